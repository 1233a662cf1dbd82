"""ckpt as the CheckpointManager of torchtitan.

    checkpoint = ckpt.integrations.torchtitan.CheckpointManager.Config(folder="s3://bucket/run")

The same command again goes on after the newest checkpoint, bit for bit: weights, optimizers, schedulers, the Trainer's
counters, random generators and the data's position. A step of ckpt is a step of torchtitan.

`load()`, which the Trainer calls before its loop, enters the Checkpointer. `save()`, which it calls after each step,
ends a step of ckpt. `close()` leaves the Checkpointer, by an exception if one is being handled.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torchtitan
import tyro  # type: ignore[import-not-found]
from torch.distributed import get_rank
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components import checkpointer as titan
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools import filesystem

import ckpt

TESTED = "0.3"
NO_FOLDER = ".no-checkpoint-of-torchtitan"  # where torchtitan's own manager looks, and finds nothing
HF_FOLDER = "hf"  # in the dump folder: the weights that last_save_in_hf asks for


class CheckpointManager(BaseCheckpointManager):
    """Saves and resumes torchtitan's Trainer. `checkpointer`: the Checkpointer, from load() to close(), else None.

    Errors of load(), save() and close(): those of ckpt.Checkpointer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """As of torchtitan's manager. What ckpt does not do is refused with a UsageError."""

        enable: bool = True
        """Whether to save and resume."""

        folder: str = "checkpoint"
        """Any URL that ckpt.Checkpointer takes; a folder is relative to the dump folder."""

        interval: int = 1
        """Steps between two checkpoints in the store. 1: ckpt.Adaptive() chooses the steps."""

        last_save_model_only: bool = False
        """Refused, since the last step is saved whole; implied by last_save_in_hf."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Options of ckpt.Checkpointer, but for `state`. They win over `interval` and `keep_latest_k`."""

        def __post_init__(self) -> None:
            _refuse(self)
            self.last_save_model_only = self.last_save_in_hf
            # torchtitan cannot write weights for Hugging Face to a bucket; they go to the dump folder.
            folder, self.folder = self.folder, self.folder and "checkpoint"
            BaseCheckpointManager.Config.__post_init__(self)
            self.folder = folder

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None
        self.checkpointer: ckpt.Checkpointer | None = None
        self._config = config
        self._ended_step = 0
        self._url = filesystem.join(base_folder, config.folder)
        self._state = states | {
            "model": _one_or_all(model_parts),
            "optim": _one_or_all(list(optimizers)),
            "sched": _one_or_all(list(lr_schedulers)),
        }
        if dataloader is not None:
            is_titan = isinstance(dataloader, ParallelAwareDataloader)
            self._state["loader"] = _Loader(dataloader) if is_titan else dataloader
        self._titan_parts = {
            "dataloader": dataloader,
            "model_parts": model_parts,
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            "sd_adapter": sd_adapter,
            "base_folder": base_folder,
        }
        self._states = states

    def _load(self, step: int = -1) -> bool:
        config = self._config
        config.load_step = step
        _refuse(config)
        options = {
            "policy": ckpt.Every(steps=config.interval) if config.interval > 1 else ckpt.Adaptive(),
            "keep": ckpt.Keep(last=config.keep_latest_k) if config.keep_latest_k else None,
        }
        ck = ckpt.Checkpointer(self._url, self._state, **(options | config.options))
        self.checkpointer = ck.__enter__()
        if not torchtitan.__version__.startswith(f"{TESTED}.") and get_rank() == 0:
            text = f"ckpt.integrations.torchtitan was tested with torchtitan {TESTED}; this is {torchtitan.__version__}"
            ck.events.emit("framework.untested", f"ckpt: {text}", loud=True)
        is_loaded = ck.restored.identity is not None
        if not is_loaded and (config.initial_load_path or config.initial_load_in_hf):
            is_loaded = self._titan(NO_FOLDER).load()
        self._ended_step = getattr(self._states.get("train_state"), "step", 0)
        return is_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        ck, self._ended_step = self._entered, curr_step
        # Before the step ends: a kill in the export repeats the step, and so the export.
        if last_step and self._config.last_save_in_hf:
            self._titan(HF_FOLDER)._save_last_step(curr_step)
        try:
            ck.step()
            if curr_step == 1 and self._config.enable_first_step_checkpoint:
                ck.save()
        except BaseException:
            # torchtitan closes its manager after an Exception only, and ckpt.Leave is a SystemExit.
            self._close()
            raise
        return True

    def _maybe_wait_for_staging(self) -> None:
        self._entered.fence()

    def _wait_for_saving(self) -> None:
        self._entered.wait()

    def _close(self) -> None:
        ck, self.checkpointer = self.checkpointer, None
        if ck is not None:
            # The Trainer counts the step in which its data ran out, and cancels it.
            if (trainer := self._states.get("train_state")) is not None:
                trainer.step = self._ended_step
            ck.__exit__(*sys.exc_info())

    @property
    def _entered(self) -> ckpt.Checkpointer:
        if self.checkpointer is None:
            raise ckpt.UsageError("call load() before the first step, and nothing after close()")
        return self.checkpointer

    def _titan(self, folder: str) -> titan.CheckpointManager:
        """torchtitan's own manager, for weights that ckpt has not saved, and for those of other tools."""
        names = {each.name for each in dataclasses.fields(titan.CheckpointManager.Config)}
        values = {name: getattr(self._config, name) for name in names if hasattr(self._config, name)}
        values |= {"folder": folder, "keep_latest_k": 0}
        return titan.CheckpointManager.Config(**values).build(states=dict(self._states), **self._titan_parts)


class _Loader:
    """torchtitan's loader, whose own state_dict() is a pickle, with the state of torchdata's loader below it."""

    def __init__(self, loader: ParallelAwareDataloader) -> None:
        self.base_dataloader = loader
        if loader.generator is None:
            # Else each start draws the workers' seed from the global generator, which the steps may use.
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())

    def __getattr__(self, name: str) -> Any:
        # A subclass may have reshard(), which ckpt then calls.
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base_dataloader)

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = StatefulDataLoader.state_dict(self.base_dataloader)
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        StatefulDataLoader.load_state_dict(self.base_dataloader, saved)


def _one_or_all(parts: list[Any]) -> Any:
    """The only part; several are a dict, by their number."""
    return parts[0] if len(parts) == 1 else {str(number): each for number, each in enumerate(parts)}


def _refuse(config: CheckpointManager.Config) -> None:
    """Errors: UsageError for an option of torchtitan's that ckpt would have to ignore."""
    refused = {
        "last_save_model_only": (
            config.last_save_model_only and not config.last_save_in_hf,
            'the last step is saved whole; for the weights alone set last_save_in_hf, or options={"export": '
            "ckpt.Export(...)}",
        ),
        "load_step": (
            config.load_step != -1,
            "the newest checkpoint is restored; after `ckpt branch URL --at STEP` that is the one of STEP",
        ),
        "load_only": (
            config.load_only,
            'a run of ckpt saves as well; another run can begin with its weights: options={"init": its URL}',
        ),
        "create_seed_checkpoint": (
            config.create_seed_checkpoint,
            "make the seed with torchtitan's own CheckpointManager, and give it as initial_load_path",
        ),
        "exclude_from_loading": (
            bool(config.exclude_from_loading) and not config.initial_load_path,
            "a restart restores everything; with initial_load_path it holds for that path",
        ),
    }
    for name, (is_given, why) in refused.items():
        if is_given:
            raise ckpt.UsageError(f"checkpoint.{name} cannot be used with ckpt.integrations.torchtitan: {why}")
