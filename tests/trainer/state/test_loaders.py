"""What ckpt says of a loader on entry is what a restart does to it: no more and no less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import data as plain
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

import ckpt
from ckpt.trainer.state.loaders import find_inexactness, load_loader_state, read_loader_state
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own

SAMPLES = list(range(40))
BATCH, PER_EPOCH, STEPS = 8, 5, 13
CUTS = (3, 5, 7)  # within an epoch, at its end, within the next

Make = Callable[[], Any]


def loader(**options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(SAMPLES, batch_size=BATCH, **options)


def own() -> torch.Generator:
    return torch.Generator().manual_seed(3)


KINDS: dict[str, Make] = {
    "in order, no generator": lambda: loader(),
    "in order": lambda: loader(generator=own()),
    "shuffle, no generator": lambda: loader(shuffle=True),
    "shuffle": lambda: loader(shuffle=True, generator=own()),
    "torchdata's sampler, no generator": lambda: loader(sampler=RandomSampler(SAMPLES)),
    "torchdata's sampler": lambda: loader(sampler=RandomSampler(SAMPLES), generator=own()),
    "distributed sampler": lambda: loader(sampler=StatefulDistributedSampler(SAMPLES, 1, 0), generator=own()),
    "torch's sampler": lambda: loader(sampler=plain.RandomSampler(SAMPLES), generator=own()),
    "torch's sampler, seeded": lambda: loader(sampler=plain.RandomSampler(SAMPLES, generator=own()), generator=own()),
    "torch's subset sampler": lambda: loader(sampler=plain.SubsetRandomSampler(SAMPLES), generator=own()),
}


def endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def train(batches: Any, steps: int) -> list[tuple[list[int], float]]:
    """The samples of each step, and what is random in it."""
    drawn = endless(batches)
    return [(sorted(next(drawn).tolist()), torch.rand(1).item()) for _ in range(steps)]


def restarted(make: Make, cut: int) -> list[tuple[list[int], float]]:
    """As from a checkpoint after `cut` steps: the loader's state and torch's are back, in new objects."""
    torch.manual_seed(1)
    first = make()
    before = train(first, cut)
    state, random = first.state_dict(), torch.get_rng_state()
    torch.manual_seed(2)
    second = make()
    second.load_state_dict(state)
    torch.set_rng_state(random)
    return before + train(second, STEPS - cut)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_a_loader_is_what_a_restart_does_to_it(kind: str) -> None:
    make = KINDS[kind]
    torch.manual_seed(1)
    undisturbed = train(make(), STEPS)
    found = [restarted(make, cut) for cut in CUTS]
    said = find_inexactness(make())
    whole = all(
        sorted(sample for samples, _ in run[at : at + PER_EPOCH] for sample in samples) == SAMPLES
        for run in found
        for at in (0, PER_EPOCH)
    )
    same_data = all([s for s, _ in run] == [s for s, _ in undisturbed] for run in found)
    same_random = all([r for _, r in run] == [r for _, r in undisturbed] for run in found)
    assert ("repeats some samples" in said) == (not whole), said
    assert ("order of the next epochs" in said) == (whole and not same_data), said
    assert ("draws one number more" in said) == (whole and same_data and not same_random), said


def test_what_is_said_is_said_on_entry_loudly_with_the_name_and_the_way_out(tmp_path: Path) -> None:
    seen = Seen()
    state = {"data": {"train": loader(shuffle=True), "test": KINDS["torchdata's sampler"]()}}
    with ckpt.Checkpointer(tmp_path, state, sinks=(seen,)):
        (event,) = seen.named("loader.inexact")
    wait_agent_gone(tmp_path)
    assert event.loud
    assert event.data == {"loader": "data.train"}
    assert "generator=torch.Generator()" in event.message


def test_loaders_of_other_makes_are_left_alone() -> None:
    class Mine:
        generator = None

        def __iter__(self) -> Iterator[int]:
            return iter(SAMPLES)

    assert find_inexactness(Mine()) == ""


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_set_after_entering_is_the_one_that_is_drawn(workers: int, tmp_path: Path) -> None:
    """At a fresh start and at a restart within an epoch: who asks a loader with workers for its position before it is
    iterated over has them sent what the sampler draws by then, in the order of epoch 0."""

    def start(steps: int) -> list[list[int]]:
        sampler = StatefulDistributedSampler(SAMPLES, 1, 0)
        batches = loader(sampler=sampler, generator=own(), num_workers=workers)
        drawn = []
        model = torch.nn.Linear(1, 1)
        optim = torch.optim.AdamW(model.parameters())  # has more state after a restore, which is looked at once more

        def epochs(state: dict[str, Any]) -> Iterator[Any]:
            while True:
                sampler.set_epoch(state["epoch"])
                yield from batches
                state["epoch"] += 1

        state = {"data": batches, "epoch": 3, "model": model, "optim": optim}
        with ckpt.Checkpointer(tmp_path, state) as ck:
            for _, batch in zip(ck.steps(steps), epochs(ck.state), strict=False):
                drawn.append(batch.tolist())
                model(torch.ones(1)).sum().backward()
                optim.step()
        batches._iterator = None  # and with it the workers
        wait_agent_gone(tmp_path)
        return drawn

    sampler = StatefulDistributedSampler(SAMPLES, 1, 0)
    undisturbed = []
    for epoch in (3, 4):
        sampler.set_epoch(epoch)
        undisturbed += [batch.tolist() for batch in loader(sampler=sampler)]
    cut = PER_EPOCH + 2
    assert start(cut) == undisturbed[:cut]
    assert start(2 * PER_EPOCH) == undisturbed[cut:]


SHORT = 11  # samples, so that the last batch of two is short, or is dropped


def passes(batches: StatefulDataLoader, epochs: range, stop_in_last: int | None = None) -> list[list[list[int]]]:
    """The batches of each epoch; of the last one only so many, where that is given."""
    found = []
    for epoch in epochs:
        if isinstance(batches.sampler, StatefulDistributedSampler):
            batches.sampler.set_epoch(epoch)
        most = stop_in_last if epoch == epochs[-1] else None
        found.append([batch.reshape(-1).tolist() for batch in islice(batches, most)])
    return found


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("by", [{"batch_size": None}, {"batch_size": 2}, {"batch_size": 2, "drop_last": True}], ids=str)
@pytest.mark.parametrize("kind", [StatefulDistributedSampler, RandomSampler])
def test_the_epoch_after_one_that_had_ended_is_whole(kind: Any, by: dict[str, Any], options: dict[str, Any]) -> None:
    """And so is the one after it. A restart within an epoch, after such a one or not, goes on in it."""

    def made(state: Any = None) -> StatefulDataLoader:
        samples = torch.arange(SHORT)
        sampler = kind(samples, 1, 0) if kind is StatefulDistributedSampler else kind(samples, generator=own())
        new = StatefulDataLoader(samples, sampler=sampler, generator=own(), **by, **options)
        if state is not None:
            load_loader_state(new, state)
            assert read_loader_state(new) == state
        return new

    undisturbed = passes(made(), range(5))
    assert all(undisturbed)
    first = made()
    for _ in first:  # within a pass, and behind its last batch, it is torchdata's own
        assert read_loader_state(first) == first.state_dict()
    first = made()
    assert passes(first, range(2)) == undisturbed[:2]
    at_end = read_loader_state(first)
    assert passes(made(at_end), range(2, 5)) == undisturbed[2:]
    from_torchdata = made()
    load_loader_state(from_torchdata, first.state_dict())  # as older checkpoints have it
    assert passes(from_torchdata, range(2, 5)) == undisturbed[2:]
    second = made(at_end)
    passes(second, range(2, 4), stop_in_last=3)
    assert passes(made(read_loader_state(second)), range(3, 5)) == [undisturbed[3][3:], undisturbed[4]]
