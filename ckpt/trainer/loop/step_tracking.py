"""Whether an optimizer of the state has stepped since the last boundary, or was left in the middle of its step: what a
break, a save and a poll depend on. A step that a GradScaler of the state has skipped, since the gradients were not
finite, is such a step as well: the loop that goes on counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import ref

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt.errors import is_from_outside
from ckpt.events import Events
from ckpt.trainer.loop.gradients import Gradients
from ckpt.trainer.loop.unregistered_optimizers import UnregisteredOptimizers, find_held
from ckpt.trainer.loop.weights import Weights, are_alike
from ckpt.trainer.snapshot.deferred_copy import owns_any, params_of
from ckpt.trainer.state import value_trees
from ckpt.trainer.state.shard import storages
from ckpt.trainer.state.state_nodes import ModuleNode, ObjectNode, OptimizerNode
from ckpt.trainer.state.state_walk import Walk

T = TypeVar("T")
HELD_MAX = 1000  # in a collection, among which optimizers are looked for: a longer one is of data


class StepTracking:
    """From `begin` to `close`, counts steps of the optimizers in `state` and of those, inside wrappers or not
    registered at all, that own one of its tensors; and of those that an object in it holds and gives copies of.
    `walk()`: the present walk.

    Since the last boundary: `ended`, how many steps have; `fenced`, whether changes by hand were announced;
    `collected`, what each of `scalers` was collecting of one step then. `by_hand`: no optimizer has stepped yet, so
    that updates are such changes. `is_idle`: `note` has nothing to do before the next update. `elsewhere`: one that
    owns nothing of the state has, and none that does or was to. Its hooks are to come after those that wait for a copy,
    and after those of the user: an exception there has changed nothing."""

    def __init__(self, state: dict[str, Any], walk: Callable[[], Walk], events: Events) -> None:
        self.ended = 0
        self.fenced = False
        self.by_hand = True
        self.is_idle = False
        self.elsewhere: Optimizer | None = None
        self.scalers: Sequence[GradScaler] = ()
        self.collected: Sequence[object] = ()
        self.strangers = UnregisteredOptimizers(events)
        self.weights = Weights(self._walked)
        self.gradients = Gradients(
            lambda: [view.optimizer for view in walk().scan.views.values()],
            lambda: self.by_hand and not are_alike(self._first, self.weights.glance()),
        )
        self._state = state
        self._walk = walk
        self._events = events
        self._said_torn = self._said_elsewhere = self._said_waiting = self._said_swapped = False
        # Not held: what has left the state is to be free, also where no optimizer steps any more.
        self._followed: ref[Walk] | None = None
        self._followed_parts: list[ref[Optimizer | nn.Module]] = []
        self._storages: frozenset[int] = frozenset()
        self._hooks: list[RemovableHandle] = []
        self._known: dict[int, tuple[ref[Optimizer], bool]] = {}  # by id: some have no hash, or are equal to others
        self._last: dict[int, RemovableHandle] = {}  # by id: the hook that comes after all others of that optimizer
        self._begun: list[Optimizer] = []  # one for each step that has not ended: on threads, or within each other

    def begin(self, step: int = 0) -> None:
        """`step`: the restored one."""
        self._first = self.weights.begin()
        self.gradients.begin(step)
        self._hooks.append(register_optimizer_step_pre_hook(self._announce))
        self._hooks.append(register_optimizer_step_post_hook(self._end))
        self._follow()
        self.collected = self.collect()

    def close(self) -> None:
        for hook in (*self._hooks, *self._last.values()):
            hook.remove()

    def collect(self) -> Sequence[object]:
        """`collected`, as it is now. A scaler's update(), also of a step that it skipped, begins another one; None: the
        scaler is in the midst of a step."""
        found = (getattr(scaler, "_per_optimizer_states", None) for scaler in self.scalers)
        return [None if each else each for each in found]

    @property
    def pending(self) -> int:
        """How many updates no step has ended."""
        return self.ended or int(any(_has_updated(*each) for each in zip(self.scalers, self.collected, strict=False)))

    @property
    def is_torn(self) -> bool:
        return bool(self._begun)

    @property
    def torn(self) -> str:
        """Why the state is no whole one; "" where it is. What an exception has left stays so, whatever steps follow."""
        for optimizer in self._begun[:1]:
            return (
                f"{type(optimizer).__name__}.step() has begun and not ended, as by an exception in it: a part of that "
                "update may be in the state, which is not saved any more. Start again from the newest checkpoint; what "
                "may fail belongs before step(), not into its closure"
            )
        return ""

    def find_torn(self) -> str:
        """`torn`, and an event says it, once."""
        torn = self.torn
        if torn and not self._said_torn:
            self._said_torn = True
            self._events.emit("optimizer.interrupted", f"ckpt: {torn}", loud=True)
        return torn

    def note(self, step: int) -> None:
        """That step ends, with an update or without one."""
        has_updated = self.pending > 0
        if has_updated:
            self.gradients.updated(step)
        else:
            self.gradients.is_watching = True
        self.weights.end(has_updated)
        self.is_idle = not (has_updated or self.weights.is_watching)

    def watch(self) -> None:
        """A poll or a save has come: there will be others."""
        self.weights.is_watching, self.is_idle = True, False

    def find_waiting(self, step: int) -> str:
        """`Gradients.lost` at the end of that step, the last one; and an event says so, once."""
        why = self.gradients.lost(step)
        if why and not self._said_waiting:
            self._said_waiting = True
            text = f"ckpt: a snapshot due at step {step} waits for the next step with an update: {why}"
            self._events.emit("gradients.waiting", text, loud=True)
        return why

    def find_swapped(self, step: int) -> str:
        """Why what is in the state now is not saved as the end of that step, the last one, or ""; and an event says so,
        once."""
        if not self.weights.are_swapped:
            return ""
        why = (
            f"the parameters are not those of the end of step {step}, as where averaged weights are swapped in for an "
            "evaluation; the newest snapshot before counts. Swap back before ck.poll() or ck.save(); a change that is "
            "to stay belongs before ck.step()"
        )
        if not self._said_swapped:
            self._said_swapped = True
            self._events.emit("weights.swapped", f"ckpt: no snapshot is taken now: {why}", loud=True)
        return why

    def find_elsewhere(self, others: Iterable[StepTracking]) -> None:
        """At a boundary: an event says, once, that the loop trains something else than what is saved, here or by
        `others`, those of other Checkpointers in this process. Not where an object of the user's in it has that one,
        with weights of its own, nor where it has none of torch's, so that an object may."""
        optimizer, self.elsewhere = self.elsewhere, None
        everyone = [self, *others]
        if optimizer is None or any(each._is_ours(optimizer) for each in everyone):
            return
        self._said_elsewhere = True
        if find_held([optimizer], [each._state for each in everyone])[0]:
            return
        if any(isinstance(node, OptimizerNode) for node in self._walk().scan.nodes):
            text = (
                "ckpt: the loop trains what is not in the state: a step has ended, and only an optimizer has stepped "
                "that is not in it and has nothing of it. What that trains is not saved: give the Checkpointer the "
                "model and optimizer that the loop uses; where they were made anew since, assign them in ck.state"
            )
            self._events.emit("optimizer.not_registered", text, loud=True)

    def _announce(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first hook of a step has the last one begin it."""
        if not self._is_ours(optimizer):
            return
        last = self._last.get(id(optimizer))
        if last is None or next(reversed(optimizer._optimizer_step_pre_hooks), None) != last.id:
            if last is not None:
                last.remove()
            self._last[id(optimizer)] = optimizer.register_step_pre_hook(self._begin)

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._begun.append(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for at, begun in enumerate(self._begun):
            if begun is optimizer:
                self.ended += 1
                self.by_hand, self.elsewhere = False, None
                del self._begun[at]
                self.strangers.stepped(optimizer)
                return
        self.elsewhere = optimizer if self.by_hand and not self._said_elsewhere else None

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if self._followed is None or self._followed() is not self._walk():
            self._follow()
        known = self._known_of(optimizer)
        if not known and not self._is_followed(self._parts()):  # one that was ours stays so until the next walk
            self._follow()
            known = self._known_of(optimizer)
        if known is None:
            # One within another may find the parameters elsewhere, where the outer one has put them.
            around = storages(param for each in self._begun for param in params_of(each))
            known = owns_any(optimizer, self._storages | around)
            self._known[id(optimizer)] = ref(optimizer), known
        return known

    def _known_of(self, optimizer: Optimizer) -> bool | None:
        found = self._known.get(id(optimizer))
        return found[1] if found is not None and found[0]() is optimizer else None

    def _parts(self) -> list[Optimizer | nn.Module]:
        """Of the state. What is made anew is assigned there, and steps before it is walked."""
        return _find((Optimizer, nn.Module), self._state, set())

    def _walked(self) -> list[Optimizer | nn.Module]:
        """Those in the places where the walk has found such, at each boundary: no plain value is looked at."""
        try:
            found = [node.value for node in self._walk().scan.nodes if isinstance(node, (ModuleNode, OptimizerNode))]
        except LookupError:  # one has left the state
            return self._parts()
        return [each for each in found if isinstance(each, (Optimizer, nn.Module))]

    def _is_followed(self, parts: Sequence[Optimizer | nn.Module]) -> bool:
        followed = self._followed_parts
        return len(parts) == len(followed) and all(one() is other for one, other in zip(followed, parts, strict=True))

    def _follow(self) -> None:
        """The walk is another one, or the state. Asks no object for its own."""
        walk, parts = self._walk(), self._parts()
        self._followed, self._followed_parts = ref(walk), [*map(ref, parts)]
        params = (param for each in parts if isinstance(each, nn.Module) for param in each.parameters())
        self._storages = walk.storages | storages(params)
        self._known = {id(each): (ref(each), True) for each in parts if isinstance(each, Optimizer)}
        self.strangers.pass_over(known for known, _ in self._known.values())
        for node in walk.scan.nodes:
            if isinstance(node, ObjectNode) and walk.scan.found[node.path]:  # else it saves no weights of its own
                held = _held_by(node)
                if not any(owns_any(each, self._storages) for each in held):
                    self._known.update((id(each), (ref(each), True)) for each in held)
        scalers = _find(GradScaler, self._state, set())
        if [*map(id, scalers)] != [*map(id, self.scalers)]:
            self.scalers, self.collected = scalers, ()  # of these nothing is known before the next boundary


def _has_updated(scaler: GradScaler, collected: object) -> bool:
    return collected is not None and scaler._per_optimizer_states is not collected


def _held_by(node: ObjectNode) -> list[Optimizer]:
    """By an object of the user's, as its attributes or in a collection there."""
    try:
        held = [*vars(node.value).values()]
        for each in [each for each in held if isinstance(each, (dict, list, tuple)) and len(each) <= HELD_MAX]:
            held += each.values() if isinstance(each, dict) else each
        return [each for each in held if isinstance(each, Optimizer)]
    except Exception as exc:  # it may have left the state, and what lies there has code of its own
        if is_from_outside(exc):
            raise
        return []


def _find(kind: type[T] | tuple[type[T], ...], value: Any, seen: set[int]) -> list[T]:
    if isinstance(value, kind):
        return [value]
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
        return []
    seen.add(id(value))  # a state that contains itself is refused later, by name
    items = list(value.values()) if isinstance(value, dict) else value  # a copy: any thread steps
    if set(map(type, items)) <= value_trees.PLAIN:
        return []
    return [found for item in items for found in _find(kind, item, seen)]
