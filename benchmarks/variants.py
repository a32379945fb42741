"""What was tried beside what is kept: variants of the loss, each timed in turn with the loss as it is.

    python benchmarks/variants.py                        # every group, on a CUDA device
    python benchmarks/variants.py --groups chunks tiles

A variant changes constants or functions of the package for the time of its steps. Rounds as in loss.py; "error" is the
larger relative difference of the two gradients from those of the loss as it is, so that a variant that computes
something else is seen. Nothing here is used by the package: docs/concepts/kernels.md says what came of each.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import loss as bench
import peers
import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_infcl.ops.triton import kernels_statistics, products
from hf_infcl.ops.triton.configs import TileConfig
from hf_infcl.ops.triton.launch import cdiv, launch

PACKAGE = "hf_infcl.ops.triton."
Patches = dict[str, Any]  # a name under PACKAGE -> what stands there instead
AS_IT_IS: Patches = {}

_tile_statistics = kernels_statistics._tile_statistics
_merge = kernels_statistics._merge
PARTS = kernels_statistics.PARTS
_MERGE_ROWS, _MERGE_STEP = 32, 16
_counters: dict[torch.device, Tensor] = {}


@triton.jit
def forward_kernel(
    x, y, x_stride, y_stride, n, depth, scale, row_stats, col_stats, row_parts, col_parts, counters, loss_parts, loss,
    share, n_programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The loss of a small batch in one cooperative launch: tiles, all programs wait for each other, then the merge.

    counters: two int32, zero between launches. All n_programs programs have to be on the chip at once.
    """
    program = tl.program_id(0)
    tiles_m, tiles_n, blocks = tl.cdiv(n, BLOCK_M), tl.cdiv(n, BLOCK_N), tl.cdiv(n, BLOCK)
    s = tl.load(scale).to(tl.float32)
    for tile in range(program, tiles_m * tiles_n, n_programs):
        _tile_statistics(
            tile, x, y, x_stride, y_stride, n, n, depth, 0, None, None, None, 0, s * kernels_statistics.LOG2_E,
            row_stats, col_stats, n, n, row_parts, col_parts, None, None, 0, 0, 0,
            True, True, False, False, True, False, True, False, 0, False, False, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
            "ieee", False,
        )  # fmt: skip
    tl.debug_barrier()
    tl.atomic_add(counters, 1)
    while tl.atomic_cas(counters, n_programs, n_programs) != n_programs:
        pass
    for block in range(program, 2 * blocks, n_programs):
        if block < blocks:
            mine = _merge(row_parts, row_stats, n, n, tiles_n, block, s, 0.0, False, False, True, True, BLOCK, STEP)
        else:
            mine = _merge(
                col_parts, col_stats, n, n, tiles_m, block - blocks, s, 0.0, False, False, True, True, BLOCK, STEP
            )
        tl.store(loss_parts + block, mine * share)
    tl.debug_barrier()
    if tl.atomic_add(counters + 1, 1) == n_programs - 1:
        total = tl.zeros((PARTS,), tl.float32)
        for start in range(0, 2 * blocks, PARTS):
            at = start + tl.arange(0, PARTS)
            total += tl.load(loss_parts + at, mask=at < 2 * blocks, other=0.0, cache_modifier=".cg")
        tl.store(loss, tl.sum(total, 0))
        tl.store(counters, 0)
        tl.store(counters + 1, 0)


