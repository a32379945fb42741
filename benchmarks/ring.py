"""The loss over several processes: time, rate, memory and exposed communication, beside the alternatives of a run.

    python benchmarks/ring.py                         # all GPUs of this host; without one, CPU processes
    python benchmarks/ring.py --processes 2 --local 65536 --total 131072
    python benchmarks/ring.py --suite one             # on one GPU: a ring of one, and rings that are played

Suites: `weak` holds the rows of each process, `strong` those of all together; `one` needs a single device: a ring of
one process, and rings in which the device plays one rank of W through the same schedule, copies standing for messages.

The rate counts four products of 2 N^2 D operations, divided by the processes. *Exposed* is the time beyond the same
schedule without messages on the same processes; *blocks* is the time of W losses of the local size on one device, the
least that a rank has to do. Memory is the largest rank's peak beyond its inputs and returned gradients.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ring_peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loss import DTYPES, MIB, SCALE, environment, pairs, synchronize
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hf_infcl import contrastive_loss
from hf_infcl.ring import World

Step = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PlayedWorld(World):
    """One rank of a ring without the others: what it would receive is a copy of what it sends, or not even that.

    The time and the memory of a rank are real; the loss is that of W copies of the same rows.

    Attributes:
        copies: whether messages are copies, made on a stream of their own; else nothing is moved at all.
    """

    copies: bool = True

    def check_device(self, device: torch.device) -> None:
        pass

    def headers(self, header: Tensor) -> list[list[int]]:
        return [header.tolist()] * self.size

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return tensor.repeat(self.size, *[1] * (tensor.ndim - 1))

    def scatter(self, tensor: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tensor.split(sizes)

    def post(self, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int) -> Callable[[], None]:
        if not self.copies:
            return lambda: None
        if not send or send[0].device.type != "cuda":
            for source, target in zip(send, receive, strict=True):
                target.copy_(source)
            return lambda: None
        stream = _side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for source, target in zip(send, receive, strict=True):
                target.copy_(source)
        held = [*send, *receive]

        def wait() -> None:
            torch.cuda.current_stream().wait_stream(stream)
            held.clear()

        return wait


_streams: list[Any] = []


def _side_stream() -> Any:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


def ours(group: Any) -> Step:
    return lambda x, y, s: contrastive_loss(x, y, s, group=group)


def together(function: Callable[[], float], device: str) -> float:
    """The largest of all processes' figures."""
    value = torch.tensor([function()], device=device, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def time_ms(step: Callable[[], object], device: str, budget_ms: float) -> float:
    """Median time of a step, the slowest process's, over rounds of steps that follow one another without a wait."""

    def round_of(steps: int) -> float:
        synchronize(device)
        if dist.is_initialized():
            dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return 1e3 * (time.perf_counter() - start) / steps

    round_of(1)
    steps = int(min(20, max(1, budget_ms / 5 / together(lambda: round_of(2), device))))
    return statistics.median(together(lambda: round_of(steps), device) for _ in range(5))


def peak_mib(step: Callable[[], object], leaves: Sequence[Tensor], device: str) -> float:
    """Most memory at a time beyond what was there before and the gradients that stay."""

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    clear()
    if device == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step()
        assert recorded.profiler is not None
        assert recorded.profiler.kineto_results is not None
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
    return together(lambda: (peak - sum(leaf.nbytes for leaf in leaves)) / MIB, device)


def measure(make: Callable[[], Step], rows: int, depth: int, dtype: str, device: str, budget_ms: float) -> dict:
    """Time and memory of a loss, forward and backward, on this process's rows."""
    loss = make()
    x, y = pairs(rows, depth, DTYPES[dtype], device)
    scale = torch.tensor(SCALE, device=device, requires_grad=True)

    def step() -> None:
        x.grad = y.grad = scale.grad = None
        loss(x, y, scale).backward()

    step()
    return {"extra_mib": peak_mib(step, (x, y), device), "ms": time_ms(step, device, budget_ms)}


def attempt(row: dict[str, Any], make: Callable[[], Step], arguments: argparse.Namespace, device: str) -> dict:
    try:
        row |= measure(make, row["local"], row["depth"], row["dtype"], device, arguments.budget)
        total = row["local"] * row["processes"]
        row["tflops"] = 8 * total**2 * row["depth"] / row["processes"] / row["ms"] / 1e9
    except ring_peers.Unavailable as reason:
        row["unavailable"] = str(reason)
    except torch.cuda.OutOfMemoryError:
        row["unavailable"] = "out of memory"
        torch.cuda.empty_cache()
    return row


def say(row: dict[str, Any]) -> None:
    head = f"{row['suite']:7} {row['name']:24} W={row['processes']:<4} n={row['local']:<8} D={row['depth']:<5}"
    if "unavailable" in row:
        print(head, row["unavailable"], flush=True)
        return
    exposed = f" exposed {row['exposed_ms']:7.2f} ms" if "exposed_ms" in row else ""
    blocks = f" / blocks {row['over_blocks']:.3f}" if "over_blocks" in row else ""
    figures = f"{row['ms']:9.2f} ms {row['tflops']:8.3f} TFLOP/s {row['extra_mib']:8.1f} MiB"
    print(f"{head} {figures}{blocks}{exposed}", flush=True)


def one_device(arguments: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """A ring of one, and rings played by one device."""
    rows = []
    local, depth, dtype = arguments.local, arguments.depth, arguments.dtype
    common = {"suite": "one", "local": local, "depth": depth, "dtype": dtype, "processes": 1}
    alone = attempt({**common, "name": "alone"}, partial(ours, False), arguments, device)
    rows.append(alone)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(_backend(device), init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        ring = attempt({**common, "name": "ring of one"}, partial(ours, None), arguments, device)
        dist.destroy_process_group()
    ring["over_blocks"] = ring["ms"] / alone["ms"]
    rows.append(ring)
    for row in rows:
        say(row)
    for size in arguments.played:
        world = PlayedWorld(None, 0, size, copies=True)
        labels = {**common, "name": "played ring", "processes": size}
        with _forced("hf_infcl hop"):
            row = attempt(labels, partial(ours, world), arguments, device)
        if "ms" in row:
            row["over_blocks"] = row["ms"] / (size * alone["ms"])
        rows.append(row)
        say(row)
    return rows


def worker(rank: int, world_size: int, folder: str, arguments: argparse.Namespace, device: str) -> None:
    """One process of the weak and the strong suite."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        _backend(device), init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    rows = []
    sizes = {"weak": [arguments.local], "strong": [total // world_size for total in arguments.total]}
    for suite in arguments.suite:
        for local in sizes.get(suite, []):
            common = {"suite": suite, "local": local, "depth": arguments.depth, "dtype": arguments.dtype}
            block = attempt({**common, "name": "alone", "processes": 1}, partial(ours, False), arguments, device)
            for name in arguments.names:
                labels = {**common, "name": name, "processes": world_size}
                with _forced(name):
                    row = attempt(dict(labels), partial(_maker, name), arguments, device)
                    if name.startswith("hf_infcl") and "ms" in row and world_size > 1:
                        silent = partial(ours, PlayedWorld(None, rank, world_size, copies=False))
                        row["exposed_ms"] = row["ms"] - attempt(dict(labels), silent, arguments, device)["ms"]
                if "ms" in row and "ms" in block:
                    row["over_blocks"] = row["ms"] / (world_size * block["ms"])
                rows.append(row)
                if rank == 0:
                    say(row)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _maker(name: str) -> Step:
    return ours(None) if name.startswith("hf_infcl") else ring_peers.peer(name, SCALE)


_LIMITS = {"hf_infcl hop": "0", "hf_infcl gather": str(10**9)}


@contextmanager
def _forced(name: str) -> Iterator[None]:
    """Forces the path that a name asks for."""
    if name not in _LIMITS:
        yield
        return
    os.environ["HF_INFCL_GATHER_BELOW"] = _LIMITS[name]
    yield
    del os.environ["HF_INFCL_GATHER_BELOW"]


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Weak scaling (time over processes) and strong scaling (speed over processes)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, suite in zip(axes, ("weak", "strong"), strict=True):
        mine = [row for row in rows if row["suite"] == suite and "ms" in row]
        curves = dict.fromkeys((row["name"], row["local"] * row["processes"] * (suite == "strong")) for row in mine)
        for name, total in curves:
            points = [
                row
                for row in mine
                if row["name"] == name and (suite == "weak" or row["local"] * row["processes"] == total)
            ]
            label = name if suite == "weak" else f"{name}, N = {total:,}"
            axis.plot([row["processes"] for row in points], [row["tflops"] for row in points], marker="o", label=label)
        axis.set(title=f"{suite} scaling", xlabel="processes", ylabel="TFLOP/s of each on 4 products", ylim=(0, None))
        if mine:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    most = torch.cuda.device_count() if on_gpu else 4
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="*", default=["one", "weak", "strong"], choices=["one", "weak", "strong"])
    parser.add_argument("--processes", nargs="*", type=int, default=[w for w in (1, 2, 3, 4, 8) if w <= most])
    parser.add_argument("--played", nargs="*", type=int, default=[2, 4, 8], help="sizes of the played rings")
    parser.add_argument("--local", type=int, default=65_536 if on_gpu else 768, help="rows of each process")
    totals = [8_192, 16_384, 32_768, 65_536, 131_072] if on_gpu else [768, 3_072]
    parser.add_argument("--total", nargs="*", type=int, default=totals, help="rows of all processes")
    parser.add_argument("--depth", type=int, default=512 if on_gpu else 128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16" if on_gpu else "fp32")
    parser.add_argument("--names", nargs="*", default=list(ring_peers.NAMES))
    parser.add_argument("--budget", type=float, default=1000, help="milliseconds of measuring for each figure")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"), help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler counts memory here, and need not tell of it
    rows = one_device(arguments, device) if "one" in arguments.suite else []
    if {"weak", "strong"} & set(arguments.suite):
        for size in arguments.processes:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(worker, (size, folder, arguments, device), nprocs=size)
                rows += json.loads(Path(folder, "rows.json").read_text())
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    # Who else computes on this machine: times of processes that share cores say little where it is high.
    found = environment() | {"load per core": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1)}
    stem = "ring_" + found["device"].lower().replace(" ", "_")
    (folder / f"{stem}.json").write_text(json.dumps({"environment": found, "rows": rows}, indent=1) + "\n")
    plot(rows, folder / f"{stem}.png")
    print("written:", folder / f"{stem}.json")


if __name__ == "__main__":
    main()
