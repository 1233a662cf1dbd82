"""The order and the position: pure functions, over any sequence of world sizes, batch sizes and kills."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.data import Batches, Order, Position

starts = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=6
)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**64), st.booleans(), starts)
def test_any_world_sizes_and_kills_draw_each_index_once_an_epoch(
    size: int, seed: int, shuffle: bool, starts: list[tuple[int, int, int, int]]
) -> None:
    """Each start has a world, a batch size, the number of its batches, and how many of the last ones it loses."""
    order, saved, seen = Order(size, seed, shuffle), Position(), Counter()
    for world, batch_size, count, lost in starts:
        batches, position = Batches(size, batch_size, world), saved
        for number in range(count):
            if not batches.next_samples(position):
                position = batches.begin_next_epoch(position)
            shares = [batches.share(position, rank) for rank in range(world)]
            assert all(1 <= stop - start <= batch_size for start, stop in shares)
            assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1
            drawn = [(position.epoch, index) for a, b in shares for index in order.indices(position.epoch, a, b)]
            assert len(drawn) == batches.next_samples(position)
            before, position = position, batches.advance(position)
            if number < count - lost:
                # Else the kill came before this batch was saved, and the next start draws it again.
                saved = position
                places = range(before.samples, position.samples)
                seen.update((before.epoch + place // size, place % size) for place in places)
    total = saved.epoch * size + saved.samples
    assert seen == Counter({(number // size, number % size): 1 for number in range(total)})
    for epoch in range(total // size):
        assert sorted(order.indices(epoch, 0, size)) == list(range(size))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6), st.integers(0, 60))
def test_drop_last_drops_only_what_fills_no_whole_batch(size, batch_size, world, samples) -> None:
    batches, position = Batches(size, batch_size, world, drop_last=True), Position(3, min(samples, size))
    while count := batches.next_samples(position):
        assert count == batch_size * world
        position = batches.advance(position)
    assert 0 <= size - position.samples < batch_size * world
    assert batches.begin_next_epoch(position) == Position(4, 0)


def test_the_order_is_the_same_in_every_version() -> None:
    assert Order(10, seed=1).indices(0, 0, 10) == [2, 0, 1, 4, 6, 7, 3, 5, 8, 9]
    assert Order(10, seed=1).indices(1, 0, 10) == [9, 8, 5, 3, 2, 6, 1, 0, 4, 7]
    across = Order(10**8, seed=7).indices(2, 10**8 - 3, 10**8 + 2)
    assert across == [14620647, 58865836, 96490850, 55227825, 73098539]
    assert Order(5, shuffle=False).indices(2, 3, 7) == [3, 4, 0, 1]


@pytest.mark.parametrize("size", [2, 3, 5, 17])
def test_each_index_comes_as_often_at_each_place(size: int) -> None:
    """The chi-square statistic of (place, index) over 4000 epochs, against its mean of (size - 1)**2."""
    epochs = 4000
    counts = Counter(pair for epoch in range(epochs) for pair in enumerate(Order(size, seed=3).indices(epoch, 0, size)))
    expected = epochs / size
    chi = sum((counts[place, index] - expected) ** 2 / expected for place in range(size) for index in range(size))
    freedom = (size - 1) ** 2
    assert chi < freedom + 5 * (2 * freedom) ** 0.5 + 5


@pytest.mark.parametrize("size", [50_000, 100_000])
def test_neighbours_in_the_order_are_as_far_apart_as_by_chance(size: int) -> None:
    order = Order(size, seed=0).indices(0, 0, size)
    shuffled = random.Random(0).sample(range(size), size)

    def mean_step(numbers: list[int]) -> float:
        return sum(abs(a - b) for a, b in itertools.pairwise(numbers)) / (size - 1)

    assert mean_step(order) == pytest.approx(mean_step(shuffled), rel=0.01)
    assert sorted(order) == list(range(size))
    assert order != Order(size, seed=1).indices(0, 0, size)


def test_a_hundred_million_indices_take_no_memory() -> None:
    tracemalloc.start()
    drawn = {index for place in range(0, 10**8, 10**6) for index in Order(10**8).indices(0, place, place + 64)}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(drawn) == 6400
    assert peak < 2 << 20
