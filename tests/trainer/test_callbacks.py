"""The figures that a line of the log has besides transformers' own."""

import subprocess
import sys

import numpy as np
import pytest

from hf_infcl.trainer.callbacks import peak_memory_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is the system's own figure for the process")
def test_the_peak_is_that_of_this_process_and_not_of_its_parent():
    held = np.ones(2**27)  # 1 GiB
    assert peak_memory_bytes() > held.nbytes
    script = "from hf_infcl.trainer.callbacks import peak_memory_bytes; print(peak_memory_bytes())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert int(done.stdout) < held.nbytes
