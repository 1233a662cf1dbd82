"""One node's share of a job: its ranks' connections, control page and arenas, and what is staged in these.

It decides nothing: the job's coordinator says what is to be done, and hears of the outcome. The ranks here may be some
of the job's, or all. Everything runs on the agent's main thread; what takes long is done on others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ckpt.agent.net.progress import Progress
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.runtime.workers import Lane, Workers, failure
from ckpt.agent.snapshots.inventory import whose
from ckpt.agent.snapshots.memory_checkpoint import StagedPart, StagedReader
from ckpt.agent.state import memory_pressure
from ckpt.errors import AgentError
from ckpt.ipc.arena import GIVE_WAY_S, Arena
from ckpt.ipc.control_page import SLOTS_MAX, ControlPage, ControlWord
from ckpt.placement.placement import GENERATIONS
from ckpt.types import Identity

LET_GO_S = 5.0  # that ranks may take to let go of memory, which is more than it takes


class LocalShare:
    """Owns the page and the arenas: `arenas[slot][rank]`. `peers`: each rank's newest connection.

    Where something takes time, `then` is called with its result and "", or with an empty one and what went wrong; not
    at all after `drop`."""

    def __init__(self, world: int, bulk: Workers, taken: Callable[[], memory_plan.MemoryUse]) -> None:
        """`world`: of the whole job. `taken`: what there is here beside its arenas.
        Errors: AgentError where there cannot be so many ranks."""
        self.page = ControlPage.create(world)
        self.world = world
        self.peers: dict[int, Peer] = {}
        self.arenas: dict[int, dict[int, Arena]] = {}
        self.dropped = False
        self.progress = Progress()  # of memory that is made, and of snapshots that are hashed
        self.reader = StagedReader(self.progress.moved)
        self._bulk = bulk
        self._taken = taken
        self.limited: memory_plan.MemoryPlan | None = (
            None  # the newest plan, where it is the user's limit that bounds it
        )
        self.is_cramped = False  # whether earlier starts' checkpoints were in the way when that was made
        self._handed: set[tuple[int, int]] = set()  # (slot, rank) whose arena the rank has
        self._making: dict[int, object] = {}  # by slot: who makes its arenas

    @property
    def count(self) -> int:
        """Of the ranks that may come here."""
        return self.world

    @property
    def arena_bytes(self) -> int:
        return sum(arena.bytes for by_rank in self.arenas.values() for arena in by_rank.values())

    def node_of(self, rank: int) -> str:
        """The name of the agent where it is; "": this one."""
        return ""

    def all_arenas(self) -> list[Arena]:
        return [arena for by_rank in self.arenas.values() for arena in by_rank.values()]

    def steps(self) -> list[int]:
        """By rank: the step that it published as entered; 0: none yet."""
        return [self.page.entered(rank) for rank in range(self.world)]

    def polls(self) -> list[int]:
        """By rank: how often it polled or saved since the last ended step."""
        return [self.page.polled(rank) for rank in range(self.world)]

    def since_s(self) -> list[float | None]:
        """By rank: when it entered that step, on the monotonic clock; None: that is not known here."""
        return [self.page.since_s(rank) for rank in range(self.world)]

    def hindmost(self) -> int:
        """The step that all of these ranks have entered."""
        return min((self.page.entered(rank) for rank in self.peers), default=0)

    def ended(self) -> int:
        """The newest step that all of these ranks have ended; 0: none yet."""
        return max(0, self.hindmost() - 1)

    def hindmost_since_s(self) -> float | None:
        """When the last of them entered it, on the monotonic clock; None: that is not known here."""
        last = min(self.peers, key=self.page.entered, default=None)
        return self.page.since_s(last) if last is not None else None

    def welcome(self, rank: int, peer: object) -> list[int]:
        """This is the rank's connection now; what its answer comes with."""
        assert isinstance(peer, Peer)
        self.peers[rank] = peer
        return [self.page.fd]

    def send(self, rank: int, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self.peers[rank].send(fields, blobs=blobs)

    def announce(self, slot: int, word: ControlWord | None) -> None:
        """What that slot is appointed for; None: nothing."""
        self.page.announce(slot, word)

    def appoint_nothing(self) -> None:
        """Whatever was."""
        for slot in range(SLOTS_MAX):
            self.page.announce(slot, None)

    def leave(self, round_: int) -> None:
        """The verdict on a round at which they hold: leave."""
        self.page.leave(round_)

    def measure(
        self,
        sizes: Mapping[int, int],
        slots: int,
        limit_bytes: int | None,
        then: Callable[[memory_plan.MemoryPlan | None, str], None],
    ) -> None:
        """How many slots of arenas of so many bytes by rank there can be, up to so many."""
        taken, total_bytes = self._taken(), memory_plan.total_bytes()
        plan = memory_plan.plan(
            slot_bytes=sum(sizes.values()),
            kept_bytes=taken.kept_bytes,
            held_bytes=self.arena_bytes + taken.lent_bytes,
            limit_bytes=limit_bytes,
            free_bytes=self._bulk.free_bytes(),
            slots=slots,
            reserve_bytes=memory_pressure.reserve_bytes(total_bytes),
            total_bytes=total_bytes,
        )
        self.limited = plan if plan.allowed_bytes == limit_bytes else None
        self.is_cramped = bool(plan.kept_bytes) and plan.left_bytes(slots) < GENERATIONS * plan.slot_bytes
        then(plan, "")

    def for_a_while_bytes(self, slot_bytes: int, slots: int, limit_bytes: int | None) -> int:
        """What may be taken here until all ranks have restored, where a slot of theirs will take so much, and so many
        are to be."""
        free_bytes, taken = self._bulk.free_bytes(), self._taken()
        held_bytes = self.arena_bytes + taken.lent_bytes
        plan = memory_plan.plan(slot_bytes, taken.kept_bytes, held_bytes, limit_bytes, free_bytes, slots)
        return memory_plan.for_a_while_bytes(plan, limit_bytes, free_bytes)

    def make(self, slot: int, sizes: Mapping[int, int], then: Callable[[dict[int, int], str], None]) -> None:
        """New arenas with warm pages, of so many bytes by rank, for a slot whose former ones nobody uses: the bytes
        that they have. Where that fails the slot has none; so where it is closed meanwhile, or made anew, by a
        coordinator that was cut off and does not know of this."""
        self.close_arenas(slot)
        mine = self._making[slot] = object()

        def made(done: Future[dict[int, Arena]]) -> None:
            if error := failure(done):
                if not self.dropped:
                    then({}, error)
            elif self.dropped or self._making.get(slot) is not mine:
                self._bulk.close_arenas(done.result().values())
                if not self.dropped:
                    then({}, "the slot was closed meanwhile")
            else:
                self.arenas[slot] = done.result()
                then({rank: arena.bytes for rank, arena in done.result().items()}, "")

        def make() -> dict[int, Arena]:
            self._await_room(sum(sizes.values()))
            return _make(sizes, self._give_way)

        self._bulk.run(Lane.MEMORY, make, made)

    def _await_room(self, count: int) -> None:
        """What was closed just now is free once the kernel is done with it, and the ranks have let go of it. Errors:
        AgentError."""
        until_s = time.monotonic() + LET_GO_S
        while (short := count - memory_plan.free_bytes()) > 0:
            if self._bulk.closing_bytes:
                until_s = time.monotonic() + LET_GO_S
            if self.dropped or time.monotonic() >= until_s:
                raise AgentError(f"{-(-short >> 20)} MiB of memory are missing for it")
            time.sleep(LET_GO_S / 100)

    def _give_way(self) -> None:
        """Between two pieces of an arena that is made: training that stands still for a copy needs the memory more. A
        rank that was killed meanwhile says so for ever."""
        until_s = time.monotonic() + GIVE_WAY_S
        while not self.dropped and self.page.copies and time.monotonic() < until_s:
            time.sleep(0.001)
        self.progress.moved()

    def offer(self, slot: int, division: str) -> None:
        """Grants each rank its arena of the slot, for that division."""
        for rank, peer in self.peers.items():
            arena = self.arenas[slot][rank]
            new = (slot, rank) not in self._handed
            self._handed.add((slot, rank))
            fields = {"t": "arena", "slot": slot, "bytes": arena.bytes, "division": division}
            peer.send(fields, [arena.fd] if new else [])

    def read(self, slot: int, identity: Identity, then: Callable[[list[StagedPart], str], None]) -> None:
        """Hashes what the ranks have staged in a slot, and leaves the hashes there. Errors: AgentError where there is
        none: it went with a former agent, to which that was to be said."""
        arenas = self.arenas.get(slot)
        if arenas is None:
            raise AgentError(f"there is nothing in slot {slot} here")

        def read(done: Future[list[StagedPart]]) -> None:
            error = failure(done)
            if not self.dropped:
                then([] if error else done.result(), error)

        self._bulk.run(Lane.MEMORY, lambda: self.reader.read(identity, self.world, arenas), read)

    def adopt(self, slot: int, arenas: Mapping[int, Arena]) -> None:
        """Arenas of a former agent, which the ranks have brought."""
        self.arenas[slot] = dict(arenas)
        self._handed |= {(slot, rank) for rank in arenas}

    def has(self, rank: int, slots: Sequence[int], fds: Sequence[int]) -> None:
        """On a new connection a rank says which arenas it has: what was on its way on the old one is sent again."""
        self._handed = {each for each in self._handed if each[1] != rank}
        self._handed |= {(slot, rank) for slot, fd in zip(slots, fds, strict=False) if self._is_arena(slot, rank, fd)}

    def bring(self, rank: int, slots: Sequence[int], fds: list[int]) -> None:
        """A rank that this agent sees for the first time has these arenas of a former agent, which are taken over."""
        for slot in slots:
            arena = Arena.adopt(fds.pop(0))
            old = self.arenas.setdefault(slot, {}).get(rank)
            if old is not None:
                old.close()
            self.arenas[slot][rank] = arena
            self._handed.add((slot, rank))

    def lacks(self, slot: int) -> bool:
        """Whether some rank here has no arena in it."""
        return any(rank not in self.arenas.get(slot, {}) for rank in self.peers)

    def close_arenas(self, slot: int) -> None:
        """Its memory goes: the ranks here let go of it as well."""
        for peer in self.peers.values():
            peer.send({"t": "close-arena", "slot": slot})
        self._close_here(slot)

    def _close_here(self, slot: int) -> None:
        """What the ranks have they may bring to another agent."""
        self._making.pop(slot, None)
        self._bulk.close_arenas(self.arenas.pop(slot, {}).values())
        self._handed = {each for each in self._handed if each[0] != slot}

    def give_back(self, outdated: Callable[[Identity], bool]) -> None:
        """The memory of slots that hold nothing, or what is outdated. The caller has made sure that nobody fills it."""
        for slot, by_rank in list(self.arenas.items()):
            if all(found is None or outdated(found[0][0]) for found in map(whose, by_rank.values())):
                self._close_here(slot)

    def drop(self) -> None:
        """Lets go of the memory. The caller has made sure that nobody holds a lease on it."""
        self.dropped = True
        for slot in list(self.arenas):
            self._close_here(slot)
        self.page.close()

    def _is_arena(self, slot: int, rank: int, fd: int) -> bool:
        """Whether that is the arena that the slot has now."""
        arena = self.arenas.get(slot, {}).get(rank)
        return arena is not None and os.path.samestat(os.fstat(fd), os.fstat(arena.fd))


def _make(sizes: Mapping[int, int], between: Callable[[], None]) -> dict[int, Arena]:
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
