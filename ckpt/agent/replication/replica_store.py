"""The replica store of one node: keeps copies and parity for peers, and offers snapshots to peers.

It evicts when it is told: by a coordinator (`make_room`, `before`, `unkeep`), by a start (`epochs_before`), and by
node_memory.py when memory runs short (`forget`).

A copy is an arena with the same bytes as the original, and is used like the original. Every frame is verified by its
hash on arrival. The first page says what the arena holds; it is written last, so a partial copy is never taken for a
whole one. Main thread only, but for `described`, which runs on a worker.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgpack

from ckpt.agent.net.progress import Progress
from ckpt.agent.net.transport import Fetch, Frames, Transport
from ckpt.agent.replication.parity_store import ParityStore
from ckpt.agent.runtime.workers import Lane, Workers, failure
from ckpt.agent.snapshots.described import DescribedSnapshot, described
from ckpt.agent.snapshots.inventory import Inventory, Key, sealed
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import PAGE, Arena
from ckpt.ipc.bounded_msgpack import unpacked
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.snapshots.described import ParityChunkName

log = logging.getLogger("ckpt")

COPIES_MAX = 4096  # ranks of one checkpoint that one node keeps
ARENA_BYTES_MAX = 1 << 42
SHOWN, RANKS_SHOWN = 4, 64
# Checkpoints kept beside `told_safe` while it is unknown which one is replicated.
FAILED_MAX = 2


def encode_described(found: Sequence[DescribedSnapshot]) -> bytes:
    packed: bytes = msgpack.packb([[each.rank, each.size, each.page, each.frames.encode()] for each in found])
    return packed


def decode_described(blob: bytes) -> list[DescribedSnapshot]:
    """The inverse of `encode_described`. Errors: AgentError if malformed."""
    try:
        rows = unpacked(blob, "what a node says of its snapshots")
        if not isinstance(rows, list) or len(rows) > COPIES_MAX:
            raise AgentError("a node describes more snapshots than there can be")
        return [_decoded(*row) for row in rows]
    except (ValueError, TypeError, OverflowError) as exc:
        raise AgentError(f"a node describes its snapshots wrong: {exc}") from exc


def _decoded(rank: int, size: int, page: bytes, frames: bytes) -> DescribedSnapshot:
    found = DescribedSnapshot(int(rank), int(size), bytes(page), Frames.decode(frames, int(size)))
    if found.rank < 0 or not PAGE <= found.size <= ARENA_BYTES_MAX or len(found.page) != PAGE:
        raise AgentError(f"the snapshot of rank {rank} is described wrong")
    if len(found.frames) and int(found.frames.offsets.min()) < PAGE:
        raise AgentError(f"the snapshot of rank {rank} is described wrong")
    return found


def transfer_of(identity: Identity, rank: int) -> str:
    """The name under which that rank's whole snapshot is offered."""
    return f"copy/{identity}/{rank}"


def _identity_of(transfer: str) -> Identity:
    """The checkpoint that an offer is of, be it a copy or parity."""
    return Identity.parse(transfer.split("/")[1])


