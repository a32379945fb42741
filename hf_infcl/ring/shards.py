"""What one process holds of one modality, and the blocks that two such shards make."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hf_infcl.ops import Side


@dataclass(frozen=True)
class Shard:
    """A process's rows of one modality: its part of the batch, and its part of the memory bank (None: no bank)."""

    batch: Side
    bank: Side | None = None


class Block(NamedTuple):
    """A rectangle of the similarity matrix, and whose candidates it holds."""

    rows: Side
    cols: Side
    for_rows: bool
    for_cols: bool


def blocks(images: Shard, texts: Shard) -> Iterator[Block]:
    """The blocks between two shards. Bank entries are candidates and never anchors, so bank x bank is left out."""
    yield Block(images.batch, texts.batch, True, True)
    if texts.bank is not None:
        yield Block(images.batch, texts.bank, True, False)
    if images.bank is not None:
        yield Block(images.bank, texts.batch, False, True)
