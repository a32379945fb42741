"""A model of the loss's step time on W GPUs, from what one GPU and one link were measured to do.

    python docs/concepts/scaling_model.py                       # the tables of scaling.md
    python docs/concepts/scaling_model.py --rate 420 --results benchmarks/results/ring_nvidia_h200.json

Forward and backward together are W hops each. A hop takes the longer of its arithmetic and its messages; only the last
yield of a pass, which has nothing left to hide behind, and the elementwise merges come on top.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

MIB, GIB = 2**20, 2**30


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
        memory: bytes a second of elementwise work.
        per_node: GPUs that NVLink joins.
    """

    rate: float
    overhead: float = 0.4e-3
    memory: float = 4e12
    per_node: int = 8


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


def step(machine: Machine, ranks: int, rows: int, depth: int, width: int = 2, gradient_width: int = 4) -> Step:
    """The time of a step's loss, forward and backward.

    Args:
        ranks: W.
        rows: n, of each rank.
        depth: D.
        width: bytes of an embedding's element; 2 for bfloat16.
        gradient_width: bytes of an element of a gradient that travels; 4, or 2 with HF_INFCL_BF16_GRADIENTS=1.
    """
    block = 2 * rows**2 * depth / machine.rate  # one product of two blocks
    forward, backward = block + machine.overhead / 4, 3 * block + 3 * machine.overhead / 4
    arithmetic = ranks * (forward + backward)
    if ranks == 1:
        return Step(arithmetic, arithmetic, True, True)
    # Every rank waits for the slowest link of the ring; beyond one node that is the network.
    link = NVLINK if ranks <= machine.per_node else NETWORK
    statistics = 16 * rows  # four float32 numbers a column
    payload, gradient = width * rows * depth, gradient_width * rows * depth
    there, back = link.seconds(payload) + link.seconds(statistics), link.seconds(payload + statistics + gradient)
    merge = 3 * 4 * rows * depth / machine.memory
    hops = ranks - 1  # each brings one payload, and one yield home
    total = arithmetic + hops * max(0.0, there - forward) + hops * max(0.0, back - backward)
    total += hops * merge + link.seconds(statistics) + link.seconds(gradient)
    return Step(arithmetic, total, there <= forward, back <= backward)


def least_rows(machine: Machine, link: Link, depth: int, width: int = 2, gradient_width: int = 4) -> int:
    """The local batch above which every message hides behind arithmetic (launches not counted in its favour)."""
    rows = 64
    while True:
        block = 2 * rows**2 * depth / machine.rate
        statistics = 16 * rows
        there = link.seconds(width * rows * depth) + link.seconds(statistics)
        back = link.seconds((width + gradient_width) * rows * depth + statistics)
        if there <= block and back <= 3 * block:
            return rows
        rows += 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=418, help="TFLOP/s of one GPU on the four products")
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--results", type=Path, help="a results file of benchmarks/ring.py to hold the model against")
    arguments = parser.parse_args()
    machine, depth = Machine(arguments.rate * 1e12), arguments.depth
    print(f"links: NVLink {NVLINK.latency * 1e6:.0f} us + {NVLINK.bandwidth / GIB:.0f} GiB/s, ", end="")
    print(f"network {NETWORK.latency * 1e6:.0f} us + {NETWORK.bandwidth / 1e9:.0f} GB/s\n")
    print("| GPUs | local batch | global batch | arithmetic | step | exposed |")
    print("|---|---|---|---|---|---|")
    for ranks in (2, 8, 64, 1024):
        for rows in (1_024, 4_096, 16_384, 65_536):
            found = step(machine, ranks, rows, depth)
            share = found.exposed / found.total
            print(f"| {ranks:,} | {rows:,} | {ranks * rows:,} | {_time(found.arithmetic)} | ", end="")
            print(f"{_time(found.total)} | {share:.1%} |")
    found = step(machine, 32, 12 * MIB // 32, depth)
    print(f"\n12M pairs on 32 GPUs: {_time(found.total)} a step, {found.exposed / found.total:.2%} exposed")
    for name, link in (("NVLink", NVLINK), ("the network", NETWORK)):
        print(f"messages over {name} are hidden from a local batch of {least_rows(machine, link, depth):,} on", end="")
        print(f" ({least_rows(machine, link, depth, gradient_width=2):,} with gradients in bfloat16)")
    if arguments.results is not None:
        compare(arguments.results)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def compare(path: Path) -> None:
    """Prediction beside measurement; the rate is that of the file's own single-GPU row, where it has one."""
    rows = [row for row in json.loads(path.read_text())["rows"] if "ms" in row]
    alone = [row for row in rows if row["name"] == "alone"]
    print("\n| GPUs | local batch | measured | predicted |\n|---|---|---|---|")
    for row in rows:
        if row["name"] not in ("hf_infcl", "played ring"):
            continue
        rate = next((one["tflops"] for one in alone if one["local"] == row["local"]), row["tflops"])
        machine = Machine(rate * 1e12, overhead=0.0)  # the rate of that size holds its launches already
        predicted = step(machine, row["processes"], row["local"], row["depth"]).total
        print(f"| {row['processes']} | {row['local']:,} | {_time(row['ms'] / 1e3)} | {_time(predicted)} |")


if __name__ == "__main__":
    main()
