"""Loading a dual encoder, with or without adapters, from a folder or the Hub."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecodeError
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftConfig, get_peft_model_state_dict
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoProcessor
from transformers.utils import cached_file

from hf_infcl.hub.adapters import CONFIG_NAME, WEIGHTS_NAME, DualEncoderPeftModel, check_adapter_name
from hf_infcl.hub.weights import Shapes, find_misfits, tensor_shapes
from hf_infcl.locations import absence, check_location
from hf_infcl.models import family_of, prepare_dual_encoder, unwrap

logger = logging.getLogger(__name__)

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
        (model, processor). The model is in eval mode; with an adapter, unless merged, it is frozen, as PEFT loads it.
        Called with `pixel_values` or `input_ids` it returns `image_embeds` or `text_embeds` of shape (n, D) and
        length 1. Called with both it is the model's own forward: both embeddings, `logits_per_image`,
        `logits_per_text`, and `loss` where `return_loss=True` asks for it. It normalises uint8 `pixel_values` itself.

    Raises:
        ValueError: for a family that is not supported, an adapter without a base or of another one, weights that are
            damaged or not safetensors.
        OSError: for what cannot be found.

    Example:
        >>> model, processor = load_dual_encoder("openai/clip-vit-base-patch32", adapter="me/clip-emoji")
        >>> inputs = processor(text=["a cat", "a dog"], padding=True, return_tensors="pt")
        >>> model(**inputs).text_embeds.shape
        torch.Size([2, 512])
    """
    named = adapter if isinstance(adapter, Mapping) else {} if adapter is None else {"default": adapter}
    adapters = {name: expand_home(location) for name, location in named.items()}
    base, base_revision, adapter_revision = expand_home(model_name_or_path), revision, None
    naming_adapter = None  # the one that says which base is to be loaded
    if not adapters and _find(base, CONFIG_NAME, revision) is not None:
        adapters, adapter_revision, naming_adapter = {"default": base}, revision, base
        base, base_revision = _base_of(adapters["default"], revision)
    shapes = {}
    for name, location in adapters.items():
        check_adapter_name(name)
        shapes[name] = _check_adapter(location, adapter_revision)

    model = _load_base(base, base_revision, dtype, device_map, naming_adapter)
    # Before the processor, which of an adapter of another family would not fit either.
    for name, location in adapters.items():
        try:
            model = _add_adapter(model, name, location, adapter_revision)
        except ValueError as error:  # not one of the adapter's layers is there
            raise ValueError(f"the adapter {location!r} does not belong to the base {base!r}: {error}") from error
        _check_fit(model, name, location, base, shapes[name])
    processor = _choose_processor(next(iter(adapters.values()), None), adapter_revision, base, base_revision)
    prepare_dual_encoder(model, processor, logits=True)
    if adapters and merge:
        model = model.merge_and_unload()  # type: ignore[operator]
        for parameter in model.parameters():  # PEFT has frozen them; a plain model can be trained
            parameter.requires_grad_(parameter.is_floating_point())
    return model.eval(), processor


def expand_home(location: Location) -> str:
    """Returns a location as a string, with a leading ~ written out."""
    return str(Path(location).expanduser()) if str(location).startswith("~") else str(location)


@contextmanager
def explain_absence(location: str) -> Iterator[None]:
    """Says of a location that cannot be loaded that it may be a misspelt folder, which transformers takes for an id."""
    check_location(location, "model")
    try:
        yield
    except OSError as error:
        # A folder, or a repository that was reached: what is said of the file that is missing there stands.
        if Path(location).is_dir() or "does not appear to have a file" in str(error):
            raise
        raise OSError(absence(location, str(error).strip().partition("\n")[0].rstrip("."))) from error


@contextmanager
def explain_damage(location: str) -> Iterator[None]:
    """Says of weights and a configuration that cannot be loaded, or not together, where they lie, by a ValueError.

    Raises:
        OSError: a folder of something else, before transformers guesses a model from the folder's name.
    """
    folder = Path(location)
    if folder.is_dir() and not any((folder / name).exists() for name in ("config.json", CONFIG_NAME)):
        raise OSError(
            f"the folder {str(folder.absolute())!r} has no config.json; expected a model that save_pretrained wrote, "
            f"or an adapter with its {CONFIG_NAME}"
        )
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {location!r} are damaged or incomplete ({error}); copy or download them again"
        ) from error
    except StrictDataclassError as error:
        raise ValueError(f"the config.json of {location!r} has a value that cannot be: {error}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the weights in {location!r} do not fit its config.json: some have another shape than it says (listed in "
            "the log)"
        ) from error


def _find(location: str, file: str, revision: str | None) -> str | None:
    """Returns the local path of a repository's file, or None where there is none."""
    with explain_absence(location):
        return cached_file(
            location,
            file,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )


def _base_of(adapter: str, revision: str | None) -> tuple[str, str | None]:
    config = _adapter_config(adapter, revision)
    if not config.base_model_name_or_path:
        raise ValueError(
            f"the adapter {adapter!r} does not say which model it belongs to; name it: {_naming_base(adapter)}"
        )
    return config.base_model_name_or_path, config.revision


def _adapter_config(adapter: str, revision: str | None) -> PeftConfig:
    try:
        return PeftConfig.from_pretrained(adapter, revision=revision)
    except JSONDecodeError as error:
        raise ValueError(f"{CONFIG_NAME} of the adapter {adapter!r} is damaged or incomplete ({error})") from error


