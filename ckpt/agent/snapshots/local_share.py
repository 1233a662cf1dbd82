"""The local ranks of a job: their connections, their control page, their arenas, and the snapshots staged in them.

LocalShare decides nothing: it carries out the coordinator's actions and reports the outcomes. The local ranks are some
or all of the job's. All methods are for the agent's main thread; slow work runs on worker threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from ckpt.agent.net.progress import Progress
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.coroutines import run_on
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.runtime.workers import Lane, Workers
from ckpt.agent.snapshots.inventory import find_snapshot
from ckpt.agent.snapshots.memory_checkpoint import StagedPart, StagedReader
from ckpt.agent.state import memory_pressure
from ckpt.errors import AgentError
from ckpt.ipc.arena import YIELD_S_MAX, Arena
from ckpt.ipc.control_page import SLOTS_MAX, ControlPage, ControlWord
from ckpt.placement.placement import GENERATIONS
from ckpt.types import Identity

RELEASE_TIMEOUT_S = 5.0  # generous time for ranks to release memory


class LocalShare:
    """Owns the control page and the arenas: `arenas[slot][rank]`. `peers`: each rank's newest connection."""

    def __init__(self, world: int, workers: Workers, taken: Callable[[], memory_plan.MemoryUse]) -> None:
        """`world`: ranks of the whole job. `taken`: returns the other memory that ckpt uses on this node.
        Errors: AgentError if a job cannot have so many ranks."""
        self.control_page = ControlPage.create(world)
        self.world = world
        self.peers: dict[int, Peer] = {}
        self.arenas: dict[int, dict[int, Arena]] = {}
        self.is_dropped = False
        self.progress = Progress()  # of making arenas, and of hashing snapshots
        self.reader = StagedReader(self.progress.advance)
        self._workers = workers
        self._get_memory_use = taken
        # The newest plan, if the user's limit bounds it.
        self.limited_plan: memory_plan.MemoryPlan | None = None
        self.is_memory_short = False  # at the newest plan, earlier starts' checkpoints left too little room
        self._sent_arenas: set[tuple[int, int]] = set()  # (slot, rank) whose arena the rank has
        self._pending_makes: dict[int, object] = {}  # by slot: identifies the call of `make_arenas` under way

    @property
    def arena_bytes(self) -> int:
        """The bytes of all arenas here."""
        return sum(arena.size_bytes for by_rank in self.arenas.values() for arena in by_rank.values())

    def all_arenas(self) -> list[Arena]:
        return [arena for by_rank in self.arenas.values() for arena in by_rank.values()]

    def slowest_step(self) -> int:
        """The newest step that all connected local ranks have entered; 0: none yet."""
        return min((self.control_page.entered_step(rank) for rank in self.peers), default=0)

    def ended_step(self) -> int:
        """The newest step that all connected local ranks have ended; 0: none yet."""
        return max(0, self.slowest_step() - 1)

    def slowest_entered_s(self) -> float:
        """When the slowest local rank entered its step, on the monotonic clock; now, if that is unknown."""
        last = min(self.peers, key=self.control_page.entered_step, default=None)
        entered_s = self.control_page.entry_time_s(last) if last is not None else None
        return time.monotonic() if entered_s is None else entered_s

    def connect_rank(self, rank: int, peer: object) -> list[int]:
        """Takes `peer` as the rank's connection; returns the descriptors to send with the reply."""
        assert isinstance(peer, Peer)
        self.peers[rank] = peer
        return [self.control_page.fd]

    def announce(self, slot: int, word: ControlWord | None) -> None:
        """Writes the slot's control word: the version it is appointed for; None: nothing."""
        self.control_page.announce(slot, word)

    def clear_appointments(self) -> None:
        for slot in range(SLOTS_MAX):
            self.control_page.announce(slot, None)

    def announce_verdict(self, attempt: int) -> None:
        """Writes the verdict to the control page: the ranks leave by that save attempt."""
        self.control_page.publish_leave(attempt)

    async def plan_memory(
        self, sizes: Mapping[int, int], slots: int, limit_bytes: int | None
    ) -> memory_plan.MemoryPlan:
        """Plans the memory here: the number of slots, at most `slots`. `sizes`: arena bytes by rank."""
        # Free before total: if the group's limit is raised in between, this plan is only too small, and the next one
        # is right. The other way round a slot would count as large, and the job would keep to two.
        taken, free_bytes, total_bytes = self._get_memory_use(), self._workers.free_bytes(), memory_plan.total_bytes()
        plan = memory_plan.make_plan(
            slot_bytes=sum(sizes.values()),
            kept_bytes=taken.kept_bytes,
            held_bytes=self.arena_bytes + taken.lent_bytes,
            limit_bytes=limit_bytes,
            free_bytes=free_bytes,
            slots=slots,
            reserve_bytes=memory_pressure.reserve_bytes(total_bytes),
            total_bytes=total_bytes,
        )
        self.limited_plan = plan if plan.allowed_bytes == limit_bytes else None
        self.is_memory_short = bool(plan.kept_bytes) and plan.replica_bytes_max(slots) < GENERATIONS * plan.slot_bytes
        return plan

    def restore_budget_bytes(self, slot_bytes: int, slots: int, limit_bytes: int | None) -> int:
        """The bytes that a start may use here until all ranks have restored. `slot_bytes`, `slots`: the arenas that the
        job will have."""
        free_bytes, taken = self._workers.free_bytes(), self._get_memory_use()
        held_bytes = self.arena_bytes + taken.lent_bytes
        plan = memory_plan.make_plan(slot_bytes, taken.kept_bytes, held_bytes, limit_bytes, free_bytes, slots)
        return memory_plan.restore_budget_bytes(plan, limit_bytes, free_bytes)

    async def make_arenas(self, slot: int, sizes: Mapping[int, int]) -> dict[int, int]:
        """Makes new arenas with warm pages, of `sizes` by rank; returns their sizes. The slot's former arenas must be
        unused. Errors: CkptError. The slot has no arenas then. Closing or remaking the slot meanwhile is such an error:
        a coordinator that was cut off does not know of this call."""
        self.close_arenas(slot)
        mine = self._pending_makes[slot] = object()

        def make() -> dict[int, Arena]:
            self._await_room(sum(sizes.values()))
            return _make_arenas(sizes, self._yield_to_snapshot)

        made = await run_on(self._workers, Lane.MEMORY, make)
        if self._pending_makes.get(slot) is not mine:
            self._workers.close_arenas(made.values())
            raise AgentError("the slot was closed meanwhile")
        self.arenas[slot] = made
        return {rank: arena.size_bytes for rank, arena in made.items()}

    def _await_room(self, count: int) -> None:
        """Waits until `count` bytes are free. Memory of closed arenas is free once the kernel and the ranks release it.
        Errors: AgentError if that takes too long."""
        until_s = time.monotonic() + RELEASE_TIMEOUT_S
        while (short := count - memory_plan.free_bytes()) > 0:
            if self._workers.closing_bytes:
                until_s = time.monotonic() + RELEASE_TIMEOUT_S
            if self.is_dropped or time.monotonic() >= until_s:
                raise AgentError(f"{-(-short >> 20)} MiB of memory are missing for it")
            time.sleep(RELEASE_TIMEOUT_S / 100)

    def _yield_to_snapshot(self) -> None:
        """Pauses making an arena while training stands still for a copy, which needs the memory bandwidth more. The
        wait is bounded: a rank killed in a copy shows that copy for ever."""
        until_s = time.monotonic() + YIELD_S_MAX
        while not self.is_dropped and self.control_page.has_copying_rank and time.monotonic() < until_s:
            time.sleep(0.001)
        self.progress.advance()

    def offer_slot(self, slot: int, division: str) -> None:
        """Sends each connected rank its arena of the slot, to bind for that division."""
        for rank, peer in self.peers.items():
            if not peer.is_open:  # the rank may be coming back: `connect_rank` brings its new connection
                continue
            arena = self.arenas[slot][rank]
            new = (slot, rank) not in self._sent_arenas
            self._sent_arenas.add((slot, rank))
            fields = {"t": "grant-arena", "slot": slot, "bytes": arena.size_bytes, "division": division}
            peer.send(fields, [arena.fd] if new else [])

    async def hash_snapshots(self, slot: int, identity: Identity) -> list[StagedPart]:
        """Hashes the snapshots staged in a slot, and writes the hashes into the arenas. Errors: CkptError, also if the
        slot has no arenas here, as after a request meant for a former agent."""
        arenas = self.arenas.get(slot)
        if arenas is None:
            raise AgentError(f"there is nothing in slot {slot} here")
        return await run_on(self._workers, Lane.MEMORY, lambda: self.reader.read(identity, self.world, arenas))

    def take_arenas(self, rank: int, slots: Sequence[int], fds: list[int], is_new: bool) -> None:
        """Takes the arenas that a rank brings on a new connection, one descriptor for each slot. `is_new`: the rank is
        new to this agent and brings those of a former agent, which are taken over. Else its present arenas are those
        that it has; the others are sent to it again. Errors: AgentError."""
        if len(slots) != len(fds) or not set(slots) <= set(range(SLOTS_MAX)):
            raise AgentError(f"rank {rank} names {len(slots)} arenas and hands over {len(fds)}")
        self._sent_arenas = {each for each in self._sent_arenas if each[1] != rank}
        for slot in slots if is_new else ():
            arena = Arena.adopt(fds.pop(0))
            old = self.arenas.setdefault(slot, {}).get(rank)
            if old is not None:
                old.close()
            self.arenas[slot][rank] = arena
            self._sent_arenas.add((slot, rank))
        self._sent_arenas |= {
            (slot, rank) for slot, fd in zip(slots, fds, strict=False) if self._is_arena(slot, rank, fd)
        }

    def has_missing_arena(self, slot: int) -> bool:
        """Whether some connected local rank has no arena in that slot."""
        return any(rank not in self.arenas.get(slot, {}) for rank in self.peers)

    def close_arenas(self, slot: int) -> None:
        """Frees the slot's memory: here, and in the local ranks."""
        for peer in self.peers.values():
            peer.send({"t": "close-arena", "slot": slot})
        self._close_local_arenas(slot)

    def _close_local_arenas(self, slot: int) -> None:
        """Frees the slot's memory here only: the ranks may hand their arenas to another agent."""
        self._pending_makes.pop(slot, None)
        self._workers.close_arenas(self.arenas.pop(slot, {}).values())
        self._sent_arenas = {each for each in self._sent_arenas if each[0] != slot}

    def free_outdated_slots(self, outdated: Callable[[Identity], bool]) -> None:
        """Frees the slots that hold no snapshot, or only outdated ones. The caller ensures that no rank is staging."""
        for slot, by_rank in list(self.arenas.items()):
            if all(found is None or outdated(found[0][0]) for found in map(find_snapshot, by_rank.values())):
                self._close_local_arenas(slot)

    def drop(self) -> None:
        """Frees all memory here. The caller makes sure that there is no lease on it."""
        self.is_dropped = True
        self._pending_makes.clear()
        for slot in list(self.arenas):
            self._close_local_arenas(slot)
        self.control_page.close()

    def _is_arena(self, slot: int, rank: int, fd: int) -> bool:
        """Whether the descriptor is the slot's present arena of the rank."""
        arena = self.arenas.get(slot, {}).get(rank)
        return arena is not None and os.path.samestat(os.fstat(fd), os.fstat(arena.fd))


def _make_arenas(sizes: Mapping[int, int], between: Callable[[], None]) -> dict[int, Arena]:
    made: dict[int, Arena] = {}
    try:
        for rank, size in sizes.items():
            made[rank] = Arena.create(size)
            made[rank].warm(between)
    except BaseException:
        for arena in made.values():
            arena.close()
        raise
    return made
