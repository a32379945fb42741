"""The best checkpoint is the one reloaded, and a resumed run ends where the uninterrupted one does, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import AutoModel, AutoProcessor, CLIPModel, TrainerCallback

from hf_infcl import InfCLTrainer, load_dual_encoder
from hf_infcl.trainer.checkpoints import how_to_go_on, newest_checkpoint
from tests.tiny import save_tiny, tiny_clip, tiny_processor, tiny_siglip
from tests.trainer.helpers import Rows, config, dropout_clip, lora, parameters, stack, trained, trainer

CASES = {
    "full": {},
    "lora": {"adapter": {"target_modules": ["q_proj"]}},
    "lora with dropout": {"adapter": {"target_modules": ["q_proj"], "lora_dropout": 0.5}, "dropout": True},
    "memory bank": {"adapter": {"lora_dropout": 0.5}, "memory_bank_size": 5},
    "trained scale": {"adapter": {}, "train_logit_scale": True},
    "accumulation": {"adapter": {"lora_dropout": 0.5}, "gradient_accumulation_steps": 2},
}


def resumable(folder: Path, case: dict, **options):
    case = dict(case)
    adapter = case.pop("adapter", None)
    torch.manual_seed(5)
    model = dropout_clip() if case.pop("dropout", False) else tiny_clip()
    return trainer(
        folder,
        model,
        n=16,
        peft_config=None if adapter is None else lora(**adapter),
        **{
            "per_device_train_batch_size": 2,
            "max_steps": 8,
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_dataset": Rows(4),
            "eval_strategy": "steps",
            "eval_steps": 3,
            **case,
            **options,
        },
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, case, step):
    whole = resumable(tmp_path / "whole", case)
    whole.train()
    resumed = resumable(tmp_path / "resumed", case)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert resumed.state.global_step == 8
    wanted, found = parameters(whole.model), parameters(resumed.model)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    if whole.memory_bank is not None:
        assert torch.equal(whole.memory_bank.image_embeds, resumed.memory_bank.image_embeds)
        assert torch.equal(whole.memory_bank.ids, resumed.memory_bank.ids)


class Changing(Rows):
    """Rows that are others in every epoch, as drawn captions are."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.rows[(index + self.epoch) % len(self)]


class ChangingStream(IterableDataset):
    """The same as a stream, which has no length."""

    def __init__(self, n):
        self._rows = Changing(n)

    def set_epoch(self, epoch):
        self._rows.set_epoch(epoch)

    def __iter__(self):
        return (self._rows[i] for i in range(len(self._rows)))


