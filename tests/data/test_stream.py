"""Streams of Hugging Face's datasets: workers, shuffle buffers, other numbers of ranks, and what is refused."""

from __future__ import annotations

import itertools
import random
import sys
import types
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.distributed import split_dataset_by_node

import ckpt
from ckpt.data import Loader, StreamLoader

SIZE = 62


def stream(shards: int = 6, buffer: int = 0) -> datasets.IterableDataset:
    """Numbers from 0 on, in shards of 10 or 11, which no batch of 4 divides."""
    numbers = datasets.Dataset.from_dict({"n": list(range(SIZE))}).to_iterable_dataset(num_shards=shards)
    return numbers.shuffle(seed=1, buffer_size=buffer) if buffer else numbers


def noisy(sample: dict[str, int]) -> dict[str, Any]:
    return {**sample, "noise": random.random()}


def lists(batches: Any) -> list[list[int]]:
    return [batch["n"].tolist() for batch in batches]


def endless(loader: StreamLoader) -> Any:
    while True:
        yield from loader


@pytest.mark.parametrize("buffer", [0, 7], ids=["plain", "buffer"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_any_batch_of_a_stream_goes_on_with_the_next(workers: int, buffer: int) -> None:
    """5 shards, which 2 workers do not divide evenly. The second epoch begins after 17 batches."""
    loader = StreamLoader(stream(5, buffer), 4, num_workers=workers)
    drawn, states = [], []
    for batch in itertools.islice(endless(loader), 22):
        drawn.append(batch["n"].tolist())
        states.append(loader.state_dict())
    assert sorted(itertools.chain(*drawn[:17])) == list(range(SIZE))
    assert (sorted(drawn[17]) == sorted(drawn[0])) == (buffer == 0)  # each epoch fills the buffer in another order
    for done in (3, 13, 16, 17, 20):
        again = StreamLoader(stream(5, buffer), 4, num_workers=workers)
        again.load_state_dict(states[done - 1])
        assert lists(itertools.islice(endless(again), 22 - done)) == drawn[done:]


def test_a_position_goes_on_under_python_without_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    path, module = ckpt.data.stream.__file__, types.ModuleType("optimized")
    monkeypatch.setitem(sys.modules, "optimized", module)
    exec(compile(Path(path).read_text(), path, "exec", optimize=1), module.__dict__)
    loader = module.StreamLoader(stream(), 4)
    drawn = lists(itertools.islice(loader, 5))
    again = module.StreamLoader(stream(), 4)
    again.load_state_dict(loader.state_dict())
    assert drawn + lists(again) == lists(module.StreamLoader(stream(), 4))


def test_random_samples_of_a_stream_are_the_same_after_a_restart() -> None:
    def make() -> StreamLoader:
        return StreamLoader(stream(buffer=7).map(noisy), 4, num_workers=2)

    whole = [batch["noise"].tolist() for batch in make()]
    first, second = make(), make()
    for _ in itertools.islice(first, 7):
        pass
    second.load_state_dict(first.state_dict())
    assert [batch["noise"].tolist() for batch in second] == whole[7:]


def test_any_numbers_of_ranks_and_workers_draw_each_sample_once_an_epoch() -> None:
    """Each start has (world, workers, batches). Some ranks end their epoch before others, and begin the next one."""
    states: list[dict[str, Any]] = []
    drawn: dict[int, list[int]] = {0: [], 1: []}
    for world, workers, count in [(1, 2, 3), (4, 0, 2), (2, 1, 1), (3, 0, 3), (6, 0, 1), (1, 0, 99)]:
        loaders = [StreamLoader(stream(), 4, rank=rank, world=world, num_workers=workers) for rank in range(world)]
        for rank, loader in enumerate(loaders):
            if states:
                loader.reshard(states, rank, world)
        for loader in loaders:
            epoch = loader.epoch
            drawn[epoch] += itertools.chain(*lists(itertools.islice(loader, count)))
        states = [loader.state_dict() for loader in loaders]
    assert sorted(drawn[0]) == list(range(SIZE))
    assert len(set(drawn[1])) == len(drawn[1])


def test_a_stream_restored_at_its_end_ends_once_more() -> None:
    loader = StreamLoader(stream(), 4)
    batches = iter(loader)
    for _ in range(18):
        next(batches)
    at_end = loader.state_dict()
    assert next(batches, None) is None
    assert loader.epoch == 1
    again = StreamLoader(stream(), 4)
    again.load_state_dict(at_end)
    assert [len(list(again)) for _ in range(2)] == [0, 18]


def test_a_dataset_of_hugging_face_with_a_length_works_as_it_is() -> None:
    numbers = datasets.Dataset.from_dict({"n": list(range(SIZE))})
    whole = lists(Loader(numbers, 8, num_workers=2))
    assert sorted(itertools.chain(*whole)) == list(range(SIZE))
    first, second = Loader(numbers, 8), Loader(numbers, 8, num_workers=1)
    assert lists(itertools.islice(first, 3)) == whole[:3]
    second.load_state_dict(first.state_dict())
    assert lists(second) == whole[3:]


def test_another_version_of_datasets_is_told_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version comes from the installed distribution: another one is first in the path."""
    (tmp_path / "datasets-9.1.dist-info").mkdir()
    (tmp_path / "datasets-9.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: datasets\nVersion: 9.1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=r"was tested with datasets 5\.2; this is 9\.1"):
        loader = StreamLoader(stream(), 4)
    assert len(list(loader)) == 18


def test_streams_that_would_lose_their_position_are_refused() -> None:
    with pytest.raises(ckpt.UsageError, match=r"a list_iterator has no num_shards, shard"):
        StreamLoader(iter([1]), 4)
    with pytest.raises(ckpt.UsageError, match="Workers are started for each epoch"):
        StreamLoader(stream(), 4, num_workers=1, persistent_workers=True)
    with pytest.raises(ckpt.UsageError, match="was split by node"):
        StreamLoader(split_dataset_by_node(stream(), 0, 2), 4)
    with pytest.raises(ckpt.UsageError, match=r"has 6 shards for 7 ranks: start at most as many"):
        next(iter(StreamLoader(stream(), 4, rank=0, world=7)))
    state = StreamLoader(stream(), 4, rank=0, world=2).state_dict()
    with pytest.raises(ckpt.UsageError, match=r"has 5 shards, and had 6"):
        StreamLoader(stream(5), 4, rank=0, world=1).reshard([state], 0, 1)
    with pytest.raises(ckpt.UsageError, match=r"the shards \[1, 3, 5\], and the state is of \[0, 2, 4\]"):
        StreamLoader(stream(), 4, rank=1, world=2).load_state_dict(state)
    loader = StreamLoader(stream(), 4)
    early = iter(loader)
    next(early)
    loader.begin_run()
    with pytest.raises(ckpt.UsageError, match="Make the iterator in the block"):
        next(early)
