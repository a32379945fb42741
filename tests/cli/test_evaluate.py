"""`hf-infcl evaluate`: the same figures as the trainer's, whatever the batch size."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest

from hf_infcl import InfCLConfig, InfCLTrainer
from hf_infcl.cli import main
from hf_infcl.cli.arguments import EmbeddingArguments
from hf_infcl.cli.embedding import embed_pairs, load_pairs
from hf_infcl.data import load_image_text_dataset
from tests.tiny import save_tiny


@pytest.mark.parametrize("batch_size", [3, 64])
def test_the_figures_are_the_trainers(tmp_path, batch_size, capsys):
    model = save_tiny("clip", tmp_path / "model")
    output = tmp_path / "metrics.json"
    data = ["--dataset_name", "sample:photo:16", "--per_device_eval_batch_size", str(batch_size)]
    assert main(["evaluate", "--model_name_or_path", model, *data, "--ks", "1", "5", "--output_file", str(output)]) == 0
    assert "image to text, recall@5" in capsys.readouterr().out
    got = json.loads(output.read_text())

    args = InfCLConfig(str(tmp_path / "out"), use_cpu=True, report_to="none")
    table = load_image_text_dataset("sample:photo:16", split="test")
    want = InfCLTrainer(model, args, eval_dataset=table).evaluate()
    assert got == pytest.approx({name: want[f"eval_{name}"] for name in got})
    assert "mean_recall@5" in got
    assert "mean_recall@10" not in got


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ks", "0"], "ks is [0]; expected a sequence of integers of at least 1"),
        (["--dataloader_num_workers", "-1"], "dataloader_num_workers is -1; expected at least 0"),
        (["--dtype", "float8"], "dtype is 'float8'; expected one of auto, float32, bfloat16, float16"),
        (["--output_file", "."], "output_file '.' is a folder"),
    ],
)
def test_a_bad_option_is_one_line_before_a_model_is_looked_for(capsys, options, said):
    given = ["--model_name_or_path", "no/such-model", "--dataset_name", "sample:photo:4"]
    assert main(["evaluate", *given, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_recipe_of_train_says_where_the_data_is(tmp_path, caplog):
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "metrics.json"
    model = save_tiny("clip", tmp_path / "model")
    recipe.write_text(
        f"model_name_or_path: {model}\ndataset_name: sample:photo:8\ndataset_test_split: auto\nmax_eval_samples: 6\n"
        f"output_dir: {tmp_path / 'trained'}\nlearning_rate: 1e-3\nuse_peft: true\nloss_type: contrastive\n"
    )
    assert main(["evaluate", "--config", str(recipe), "--output_file", str(output)]) == 0
    assert "left aside here: output_dir, learning_rate, use_peft, loss_type; model_name_or_path is" in caplog.text
    direct = ["--model_name_or_path", model, "--dataset_name", "sample:photo:8", "--max_eval_samples", "6"]
    assert main(["evaluate", *direct, "--output_file", str(tmp_path / "direct.json")]) == 0
    assert json.loads(output.read_text()) == json.loads((tmp_path / "direct.json").read_text())


@pytest.mark.parametrize("content", ["the user's own", '{"name": "pairs"}', "[1]"])
def test_a_file_that_holds_no_metrics_is_left_alone(tmp_path, capsys, content):
    file = tmp_path / "notes"
    file.write_text(content)
    given = ["--model_name_or_path", "no/such-model", "--dataset_name", "sample:photo:4"]
    assert main(["evaluate", *given, "--output_file", str(file)]) == 2
    assert "exists and holds no metrics of evaluate" in capsys.readouterr().err
    assert file.read_text() == content


def test_a_table_is_read_as_training_reads_it(tmp_path):
    model = save_tiny("clip", tmp_path / "model")
    lines = ["file_name;caption"]
    for number, row in enumerate(load_image_text_dataset("sample:photo:4")):
        row["image"].save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png;é, {row['caption']}")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    lines += ["broken.png;a broken one", "0.png;"]
    table = tmp_path / "pairs.csv"
    table.write_text("\n".join(lines) + "\n", encoding="latin-1")
    told = [
        "--dataset_name",
        str(table),
        "--dataset_test_split",
        "train",
        "--output_file",
        str(tmp_path / "metrics.json"),
    ]
    options = ["--delimiter", ";", "--encoding", "latin-1", "--on_bad_image", "skip", "--empty_captions", "drop"]
    assert main(["evaluate", "--model_name_or_path", model, *told]) == 2
    assert main(["evaluate", "--model_name_or_path", model, *told, *options]) == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["mean_recall@5"] == 1.0  # four pairs are left


def test_a_lone_table_says_which_split_to_name_before_a_model_is_looked_for(tmp_path, capsys):
    rows = load_image_text_dataset("sample:photo:20")
    rows.to_parquet(tmp_path / "rows.parquet")
    data = ["--dataset_name", str(tmp_path / "rows.parquet")]
    assert main(["evaluate", "--model_name_or_path", "no/such-model", *data]) == 2
    said = capsys.readouterr().err
    assert "has no split 'test' (it has train)" in said
    words = shlex.split(re.search(r'(--dataset_test_split "train\[90%:\]")', said)[1])
    model, output = save_tiny("clip", tmp_path / "model"), tmp_path / "metrics.json"
    assert main(["evaluate", "--model_name_or_path", model, *data, *words, "--output_file", str(output)]) == 0
    assert json.loads(output.read_text())["mean_recall@5"] == 1.0  # two pairs


def test_pairs_are_embedded_by_whatever_has_the_fields(tmp_path):
    """As a script's own `argparse` gives them, beside fields of its own."""
    given = SimpleNamespace(model_name_or_path=save_tiny("clip", tmp_path), dataset_name="sample:photo:4", colour="red")
    found = embed_pairs(given, split="test", max_samples=3)
    assert found.image_embeds.shape == found.text_embeds.shape == (3, 16)
    assert found.ids.shape == (3, 2)


def test_a_batch_is_embedded_without_its_matrix(tmp_path):
    save_tiny("clip", tmp_path)
    args = EmbeddingArguments(model_name_or_path=str(tmp_path), dataset_name="sample:photo")
    loaded = load_pairs(args, split="test", max_samples=8)
    batch = next(iter(loaded.loader))
    batch.pop("ids")
    output = loaded.model(**batch)
    assert output.image_embeds.shape == output.text_embeds.shape
    assert getattr(output, "logits_per_image", None) is None
