"""The map of where ids may agree, against a comparison of all pairs."""

import pytest
import torch

from hf_infcl.ops import Side
from hf_infcl.ops.dispatch import triton_installed
from hf_infcl.ops.sides import same

pytestmark = pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CELL = 64


def sides(n, m, distinct, offsets=(0, 0), columns=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(-(2**62), 2**62, (distinct,), generator=g)
    drawn = labels[torch.randint(0, distinct, (n + m, columns), generator=g)].to(DEVICE)
    embeds = torch.zeros(n + m, 1, device=DEVICE)
    return Side(embeds[:n], offsets[0], drawn[:n]), Side(embeds[n:], offsets[1], drawn[n:])


def expected_cells(rows, cols):
    """(row cells, column cells) bool: a pair in the cell agrees, and is not one of the diagonal's own."""
    alike = same(rows, cols)
    own = rows.offset + torch.arange(len(rows), device=DEVICE)
    alike &= own[:, None] != cols.offset + torch.arange(len(cols), device=DEVICE)
    height, width = -(-len(rows) // CELL), -(-len(cols) // CELL)
    padded = torch.zeros(height * CELL, width * CELL, dtype=torch.bool, device=DEVICE)
    padded[: len(rows), : len(cols)] = alike
    return padded.view(height, CELL, width, CELL).any(3).any(1)


@pytest.mark.parametrize(("n", "m", "offsets"), [(1, 1, (0, 0)), (130, 300, (0, 0)), (200, 65, (40, 0))])
def test_marks_the_cells_that_hold_copies_and_no_others(n, m, offsets):
    from hf_infcl.ops.triton.related import mark

    rows, cols = sides(n, m, 2000, offsets)
    expected = expected_cells(rows, cols)
    found = mark(rows, cols)
    assert torch.equal(found[:, : expected.shape[1]].bool(), expected)
    assert not found[:, expected.shape[1] :].any()


def test_a_cell_with_one_copy_says_where_it_is():
    from hf_infcl.ops.triton.kernels_common import SEVERAL
    from hf_infcl.ops.triton.related import mark

    rows, cols = sides(500, 700, 20_000, (40, 0))
    alike = same(rows, cols)
    alike &= (40 + torch.arange(500, device=DEVICE))[:, None] != torch.arange(700, device=DEVICE)
    expected = torch.zeros_like(mark(rows, cols))
    for i, j in alike.nonzero().tolist():
        cell = i // CELL, j // CELL
        expected[cell] = SEVERAL.value if expected[cell] else 1 + i % CELL * CELL + j % CELL
    assert (expected == SEVERAL.value).any()
    assert ((expected > 0) & (expected < SEVERAL.value)).sum() > 10
    assert torch.equal(mark(rows, cols), expected)


def test_ids_that_differ_in_their_high_halves_only_are_no_copies():
    from hf_infcl.ops.triton.related import mark

    ids = torch.arange(200, device=DEVICE)[:, None]
    embeds = torch.zeros(100, 1, device=DEVICE)
    rows, cols = Side(embeds, 1000, ids[:100]), Side(embeds, 0, ids[:100] + 2**32)
    assert not mark(rows, cols).any()
    assert mark(rows, Side(embeds, 0, ids[:100])).any()


def test_own_pairs_are_no_copies():
    from hf_infcl.ops.triton.related import mark

    rows, _ = sides(200, 1, 10**6)
    assert not mark(rows, rows).any()


@pytest.mark.parametrize("distinct", [1, 3, 40])
def test_long_runs_miss_nothing(distinct):
    """Few ids: marking whole rows and columns of cells is allowed, missing one is not."""
    from hf_infcl.ops.triton.related import mark

    rows, cols = sides(150, 190, distinct, columns=1)
    expected = expected_cells(rows, cols)
    assert (mark(rows, cols)[:, : expected.shape[1]].bool() | ~expected).all()


def test_a_copy_at_the_end_of_a_long_run_is_found():
    from hf_infcl.ops.triton.related import mark

    ids = torch.arange(400, device=DEVICE)[:, None].repeat(1, 1)
    ids[torch.arange(0, 400, 10, device=DEVICE)] = -7
    embeds = torch.zeros(200, 1, device=DEVICE)
    rows, cols = Side(embeds, 0, ids[:200]), Side(embeds, 0, ids[200:])
    expected = expected_cells(rows, cols)
    assert expected.any()
    assert (mark(rows, cols)[:, : expected.shape[1]].bool() | ~expected).all()


def test_chunks_see_their_part_of_the_map(monkeypatch):
    from hf_infcl.ops.triton import related

    rows, cols = sides(500, 300, 5000)
    whole = related.Related(rows, cols)
    monkeypatch.setattr(related, "_LARGEST_MAP", 1)
    for known, step in ((whole, 128), (whole, 100), (related.Related(rows, cols), 64)):
        for r in range(0, 500, step):
            for c in range(0, 300, step):
                part = slice(r, min(r + step, 500)), slice(c, min(c + step, 300))
                expected = expected_cells(rows[part[0]], cols[part[1]])
                found = known.chunk(*part)[: expected.shape[0], : expected.shape[1]].bool()
                assert (found | ~expected).all()
                if step == 128:
                    assert torch.equal(found, expected)
