"""Hugging Face Accelerate: a Checkpointer over all that an Accelerator has prepared.

    with ckpt.integrations.accelerate.attach(accelerator, "s3://bucket/run") as ck:
        for step, batch in zip(ck.steps(10_000), endless(loader)):
            ...

It saves the prepared models, optimizers, schedulers and scaler, what register_for_checkpointing() was given, and each
prepared loader's position. Within the block save_state() is a ck.save().

A loader's position is exact: the epoch, the number of batches that it handed out, and the generators as of the epoch's
beginning. A restart draws the epoch's order anew and skips in the sampler; it reads no skipped sample. Accelerate reads
one batch ahead. That batch is read again, with the generators as they were before the first read.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from torch.utils.data import IterableDataset

import ckpt

TESTED = "1.15"
GUIDE = "(docs/guides/accelerate.md)"
OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")
_END = object()
_DRAWS = itertools.count(1)


def attach(accelerator: accelerate.Accelerator, url: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """A Checkpointer over all that `accelerator` has prepared. It is called after prepare() and
    register_for_checkpointing().

    url, options: those of ckpt.Checkpointer, but for `state`. `ck.state` may get further values before the block.
    Errors: UsageError if nothing was prepared, or for DeepSpeed, Megatron-LM and XLA, which keep states of their own.
    """
    return Checkpointer(accelerator, url, **options)


class Checkpointer(ckpt.Checkpointer):
    """What attach() returns: a ckpt.Checkpointer that also keeps its accelerator from saving by itself."""

    def __init__(self, accelerator: accelerate.Accelerator, url: str | os.PathLike[str], **options: Any) -> None:
        engine = str(accelerator.distributed_type.value)
        if engine in OTHER_ENGINES:
            raise ckpt.UsageError(f"the accelerator runs {engine}, whose state ckpt cannot see {GUIDE}")
        if not accelerator._models:
            raise ckpt.UsageError("the accelerator has prepared no model: call its prepare() before attach()")
        self.accelerator = accelerator
        self._loaders = [_Position(each, accelerator._models) for each in accelerator._dataloaders]
        self._attached = _prepared(accelerator)
        self._hooks: list[Any] = []
        self._has_update = self._is_save_due = self._has_told = self._has_checked = False
        self._is_ahead_told, self._drawn_before = False, 0
        super().__init__(url, _state(accelerator, self._loaders), **options)

    def __enter__(self) -> Checkpointer:
        super().__enter__()
        accelerator = self.accelerator
        self._own = {name: getattr(accelerator, name) for name in ("save_state", "load_state")}
        vars(accelerator).update(save_state=self._save_state, load_state=self._load_state)
        self._hooks = [each.optimizer.register_step_post_hook(self._note_update) for each in accelerator._optimizers]
        if ".".join(accelerate.__version__.split(".")[:2]) != TESTED:
            self._tell(
                "framework.untested",
                f"ckpt.integrations.accelerate was tested with accelerate {TESTED}; this is {accelerate.__version__}, "
                "which may differ",
            )
        return self

    def __exit__(self, *error: Any) -> None:
        for name in self._own:
            vars(self.accelerator).pop(name, None)
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def step(self, n: Any = None) -> None:
        super().step(n)
        if not self._has_checked:
            self._has_checked = True
            self._check_complete()
        if self._has_update:
            self._check_order()
        self._has_update = False
        if self._is_save_due:
            self._is_save_due = False
            self.save()

    # -- inside

    def _save_state(self, output_dir: str | None = None, *unused: Any, **more: Any) -> str | None:
        """Stands in for accelerator.save_state(): saves the last ended step, or the present one when it ends."""
        self._tell_taken_over()
        if self._has_update:
            self._is_save_due = True
        else:
            self.save()
        return output_dir

    def _load_state(self, input_dir: str | None = None, *args: Any, **more: Any) -> None:
        """Stands in for accelerator.load_state(): the block has restored everything. A fresh run may begin with a
        folder of Accelerate's."""
        if self.restored.identity is None:
            self._own["load_state"](input_dir, *args, **more)
        else:
            self._tell_taken_over()

    def _note_update(self, *unused: Any) -> None:
        self._has_update, self._drawn_before = True, max((each.drawn_at for each in self._loaders), default=0)
        for each in self._loaders:
            each.is_training |= each.drawn_at == self._drawn_before > 0

    def _tell_taken_over(self) -> None:
        if not self._has_told:
            self._has_told = True
            hooks = ""
            if self.accelerator._save_model_state_pre_hook or self.accelerator._load_model_state_pre_hook:
                hooks = ". Hooks of the script on save_state() and load_state() are not called: give what they keep to "
                hooks += "register_for_checkpointing()"
            self._tell(
                "framework.also_saves",
                "the script calls accelerator.save_state() or load_state(): they write and read no folder here. "
                f"save_state() saves to {self.url}, and entering the block has restored the state{hooks} {GUIDE}",
            )

    def _check_complete(self) -> None:
        late = [kind for kind, count in _prepared(self.accelerator).items() if count > self._attached[kind]]
        if late:
            self._tell(
                "framework.unsaved",
                f"prepared or registered after attach(), so not saved: {', '.join(late)}. Call attach() last {GUIDE}",
            )

    def _check_order(self) -> None:
        """Tells once of a batch that was drawn between the update and the end of its step."""
        ahead = next((each for each in self._loaders if each.is_training and each.drawn_at > self._drawn_before), None)
        if ahead is None or self._is_ahead_told or self.accelerator.scaler is not None:
            return
        self._is_ahead_told = True
        self._tell(
            "loader.ahead",
            "a batch was drawn after the update and before the step ended, so a restart skips it. Put ck.steps(n) "
            f"first in zip(), or call ck.step() directly after the update {GUIDE}",
            loader=next(name for name, each in self.state.items() if each is ahead),
            batches=1,
        )

    def _tell(self, name: str, text: str, **data: Any) -> None:
        if self.accelerator.is_main_process:
            self.events.emit(name, f"ckpt: {text}", loud=True, **data)


