"""`hf-infcl env`: what a bug report needs."""

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "datasets", "safetensors", "huggingface_hub",
            "numpy", "pillow")  # fmt: skip


def environment() -> dict[str, str]:
    """Versions, devices and the loss backend that `auto` chooses here.

    Returns:
        Names and values in the order in which they are shown.
    """
    import torch

    from hf_infcl import __version__
    from hf_infcl.ops import resolve_backend

    facts = {
        "hf_infcl": __version__,
        "Python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "Operating system": platform.platform(),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    if torch.cuda.is_available():
        facts["CUDA"] = str(torch.version.cuda)
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts[f"GPU {index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
    else:
        facts["GPU"] = "none"
    facts["CPU threads of torch"] = str(torch.get_num_threads())
    facts["Distributed backends"] = ", ".join(
        name for name, there in (("nccl", torch.distributed.is_nccl_available()),
                                 ("gloo", torch.distributed.is_gloo_available())) if there
    ) or "none"  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts["Loss backend (auto)"] = f"{resolve_backend('auto', device, torch.bfloat16)} on {device.type}"
    return facts


def run(args: Sequence[str]) -> int:
    """Prints the environment as lines that can be pasted."""
    if args:
        print("usage: hf-infcl env\n\nPrints versions, devices and the chosen backend, for bug reports.")
        return 0 if args[0] in ("-h", "--help") else 2
    for name, value in environment().items():
        print(f"- {name}: {value}")
    return 0
