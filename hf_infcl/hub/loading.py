"""Loading a dual encoder, with or without adapters, from a folder or the Hub."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoConfig, AutoModel, AutoProcessor
from transformers.utils import cached_file

from hf_infcl.hub.adapters import CONFIG_NAME, WEIGHTS_NAME, DualEncoderPeftModel, check_adapter_name
from hf_infcl.models import family_of, prepare_dual_encoder

Location = str | PathLike[str]


def load_dual_encoder(
    model_name_or_path: Location,
    *,
    adapter: Location | Mapping[str, Location] | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    merge: bool = False,
) -> tuple[nn.Module, Any]:
    """Loads a dual encoder and its processor, ready to embed.

    Args:
        model_name_or_path: the id or folder of a model, or of an adapter, which then names its own base.
        adapter: an adapter's id or folder to put onto the model; or several by name, of which the first is in use until
            `model.set_adapter(name)`, which changes logit_scale and logit_bias along.
        revision: of the repository that `model_name_or_path` names.
        dtype: of the weights; by default the one they were saved in.
        device_map: as in `from_pretrained`.
        merge: whether to fold the adapter in use into the weights; a plain transformers model is returned.

    Returns:
        (model, processor). The model is in eval mode. Called with `pixel_values`, `input_ids` or both it returns
        `image_embeds` and `text_embeds` of shape (n, D) and length 1; it normalises uint8 `pixel_values` itself.

    Raises:
        ValueError: for a family that is not supported, an adapter without a base, weights that are not safetensors.
        OSError: for what cannot be found.

    Example:
        >>> model, processor = load_dual_encoder("openai/clip-vit-base-patch32", adapter="me/clip-emoji")
        >>> inputs = processor(text=["a cat", "a dog"], padding=True, return_tensors="pt")
        >>> model(**inputs).text_embeds.shape
        torch.Size([2, 512])
    """
    named = adapter if isinstance(adapter, Mapping) else {} if adapter is None else {"default": adapter}
    adapters = {name: str(location) for name, location in named.items()}
    base, base_revision, adapter_revision = str(model_name_or_path), revision, None
    if not adapters and _find(base, CONFIG_NAME, revision) is not None:
        adapters, adapter_revision = {"default": base}, revision
        base, base_revision = _base_of(adapters["default"], revision)
    for name, location in adapters.items():
        check_adapter_name(name)
        _check_adapter(location, adapter_revision)

    model = _load_base(base, base_revision, dtype, device_map, adapters)
    first = next(iter(adapters.values()), None)
    processor = _load_processor(first, adapter_revision) or _load_processor(base, base_revision)
    if processor is None:
        raise OSError(
            f"no processor (processor_config.json or preprocessor_config.json) in {first or base!r} or its base"
        )
    prepare_dual_encoder(model, processor)
    if adapters:
        model = _with_adapters(model, adapters, adapter_revision)
        if merge:
            model = model.merge_and_unload()  # type: ignore[operator]
    return model.eval(), processor


def _find(location: str, file: str, revision: str | None) -> str | None:
    """Returns the local path of a repository's file, or None where there is none."""
    return cached_file(
        location,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _base_of(adapter: str, revision: str | None) -> tuple[str, str | None]:
    config = PeftConfig.from_pretrained(adapter, revision=revision)
    if not config.base_model_name_or_path:
        raise ValueError(
            f"the adapter {adapter!r} does not say which model it belongs to; "
            f"name it: load_dual_encoder(BASE, adapter={adapter!r})"
        )
    return config.base_model_name_or_path, config.revision


def _check_adapter(adapter: str, revision: str | None) -> None:
    if _find(adapter, CONFIG_NAME, revision) is None:
        raise OSError(f"no adapter in {adapter!r}: {CONFIG_NAME} is not there or cannot be reached")
    if _find(adapter, WEIGHTS_NAME, revision) is None:
        raise ValueError(f"the adapter {adapter!r} has no {WEIGHTS_NAME}; other formats are not loaded")


def _load_base(base: str, revision: str | None, dtype: Any, device_map: Any, adapters: dict[str, str]) -> nn.Module:
    options = {"revision": revision, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(base, **options)
    except OSError as error:
        if not adapters:
            raise
        adapter = next(iter(adapters.values()))
        raise OSError(
            f"the base model {base!r} of the adapter {adapter!r} cannot be loaded; if it lies elsewhere, "
            f"name it: load_dual_encoder(BASE, adapter={adapter!r})"
        ) from error
    family_of(config)
    if dtype is not None:
        options["dtype"] = dtype
    if device_map is not None:
        options["device_map"] = device_map
    return AutoModel.from_pretrained(base, config=config, use_safetensors=True, **options)


def _load_processor(location: str | None, revision: str | None) -> Any:
    if location is None:
        return None
    if not any(_find(location, file, revision) for file in ("processor_config.json", "preprocessor_config.json")):
        return None
    return AutoProcessor.from_pretrained(location, revision=revision, trust_remote_code=False)


def _with_adapters(model: nn.Module, adapters: dict[str, str], revision: str | None) -> nn.Module:
    wrapped: Any = None
    for name, location in adapters.items():
        if wrapped is not None:
            wrapped.load_adapter(location, name, revision=revision)
            continue
        config = PeftConfig.from_pretrained(location, revision=revision)
        # With a task, PEFT would wrap the model in a class that calls it as a language model.
        config.task_type = None
        wrapped = DualEncoderPeftModel.from_pretrained(
            model, location, adapter_name=name, config=config, revision=revision
        )
    return wrapped
