"""The tests that need a CUDA device: `make test-gpu`, never part of `make test`."""

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _device() -> None:
    # A failure, not a skip: who asked for these tests without a device should hear of it.
    if not torch.cuda.is_available():
        pytest.fail("tests/gpu needs a CUDA device; `make test` runs everything else")
