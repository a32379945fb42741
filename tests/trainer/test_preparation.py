"""Loading what the user names."""

from pathlib import Path

import pytest

from hf_infcl.trainer.preparation import load_model, load_processor
from tests.tiny import save_tiny


@pytest.mark.parametrize("place", ["demo-output/bse", "/nope", "./nope/none"])
def test_a_misspelt_folder_is_said_to_be_no_folder(place: str) -> None:
    with pytest.raises(OSError, match=r"is no file or folder here|no such file or folder") as caught:
        load_model(place)
    assert str(Path(place).absolute()) in str(caught.value)


def test_the_home_folder_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_tiny("clip", tmp_path / "base")
    model = load_model("~/base")
    assert load_processor(model, "~/base").tokenizer("a dog").input_ids
