"""The losses' memory grows with n d, not with n^2."""

import subprocess
import sys

import pytest

# A process of its own, whose memory nothing else moves. The small call first pays for what every call needs. The peak
# is the kernel's for this address space: `ru_maxrss` would begin with that of the process that started this one.
SCRIPT = """
import re, torch
from pathlib import Path
from hf_infcl import {name}

def memory(which):
    return int(re.search(which + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024  # MiB

def run(n):
    x, y = (torch.nn.functional.normalize(torch.randn(n, 128), dim=-1).requires_grad_() for _ in range(2))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmRSS")
    {name}(x, y, torch.tensor(50.0, requires_grad=True), {arguments}).backward()
    return memory("VmHWM") - before - (x.grad.nbytes + y.grad.nbytes) / 2**20

run(64)
print(run(16_384))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize(("name", "arguments"), [("contrastive_loss", ""), ("sigmoid_loss", "torch.tensor(-10.0)")])
def test_extra_memory_at_16k_pairs_is_at_most_100_mib(name, arguments):
    """One similarity matrix of 16,384 pairs alone is 1,024 MiB."""
    script = SCRIPT.format(name=name, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=True)
    assert 0 < float(done.stdout) < 100
