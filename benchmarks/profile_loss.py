"""Where a step of the loss spends its time: every kernel's, what the host costs, and how busy the chip's units are.

    python benchmarks/profile_loss.py                       # kernels, host, clock and power, over sizes
    python benchmarks/profile_loss.py --counters 16384      # hardware counters by kernel, where Nsight Compute runs
    python benchmarks/profile_loss.py --host                # small batches, with and without what spares the host

A kernel's rate counts 2 N^2 D operations for each product that it computes of the whole similarity matrix, whatever
repairs or partial tiles add. "host" is the time in which a step is only issued; where it exceeds the kernels' sum, the
chip waits. Clock and power are what the driver says (`nvidia-smi`) while steps of a large case follow one another.
"""

import argparse
import csv
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import loss as bench
import peers
import torch

CASES = (
    (512, 512, ""),
    (2048, 512, ""),
    (4096, 512, ""),
    (8192, 512, ""),
    (8192, 1024, ""),
    (16_384, 512, ""),
    (65_536, 512, ""),
    (65_536, 512, "ids"),
    (65_536, 768, ""),
    (65_536, 1024, ""),
    (65_536, 768, "sigmoid"),
    (65_536, 512, "torch.compile"),
    (65_536, 1024, "torch.compile"),
    (65_536, 1024, "the library's product"),
)
# From so many pairs on, clock and power are sampled over so many seconds, after as many to settle.
SAMPLED, SECONDS = 65_536, 2.0
SAMPLES = {
    "power.draw.instant": "watts",
    "power.limit": "watts_allowed",
    "clocks.sm": "mhz",
    "clocks.max.sm": "mhz_allowed",
    "temperature.gpu": "celsius",
}
# Products of 2 N^2 D operations that all launches of a kernel in one step compute.
PRODUCTS = {
    "statistics_kernel": 1,
    "statistics_pingpong_kernel": 1,
    "weights_kernel": 1,
    "weights_pingpong_kernel": 1,
    "sigmoid_weights_kernel": 1,
    "gradient_kernel": 2,
    "library": 2,
}
COUNTERS = {
    "gpu__time_duration.sum": "time",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors, % of peak",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor instructions, % of peak",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": "tensor cores active, %",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "exponentials' unit, %",
    "sm__issue_active.avg.pct_of_peak_sustained_active": "instructions issued, % of cycles",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory, % of peak",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2, % of peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps resident, % of 64",
}


def step_of(n: int, d: int, kind: str) -> Callable[[], None]:
    """One forward and backward on n pairs."""
    x, y = bench.pairs(n, d, torch.bfloat16, "cuda")
    scale = torch.tensor(bench.SCALE, device="cuda", requires_grad=True)
    if kind == "the library's product":
        a, b = x.detach(), y.detach()
        out = torch.empty(8192, n, device="cuda", dtype=a.dtype)

        def product() -> None:
            for rows in a.split(8192):
                torch.mm(rows, b.T, out=out[: len(rows)])

        return product
    if kind == "sigmoid":
        loss = peers.sigmoid("hf_infcl")
    elif kind == "torch.compile":
        loss = peers.contrastive(kind)
    elif kind == "ids":
        loss = peers.ours(ids=torch.stack([torch.randint(0, 10 * n, (n,), device="cuda") for _ in range(2)], 1))
    else:
        loss = peers.ours()

    def step() -> None:
        x.grad = y.grad = scale.grad = None
        loss(x, y, scale).backward()

    step.inputs = x, y, scale  # type: ignore[attr-defined]
    return step


def short(kernel: str) -> str:
    """A kernel's name without its arguments; the vendor's products, whatever they are called, as "library"."""
    products = ("gemm", "cutlass", "nvjet")
    return "library" if any(word in kernel.lower() for word in products) else kernel.split("<")[0].split("(")[0]


