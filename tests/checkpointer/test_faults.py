"""Damage, foreign data, and other jobs: a start ends in the right checkpoint or a clear error, never in a wrong one."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.events import Event
from tests.checkpointer.loops import Job, losses, make, wait_agent_gone
from tests.checkpointer.scripts import train
from tests.checkpointer.test_one_process import agent_pid


def save_at(url: Path, *steps: int, job: Job | None = None, **options: Any) -> list[float]:
    """A run whose checkpoints are those of `steps`, the last of which ends it."""
    job, found = job or make(), []
    with ckpt.Checkpointer(url, job.state, **options) as ck:
        for step in ck.steps(max(steps)):
            found.append(job.train(step))
            if step in steps and step != max(steps):
                ck.step()
                ck.save().wait("store", timeout_s=60)
    wait_agent_gone(url)
    return found


def go_on(url: Path, steps: int, **options: Any) -> tuple[list[float], ckpt.Checkpointer, list[Event]]:
    job, found, events = make(seed=9), [], list[Event]()
    with ckpt.Checkpointer(url, job.state, sinks=(events.append,), **options) as ck:
        for step in ck.steps(steps):
            found.append(job.train(step))
    return found, ck, events


def packs(url: Path, step: int) -> list[Path]:
    found = [p for p in (url / "data").rglob("*.pack") if f"-{step:012d}." in str(p.relative_to(url))]
    assert found
    return found


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_loudly(tmp_path: Path, damage: str) -> None:
    url = tmp_path / "run"
    first = save_at(url, 3, 6)
    pack = packs(url, 6)[0]
    data = bytearray(pack.read_bytes())
    if damage == "flip":
        data[::64] = bytes(byte ^ 0x10 for byte in data[::64])  # a single one may lie between two frames
        pack.write_bytes(data)
    elif damage == "remove":
        pack.unlink()
    else:
        pack.write_bytes(data[: len(data) // 2] if damage == "truncate" else b"")
    second, ck, events = go_on(url, 8)
    assert ck.restored.step == 3
    assert any(event.name == "restore.skipped" and event.loud for event in events)
    assert first[:3] + second == losses(8)


@pytest.mark.parametrize("damage", ["flip", "truncate", "garbage"])
def test_a_damaged_record_falls_back_too(tmp_path: Path, damage: str) -> None:
    url = tmp_path / "run"
    save_at(url, 3, 6)
    record = next(p for p in (url / "commits").iterdir() if "-000000000006." in p.name)
    data = bytearray(record.read_bytes())
    data[len(data) // 3] ^= 1
    record.write_bytes({"flip": bytes(data), "truncate": bytes(data[:-40]), "garbage": os.urandom(400)}[damage])
    _, ck, events = go_on(url, 7)
    assert ck.restored.step == 3
    assert any(event.name == "restore.skipped" and event.loud for event in events)


def test_a_start_whose_every_checkpoint_is_damaged_is_an_error_and_never_fresh(tmp_path: Path) -> None:
    url = tmp_path / "run"
    save_at(url, 3, 6)
    for step in (3, 6):
        for pack in packs(url, step):
            pack.write_bytes(b"x")
    with pytest.raises((ckpt.NoCheckpoint, ckpt.DamagedData), match=r"step|checkpoint"):
        go_on(url, 8)


def test_a_folder_of_something_else_is_a_fresh_start_that_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "notes.txt").write_text("mine")
    (tmp_path / "readme").write_text("mine too")
    found, ck, _ = go_on(tmp_path, 2)
    assert ck.restored.step == 0
    assert len(found) == 2
    assert (tmp_path / "commits" / "notes.txt").read_text() == "mine"


def test_a_url_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ckpt.CkptError, match="file"):
        go_on(tmp_path / "file", 2)


def test_a_wrong_url_is_a_usage_error() -> None:
    with pytest.raises(ckpt.UsageError, match="s3://"):
        ckpt.Checkpointer("s3:bucket/run", {})


def test_a_store_that_vanishes_fails_the_save_and_not_the_training(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CKPT_RETRY_S", "0.5")
    url, job, found = tmp_path / "run", make(), []
    with pytest.raises(ckpt.CommitFailed), ckpt.Checkpointer(url, job.state, limits=ckpt.Limits(exit_s=20)) as ck:  # noqa: PT012
        for step in ck.steps(6):
            found.append(job.train(step))
            if step == 2:
                ck.step()
                ck.save().wait("store", timeout_s=60)
                url.rename(tmp_path / "gone")
                url.write_text("somebody put a file here")
                handle = ck.save()
                with pytest.raises(ckpt.SaveFailed):
                    handle.wait("store", timeout_s=30)
                assert handle.level == "local"
    assert found == losses(6)


def test_a_second_job_elsewhere_on_a_living_run_is_refused(tmp_path: Path, runtime_dir: Path) -> None:
    """Another runtime folder stands for another machine: its agent does not know the first."""
    first = train(tmp_path / "1.log", tmp_path / "run", 100_000, "--every", "20", CKPT_HEARTBEAT_S="5")
    try:
        first.wait_for(lambda line: line.get("step") == 5)
        other = runtime_dir / "other"
        env = {"CKPT_RUNTIME_DIR": str(other), "CKPT_HEARTBEAT_S": "5", "CKPT_LAUNCH": "another"}
        second = train(tmp_path / "2.log", tmp_path / "run", 10, **env)
        assert second.process.wait(60) != 0
        text = second.log.read_text()
        assert "RunInUse" in text
        assert any(line.get("event") == "run.watched" for line in second.lines()), "it waited without a word"
        assert "take_over" in text
        third = train(tmp_path / "3.log", tmp_path / "run", 100_000, "--take-over", "--every", "20", **env)
        third.wait_for(lambda line: "restored" in line)
        assert first.process.wait(90) == 75
        assert "owns" in (left := first.log.read_text())
        assert "need a URL each" in left
        third.kill()
    finally:
        if first.process.poll() is None:
            first.kill()


def test_strict_false_goes_on_with_what_fits_and_says_so(tmp_path: Path) -> None:
    url = tmp_path / "run"
    save_at(url, 2)
    job, events = make(seed=9), list[Event]()
    extra = torch.nn.Linear(3, 3)
    before = extra.weight.detach().clone()
    with ckpt.Checkpointer(url, {**job.state, "head": extra}, strict=False, sinks=(events.append,)) as ck:
        assert ck.restored.step == 2
    assert torch.equal(extra.weight, before)
    said = next(event for event in events if event.name == "restore.mismatch")
    assert "head.*: 2 tensors" in said.message


def test_init_weights_count_only_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    source = make(seed=3)
    save_at(tmp_path / "other", 2, job=source)
    job = make(seed=4)
    with ckpt.Checkpointer(tmp_path / "run", job.state, init=tmp_path / "other") as ck:
        assert ck.restored.step == 0
        for mine, theirs in zip(job.model.parameters(), source.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        for step in ck.steps(1):
            job.train(step)
    fresh = make(seed=5)
    with ckpt.Checkpointer(tmp_path / "run", fresh.state, init=tmp_path / "other") as ck:
        assert ck.restored.step == 1
        for mine, theirs in zip(fresh.model.parameters(), job.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_value_that_changed_in_the_agents_memory_is_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are whole, and what the agent holds is the newest there is; the store has it or an earlier one."""
    monkeypatch.setenv("CKPT_LINGER_S", "60")

    def state() -> dict[str, Any]:
        return {"x": torch.zeros(1000), "text": "not restored"}

    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        ckpt.Checkpointer(tmp_path, state(), policy=ckpt.Every(steps=10**6)) as ck,
    ):
        for step in ck.steps(5):
            ck.state["x"].fill_(step)
            ck.state["text"] = f"at the end of step {step}"
            ck.step()
            ck.save().wait("store" if step == 3 else "local", timeout_s=60)
        raise ZeroDivisionError
    pid = agent_pid(str(tmp_path))
    assert pid is not None
    assert spoil(pid, b"at the end of step 5", b"at the end of step 7") > 0
    events: list[Event] = []
    with ckpt.Checkpointer(tmp_path, state(), sinks=(events.append,)) as ck:
        found = ck.restored
        assert ck.state["text"] == f"at the end of step {found.step}"
        assert ck.state["x"].unique().tolist() == [found.step]
        assert found.step in (3, 4, 5)
        if found.step == 5:
            assert ck.receipt["bytes"]["restored from store"] > 0


def spoil(pid: int, old: bytes, new: bytes) -> int:
    """Writes `new` over `old` wherever a process holds it in anonymous files. How often."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed since
            if "memfd:" not in os.readlink(entry):
                continue
            with open(entry, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as whole:
                while (at := whole.find(old)) >= 0:
                    whole[at : at + len(old)] = new
                    count += 1
    return count
