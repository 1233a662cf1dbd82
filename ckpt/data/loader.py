"""`Loader`: torch's DataLoader for a dataset with a length, with an order and a position that are exact.

The position counts the batches that the loop was handed, not those that workers have fetched. It is the same number on
all ranks, so any number of ranks can go on from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import ckpt
from ckpt.data.order import Batches, Order, Position


class Loader(DataLoader[Any]):
    """A DataLoader that hands out each index of `dataset` once an epoch, over any restarts and numbers of ranks.

    batch_size: samples of one rank's batch. seed, shuffle: the order of epoch e depends on the seed, e and the length
        of the dataset. drop_last: see `Batches`, also for the short last batch.
    rank, world: the data-parallel rank and the number of them (default: those of torch.distributed).
    options: those of DataLoader: num_workers, persistent_workers, collate_fn, pin_memory, ...

    An iterator hands out what is left of the present epoch. Only one iterator is in use at a time: one that was drawn
    from before a newer one, before load_state_dict() or before the block of a Checkpointer raises UsageError when it
    is drawn from again. Workers' generators (torch's, NumPy's and Python's) are seeded anew for each batch, by the
    seed and the batch's place, so that random augmentation in workers is the same after a restart.

    Errors: UsageError for a dataset without a length, and for options that would break the order."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise ckpt.UsageError(
                f"ckpt.data.Loader: a {type(dataset).__name__} has no length and no places; use ckpt.data.StreamLoader"
            )
        if not options.get("in_order", True):
            raise ckpt.UsageError("ckpt.data.Loader: in_order=False loses the position; leave it out")
        if batch_size < 1:
            raise ckpt.UsageError(f"ckpt.data.Loader: batch_size={batch_size}: at least 1")
        self._turns = Turns()
        # A pass that ended before the checkpoint ends once more after the restore: the loop has not counted it yet.
        self._ends_again = False
        order = Order(len(dataset), seed, shuffle)
        sampler = _BatchSampler(order, batch_size, drop_last, check_ranks(rank, world))
        # With its own generator the loader draws nothing from torch's, which the training uses.
        options.setdefault("generator", torch.Generator())
        super().__init__(cast(Any, dataset), batch_sampler=sampler, **options)

    @property
    def epoch(self) -> int:
        """The number of the present epoch, from 0. It is counted when an iterator ends."""
        return self._sampler.position.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler, batches = self._sampler, self._sampler.batches()
        if not batches.next_samples(sampler.position) and not self._ends_again:
            # The iterator before was left at its last batch, without asking for another one.
            sampler.position = batches.begin_next_epoch(sampler.position)
        self._ends_again = False
        for batch in self._turns.follow(super().__iter__()):
            # Before the loop gets the batch: it may save as soon as it has the batch.
            sampler.position = batches.advance(sampler.position)
            yield batch
        sampler.position = batches.begin_next_epoch(sampler.position)

    def state_dict(self) -> dict[str, Any]:
        """The position of the job: the same on all ranks."""
        order, position = self._sampler.order, self._sampler.position
        return {
            "epoch": position.epoch,
            "samples": position.samples,
            "size": order.size,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of a state of any number of ranks and any batch size. Errors: UsageError if the state
        is of another order: another seed, or another length in mid-epoch."""
        order, samples = self._sampler.order, state["samples"]
        if samples in (0, state["size"]):
            # At an epoch's beginning or end a dataset may get another length.
            samples = order.size if samples else 0
        elif state["size"] != order.size:
            raise ckpt.UsageError(
                f"ckpt.data.Loader: the dataset has {order.size} samples, and had {state['size']} when {samples} of "
                f"them were handed out in epoch {state['epoch']}: the rest of the epoch cannot be told. Restore with "
                "the same data, or change it where an epoch has ended"
            )
        if (state["seed"], state["shuffle"]) != (order.seed, order.shuffle):
            raise ckpt.UsageError(
                f"ckpt.data.Loader: the checkpoint's order has seed={state['seed']} and shuffle={state['shuffle']}, "
                f"the loader has seed={order.seed} and shuffle={order.shuffle}: give the same ones, else samples would "
                "repeat and others would be skipped"
            )
        self._sampler.position, self._ends_again = Position(state["epoch"], samples), True
        self._turns.reset()

    def reshard(self, states: Sequence[Mapping[str, Any]], rank: int, world: int) -> None:
        """Goes to the position that `states` of all former ranks name. A Checkpointer calls it after a change of the
        number of ranks. Errors: those of load_state_dict; UsageError if the ranks were at different positions."""
        if any(state != states[0] for state in states):
            places = ", ".join(sorted({f"epoch {each['epoch']}: {each['samples']}" for each in states}))
            raise ckpt.UsageError(
                f"ckpt.data.Loader: the ranks were at different positions ({places}), so that no other number of ranks "
                f"can go on: start with {len(states)} ranks, and draw equally many batches on each"
            )
        self.load_state_dict(states[0])

    def begin_run(self) -> None:
        """The block of a Checkpointer begins: iterators that were drawn from before are no longer valid."""
        self._turns.reset()

    def drawn_batches(self) -> tuple[object, int, bool]:
        """(a mark of the newest iterator, how many batches it has handed out, whether it has ended), for the warnings
        of a Checkpointer. The mark is None before the first draw."""
        return self._turns.newest, self._turns.batches, self._turns.is_ended

    @property
    def _sampler(self) -> _BatchSampler:
        return cast(_BatchSampler, self.batch_sampler)


class Turns:
    """The iterators of one loader, of which only the newest may be drawn from. `newest`: a mark of that iterator; None:
    none has been drawn from since the state was restored. `batches`: how many it has handed out."""

    def __init__(self) -> None:
        self.newest: object | None = None
        self.batches = 0
        self.is_ended = False

    def reset(self) -> None:
        """From here on no iterator is valid that was drawn from before."""
        self.newest, self.batches, self.is_ended = None, 0, False

    def follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a new iterator. Errors: UsageError once the iterator is not the newest any more."""
        self.reset()
        self.newest = mark = object()
        for batch in batches:
            self.batches += 1
            yield batch
            if self.newest is not mark:
                raise ckpt.UsageError(
                    "ckpt.data: this iterator was drawn from before a newer one, before the state was restored or "
                    "before the block of the Checkpointer, so its batches are not the next ones. Make the iterator in "
                    "the block: batches = iter(loader) (docs/guides/data.md)"
                )
        self.is_ended = True


def find_ranks(given: tuple[int, int] | None) -> tuple[int, int]:
    """(rank, world): those that were given, else those of torch.distributed. Errors: UsageError if torchrun has started
    other ranks and torch.distributed does not know them."""
    if given is not None:
        return given
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if dist.is_available() and dist.is_torchelastic_launched():
        raise ckpt.UsageError(
            "ckpt.data: torchrun started this process, and torch.distributed is not initialised, so each rank would "
            "draw all samples: call torch.distributed.init_process_group() first, or give rank= and world="
        )
    return 0, 1


def check_ranks(rank: int | None, world: int | None) -> tuple[int, int] | None:
    """The ranks that a user gave. Errors: UsageError."""
    if rank is None and world is None:
        return None
    if rank is None or world is None or not 0 <= rank < world:
        raise ckpt.UsageError(f"ckpt.data: rank={rank}, world={world}: give both, with 0 <= rank < world, or neither")
    return rank, world


def seed_generators(key: str) -> None:
    """Seeds Python's, NumPy's and torch's generators of this process by a text, in every process alike."""
    seeds = random.Random(key)
    random.seed(seeds.getrandbits(64))
    np.random.seed(seeds.getrandbits(32))
    torch.manual_seed(seeds.getrandbits(63))


class _BatchSampler:
    """The batches of one rank from `position` to the end of the epoch, as lists of indices. The loader sets `position`
    to what the loop was handed; an iterator that has begun goes on ahead of it."""

    def __init__(self, order: Order, batch_size: int, drop_last: bool, ranks: tuple[int, int] | None) -> None:
        self.order, self.position = order, Position()
        self.batch_size, self.drop_last = batch_size, drop_last
        self._ranks = ranks

    def batches(self) -> Batches:
        """Errors: UsageError if an epoch has no batch, and if the number of ranks is not known."""
        batches = Batches(self.order.size, self.batch_size, find_ranks(self._ranks)[1], self.drop_last)
        if not batches.next_samples(Position()):
            raise ckpt.UsageError(
                f"ckpt.data.Loader: {self.order.size} samples make no batch of {self.batch_size} samples on each of "
                f"{batches.world} ranks" + (": use drop_last=False" if self.order.size else "")
            )
        return batches

    def __iter__(self) -> Iterator[list[int]]:
        batches, position, (rank, _) = self.batches(), self.position, find_ranks(self._ranks)
        while batches.next_samples(position):
            start, stop = batches.share(position, rank)
            indices = self.order.indices(position.epoch, start, stop)
            yield _SeededBatch(indices, f"{self.order.seed} {position.epoch} {start}")
            position = batches.advance(position)

    def __len__(self) -> int:
        """The batches of an epoch that begins at its first sample."""
        whole = self.batch_size * find_ranks(self._ranks)[1]
        return self.order.size // whole if self.drop_last else -(-self.order.size // whole)


class _SeededBatch(list[int]):
    """The indices of a batch. When a worker receives them, it seeds its generators for this batch.

    A worker unpickles the indices of a batch just before it fetches that batch, and fetches one at a time."""

    def __init__(self, indices: list[int], key: str) -> None:
        super().__init__(indices)
        self.key = key

    def __reduce__(self) -> tuple[Callable[[list[int], str], list[int]], tuple[list[int], str]]:
        return _receive, (list(self), self.key)


def _receive(indices: list[int], key: str) -> list[int]:
    if torch.utils.data.get_worker_info() is not None:
        seed_generators(key)
    return indices
