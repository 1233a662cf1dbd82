"""Which optimizers belong to a state: those whose steps count as updates of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import ref

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt.errors import is_injected
from ckpt.trainer.snapshot.deferred_copy import owns_any_storage, params_of
from ckpt.trainer.state import value_trees
from ckpt.trainer.state.shard import storage_addresses
from ckpt.trainer.state.state_nodes import ModuleNode, ObjectNode, OptimizerNode, StateNode
from ckpt.trainer.state.state_walk import Walk

T = TypeVar("T")

HELD_ITEMS_MAX = 1000  # a longer collection holds data, and is not searched for optimizers


class CountedOptimizers:
    """The optimizers that count for one `state`. `walk()`: the present walk. These count:
    - those in `state`;
    - those that own a tensor of the state, inside wrappers or not registered;
    - those that an object in the state holds and saves copies of.

    `scalers`: the GradScalers in the state. It keeps weak references: what has left the state is freed, even if no
    optimizer steps any more."""

    def __init__(self, state: dict[str, Any], walk: Callable[[], Walk]) -> None:
        self.walk = walk
        self.scalers: Sequence[GradScaler] = ()
        self._state = state
        self._adopted_walk: ref[Walk] | None = None
        self._adopted_parts: list[ref[Optimizer | nn.Module]] = []
        self._storages: frozenset[int] = frozenset()
        # By id, since some optimizers have no hash or equal others: whether each one's steps count.
        self._known: dict[int, tuple[ref[Optimizer], bool]] = {}

    def is_counted(self, optimizer: Optimizer, running: Sequence[Optimizer] = ()) -> bool:
        """`running`: the optimizers whose steps have begun. An inner optimizer may see other parameter objects, which
        the outer one has put in place."""
        if self._adopted_walk is None or self._adopted_walk() is not self.walk():
            self.adopt()
        known = self._look_up(optimizer)
        # An optimizer that counted still does until the next walk.
        if not known and not self._are_adopted(self._find_parts()):
            self.adopt()
            known = self._look_up(optimizer)
        if known is None:
            around = storage_addresses(param for each in running for param in params_of(each))
            known = owns_any_storage(optimizer, self._storages | around)
            self._known[id(optimizer)] = ref(optimizer), known
        return known

    def _look_up(self, optimizer: Optimizer) -> bool | None:
        found = self._known.get(id(optimizer))
        return found[1] if found is not None and found[0]() is optimizer else None

    def _find_parts(self) -> list[Optimizer | nn.Module]:
        """The optimizers and modules in the state's dicts and lists. A new one that is assigned there may step before
        the next walk."""
        return _find_instances((Optimizer, nn.Module), self._state, set())

    def walked_parts(self) -> list[Optimizer | nn.Module]:
        """The optimizers and modules at the places where the walk found some. It runs at each boundary, and looks at no
        plain value."""
        try:
            found = [node.value for node in self.walk().scan.nodes if isinstance(node, (ModuleNode, OptimizerNode))]
        except LookupError:  # an object has left the state
            return self._find_parts()
        return [each for each in found if isinstance(each, (Optimizer, nn.Module))]

    def _are_adopted(self, parts: Sequence[Optimizer | nn.Module]) -> bool:
        followed = self._adopted_parts
        return len(parts) == len(followed) and all(one() is other for one, other in zip(followed, parts, strict=True))

    def adopt(self) -> None:
        """Takes over a new walk or a changed state. Asks no object for its state."""
        walk, parts = self.walk(), self._find_parts()
        self._adopted_walk, self._adopted_parts = ref(walk), [*map(ref, parts)]
        params = (param for each in parts if isinstance(each, nn.Module) for param in each.parameters())
        self._storages = walk.storages | storage_addresses(params)
        self._known = {id(each): (ref(each), True) for each in parts if isinstance(each, Optimizer)}
        for node in walk.scan.nodes:
            # Only objects that save weights of their own.
            if isinstance(node, ObjectNode) and walk.scan.tensors_by_node[node.path]:
                held = find_held(node)
                if not any(owns_any_storage(each, self._storages) for each in held):
                    self._known.update((id(each), (ref(each), True)) for each in held)
        self.scalers = _find_instances(GradScaler, self._state, set())


def find_saved(walks: Iterable[Walk]) -> set[int]:
    """The optimizers, by id, that are in the state, and those that an object in it holds and may save in its own way,
    for instance as bytes."""
    return {id(each) for walk in walks for node in walk.scan.nodes for each in find_held(node)}


def find_held(node: StateNode) -> list[Optimizer]:
    """The optimizer at a node of the state; or those that an object of the user's has as an attribute, or in a
    collection that is an attribute. Nothing is searched any deeper. A scheduler holds its optimizer, and does not save
    it."""
    try:
        if isinstance(node, OptimizerNode):
            return [node.value]
        if not isinstance(node, ObjectNode) or isinstance(node.value, LRScheduler):
            return []
        held = [*vars(node.value).values()]
        for each in [each for each in held if isinstance(each, (dict, list, tuple)) and len(each) <= HELD_ITEMS_MAX]:
            held += each.values() if isinstance(each, dict) else each
        return [each for each in held if isinstance(each, Optimizer)]
    except Exception as exc:
        # The object may have left the state, and attributes may run code of the user's.
        if is_injected(exc):
            raise
        return []


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
