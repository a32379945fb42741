"""What every test may rely on: no network, a Hub cache of its own, one torch thread, one seed."""

import os
import tempfile

# Set before transformers, datasets or huggingface_hub are imported anywhere: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf-home-")
for _name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "TRANSFORMERS_CACHE"):
    os.environ.pop(_name, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
# Experiment trackers that happen to be installed must not report from tests.
os.environ["WANDB_MODE"] = "disabled"

import random
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
# Triton reads this when a kernel is defined. Without a GPU its interpreter runs the kernels' tests.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers for a test, whichever tests ran before it in this process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global one is what the libraries under test read
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """A test that leaves a process group behind fails itself, not the next one."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test left an initialised process group behind")


def pytest_sessionfinish() -> None:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
