"""One rank of a ring without the others, for `benchmarks/ring.py`: one device plays all blocks that a rank meets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ring import World


@dataclass(frozen=True)
class PlayedWorld(World):
    """A world of W ranks that are all this one: what it would receive is a copy of what it sends, or not even that.

    The time and the memory of a rank are real; the loss is that of W copies of the same rows.

    Attributes:
        copies: whether messages are copies, made on a stream of their own; else nothing is moved at all.
    """

    copies: bool = True

    def check_device(self, device: torch.device) -> None:
        pass

    def headers(self, header: Tensor) -> list[list[int]]:
        return [header.tolist()] * self.size

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return tensor.repeat(self.size, *[1] * (tensor.ndim - 1))

    def scatter(self, tensor: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tensor.split(sizes)

    def post(self, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int) -> Callable[[], None]:
        if not self.copies or not send:
            return lambda: None
        if send[0].device.type != "cuda":
            for source, target in zip(send, receive, strict=True):
                target.copy_(source)
            return lambda: None
        stream = _messages()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for source, target in zip(send, receive, strict=True):
                target.copy_(source)
        held = [*send, *receive]  # their memory must not be given to others meanwhile

        def wait() -> None:
            torch.cuda.current_stream().wait_stream(stream)
            held.clear()

        return wait


@cache
def _messages() -> Any:
    """The stream that messages have to themselves."""
    return torch.cuda.Stream()
