"""Time, rate, memory and error of the losses, beside their alternatives in the same run.

    python benchmarks/loss.py                          # every suite that suits the device
    python benchmarks/loss.py --suite sizes --sizes 4096 8192 --depths 512 768

The rate counts the floor of four products of 2 N^2 D operations (one forward; recompute, dX and dY backward), whatever
an implementation really spends. Times are medians over device events, so that launch overhead counts where it shows; a
million pairs are timed once. Rows that are compared are timed in turn, in rounds, and the median round counts: a chip
that has worked for a minute is slower than one that has rested, and a host waits longer for its threads at some times.
The roof, the rate of one 8192^3 product of the vendor's library, takes part in the rounds like the rest.
Suites can be run one by one: each replaces its own rows of the results file.
Memory is the peak beyond inputs and returned gradients. The error is ||gradient - reference|| / max(||reference||,
0.05 s / sqrt(N)) against float64.
"""

import argparse
import functools
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import peers
import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALE = 50.0
MIB = 2**20
# Rounds, and milliseconds for each implementation in one: small batches are at the mercy of the host.
ROUNDS, ROUND_MS = 3, 200
OPTIONS_ROUNDS = 9  # their differences are a few percent
SMALL, SMALL_ROUNDS, SMALL_ROUND_MS = 16_384, 15, 40
# Beyond this the dense float64 reference is not worth its time.
LARGEST_REFERENCE = 16_384
SIZES = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
SIZES_OF_OTHER_DEPTHS = (4096, 32_768, 65_536)
TOO_SLOW = {("inf-cl", 65_536), ("inf-cl", 131_072)}  # a second a step, and four


