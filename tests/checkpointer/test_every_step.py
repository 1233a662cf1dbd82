"""Every(steps=N) saves every N-th step, and the exit takes no second checkpoint of a state that is saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.checkpointer.loops import make, wait_agent_gone
from tests.checkpointer.runs import Seen, agent_status, run


def test_every_named_step_of_the_run_is_saved_however_short_the_steps_are(tmp_path: Path) -> None:
    """Multiples count from the first step of the run, and one that breaks goes on from the last of them."""
    first = run(tmp_path, 4, make(), policy=ckpt.Every(steps=5))
    assert first.seen.committed == [4]
    job, seen = make(), Seen()
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=3), sinks=(seen,)) as ck,
    ):
        for step in ck.steps(30):
            if step == 20:
                raise ZeroDivisionError
            job.train(step)
    assert (ck.receipt["missed"], ck.receipt["passed"]) == (0, 0)
    wait_agent_gone(tmp_path)
    with ckpt.open(tmp_path) as reader:
        assert [each.step for each in reader.checkpoints] == [4, 6, 9, 12, 15, 18]


def test_a_due_save_that_fails_is_counted_and_training_goes_on(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": torch.zeros(3)}

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        state["bad"] = object() if step == 4 else 0

    ended = run(tmp_path, 6, state, at, policy=ckpt.Every(steps=2))
    assert ended.seen.committed == [2, 6]
    assert ended.seen.named("save.failed")
    assert ended.ck.receipt["missed"] == 1


@pytest.mark.parametrize("what", ["nothing", "value", "tensor", "data", "draw"])
def test_the_exit_saves_a_step_again_only_where_something_has_changed(what: str, tmp_path: Path) -> None:
    job, seen = make(), Seen()
    state: dict[str, Any] = {**job.state, "best": 0.0}
    with ckpt.Checkpointer(tmp_path, state, policy=ckpt.Every(steps=10**6), sinks=(seen,)) as ck:
        for step in ck.steps(4):
            job.train(step)
        ck.save(metrics={"loss": 1.5})
        ck.poll()
        weight = next(job.model.parameters())
        if what == "value":
            state["best"] = 2.0
        elif what == "tensor":
            with torch.no_grad():
                weight.mul_(2.0)
        elif what == "data":
            weight.data.view(-1).numpy()[0] = 7.0  # which moves no version counter
        elif what == "draw":
            torch.rand(1)
    assert seen.committed == ([4] if what == "nothing" else [4, 4])
    wait_agent_gone(tmp_path)
    with ckpt.open(tmp_path) as reader:
        assert reader.checkpoints[0].metrics == {"loss": 1.5}


def test_an_agent_that_hangs_stops_training_once_and_saves_when_it_wakes_up(tmp_path: Path) -> None:
    job, seen = make(), Seen()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=1), sinks=(seen,)) as ck:
        pid = agent_status(tmp_path)["pid"]
        for step in ck.steps(60):
            if step == 5:
                os.kill(pid, signal.SIGSTOP)
            job.train(step)
            if step == 50:
                assert len(seen.named("save.failed")) == 45
                os.kill(pid, signal.SIGCONT)
                ck.step()
                ck.save().wait("store")  # by then it has answered what was asked before
    assert seen.committed[-10:] == list(range(51, 61))


def test_the_default_policy_takes_a_first_checkpoint_at_once(tmp_path: Path) -> None:
    job, seen = make(), Seen()
    with ckpt.Checkpointer(tmp_path, job.state, sinks=(seen,)) as ck:
        for step in ck.steps(100_000):
            job.train(step)
            if seen.committed:
                break
    assert seen.named("policy.first")
