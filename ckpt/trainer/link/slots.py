"""The slots of one rank: the offered state, the plan that the agent made for it, and the arenas that are ready.

Guarantees:
- An arena is written only between its grant (`grant-arena`) and the report of a snapshot in it (`snapshot-staged`),
  and only by this process.
- What is bound, declared and filled in an arena belongs to one plan: the thread that does it holds the slot.
- The agent is told that a slot is warm once its arena is ready for the present plan and nobody holds the slot.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpt.errors import CkptError
from ckpt.events import Events
from ckpt.format.declaration import decode_layout, decode_share, encode
from ckpt.gc_pause import pause_gc
from ckpt.ipc import messages
from ckpt.ipc.arena import YIELD_S_MAX, Arena, abandon_in_child
from ckpt.layout.layout import Declaration, Layout, Staging
from ckpt.layout.staging import stage
from ckpt.threads import Flag, Tasks
from ckpt.types import Version

log = logging.getLogger("ckpt")

HOLD_RETRY_S = 0.01  # between attempts to hold a slot that a snapshot holds
DIFFERING_HASH = (1 << 64) - 1  # the first half of a hash that only says that the tensor differs


@dataclass(frozen=True, slots=True)
class StateOffer:
    """A state as the agent knows it: its layout, hashes of what may be replicated, and the version they belong to."""

    layout: Layout
    hashes: bytes
    version: Version
    values_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of a division that concerns this rank. `offered_layout`: the layout that was divided, the same object
    that the rank offered. `differing_tensors`: tensors that are no replicas, since they differ between ranks."""

    offered_layout: Layout
    declaration: Declaration
    encoded_declaration: bytes
    differing_tensors: frozenset[str]

    @property
    def staging(self) -> Staging:
        return self.declaration.staging


@dataclass(slots=True)
class RankSlot:
    """One slot. `plan`: the plan for which its arena is bound and warm; None until then. `declaration_place`: the
    position of the declaration in the arena.

    A slot has one holder at a time: the thread that makes the arena ready, or fills it, until the arena is sealed. So
    what is bound, declared and filled always belongs to one plan. A holder is known by an object that it chooses: so it
    can let go even if Ctrl-C has swallowed the answer of `hold`."""

    arena: Arena
    plan: Plan | None = None
    declaration_place: tuple[int, int] = (0, 0)
    _holder: object = None
    _on_free: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, by: object) -> bool:
        """Tries to take the slot, without waiting. Returns whether `by` holds it now."""
        with self._lock:
            if self._holder is None:
                self._holder = by
            return self._holder is by

    def release(self, by: object) -> None:
        """Gives the slot back, on any thread. Does nothing unless `by` holds it."""
        with self._lock:
            if self._holder is not by:
                return
            then, self._on_free = self._on_free, None
            self._holder = then
        if then is not None:
            then()

    def close_when_free(self, then: Callable[[], None]) -> None:
        """Lets nobody hold the slot any more. `then` is called once the slot is free, perhaps on the holder's
        thread."""
        with self._lock:
            if self._holder is not None:
                self._on_free = then
                return
            self._holder = then
        then()


