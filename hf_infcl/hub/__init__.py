"""Saving and loading: adapters, processors, model cards and plots."""

from hf_infcl.hub.adapters import DualEncoderPeftModel, check_folder, find_peft_model, other_weights, save_adapter
from hf_infcl.hub.card import RunFacts, write_model_card
from hf_infcl.hub.facts import run_facts, write_run
from hf_infcl.hub.loading import load_dual_encoder
from hf_infcl.hub.plots import plot_history

__all__ = [
    "DualEncoderPeftModel",
    "RunFacts",
    "check_folder",
    "find_peft_model",
    "load_dual_encoder",
    "other_weights",
    "plot_history",
    "run_facts",
    "save_adapter",
    "write_model_card",
    "write_run",
]
