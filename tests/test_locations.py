"""What is no path here and no answer of the Hub is said at once."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from hf_infcl.locations import check_location


class NoRoute(Exception):
    """Stands for what the HTTP client raises: no kind of OSError, and of another module in each version."""


class Hub:
    """Stands for the Hub: counts what it is asked, and answers or not."""

    def __init__(self, error):
        self.asked, self.error = [], error

    def repo_info(self, name, *, repo_type, timeout):
        self.asked.append((name, repo_type))
        if self.error is not None:
            raise self.error


@pytest.fixture
def hub(monkeypatch, tmp_path):
    def stand(error):
        stands = Hub(error)
        monkeypatch.setattr(HfApi, "repo_info", lambda _, *args, **kwargs: stands.repo_info(*args, **kwargs))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
        return stands

    return stand


@pytest.mark.parametrize("name", ["./gone", "../gone", "~/gone", "/gone", "a/b/c", "a\\b"])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_path_is_never_asked_for(hub, name, kind):
    stands = hub(None)
    with pytest.raises(FileNotFoundError, match="no such file or folder: /"):
        check_location(name, kind)
    assert stands.asked == []


@pytest.mark.parametrize("name", ["gone", "runs/gone"])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_name_that_nobody_answers_for_is_asked_for_once(hub, tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    stands = hub(NoRoute("no route"))
    with pytest.raises(FileNotFoundError) as caught:
        check_location(name, kind)
    assert stands.asked == [(name, kind)]
    for part in (f"'{name}' is no file or folder", os.path.join(tmp_path, name), "(no route)", "HF_HUB_OFFLINE=1"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_what_is_here_or_cached_is_not_asked_for(hub, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    stands = hub(NoRoute("no route"))
    (tmp_path / "here").mkdir()
    (tmp_path / "hub" / f"{kind}s--owner--cached").mkdir(parents=True)
    (tmp_path / "datasets" / "owner___my_prepared").mkdir(parents=True)
    check_location("here", kind)
    check_location("owner/cached", kind)
    if kind == "dataset":
        check_location("owner/MyPrepared", kind)
    assert stands.asked == []


def test_what_the_hub_answers_is_left_to_whoever_loads(hub):
    answer: Any = SimpleNamespace(headers={}, request=None, status_code=404)
    stands = hub(RepositoryNotFoundError("not there", response=answer))
    check_location("owner/private", "model")
    assert stands.asked == [("owner/private", "model")]
