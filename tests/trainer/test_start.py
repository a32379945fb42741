"""What is refused before the first step, and what the message says."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from torch import nn
from transformers import CLIPVisionModel, TrainingArguments

from hf_infcl import ContrastiveLoss, InfCLConfig, InfCLTrainer, MemoryBank
from hf_infcl.data import ImageTextCollator, sample_dataset
from hf_infcl.trainer import checks
from hf_infcl.trainer.preparation import sides_of
from tests.tiny import save_tiny, tiny_clip, tiny_processor, tiny_siglip, tiny_vision_text_dual_encoder
from tests.trainer.helpers import Rows, Stream, config, lora, parameters, stack, trainer


def test_a_data_set_smaller_than_a_contrastive_batch_names_rows_batch_and_options(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"3 rows, fewer than one contrastive batch of 8 \(per_device_train_batch_size=4 x "
        r"gradient_accumulation_steps=2 x 1 process",
    ):
        trainer(tmp_path, n=3, gradient_accumulation_steps=2)


@pytest.mark.parametrize("drop_last", [True, False])
def test_fewer_rows_than_a_batch_are_refused_with_and_without_drop_last(tmp_path, drop_last):
    with pytest.raises(ValueError, match="3 rows"):
        trainer(tmp_path, n=3, dataloader_drop_last=drop_last)


def test_a_contrastive_batch_of_one_pair_is_refused_for_softmax_losses(tmp_path):
    with pytest.raises(ValueError, match="one pair"):
        trainer(tmp_path, per_device_train_batch_size=1)
    trainer(tmp_path, per_device_train_batch_size=1, memory_bank_size=4).train()
    trainer(tmp_path, tiny_siglip(), train_dataset=Rows(4, "siglip"), per_device_train_batch_size=1).train()
    trainer(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2).train()


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_last_batch_of_one_pair_is_left_out_of_training_and_mean(tmp_path, drop_last, caplog):
    """Five rows in batches of four: one step an epoch, whose loss is that of the four."""
    run = trainer(tmp_path, n=5, num_train_epochs=2, max_steps=-1, dataloader_drop_last=drop_last, learning_rate=0.0)
    run.train()
    assert run.state.global_step == run.state.max_steps == 2
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert run.state.log_history[-1]["train_loss"] == pytest.approx(sum(losses) / 2)
    assert min(losses) > 0.5  # a lone pair's loss is 0
    assert "1 of 5 rows are left over" in caplog.text


def test_a_group_cut_short_is_dropped_and_reported_once(tmp_path, caplog):
    """A stream of 9 rows: in micro-batches of 2 and groups of 3 there is one whole group a pass."""
    run = trainer(
        tmp_path,
        train_dataset=Stream(Rows(9)),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=3,
    )
    run.train()
    assert run.state.global_step == 3
    sizes = {line["contrastive_batch_size"] for line in run.state.log_history if "loss" in line}
    assert sizes == {6}
    assert caplog.text.count("is dropped") == 1


def test_the_short_group_of_an_epoch_is_no_step(tmp_path):
    run = trainer(
        tmp_path, n=11, per_device_train_batch_size=2, gradient_accumulation_steps=3, num_train_epochs=3, max_steps=-1
    )
    run.train()
    # 11 rows: a whole batch of 6, and 5 more that fill three micro-batches (2, 2, 1).
    assert run.state.global_step == run.state.max_steps == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric_for_best_model": "recall@1"}, "did you mean .*mean_recall@1"),
        ({"metric_for_best_model": "eval_accuracy"}, "is no metric of the evaluation"),
    ],
)
def test_a_metric_that_no_evaluation_gives_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, eval_dataset=Rows(4), **options)


def test_losses_of_the_users_own_are_passed_as_loss(tmp_path):
    with pytest.raises(ValueError, match=r"compute_loss_func.*one micro-batch"):
        InfCLTrainer(
            tiny_clip(), config(tmp_path), data_collator=stack, train_dataset=Rows(4), compute_loss_func=lambda *_: 0
        )
    with pytest.raises(ValueError, match="memory_bank_size"):
        trainer(tmp_path, loss=ContrastiveLoss(bank=MemoryBank(4, 16)))


def test_several_visible_gpus_in_one_process_are_refused(tmp_path):
    args = config(tmp_path)
    args._n_gpu = 3
    with pytest.raises(ValueError, match=r"3 GPUs are visible.*accelerate launch --num_processes 3"):
        checks.check_arguments(args)


def test_other_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"InfCLConfig, got TrainingArguments; use InfCLConfig\(\.\.\.\)"):
        InfCLTrainer(tiny_clip(), TrainingArguments(str(tmp_path), report_to="none"))
    for options in ({"batch_eval_metrics": True}, {"train_sampling_strategy": "group_by_length"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            trainer(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "infonce"}, "loss_type must be one of 'contrastive', 'hard_negative', 'sigmoid', got 'infonce'"),
        ({"duplicates": "drop"}, "duplicates must be one of"),
        ({"batch_sampler": "group"}, "batch_sampler must be one of"),
        ({"logit_scale_max": -1.0}, "logit_scale_max must be a number >= 0"),
        ({"logit_scale_max": 0.0}, "logit_scale_max must be greater than 0"),
        ({"memory_bank_size": -1}, "memory_bank_size must be an integer >= 0"),
        ({"num_hard_negatives": 0}, "num_hard_negatives must be an integer >= 1"),
        ({"label_smoothing_factor": 1.0}, "label_smoothing_factor must be in"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be an integer >= 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be an integer >= 1"),
    ],
)
def test_a_value_that_no_field_takes_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sigmoid", "memory_bank_size": 4}, "memory_bank_size has no effect"),
        ({"loss_type": "sigmoid", "label_smoothing_factor": 0.1}, "label_smoothing_factor has no effect"),
        ({"loss_type": "sigmoid", "duplicates": "positive"}, "needs loss_type='contrastive'"),
        ({"hard_negative_start": 5.0}, "hard_negative_start has no effect"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, tiny_siglip(), train_dataset=Rows(4, "siglip"), **{"loss_type": "contrastive", **options})


def test_parameters_out_of_the_losss_reach_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"do not reach the contrastive loss: logit_bias.*train_logit_scale=False"):
        trainer(tmp_path, tiny_siglip(), train_dataset=Rows(4, "siglip"), loss_type="contrastive")
    options = {"loss_type": "contrastive", "train_logit_scale": False}
    trainer(tmp_path, tiny_siglip(), train_dataset=Rows(4, "siglip"), **options).train()
    adapter = lora(target_modules=["q_proj", "out_proj"])
    with pytest.raises(ValueError, match=r"do not reach the sigmoid loss: .*head"):
        trainer(tmp_path, tiny_siglip(), train_dataset=Rows(4, "siglip"), peft_config=adapter)


def test_a_sigmoid_loss_without_a_bias_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a logit_bias, which CLIPModel lacks"):
        trainer(tmp_path, loss_type="sigmoid")


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no trainable parameter"):
        trainer(tmp_path, tiny_clip().requires_grad_(False))


def test_lora_targets_that_a_tower_lacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="match nothing in the vision tower"):
        trainer(
            tmp_path, tiny_vision_text_dual_encoder(), peft_config=LoraConfig(target_modules=["intermediate.dense"])
        )


def test_an_adapter_upon_an_adapter_is_refused(tmp_path):
    model = trainer(tmp_path, peft_config=lora()).model
    with pytest.raises(ValueError, match="has an adapter already"):
        trainer(tmp_path, model, peft_config=lora())
    trainer(tmp_path, model).train()


@pytest.mark.parametrize("task_type", ["FEATURE_EXTRACTION", "SEQ_CLS"])
def test_a_task_type_is_set_aside(tmp_path, task_type, caplog):
    run = trainer(tmp_path, peft_config=lora(task_type=task_type, target_modules=["q_proj", "v_proj"]))
    run.train()
    run.save_model()
    assert "task_type" in caplog.text
    assert run.model.peft_config["default"].task_type is None


def test_an_unsupported_family_is_refused_by_its_name(tmp_path):
    with pytest.raises(ValueError, match="not a supported dual encoder"):
        trainer(tmp_path, tiny_clip().vision_model)


def test_an_unsupported_family_is_named_before_its_processor_is_looked_for(tmp_path):
    table = sample_dataset("drawing", size=4)
    with pytest.raises(ValueError, match="CLIPVisionModel.*is not a supported dual encoder"):
        InfCLTrainer(CLIPVisionModel(tiny_clip().config.vision_config), config(tmp_path), train_dataset=table)


def test_a_model_without_processor_asks_for_one(tmp_path):
    with pytest.raises(ValueError, match="pass processing_class"):
        InfCLTrainer(tiny_clip(), config(tmp_path), train_dataset=sample_dataset("drawing", size=4))


def test_a_missing_column_lists_those_there_are(tmp_path):
    table = Dataset.from_dict({"picture_of": ["a.png"], "caption": ["a dog"]})
    with pytest.raises(ValueError, match=r"no image column.*picture_of, caption.*image_column"):
        InfCLTrainer(tiny_clip(), config(tmp_path), train_dataset=table, processing_class=tiny_processor("clip"))


def test_float16_weights_are_raised_before_they_are_trained(tmp_path, caplog):
    run = trainer(tmp_path, tiny_clip().half())
    run.train()
    assert "float16" in caplog.text
    assert {value.dtype for value in run.model.parameters()} == {torch.float32}
    assert math.isfinite(run.state.log_history[0]["loss"])


def test_a_float16_checkpoint_is_loaded_to_be_trained(tmp_path):
    folder = save_tiny(tiny_clip().half(), tmp_path / "half")
    run = InfCLTrainer(folder, config(tmp_path), train_dataset=sample_dataset("drawing", size=8))
    assert run.model.dtype == torch.float32
    run.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train_dataset": DatasetDict(train=Dataset.from_dict({"a": [1]}), test=Dataset.from_dict({"a": [1]}))},
            r"train_dataset is a DatasetDict of train, test; .* such as train_dataset\['train'\]",
        ),
        ({"train_dataset": {"all": Rows(8)}}, r"train_dataset is a dict of all; .*train_dataset\['all'\]"),
        ({"train_dataset": "some/data"}, r"train_dataset is the name 'some/data'; load it: .*load_image_text_dataset"),
        ({"eval_dataset": "some/data"}, "eval_dataset is the name 'some/data'; load it: .*split='test'"),
        ({"eval_dataset": {"a": Path("some/data")}}, "eval_dataset is the name 'some/data'"),
        ({"loss": ContrastiveLoss}, "loss is the class ContrastiveLoss; pass an instance of a module"),
        ({"loss": lambda *_: 0}, "loss is a function; pass an instance of a module .*loss_type"),
        ({"loss": "contrastive"}, "loss is a str; pass an instance"),
        ({"peft_config": {"r": 4}}, "peft_config must be a PeftConfig, got dict; pass one such as peft.LoraConfig"),
        ({"peft_config": LoraConfig}, "peft_config must be a PeftConfig, got type"),
    ],
)
def test_what_is_no_data_set_no_loss_and_no_adapter_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options)


# ---- Freezing ----


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("option", ["freeze_vision_model", "freeze_text_model"])
def test_a_frozen_tower_is_bit_equal_afterwards_and_embedded_without_graph(tmp_path, option, adapter):
    model = tiny_clip()
    run = trainer(
        tmp_path,
        model,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        peft_config=lora() if adapter else None,
        **{option: True},
    )
    frozen, other = ("vision", "text") if option == "freeze_vision_model" else ("text", "vision")
    sides = sides_of(run.model)
    assert (sides.image_trained, sides.text_trained) == (frozen == "text", frozen == "vision")
    before = parameters(run.model)
    run.train()
    changed = {name for name, value in parameters(run.model).items() if not torch.equal(before[name], value)}
    assert not any(f"{frozen}_model" in name or f"{frozen[:4]}ual_projection" in name for name in changed)
    assert any(f"{other}_model" in name for name in changed)
    assert not model.vision_model.training if frozen == "vision" else not model.text_model.training


def test_a_new_projection_behind_a_locked_tower_is_trained(tmp_path):
    model = tiny_vision_text_dual_encoder()
    run = trainer(
        tmp_path, model, train_dataset=Rows(8, "vision-text-dual-encoder"), freeze_vision_model=True, max_steps=1
    )
    before = parameters(run.model)
    run.train()
    changed = {name for name, value in parameters(run.model).items() if not torch.equal(before[name], value)}
    assert "visual_projection.weight" in changed
    assert not any(name.startswith("vision_model") for name in changed)


def test_only_the_projections_may_be_trained(tmp_path):
    model = tiny_clip()
    model.vision_model.requires_grad_(False)
    model.text_model.requires_grad_(False)
    run = trainer(tmp_path, model, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3)
    before = parameters(model)
    run.train()
    changed = {name for name, value in parameters(model).items() if not torch.equal(before[name], value)}
    assert changed == {"visual_projection.weight", "text_projection.weight", "logit_scale"}


# ---- The scale ----


@pytest.mark.parametrize("start", [4.6052, 7.0, 89.0])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_clips_scale_is_capped_in_the_parameter_and_in_what_is_saved(tmp_path, start, adapter):
    model = tiny_clip()
    model.logit_scale.data.fill_(start)
    run = trainer(tmp_path, model, peft_config=lora() if adapter else None)
    run.train()
    assert model.logit_scale.exp().item() <= 100.0
    assert math.isfinite(run.state.log_history[0]["loss"])
    run.save_model()
    file = Path(tmp_path, "adapter_model.safetensors" if adapter else "model.safetensors")
    from safetensors.torch import load_file

    saved = load_file(file)
    name = "base_model.model.logit_scale" if adapter else "logit_scale"
    if adapter and start < 5:
        assert name not in saved  # frozen, and above 100 only in its last digit
    else:
        assert saved[name].exp().item() <= 100.0


def test_a_cap_that_cuts_is_logged(tmp_path, caplog):
    model = tiny_clip()
    model.logit_scale.data.fill_(3.0)
    run = trainer(tmp_path, model, logit_scale_max=10.0)
    run.train()
    assert model.logit_scale.exp().item() <= 10.0
    assert "capped at logit_scale_max=10" in caplog.text
    assert run.state.log_history[0]["logit_scale"] <= 10.0


def test_siglips_scale_is_not_cut_unless_asked(tmp_path):
    def scale_after(**options):
        model = tiny_siglip()
        model.logit_scale.data.fill_(4.7215)
        trainer(tmp_path, model, train_dataset=Rows(4, "siglip"), learning_rate=0.0, **options).train()
        return model.logit_scale.exp().item()

    assert scale_after() == pytest.approx(112.34, abs=0.1)
    assert scale_after(logit_scale_max=100.0) <= 100.0


def test_the_scale_is_frozen_with_lora_unless_asked(tmp_path):
    for options, moves in (({}, False), ({"train_logit_scale": True}, True)):
        model = tiny_clip()
        before = model.logit_scale.item()
        trainer(tmp_path, model, peft_config=lora(), **options).train()
        assert (model.logit_scale.item() != before) == moves


def test_scale_and_bias_do_not_decay(tmp_path):
    run = trainer(tmp_path, tiny_siglip(), train_dataset=Rows(4, "siglip"), weight_decay=0.1)
    run.create_optimizer()
    decayed, kept = (set(map(id, group["params"])) for group in run.optimizer.param_groups)
    for name in ("logit_scale", "logit_bias"):
        assert id(getattr(run.model, name)) in kept
    assert id(run.model.vision_model.encoder.layers[0].mlp.fc1.weight) in decayed


# ---- The ways in ----


def test_a_model_by_path_and_a_table_of_pictures(tmp_path):
    """Columns are found, and neither is lost to remove_unused_columns."""
    folder = save_tiny("clip", tmp_path / "base")
    table = sample_dataset("drawing", size=12)
    run = InfCLTrainer(folder, config(tmp_path), train_dataset=table, eval_dataset={"scenes": table.select(range(4))})
    assert run.args.remove_unused_columns
    run.train()
    assert "eval_scenes_mean_recall@1" in run.evaluate()


def test_model_init_makes_a_model_that_trains(tmp_path):
    run = InfCLTrainer(
        args=config(tmp_path),
        model_init=lambda: tiny_clip(),
        train_dataset=Rows(8),
        data_collator=stack,
        peft_config=lora(),
    )
    run.train()
    assert run.state.global_step == 2


def test_the_default_loss_is_the_familys(tmp_path):
    assert trainer(tmp_path).loss_type == "contrastive"
    assert trainer(tmp_path, tiny_siglip(), train_dataset=Rows(4, "siglip")).loss_type == "sigmoid"


def test_options_reach_the_loss(tmp_path):
    run = trainer(tmp_path, label_smoothing_factor=0.1, duplicates="positive", loss_block_size=3, loss_backend="torch")
    options = run.loss.get_config_dict()
    assert options["label_smoothing"] == 0.1
    assert (options["duplicates"], options["block_size"], options["backend"]) == ("positive", 3, "torch")


def test_numbers_that_came_as_text_are_numbers(tmp_path):
    args = config(tmp_path, learning_rate="1e-4", per_device_train_batch_size="8", logging_steps="5", max_score="0.5")
    assert (args.learning_rate, args.per_device_train_batch_size, args.max_score) == (1e-4, 8, 0.5)
    for options, message in (
        ({"learning_rate": "fast"}, "learning_rate must be a number, got 'fast'"),
        ({"gradient_accumulation_steps": "2.5"}, "gradient_accumulation_steps must be an integer, got '2.5'"),
    ):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **options)


def test_defaults_that_differ_from_transformers():
    args = InfCLConfig("out", use_cpu=True)
    assert args.logging_nan_inf_filter is False
    assert args.ddp_find_unused_parameters is False
    assert args.metric_for_best_model is None


def test_batch_normalisation_is_left_alone(tmp_path):
    """Its outcome would depend on how the batch is cut."""
    model = tiny_vision_text_dual_encoder(vision="efficientnet")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [module.running_mean.clone() for module in norms]
    trainer(tmp_path, model, train_dataset=Rows(8, "vision-text-dual-encoder"), max_steps=1).train()
    assert norms
    assert all(torch.equal(module.running_mean, mean) for module, mean in zip(norms, before, strict=True))


# ---- Known before anything starts ----


def test_a_trainer_without_model_says_so(tmp_path):
    with pytest.raises(ValueError, match="^model is missing"):
        InfCLTrainer(None, config(tmp_path), train_dataset=Rows(8))
    with pytest.raises(ValueError, match="^with model_init, pass processing_class"):
        InfCLTrainer(None, config(tmp_path), train_dataset=Rows(8), model_init=tiny_clip)


def test_an_evaluation_set_without_a_row_for_each_process_is_refused_with_the_trainer(tmp_path):
    with pytest.raises(ValueError, match="the evaluation set has no rows"):
        trainer(tmp_path, eval_dataset={"some": Rows(2), "none": []})
    with pytest.raises(ValueError, match="1 rows, fewer than the 2 processes"):
        checks.check_eval_dataset({"one": Rows(1)}, world_size=2)


def test_batches_without_duplicates_of_rows_without_ids_are_refused_with_the_trainer(tmp_path):
    with pytest.raises(ValueError, match=r"no_duplicates.*no method ids\(index\) \(it is a list\)"):
        trainer(tmp_path, train_dataset=list(Rows(8)), batch_sampler="no_duplicates")


def test_strategies_that_differ_are_named_by_their_values(tmp_path):
    with pytest.raises(ValueError, match="eval_strategy is 'epoch' and save_strategy 'steps'") as caught:
        config(tmp_path, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps")
    assert "Strategy." not in str(caught.value)
    config(tmp_path, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="best")


def test_a_list_of_rows_is_read_as_a_table_is(tmp_path):
    rows = [{"img": row["image"], "text": row["caption"]} for row in sample_dataset("drawing", size=8)]
    run = InfCLTrainer(
        tiny_clip(),
        config(tmp_path),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tiny_processor("clip"),
    )
    run.train()
    assert run.evaluate()["eval_loss"] > 0
    assert "ids" in run.train_dataset[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"some": 1, "other": "a"}, "no image column found; columns: some, other. Set image_column"),
        (("a.png", "a dog"), "rows are of type tuple; expected dicts of columns"),
    ],
)
def test_a_list_of_other_rows_is_refused_with_the_trainer(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        InfCLTrainer(tiny_clip(), config(tmp_path), train_dataset=[row] * 8, processing_class=tiny_processor("clip"))


def test_a_collator_with_columns_of_its_own_gets_the_rows_as_they_are(tmp_path):
    rows = [{"img": row["image"], "text": row["caption"]} for row in sample_dataset("drawing", size=8)]
    processor = tiny_processor("clip")
    collate = ImageTextCollator(processor, image_column="img", caption_column="text")
    for dataset in (rows, Dataset.from_list(rows)):
        run = InfCLTrainer(
            tiny_clip(),
            config(tmp_path),
            train_dataset=dataset,
            data_collator=collate,
            processing_class=processor,
        )
        run.train()
        assert run.state.global_step == 2


@pytest.mark.parametrize("below", ["", "runs/first"])
def test_an_output_dir_that_is_or_lies_below_a_file_is_refused(tmp_path, below):
    file = tmp_path / "notes"
    file.write_text("")
    with pytest.raises(ValueError, match=r"output_dir=.* cannot be made a folder: '.*notes' is a file"):
        trainer(file / below)
    trainer(tmp_path / "new" / "folder")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("learning_rate", float("nan"), "learning_rate must be a number, got nan"),
        ("weight_decay", "nan", "weight_decay must be a number, got nan"),
        ("num_train_epochs", float("inf"), "num_train_epochs must be a finite number >= 0, got inf"),
        ("num_train_epochs", -1, "num_train_epochs must be a finite number >= 0, got -1"),
    ],
)
def test_numbers_that_count_nothing_are_refused(tmp_path, field, value, says):
    with pytest.raises(ValueError, match=says):
        InfCLConfig(str(tmp_path), **{field: value})
