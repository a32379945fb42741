"""The package from outside: light to import, every public name there with its signature, imports running downhill."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hf_infcl

_REPOSITORY = Path(__file__).resolve().parents[1]

# What users' code calls. A name may be added here; changing one is a breaking change.
_LOSS_OPTIONS = "block_size=None, group=None, backend='auto', precision='auto'"
_CONTRASTIVE = f"ids=None, duplicates='mask', bank=None, direction='both', label_smoothing=0.0, {_LOSS_OPTIONS}"
SIGNATURES = {
    "contrastive_loss": f"(image_embeds, text_embeds, logit_scale, *, {_CONTRASTIVE})",
    "hard_negative_loss": (
        "(image_embeds, text_embeds, logit_scale, *, k, ids=None, bank=None, direction='both', "
        f"{_LOSS_OPTIONS}, return_stats=False)"
    ),
    "sigmoid_loss": f"(image_embeds, text_embeds, logit_scale, logit_bias, *, ids=None, {_LOSS_OPTIONS})",
    "hardest_negatives": f"(queries, keys, k, *, ids=None, key_ids=None, {_LOSS_OPTIONS})",
    "retrieval_metrics": "(image_embeds, text_embeds, *, image_ids=None, text_ids=None, ks=(1, 5, 10))",
    "zero_shot_metrics": "(image_embeds, labels, class_embeds, *, ks=(1, 5))",
    "load_dual_encoder": (
        "(model_name_or_path, *, adapter=None, revision=None, dtype=None, device_map=None, merge=False)"
    ),
    "MemoryBank": "(size, dim, *, dtype=None, device=None)",
}
LOSS_MODULES = {"ContrastiveLoss", "HardNegativeLoss", "SigmoidLoss"}
CLASSES = LOSS_MODULES | {"InfCLConfig", "InfCLTrainer"}


def _plain(signature: inspect.Signature, promised: str) -> str:
    """Names, kinds and defaults, less the optional keywords that go beyond what is promised and break no caller."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature([p for p in parameters if p.kind is not p.KEYWORD_ONLY or f" {p.name}" in promised]))


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=_REPOSITORY, check=False
    )


def test_import_is_light() -> None:
    code = (
        "import sys, hf_infcl; dir(hf_infcl); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} "
        "& {'torch', 'transformers', 'triton', 'peft', 'accelerate', 'datasets', 'numpy', 'PIL', 'matplotlib'}))"
    )
    result = _run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_everything_imports_without_triton() -> None:
    code = (
        "import sys, pkgutil, importlib; sys.modules['triton'] = None\n"
        "import hf_infcl\n"
        "for name in hf_infcl.__all__: getattr(hf_infcl, name)\n"
        "import torch; from hf_infcl import contrastive_loss\n"
        "print(contrastive_loss(torch.eye(3), torch.eye(3), 10.0).item())"
    )
    result = _run(code)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.strip().splitlines()[-1]) < 1e-3


@pytest.mark.parametrize("name", sorted(hf_infcl.__all__))
def test_public_name_exists_with_its_signature(name: str) -> None:
    assert name in SIGNATURES or name in CLASSES, f"{name} is public but this test does not know its signature"
    value = getattr(hf_infcl, name)
    assert value.__name__ == name
    assert value.__doc__
    if name in SIGNATURES:
        assert _plain(inspect.signature(value), SIGNATURES[name]) == SIGNATURES[name]


@pytest.mark.parametrize("name", sorted(LOSS_MODULES & set(hf_infcl.__all__)))
def test_loss_module_has_the_interface_that_the_trainer_calls(name: str) -> None:
    loss = getattr(hf_infcl, name)
    promised = "(self, image_embeds, text_embeds, logit_scale, logit_bias=None, *, ids=None)"
    assert _plain(inspect.signature(loss.forward), promised) == promised
    module = loss(k=2) if name == "HardNegativeLoss" else loss()
    assert isinstance(module.get_config_dict(), dict)
    assert "@" in module.citation


def test_loss_modules_take_the_keyword_arguments_of_their_functions() -> None:
    for name, function in [("ContrastiveLoss", "contrastive_loss"), ("SigmoidLoss", "sigmoid_loss")]:
        if name not in hf_infcl.__all__:
            continue
        of_function = inspect.signature(getattr(hf_infcl, function)).parameters.values()
        keyword_only = {p.name: p.default for p in of_function if p.kind is p.KEYWORD_ONLY and p.name != "ids"}
        of_module = inspect.signature(getattr(hf_infcl, name)).parameters
        assert {key: of_module[key].default for key in keyword_only} == keyword_only


def test_star_import_and_dir_offer_the_public_names() -> None:
    assert set(hf_infcl.__all__) <= set(dir(hf_infcl))
    with pytest.raises(AttributeError, match="has no attribute 'contrastive_los'"):
        _ = hf_infcl.contrastive_los


def test_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert version("hf-infcl") == hf_infcl.__version__


def test_arithmetic_imports_nothing_of_ours_and_no_framework() -> None:
    """The layering itself is import-linter's (`make lint`); this one also sees what is imported at run time."""
    code = (
        "import sys, hf_infcl.ops\n"
        "rooms = {'ring', 'losses', 'models', 'trainer', 'data', 'evaluation', 'hub', 'cli'}\n"
        "print([n for n in sys.modules if n.startswith('hf_infcl.') and n.split('.')[1] in rooms])\n"
        "print([n for n in ('transformers', 'peft', 'accelerate', 'datasets') if n in sys.modules])"
    )
    result = _run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[]", "[]"]
