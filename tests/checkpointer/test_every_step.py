"""Every(steps=N) saves every N-th step, and the exit takes no second checkpoint of a state that is saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.types import Identity
from tests.checkpointer.loops import make, wait_agent_gone
from tests.checkpointer.test_one_process import agent_pid


class Commits:
    """A sink: the versions that were committed, in order, and the events that were emitted."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.names: list[str] = []

    def __call__(self, event: ckpt.Event) -> None:
        self.names.append(event.name)
        if event.name == "commit.done":
            self.versions.append(str(Identity.parse(event.data["identity"]).version))


def steps_of(commits: Commits) -> list[int]:
    return [int(version.split(".")[0]) for version in commits.versions]


def test_every_named_step_is_saved_however_short_the_steps_are(tmp_path: Path) -> None:
    job, seen = make(), Commits()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=3), sinks=(seen,)) as ck:
        for step in ck.steps(20):
            job.train(step)
    assert steps_of(seen) == [3, 6, 9, 12, 15, 18, 20]
    assert (ck.receipt["missed"], ck.receipt["passed"]) == (0, 0)


def test_a_job_that_breaks_in_its_tenth_step_goes_on_from_the_ninth(tmp_path: Path) -> None:
    job = make()
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=3)) as ck,
    ):
        for step in ck.steps(20):
            if step == 10:
                raise ZeroDivisionError
            job.train(step)
    with ckpt.Checkpointer(tmp_path, make().state) as ck:
        assert ck.restored.step == 9


def test_multiples_count_from_the_first_step_of_the_run(tmp_path: Path) -> None:
    for last, expected in ((4, [4]), (12, [5, 10, 12])):
        job, seen = make(), Commits()
        with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=5), sinks=(seen,)) as ck:
            for step in ck.steps(last):
                job.train(step)
        assert steps_of(seen) == expected
        wait_agent_gone(tmp_path)


def test_a_due_save_that_fails_is_counted_and_training_goes_on(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": torch.zeros(3)}
    seen = Commits()
    with ckpt.Checkpointer(tmp_path, state, policy=ckpt.Every(steps=2), sinks=(seen,)) as ck:
        for step in ck.steps(6):
            state["bad"] = object() if step == 4 else 0
    assert steps_of(seen) == [2, 6]
    assert "save.failed" in seen.names
    assert ck.receipt["missed"] == 1


def test_the_exit_takes_no_second_checkpoint_of_a_step_that_was_saved(tmp_path: Path) -> None:
    job, seen = make(), Commits()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=10**6), sinks=(seen,)) as ck:
        for step in ck.steps(4):
            job.train(step)
        ck.save(metrics={"loss": 1.5})
        ck.poll()
    assert len(seen.versions) == 1
    wait_agent_gone(tmp_path)
    with ckpt.open(tmp_path) as run:
        (found,) = run.checkpoints
        assert (found.step, found.metrics) == (4, {"loss": 1.5})


@pytest.mark.parametrize("what", ["value", "tensor", "data", "draw"])
def test_the_exit_saves_what_has_changed_since_the_step_was_saved(what: str, tmp_path: Path) -> None:
    job, seen = make(), Commits()
    state: dict[str, Any] = {**job.state, "best": 0.0}
    with ckpt.Checkpointer(tmp_path, state, policy=ckpt.Every(steps=10**6), sinks=(seen,)) as ck:
        for step in ck.steps(4):
            job.train(step)
        ck.save()
        weight = next(job.model.parameters())
        if what == "value":
            state["best"] = 2.0
        elif what == "tensor":
            with torch.no_grad():
                weight.mul_(2.0)
        elif what == "data":
            weight.data.view(-1).numpy()[0] = 7.0  # which moves no version counter
        else:
            torch.rand(1)
    assert len(seen.versions) == 2


def test_an_agent_that_hangs_stops_training_once_and_saves_when_it_wakes_up(tmp_path: Path) -> None:
    job, seen = make(), Commits()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=1), sinks=(seen,)) as ck:
        pid = agent_pid(str(tmp_path))
        assert pid is not None
        for step in ck.steps(60):
            if step == 5:
                os.kill(pid, signal.SIGSTOP)
            job.train(step)
            if step == 50:
                assert seen.names.count("save.failed") == 45
                os.kill(pid, signal.SIGCONT)
                ck.step()
                ck.save().wait("store")  # by then it has answered what was asked before
    assert steps_of(seen)[-10:] == list(range(51, 61))


def test_the_default_policy_takes_a_first_checkpoint_at_once(tmp_path: Path) -> None:
    job, seen = make(), Commits()
    with ckpt.Checkpointer(tmp_path, job.state, sinks=(seen,)) as ck:
        for step in ck.steps(100_000):
            job.train(step)
            if seen.versions:
                break
    assert "policy.first" in seen.names