@pytest.mark.parametrize("step", [3, 5, 6])
def test_what_changes_with_the_epoch_is_resumed_in_its_epoch(tmp_path, step):
    ends = []
    for checkpoint in (None, step):
        run = trainer(tmp_path, train_dataset=Changing(16), max_steps=9, save_strategy="steps", save_steps=1)
        run.train(checkpoint and str(tmp_path / f"checkpoint-{checkpoint}"))
        ends.append(parameters(run.model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("step", [1, 3, 4, 6, 7])
def test_a_stream_is_resumed_in_the_pass_it_was_in(tmp_path, step):
    """13 rows, of which each pass gives three steps of two micro-batches of two; the last row is left out."""
    ends = []
    for checkpoint in (None, step):
        run = trainer(
            tmp_path,
            dropout_clip(),
            train_dataset=ChangingStream(13),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=8,
            save_strategy="steps",
            save_steps=1,
        )
        run.train(checkpoint and str(tmp_path / f"checkpoint-{checkpoint}"))
        assert run.state.global_step == 8
        ends.append(parameters(run.model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_best_adapter_is_the_one_reloaded(tmp_path):
    """The recall is told by hand: the second of four evaluations is the best."""
    recalls = iter([0.2, 0.9, 0.5, 0.1])
    run = trainer(
        tmp_path,
        peft_config=lora(),
        train_logit_scale=True,
        eval_dataset=Rows(4),
        compute_metrics=lambda _: {"quality": next(recalls)},
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="quality",
    )
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    saved = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    found = trained(run.model)
    assert len(saved) == len(found)
    for name, value in found.items():
        assert torch.equal(saved[name.replace(".default", "")], value)


@pytest.mark.parametrize(
    ("metric", "greater"),
    [(None, True), ("loss", False), ("eval_text_to_image/median_rank", False), ("image_to_text/mrr", True)],
)
def test_the_best_model_is_chosen_by_a_metric_in_its_own_direction(tmp_path, metric, greater):
    run = trainer(
        tmp_path,
        eval_dataset=Rows(6),
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
    )
    run.train()
    name = f"eval_{(metric or 'mean_recall@1').removeprefix('eval_')}"
    values = [line[name] for line in run.state.log_history if name in line]
    assert len(values) == 3
    assert run.state.best_metric == (max(values) if greater else min(values))


def test_the_first_of_several_sets_chooses_the_best_model(tmp_path):
    run = trainer(
        tmp_path,
        eval_dataset={"a": Rows(4), "b": Rows(4, seed=1)},
        eval_strategy="steps",
        save_strategy="best",
        eval_steps=1,
    )
    run.train()
    assert run.args.metric_for_best_model == "a_mean_recall@1"
    assert run.state.best_metric is not None


def test_the_saved_adapter_is_whole(tmp_path):
    base = save_tiny("clip", tmp_path / "base")
    out = tmp_path / "out"
    run = InfCLTrainer(
        base,
        config(out, train_logit_scale=True, logging_steps=1),
        data_collator=stack,
        train_dataset=Rows(8),
        eval_dataset=Rows(4),
        processing_class=AutoProcessor.from_pretrained(base),
        peft_config=lora(),
    )
    run.train()
    run.evaluate()
    run.save_model()
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md", "curves.png"):
        assert (out / name).is_file(), name
    assert str(tmp_path) not in (out / "README.md").read_text() + (out / "adapter_config.json").read_text()
    batch = {name: value for name, value in stack(Rows(3).rows).items() if name != "ids"}
    wanted = run.model.eval()(**batch)
    found, _ = load_dual_encoder(base, adapter=out)
    assert torch.equal(found(**batch).image_embeds, wanted.image_embeds)
    plain = PeftModel.from_pretrained(CLIPModel.from_pretrained(base), out)
    assert torch.equal(plain.get_base_model().logit_scale, run.model.get_base_model().logit_scale)


def test_a_push_writes_a_card_and_leaves_a_fuller_one(tmp_path):
    run = trainer(tmp_path, peft_config=lora())
    run.train()
    run.create_model_card()
    card = Path(tmp_path, "README.md")
    assert "generated_from_trainer" in card.read_text()
    run.save_model()
    card.write_text(card.read_text() + "And more.")
    run.create_model_card(model_name="x")
    assert card.read_text().endswith("And more.")
    # Another training makes it outdated.
    run.train()
    run.create_model_card()
    assert not card.read_text().endswith("And more.")


def test_the_saved_model_is_a_plain_transformers_model(tmp_path):
    run = trainer(tmp_path)
    run.processing_class = tiny_processor("clip")
    run.train()
    run.save_model(str(tmp_path / "final"))
    plain = AutoModel.from_pretrained(tmp_path / "final")
    assert type(plain) is CLIPModel
    assert all(
        torch.equal(value, dict(plain.named_parameters())[name]) for name, value in parameters(run.model).items()
    )


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "trainer_state.json", "adapter_model.safetensors"])
def test_a_checkpoint_without_a_file_is_refused_by_its_name(tmp_path, name):
    resumable(tmp_path, CASES["lora"], max_steps=2).train()
    (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.raises(ValueError, match=name):
        resumable(tmp_path, CASES["lora"]).train(resume_from_checkpoint=True)


def test_a_checkpoint_without_its_memory_bank_is_refused(tmp_path):
    resumable(tmp_path, CASES["lora"], max_steps=2).train()
    with pytest.raises(ValueError, match=r"memory_bank\.pt"):
        resumable(tmp_path, CASES["lora"], memory_bank_size=4).train(resume_from_checkpoint=True)


def test_a_bank_of_another_size_is_refused(tmp_path):
    resumable(tmp_path, CASES["memory bank"], max_steps=2).train()
    with pytest.raises(ValueError, match="memory_bank_size=5, this run 6"):
        resumable(tmp_path, CASES["memory bank"], memory_bank_size=6).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"lora_alpha": 32}, "lora_alpha=8, this run 32"),
        ({"use_rslora": True}, "use_rslora=False, this run True"),
        ({"alpha_pattern": {"q_proj": 2}}, r"alpha_pattern=\{\}, this run \{'q_proj': 2\}"),
    ],
)
def test_an_adapter_of_the_same_shapes_and_another_meaning_is_refused(tmp_path, adapter, said):
    resumable(tmp_path, CASES["lora"], max_steps=2).train()
    with pytest.raises(ValueError, match=said):
        resumable(tmp_path, {"adapter": {"target_modules": ["q_proj"], **adapter}}).train(resume_from_checkpoint=True)


