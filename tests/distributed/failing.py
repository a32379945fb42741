"""A script for launchers: a few steps on each process, in which one process comes to grief.

python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.failing <loss or trainer> <how> <folder>

What rank r noticed is in ``<folder>/told-<r>``, and how many steps it had taken by its end in ``<folder>/steps-<r>``.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=20)
AT_STEP = 2


def come_to_grief(how: str, rank: int, step: int) -> None:
    """Rank 1, at its time."""
    if rank != 1 or step != AT_STEP:
        return
    if how == "raise":
        raise ValueError("broken on purpose")
    if how == "memory":
        torch.empty(2**50)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def by_loss(how: str, folder: Path) -> None:
    """The loss alone, over towers of one layer under DDP; before that, the processes disagree."""
    from hf_infcl import contrastive_loss

    dist.init_process_group("gloo", timeout=LIMIT)
    rank = dist.get_rank()
    try:
        contrastive_loss(torch.ones(3, 4 + rank), torch.ones(3, 4 + rank), 1.0)
    except ValueError as error:
        (folder / f"told-{rank}").write_text(str(error))
    tower = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    for step in range(5):
        come_to_grief(how, rank, step)
        rows = tower(torch.randn(2, 6, 8))
        contrastive_loss(rows[0], rows[1], 5.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        (folder / f"steps-{rank}").write_text(str(step + 1))
    dist.destroy_process_group()


def by_trainer(how: str, folder: Path) -> None:
    """The Trainer: a run that a NaN ends, and a run whose processes whoever started them has to look after."""
    from transformers import TrainerCallback

    from tests.trainer.helpers import trainer

    def spoil(module, args, output):
        output["text_embeds"] = output["text_embeds"] * torch.nan
        return output

    class Steps(TrainerCallback):
        def __init__(self, how: str):
            self.how = how

        def on_step_begin(self, args, state, control, **kwargs):
            come_to_grief(self.how, args.process_index, state.global_step)
            if self.how == "nan" and args.process_index == 1 and state.global_step == AT_STEP:
                kwargs["model"].register_forward_hook(spoil)

        def on_optimizer_step(self, args, state, control, **kwargs):
            (folder / f"steps-{args.process_index}").write_text(str(state.global_step + 1))

    def run(how: str) -> None:
        options = dict(n=40, max_steps=5, per_device_train_batch_size=4, ddp_timeout=LIMIT.seconds)
        trainer(folder / "out", callbacks=[Steps(how)], **options).train()

    try:
        run("nan")
    except FloatingPointError as error:
        rank, group = dist.get_rank(), dist.group.WORLD
        steps = (folder / f"steps-{rank}").read_text()
        limit = group._get_backend(torch.device("cpu")).options._timeout.seconds
        (folder / f"told-{rank}").write_text(f"{error} after {steps} steps, messages within {limit} s")
    run(how)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"loss": by_loss, "trainer": by_trainer}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
