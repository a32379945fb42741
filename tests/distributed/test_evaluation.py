"""Retrieval metrics of a pool that is spread over processes: to the digit what one process finds that has it all."""

import os
from collections.abc import Iterator

import pytest
import torch

from hf_infcl import retrieval_metrics, zero_shot_metrics
from hf_infcl.evaluation import dataset_retrieval_metrics
from tests.processes import run_processes

pytestmark = pytest.mark.distributed


def forced_paths() -> Iterator[None]:
    for limit in ("0", "1000000"):
        os.environ["HF_INFCL_GATHER_BELOW"] = limit
        yield


def integers(n: int, seed: int, d: int = 5) -> torch.Tensor:
    """Embeddings whose products are exact, with ties in plenty."""
    return torch.randint(-2, 3, (n, d), generator=torch.Generator().manual_seed(seed)).float()


def part(sizes: list[int], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def _metrics(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    image_sizes, text_sizes = [7, 1, 12][:world_size], [3, 20, 2][:world_size]
    n, p = sum(image_sizes), sum(text_sizes)
    images, texts = integers(n, 0), integers(p, 1)
    image_ids, text_ids = (torch.randint(0, 9, (size, 2), generator=generator) for size in (n, p))
    own_images, own_texts = part(image_sizes, rank), part(text_sizes, rank)
    # Rows of one data set: few images, the last rank's rows all seen before.
    rows = [6, 5, 4][:world_size]
    ids = torch.stack([torch.randint(0, 4, (15,), generator=generator), torch.arange(15) % 11], 1)
    ids[11:] = ids[:4]
    row_images, row_texts = integers(4, 4)[ids[:, 0]], integers(11, 5)[ids[:, 1]]
    ids, own_rows = ids[: sum(rows)], part(rows, rank)
    for _ in forced_paths():
        for block_size in (None, 4):
            options = dict(block_size=block_size, ks=(1, 2, 5))
            assert retrieval_metrics(
                images[own_images], texts[own_texts], image_ids=image_ids[own_images], text_ids=text_ids[own_texts],
                group=None, **options,
            ) == retrieval_metrics(images, texts, image_ids=image_ids, text_ids=text_ids, **options)  # fmt: skip
            assert retrieval_metrics(images[own_images], integers(n, 2)[own_images], group=None, **options) == (
                retrieval_metrics(images, integers(n, 2), **options)
            )
            found = dataset_retrieval_metrics(
                row_images[own_rows], row_texts[own_rows], ids[own_rows], group=None, **options
            )
            everything = slice(0, len(ids))
            assert found == dataset_retrieval_metrics(row_images[everything], row_texts[everything], ids, **options)
        labels, classes = torch.randint(0, 6, (n,), generator=torch.Generator().manual_seed(8)), torch.eye(6, 5) - 0.1
        found = zero_shot_metrics(images[own_images], labels[own_images], classes, group=None)
        assert found == zero_shot_metrics(images, labels, classes)
        spoilt = images[own_images].clone()
        if rank == 1:
            spoilt[0, 0] = torch.nan
        with pytest.raises(ValueError, match="image_embeds: 1 of 1 embeddings on rank 1 are NaN or infinite"):
            retrieval_metrics(spoilt, integers(n, 2)[own_images], group=None)
        with pytest.raises(ValueError, match=r"ks: rank 0 has \[1\], rank 1 has \[2\]"):
            retrieval_metrics(images[own_images], integers(n, 2)[own_images], ks=[rank + 1], group=None)


@pytest.mark.parametrize("world_size", [2, 3])
def test_metrics_equal_one_processs(world_size):
    run_processes(_metrics, world_size)
