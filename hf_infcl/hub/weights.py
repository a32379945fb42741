"""Comparing what a weights file holds with what a model expects, before or after it is loaded."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
_SHOWN = 3


def tensor_shapes(file: str | Path) -> Shapes:
    """Returns the shapes of a safetensors file's tensors by name; the tensors are not read.

    Raises:
        ValueError: names a file that is cut short or no safetensors file.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{str(file)!r} is damaged or incomplete ({error}); copy or download it again") from error


def find_misfits(found: Shapes, wanted: Mapping[str, Tensor], optional: Mapping[str, Tensor] | None = None) -> str:
    """Says in what a file's tensors differ from the ones a model expects.

    Args:
        found: the shapes in the file.
        wanted: the tensors that are to be there. Of those that share their memory one stands for all in the file.
        optional: tensors that may be there as well, with these shapes.

    Returns:
        A phrase that counts and names what is missing, unexpected or of another shape; empty where all fits.
    """
    shared = {value.data_ptr() for name, value in wanted.items() if name in found} - {0}
    shapes = {name: tuple(value.shape) for name, value in {**(optional or {}), **wanted}.items()}
    lacking = [name for name in wanted if name not in found and wanted[name].data_ptr() not in shared]
    surplus = [name for name in found if name not in shapes]
    other = [name for name in found if name in shapes and found[name] != shapes[name]]
    phrases = [
        f"it {what} {len(names)} tensors ({', '.join(names[:_SHOWN])})"
        for what, names in (("lacks", lacking), ("has besides", surplus))
        if names
    ]
    if other:
        name = other[0]
        phrases.append(f"{len(other)} tensors have another shape ({name}: {found[name]} instead of {shapes[name]})")
    return "; ".join(phrases)
