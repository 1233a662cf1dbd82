"""The optimizer steps since the last boundary: whether one has ended, and whether one was left in its middle.

Breaks, saves and polls depend on it. A step that a GradScaler of the state has skipped, since the gradients were not
finite, counts as well: the loop goes on and counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt.events import Events
from ckpt.trainer.loop.counted_optimizers import CountedOptimizers
from ckpt.trainer.loop.gradients import Gradients
from ckpt.trainer.loop.unsaved_optimizers import UnregisteredOptimizers
from ckpt.trainer.loop.weights import Weights
from ckpt.trainer.state.state_walk import Walk


class StepTracking:
    """Counts the steps of optimizers, from `install_hooks` to `close`. `counted`: those that count.

    Facts since the last boundary:
    - `finished_updates`: how many steps have ended; `is_fenced`: whether changes by hand were announced; `is_swapped`:
      whether `ck.swapped()` has put other weights in;
    - `scaler_states`: by scaler of the state, what it was collecting for one step, as of the boundary.

    `has_manual_updates`: no optimizer that counts has ever stepped, so updates are made by hand. `is_idle`:
    `note_step_end` has nothing to do before the next update. The hooks run after those that wait for a copy, and after
    the user's own: an exception in those has changed nothing."""

    def __init__(self, state: dict[str, Any], walk: Callable[[], Walk], events: Events) -> None:
        self.finished_updates = 0
        self.is_fenced = False
        self.is_swapped = False
        self.has_manual_updates = True
        self.is_idle = False
        self.scaler_states: Sequence[tuple[GradScaler, object]] = ()
        self.counted = CountedOptimizers(state, walk)
        self.unregistered = UnregisteredOptimizers(events)
        self.weights = Weights(self.counted.walked_parts)
        self.gradients = Gradients(
            lambda: [view.optimizer for view in walk().scan.views.values()],
            lambda: self.has_manual_updates and self.weights.have_changed,
        )
        self._events = events
        self._reported_events: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._last_hooks: dict[int, RemovableHandle] = {}  # the last hook of each optimizer, by id
        self._running_steps: list[Optimizer] = []  # one per step that has not ended: on several threads, or nested

    def install_hooks(self, step: int = 0) -> None:
        """Installs the hooks. `step`: the restored step."""
        self.weights.begin()
        self.gradients.begin(step)
        self._hooks.append(register_optimizer_step_pre_hook(self._install_last_hook))
        self._hooks.append(register_optimizer_step_post_hook(self._on_step_end))
        self.counted.adopt()
        self.scaler_states = self.read_scaler_states()

    def close(self) -> None:
        for hook in (*self._hooks, *self._last_hooks.values()):
            hook.remove()

    def read_scaler_states(self) -> Sequence[tuple[GradScaler, object]]:
        """The present value for `scaler_states`. A scaler's update(), also after a step that it skipped, begins another
        collection. None: the scaler is in the middle of a step."""
        found = ((scaler, getattr(scaler, "_per_optimizer_states", None)) for scaler in self.counted.scalers)
        return [(scaler, None if collected else collected) for scaler, collected in found]

    @property
    def pending_updates(self) -> int:
        """How many updates no step has ended. Of a new scaler nothing is known before the next boundary."""
        scalers = self.counted.scalers
        return self.finished_updates or int(
            any(_has_updated(*each) for each in self.scaler_states if each[0] in scalers)
        )

    @property
    def is_torn(self) -> bool:
        return bool(self._running_steps)

    @property
    def torn_reason(self) -> str:
        """Why the state may hold half an update; "" if it does not. Later steps do not mend a torn state."""
        for optimizer in self._running_steps[:1]:
            return (
                f"{type(optimizer).__name__}.step() has begun and not ended, for instance because of an exception in "
                "it. The state may hold a part of that update, so it is not saved any more. Start again from the "
                "newest checkpoint. Do what may fail before step(), not in its closure"
            )
        return ""

    def report_torn(self) -> str:
        """`torn_reason`, which an event reports once."""
        torn = self.torn_reason
        if torn:
            self._emit("optimizer.interrupted", torn)
        return torn

    def _emit(self, name: str, text: str) -> None:
        """Emits the event, as a warning, once."""
        if name not in self._reported_events:
            self._reported_events.add(name)
            self._events.emit(name, f"ckpt: {text}", loud=True)

    def note_step_end(self, step: int) -> None:
        """Notes that `step` ends, with an update or without one."""
        has_updated = self.pending_updates > 0
        if has_updated:
            self.gradients.note_update(step)
        else:
            self.gradients.is_watching = True
        self.weights.note_step_end(has_updated)
        self.is_idle = not (has_updated or self.weights.is_watching)

    def note_poll(self) -> None:
        """Notes a poll or a save: more may come."""
        self.weights.is_watching, self.is_idle = True, False

    def report_waiting_gradients(self, step: int) -> str:
        """`Gradients.waiting_reason` at the end of `step`, the last one; an event reports it once."""
        why = self.gradients.waiting_reason(step)
        if why:
            text = f"a snapshot due at step {step} waits for the next step with an update: {why}"
            self._emit("gradients.waiting", text)
        return why

    def report_swapped_weights(self, step: int) -> str:
        """Why the present state is not that of the end of `step`, the last one; "" if it is. An event reports it
        once."""
        if self.is_swapped:
            return "ck.swapped() has put averaged weights in"
        if not self.weights.are_swapped:
            return ""
        why = (
            f"the parameters are not those of the end of step {step}, for instance because averaged weights are "
            "swapped in for an evaluation. The newest earlier snapshot counts. Swap back before ck.poll() or "
            "ck.save(). Make a change that is to stay before ck.step()"
        )
        self._emit("weights.swapped", f"no snapshot is taken now: {why}")
        return why

    def _install_last_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first hook of a step. It makes `_on_step_begin` the last hook."""
        if not self.counted.is_counted(optimizer, self._running_steps):
            return
        last = self._last_hooks.get(id(optimizer))
        if last is None or next(reversed(optimizer._optimizer_step_pre_hooks), None) != last.id:
            if last is not None:
                last.remove()
            self._last_hooks[id(optimizer)] = optimizer.register_step_pre_hook(self._on_step_begin)

    def _on_step_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._running_steps.append(optimizer)

    def _on_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for at, begun in enumerate(self._running_steps):
            if begun is optimizer:
                self.finished_updates += 1
                self.has_manual_updates, self.unregistered.foreign = False, None
                del self._running_steps[at]
                self.unregistered.note_step(optimizer)
                return
        if self.has_manual_updates:
            self.unregistered.note_foreign(optimizer)


def _has_updated(scaler: GradScaler, collected: object) -> bool:
    return collected is not None and scaler._per_optimizer_states is not collected
