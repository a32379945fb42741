"""Registers, spills, shared memory and compile time of the main kernels, for chips that need not be there.

    python benchmarks/kernel_resources.py                 # Hopper
    python benchmarks/kernel_resources.py --capability 80 # A100
    python benchmarks/kernel_resources.py --only pingpong # kernels whose names hold the word

A tile that spills (stack > 0) or that leaves room for one program a multiprocessor shows here before any timing does.
Of kernels with specialised warps the registers are the average that they are started with.
"""

import argparse
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from hf_infcl.ops.triton import (
    kernels_gradient,
    kernels_kept,
    kernels_pingpong_statistics,
    kernels_pingpong_weights,
    kernels_sigmoid,
    kernels_statistics,
    kernels_topk,
    kernels_topk_buffer,
    kernels_topk_filter,
    kernels_weights,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FLOATS = {"smoothing", "gain", "share"}
POINTERS = {
    "scale": "fp32", "bias": "fp32", "grad": "fp32", "row_stats": "fp32", "col_stats": "fp32", "row_parts": "fp32",
    "col_parts": "fp32", "parts": "fp32", "sum_parts": "fp32", "loss_parts": "fp32", "doubts": "i32",
    "loss": "fp32", "counter": "fp32",
    "scores": "fp32", "indices": "i64", "keys": "i64", "skipped": "i32", "bounds": "fp32",
    "entries": "i64", "counts": "i32", "wanted": "i32", "left": "i32",
    "references": "fp32",
    "d_x": "fp32", "d_y": "fp32", "sums": "fp32", "out_scale": "fp32",
}  # fmt: skip


def compile_kernel(
    kernel: Any, tile: tuple[int, int, int, int, int], switches: dict[str, Any], capability: int, ids: int = 0,
    dtype: str = "bf16", precision: str = "ieee", copy_engine: bool | None = None, registers: int | None = None,
) -> str:  # fmt: skip
    """Compiles a kernel as its launcher would, and returns a line about it. registers: the most it may have."""
    m, n, k, warps, stages = tile
    names = kernel.arg_names
    engine = capability >= 90 if copy_engine is None else copy_engine
    given = {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP": 8,
        "PRECISION": precision,
        "USE_TMA": engine,
        "CELLS": ids > 0,
    }
    constants = {name: value for name, value in {**given, "ID_COLUMNS": ids}.items() if name in names}
    constants |= switches
    signature: dict[str, str] = {}
    for name in names:
        if name in constants or (name == "kept" and not switches["KEEP"]):
            signature[name] = "constexpr"
        elif name in ("x", "y", "g", "kept") and engine:
            rows, width = {"x": (m, k), "y": (n, k)}.get(name, (m, n // 4 if kernel.is_gluon() else n // 2))
            layout = f",{NVMMASharedLayout(2 * width, 16, 2)!r}" if kernel.is_gluon() else ""
            signature[name] = f"tensordesc<{dtype}[{rows},{width}]{layout}>"
        elif name in ("x", "y", "g", "kept", "out_x", "out_y"):
            signature[name] = f"*{dtype}"
        elif name in ("x_ids", "y_ids"):
            signature[name] = "*i64" if ids else "constexpr"
        elif name == "ceiling":
            signature[name] = "constexpr"
        elif name == "related":
            signature[name] = "*i16" if ids else "constexpr"
        elif name in POINTERS:
            signature[name] = "*" + POINTERS[name]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        if signature[name] == "constexpr":
            constants.setdefault(name, None)
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name][0] == "*" or (signature[name] == "i32" and name not in kernel.do_not_specialize)
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    start = time.perf_counter()
    options = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    seconds = time.perf_counter() - start
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    on = ",".join(name for name, value in switches.items() if value is True)
    head = f"{kernel.__name__:22} {dtype:4} {precision:6} {m}x{n}x{k}/{warps}w/{stages}s ids={ids} {on}"
    shared = made.metadata.shared
    return f"{head:100} registers {found[1]:>3} stack {found[2]:>4} shared {shared / 1024:5.0f} KiB  {seconds:5.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--only", default="", metavar="WORD", help="only kernels whose names hold this word")
    arguments = parser.parse_args()
    capability = arguments.capability
    both = {"ROWS": True, "COLS": True, "MASK": False, "MANY_POSITIVES": False, "SMOOTH": False, "EXACT": False}
    forward = {**both, "REPAIR": False, "FRESH": False, "KEEP": False}
    backward = {**both, "WANT_SUM": False, "DEFER": False, "REPAIR": False}
    merge = {"ROWS": True, "COLS": True, "MANY_POSITIVES": False, "SMOOTH": False, "FRESH": True, "LOSS": True}
    gradient = {"FOR_X": True, "FOR_Y": True, "WANT_SUM": True, "SPLIT": False, "RUN": 2**30}
    finish = {"FOR_X": True, "FOR_Y": True, "WANT_SCALE": True, "DUE": True, "BLOCK": 2048, "STEP": 256}
    big = (128, 128, 64, 4, 3) if capability >= 90 else (128, 128, 32, 4, 4)
    small = (64, 64, 64, 4, 3)
    strip = (64, 128, 64, 4, 3) if capability >= 90 else (64, 128, 32, 4, 4)
    buffers = (*strip[:3], 8, strip[4])
    search = {"EXCLUDE_PAIRS": True, "CEILING": False}
    inserted = {**search, "LOAD": True, "SOME": False, "wanted": None}
    beyond = {**search, "SOME": False, "wanted": None, "WIDTH": 32}
    few = {} if capability < 90 else {"registers": 168}
    fewer = {} if capability < 90 else {"registers": 128}
    wide = (*big[:3], 8, big[4])  # what the launcher takes for repairs
    statistics, weights = kernels_statistics.statistics_kernel, kernels_weights.weights_kernel
    jobs: list[tuple[Any, ...]] = [
        (statistics, big, forward, {}),
        (statistics, big, {**forward, "KEEP": True, "FRESH": True}, {}),
        (statistics, big, {**forward, "MASK": True}, {"ids": 2}),
        (statistics, wide, {**forward, "MASK": True, "EXACT": True, "REPAIR": True}, {"ids": 2}),
        (statistics, big, {**forward, "MANY_POSITIVES": True}, {"ids": 2}),
        (statistics, wide, {**forward, "MANY_POSITIVES": True, "EXACT": True, "REPAIR": True}, {"ids": 2}),
        (statistics, big, {**forward, "EXACT": True, "FRESH": True}, {}),
        (weights, big, backward, {}),
        (weights, big, {**backward, "MASK": True, "DEFER": True}, {"ids": 2}),
        (weights, wide, {**backward, "MASK": True, "REPAIR": True}, {"ids": 2}),
        (weights, big, {**backward, "MANY_POSITIVES": True, "DEFER": True}, {"ids": 2}),
        (weights, wide, {**backward, "MANY_POSITIVES": True, "REPAIR": True}, {"ids": 2}),
        (weights, big, {**backward, "SMOOTH": True}, {}),
        (statistics, wide, {**forward, "EXACT": True, "REPAIR": True, "FRESH": True}, {"copy_engine": False}),
        (weights, wide, {**backward, "REPAIR": True}, {"copy_engine": False}),
        (kernels_sigmoid.sigmoid_loss_kernel, big, {"MASK": False}, {}),
        (kernels_sigmoid.sigmoid_weights_kernel, big, {"MASK": False, "WANT_SUM": False}, {}),
        (statistics, (128, 128, 32, 8, 3), forward, {"dtype": "fp32", "precision": "tf32"}),
        (weights, (128, 128, 32, 8, 3), backward, {"dtype": "fp32", "precision": "tf32"}),
        (statistics, small, {**forward, "EXACT": True, "FRESH": True}, {"copy_engine": False}),
        (weights, small, backward, {"copy_engine": False}),
        (kernels_gradient.gradient_kernel, small, gradient, {"copy_engine": False}),
        (
            kernels_gradient.gradient_kernel,
            small,
            {**gradient, "FOR_X": False, "WANT_SUM": False, "out_x": None, "sum_parts": None},
            {"copy_engine": False},
        ),
        (kernels_gradient.gradient_kernel, small, {**gradient, "FOR_Y": False, "out_y": None}, {"copy_engine": False}),
        (kernels_gradient.finish_kernel, (0, 0, 0, 4, 1), finish, {"copy_engine": False}),
        (
            kernels_gradient.finish_kernel,
            (0, 0, 0, 4, 1),
            {**finish, "FOR_X": False, "d_x": None, "out_x": None},
            {"copy_engine": False},
        ),
        (kernels_topk.topk_kernel, wide, {**inserted, "K": 8}, fewer),
        (kernels_topk.topk_kernel, wide, {**inserted, "K": 16}, fewer),
        (kernels_topk.topk_kernel, strip, {**inserted, "K": 32}, few),
        (kernels_topk.topk_kernel, strip, {**inserted, "K": 64}, {}),
        (kernels_topk_buffer.topk_buffer_kernel, buffers, beyond, fewer),
        (kernels_topk_filter.filter_kernel, wide, search, fewer),
        (
            kernels_topk_filter.select_kernel,
            (4, 0, 0, 4, 1),
            {"WIDTH": 64, "BLOCK_M": 4},
            {"copy_engine": False},
        ),
        (
            kernels_kept.reweigh_kernel,
            (*big[:2], 0, 4, 1),
            {"ROWS": True, "COLS": True, "PART": 16, "BLOCK_K": 32},
            {"copy_engine": False},
        ),
        (kernels_statistics.merge_kernel, (0, 0, 0, 4, 1), {**merge, "BLOCK": 32, "STEP": 16}, {"copy_engine": False}),
    ]
    if capability == 90:
        turns = {"ROWS": True, "COLS": True, "STEPS": 8, "KEPT": 8, "GROUP": 8, "IDS": False, "BY_PLACE": False}
        masked = {"IDS": True, "BY_PLACE": True}
        forward = {**turns, "FRESH": False, "STAGES": 5}
        backward = {**turns, "MANY_POSITIVES": False, "SMOOTH": False, "STAGES": 4}
        deep = {"STEPS": 16, "KEPT": 7, "STAGES": 6}  # more than stays in shared memory
        jobs += [
            (kernels_pingpong_statistics.statistics_pingpong_kernel, big, forward, {}),
            (kernels_pingpong_statistics.statistics_pingpong_kernel, big, {**forward, **masked}, {"ids": 2}),
            (kernels_pingpong_statistics.statistics_pingpong_kernel, big, {**forward, **deep}, {}),
            (kernels_pingpong_weights.weights_pingpong_kernel, big, backward, {}),
            (kernels_pingpong_weights.weights_pingpong_kernel, big, {**backward, **masked}, {"ids": 2}),
            (kernels_pingpong_weights.weights_pingpong_kernel, big, {**backward, "SMOOTH": True}, {}),
            (kernels_pingpong_weights.weights_pingpong_kernel, big, {**backward, **deep, "KEPT": 4, "STAGES": 8}, {}),
        ]
    for kernel, tile, switches, more in jobs:
        if arguments.only in kernel.__name__:
            print(compile_kernel(kernel, tile, switches, capability, **more), flush=True)


if __name__ == "__main__":
    main()
