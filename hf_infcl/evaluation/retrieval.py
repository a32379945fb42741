"""Retrieval metrics: recall@k, median rank and mean reciprocal rank in both directions, exact and in linear memory."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_infcl.evaluation.checks import as_embeddings, as_ids, check_finite, check_ks, check_same_space
from hf_infcl.evaluation.relations import PairList, Relation, SameIds
from hf_infcl.evaluation.sweep import rank_sweep
from hf_infcl.ring.layout import Layout

logger = logging.getLogger(__name__)

DEFAULT_KS = (1, 5, 10)


def retrieval_metrics(
    image_embeds: Tensor,
    text_embeds: Tensor,
    *,
    image_ids: Any = None,
    text_ids: Any = None,
    ks: Sequence[int] = DEFAULT_KS,
    block_size: int | None = None,
    group: Any = False,
) -> dict[str, float]:
    """Image-to-text and text-to-image retrieval over the whole pool, without the n x p score matrix.

    The score is the dot product of the embeddings as given (pass normalised ones for cosines), in float32 whatever
    their dtype. Where a query has several positives (five captions of an image), any of them is a hit: its rank is
    that of the best one, the others do not stand in its way. A candidate that ties with the positive counts against
    it, so a collapsed model scores 0 and not 1.

    Args:
        image_embeds: (n, d) float tensor or array.
        text_embeds: (p, d) float tensor or array on the same device.
        image_ids: (n,) or (n, m) integers. An image and a text belong together if their ids agree in any column.
            Without ids the i-th image belongs to the i-th text.
        text_ids: (p,) or (p, m) integers; given exactly when `image_ids` is.
        ks: the k of recall@k. A k as large as the pool gives 1.0, which is said once in the log.
        block_size: rows and columns of a block of scores; default by device.
        group: the process group that shares the pool, where each process passes images and texts of its own and all
            get the same metrics; None: the default group where one is initialised; False: this process has it all.

    Returns:
        "image_to_text/recall@k" (share of the images whose best positive is among the k best texts),
        "image_to_text/median_rank" (1 is best), "image_to_text/mrr", the same for "text_to_image", and
        "mean_recall@k", the mean of the two directions.
        Queries without any positive are left out of their direction, which is said in the log.

    Raises:
        ValueError: shapes, devices, ids or ks that do not fit; an embedding that is NaN or infinite (side and row are
            named); a direction in which no query has a positive.

    Example:
        >>> import torch
        >>> from hf_infcl import retrieval_metrics
        >>> metrics = retrieval_metrics(torch.eye(4), torch.eye(4), ks=(1,))
        >>> metrics["image_to_text/recall@1"]
        1.0
    """
    image_embeds = as_embeddings(image_embeds, "image_embeds")
    text_embeds = as_embeddings(text_embeds, "text_embeds")
    check_same_space(image_embeds, text_embeds, "image_embeds", "text_embeds")
    n, p, device = image_embeds.shape[0], text_embeds.shape[0], image_embeds.device
    ks = check_ks(ks)
    if (image_ids is None) != (text_ids is None):
        missing = "image_ids" if image_ids is None else "text_ids"
        raise ValueError(f"image_ids and text_ids go together: {missing} is missing")
    if image_ids is not None and text_ids is not None:
        image_ids, text_ids = as_ids(image_ids, n, "image_ids", device), as_ids(text_ids, p, "text_ids", device)
        if image_ids.shape[1] != text_ids.shape[1]:
            raise ValueError(
                f"image_ids have {image_ids.shape[1]} columns and text_ids {text_ids.shape[1]}; "
                "they are compared column by column"
            )
    elif n != p:
        raise ValueError(
            f"without ids the i-th image belongs to the i-th text, but there are {n} images and {p} texts; "
            "pass image_ids and text_ids"
        )
    options = _agreement("retrieval_metrics", image_embeds, image_ids, ks)
    images, texts = (Layout.of(group, rows, 0, device, options) for rows in (n, p))
    if image_ids is None or text_ids is None:
        first = images.offset(images.world.rank)
        image_ids = text_ids = torch.arange(first, first + n, device=device)[:, None]
    # Numbers, unlike embeddings, are small enough for every process to have them all.
    relation = SameIds(
        images.world.gather(image_ids, images.batch_sizes), texts.world.gather(text_ids, texts.batch_sizes)
    )
    return _metrics(image_embeds, text_embeds, relation, ks, block_size, images, texts)


def dataset_retrieval_metrics(
    image_embeds: Tensor,
    text_embeds: Tensor,
    ids: Any = None,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    block_size: int | None = None,
    group: Any = False,
) -> dict[str, float]:
    """Retrieval metrics of a data set given as (image, caption) rows, in which images and captions may repeat.

    Each distinct image and each distinct caption stands in the pool once, whatever the number of its rows and their
    order; an image and a caption belong together if some row pairs them. So a table with one row per caption and a
    list of captions per image score the same.

    Args:
        image_embeds: (n, d) embeddings of the rows' images.
        text_embeds: (n, d) embeddings of the rows' captions.
        ids: (n, 2) integers, (image id, caption id) of every row; (n,) or (n, 1): one id for both; None: all rows are
            distinct.
        ks: as in `retrieval_metrics`.
        block_size: as in `retrieval_metrics`.
        group: as in `retrieval_metrics`; each process passes rows of its own. An image or caption that stands in rows
            of several processes counts once.

    Returns:
        The dictionary of `retrieval_metrics`.

    Raises:
        ValueError: as in `retrieval_metrics`.
    """
    image_embeds = as_embeddings(image_embeds, "image_embeds")
    text_embeds = as_embeddings(text_embeds, "text_embeds")
    check_same_space(image_embeds, text_embeds, "image_embeds", "text_embeds")
    n, device = image_embeds.shape[0], image_embeds.device
    if text_embeds.shape[0] != n:
        raise ValueError(f"rows are pairs, but there are {n} image_embeds and {text_embeds.shape[0]} text_embeds")
    ks = check_ks(ks)
    if ids is not None:
        ids = as_ids(ids, n, "ids", device)
        if ids.shape[1] > 2:
            raise ValueError(f"ids has {ids.shape[1]} columns; expected (image id, caption id)")
    rows = Layout.of(group, n, 0, device, _agreement("dataset_retrieval_metrics", image_embeds, ids, ks))
    all_ids = (
        torch.arange(rows.rows, device=device)[:, None] if ids is None else rows.world.gather(ids, rows.batch_sizes)
    )
    images, image_of_row = _first_rows(all_ids[:, 0])
    texts, text_of_row = _first_rows(all_ids[:, -1])
    (own_images, image_layout), (own_texts, text_layout) = (_own_part(first, rows) for first in (images, texts))
    relation = PairList(image_of_row, text_of_row)
    return _metrics(
        image_embeds[own_images], text_embeds[own_texts], relation, ks, block_size, image_layout, text_layout
    )


def _agreement(name: str, embeds: Tensor, ids: Tensor | None, ks: list[int]) -> dict[str, object]:
    columns = None if ids is None else ids.shape[1]
    dtype = str(embeds.dtype).removeprefix("torch.")
    return {"function": name, "width": embeds.shape[1], "dtype": dtype, "columns of ids": columns, "ks": ks}


def _first_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """For every distinct id the first row that has it, ascending, and for every row the place of its id's among those.

    Ascending, so that the rows of one process stand together.
    """
    distinct, place = torch.unique(ids, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(distinct, len(ids)).scatter_reduce(0, place, rows, "amin")
    order = first.argsort()
    new_place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return first[order], new_place[place]


def _own_part(first: Tensor, rows: Layout) -> tuple[Tensor, Layout]:
    """Which of the pool's rows this process has, by its own numbering, and where everybody's stand in the pool."""
    bounds = [rows.offset(rank) for rank in range(rows.world.size + 1)]
    ends = torch.searchsorted(first, torch.tensor(bounds, device=first.device)).tolist()
    sizes = tuple(end - start for start, end in pairwise(ends))
    rank = rows.world.rank
    return first[ends[rank] : ends[rank + 1]] - bounds[rank], replace(rows, batch_sizes=sizes)


def _metrics(
    images: Tensor,
    texts: Tensor,
    relation: Relation,
    ks: list[int],
    block_size: int | None,
    image_layout: Layout,
    text_layout: Layout,
) -> dict[str, float]:
    world = image_layout.world
    check_finite(images, "image_embeds", world)
    check_finite(texts, "text_embeds", world)
    offset = image_layout.offset(world.rank)
    ranks = rank_sweep(images, texts, relation, block_size, row_offset=offset, layout=text_layout)
    metrics = {
        **_direction("image_to_text", world.gather(ranks.rows, image_layout.batch_sizes), text_layout.rows, ks),
        **_direction("text_to_image", world.gather(ranks.cols, text_layout.batch_sizes), image_layout.rows, ks),
    }
    for k in ks:
        metrics[f"mean_recall@{k}"] = (metrics[f"image_to_text/recall@{k}"] + metrics[f"text_to_image/recall@{k}"]) / 2
    return metrics


def _direction(name: str, ranks: Tensor, pool: int, ks: list[int]) -> dict[str, float]:
    found = ranks[ranks > 0]
    lost = len(ranks) - len(found)
    if len(found) == 0:
        raise ValueError(
            f"{name}: none of the {len(ranks)} queries has a positive; "
            "do image and text ids come from the same numbering?"
        )
    if lost:
        logger.warning("%s: %d of %d queries have no positive and are left out", name, lost, len(ranks))
    for k in ks:
        if k >= pool:
            say_once_pool_is_small(f"{name}/recall@{k}", pool)
    metrics = {f"{name}/recall@{k}": (found <= k).double().mean().item() for k in ks}
    ordered = found.sort().values
    metrics[f"{name}/median_rank"] = (ordered[(len(found) - 1) // 2] + ordered[len(found) // 2]).item() / 2
    metrics[f"{name}/mrr"] = found.double().reciprocal().mean().item()
    return metrics


@cache
def say_once_pool_is_small(metric: str, pool: int) -> None:
    """Says in the log, once for each metric and pool size, that a metric is 1.0 by construction."""
    there = "is only 1 candidate" if pool == 1 else f"are only {pool} candidates"
    logger.warning("%s is 1.0 whatever the model: there %s", metric, there)
