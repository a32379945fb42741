"""What happens around a step: the scale's cap, and the figures that the log adds to transformers' own."""

import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from hf_infcl.models import logit_scale_parameter

logger = logging.getLogger(__name__)


# CLIP's published checkpoints hold 4.6052, which is the logarithm of 100 to the digits it is given in.
ROUNDING = 1e-4


def round_down_scale(model: nn.Module, cap: float) -> None:
    """Brings a scale that exceeds the cap by rounding alone to the cap: nothing that was trained, nothing to report."""
    parameter = logit_scale_parameter(model)
    if parameter is not None and 0 < parameter.max().item() - (limit := largest_log_scale(cap, parameter)) < ROUNDING:
        parameter.data.copy_(limit)


def largest_log_scale(cap: float, parameter: torch.Tensor) -> torch.Tensor:
    """The largest number of the parameter's dtype whose exponential, in float32, does not exceed the cap."""
    limit = torch.tensor(math.log(cap), dtype=parameter.dtype, device=parameter.device)
    while limit.float().exp() > cap:
        limit = torch.nextafter(limit, torch.zeros_like(limit) - math.inf)
    return limit


class LogitScaleCap(TrainerCallback):
    """Keeps the multiplier at or below its cap: at the start of training and after every optimizer step.

    The parameter itself is clamped, so what is saved is what was used. A cap that cuts at the start is logged.

    Args:
        cap: largest multiplier.
    """

    def __init__(self, cap: float):
        self.cap = cap
        self._limit: torch.Tensor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        parameter = logit_scale_parameter(model)
        if parameter is None:
            return
        self._limit = largest_log_scale(self.cap, parameter)
        before, largest = parameter.max().item(), self._limit.item()
        if before > largest + ROUNDING:
            logger.warning("the logit scale %g is capped at logit_scale_max=%g", math.exp(min(before, 700)), self.cap)
        self._clamp(model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self._clamp(model)

    def _clamp(self, model: nn.Module) -> None:
        parameter = logit_scale_parameter(model)
        if parameter is not None and self._limit is not None:
            with torch.no_grad():
                torch.minimum(parameter, self._limit.to(parameter.device), out=parameter.data)


class FillMemoryBank(TrainerCallback):
    """Hands the embeddings of a step to the memory bank, once the step was taken.

    A step that mixed precision skipped has left the weights as they were, and may hold infinite embeddings.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer.accelerator.optimizer_step_was_skipped:
            self._trainer.fill_memory_bank()


class StepClock(TrainerCallback):
    """Measures the steps between two lines of the log: pairs per second, and the time spent waiting for data.

    Evaluation, saving and logging are left out.
    """

    def __init__(self) -> None:
        self._started: float | None = None
        self._loaded: float | None = None
        self.reset()

    def reset(self) -> None:
        self.pairs, self.steps = 0, 0
        self.seconds, self.data_seconds = 0.0, 0.0

    def data_wanted(self) -> None:
        self._started = time.perf_counter()

    def data_ready(self) -> None:
        self._loaded = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reset()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def count(self, pairs: int) -> None:
        self.pairs += pairs

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._started is not None and self._loaded is not None:
            self.seconds += time.perf_counter() - self._started
            self.data_seconds += self._loaded - self._started
            self.steps += 1

    def take(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The figures since the last call.

        Args:
            gather: gives a (1, m) tensor's rows of all processes: pairs add up, the most memory of any is told.
        """
        if self.steps == 0 or self.seconds == 0:
            return {}
        own = torch.tensor([[float(self.pairs), peak_memory_bytes() / 2**30]])
        everyone = gather(own).reshape(-1, 2)
        pairs = everyone[:, 0].sum().item()
        figures = {
            "contrastive_batch_size": pairs / self.steps,
            "samples_per_second": pairs / self.seconds,
            "data_seconds_per_step": self.data_seconds / self.steps,
            "peak_memory_gib": everyone[:, 1].max().item(),
        }
        self.reset()
        return figures


def peak_memory_bytes() -> int:
    """Most memory held so far: by torch on the GPU since training began, else by this process since it started."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    if sys.platform == "linux":
        # getrusage's peak would begin with that of the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
