"""The two sides of a block of the similarity matrix, and the rule that relates their rows."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """One side of a rectangular block: rows of one modality and where they stand in the global batch.

    Attributes:
        embeds: (n, d) embeddings, used as given.
        offset: global index of row 0. Row i of one side and row j of the other form a pair where
            ``rows.offset + i == cols.offset + j``.
        ids: (n, m) int64 or None. Two rows are the same if they agree in any column.
    """

    embeds: Tensor
    offset: int = 0
    ids: Tensor | None = None

    def __len__(self) -> int:
        return self.embeds.shape[0]

    def __getitem__(self, part: slice) -> "Side":
        start, _, _ = part.indices(len(self))
        return Side(self.embeds[part], self.offset + start, None if self.ids is None else self.ids[part])


@dataclass(frozen=True)
class Rule:
    """How rows of the two sides relate: which pairs are candidates, which are positives.

    Attributes:
        duplicates: what becomes of the *other* rows that are the same as a row: ``"mask"`` leaves them out of its
            candidates, ``"positive"`` makes them positives, ``"keep"`` leaves them negatives.
        label_smoothing: the share e of the target spread evenly over the candidates.
    """

    duplicates: str = "mask"
    label_smoothing: float = 0.0


def diagonal(rows: Side, cols: Side) -> int | None:
    """Offset (in `torch.diagonal`'s sense) of the pairs within a block, or None if the block holds none."""
    shift = rows.offset - cols.offset
    return shift if -len(rows) < shift < len(cols) else None


def same(rows: Side, cols: Side) -> Tensor | None:
    """(n_rows, n_cols) bool: the two rows agree in a column of their ids. None where a side has no ids."""
    if rows.ids is None or cols.ids is None:
        return None
    result = rows.ids[:, None, 0] == cols.ids[None, :, 0]
    for column in range(1, rows.ids.shape[1]):
        result |= rows.ids[:, None, column] == cols.ids[None, :, column]
    return result


def relations(rows: Side, cols: Side, rule: Rule) -> tuple[Tensor | None, Tensor | None]:
    """The block's candidates and positives under a rule.

    Returns:
        ``(valid, positive)``, each (n_rows, n_cols) bool or None. ``valid`` None: every pair is a candidate.
        ``positive`` None: the positives are the pairs on the block's `diagonal`.
    """
    alike = None if rule.duplicates == "keep" else same(rows, cols)
    if alike is None:
        return None, None
    shift = diagonal(rows, cols)
    if rule.duplicates == "mask":
        valid = alike.logical_not_()
        if shift is not None:
            torch.diagonal(valid, shift).fill_(True)
        return valid, None
    if shift is not None:
        torch.diagonal(alike, shift).fill_(True)
    return None, alike
