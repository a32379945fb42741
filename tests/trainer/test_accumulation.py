"""Accumulation is exact: one trajectory however a batch is cut, and one graph's gradient under dropout."""

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_infcl.losses import ContrastiveLoss
from hf_infcl.models import logit_scale, prepare_dual_encoder
from hf_infcl.trainer.accumulation import ContrastiveStep, RngState, Sides
from tests.tiny import tiny_clip, tiny_siglip
from tests.trainer.helpers import Rows, dropout_clip, lora, parameters, stack, trained, trainer

CPU = torch.device("cpu")


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_1x64_8x8_and_64x1_follow_one_trajectory(tmp_path, adapter):
    runs = []
    for size, steps in ((64, 1), (8, 8), (1, 64)):
        torch.manual_seed(1)
        run = trainer(
            tmp_path,
            train_dataset=Rows(64),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=3,
            optim="sgd",
            learning_rate=0.1,
            train_logit_scale=True,
            peft_config=lora() if adapter else None,
        )
        before = trained(run.model)
        run.train()
        after = trained(run.model)
        assert any(not torch.equal(before[name], after[name]) for name in after)
        log = [line for line in run.state.log_history if "loss" in line]
        runs.append((after, [(line["loss"], line["grad_norm"], line["logit_scale"]) for line in log]))
    for after, log in runs[1:]:
        close(after, runs[0][0])
        torch.testing.assert_close(torch.tensor(log), torch.tensor(runs[0][1]), rtol=1e-5, atol=1e-5)


def test_sigmoid_loss_trains_its_bias_the_same_way_in_pieces(tmp_path):
    runs = []
    for size, steps in ((8, 1), (2, 4)):
        run = trainer(
            tmp_path,
            tiny_siglip(),
            train_dataset=Rows(16, "siglip"),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            optim="sgd",
            learning_rate=0.1,
        )
        before = parameters(run.model)
        run.train()
        assert not torch.equal(before["logit_bias"], run.model.logit_bias)
        runs.append(parameters(run.model))
    close(*runs)


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not self.found:
            self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("size", "steps"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_with_dropout_each_cut_equals_one_graph_over_its_own_micro_batches(tmp_path, size, steps):
    rows = Rows(8)
    seen = Gradients()
    torch.manual_seed(1)
    run = trainer(
        tmp_path,
        dropout_clip(),
        train_dataset=rows,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=steps,
        train_sampling_strategy="sequential",
        max_grad_norm=0,
        max_steps=1,
        peft_config=lora(lora_dropout=0.5),
        callbacks=[seen],
    )
    states = []
    model = run.model

    class Before(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            states.append(RngState(CPU))
            states.append({n: p.detach().clone() for n, p in model.named_parameters()})

    run.add_callback(Before())
    run.train()
    end = RngState(CPU)

    model.load_state_dict(states[1], strict=False)
    model.zero_grad()
    model.train()
    states[0].restore()
    outputs = [model(**batch) for batch in (pieces(rows, size))]
    images = torch.cat([output.image_embeds for output in outputs])
    texts = torch.cat([output.text_embeds for output in outputs])
    ContrastiveLoss()(images, texts, logit_scale(model)).backward()
    close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, seen.found, 1e-6)
    # The generators end where one pass over the micro-batches leaves them.
    assert torch.equal(torch.get_rng_state(), end._cpu)


def pieces(rows: Rows, size: int):
    for start in range(0, len(rows), size):
        batch = stack(rows.rows[start : start + size])
        batch.pop("ids")
        yield batch


def step_over(model, batches, sides, calls=None, loss=None) -> ContrastiveStep:
    def embed(inputs):
        if calls is not None:
            calls.append((sorted(inputs), torch.is_grad_enabled()))
        output = model(**inputs)
        return output.image_embeds, output.text_embeds

    loss = ContrastiveLoss() if loss is None else loss
    return ContrastiveStep(
        batches,
        sides=sides,
        embed=embed,
        loss=lambda image, text, scale, bias, ids: loss(image, text, scale, bias, ids=ids),
        scale=lambda: logit_scale(model),
        bias=lambda: None,
        to_device=lambda inputs: inputs,
        device=CPU,
    )


INPUTS = (("pixel_values",), ("input_ids", "attention_mask"))


def test_one_micro_batch_is_embedded_once():
    model = prepare_dual_encoder(tiny_clip())
    calls = []
    step = step_over(model, [stack(Rows(4).rows)], Sides(*INPUTS), calls)
    step.begin()
    step.surrogate(0).backward()
    assert len(calls) == 1
    assert model.visual_projection.weight.grad is not None


def test_a_locked_side_is_embedded_once_without_graph():
    model = prepare_dual_encoder(tiny_clip())
    calls = []
    step = step_over(model, list(pieces(Rows(4), 2)), Sides(*INPUTS, image_trained=False), calls)
    step.begin()
    for index in range(2):
        step.surrogate(index).backward()
    image_calls = [grad for names, grad in calls if "pixel_values" in names]
    text_calls = [grad for names, grad in calls if "input_ids" in names]
    assert image_calls == [False, False]
    assert text_calls == [False, False, True, True]


def test_a_locked_side_with_dropout_does_not_shift_the_random_numbers_of_the_other():
    model = prepare_dual_encoder(dropout_clip()).train()
    model.vision_model.requires_grad_(False)
    model.visual_projection.requires_grad_(False)
    batches = list(pieces(Rows(4), 2))
    torch.manual_seed(3)
    step = step_over(model, batches, Sides(*INPUTS, image_trained=False))
    step.begin()
    for index in range(2):
        step.surrogate(index).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.manual_seed(3)
    images, texts = [], []
    for batch in batches:
        images.append(model(pixel_values=batch["pixel_values"]).image_embeds)
        texts.append(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).text_embeds)
    ContrastiveLoss()(torch.cat(images), torch.cat(texts), logit_scale(model)).backward()
    close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, found, 1e-6)