def chip_state(step: Callable[[], None], ms: float) -> dict[str, float]:
    """Medians of what the driver says of the chip while a step of so many milliseconds is repeated."""
    repetitions = max(1, int(1e3 * SECONDS / ms))

    def repeated() -> float:
        begin = time.perf_counter()
        for _ in range(repetitions):
            step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / repetitions

    repeated()
    query = ["nvidia-smi", f"--query-gpu={','.join(SAMPLES)}", "--format=csv,noheader,nounits", "-lms", "50", "-i", "0"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as sampler:
        taken = repeated()
        sampler.terminate()
        lines = sampler.communicate()[0].strip().splitlines()
    rows = [[float(value) for value in line.split(",")] for line in lines if line.count(",") == len(SAMPLES) - 1]
    found = {
        name: statistics.median(column) for name, column in zip(SAMPLES.values(), zip(*rows, strict=True), strict=True)
    }
    return {"step_ms": taken, "samples": len(rows)} | found | {"joules": found["watts"] * taken / 1e3}


def profile(n: int, d: int, kind: str, roof: float) -> dict[str, Any]:
    step = step_of(n, d, kind)
    ms = bench.median_ms(step, "cuda", 200)
    repetitions = max(3, int(100 / ms))
    begin = time.perf_counter()
    for _ in range(min(repetitions, 20)):
        step()
    host = 1e3 * (time.perf_counter() - begin) / min(repetitions, 20)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as record:
        for _ in range(repetitions):
            step()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for event in record.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = short(event.name)
            spent[name] += event.device_time / 1e3 / repetitions
            launches[name] += 1
    kernels: list[dict[str, Any]] = []
    for name in sorted(spent, key=lambda name: -spent[name]):
        row: dict[str, Any] = {"kernel": name, "ms": spent[name], "launches": launches[name] / repetitions}
        if name in PRODUCTS:
            products = {"torch.compile": 3, "the library's product": 1}.get(kind, PRODUCTS[name])
            rate = products * 2 * n * n * d / spent[name] / 1e9
            row |= {"tflops": rate, "share_of_roof": rate / roof}
        kernels.append(row)
    found = {"n": n, "d": d, "kind": kind, "ms": ms, "host_ms": host, "kernels_ms": sum(spent.values())}
    if n >= SAMPLED:
        found["chip"] = chip_state(step, ms)
    return found | {"roof": roof, "kernels": kernels}


def shown(found: dict[str, Any]) -> str:
    lines = [
        f"N={found['n']:<7} D={found['d']:<5} {found['kind']:8} {found['ms']:8.3f} ms, kernels "
        f"{found['kernels_ms']:8.3f}, host {found['host_ms']:7.3f}"
    ]
    if "chip" in found:
        lines.append("    " + ", ".join(f"{name} {value:.1f}" for name, value in found["chip"].items()))
    for row in found["kernels"][:7]:
        rate = f"{row['tflops']:6.0f} TFLOP/s {row['share_of_roof']:6.1%}" if "tflops" in row else ""
        lines.append(f"    {row['kernel'][:58]:58} {row['launches']:6.1f} x {row['ms']:8.3f} ms {rate}")
    return "\n".join(lines)


def host(n: int, d: int) -> dict[str, Any]:
    """A small batch's step, timed in turn with variants: each takes back one thing that spares the host work."""
    from hf_infcl.ops.triton import launch, whole
    from hf_infcl.ring import softmax

    step = step_of(n, d, "")
    plain = launch.launch

    def launched_by_triton(
        kernel: Any, device: Any, programs: int, values: Any, constants: Any, warps: int, stages: int, kind: Any = None
    ) -> None:
        kernel[(programs,)](*values, *constants, num_warps=warps, num_stages=stages)

    def by_triton() -> None:
        launch.launch = whole.launch = launched_by_triton
        try:
            step()
        finally:
            launch.launch = whole.launch = plain

    def gradients_in_backward() -> None:
        with patch.object(softmax.torch, "is_grad_enabled", lambda: False):  # what decides whether they are made ahead
            x, y, scale = step.inputs  # type: ignore[attr-defined]
            x.grad = y.grad = scale.grad = None
            value = peers.ours()(x, y, scale)
        value.backward()

    def general_way() -> None:
        with patch.object(whole, "suits", lambda *_: False):
            step()

    variants: dict[str, Callable[[], None]] = {
        "as it is": step,
        "launched by Triton": by_triton,
        "gradients in the backward pass": gradients_in_backward,
        "the general way": general_way,
        "replayed from a CUDA graph": bench.replayed(step),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(bench.SMALL_ROUNDS):
        for name, variant in variants.items():
            times[name].append(bench.median_ms(variant, "cuda", bench.SMALL_ROUND_MS))
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    print(f"N={n:<6} " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in medians.items()), flush=True)
    return {"n": n, "d": d, "ms": medians}


def counters(n: int, d: int) -> list[dict[str, Any]]:
    """Hardware counters of every kernel of one step, by Nsight Compute on this script."""
    if shutil.which("ncu") is None:
        raise SystemExit("--counters needs Nsight Compute's `ncu` on the PATH")
    command = [
        "ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        "--metrics", ",".join(COUNTERS), sys.executable, __file__, "--step", str(n), str(d),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    table = done.stdout[done.stdout.find('"ID"') :]
    if done.returncode or not table:
        raise SystemExit(f"ncu failed with code {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    rows = list(csv.DictReader(io.StringIO(table)))[1:]  # the first line after the names holds units
    found = [
        {"kernel": short(row["Kernel Name"]), **{text: row[name] for name, text in COUNTERS.items() if name in row}}
        for row in rows
    ]
    for row in found:
        print(row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counters", type=int, metavar="N", help="hardware counters of a step on N pairs of D = 512")
    parser.add_argument("--host", action="store_true", help="what spares the host work in small batches, one by one")
    parser.add_argument("--step", type=int, nargs=2, metavar=("N", "D"), help="one step alone, for a profiler to watch")
    parser.add_argument("--sizes", type=int, nargs="*", help="of the cases, only these sizes")
    parser.add_argument("--depths", type=int, nargs="*", help="of the cases, only these depths")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("profile_loss needs a CUDA device")
    if arguments.step:
        step = step_of(*arguments.step, "")
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return
    results: dict[str, Any] = {"environment": bench.environment()}
    stem = "host" if arguments.host else "profile" if arguments.counters is None else "counters"
    device = results["environment"]["device"].lower().replace(" ", "_")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"loss_{stem}_{device}.json"

    def write() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if arguments.host:
        results["steps"] = [host(n, 512) for n in arguments.sizes or (512, 1024, 2048, 4096, 8192, 16_384)]
    elif arguments.counters is not None:
        results["counters"] = counters(arguments.counters, 512)
    else:
        results["steps"] = []
        for n, d, kind in CASES:
            wanted = (not arguments.sizes or n in arguments.sizes) and (not arguments.depths or d in arguments.depths)
            if wanted:
                results["steps"].append(profile(n, d, kind, bench.roof_tflops("cuda", torch.bfloat16)))
                print(shown(results["steps"][-1]), flush=True)
                write()  # a run that is cut short leaves what it has
    write()
    print("written:", path)


if __name__ == "__main__":
    main()
