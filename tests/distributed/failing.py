"""A script for launchers: a few steps on each process, in which one process comes to grief.

python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.failing <how> <folder> <0, or 1: by the Trainer>
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


def steps(how: str, folder: Path) -> None:
    """The loss alone over towers of one layer, under DDP."""
    from hf_infcl import contrastive_loss

    dist.init_process_group("gloo", timeout=LIMIT)
    rank = dist.get_rank()
    tower = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    for step in range(5):
        come_to_grief(how, rank, step)
        rows = tower(torch.randn(2, 6, 8))
        contrastive_loss(rows[0], rows[1], 5.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        (folder / f"rank-{rank}").write_text(str(step + 1))
    dist.destroy_process_group()


def train(how: str, folder: Path) -> None:
    """The Trainer, which does not look after the others either: whoever started them has to."""
    from transformers import TrainerCallback

    from tests.trainer.helpers import trainer

    run = trainer(folder / "out", n=40, max_steps=5, per_device_train_batch_size=4, ddp_timeout=LIMIT.seconds)
    rank = run.args.process_index

    def spoil(module, args, output):
        output["text_embeds"] = output["text_embeds"] * torch.nan
        return output

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            come_to_grief(how, rank, state.global_step)
            if how == "nan" and rank == 1 and state.global_step == AT_STEP:
                kwargs["model"].register_forward_hook(spoil)

        def on_optimizer_step(self, args, state, control, **kwargs):
            (folder / f"rank-{rank}").write_text(str(state.global_step + 1))

    run.add_callback(Steps())
    run.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    (train if sys.argv[3] == "1" else steps)(sys.argv[1], Path(sys.argv[2]))
