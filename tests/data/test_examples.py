"""The examples in the docstrings are true."""

import doctest
from importlib import import_module

import pytest
from PIL import Image

import hf_infcl.data as data


@pytest.mark.parametrize(
    "module", ["sample", "sample_clip", "images", "dataset", "collator", "counts", "stream", "loading"]
)
def test_examples_hold(module):
    names = {name: getattr(data, name) for name in data.__all__} | {"Image": Image}
    names["pairs"] = data.ImageTextDataset(data.sample_dataset("drawing", size=8))
    result = doctest.testmod(import_module(f"hf_infcl.data.{module}"), extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
