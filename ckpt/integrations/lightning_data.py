"""The position of Lightning's training data, also of plain DataLoaders.

A plain DataLoader over a map-style dataset has no position. What it draws is decided by its sampler, though. So
`SamplerPass` stands before the sampler: it notes the generators as they are when the sampler begins. A restart gives
the sampler these generators, draws the indices of the batches that were trained on, and reads none of their data.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

import ckpt


class Positions:
    """The positions of a fit loop's loaders. ckpt treats this object as a loader, so each rank saves its own positions.

    Loaders with state_dict() and load_state_dict() know their positions. Other loaders over map-style datasets draw
    their indices again. The rest, such as a plain loader over an IterableDataset, reads its batches again."""

    def __init__(self, fit_loop: Any) -> None:
        self._loop = fit_loop
        self._found: list[dict[str, Any]] = []
        self._shapes: list[dict[str, Any]] = []
        self._ahead: dict[int, dict[str, Any]] = {}
        self._is_checked = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loaders)

    def state_dict(self) -> dict[str, Any]:
        positions = [self._ahead.get(n) or self._position(each) for n, each in enumerate(self._loaders)]
        return {"loaders": positions, "shapes": [shape(each) for each in self._loaders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found = list(state["loaders"])
        self._shapes = list(state["shapes"])

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        """Errors: UsageError. Lightning's loops count the batches of each rank, and so does a position."""
        raise ckpt.UsageError(
            f"{len(states)} ranks have saved this run, and there are {world} now, for which Lightning's loops cannot "
            f"count: start with {len(states)} ranks (docs/guides/lightning.md)"
        )

    def attach(self, is_resuming: bool) -> None:
        """Comes when Lightning has made the loaders, and before it iterates over them. Errors: UsageError.

        is_resuming: a restart within an epoch."""
        for loader in self._loaders:
            prepare(loader, lambda: int(self._loop.epoch_loop.batch_progress.current.ready))
        if len({bool(self._position(each)) for each in self._loaders}) > 1:
            raise ckpt.UsageError(
                "the training data comes from several loaders, and some of them have no position: a plain DataLoader "
                "over an IterableDataset. Use torchdata's StatefulDataLoader there"
            )
        self._apply(is_resuming)

    def begin_again(self, is_resuming: bool) -> None:
        """Comes after a restore. Loaders that Lightning has made and begun before begin at the restored position.
        Errors: UsageError."""
        if self._loop._data_fetcher is not None:
            self._apply(is_resuming)
            with isolate_rng():
                iter(self._loop._data_fetcher)

    def read_again(self, data_fetcher: Any) -> None:
        """Comes before the first batch after a restore. Loaders without a position draw the batches that were trained
        on."""
        if not all(map(self._position, self._loaders)):
            ready = self._loop.epoch_loop.batch_progress.current.ready
            data_fetcher.fetched -= ready
            for _ in range(ready):
                next(data_fetcher)

    def note_fetch(self, data_fetcher: Any) -> None:
        """Comes before a batch is fetched. If Lightning prefetches, the loaders' present positions are those to restore
        after the coming batch. The position of a sampler counts the batches trained on: nothing is ahead of it."""
        ahead = enumerate(self._loaders if getattr(data_fetcher, "batches", None) else ())
        self._ahead = {n: self._position(each) for n, each in ahead if not is_map_style(each)}

    def find_inexactness(self) -> str:
        """What a restart may change; "" if nothing is known to. It is asked at each step and answers once."""
        if self._is_checked or all(map(self._position, self._loaders)):
            self._is_checked = True
            return ""
        self._is_checked = True
        return (
            "the training data has no position (a plain DataLoader over an IterableDataset): a restart within an epoch "
            "reads its batches again, and goes on right only if they come in the same order. Use torchdata's "
            "StatefulDataLoader and give the dataset a state_dict() (docs/guides/lightning.md)"
        )

    @property
    def _loaders(self) -> list[Any]:
        combined = self._loop._combined_loader
        return [] if combined is None else combined.flattened

    def _apply(self, is_resuming: bool) -> None:
        found, self._found = self._found, []
        shapes, self._shapes = self._shapes if is_resuming else [], []
        for loader, saved in zip(self._loaders, shapes, strict=False):
            check_shape(loader, saved)
        for loader, state in zip(self._loaders, found, strict=False):
            # Lightning does so only after workers have drawn their first batches.
            _set_sampler_epoch(loader, self._loop.epoch_progress.current.processed)
            if "state" in state:
                loader.load_state_dict(state["state"])
            elif "pass" in state:
                loader._index_sampler.resume(state["pass"])

    def _position(self, loader: Any) -> dict[str, Any]:
        if not is_map_style(loader):
            return {"state": loader.state_dict()} if hasattr(loader, "state_dict") else {}
        return {"pass": loader._index_sampler.state()}


