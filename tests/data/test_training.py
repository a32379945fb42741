"""The Trainer on tables with faults: what is skipped is counted, what is drawn is drawn again."""

import csv

import pytest
from PIL import Image

from hf_infcl import InfCLConfig, InfCLTrainer
from hf_infcl.data import load_image_text_dataset, sample_dataset
from hf_infcl.data.images import UnreadableImageError
from tests.tiny import tiny_clip, tiny_processor


@pytest.fixture
def damaged(tmp_path):
    """A CSV of 8 rows: 5 good, half a JPEG, an empty file, a web page."""
    with open(tmp_path / "t.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "caption"])
        for row in range(8):
            Image.effect_noise((40, 40), 60).convert("RGB").save(tmp_path / f"{row}.jpg")
            table.writerow([f"{row}.jpg", f"a dog number {row}"])
    whole = (tmp_path / "1.jpg").read_bytes()
    for row, content in ((1, whole[: len(whole) // 2]), (3, b""), (5, b"<html>404</html>")):
        (tmp_path / f"{row}.jpg").write_bytes(content)
    return tmp_path / "t.csv"


def trainer(table, folder, **options):
    args = InfCLConfig(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    dataset = load_image_text_dataset(table)
    return InfCLTrainer(model=tiny_clip(), args=args, train_dataset=dataset, processing_class=tiny_processor("clip"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_stops_at_an_unreadable_picture_and_names_it(damaged, tmp_path, workers):
    with pytest.raises(UnreadableImageError, match=r"row [135] has an unreadable image: .*[135]\.jpg"):
        trainer(damaged, tmp_path / "out", dataloader_num_workers=workers).train()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_skips_ends_and_says_how_many(damaged, tmp_path, workers, caplog):
    run = trainer(damaged, tmp_path / "out", dataloader_num_workers=workers, on_bad_image="skip")
    assert run.train().global_step == 2
    assert "3 of 8 rows skipped" in caplog.text
    assert len(run.train_dataset) == 5


def losses(folder, **options):
    """The losses of two epochs in which captions are drawn, and the weights' sum at the end."""
    args = InfCLConfig(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        captions="draw",
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{name: value for name, value in options.items() if name != "resume"},
    )
    run = InfCLTrainer(
        model=tiny_clip(),
        args=args,
        train_dataset=sample_dataset("drawing", size=8, captions_per_image=6),
        processing_class=tiny_processor("clip"),
    )
    run.train(resume_from_checkpoint=options.get("resume"))
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_drawn_captions_do_not_depend_on_workers_or_on_resuming(tmp_path):
    alone = losses(tmp_path / "alone")
    assert len(alone) == 4
    assert losses(tmp_path / "workers", dataloader_num_workers=2, dataloader_persistent_workers=True) == alone
    assert losses(tmp_path / "resumed", resume=str(tmp_path / "alone" / "checkpoint-2")) == alone
