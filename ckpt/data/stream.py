"""`StreamLoader`: torch's DataLoader for a stream in shards (of Hugging Face's `datasets`), with an exact position.

Guarantees:

- The position is one entry for each shard of the stream: its epoch, how many samples of it the loop was handed, and the
  shard's own state. A worker sends the entry with each batch, so what it has read ahead does not count.
- A shard belongs to one rank and one worker at a time. After a restart with another number of ranks or workers the
  shards are dealt out anew, and each goes on where it was. So each sample comes once an epoch.
- With the same numbers the batches come in the same order as without the restart.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

import ckpt
from ckpt.data.loader import Turns, check_ranks, find_ranks, seed_generators

TESTED = "5.2"  # the version of datasets; it is read in places that are not public
NEEDED = ("num_shards", "shard", "state_dict", "load_state_dict")


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where a shard stands: `samples` of `epoch` were handed out. `state`: the shard's own; None: at the beginning."""

    epoch: int = 0
    samples: int = 0
    state: Any = None


class StreamLoader(DataLoader[Any]):
    """A DataLoader over an iterable dataset in shards. Its position is exact with workers, at any batch.

    dataset: has num_shards, shard(num_shards=, index=), state_dict() and load_state_dict(), as the IterableDataset of
        Hugging Face's `datasets`. Do not split it by node: this class does.
    batch_size: samples of one batch. All samples of a batch are of one shard, so each shard ends with a short batch,
        which drop_last drops.
    rank, world: the data-parallel rank and the number of them (default: those of torch.distributed).
    options: those of DataLoader, but for persistent_workers.

    An iterator hands out what is left of the present epoch of this rank's shards. Ranks may have different numbers of
    batches. As in `Loader`, only one iterator is in use at a time, and workers' generators are seeded for each batch.

    A stream with a shuffle buffer is read again from the shard's beginning at a restore: the buffer is in no state.

    Errors: UsageError for a dataset or an option that would lose the position, and for fewer shards than ranks."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        drop_last: bool = False,
        rank: int | None = None,
        world: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> None:
        if missing := [name for name in NEEDED if not hasattr(dataset, name)]:
            raise ckpt.UsageError(
                f"ckpt.data.StreamLoader: a {type(dataset).__name__} has no {', '.join(missing)}. It needs those of "
                "an IterableDataset of Hugging Face's datasets; for a dataset with a length use ckpt.data.Loader"
            )
        is_hugging_face = type(dataset).__module__.startswith("datasets.")
        if is_hugging_face and not (datasets := version("datasets")).startswith(f"{TESTED}."):
            text = f"ckpt.data.StreamLoader was tested with datasets {TESTED}; this is {datasets}, which may differ"
            warnings.warn(text, stacklevel=2)
        if getattr(dataset, "_distributed", None) is not None:
            raise ckpt.UsageError(
                "ckpt.data.StreamLoader: the dataset was split by node (split_dataset_by_node). The loader deals the "
                "shards out to the ranks: give it the whole dataset"
            )
        if options.get("persistent_workers") or not options.get("in_order", True):
            raise ckpt.UsageError(
                "ckpt.data.StreamLoader: persistent_workers and in_order=False lose the position; leave them out. "
                "Workers are started for each epoch"
            )
        self._ranks, self._turns = check_ranks(rank, world), Turns()
        self._positions = {shard: ShardPosition() for shard in range(dataset.num_shards)}
        # The shards of this rank in this epoch, by worker: the next one to be handed out comes first, in both lists.
        self._queues: list[list[int]] = []
        options.setdefault("generator", torch.Generator())
        reader = _Reader(dataset, batch_size, drop_last, collate_fn)
        super().__init__(reader, batch_size=None, collate_fn=_keep, **options)

    @property
    def epoch(self) -> int:
        """The number of the present epoch of this rank's shards, from 0."""
        return min(self._positions[shard].epoch for shard in self._own_shards())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        reader = self.dataset
        assert isinstance(reader, _Reader)
        if not any(self._queues):
            now = self.epoch
            due = [shard for shard in self._own_shards() if self._positions[shard].epoch == now]
            workers = max(1, self.num_workers)
            self._queues = [due[worker::workers] for worker in range(workers)]
        reader.begin(self._queues, self._positions)
        yield from self._turns.follow(self._draw(super().__iter__()))

    def _draw(self, records: Iterable[Any]) -> Iterator[Any]:
        for shard, position, batch in records:
            self._note(shard, position, is_ended=batch is None)
            if batch is not None:
                yield batch[0]

    def state_dict(self) -> dict[str, Any]:
        """The positions of this rank's shards."""
        own = {shard: self._positions[shard] for shard in self._own_shards()}
        shards = {str(shard): [each.epoch, each.samples, each.state] for shard, each in own.items()}
        return {"of": len(self._positions), "shards": shards, "queues": copy.deepcopy(self._queues)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on as the rank that gave `state`. Errors: UsageError if the stream has another number of shards, or the
        rank has other shards now."""
        own = self._own_shards()
        if set(own) != set(map(int, state["shards"])):
            raise ckpt.UsageError(
                f"ckpt.data.StreamLoader: this rank has the shards {own}, and the state is of "
                f"{sorted(map(int, state['shards']))}. For another number of ranks call reshard() with all their states"
            )
        self.reshard([state], *find_ranks(self._ranks))
        if len(state["queues"]) == max(1, self.num_workers):
            self._queues = copy.deepcopy(state["queues"])

    def reshard(self, states: Sequence[Mapping[str, Any]], rank: int, world: int) -> None:
        """Deals the shards of all former ranks out anew. A Checkpointer calls it after a change of the number of ranks.
        Errors: UsageError if the stream has another number of shards, or fewer than ranks."""
        count = len(self._positions)
        if any(state["of"] != count for state in states):
            raise ckpt.UsageError(
                f"ckpt.data.StreamLoader: the stream has {count} shards, and had {states[0]['of']} when the position "
                "was saved, which has no meaning for other shards: restore with the same files"
            )
        self._own_shards()
        for state in states:
            for shard, (epoch, samples, inner) in state["shards"].items():
                self._positions[int(shard)] = ShardPosition(epoch, samples, inner)
        self._queues = []
        self._turns.reset()

    def begin_run(self) -> None:
        """The block of a Checkpointer begins: iterators that were drawn from before are no longer valid."""
        self._turns.reset()

    def drawn_batches(self) -> tuple[object, int, bool]:
        """As that of `Loader`."""
        return self._turns.newest, self._turns.batches, self._turns.is_ended

    def _note(self, shard: int, position: ShardPosition, is_ended: bool) -> None:
        """The loop is handed a batch of a shard, or the shard has ended."""
        # Workers whose shards have all ended take no turn any more.
        turn = next(number for number, queue in enumerate(self._queues) if queue)
        queue = self._queues[turn]
        first = queue.pop(0)
        assert first == shard
        if not is_ended:
            queue.append(shard)
        self._queues = self._queues[turn + 1 :] + self._queues[: turn + 1]
        self._positions[shard] = position

    def _own_shards(self) -> list[int]:
        rank, world = find_ranks(self._ranks)
        if len(self._positions) < world:
            raise ckpt.UsageError(
                f"ckpt.data.StreamLoader: the stream has {len(self._positions)} shards for {world} ranks: start at "
                "most as many ranks, or write the data in more files"
            )
        return list(range(rank, len(self._positions), world))


class _Reader(IterableDataset[Any]):
    """Reads the shards of each worker's queue in turn. It yields (shard, position after it, [batch]), and at a shard's
    end (shard, where the next epoch begins, None). It goes to the workers as a copy."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, collate: Callable[[list[Any]], Any]) -> None:
        self.source = dataset
        self._batch_size, self._drop_last, self._collate = batch_size, drop_last, collate
        self._is_replayed = _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None))
        self._queues: list[list[int]] = []
        self._positions: dict[int, ShardPosition] = {}

    def begin(self, queues: list[list[int]], positions: dict[int, ShardPosition]) -> None:
        self._queues, self._positions = copy.deepcopy(queues), dict(positions)

    def __iter__(self) -> Iterator[tuple[int, ShardPosition, list[Any] | None]]:
        info = torch.utils.data.get_worker_info()
        if info is not None:
            # Else the dataset would divide each shard among the workers once more.
            torch.utils.data._utils.worker._worker_info = None
        queue = self._queues[0 if info is None else info.id]
        readers = {shard: self._read_shard(shard, info is not None) for shard in queue}
        while queue:
            shard = queue.pop(0)
            position, batch = next(readers[shard])
            if batch is not None:
                queue.append(shard)
            yield shard, position, batch

    def _read_shard(self, shard: int, in_worker: bool) -> Iterator[tuple[ShardPosition, list[Any] | None]]:
        start = self._positions[shard]
        data = self.source.shard(num_shards=self.source.num_shards, index=shard)
        if hasattr(data, "set_epoch"):
            data.set_epoch(start.epoch)
        # What is read again is read in the same batches, since each is seeded.
        samples = 0 if self._is_replayed else start.samples
        if start.state is not None:
            data.load_state_dict(start.state)
        items = iter(data)
        while True:
            if in_worker:
                seed_generators(f"{shard} {start.epoch} {samples}")
            is_replay = samples < start.samples
            count = min(self._batch_size, start.samples - samples) if is_replay else self._batch_size
            group = list(itertools.islice(items, count))
            if len(group) < (count if self._drop_last else 1):
                yield ShardPosition(start.epoch + 1), None
                return
            samples += len(group)
            if not is_replay:
                state = None if self._is_replayed else copy.deepcopy(data.state_dict())
                yield ShardPosition(start.epoch, samples, state), [self._collate(group)]


def _has_shuffle_buffer(iterable: Any) -> bool:
    """Whether a stream of Hugging Face's shuffles within a buffer, which its state does not include."""
    if iterable is None:
        return False
    inner = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", [])]
    return "BufferShuffled" in type(iterable).__name__ or any(map(_has_shuffle_buffer, inner))


def _keep(record: Any) -> Any:
    return record
