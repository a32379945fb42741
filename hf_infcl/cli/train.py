"""`hf-infcl train`, which is also what `accelerate launch recipes/finetune_clip.py` runs."""

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
    from hf_infcl.cli.parser import RecipeParser
    from hf_infcl.trainer import InfCLConfig

logger = logging.getLogger(__name__)


def make_parser(prog: str | None = None) -> "RecipeParser":
    """The parser of the command and of the recipe script: data, training and model arguments in one place."""
    from hf_infcl.cli.arguments import ModelArguments, ScriptArguments
    from hf_infcl.cli.parser import RecipeParser
    from hf_infcl.trainer import InfCLConfig

    return RecipeParser([ScriptArguments, InfCLConfig, ModelArguments], prog=prog)


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
    from transformers import set_seed

    from hf_infcl.cli.building import load_datasets, lora_config, model_init_kwargs
    from hf_infcl.hub import write_run
    from hf_infcl.trainer import InfCLTrainer

    set_seed(training_args.seed)
    train_dataset, eval_dataset = load_datasets(script_args, training_args)
    training_args.model_init_kwargs = model_init_kwargs(training_args, model_args)
    trainer = InfCLTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=lora_config(model_args),
    )
    before = trainer.evaluate() if eval_dataset is not None and script_args.evaluate_base else {}
    trainer.train(resume_from_checkpoint=_checkpoint(training_args.resume_from_checkpoint))
    after = trainer.evaluate() if eval_dataset is not None else {}

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
    if training_args.push_to_hub:
        trainer.push_to_hub()
    return after


def _checkpoint(value: str | None) -> Any:
    """`--resume_from_checkpoint last` (or `true`) means the newest checkpoint of the output folder."""
    return True if value is not None and value.lower() in ("last", "true") else value


def run(args: Sequence[str] | None = None, prog: str = "hf-infcl train") -> int:
    """Parses a command line and trains.

    Returns:
        The exit status: 2 where the command line or the recipe cannot be followed, else 0.
    """
    from hf_infcl.cli.parser import RecipeError

    try:
        parsed = make_parser(prog).parse(args)
    except RecipeError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    main(*parsed)
    return 0
