"""What a budget of hard negatives saves and costs: memory of the loss, skip ratio in training, and recall.

    python benchmarks/hard_negatives.py quality --data icons32 emoji64 --tokenizer clip-tokenizer
    python benchmarks/hard_negatives.py merge first/hard_negatives_quality_*.json second/hard_negatives_quality_*.json
    python benchmarks/hard_negatives.py memory --gib 40 80                      # needs a CUDA device

``quality`` asks about fine-tuning, on folders of Parquet files (an image, its name, its captions). For every set and
seed it trains a small CLIP with InfoNCE, the base, and goes on from its weights with each loss for equally many steps:
InfoNCE and the k hardest negatives, each with and without a memory bank. Runs of a seed differ in nothing but the loss;
``--scratch`` adds ones without a base, for as many steps as both stages together. It reports recall on the test or
validation file (pairs of the same picture or name all count), each run's difference to plain InfoNCE of its seed, and,
for seed 0, the skip ratio and how hard the negatives are over the training of the base and of each loss.

Sets and seeds can run in processes of their own, each with an ``--out`` folder: the results hold every seed's values,
and ``merge`` joins those of the same settings. So give such processes their steps and not ``--seconds``, by which each
would choose its own. A process that is cut short leaves the runs that it has finished.

``memory`` finds the largest batches of ViT-B/32 CLIP with LoRA: see hard_negatives_memory.py.
"""

import argparse
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import hard_negatives_memory
import torch
from hard_negatives_quality import DEVICE, METRICS, Pairs, Plan, Run, one_seed, read, small_clip, train

REFERENCE = str(Run())
Keep = Callable[[dict[str, Any]], object]


def shortened(plan: Plan, data: Pairs, tokenizer: Any, trainings: int, seconds: float) -> Plan:
    """As many steps of both stages, in proportion, as so many trainings of all runs can take in the time."""
    some = min(10, plan.steps)
    run, model = Run(plan.ks[-1], plan.bank_sizes[-1]), small_clip(data.pictures.shape[-1], tokenizer, 0)
    batches = data.draw(some, plan.batch_size, 0)
    once = [train(model, data, batches, run, plan, ())["seconds"] / some for _ in range(2)][-1]  # the first compiles
    steps = sum(len(range(plan.base_steps + plan.steps)[plan.steps_of(run)]) for run in plan.runs())
    share = min(1.0, seconds / (1.3 * once * steps * trainings))
    return replace(plan, base_steps=max(int(share * plan.base_steps), 1), steps=max(int(share * plan.steps), 1))


def quality(args: argparse.Namespace, device: str, keep: Keep) -> dict[str, Any]:
    """keep: called with the results after every run, so that a process cut short leaves what it has."""
    from transformers import AutoTokenizer

    begin = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sets = {
        folder.name: [read(folder, kinds, tokenizer, args.largest_set) for kinds in (("train",), ("test", "val"))]
        for folder in args.data
    }
    options = {field.name: getattr(args, field.name) for field in fields(Plan)}
    plan = Plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})
    print(f"read in {time.perf_counter() - begin:.0f} s", flush=True)
    if args.seconds is not None:
        left = args.seconds - (time.perf_counter() - begin)
        plan = shortened(plan, next(iter(sets.values()))[0], tokenizer, len(sets) * len(args.seeds), left)
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "settings": asdict(plan)}
    results["sets"] = {name: [len(part) for part in parts] for name, parts in sets.items()}
    results["runs"] = []
    for name, (data, test) in sets.items():
        for seed in args.seeds:
            for row in one_seed(data, test, tokenizer, plan, seed):
                results["runs"].append({"set": name, **row})
                keep(results)
                print(
                    f"{name:8} seed {seed} {row['run']:18} {row['mean_recall@1']:.4f} {row['seconds']:6.1f} s",
                    flush=True,
                )
    return results


