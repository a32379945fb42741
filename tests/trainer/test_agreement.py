"""What processes must have in common is shown with each one's value; what is their own is not compared."""

from hf_infcl.trainer.agreement import check_agreement, common_values, differences
from tests.trainer.helpers import Rows, lora, trainer


def test_each_value_is_shown_with_its_processes():
    everyone = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}]
    assert differences(everyone) == ["b is 2 (process 0, 2), 3 (process 1)"]
    assert differences([{"a": 1}, {}]) == ["a is 1 (process 0), None (process 1)"]
    assert differences(everyone[:1] * 3) == []
    check_agreement({"a": object()})  # a process alone has nobody to agree with


def differing(folder, one, other):
    def values(name, options):
        return common_values(trainer(folder / name, **options))

    return [line.partition(" is ")[0] for line in differences([values("0", one), values("1", other)])]


def test_options_data_adapter_and_what_is_trained_are_compared(tmp_path):
    assert differing(tmp_path, {}, {}) == []
    assert differing(tmp_path, {"seed": 1}, {"seed": 2}) == ["seed"]
    assert differing(tmp_path, {"n": 16}, {"n": 17}) == ["the number of training rows"]
    assert differing(tmp_path, {"eval_dataset": Rows(4)}, {"eval_dataset": Rows(5)}) == [
        "the number of evaluation rows"
    ]
    assert differing(tmp_path, {"peft_config": lora()}, {"peft_config": lora(lora_alpha=3)}) == [
        "the adapter's lora_alpha"
    ]
    assert "the number of trained parameters" in differing(tmp_path, {}, {"freeze_text_model": True})


def test_what_is_a_processs_own_is_not(tmp_path):
    own = {"run_name": "b", "log_level": "error", "dataloader_num_workers": 1, "model_init_kwargs": {"device_map": 1}}
    assert differing(tmp_path, {"run_name": "a", "model_init_kwargs": {"device_map": 0}}, own) == []
