"""Lightning's Trainer with ckpt: one callback saves the whole state of a fit and goes on from it.

    Trainer(callbacks=[ckpt.integrations.lightning.Checkpoint("s3://bucket/run", policy=ckpt.Every(steps=100))])

The callback owns a Checkpointer. `trainer.fit` enters it before the first batch and leaves it before `on_train_end`.
A step of ckpt is one batch after which an optimizer has stepped. The step ends once all hooks of that batch have run
and before a validation that is due then. A restart runs that validation first, and then draws the next batch.

The loops' own restart of Lightning is not used: it skips such a validation, forgets the metrics that schedulers and
callbacks monitor, and draws an epoch's data anew. Two subclasses of Lightning's loops do instead what is needed.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loops import _Loop
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn

import ckpt
from ckpt.integrations.lightning_data import Positions
from ckpt.integrations.lightning_state import SwaSchedulers, TrainerState, find_state

TESTED = "2.6"


class Checkpoint(LightningCheckpoint):  # type: ignore[misc]
    """Saves the state of `trainer.fit` at `url`, and goes on from the newest checkpoint there by itself.

    url, options: those of ckpt.Checkpointer. Saved are the module, optimizers, schedulers, the precision plugin's
    scaler, the loops' progress, callbacks and data module with a state, logged metrics, and the data's position.

    A checkpoint at `url` wins over `fit(ckpt_path=)`, which counts only for a run without one. `checkpointer` is the
    Checkpointer of the present or last fit. Errors of fit: those of ckpt.Checkpointer; ckpt.Leave, a SystemExit."""

    # Lightning asks each checkpoint callback for it.
    best_model_path = ""

    def __init__(self, url: str | os.PathLike[str], **options: Any) -> None:
        self.checkpointer: ckpt.Checkpointer | None = None
        self._url, self._options = url, options
        self._run: _Run | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # trainer.checkpoint_callback is the first one, and has to be the one that knows the best model.
        # A new list, since Lightning iterates over this one.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda each: each is self)
        self._run = _Run(trainer, self)
        for part, kind in (
            (trainer.fit_loop, _CheckpointedFitLoop),
            (trainer.fit_loop.epoch_loop, _CheckpointedEpochLoop),
            (trainer._signal_connector, _CheckpointedSignals),
        ):
            if not isinstance(part, kind):
                part.__class__ = type(type(part).__name__, (kind, type(part)), {})
            part._ckpt = self._run

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._run is not None:
            self._run.leave(exception)

    def make_checkpointer(self, state: dict[str, Any]) -> ckpt.Checkpointer:
        """Makes the Checkpointer of a fit over `state`."""
        self.checkpointer = ckpt.Checkpointer(self._url, state, **self._options)
        return self.checkpointer


class _Run:
    """One fit: what the parts of its Trainer share."""

    def __init__(self, trainer: Trainer, callback: Checkpoint) -> None:
        self.trainer = trainer
        self.positions = Positions(trainer.fit_loop)
        self.is_resuming = False  # within an epoch, before its first batch
        self._callback = callback
        self._trainer_state = TrainerState(trainer)
        self._checkpointer: ckpt.Checkpointer | None = None
        self._global_step = 0
        self._generators: dict[str, Any] | None = None
        self._requeue_signal: int | None = None  # Slurm's, once it came
        self._requeue_handlers: dict[int, Any] = {}

    def enter(self) -> None:
        """Restores the newest checkpoint. From here on the fit is saved."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        state = find_state(trainer, self._trainer_state, self.positions)
        checkpointer = self._callback.make_checkpointer(state)
        _report(trainer, checkpointer)
        self._listen_for_requeue()
        checkpointer.__enter__()
        self._checkpointer, self._global_step = checkpointer, trainer.global_step
        if checkpointer.restored.step:
            if path := trainer._checkpoint_connector._ckpt_path:
                text = (
                    f"ckpt: fit(ckpt_path={str(path)!r}) only begins a run. This one goes on from its own checkpoint, "
                )
                text += f"{checkpointer.restored.source}"
                checkpointer.events.emit("framework.resume_ignored", text, loud=True)
            self._generators = _collect_rng_states()
            self.is_resuming = self._trainer_state.is_in_epoch
            if not self.is_resuming:
                _clear_restarting(loop)
                loop.on_iteration_done()
            elif isinstance(state["schedulers"], SwaSchedulers):
                state["schedulers"].resume()
            # Lightning then makes no sanity check.
            loop.epoch_loop.val_loop.restarting = True
            self.positions.begin_again(self.is_resuming)

    def _listen_for_requeue(self) -> None:
        """ckpt saves at the signal; what is left to do is that Lightning puts the job into Slurm's queue again."""
        environment = self.trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            number = environment.requeue_signal
            self._requeue_handlers[number] = signal.signal(number, self._note_requeue)

    def _note_requeue(self, number: int, frame: Any) -> None:
        self._requeue_signal = number

    def restore_generators(self) -> None:
        """Takes back the random numbers that Lightning has drawn since the restore."""
        if self._generators is not None:
            _set_rng_states(self._generators)

    def end_batch(self) -> None:
        """Ends a step of ckpt if an optimizer has stepped."""
        if self._checkpointer is not None and self.trainer.global_step != self._global_step:
            self._global_step = self.trainer.global_step
            self._trainer_state.is_in_epoch = True
            if why := self.positions.find_inexactness():
                self._checkpointer.events.emit("loader.inexact", f"ckpt: {why}", loud=True, loader="data")
            self._checkpointer.step()

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the Checkpointer, once: after an error, or after the last epoch."""
        self._trainer_state.is_in_epoch = False
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            try:
                checkpointer.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
            finally:
                for number, handler in self._requeue_handlers.items():
                    signal.signal(number, handler)
            if self._requeue_signal is not None and isinstance(error, ckpt.Leave):
                self.trainer.save_checkpoint = lambda *args, **kwargs: None
                self.trainer._signal_connector._slurm_sigusr_handler_fn(self._requeue_signal, None)


class _CheckpointedSignals(_SignalConnector):  # type: ignore[misc]
    """ckpt listens to signals instead of Lightning, whose handlers begin a collective in the middle of another."""

    _ckpt: _Run

    def register_signal_handlers(self) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:
            super().register_signal_handlers()
            return
        # Lightning has finished its own restore.
        self._ckpt.enter()


class _CheckpointedFitLoop(_FitLoop):  # type: ignore[misc]
    """The fit loop inside a Checkpointer."""

    _ckpt: _Run

    def run(self) -> None:
        self._ckpt.restore_generators()
        super().run()
        self._ckpt.leave()

    def reset(self) -> None:
        if not self._ckpt.is_resuming:
            super().reset()
            return
        torch.set_grad_enabled(True)
        self._restart_stage = RestartStage.RESTARTED_MID_EPOCH

    def on_run_start(self) -> None:
        super().on_run_start()
        # A new epoch begins next: its order depends on them.
        self._ckpt.restore_generators()

    def on_run_end(self) -> None:
        # Before callbacks put averaged weights into the module.
        self._ckpt.leave()
        super().on_run_end()

    def _load_combined_loader_states(self) -> None:
        # Lightning has just made the loaders, and iterates over them next.
        self._ckpt.positions.attach(self._ckpt.is_resuming)


class _CheckpointedEpochLoop(_TrainingEpochLoop):  # type: ignore[misc]
    """The loop over an epoch's batches, in which each batch with an update is a step."""

    _ckpt: _Run

    def reset(self) -> None:
        if not self._ckpt.is_resuming:
            super().reset()
            return
        # The progress was saved between two batches: nothing is to be reset, counted on or skipped.
        _clear_restarting(self.trainer.fit_loop)

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        if self._ckpt.is_resuming:
            self._ckpt.is_resuming = False
            self._ckpt.positions.read_again(data_fetcher)
            self._ckpt.restore_generators()
            super().on_advance_end(data_fetcher)

    def advance(self, data_fetcher: Any) -> None:
        self._ckpt.positions.note_fetch(data_fetcher)
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        self._ckpt.end_batch()
        super().on_advance_end(data_fetcher)


def _report(trainer: Trainer, checkpointer: ckpt.Checkpointer) -> None:
    """Says once what a user should know of this version and of this Trainer."""
    if not trainer.is_global_zero:
        return
    if not lightning.__version__.startswith(f"{TESTED}."):
        text = f"ckpt: tested with Lightning {TESTED}; this is {lightning.__version__}, which may differ"
        checkpointer.events.emit("framework.untested", text, loud=True)
    others = [
        type(each).__name__ for each in trainer.callbacks if isinstance(each, ModelCheckpoint | OnExceptionCheckpoint)
    ]
    if others:
        text = f"ckpt: {', '.join(others)} saves files of its own beside ckpt. fit goes on from ckpt's checkpoint"
        checkpointer.events.emit("framework.also_saves", text, loud=True)


def _clear_restarting(loop: _FitLoop) -> None:
    """Tells all loops that they go on. The fit loop's own setter says otherwise if max_steps is given."""
    _Loop.restarting.fset(loop, False)