def pairs(n: int, d: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Unit-norm pairs of cosine .3: the batch's negatives still matter, so that its gradient is worth comparing."""
    generator = torch.Generator(device).manual_seed(n + d)

    def unit() -> Tensor:
        x = torch.randn(n, d, generator=generator, device=device)
        return torch.nn.functional.normalize(x, dim=-1)

    x = unit()
    y = torch.nn.functional.normalize(0.3 * x + 0.95 * unit(), dim=-1)
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_ms(step: Callable[[], object], device: str, budget_ms: float) -> float:
    """Median time of a step, after a warm-up, over as many repetitions as the budget holds (3 at least)."""
    step()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    once = 1e3 * (time.perf_counter() - start)
    repetitions = int(min(1000, max(3, budget_ms / max(once, 1e-3))))
    if device != "cuda":
        times = []
        for _ in range(repetitions):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    for _ in range(min(5, repetitions // 2)):
        step()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for first, last in events:
        first.record()
        step()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events)


def replayed(step: Callable[[], object]) -> Callable[[], object]:
    """The step captured in a CUDA graph: its inputs and results stay where they are."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def roof_step(device: str, dtype: torch.dtype, tf32: bool = False) -> Callable[[], object]:
    """One square product of the vendor's library."""
    n = roof_size(device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))

    def step() -> Tensor:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        product = a @ b
        torch.backends.cuda.matmul.allow_tf32 = before
        return product

    return step


def roof_size(device: str) -> int:
    return 8192 if device == "cuda" else 1024


def roof_tflops(device: str, dtype: torch.dtype, tf32: bool = False) -> float:
    """The library's rate alone, timed for long enough that the chip is as warm as under load."""
    budget = 200 if device == "cpu" else 1000
    return 2 * roof_size(device) ** 3 / median_ms(roof_step(device, dtype, tf32), device, budget) / 1e9


def reference_gradient(loss: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both embeddings by the dense float64 loss."""
    a, b = (t.detach().double().requires_grad_() for t in (x, y))
    logits = SCALE * a @ b.T
    if loss == "sigmoid":
        z = 2 * torch.eye(len(x), device=x.device, dtype=torch.float64) - 1
        value = -torch.nn.functional.logsigmoid(z * (logits + peers.BIAS)).sum() / len(x)
    else:
        own = logits.diagonal()
        value = (logits.logsumexp(1) + logits.logsumexp(0) - 2 * own).mean() / 2
    gradients = torch.autograd.grad(value, (a, b))
    return gradients[0], gradients[1]


def error(x: Tensor, y: Tensor, reference: tuple[Tensor, Tensor]) -> float:
    """The larger of both gradients' relative errors."""
    given = ((t.grad, ref) for t, ref in zip((x, y), reference, strict=True) if t.grad is not None)
    least = 0.05 * SCALE / len(x) ** 0.5
    return max(float((grad.double() - ref).norm() / ref.norm().clamp(min=least)) for grad, ref in given)


def measure(
    loss: Callable[..., Tensor],
    n: int,
    d: int,
    dtype: torch.dtype,
    device: str,
    *,
    frozen: str = "",
    backward: bool = True,
    reference: tuple[Tensor, Tensor] | None = None,
    once: bool = False,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """One row of the table but for its time, and the step to be timed: forward (and backward) of a loss on n pairs.

    once: the one step that measures the memory is timed as well, and there is no other of this size.
    """
    x, y = pairs(n, d, dtype, device)
    if frozen:
        (x if frozen == "images" else y).requires_grad_(False)
    scale = torch.tensor(SCALE, device=device, requires_grad=True)

    def step() -> None:
        x.grad = y.grad = scale.grad = None
        value = loss(x, y, scale)
        if backward:
            value.backward()

    row: dict[str, Any] = {"n": n, "d": d}
    if once:
        measure(loss, 2 * SMALL, d, dtype, device)  # compiles what the one step runs
    else:
        start = time.perf_counter()
        step()
        synchronize(device)
        row["first_call_s"] = round(time.perf_counter() - start, 2)
    if backward and reference is not None:
        row["error"] = error(x, y, reference)
    if device == "cuda":
        x.grad = y.grad = scale.grad = None
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        synchronize(device)
        if once:
            row["ms"] = 1e3 * (time.perf_counter() - start)
        returned = sum(t.grad.nbytes for t in (x, y) if t.grad is not None)
        row["extra_mib"] = (torch.cuda.max_memory_allocated() - base - returned) / MIB
    x.grad = y.grad = scale.grad = None
    row["operations"] = (8 if backward else 2) * n * n * d
    return row, step


Steps = list[tuple[dict[str, Any], Callable[[], object]]]


def attempt(
    rows: list[dict[str, Any]],
    steps: Steps,
    labels: dict[str, Any],
    make: Callable[[], Callable[..., Tensor]],
    **more: Any,
) -> None:
    """Measures one implementation but for its time; what cannot run here is recorded with the reason."""
    row = dict(labels)
    with recorded(row):
        found, step = measure(make(), **more)
        row |= found
        if not more.get("once"):
            steps.append((row, step))
    rows.append(row)


@contextmanager
def recorded(row: dict[str, Any]) -> Iterator[None]:
    """Records in a row why an implementation failed: a peer's failure is a result, ours is not."""
    try:
        yield
    except peers.Unavailable as reason:
        row["unavailable"] = str(reason)
    except torch.cuda.OutOfMemoryError:
        row["unavailable"] = "out of memory"
        torch.cuda.empty_cache()
    except Exception as reason:
        if row["name"].startswith("hf_infcl"):
            raise
        row["unavailable"] = f"{type(reason).__name__}: {str(reason)[:120]}"


def finish(
    rows: list[dict[str, Any]],
    steps: Steps,
    device: str,
    dtype: torch.dtype,
    tf32: bool = False,
    rounds: int = ROUNDS,
) -> None:
    """Times the steps of a group in turn, the roof among them, and prints the group's rows."""
    roof: dict[str, Any] = {"name": "roof", "operations": 2 * roof_size(device) ** 3}
    everyone: Steps = [(roof, roof_step(device, dtype, tf32)), *steps]
    times: list[list[float]] = [[] for _ in everyone]
    is_small = all(row["size"] <= SMALL for row in rows)
    rounds, budget = (SMALL_ROUNDS, SMALL_ROUND_MS) if is_small and device == "cuda" else (rounds, ROUND_MS)
    for _ in range(rounds):
        for of_one, (row, step) in zip(times, everyone, strict=True):
            if "unavailable" not in row:
                with recorded(row):
                    of_one.append(median_ms(step, device, budget))
    for of_one, (row, _) in zip(times, everyone, strict=True):
        if "unavailable" not in row:
            row |= {"ms": statistics.median(of_one), "rounds_ms": of_one}
    steps.clear()
    for row in (roof, *rows):
        if "ms" in row:
            row["tflops"] = row.pop("operations") / row["ms"] / 1e9
    print(f"roof {roof['tflops']:.1f} TFLOP/s", flush=True)
    for row in rows:
        row["roof"] = roof["tflops"]
        print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    head = f"{row['suite']:9} {row['name']:36} {row['dtype']:5} N={row['size']:<8} D={row['depth']:<5}"
    if "unavailable" in row:
        return f"{head} {row['unavailable']}"
    share = f"{row['tflops'] / row['roof']:6.1%}" if row.get("roof") else ""
    memory = f"{row['extra_mib']:8.0f} MiB" if "extra_mib" in row else ""
    wrong = f"error {row['error']:.1e}" if "error" in row else ""
    return f"{head} {row['ms']:10.3f} ms {row['tflops']:7.1f} TFLOP/s {share} {memory} {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = ("small", "sizes", "options", "sigmoid", "precision", "large")
    parser.add_argument("--suite", nargs="*", default=suites, choices=suites)
    parser.add_argument("--sizes", nargs="*", type=int)
    parser.add_argument("--depths", nargs="*", type=int)
    parser.add_argument("--names", nargs="*", help="implementations (default: all)")
    parser.add_argument("--large", nargs="*", type=int, default=[1_048_576, 4_194_304], help="sizes of the suite large")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"), help="folder of the results")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    half = "bf16" if on_gpu else "fp32"
    found = environment()
    common: dict[str, Any] = {"device": device, "dtype": DTYPES[half]}

    steps: Steps = []

    def labels(suite: str, name: str, n: int, d: int, dtype: str = half) -> dict[str, Any]:
        return {"suite": suite, "name": name, "size": n, "depth": d, "dtype": dtype}

    def known_gradient(loss: str, n: int, d: int) -> tuple[Tensor, Tensor] | None:
        return reference_gradient(loss, *pairs(n, d, DTYPES[half], device)) if n <= LARGEST_REFERENCE else None

    for suite in (suite for suite in ("small", "sizes") if suite in arguments.suite):
        depths = arguments.depths or ([512, 768, 1024] if on_gpu else [64])
        for d, n in itertools.product(depths, arguments.sizes or (SIZES if on_gpu else [128, 256, 512])):
            if not arguments.sizes and d != depths[0] and n not in SIZES_OF_OTHER_DEPTHS:
                continue
            if (n <= SMALL) != (suite == "small"):
                continue
            known, group = known_gradient("contrastive", n, d), []
            for name in arguments.names or peers.CONTRASTIVE:
                if (name, n) not in TOO_SLOW:
                    make = functools.partial(peers.contrastive, name)
                    attempt(group, steps, labels(suite, name, n, d), make, n=n, d=d, reference=known, **common)
            finish(group, steps, device, DTYPES[half])
            rows += group
            write(rows, found, Path(arguments.out))
    if "options" in arguments.suite:
        n, d = (65_536, 512) if on_gpu else (512, 64)
        # Image and caption ids of a batch in which one row in ten has a copy of its image, one in ten of its caption.
        ids = torch.stack([torch.randint(0, 10 * n, (n,), device=device) for _ in range(2)], 1)
        options: dict[str, dict[str, Any]] = {
            "": {},
            " ids": {"ids": ids},
            " ids, one column": {"ids": ids[:, :1].contiguous()},
            " ids as positives": {"ids": ids, "duplicates": "positive"},
            " image_to_text": {"direction": "image_to_text"},
            " label_smoothing": {"label_smoothing": 0.1},
            " again": {},
        }
        more = {" frozen images": {"frozen": "images"}, " frozen texts": {"frozen": "texts"}}
        more[" forward only"] = {"backward": False}
        group = []
        for name in (*options, *more):
            make = functools.partial(peers.ours, **options.get(name, {}))
            about = labels("options", "hf_infcl" + name, n, d)
            attempt(group, steps, about, make, n=n, d=d, **more.get(name, {}), **common)
        finish(group, steps, device, DTYPES[half], rounds=OPTIONS_ROUNDS)
        rows += group
        write(rows, found, Path(arguments.out))
    if "sigmoid" in arguments.suite:
        for n, d in ((n, 768 if on_gpu else 64) for n in arguments.sizes or ((8192, 65_536) if on_gpu else (256,))):
            known, group = known_gradient("sigmoid", n, d), []
            for name in arguments.names or peers.SIGMOID:
                make = functools.partial(peers.sigmoid, name)
                attempt(group, steps, labels("sigmoid", name, n, d), make, n=n, d=d, reference=known, **common)
            finish(group, steps, device, DTYPES[half])
            rows += group
            write(rows, found, Path(arguments.out))
    if "precision" in arguments.suite:
        n, d = (32_768, 512) if on_gpu else (256, 64)
        for dtype, precision in [("fp16", "auto"), ("fp32", "tf32"), ("fp32", "tf32x3"), ("fp32", "ieee")]:
            if not on_gpu and dtype == "fp16":
                continue
            group, make = [], functools.partial(peers.ours, precision=precision)
            about = labels("precision", f"hf_infcl {dtype} {precision}", n, d, dtype)
            attempt(group, steps, about, make, n=n, d=d, dtype=DTYPES[dtype], device=device)
            finish(group, steps, device, DTYPES[dtype], tf32=on_gpu and precision.startswith("tf32"))
            rows += group
            write(rows, found, Path(arguments.out))
    if "large" in arguments.suite and on_gpu:
        group = []
        for n in arguments.large:
            attempt(group, steps, labels("large", "hf_infcl", n, 512), peers.ours, n=n, d=512, once=True, **common)
        finish(group, steps, device, DTYPES[half])
        write(rows + group, found, Path(arguments.out))


def environment() -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version(), "device": platform.machine()}
    if torch.cuda.is_available():
        import triton

        found |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    return found


def write(rows: list[dict[str, Any]], found: dict[str, str], folder: Path) -> None:
    """The results file of this device, with the rows of suites that did not run now, and a plot of time over size.

    Called after every group, so that a run that is cut short leaves what it has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "loss_" + found["device"].lower().replace(" ", "_")
    path, suites = folder / f"{stem}.json", {row["suite"] for row in rows}
    if path.exists():
        before = json.loads(path.read_text())
        if before["environment"] == found:
            rows = [row for row in before["rows"] if row["suite"] not in suites] + rows
    path.write_text(json.dumps({"environment": found, "rows": rows}, indent=1) + "\n")
    plot([row for row in rows if row["suite"] in ("small", "sizes") and "ms" in row], folder / f"{stem}.png")
    print("written:", path)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    at = {row["depth"]: {other["size"] for other in rows if other["depth"] == row["depth"]} for row in rows}
    depths = sorted(depth for depth in at if len(at[depth]) > 2) or sorted(at)  # two points are no curve
    figure, axes = pyplot.subplots(2, len(depths), figsize=(5 * len(depths), 7), squeeze=False, sharex=True)
    for column, depth in enumerate(depths):
        for name in dict.fromkeys(row["name"] for row in rows):
            mine = sorted(
                (row for row in rows if row["name"] == name and row["depth"] == depth), key=lambda r: r["size"]
            )
            sizes = [row["size"] for row in mine]
            style = {"marker": "o", "markersize": 3, "label": name, "linewidth": 2.2 if name == "hf_infcl" else 1.0}
            axes[0, column].plot(sizes, [row["ms"] for row in mine], **style)
            axes[1, column].plot(sizes, [100 * row["tflops"] / row["roof"] for row in mine], **style)
        axes[0, column].set(title=f"D = {depth}", xscale="log", yscale="log")
        axes[1, column].set(xlabel="pairs in the batch", xscale="log", ylim=(0, 100))
    axes[0, 0].set_ylabel("forward + backward, ms")
    axes[1, 0].set_ylabel("rate on 4 products, % of the library's")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
