"""The command line: `hf-infcl train | evaluate | mine | env | demo`."""

from hf_infcl.cli.main import main

__all__ = ["main"]
