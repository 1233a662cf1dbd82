"""States that lie in other memory after each step, or are made anew when they are asked for: their appointed
checkpoints are taken, a signal saves the last step, and what comes back is of one step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.trainer.loop.saver import Saver
from ckpt.types import Version
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.moving import KINDS, Value, bits
from tests.checkpointer.notices import CODE, ENDLESS, SELDOM, at_step, code_of
from tests.checkpointer.runs import LATER, Seen, Stateful
from tests.checkpointer.scripts import train


def restored(url: Path, kind: str) -> tuple[int, str]:
    """What a start finds: the step, and the state."""
    job = KINDS[kind]().begin()
    with ckpt.Checkpointer(url, job.state) as ck:
        return ck.restored.step, bits(job, ck.state)


@pytest.mark.parametrize("kind", KINDS)
def test_appointed_checkpoints_are_taken_and_come_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, seen, missed = KINDS[kind]().begin(), {}, list[str]()

    def spied(saver: Saver, attempt: int, version: Version, why: str) -> None:
        missed.append(why)
        miss(saver, attempt, version, why)

    miss = Saver.report_missed
    monkeypatch.setattr(Saver, "report_missed", spied)
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=2)) as ck,
    ):
        for step in ck.steps(100_000):
            job.train(step, ck.state)
            ck.step()
            seen[step] = bits(job, ck.state)
            time.sleep(0.005)
            if ck.receipt["snapshots"] >= 8 and (ck.receipt["committed_step"] or 0) > 12:
                raise ZeroDivisionError  # nothing is saved at the exit
    assert len([why for why in missed if why != "late"]) <= 6, missed  # while its structure still grows
    assert any("other memory" in text for text in ck.receipt["fell_back"]), ck.receipt
    wait_agent_gone(tmp_path)
    step, found = restored(tmp_path, kind)
    assert step > 12
    assert found == seen[step]


@pytest.mark.parametrize("kind", ["rate", "value", "quasi"])
def test_a_signal_saves_the_last_step(tmp_path: Path, kind: str) -> None:
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, *SELDOM, "--job", kind, CKPT_NOTICES="given")
    at_step(script)
    script.process.terminate()
    assert code_of(script) == CODE, script.log.read_text()[-3000:]
    last = [line for line in script.lines() if "step" in line][-1]
    assert restored(tmp_path / "run", kind) == (last["step"], last["bits"])


def test_a_structure_that_changes_at_each_step_is_said_and_still_saved_when_asked(tmp_path: Path) -> None:
    job, seen = Value().begin(), Seen()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(seconds=0.01), sinks=(seen,)) as ck:
        for step in ck.steps(100_000):
            ck.state["y"] = torch.zeros(10 + step)
            job.loss()
            job.optim.step()
            ck.step()
            time.sleep(0.005)
            if seen.named("state.unsettled"):
                break
        ck.save().wait("store", timeout_s=60)
    told = seen.named("state.unsettled")[0]
    assert told.loud
    assert "(y)" in told.message
    again = Value().begin()
    again.state["y"] = torch.ones(10 + step)
    with ckpt.Checkpointer(tmp_path, again.state) as ck:
        assert ck.restored.step == step
        assert ck.state["y"].unique().tolist() == [0.0]


def test_a_slot_that_is_being_made_ready_for_another_division_is_not_used(tmp_path: Path) -> None:
    """What is copied by one division must not be declared by another."""
    with ckpt.Checkpointer(tmp_path, {"a": torch.ones(64)}, policy=LATER) as ck:
        ck.step()
        ck.save().wait("store", timeout_s=60)
        saver = ck._block.saver
        number, slot = next((number, slot) for number, slot in saver.link.slots.by_number.items() if slot.plan)
        assert slot.hold("who makes it ready")
        assert saver.take(10**6, number, Version(1, 2)) == "not granted"
        slot.release("who makes it ready")
        assert saver.take(10**6, number, Version(1, 2)) == ""


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_what_moved_while_the_state_could_not_be_read_is_found_by_the_next_save(tmp_path: Path, asked: int) -> None:
    """`asked`: how often at that boundary until it fails."""
    job, times_until_failure = Value().begin(), 0

    def read() -> dict[str, Any]:
        nonlocal times_until_failure
        times_until_failure -= 1
        if times_until_failure == 0:
            raise MemoryError("once")
        return {"n": 1}

    job.state["failing"] = Stateful(read)
    with ckpt.Checkpointer(tmp_path, job.state, policy=LATER) as ck:
        for step in ck.steps(4):
            ck.step()
            if step == 2:
                ck.state["y"] = torch.full((5000,), 2.0)
                times_until_failure = asked
                with pytest.raises(ckpt.SaveFailed, match="once"):
                    ck.save().wait("local", timeout_s=60)
        ck.save().wait("store", timeout_s=60)
    again = Value().begin()
    again.state["failing"] = Stateful(read)
    with ckpt.Checkpointer(tmp_path, again.state) as ck:
        assert ck.restored.step == 4
        assert ck.state["y"].unique().tolist() == [2.0]
