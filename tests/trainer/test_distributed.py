"""Several processes train as one: the same trajectory, the same evaluation, and they stop together."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_infcl.models import logit_scale_parameter
from tests.processes import ProcessesError, run_processes
from tests.tiny import MODELS
from tests.trainer.helpers import Rows, dropout_clip, lora, parameters, trainer

pytestmark = pytest.mark.distributed


def train(rank: int, world: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains 24 pairs a step, however many processes and micro-batches there are."""
    options = dict(options)
    adapter = options.pop("adapter", None)
    rows = options.pop("rows", 48)
    family = options.pop("family", "clip")
    steps = options.pop("steps", {1: 6, 2: 3, 3: 2, 4: 2})[world]
    evaluated_first = options.pop("evaluated_first", False)
    torch.manual_seed(1)
    run = trainer(
        Path(folder),
        MODELS[family](),
        train_dataset=Rows(rows, family),
        eval_dataset=Rows(7, family),
        per_device_eval_batch_size=2,
        peft_config=None if adapter is None else lora(**adapter),
        train_logit_scale=True,
        per_device_train_batch_size=24 // (steps * world),
        gradient_accumulation_steps=steps,
        **{"optim": "sgd", "learning_rate": 0.05, "max_steps": 10, **options},
    )
    if evaluated_first:
        run.evaluate()
        run.predict(Rows(7, family))
    run.train()
    return {
        "parameters": parameters(run.model),
        "log": [
            (line["loss"], line["grad_norm"], line["logit_scale"], line["contrastive_batch_size"])
            for line in run.state.log_history
            if "loss" in line
        ],
        "evaluation": {
            name: value for name, value in run.evaluate().items() if "second" not in name and "runtime" not in name
        },
        "predictions": len(run.predict(Rows(7, family)).label_ids),
        "bank": None if run.memory_bank is None else run.memory_bank.ids.tolist(),
    }


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' common result; their weights are bit-equal."""
    for other in results[1:]:
        for name, value in results[0]["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), name
        assert other["log"] == results[0]["log"]
        assert other["evaluation"] == results[0]["evaluation"]
    return results[0]


CASES = {
    "full": {},
    "lora": {"adapter": {}},
    "without accumulation": {"steps": {1: 1, 2: 1, 3: 1, 4: 1}},
    "sigmoid": {"family": "siglip"},
    "frozen tower": {"freeze_vision_model": True},
    "memory bank": {"memory_bank_size": 20},
    "hard negatives": {"loss_type": "hard_negative", "num_hard_negatives": 5},
    "evaluated first": {"evaluated_first": True, "adapter": {}},
    "rows left over": {"rows": 47, "num_train_epochs": 4, "max_steps": -1},
}
WORLDS = {2: list(CASES), 3: ["full", "lora", "hard negatives"], 4: ["full", "lora"]}
# The texts travel; or they are gathered, which shows in the loss alone.
PATHS = {"0": list(CASES), "1000000": ["full", "lora", "hard negatives"]}


def train_each(rank: int, world: int, folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for limit, cases in PATHS.items():
        os.environ["HF_INFCL_GATHER_BELOW"] = limit
        for case in cases:
            if case in WORLDS[world]:
                found[case, limit] = train(rank, world, folder, CASES[case])
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What one process finds."""
    return {case: train(0, 1, str(tmp_path_factory.mktemp("alone")), options) for case, options in CASES.items()}


@pytest.mark.parametrize("world", WORLDS)
def test_several_processes_follow_the_trajectory_of_one(tmp_path, alone, world):
    by_rank = run_processes(train_each, world, timeout=240, args=(str(tmp_path),))
    for case, limit in by_rank[0]:
        results = [found[case, limit] for found in by_rank]
        found, expected = together(results), alone[case]
        close = dict(rtol=1e-5, atol=1e-5, msg=lambda text, case=case, limit=limit: f"{case}, {limit}: {text}")
        torch.testing.assert_close(torch.tensor(found["log"]), torch.tensor(expected["log"]), **close)
        for name, value in expected["parameters"].items():
            torch.testing.assert_close(found["parameters"][name], value, **close)
        assert found["predictions"] == expected["predictions"] == 7
        for name, value in expected["evaluation"].items():
            assert found["evaluation"][name] == pytest.approx(value, rel=1e-5), (case, name)
        if expected["bank"] is not None:
            assert sorted(row for result in results for row in result["bank"]) == sorted(expected["bank"])


def unwrapped(rank: int, world: int, folder: str) -> str:
    run = trainer(Path(folder))
    run.accelerator.prepare_model = lambda model, **options: model
    with pytest.raises(RuntimeError) as error:
        run.train()
    return str(error.value)


def test_processes_that_would_each_go_by_their_own_gradients_are_refused(tmp_path):
    for message in run_processes(unwrapped, 2, args=(str(tmp_path),)):
        assert "a CLIPModel, is not wrapped by DistributedDataParallel" in message


def spoilt_scale(rank: int, world: int, folder: str) -> str:
    class Spoil(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            if rank == 1:
                logit_scale_parameter(model).data.fill_(float("nan"))

    with pytest.raises(FloatingPointError) as error:
        trainer(Path(folder), callbacks=[Spoil()]).train()
    return str(error.value)


def test_a_scale_that_is_nan_on_one_process_is_named_on_all(tmp_path):
    assert run_processes(spoilt_scale, 2, args=(str(tmp_path),)) == ["process 1: the logit scale is nan"] * 2


def spoilt(rank: int, world: int, folder: str) -> str:
    run = trainer(Path(folder), gradient_accumulation_steps=2, train_sampling_strategy="sequential")
    before = parameters(run.model)

    def spoil(module, args, output):
        if rank == 1 and module.training:
            output["text_embeds"] = output["text_embeds"] * torch.nan
        return output

    run.model.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError) as error:
        run.train()
    assert all(torch.equal(before[name], value) for name, value in parameters(run.model).items())
    return str(error.value)


def test_nan_on_one_process_stops_all_before_the_step_and_names_it(tmp_path):
    messages = run_processes(spoilt, 2, args=(str(tmp_path),))
    assert messages[0] == messages[1]
    assert messages[0].startswith("process 1: the text tower gave a NaN or infinite embedding for row 0")


def counted(rank: int, world: int, folder: str) -> list[int]:
    """How many collectives over gradients a step has: DDP's buckets are reduced in its hook."""
    run = trainer(Path(folder), n=32, gradient_accumulation_steps=4, max_steps=3)
    calls: list[int] = []
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def hook(state, bucket):
        calls.append(run.state.global_step)
        return allreduce_hook(state, bucket)

    prepare = run._prepare_for_training

    def prepared(*args):
        result = prepare(*args)
        run.model_wrapped.register_comm_hook(None, hook)
        return result

    run._prepare_for_training = prepared
    run.train()
    return calls


def test_gradients_are_reduced_once_a_step(tmp_path):
    calls = run_processes(counted, 2, args=(str(tmp_path),))
    # The tiny model's gradients fit one bucket.
    assert calls[0] == calls[1] == [0, 1, 2]


def resumed(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    finished = []
    for name, checkpoint in (("whole", None), ("again", "checkpoint-2")):
        torch.manual_seed(1)
        run = trainer(
            Path(folder, name),
            dropout_clip(),
            per_device_train_batch_size=2,
            max_steps=5,
            save_strategy="steps",
            save_steps=2,
            memory_bank_size=6,
            peft_config=lora(lora_dropout=0.5),
        )
        run.train(None if checkpoint is None else str(Path(folder, "whole", checkpoint)))
        finished.append(parameters(run.model))
    assert all(torch.equal(finished[0][name], finished[1][name]) for name in finished[0])
    return finished[0]


def test_resuming_on_two_processes_is_exact(tmp_path):
    first, second = run_processes(resumed, 2, args=(str(tmp_path),))
    assert all(torch.equal(first[name], second[name]) for name in first)


def saved_late(rank: int, world: int, folder: str) -> bool:
    found = []

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            found.append(Path(folder, "checkpoint-1", "rng_state_1.pth").is_file())

    def late(*args, **options):
        time.sleep(0.3 * rank)
        save(*args, **options)

    run = trainer(Path(folder), max_steps=1, save_strategy="steps", save_steps=1, callbacks=[Look()])
    save, torch.save = torch.save, late
    run.train()
    return found[0]


def test_a_checkpoint_is_whole_only_once_every_process_has_saved(tmp_path):
    assert run_processes(saved_late, 2, args=(str(tmp_path),)) == [True, True]


def resumed_without_a_file(rank: int, world: int, folder: str) -> str:
    options = dict(max_steps=2, save_strategy="steps", save_steps=1, per_device_train_batch_size=2)
    trainer(Path(folder), **options).train()
    if rank == 1:
        Path(folder, "checkpoint-1", "rng_state_1.pth").unlink()
    torch.distributed.barrier()
    with pytest.raises(ValueError) as error:
        trainer(Path(folder), **options).train(str(Path(folder, "checkpoint-1")))
    return str(error.value)


def test_a_file_that_one_process_lacks_stops_all(tmp_path):
    first, second = run_processes(resumed_without_a_file, 2, args=(str(tmp_path),))
    assert first == second
    assert first.startswith("process 1: the checkpoint")
    assert "lacks rng_state_1.pth" in first


def resumed_apart(rank: int, world: int, folder: str) -> list[str]:
    options = dict(max_steps=2, save_strategy="steps", save_steps=1, per_device_train_batch_size=2)
    trainer(Path(folder), **options).train()
    messages = []
    # As on machines with a disk of their own: one has gone further, to the end; one has nothing.
    for found in (str(Path(folder, f"checkpoint-{rank + 1}")), rank == 1):
        with pytest.raises(ValueError) as error:
            trainer(Path(folder), **options).train(found)
        messages.append(str(error.value))
    with pytest.raises(ValueError) as error:
        trainer(Path(folder, "new" if rank == 1 else ""), **options).train(True)
    return [*messages, str(error.value)]


def test_processes_that_would_go_on_from_different_steps_are_told_so(tmp_path):
    first, second = run_processes(resumed_apart, 2, args=(str(tmp_path),))
    assert first == second
    step, whether, nothing = first
    assert step.endswith("and do not: the step to resume from is 1 (process 0), 2 (process 1)")
    assert whether.endswith("and do not: whether to resume is False (process 0), True (process 1)")
    assert nothing.startswith("process 1: there is no checkpoint in output_dir")


def differing(rank: int, world: int, folder: str) -> list[str]:
    messages = []
    for options, n in (({"max_steps": 4 + rank, "learning_rate": 1e-3 * (1 + rank)}, 16), ({}, 16 + rank)):
        with pytest.raises(ValueError) as error:
            trainer(Path(folder, str(rank)), n=n, **options).train()
        messages.append(str(error.value))
    return messages


def test_processes_with_other_options_or_data_are_told_so_and_do_not_wait(tmp_path):
    first, second = run_processes(differing, 2, timeout=60, args=(str(tmp_path),))
    assert first == second
    options, rows = first
    assert "learning_rate is 0.001 (process 0), 0.002 (process 1)" in options
    assert "max_steps is 4 (process 0), 5 (process 1)" in options
    assert options.count(" is ") == 2
    assert rows.endswith("and do not: the number of training rows is 16 (process 0), 17 (process 1)")


def too_few(rank: int, world: int, folder: str) -> None:
    trainer(Path(folder), eval_dataset=Rows(1)).evaluate()


def test_fewer_evaluation_rows_than_processes_are_refused(tmp_path):
    with pytest.raises(ProcessesError, match="1 rows, fewer than the 2 processes"):
        run_processes(too_few, 2, args=(str(tmp_path),))
