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
from tests.checkpointer.runs import LATER, restore
from tests.checkpointer.scripts import train


def restored(url: Path, kind: str) -> tuple[int, str]:
    """What a start finds: the step, and the state."""
    job = KINDS[kind]()
    job.begin()
    with ckpt.Checkpointer(url, job.state) as ck:
        return ck.restored.step, bits(job, ck.state)


@pytest.mark.parametrize("kind", KINDS)
def test_appointed_checkpoints_are_taken_and_come_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, seen, missed = KINDS[kind](), {}, list[str]()

    def spied(saver: Saver, attempt: int, version: Version, why: str) -> None:
        missed.append(why)
        miss(saver, attempt, version, why)

    miss = Saver.report_missed
    monkeypatch.setattr(Saver, "report_missed", spied)
    job.begin()
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


def test_what_is_saved_is_of_the_boundary_and_not_of_the_next_step(tmp_path: Path) -> None:
    job = Value()
    job.begin()
    with ckpt.Checkpointer(tmp_path, job.state, policy=LATER) as ck:
        for step in ck.steps(6):
            job.train(step, ck.state)
            ck.step()
            handle = ck.save()
            ck.state["y"] = torch.full((5000,), -1.0)  # in other memory
            handle.wait("local", timeout_s=60)
            ck.state["y"] = torch.full((5000,), float(step))
        (ck.state["y"]).fill_(77.0)
    again = Value()
    again.begin()
    ck = restore(tmp_path, again.state)
    assert ck.restored.step == 6
    assert ck.state["y"].unique().tolist() == [77.0]


def test_a_structure_that_changes_at_each_step_is_said_and_still_saved_when_asked(tmp_path: Path) -> None:
    job, said = Value(), []
    job.begin()
    options: dict[str, Any] = {"policy": ckpt.Every(seconds=0.01), "sinks": (lambda event: said.append(event),)}
    with ckpt.Checkpointer(tmp_path, job.state, **options) as ck:
        for step in ck.steps(100_000):
            ck.state["y"] = torch.zeros(10 + step)
            job.loss()
            job.optim.step()
            ck.step()
            time.sleep(0.005)
            if any(event.name == "state.unsettled" for event in said):
                break
        ck.save().wait("store", timeout_s=60)
    named = [event for event in said if event.name == "state.unsettled"]
    assert named, "it was not said"
    assert named[0].loud
    assert "(y)" in named[0].message
    again = Value()
    again.begin()
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


class Failing:
    """Fails once in a while when it is asked for its state."""

    asked, fails_at = 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked == self.fails_at:
            raise MemoryError("once")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_what_moved_while_the_state_could_not_be_read_is_found_by_the_next_save(tmp_path: Path, asked: int) -> None:
    """`asked`: how often at that boundary until it fails."""
    job = Value()
    job.begin()
    failing = Failing()
    job.state["failing"] = failing
    with ckpt.Checkpointer(tmp_path, job.state, policy=LATER) as ck:
        for step in ck.steps(4):
            ck.step()
            if step == 2:
                ck.state["y"] = torch.full((5000,), 2.0)
                failing.fails_at = failing.asked + asked
                with pytest.raises(ckpt.SaveFailed, match="once"):
                    ck.save().wait("local", timeout_s=60)
        failing.fails_at = 0
        ck.save().wait("store", timeout_s=60)
    again = Value()
    again.begin()
    again.state["failing"] = Failing()
    with ckpt.Checkpointer(tmp_path, again.state) as ck:
        assert ck.restored.step == 4
        assert ck.state["y"].unique().tolist() == [2.0]
