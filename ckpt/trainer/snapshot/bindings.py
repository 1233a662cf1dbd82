"""Which walk is bound to which slot's arena, and how a snapshot of it is copied there: planned before it is taken.

Guarantees:
- All bindings are of one walk, the newest: others would hold memory that the state has left.
- A region is pinned while it is bound, or that it cannot be is said.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from ckpt.errors import CkptError, is_from_outside
from ckpt.events import Events
from ckpt.layout.layout import Staging
from ckpt.threads import Outcome
from ckpt.trainer.snapshot.cpu_copier import Copier, CopyJob
from ckpt.trainer.snapshot.deferred_copy import LATE_BYTES_MIN, DeferredTrust, Key, Spot, TensorWatch
from ckpt.trainer.state.pieces import CopyPiece, Walked, cut, where
from ckpt.trainer.state.shard import storages


class Bindings:
    """Those of one rank. `trust`: what may be copied late."""

    def __init__(self, copier: Copier, trust: DeferredTrust, events: Events) -> None:
        self._copier = copier
        self._trust = trust
        self._events = events
        self._bound: dict[int, Binding] = {}
        self._newest: Walked | None = None  # of the walks that were to be bound
        self._regions: dict[int, memoryview] = {}  # what is pinned, by slot
        self._lock = threading.Lock()

    def get(self, slot: int) -> Binding | None:
        return self._bound.get(slot)

    def bind(self, slot: int, walk: Walked, staging: Staging, data: memoryview) -> None:
        """Prepares copies of `walk` into `data`, the data region of that slot's arena; on one thread at a time for a
        slot. Binding the same again costs nothing; bindings of other walks are dropped, since they hold memory that the
        state has left.

        Errors: CkptError when the staging does not fit."""
        with plain():
            known = self._regions.get(slot)
            moved = known is None or where(known) != where(data)
            if not moved and self.is_bound(slot, walk, staging):
                return
            with self._lock:
                self._newest = walk
            binding = Binding(walk, staging, cut(walk, staging, data))
            self._plan(binding)  # now, and not while training stands still for a first snapshot
            if moved:
                self._pin(slot, data)
            with self._lock:
                if self._newest is not walk:  # it took a while, and the state has moved: bound anew before a snapshot
                    return
                self._bound = {n: b for n, b in self._bound.items() if b.walk is walk} | {slot: binding}
                self._trust.forget_all_but(binding.candidates.keys())

    def is_bound(self, slot: int, walk: Walked, staging: Staging) -> bool:
        """Whether the next snapshot into that slot is one of `walk`, as `staging` says."""
        binding = self._bound.get(slot)
        return binding is not None and binding.walk is walk and binding.staging is staging

    def unbind(self, slot: int, view: memoryview) -> None:
        """Drops all views of that slot's arena, which `view` is of, before it is unmapped. Another one that is bound by
        now stays."""
        with self._lock:
            region = self._regions.get(slot)
            if region is None or region.obj is not view.obj:
                return
            self._bound = {n: b for n, b in self._bound.items() if n != slot}
            self._regions.pop(slot, None)
        self._copier.unpin(region)

    def plan_anew(self) -> None:
        """What is copied late has changed: better here than while training stands still for the next snapshot."""
        for binding in list(self._bound.values()):
            with plain():
                self._plan(binding)

    def _plan(self, binding: Binding) -> None:
        """Ahead of time. What goes wrong, as where a device has no memory left just now, comes again in `take`."""
        try:
            binding.plan(self._trust, self._copier)
        except Exception as exc:
            if is_from_outside(exc):
                raise

    def close(self) -> None:
        """Unbinds all."""
        with self._lock:
            self._bound, self._newest = {}, None
        for slot in list(self._regions):
            self._unpin(slot)

    def _pin(self, slot: int, data: memoryview) -> None:
        self._unpin(slot)
        self._regions[slot] = data
        try:
            self._copier.pin(data)
        except CkptError as exc:
            self._events.emit("snapshot.unpinned", f"snapshots into slot {slot} are slow: {exc}", loud=True)

    def _unpin(self, slot: int) -> None:
        region = self._regions.pop(slot, None)
        if region is not None:
            self._copier.unpin(region)


@dataclass(slots=True)
class Binding:
    """A walk cut to one arena. `candidates`: what may be copied late once it is proven, with the indices of its
    pieces. `last`: `done` of the newest snapshot of this binding."""

    walk: Walked
    staging: Staging
    pieces: tuple[CopyPiece, ...]
    candidates: dict[Key, list[int]] = field(init=False)
    devices: frozenset[torch.device] = field(init=False)
    last: Outcome[None] | None = None
    _plan: CopyPlan | None = None
    _planning: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.devices = frozenset(piece.source.device for piece in self.pieces)
        of_tensor: dict[tuple[int, int], list[int]] = {}
        for n, piece in enumerate(self.pieces):
            if self.walk.late[piece.entry]:
                of_tensor.setdefault((piece.entry, piece.box), []).append(n)
        self.candidates = {}
        for (entry, box), pieces in of_tensor.items():
            live = self.walk.tensors[entry][box]
            if live.nbytes >= LATE_BYTES_MIN and live.dim() > 0 and not live.is_inference():
                named = self.walk.layout.entries[entry]
                self.candidates[named.name, named.owner, box, live.data_ptr()] = pieces

    def plan(self, trust: DeferredTrust, copier: Copier) -> CopyPlan:
        """Any thread; it may take a while where trust has changed. Whoever gets it may use its buffers at once, on any
        stream: what was to be written there is."""
        with self._planning:
            if self._plan is None or self._plan.version != trust.version:
                with copier.aside(self.devices):
                    made = self._make(trust, copier)
                self._plan = made
            return self._plan

    def _make(self, trust: DeferredTrust, copier: Copier) -> CopyPlan:
        version = trust.version
        watched = {key: pieces for key, pieces in self.candidates.items() if trust.is_candidate(key)}
        late_keys = {key for key in watched if trust.is_proven(key)}
        late = {n for key in late_keys for n in watched[key]}
        unproven = [n for key, pieces in watched.items() if key not in late_keys for n in pieces]
        parts = [[self.pieces[n] for n in pieces] for pieces in watched.values()]
        live = [self.walk.tensors[of_one[0].entry][of_one[0].box] for of_one in parts]
        return CopyPlan(
            version=version,
            eager=copier.prepare([p for n, p in enumerate(self.pieces) if n not in late]),
            late=copier.prepare([self.pieces[n] for n in sorted(late)]),
            late_keys=late_keys,
            unproven_pieces=[self.pieces[n] for n in unproven],
            unproven_keys=set(watched) - late_keys,
            key_of={(p[0].entry, p[0].box): key for key, p in zip(watched, parts, strict=True)},
            watch=TensorWatch(list(watched), live, parts) if watched else None,
            spot=Spot([self.pieces[n] for n in sorted(late)]) if late else None,
            storages=storages(live),
            devices=self.devices,
        )


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How a binding is copied while trust is what it was at `version`."""

    version: int
    eager: CopyJob
    late: CopyJob
    late_keys: set[Key]
    unproven_pieces: list[CopyPiece]
    unproven_keys: set[Key]
    key_of: dict[tuple[int, int], Key]
    watch: TensorWatch | None  # None: nothing may be late, now or later
    spot: Spot | None
    storages: frozenset[int]
    devices: frozenset[torch.device]


def plain() -> AbstractContextManager[object]:
    """Whatever mode the user is in: our views and buffers are ordinary tensors. None of them requires a gradient, so
    that it is no matter whether those are recorded."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
