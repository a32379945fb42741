"""Retrieval metrics against a dense numpy computation that ranks by counting."""

import math

import numpy as np
import pytest
import torch

from hf_infcl.evaluation import dataset_retrieval_metrics, retrieval_metrics
from hf_infcl.evaluation.retrieval import say_once_pool_is_small


def dense_metrics(images, texts, positive, ks):
    """The definition, with the whole matrix in float64."""
    scores = images.double().numpy() @ texts.double().numpy().T
    metrics = {}
    for name, s, pos in (("image_to_text", scores, positive), ("text_to_image", scores.T, positive.T)):
        has = pos.any(axis=1)
        best = np.where(pos, s, -np.inf).max(axis=1, keepdims=True)
        rank = (1 + ((s >= best) & ~pos).sum(axis=1))[has]
        metrics |= {f"{name}/recall@{k}": float((rank <= k).mean()) for k in ks}
        metrics |= {f"{name}/median_rank": float(np.median(rank)), f"{name}/mrr": float((1 / rank).mean())}
    return metrics | {
        f"mean_recall@{k}": (metrics[f"image_to_text/recall@{k}"] + metrics[f"text_to_image/recall@{k}"]) / 2
        for k in ks
    }


def pairs(n, p, d, seed=0):
    """Images and texts that share enough for ranks to spread between first and last."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(max(n, p), d, generator=generator)
    images = shared[:n] + 2 * torch.randn(n, d, generator=generator)
    texts = shared[:p] + 2 * torch.randn(p, d, generator=generator)
    return torch.nn.functional.normalize(images, dim=1), torch.nn.functional.normalize(texts, dim=1)


@pytest.mark.parametrize("block_size", [None, 1, 7, 64])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (2, 3), (63, 7), (130, 16)])
def test_paired_rows_match_the_dense_definition(n, d, block_size):
    images, texts = pairs(n, n, d)
    got = retrieval_metrics(images, texts, block_size=block_size)
    assert got == pytest.approx(dense_metrics(images, texts, np.eye(n, dtype=bool), (1, 5, 10)), abs=1e-12)


@pytest.mark.parametrize("block_size", [None, 10])
def test_any_agreeing_id_column_makes_a_positive(block_size):
    images, texts = pairs(60, 80, 8)
    generator = torch.Generator().manual_seed(1)
    image_ids, text_ids = (torch.randint(0, 40, (rows, 2), generator=generator) for rows in (60, 80))
    positive = (image_ids[:, None] == text_ids[None]).any(dim=2).numpy()
    assert not positive.any(axis=1).all()  # some queries have no positive and are left out
    got = retrieval_metrics(images, texts, image_ids=image_ids, text_ids=text_ids, ks=(1, 3), block_size=block_size)
    assert got == pytest.approx(dense_metrics(images, texts, positive, (1, 3)), abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 63, 64, 100, 513])
def test_a_collapsed_model_scores_zero(n):
    constant = torch.randn(1, 37, generator=torch.Generator().manual_seed(0)).repeat(n, 1)
    got = retrieval_metrics(constant, constant, ks=(1,), block_size=50)
    assert got["image_to_text/recall@1"] == got["text_to_image/recall@1"] == 0.0
    assert got["image_to_text/median_rank"] == got["text_to_image/median_rank"] == n


def two_images_five_captions():
    """Two images of five captions each, four of the first's tilted so that the second image wins them."""
    e1, e2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    tilted = torch.tensor([math.sin(0.1), math.cos(0.1)])
    return torch.stack([e1, e2]), torch.stack([e1, *[tilted] * 4, *[e2] * 5])


def test_any_of_several_captions_is_a_hit():
    images, texts = two_images_five_captions()
    got = retrieval_metrics(images, texts, image_ids=[0, 1], text_ids=[0] * 5 + [1] * 5, ks=(1,))
    assert got["image_to_text/recall@1"] == 1.0
    assert got["text_to_image/recall@1"] == pytest.approx(0.6)


@pytest.mark.parametrize("shuffled", [False, True])
def test_one_row_per_caption_scores_like_the_list_layout(shuffled):
    images, texts = two_images_five_captions()
    image_ids = torch.tensor([7] * 5 + [3] * 5)
    rows = torch.randperm(10, generator=torch.Generator().manual_seed(0)) if shuffled else torch.arange(10)
    ids = torch.stack([image_ids, 100 + torch.arange(10)], dim=1)[rows]
    got = dataset_retrieval_metrics(images.repeat_interleave(5, 0)[rows], texts[rows], ids, ks=(1, 2))
    want = retrieval_metrics(images, texts, image_ids=[7, 3], text_ids=image_ids, ks=(1, 2))
    assert got == want


def test_repeated_captions_stand_in_the_pool_once():
    # captions A, A, B, B: either copy is a hit
    e1, e2 = torch.eye(2)
    embeds = torch.stack([e1, e1, e2, e2])
    ids = torch.tensor([[0, 10], [1, 10], [2, 11], [3, 11]])
    got = dataset_retrieval_metrics(embeds, embeds, ids, ks=(1,))
    assert got["mean_recall@1"] == 1.0
    assert got["image_to_text/mrr"] == got["text_to_image/mrr"] == 1.0


