"""benchmarks/variants.py changes the package by name: what it changes has to be there, and compute the same."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from hf_infcl.ops.dispatch import triton_installed

pytestmark = pytest.mark.skipif(not triton_installed(), reason="needs triton, which is for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def variants(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    return import_module("variants")


def test_what_the_variants_change_is_there(variants):
    step, _ = variants.step_of(8, 16, DEVICE)
    for _, group in variants.GROUPS.values():
        for patches in group.values():
            with variants.patched(patches):
                step()


def test_one_launch_for_the_loss_computes_the_same(variants):
    step, leaves = variants.step_of(150, 20, DEVICE)
    (patches,) = variants.GROUPS["launches"][1].values()
    assert variants.differences(leaves, step, patches) < 1e-6


def test_products_that_do_not_add_compute_the_same(variants, monkeypatch):
    from hf_infcl.ops.triton import whole

    monkeypatch.setattr(whole, "suits", lambda *_: False)  # small batches have products of their own
    step, leaves = variants.step_of(150, 20, DEVICE)
    (patches,) = variants.GROUPS["products"][1].values()
    assert variants.differences(leaves, step, patches) < 1e-6
