"""What a budget of hard negatives saves and costs: memory of the loss, skip ratio in training, and recall.

    python benchmarks/hard_negatives.py quality --model_name_or_path M --dataset_name D --dataset_test_split test
    python benchmarks/hard_negatives.py memory --gib 40 80                      # needs a CUDA device

``quality`` embeds a data set once with a frozen model and trains a linear head on each side, so that runs differ in
nothing but the loss: InfoNCE, the k hardest negatives for several k, each with and without a memory bank, all for the
same number of steps from the same start, several seeds. It reports recall on the test split (pairs of the same picture
or caption all count), the skip ratio and the hardest similarity over training, and plots them.

``memory`` finds the largest batch whose loss and gradient fit beside embeddings and their gradients: dense InfoNCE with
float32 logits, this project's InfoNCE, and the hard-negative loss. Encoder memory is not part of it: accumulation keeps
that at one micro-batch's, whatever the batch.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_infcl import MemoryBank, contrastive_loss, hard_negative_loss
from hf_infcl.cli.embedding import embed_pairs
from hf_infcl.evaluation import dataset_retrieval_metrics

RESULTS = Path(__file__).parent / "results"
SHARE = 0.027  # k blocks of all, at which theory gives a skip ratio of 0.891
METRICS = ("mean_recall@1", "image_to_text/recall@1", "image_to_text/recall@5", "text_to_image/recall@1")


# ---- Quality ----


def embedded(args: argparse.Namespace, split: str) -> dict[str, Tensor]:
    """Frozen embeddings of a split, from the cache where they have been computed before."""
    cache = None if args.cache is None else Path(args.cache) / f"{split}.pt"
    if cache is not None and cache.is_file():
        found: dict[str, Tensor] = torch.load(cache, weights_only=True)
        return found
    fields = dict.fromkeys(("adapter", "model_revision", "dtype", "dataset_config", "dataset_revision", "image_root"))
    given = SimpleNamespace(**{**fields, **vars(args)}, per_device_eval_batch_size=64, dataloader_num_workers=0)
    result = embed_pairs(given, split=split, max_samples=None)
    found = {"images": result.image_embeds, "texts": result.text_embeds, "ids": result.ids}
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, cache)
    return found


class Heads(torch.nn.Module):
    """A linear map on each side, from the same start for a seed, and a scale."""

    def __init__(self, dim: int, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.image, self.text = (torch.nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.log_scale = torch.nn.Parameter(torch.tensor(math.log(20.0)))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)


def train(
    data: dict[str, Tensor], test: dict[str, Tensor], k: int | None, bank_size: int, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One run. k None: InfoNCE."""
    heads = Heads(data["images"].shape[1], seed).to(data["images"].device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=args.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / args.steps, 0.0))
    bank = MemoryBank(bank_size, data["images"].shape[1], device=data["images"].device) if bank_size else None
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.randperm(len(data["images"]), generator=generator) for _ in range(args.epochs_at_most)])
    curve: list[dict[str, float]] = []
    start = time.perf_counter()
    for step, batch in enumerate(rows.split(args.batch_size)[: args.steps]):
        images, texts = heads(data["images"][batch], data["texts"][batch])
        ids, scale = data["ids"][batch], heads.log_scale.exp().clamp(max=100.0)
        if k is None:
            loss = contrastive_loss(images, texts, scale, ids=ids, bank=bank)
        else:
            loss = hard_negative_loss(images, texts, scale, k=k, ids=ids, bank=bank)
            if step % max(args.steps // 5, 1) == 0:
                # Blocks so narrow that k of them are 2.7% of all: 89.1% of the pairs are skipped in random order.
                block = max(1, round(SHARE * (len(batch) + len(bank or ())) / k))
                with torch.no_grad():
                    _, stats = hard_negative_loss(
                        images, texts, scale, k=k, ids=ids, bank=bank, block_size=block, return_stats=True
                    )
                curve.append({"step": step, "block": block} | {name: float(value) for name, value in stats.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if bank is not None:
            bank.push(images, texts, ids)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        metrics = dataset_retrieval_metrics(*heads(test["images"], test["texts"]), test["ids"])
    return {"metrics": {name: metrics[name] for name in METRICS}, "seconds": seconds, "curve": curve}


def quality(args: argparse.Namespace) -> dict[str, Any]:
    data, test = embedded(args, args.dataset_train_split), embedded(args, args.dataset_test_split)
    args.epochs_at_most = -(-args.steps * args.batch_size // len(data["images"])) + 1
    settings = ("dataset_name", "steps", "batch_size", "learning_rate", "seeds", "bank_sizes", "ks")
    results: dict[str, Any] = {"settings": {name: getattr(args, name) for name in settings}, "runs": []}
    results["settings"]["dataset_name"] = Path(args.dataset_name).name
    for bank_size in args.bank_sizes:
        for k in (None, *args.ks):
            runs = [train(data, test, k, bank_size, seed, args) for seed in range(args.seeds)]
            row: dict[str, Any] = {"loss": "InfoNCE" if k is None else f"k = {k}", "k": k, "bank": bank_size}
            for name in METRICS:
                values = [run["metrics"][name] for run in runs]
                row[name] = statistics.mean(values)
                row[f"{name} spread"] = max(values) - min(values)
            row["seconds"] = statistics.mean(run["seconds"] for run in runs)
            row["curve"] = runs[0]["curve"]
            if k is not None:
                row["row_skip_ratio"] = statistics.mean(point["row_skip_ratio"] for point in row["curve"])
            results["runs"].append(row)
            print({name: value for name, value in row.items() if name != "curve"}, flush=True)
    return results


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (recall, skipped, hardest) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    runs = results["runs"]
    labels = [f"{run['loss']}\n{'bank' if run['bank'] else 'no bank'}" for run in runs]
    recall.bar(labels, [run["mean_recall@1"] for run in runs], yerr=[run["mean_recall@1 spread"] / 2 for run in runs])
    recall.set_ylabel("mean recall@1 (bars: half the spread of seeds)")
    recall.tick_params(axis="x", labelsize=7)
    for run in runs:
        if run["curve"]:
            steps = [point["step"] for point in run["curve"]]
            label = f"{run['loss']}, {'bank' if run['bank'] else 'no bank'}"
            skipped.plot(steps, [point["row_skip_ratio"] for point in run["curve"]], label=label)
            hardest.plot(steps, [point["hardest_beats_positive"] for point in run["curve"]], label=label)
    skipped.set(xlabel="step", ylabel="row skip ratio")
    hardest.set(xlabel="step", ylabel="share of anchors whose hardest negative beats the pair")
    skipped.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---- Memory ----


def dense(x: Tensor, y: Tensor) -> Tensor:
    logits = (x @ y.T).float() * 20.0
    labels = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def fits(loss: Callable[[Tensor, Tensor], Tensor], n: int, dim: int, limit: int) -> tuple[bool, int]:
    """Whether a batch's loss and gradient fit, and the peak beyond embeddings and gradients in bytes."""
    try:
        x, y = (torch.randn(n, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        loss(x, y).backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    except torch.OutOfMemoryError:
        return False, 0
    finally:
        torch.cuda.empty_cache()
    return peak <= limit, peak - 4 * n * dim * 2


def memory(args: argparse.Namespace) -> dict[str, Any]:
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "dense InfoNCE": dense,
        "InfoNCE": lambda x, y: contrastive_loss(x, y, 20.0),
        **{f"k = {k}": lambda x, y, k=k: hard_negative_loss(x, y, 20.0, k=k) for k in args.ks},  # type: ignore[misc]
    }
    total = torch.cuda.get_device_properties(0).total_memory
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "dim": args.dim, "budgets": []}
    for gib in args.gib:
        limit = gib * 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        for name, loss in losses.items():
            n, largest, extra = 4096, 0, 0
            while n <= args.largest:
                fit, used = fits(loss, n, args.dim, limit)
                if not fit:
                    break
                largest, extra, n = n, used, n * 2
            row = {"gib": gib, "loss": name, "largest_batch": largest, "extra_mib": extra / 2**20}
            results["budgets"].append(row | {"tried_up_to": args.largest})
            print(row, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    run = modes.add_parser("quality")
    run.add_argument("--model_name_or_path", required=True)
    run.add_argument("--dataset_name", required=True)
    run.add_argument("--dataset_train_split", default="train")
    run.add_argument("--dataset_test_split", default="test")
    run.add_argument("--image_column")
    run.add_argument("--caption_column")
    run.add_argument("--cache", help="folder to keep the embeddings in")
    run.add_argument("--batch_size", type=int, default=1024)
    run.add_argument("--steps", type=int, default=300)
    run.add_argument("--learning_rate", type=float, default=1e-3)
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--ks", type=int, nargs="+", default=[16, 64, 256])
    run.add_argument("--bank_sizes", type=int, nargs="+", default=[0, 4096])
    sized = modes.add_parser("memory")
    sized.add_argument("--gib", type=int, nargs="+", default=[40, 80])
    sized.add_argument("--dim", type=int, default=512)
    sized.add_argument("--ks", type=int, nargs="+", default=[16, 64, 256])
    sized.add_argument("--largest", type=int, default=2**20, help="largest batch tried: time, not memory, ends there")
    for mode in (run, sized):
        mode.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.mode == "memory" and not torch.cuda.is_available():
        sys.exit("memory needs a CUDA device")
    results = quality(args) if args.mode == "quality" else memory(args)
    output = args.output or RESULTS / f"hard_negatives_{args.mode}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.mode == "quality":
        plot(results, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
