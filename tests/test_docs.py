"""README and docs say what is true: their Python runs, their recipes parse, their links and targets exist.

A Python block whose first line starts with `# Needs the Hub` is shown to readers and not run here.
The blocks of a page run one after the other, in one namespace, in an empty folder.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

import hf_infcl

_REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "docs/guides/*.md",
        "docs/concepts/*.md",
        "model_cards/*.md",
    )
    for path in _REPOSITORY.glob(pattern)
)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = "# Needs the Hub"


def _blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line number, text) of the page's fenced blocks in that language."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(2)) + 1, match.group(2))
        for match in _FENCE.finditer(text)
        if match.group(1) == language
    ]


def _name(page: Path) -> str:
    return str(page.relative_to(_REPOSITORY))


def _runnable(page: Path) -> list[tuple[int, str]]:
    return [(line, code) for line, code in _blocks(page, "python") if not code.startswith(NOT_RUN)]


@pytest.mark.parametrize("page", [page for page in PAGES if _runnable(page)], ids=_name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for line, code in _runnable(page):
        # The padding makes a traceback's line numbers the page's own.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, id=f"{_name(page)}:{line}")
        for page in PAGES
        for line, code in _blocks(page, "python")
        if code.startswith(NOT_RUN)
    ],
)
def test_python_blocks_that_need_the_hub_at_least_import(page: Path, code: str) -> None:
    compile(code, str(page), "exec")
    imports = [line for line in code.splitlines() if re.match(r"(from|import) ", line)]
    exec("\n".join(imports), {})


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_yaml_blocks_have_known_fields(page: Path) -> None:
    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments

    kinds = (ScriptArguments, ModelArguments, hf_infcl.InfCLConfig)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind) if field.init}
    for line, text in _blocks(page, "yaml"):
        assert set(yaml.safe_load(text)) <= known, f"{_name(page)}:{line}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_index_links_every_page() -> None:
    docs = _REPOSITORY / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if not page.startswith("reference/")} == set(re.findall(r"\]\(([^)]+\.md)\)", index))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_and_targets_named_in_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (_REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for _, text in _blocks(page, "bash"):
        assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= targets
        for path in re.findall(r"\b(?:recipes|benchmarks)/[\w./-]+\.\w+", text):
            assert (_REPOSITORY / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_options_in_commands_exist(page: Path) -> None:
    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
    from hf_infcl.cli.evaluate import EvaluateArguments

    train = (ScriptArguments, ModelArguments, hf_infcl.InfCLConfig)
    commands = {"hf-infcl train": train, "finetune_clip.py": train, "hf-infcl evaluate": (EvaluateArguments,)}
    for _, text in _blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            for command, kinds in commands.items():
                if command in line:
                    known = {field.name for kind in kinds for field in dataclasses.fields(kind)} | {
                        "config",
                        "help",
                        "help-all",
                    }
                    assert set(re.findall(r" --(\w+)", line.split(command, 1)[1])) <= known, line


def test_readme_lists_every_public_name() -> None:
    readme = (_REPOSITORY / "README.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in readme.splitlines() if line.startswith("|"))
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert set(hf_infcl.__all__) <= listed
    assert not {name for name in listed if not hasattr(hf_infcl, name)}, "a name is promised that does not exist"


def test_ci_runs_the_readmes_test_command() -> None:
    readme = (_REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert "\nmake demo " in readme
    assert "\nmake test " in readme
    commands = (_REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^make test\b", commands, re.MULTILINE)
