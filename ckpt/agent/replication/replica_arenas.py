"""The memory of the replicas on one node: the arenas in use, the arenas to reuse, and the limit of their bytes.

Main thread only. Arenas are filled and closed by worker threads: zeroing 1 GiB would block the main thread for half a
second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.agent.net.tcp_receiver import Fetch
from ckpt.agent.runtime.coroutines import Promise
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.described import ParityChunk, ParityChunkName
from ckpt.agent.snapshots.inventory import Key
from ckpt.errors import AgentError
from ckpt.ipc.arena import Arena, created_bytes
from ckpt.types import Epoch, Identity

SHOWN, RANKS_SHOWN = 4, 64

ReplicaName = Key | ParityChunkName


def checkpoint_of(name: ReplicaName) -> Identity:
    return name.identity if isinstance(name, ParityChunkName) else name[0]


def _bytes(arenas: Iterable[Arena]) -> int:
    return sum(arena.size_bytes for arena in arenas)


@dataclass(eq=False, slots=True)
class IncomingReplica:
    """A copy that is being fetched from agent `source`, or a chunk that is being made (`fetch` is None). `is_evicted`:
    nobody wants the replica any more. `landed`: settled when the copy has come, or has failed."""

    arena: Arena
    source: str = ""
    fetch: Fetch | None = None
    is_evicted: bool = False
    landed: Promise[None] = field(default_factory=Promise)


class KeptReplicas:
    """The replicas that are complete. `arenas_by_key`: verified copies. `chunks_by_name`: parity chunks."""

    def __init__(self) -> None:
        self.arenas_by_key: dict[Key, Arena] = {}
        self.chunks_by_name: dict[ParityChunkName, ParityChunk] = {}

    @property
    def by_name(self) -> dict[ReplicaName, Arena]:
        """The arenas of all these replicas."""
        chunks = ((name, chunk.arena) for name, chunk in self.chunks_by_name.items())
        return dict([*self.arenas_by_key.items(), *chunks])

    @property
    def identities(self) -> set[Identity]:
        """The checkpoints of which a copy or parity is kept."""
        return {checkpoint_of(name) for name in self.by_name}

    def arenas_of(self, identity: Identity) -> dict[int, Arena]:
        """The copies of that checkpoint, by rank."""
        return {rank: arena for (each, rank), arena in self.arenas_by_key.items() if each == identity}

    def chunks_of(self, identity: Identity) -> list[ParityChunk]:
        return [chunk for name, chunk in self.chunks_by_name.items() if name.identity == identity]

    def pop(self, name: ReplicaName) -> Arena:
        if isinstance(name, ParityChunkName):
            return self.chunks_by_name.pop(name).arena
        return self.arenas_by_key.pop(name)

    def status_fields(self) -> dict[str, list[int]]:
        """For display: of the newest SHOWN checkpoints, the ranks of which copies are kept."""
        return {str(each): sorted(self.arenas_of(each))[:RANKS_SHOWN] for each in sorted(self.identities)[-SHOWN:]}


class ReplicaArenas:
    """The arenas of the replicas `kept` and `incoming`, which the replica store adds and removes, of evicted replicas
    that are leased, and spare ones."""

    def __init__(self, workers: Workers, kept: KeptReplicas, incoming: Mapping[ReplicaName, IncomingReplica]) -> None:
        self._workers, self._kept, self._incoming = workers, kept, incoming
        self._spare_arenas: list[Arena] = []  # free arenas with warm pages
        self._get_limit_bytes: Callable[[], int] | None = None  # the memory limit in bytes; None: unlimited
        self._leases: Counter[Identity] = Counter()
        self._evicted_leased: list[tuple[Identity, Arena]] = []  # evicted, but still leased

    @property
    def bytes(self) -> int:
        """Bytes of all arenas: kept, leased, on their way, and spare."""
        return self.used_bytes + _bytes(self._spare_arenas)

    @property
    def used_bytes(self) -> int:
        """`bytes` without the spare arenas."""
        return _bytes(self._used_arenas)

    @property
    def allocated_bytes(self) -> int:
        """The part of `bytes` whose pages the machine has allocated."""
        return self.bytes - self.unallocated_bytes

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that replicas on their way will still allocate: pages are taken as the data arrives."""
        return sum(each.arena.untouched_bytes for each in self._incoming.values())

    @property
    def _used_arenas(self) -> list[Arena]:
        incoming = [each.arena for each in self._incoming.values()]
        return [*self._kept.by_name.values(), *incoming, *(arena for _, arena in self._evicted_leased)]

    def bytes_of(self, epoch: Epoch) -> int:
        """Bytes kept and on their way of that epoch's checkpoints, with all spare memory."""
        arenas = self._kept.by_name | {name: each.arena for name, each in self._incoming.items()}
        of_epoch = [arena for name, arena in arenas.items() if checkpoint_of(name).epoch == epoch]
        return _bytes([*of_epoch, *self._spare_arenas])

    def set_limit(self, room: Callable[[], int]) -> None:
        """From now on a copy that does not fit is refused. `room`: the current limit of `bytes`."""
        self._get_limit_bytes = room

    def fits(self, sizes: Iterable[int]) -> bool:
        """Whether arenas of these sizes fit in the limit once the spare ones are closed."""
        return self._get_limit_bytes is None or self.used_bytes + sum(sizes) <= self._get_limit_bytes()

    def take(self, size: int) -> Arena:
        """An arena for `size` bytes, a spare one if possible. Errors: AgentError if there is no room, OSError."""
        for arena in self._spare_arenas:
            if arena.size_bytes == created_bytes(size):
                self._spare_arenas.remove(arena)
                return arena
        if self._get_limit_bytes is not None:
            room = self._get_limit_bytes()
            self.close_spares(self.bytes + size - room)
            if self.bytes + size > room:
                used, wanted = self.bytes >> 20, size >> 20
                raise AgentError(
                    f"{used} MiB of the {room >> 20} MiB that it has for others are in use, {wanted} more are not left"
                )
        return Arena.create(size)

    def recycle(self, arena: Arena) -> None:
        """Keeps the arena as a warm spare. Closes the oldest spares beyond the bytes of the replicas that are kept."""
        arena.begin_fill()
        self._spare_arenas.append(arena)
        self.close_spares(_bytes(self._spare_arenas) - _bytes(self._kept.by_name.values()))

    def retire(self, identity: Identity, arena: Arena) -> None:
        """Recycles the arena of an evicted replica of that checkpoint: now, or after the last lease."""
        if self._leases[identity]:
            self._evicted_leased.append((identity, arena))
        else:
            self.recycle(arena)

    def lease(self, identity: Identity) -> None:
        """Protects the replicas of that checkpoint from reuse until `release`. Leases are counted."""
        self._leases[identity] += 1

    def lease_until(self, identity: Identity, ended: Promise[Any]) -> None:
        """Leases the replicas of that checkpoint until the promise is settled, also if nobody waits for it any more: a
        thread that works on them reads on. A newer checkpoint may be replicated meanwhile."""
        self.lease(identity)
        ended.when_settled(lambda: self.release(identity))

    def release(self, identity: Identity) -> None:
        """Ends one lease. After the last, the memory of evicted replicas is reused."""
        self._leases[identity] -= 1
        if not self._leases[identity]:
            del self._leases[identity]
            for each in [each for each in self._evicted_leased if each[0] == identity]:
                self._evicted_leased.remove(each)
                self.recycle(each[1])

    def close_spares(self, missing: int) -> int:
        """Closes spare arenas until about `missing` bytes are free. Returns the bytes freed."""
        freed = 0
        while self._spare_arenas and freed < missing:
            freed += self._spare_arenas[0].size_bytes
            self._workers.close_arenas([self._spare_arenas.pop(0)])
        return freed

    def close(self) -> None:
        self._workers.close_arenas([*self._used_arenas, *self._spare_arenas])
        self._evicted_leased.clear()
        self._spare_arenas.clear()
