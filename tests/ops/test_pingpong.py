"""The kernels of two groups in turn, for a chip that need not be there: they compile, and none spills its tile."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_infcl.ops.dispatch import triton_installed

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")
def test_the_installed_triton_compiles_them(tmp_path):
    """Gluon, their language, changes from release to release; what they compute is for tests/gpu to say."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "benchmarks/kernel_resources.py", "--only", "pingpong"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"(\w+)_pingpong_kernel .* stack +(\d+) shared +(\d+) KiB", done.stdout)
    assert [kernel for kernel, _, _ in lines] == ["statistics"] * 3 + ["weights"] * 4
    for kernel, stack, shared in lines:
        assert int(stack) < 256, kernel  # the tile of a thread is 512 bytes
        assert int(shared) <= 227, kernel


@pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")
@pytest.mark.parametrize(
    ("processors", "pairs", "expected"),
    [(132, 4096, 128), (132, 60, 60), (128, 4096, 128), (114, 4096, 114), (78, 4096, 78)],
)
def test_programs_are_a_power_of_two_where_that_idles_few_multiprocessors(processors, pairs, expected):
    from hf_infcl.ops.triton import pingpong

    assert pingpong._programs(processors, pairs) == expected
