"""How a loop may be left: whatever is saved then is of the step that it is said to be of, or nothing is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ckpt
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen

RARELY = ckpt.Every(seconds=600)


class Ones(torch.optim.Optimizer):
    """Adds one to each parameter in turn; `stop` is called before the last one of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.stop: Callable[[], None] = lambda: None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        *first, last = self.param_groups[0]["params"]
        for param in first:
            param.add_(1)
        self.stop()
        last.add_(1)


class Run:
    """A model whose parameters say how many updates they have had."""

    def __init__(self, url: Path, **options: Any) -> None:
        self.url = url
        self.model = torch.nn.Linear(2, 2)
        for param in self.model.parameters():
            torch.nn.init.zeros_(param)
        self.optim = Ones(self.model.parameters())
        self.seen = Seen()
        state = {"model": self.model, "optim": self.optim}
        self.ck = ckpt.Checkpointer(url, state, **{"policy": RARELY, "sinks": (self.seen,)} | options)

    @property
    def updates(self) -> tuple[float, float]:
        return self.model.weight[0, 0].item(), self.model.bias[0].item()


def came_back(url: Path) -> tuple[int, tuple[float, float]]:
    """The step that is restored, and the updates that are in it."""
    wait_agent_gone(url)
    run = Run(url)
    with run.ck as ck:
        return ck.restored.step, run.updates


def own_loop(run: Run, ck: ckpt.Checkpointer) -> None:
    for step in range(1, 10):
        run.optim.step()
        if step == 4:
            break
        ck.step(step)


def steps_ended_by_hand(run: Run, ck: ckpt.Checkpointer) -> None:
    for step in ck.steps(10):
        run.optim.step()
        ck.step()
        if step == 3:
            run.optim.step()
            break


def polish(run: Run, ck: ckpt.Checkpointer) -> None:
    for _ in ck.steps(3):
        run.optim.step()
    run.optim.step()


def by_hand(run: Run, ck: ckpt.Checkpointer) -> None:
    for step in ck.steps(10):
        ck.fence()
        with torch.no_grad():
            run.model.weight += 1
            run.model.bias += 1
        if step == 4:
            break


@pytest.mark.parametrize("train", [own_loop, steps_ended_by_hand, polish, by_hand])
def test_an_update_that_no_step_has_ended_makes_one_at_the_end_of_the_block(
    tmp_path: Path, train: Callable[[Run, ckpt.Checkpointer], None]
) -> None:
    run = Run(tmp_path)
    with run.ck as ck:
        train(run, ck)
    assert run.updates == (4, 4)
    assert came_back(tmp_path) == (4, (4, 4))


@pytest.mark.parametrize(("updates", "code", "saved"), [(1, 0, 3), (1, None, 3), (0, 0, 2), (1, 1, 0)])
def test_a_loop_that_exits_with_success_is_saved_as_if_it_had_ended(
    tmp_path: Path, updates: int, code: int | None, saved: int
) -> None:
    """`updates`: in the step that exits."""
    run = Run(tmp_path)
    with pytest.raises(SystemExit), run.ck as ck:  # noqa: PT012
        for step in ck.steps(10):
            if step < 3 or updates:
                run.optim.step()
            if step == 3:
                sys.exit(code)
    assert came_back(tmp_path) == (saved, (saved, saved))


