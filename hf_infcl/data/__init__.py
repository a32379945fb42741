"""Image-text pairs: loading, choosing captions, collating, and the built-in sample data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public name -> its module here. Loaded on first use: drawing a sample needs neither torch nor datasets.
_PUBLIC = {
    "ImageTextCollator": "collator",
    "ImageTextDataset": "dataset",
    "ImageTextStream": "stream",
    "load_image_text_dataset": "loading",
    "sample_arrays": "sample",
    "sample_captions": "sample",
    "sample_dataset": "sample",
    "sample_processor": "sample_clip",
}

__all__ = [
    "ImageTextCollator",
    "ImageTextDataset",
    "ImageTextStream",
    "load_image_text_dataset",
    "sample_arrays",
    "sample_captions",
    "sample_dataset",
    "sample_processor",
]

if TYPE_CHECKING:
    from hf_infcl.data.collator import ImageTextCollator
    from hf_infcl.data.dataset import ImageTextDataset
    from hf_infcl.data.loading import load_image_text_dataset
    from hf_infcl.data.sample import sample_arrays, sample_captions, sample_dataset
    from hf_infcl.data.sample_clip import sample_processor
    from hf_infcl.data.stream import ImageTextStream


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
