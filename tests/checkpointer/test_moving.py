"""States that lie in other memory after each step, or are made anew when they are asked for: their appointed
checkpoints are taken, a signal saves the last step, and what comes back is of one step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.format.declaration import encode
from ckpt.trainer.link.link import Link
from ckpt.trainer.link.slots import Plan, RankSlot
from ckpt.trainer.loop.saver import Saver
from ckpt.types import Version
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.moving import KINDS, Value, bits
from tests.checkpointer.scripts import Line, Script, torchrun

MODULE = "tests.checkpointer.moving"
ENDLESS = "1000000"


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
            job.train(ck.state)
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
def test_a_signal_saves_the_last_step(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    log = tmp_path / "log"
    script = Script([sys.executable, "-m", MODULE, kind, str(tmp_path / "run"), ENDLESS, ENDLESS], log)
    script.wait_for(lambda line: line.get("step", 0) >= 12)
    os.kill(script.process.pid, signal.SIGTERM)
    assert script.process.wait(60) == 143, log.read_text()[-3000:]
    last = _last(script.lines(), "step", 0)
    assert restored(tmp_path / "run", kind) == (last["step"], last["bits"])


@pytest.mark.torchrun
def test_so_it_is_with_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appointed, replicated, and by a signal; the next start is of one rank."""
    kind = "clones"
    monkeypatch.setenv("CKPT_NOTICES", "given")
    script = torchrun(tmp_path / "log", 2, MODULE, kind, str(tmp_path / "run"), "60", "3")
    ended = [line for line in script.end() if "ended" in line]
    assert [line["ended"] for line in ended] == [60, 60]
    again = torchrun(tmp_path / "again", 2, MODULE, kind, str(tmp_path / "run"), ENDLESS, ENDLESS)
    came = again.wait_for(lambda line: "restored" in line)
    assert (came["restored"], came["bits"]) == (60, _last(script.lines(), "step", came["rank"])["bits"])
    again.wait_for(lambda line: line.get("step", 0) >= 72)
    os.kill(again.process.pid, signal.SIGTERM)
    again.process.wait(90)
    last = _last(again.lines(), "step", 0)
    assert restored(tmp_path / "run", kind) == (last["step"], last["bits"])


def test_what_is_saved_is_of_the_boundary_and_not_of_the_next_step(tmp_path: Path) -> None:
    job = Value()
    job.begin()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=10**6)) as ck:
        for step in ck.steps(6):
            job.train(ck.state)
            ck.step()
            handle = ck.save()
            ck.state["y"] = torch.full((5000,), -1.0)  # in other memory
            handle.wait("local", timeout_s=60)
            ck.state["y"] = torch.full((5000,), float(step))
        (ck.state["y"]).fill_(77.0)
    wait_agent_gone(tmp_path)
    again = Value()
    again.begin()
    with ckpt.Checkpointer(tmp_path, again.state) as ck:
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


def ready(link: Link) -> tuple[int, RankSlot, Plan]:
    """A slot that can be used, and the plan that it is ready for."""
    return next((number, slot, slot.plan) for number, slot in link.slots.by_number.items() if slot.plan is not None)


def divided_anew(old: Plan) -> Plan:
    declaration = replace(old.declaration, division="new", staging=replace(old.staging))
    return replace(old, declaration=declaration, encoded_declaration=encode(declaration))


def test_a_slot_that_is_made_ready_for_another_division_meanwhile_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent divides anew while the training thread takes a snapshot of what has moved: what is copied by one
    division must not be declared by another."""
    with ckpt.Checkpointer(tmp_path, {"a": torch.ones(64), "y": torch.zeros(16)}, policy=ckpt.Every(steps=10**6)) as ck:
        steps = ck.steps(2)
        next(steps)
        ck.step()
        ck.save().wait("store", timeout_s=60)
        next(steps)
        saver = ck._block.saver
        link, snapshotter = saver.link, saver.snapshotter
        number, slot, old = ready(link)
        new = divided_anew(old)
        is_inside, bind = threading.Event(), snapshotter.bindings.bind

        def slow(slot: int, walk: Any, staging: Any, data: Any) -> None:
            if staging is new.staging:
                is_inside.set()
                time.sleep(0.5)
            bind(slot, walk, staging, data)

        monkeypatch.setattr(snapshotter.bindings, "bind", slow)
        link.slots._present_plan = new
        thread = threading.Thread(target=link.slots._prepare_slot, args=(number, slot, new))
        thread.start()
        assert is_inside.wait(60)
        ck.state["y"] = torch.ones(16)
        assert saver.take(10**6, number, Version(2)) == "not granted"
        thread.join()
        assert slot.plan is new
        snapshotter.bindings.bind = bind
        assert saver.take(10**6, number, Version(2)) == ""
        assert snapshotter.bindings.is_bound(number, saver.walk, new.staging)
        link.slots._present_plan = slot.plan = old


def test_a_slot_is_not_made_ready_while_a_snapshot_is_on_its_way_into_it(tmp_path: Path) -> None:
    """The agent takes an appointment back that this rank has kept, and divides anew."""
    with ckpt.Checkpointer(tmp_path, {"a": torch.ones(64)}, policy=ckpt.Every(steps=10**6)) as ck:
        for _ in ck.steps(1):
            ck.step()
        ck.save().wait("store", timeout_s=60)
        link = ck._block.saver.link
        number, slot, old = ready(link)
        assert slot.hold(link)
        before = bytes(slot.arena.view)
        link.slots._present_plan = new = divided_anew(old)
        thread = threading.Thread(target=link.slots._prepare_slot, args=(number, slot, new))
        thread.start()
        time.sleep(0.3)
        assert slot.plan is old
        assert bytes(slot.arena.view) == before
        slot.release(link)
        thread.join()
        assert slot.plan is new
        link.slots._present_plan = slot.plan = old


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
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=10**6)) as ck:
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


def _last(lines: list[Line], key: str, rank: int) -> Line:
    return [line for line in lines if key in line and line["rank"] == rank][-1]
