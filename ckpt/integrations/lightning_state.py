"""What ckpt saves of a fit of Lightning's Trainer: each part as an object that a Checkpointer knows."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from ckpt.integrations.lightning_data import Positions
from ckpt.integrations.peft import find_scores


def find_state(trainer: Trainer, trainer_state: TrainerState, positions: Positions) -> dict[str, Any]:
    """What a Checkpointer saves of a fit."""
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    state: dict[str, Any] = {
        "model": module,
        "optimizers": list(trainer.optimizers),
        "loops": trainer.fit_loop,
        "trainer": trainer_state,
        "data": positions,
        "callbacks": {},
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        **find_scores(module),
    }
    if getattr(plugin, "scaler", None) is not None:
        state["scaler"] = plugin.scaler
    if trainer.datamodule is not None and is_overridden("state_dict", trainer.datamodule):
        state["datamodule"] = trainer.datamodule
    hooked = []
    for callback in trainer.callbacks:
        held: dict[str, Any] = {}
        if is_overridden("state_dict", callback):
            held["state"] = callback
        if isinstance(callback, StochasticWeightAveraging):
            state["schedulers"] = SwaSchedulers(trainer, callback)
        elif isinstance(callback, WeightAveraging):
            held["average"] = callback._average_model
        elif is_overridden("on_save_checkpoint", callback):
            hooked.append(callback)
        if held:
            name = type(callback).__name__
            same = sum(key.partition("-")[0] == name for key in state["callbacks"])
            state["callbacks"][f"{name}-{same}" if same else name] = held
    if hooked or is_overridden("on_save_checkpoint", module):
        state["hooks"] = _Hooks(trainer, hooked)
    return state


class TrainerState:
    """What a Trainer knows beside its loops: the metrics that callbacks and schedulers monitor, as last logged; whether
    a callback has ended the fit; whether the loops are within an epoch. Their counts do not tell: a fit that began with
    a file of Lightning's may have begun more epochs than it counted."""

    def __init__(self, trainer: Trainer) -> None:
        self.is_in_epoch = False
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        found = self._trainer.callback_metrics.items()
        metrics = {name: (value.item(), str(value.dtype).removeprefix("torch.")) for name, value in found}
        return {"metrics": metrics, "should_stop": self._trainer.should_stop, "in_epoch": self.is_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = state["metrics"].items()
        metrics = {name: torch.tensor(value, dtype=getattr(torch, dtype)) for name, (value, dtype) in found}
        self._trainer._logger_connector._callback_metrics.update(metrics)
        self._trainer.should_stop, self.is_in_epoch = state["should_stop"], state["in_epoch"]


class _Hooks:
    """What on_save_checkpoint of the module and of callbacks adds to a checkpoint of Lightning's."""

    def __init__(self, trainer: Trainer, callbacks: list[Callback]) -> None:
        self._trainer, self._callbacks = trainer, callbacks

    def state_dict(self) -> dict[str, Any]:
        given = self._lightnings_own()
        made = dict(given)
        for callback in self._callbacks:
            callback.on_save_checkpoint(self._trainer, self._trainer.lightning_module, made)
        self._trainer.lightning_module.on_save_checkpoint(made)
        return {key: value for key, value in made.items() if key not in given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        made = {**self._lightnings_own(), **state}
        self._trainer.lightning_module.on_load_checkpoint(made)
        for callback in self._callbacks:
            callback.on_load_checkpoint(self._trainer, self._trainer.lightning_module, made)

    def _lightnings_own(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {},
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        }


class SwaSchedulers:
    """The schedulers of a fit with StochasticWeightAveraging, which replaces them by one that its own state holds."""

    def __init__(self, trainer: Trainer, swa: StochasticWeightAveraging) -> None:
        self._trainer, self._swa = trainer, swa
        self.is_replaced = False

    def state_dict(self) -> dict[str, Any]:
        if self._swa._initialized:
            return {"schedulers": None}
        return {"schedulers": [config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_replaced = state["schedulers"] is None
        for config, saved in zip(self._trainer.lr_scheduler_configs, state["schedulers"] or (), strict=False):
            config.scheduler.load_state_dict(saved)

    def resume(self) -> None:
        """Replaces the schedulers as at the begin of the epoch. The optimizer's rates stay as restored."""
        if self.is_replaced:
            groups = self._trainer.optimizers[0].param_groups
            rates = [{key: each[key] for key in each if key != "params"} for each in groups]
            self._swa.on_train_epoch_start(self._trainer, self._trainer.lightning_module)
            for group, saved in zip(groups, rates, strict=True):
                group.update(saved)
