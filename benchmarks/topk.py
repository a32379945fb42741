"""Streaming top-k and the hard-negative loss: time, memory and skip ratio, beside a product and its alternatives.

    python benchmarks/topk.py                                    # N = 65,536, D = 512, bf16
    python benchmarks/topk.py --sizes 4096 --device cpu          # the same figures on a CPU
    python benchmarks/topk.py --mine 1000000                     # besides: the search of a data set of that many pairs

Everything is counted in products: one is 2 N^2 D operations at the rate of the vendor's library on the same shape in
the same run. Memory is the peak beyond inputs and results (and gradients). Times are medians.

Beyond k = 16, on a GPU, each k is timed with and without the bound from a sample of the columns.

Skip ratios are measured against theory: for T blocks in random order, the mean over t of (1 - 1/t)^k, and 1 - k/T with
the k-th largest of each row's block maxima as a bound, which a first sweep would have to find. With the entry of rank r
in a sample of m columns as a bound it is (m / (m + b))^r for blocks of b: the mean of (1 - p)^b over the share p that
passes.
"""

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from loss import DTYPES, MIB, median_ms, pairs, roof_tflops
from torch import Tensor

from hf_infcl import contrastive_loss, hard_negative_loss, hardest_negatives

SCALE = 50.0
BUDGET_MS = 500.0
_CHUNK = 8192  # rows of the chunked baseline: 2 GiB of float32 scores at N = 65,536
_TILE = 128  # columns of the kernels' tiles


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


def without_samples(step: Callable[[], object]) -> Callable[[], object]:
    """A step in which no search starts from the bound that a sample gives."""

    def run() -> object:
        with patch("hf_infcl.ops.triton.topk.sampling", lambda *_: None):
            return step()

    return run


