"""Data that a restart would repeat or skip is named in the first steps, and what is said is what a restart does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen, Stateful

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own

BATCH, PER_EPOCH = 2, 12

Train = Callable[[Any], None]
Loop = Callable[[ckpt.Checkpointer, Train, int], None]


def loader(batches: int = PER_EPOCH, **options: Any) -> StatefulDataLoader:
    """In order, so that each batch tells its place."""
    data = list(range(BATCH * batches))
    return StatefulDataLoader(data, batch_size=BATCH, generator=torch.Generator().manual_seed(3), **options)


class Killed(Exception):
    """Raised by a loop behind a save."""


def start(path: Path, state: dict[str, Any], loop: Loop, steps: int) -> tuple[list[int], Seen]:
    """Runs a training job. Returns the numbers of the batches that it trained on, and its events."""
    model = torch.nn.Linear(1, 1)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    trained: list[int] = []
    seen = Seen()

    def train(batch: Any) -> None:
        trained.append(int(batch.flatten()[0]) // BATCH)
        model(torch.ones(1)).sum().backward()
        optim.step()
        optim.zero_grad()

    state = {"model": model, "optim": optim, **state}
    with contextlib.suppress(Killed), ckpt.Checkpointer(path, state, sinks=(seen,)) as ck:
        loop(ck, train, steps)
    wait_agent_gone(path)
    return trained, seen


def said(seen: Seen) -> list[str]:
    """What of it is of the data, but for what is said on entry."""
    mine = [event for event in seen.events if event.name.startswith(("loader.", "epoch."))]
    assert all(event.loud and event.message.endswith("(docs/guides/loops.md)") for event in mine)
    return [event.name for event in mine]


def endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


# ------------------------------------------------------------------------------------------- loops that restart rightly


def plain(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    for _, batch in zip(ck.steps(steps), endless(batches), strict=False):
        train(batch)


def accumulating(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    drawn = endless(batches)
    for _ in ck.steps(steps):
        for micro in islice(drawn, 4):
            last = micro
        train(last)


def packing(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    """As many batches as fill a sequence."""
    drawn = endless(batches)
    for step in ck.steps(steps):
        for _ in range(1 + (step in (2, 3, 9))):
            batch = next(drawn)
        train(batch)


def by_epochs(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    """Ends its steps itself, and counts the epoch before it evaluates and saves. It may stop within an epoch."""
    left = steps - ck.restored.step
    while True:
        for batch in batches:
            train(batch)
            ck.step()
            left -= 1
            if not left:
                return
        ck.state["epoch"] += 1
        ck.poll()
        ck.save().wait()


def a_part_of_each_epoch(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    """Five batches, then the next epoch."""
    left = steps - ck.restored.step
    while left:
        for batch in islice(batches, min(5, left)):
            train(batch)
            ck.step()
            left -= 1


def one_step_an_epoch(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    for _ in ck.steps(steps):
        for batch in batches:
            last = batch
        train(last)
        ck.state["epoch"] += 1


def with_evaluation(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    """By a loader that is in the state as well, and polls and saves at its end."""
    for step, batch in zip(ck.steps(steps), endless(batches), strict=False):
        train(batch)
        if step % 3 == 0:
            ck.step()
            for _ in ck.state["test"]:
                ck.poll()
            ck.state["tests"] += 1
            ck.save()


def one_batch_for_many_steps(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    drawn = endless(batches)
    batch = None
    for step in ck.steps(steps):
        if step % 5 == 1 or batch is None:
            batch = next(drawn)
        train(batch)


LOOPS = (
    plain,
    accumulating,
    packing,
    by_epochs,
    a_part_of_each_epoch,
    one_step_an_epoch,
    with_evaluation,
    one_batch_for_many_steps,
)


@pytest.mark.parametrize(("loop", "workers"), [*((loop, 0) for loop in LOOPS), (plain, 2), (by_epochs, 2)])
def test_of_data_that_restarts_rightly_nothing_is_said(loop: Any, workers: int, tmp_path: Path) -> None:
    for steps in (7, 40):  # the second one in the midst of an epoch
        made = loader(num_workers=workers, persistent_workers=workers > 0)
        state = {"loader": made, "rare": loader(), "test": loader(3), "epoch": 0, "tests": 0}
        trained, seen = start(tmp_path, state, lambda *given, made=made: loop(made, *given), steps)
        assert said(seen) == []
        assert len(trained) == (steps if steps == 7 else 33)
        made._iterator = None  # and with it the workers


class Batches:
    """A loader as the guide has it. `counts`: whether it says where it is."""

    def __init__(self, counts: bool = True) -> None:
        self.position, self.counts = 0, counts

    def __iter__(self) -> Iterator[Any]:
        while self.position < 3:
            self.position += 1
            yield torch.tensor([BATCH * (self.position - 1)])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position if self.counts else 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


# ------------------------------------------------------------------------------------------ loops that restart wrongly


def test_an_iterator_from_before_the_block_is_named_at_the_first_step(tmp_path: Path) -> None:
    for steps in (1, 3):
        made = loader(num_workers=1)
        batches = iter(made)
        trained, seen = start(tmp_path, {"loader": made}, lambda *given, it=batches: plain(it, *given), steps)
        assert trained == [0, 1][: len(trained)], "each start begins at the first batch again"
        assert [name for name in said(seen) if name != "loader.unshielded"] == ["loader.early"]
        assert seen.named("loader.early")[0].data == {"loader": "loader"}
        made._iterator = None
        del batches


@pytest.mark.parametrize("kind", ["own", "own, that does not count", "another is drawn from"])
def test_a_loader_that_does_not_move_is_named_after_sixteen_steps(kind: str, tmp_path: Path) -> None:
    for steps in (15, 40):
        made = loader() if kind == "another is drawn from" else Batches(counts=kind == "own")
        drawn = loader() if kind == "another is drawn from" else made
        state: dict[str, Any] = {"loader": made}
        _, seen = start(tmp_path / str(steps), state, lambda *given, it=drawn: plain(it, *given), steps)
        assert said(seen) == (["loader.not_moving"] if steps > 16 and kind != "own" else [])
    assert [event.data for event in seen.named("loader.not_moving")] == [{"loaders": ["loader"]}] * (kind != "own")


def the_wrong_way_round(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    for batch, _ in zip(endless(batches), ck.steps(steps), strict=False):
        train(batch)


def prefetching(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    """As what copies the next batch to a device while this one is trained on."""
    drawn = endless(batches)
    coming = next(drawn)
    for _ in ck.steps(steps):
        batch, coming = coming, next(drawn)
        train(batch)


def in_micro_batches(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    """Prefetches, and accumulates."""
    drawn = endless(batches)
    coming = next(drawn)
    for _ in ck.steps(steps):
        for _ in range(2):
            batch, coming = coming, next(drawn)
        train(batch)


@pytest.mark.parametrize(("loop", "workers"), [(the_wrong_way_round, 0), (prefetching, 2), (in_micro_batches, 0)])
def test_batches_that_are_drawn_ahead_are_counted_and_a_restart_skips_them(
    loop: Any, workers: int, tmp_path: Path
) -> None:
    trained: list[int] = []
    for steps in (10, 20):
        made = loader(100, num_workers=workers)
        more, seen = start(tmp_path, {"loader": made}, lambda *given, made=made: loop(made, *given), steps)
        trained += more
        (event,) = seen.named("loader.ahead")
        assert event.data == {"loader": "loader", "batches": 1}
        assert said(seen) == ["loader.ahead"]
        made._iterator = None
    each = 2 if loop is in_micro_batches else 1
    assert [b - a for a, b in pairwise(trained)] == [*[each] * 9, each + 1, *[each] * 9]


@pytest.mark.parametrize("late", [False, True])
def test_an_epoch_that_is_counted_behind_the_save_is_named_and_made_twice(late: bool, tmp_path: Path) -> None:
    def loop(ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
        while ck.state["epoch"] < 2:
            for batch in ck.state["loader"]:
                train(batch)
                ck.step()
            if not late:
                ck.state["epoch"] += 1
            ck.save().wait()
            if ck.state["epoch"] + late == steps:  # it is killed there, as far as the store can tell
                ck.state["loader"], ck.state["epoch"] = Batches(), 2
                return
            if late:
                ck.state["epoch"] += 1

    trained, seen = start(tmp_path, {"loader": loader(4), "epoch": 0}, loop, 0)
    assert trained == [0, 1, 2, 3] * 2
    assert said(seen) == (["epoch.repeated"] if late else [])
    if late:
        assert seen.named("epoch.repeated")[0].data == {"counter": "epoch"}


@pytest.mark.parametrize(("batches", "late"), [(5, False), (5, True), (4, True)])
def test_an_epoch_with_a_short_last_group_is_counted_where_its_data_ends(
    batches: int, late: bool, tmp_path: Path
) -> None:
    """Two batches make a step. If the epoch is counted after the loop over the groups, and the last group is short, a
    restart after that group repeats the epoch. An event says so."""

    def one_epoch(state: dict[str, Any]) -> Iterator[Any]:
        """As in the guide."""
        yield from state["loader"]
        state["epoch"] += 1

    def loop(ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
        ended = ck.restored.step
        while ck.state["epoch"] < 3:
            drawn = iter(ck.state["loader"]) if late else one_epoch(ck.state)
            while group := list(islice(drawn, 2)):
                train(group[0])
                ck.step()
                ended += 1
                if ended == steps:
                    ck.save().wait("store")
                    raise Killed
            ck.state["epoch"] += late

    groups, is_repeated = -(-batches // 2), late and batches == 5
    whole, seen = start(tmp_path / "whole", {"loader": loader(batches), "epoch": 0}, loop, 0)
    assert len(whole) == 3 * groups
    assert said(seen) == ["epoch.repeated"] * is_repeated
    before, _ = start(tmp_path / "killed", {"loader": loader(batches), "epoch": 0}, loop, groups)
    after, _ = start(tmp_path / "killed", {"loader": loader(batches), "epoch": 0}, loop, 0)
    assert before + after == (whole[:groups] if is_repeated else []) + whole


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(BATCH * PER_EPOCH))


class Streaming(Stream):
    """The same, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < BATCH * PER_EPOCH:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("kind", [Stream, Streaming])