def merge(files: list[Path]) -> dict[str, Any]:
    """The runs of several results as one.

    Raises:
        ValueError: they differ in settings, or hold the same run twice.
    """
    first, *others = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    for file, other in zip(files[1:], others, strict=True):
        for name in ("device", "torch", "settings"):
            if other[name] != first[name]:
                raise ValueError(
                    f"{name} must be the same in all files, got {first[name]} and, in {file}, {other[name]}"
                )
        for name, sizes in other["sets"].items():
            if first["sets"].setdefault(name, sizes) != sizes:
                raise ValueError(f"{name} must be as large in all files, got {first['sets'][name]} and {sizes}")
        first["runs"] += other["runs"]
    keys = [(row["set"], row["run"], row["seed"]) for row in first["runs"]]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"files must not hold a run twice, got {twice[0]} more than once")
    return first


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds of every set and run: mean and spread, and mean and standard error of the paired difference."""
    reference = {(row["set"], row["seed"]): row for row in runs if row["run"] == REFERENCE}
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(runs, key=lambda row: (row["set"], row["seed"])):
        if (row["set"], row["seed"]) not in reference:
            continue  # cut short before there was anything to compare with
        grouped.setdefault((row["set"], row["run"]), []).append(row)
    found = []
    for (name, run), rows in grouped.items():
        line: dict[str, Any] = {"set": name, "run": run, "seeds": [row["seed"] for row in rows]}
        for metric in METRICS:
            values = [row[metric] for row in rows]
            line[metric] = {"mean": statistics.mean(values), "spread": max(values) - min(values)}
            if run == REFERENCE:
                continue
            gains = [row[metric] - reference[name, row["seed"]][metric] for row in rows]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
            line[metric] |= {"difference": statistics.mean(gains), "standard_error": error}
        found.append(line | {key: statistics.mean(row[key] for row in rows) for key in ("loss", "scale", "seconds")})
    return found


def curve(results: dict[str, Any], name: str, run: str, k: int | None = None, kind: str = "narrow") -> list[Any]:
    """The points of a run's curve, for one k where it follows several."""
    points = [point for row in results["runs"] if (row["set"], row["run"]) == (name, run) for point in row["curve"]]
    return [point for point in points if point["kind"] == kind and point["k"] == (k or points[0]["k"])]


