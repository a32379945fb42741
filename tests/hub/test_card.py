"""Model cards: what they tell, and what they must not."""

import pytest
from huggingface_hub import ModelCard

from hf_infcl.hub import RunFacts, write_model_card
from hf_infcl.hub.card import render_model_card

METRICS = {
    "image_to_text/recall@1": 0.25,
    "image_to_text/recall@5": 0.5,
    "image_to_text/median_rank": 4.0,
    "text_to_image/recall@1": 0.125,
    "mean_recall@1": 0.1875,
    "loss": 1.5,
}


def full_facts(**changes):
    facts = {
        "name": "clip-emoji-lora",
        "base_model": "openai/clip-vit-base-patch32",
        "model_type": "clip",
        "adapter": {"method": "LoRA", "r": 16, "lora_alpha": 32},
        "parameters": 1_000_000,
        "trainable_parameters": 10_000,
        "adapter_bytes": 40_000,
        "dataset": "someone/emoji",
        "dataset_revision": "v1",
        "train_rows": 8565,
        "eval_rows": 1558,
        "skipped_rows": 3,
        "image_column": "image",
        "caption_column": "text",
        "loss": "ContrastiveLoss",
        "loss_options": {"duplicates": "mask", "block_size": None, "direction": "both"},
        "citation": "\n@article{cheng2024breaking,\n}\n",
        "per_device_batch_size": 64,
        "gradient_accumulation_steps": 16,
        "processes": 1,
        "contrastive_batch_size": 1024,
        "hyperparameters": {"learning_rate": 2e-4},
        "steps": 80,
        "before": {name: value / 2 for name, value in METRICS.items()},
        "after": METRICS,
        "seconds": 600.0,
        "peak_memory_bytes": 3 * 2**30,
        "device": "2 CPU threads",
        "versions": {"torch": "2.13.0"},
        "plot": "curves.png",
    }
    return {**facts, **changes}


def test_front_matter_is_read_back_by_the_hub_client(tmp_path):
    path = write_model_card(full_facts(), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "README.md"
    data = ModelCard.load(path).data
    assert data.base_model == "openai/clip-vit-base-patch32"
    assert data.base_model_relation == "adapter"
    assert data.datasets == ["someone/emoji"]
    assert (data.library_name, data.metrics) == ("peft", ["recall"])
    assert {"hf_infcl", "lora", "clip"} <= set(data.tags)
    results = {(result.task_type, result.metric_name): result.metric_value for result in data.eval_results}
    assert results == {
        ("image-to-text-retrieval", "Recall@1"): 0.25,
        ("image-to-text-retrieval", "Recall@5"): 0.5,
        ("text-to-image-retrieval", "Recall@1"): 0.125,
    }


def test_the_facts_stand_in_the_text():
    text = render_model_card(full_facts())
    for expected in (
        "# clip-emoji-lora",
        "LoRA adapter for [openai/clip-vit-base-patch32](https://huggingface.co/openai/clip-vit-base-patch32)",
        "[someone/emoji](https://huggingface.co/datasets/someone/emoji).",
        "contrasted 1,024 images with 1,024 texts",
        "| image to text, recall@1 | 0.125 | 0.250 |",
        "| image to text, median rank | 2.000 | 4.000 |",
        "| mean recall@1 | 0.094 | 0.188 |",
        "![Loss and recall over the training](curves.png)",
        "| training pairs | 8,565 |",
        "| rows left out | 3 (no caption, or a picture that cannot be read) |",
        "| caption column | `text` |",
        "| loss | `ContrastiveLoss` (duplicates=mask, direction=both) |",
        "1,024 pairs = 64 a micro-batch x 16 accumulated x 1 process |",
        "| adapter | LoRA, r=16, lora_alpha=32 |",
        "| trained parameters | 10,000 of 1,000,000 (1.00%) |",
        "| adapter file | 39.1 KiB |",
        "| learning_rate | 0.0002 |",
        "| duration | 10 min on 2 CPU threads |",
        "| peak memory | 3.0 GiB |",
        "Versions: torch 2.13.0.",
        "```bibtex\n@article{cheng2024breaking,\n}\n```",
        'AutoModel.from_pretrained("openai/clip-vit-base-patch32")',
    ):
        assert expected in text


@pytest.mark.parametrize("existing", [True, False])
def test_no_path_of_this_machine_is_told(tmp_path, existing):
    base, table = tmp_path / "private" / "base", tmp_path / "private" / "pairs"
    if existing:
        base.mkdir(parents=True)
        table.mkdir()
    text = render_model_card(full_facts(base_model=str(base), dataset=str(table), dataset_revision=None))
    assert "private" not in text
    assert "base_model:" not in text
    assert "datasets:" not in text
    assert "| data set | pairs |" in text
    assert "path/to/the/base" in text


def test_a_relative_folder_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "outputs" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "outputs/base" not in render_model_card(full_facts(base_model="outputs/base"))


@pytest.mark.parametrize("name", ["", None])
def test_a_base_without_a_name_is_left_out(name):
    text = render_model_card(full_facts(base_model=name))
    assert "base_model" not in text
    assert "for a dual encoder that is not on the Hub" in text


def test_built_in_data_is_no_dataset_of_the_hub():
    text = render_model_card(full_facts(dataset="sample:photo", dataset_revision=None))
    assert "datasets:" not in text
    assert " on sample:photo." in text


def test_what_is_unknown_is_left_out():
    text = render_model_card(RunFacts(name="clip"))
    assert "None" not in text
    for heading in ("## Results", "## Data", "## Citation", "Versions", "base model"):
        assert heading not in text
    assert "model-index" not in text


def test_the_example_pads_text_as_the_model_wants_it():
    assert 'return_tensors="pt", padding=True, truncation=True)' in render_model_card(full_facts())
    text_kwargs = {"padding": "max_length", "truncation": True, "max_length": 64}
    text = render_model_card(full_facts(text_kwargs=text_kwargs))
    assert 'return_tensors="pt", padding="max_length", truncation=True, max_length=64)' in text


def test_a_whole_model_is_called_one():
    text = render_model_card(full_facts(adapter=None, adapter_bytes=None, before={}))
    assert "Image-text dual encoder, fine-tuned from [openai/" in text
    assert "library_name: transformers" in text
    assert "base_model_relation: finetune" in text
    assert "PeftModel" not in text
    assert "| | this model |\n|---|---:|\n| image to text, recall@1 | 0.250 |" in text


def test_a_readme_of_the_users_stays_and_a_card_is_renewed(tmp_path, caplog):
    (tmp_path / "README.md").write_text("the user's own")
    for name in ("first", "second"):
        path = write_model_card({"name": name}, tmp_path)
        assert path == tmp_path / "README-hf_infcl.md"
    assert f"{tmp_path / 'README.md'} is no card of this package and stays as it is" in caplog.text
    assert "# second" in path.read_text()
    assert (tmp_path / "README.md").read_text() == "the user's own"
    assert write_model_card({"name": "first"}, tmp_path / "model") == write_model_card(
        {"name": "second"}, tmp_path / "model"
    )


def test_an_unknown_fact_is_named(tmp_path):
    with pytest.raises(ValueError, match="a card knows no colour"):
        write_model_card({"colour": "red"}, tmp_path)
