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
from tests.checkpointer.loops import make
from tests.checkpointer.runs import agent_status, goes_on, run, saving
from tests.checkpointer.scripts import train


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, list[float]]:
    """The URL of a run with checkpoints of steps 3 and 6, and the losses of that run."""
    return tmp_path / "run", run(tmp_path / "run", 6, make(), saving(3)).losses


def packs(url: Path, step: int) -> list[Path]:
    found = [p for p in (url / "data").rglob("*.pack") if f"-{step:012d}." in str(p.relative_to(url))]
    assert found
    return found


@pytest.mark.parametrize(("what", "damage"), [("pack", "flip"), ("pack", "remove"), ("record", "truncate")])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_loudly(
    two: tuple[Path, list[float]], what: str, damage: str
) -> None:
    url, first = two
    (record,) = (p for p in (url / "commits").iterdir() if "-000000000006." in p.name)
    file = packs(url, 6)[0] if what == "pack" else record
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[7::64] = bytes(byte ^ 0x10 for byte in data[7::64])  # a single one may lie between two frames
    file.write_bytes(data[: len(data) // 2] if damage == "truncate" else data)
    if damage == "remove":
        file.unlink()
    again = goes_on(url, first[:3], 5)
    assert any(event.loud for event in again.seen.named("restore.skipped"))
    (told,) = again.seen.named("restored")
    assert told.data["steps_lost"] == 3
    why = "the checkpoint of step 6 cannot be restored" if what == "pack" else "-000000000006.0000 is damaged"
    assert why in told.data["fell_back"][0]
    assert "slow path: the checkpoint " in told.message
    assert again.ck.receipt["fell_back"] == told.data["fell_back"]


def test_a_start_whose_every_checkpoint_is_damaged_is_an_error_and_never_fresh(two: tuple[Path, list[float]]) -> None:
    for step in (3, 6):
        for pack in packs(two[0], step):
            pack.write_bytes(b"x")
    with pytest.raises((ckpt.NoCheckpoint, ckpt.DamagedData), match=r"step|checkpoint"):
        run(two[0], 8)


def test_a_url_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_EVENTS", str(tmp_path / "events.jsonl"))  # whose thread ends with such an entry, too
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ckpt.CkptError, match="file"):
        run(tmp_path / "file", 2)


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


def test_a_value_that_changed_in_the_agents_memory_is_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are intact. The agent holds the newest checkpoint; the store has that one or an earlier one."""
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
    assert spoil(agent_status(tmp_path)["pid"], b"at the end of step 5", b"at the end of step 7") > 0
    with ckpt.Checkpointer(tmp_path, state()) as ck:
        found = ck.restored
        assert ck.state["text"] == f"at the end of step {found.step}"
        assert ck.state["x"].unique().tolist() == [found.step]
        assert found.step in (3, 4, 5)
        if found.step == 5:
            assert ck.receipt["bytes"]["restored from store"] > 0


def spoil(pid: int, old: bytes, new: bytes) -> int:
    """Writes `new` over `old` wherever a process holds it in arenas (its other files may be sealed). How often."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed since
            if "memfd:ckpt-arena" not in os.readlink(entry):
                continue
            with open(entry, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as whole:
                while (at := whole.find(old)) >= 0:
                    whole[at : at + len(old)] = new
                    count += 1
    return count