def _naming_base(adapter: str) -> str:
    return f"load_dual_encoder(BASE, adapter={adapter!r}), or --model_name_or_path BASE --adapter {adapter}"


def _check_adapter(adapter: str, revision: str | None) -> Shapes:
    if _find(adapter, CONFIG_NAME, revision) is None:
        if not Path(adapter).is_dir():
            raise OSError(f"the adapter {absence(adapter, f'it has no {CONFIG_NAME}')}")
        raise OSError(f"no adapter in {adapter!r}: {CONFIG_NAME} is not there")
    weights = _find(adapter, WEIGHTS_NAME, revision)
    if weights is None:
        raise ValueError(f"the adapter {adapter!r} has no {WEIGHTS_NAME}; other formats are not loaded")
    return tensor_shapes(weights)


def _load_base(base: str, revision: str | None, dtype: Any, device_map: Any, adapter: str | None) -> nn.Module:
    """Loads the base, which `adapter` named unless the caller did."""
    options = {"revision": revision, "trust_remote_code": False}
    try:
        with explain_absence(base), explain_damage(base):
            config = AutoConfig.from_pretrained(base, **options)
    except OSError as error:
        if adapter is None:
            raise
        raise OSError(
            f"the base model {base!r} of the adapter {adapter!r} cannot be loaded; if it lies elsewhere, "
            f"name it: {_naming_base(adapter)}"
        ) from error
    family_of(config)
    if dtype is not None:
        options["dtype"] = dtype
    if device_map is not None:
        options["device_map"] = device_map
    with explain_damage(base):
        return AutoModel.from_pretrained(base, config=config, use_safetensors=True, **options)


def _load_processor(location: str | None, revision: str | None) -> Any:
    if location is None:
        return None
    if not any(_find(location, file, revision) for file in ("processor_config.json", "preprocessor_config.json")):
        return None
    try:
        return AutoProcessor.from_pretrained(location, revision=revision, trust_remote_code=False)
    except JSONDecodeError as error:
        raise ValueError(f"a file of the processor in {location!r} is damaged or incomplete ({error})") from error


def _choose_processor(adapter: str | None, adapter_revision: str | None, base: str, revision: str | None) -> Any:
    """Returns the adapter's own processor, or else the base's."""
    of_adapter, of_base = _load_processor(adapter, adapter_revision), _load_processor(base, revision)
    if of_adapter is None and of_base is None:
        raise OSError(
            f"no processor (processor_config.json or preprocessor_config.json) in {adapter or base!r} or its base"
        )
    if of_adapter is not None and of_base is not None:
        kinds = type(of_adapter).__name__, type(of_base).__name__
        vocabularies = _vocabulary(of_adapter), _vocabulary(of_base)
        if kinds[0] != kinds[1] or vocabularies[0] != vocabularies[1]:
            raise ValueError(
                f"the adapter {adapter!r} does not belong to the base {base!r}: it comes with another processor or "
                f"vocabulary ({kinds[0]} of {len(vocabularies[0])} tokens, the base's is a {kinds[1]} of "
                f"{len(vocabularies[1])})"
            )
    return of_base if of_adapter is None else of_adapter


def _vocabulary(processor: Any) -> dict[str, int]:
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}


def _add_adapter(model: Any, name: str, adapter: str, revision: str | None) -> nn.Module:
    # What does not fit is named all at once afterwards (_check_fit); PEFT would go on with random weights for the rest.
    options: dict[str, Any] = {"revision": revision, "ignore_mismatched_sizes": True}
    if isinstance(model, DualEncoderPeftModel):
        model.load_adapter(adapter, name, **options)
        return model
    config = _adapter_config(adapter, revision)
    # With a task, PEFT would wrap the model in a class that calls it as a language model.
    config.task_type = None
    return DualEncoderPeftModel.from_pretrained(model, adapter, adapter_name=name, config=config, **options)


def _check_fit(model: Any, name: str, adapter: str, base: str, found: Shapes) -> None:
    wanted = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    # Of the base's own weights an adapter may bring new values: the temperature, PEFT's copies of embeddings.
    misfits = find_misfits(found, wanted, model.state_dict())
    if misfits:
        raise ValueError(f"the adapter {adapter!r} does not belong to the base {base!r}: {misfits}")
    _warn_of_bare_layers(model, name, adapter, base, found)


def _warn_of_bare_layers(model: Any, name: str, adapter: str, base: str, found: Shapes) -> None:
    """Names a base that has layers beyond those an adapter lists: it then fits a deeper base as well as its own."""
    targets = model.peft_config[name].target_modules
    if not targets or isinstance(targets, str):
        return  # names found by a pattern, or by their ends, are looked for in every layer of the base
    for stack, layers in unwrap(model).named_modules():
        if not isinstance(layers, nn.ModuleList) or not any(f"{stack}." in target for target in targets):
            continue
        start = f"base_model.model.{stack}."
        adapted = {int(key.removeprefix(start).partition(".")[0]) for key in found if key.startswith(start)}
        # The last layers, or every second one, may be what was chosen; the first ones look like a shallower base's all.
        if adapted == set(range(len(adapted))) and len(adapted) < len(layers):
            logger.warning(
                "the adapter %r has weights for the first %d of the %d layers in %s of the base %r: if the base it was "
                "trained on had no more, this is another one",
                adapter,
                len(adapted),
                len(layers),
                stack,
                base,
            )
