"""Largest batch of ViT-B/32 CLIP with LoRA on a device held to so many GiB; the memory mode of hard_negatives.py.

Weights are random: memory does not depend on them. Two ways to train are told apart. In one pass the whole batch's
activations are held, with the dense loss on top. With exact accumulation the encoders hold one micro-batch, and the
loss the embeddings of all, with their gradients: what fits is then a matter of the loss. Both phases share the memory,
one after the other, so a batch fits if the larger of them does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_infcl import contrastive_loss, hard_negative_loss

MIB = 2**20
_SCALE = 20.0
_BLOCK = 128  # columns of a tile


def clip_with_lora() -> Any:
    """ViT-B/32 CLIP in bfloat16, its linear layers adapted at rank 16, ready for training."""
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPConfig, CLIPModel

    from hf_infcl.models.embedding import prepare_dual_encoder
    from hf_infcl.models.lora import complete_lora_config

    model = CLIPModel(CLIPConfig()).to("cuda", torch.bfloat16)
    return prepare_dual_encoder(get_peft_model(model, complete_lora_config(model, LoraConfig(r=16))))


def dense(x: Tensor, y: Tensor) -> Tensor:
    logits = (x @ y.T).float() * _SCALE
    labels = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def peak(step: Callable[[int], None], n: int) -> int | None:
    """Peak bytes of a step beyond what was there before; None if it did not fit."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        step(n)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() - before


def largest(step: Callable[[int], None], first: int, most: int) -> tuple[int, int]:
    """Largest batch that fits, to within an eighth, up to `most`, and its peak in bytes; (0, 0) if none does."""
    fits, used, n = 0, 0, first
    while n <= most:
        bytes_used = peak(step, n)
        if bytes_used is None:
            break
        fits, used, n = n, bytes_used, 2 * n
    width = fits // 2
    while fits and n <= most and width >= fits // 8:
        bytes_used = peak(step, fits + width)
        if bytes_used is not None:
            fits, used = fits + width, bytes_used
        width //= 2
    return fits, used


def memory(
    gibs: list[int], ks: list[int], micro_batch: int, most: int, keep: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """The largest batches of both ways and all losses under each budget, in GiB.

    Args:
        most: the largest batch tried, where time and not memory would end the search. A loss that gets there under one
            budget is not tried again under a larger one.
        keep: called with the results after every row.
    """
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "dense InfoNCE": dense,
        "InfoNCE": lambda x, y: contrastive_loss(x, y, _SCALE),
        **{f"k = {k}": lambda x, y, k=k: hard_negative_loss(x, y, _SCALE, k=k) for k in ks},  # type: ignore[misc]
    }
    model = clip_with_lora()
    dim = model.config.projection_dim

    def encode(n: int) -> Any:
        pixels = torch.zeros(n, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        ids = torch.full((n, 77), model.config.text_config.eos_token_id, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(pixel_values=pixels, input_ids=ids)

    def one_pass(n: int) -> None:
        output = encode(n)
        dense(output.image_embeds, output.text_embeds).backward()
        model.zero_grad()

    def micro_step(n: int) -> None:
        output = encode(n)
        (output.image_embeds.sum() + output.text_embeds.sum()).backward()
        model.zero_grad()

    def loss_step(loss: Callable[[Tensor, Tensor], Tensor], n: int) -> None:
        x, y = (torch.randn(n, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        loss(x, y).backward()

    total = torch.cuda.get_device_properties(0).total_memory
    micro_step(micro_batch)  # libraries take their workspaces
    weights, encoder = torch.cuda.memory_allocated(), peak(micro_step, micro_batch)
    assert encoder is not None
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "weights_mib": weights / MIB,
        "micro_batch": micro_batch,
        "encoder_mib": encoder / MIB,
        "tried_up_to": most,
        "budgets": [],
    }
    done: dict[str, tuple[int, int]] = {}
    for gib in sorted(gibs):
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))

        def add(row: dict[str, Any]) -> None:
            results["budgets"].append(row)
            print(line(row, most), flush=True)
            keep(results)

        n, used = largest(one_pass, 256, most)
        add({"gib": gib, "way": "one pass", "loss": "dense InfoNCE", "largest_batch": n, "peak_mib": used / MIB})
        for name, loss in losses.items():
            n, used = done.get(name) or largest(lambda n, loss=loss: loss_step(loss, n), 4096, most)  # type: ignore[misc]
            if 2 * n > most:
                done[name] = n, used
            embeds = 4 * n * dim * 2  # both sides and their gradients
            add(
                {
                    "gib": gib,
                    "way": "accumulation",
                    "loss": name,
                    "largest_batch": n,
                    "peak_mib": used / MIB,
                    "embeds_and_gradients_mib": embeds / MIB,
                    "loss_mib": (used - embeds) / MIB,
                    "scores_all_mib": 4 * n * n / MIB,
                    "scores_of_a_block_mib": 4 * n * _BLOCK / MIB,
                }
            )
    torch.cuda.set_per_process_memory_fraction(1.0)
    return results


def head(results: dict[str, Any]) -> str:
    return (
        f"ViT-B/32 + LoRA: weights {results['weights_mib']:,.0f} MiB; encoders, micro-batches of "
        f"{results['micro_batch']}: {results['encoder_mib']:,.0f} MiB"
    )


def line(row: dict[str, Any], most: int) -> str:
    text = f"{row['gib']:>4} GiB {row['way']:13} {row['loss']:14} largest batch {row['largest_batch']:>9,}"
    if "loss_mib" in row:
        text += (
            f", loss {row['loss_mib']:,.0f} MiB (all scores {row['scores_all_mib']:,.0f}, a block "
            f"{row['scores_of_a_block_mib']:,.0f})"
        )
    return text + (" (tried no more)" if row["largest_batch"] * 2 > most else "")
