"""The streaming top-k itself: the k best keys of every query, without their similarity matrix."""

from typing import Any

import torch
from torch import Tensor

from hf_infcl.losses import checks
from hf_infcl.ops import Side
from hf_infcl.ring import HardNegativeSpec, hardest


@torch.no_grad()
def hardest_negatives(
    queries: Tensor,
    keys: Tensor,
    k: int,
    *,
    ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    block_size: int | None = None,
    group: Any = None,
    backend: str = "auto",
    precision: str = "auto",
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The k keys that score highest for every query, exactly those of a top-k over the whole score matrix.

    Keys pass in blocks; a block is searched for a query only where it may hold one of the query's k best. Memory grows
    with n k, not with n m.

    Args:
        queries: (n, d) embeddings, used as given; float32, float16, bfloat16, or float64 (PyTorch backend).
        keys: (m, d), same dtype and device. With a group: this rank's keys; every rank's are searched.
        k: how many, >= 1.
        ids: (n,) or (n, c) integers of the queries. A key that agrees with a query in any column is left out of its
            negatives. None: nothing is left out, not even the key of the same position.
        key_ids: (m,) or (m, c) likewise for the keys; by default ``ids``, where there are as many keys as queries.
        block_size: keys that are searched at once; by default chosen for the device. Changes speed, memory and the skip
            ratio, never the selection.
        group: the process group whose keys are searched; None: the default group where one is initialised; False: this
            process's alone.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
        precision: of float32 products: ``"auto"`` (ieee), ``"ieee"``, ``"tf32"`` or ``"tf32x3"``.

    Returns:
        scores (n, k) float32, best first, and indices (n, k) int64 of the keys: over all ranks, rank after rank. Equal
        scores come in the order of their indices. Rows with fewer than k valid keys end in (-inf, -1). The third is a
        dictionary: ``row_skip_ratio``, a float32 scalar, the share of (query, block) pairs that were not searched.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or value, named in the message.

    Example:
        >>> import torch
        >>> from hf_infcl import hardest_negatives
        >>> scores, indices, stats = hardest_negatives(torch.eye(3), torch.eye(3) + 0.5, 2, ids=torch.arange(3))
        >>> indices.tolist()
        [[1, 2], [0, 2], [0, 1]]
    """
    checks.check_embeddings("queries", queries)
    checks.check_embeddings("keys", keys)
    if queries.shape[1] != keys.shape[1]:
        raise ValueError(f"queries and keys must have the same dimension d, got {queries.shape[1]} and {keys.shape[1]}")
    checks.check_alike("keys", keys, "queries", queries)
    checks.check_count("k", k)
    checks.check_options(block_size=block_size, backend=backend, precision=precision)
    known = checks.check_ids("ids", ids, queries)
    if key_ids is None and ids is not None:
        if len(keys) != len(queries):
            raise ValueError(
                f"key_ids must be given with ids where keys and queries differ in number, got {len(keys)} keys and "
                f"{len(queries)} queries"
            )
        key_ids = ids
    known_keys = checks.check_ids("key_ids", key_ids, keys)
    columns, key_columns = (None if given is None else given.shape[1] for given in (known, known_keys))
    if columns != key_columns:
        raise ValueError(
            f"ids and key_ids must have the same number of columns (None without ids), got {columns} and {key_columns}"
        )
    spec = HardNegativeSpec(block_size=block_size, group=group, backend=backend, precision=precision, k=k)
    with torch.autocast(queries.device.type, enabled=False):
        scores, indices, counts = hardest(Side(queries, 0, known), Side(keys, 0, known_keys), spec)
    skipped, met = counts.float()
    return scores.float(), indices, {"row_skip_ratio": skipped / met}
