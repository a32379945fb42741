"""Streaming top-k and the hard-negative loss: time, memory and skip ratio, beside a product and its alternatives.

    python benchmarks/topk.py                                    # N = 65,536, D = 512, bf16
    python benchmarks/topk.py --sizes 4096 --device cpu          # the same figures on a CPU
    python benchmarks/topk.py --mine 1000000                     # besides: the search of a data set of that many pairs

Everything is counted in products: one is 2 N^2 D operations at the rate of the vendor's library on the same shape in
the same run. Memory is the peak beyond inputs and results (and gradients). Times are medians.

Skip ratios are measured against theory: for T blocks in random order, the mean over t of (1 - 1/t)^k, and 1 - k/T with
thresholds from a first sweep that keeps every block's maximum.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from loss import DTYPES, MIB, median_ms, pairs
from torch import Tensor

from hf_infcl import contrastive_loss, hard_negative_loss, hardest_negatives

SCALE = 50.0
BUDGET_MS = 1500.0
_CHUNK = 8192  # rows of the chunked baseline: 2 GiB of float32 scores at N = 65,536


def chunked_topk(queries: Tensor, keys: Tensor, k: int, wide: bool) -> tuple[Tensor, Tensor]:
    """The baseline: the vendor's product in chunks of rows, then torch.topk.

    Args:
        wide: whether scores are float32; else they have the inputs' dtype, and tie.
    """
    scores, indices = [], []
    for chunk in queries.split(_CHUNK):
        if wide and chunk.dtype != torch.float32:
            tile = torch.mm(chunk, keys.T, out_dtype=torch.float32) if chunk.is_cuda else chunk.float() @ keys.float().T
        else:
            tile = chunk @ keys.T
        best = tile.topk(k, dim=1)
        scores.append(best.values)
        indices.append(best.indices)
    return torch.cat(scores), torch.cat(indices)


def product_ms(x: Tensor, y: Tensor) -> float:
    """One product of all rows, in chunks that are written and dropped."""
    return median_ms(lambda: [chunk @ y.T for chunk in x.split(_CHUNK)], x.device.type, BUDGET_MS)


def peak_mib(step: Callable[[], object], kept: int) -> float | None:
    """Peak memory of a step beyond what was there before and what it keeps, in MiB; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - kept) / MIB


def search(x: Tensor, y: Tensor, k: int, product: float) -> dict[str, Any]:
    device, n = x.device.type, len(x)
    row: dict[str, Any] = {"k": k}
    ms = median_ms(lambda: hardest_negatives(x, y, k), device, BUDGET_MS)
    row |= {"ms": ms, "share_of_product_rate": product / ms}
    row["row_skip_ratio"] = float(hardest_negatives(x, y, k)[2]["row_skip_ratio"])
    row["extra_mib"] = peak_mib(lambda: hardest_negatives(x, y, k), n * k * 12)
    for name, wide in (("chunked float32", True), ("chunked input dtype", False)):
        row[f"{name} ms"] = median_ms(lambda wide=wide: chunked_topk(x, y, k, wide), device, BUDGET_MS)  # type: ignore[misc]
    row["times_faster_than_chunked_float32"] = row["chunked float32 ms"] / ms
    return row


def loss(x: Tensor, y: Tensor, k: int | None, product: float) -> dict[str, Any]:
    scale = torch.tensor([SCALE], device=x.device, requires_grad=True)

    def step() -> None:
        x.grad = y.grad = scale.grad = None
        value = contrastive_loss(x, y, scale) if k is None else hard_negative_loss(x, y, scale, k=k)
        value.backward()

    ms = median_ms(step, x.device.type, BUDGET_MS)
    x.grad = y.grad = None
    kept = 2 * x.numel() * x.element_size() + (0 if k is None else 2 * len(x) * k * 12)
    name = "contrastive_loss" if k is None else "hard_negative_loss"
    return {"loss": name, "k": k, "ms": ms, "products": ms / product, "extra_mib": peak_mib(step, kept)}


def skip_ratios(device: str, n: int, block: int, k: int) -> dict[str, float]:
    """Measured on 512 random queries, and theory, for one sweep and with thresholds from a first sweep."""
    queries, keys = (torch.randn(size, 64, device=device) for size in (512, n))
    ratio = float(hardest_negatives(queries, keys, k, block_size=block, backend="torch")[2]["row_skip_ratio"])
    blocks = n // block
    highest = (queries @ keys[: blocks * block].T).reshape(len(queries), blocks, block).amax(2)
    threshold = highest.topk(min(k, blocks), dim=1).values[:, -1:]
    t = torch.arange(1, blocks + 1, dtype=torch.float64)
    return {
        "n": n,
        "block": block,
        "k": k,
        "one sweep": ratio,
        "one sweep, theory": float(((1 - 1 / t) ** k).mean()),
        "two sweeps": float((highest < threshold).double().mean()),
        "two sweeps, theory": max(1 - k / blocks, 0.0),
    }


def mining(device: str, n: int, d: int, dtype: torch.dtype, k: int) -> dict[str, float | int | None]:
    """The whole search of a data set, both directions, each pair's own side left out."""
    from hf_infcl.evaluation import mine_hard_negatives

    x, y = (side.detach() for side in pairs(n, d, dtype, device))
    start = time.perf_counter()

    def step() -> None:
        for direction in ("image_to_text", "text_to_image"):
            mine_hard_negatives(x, y, direction=direction, num_negatives=k)

    extra = peak_mib(step, 0)
    return {"pairs": n, "num_negatives": k, "seconds": time.perf_counter() - start, "extra_mib": extra}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[65_536], help="none: the skip ratios only")
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ks", type=int, nargs="+", default=[8, 32, 64, 256])
    parser.add_argument("--loss-ks", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--mine", type=int, default=0, help="pairs of the data set searched; 0: none")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "topk.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "dtype": args.dtype, "depth": args.depth}
    results["sizes"] = []
    for n in args.sizes:
        x, y = pairs(n, args.depth, DTYPES[args.dtype], args.device)
        product = product_ms(x.detach(), y.detach())
        row = {"n": n, "product_ms": product, "product_tflops": 2 * n * n * args.depth / product / 1e9}
        row["search"] = [search(x.detach(), y.detach(), k, product) for k in args.ks if k < n]
        row["loss"] = [loss(x, y, k, product) for k in (None, *(k for k in args.loss_ks if k < n))]
        results["sizes"].append(row)
        print(json.dumps(row, indent=2), flush=True)
    results["skip_ratios"] = [
        skip_ratios(args.device, n, block, k)
        for n, block, k in ((65_536, 128, 32), (65_536, 128, 8), (65_536, 1024, 32), (16_384, 64, 16))
    ]
    if args.mine:
        results["mining"] = mining(args.device, args.mine, args.depth, DTYPES[args.dtype], 8)
    print(json.dumps({name: results[name] for name in ("skip_ratios", "mining") if name in results}, indent=2))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
