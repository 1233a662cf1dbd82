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
HELD_MAX = 1000  # a longer collection holds data, and is not searched for optimizers


class StepTracking:
    """Counts the steps of optimizers, from `begin` to `close`. `walk()`: the present walk. These optimizers count:
    - those in `state`;
    - those that own a tensor of the state, inside wrappers or not registered;
    - those that an object in the state holds and saves copies of.

    Facts since the last boundary:
    - `ended`: how many steps have ended; `fenced`: whether changes by hand were announced;
    - `collected`: what each of `scalers` was collecting for one step, as of the boundary;
    - `elsewhere`: an optimizer that has stepped and owns nothing of the state, while none that counts has or was to.

    `by_hand`: no optimizer that counts has ever stepped, so updates are made by hand. `is_idle`: `note` has nothing to
    do before the next update. The hooks run after those that wait for a copy, and after the user's own: an exception in
    those has changed nothing."""

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
        # Weak references: what has left the state is freed, even if no optimizer steps any more.
        self._followed: ref[Walk] | None = None
        self._followed_parts: list[ref[Optimizer | nn.Module]] = []
        self._storages: frozenset[int] = frozenset()
        self._hooks: list[RemovableHandle] = []
        # By id, since some optimizers have no hash or equal others: whether each one's steps count.
        self._known: dict[int, tuple[ref[Optimizer], bool]] = {}
        self._last: dict[int, RemovableHandle] = {}  # the last hook of each optimizer, by id
        self._begun: list[Optimizer] = []  # one per step that has not ended: on several threads, or nested

    def begin(self, step: int = 0) -> None:
        """Installs the hooks. `step`: the restored step."""
        self._first = self.weights.begin()
        self.gradients.begin(step)
        self._hooks.append(register_optimizer_step_pre_hook(self._announce))
        self._hooks.append(register_optimizer_step_post_hook(self._end))
        self._follow()
        self.collected = self.collect()

    def close(self) -> None:
        """Removes the hooks."""
        for hook in (*self._hooks, *self._last.values()):
            hook.remove()

    def collect(self) -> Sequence[object]:
        """The present value for `collected`. A scaler's update(), also after a step that it skipped, begins another
        collection. None: the scaler is in the middle of a step."""
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
        """Why the state may hold half an update; "" if it does not. Later steps do not mend a torn state."""
        for optimizer in self._begun[:1]:
            return (
                f"{type(optimizer).__name__}.step() has begun and not ended, for instance because of an exception in "
                "it. The state may hold a part of that update, so it is not saved any more. Start again from the "
                "newest checkpoint. Do what may fail before step(), not in its closure"
            )
        return ""

    def find_torn(self) -> str:
        """`torn`, which an event reports once."""
        torn = self.torn
        if torn and not self._said_torn:
            self._said_torn = True
            self._events.emit("optimizer.interrupted", f"ckpt: {torn}", loud=True)
        return torn

    def note(self, step: int) -> None:
        """Notes that `step` ends, with an update or without one."""
        has_updated = self.pending > 0
        if has_updated:
            self.gradients.updated(step)
        else:
            self.gradients.is_watching = True
        self.weights.end(has_updated)
        self.is_idle = not (has_updated or self.weights.is_watching)

    def watch(self) -> None:
        """Notes a poll or a save: more may come."""
        self.weights.is_watching, self.is_idle = True, False

    def find_waiting(self, step: int) -> str:
        """`Gradients.lost` at the end of `step`, the last one; an event reports it once."""
        why = self.gradients.lost(step)
        if why and not self._said_waiting:
            self._said_waiting = True
            text = f"ckpt: a snapshot due at step {step} waits for the next step with an update: {why}"
            self._events.emit("gradients.waiting", text, loud=True)
        return why

    def find_swapped(self, step: int) -> str:
        """Why the present state is not that of the end of `step`, the last one; "" if it is. An event reports it
        once."""
        if not self.weights.are_swapped:
            return ""
        why = (
            f"the parameters are not those of the end of step {step}, for instance because averaged weights are "
            "swapped in for an evaluation. The newest earlier snapshot counts. Swap back before ck.poll() or "
            "ck.save(). Make a change that is to stay before ck.step()"
        )
        if not self._said_swapped:
            self._said_swapped = True
            self._events.emit("weights.swapped", f"ckpt: no snapshot is taken now: {why}", loud=True)
        return why

    def find_elsewhere(self, others: Iterable[StepTracking]) -> None:
        """At a boundary: warns once if the loop trains what is not saved, neither here nor by `others`, the other
        Checkpointers of this process. There is no warning if an object of the user's in the state holds the optimizer,
        with weights of its own. Nor is there one if the state has no torch optimizer, since such an object may hold the
        weights."""
        optimizer, self.elsewhere = self.elsewhere, None
        everyone = [self, *others]
        if optimizer is None or any(each._is_ours(optimizer) for each in everyone):
            return
        self._said_elsewhere = True
        if find_held([optimizer], [each._state for each in everyone])[0]:
            return
        if any(isinstance(node, OptimizerNode) for node in self._walk().scan.nodes):
            text = (
                "ckpt: the loop trains what is not in the state. The only optimizer that has stepped is not in the "
                "state, and trains nothing in it. What it trains is not saved. Give the Checkpointer the model and the "
                "optimizer that the loop uses. If the script has made new ones since, assign them in ck.state"
            )
            self._events.emit("optimizer.not_registered", text, loud=True)

    def _announce(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first hook of a step. It makes `_begin` the last hook."""
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
        # An optimizer that counted still does until the next walk.
        if not known and not self._is_followed(self._parts()):
            self._follow()
            known = self._known_of(optimizer)
        if known is None:
            # An inner optimizer may see other parameter objects, which the outer one has put in place.
            around = storages(param for each in self._begun for param in params_of(each))
            known = owns_any(optimizer, self._storages | around)
            self._known[id(optimizer)] = ref(optimizer), known
        return known

    def _known_of(self, optimizer: Optimizer) -> bool | None:
        found = self._known.get(id(optimizer))
        return found[1] if found is not None and found[0]() is optimizer else None

    def _parts(self) -> list[Optimizer | nn.Module]:
        """The optimizers and modules in the state's dicts and lists. A new one that is assigned there may step before
        the next walk."""
        return _find((Optimizer, nn.Module), self._state, set())

    def _walked(self) -> list[Optimizer | nn.Module]:
        """The optimizers and modules at the places where the walk found some. It runs at each boundary, and looks at no
        plain value."""
        try:
            found = [node.value for node in self._walk().scan.nodes if isinstance(node, (ModuleNode, OptimizerNode))]
        except LookupError:  # an object has left the state
            return self._parts()
        return [each for each in found if isinstance(each, (Optimizer, nn.Module))]

    def _is_followed(self, parts: Sequence[Optimizer | nn.Module]) -> bool:
        followed = self._followed_parts
        return len(parts) == len(followed) and all(one() is other for one, other in zip(followed, parts, strict=True))

    def _follow(self) -> None:
        """Takes over a new walk or a changed state. Asks no object for its state."""
        walk, parts = self._walk(), self._parts()
        self._followed, self._followed_parts = ref(walk), [*map(ref, parts)]
        params = (param for each in parts if isinstance(each, nn.Module) for param in each.parameters())
        self._storages = walk.storages | storages(params)
        self._known = {id(each): (ref(each), True) for each in parts if isinstance(each, Optimizer)}
        self.strangers.pass_over(known for known, _ in self._known.values())
        for node in walk.scan.nodes:
            # Only objects that save weights of their own.
            if isinstance(node, ObjectNode) and walk.scan.found[node.path]:
                held = _held_by(node)
                if not any(owns_any(each, self._storages) for each in held):
                    self._known.update((id(each), (ref(each), True)) for each in held)
        scalers = _find(GradScaler, self._state, set())
        if [*map(id, scalers)] != [*map(id, self.scalers)]:
            # Before the next boundary nothing is known of the new scalers.
            self.scalers, self.collected = scalers, ()


def _has_updated(scaler: GradScaler, collected: object) -> bool:
    return collected is not None and scaler._per_optimizer_states is not collected


def _held_by(node: ObjectNode) -> list[Optimizer]:
    """The optimizers that an object of the user's has as an attribute, or in a collection that is an attribute."""
    try:
        held = [*vars(node.value).values()]
        for each in [each for each in held if isinstance(each, (dict, list, tuple)) and len(each) <= HELD_MAX]:
            held += each.values() if isinstance(each, dict) else each
        return [each for each in held if isinstance(each, Optimizer)]
    except Exception as exc:
        # The object may have left the state, and attributes may run code of the user's.
        if is_from_outside(exc):
            raise
        return []


def _find(kind: type[T] | tuple[type[T], ...], value: Any, seen: set[int]) -> list[T]:
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
    return [found for item in items for found in _find(kind, item, seen)]
