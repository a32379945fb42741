"""One process in trouble ends the whole run, soon and with its name: by accelerate's launcher and by torchrun."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta

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


def launch(launcher: str, how: str, folder: str, *, trains: bool) -> tuple[int, str]:
    """Exit status and all that was printed. Whatever happens, nothing is left running."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(free_port()), "-m", "tests.distributed.failing"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    process = subprocess.Popen(
        [*command, how, folder, str(int(trains))],
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


def taken(folder) -> list[str]:
    """How many steps each process has taken."""
    return [(folder / f"rank-{rank}").read_text() for rank in (0, 1)]


@pytest.mark.parametrize(
    ("how", "launcher", "trains", "words"),
    [
        ("memory", "torchrun", False, "can't allocate memory"),
        ("kill", "torchrun", False, "exitcode *: -9"),
        ("kill", "accelerate", True, "exitcode *: -9"),
        ("raise", "accelerate", True, "ValueError: broken on purpose"),
    ],
)
def test_one_process_ends_all_and_is_named(tmp_path, how, launcher, trains, words):
    status, output = launch(launcher, how, str(tmp_path), trains=trains)
    assert status != 0
    assert re.search(words, output), output
    assert re.search(r"Root Cause[\s\S]*rank *: 1 \(local_rank: 1\)", output), output
    # Before it happened every process had taken the steps, and none took a further one.
    assert taken(tmp_path) == [str(AT_STEP)] * 2


def test_nan_on_one_process_raises_on_every_one_before_the_step(tmp_path):
    status, output = launch("torchrun", "nan", str(tmp_path), trains=True)
    assert status != 0
    for rank in (0, 1):
        assert re.search(rf"\[rank{rank}\]: FloatingPointError: process 1: the text tower gave a NaN", output), output
    assert taken(tmp_path) == [str(AT_STEP)] * 2


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
