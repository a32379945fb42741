"""A model of the loss's step time on W GPUs, from what one GPU and one link were measured to do.

    python docs/concepts/scaling_model.py            # prints what scaling.md says
    python docs/concepts/scaling_model.py --write    # puts it there

What one GPU does is read from `benchmarks/results`, if a run on the GPU has left its files there.

Forward and backward together are W hops each. A hop takes the longer of its arithmetic and its messages; only the last
yield of a pass, which has nothing left to hide behind, and the elementwise merges come on top.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30
# Bytes of an element that travels: of bfloat16 embeddings, and of their gradients.
TEXT, GRADIENT = 2, 4
PAGE = Path(__file__).with_name("scaling.md")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# The first that has what is looked for.
FILES = ("ring_nvidia_h200.json", "loss_nvidia_h200.json")
HOST = "loss_host_nvidia_h200.json"


@dataclass(frozen=True)
class Link:
    """One direction of a link: seconds for a message are latency + bytes / bandwidth."""

    latency: float
    bandwidth: float  # bytes a second, of endless messages

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> "Link":
        """The link that sends messages of two sizes (bytes) at two measured rates (bytes a second)."""
        seconds = [size / rate for size, rate in (small, large)]
        bandwidth = (large[0] - small[0]) / (seconds[1] - seconds[0])
        return cls(seconds[0] - small[0] / bandwidth, bandwidth)

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


# Measured between two H200 of one host: 100 GiB/s at 16 MiB, 263 GiB/s at 256 MiB.
NVLINK = Link.through((16 * MIB, 100 * GIB), (256 * MIB, 263 * GIB))
# 50 GB/s between nodes is an assumption, and so is its latency: a flat ring sends over one adapter of a node.
NETWORK = Link(50e-6, 50e9)


@dataclass(frozen=True)
class Machine:
    """What a GPU does.

    Attributes:
        rate: operations a second on the four products, of a block that fills the GPU.
        overhead: seconds that a block's launches cost beside it, forward and backward together.
        issue: seconds in which the host issues a block's launches, likewise: a block takes no less.
        memory: bytes a second of elementwise work.
        per_node: GPUs that NVLink joins.
    """

    rate: float
    overhead: float
    issue: float = 0.0
    memory: float = 4e12
    per_node: int = 8

    @classmethod
    def through(cls, depth: int, small: tuple[int, float], large: tuple[int, float], issue: float) -> "Machine":
        """The GPU that takes the measured seconds for the losses of two sizes (rows)."""
        operations = [8 * rows**2 * depth for rows, _ in (small, large)]
        rate = (operations[1] - operations[0]) / (large[1] - small[1])
        return cls(rate, max(0.0, small[1] - operations[0] / rate), issue)


@dataclass(frozen=True)
class Step:
    """Seconds of one step."""

    arithmetic: float
    total: float
    forward_hidden: bool
    backward_hidden: bool

    @property
    def exposed(self) -> float:
        return self.total - self.arithmetic


def step(machine: Machine, ranks: int, rows: int, depth: int) -> Step:
    """The time of a step's loss, forward and backward.

    Args:
        ranks: W.
        rows: n, of each rank.
        depth: D.
    """
    block = 2 * rows**2 * depth / machine.rate  # one product of two blocks
    both = max(4 * block + machine.overhead, machine.issue)
    forward, backward = both / 4, 3 * both / 4
    arithmetic = ranks * (forward + backward)
    if ranks == 1:
        return Step(arithmetic, arithmetic, True, True)
    # Every rank waits for the slowest link of the ring; beyond one node that is the network.
    link = NVLINK if ranks <= machine.per_node else NETWORK
    statistics = 16 * rows  # four float32 numbers a column
    payload, gradient = TEXT * rows * depth, GRADIENT * rows * depth
    there, back = link.seconds(payload) + link.seconds(statistics), link.seconds(payload + statistics + gradient)
    merge = 3 * 4 * rows * depth / machine.memory
    hops = ranks - 1  # each brings one payload, and one yield home
    total = arithmetic + hops * max(0.0, there - forward) + hops * max(0.0, back - backward)
    total += hops * merge + link.seconds(statistics) + link.seconds(gradient)
    return Step(arithmetic, total, there <= forward, back <= backward)


def least_rows(machine: Machine, link: Link, depth: int) -> int:
    """The local batch above which every message hides behind arithmetic (launches not counted in its favour)."""
    rows = 64
    while True:
        block = 2 * rows**2 * depth / machine.rate
        statistics = 16 * rows
        there = link.seconds(TEXT * rows * depth) + link.seconds(statistics)
        back = link.seconds((TEXT + GRADIENT) * rows * depth + statistics)
        if there <= block and back <= 3 * block:
            return rows
        rows += 64


def measured(depth: int) -> tuple[Machine, str]:
    """The GPU of the results, and where it was found."""
    for name in FILES:
        # Smaller blocks do not fill the GPU, and a process alone has a way of its own for them.
        alone = [row for row in _rows(name, depth) if row.get("processes", 1) == 1 and _size(row) >= 32_768]
        times = {_size(row): row["ms"] / 1e3 for row in alone if row["name"] in ("hf_infcl", "alone")}
        if len(times) > 1:
            small, large = min(times), max(times)
            return Machine.through(depth, (small, times[small]), (large, times[large]), _issue()), name
    raise FileNotFoundError(f"none of {', '.join(FILES)} in {RESULTS} has two sizes of D={depth}; give --rate")


def _issue() -> float:
    """Median over small batches, which all wait for the host."""
    if not (RESULTS / HOST).exists():
        return 0.0
    steps = json.loads((RESULTS / HOST).read_text())["steps"]
    return statistics.median(one["ms"]["the general way"] for one in steps) / 1e3


def _rows(name: str, depth: int) -> Iterator[dict[str, Any]]:
    if (RESULTS / name).exists():
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            if "ms" in row and (row["depth"], row["dtype"]) == (depth, "bf16"):
                yield row


def _size(row: dict[str, Any]) -> int:
    return int(row["local"] if "local" in row else row["size"])


def report(machine: Machine, source: str, depth: int) -> Iterator[str]:
    """The lines of the tables."""
    nvlink = f"{NVLINK.latency * 1e6:.0f} us and {NVLINK.bandwidth / GIB:.0f} GiB/s"
    network = f"{NETWORK.latency * 1e6:.0f} us and {NETWORK.bandwidth / 1e9:.0f} GB/s"
    gpu = f"{machine.rate / 1e12:.0f} TFLOP/s, {machine.overhead * 1e3:.2f} ms beside a block"
    gpu += f", which takes the host {machine.issue * 1e3:.1f} ms to issue"
    yield f"One GPU ({source}): {gpu}."
    yield f"NVLink: {nvlink}; the network between nodes: {network}. D = {depth}, bfloat16, nothing gathered."
    yield ""
    yield "| GPUs | local batch | global batch | arithmetic | step | exposed |"
    yield "|---|---|---|---|---|---|"
    for ranks in (2, 8, 64, 1024):
        for rows in (4_096, 16_384, 65_536):
            found = step(machine, ranks, rows, depth)
            yield (
                f"| {ranks:,} | {rows:,} | {ranks * rows:,} | {_time(found.arithmetic)} | {_time(found.total)} | "
                f"{found.exposed / found.total:.1%} |"
            )
    found = step(machine, 32, 12 * MIB // 32, depth)
    yield ""
    yield f"* 12M pairs on 32 GPUs: {_time(found.total)} a step, {found.exposed / found.total:.2%} of it communication."
    for name, link in (("NVLink", NVLINK), ("the network", NETWORK)):
        rows = least_rows(machine, link, depth)
        yield f"* Messages over {name} are hidden from a local batch of {rows:,} on."
    rings = [row for row in _rows(FILES[0], depth) if row["name"] == "hf_infcl hop" and row["processes"] > 1]
    if rings:
        yield ""
        yield "| GPUs | local batch | measured | predicted |"
        yield "|---|---|---|---|"
    for row in rings:
        alone = row["ms"] / 1e3 / row["over_blocks"] / row["processes"]  # in the same rounds, launches included
        own = Machine(8 * row["local"] ** 2 * depth / alone, overhead=0.0)
        predicted = step(own, row["processes"], row["local"], depth).total
        yield f"| {row['processes']} | {row['local']:,} | {_time(row['ms'] / 1e3)} | {_time(predicted)} |"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, help="TFLOP/s of one GPU on the four products, instead of the results'")
    parser.add_argument("--overhead", type=float, default=0.3, help="with --rate: milliseconds of a block's launches")
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--write", action="store_true", help="put it into scaling.md, between its two marks")
    arguments = parser.parse_args()
    if arguments.rate is None:
        machine, source = measured(arguments.depth)
    else:
        machine, source = Machine(arguments.rate * 1e12, arguments.overhead * 1e-3, _issue()), "as given"
    text = "\n".join(report(machine, source, arguments.depth))
    print(text)
    if arguments.write:
        before, _, rest = PAGE.read_text().partition(_MARKS[0])
        _, _, after = rest.partition(_MARKS[1])
        PAGE.write_text(f"{before}{_MARKS[0]}\n{text}\n{_MARKS[1]}{after}")


_MARKS = "<!-- scaling_model.py -->", "<!-- until here -->"


if __name__ == "__main__":
    main()