def _prepared(accelerator: Any) -> dict[str, int]:
    kinds = ("models", "optimizers", "schedulers", "dataloaders", "custom_objects")
    return {kind: len(getattr(accelerator, f"_{kind}")) for kind in kinds}


def _state(accelerator: Any, positions: Sequence[_Position]) -> dict[str, Any]:
    """The state, by Accelerate's own names: model, model_1, optimizer, ..."""
    kinds = {
        "model": accelerator._models,
        "optimizer": [each.optimizer for each in accelerator._optimizers],
        "scheduler": [each.scheduler for each in accelerator._schedulers],
        "object": accelerator._custom_objects,
        "loader": positions,
    }
    state = {f"{kind}_{n}" if n else kind: each for kind, found in kinds.items() for n, each in enumerate(found)}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


class _Position:
    """The position of one prepared loader. It counts what the loader draws from its torch DataLoader.

    `drawn`: batches of that DataLoader in this pass; the loader hands out one for each `per_batch`, and is one ahead.
    `drawn_at`: when the newest one was, in the order of all loaders' draws. `is_training`: a model was in training mode
    then, or an optimizer stepped before another loader was drawn from. A restart begins any other pass anew."""

    def __init__(self, loader: Any, models: Sequence[torch.nn.Module]) -> None:
        self.drawn_at = 0
        self.is_training = False
        self._loader, self._models = loader, models
        self._base = base = loader.base_dataloader
        self._is_map_style = not isinstance(base.dataset, IterableDataset)
        is_split = getattr(loader, "split_batches", False)
        is_dispatcher = issubclass(type(loader), DataLoaderDispatcher)
        self._per_batch = loader.state.num_processes if is_dispatcher and not is_split else 1
        self._drawn = 0
        self._iteration = loader.iteration
        self._start: dict[str, Any] = {}
        self._ahead: dict[str, Any] | None = None
        self._given: dict[str, Any] | None = None
        loader.base_dataloader = _Base(base, self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        if self._given is not None:
            return self._given
        loader, is_dispatcher = self._loader, self._per_batch > 1
        # Accelerate counts the epoch when the loop asks for a batch after the last one.
        is_in_pass = bool(self._start) and self.is_training and self._iteration == loader.iteration
        is_ended = is_in_pass and loader.end_of_dataloader
        batches = -(-self._drawn // self._per_batch) - 1 if is_in_pass and not is_ended else 0
        return {
            "iteration": loader.iteration + (is_ended and is_dispatcher),
            "batches": batches,
            "is_ended": is_ended and not is_dispatcher,
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
        first, is_split = states[0], getattr(self._base.batch_sampler, "split_batches", False)
        batches = first["batches"] * (1 if is_split else len(states))
        lost = {path for path, _ in self._own_generators()} - first["start"]["own"].keys()
        if lost and first["batches"] > 0:
            raise ckpt.UsageError(
                "one process has shuffled without a generator, and several cannot draw that order: start with one "
                f"process, or with DataLoaderConfiguration(use_seedable_sampler=True) from the beginning {GUIDE}"
            )
        if not is_split and batches % world:
            raise ckpt.UsageError(
                f"{len(states)} processes have handed out {first['batches']} batches each in this epoch, which {world} "
                f"processes cannot divide: start with another number of processes {GUIDE}"
            )
        self.load_state_dict({**first, "batches": batches if is_split else batches // world})

    def begin_pass(self) -> Iterator[Any]:
        """A pass over the DataLoader, from the restored batch if one was restored. Accelerate has set the epoch."""
        given, self._given, loader = self._given, None, self._loader
        is_within = given is not None and (given["batches"] > 0 or given["is_ended"])
        if given is not None and is_within and given["iteration"] != loader.iteration:
            raise ckpt.UsageError(
                f"the checkpoint was taken in the middle of epoch {given['iteration']} of a loader, and the loop "
                f"begins its epoch {loader.iteration}: begin with loader.iteration {GUIDE}"
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

    def __init__(self, base: Any, position: _Position) -> None:
        self._base, self._position = base, position

    def __iter__(self) -> Iterator[Any]:
        return self._position.begin_pass()

    def __len__(self) -> int:
        return len(self._base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Accelerate's loaders say by this that they are a DataLoader.
        return type(self._base)


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
