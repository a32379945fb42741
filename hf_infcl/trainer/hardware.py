"""Devices, precisions and processes that do not go together: refused at the start, in the words of the fields."""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import get_int_from_env
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

logger = logging.getLogger(__name__)

# Where torchrun, `accelerate launch` and the flavours of mpirun say how many processes they started.
_WORLD_SIZES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]


def launched_processes() -> int:
    """How many processes the launcher says it started; 1 where there was none."""
    return get_int_from_env(_WORLD_SIZES, 1)


def check_bf16(args: TrainingArguments) -> None:
    """That bfloat16 is there where it is asked for. transformers would speak of a "setup" only.

    Raises:
        ValueError: names the field and what to set instead.
    """
    name = "bf16" if args.bf16 else "bf16_full_eval"
    if not getattr(args, name) or args.use_cpu or is_torch_bf16_gpu_available() or is_torch_xla_available():
        return
    if torch.accelerator.is_available():
        raise ValueError(f"{name}=True: the GPU here has no bfloat16; set {name}=False, or fp16=True instead")
    raise ValueError(
        f"{name}=True: this machine has no GPU; set {name}=False (--{name} false), or use_cpu=True (--use_cpu true) to "
        "compute in bfloat16 on the CPU"
    )


def meets_on_cpu(args: TrainingArguments) -> bool:
    """Whether several processes were started on a machine where only the CPU is left for them to train on.

    transformers joins them there only where `use_cpu` is set; otherwise each would train by itself, into one folder.
    """
    return bool(args.use_cpu) or (launched_processes() > 1 and not torch.accelerator.is_available())


def join_on_cpu(args: TrainingArguments) -> None:
    """Joins processes that train on the CPU, with the time limit `ddp_timeout`.

    transformers, which joins them otherwise, passes it on for GPUs only: gloo's own half an hour would apply.
    """
    if args.use_cpu and launched_processes() > 1 and dist.is_available() and not dist.is_initialized():
        PartialState(cpu=True, backend=args.ddp_backend, timeout=timedelta(seconds=args.ddp_timeout))


def check_device(args: TrainingArguments) -> None:
    """That float16 has a GPU, and that processes which were started together train together.

    Raises:
        ValueError: names the field and what to set instead.
    """
    if args.fp16 and args.device.type == "cpu":
        raise ValueError(
            "fp16=True needs a GPU, and this run is on the CPU; set fp16=False (--fp16 false), or bf16=True with "
            "use_cpu=True"
        )
    started = launched_processes()
    if dist.is_available() and dist.is_initialized():
        started = max(started, dist.get_world_size())
    if started > 1 and args.world_size == 1:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE or the process group says so), but this one would train by "
            "itself, and so would the others, into one output_dir. Start them by `accelerate launch` or `torchrun`; "
            "on CPUs set use_cpu=True (--use_cpu true)"
        )


def warn_of_lone_process() -> None:
    """Says where `accelerate launch` was asked for several processes and started one, whose batch is a part only.

    It does so without a word wherever it sees no second GPU. How many were asked for it hands on to nobody, only the
    address at which they would have met.
    """
    asked = all(name in os.environ for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"))
    if asked and launched_processes() == 1 and "LOCAL_RANK" not in os.environ:
        logger.warning(
            "accelerate launch was asked for several processes and started one, as it does without several GPUs: the "
            "contrastive batch is that of one process. Start N of them by: torchrun --nproc_per_node N SCRIPT ..."
        )
