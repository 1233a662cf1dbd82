"""The optimizer steps since the last boundary: whether one has ended, and whether one was left in its middle.

Breaks, saves and polls depend on it. A step that a GradScaler of the state has skipped, since the gradients were not
finite, counts as well: the loop goes on and counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import ref

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt.events import Events
from ckpt.trainer.loop.gradients import Gradients
from ckpt.trainer.loop.unregistered_optimizers import UnregisteredOptimizers, find_held, find_saved
from ckpt.trainer.loop.weights import Weights, are_equal_glances
from ckpt.trainer.snapshot.deferred_copy import owns_any_storage, params_of
from ckpt.trainer.state import value_trees
from ckpt.trainer.state.shard import storage_addresses
from ckpt.trainer.state.state_nodes import ModuleNode, ObjectNode, OptimizerNode
from ckpt.trainer.state.state_walk import Walk

T = TypeVar("T")


class StepTracking:
    """Counts the steps of optimizers, from `install_hooks` to `close`. `walk()`: the present walk. These optimizers
    count:
    - those in `state`;
    - those that own a tensor of the state, inside wrappers or not registered;
    - those that an object in the state holds and saves copies of.

    Facts since the last boundary:
    - `finished_updates`: how many steps have ended; `is_fenced`: whether changes by hand were announced; `is_swapped`:
      whether `ck.swapped()` has put other weights in;
    - `scaler_states`: what each of `scalers` was collecting for one step, as of the boundary;
    - `foreign_optimizer`: an optimizer that has stepped and owns nothing of the state, while none that counts has or
      was to.

    `has_manual_updates`: no optimizer that counts has ever stepped, so updates are made by hand. `is_idle`:
    `note_step_end` has nothing to do before the next update. The hooks run after those that wait for a copy, and after
    the user's own: an exception in those has changed nothing."""

    def __init__(self, state: dict[str, Any], walk: Callable[[], Walk], events: Events) -> None:
        self.finished_updates = 0
        self.is_fenced = False
        self.is_swapped = False
        self.has_manual_updates = True
        self.is_idle = False
        self.foreign_optimizer: Optimizer | None = None
        self.scalers: Sequence[GradScaler] = ()
        self.scaler_states: Sequence[object] = ()
        self.unregistered = UnregisteredOptimizers(events)
        self.weights = Weights(self._walked_parts)
        self.gradients = Gradients(
            lambda: [view.optimizer for view in walk().scan.views.values()],
            lambda: self.has_manual_updates and not are_equal_glances(self._first_glance, self.weights.glance()),
        )
        self._state = state
        self._walk = walk
        self._events = events
        self._reported_events: set[str] = set()
        self._has_judged_foreign = False
        # Weak references: what has left the state is freed, even if no optimizer steps any more.
        self._adopted_walk: ref[Walk] | None = None
        self._adopted_parts: list[ref[Optimizer | nn.Module]] = []
        self._storages: frozenset[int] = frozenset()
        self._hooks: list[RemovableHandle] = []
        # By id, since some optimizers have no hash or equal others: whether each one's steps count.
        self._counted_by_id: dict[int, tuple[ref[Optimizer], bool]] = {}
        self._last_hooks: dict[int, RemovableHandle] = {}  # the last hook of each optimizer, by id
        self._running_steps: list[Optimizer] = []  # one per step that has not ended: on several threads, or nested

    def install_hooks(self, step: int = 0) -> None:
        """Installs the hooks. `step`: the restored step."""
        self._first_glance = self.weights.take_first_glance()
        self.gradients.begin(step)
        self._hooks.append(register_optimizer_step_pre_hook(self._install_last_hook))
        self._hooks.append(register_optimizer_step_post_hook(self._on_step_end))
        self._adopt_walk()
        self.scaler_states = self.read_scaler_states()

    def close(self) -> None:
        """Removes the hooks."""
        for hook in (*self._hooks, *self._last_hooks.values()):
            hook.remove()

    def read_scaler_states(self) -> Sequence[object]:
        """The present value for `scaler_states`. A scaler's update(), also after a step that it skipped, begins another
        collection. None: the scaler is in the middle of a step."""
        found = (getattr(scaler, "_per_optimizer_states", None) for scaler in self.scalers)
        return [None if each else each for each in found]

    @property
    def pending_updates(self) -> int:
        """How many updates no step has ended."""
        return self.finished_updates or int(
            any(_has_updated(*each) for each in zip(self.scalers, self.scaler_states, strict=False))
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

    def report_foreign_optimizer(self, others: Iterable[StepTracking]) -> None:
        """At a boundary: warns once if the loop trains what is not saved, neither here nor by `others`, the other
        Checkpointers of this process. There is no warning if an object of the user's in the state holds the optimizer,
        with weights of its own. Nor is there one if the state has no torch optimizer, since such an object may hold the
        weights."""
        optimizer, self.foreign_optimizer = self.foreign_optimizer, None
        everyone = [self, *others]
        if optimizer is None or any(each._is_counted(optimizer) for each in everyone):
            return
        self._has_judged_foreign = True
        if id(optimizer) in find_saved(each._walk() for each in everyone):
            return
        if any(isinstance(node, OptimizerNode) for node in self._walk().scan.nodes):
            text = (
                "the loop trains what is not in the state. The only optimizer that has stepped is not in the state, "
                "and trains nothing in it. What it trains is not saved. Give the Checkpointer the model and the "
                "optimizer that the loop uses. If the script has made new ones since, assign them in ck.state"
            )
            self._emit("optimizer.not_registered", text)

    def _install_last_hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first hook of a step. It makes `_on_step_begin` the last hook."""
        if not self._is_counted(optimizer):
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
                self.has_manual_updates, self.foreign_optimizer = False, None
                del self._running_steps[at]
                self.unregistered.note_step(optimizer)
                return
        self.foreign_optimizer = optimizer if self.has_manual_updates and not self._has_judged_foreign else None

    def _is_counted(self, optimizer: Optimizer) -> bool:
        if self._adopted_walk is None or self._adopted_walk() is not self._walk():
            self._adopt_walk()
        known = self._get_counted(optimizer)
        # An optimizer that counted still does until the next walk.
        if not known and not self._are_adopted(self._find_parts()):
            self._adopt_walk()
            known = self._get_counted(optimizer)
        if known is None:
            # An inner optimizer may see other parameter objects, which the outer one has put in place.
            around = storage_addresses(param for each in self._running_steps for param in params_of(each))
            known = owns_any_storage(optimizer, self._storages | around)
            self._counted_by_id[id(optimizer)] = ref(optimizer), known
        return known

    def _get_counted(self, optimizer: Optimizer) -> bool | None:
        found = self._counted_by_id.get(id(optimizer))
        return found[1] if found is not None and found[0]() is optimizer else None

    def _find_parts(self) -> list[Optimizer | nn.Module]:
        """The optimizers and modules in the state's dicts and lists. A new one that is assigned there may step before
        the next walk."""
        return _find_instances((Optimizer, nn.Module), self._state, set())

    def _walked_parts(self) -> list[Optimizer | nn.Module]:
        """The optimizers and modules at the places where the walk found some. It runs at each boundary, and looks at no
        plain value."""
        try:
            found = [node.value for node in self._walk().scan.nodes if isinstance(node, (ModuleNode, OptimizerNode))]
        except LookupError:  # an object has left the state
            return self._find_parts()
        return [each for each in found if isinstance(each, (Optimizer, nn.Module))]

    def _are_adopted(self, parts: Sequence[Optimizer | nn.Module]) -> bool:
        followed = self._adopted_parts
        return len(parts) == len(followed) and all(one() is other for one, other in zip(followed, parts, strict=True))

    def _adopt_walk(self) -> None:
        """Takes over a new walk or a changed state. Asks no object for its state."""
        walk, parts = self._walk(), self._find_parts()
        self._adopted_walk, self._adopted_parts = ref(walk), [*map(ref, parts)]
        params = (param for each in parts if isinstance(each, nn.Module) for param in each.parameters())
        self._storages = walk.storages | storage_addresses(params)
        self._counted_by_id = {id(each): (ref(each), True) for each in parts if isinstance(each, Optimizer)}
        for node in walk.scan.nodes:
            # Only objects that save weights of their own.
            if isinstance(node, ObjectNode) and walk.scan.tensors_by_node[node.path]:
                held = find_held(node)
                if not any(owns_any_storage(each, self._storages) for each in held):
                    self._counted_by_id.update((id(each), (ref(each), True)) for each in held)
        scalers = _find_instances(GradScaler, self._state, set())
        if [*map(id, scalers)] != [*map(id, self.scalers)]:
            # Before the next boundary nothing is known of the new scalers.
            self.scalers, self.scaler_states = scalers, ()


def _has_updated(scaler: GradScaler, collected: object) -> bool:
    return collected is not None and scaler._per_optimizer_states is not collected


def _find_instances(kind: type[T] | tuple[type[T], ...], value: Any, seen: set[int]) -> list[T]:
    if isinstance(value, kind):
        return [value]
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
        return []
    # A state that contains itself is refused later, by name.
    seen.add(id(value))
    # A copy: any thread may step.
    items = list(value.values()) if isinstance(value, dict) else value
    if set(map(type, items)) <= value_trees.PLAIN:
        return []
    return [found for item in items for found in _find_instances(kind, item, seen)]
