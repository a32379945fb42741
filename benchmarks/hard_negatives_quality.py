"""A small CLIP, trained with InfoNCE, goes on with each loss; the quality mode of hard_negatives.py.

All runs of a seed see the same batches with the same captions, and start from the same weights: they differ in the
loss, and by chance not at all.
"""

import copy
import io
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
class Batches:
    """What a run sees, step by step.

    Attributes:
        rows: (steps, batch) int64, rows of the pairs.
        texts: (steps, batch) int64, the text drawn for each.
    """

    rows: Tensor
    texts: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> "Batches":
        return Batches(self.rows[part], self.texts[part])


@dataclass
class Pairs:
    """Pictures of one file set on the device, and all their captions.

    Attributes:
        pictures: (n, 3, side, side) uint8.
        tokens: (texts, length) int64, the distinct texts.
        captions: (captions,) int64, texts; a picture's are first[i] ... first[i] + count[i] - 1, the first its name.
        first, count: (n,) int64.
    """

    pictures: Tensor
    tokens: Tensor
    captions: Tensor
    first: Tensor
    count: Tensor

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def names(self) -> Tensor:
        """(n,) int64, the text that is each picture's name."""
        return self.captions[self.first]

    def ids(self, rows: Tensor, texts: Tensor) -> Tensor:
        """(rows, 3): pairs are the same if they share the picture, its name or the text: many a keyword is shared."""
        return torch.stack([rows, self.names[rows], texts], dim=1)

    def inputs(self, rows: Tensor, texts: Tensor) -> dict[str, Tensor]:
        """The model's; without a mask, for its text tower is causal and reads the first end-of-text token."""
        return {"pixel_values": self.pictures[rows].float().div_(127.5).sub_(1), "input_ids": self.tokens[texts]}

    def draw(self, steps: int, batch_size: int, seed: int) -> Batches:
        """Batches of a whole training, epoch after epoch in new orders, with a caption of each row at random."""
        generator = torch.Generator().manual_seed(seed)
        total = steps * batch_size
        orders = [torch.randperm(len(self), generator=generator) for _ in range(math.ceil(total / len(self)))]
        rows = torch.cat(orders)[:total].to(DEVICE)
        count = self.count[rows]
        chosen = (torch.rand(total, generator=generator).to(DEVICE) * count).long().minimum(count - 1)
        texts = self.captions[self.first[rows] + chosen]
        return Batches(rows.view(steps, batch_size), texts.view(steps, batch_size))


def read(folder: Path, kinds: tuple[str, ...], tokenizer: Any, most: int) -> Pairs:
    """The pairs of the first Parquet files of these kinds ("train"), at most so many."""
    import pyarrow.parquet as parquet
    from PIL import Image

    files = next((found for kind in kinds if (found := sorted(folder.glob(f"*{kind}*.parquet")))), None)
    if files is None:
        raise ValueError(f"data must be folders with Parquet files named after {' or '.join(kinds)}, got {folder}")
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

    pictures = np.stack([picture(row) for row in rows])  # threads would only wait for each other at this size
    distinct: dict[str, int] = {}
    captions, count = [], []
    for row in rows:
        own = dict.fromkeys(caption.lower() for caption in (row["text"], *row["captions"]))
        captions += [distinct.setdefault(caption, len(distinct)) for caption in own]
        count.append(len(own))
    tokens = tokenizer(
        list(distinct), padding="max_length", truncation=True, max_length=_WORDS, return_tensors="pt"
    ).input_ids
    counts = torch.tensor(count)
    parts = (
        torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(),
        tokens,
        torch.tensor(captions),
        counts.cumsum(0) - counts,
        counts,
    )
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
    """A loss, and what it starts from.

    Attributes:
        k: None for InfoNCE.
        bank: pairs in the memory bank.
        stage: "base" (from scratch), "tuned" (from the base) or "scratch" (as many steps as both together).
    """

    k: int | None = None
    bank: int = 0
    stage: str = "tuned"

    def __str__(self) -> str:
        if self.stage == "base":
            return "base"
        name = "InfoNCE" if self.k is None else f"k = {self.k}"
        return name + (f", bank {self.bank}" if self.bank else "") + (", scratch" if self.stage == "scratch" else "")


@dataclass(frozen=True)
class Plan:
    """The settings that all seeds and sets share."""

    batch_size: int
    base_steps: int
    steps: int
    base_learning_rate: float
    learning_rate: float
    ks: tuple[int, ...]
    bank_sizes: tuple[int, ...]
    scratch: bool
    points: int

    def runs(self) -> list[Run]:
        """The base first, then plain InfoNCE."""
        losses = (None, *self.ks)
        tuned = [Run(k, bank) for bank in self.bank_sizes for k in losses]
        return [Run(stage="base"), *tuned, *(Run(k, stage="scratch") for k in losses if self.scratch)]

    def steps_of(self, run: Run) -> slice:
        """Which of a seed's batches the run sees."""
        if run.stage == "base":
            return slice(0, self.base_steps)
        return slice(self.base_steps if run.stage == "tuned" else 0, self.base_steps + self.steps)


