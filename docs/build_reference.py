"""Builds the reference from the docstrings into docs/reference (HTML): `make docs`."""

import sys
from importlib import import_module
from pathlib import Path

import pdoc
import pdoc.render

import hf_infcl

# What users import from, in the order in which they meet it; the rooms below are for who changes the project.
MODULES = (
    "hf_infcl",
    "hf_infcl.trainer",
    "hf_infcl.losses",
    "hf_infcl.data",
    "hf_infcl.evaluation",
    "hf_infcl.hub",
    "hf_infcl.models",
    "hf_infcl.cli",
    "hf_infcl.ring",
    "hf_infcl.ops",
)


def build(output: Path) -> None:
    """Writes one page a module into `output`, and an index.

    Args:
        output: the folder; made if it is missing.

    Raises:
        RuntimeError: a public name without a docstring.
    """
    undocumented = [name for name in hf_infcl.__all__ if not getattr(hf_infcl, name).__doc__]
    if undocumented:
        raise RuntimeError(f"no docstring: {', '.join(undocumented)}")
    for name in MODULES:
        _load_lazy_names(name)
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=output)


def _load_lazy_names(name: str) -> None:
    """Names that load on first use are not in a module's dictionary yet, where pdoc looks for their objects."""
    module = import_module(name)
    for public in getattr(module, "__all__", ()):
        setattr(module, public, getattr(module, public))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("reference")
    build(target)
    print(f"open {target / 'index.html'}")
