"""What of optimizers is not saved: those that are not in the state, and numbers that they count in attributes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

from torch.optim import Optimizer

from ckpt.events import Events
from ckpt.trainer.loop.counted_optimizers import CountedOptimizers, find_saved
from ckpt.trainer.snapshot.deferred_copy import params_of, state_of
from ckpt.trainer.state.optimizers import OptimizerView
from ckpt.trainer.state.shard import storage_addresses
from ckpt.trainer.state.state_nodes import OptimizerNode
from ckpt.trainer.state.state_walk import Walk
from ckpt.types import format_count


class UnregisteredOptimizers:
    """Warns of the optimizers that train a part of the state and are not saved, and of a loop that trains nothing of
    it.

    `foreign`: an optimizer that has stepped since the last boundary and owns nothing of the state, while none that
    counts has or was to. `boundary_count`: how many boundaries there were. `due_by_role`: optimizers to judge, which
    have stepped in a second step: one that is made anew for each step need not be restored. One entry stands for all of
    a class that train the same parameters: an optimizer may be made anew every few steps."""

    def __init__(self, events: Events) -> None:
        self.foreign: Optimizer | None = None
        self.boundary_count = 0
        self.due_by_role: dict[tuple[type, int], ref[Optimizer]] = {}
        self._events = events
        # The boundary after which each optimizer first stepped; None: done. By id: some have no hash or equal others.
        self._first_steps: dict[int, tuple[ref[Optimizer], int | None]] = {}
        self._reported_roles: set[tuple[type, int]] = set()
        self._has_judged_foreign = False

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

    def note_foreign(self, optimizer: Optimizer) -> None:
        """Notes a step of an optimizer that owns nothing of the state, where none that counts has ever stepped."""
        if not self._has_judged_foreign:
            self.foreign = optimizer

    def report_foreign(self, counted: Sequence[CountedOptimizers]) -> None:
        """At a boundary: warns once if the loop trains what is not saved. `counted`: that of this Checkpointer, then
        those of the others of this process. There is no warning if an object of the user's in the state holds the
        optimizer, with weights of its own. Nor is there one if the state has no torch optimizer, since such an object
        may hold the weights."""
        optimizer, self.foreign = self.foreign, None
        if optimizer is None or any(each.is_counted(optimizer) for each in counted):
            return
        self._has_judged_foreign = True
        is_trained = any(isinstance(node, OptimizerNode) for node in counted[0].walk().scan.nodes)
        if is_trained and id(optimizer) not in find_saved(each.walk() for each in counted):
            text = (
                "ckpt: the loop trains what is not in the state. The only optimizer that has stepped is not in the "
                "state, and trains nothing in it. What it trains is not saved. Give the Checkpointer the model and the "
                "optimizer that the loop uses. If the script has made new ones since, assign them in ck.state"
            )
            self._events.emit("optimizer.not_registered", text, loud=True)

    def report_unsaved(self, walks: Sequence[Walk]) -> None:
        """Emits an event for the due optimizers that are not saved. An optimizer is saved if `find_saved` knows it, or
        if the walks have a tensor of its state. `walks`: that of this Checkpointer, made for a snapshot, then those of
        the others. A walk made for this purpose would ask objects for their state when other ranks do not, although
        they may do so in a collective."""
        saved = find_saved(walks)
        due = {role: one for role, each in self.due_by_role.items() if (one := each()) is not None}
        self.due_by_role = {}
        states = {role: storage_addresses(state_of(each)) for role, each in due.items() if id(each) not in saved}
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


class AttributeWatch:
    """Compares the attributes of optimizers at two boundaries, with one step in between. Attributes whose names begin
    with an underscore do not count: torch and schedulers set such ones."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._seen: dict[tuple[str, str], float] = {}

    def look(self, views: Iterable[OptimizerView]) -> None:
        """Reads the attributes. At the second call it emits one event for those that have moved and are not saved."""
        now = {
            (view.path, name): value
            for view in views
            for name, value in vars(view.optimizer).items()
            if type(value) in (int, float) and not name.startswith("_") and name not in view.rest["value"]
        }
        moved = sorted(
            f"{path}.{name}" for (path, name), value in now.items() if self._seen.get((path, name), value) != value
        )
        self._seen = now
        if moved:
            text = (
                f"ckpt: the attributes {', '.join(moved)} change in training, and the optimizer's state_dict() leaves "
                "them out: they are not saved, and a restart begins with their first values. Save them as plain values "
                "of the state, and set them in the block (docs/guides/optimizers.md)"
            )
            self._events.emit("optimizer.attribute", text, loud=True, names=moved)