def test_an_iterable_dataset_without_a_state_is_named_at_the_first_step(kind: Any, tmp_path: Path) -> None:
    trained: list[int] = []
    for steps in (2, 4, 5):
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
        made = StatefulDataLoader(kind(), batch_size=BATCH, generator=torch.Generator(), **options)
        more, seen = start(tmp_path, {"loader": made}, lambda *given, made=made: plain(made, *given), steps)
        trained += more
        assert said(seen) == (["loader.inexact"] if kind is Stream else [])
        made._iterator = None
    assert trained == ([0, 1, 2, 3, 6] if kind is Stream else [0, 1, 2, 3, 4]), "the second restart skips"


# ------------------------------------------------------------------------------------------------- no loader at all


def counting(batches: Any, ck: ckpt.Checkpointer, train: Train, steps: int) -> None:
    for _, batch in zip(ck.steps(steps), batches, strict=False):
        train(batch)
        ck.state["samples"] = ck.state.get("samples", 0) + BATCH


@pytest.mark.parametrize(
    ("state", "loop", "names"),
    [
        ({}, plain, ["loader.missing"]),
        ({"epoch": 0}, plain, ["loader.missing"]),
        ({"samples": 0}, counting, []),
        ({"trainer": Stateful(dict)}, plain, []),  # which may know where the data is
    ],
)
def test_a_state_without_a_loader_is_named_where_nothing_in_it_may_know(
    state: dict[str, Any], loop: Any, names: list[str], tmp_path: Path
) -> None:
    trained, seen = start(tmp_path, state, lambda *given: loop(loader(), *given), 2)
    assert said(seen) == names
    more, seen = start(tmp_path, state, lambda *given: loop(loader(), *given), 4)
    assert said(seen) == names
    assert trained == more == [0, 1], "as it is said: the data begin again"
