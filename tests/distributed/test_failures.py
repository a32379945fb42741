"""One process in trouble ends the whole run, soon and with its name: by accelerate's launcher and by torchrun."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_infcl import contrastive_loss
from tests.distributed.failing import AT_STEP, LIMIT
from tests.processes import ProcessesError, free_port, run_processes

pytestmark = pytest.mark.distributed

TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2"]
ACCELERATE = [
    "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no",
]  # fmt: skip
LAUNCHERS = {"torchrun": [*TORCHRUN, "--master-port"], "accelerate": [*ACCELERATE, "--main_process_port"]}


def launch(launcher: str, by: str, how: str, folder: Path) -> tuple[int, str]:
    """Exit status and all that was printed. Whatever happens, nothing is left running."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(free_port()), "-m", "tests.distributed.failing"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    process = subprocess.Popen(
        [*command, by, how, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        # Starting takes most of it; the run itself is over within the group's time limit.
        output, _ = process.communicate(timeout=60 + LIMIT.seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output


# What the output says of the process's end; and what every process was told before it.
WORDS = {
    "raise": "ValueError: broken on purpose",
    "memory": "can't allocate memory",
    "kill": "exitcode *: -9",
}
# By the launcher, or, where it meets both processes' ends at once and lists the first, by the other process itself.
NAMED = r"Root Cause[\s\S]*rank *: 1 \(local_rank: 1\)|rank 1 of 2 ended or stopped answering while rank 0 waited"
TOLD = {
    "loss": "embedding dimension: rank 0 has 4, rank 1 has 5",
    "trainer": f"process 1: the text tower gave a NaN .* after {AT_STEP} steps, messages within {LIMIT.seconds} s",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("by", "how"), [("loss", "raise"), ("loss", "memory"), ("trainer", "kill")])
def test_one_process_ends_all_and_is_named(tmp_path, launcher, by, how):
    status, output = launch(launcher, by, how, tmp_path)
    assert status != 0
    assert re.search(WORDS[how], output), output
    assert re.search(NAMED, output), output
    for rank in (0, 1):
        assert re.search(TOLD[by], (tmp_path / f"told-{rank}").read_text())
        # Before it happened every process had taken the steps, and none took a further one.
        assert (tmp_path / f"steps-{rank}").read_text() == str(AT_STEP)


def _one_stops(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    embeds = torch.ones(2, 4)
    contrastive_loss(embeds, embeds, 1.0, group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    contrastive_loss(embeds, embeds, 1.0, group=group)


def test_a_process_that_does_not_answer_is_named_within_the_groups_timeout():
    with pytest.raises(ProcessesError, match="rank 1 of 2 ended or stopped answering while rank 0 waited for it"):
        run_processes(_one_stops, 2, timeout=60)
