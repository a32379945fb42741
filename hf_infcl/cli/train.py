"""`hf-infcl train`, which is also what `accelerate launch recipes/finetune_clip.py` runs."""

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
    from hf_infcl.cli.parser import RecipeParser
    from hf_infcl.trainer import InfCLConfig, InfCLTrainer

logger = logging.getLogger(__name__)


# Of the hundred fields that transformers' TrainingArguments bring along, those that runs usually set.
USUAL_TRAINING_FIELDS = (
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size"),
    *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay"),
    *("label_smoothing_factor", "bf16", "gradient_checkpointing", "dataloader_num_workers", "seed"),
    *("logging_steps", "report_to", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit"),
    *("load_best_model_at_end", "metric_for_best_model", "resume_from_checkpoint", "push_to_hub", "hub_model_id"),
)


_EXAMPLE = """example:
  hf-infcl train --config recipes/sample.yaml --learning_rate 1e-3"""


def make_parser(prog: str | None = None) -> "RecipeParser":
    """The parser of the command and of the recipe script: data, training and model arguments in one place."""
    from transformers import TrainingArguments

    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
    from hf_infcl.cli.parser import RecipeParser
    from hf_infcl.trainer import InfCLConfig

    inherited = [entry.name for entry in fields(TrainingArguments) if entry.init]
    rare = [name for name in inherited if name not in USUAL_TRAINING_FIELDS]
    return RecipeParser(
        [ScriptArguments, InfCLConfig, ModelArguments],
        sections={
            "data": [entry.name for entry in fields(ScriptArguments)],
            "model and adapter": [entry.name for entry in fields(ModelArguments)],
            "contrastive training": [
                entry.name for entry in fields(InfCLConfig) if entry.init and entry.name not in inherited
            ],
            "training, as in transformers.TrainingArguments": [*USUAL_TRAINING_FIELDS, *rare],
        },
        rare=rare,
        prog=prog,
        epilog=_EXAMPLE,
    )


def recipe_fields() -> set[str]:
    """The names that a recipe of this command may have."""
    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
    from hf_infcl.trainer import InfCLConfig

    return {
        entry.name for kind in (ScriptArguments, InfCLConfig, ModelArguments) for entry in fields(kind) if entry.init
    }


def main(
    script_args: "ScriptArguments", training_args: "InfCLConfig", model_args: "ModelArguments"
) -> dict[str, float]:
    """Fine-tunes a dual encoder as a recipe says and writes model or adapter, processor, card and plot.

    Args:
        script_args: the data.
        training_args: everything about the training.
        model_args: the model and its adapter.

    Returns:
        The metrics of the final evaluation; empty without an evaluation split.
    """
    return fine_tune(*build(script_args, training_args, model_args), script_args, model_args)


def build(
    script_args: "ScriptArguments", training_args: "InfCLConfig", model_args: "ModelArguments"
) -> tuple["InfCLTrainer", str | None]:
    """Data, model and trainer of a recipe: what can go wrong here is the recipe's.

    Args:
        script_args, training_args, model_args: see `main`.

    Returns:
        The trainer, and the checkpoint to resume from.

    Raises:
        ValueError, OSError: data, model or checkpoint are not there, or do not go together.
    """
    from transformers import set_seed

    from hf_infcl.cli.building import load_datasets, lora_config, model_init_kwargs
    from hf_infcl.cli.unused import unused_options
    from hf_infcl.hub import check_folder
    from hf_infcl.trainer import InfCLTrainer

    adapter = lora_config(model_args)
    check_folder(training_args.output_dir, is_adapter=adapter is not None)
    set_seed(training_args.seed)
    train_dataset, eval_dataset = load_datasets(script_args, training_args)
    training_args.model_init_kwargs = model_init_kwargs(training_args, model_args)
    trainer = InfCLTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=adapter,
    )
    if trainer.is_world_process_zero():
        for line in unused_options(script_args, model_args, evaluates=eval_dataset is not None):
            logger.warning("%s", line)
    return trainer, trainer.find_checkpoint(_checkpoint(training_args.resume_from_checkpoint))


def fine_tune(
    trainer: "InfCLTrainer", checkpoint: str | None, script_args: "ScriptArguments", model_args: "ModelArguments"
) -> dict[str, float]:
    """Trains, evaluates before and afterwards, and writes the result.

    Args:
        trainer, checkpoint: what `build` returns.
        script_args, model_args: see `main`.

    Returns:
        As `main`.
    """
    from hf_infcl.cli.progress import use_brief_evaluations
    from hf_infcl.cli.summary import print_summary
    from hf_infcl.hub import find_peft_model, write_run
    from hf_infcl.trainer.description import describe_run

    if trainer.is_world_process_zero():
        print(describe_run(trainer))
    use_brief_evaluations(trainer)
    evaluates = trainer.eval_dataset is not None
    before = trainer.evaluate() if evaluates and script_args.evaluate_base else {}
    trainer.train(resume_from_checkpoint=checkpoint)
    after = trainer.evaluate() if evaluates else {}

    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        write_run(
            trainer,
            before=before,
            after=after,
            base_model=model_args.model_name_or_path,
            base_model_revision=model_args.model_revision,
            dataset=script_args.dataset_name,
            dataset_revision=script_args.dataset_revision,
        )
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        is_adapter = find_peft_model(trainer.model) is not None
        print_summary(script_args, trainer.args, model_args, is_adapter=is_adapter, before=before, after=after)
    return after


def _checkpoint(value: str | None) -> Any:
    """`--resume_from_checkpoint last` (or `true`) means the newest checkpoint of the output folder."""
    return True if value is not None and value.lower() in ("last", "true") else value


def _leave_group(trainer: "InfCLTrainer") -> None:
    """Takes the process group down, its threads too.

    A process that ends while they still run can be aborted by them; its launcher then kills the others, and the first
    one may still be writing the card. They run for as long as the DDP model holds the group.
    """
    from torch.nn.parallel import DistributedDataParallel

    trainer.accelerator.end_training()
    if isinstance(trainer.model_wrapped, DistributedDataParallel):
        for holder in ("reducer", "logger", "process_group"):
            delattr(trainer.model_wrapped, holder)


def run(args: Sequence[str] | None = None, prog: str = "hf-infcl train") -> int:
    """Parses a command line and trains.

    Returns:
        The exit status: 2 where command line, recipe, data or model cannot be followed, 130 where the run was
        interrupted, else 0. What fails once the training runs keeps its traceback, unless it is a picture, a caption,
        the memory or the Hub.
    """
    from hf_infcl.cli.errors import run_command

    def prepare() -> tuple["InfCLTrainer", str | None, "ScriptArguments", "ModelArguments"]:
        script_args, training_args, model_args = make_parser(prog).parse(args)
        return *build(script_args, training_args, model_args), script_args, model_args

    def work(trainer: "InfCLTrainer", *told: Any) -> None:
        fine_tune(trainer, *told)
        _leave_group(trainer)

    return run_command(prog, prepare, work)
