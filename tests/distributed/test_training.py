"""One step on two processes against one: every weight, the scale and the bias; and what is not trained stays."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import run_processes
from tests.tiny import MODELS
from tests.trainer.helpers import Rows, parameters, trainer

pytestmark = pytest.mark.distributed


def one_step(world_size: int, folder: str, family: str, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss of 8 fixed pairs, and all weights after one step of SGD with rate 1."""
    torch.manual_seed(0)
    run = trainer(
        Path(folder),
        MODELS[family](),
        train_dataset=Rows(8, family),
        per_device_train_batch_size=8 // world_size,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        **{"max_steps": 1, "train_logit_scale": True, "logit_scale_max": float("inf"), **options},
    )
    run.train()
    return next(line["loss"] for line in run.state.log_history if "loss" in line), parameters(run.model)


FAMILIES = {"clip": "contrastive", "siglip": "sigmoid"}


def _gathered_and_travelling(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {}
    for path, limit in {"hop": "0", "gather": "1000000"}.items():
        os.environ["HF_INFCL_GATHER_BELOW"] = limit
        for family, loss_type in FAMILIES.items():
            found[family, path] = one_step(world_size, folder, family, loss_type=loss_type)
    return found


def _both(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    return _gathered_and_travelling(rank, world_size, folder), _parts_that_are_trained(rank, world_size, folder)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """What two processes find, started once."""
    return run_processes(_both, 2, args=(str(tmp_path_factory.mktemp("two")),))


def test_every_updated_weight_is_that_of_one_process(tmp_path, by_rank):
    for family, loss_type in FAMILIES.items():
        expected_loss, expected = one_step(1, str(tmp_path), family, loss_type=loss_type)
        assert ("logit_bias" in expected) == (family == "siglip")
        for path in ("hop", "gather"):
            for found, _ in by_rank:
                loss, weights = found[family, path]
                assert loss == pytest.approx(expected_loss, rel=1e-5)
                for name, value in expected.items():
                    torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5, msg=f"{path} {name}")


def _parts_that_are_trained(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Tensor]]:
    with pytest.raises(ValueError, match="logit_bias"):  # softmax does not depend on it: DDP would wait for it
        one_step(world_size, folder, "siglip", loss_type="contrastive")
    found = {}
    before = parameters(MODELS["clip"]())
    _, found["frozen tower"] = one_step(world_size, folder, "clip", max_steps=3, freeze_vision_model=True)
    make = MODELS["clip"]

    def projections_only():
        model = make()
        model.requires_grad_(False)
        model.visual_projection.requires_grad_(True)
        model.text_projection.requires_grad_(True)
        return model

    MODELS["clip"] = projections_only
    _, found["projections"] = one_step(world_size, folder, "clip", max_steps=3, train_logit_scale=None)
    for case, trained in (("frozen tower", ("text", "logit_scale")), ("projections", ("visual_proj", "text_proj"))):
        for name, value in found[case].items():
            assert torch.equal(value, before[name]) or name.startswith(trained), (case, name)
        assert any(not torch.equal(value, before[name]) for name, value in found[case].items())
    return found


def test_frozen_parts_stay_and_no_process_waits_for_them(by_rank):
    (_, first), (_, second) = by_rank
    for case, weights in first.items():
        assert all(torch.equal(value, second[case][name]) for name, value in weights.items())
