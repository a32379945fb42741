"""The loss over several processes: time, rate, memory and exposed communication, beside the alternatives of a run.

    python benchmarks/ring.py                         # all GPUs of this host; without one, CPU processes
    python benchmarks/ring.py --processes 2 --local 65536 --total 131072
    python benchmarks/ring.py --suite one             # on one device: a ring of one, and rings that are played

Suites: `weak` holds the rows of each process, `strong` those of all together; `one` needs a single device: a ring of
one process, rings in which the device plays all blocks of a rank in turn through the same schedule, copies standing for
messages, and the same with gathering instead of hopping, which says below how many rows gathering is faster.

What is compared is timed in turn, over and over, forwards and backwards: a device's clock drifts by more than what is
to be seen. *blocks* is the time beside that of W plain losses of the local size, the least that a rank has to do;
*exposed* is the time beyond the same schedule without messages on the same processes. The rate counts four products of
2 N^2 D operations, divided by the processes. Memory is the largest rank's peak beyond its inputs and returned
gradients. All times are medians of the rounds, and the slowest process's.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read on import: the profiler counts memory here, and need not say so

import ring_peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loss import DTYPES, MIB, SCALE, environment, pairs, synchronize
from peers import Unavailable
from ring_played import PlayedWorld
from ring_report import plot, say, summary
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hf_infcl import contrastive_loss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]
# An odd number, so that the median is one that was measured.
ROUNDS = 9


def ours(group: Any, gather_below: int | None = None) -> Loss:
    """This project's loss in a world; `gather_below` moves the limit between gathering and hopping."""

    def loss(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        with _limit(gather_below):
            return contrastive_loss(x, y, s, group=group)

    return loss


HOP, GATHER = 0, 10**9
LIMITS = {"hf_infcl": None, "hf_infcl hop": HOP, "hf_infcl gather": GATHER}


@contextmanager
def _limit(rows: int | None) -> Iterator[None]:
    if rows is None:
        yield
        return
    os.environ["HF_INFCL_GATHER_BELOW"] = str(rows)
    yield
    del os.environ["HF_INFCL_GATHER_BELOW"]


def together(value: float, device: str) -> float:
    """The largest of all processes' figures."""
    if not dist.is_initialized():
        return value
    everyone = torch.tensor([value], device=device, dtype=torch.float64)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return float(everyone)


def in_turn(steps: Sequence[Callable[[], object]], device: str, budget_ms: float) -> list[list[float]]:
    """Milliseconds of each step in each round.

    Args:
        steps: what is compared; each has been taken before.
        budget_ms: about how long each of them is measured.

    Returns:
        One list of as many rounds for every step. A round takes each step several times without a wait in between.
    """

    def once(step: Callable[[], object], times: int) -> float:
        synchronize(device)
        if dist.is_initialized():
            dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            step()
        synchronize(device)
        return together(1e3 * (time.perf_counter() - start) / times, device)

    first = [once(step, 1) for step in steps]
    # What is slow beyond the budget is met three times all the same.
    rounds = int(min(ROUNDS, max(3, budget_ms // max(first))))
    times = [max(1, int(budget_ms / rounds / ms)) for ms in first]
    found: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds):
        for which in range(len(steps)) if turn % 2 == 0 else reversed(range(len(steps))):
            found[which].append(once(steps[which], times[which]))
    return found


def peak_mib(step: Callable[[], object], leaves: Sequence[Tensor], device: str) -> float:
    """Most memory at a time beyond what was there before and the gradients that stay."""
    for leaf in leaves:
        leaf.grad = None
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
    return together((peak - sum(leaf.nbytes for leaf in leaves)) / MIB, device)


def measure(
    row: Row, make: Callable[[], Loss], device: str, budget_ms: float, beyond: Mapping[str, Loss] | None = None
) -> Row:
    """Completes a row by time and memory of a loss, forward and backward, beside those of the plain loss's blocks.

    Args:
        row: `local`, `depth`, `dtype` and `processes` say what is measured.
        make: makes the loss; where that or the loss itself fails, the row says why.
        beyond: other losses, by the name under which the row is to say how many milliseconds they take less.
    """
    beyond = beyond or {}
    x, y = pairs(row["local"], row["depth"], DTYPES[row["dtype"]], device)
    scale = torch.tensor(SCALE, device=device, requires_grad=True)

    def step_of(loss: Loss, times: int = 1) -> Callable[[], None]:
        def step() -> None:
            for _ in range(times):
                x.grad = y.grad = scale.grad = None
                loss(x, y, scale).backward()

        return step

    try:
        step = step_of(make())
        steps = [step, step_of(ours(False), row["processes"]), *map(step_of, beyond.values())]
        for each in steps:
            each()
        row["extra_mib"] = peak_mib(step, (x, y), device)
        found = in_turn(steps, device, budget_ms)
    except Unavailable as reason:
        return row | {"unavailable": str(reason)}
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return row | {"unavailable": "out of memory"}
    except Exception as reason:  # a peer's own failure is a result, ours is not
        if row["name"] not in ring_peers.PEERS:
            raise
        return row | {"unavailable": f"{type(reason).__name__}: {str(reason)[:120]}"}
    mine, least, *others = found
    row["ms"], row["rounds"] = statistics.median(mine), len(mine)
    row["over_blocks"] = statistics.median(a / b for a, b in zip(mine, least, strict=True))
    for name, other in zip(beyond, others, strict=True):
        row[name] = statistics.median(a - b for a, b in zip(mine, other, strict=True))
    row["tflops"] = 8 * row["processes"] * row["local"] ** 2 * row["depth"] / row["ms"] / 1e9
    return row


def one_device(arguments: argparse.Namespace, device: str) -> list[Row]:
    """A ring of one, rings played by one device, and where gathering is faster than hopping."""
    rows = []
    common = {"suite": "one", "depth": arguments.depth, "dtype": arguments.dtype}

    def add(name: str, local: int, processes: int, loss: Loss, budget: float, **beyond: Loss) -> None:
        labels = {**common, "name": name, "local": local, "processes": processes}
        rows.append(measure(labels, lambda: loss, device, budget * arguments.budget, beyond))
        say(rows[-1])

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(_backend(device), init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        # Beside itself: what a ratio of two equal things looks like here.
        add("alone", arguments.local, 1, ours(False), 3)
        add("ring of one", arguments.local, 1, ours(None), 3)
        dist.destroy_process_group()
    for size in arguments.played:
        add("played ring", arguments.local, size, ours(PlayedWorld(None, 0, size), HOP), 3)
    for size in arguments.played:
        add("played, strong", max(arguments.total) // size, size, ours(PlayedWorld(None, 0, size), HOP), 0.5)
    for size, total in itertools.product(arguments.played, arguments.gathered):
        world = PlayedWorld(None, 0, size)
        add("played hop", total // size, size, ours(world, HOP), 0.2, beyond_gather_ms=ours(world, GATHER))
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
    # A ring of one neither hops nor gathers.
    names = [name for name in arguments.names if world_size > 1 or name not in ("hf_infcl hop", "hf_infcl gather")]
    for suite, name in itertools.product(arguments.suite, names):
        for local in sizes.get(suite, []):
            row = {"suite": suite, "name": name, "local": local, "processes": world_size}
            row |= {"depth": arguments.depth, "dtype": arguments.dtype}
            if name in LIMITS:
                silent = ours(PlayedWorld(None, rank, world_size, copies=False), LIMITS[name])
                beyond = {"exposed_ms": silent} if world_size > 1 else {}
                row = measure(row, partial(ours, None, LIMITS[name]), device, arguments.budget, beyond)
            else:
                row = measure(row, partial(ring_peers.peer, name, SCALE), device, arguments.budget)
            rows.append(row)
            if rank == 0:
                say(row)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    most = torch.cuda.device_count() if on_gpu else 4
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="*", default=["one", "weak", "strong"], choices=["one", "weak", "strong"])
    parser.add_argument("--processes", nargs="*", type=int, default=[w for w in (1, 2, 4, 8) if w <= most])
    parser.add_argument("--played", nargs="*", type=int, default=[2, 4, 8], help="sizes of the played rings")
    parser.add_argument("--local", type=int, default=65_536 if on_gpu else 768, help="rows of each process")
    totals = [16_384, 65_536] if on_gpu else [768, 3_072]
    parser.add_argument("--total", nargs="*", type=int, default=totals, help="rows of all processes (strong)")
    gathered = [2**k for k in range(11, 18)] if on_gpu else [256, 1_024, 4_096]
    parser.add_argument("--gathered", nargs="*", type=int, default=gathered, help="rows of all, hopping and gathered")
    parser.add_argument("--depth", type=int, default=512 if on_gpu else 128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16" if on_gpu else "fp32")
    parser.add_argument("--names", nargs="*", default=list(ring_peers.NAMES))
    parser.add_argument("--budget", type=float, default=800, help="milliseconds of measuring for each figure")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Who else computes on this machine: times of processes that share cores say little where it is high.
    found = environment() | {"load per core": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"ring_{found['device'].lower().replace(' ', '_')}.json"

    def keep(rows: list[Row]) -> list[Row]:
        file.write_text(json.dumps({"environment": found, "rows": rows}, indent=1) + "\n")
        return rows

    rows = keep(one_device(arguments, device) if "one" in arguments.suite else [])
    if on_gpu:
        torch.cuda.empty_cache()  # what this process keeps for itself, the others may need
    for size in arguments.processes if {"weak", "strong"} & set(arguments.suite) else []:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (size, folder, arguments, device), nprocs=size)
            rows = keep(rows + json.loads(Path(folder, "rows.json").read_text()))
    plot(rows, file.with_suffix(".png"))
    print("\n" + summary(rows))
    print("written:", file)


if __name__ == "__main__":
    main()
