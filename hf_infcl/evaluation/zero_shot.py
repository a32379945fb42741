"""Zero-shot classification: an image's class is the class whose text embedding is nearest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_infcl.evaluation.checks import as_embeddings, as_ids, check_finite, check_ks, check_same_space
from hf_infcl.evaluation.relations import SameIds
from hf_infcl.evaluation.retrieval import say_once_pool_is_small
from hf_infcl.evaluation.sweep import rank_sweep
from hf_infcl.ring.layout import Layout


def zero_shot_metrics(
    image_embeds: Tensor,
    labels: Any,
    class_embeds: Tensor,
    *,
    ks: Sequence[int] = (1, 5),
    class_names: Sequence[str] | None = None,
    block_size: int | None = None,
    group: Any = False,
) -> dict[str, float]:
    """Accuracy of classifying images by the nearest class embedding.

    Args:
        image_embeds: (n, d) embeddings.
        labels: (n,) integers in [0, C): each image's class.
        class_embeds: (C, d) one embedding a class (for prompt ensembles, the normalised mean of the prompts'
            embeddings).
        ks: the k of accuracy@k. A k as large as the number of classes gives 1.0, which is said once in the log.
        class_names: (C,) names; classes of one name are merged into the first of them.
        block_size: rows and columns of a block of scores; default by device.
        group: the process group that shares the images, where each process passes images of its own and all classes,
            and all get the same metrics; None: the default group where one is initialised; False: this process has
            them all.

    Returns:
        "accuracy@k" for every k, and "mean_per_class_accuracy" (accuracy@1 averaged over the classes that occur, so
        that rare ones weigh as much as frequent ones). A class that ties with the right one counts against it.

    Raises:
        ValueError: shapes, labels or ks that do not fit; NaN or infinite embeddings; two classes with the very same
            embedding (the same name twice, or a collapsed text tower), which no classifier could tell apart.

    Example:
        >>> import torch
        >>> from hf_infcl import zero_shot_metrics
        >>> zero_shot_metrics(torch.eye(3), [0, 1, 2], torch.eye(3), ks=(1,))["accuracy@1"]
        1.0
    """
    image_embeds = as_embeddings(image_embeds, "image_embeds")
    class_embeds = as_embeddings(class_embeds, "class_embeds")
    check_same_space(image_embeds, class_embeds, "image_embeds", "class_embeds")
    check_finite(image_embeds, "image_embeds")
    check_finite(class_embeds, "class_embeds")
    checked_ks = check_ks(ks)
    n, classes, device = image_embeds.shape[0], class_embeds.shape[0], image_embeds.device
    labels = as_ids(labels, n, "labels", device)
    if labels.shape[1] != 1:
        raise ValueError(f"labels has shape {tuple(labels.shape)}; expected ({n},): one class an image")
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        row = int(outside.flatten().nonzero()[0])
        raise ValueError(
            f"labels[{row}] is {labels[row].item()}; expected 0 to {classes - 1} for {classes} class_embeds"
        )
    if class_names is not None:
        class_embeds, labels = _merge(class_embeds, labels, class_names)
        classes = class_embeds.shape[0]
    _refuse_equal_classes(class_embeds)

    options = {"function": "zero_shot_metrics", "width": class_embeds.shape[1], "classes": classes, "ks": checked_ks}
    layout = Layout.of(group, n, 0, device, options)
    relation = SameIds(labels, torch.arange(classes, device=device)[:, None])
    ranks = rank_sweep(image_embeds, class_embeds, relation, block_size).rows
    ranks, labels = (layout.world.gather(numbers, layout.batch_sizes) for numbers in (ranks, labels))
    for k in checked_ks:
        if k >= classes:
            say_once_pool_is_small(f"accuracy@{k}", classes)
    metrics = {f"accuracy@{k}": (ranks <= k).double().mean().item() for k in checked_ks}
    right = torch.zeros(classes, dtype=torch.float64, device=device).index_add_(0, labels[:, 0], (ranks == 1).double())
    count = torch.bincount(labels[:, 0], minlength=classes)
    metrics["mean_per_class_accuracy"] = (right[count > 0] / count[count > 0]).mean().item()
    return metrics


def _merge(class_embeds: Tensor, labels: Tensor, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Keeps the first class of every name and renumbers the labels."""
    if len(names) != len(class_embeds):
        raise ValueError(f"class_names has {len(names)} names for {len(class_embeds)} class_embeds")
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        first.setdefault(name, i)
    place = {name: new for new, name in enumerate(first)}
    renumber = torch.tensor([place[name] for name in names], device=labels.device)
    return class_embeds[list(first.values())], renumber[labels]


def _refuse_equal_classes(class_embeds: Tensor) -> None:
    distinct, place = torch.unique(class_embeds, dim=0, return_inverse=True)
    if len(distinct) == len(class_embeds):
        return
    counts = torch.bincount(place)
    twins = (place == counts.argmax()).nonzero().flatten().tolist()
    raise ValueError(
        f"class_embeds: classes {twins[0]} and {twins[1]} have the very same embedding "
        f"({len(distinct)} of {len(class_embeds)} are distinct); "
        "if they share a name, pass class_names to merge them, else the text tower has collapsed"
    )
