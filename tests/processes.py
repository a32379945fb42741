"""Real processes for the distributed tests: started, watched against one deadline, and never left behind.

def work(rank, world_size, n):          # at module level, so that the processes can import it
    ...                                 # the gloo group is up; torch runs on one thread
    return some_tensor

results = run_processes(work, world_size=3, args=(128,))   # results[rank]
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[1]
# When one rank has failed the others usually wait for it in a collective: time to fail by themselves, so that
# the report shows every rank that had something to say.
_GRACE_SECONDS = 3.0
# Functions run in forks of one process that has imported all this, and done nothing else: imports take longer than most
# of the tests. Its environment is that of the test process; a run that wants another gets interpreters of its own.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch.distributed.nn.functional", "transformers.trainer", "peft", "hf_infcl.trainer"])


class ProcessesError(RuntimeError):
    """A rank failed or the deadline passed; the message has every such rank's traceback or stack."""


def run_processes(
    target: Callable[..., Any] | str | Path,
    world_size: int,
    timeout: float = 120.0,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `target` on `world_size` processes that can talk over gloo on this machine.

    Args:
        target: a module-level function, called as `target(rank, world_size, *args, **kwargs)` inside an initialised
            default process group; or the path of a script, started as `python script *args` with the environment
            variables that `torchrun` sets (it makes its own group).
        world_size: how many processes.
        timeout: seconds until every process is killed and the test fails, with each one's stack.
        args: further positional arguments (strings for a script). They and the results travel by pickle.
        kwargs: further keyword arguments, for a function only.
        env: environment variables on top of this process's.

    Returns:
        By rank: what the function returned, or all that the script printed.

    Raises:
        ProcessesError: with the traceback of each rank that failed, or the stack of each that hung.
    """
    with tempfile.TemporaryDirectory(prefix="processes-") as folder:
        workdir = Path(folder)
        is_function = callable(target)
        if callable(target):
            (workdir / "task.pkl").write_bytes(pickle.dumps((target, tuple(args), dict(kwargs or {}))))
            command = [sys.executable, "-m", "tests.processes", folder]
        else:
            command = [sys.executable, str(target), *map(str, args)]
        environment = _environment(world_size, timeout, workdir) | dict(env or {})
        forks = is_function and all(os.environ.get(name) == value for name, value in (env or {}).items())

        processes: list[Any] = []
        try:
            for rank in range(world_size):
                its_own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if forks:
                    fork = _FORKS.Process(target=_forked, args=(workdir, rank, its_own))
                    fork.start()
                    processes.append(fork)
                else:
                    processes.append(_interpreter(command, workdir, rank, its_own))
            hung = _wait(processes, timeout)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                (process.join if isinstance(process, _FORKS.Process) else process.wait)()

        bad = [rank for rank, process in enumerate(processes) if _exit_code(process) != 0]
        if bad:
            raise ProcessesError(_report(workdir, processes, bad, hung, timeout))
        if is_function:
            return [pickle.loads((workdir / f"result-{rank}.pkl").read_bytes()) for rank in range(world_size)]
        return [_log(workdir, rank).read_text(errors="replace") for rank in range(world_size)]


def _interpreter(command: list[str], workdir: Path, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(_log(workdir, rank), "wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=_REPOSITORY,
            env=environment,
            start_new_session=True,
        )


def _forked(workdir: Path, rank: int, environment: dict[str, str]) -> None:
    """What an interpreter of its own would find, in a fork of the process that has imported everything."""
    os.setsid()
    with open(_log(workdir, rank), "wb") as log, open(os.devnull, "rb") as nothing:
        for here, there in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(here.fileno(), there)
    os.chdir(_REPOSITORY)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(_main(workdir))


def _exit_code(process: Any) -> int | None:
    """None while it runs."""
    return process.exitcode if isinstance(process, _FORKS.Process) else process.poll()


def free_port() -> int:
    """A TCP port on the loopback interface that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _environment(world_size: int, timeout: float, workdir: Path) -> dict[str, str]:
    environment = os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *filter(None, sys.path)]),
        "PROCESSES_WORKDIR": str(workdir),
        "PROCESSES_DEADLINE": str(time.time() + timeout),
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # gloo otherwise asks for this machine's name, which need not resolve
    return environment


def _wait(processes: list[Any], timeout: float) -> list[int]:
    """Wait for all, or until the deadline, or a little longer than the first failure; the ranks still running."""
    deadline = time.monotonic() + timeout
    failed = False
    while True:
        codes = [_exit_code(process) for process in processes]
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running or time.monotonic() > deadline:
            return running
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.02)


def _report(workdir: Path, processes: list[Any], bad: list[int], hung: list[int], timeout: float) -> str:
    parts = []
    # Those that failed by themselves first: they are the reason why the others hung.
    for rank in sorted(bad, key=lambda rank: (rank in hung, rank)):
        end = "still ran and was killed" if rank in hung else f"exited with {_exit_code(processes[rank])}"
        log = _log(workdir, rank).read_text(errors="replace")[-8000:]
        parts.append(f"--- rank {rank} {end} (limit {timeout:g} s) ---\n{log.rstrip()}")
    return f"{len(bad)} of {len(processes)} processes failed\n" + "\n".join(parts)


def _log(workdir: Path, rank: int) -> Path:
    return workdir / f"log-{rank}.txt"


def _main(workdir: Path) -> int:
    """One rank of a function run: what `python -m tests.processes` does."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Shortly before the parent kills this process: its stack says where it hung.
    faulthandler.dump_traceback_later(max(0.1, float(os.environ["PROCESSES_DEADLINE"]) - time.time() - 1.0))
    torch.set_num_threads(1)
    target, args, kwargs = pickle.loads((workdir / "task.pkl").read_bytes())
    # A file is a rendezvous without a port, so tests side by side cannot take each other's.
    dist.init_process_group("gloo", init_method=f"file://{workdir}/rendezvous", rank=rank, world_size=world_size)
    try:
        result = target(rank, world_size, *args, **kwargs)
        (workdir / f"result-{rank}.pkl").write_bytes(pickle.dumps(result))
    except BaseException:  # noqa: BLE001 - reported, and the process ends
        # Printed here and left at once: taking the group down would wait for ranks that wait for this one.
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)
    gc.collect()  # tracebacks of errors that the target expected hold on to the group, whose threads then outlive it
    dist.barrier()  # a rank that leaves early takes its connections with it while others still read
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
