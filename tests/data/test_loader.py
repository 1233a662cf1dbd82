"""The loader in one process: workers, early iterators, the end of an epoch, and what is refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import ckpt
from ckpt.data import Loader


class Numbers(Dataset[int]):
    """Each sample is its own index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Each sample is random, by all generators, as augmentation is."""

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
]


def make(size: int = 20, batch_size: int = 4, **options: Any) -> Loader:
    return Loader(Numbers(size), batch_size, **options)


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def endless(loader: Loader) -> Any:
    while True:
        yield from loader


@pytest.mark.parametrize("options", WORKERS, ids=["main", "workers", "persistent"])
def test_a_state_of_any_batch_goes_on_with_the_next_one(options: dict[str, Any]) -> None:
    """The position counts what the loop was handed. Two persistent workers have fetched eight batches more."""
    whole = lists(itertools.islice(endless(make()), 12))
    loader = make(**options)
    drawn, states = [], []
    for batch in itertools.islice(endless(loader), 12):
        drawn.append(batch.tolist())
        states.append(loader.state_dict())
    assert drawn == whole
    other = make(**options)
    for done in (1, 4, 5, 7, 11):
        # The same loader, with a pass begun and left each time, as with a restore in a running process.
        other.load_state_dict(states[done - 1])
        assert lists(itertools.islice(endless(other), 12 - done)) == whole[done:]


def test_random_samples_of_workers_are_the_same_after_a_restart() -> None:
    def make_noisy() -> Loader:
        return Loader(Noisy(24), 4, num_workers=2)

    whole = [torch.stack(batch).tolist() for batch in make_noisy()]
    assert len({str(batch) for batch in whole}) == 6
    first, second = make_noisy(), make_noisy()
    for _ in itertools.islice(first, 3):
        pass
    second.load_state_dict(first.state_dict())
    assert [torch.stack(batch).tolist() for batch in second] == whole[3:]


def test_a_loader_draws_nothing_from_the_generators_of_the_training() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    lists(make(num_workers=1))
    lists(make())
    assert torch.equal(before[0], torch.get_rng_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_a_pass_that_was_restored_at_its_end_ends_once_more() -> None:
    """A loop that counts epochs behind its data then counts the one that it has not counted before the kill."""
    loader = make()
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    at_end = loader.state_dict()
    assert next(batches, None) is None
    after_end = loader.state_dict()
    for state, passes in ((at_end, [0, 5, 5]), (after_end, [5, 5, 5])):
        again = make()
        again.load_state_dict(state)
        assert [len(list(again)) for _ in range(3)] == passes
        assert again.epoch == at_end["epoch"] + (3 if passes[0] == 0 else 4)


def test_a_pass_left_at_its_last_batch_is_followed_by_the_next_epoch() -> None:
    loader = make()
    first = lists(itertools.islice(loader, len(loader)))
    second = lists(itertools.islice(loader, len(loader)))
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(20))
    assert first != second


def test_an_iterator_drawn_from_before_a_restore_is_refused_at_its_next_draw() -> None:
    loader = make()
    state = loader.state_dict()
    early, untouched = iter(loader), iter(loader)
    next(early)
    loader.load_state_dict(state)
    with pytest.raises(ckpt.UsageError, match="drawn from before a newer one"):
        next(early)
    assert lists(untouched) == lists(make())


def test_bad_options_and_states_are_refused_with_a_way_out() -> None:
    with pytest.raises(ckpt.UsageError, match=r"use ckpt\.data\.StreamLoader"):
        Loader(iter([1]), 4)
    with pytest.raises(ckpt.UsageError, match="in_order=False loses the position"):
        make(in_order=False)
    with pytest.raises(ckpt.UsageError, match=r"rank=1, world=None: give both"):
        make(rank=1)
    with pytest.raises(ckpt.UsageError, match="20 samples make no batch of 4 samples on each of 6 ranks: use drop_la"):
        next(iter(make(rank=0, world=6, drop_last=True)))
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ckpt.UsageError, match=r"has 21 samples, and had 20 when 4 of them"):
        make(21).load_state_dict(state)
    with pytest.raises(ckpt.UsageError, match=r"order has seed=0 .* the loader has seed=5"):
        make(seed=5).load_state_dict(state)
    with pytest.raises(ckpt.UsageError, match=r"different positions \(epoch 0: 4, epoch 0: 8\)"):
        make().reshard([state, state | {"samples": 8}], 0, 1)
    lists(loader)
    make(21).load_state_dict(loader.state_dict())