def test_what_is_kept_for_the_backward_pass_is_one_micro_batchs():
    model = prepare_dual_encoder(tiny_clip())

    def kept(size: int) -> list[int]:
        """Bytes that autograd keeps of the model in the first pass, then in each micro-batch's second."""
        step = step_over(model, list(pieces(Rows(8), size)), Sides(*INPUTS), loss=lambda image, *_, **__: image.sum())
        counts = []

        def keep(tensor):
            counts[-1] += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            counts.append(0)
            step.begin()
            for index in range(len(step)):
                counts.append(0)
                step.surrogate(index)
        return counts

    whole, pieces_of_it = kept(8), kept(2)
    assert pieces_of_it[0] < whole[0] / 100
    # Weights are counted in each, hence not a quarter.
    assert max(pieces_of_it) < whole[0] / 2


def test_float16_gradients_at_the_embeddings_do_not_underflow():
    """At s = 1 and N = 1024 pairs that are nearly learnt, the gradient is below float16's smallest number."""
    torch.manual_seed(0)
    embeds = torch.nn.functional.normalize(torch.randn(1024, 8), dim=-1)
    parameter = torch.nn.Parameter(embeds)

    def dense(image, text, scale, bias, ids):
        logits = image @ text.T
        return torch.nn.functional.cross_entropy(logits.float() * 1e-4, torch.arange(len(image)))

    step = ContrastiveStep(
        [{"pixel_values": torch.zeros(1024, 1), "input_ids": torch.zeros(1024, 1)}],
        sides=Sides(("pixel_values",), ("input_ids",)),
        embed=lambda inputs: (parameter, parameter),
        loss=dense,
        scale=lambda: None,
        bias=lambda: None,
        to_device=lambda inputs: inputs,
        device=CPU,
        loss_dtype=torch.float16,
    )
    step.begin()
    (found,) = torch.autograd.grad(step.surrogate(0), parameter)
    logits = parameter @ parameter.T * 1e-4
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, torch.arange(1024)), parameter)
    assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(("side", "tower"), [("image_embeds", "vision tower"), ("text_embeds", "text tower")])
def test_nan_names_the_tower_and_the_row_and_leaves_the_weights(tmp_path, side, tower):
    model = tiny_clip()
    rows = Rows(16)
    run = trainer(
        tmp_path,
        model,
        train_dataset=rows,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        train_sampling_strategy="sequential",
    )
    before = parameters(model)
    seen = []

    def spoil(module, args, output):
        seen.append(len(output[side]))
        if len(seen) == 3:  # the third micro-batch's first pass
            output[side] = output[side].clone()
            output[side].data[1] = torch.nan
        return output

    model.register_forward_hook(spoil)
    with pytest.raises(
        FloatingPointError, match=rf"{tower} .* row 5 of the batch \(micro-batch 2, row 1, ids \[5, 5\]\)"
    ):
        run.train()
    assert all(torch.equal(before[name], value) for name, value in parameters(model).items())


def test_an_infinite_scale_is_named(tmp_path):
    model = tiny_clip()
    model.logit_scale.data.fill_(89.0)
    with pytest.raises(FloatingPointError, match="the logit scale is inf"):
        trainer(tmp_path, model, logit_scale_max=float("inf")).train()
