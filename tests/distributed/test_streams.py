"""A stream in fewer pieces than there are readers: every process takes the same number of steps, and none waits."""

import io
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.processes import run_processes

pytestmark = pytest.mark.distributed


def write_tars(folder: Path, sizes: list[int]) -> None:
    """Tar files in webdataset's manner, with so many pairs each."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for row in range(size):
                picture = io.BytesIO()
                Image.new("RGB", (32, 32), (40 * number, 40 * row, 90)).save(picture, "PNG")
                caption = f"a dog number {number} {row}".encode()
                for suffix, content in (("png", picture.getvalue()), ("txt", caption)):
                    member = tarfile.TarInfo(f"{number}-{row:03}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def _train(rank: int, world_size: int, folders: list[str]) -> list[tuple[int, list[float]]]:
    from hf_infcl import InfCLConfig, InfCLTrainer
    from hf_infcl.data import load_image_text_dataset
    from tests.tiny import tiny_clip, tiny_processor

    found = []
    for folder in folders:
        torch.manual_seed(0)
        run = InfCLTrainer(
            model=tiny_clip(),
            args=InfCLConfig(
                f"{folder}-out",
                per_device_train_batch_size=2,
                max_steps=3,
                logging_steps=1,
                dataloader_num_workers=2,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=load_image_text_dataset(folder, streaming=True),
            processing_class=tiny_processor("clip"),
        )
        steps = run.train().global_step
        found.append((steps, [line["loss"] for line in run.state.log_history if "loss" in line]))
    return found


def test_fewer_tar_files_than_readers(tmp_path):
    sizes = {"one": [6], "three": [4, 4, 1]}
    for name, rows in sizes.items():
        write_tars(tmp_path / name, rows)
    first, second = run_processes(_train, 2, args=([str(tmp_path / name) for name in sizes],))
    assert first == second
    assert [steps for steps, _ in first] == [3, 3]