def test_a_success_whose_last_step_cannot_be_saved_is_a_failure(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", limits=ckpt.Limits(exit_s=5))
    with pytest.raises(ckpt.CommitFailed), run.ck as ck:  # noqa: PT012
        for _ in ck.steps(10):
            run.optim.step()
            run.optim.stop = lambda: sys.exit(0)
    assert came_back(tmp_path / "run") == (0, (0, 0))


def behind_a_boundary(run: Run, ck: ckpt.Checkpointer) -> None:
    for step in ck.steps(10):
        run.optim.step()
        if step == 6:
            ck.step()
            ck.fence()
            break


def behind_a_loop_whose_loader_has_ended(run: Run, ck: ckpt.Checkpointer) -> None:
    """zip() is in the next body by then."""
    for _ in range(3):
        for _step, _batch in zip(ck.steps(12), range(2), strict=False):
            run.optim.step()
        ck.fence()


@pytest.mark.parametrize("train", [behind_a_boundary, behind_a_loop_whose_loader_has_ended])
def test_weights_that_are_swapped_behind_a_step_make_no_other_step(
    tmp_path: Path, train: Callable[[Run, ckpt.Checkpointer], None]
) -> None:
    run = Run(tmp_path)
    with run.ck as ck:
        train(run, ck)
    assert came_back(tmp_path) == (6, (6, 6))


def test_ctrl_c_that_is_caught_while_a_step_ends_makes_no_other_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    with run.ck as ck:
        saver = ck._block.saver
        boundary = saver.note_boundary

        def interrupted(step: int) -> None:
            boundary(step)
            if step == 4:
                interrupt()

        monkeypatch.setattr(saver, "note_boundary", interrupted)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for _ in ck.steps(10):
                run.optim.step()
        monkeypatch.undo()
    assert came_back(tmp_path) == (4, (4, 4))


# ------------------------------------------------------------------------------------------------- no update at all


class Scaled:
    """A model with a buffer, whose scaler skips the update of step SKIPPED."""

    SKIPPED = 3

    def __init__(self, url: Path) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        state = {"model": self.model, "optim": self.optim, "scaler": self.scaler}
        self.ck = ckpt.Checkpointer(url, state, policy=RARELY)

    @property
    def batches(self) -> float:
        return self.model[1].num_batches_tracked.item()

    def train(self, step: int) -> None:
        loss = self.model(torch.randn(4, 2)).square().sum() * (torch.inf if step == self.SKIPPED else 1.0)
        self.optim.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_step_whose_update_a_scaler_has_skipped_ends_as_any_other(tmp_path: Path, own_loop: bool) -> None:
    """And before that nothing is saved."""
    run = Scaled(tmp_path)
    with run.ck as ck:
        for step in range(1, 10) if own_loop else ck.steps(10):
            run.train(step)
            if step == run.SKIPPED:
                with pytest.raises(ckpt.UsageError, match=r"call ck\.step\(\) first"):
                    ck.save()
                break
            ck.step()
            ck.save()
    wait_agent_gone(tmp_path)
    again = Scaled(tmp_path)
    with again.ck as ck:
        assert (ck.restored.step, again.batches, again.scaler.get_scale()) == (3, 3, 2.0)


# ------------------------------------------------------------------------------------------------- half an update


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("saved", [False, True])
def test_an_update_that_was_left_in_the_middle_is_not_saved_and_the_exit_says_so(tmp_path: Path, saved: bool) -> None:
    """If the step before was saved, the exit is in order."""
    run, failed = Run(tmp_path), pytest.raises(ckpt.CommitFailed, match=r"Ones\.step\(\) has begun and not ended")
    with contextlib.nullcontext() if saved else failed, run.ck as ck:
        for step in ck.steps(10):
            run.optim.stop = interrupt if step == 4 else lambda: None
            try:
                run.optim.step()
            except KeyboardInterrupt:
                break
            if saved or step == 1:
                ck.step()
                ck.save()
    assert run.updates == (4, 3)
    (said,) = run.seen.named("optimizer.interrupted")
    assert said.loud
    assert came_back(tmp_path) == ((3, (3, 3)) if saved else (1, (1, 1)))


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_error_of_the_users_own_hook_before_an_update_leaves_no_half_of_one(
    tmp_path: Path, everywhere: bool
) -> None:
    """For example of a hook that clips gradients, and raises if they are not finite."""
    run, refused = Run(tmp_path), 0

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if ck.receipt["end_step"] == 2 and not refused:
            raise ArithmeticError

    with run.ck as ck:
        register = register_optimizer_step_pre_hook if everywhere else run.optim.register_step_pre_hook
        hook = register(check)
        try:
            for _ in range(4):
                try:
                    run.optim.step()
                except ArithmeticError:
                    refused += 1
                    continue
                ck.step()
        finally:
            hook.remove()
    assert refused == 1
    assert not run.seen.named("optimizer.interrupted")
    assert came_back(tmp_path) == (3, (3, 3))
    run.optim.step()
    assert not run.optim._optimizer_step_pre_hooks, "ours are gone"


def test_within_an_update_nothing_is_saved_and_after_it_all_is_well(tmp_path: Path) -> None:
    """As in the closure of an LBFGS, or where one optimizer is another's part."""
    run, inner = Run(tmp_path), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)

    def within() -> None:
        inner.step()
        run.ck.poll()
        handle = run.ck.save() if not run.seen.named("save.failed") else None
        if handle is not None:
            with pytest.raises(ckpt.SaveFailed):
                handle.wait(timeout_s=60)

    with run.ck as ck:
        run.optim.stop = within
        for _ in ck.steps(3):
            run.optim.step()
    assert came_back(tmp_path) == (3, (3, 3))