class ReplicaStore:
    """Replicas that this node keeps for peers, and the transfers it offers them. `kept`: complete, verified copies.
    `chunks`: the parity, evicted by the same rules."""

    def __init__(self, bulk: Workers, post: Callable[[Callable[[], None]], None]) -> None:
        self.kept: dict[Key, Arena] = {}
        self.chunks = ParityStore(bulk, lambda name: self._offer_no_more(name.transfer))
        self.progress = Progress()  # of copies that arrive, and of parity that is made here
        self._bulk, self._post = bulk, post
        self._spare: list[Arena] = []  # free arenas with warm pages
        self._offered: dict[str, set[str]] = {}  # name of an offer -> its readers
        self._urgent: set[str] = set()  # names of the urgent offers
        self._transport: Transport | None = None  # the transport of the offers
        self._coming: dict[Key, tuple[Fetch, Arena]] = {}  # copies that are being fetched
        self._sources: dict[Key, str] = {}  # copies in `_coming` -> the agent they come from
        self._unwanted: set[Key] = set()  # copies in `_coming` that were evicted meanwhile
        self._room: Callable[[], int] | None = None  # the memory limit in bytes; None: unlimited
        self._leases: Counter[Identity] = Counter()
        self._late: dict[Key, Arena] = {}  # evicted, but still leased
        self.told_safe: Identity | None = None  # the newest checkpoint that a coordinator called replicated
        self._failed: set[tuple[Identity, str]] = set()  # (checkpoint, source) whose last transfer failed
        # Returns a predicate: which checkpoints may be evicted when memory is short.
        self.may_go: Callable[[], Callable[[Identity], bool]] = lambda: lambda identity: False
        # Raises AgentError if that epoch may not have older replicas dropped now.
        self.check: Callable[[Epoch], None] = lambda epoch: None

    @property
    def bytes(self) -> int:
        """Bytes of all arenas and chunks: kept, leased, on their way, and spare."""
        return self._used_bytes + self.chunks.bytes - self.chunks.used_bytes + sum(each.bytes for each in self._spare)

    @property
    def taken_bytes(self) -> int:
        """The part of `bytes` whose pages the machine has allocated."""
        return self.bytes - self.to_take_bytes

    @property
    def to_take_bytes(self) -> int:
        """Bytes that copies and parity on their way will still allocate: pages are taken as the data arrives."""
        return self.chunks.to_take_bytes + sum(arena.to_take_bytes for _, arena in self._coming.values())

    @property
    def _used_bytes(self) -> int:
        coming = [arena for _, arena in self._coming.values()]
        arenas = [*self.kept.values(), *self._late.values(), *coming]
        return self.chunks.used_bytes + sum(arena.bytes for arena in arenas)

    @property
    def identities(self) -> set[Identity]:
        """The checkpoints of which a copy or parity is kept."""
        return {identity for identity, _ in self.kept} | self.chunks.identities

    def bound(self, room: Callable[[], int]) -> None:
        """From now on a copy that does not fit is refused. `room`: the current limit of `bytes`."""
        self._room = room

    def fits(self, sizes: Iterable[int]) -> bool:
        """Whether arenas of these sizes fit in the limit once the spare ones are closed."""
        return self._room is None or self._used_bytes + sum(sizes) <= self._room()

    def make_way(self, sizes: Iterable[int]) -> None:
        """Evicts what `may_go` permits, if arenas of these sizes do not fit."""
        if not self.fits(sizes):
            self.forget(self.may_go())

    def bytes_of(self, epoch: Epoch) -> int:
        """Bytes kept and on their way of that epoch's checkpoints, with all spare memory."""
        coming = [arena for (identity, _), (_, arena) in self._coming.items() if identity.epoch == epoch]
        kept = [arena for (identity, _), arena in self.kept.items() if identity.epoch == epoch]
        return self.chunks.bytes_of(epoch) + sum(arena.bytes for arena in [*kept, *coming, *self._spare])

    # -- as the node that has the original

    def publish(
        self,
        transport: Transport,
        identity: Identity,
        arenas: Mapping[int, Arena],
        then: Callable[[list[DescribedSnapshot], str], None],
        reader: str = "",
        urgent: bool = False,
    ) -> None:
        """Lets other nodes fetch these ranks' snapshots. The caller leaves the arenas unchanged until `withdraw`.
        `then` hears the descriptions that the readers need, and "" or the error. `reader`: who will `withdraw`, where
        there are several readers. `urgent`: a start waits for the snapshots."""

        def found(done: Future[list[DescribedSnapshot]]) -> None:
            error = failure(done)
            if error:
                then([], error)
                return
            try:
                for each in done.result():
                    name = transfer_of(identity, each.rank)
                    self.offer(transport, name, arenas[each.rank].view, each.frames, reader, urgent)
            except (CkptError, ValueError) as exc:  # ValueError: the arena was closed.
                then([], str(exc))
                return
            then(done.result(), "")

        self._bulk.run(Lane.FRONT if urgent else Lane.MEMORY, lambda: described(identity, arenas), found)

    def offer(
        self, transport: Transport, name: str, source: memoryview, frames: Frames, reader: str, urgent: bool = False
    ) -> None:
        """Lets other nodes fetch `source` under `name`, until `withdraw`. `urgent`: see Transport.offer; an existing
        offer becomes urgent, and its readers connect anew. Errors: AgentError; ValueError if the memory was closed."""
        if name in self._offered and urgent and name not in self._urgent:
            transport.withdraw(name)
            transport.offer(name, source, frames, urgent)
        elif name not in self._offered:
            transport.offer(name, source, frames, urgent)
        if urgent:
            self._urgent.add(name)
        self._transport = transport
        self._offered.setdefault(name, set()).add(reader)

    def is_offered(self, identity: Identity) -> bool:
        return any(_identity_of(name) == identity for name in self._offered)

    def withdraw(self, transport: Transport, identity: Identity, reader: str = "") -> None:
        """Ends that reader's use of all offers of the checkpoint. An offer without readers ends."""
        offered = f"copy/{identity}/", f"parity/{identity}/"
        for name in [name for name, readers in self._offered.items() if name.startswith(offered) and reader in readers]:
            self._offered[name].discard(reader)
            if not self._offered[name]:
                transport.withdraw(name)
                del self._offered[name]
                self._urgent.discard(name)

    # -- as the node that keeps it

    def keep(
        self,
        transport: Transport,
        identity: Identity,
        source: str,
        addresses: Sequence[Address],
        wanted: Sequence[DescribedSnapshot],
        then: Callable[[str], None],
    ) -> None:
        """Copies these snapshots from agent `source`. `then` hears "" once all are here and right, else the error."""
        left = {each.rank for each in wanted}
        errors: list[str] = []

        def ended(rank: int, error: str) -> None:
            left.discard(rank)
            errors.extend([error] if error else [])
            if not left:
                self.attempted(identity, source, not errors)
                then(errors[0] if errors else "")

        if not left:
            self._post(lambda: then(""))
        self.make_way([each.size for each in wanted if (identity, each.rank) not in self.kept])
        for each in wanted:
            self._keep_one(transport, identity, source, addresses, each, ended)

    def _keep_one(
        self,
        transport: Transport,
        identity: Identity,
        source: str,
        addresses: Sequence[Address],
        wanted: DescribedSnapshot,
        ended: Callable[[int, str], None],
    ) -> None:
        key = identity, wanted.rank
        if key in self.kept:
            self._post(lambda: ended(wanted.rank, ""))
            return
        if key in self._coming:
            came = lambda: ended(wanted.rank, "" if key in self.kept else "it was on its way already, and has not come")  # noqa: E731
            self._coming[key][0].done.add_done_callback(lambda done: self._post(came))  # runs after `fetched`
            return
        try:
            arena = self._arena(wanted.size)
        except (OSError, AgentError) as exc:
            self._post(lambda error=f"no memory for a copy: {exc}": ended(wanted.rank, error))  # type: ignore[misc]
            return
        arena.begin_fill()
        fetch = transport.fetch(
            source,
            addresses,
            transfer_of(identity, wanted.rank),
            arena.view[: arena.bytes],
            wanted.frames,
            landed=self.progress.moved,
        )
        self._coming[key] = fetch, arena
        self._sources[key] = source

        def fetched(done: Future[None]) -> None:
            self._coming.pop(key, None)
            self._sources.pop(key, None)
            error = failure(done)
            if not error:
                error = self._finish(key, arena, wanted)
            self._unwanted.discard(key)
            if error:
                self._put_back(arena)
            ended(wanted.rank, error)

        fetch.done.add_done_callback(lambda done: self._post(lambda: fetched(done)))

    def source_gone(self, source: str) -> None:
        """Agent `source` has disconnected: cancels the copies from it at once, before their transfers time out."""
        for key in [key for key, name in self._sources.items() if name == source]:
            self._coming[key][0].cancel()

    def _finish(self, key: Key, arena: Arena, wanted: DescribedSnapshot) -> str:
        if key in self._unwanted or self.chunks.is_outdated(key[0]):
            return f"nobody goes on from {key[0]} any more"
        arena.set_page(wanted.page)
        found = sealed(arena)
        if found is None or found[0] != key:
            arena.begin_fill()
            return f"what came as rank {key[1]} of {key[0]} says that it is something else"
        self.kept[key] = arena
        return ""

    # -- letting go

    def attempted(self, identity: Identity, source: str, succeeded: bool) -> None:
        """Records whether the last transfer of that checkpoint from `source` brought all of it."""
        (self._failed.discard if succeeded else self._failed.add)((identity, source))

    def make_room(
        self,
        identity: Identity,
        safe: Identity | None,
        sizes: Collection[int] = (),
        needed: Collection[int] | None = None,
    ) -> None:
        """Evicts replicas of the epoch that those of `identity`, of `sizes` bytes, supersede.

        - `safe`, the newest replicated checkpoint, stays. Others came of failed attempts, and go.
        - If none of `safe` is here (this node was away), `told_safe` stays while there is room.
        - If `safe` is None (unknown, or none): `told_safe` and the newest checkpoint that did not fail here stay. While
          there is room, older ones stay, too, up to FAILED_MAX. One of them may be all that survives a loss.
        - `needed`: the ranks of `safe` whose copies here it needs; None: unknown. If room is short, other copies of
          `safe` go. With no ranks needed, its parity goes, too.

        Errors: AgentError, see `check`."""
        self.check(identity.epoch)
        others = {i for i in self.identities if i.epoch == identity.epoch and i not in (identity, safe)}
        stay, may_stay = set[Identity | None](), set[Identity | None]()  # in any case; while there is room
        if safe is None:
            left = sorted(others - {each for each, _ in self._failed} - {self.told_safe})[-FAILED_MAX:]
            stay, may_stay = {self.told_safe, *left[-1:]}, {*left[:-1]}
        elif safe not in self.identities:
            may_stay = {self.told_safe}
        wanted = {identity, safe} | stay | may_stay
        self.forget(lambda each: each.epoch == identity.epoch and each not in wanted)  # cancels transfers, too
        if not self.fits(sizes):
            self.forget((others & may_stay).__contains__)
        if needed is not None and safe != identity and not self.fits(sizes):
            self._forget([key for key in self.kept if key[0] == safe and key[1] not in needed])
            if not needed:
                self.chunks.forget(lambda each: each == safe)

    def forget(self, goes: Callable[[Identity], bool]) -> None:
        """Evicts these checkpoints, and cancels what is still on its way of them. Leased copies go at `release`."""
        for key in [key for key in self._coming if goes(key[0])]:
            self._unwanted.add(key)
            self._coming[key][0].cancel()
        for name in list(self._offered):
            if goes(_identity_of(name)):
                self._offer_no_more(name)
        self.chunks.forget(goes)
        self._failed = {each for each in self._failed if not goes(each[0])}
        self._forget([key for key in self.kept if goes(key[0])])

    def _forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._offer_no_more(transfer_of(*key))
            arena = self.kept.pop(key)
            if self._leases[key[0]]:
                self._late[key] = arena
            else:
                self._put_back(arena)

    def _offer_no_more(self, name: str) -> None:
        """Ends an offer even while it has readers: its memory will be used again."""
        if self._transport is not None and name in self._offered:
            self._transport.withdraw(name)
            del self._offered[name]
            self._urgent.discard(name)

    def lease(self, identity: Identity) -> None:
        """Protects the copies of that checkpoint from reuse until `release`. Leases are counted."""
        self._leases[identity] += 1

    def release(self, identity: Identity) -> None:
        """Ends one lease. After the last, the memory of evicted copies is reused."""
        self._leases[identity] -= 1
        if not self._leases[identity]:
            del self._leases[identity]
            for key in [key for key in self._late if key[0] == identity]:
                self._put_back(self._late.pop(key))

    def before(self, newer: Identity) -> None:
        """Evicts all checkpoints older than `newer`, which is replicated, also of earlier epochs. Errors: AgentError,
        see `check`."""
        self.check(newer.epoch)
        self.chunks.replaced(newer)
        self.told_safe = max(newer, self.told_safe or newer)
        self.forget(lambda identity: identity < newer)

    def unkeep(self, epoch: Epoch) -> None:
        """Evicts all checkpoints of that epoch: its job replicates no longer. Errors: AgentError, see `check`."""
        self.check(epoch)
        if self.told_safe is not None and self.told_safe.epoch == epoch:
            self.told_safe = None
        self.forget(lambda identity: identity.epoch == epoch)

    def epochs_before(self, epoch: Epoch) -> None:
        """Evicts all epochs before `epoch`, now and in future. Errors: AgentError, see `check`."""
        self.check(epoch)
        self.chunks.since = max(epoch, self.chunks.since or epoch)
        self.forget(self.chunks.is_outdated)

    def cool(self, missing: int) -> int:
        """Closes spare arenas until about `missing` bytes are free. Returns the bytes freed."""
        freed = 0
        while self._spare and freed < missing:
            freed += self._spare[0].bytes
            self._bulk.close_arenas([self._spare.pop(0)])
        return freed + (self.chunks.cool(missing - freed) if freed < missing else 0)

    def close(self) -> None:
        for fetch, _ in self._coming.values():
            fetch.cancel()
        self._bulk.close_arenas([arena for _, arena in self._coming.values()])
        self._bulk.close_arenas([*self.kept.values(), *self._late.values(), *self._spare])
        self.kept.clear()
        self._late.clear()
        self._spare.clear()
        self.chunks.close()

    def of(self, identity: Identity) -> dict[int, Arena]:
        """The complete copies of that checkpoint, by rank."""
        return {rank: arena for (each, rank), arena in self.kept.items() if each == identity}

    def shown(self) -> dict[str, list[int]]:
        """For display: of the newest SHOWN checkpoints, the ranks of which copies are kept."""
        return {str(each): sorted(self.of(each))[:RANKS_SHOWN] for each in sorted(self.identities)[-SHOWN:]}

    def add(self, key: Key, arena: Arena) -> None:
        """Adds a copy that was rebuilt here; closes it if there is one already."""
        if key in self.kept:
            self._bulk.close_arenas([arena])
        else:
            self.kept[key] = arena

    def arenas(self) -> Iterable[Arena]:
        return self.kept.values()

    def inventory(self) -> Inventory:
        """The inventory of the copies, without parity."""
        found = Inventory()
        found.add_arenas(self.kept.values())
        return found

    def _arena(self, size: int) -> Arena:
        """An arena of exactly that size, a spare one if possible. Errors: AgentError if there is no room, OSError."""
        for arena in self._spare:
            if arena.bytes == size:
                self._spare.remove(arena)
                return arena
        if self._room is not None:
            room = self._room()
            self._drop_spare(size, room)
            if self.bytes + size > room:
                used, wanted = self.bytes >> 20, size >> 20
                raise AgentError(
                    f"{used} MiB of the {room >> 20} MiB that it has for others are in use, {wanted} more are not left"
                )
        return Arena.create(size)

    def begin_chunk(self, name: ParityChunkName) -> Arena:
        """Memory for a parity chunk that `fits`; see ParityStore.begin."""
        if self._room is not None and not self.chunks.is_warm(name.striped.length):
            self._drop_spare(name.striped.length, self._room())
        return self.chunks.begin(name)

    def _drop_spare(self, size: int, room: int) -> None:
        """Closes spare arenas until `size` more bytes fit in `room`, or none is left."""
        while self.bytes + size > room:
            if self._spare:
                self._bulk.close_arenas([self._spare.pop(0)])
            elif not self.chunks.drop_spare():
                return

    def _put_back(self, arena: Arena) -> None:
        """Keeps the arena as a warm spare. Closes the oldest spares beyond the bytes of the copies that are kept."""
        arena.begin_fill()
        self._spare.append(arena)
        kept_bytes = sum(each.bytes for each in self.kept.values())
        while sum(each.bytes for each in self._spare) > kept_bytes:
            self._bulk.close_arenas([self._spare.pop(0)])
