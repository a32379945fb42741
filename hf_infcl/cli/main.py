"""Entry point of the `hf-infcl` command."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "train": "fine-tune a dual encoder: hf-infcl train --config recipe.yaml [--any_field value]",
    "evaluate": "measure a model or an adapter: hf-infcl evaluate --model_name_or_path M --dataset_name D",
    "mine": "write a data set's hard negatives: hf-infcl mine --model_name_or_path M --dataset_name D --output_dir O",
    "env": "versions, devices and the backend chosen, for bug reports",
    "demo": "train a tiny CLIP and its adapter on built-in pictures, in minutes on a CPU",
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: hf-infcl COMMAND [options]", "", *lines, "", "hf-infcl COMMAND --help lists its options."]
    )


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; everything heavy is imported by the command itself.

    Args:
        args: the command line without the program's name, by default this process's.

    Returns:
        The exit status: 0, 2 for a command line or recipe that cannot be followed, or 130 where it was interrupted.
    """
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0 if args else 2
    if args[0] == "--version":
        from hf_infcl import __version__

        print(__version__)
        return 0
    command, rest = args[0], args[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"hf-infcl: unknown command {command!r}{hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    return import_module(f"hf_infcl.cli.{command}").run(rest)