def ways(device: str, k: int | None, step: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """A step as it is, and where samples matter, without them."""
    if device != "cuda" or k is None or k <= 16:
        return {"": step}
    return {"sampled": step, "unsampled": without_samples(step)}


def one_sweep_theory(blocks: int, k: int) -> float:
    t = torch.arange(1, blocks + 1, dtype=torch.float64)
    return float(((1 - 1 / t) ** k).mean())


def sampled_theory(n: int, block: int, k: int) -> float | None:
    """Of rows that pass over what is below the bound that a sample gives; None where there is no sample."""
    from hf_infcl.ops.triton.topk import sampling

    sampled = sampling(k, n)
    if sampled is None:
        return None
    step, rank = sampled
    return (n / (n + step * block)) ** rank


def search(x: Tensor, y: Tensor, k: int, product: float) -> list[dict[str, Any]]:
    device, n = x.device.type, len(x)
    theory = one_sweep_theory(-(-n // _TILE), k) if device == "cuda" else None
    of_sample = sampled_theory(n, _TILE, k) if device == "cuda" else None
    step = lambda: hardest_negatives(x, y, k)  # noqa: E731
    chunked = {
        f"{name}_ms": median_ms(lambda wide=wide: chunked_topk(x, y, k, wide), device, BUDGET_MS)  # type: ignore[misc]
        for name, wide in (("chunked_float32", True), ("chunked_input_dtype", False))
    }
    rows = []
    for way, run in ways(device, k, step).items():
        ms = median_ms(run, device, BUDGET_MS)
        result: Any = run()
        rows.append(
            {
                "k": k,
                "way": way,
                "ms": ms,
                "share_of_product_rate": product / ms,
                "times_faster_than_chunked_float32": chunked["chunked_float32_ms"] / ms,
                "row_skip_ratio": float(result[2]["row_skip_ratio"]),
                "row_skip_ratio_theory": of_sample if way == "sampled" else theory,
                "extra_mib": peak_mib(run, n * k * 12),
                **chunked,
            }
        )
    return rows


def loss(x: Tensor, y: Tensor, k: int | None, product: float) -> list[dict[str, Any]]:
    device = x.device.type
    scale = torch.tensor([SCALE], device=x.device, requires_grad=True)

    def step() -> None:
        x.grad = y.grad = scale.grad = None
        value = contrastive_loss(x, y, scale) if k is None else hard_negative_loss(x, y, scale, k=k)
        value.backward()

    rows = []
    for way, run in ways(device, k, step).items():
        ms = median_ms(run, device, BUDGET_MS)
        x.grad = y.grad = None
        kept = 2 * x.numel() * x.element_size() + (0 if k is None else 2 * len(x) * k * 12)
        name = "contrastive_loss" if k is None else "hard_negative_loss"
        row = {"loss": name, "k": k, "way": way, "ms": ms, "products": ms / product}
        rows.append(row | {"extra_mib": peak_mib(run, kept)})
    return rows


def skip_ratios(device: str, n: int, block: int, k: int) -> dict[str, float]:
    """Measured on 512 random queries, and theory, for one sweep and with thresholds from block maxima."""
    queries, keys = (torch.randn(size, 64, device=device) for size in (512, n))
    ratio = float(hardest_negatives(queries, keys, k, block_size=block, backend="torch")[2]["row_skip_ratio"])
    blocks = n // block
    highest = (queries @ keys[: blocks * block].T).reshape(len(queries), blocks, block).amax(2)
    threshold = highest.topk(min(k, blocks), dim=1).values[:, -1:]
    return {
        "n": n,
        "block": block,
        "k": k,
        "one sweep": ratio,
        "one sweep, theory": one_sweep_theory(blocks, k),
        "block maxima": float((highest < threshold).double().mean()),
        "block maxima, theory": max(1 - k / blocks, 0.0),
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


def search_line(row: dict[str, Any]) -> str:
    theory = "" if row["row_skip_ratio_theory"] is None else f" (theory {row['row_skip_ratio_theory']:.3f})"
    memory = "" if row["extra_mib"] is None else f", {row['extra_mib']:.0f} MiB"
    return (
        f"search k={row['k']:<5}{row['way']:>10} {row['ms']:8.2f} ms, {row['share_of_product_rate']:.2f} of the "
        f"product's rate, {row['times_faster_than_chunked_float32']:.2f} times chunked float32, skip ratio "
        f"{row['row_skip_ratio']:.3f}{theory}{memory}"
    )


def loss_line(row: dict[str, Any]) -> str:
    name = row["loss"] + ("" if row["k"] is None else f" k={row['k']}")
    memory = "" if row["extra_mib"] is None else f", {row['extra_mib']:.0f} MiB"
    return f"{name:26}{row['way']:>10} {row['ms']:8.2f} ms, {row['products']:.2f} products{memory}"


def skip_line(row: dict[str, Any]) -> str:
    ways = ", ".join(
        f"{way} {row[way]:.3f} (theory {row[f'{way}, theory']:.3f})" for way in ("one sweep", "block maxima")
    )
    return f"skip ratio n={row['n']} block={row['block']} k={row['k']}: {ways}"


def mining_line(row: dict[str, Any]) -> str:
    memory = "" if row["extra_mib"] is None else f", {row['extra_mib']:,.0f} MiB"
    return f"mining {row['pairs']:,} pairs, both directions: {row['seconds']:.1f} s{memory}"


def printed(line: Callable[[dict[str, Any]], str], row: dict[str, Any]) -> dict[str, Any]:
    """The row, after its line is printed: a run that is cut short has shown what it measured."""
    print(line(row), flush=True)
    return row


def plot(size: dict[str, Any], path: Path) -> None:
    """Time of the search over k, and of the losses in products."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, kinds in (("with a sample beyond k = 16", ("", "sampled")), ("without", ("", "unsampled"))):
        rows = [row for row in size["search"] if row["way"] in kinds]
        left.plot([row["k"] for row in rows], [row["ms"] for row in rows], marker="o", label=name)
        losses = [row for row in size["loss"] if row["way"] in kinds and row["k"] is not None]
        right.plot([row["k"] for row in losses], [row["products"] for row in losses], marker="o", label=name)
    for key, name in (
        ("chunked_float32_ms", "chunked, float32 scores"),
        ("chunked_input_dtype_ms", "chunked, input dtype"),
    ):
        rows = [row for row in size["search"] if row["way"] != "unsampled"]
        left.plot([row["k"] for row in rows], [row[key] for row in rows], marker="x", linestyle="--", label=name)
    left.axhline(size["product_ms"], color="grey", linestyle=":", label="one product")
    right.axhline(size["loss"][0]["products"], color="grey", linestyle=":", label="contrastive_loss")
    left.set(xscale="log", yscale="log", xlabel="k", ylabel="ms", title=f"search, one direction, N = {size['n']:,}")
    right.set(xscale="log", xlabel="k", ylabel="products of 2 N^2 D", title="loss, forward and backward")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[65_536], help="none: the skip ratios only")
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ks", type=int, nargs="+", default=[8, 32, 64, 256, 1024])
    parser.add_argument("--loss-ks", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--mine", type=int, default=0, help="pairs of the data set searched; 0: none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "dtype": args.dtype, "depth": args.depth}
    results["roof_tflops"] = roof_tflops(args.device, DTYPES[args.dtype])
    print(f"{name}, {args.dtype}, D = {args.depth}, roof {results['roof_tflops']:.0f} TFLOP/s", flush=True)
    results["sizes"] = []
    for n in args.sizes:
        x, y = pairs(n, args.depth, DTYPES[args.dtype], args.device)
        product = product_ms(x.detach(), y.detach())
        row = {"n": n, "product_ms": product, "product_tflops": 2 * n * n * args.depth / product / 1e9}
        print(f"N = {n:,}: a product {product:.2f} ms, {row['product_tflops']:.0f} TFLOP/s", flush=True)
        row["search"] = [
            printed(search_line, one) for k in args.ks if k < n for one in search(x.detach(), y.detach(), k, product)
        ]
        ks = (None, *(k for k in args.loss_ks if k < n))
        row["loss"] = [printed(loss_line, one) for k in ks for one in loss(x, y, k, product)]
        results["sizes"].append(row)
    results["skip_ratios"] = [
        printed(skip_line, skip_ratios(args.device, n, block, k))
        for n, block, k in ((65_536, 128, 32), (65_536, 128, 8), (65_536, 1024, 32), (16_384, 64, 16))
    ]
    if args.mine:
        results["mining"] = printed(mining_line, mining(args.device, args.mine, args.depth, DTYPES[args.dtype], 8))
    path = args.out / f"topk_{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if results["sizes"]:
        plot(results["sizes"][-1], path.with_suffix(".png"))
    print("written:", path)


if __name__ == "__main__":
    main()
