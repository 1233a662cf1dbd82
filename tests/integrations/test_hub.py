"""Exports to the Hugging Face Hub: each is a commit of the repository, and one that fails is made up for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load
from torch import nn

import ckpt
from ckpt.store.hub import check_repository
from tests.checkpointer.loops import wait_agent_gone
from tests.cli.stores import ckpt as command
from tests.integrations.fake_hub import REPOSITORY, TOKEN, Hub, hub

TO = f"hf://{REPOSITORY}"
FILES = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub() as made:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", made.url)  # of this process, which has imported it
        yield made


def train(folder: Path, steps: int, model: nn.Module | None = None) -> list[ckpt.Event]:
    events: list[ckpt.Event] = []
    state, export = {"model": model or nn.Linear(2, 2)}, ckpt.Export(TO, every=2)
    with ckpt.Checkpointer(folder, state, policy=ckpt.Every(steps=1), export=export, sinks=(events.append,)) as ck:
        for _ in ck.steps(steps):
            pass
    wait_agent_gone(folder)
    return [each for each in events if each.name.startswith("export")]


def test_each_export_is_a_commit_and_none_is_made_twice(repository: Hub, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert [each.loud for each in train(tmp_path / "run", 3, model)] == [False] * len(repository.commits)
    titles = [title for title, _ in repository.commits]
    assert titles[-1] == "step 3"
    assert len(set(titles)) == len(titles)
    assert repository.commits[-1][1].keys() == FILES
    assert torch.equal(load(repository.commits[-1][1]["model-00001-of-00001.safetensors"])["weight"], model.weight)
    train(tmp_path / "run", 3)
    assert [title for title, _ in repository.commits] == titles
    kept = [each for each in (tmp_path / "home/.cache/ckpt").rglob("*") if each.is_file()]
    assert kept == []


def test_a_refused_upload_is_said_and_made_up_for_by_the_next_start(repository: Hub, tmp_path: Path) -> None:
    repository.refuses = True
    events = train(tmp_path / "run", 2)
    assert {each.name for each in events} == {"export.failed"}
    assert "quota is used up" in events[-1].message
    repository.refuses = False
    train(tmp_path / "run", 2)
    assert [title for title, _ in repository.commits] == ["step 2"]


def test_a_repository_that_cannot_be_written_to_is_refused_at_entry(
    repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ckpt.UsageError, match=r"hf://someone/model: .*Log in"):
        train(tmp_path / "run", 1)


def test_a_hub_that_gives_no_answer_keeps_no_training_from_its_start(
    repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert {each.name for each in train(tmp_path / "run", 1)} == {"export.failed"}


@pytest.mark.parametrize(
    ("status", "is_refused"), [(401, True), (403, True), (404, True), (408, False), (429, False), (503, False)]
)
def test_only_an_answer_about_the_rights_refuses_a_start(
    status: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*given: Any, **options: Any) -> None:
        error = HfHubHTTPError.__new__(HfHubHTTPError)
        error.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
        raise error

    monkeypatch.setattr(HfApi, "auth_check", answer)
    with pytest.raises(ckpt.UsageError) if is_refused else contextlib.nullcontext():
        check_repository(REPOSITORY)


def test_ckpt_restore_uploads_a_checkpoint(repository: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpt.Checkpointer(tmp_path / "run", {"model": nn.Linear(2, 2)}) as ck:
        for _ in ck.steps(1):
            pass
    done = command(monkeypatch, "restore", tmp_path / "run", "--to", TO, "--strip", "model.")
    assert done.code == 0, done
    assert f"in {TO}" in done.out
    assert repository.commits[0][1].keys() == FILES
    assert command(monkeypatch, "restore", tmp_path / "run", "--to", "hf://model").code == 2
    file = command(monkeypatch, "restore", tmp_path / "run", "--to", TO, "--format", "safetensors")
    assert (file.code, len(repository.commits)) == (2, 1)
    assert "a repository gets a folder" in file.err
