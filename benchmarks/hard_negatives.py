"""What a budget of hard negatives saves and costs: memory of the loss, skip ratio in training, and recall.

    python benchmarks/hard_negatives.py quality --data icons32 emoji64 --tokenizer clip-tokenizer
    python benchmarks/hard_negatives.py memory --gib 40 80                      # needs a CUDA device

``quality`` trains a small CLIP from scratch on folders of Parquet files (an image, its name, its captions), so that
runs differ in nothing but the loss: InfoNCE and the k hardest negatives, each with and without a memory bank, from the
first step on or after a start with InfoNCE, all for the same number of steps from the same start. It reports recall on
the test or validation file (pairs of the same picture or name all count), the skip ratio and the hardest similarity
over training, and plots them.

``memory`` finds the largest batches of ViT-B/32 CLIP with LoRA: see hard_negatives_memory.py.
"""

import argparse
import io
import json
import math
import platform
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import hard_negatives_memory
import numpy as np
import torch
from torch import Tensor

from hf_infcl import MemoryBank, contrastive_loss, hard_negative_loss, hardest_negatives
from hf_infcl.evaluation import dataset_retrieval_metrics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHARE = 0.027  # k blocks of all, at which theory gives a skip ratio of 0.891
METRICS = ("mean_recall@1", "image_to_text/recall@1", "image_to_text/recall@5", "text_to_image/recall@1")
_WORDS = 16  # tokens of a caption at most
_QUERIES, _POOL = 512, 8192  # pairs among which the skip ratio is measured


@dataclass
class Pairs:
    """Pictures of one file set on the device, with all their captions as tokens.

    Attributes:
        pictures: (n, 3, side, side) uint8.
        tokens: (captions, length) int64; a picture's are first[i] ... first[i] + count[i] - 1, the first its name.
        first, count: (n,) int64.
        ids: (n, 2) int64, picture and name.
    """

    pictures: Tensor
    tokens: Tensor
    first: Tensor
    count: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """The model's inputs: a caption of each row at random, or without a generator the name."""
        caption = self.first[rows]
        if generator is not None:
            chosen = torch.rand(len(rows), generator=generator).to(DEVICE) * self.count[rows]
            caption = caption + chosen.long().clamp(max=self.count[rows] - 1)
        tokens = self.tokens[caption]
        pixels = self.pictures[rows].float().div_(127.5).sub_(1)
        return {"pixel_values": pixels, "input_ids": tokens, "attention_mask": _mask(tokens)}


def _mask(tokens: Tensor) -> Tensor:
    """The end-of-text token pads as well: what follows the first one is padding."""
    end = tokens == tokens[:, -1:]
    return (end.long().cumsum(1) - end.long() == 0).long()


def read(folder: Path, kinds: tuple[str, ...], tokenizer: Any, most: int) -> Pairs:
    """The pairs of the first Parquet files of these kinds ("train"), at most so many."""
    import pyarrow.parquet as parquet
    from PIL import Image

    files = next(found for kind in kinds if (found := sorted(folder.glob(f"*{kind}*.parquet"))))
    rows: list[dict[str, Any]] = []
    for file in files:
        table = parquet.read_table(file, columns=["image", "text", "captions"])
        rows += table.slice(0, most - len(rows)).to_pylist()

    def picture(row: dict[str, Any]) -> np.ndarray:
        image = Image.open(io.BytesIO(row["image"]["bytes"]))
        if image.mode != "L":  # transparent ones onto white
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return np.asarray(image.convert("RGB"))

    with ThreadPoolExecutor(8) as pool:
        pictures = np.stack(list(pool.map(picture, rows)))
    captions = [[row["text"], *(c for c in row["captions"] if c != row["text"])] for row in rows]
    flat = [caption for several in captions for caption in several]
    tokens = tokenizer(flat, padding="max_length", truncation=True, max_length=_WORDS, return_tensors="pt").input_ids
    tokens[:, -1] = tokenizer.eos_token_id
    count = torch.tensor([len(several) for several in captions])
    names: dict[str, int] = {}
    ids = [[i, names.setdefault(row["text"].lower(), len(names))] for i, row in enumerate(rows)]
    parts = (torch.from_numpy(pictures).permute(0, 3, 1, 2), tokens, count.cumsum(0) - count, count, torch.tensor(ids))
    return Pairs(*(part.to(DEVICE) for part in parts))


