"""Dense float64 oracles: the definitions, as short as they can be written. Every matrix is built."""

from collections.abc import Callable

import torch
from torch import Tensor


def related(a: Tensor | None, b: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """(n, p) bool: the rows agree in any column of their ids."""
    if a is None or b is None:
        return torch.zeros(shape, dtype=torch.bool)
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    return (a[:, None] == b[None]).any(-1)


def cross_entropy(logits: Tensor, alike: Tensor, duplicates: str = "mask", e: float = 0.0) -> Tensor:
    """Mean over rows of the cross-entropy to (1-e) uniform(P) + e uniform(C); row i's own pair is column i."""
    own = torch.eye(*logits.shape, dtype=torch.bool)
    valid = ~alike | own if duplicates == "mask" else torch.ones_like(own)
    positive = alike | own if duplicates == "positive" else own
    target = (1 - e) * positive / positive.sum(1, keepdim=True) + e * valid / valid.sum(1, keepdim=True)
    log_p = logits.masked_fill(~valid, -torch.inf).log_softmax(1)
    return -(target * log_p.masked_fill(~valid, 0.0)).sum(1).mean()


def contrastive(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    direction: str = "both",
    label_smoothing: float = 0.0,
    bank: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Tensor:
    """InfoNCE of (n, d) pairs, with (p, d) bank entries as further candidates."""
    all_images, all_texts, all_ids = images, texts, ids
    if bank is not None:
        all_images, all_texts = torch.cat([images, bank[0]]), torch.cat([texts, bank[1]])
        all_ids = None if ids is None or bank[2] is None else torch.cat([ids, bank[2]])
    alike = related(ids, all_ids, (len(images), len(all_images)))
    losses = {
        "image_to_text": cross_entropy(scale * images @ all_texts.T, alike, duplicates, label_smoothing),
        "text_to_image": cross_entropy(scale * texts @ all_images.T, alike, duplicates, label_smoothing),
    }
    return sum(losses.values()) / 2 if direction == "both" else losses[direction]


def hardest(scores: Tensor, valid: Tensor, k: int) -> Tensor:
    """(n, p) bool: the k best valid entries of every row, by score, then by lowest index."""
    order = scores.masked_fill(~valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(valid).scatter_(1, order[:, :k], True) & valid


def hard_negative(
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    k: int,
    ids: Tensor | None = None,
    direction: str = "both",
    bank: tuple[Tensor, Tensor, Tensor | None] | None = None,
    ceiling: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """InfoNCE over the pair and the k hardest negatives. `ceiling` maps the pairs' scores to the highest allowed."""
    all_images, all_texts, all_ids = images, texts, ids
    if bank is not None:
        all_images, all_texts = torch.cat([images, bank[0]]), torch.cat([texts, bank[1]])
        all_ids = None if ids is None or bank[2] is None else torch.cat([ids, bank[2]])
    own = torch.eye(len(images), len(all_images), dtype=torch.bool)
    alike = related(ids, all_ids, tuple(own.shape)) | own
    losses = {}
    for name, anchors, others in (("image_to_text", images, all_texts), ("text_to_image", texts, all_images)):
        scores = anchors @ others.T
        valid = ~alike
        if ceiling is not None:
            valid = valid & ~(scores > ceiling(scores[own])[:, None])
        kept = hardest(scores.detach(), valid, k) | own
        log_p = (scale * scores).masked_fill(~kept, -torch.inf).log_softmax(1)
        losses[name] = -log_p[own].mean()
    return sum(losses.values()) / 2 if direction == "both" else losses[direction]


def sigmoid(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None = None) -> Tensor:
    """SigLIP: -sum_ij log sigmoid(z_ij (s x_i.y_j + b)) / n, other copies of a pair left out."""
    own = torch.eye(len(images), dtype=torch.bool)
    z = 2.0 * own - 1
    terms = torch.nn.functional.logsigmoid(z * (scale * images @ texts.T + bias))
    return -(terms.masked_fill(related(ids, ids, own.shape) & ~own, 0.0)).sum() / len(images)


def pairs(kind: str, n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit-norm float64 pairs of a structure: random, trained (cosine .3 to .95), identical rows, opposite pairs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(n, d, generator=g, dtype=torch.float64), dim=-1)
    if kind == "random":
        y = torch.randn(n, d, generator=g, dtype=torch.float64)
    elif kind == "trained":
        cosine = 0.3 + 0.65 * torch.rand(n, 1, generator=g, dtype=torch.float64)
        other = torch.randn(n, d, generator=g, dtype=torch.float64)
        other = torch.nn.functional.normalize(other - (other * x).sum(1, keepdim=True) * x, dim=-1)
        y = cosine * x + (1 - cosine**2).sqrt() * other
    elif kind == "identical":
        x = x[:1].expand(n, d).clone()
        y = x.clone()
    elif kind == "opposite":
        y = -x
    else:
        raise ValueError(kind)
    return x, torch.nn.functional.normalize(y, dim=-1)


def gradient_error(out: Tensor, ref: Tensor, scale: float) -> float:
    """||out - ref|| / max(||ref||, 0.05 s / sqrt(N)); the floor keeps a vanishing gradient from dividing by nothing."""
    ref = ref.double()
    return float((out.double() - ref).norm() / max(float(ref.norm()), 0.05 * scale / len(ref) ** 0.5))
