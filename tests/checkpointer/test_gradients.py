"""Loops in which a step of ckpt is a micro-batch: nothing is saved where gradients wait for an update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen

RARELY = ckpt.Every(seconds=600)
GATHERED = 4


class Run:
    """A model that is trained by one update for every GATHERED steps."""

    def __init__(self, url: Path, policy: ckpt.Every = RARELY) -> None:
        torch.manual_seed(0)
        self.url = url
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seen = Seen()
        state = {"model": self.model, "optim": self.optim}
        self.other: torch.optim.Optimizer = self.optim
        self.free = torch.nn.Linear(2, 2)
        self.ck = ckpt.Checkpointer(url, state, policy=policy, sinks=(self.seen,))

    def gather(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.model(torch.randn(2, 4, generator=generator)).sum().backward()

    def train(self, step: int) -> None:
        self.gather(step)
        if step % GATHERED == 0:
            self.optim.step()
            self.optim.zero_grad()


def came_back(url: Path) -> tuple[int, Run]:
    wait_agent_gone(url)
    run = Run(url)
    with run.ck as ck:
        return ck.restored.step, run


def test_only_steps_that_end_with_an_update_are_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, policy=ckpt.Every(seconds=0.05))
    until_s = time.monotonic() + 60
    with run.ck as ck:
        for step in ck.steps(100_000):
            run.train(step)
            time.sleep(0.005)
            if step % GATHERED == 0 and (len(run.seen.committed) >= 5 or time.monotonic() > until_s):
                break
    assert len(run.seen.committed) >= 5
    assert {step % GATHERED for step in run.seen.committed} == {0}
    assert len(run.seen.named("gradients.waiting")) <= 1


def test_a_save_due_between_two_updates_is_taken_after_the_next_one(tmp_path: Path) -> None:
    run = Run(tmp_path, policy=ckpt.Every(steps=6))
    with run.ck as ck:
        for step in ck.steps(24):
            run.train(step)
    assert run.seen.committed == [8, 12, 20, 24]


def test_a_save_between_two_updates_fails_and_the_next_update_is_saved(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.ck as ck:
        for step in ck.steps(8):
            run.train(step)
            if step in (6, 8):
                ck.step()
                handle = ck.save()
                if step == 6:
                    with pytest.raises(ckpt.SaveFailed, match="gradients of 2 steps wait"):
                        handle.wait("store", 60)
        handle.wait("store", 60)
    assert set(run.seen.committed) == {8}


def test_the_exit_between_two_updates_saves_the_step_and_says_what_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.ck as ck:
        for step in ck.steps(6):
            run.train(step)
    assert ["gradients of 2 steps" in event.message for event in run.seen.named("gradients.waiting")] == [True]
    assert came_back(tmp_path)[0] == 6


def step_and_keep(run: Run, step: int) -> None:
    """Gradients stay set from the update to the next backward pass."""
    if step % GATHERED == 0:
        run.optim.zero_grad()
        run.gather(step)
        run.optim.step()


def clear_to_zeros(run: Run, step: int) -> None:
    run.optim.zero_grad(set_to_none=False)
    if step % GATHERED == 0:
        run.gather(step)
        run.optim.step()


def skip_what_is_not_finite(run: Run, step: int) -> None:
    """As a scaler does that is not in the state."""
    run.optim.zero_grad()
    run.gather(step)
    if step % GATHERED:
        for param in run.model.parameters():
            param.grad = torch.full_like(param, torch.inf)
    else:
        run.optim.step()


def train_by_hand(run: Run, step: int) -> None:
    run.gather(step)
    with torch.no_grad():
        for param in run.model.parameters():
            param.sub_(param.grad if param.grad is not None else 0)
            param.grad = None
    run.gather(step)


def train_one_of_two(run: Run, step: int) -> None:
    """The other one, as a generator, has gradients that a critic's loss has left."""
    run.gather(step)
    run.other.step()


def train_what_no_optimizer_has(run: Run, step: int) -> None:
    for param in run.free.parameters():
        param.grad = torch.ones_like(param)


LOOPS = [
    *(step_and_keep, clear_to_zeros, skip_what_is_not_finite),
    *(train_by_hand, train_one_of_two, train_what_no_optimizer_has),
]


@pytest.mark.parametrize("train", LOOPS, ids=lambda train: train.__name__)
def test_gradients_that_wait_for_nothing_are_no_reason_not_to_save(
    tmp_path: Path, train: Callable[[Run, int], None]
) -> None:
    run = Run(tmp_path)
    run.other = torch.optim.SGD(run.model[1].parameters(), lr=0.1)
    run.ck.state.update({"other": run.other, "free": run.free})
    with run.ck as ck:
        for step in ck.steps(7):
            train(run, step)
        ck.save().wait("store", 60)
    assert run.seen.committed[0] == 7
    assert not run.seen.named("gradients.waiting")


def test_a_backward_pass_in_the_body_of_a_step_is_no_reason_not_to_save(tmp_path: Path) -> None:
    """A restart does that step again."""
    run = Run(tmp_path)
    with run.ck as ck:
        for step in ck.steps(3):
            run.optim.zero_grad()
            run.gather(step)
            if step == 3:
                ck.save().wait("store", 60)
            run.optim.step()
    assert run.seen.committed[0] == 2


@contextlib.contextmanager
def swapped_in(run: Run) -> Iterator[list[torch.Tensor]]:
    """Averaged weights are in the model. Yields its own, which are put back."""
    kept = [param.clone() for param in run.model.parameters()]
    for param in run.model.parameters():
        param.data.fill_(7.0)
    yield kept
    for param, was in zip(run.model.parameters(), kept, strict=True):
        param.data.copy_(was)


def test_averaged_weights_are_not_saved_and_it_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.ck as ck:
        for step in ck.steps(8):
            run.train(step)
            if step in (4, 8):
                ck.step()
                ck.save().wait("store", 60)
            if step == 8:
                with swapped_in(run) as kept:
                    ck.poll()
                    with pytest.raises(ckpt.SaveFailed, match="parameters are not those of the end of step 8"):
                        ck.save().wait("store", 60)
                ck.save().wait("store", 60)
    assert len(run.seen.named("weights.swapped")) == 1
    again = came_back(tmp_path)[1]
    assert all(map(torch.equal, again.model.parameters(), kept))


def test_a_request_to_leave_in_an_evaluation_with_other_weights_waits_for_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    monkeypatch.setenv("CKPT_NOTICE_FILE", str(tmp_path / "word"))
    run, word = Run(tmp_path / "run"), tmp_path / "word"
    with pytest.raises(ckpt.Leave), run.ck as ck:  # noqa: PT012
        for step in ck.steps(1000):
            run.gather(step)
            run.optim.step()
            run.optim.zero_grad()
            if step == 5:
                ck.step()
                ck.save().wait("store", 60)
                with swapped_in(run):
                    word.write_text("+60")
                    until_s = time.monotonic() + 60
                    while not run.seen.named("weights.swapped") and time.monotonic() < until_s:
                        ck.poll()
                        time.sleep(0.01)
            time.sleep(0.01)
    assert run.seen.named("weights.swapped")
    word.unlink()
    found, again = came_back(tmp_path / "run")
    assert found > 5
    assert not any(param.eq(7).any() for param in again.model.parameters())