def small_clip(side: int, tokenizer: Any, seed: int) -> Any:
    """A CLIP of 4 layers and 256 features on each side, and 64 patches a picture."""
    from transformers import CLIPConfig, CLIPModel

    from hf_infcl.models.embedding import prepare_dual_encoder

    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    words = {"vocab_size": len(tokenizer), "max_position_embeddings": _WORDS, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(seed)
    config = CLIPConfig(
        vision_config={**shape, "image_size": side, "patch_size": side // 8},
        text_config={**shape, **words, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.eos_token_id},
        projection_dim=256,
    )
    return prepare_dual_encoder(CLIPModel(config).to(DEVICE))


@dataclass(frozen=True)
class Run:
    """A loss. k None: InfoNCE. start: the share of steps with InfoNCE before k takes over."""

    k: int | None
    bank: int
    start: float = 0.0

    def __str__(self) -> str:
        name = "InfoNCE" if self.k is None else f"k = {self.k}"
        return f"{name}{f', from {self.start:.0%}' if self.start else ''}{', bank' if self.bank else ''}"


@torch.no_grad()
def embed(model: Any, pairs: Pairs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings of some rows' pictures and names."""
    model.eval()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=DEVICE.type == "cuda"):
        outputs = [model(**pairs.batch(part, None)) for part in rows.split(1024)]
    model.train()
    images, texts = (torch.cat([output[i] for output in outputs]).float() for i in range(2))
    return images, texts


def skips(model: Any, data: Pairs, k: int, step: int) -> list[dict[str, Any]]:
    """The search of some hundred training pictures among some thousand names: skip ratio, and theory's in random order.

    One block is so narrow that k of them are 2.7% of all (89.1% skipped), where that leaves two columns; one is 128.
    """
    rows = torch.arange(min(len(data), _POOL), device=DEVICE)
    images, texts = embed(model, data, rows)
    queries, ids = images[:_QUERIES], data.ids[rows]
    positive = (queries * texts[:_QUERIES]).sum(1)
    points = []
    for block in (max(2, round(SHARE * len(rows) / k)), 128):
        scores, _, stats = hardest_negatives(  # this backend takes any block size
            queries, texts, k, ids=ids[:_QUERIES], key_ids=ids, block_size=block, backend="torch"
        )
        t = torch.arange(1, -(-len(rows) // block) + 1, dtype=torch.float64)
        points.append(
            {
                "step": step,
                "block": block,
                "theory": float(((1 - 1 / t) ** k).mean()),
                "row_skip_ratio": float(stats["row_skip_ratio"]),
                "hardest_similarity": float(scores[:, 0].mean()),
                "hardest_beats_positive": float((scores[:, 0] > positive).float().mean()),
            }
        )
    return points


def train(data: Pairs, test: Pairs, tokenizer: Any, run: Run, seed: int, steps: int, args: Any) -> dict[str, Any]:
    model = small_clip(data.pictures.shape[-1], tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1, fused=True)
    rise = max(steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / rise, 1 - step / (steps + 1)))
    generator = torch.Generator().manual_seed(seed)
    bank = MemoryBank(run.bank, model.config.projection_dim, device=DEVICE) if run.bank else None
    epochs = math.ceil(steps * args.batch_size / len(data)) + 1
    order = torch.cat([torch.randperm(len(data), generator=generator) for _ in range(epochs)])
    curve: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for step, rows in enumerate(order[: steps * args.batch_size].to(DEVICE).split(args.batch_size)):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=DEVICE.type == "cuda"):
            output = model(**data.batch(rows, generator))
        images, texts, ids = output.image_embeds.float(), output.text_embeds.float(), data.ids[rows]
        scale = model.logit_scale.exp().clamp(max=100.0)
        if run.k is None or step < run.start * steps:
            loss = contrastive_loss(images, texts, scale, ids=ids, bank=bank)
        else:
            loss = hard_negative_loss(images, texts, scale, k=run.k, ids=ids, bank=bank)
        if run.k is not None and seed == 0 and step % max(steps // args.points, 1) == 0:
            paused = time.perf_counter()
            curve += skips(model, data, run.k, step)
            begin += time.perf_counter() - paused
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if bank is not None:
            bank.push(images, texts, ids)
    last = loss.item()
    seconds = time.perf_counter() - begin
    if not math.isfinite(last):
        raise RuntimeError(f"{run}: the loss is {last}")
    metrics = dataset_retrieval_metrics(*embed(model, test, torch.arange(len(test), device=DEVICE)), test.ids)
    return {"metrics": {name: metrics[name] for name in METRICS}, "seconds": seconds, "loss": last, "curve": curve}


def quality(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    begin = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sets = {
        folder.name: (
            read(folder, ("train",), tokenizer, args.largest_set),
            read(folder, ("test", "val"), tokenizer, args.largest_set),
        )
        for folder in args.data
    }
    runs = [Run(k, bank) for bank in args.bank_sizes for k in (None, *args.ks)]
    runs += [Run(k, 0, args.start) for k in args.ks] if args.start else []
    steps, some = args.steps, min(10, args.steps)
    if args.seconds is not None:
        data, test = next(iter(sets.values()))
        for _ in range(2):  # the first compiles
            once = train(data, test, tokenizer, Run(args.ks[-1], args.bank_sizes[-1]), 1, some, args)["seconds"] / some
        left = args.seconds - (time.perf_counter() - begin)
        steps = max(some, min(steps, int(left / (1.3 * once * len(runs) * len(sets) * args.seeds))))
    results: dict[str, Any] = {"torch": torch.__version__, "runs": []}
    results["settings"] = {name: getattr(args, name) for name in ("batch_size", "learning_rate", "seeds", "start")}
    results["settings"] |= {"steps": steps, "sets": {name: [len(a), len(b)] for name, (a, b) in sets.items()}}
    for name, (data, test) in sets.items():
        for run in runs:
            done = [train(data, test, tokenizer, run, seed, steps, args) for seed in range(args.seeds)]
            row: dict[str, Any] = {"set": name, "run": str(run), "k": run.k, "bank": run.bank, "start": run.start}
            for metric in METRICS:
                values = [one["metrics"][metric] for one in done]
                row |= {metric: statistics.mean(values), f"{metric} spread": max(values) - min(values)}
            row |= {key: statistics.mean(one[key] for one in done) for key in ("seconds", "loss")}
            row["curve"] = done[0]["curve"]
            results["runs"].append(row)
            print(f"{name:8} {row['run']:22} {row['mean_recall@1']:.4f} {row['seconds']:6.1f} s", flush=True)
    results["seconds"] = time.perf_counter() - begin
    return results


def summary(results: dict[str, Any]) -> str:
    lines = [
        f"{'set':8} {'loss':22} {'mean R@1':>9} {'spread':>7} {'i2t R@5':>8} {'skip':>6} {'theory':>7} {'beats':>8}"
    ]
    for row in results["runs"]:
        narrow = row["curve"][::2]
        means = (
            [statistics.mean(point[key] for point in narrow) for key in ("row_skip_ratio", "theory")] if narrow else []
        )
        skipped = f"{means[0]:6.3f} {means[1]:7.3f} {narrow[-1]['hardest_beats_positive']:8.3f}" if narrow else ""
        lines.append(
            f"{row['set']:8} {row['run']:22} {row['mean_recall@1']:9.4f} {row['mean_recall@1 spread']:7.4f} "
            f"{row['image_to_text/recall@5']:8.4f} {skipped}"
        )
    settings = results["settings"]
    lines.append(f"{settings['steps']} steps of {settings['batch_size']}, {settings['seeds']} seed(s)")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = list(results["settings"]["sets"])
    figure, axes = plt.subplots(len(names), 3, figsize=(15, 4.2 * len(names)), layout="constrained", squeeze=False)
    for name, (recall, skipped, hardest) in zip(names, axes, strict=True):
        rows = [row for row in results["runs"] if row["set"] == name]
        recall.barh(
            [row["run"] for row in rows],
            [row["mean_recall@1"] for row in rows],
            xerr=[row["mean_recall@1 spread"] / 2 for row in rows],
        )
        recall.invert_yaxis()
        recall.set(xlabel="mean recall@1 (bars: half the spread of seeds)", title=name)
        for row in rows:
            for line, points in (("-", row["curve"][::2]), (":", row["curve"][1::2])):
                if points:
                    steps, label = [point["step"] for point in points], f"{row['run']}, block {points[0]['block']}"
                    (drawn,) = skipped.plot(steps, [point["row_skip_ratio"] for point in points], line, label=label)
                    skipped.axhline(points[0]["theory"], color=drawn.get_color(), linewidth=0.4)
            if row["curve"]:
                points = row["curve"][::2]
                steps = [point["step"] for point in points]
                hardest.plot(steps, [point["hardest_beats_positive"] for point in points], label=row["run"])
        skipped.set(xlabel="step", ylabel="row skip ratio (thin lines: random order)")
        hardest.set(xlabel="step", ylabel="share of anchors whose hardest negative beats the pair")
        skipped.legend(fontsize=5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    trained, sized = modes.add_parser("quality"), modes.add_parser("memory")
    trained.add_argument("--data", type=Path, nargs="+", required=True, help="folders with *train*.parquet and a test")
    trained.add_argument("--tokenizer", required=True, help="folder of a CLIP tokenizer")
    trained.add_argument("--largest_set", type=int, default=120_000, help="pictures read of each file set")
    trained.add_argument("--batch_size", type=int, default=1024)
    trained.add_argument("--steps", type=int, default=1000)
    trained.add_argument("--seconds", type=float, help="of all runs together: fewer steps where they do not fit")
    trained.add_argument("--learning_rate", type=float, default=1e-3)
    trained.add_argument("--seeds", type=int, default=1)
    trained.add_argument("--ks", type=int, nargs="+", default=[16, 64, 256])
    trained.add_argument("--bank_sizes", type=int, nargs="+", default=[0, 4096])
    trained.add_argument(
        "--start", type=float, default=0.5, help="share of InfoNCE first in a second kind of runs; 0: none"
    )
    trained.add_argument("--points", type=int, default=4, help="of the skip ratio's curve")
    sized.add_argument("--gib", type=int, nargs="+", default=[40, 80])
    sized.add_argument("--ks", type=int, nargs="+", default=[16, 64, 256])
    sized.add_argument("--micro_batch", type=int, default=256)
    sized.add_argument("--largest", type=int, default=2**19, help="largest batch tried: time, not memory, ends there")
    for mode in (trained, sized):
        mode.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    if args.mode == "memory" and DEVICE.type != "cuda":
        sys.exit("memory needs a CUDA device")
    if args.mode == "memory":
        results = hard_negatives_memory.memory(args.gib, args.ks, args.micro_batch, args.largest)
        shown = hard_negatives_memory.table(results)
    else:
        results = quality(args)
        shown = summary(results)
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine()
    output = args.out / f"hard_negatives_{args.mode}_{re.sub(r'[^a-z0-9]+', '_', device.lower())}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.mode == "quality":
        plot(results, output.with_suffix(".png"))
    print(shown)


if __name__ == "__main__":
    main()
