"""`hf-infcl demo`: the main job from nothing to a loaded adapter, on built-in pictures, in minutes on two CPU cores.

A tiny CLIP learns drawn scenes. A LoRA adapter then takes it to their photo-like look, with 1,024 pairs contrasted
exactly in micro-batches of 64. Adapter, processor, card and curves are written, and a fresh process loads them by plain
`from_pretrained` calls. `hf_infcl.trainer.InfCLTrainer` does both trainings, as it would with a model of the Hub.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The base must be good enough to be worth adapting, in half a minute: 0.67 M parameters, 240 steps of 128 pairs.
WIDTH, VISION_LAYERS, TEXT_LAYERS, HEADS, PATCH_SIZE = 96, 3, 2, 4, 8
MICRO_BATCH, ACCUMULATION = 64, 16
# transformers announces to PEFT what it will rename; the reader of the demo can do nothing about it.
_QUIET = "ignore::FutureWarning"
PICTURE, CAPTIONS_SHOWN = "picture.png", 8
ENLARGED = 8  # 32 pixels are too few to look at


@dataclass
class Sizes:
    """How much the demo does; the tests do less.

    Args:
        train_rows: scenes of each domain to train on.
        eval_rows: scenes of the second domain's test split.
        base_batch: pairs of a step of the base's training.
        base_steps: its steps.
        accumulation: micro-batches of a step of the adapter's training.
        adapter_steps: its steps.
    """

    train_rows: int = 8192
    eval_rows: int = 1024  # as the recipe that the reader is sent to next
    base_batch: int = 128
    base_steps: int = 240
    accumulation: int = ACCUMULATION
    adapter_steps: int = 24


def tiny_clip(processor: Any, seed: int = 0) -> Any:
    """A CLIP of 0.67 M parameters for 32 x 32 pictures and the sample captions, untrained.

    Args:
        processor: what `hf_infcl.data.sample_processor` makes; its tokenizer sets the vocabulary and the text length.
        seed: of the weights.

    Returns:
        A `transformers.CLIPModel`.
    """
    from transformers import CLIPConfig, CLIPModel, set_seed

    tokenizer = processor.tokenizer
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
    }
    set_seed(seed)
    config = CLIPConfig(
        text_config={
            **tower,
            "num_hidden_layers": TEXT_LAYERS,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": tokenizer.model_max_length,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            **tower,
            "num_hidden_layers": VISION_LAYERS,
            "image_size": processor.image_processor.crop_size["height"],
            "patch_size": PATCH_SIZE,
        },
        projection_dim=WIDTH,
    )
    return CLIPModel(config)


def run_demo(output_dir: str | Path, seed: int = 0, sizes: Sizes | None = None) -> dict[str, Any]:
    """Trains the base and the adapter, writes both, and loads the adapter in a fresh process.

    Args:
        output_dir: gets `base/` and `adapter/`.
        seed: of weights, scenes and batches.
        sizes: how much is done.

    Returns:
        `before` and `after` (metrics of the base and of the adapter on the second domain's test split) and the facts
        that the table shows.
    """
    from datasets import disable_progress_bars
    from peft import LoraConfig

    from hf_infcl import InfCLConfig, InfCLTrainer
    from hf_infcl.cli.progress import use_one_line
    from hf_infcl.data import sample_dataset, sample_processor
    from hf_infcl.hub import write_run
    from hf_infcl.hub.adapters import WEIGHTS_NAME

    sizes = sizes or Sizes()
    started = time.perf_counter()
    folder = Path(output_dir)
    base_folder, adapter_folder = folder / "base", folder / "adapter"
    disable_progress_bars()
    processor = sample_processor()
    common: dict[str, Any] = {
        "seed": seed,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "adam_beta2": 0.98,
        "save_strategy": "no",
        "report_to": "none",
        "per_device_eval_batch_size": 128,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }

    _say(f"1  A tiny CLIP learns drawn scenes: {sizes.base_steps} steps of {sizes.base_batch} pairs")
    base = InfCLTrainer(
        model=tiny_clip(processor, seed),
        args=InfCLConfig(
            str(base_folder),
            per_device_train_batch_size=sizes.base_batch,
            max_steps=sizes.base_steps,
            learning_rate=1.5e-3,
            weight_decay=0.05,
            logging_steps=10,
            **common,
        ),
        train_dataset=sample_dataset("drawing", "train", sizes.train_rows, seed),
        processing_class=processor,
    )
    use_one_line(base)
    base.train()
    base.save_model()
    write_run(base, name="tiny-clip-drawings", dataset="sample:drawing")

    batch = MICRO_BATCH * sizes.accumulation
    _say(
        f"2  A LoRA adapter takes it to photo-like scenes: {sizes.adapter_steps} steps of {batch:,} pairs, "
        f"contrasted exactly, in micro-batches of {MICRO_BATCH}"
    )
    trainer = InfCLTrainer(
        model=str(base_folder),
        args=InfCLConfig(
            str(adapter_folder),
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=sizes.accumulation,
            max_steps=sizes.adapter_steps,
            learning_rate=5e-3,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=max(1, sizes.adapter_steps // 5),
            **common,
        ),
        train_dataset=sample_dataset("photo", "train", sizes.train_rows, seed),
        eval_dataset=sample_dataset("photo", "test", sizes.eval_rows, seed),
        peft_config=LoraConfig(r=16, lora_alpha=32),
    )
    use_one_line(trainer)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    write_run(trainer, before=before, after=after, name="sample-photo-lora", dataset="sample:photo")

    _say("3  A fresh process loads it by plain from_pretrained calls and ranks captions for a picture")
    _write_picture(adapter_folder, seed)
    reload_in_fresh_process(base_folder, adapter_folder)
    peak_gib = max(line.get("peak_memory_gib", 0.0) for line in trainer.state.log_history)
    return {
        "before": {name.removeprefix("eval_"): value for name, value in before.items()},
        "after": {name.removeprefix("eval_"): value for name, value in after.items()},
        "adapter_bytes": (adapter_folder / WEIGHTS_NAME).stat().st_size,
        "seconds": time.perf_counter() - started,
        "peak_memory_bytes": int(peak_gib * 2**30),
        "kept_bytes": kept_bytes(trainer),
        "accumulation": sizes.accumulation,
        "contrastive_batch_size": batch,
        "eval_rows": sizes.eval_rows,
        "steps": sizes.adapter_steps,
        "folder": folder,
    }


def _write_picture(folder: Path, seed: int) -> None:
    """One test scene and captions to rank: its own first, so that the reader can check."""
    from PIL import Image

    from hf_infcl.data import sample_dataset

    scenes = sample_dataset("photo", "test", CAPTIONS_SHOWN, seed)
    picture = scenes[0]["image"]
    enlarged = picture.resize((ENLARGED * picture.width, ENLARGED * picture.height), Image.Resampling.NEAREST)
    enlarged.save(folder / PICTURE)
    (folder / "captions.txt").write_text("\n".join(scenes["caption"]) + "\n", encoding="utf-8")


def reload_in_fresh_process(base: Path, adapter: Path) -> None:
    """Runs `demo_reload.py`, which knows nothing of this package, in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; what it printed stands on the terminal.
    """
    script = Path(__file__).with_name("demo_reload.py")
    paths = (script, base, adapter, adapter / PICTURE, adapter / "captions.txt")
    subprocess.run([sys.executable, "-W", _QUIET, *map(str, paths)], check=True)


def kept_bytes(trainer: Any) -> int:
    """What one micro-batch of a trainer keeps for its backward pass: the graph's saved tensors, parameters aside."""
    import torch

    parameters = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = next(iter(trainer.get_train_dataloader()))
    batch.pop("ids", None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = trainer.model(**batch)  # kept until all of its graph has been counted
    del output
    return sum(storages.values())


def dense_loss_bytes(pairs: int) -> int:
    """What a dense float32 InfoNCE holds at its peak: the logits, two softmaxes and their gradient, N x N each."""
    return 4 * pairs * pairs * 4


def _say(text: str) -> None:
    from rich.console import Console

    Console().print(f"\n[bold]{text}[/bold]")


def _memory_table(pairs: int, kept: int, accumulation: int) -> Any:
    """What one step needs beside the weights, here and with a dense loss over as many pairs at once."""
    from rich.table import Table

    table = Table(title="Memory of one step, beside the weights", title_justify="left")
    table.add_column("what is held")
    table.add_column("here", justify="right")
    table.add_column("dense loss", justify="right")
    table.add_row(
        f"activations, {pairs:,} pairs",
        f"{kept / 2**20:,.0f} MiB ({MICRO_BATCH} at a time)",
        f"{kept * accumulation / 2**20:,.0f} MiB",
    )
    for rows in (pairs, 65_536):
        size = dense_loss_bytes(rows) / 2**20
        dense = f"{size:,.0f} MiB" if size < 2**10 else f"{size / 2**10:,.0f} GiB"
        table.add_row(f"similarities, {rows:,} pairs", "a few MiB", dense)
    return table


def activation_line() -> str | None:
    """What puts this interpreter's commands on the PATH, or None where they are on it."""
    commands = Path(sys.executable).parent
    if str(commands) in os.environ.get("PATH", "").split(os.pathsep):
        return None
    shown = os.path.relpath(commands) if commands.is_relative_to(Path.cwd()) else str(commands)
    if (commands / "activate").exists():
        return f"source {shlex.quote(os.path.join(shown, 'activate'))}"
    return f"export PATH={shlex.quote(str(commands))}:$PATH"


def report(result: dict[str, Any]) -> None:
    """Prints the table of results and what to type next."""
    from rich.console import Console

    from hf_infcl.cli.tables import metrics_table

    console = Console()
    recalls = {
        heading: {name: value for name, value in result[key].items() if "/recall@" in name}
        for heading, key in (("base", "before"), ("with adapter", "after"))
    }
    console.print()
    title = f"{result['eval_rows']:,} photo-like test pairs, seen by no training"
    console.print(metrics_table(recalls, title))
    console.print(
        f"Adapter file {result['adapter_bytes'] / 2**10:.0f} KiB; {result['seconds']:.0f} seconds in all; "
        f"peak memory {result['peak_memory_bytes'] / 2**20:,.0f} MiB, Python and PyTorch included.",
        highlight=False,
    )
    console.print()
    console.print(_memory_table(result["contrastive_batch_size"], result["kept_bytes"], result["accumulation"]))
    folder = result["folder"]
    activation = activation_line()
    console.print(
        f"""
Written: {folder}/base (model and processor), {folder}/adapter (adapter, processor, README.md, curves.png)

Next, the same from a recipe, for five passes over the scenes instead of {result["steps"]} steps:

{f"  {activation}{chr(10)}" if activation else ""}\
  accelerate launch --config_file recipes/accelerate/single.yaml recipes/finetune_clip.py --config recipes/sample.yaml

Then with a model and a dataset that are downloaded (needs the Hub):

  hf-infcl train --model_name_or_path openai/clip-vit-base-patch32 --use_peft --dataset_name jxie/flickr8k \\
      --caption_column caption_0 --per_device_train_batch_size 64 --gradient_accumulation_steps 16 \\
      --learning_rate 2e-4 --num_train_epochs 5 --output_dir outputs/clip-flickr8k""",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _check_folders(output_dir: str) -> bool:
    """Whether there are models of an earlier demo, known by its card, to write over; refuses any others."""
    from hf_infcl.hub.card import CARD_NAME, is_own_card

    replaces = False
    for folder in (Path(output_dir, name) for name in ("base", "adapter")):
        there = next(folder.iterdir(), None) if folder.is_dir() else None
        if there is None:
            continue
        if not is_own_card(folder / CARD_NAME):
            raise ValueError(
                f"{folder} is not empty and was not written by the demo ({there.name} is there); "
                "name another folder by --output_dir"
            )
        replaces = True
    return replaces


def run(args: Sequence[str] | None = None) -> int:
    """Runs the demo and prints its table.

    Returns:
        The exit status, 0.
    """
    from hf_infcl.cli.errors import run_command

    parser = argparse.ArgumentParser("hf-infcl demo", description=__doc__.split("\n\n")[1])
    parser.add_argument("--output_dir", default="demo-output", help="folder for the base and the adapter")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(args)
    # Read by OpenMP when torch is imported, which is yet to come. Threads that spin at every barrier make a step six
    # times as long when anything else runs on the two cores (measured: 5.0 s against 0.9 s).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.simplefilter("ignore", FutureWarning)

    def prepare() -> tuple[str, int]:
        if _check_folders(parsed.output_dir):
            print(f"This run replaces the models that an earlier demo wrote to {parsed.output_dir}.")
        return parsed.output_dir, parsed.seed

    return run_command(parser.prog, prepare, lambda *told: report(run_demo(*told)))
