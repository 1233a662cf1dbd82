"""Lightning Fabric with ckpt: a Checkpointer over the objects that Fabric has set up.

    with ckpt.integrations.lightning_fabric.checkpointer("s3://bucket/run", {"model": model, "loader": loader}) as ck:

The loop stays as Fabric's users write it; it calls ck.step() or loops over ck.steps(). Plain DataLoaders are saved
with their position.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.wrappers import _FabricDataLoader, _unwrap_objects
from lightning.pytorch.utilities.seed import isolate_rng

import ckpt
from ckpt.integrations.lightning_data import check_shape, is_map_style, prepare, shape


def checkpointer(url: str | os.PathLike[str], state: dict[str, Any], **options: Any) -> ckpt.Checkpointer:
    """A ckpt.Checkpointer over `state`, in which modules, optimizers and loaders may be those of fabric.setup() and
    fabric.setup_dataloaders(). The loop goes on to use the same objects. Values that change are in `ck.state`.

    Errors: UsageError for a plain DataLoader over an IterableDataset, which has no position."""
    return ckpt.Checkpointer(url, {key: _saved(value, key) for key, value in state.items()}, **options)


def _saved(value: Any, path: str) -> Any:
    """What ckpt saves of a value: an object in place of Fabric's wrapper."""
    if isinstance(value, dict):
        return {key: _saved(each, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [_saved(each, f"{path}.{n}") for n, each in enumerate(value)]
    if not isinstance(value, _FabricDataLoader):
        return _unwrap_objects(value)
    if not is_map_style(value._dataloader) and not hasattr(value._dataloader, "state_dict"):
        raise ckpt.UsageError(
            f"state[{path!r}] is a plain DataLoader over an IterableDataset, which has no position; use torchdata's "
            "StatefulDataLoader and give the dataset a state_dict()"
        )
    value.__class__ = _CountedLoader
    value.attach()
    return value


class _CountedLoader(_FabricDataLoader):  # type: ignore[misc]
    """A loader of Fabric's that counts the batches that it hands out in a pass."""

    def attach(self) -> None:
        self._taken, self._resumed, self._has_ended = 0, False, False
        prepare(self._dataloader, lambda: self._taken)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, False
        self._has_ended = False
        if not resumed:
            self._taken = 0
        _set_sampler_epoch(self._dataloader, self._num_iter_calls)
        self._num_iter_calls += 1
        # The pass that goes on has drawn its workers' seed before.
        with isolate_rng() if resumed else contextlib.nullcontext():
            batches = iter(self._dataloader)
        for batch in batches:
            self._taken += 1
            yield batch if self._device is None else move_data_to_device(batch, self._device)
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        loader = self._dataloader
        inner = loader._index_sampler.state() if is_map_style(loader) else loader.state_dict()
        count = {"passes": self._num_iter_calls, "taken": self._taken, "ended": self._has_ended}
        return {**count, "inner": inner, "shape": shape(loader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Errors: UsageError."""
        loader = self._dataloader
        self._num_iter_calls, self._taken = state["passes"], state["taken"]
        self._has_ended = state["ended"]
        self._resumed = state["passes"] > 0 and not self._has_ended
        if self._resumed:
            self._num_iter_calls -= 1
            if self._taken:
                check_shape(loader, state["shape"])
        if state["passes"] and not is_map_style(loader):
            loader.load_state_dict(state["inner"])
        elif state["passes"]:
            loader._index_sampler.resume(state["inner"])
        if self._has_ended and is_map_style(loader):
            # Nothing is left of the pass, but the sampler's own generators go on from its end.
            for _ in loader._index_sampler:
                pass