# ------------------------------------------------------------------------------------------------- called within ckpt


def test_who_asks_ckpt_for_something_while_it_is_at_work_is_refused(tmp_path: Path) -> None:
    """For example a signal's handler saves, and the signal comes while a step ends. Here the sink of an event does
    it."""
    errors: list[str] = []

    def ask(event: ckpt.Event) -> None:
        if event.name == "optimizer.interrupted":
            for each in (run.ck.save, run.ck.step, run.ck.poll, run.ck.wait, run.ck.fence, handles[0].wait):
                try:
                    each()
                except ckpt.UsageError as exc:
                    errors.append(str(exc))

    run, handles = Run(tmp_path, sinks=(ask,)), list[ckpt.Handle]()
    with pytest.raises(ZeroDivisionError), run.ck as ck:  # noqa: PT012
        handles.append(ck.save())
        run.optim.stop = interrupt
        with pytest.raises(KeyboardInterrupt):
            run.optim.step()
        ck.step()
        ck.save()  # it is refused no longer
        raise ZeroDivisionError
    assert len(errors) == 6
    assert all("while ckpt is at work" in error for error in errors)


@pytest.mark.parametrize("interrupts", [False, True])
def test_what_a_sink_does_while_the_optimizer_waits_for_a_copy_neither_hangs_nor_leaves_half_an_update(
    tmp_path: Path, interrupts: bool
) -> None:
    """The sink saves, and nothing could end that save; or Ctrl-C comes in the sink."""
    told: list[BaseException] = []

    def sink(event: ckpt.Event) -> None:
        if event.name == "snapshot.abandoned" and not told:
            try:
                if interrupts:
                    raise KeyboardInterrupt
                ck.save()
            except (ckpt.UsageError, KeyboardInterrupt) as exc:
                told.append(exc)
                if interrupts:
                    raise

    model = torch.nn.Linear(512, 512)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.Checkpointer(tmp_path, {"model": model, "optim": optim}, policy=RARELY, sinks=(sink,)) as ck:
        for step in ck.steps(8):
            if step == 8:
                with torch.no_grad():
                    model.weight += 1  # without ck.fence(), under the copy
            model(torch.ones(512)).sum().backward()
            try:
                optim.step()
            except KeyboardInterrupt:
                break
            ck.step()
            if step < 8:
                ck.save()
    (error,) = told
    assert interrupts or "while ckpt is at work" in str(error)
    assert ck.receipt["committed_step"] == (7 if interrupts else 8)


# ------------------------------------------------------------------------------------------------- used otherwise


def test_a_checkpointer_is_entered_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.ck as ck:
        for _ in ck.steps(2):
            run.optim.step()
    with pytest.raises(ckpt.UsageError, match="was entered before; make one for each `with`"), run.ck:
        pass
    assert came_back(tmp_path) == (2, (2, 2))


def test_a_loop_over_steps_within_another_one_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ckpt.UsageError, match=r"a loop over ck\.steps\(\) has run within"), run.ck as ck:  # noqa: PT012
        for _ in ck.steps(4):
            run.optim.step()
            for _ in ck.steps(3):
                run.optim.step()
    assert ck.receipt["end_step"] == 3
