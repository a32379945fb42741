"""A keyword that is no field of the configuration."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from hf_infcl import InfCLConfig, InfCLTrainer
from tests.tiny import tiny_clip
from tests.trainer.helpers import config


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("learning_rat", "did you mean learning_rate?"),
        ("per_device_batch_size", "did you mean per_device_"),
        ("temperature", "did you mean train_logit_scale?"),
        ("batch_size", "did you mean per_device_train_batch_size?"),
    ],
)
def test_the_field_that_was_meant_is_named(tmp_path, name, said):
    with pytest.raises(TypeError) as caught:
        config(tmp_path, **{name: 1})
    assert str(caught.value).startswith(f"InfCLConfig has no field {name!r}; {said}")


def test_a_name_like_no_other_is_only_refused(tmp_path):
    with pytest.raises(TypeError, match="^InfCLConfig has no field 'zzzzz'$"):
        config(tmp_path, zzzzz=1)


def test_the_configuration_stays_a_dataclass(tmp_path):
    args = config(tmp_path, duplicates="keep")
    assert pickle.loads(pickle.dumps(args)).duplicates == copy.deepcopy(args).duplicates == "keep"
    names = list(inspect.signature(InfCLConfig).parameters)
    assert names == [entry.name for entry in dataclasses.fields(InfCLConfig) if entry.init]

    @dataclasses.dataclass
    class Own(InfCLConfig):
        colour: str = "red"

    assert Own(str(tmp_path), use_cpu=True, report_to="none", colour="blue").colour == "blue"


@pytest.mark.parametrize(("name", "meant"), [("tokenizer", "processing_class"), ("training_dataset", "train_dataset")])
def test_the_trainers_argument_that_was_meant_is_named(tmp_path, name, meant):
    with pytest.raises(TypeError, match=f"^InfCLTrainer has no argument '{name}'; did you mean {meant}[?]$"):
        InfCLTrainer(tiny_clip(), config(tmp_path), **{name: None})
    assert {"model", "args", "processing_class"} <= set(inspect.signature(InfCLTrainer).parameters)
