"""What the recipes say beyond what a run of seconds would show."""

import re
from pathlib import Path

import pytest
import yaml

from hf_infcl.cli.building import held_back

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_an_evaluation_is_not_left_at_transformers_batches_of_eight(path):
    assert yaml.safe_load(path.read_text())["per_device_eval_batch_size"] >= 64


@pytest.mark.parametrize("name", ["clip_flickr8k", "dual_encoder_emoji"])
def test_the_slices_in_a_recipes_comments_hold_a_part_back(name):
    text = next(path for path in RECIPES if path.stem == name).read_text()
    lines = yaml.safe_load("\n".join(re.findall(r"^# (dataset_\w+_split: .*)$", text, re.MULTILINE)))
    assert (lines["dataset_train_split"], lines["dataset_test_split"]) == held_back("train")
