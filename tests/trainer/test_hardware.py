"""Devices, precisions and processes that do not go together."""

import re
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from hf_infcl.trainer import hardware
from tests.processes import ProcessesError, run_processes
from tests.tiny import save_tiny
from tests.trainer.helpers import config

SCRIPT = Path(__file__).parents[2] / "recipes" / "finetune_clip.py"


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_, **__: False)
    monkeypatch.setattr(hardware, "is_torch_bf16_gpu_available", lambda: False)


@pytest.mark.parametrize("name", ["bf16", "bf16_full_eval"])
def test_bfloat16_without_a_gpu_names_the_field_and_the_fix(tmp_path, name, without_gpu):
    with pytest.raises(ValueError, match=rf"^{name}=True: this machine has no GPU; set {name}=False .*use_cpu=True"):
        config(tmp_path, use_cpu=False, **{name: True})
    assert config(tmp_path, use_cpu=True, **{name: True}).use_cpu


def test_bfloat16_on_an_older_gpu_points_at_float16(tmp_path, without_gpu, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_, **__: True)
    with pytest.raises(ValueError, match="the GPU here has no bfloat16; .*fp16=True"):
        config(tmp_path, use_cpu=False, bf16=True)


def test_float16_on_the_cpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^fp16=True needs a GPU, .*set fp16=False"):
        config(tmp_path, fp16=True)


def test_the_cpu_is_chosen_for_several_processes_only_where_there_is_nothing_else(tmp_path, without_gpu, monkeypatch):
    args = config(tmp_path)
    args.use_cpu = False
    assert not hardware.meets_on_cpu(args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert hardware.meets_on_cpu(args)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_, **__: True)
    assert not hardware.meets_on_cpu(args)


def test_one_of_several_processes_that_would_train_alone_is_refused(tmp_path, monkeypatch):
    args = config(tmp_path)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"^3 processes were started .*--use_cpu true"):
        hardware.check_device(args)


def a_group_that_the_launcher_does_not_tell_of(rank, world_size, folder):
    import os

    del os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
    config(Path(folder))


@pytest.mark.distributed
def test_a_process_group_beside_a_lone_trainer_is_refused(tmp_path):
    with pytest.raises(ProcessesError, match="ValueError: 2 processes were started"):
        run_processes(a_group_that_the_launcher_does_not_tell_of, 2, args=(str(tmp_path),))


@pytest.mark.distributed
def test_the_script_started_twice_by_a_launcher_trains_as_one_without_being_told_of_the_cpu(tmp_path):
    options = {
        "model_name_or_path": save_tiny("clip", tmp_path / "base"),
        "dataset_name": "sample:photo:16",
        "output_dir": tmp_path / "out",
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    said = run_processes(SCRIPT, 2, args=words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ["Written to" in text for text in said] == [True, False]
    assert re.search(r"'contrastive_batch_size': '?8", said[0])


@pytest.mark.parametrize(("processes", "warned"), [(1, False), (2, True)])
def test_a_launcher_that_started_fewer_processes_than_it_was_asked_for_is_said(monkeypatch, caplog, processes, warned):
    """The environment is the one that accelerate's own launcher makes."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = ["--cpu", "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
    words += ["--num_cpu_threads_per_process", 1, "--num_processes", processes, "script.py"]
    _, environment = prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(map(str, words)))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hardware.warn_of_lone_process()
    assert ("torchrun --nproc_per_node" in caplog.text) == warned


def test_processes_of_torchrun_are_not_taken_for_lone_ones(monkeypatch, caplog):
    for name, value in {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    hardware.warn_of_lone_process()
    assert not caplog.records
