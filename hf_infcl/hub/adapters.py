"""Adapter folders: what is written into them, and a PEFT model whose temperature follows the adapter in use."""

import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_infcl.models import unwrap

logger = logging.getLogger(__name__)

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME: str = SAFETENSORS_WEIGHTS_NAME
_MODEL_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_TEMPERATURE = ("logit_scale", "logit_bias")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def other_weights(folder: str | Path, is_adapter: bool) -> list[Path]:
    """The files in a folder that belong to a whole model, if an adapter is to be saved into it, or the other way round.

    transformers puts the adapter that lies beside a model on it: a folder with both loads as neither run's result.
    """
    names = _MODEL_WEIGHTS if is_adapter else (CONFIG_NAME, WEIGHTS_NAME)
    return [file for name in names if (file := Path(folder, name)).is_file()]


def check_folder(folder: str | Path, is_adapter: bool) -> None:
    """That what is to be saved into a folder would not lie beside weights of the other kind.

    Raises:
        ValueError: names a file that is there, and says what to do.
    """
    if others := other_weights(folder, is_adapter):
        mine, theirs = ("an adapter", "a whole model") if is_adapter else ("a whole model", "an adapter")
        raise ValueError(
            f"output_dir={str(folder)!r} holds {theirs} ({others[0].name}), and {mine} saved beside it could not be "
            "loaded: name another output_dir, or remove what is there"
        )


class DualEncoderPeftModel(PeftModel):
    """A PeftModel that keeps logit_scale and logit_bias per adapter.

    Both are parameters of the base model. An adapter that trained them brings its own values, which plain PEFT writes
    over the base's for good; here they change with `set_adapter`, and `disable_adapter` gives the base's back.
    """

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        base_temperature = _read_temperature(model)
        with warnings.catch_warnings():
            # PEFT asks for gradient checkpointing by the name that transformers is about to drop.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            super().__init__(model, *args, **kwargs)
        self._base_temperature = base_temperature
        self._temperatures: dict[str, dict[str, Tensor]] = {}

    def load_adapter(self, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        current = _read_temperature(self)
        _write_temperature(self, self._base_temperature)
        try:
            result = super().load_adapter(model_id, adapter_name, *args, **kwargs)
            self._temperatures[adapter_name] = _read_temperature(self)
        finally:
            if adapter_name not in self._temperatures or adapter_name != self.active_adapter:
                _write_temperature(self, current)
        return result

    def set_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        self._temperatures[self.active_adapter] = _read_temperature(self)
        super().set_adapter(adapter_name, *args, **kwargs)
        _write_temperature(self, self._temperatures.get(adapter_name, self._base_temperature))

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        current = _read_temperature(self)
        with super().disable_adapter():
            _write_temperature(self, self._base_temperature)
            try:
                yield
            finally:
                _write_temperature(self, current)

    def own_temperature(self) -> dict[str, Tensor]:
        """Returns the active adapter's values that differ from the base's."""
        return {
            name: value
            for name, value in _read_temperature(self).items()
            if not torch.equal(value, self._base_temperature[name].to(value))
        }


def _read_temperature(model: nn.Module) -> dict[str, Tensor]:
    base = unwrap(model)
    return {name: getattr(base, name).detach().clone() for name in _TEMPERATURE if hasattr(base, name)}


def _write_temperature(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            getattr(unwrap(model), name).copy_(value)


def check_adapter_name(name: str) -> None:
    """Refuses "lora", "lora_A" and the like: PEFT cannot tell them from its own parameters' names when it loads."""
    if re.fullmatch(r"lora(_.*)?", name):
        raise ValueError(f"an adapter cannot be named {name!r}: PEFT uses that in its parameters' names; take another")


def save_adapter(
    model: nn.Module,
    output_dir: str | Path,
    processor: Any = None,
    base_model_id: str | None = None,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Writes the active adapter so that it can be published: weights, configuration, processor and tokenizer.

    Where logit_scale and logit_bias were trained, they are among the weights as `base_model.model.logit_scale`, from
    which `PeftModel.from_pretrained` restores them. New projections are there by `modules_to_save`. PEFT's own README,
    which would name a local base by its path, is not written.

    Args:
        model: a PeftModel, wrapped or not.
        output_dir: the folder; made if it is missing.
        processor: what is needed to embed with the adapter; saved beside it.
        base_model_id: the Hub id of the base. Without it the base's own name is kept if it is one; the path of a local
            base is left out, with a notice, once per process.
        state_dict: the gathered weights, where a strategy shards them.

    Raises:
        ValueError: for an adapter's name that PEFT mistakes, a base_model_id that is a path, a model without adapters.

    Example:
        >>> save_adapter(model, "out", processor, base_model_id="openai/clip-vit-base-patch32")
    """
    peft_model = find_peft_model(model)
    if peft_model is None:
        raise ValueError(f"{type(model).__name__} has no adapter to save; use save_pretrained")
    if base_model_id is not None and not is_hub_id(base_model_id):
        raise ValueError(f"base_model_id is to be the base's Hub id, got {base_model_id!r}")
    name = peft_model.active_adapter
    check_adapter_name(name)
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir) as draft:
        peft_model.save_pretrained(draft, selected_adapters=[name], state_dict=state_dict)
        written = Path(draft) if name == "default" else Path(draft, name)
        _add_temperature(peft_model, written / WEIGHTS_NAME, state_dict)
        _set_base(written / CONFIG_NAME, base_model_id)
        for file in (WEIGHTS_NAME, CONFIG_NAME):
            (written / file).replace(output_dir / file)
    if processor is not None:
        processor.save_pretrained(output_dir)


def find_peft_model(model: Any) -> PeftModel | None:
    """Returns the PeftModel inside torch.compile and DistributedDataParallel, or None."""
    while model is not None and not isinstance(model, PeftModel):
        model = getattr(model, "_orig_mod", getattr(model, "module", None))
    return model


def is_hub_id(name: str | None) -> bool:
    """Tells whether a name is a Hub id: of the right form, and no path that exists here."""
    return bool(name) and _HUB_ID.fullmatch(str(name)) is not None and not Path(str(name)).exists()


def _add_temperature(model: PeftModel, weights: Path, state_dict: dict[str, Tensor] | None) -> None:
    trained = {
        name for name in _TEMPERATURE if (p := getattr(unwrap(model), name, None)) is not None and p.requires_grad
    }
    values = model.own_temperature() if isinstance(model, DualEncoderPeftModel) else {}
    values |= {name: value for name, value in _read_temperature(model).items() if name in trained}
    if values:
        keys = {name: f"base_model.model.{name}" for name in values}
        tensors = load_file(weights)
        tensors |= {keys[name]: (state_dict or {}).get(keys[name], value).cpu() for name, value in values.items()}
        save_file(tensors, weights, metadata={"format": "pt"})


def _set_base(config_file: Path, base_model_id: str | None) -> None:
    config = json.loads(config_file.read_text())
    name = base_model_id or config.get("base_model_name_or_path")
    if name and not is_hub_id(name):
        _say_that_base_is_local()
        name = None
    config["base_model_name_or_path"] = name or None
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n")


@cache  # once, not at every checkpoint
def _say_that_base_is_local() -> None:
    logger.warning(
        "The adapter is saved without the name of its base model, which is a folder on this computer. To load it, name "
        "the base: load_dual_encoder(BASE, adapter=ADAPTER), or --model_name_or_path BASE --adapter ADAPTER. If the "
        "base is on the Hub as well, base_model_id writes down its id."
    )
