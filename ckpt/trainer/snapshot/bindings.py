"""Bindings: which walk is bound to which slot's arena, and the plan of each copy, made before the snapshot is taken.

Guarantees:
- All bindings are of one walk, the newest. Bindings of older walks would hold memory that the state has left.
- A region is pinned while it is bound. If it cannot be pinned, a warning says so.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from ckpt.errors import CkptError, is_injected
from ckpt.events import Events
from ckpt.layout.layout import Staging
from ckpt.threads import Outcome
from ckpt.trainer.snapshot.cpu_copier import Copier, CopyJob
from ckpt.trainer.snapshot.deferred_copy import DEFERRED_BYTES_MIN, DeferredTrust, Key, TensorWatch
from ckpt.trainer.state.pieces import CopyPiece, address_and_size, cut_pieces
from ckpt.trainer.state.shard import storage_addresses
from ckpt.trainer.state.state_walk import Walk


class Bindings:
    """The bindings of one rank, by slot. `trust`: which tensors may be deferred."""

    def __init__(self, copier: Copier, trust: DeferredTrust, events: Events) -> None:
        self._copier = copier
        self._trust = trust
        self._events = events
        self._bindings_by_slot: dict[int, Binding] = {}
        self._newest_walk: Walk | None = None  # the newest walk given to bind()
        self._pinned_regions: dict[int, memoryview] = {}  # the pinned regions, by slot
        self._lock = threading.Lock()

    def get(self, slot: int) -> Binding | None:
        return self._bindings_by_slot.get(slot)

    def bind(self, slot: int, walk: Walk, staging: Staging, data: memoryview) -> None:
        """Prepares copies of `walk` into `data`, the data region of the slot's arena. Drops bindings of other walks.
        Binding the same again costs nothing. Call it on one thread at a time for each slot. Errors: CkptError if the
        staging does not fit."""
        with ordinary_mode():
            known = self._pinned_regions.get(slot)
            moved = known is None or address_and_size(known) != address_and_size(data)
            if not moved and self.is_bound(slot, walk, staging):
                return
            with self._lock:
                self._newest_walk = walk
            binding = Binding(self._trust, self._copier, walk, staging, cut_pieces(walk, staging, data))
            # Plan now, not while training pauses for the first snapshot.
            self._plan_ahead(binding)
            if moved:
                self._pin(slot, data)
            with self._lock:
                # The state has changed meanwhile. Its new walk is bound before the next snapshot.
                if self._newest_walk is not walk:
                    return
                self._bindings_by_slot = {n: b for n, b in self._bindings_by_slot.items() if b.walk is walk} | {
                    slot: binding
                }
                self._trust.forget_all_but(binding.candidates.keys())

    def is_bound(self, slot: int, walk: Walk, staging: Staging) -> bool:
        """Whether the next snapshot into that slot is one of `walk`, as `staging` says."""
        binding = self._bindings_by_slot.get(slot)
        return binding is not None and binding.walk is walk and binding.staging is staging

    def unbind(self, slot: int, view: memoryview) -> None:
        """Drops all views of the slot's arena before it is unmapped. `view`: a view of that arena. If another arena is
        bound to the slot by now, it stays bound."""
        with self._lock:
            region = self._pinned_regions.get(slot)
            if region is None or region.obj is not view.obj:
                return
            self._bindings_by_slot = {n: b for n, b in self._bindings_by_slot.items() if n != slot}
            self._pinned_regions.pop(slot, None)
        self._copier.unpin(region)

    def replan_all(self) -> None:
        """Plans all bindings again after trust has changed. Otherwise the next snapshot would plan while training
        pauses."""
        for binding in list(self._bindings_by_slot.values()):
            with ordinary_mode():
                self._plan_ahead(binding)

    def _plan_ahead(self, binding: Binding) -> None:
        """Plans ahead of time. An error (a device has no memory left) is ignored: `take` meets it again."""
        try:
            binding.plan()
        except Exception as exc:
            if is_injected(exc):
                raise

    def close(self) -> None:
        """Drops all bindings."""
        with self._lock:
            self._bindings_by_slot, self._newest_walk = {}, None
        for slot in list(self._pinned_regions):
            self._unpin(slot)

    def _pin(self, slot: int, data: memoryview) -> None:
        self._unpin(slot)
        self._pinned_regions[slot] = data
        try:
            self._copier.pin(data)
        except CkptError as exc:
            self._events.emit("snapshot.unpinned", f"snapshots into slot {slot} are slow: {exc}", loud=True)

    def _unpin(self, slot: int) -> None:
        region = self._pinned_regions.pop(slot, None)
        if region is not None:
            self._copier.unpin(region)


@dataclass(slots=True)
class Binding:
    """A walk cut to one arena. `candidates`: the tensors that may be deferred once that is proven safe, with their
    pieces. `last_done`: `done` of the newest snapshot of this binding."""

    trust: DeferredTrust
    copier: Copier
    walk: Walk
    staging: Staging
    pieces: tuple[CopyPiece, ...]
    candidates: dict[Key, list[CopyPiece]] = field(init=False)
    devices: frozenset[torch.device] = field(init=False)
    last_done: Outcome[None] | None = None
    _plan: CopyPlan | None = None
    _plan_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.devices = frozenset(piece.source.device for piece in self.pieces)
        of_tensor: dict[tuple[int, int], list[CopyPiece]] = {}
        for piece in self.pieces:
            if self.walk.deferrable[piece.entry]:
                of_tensor.setdefault((piece.entry, piece.box), []).append(piece)
        self.candidates = {}
        for (entry, box), pieces in of_tensor.items():
            live = self.walk.tensors[entry][box]
            if live.nbytes >= DEFERRED_BYTES_MIN and live.dim() > 0 and not live.is_inference():
                named = self.walk.layout.entries[entry]
                self.candidates[named.name, named.owner, box, live.data_ptr()] = pieces

    def plan(self) -> CopyPlan:
        """The present copy plan. Any thread; it takes a while if trust has changed. The caller may use the plan's
        buffers at once, on any stream: their preparation is over."""
        with self._plan_lock:
            if self._plan is None or self._plan.version != self.trust.version:
                with self.copier.background_context(self.devices):
                    made = self._make_plan()
                self._plan = made
            return self._plan

    def _make_plan(self) -> CopyPlan:
        trust, copier, version = self.trust, self.copier, self.trust.version
        watched = {key: pieces for key, pieces in self.candidates.items() if trust.is_candidate(key)}
        late_keys = {key for key in watched if trust.is_proven(key)}
        deferred = {piece for key in late_keys for piece in watched[key]}
        late = [piece for piece in self.pieces if piece in deferred]
        live = [self.walk.tensors[of_one[0].entry][of_one[0].box] for of_one in watched.values()]
        return CopyPlan(
            version=version,
            eager_job=copier.prepare([piece for piece in self.pieces if piece not in deferred]),
            deferred_job=copier.prepare(late),
            deferred_keys=late_keys,
            unproven_pieces=[p for key, pieces in watched.items() if key not in late_keys for p in pieces],
            unproven_keys=watched.keys() - late_keys,
            watch=TensorWatch(copier, watched, live, late) if watched else None,
            storages=storage_addresses(live),
            devices=self.devices,
        )


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How a binding is copied, as of version `version` of trust."""

    version: int
    eager_job: CopyJob
    deferred_job: CopyJob
    deferred_keys: set[Key]
    unproven_pieces: list[CopyPiece]
    unproven_keys: set[Key]
    watch: TensorWatch | None  # None: no tensor may be deferred, now or later
    storages: frozenset[int]
    devices: frozenset[torch.device]


def ordinary_mode() -> AbstractContextManager[object]:
    """A context in which new views and buffers are ordinary tensors, whatever mode the user is in. None of them
    requires a gradient, so the gradient mode does not matter."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
