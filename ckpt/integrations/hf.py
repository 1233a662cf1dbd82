"""ckpt for the Trainer of Hugging Face transformers: a callback that saves, and that resumes by itself.

    Trainer(..., callbacks=[ckpt.integrations.hf.Callback("s3://bucket/run")]).train()

The same command again goes on after the newest checkpoint, bit for bit: weights, optimizer, scheduler, the Trainer's
own state, callbacks' states, random generators and the data's position.

The Trainer offers callbacks no place where the model is prepared and the position is not yet fixed. So the callback
wraps methods of its Trainer (SEAMS), in this order of calls:

1. `_inner_training_loop` is the block of the Checkpointer. `_finalize_training`, which may load the best model, comes
   after the block.
2. `_init_training_state` tells the Trainer its position. The model is prepared and the Checkpointer entered in there.
3. `_run_epoch` begins an epoch, or goes on in its middle.
4. `get_batch_samples` begins an update: here, or at the epoch's end, the update before is a step of ckpt. What the
   Trainer logs, evaluates and saves after an update thus belongs to that step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

import ckpt
from ckpt.integrations.peft import find_scores

TESTED = "5.24"
# The methods of a Trainer that are wrapped while it trains.
BEGIN_AND_END = ("get_train_dataloader", "_init_training_state", "_prepare_for_training", "_finalize_training")
SEAMS = (*BEGIN_AND_END, "_run_epoch", "get_batch_samples", "_load_rng_state")
# What is restored of TrainerState; each start computes the rest.
COUNTED_FIELDS = ("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history")
STATE_FIELDS = (*COUNTED_FIELDS, "best_metric", "best_global_step", "best_model_checkpoint")
RESUMED = "ckpt"  # what the Trainer takes for the path of its own checkpoint while it skips batches


class Callback(TrainerCallback):
    """Saves the run of a Trainer at `url`, and resumes it. Give it to Trainer(callbacks=[...]); for a Trainer that
    exists, call `attach(trainer)` instead of trainer.add_callback().

    options: those of ckpt.Checkpointer, but for `state`. A step of ckpt is an update of the Trainer.
    `checkpointer`: the entered Checkpointer during train(), else None.

    A checkpoint at `url` wins over train(resume_from_checkpoint=), which counts only for a run's first start.
    Errors of train(): those of ckpt.Checkpointer; UsageError for a Trainer that cannot be resumed."""

    def __init__(self, url: str | os.PathLike[str], **options: Any) -> None:
        inspect.signature(ckpt.Checkpointer).bind(url, {}, **options)
        self.url, self.options = url, options
        self.checkpointer: ckpt.Checkpointer | None = None
        self._trainer: Any = None
        self._run: _Run | None = None

    def attach(self, trainer: Trainer) -> None:
        """Makes `trainer` save and resume. Errors: UsageError, if its version of transformers is too old."""
        if missing := [name for name in ("_inner_training_loop", *SEAMS) if not hasattr(trainer, name)]:
            raise ckpt.UsageError(
                f"transformers {transformers.__version__} has no Trainer.{missing[0]}, which ckpt.integrations.hf "
                f"wraps; it was tested with {TESTED}: install that version"
            )
        if self._trainer is not None:
            raise ckpt.UsageError("this ckpt.integrations.hf.Callback has a Trainer already; make one for each Trainer")
        self._trainer = trainer
        _wrap(trainer, "_inner_training_loop", self._train)
        if self not in trainer.callback_handler.callbacks:
            trainer.callback_handler.callbacks.append(self)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attach(_find_trainer(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is None:
            raise ckpt.UsageError(
                "ckpt.integrations.hf.Callback came too late to a Trainer that exists already: give it to "
                "Trainer(callbacks=[...]), or call callback.attach(trainer) instead of trainer.add_callback(callback)"
            )
        self._run.progress.fill_running_loss()

    def _train(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("trial") is not None:
            raise ckpt.UsageError(
                "ckpt.integrations.hf saves one run, and a hyperparameter search has many: leave it out"
            )
        if self._trainer.is_deepspeed_enabled:
            raise ckpt.UsageError("ckpt.integrations.hf cannot save DeepSpeed's partitions: use DDP or FSDP2")
        with contextlib.ExitStack() as block:
            self._run = _Run(self, self._trainer, block)
            block.callback(self._end_run)
            return inner(*args, **kwargs)

    def _end_run(self) -> None:
        self._run = self.checkpointer = None


class _Run:
    """One call of train(): the Checkpointer, and where the training is. `block`: open until the training ends. The
    methods of SEAMS get the Trainer's own method first."""

    def __init__(self, callback: Callback, trainer: Any, block: contextlib.ExitStack) -> None:
        self.callback, self.trainer, self.block = callback, trainer, block
        self.progress = _Progress(trainer)
        self._loader: Any = None
        self._prepared: Any = None
        self._ended_step = 0
        self._is_resumed = False
        self._generators: Any = None  # as restored
        for name in SEAMS:
            block.callback(setattr, trainer, name, getattr(trainer, name))
            _wrap(trainer, name, getattr(self, name))

    def get_train_dataloader(self, inner: Any) -> Any:
        self._loader = loader = inner()
        base = getattr(loader, "base_dataloader", loader)
        sampler = getattr(base, "batch_sampler", None)
        if sampler is not None and not isinstance(base.dataset, torch.utils.data.IterableDataset):
            self.progress.sampler = _NotingSampler(sampler)
            # A DataLoader refuses to change the attribute, since its iterators read it. None has been made yet.
            object.__setattr__(base, "batch_sampler", self.progress.sampler)
        return loader

    def _init_training_state(self, inner: Any, max_steps: int, updates: int, epochs: int, *more: Any) -> Any:
        """Prepares the model and enters the Checkpointer. Returns the epoch, and the batches of it that are trained."""
        trainer, progress, resume = self.trainer, self.progress, more[0]
        position = progress.epoch, progress.batches = inner(max_steps, updates, epochs, *more)
        self._prepared = trainer._prepare_for_training(max_steps, self._loader, resume)
        state = {
            "model": self._prepared[0],
            "optim": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "sched": trainer.lr_scheduler,
            "trainer": progress,
            **find_scores(self._prepared[0]),
        }
        if getattr(trainer.accelerator, "scaler", None) is not None:
            state["scaler"] = trainer.accelerator.scaler
        ck = ckpt.Checkpointer(self.callback.url, state, **self.callback.options)
        self.callback.checkpointer = self.block.enter_context(ck)
        self._generators = _read_generators(cuda=True)
        self._is_resumed = ck.restored.step > 0
        self._ended_step = trainer.state.global_step
        self._tell(ck, resume)
        if self._is_resumed:
            trainer.args.eval_on_start = False  # the run began before
            position = self._find_position()
        if trainer.state.global_step >= max_steps or any(map(_is_exhausted, trainer.callback_handler.callbacks)):
            text = f"the run has ended at step {trainer.state.global_step}: nothing is trained. "
            text += "For a new run give another URL; to go on, give more steps, or more patience to early stopping"
            ck.events.emit("run.finished", f"ckpt: {text}", loud=True)
            return epochs, 0
        return position

    def _prepare_for_training(self, inner: Any, *args: Any) -> Any:
        return self._prepared or inner(*args)

    def _run_epoch(self, inner: Any, **call: Any) -> None:
        progress, epoch = self.progress, call["epoch"]
        is_first = epoch == call["epochs_trained"]
        progress.epoch, progress.batches = epoch, call["steps_trained_in_current_epoch"] if is_first else 0
        if is_first and self._is_resumed:
            self._resume_epoch(call)
        else:
            progress.epoch_begin = _read_generators()
        inner(**call)
        if not self.trainer.control.should_training_stop or progress.batches >= call["steps_in_epoch"]:
            progress.epoch, progress.batches = epoch + 1, 0
        self._end_step()

    def _resume_epoch(self, call: dict[str, Any]) -> None:
        progress = self.progress
        # The Trainer would load the generators of its own checkpoint.
        call["resume_from_checkpoint"] = RESUMED if progress.batches else None
        if not progress.batches:
            _write_generators(self._generators)
            progress.epoch_begin = _read_generators()
            return
        # The loader that skips does not hand the epoch on to all samplers.
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(call["epoch"])
        # A sampler may draw the epoch's order from the global generators, and a loader its workers' seeds.
        _write_generators(progress.epoch_begin)
        if progress.sampler is not None:
            progress.sampler.resume = progress.batches, progress.sampler.before, self._generators

    def get_batch_samples(self, inner: Any, *args: Any) -> Any:
        self._end_step()
        found = inner(*args)
        self.progress.batches += len(found[0])
        return found

    def _load_rng_state(self, inner: Any, checkpoint: Any) -> None:
        if checkpoint != RESUMED:
            inner(checkpoint)
        elif self.progress.sampler is None:
            _write_generators(self._generators)

    def _finalize_training(self, inner: Any, *args: Any) -> Any:
        self.block.close()
        return inner(*args)

    def _end_step(self) -> None:
        """Ends a step of ckpt, if the Trainer has made an update since the last one."""
        if self.trainer.state.global_step != self._ended_step and self.callback.checkpointer is not None:
            self._ended_step = self.trainer.state.global_step
            self.callback.checkpointer.step()

    def _find_position(self) -> tuple[int, int]:
        """The restored epoch, and the batches of it that are trained, in batches of this start."""
        progress, saved, args = self.progress, self.progress.saved_data, self.trainer.args
        if not progress.batches or args.ignore_data_skip:
            return progress.epoch, 0
        now, anew = progress.describe_data(), "set TrainingArguments(ignore_data_skip=True) to begin this epoch anew"
        if changed := [key for key in now if key != "batch_size" and now[key] != saved[key]]:
            lines = ", ".join(f"{key} was {saved[key]} and is {now[key]}" for key in changed)
            raise ckpt.UsageError(
                f"the checkpoint is in the middle of an epoch, and the data's order has changed: {lines}. Set them as "
                f"they were, or {anew}"
            )
        batches, rest = divmod(progress.batches * saved["batch_size"], now["batch_size"])
        if rest or batches % args.gradient_accumulation_steps:
            raise ckpt.UsageError(
                f"the checkpoint is {progress.batches * saved['batch_size']} samples into its epoch, which is no whole "
                f"number of updates of {now['batch_size']} x {args.gradient_accumulation_steps} samples. Set batch "
                f"size, ranks and gradient accumulation as they were, or {anew}"
            )
        return progress.epoch, batches

    def _tell(self, ck: ckpt.Checkpointer, resume: Any) -> None:
        args = self.trainer.args
        if not self.trainer.is_world_process_zero():
            return
        if ".".join(transformers.__version__.split(".")[:2]) != TESTED:
            text = f"ckpt.integrations.hf was tested with transformers {TESTED}; this is {transformers.__version__}"
            ck.events.emit("framework.untested", f"ckpt: {text}", loud=True)
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" and not args.save_only_model:
            text = f"the Trainer also saves checkpoints, to {args.output_dir}, which ckpt does not need. "
            text += 'Set TrainingArguments(save_strategy="no"), or save_only_model=True to keep weights only'
            ck.events.emit("framework.also_saves", f"ckpt: {text}", loud=True)
        if self._is_resumed and resume is not None:
            text = f"resume_from_checkpoint={str(resume)!r} is not used: ckpt has a checkpoint of this run"
            ck.events.emit("framework.resume_ignored", f"ckpt: {text}", loud=True)
        if self.progress.lost_best is not None:
            text = f"{self.progress.lost_best}, the Trainer's folder of the best model so far, is gone: "
            text += "only a model that is better will be loaded at the end"
            ck.events.emit("best_model.lost", f"ckpt: {text}", loud=True)
        if self.progress.sampler is None:
            text = "the training data is an IterableDataset: a restart in the middle of an epoch reads the epoch's "
            text += "samples up to its position again. The dataset must give them in the same order"
            ck.events.emit("loader.inexact", f"ckpt: {text}", loud=True, loader="train_dataset")


