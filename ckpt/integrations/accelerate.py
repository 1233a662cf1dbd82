"""Hugging Face Accelerate: a Checkpointer over all that an Accelerator has prepared.

    with ckpt.integrations.accelerate.attach(accelerator, "s3://bucket/run") as ck:
        for step, batch in zip(ck.steps(10_000), endless(loader)):
            ...

It saves the prepared models, optimizers, schedulers and scaler, what register_for_checkpointing() was given, and each
prepared loader's position. Within the block save_state() is a ck.save().
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import accelerate

import ckpt
from ckpt.integrations.accelerate_data import GUIDE, Position
from ckpt.integrations.peft import find_scores

TESTED = "1.15"
OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def attach(accelerator: accelerate.Accelerator, url: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """A Checkpointer over all that `accelerator` has prepared. It is called after prepare() and
    register_for_checkpointing().

    url, options: those of ckpt.Checkpointer, but for `state`. `ck.state` may get further values before the block.
    Errors: UsageError if no model was prepared, or for DeepSpeed, Megatron-LM and XLA.
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
        self._loaders = [Position(each, accelerator._models) for each in accelerator._dataloaders]
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
            self._emit(
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
            self._emit(
                "framework.also_saves",
                "the script calls accelerator.save_state() or load_state(): they write and read no folder in the "
                f"block. save_state() is a ck.save(), and entering the block has restored the state{hooks} {GUIDE}",
            )

    def _check_complete(self) -> None:
        late = [kind for kind, count in _prepared(self.accelerator).items() if count > self._attached[kind]]
        if late:
            self._emit(
                "framework.unsaved",
                f"prepared or registered after attach(), so not saved: {', '.join(late)}. Call attach() last {GUIDE}",
                framework="an Accelerator",
            )

    def _check_order(self) -> None:
        """Tells once of a batch that was drawn between the update and the end of its step."""
        ahead = next((each for each in self._loaders if each.is_training and each.drawn_at > self._drawn_before), None)
        if ahead is None or self._is_ahead_told or self.accelerator.scaler is not None:
            return
        self._is_ahead_told = True
        self._emit(
            "loader.ahead",
            "a batch was drawn after the update and before the step ended, so a restart skips it. Put ck.steps(n) "
            f"first in zip(), or call ck.step() directly after the update {GUIDE}",
            loader=next(name for name, each in self.state.items() if each is ahead),
            batches=1,
        )

    def _emit(self, name: str, text: str, **data: Any) -> None:
        if self.accelerator.is_main_process:
            self.events.emit(name, f"ckpt: {text}", loud=True, **data)


def _prepared(accelerator: Any) -> dict[str, int]:
    kinds = ("models", "optimizers", "schedulers", "dataloaders", "custom_objects")
    return {kind: len(getattr(accelerator, f"_{kind}")) for kind in kinds}


def _state(accelerator: Any, positions: Sequence[Position]) -> dict[str, Any]:
    """The state, by Accelerate's own names: model, model_1, optimizer, ..."""
    kinds = {
        "model": accelerator._models,
        "optimizer": [each.optimizer for each in accelerator._optimizers],
        "scheduler": [each.scheduler for each in accelerator._schedulers],
        "object": accelerator._custom_objects,
        "loader": positions,
    }
    state = {f"{kind}_{n}" if n else kind: each for kind, found in kinds.items() for n, each in enumerate(found)}
    for model in accelerator._models:
        state.update(find_scores(model))
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state
