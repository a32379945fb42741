"""Times tile shapes of the loss's two kernels on this chip, for the table in hf_infcl/ops/triton/configs.py.

    python benchmarks/tune.py                                  # bfloat16, D = 512
    python benchmarks/tune.py --dtype fp32 --precision tf32 --depth 768

Nothing is tuned while training: put what wins into the table. A shape that needs more shared memory or registers than
the chip has is listed with the reason. Where the chip and the depth let two groups of warps take turns, whose shape is
fixed, they are timed last.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import loss as bench
import torch
import triton

from hf_infcl.ops import Engine, Rule, Side, Statistics
from hf_infcl.ops.triton import pingpong
from hf_infcl.ops.triton.configs import TileConfig
from hf_infcl.ops.triton.launch import Tiles
from hf_infcl.ops.triton.softmax import exact, softmax_weights, statistics

# Rows, columns and depth of a tile, warps. Stages are tried besides.
HALF = (
    (128, 128, 64, 4), (128, 128, 64, 8), (128, 128, 32, 4), (128, 64, 64, 4), (64, 128, 64, 4), (64, 64, 64, 4),
    (128, 256, 64, 8), (256, 128, 64, 8),
)  # fmt: skip
SINGLE = ((128, 128, 32, 8), (128, 128, 32, 4), (64, 128, 32, 4), (64, 128, 32, 8), (64, 64, 32, 4), (128, 64, 32, 4))


def measured(step: Callable[[], object], config: TileConfig, operations: int) -> dict[str, Any]:
    row: dict[str, Any] = dataclasses.asdict(config)
    plainly = patch("hf_infcl.ops.triton.pingpong.suits", lambda *_: False)
    with patch("hf_infcl.ops.triton.launch.config", lambda *_: config), plainly:
        try:
            row["ms"] = bench.median_ms(step, "cuda", 60)
        except (triton.runtime.errors.OutOfResources, triton.CompilationError) as reason:
            return row | {"unavailable": str(reason)[:160]}
    return row | {"tflops": operations / row["ms"] / 1e9}


def line(name: str, row: dict[str, Any]) -> str:
    shape = "x".join(str(row[f"block_{axis}"]) for axis in "mnk")
    rate = f"{row['ms']:7.3f} ms {row['tflops']:5.0f} TFLOP/s" if "ms" in row else row["unavailable"][:60]
    return f"{name:10} {shape:11} {row['warps']} warps {row['stages']} stages {row['group']:2} rows {rate}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=bench.DTYPES, default="bf16")
    parser.add_argument("--precision", choices=("ieee", "tf32", "tf32x3"), default="ieee", help="of float32 products")
    parser.add_argument("--depth", type=int, default=512)
    # At 8,192 the statistics take 0.14 ms, less than the host needs to launch them: all shapes looked alike.
    parser.add_argument("--size", type=int, default=32_768, help="rows and columns of the chunk")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--groups", type=int, nargs="+", default=[8], help="rows of tiles walked together")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune needs a CUDA device")
    n, d, dtype, precision = arguments.size, arguments.depth, bench.DTYPES[arguments.dtype], arguments.precision
    x, y = (side.detach() for side in bench.pairs(n, d, dtype, "cuda"))
    rows, cols, rule = Side(x), Side(y), Rule()
    scale = torch.tensor(bench.SCALE, device="cuda")
    engine = Engine.of(x, "triton", precision, None)
    of_rows, of_cols = (Statistics.empty(n, rule, device=x.device, dtype=torch.float32) for _ in range(2))
    statistics(rows, cols, scale, rule, of_rows, of_cols, engine.precision)

    def forward() -> None:
        statistics(rows, cols, scale, rule, of_rows, of_cols, engine.precision)

    def weights() -> None:
        softmax_weights(rows, cols, scale, rule, of_rows, of_cols, engine.precision, False)

    results: dict[str, Any] = {"environment": bench.environment(), "roof": bench.roof_tflops("cuda", dtype)}
    results |= {"dtype": arguments.dtype, "precision": precision, "size": n, "depth": d}
    print(f"roof {results['roof']:.0f} TFLOP/s")
    rooms = pingpong.STATISTICS, pingpong.WEIGHTS
    for name, step, room in zip(("statistics", "weights"), (forward, weights), rooms, strict=True):
        found = []
        shapes = SINGLE if dtype == torch.float32 else HALF
        for shape, stages, group in itertools.product(shapes, arguments.stages, arguments.groups):
            found.append(measured(step, TileConfig(*shape, stages, group), 2 * n * n * d))
            print(line(name, found[-1]), flush=True)
        if pingpong.suits(Tiles.of("statistics", rows, cols, rule, engine.precision), exact(precision, dtype), room):
            ms = bench.median_ms(step, "cuda", 60)
            results[f"{name}, two groups in turn"] = {"ms": ms, "tflops": 2 * n * n * d / ms / 1e9}
            print(f"{name:10} two groups in turn {ms:7.3f} ms {2 * n * n * d / ms / 1e9:5.0f} TFLOP/s", flush=True)
        results[name] = sorted(found, key=lambda row: row.get("ms", float("inf")))
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = f"tune_{arguments.dtype}_{precision}_{d}_" + results["environment"]["device"].lower().replace(" ", "_")
    (arguments.out / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
