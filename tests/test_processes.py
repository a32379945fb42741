"""The helper that starts processes: results by rank, a rank's own traceback, and no hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes import ProcessesError, run_processes

pytestmark = pytest.mark.distributed


def _rank_times(rank: int, world_size: int, factor: int) -> torch.Tensor:
    total = torch.tensor([float(rank * factor)])
    dist.all_reduce(total)
    return total


def _second_rank_fails(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def _hangs(rank: int, world_size: int) -> None:
    time.sleep(600)


def test_results_come_back_by_rank() -> None:
    assert [result.item() for result in run_processes(_rank_times, 3, args=(10,))] == [30.0] * 3


def test_the_failing_ranks_traceback_is_reported() -> None:
    with pytest.raises(ProcessesError, match=r"rank 1 exited with 1[\s\S]*ValueError: broken on purpose"):
        run_processes(_second_rank_fails, 2)


def test_a_hang_ends_at_the_deadline_with_the_stack() -> None:
    run_processes(_rank_times, 1, args=(1,))  # the first takes longer to start
    with pytest.raises(ProcessesError, match=r"still ran and was killed[\s\S]*_hangs"):
        run_processes(_hangs, 1, timeout=4.0)


def test_a_script_gets_torchruns_variables(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(dist.get_rank(), dist.get_world_size(), sys.argv[1])\n"
        "dist.destroy_process_group()\n"
    )
    outputs = run_processes(script, 2, args=("word",))
    assert [output.strip().splitlines()[-1] for output in outputs] == ["0 2 word", "1 2 word"]


def _variable(rank: int, world_size: int, name: str) -> str | None:
    return os.environ.get(name)


def test_another_environment_is_that_of_the_processes(monkeypatch) -> None:
    monkeypatch.setenv("PROCESSES_TEST", "here")
    for env, wanted in ((None, "here"), ({"PROCESSES_TEST": "here"}, "here"), ({"PROCESSES_TEST": "there"}, "there")):
        assert run_processes(_variable, 1, args=("PROCESSES_TEST",), env=env) == [wanted]