def loss_in_one_launch(self: Any, for_rows: bool, for_cols: bool, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`whole.Batch.loss` by `forward_kernel`, for the default options alone."""
    n, device, c, tiles = self.n, self.x.device, self.config, self.tiles
    if not (for_rows and for_cols) or tiles.has_ids or self.rule.label_smoothing:
        raise ValueError("loss_in_one_launch computes the loss with its default options only")
    if device not in _counters:
        _counters[device] = torch.zeros(2, device=device, dtype=torch.int32)
    rows, cols = torch.empty(4, n, device=device), torch.empty(4, n, device=device)
    row_parts = torch.empty(2 * tiles.tiles_n * n, device=device)
    col_parts = torch.empty(2 * tiles.tiles_m * n, device=device)
    blocks = cdiv(n, _MERGE_ROWS)
    losses, loss = torch.empty(2 * blocks, device=device), torch.empty((), device=device)
    # Under the interpreter programs run one after another: nobody could wait for the next.
    programs = min(tiles.tiles_m * tiles.tiles_n, 2 * tiles.processors) if device.type == "cuda" else 1
    values = (
        self.x, self.y, self.x.stride(0), self.y.stride(0), n, self.depth, self.scale, rows, cols, row_parts,
        col_parts, _counters[device], losses, loss, 0.5 / n, programs,
    )  # fmt: skip
    constants = (c.block_m, c.block_n, c.block_k, c.group, _MERGE_ROWS, _MERGE_STEP)
    launch(forward_kernel, device, programs, values, constants, c.warps, c.stages, kind=("one launch", self.kind, n))
    return loss, rows, cols


def chunks(rows: int, cols: int) -> Patches:
    return {"products._WEIGHTS_CHUNK": (rows, cols)}


def forward_chunks(size: int) -> Patches:
    return {"products._STATISTICS_CHUNK": (size, size)}


def added_afterwards(a: Tensor, b: Tensor, precision: str, out: Tensor | None = None, add: bool = True) -> Tensor:
    """`products.matmul`, whose products here do not add to what is there: a pass over it does."""
    made = products.matmul(a, b, precision)
    return made if out is None else out.add_(made) if add else out.copy_(made)


def wide_tiles(kernel: str, *_: Any) -> TileConfig:
    return TileConfig(256, 128, 64, 8, 3 if kernel == "statistics" else 4)


# group -> (pairs, depth) of its cases, and its variants
GROUPS: dict[str, tuple[tuple[tuple[int, int], ...], dict[str, Patches]]] = {
    "chunks": (
        ((65_536, 512), (131_072, 512)),
        {
            "backward 4,096 x 4,096": chunks(4096, 4096),
            "backward 8,192 x 16,384": chunks(8192, 16_384),
            "backward 16,384 x 8,192": chunks(16_384, 8192),
            "backward 16,384 x 16,384": chunks(16_384, 16_384),
            "forward 8,192 x 8,192": forward_chunks(8192),
            "forward 32,768 x 32,768": forward_chunks(32_768),
        },
    ),
    "products": (
        ((65_536, 512), (65_536, 1024)),
        {"dX and dY added to in passes of their own": {"matmul": added_afterwards}},
    ),
    "fused": (((8192, 512),), {"the library's products, one each": {"whole._LARGEST_FUSED": 2048}}),
    "kept": (
        ((16_384, 1024),),
        {
            "no exponentials kept": {"whole._SHALLOW": 2**30},
            "all exponentials kept": {"whole._KEPT_BAND": 2**28},
        },
    ),
    "tiles": (((65_536, 768), (65_536, 1024)), {"256 x 128, 8 warps": {"launch.config": wide_tiles}}),
    "launches": (
        ((512, 512), (1024, 512), (2048, 512)),
        {"the loss in one cooperative launch": {"whole.Batch.loss": loss_in_one_launch}},
    ),
    "graph": (((8192, 512), (65_536, 512)), {}),
}
# Whose steps are also replayed from a CUDA graph, which leaves the GPU's time.
REPLAYED = {"launches", "graph"}


def step_of(n: int, d: int, device: str) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    x, y = bench.pairs(n, d, torch.bfloat16, device)
    scale = torch.tensor(bench.SCALE, device=device, requires_grad=True)
    ours = peers.ours() if device == "cuda" else peers.ours(backend="triton")

    def step() -> None:
        x.grad = y.grad = scale.grad = None
        ours(x, y, scale).backward()

    return step, (x, y, scale)


@contextlib.contextmanager
def patched(patches: Patches) -> Iterator[None]:
    """Other things stand under the package's names."""
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(patch(PACKAGE + name, value))
        yield


def differences(leaves: tuple[Tensor, ...], step: Callable[[], None], patches: Patches) -> float:
    """The larger relative difference of the embeddings' gradients."""
    step()
    before = [leaf.grad.double() for leaf in leaves[:2] if leaf.grad is not None]
    with patched(patches):
        step()
    after = [leaf.grad.double() for leaf in leaves[:2] if leaf.grad is not None]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(after, before, strict=True))


def measured(name: str, n: int, d: int) -> list[dict[str, Any]]:
    """A group's rows at one size, timed in turn."""
    step, leaves = step_of(n, d, "cuda")
    rows: list[dict[str, Any]] = []
    timed: list[tuple[Patches, Callable[[], object]]] = []
    for variant, patches in {"as it is": AS_IT_IS, **GROUPS[name][1]}.items():
        row: dict[str, Any] = {"group": name, "variant": variant, "size": n, "depth": d}
        rows.append(row | ({"error": differences(leaves, step, patches)} if patches else {}))
        timed.append((patches, step))
        if name in REPLAYED:
            with patched(patches):
                timed.append((patches, bench.replayed(step)))
            rows.append(row | {"variant": variant + ", from a CUDA graph"})
    small = n <= bench.SMALL
    rounds, budget = (bench.SMALL_ROUNDS, bench.SMALL_ROUND_MS) if small else (bench.ROUNDS, bench.ROUND_MS)
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for of_one, (patches, one) in zip(times, timed, strict=True):
            with patched(patches):
                of_one.append(bench.median_ms(one, "cuda", budget))
    for row, of_one in zip(rows, times, strict=True):
        row |= {"ms": statistics.median(of_one), "rounds_ms": of_one}
        error = f"  error {row['error']:.1e}" if "error" in row else ""
        print(f"{name:9} N={n:<7} D={d:<5} {row['variant']:52} {row['ms']:9.3f} ms{error}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("variants needs a CUDA device")
    found = bench.environment()
    path = arguments.out / ("variants_" + found["device"].lower().replace(" ", "_") + ".json")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in before["rows"] if row["group"] not in arguments.groups]
    for name in arguments.groups:
        for n, d in GROUPS[name][0]:
            rows += measured(name, n, d)
            path.write_text(json.dumps({"environment": found, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print("written:", path)


if __name__ == "__main__":
    main()