@pytest.mark.parametrize("block_size", [None, 5])
def test_many_to_many_rows_match_the_dense_definition(block_size):
    generator = torch.Generator().manual_seed(3)
    image_pool, text_pool = pairs(12, 20, 6)
    edges = torch.unique(
        torch.stack(
            [torch.randint(0, 12, (30,), generator=generator), torch.randint(0, 20, (30,), generator=generator)], 1
        ),
        dim=0,
    )
    edges = edges[torch.randperm(len(edges), generator=generator)]
    images, texts = edges[:, 0].unique(), edges[:, 1].unique()
    positive = (
        (edges[None, None] == torch.cartesian_prod(images, texts).view(len(images), len(texts), 1, 2)).all(-1).any(-1)
    )
    got = dataset_retrieval_metrics(
        image_pool[edges[:, 0]], text_pool[edges[:, 1]], edges, ks=(1, 5), block_size=block_size
    )
    assert got == pytest.approx(
        dense_metrics(image_pool[images], text_pool[texts], positive.numpy(), (1, 5)), abs=1e-12
    )


@pytest.mark.parametrize("ids", [None, torch.arange(40), torch.arange(40)[:, None]])
def test_rows_without_a_second_id_are_plain_pairs(ids):
    images, texts = pairs(40, 40, 8)
    assert dataset_retrieval_metrics(images, texts, ids) == retrieval_metrics(images, texts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised_to_float32(dtype):
    images, texts = (side.to(dtype) for side in pairs(90, 90, 16))
    assert retrieval_metrics(images, texts) == retrieval_metrics(images.float(), texts.float())


def test_bfloat16_agrees_with_the_float32_run():
    images, texts = pairs(300, 300, 64)
    exact, rounded = retrieval_metrics(images, texts), retrieval_metrics(images.bfloat16(), texts.bfloat16())
    assert rounded["mean_recall@1"] == pytest.approx(exact["mean_recall@1"], abs=1e-2)


def test_autocast_does_not_reach_the_scores():
    images, texts = pairs(90, 90, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert retrieval_metrics(images, texts) == retrieval_metrics(images, texts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = retrieval_metrics(images, texts)
    assert inside == retrieval_metrics(images, texts)


def test_reduced_matmul_precision_is_overridden_and_restored():
    images, texts = pairs(90, 90, 16)
    want = retrieval_metrics(images, texts)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert retrieval_metrics(images, texts) == want
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_numpy_arrays_are_taken():
    images, texts = pairs(20, 20, 4)
    assert retrieval_metrics(images.numpy(), texts.numpy()) == retrieval_metrics(images, texts)


def test_k_beyond_the_pool_is_one_and_said_once(caplog):
    images, texts = pairs(4, 4, 3, seed=9)
    for _ in range(2):
        got = retrieval_metrics(images, texts, ks=(1, 5, 17))
    assert got["image_to_text/recall@17"] == got["text_to_image/recall@5"] == got["mean_recall@17"] == 1.0
    assert sum("image_to_text/recall@17" in record.message for record in caplog.records) == 1


def test_queries_without_a_positive_are_left_out_and_said(caplog):
    got = retrieval_metrics(torch.eye(3), torch.eye(3), image_ids=[0, 1, 2], text_ids=[0, 1, 9], ks=(1,))
    assert got["image_to_text/recall@1"] == got["text_to_image/recall@1"] == 1.0
    assert "image_to_text: 1 of 3 queries have no positive" in caplog.text


def test_scratch_memory_is_a_block():
    n, block = 3000, 100
    images, texts = pairs(n, n, 4)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        retrieval_metrics(images, texts, block_size=block)
    assert largest <= max(4 * n, 128 * 128)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(image_embeds=torch.ones(3)), r"image_embeds has shape \(3,\)"),
        (dict(image_embeds=torch.ones(0, 4)), r"image_embeds has shape \(0, 4\)"),
        (dict(image_embeds=torch.ones(3, 4, dtype=torch.long)), "image_embeds is torch.int64"),
        (dict(image_embeds=torch.ones(3, 5)), "image_embeds has width 5 and text_embeds 4"),
        (dict(image_embeds=torch.ones(2, 4)), "2 images and 3 texts"),
        (dict(image_ids=[0, 1, 2]), "text_ids is missing"),
        (dict(image_ids=[0, 1], text_ids=[0, 1, 2]), r"image_ids has shape \(2,\)"),
        (dict(image_ids=[0.0, 1.0, 2.0], text_ids=[0, 1, 2]), "image_ids is torch.float32; expected integers"),
        (dict(image_ids=[[0, 1]] * 3, text_ids=[0, 1, 2]), "image_ids have 2 columns and text_ids 1"),
        (dict(image_ids=[0, 1, 2], text_ids=[3, 4, 5]), "none of the 3 queries has a positive"),
        (dict(ks=()), r"ks is \(\)"),
        (dict(ks=(0,)), r"ks is \(0,\)"),
        (dict(ks=5), r"ks is 5; expected a sequence of integers"),
        (dict(ks=(1.5,)), r"ks is \(1.5,\)"),
        (dict(image_embeds=torch.tensor([[1.0] * 4, [math.nan] * 4, [1.0] * 4])), "1 of 3 embeddings .* row 1"),
        (dict(text_embeds=torch.full((3, 4), math.inf)), "text_embeds: 3 of 3"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, said):
    good = dict(image_embeds=torch.ones(3, 4), text_embeds=torch.ones(3, 4))
    with pytest.raises(ValueError, match=said):
        retrieval_metrics(**{**good, **arguments})


def test_dataset_rows_must_be_pairs():
    with pytest.raises(ValueError, match="3 image_embeds and 2 text_embeds"):
        dataset_retrieval_metrics(torch.ones(3, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="ids has 3 columns"):
        dataset_retrieval_metrics(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize(("pool", "said"), [(1, "there is only 1 candidate"), (7, "there are only 7 candidates")])
def test_a_small_pool_is_said_in_words(caplog, pool, said):
    say_once_pool_is_small(f"test_{pool}/recall@9", pool)
    assert caplog.records[0].getMessage() == f"test_{pool}/recall@9 is 1.0 whatever the model: {said}"
