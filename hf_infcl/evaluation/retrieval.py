"""Retrieval metrics: recall@k, median rank and mean reciprocal rank in both directions, exact and in linear memory."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_infcl.evaluation.checks import as_embeddings, as_ids, check_finite, check_ks, check_same_space
from hf_infcl.evaluation.relations import PairList, Relation, SameIds
from hf_infcl.evaluation.sweep import rank_sweep

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
    if (image_ids is None) != (text_ids is None):
        missing = "image_ids" if image_ids is None else "text_ids"
        raise ValueError(f"image_ids and text_ids go together: {missing} is missing")
    if image_ids is None or text_ids is None:
        if n != p:
            raise ValueError(
                f"without ids the i-th image belongs to the i-th text, but there are {n} images and {p} texts; "
                "pass image_ids and text_ids"
            )
        image_ids = text_ids = torch.arange(n)
    image_ids = as_ids(image_ids, n, "image_ids", device)
    text_ids = as_ids(text_ids, p, "text_ids", device)
    if image_ids.shape[1] != text_ids.shape[1]:
        raise ValueError(
            f"image_ids have {image_ids.shape[1]} columns and text_ids {text_ids.shape[1]}; "
            "they are compared column by column"
        )
    return _metrics(image_embeds, text_embeds, SameIds(image_ids, text_ids), check_ks(ks), block_size)


def dataset_retrieval_metrics(
    image_embeds: Tensor,
    text_embeds: Tensor,
    ids: Any = None,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    block_size: int | None = None,
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
    ids = as_ids(torch.arange(n) if ids is None else ids, n, "ids", device)
    if ids.shape[1] > 2:
        raise ValueError(f"ids has {ids.shape[1]} columns; expected (image id, caption id)")
    images, image_of_row = _first_rows(ids[:, 0])
    texts, text_of_row = _first_rows(ids[:, -1])
    relation = PairList(image_of_row, text_of_row)
    return _metrics(image_embeds[images], text_embeds[texts], relation, check_ks(ks), block_size)


def _first_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """For every distinct id the first row that has it, and for every row the place of its id among those."""
    distinct, place = torch.unique(ids, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(distinct, len(ids)).scatter_reduce(0, place, rows, "amin")
    return first, place


def _metrics(
    images: Tensor, texts: Tensor, relation: Relation, ks: list[int], block_size: int | None
) -> dict[str, float]:
    check_finite(images, "image_embeds")
    check_finite(texts, "text_embeds")
    ranks = rank_sweep(images, texts, relation, block_size)
    metrics = {
        **_direction("image_to_text", ranks.rows, len(texts), ks),
        **_direction("text_to_image", ranks.cols, len(images), ks),
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
    logger.warning("%s is 1.0 whatever the model: there are only %d candidates", metric, pool)
