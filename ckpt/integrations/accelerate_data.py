"""The position of a prepared loader of Accelerate, exact to the batch.

A position is the epoch, the number of batches that the loader handed out in it, and the generators as of the epoch's
beginning. A restart draws the epoch's order anew and skips in the sampler; it reads no skipped sample. Accelerate reads
one batch ahead. That batch is read again, with the generators as they were before its first read.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import IterableDataset

import ckpt

GUIDE = "(docs/guides/accelerate.md)"
_END = object()
_DRAWS = itertools.count(1)


class Position:
    """The position of one prepared loader. It counts what the loader draws from its torch DataLoader.

    `drawn`: batches of that DataLoader in this pass; the loader hands out one for each `per_batch`, and is one ahead.
    `drawn_at`: when the newest one was, in the order of all loaders' draws. `is_training`: a model was in training mode
    then, or an optimizer stepped before another loader was drawn from. A restart begins any other pass anew."""

    def __init__(self, loader: Any, models: Sequence[torch.nn.Module]) -> None:
        self.drawn_at = 0
        self._is_dispatcher = issubclass(type(loader), DataLoaderDispatcher)
        # Only rank 0 of a dispatcher draws. The others know the epoch and whether it has ended.
        self.is_training = self._is_dispatcher and loader.state.process_index > 0
        self._loader, self._models = loader, models
        # The newest attach() counts.
        self._base = base = vars(loader.base_dataloader).get("_attached_base", loader.base_dataloader)
        self._is_map_style = not isinstance(base.dataset, IterableDataset)
        sampler = base.sampler if base.batch_sampler is None else base.batch_sampler
        # What makes the batches, of the size that the script gave, for any number of processes.
        self._batcher = base.dataset if isinstance(base.dataset, IterableDatasetShard) else sampler
        self._is_split = any(getattr(each, "split_batches", False) for each in (loader, self._batcher))
        self._per_batch = loader.state.num_processes if self._is_dispatcher and not self._is_split else 1
        self._drawn = 0
        self._iteration = -1
        self._start: dict[str, Any] = {}
        self._ahead: dict[str, Any] | None = None
        self._given: dict[str, Any] | None = None
        loader.base_dataloader = _Base(base, self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        if self._given is not None:
            return self._given
        loader, is_dispatcher = self._loader, self._is_dispatcher
        # Accelerate counts the epoch when the loop asks for a batch after the last one.
        is_in_pass = self.is_training and self._iteration == loader.iteration
        is_ended = is_in_pass and loader.end_of_dataloader
        batches = max(0, -(-self._drawn // self._per_batch) - 1) if is_in_pass and not is_ended else 0
        return {
            "iteration": loader.iteration + (is_ended and is_dispatcher),
            "batches": batches,
            "is_ended": is_ended and not is_dispatcher,
            "is_split": self._is_split,
            **self._sizes(),
            "start": self._start if batches > 0 else self._read_generators(),
            "ahead": self._ahead if batches > 0 else None,
            "seeds": {path: each.initial_seed for path, each in self._holders() if "initial_seed" in _vars(each)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given = state
        self._loader.iteration = state["iteration"]
        for path, each in self._holders():
            if path in state["seeds"]:
                each.initial_seed = state["seeds"][path]
        if state["batches"] <= 0:
            self._put_own(state["start"]["own"])

    def reshard(self, states: Sequence[dict[str, Any]], rank: int, world: int) -> None:
        """Takes the position that other numbers of processes saved. Errors: UsageError if the batches that they handed
        out are no whole number for each process now, or the order of the epoch cannot be drawn here."""
        first = states[0]
        batches = first["batches"] * (1 if first["is_split"] else len(states))
        world = 1 if self._is_split else world
        lost = {path for path, _ in self._own_generators()} - first["start"]["own"].keys()
        if lost and first["batches"] > 0:
            raise ckpt.UsageError(
                "one process has shuffled without a generator, and several cannot draw that order: start with one "
                f"process, or with DataLoaderConfiguration(use_seedable_sampler=True) from the beginning {GUIDE}"
            )
        if batches % world:
            raise ckpt.UsageError(
                f"{len(states)} processes have handed out {first['batches']} batches each in this epoch, which {world} "
                f"processes cannot divide: start with another number of processes {GUIDE}"
            )
        self.load_state_dict({**first, "batches": batches // world})

    def begin_pass(self) -> Iterator[Any]:
        """A pass over the DataLoader, from the restored batch if one was restored. Accelerate has set the epoch."""
        given, self._given, loader = self._given, None, self._loader
        is_within = given is not None and (given["batches"] > 0 or given["is_ended"])
        if given is not None and is_within and given["iteration"] != loader.iteration:
            raise ckpt.UsageError(
                f"the checkpoint was taken in the middle of epoch {given['iteration']} of a loader, and the loop "
                f"begins its epoch {loader.iteration}: begin with loader.iteration {GUIDE}"
            )
        for name, size in self._sizes().items():
            if given is not None and given["batches"] > 0 and size != given[name]:
                raise ckpt.UsageError(
                    f"the checkpoint was taken in the middle of an epoch of a loader that had {name} {given[name]} and "
                    f"now has {size}, so the epoch's other samples are not known: set it as it was {GUIDE}"
                )
        self._iteration, self._drawn, self._start, self._ahead = loader.iteration, 0, {}, None
        if given is not None and given["is_ended"]:
            # The loop goes on behind the last batch. Accelerate counts no epoch in which it gets none.
            loader.iteration += 1
            return iter(())
        return self._draw(given if is_within else None)

    def _draw(self, given: dict[str, Any] | None) -> Iterator[Any]:
        base, end = self._base, 0
        if hasattr(base, "next_iter_state"):
            # A StatefulDataLoader: its state_dict(), which Accelerate calls, has begun a pass already.
            base._iterator, base._initial_iter_for_state_dict, base.next_iter_state = None, False, None
        now = _read_global()
        if given is None:
            # Persistent workers of the last pass go on, with the seed that was drawn for them then.
            is_reused = base.persistent_workers and base._iterator is not None
            self._start = {**self._read_generators(), "is_reused": is_reused}
            iterator = iter(base)
        else:
            self._start, self._ahead = given["start"], given["ahead"]
            self._drawn = given["batches"] * self._per_batch
            end = self._drawn + self._per_batch
            self._put_start()
            iterator = self._skip()
        while True:
            if self._drawn >= end and self._drawn % self._per_batch == 0:
                # Only this process's own reads draw from these generators.
                self._ahead = None if base.num_workers else _read_global()
            batch = next(iterator, _END)
            self._drawn += batch is not _END
            self.drawn_at = next(_DRAWS)
            self.is_training |= given is not None or any(each.training for each in self._models)
            if given is not None and (batch is _END or self._drawn == end):
                given = None
                _put_global(now)
            if batch is _END:
                return
            yield batch

    def _skip(self) -> Iterator[Any]:
        """An iterator of the DataLoader without the batches that `_drawn` counts."""
        if not self._is_map_style:
            batches: Iterator[Any] = iter(self._base)
            for _ in range(self._drawn):
                next(batches, None)
            self._put_ahead()
            return batches
        name = "batch_sampler" if self._base.batch_sampler is not None else "sampler"
        sampler = getattr(self._base, name)
        # A DataLoader refuses to have its sampler assigned. Its iterator takes the sampler once, when it is made.
        before = self._put_start if self._start["is_reused"] else None
        vars(self._base)[name] = _Skipping(sampler, self._drawn, before, self._put_ahead)
        try:
            made: Iterator[Any] = iter(self._base)
            return made
        finally:
            vars(self._base)[name] = sampler

    def _sizes(self) -> dict[str, int | None]:
        """What turns a count of batches into samples."""
        length = len(self._base.dataset) if self._is_map_style and hasattr(self._base.dataset, "__len__") else None
        return {"batch_size": getattr(self._batcher, "batch_size", None), "dataset_length": length}

    def _put_start(self) -> None:
        _put_global(self._start["all"])
        self._put_own(self._start["own"])

    def _put_ahead(self) -> None:
        if self._ahead is not None:
            _put_global(self._ahead)

    def _holders(self) -> list[tuple[str, Any]]:
        """The DataLoader, its data set and its samplers, with their paths: what may have a generator or a seed. A path
        is the same for one process and for several."""
        found = [("", self._base), ("dataset", self._base.dataset)]
        for path, each in found:
            for name in ("batch_sampler", "sampler"):
                inner = _vars(each).get(name)
                if inner is not None and not any(inner is known for _, known in found):
                    found.append((path if isinstance(each, BatchSamplerShard) else f"{path}.{name}", inner))
        return found

    def _read_generators(self) -> dict[str, Any]:
        own = {path: generator.get_state() for path, generator in self._own_generators()}
        return {"all": _read_global(), "own": own, "is_reused": False}

    def _put_own(self, states: dict[str, torch.Tensor]) -> None:
        for path, each in self._holders():
            # Several processes make a generator for a sampler that has none in one process.
            if path in states and "generator" in _vars(each):
                each.generator = each.generator or torch.Generator()
                each.generator.set_state(states[path])

    def _own_generators(self) -> Iterator[tuple[str, torch.Generator]]:
        for path, each in self._holders():
            if isinstance(generator := _vars(each).get("generator"), torch.Generator):
                yield path, generator


class _Base:
    """Stands where a prepared loader's torch DataLoader was: the position begins each pass."""

    def __init__(self, base: Any, position: Position) -> None:
        self._attached_base, self._position = base, position

    def __iter__(self) -> Iterator[Any]:
        return self._position.begin_pass()

    def __len__(self) -> int:
        return len(self._attached_base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attached_base, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Accelerate's loaders say by this that they are a DataLoader.
        return type(self._attached_base)


class _Skipping:
    """A sampler whose first pass draws `count` items without handing them out. It calls `before` and `then` around
    that."""

    def __init__(self, sampler: Any, count: int, before: Callable[[], None] | None, then: Callable[[], None]) -> None:
        self._sampler, self._count, self._before, self._then = sampler, count, before, then

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._sampler)
        if self._count:
            if self._before is not None:
                self._before()
            for _ in range(self._count):
                next(items, None)
            self._count = 0
            self._then()
        yield from items

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _vars(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _read_global() -> dict[str, Any]:
    """The generators that a data set may draw from in this process."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def _put_global(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