@torch.no_grad()
def embed(model: Any, pairs: Pairs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings of some rows' pictures and names."""
    model.eval()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=DEVICE.type == "cuda"):
        outputs = [model(**pairs.inputs(part, pairs.names[part])) for part in rows.split(1024)]
    model.train()
    images, texts = (torch.cat([output[i] for output in outputs]).float() for i in range(2))
    return images, texts


def skips(model: Any, data: Pairs, ks: tuple[int, ...], step: int) -> list[dict[str, Any]]:
    """The search of some hundred training pictures among some thousand names: skip ratio, and theory's in random order.

    One block is so narrow that k of them are 2.7% of all (89.1% skipped), where that leaves two columns; one is 128.
    """
    rows = torch.arange(min(len(data), _POOL), device=DEVICE)
    images, texts = embed(model, data, rows)
    queries, ids = images[:_QUERIES], data.ids(rows, data.names[rows])
    positive = (queries * texts[:_QUERIES]).sum(1)
    points = []
    for k in ks:
        for kind, block in (("narrow", max(2, round(SHARE * len(rows) / k))), ("wide", 128)):
            scores, _, stats = hardest_negatives(  # this backend takes any block size
                queries, texts, k, ids=ids[:_QUERIES], key_ids=ids, block_size=block, backend="torch"
            )
            t = torch.arange(1, -(-len(rows) // block) + 1, dtype=torch.float64)
            points.append(
                {
                    "step": step,
                    "k": k,
                    "kind": kind,
                    "block": block,
                    "theory": float(((1 - 1 / t) ** k).mean()),
                    "row_skip_ratio": float(stats["row_skip_ratio"]),
                    "hardest_similarity": float(scores[:, 0].mean()),
                    "hardest_beats_positive": float((scores[:, 0] > positive).float().mean()),
                }
            )
    return points


def clock() -> float:
    """Seconds, once the device has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(model: Any, data: Pairs, batches: Batches, run: Run, plan: Plan, watched: tuple[int, ...]) -> dict[str, Any]:
    """Trains the model in place: a short warm-up, then a linear decay.

    Args:
        watched: the k whose skip ratio is followed to the model after the last step; from the one before the first if
            no other run ended with it.
    """
    rate = plan.learning_rate if run.stage == "tuned" else plan.base_learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, fused=True)
    steps, rise = len(batches), max(len(batches) // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (steps - step) / max(steps - rise, 1))
    )
    bank = MemoryBank(run.bank, model.config.projection_dim, device=DEVICE) if run.bank else None
    seen = plan.base_steps if run.stage == "tuned" else 0
    marks = {round(steps * i / plan.points) for i in range(run.stage == "tuned", plan.points)} if watched else set()
    curve: list[dict[str, Any]] = []
    begin = clock()
    for step, (rows, texts) in enumerate(zip(batches.rows.unbind(), batches.texts.unbind(), strict=True)):
        if step in marks:
            paused = clock()
            curve += skips(model, data, watched, seen + step)
            begin += clock() - paused
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=DEVICE.type == "cuda"):
            output = model(**data.inputs(rows, texts))
        x, y, ids = output.image_embeds.float(), output.text_embeds.float(), data.ids(rows, texts)
        scale = model.logit_scale.exp().clamp(max=100.0)
        if run.k is None:
            loss = contrastive_loss(x, y, scale, ids=ids, bank=bank)
        else:
            loss = hard_negative_loss(x, y, scale, k=run.k, ids=ids, bank=bank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if bank is not None:
            bank.push(x, y, ids)
    seconds = clock() - begin
    if watched:
        curve += skips(model, data, watched, seen + steps)
    last = loss.item()
    if not math.isfinite(last):
        raise RuntimeError(f"{run}: the loss is {last}")
    return {"loss": last, "scale": scale.item(), "seconds": seconds, "curve": curve}


def one_seed(data: Pairs, test: Pairs, tokenizer: Any, plan: Plan, seed: int) -> Iterator[dict[str, Any]]:
    """The results of every run, the base's first. The skip ratio is followed in seed 0 only."""
    batches = data.draw(plan.base_steps + plan.steps, plan.batch_size, seed)
    model = small_clip(data.pictures.shape[-1], tokenizer, seed)
    start = {"base": copy.deepcopy(model.state_dict())}
    start["scratch"] = start["base"]
    everything = torch.arange(len(test), device=DEVICE)
    for run in plan.runs():
        model.load_state_dict(start[run.stage])
        # InfoNCE is followed for one k: what else it does to the search shows on the base, and many blocks take long.
        ks = plan.ks if run.stage == "base" else plan.ks[:1] if run.k is None else (run.k,)
        watched = () if seed else ks
        result = train(model, data, batches[plan.steps_of(run)], run, plan, watched)
        if run.stage == "base":
            start["tuned"] = copy.deepcopy(model.state_dict())
        pairs = torch.stack([everything, test.names], dim=1)
        found = dataset_retrieval_metrics(*embed(model, test, everything), pairs)
        yield {
            "run": str(run),
            "k": run.k,
            "bank": run.bank,
            "stage": run.stage,
            "seed": seed,
            **{metric: found[metric] for metric in METRICS},
            **result,
        }