def prepare(loader: Any, count: Callable[[], int]) -> None:
    """Gives a loader a position, if it needs and can have one, and shields its workers from signals to the job.
    `count()`: how many batches were handed out."""
    if is_map_style(loader) and not isinstance(loader._index_sampler, SamplerPass):
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # DataLoader refuses a change by setattr.
        object.__setattr__(loader, name, SamplerPass(loader, count))
    if getattr(loader, "num_workers", 0) and getattr(loader.worker_init_fn, "func", None) is not _begin_worker:
        loader.worker_init_fn = functools.partial(_begin_worker, loader.worker_init_fn)


def _begin_worker(first: Callable[[int], object] | None, worker_id: int) -> None:
    if first is not None:
        first(worker_id)
    ckpt.shield_worker(worker_id)


class SamplerPass:
    """The sampler that a DataLoader asks for indices: the loader's own, which a restart draws from again."""

    def __init__(self, loader: DataLoader[Any], count: Callable[[], int]) -> None:
        self._inner: Any = loader._index_sampler
        self._count = count
        self._own = {
            f"{type(each).__name__}.{name}": value
            for each in (loader, *_samplers(self._inner))
            for name, value in vars(each).items()
            if isinstance(value, torch.Generator)
        }
        self._begin: dict[str, Any] = {}
        self._first_batch = 0
        self._resumed: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers calls this twice. Only the first draw counts.
        resumed, self._resumed = self._resumed, None
        ready = self._count()
        # Of another epoch: the pass that was to be resumed had ended.
        if resumed is None or resumed["ready"] != ready:
            self._begin, self._first_batch = self._generators(), ready
            yield from self._inner
            return
        self._begin, self._first_batch = resumed["begin"], ready - resumed["batches"]
        with isolate_rng(include_cuda=False):
            _set_rng_states(self._begin["global"])
            for name, generator in self._own.items():
                generator.set_state(self._begin["own"][name])
            indices = iter(self._inner)
            for _ in itertools.islice(indices, resumed["batches"]):
                pass
        yield from indices

    def state(self) -> dict[str, Any]:
        """What `resume` needs: the generators at the begin of this pass, and the batches trained on since."""
        return {"begin": self._begin, "batches": self._count() - self._first_batch, "ready": self._count()}

    def resume(self, state: dict[str, Any]) -> None:
        """The next pass goes on where `state` was taken."""
        self._resumed = state

    def _generators(self) -> dict[str, Any]:
        return {
            "global": _collect_rng_states(include_cuda=False),
            "own": {name: each.get_state() for name, each in self._own.items()},
        }


def shape(loader: Any) -> dict[str, Any]:
    """What has to stay as it is while a position counts batches. Empty for a loader that alone knows its position."""
    if hasattr(loader, "state_dict") and sized_len(loader) is None:
        return {}
    batch_size = getattr(getattr(loader, "_index_sampler", loader), "batch_size", None)
    return {"batch_size": batch_size, "samples": sized_len(getattr(loader, "dataset", None))}


def check_shape(loader: Any, saved: dict[str, Any]) -> None:
    """Refuses to go on within an epoch of other batches. Errors: UsageError."""
    then, now = (", ".join(f"{name}={value}" for name, value in each.items()) for each in (saved, shape(loader)))
    if then and now and then != now:
        raise ckpt.UsageError(
            f"the checkpoint is from within an epoch of training data with {then}; the data has {now} now, and its "
            "position counts batches: set both as they were until the epoch ends (docs/guides/lightning.md)"
        )


def is_map_style(loader: Any) -> bool:
    """Whether a loader's position is that of its sampler."""
    return (
        isinstance(loader, DataLoader)
        and not hasattr(loader, "state_dict")
        and not isinstance(loader.dataset, IterableDataset)
    )


def _samplers(sampler: Any) -> list[Any]:
    """A sampler, and those that it draws from."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, *_samplers(inner)]