class Slots:
    """The slots of one rank, and what they are made ready for.

    `bind(number, plan, data)` prepares the copies into an arena; it runs on a thread of `tasks`. `unbind(number, view)`
    drops them again, if they go into that arena. `tell` sends a message to the agent, if there is one.

    `by_number`: the granted slots. `offered`: the state that the agent is to divide. `differing`: tensors that are no
    replicas any more, according to a later plan. `training_running`: cleared while training stands still for a copy."""

    def __init__(
        self,
        events: Events,
        tasks: Tasks,
        bind: Callable[[int, Plan, memoryview], None],
        unbind: Callable[[int, memoryview], None],
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._events, self._tasks = events, tasks
        self._bind, self._unbind, self._notify = bind, unbind, tell
        self.by_number: dict[int, RankSlot] = {}
        self.present_offer: StateOffer | None = None
        self.differing_tensors: frozenset[str] = frozenset()
        self.training_running = Flag()
        self._present_plan: Plan | None = None
        self._lock = threading.RLock()
        self._bind_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def offer(self, offer: StateOffer) -> None:
        """Takes over another structure, or other replicas. No slot is warm for it until the agent has divided it."""
        with self._lock:
            self.present_offer, self.differing_tensors = offer, frozenset()
            self.forget_plan()

    def forget_plan(self) -> None:
        """Drops the plan: no slot is warm until another plan comes."""
        with self._lock:
            self._present_plan = None
            for slot in self.by_number.values():
                slot.plan = None

    @pause_gc()
    def on_staging_plan(self, message: messages.Message, rank: int, world: int, coordinate: str) -> None:
        """Handles the message `staging-plan`: how the offer is divided for that rank."""
        layout, share = decode_layout(message.blobs[0]), decode_share(message.blobs[1])
        offer = self.present_offer
        if offer is None or not _are_same_shapes(layout, offer.layout):
            # The plan is for an old structure; the plan for the present one follows.
            return
        staging = stage(layout, share, int(message.fields["frame_bytes"]))
        declaration = Declaration(rank, world, coordinate, str(message.fields["division"]), layout, staging)
        differing = frozenset(entry.name for entry in layout.entries if entry.owner)
        plan = Plan(offer.layout, declaration, encode(declaration), differing)
        with self._lock:
            if self.present_offer is offer:
                self._present_plan, self.differing_tensors = plan, differing

    def on_grant_arena(self, message: messages.Message) -> None:
        """Handles the message `grant-arena`: the grant of a slot, maybe with a new arena. Another thread makes it
        ready."""
        number = int(message.fields["slot"])
        with self._lock:
            if message.fds:
                old = self.by_number.pop(number, None)
                self.by_number[number] = RankSlot(Arena.adopt(message.fds.pop()))
                if old is not None:
                    old.arena.close()
            plan = self._present_plan
            slot = self.by_number.get(number)
            if slot is None or plan is None or plan.declaration.division != message.fields["division"]:
                return
        self._tasks.submit(self._prepare_slot, number, slot, plan)

    def on_close_arena(self, message: messages.Message) -> None:
        """Handles the message `close-arena`: no snapshot is taken into that slot until another arena of it is
        granted."""
        number = int(message.fields["slot"])
        with self._lock:
            slot = self.by_number.pop(number, None)
        if slot is not None:
            slot.close_when_free(lambda: self._release_arena(number, slot))

    def _release_arena(self, number: int, slot: RankSlot) -> None:
        try:
            self._unbind(number, slot.arena.view)
        except (CkptError, OSError, RuntimeError) as exc:  # as in `_prepare_slot`
            self._events.emit("arena.failed", f"ckpt: slot {number} cannot be let go of: {exc}", loud=True)
        finally:
            slot.arena.close()

    def _prepare_slot(self, number: int, slot: RankSlot, plan: Plan) -> None:
        # A snapshot may still hold the slot: the agent can take an appointment back.
        while not slot.hold(plan):
            if not self._is_current(number, slot, plan) or self._tasks.stopping.wait(HOLD_RETRY_S):
                return
        try:
            is_ready = self._warm_slot(number, slot, plan)
        except (CkptError, OSError, RuntimeError) as exc:
            # RuntimeError: torch cannot page-lock memory.
            self._events.emit("arena.failed", f"ckpt: slot {number} cannot be made ready: {exc}", loud=True)
            return
        finally:
            slot.release(plan)
        # Told only now that nobody holds the slot: the agent may appoint it at once.
        if is_ready:
            self._notify("arena-warm", {"slot": number, "division": plan.declaration.division})

    def _warm_slot(self, number: int, slot: RankSlot, plan: Plan) -> bool:
        """Makes a held slot ready for that plan. Returns whether it is, and the plan is still the present one."""
        with self._lock:
            if not self._is_current(number, slot, plan):
                return False
            ready = slot.plan
            if (
                ready is not None
                and ready.offered_layout is plan.offered_layout
                and ready.encoded_declaration == plan.encoded_declaration
            ):
                # The slot is granted again since other ranks came back. It may contain a snapshot by now.
                return True
            slot.plan = None
        slot.arena.warm(lambda: self.training_running.wait(YIELD_S_MAX))
        slot.arena.begin_fill()
        slot.declaration_place = slot.arena.write_declaration(plan.staging.data_bytes, plan.encoded_declaration)
        # Another thread may still bind a plan that is gone; it must not do so after this one.
        with self._bind_locks[number]:
            if not self._is_current(number, slot, plan):
                return False
            self._bind(number, plan, slot.arena.data(0, plan.staging.data_bytes))
        with self._lock:
            if not self._is_current(number, slot, plan):
                return False
            slot.plan = plan
        return True

    def _is_current(self, number: int, slot: RankSlot, plan: Plan) -> bool:
        return self._present_plan is plan and self.by_number.get(number) is slot

    def close(self) -> None:
        for slot in self.by_number.values():
            slot.arena.close()
        self.by_number.clear()

    def abandon_in_child(self) -> None:
        """In a forked child: lets go of the arenas, so that their memory can be freed."""
        try:
            abandon_in_child()
        except OSError as exc:
            log.warning("a forked process keeps memory of checkpoints for as long as it lives: %s", exc)
        self.by_number.clear()


def _are_same_shapes(layout: Layout, walked: Layout) -> bool:
    """Whether the layouts are equal except for the owners, which the agent has found."""
    return len(layout.entries) == len(walked.entries) and all(
        replace(a, owner=b.owner) == b for a, b in zip(layout.entries, walked.entries, strict=True)
    )


def encode_hashes(hashes: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(hashes, dtype="<u8").tobytes()


def mark_differing_hashes(offer: StateOffer, differing: Collection[str], rank: int) -> bytes:
    """The hashes of an offer that is repeated, for an agent that does not know which tensors differ by now. The old
    hashes of the differing tensors are replaced by values that no other rank sends."""
    if not (offer.hashes and differing):
        return offer.hashes
    hashes = np.frombuffer(offer.hashes, "<u8").reshape(-1, 2).copy()
    hashes[[entry.name in differing for entry in offer.layout.entries for _ in entry.boxes]] = DIFFERING_HASH, rank
    return hashes.tobytes()