def summary(results: dict[str, Any]) -> str:
    head = ["set", "run", "R@1", "spread", "difference", "i2t R@5", "difference", "skip", "theory", "beats", "s"]
    table = [head]
    for line in results["compared"]:
        cells = [line["set"], line["run"]]
        for metric, shown in (("mean_recall@1", ("mean", "spread")), ("image_to_text/recall@5", ("mean",))):
            found = line[metric]
            error = "" if found.get("standard_error") is None else f" ± {found['standard_error']:.4f}"
            cells += [f"{found[key]:.4f}" for key in shown]
            cells.append(f"{found['difference']:+.4f}{error}" if "difference" in found else "")
        points = curve(results, line["set"], line["run"])
        for key in ("row_skip_ratio", "theory", "hardest_beats_positive"):
            cells.append(f"{points[-1][key]:.3f}" if points else "")
        table.append([*cells, f"{line['seconds']:.0f}"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    settings, seeds = results["settings"], sorted({row["seed"] for row in results["runs"]})
    return "\n".join(
        [
            *lines,
            f"base {settings['base_steps']} steps, then {settings['steps']}, of {settings['batch_size']} pairs; seeds "
            f"{seeds}; difference to {REFERENCE} of the same seed, mean ± standard error; skip, theory, beats: at the "
            f"end, seed 0, k = {settings['ks'][0]} where there is none",
        ]
    )


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    names, ks = list(results["sets"]), results["settings"]["ks"]
    colours = {k: f"C{i}" for i, k in enumerate([None, *ks])}
    figure, axes = plt.subplots(len(names), 3, figsize=(16, 4.4 * len(names)), layout="constrained", squeeze=False)
    for name, (recall, skipped, hardest) in zip(names, axes, strict=True):
        rows = [row for row in results["runs"] if row["set"] == name]
        base = [row["mean_recall@1"] for row in rows if row["stage"] == "base"]
        recall.axvline(statistics.mean(base), color="grey", linewidth=1, label="base")
        for row in rows:
            if row["stage"] != "base":
                recall.plot(row["mean_recall@1"], row["run"], "o", color=colours[row["k"]], alpha=0.6)
        recall.invert_yaxis()
        recall.set(xlabel="mean recall@1, a point for each seed", title=name)
        recall.legend()
        for row in (row for row in rows if row["curve"]):
            dash = {"tuned": "--" if row["bank"] else "-", "base": "-", "scratch": ":"}[row["stage"]]
            # A run that goes on from the base begins with the base's last point.
            points = curve(results, name, row["run"])
            points = curve(results, name, "base")[-1:] * (row["stage"] == "tuned") + points
            colour = "grey" if row["stage"] == "base" else colours[row["k"]]
            hardest.plot(
                [point["step"] for point in points],
                [point["hardest_beats_positive"] for point in points],
                dash,
                color=colour,
                label=row["run"],
            )
            for k in ks if row["stage"] == "base" else [row["k"]] * (row["k"] is not None):
                for kind, width in (("narrow", 1.6), ("wide", 0.7)):
                    points = curve(results, name, row["run"], k, kind)
                    points = curve(results, name, "base", k, kind)[-1:] * (row["stage"] == "tuned") + points
                    label = f"k = {k}, {points[0]['block']} columns" if row["stage"] == "base" else None
                    steps, ratios = ([point[key] for point in points] for key in ("step", "row_skip_ratio"))
                    skipped.plot(steps, ratios, dash, color=colours[k], linewidth=width, label=label)
                    skipped.axhline(points[0]["theory"], color=colours[k], linewidth=0.4)
        for axis in (skipped, hardest):
            axis.axvline(results["settings"]["base_steps"], color="black", linewidth=0.4)
        skipped.set(
            xlabel="step", ylabel="row skip ratio (thin lines across: random order)", title="dashed: with a bank"
        )
        hardest.set(xlabel="step", ylabel="share of anchors whose hardest negative beats the pair")
        for axis in (skipped, hardest):
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    trained, merged, sized = (modes.add_parser(name) for name in ("quality", "merge", "memory"))
    trained.add_argument("--data", type=Path, nargs="+", required=True, help="folders with *train*.parquet and a test")
    trained.add_argument("--tokenizer", required=True, help="folder of a CLIP tokenizer")
    trained.add_argument("--largest_set", type=int, default=120_000, help="pictures read of each file set")
    trained.add_argument("--batch_size", type=int, default=1024)
    trained.add_argument("--base_steps", type=int, default=1000, help="with InfoNCE, from scratch")
    trained.add_argument("--steps", type=int, default=300, help="with each loss, from the base")
    trained.add_argument("--seconds", type=float, help="of all runs together: fewer steps where they do not fit")
    trained.add_argument("--base_learning_rate", type=float, default=1e-3, help="of what starts from scratch")
    trained.add_argument("--learning_rate", type=float, default=3e-4, help="of what starts from the base")
    trained.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    trained.add_argument("--ks", type=int, nargs="+", default=[16, 64, 256])
    trained.add_argument("--bank_sizes", type=int, nargs="+", default=[0, 4096], help="0, no bank, must be among them")
    trained.add_argument("--scratch", action="store_true", help="also every loss without a base")
    trained.add_argument("--points", type=int, default=4, help="of the skip ratio's curve, in either stage")
    merged.add_argument("files", type=Path, nargs="+", help="results of quality")
    sized.add_argument("--gib", type=int, nargs="+", default=[40, 80])
    sized.add_argument("--ks", type=int, nargs="+", default=[16, 64, 256])
    sized.add_argument("--micro_batch", type=int, default=256)
    sized.add_argument("--largest", type=int, default=2**19, help="largest batch tried: time, not memory, ends there")
    for mode in (trained, merged, sized):
        mode.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    if args.mode == "memory" and DEVICE.type != "cuda":
        sys.exit("memory needs a CUDA device")
    if args.mode == "quality" and 0 not in args.bank_sizes:
        sys.exit(f"--bank_sizes must hold 0, against which all is compared, got {args.bank_sizes}")
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine()
    topic = "memory" if args.mode == "memory" else "quality"
    output = args.out / f"hard_negatives_{topic}_{re.sub(r'[^a-z0-9]+', '_', device.lower())}.json"
    output.parent.mkdir(parents=True, exist_ok=True)

    def keep(results: dict[str, Any]) -> None:
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if args.mode == "memory":
        results = hard_negatives_memory.memory(args.gib, args.ks, args.micro_batch, args.largest, keep)
        print(hard_negatives_memory.head(results))
    else:
        results = merge(args.files) if args.mode == "merge" else quality(args, device, keep)
        results["compared"] = compared(results["runs"])
        plot(results, output.with_suffix(".png"))
        print(summary(results))
    keep(results)


if __name__ == "__main__":
    main()