class _Progress:
    """What the Trainer has beside model, optimizer and scheduler, and the data's position; an object of the state.

    `epoch`, `batches`: the running epoch, and how many of its batches this rank has trained. `epoch_begin`: the CPU's
    generators when it began. `sampler.before`: those before the batch was read that the loader holds in advance."""

    def __init__(self, trainer: Any) -> None:
        self.epoch = self.batches = 0
        self.epoch_begin: Any = None
        self.sampler: _NotingSampler | None = None
        self.saved_data: dict[str, Any] = {}
        self.lost_best: str | None = None  # the restored folder of the best model, if it is gone
        self._trainer = trainer
        self._running_loss: tuple[float, int] | None = None

    def describe_data(self) -> dict[str, Any]:
        """What the position and the order of the data depend on."""
        args, data = self._trainer.args, self._trainer.train_dataset
        total = self._trainer.get_total_train_batch_size(args)
        groups = {
            "group_by_length": args.train_batch_size * args.gradient_accumulation_steps,
            "batch_rebalance": f"{total} in {args.world_size} x {args.gradient_accumulation_steps}",
        }
        return {
            "batch_size": total // args.gradient_accumulation_steps,
            "length_groups": groups.get(getattr(args, "train_sampling_strategy", "")),
            "samples": len(data) if hasattr(data, "__len__") else None,
            "seed": args.seed if args.data_seed is None else args.data_seed,
        }

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loss = getattr(trainer, "_tr_loss", None)
        kept = {name: getattr(trainer.state, name) for name in STATE_FIELDS}
        return {
            "state": json.loads(json.dumps(kept, default=float)),
            "callbacks": [[name, each.state()["attributes"]] for name, each in self._stateful_callbacks()],
            "epoch": self.epoch,
            "batches": self.batches,
            "data": self.describe_data(),
            "epoch_begin": self.epoch_begin,
            "ahead": None if self.sampler is None else self.sampler.before,
            "running_loss": 0.0 if loss is None else loss.item(),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "flos": trainer.current_flos,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        for name, value in saved["state"].items():
            setattr(state, name, value)
        if state.best_model_checkpoint is not None and not os.path.isdir(state.best_model_checkpoint):
            self.lost_best, state.best_model_checkpoint = state.best_model_checkpoint, None
        callbacks = list(self._stateful_callbacks())
        for name, attributes in saved["callbacks"]:
            found = next((each for each in callbacks if each[0] == name), None)
            if found is not None:
                callbacks.remove(found)
                for attribute, value in attributes.items():
                    setattr(found[1], attribute, value)
        self.epoch, self.batches, self.saved_data = saved["epoch"], saved["batches"], saved["data"]
        self.epoch_begin = saved["epoch_begin"]
        if self.sampler is not None:
            self.sampler.before = saved["ahead"]
        self._running_loss = saved["running_loss"], saved["last_logged"]
        trainer.current_flos = saved["flos"]

    def fill_running_loss(self) -> None:
        """Restores the sum of losses since the last log, which the Trainer has just zeroed. The final train_loss stays
        the mean of this start's steps."""
        if self._running_loss is not None:
            trainer, (loss, step) = self._trainer, self._running_loss
            trainer._tr_loss += loss
            trainer._total_loss_scalar -= loss
            trainer._globalstep_last_logged = step

    def _stateful_callbacks(self) -> Iterator[tuple[str, Any]]:
        for each in self._trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState):
                yield type(each).__name__, each


