"""Optimizers that train a part of the state but are not saved with it: a restart would lose what they have gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt.errors import is_injected
from ckpt.events import Events
from ckpt.trainer.snapshot.deferred_copy import params_of, state_of
from ckpt.trainer.state.shard import storage_addresses
from ckpt.trainer.state.state_nodes import ObjectNode, OptimizerNode, StateNode
from ckpt.trainer.state.state_walk import Walk
from ckpt.types import format_count

HELD_ITEMS_MAX = 1000  # a longer collection holds data, and is not searched for optimizers


class UnregisteredOptimizers:
    """Warns of the optimizers that train a part of the state and are not saved.

    `boundary_count`: how many boundaries there were. `due_by_role`: optimizers to judge, which have stepped in a second
    step: one that is made anew for each step need not be restored. One entry stands for all of a class that train the
    same parameters: an optimizer may be made anew every few steps."""

    def __init__(self, events: Events) -> None:
        self.boundary_count = 0
        self.due_by_role: dict[tuple[type, int], ref[Optimizer]] = {}
        self._events = events
        # The boundary after which each optimizer first stepped; None: done. By id: some have no hash or equal others.
        self._first_steps: dict[int, tuple[ref[Optimizer], int | None]] = {}
        self._reported_roles: set[tuple[type, int]] = set()

    def note_step(self, optimizer: Optimizer) -> None:
        """Notes a step of an optimizer that trains a part of the state."""
        met, first = self._first_steps.get(id(optimizer), (None, None))
        if met is None or met() is not optimizer:
            self._first_steps[id(optimizer)] = ref(optimizer), self.boundary_count
        elif first not in (None, self.boundary_count):
            self._first_steps[id(optimizer)] = met, None
            role = type(optimizer), next(map(id, params_of(optimizer)), 0)
            if role not in self._reported_roles:
                self.due_by_role[role] = met

    def report_unsaved(self, walks: Sequence[Walk]) -> None:
        """Emits an event for the due optimizers that are not saved. An optimizer is saved if `find_saved` knows it, or
        if the walks have a tensor of its state. `walks`: that of this Checkpointer, made for a snapshot, then those of
        the others. A walk made for this purpose would ask objects for their state when other ranks do not, although
        they may do so in a collective."""
        saved = find_saved(walks)
        due = {role: one for role, each in self.due_by_role.items() if (one := each()) is not None}
        self.due_by_role = {}
        states = {role: _state_addresses(each) for role, each in due.items() if id(each) not in saved}
        if not any(states.values()):
            return
        storages = frozenset[int]().union(*(each.storages for each in walks))
        lost = [role for role, addresses in states.items() if addresses and not addresses & storages]
        if not lost:
            return
        self._reported_roles.update(lost)
        kind, trained = lost[0][0].__name__, storage_addresses(params_of(due[lost[0]]))
        lines = zip(walks[0].layout.entries, walks[0].tensors, strict=True)
        name = next((entry.name for entry, line in lines if storage_addresses(line) & trained), "a part of the state")
        more = f" (and {format_count(len(lost) - 1, 'other')} like it)" if len(lost) > 1 else ""
        self._events.emit(
            "optimizer.unsaved",
            f"ckpt: the {kind} that trains {name} is not in the state{more}: a restart begins with a new one, "
            "and this one's state is lost. Put it into the state as well, unless an object of the state saves it in "
            "its own way",
            loud=True,
            optimizer=kind,
            tensor=name,
        )


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


def _state_addresses(optimizer: Optimizer) -> frozenset[int]:
    return storage_addresses(each for each in state_of(optimizer) if isinstance(each, Tensor))