def test_a_bank_is_not_given_up_without_a_word(tmp_path):
    resumable(tmp_path, CASES["memory bank"], max_steps=2).train()
    with pytest.raises(ValueError, match="memory_bank_size=5, this run 0"):
        resumable(tmp_path, CASES["memory bank"], memory_bank_size=0).train(resume_from_checkpoint=True)


def test_another_batch_and_seed_are_one_warning(tmp_path, caplog):
    resumable(tmp_path, CASES["lora"], max_steps=2).train()
    resumable(tmp_path, CASES["lora"], max_steps=2).train(resume_from_checkpoint=True)
    assert "other options" not in caplog.text
    changed = {"gradient_accumulation_steps": 2, "seed": 7}
    resumable(tmp_path, CASES["lora"], max_steps=3, **changed).train(resume_from_checkpoint=True)
    assert caplog.text.count("other options") == 1
    assert "contrastive_batch_size=4 instead of 2, seed=7 instead of 42" in caplog.text


@pytest.mark.parametrize("other", ["other rank", "other targets", "whole model", "other family"])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, other):
    adapters = {"other rank": {"r": 2}, "other targets": {"target_modules": ["k_proj"]}}
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    family = "siglip" if other == "other family" else "clip"
    model = tiny_siglip() if family == "siglip" else tiny_clip()
    adapter = None if other == "whole model" else lora(**adapters.get(other, {"target_modules": ["q_proj"]}))
    trainer(tmp_path, model, train_dataset=Rows(4, family), peft_config=adapter, **options).train()
    # The other family's adapter may have layers of the same names and shapes, hence all of them here.
    mine = lora() if other == "other family" else lora(target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"of another model|this run trains an adapter"):
        trainer(tmp_path, peft_config=mine, **options).train(resume_from_checkpoint=True)


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(
        ValueError, match="no checkpoint in output_dir.*; leave resume_from_checkpoint out to begin anew"
    ):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="is no folder"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_a_checkpoint_that_was_only_saved_cannot_be_resumed(tmp_path):
    trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True).train()
    with pytest.raises(ValueError, match="save_only_model"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_checkpoints_hold_adapter_and_processor_alone(tmp_path):
    run = trainer(tmp_path, peft_config=lora(), max_steps=1, save_strategy="steps", save_steps=1)
    run.processing_class = tiny_processor("clip")
    run.train()
    names = {file.name for file in (tmp_path / "checkpoint-1").iterdir()}
    assert "model.safetensors" not in names
    assert {"adapter_model.safetensors", "tokenizer.json", "optimizer.pt"} <= names
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["global_step"] == 1
    shutil.rmtree(tmp_path / "checkpoint-1")


# ---- What is said of them ----


def saving(folder: Path, steps: int, **options):
    return trainer(folder, max_steps=steps, save_strategy="steps", save_steps=1, **options)


def test_resuming_says_from_where_and_how_far(tmp_path, capsys):
    saving(tmp_path, 2).train()
    saving(tmp_path, 4, disable_tqdm=False).train(resume_from_checkpoint=True)
    assert f"resuming from {tmp_path / 'checkpoint-2'} at step 2 of 4\n" in capsys.readouterr().out


def test_a_run_that_had_ended_says_what_to_raise(tmp_path, caplog):
    saving(tmp_path, 2).train()
    saving(tmp_path, 3).train(resume_from_checkpoint=True)
    assert "no step is left" not in caplog.text
    saving(tmp_path, 3).train(resume_from_checkpoint=True)
    assert "no step is left to take: raise max_steps or num_train_epochs" in caplog.text


def test_a_run_of_another_length_says_what_becomes_of_the_learning_rate(tmp_path, caplog):
    """What it says is what happens: a step at the rate that the old schedule ended with, then the new one's."""
    options = {"lr_scheduler_type": "linear", "learning_rate": 0.1, "logging_steps": 1}
    saving(tmp_path, 2, **options).train()
    saving(tmp_path, 2, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "was to take" not in caplog.text
    longer = saving(tmp_path, 4, **options)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "the checkpoint's run was to take 2 steps, this one 4: its first step still goes by" in caplog.text
    rates = [line["learning_rate"] for line in longer.state.log_history if "learning_rate" in line]
    assert rates[-2:] == pytest.approx([0.0, 0.1 * 1 / 4])


@pytest.mark.parametrize("steps", [3, 4, 6])
def test_a_run_that_had_ended_takes_no_step_more(tmp_path, steps):
    """16 rows are 4 steps an epoch."""
    ended = saving(tmp_path, steps)
    ended.train()
    again = saving(tmp_path, steps)
    assert again.train(resume_from_checkpoint=True).global_step == again.state.global_step == steps
    assert newest_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{steps}")
    wanted, found = parameters(ended.model), parameters(again.model)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_run_of_no_steps_takes_none(tmp_path):
    run = trainer(tmp_path, max_steps=0)
    before = parameters(run.model)
    assert run.train().global_step == 0
    assert all(torch.equal(before[name], value) for name, value in parameters(run.model).items())


def test_a_run_that_begins_anew_beside_checkpoints_says_so(tmp_path, caplog):
    saving(tmp_path, 2).train()
    assert "earlier run" not in caplog.text
    saving(tmp_path, 3).train(resume_from_checkpoint=True)
    assert "earlier run" not in caplog.text
    saving(tmp_path, 1).train()
    assert caplog.text.count("earlier run") == 1
    assert f"the newest {tmp_path / 'checkpoint-3'}, and this run begins anew beside them. " in caplog.text
    saving(tmp_path, 1, save_total_limit=2).train()
    assert "beside them, deleting the oldest as it saves its own (save_total_limit=2). " in caplog.text


def test_the_newest_checkpoint_is_the_last_runs_own(tmp_path):
    saving(tmp_path, 3).train()
    saving(tmp_path, 2).train()
    # Their times go lost where a folder is copied.
    shutil.copytree(tmp_path, tmp_path / "copy", copy_function=shutil.copyfile)
    for folder in (tmp_path, tmp_path / "copy"):
        assert saving(folder, 4).find_checkpoint(True) == str(folder / "checkpoint-2")
    saving(tmp_path, 4).train(resume_from_checkpoint=True)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_of_checkpoints_that_do_not_say_when_they_began_the_last_step_is_taken(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert newest_checkpoint(tmp_path / "none") is None


def notes_of_interrupted(run: InfCLTrainer, step: int, resume: str | None = None) -> list[str]:
    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise KeyboardInterrupt

    run.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        run.train(resume)
    return getattr(caught.value, "__notes__", [])


def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    (note,) = notes_of_interrupted(saving(tmp_path, 2), 1)
    assert note == (
        f"To go on from {tmp_path / 'checkpoint-1'}: trainer.train(resume_from_checkpoint=True), or on the command "
        "line --resume_from_checkpoint last"
    )
    assert notes_of_interrupted(trainer(tmp_path / "other"), 1) == []
    assert notes_of_interrupted(saving(tmp_path / "weights", 2, save_only_model=True), 1) == []


def test_an_interrupted_run_does_not_pass_off_an_earlier_runs_checkpoint_as_its_own(tmp_path):
    saving(tmp_path, 3).train()
    (note,) = notes_of_interrupted(saving(tmp_path, 3), 0)
    assert note == f"This run had saved no checkpoint yet: {tmp_path / 'checkpoint-3'} is an earlier run's"
    # One that resumed goes on from where it did, until it has saved one of its own.
    first = str(tmp_path / "checkpoint-1")
    (note,) = notes_of_interrupted(saving(tmp_path, 3), 1, first)
    assert note == (
        f"To go on from {first}: trainer.train(resume_from_checkpoint={first!r}), or on the command line "
        f"--resume_from_checkpoint {first}"
    )
    (note,) = notes_of_interrupted(saving(tmp_path, 3), 2, first)
    assert note.startswith(f"To go on from {tmp_path / 'checkpoint-2'}: trainer.train(resume_from_checkpoint=True)")


def test_an_interrupted_save_is_not_offered(tmp_path):
    run = saving(tmp_path, 2)

    def interrupted(folder):
        raise KeyboardInterrupt

    run._save_optimizer_and_scheduler = interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        run.train()
    assert (tmp_path / "checkpoint-1").is_dir()
    assert not hasattr(caught.value, "__notes__")


def test_interrupted_after_the_last_checkpoint_was_cleared_away_the_newest_is_named(tmp_path):
    saving(tmp_path, 2).train()
    kept = tmp_path / "checkpoint-2"
    note = how_to_go_on(str(tmp_path / "gone"), tmp_path)
    assert note is not None
    assert note.startswith(f"To go on from {kept}: trainer.train(resume_from_checkpoint=True)")
    assert how_to_go_on(str(tmp_path / "gone"), tmp_path / "empty") is None


def test_a_checkpoint_in_the_configuration_alone_is_not_resumed_from_and_says_so(tmp_path, caplog):
    run = saving(tmp_path, 1, resume_from_checkpoint="last")
    run.train()
    assert "resume_from_checkpoint='last' of the configuration is for the command line" in caplog.text


# ---- Interrupted, damaged, of another run ----


def test_what_was_not_saved_to_its_end_is_passed_over_and_named(tmp_path, caplog):
    saving(tmp_path, 3).train()
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("")
    for newest in (True, "last"):
        caplog.clear()
        assert saving(tmp_path, 3).find_checkpoint(newest) == str(tmp_path / "checkpoint-1")
        (line,) = [line for line in caplog.messages if "passed over" in line]
        assert line.endswith(f"{tmp_path / 'checkpoint-3'}, {tmp_path / 'checkpoint-2'}")
    for torn, said in (("checkpoint-3", "lacks"), ("checkpoint-2", "has damaged files, empty or cut short:")):
        with pytest.raises(ValueError, match=f"{said} trainer_state.json: its run was probably interrupted") as error:
            saving(tmp_path, 3).train(str(tmp_path / torn))
        assert str(error.value).endswith(f"Whole ones beside it, the newest first: {tmp_path / 'checkpoint-1'}")


def test_a_checkpoint_is_not_whole_while_it_is_written_over(tmp_path):
    saving(tmp_path, 2).train()
    run = saving(tmp_path, 2)

    def interrupted(folder):
        raise KeyboardInterrupt

    run._save_optimizer_and_scheduler = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match="probably interrupted"):
        saving(tmp_path, 2).train(str(tmp_path / "checkpoint-1"))


FILES = ["contrastive_options.json", "memory_bank.pt", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


def test_a_damaged_file_is_named_with_the_checkpoints_that_are_whole(tmp_path):
    saving(tmp_path, 2, memory_bank_size=3).train()
    for name in [*FILES, "trainer_state.json"]:
        file = tmp_path / "checkpoint-2" / name
        whole = file.read_bytes()
        for part in (b"", whole[: len(whole) // 2]):
            file.write_bytes(part)
            with pytest.raises(ValueError, match=f"checkpoint-2' has damaged files, .*: {name}: .*checkpoint-1"):
                saving(tmp_path, 2, memory_bank_size=3).train(str(tmp_path / "checkpoint-2"))
        file.write_bytes(whole)
    assert saving(tmp_path, 2, memory_bank_size=3).find_checkpoint(True) == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": "sgd"}, "optim=adamw_torch, this run sgd"),
        ({"freeze_text_model": True}, r"freeze_text_model=False, this run True; trained_tensors=\d+, this run \d+"),
        ({"train_logit_scale": False}, r"has trained_tensors=\d+, this run \d+: "),
    ],
)
def test_another_optimizer_or_other_parameters_trained_are_refused(tmp_path, options, said):
    saving(tmp_path, 1, optim="adamw_torch").train()
    with pytest.raises(ValueError, match=said):
        saving(tmp_path, 2, **{"optim": "adamw_torch", **options}).train(True)
    saving(tmp_path, 2, optim="adamw_torch_fused").train(True)


@pytest.mark.parametrize("adapter_first", [True, False])
def test_a_folder_never_holds_an_adapter_beside_a_whole_model(tmp_path, adapter_first):
    """transformers would put the one on the other, whichever run each is from."""

    def run(is_adapter, **options):
        return trainer(tmp_path, peft_config=lora() if is_adapter else None, **options)

    first = run(adapter_first, max_steps=1, save_strategy="steps", save_steps=1)
    first.train()
    assert (tmp_path / "checkpoint-1" / "adapter_config.json").exists() == adapter_first
    # What stands in the run's own folder is named before the first step; an earlier run's checkpoint is replaced.
    other = run(not adapter_first, max_steps=1, save_strategy="steps", save_steps=1)
    other.train()
    assert (tmp_path / "checkpoint-1" / "adapter_config.json").exists() != adapter_first
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists() == adapter_first
    assert (tmp_path / "checkpoint-1" / "adapter_model.safetensors").exists() != adapter_first
    first.save_model()
    kept = sorted(file.name for file in tmp_path.iterdir())
    held = r"an adapter \(adapter_config" if adapter_first else r"a whole model \(model.safetensors"
    for refused in (run(not adapter_first).train, other.save_model):
        with pytest.raises(ValueError, match=rf"holds {held}.*: name another output_dir"):
            refused()
    assert sorted(file.name for file in tmp_path.iterdir()) == kept
    run(adapter_first).train()
