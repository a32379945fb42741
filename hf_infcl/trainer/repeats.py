"""What repeated ids leave of a batch's negatives."""

from torch import Tensor


def repeated_shares(ids: Tensor) -> list[float]:
    """For each column of `ids`, (n, m), the share of rows that repeat another one's id."""
    return [1 - len(column.unique()) / len(column) for column in ids.unbind(1)]


def lacks_negatives(ids: Tensor) -> bool:
    """Whether some row of a batch is left without a negative where rows that agree in any column are no negatives.

    Args:
        ids: (n, m) of all rows of the batch, on the host. A lone row is not looked at: it has no other to agree with.

    Example:
        >>> lacks_negatives(torch.tensor([[1, 7], [2, 7], [3, 7]]))  # one caption for three pictures
        True
    """
    if len(ids) < 2:
        return False
    agreeing = 0
    for column in ids.unbind(1):
        _, inverse, counts = column.unique(return_inverse=True, return_counts=True)
        agreeing = agreeing + counts[inverse]
    # A row may agree with another in several columns, hence the second look at the few that this leaves.
    suspects = ids[agreeing >= len(ids)].unique(dim=0)
    return any(bool((ids == row).any(1).all()) for row in suspects)