class _NotingSampler:
    """A batch sampler that notes the CPU's generators before each batch is read. `resume`: the number of a batch, the
    generators for its reading, and those for what comes after."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.before: Any = None
        self.resume: tuple[int, Any, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        resume, self.resume = self.resume, None
        for number, batch in enumerate(self.inner):
            if resume is not None and number == resume[0]:
                _write_generators(resume[1])
            self.before = _read_generators()
            yield batch
            if resume is not None and number == resume[0]:
                _write_generators(resume[2])


def _read_generators(cuda: bool = False) -> dict[str, Any]:
    """The global generators of Python, NumPy and torch. Skipping batches moves those of the CPU only."""
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state().numpy()}
    if cuda and torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _write_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def _is_exhausted(callback: Any) -> bool:
    return (
        isinstance(callback, EarlyStoppingCallback)
        and callback.early_stopping_patience_counter >= callback.early_stopping_patience
    )


def _wrap(trainer: Any, name: str, wrapper: Any) -> None:
    """Replaces a method of this one Trainer. `wrapper` gets the method first, then its arguments."""
    setattr(trainer, name, functools.partial(wrapper, getattr(trainer, name)))


def _find_trainer(callback: Callback) -> Any:
    """The Trainer that is being made: it calls the callback, and does not name itself."""
    frame: Any = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    raise ckpt.UsageError("no Trainer is being made here: call callback.attach(trainer)")
