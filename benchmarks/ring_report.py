"""What `benchmarks/ring.py` prints and draws of its rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def say(row: Row) -> None:
    """A row in a line."""
    head = f"{row['suite']:7} {row['name']:16} W={row['processes']:<3} n={row['local']:<7} D={row['depth']:<5}"
    if "unavailable" in row:
        print(head, row["unavailable"], flush=True)
        return
    figures = f"{row['ms']:9.2f} ms {row['tflops']:8.3f} TFLOP/s {row['extra_mib']:8.1f} MiB"
    beyond = [f" {name.removesuffix('_ms')} {row[name]:.2f} ms" for name in _BEYOND if name in row]
    print(f"{head} {figures} / blocks {row['over_blocks']:.3f}{''.join(beyond)}", flush=True)


_BEYOND = ("exposed_ms", "beyond_gather_ms")


def summary(rows: Sequence[Row]) -> str:
    """The figures that claims are made of, in a few lines."""
    measured = [row for row in rows if "ms" in row]
    lines = []
    one = {name: [row for row in measured if row["name"] == name] for name in _OF_ONE}
    for row in one["ring of one"]:
        equal = one["alone"][0]["over_blocks"]
        lines.append(f"ring of one / plain loss: {row['over_blocks']:.4f}, at most 1.01 (plain / plain: {equal:.4f})")
    for row in one["played ring"]:
        lines.append(
            f"played ring of {row['processes']} / its blocks: {row['over_blocks']:.4f}, at most 1.03; extra memory "
            f"{row['extra_mib']:.1f} MiB, of the plain loss {one['alone'][0]['extra_mib']:.1f}"
        )
    for size in dict.fromkeys(row["processes"] for row in one["played hop"]):
        lines.append(f"W={size}, hop / gather: " + _gathering([r for r in one["played hop"] if r["processes"] == size]))
    for row in measured:
        if row["suite"] != "one":
            exposed = f", exposed {row['exposed_ms']:.2f}" if "exposed_ms" in row else ""
            lines.append(
                f"{row['suite']:6} W={row['processes']} N={row['processes'] * row['local']:<9,} {row['name']:16}"
                f"{row['ms']:9.2f} ms{exposed}, {row['extra_mib']:.0f} MiB"
            )
    return "\n".join(lines)


def _gathering(rows: Sequence[Row]) -> str:
    """Both times at each size, and up to which gathering pays."""
    times, limit, pays = [], 0, True
    for row in sorted(rows, key=lambda row: row["local"]):
        total, gather = row["processes"] * row["local"], row["ms"] - row["beyond_gather_ms"]
        times.append(f"{total:,} rows {row['ms']:.2f} / {gather:.2f} ms")
        pays = pays and row["ms"] > 1.05 * gather  # less is not worth the memory
        limit = total if pays else limit
    return f"{', '.join(times)}; gathering is faster by 5% up to {limit:,}"


_OF_ONE = ("alone", "ring of one", "played ring", "played hop")
# What one device plays stands beside what several do.
_PLAYED = {"weak": "played ring", "strong": "played, strong"}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Weak scaling (each process has as many rows) and strong scaling (all have, together): each process's rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, (suite, played) in zip(axes, _PLAYED.items(), strict=True):
        curves: dict[str, list[Row]] = {}
        for row in rows:
            if "ms" in row and (row["suite"] == suite or row["name"] == played):
                total = f", N = {row['local'] * row['processes']:,}" if suite == "strong" else ""
                name = "one device plays a rank" if row["name"] == played else row["name"]
                curves.setdefault(name + total, []).append(row)
        for label, points in curves.items():
            axis.plot([row["processes"] for row in points], [row["tflops"] for row in points], marker="o", label=label)
        axis.set(title=f"{suite} scaling", xlabel="processes", ylabel="TFLOP/s of each on 4 products", ylim=(0, None))
        if curves:
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({row["processes"] for points in curves.values() for row in points}))
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
