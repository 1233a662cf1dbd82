"""The replica store of one node: keeps copies and parity for peers, and offers snapshots to peers.

It evicts when it is told: by a coordinator (`evict_superseded`, `evict_older_than`, `evict_epoch`), by a start
(`evict_epochs_before`), and by node_memory.py when memory runs short (`evict`).

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
from ckpt.agent.net.tcp_receiver import Fetch
from ckpt.agent.net.tcp_sender import Transport
from ckpt.agent.net.transport import Frames
from ckpt.agent.replication.parity_store import ParityStore
from ckpt.agent.runtime.workers import Lane, Workers, failure
from ckpt.agent.snapshots.described import DescribedSnapshot, describe_snapshots
from ckpt.agent.snapshots.inventory import Inventory, Key, find_sealed_snapshot
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import PAGE, Arena
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.snapshots.described import ParityChunkName

log = logging.getLogger("ckpt")

COPIES_MAX = 4096  # ranks of one checkpoint that one node keeps
ARENA_BYTES_MAX = 1 << 42
SHOWN, RANKS_SHOWN = 4, 64
# Checkpoints kept beside `announced_replicated` while it is unknown which one is replicated.
FAILED_MAX = 2


def encode_described(found: Sequence[DescribedSnapshot]) -> bytes:
    packed: bytes = msgpack.packb(
        [[each.rank, each.arena_bytes, each.first_page, each.frames.encode()] for each in found]
    )
    return packed


def decode_described(blob: bytes) -> list[DescribedSnapshot]:
    """The inverse of `encode_described`. Errors: AgentError if malformed."""
    try:
        rows = unpack_bounded(blob, "what a node says of its snapshots")
        if not isinstance(rows, list) or len(rows) > COPIES_MAX:
            raise AgentError("a node describes more snapshots than there can be")
        return [_decode_snapshot(*row) for row in rows]
    except (ValueError, TypeError, OverflowError) as exc:
        raise AgentError(f"a node describes its snapshots wrong: {exc}") from exc


def _decode_snapshot(rank: int, size: int, page: bytes, frames: bytes) -> DescribedSnapshot:
    found = DescribedSnapshot(int(rank), int(size), bytes(page), Frames.decode(frames, int(size)))
    if found.rank < 0 or not PAGE <= found.arena_bytes <= ARENA_BYTES_MAX or len(found.first_page) != PAGE:
        raise AgentError(f"the snapshot of rank {rank} is described wrong")
    if len(found.frames) and int(found.frames.offsets.min()) < PAGE:
        raise AgentError(f"the snapshot of rank {rank} is described wrong")
    return found


def transfer_name(identity: Identity, rank: int) -> str:
    """The name under which that rank's whole snapshot is offered."""
    return f"copy/{identity}/{rank}"


def _identity_of(transfer: str) -> Identity:
    """The checkpoint that an offer is of, be it a copy or parity."""
    return Identity.parse(transfer.split("/")[1])


class ReplicaStore:
    """Replicas that this node keeps for peers, and the transfers it offers them. `kept`: complete, verified copies.
    `parity_store`: the parity, evicted by the same rules."""

    def __init__(self, workers: Workers, post: Callable[[Callable[[], None]], None]) -> None:
        self.arenas_by_key: dict[Key, Arena] = {}
        self.parity_store = ParityStore(workers, lambda name: self._end_offer(name.transfer_name))
        self.progress = Progress()  # of copies that arrive, and of parity that is made here
        self._workers, self._post = workers, post
        self._spare_arenas: list[Arena] = []  # free arenas with warm pages
        self._readers_by_offer: dict[str, set[str]] = {}  # name of an offer -> its readers
        self._urgent_offers: set[str] = set()  # names of the urgent offers
        self._transport: Transport | None = None  # the transport of the offers
        self._incoming: dict[Key, tuple[Fetch, Arena]] = {}  # copies that are being fetched
        self._sources_by_key: dict[Key, str] = {}  # copies in `_incoming` -> the agent they come from
        self._evicted_incoming: set[Key] = set()  # copies in `_incoming` that were evicted meanwhile
        self._get_limit_bytes: Callable[[], int] | None = None  # the memory limit in bytes; None: unlimited
        self._leases: Counter[Identity] = Counter()
        self._evicted_leased: dict[Key, Arena] = {}  # evicted, but still leased
        self.announced_replicated: Identity | None = None  # the newest checkpoint that a coordinator called replicated
        self._failed_transfers: set[tuple[Identity, str]] = set()  # (checkpoint, source) whose last transfer failed
        # Returns a predicate: which checkpoints may be evicted when memory is short.
        self.get_eviction_rule: Callable[[], Callable[[Identity], bool]] = lambda: lambda identity: False
        # Raises AgentError if that epoch may not have older replicas dropped now.
        self.check_eviction: Callable[[Epoch], None] = lambda epoch: None

    @property
    def bytes(self) -> int:
        """Bytes of all arenas and chunks: kept, leased, on their way, and spare."""
        return (
            self._used_bytes
            + self.parity_store.bytes
            - self.parity_store.used_bytes
            + sum(each.size_bytes for each in self._spare_arenas)
        )

    @property
    def allocated_bytes(self) -> int:
        """The part of `bytes` whose pages the machine has allocated."""
        return self.bytes - self.unallocated_bytes

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that copies and parity on their way will still allocate: pages are taken as the data arrives."""
        return self.parity_store.unallocated_bytes + sum(arena.untouched_bytes for _, arena in self._incoming.values())

    @property
    def _used_bytes(self) -> int:
        coming = [arena for _, arena in self._incoming.values()]
        arenas = [*self.arenas_by_key.values(), *self._evicted_leased.values(), *coming]
        return self.parity_store.used_bytes + sum(arena.size_bytes for arena in arenas)

    @property
    def identities(self) -> set[Identity]:
        """The checkpoints of which a copy or parity is kept."""
        return {identity for identity, _ in self.arenas_by_key} | self.parity_store.identities

    def set_limit(self, room: Callable[[], int]) -> None:
        """From now on a copy that does not fit is refused. `room`: the current limit of `bytes`."""
        self._get_limit_bytes = room

    def fits(self, sizes: Iterable[int]) -> bool:
        """Whether arenas of these sizes fit in the limit once the spare ones are closed."""
        return self._get_limit_bytes is None or self._used_bytes + sum(sizes) <= self._get_limit_bytes()

    def evict_to_fit(self, sizes: Iterable[int]) -> None:
        """Evicts what `get_eviction_rule` permits, if arenas of these sizes do not fit."""
        if not self.fits(sizes):
            self.evict(self.get_eviction_rule())

    def bytes_of(self, epoch: Epoch) -> int:
        """Bytes kept and on their way of that epoch's checkpoints, with all spare memory."""
        coming = [arena for (identity, _), (_, arena) in self._incoming.items() if identity.epoch == epoch]
        kept = [arena for (identity, _), arena in self.arenas_by_key.items() if identity.epoch == epoch]
        return self.parity_store.bytes_of(epoch) + sum(
            arena.size_bytes for arena in [*kept, *coming, *self._spare_arenas]
        )

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
                    name = transfer_name(identity, each.rank)
                    self.offer(transport, name, arenas[each.rank].view, each.frames, reader, urgent)
            except (CkptError, ValueError) as exc:  # ValueError: the arena was closed.
                then([], str(exc))
                return
            then(done.result(), "")

        self._workers.run(Lane.FRONT if urgent else Lane.MEMORY, lambda: describe_snapshots(identity, arenas), found)

    def offer(
        self, transport: Transport, name: str, source: memoryview, frames: Frames, reader: str, urgent: bool = False
    ) -> None:
        """Lets other nodes fetch `source` under `name`, until `withdraw`. `urgent`: see Transport.offer; an existing
        offer becomes urgent, and its readers connect anew. Errors: AgentError; ValueError if the memory was closed."""
        if name in self._readers_by_offer and urgent and name not in self._urgent_offers:
            transport.withdraw(name)
            transport.offer(name, source, frames, urgent)
        elif name not in self._readers_by_offer:
            transport.offer(name, source, frames, urgent)
        if urgent:
            self._urgent_offers.add(name)
        self._transport = transport
        self._readers_by_offer.setdefault(name, set()).add(reader)

    def is_offered(self, identity: Identity) -> bool:
        return any(_identity_of(name) == identity for name in self._readers_by_offer)

    def withdraw(self, transport: Transport, identity: Identity, reader: str = "") -> None:
        """Ends that reader's use of all offers of the checkpoint. An offer without readers ends."""
        offered = f"copy/{identity}/", f"parity/{identity}/"
        for name in [
            name for name, readers in self._readers_by_offer.items() if name.startswith(offered) and reader in readers
        ]:
            self._readers_by_offer[name].discard(reader)
            if not self._readers_by_offer[name]:
                transport.withdraw(name)
                del self._readers_by_offer[name]
                self._urgent_offers.discard(name)

    # -- as the node that keeps it

    def fetch_replicas(
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
                self.record_transfer(identity, source, not errors)
                then(errors[0] if errors else "")

        if not left:
            self._post(lambda: then(""))
        self.evict_to_fit([each.arena_bytes for each in wanted if (identity, each.rank) not in self.arenas_by_key])
        for each in wanted:
            self._fetch_replica(transport, identity, source, addresses, each, ended)

    def _fetch_replica(
        self,
        transport: Transport,
        identity: Identity,
        source: str,
        addresses: Sequence[Address],
        wanted: DescribedSnapshot,
        ended: Callable[[int, str], None],
    ) -> None:
        key = identity, wanted.rank
        if key in self.arenas_by_key:
            self._post(lambda: ended(wanted.rank, ""))
            return
        if key in self._incoming:

            def landed() -> None:
                why = "" if key in self.arenas_by_key else "it was on its way already, and has not come"
                ended(wanted.rank, why)

            # It runs after `fetched`.
            self._incoming[key][0].completion.add_done_callback(lambda done: self._post(landed))
            return
        try:
            arena = self._take_arena(wanted.arena_bytes)
        except (OSError, AgentError) as exc:
            self._post(lambda error=f"no memory for a copy: {exc}": ended(wanted.rank, error))  # type: ignore[misc]
            return
        arena.begin_fill()
        fetch = transport.fetch(
            source,
            addresses,
            transfer_name(identity, wanted.rank),
            arena.view[: arena.size_bytes],
            wanted.frames,
            landed=self.progress.advance,
        )
        self._incoming[key] = fetch, arena
        self._sources_by_key[key] = source

        def fetched(done: Future[None]) -> None:
            self._incoming.pop(key, None)
            self._sources_by_key.pop(key, None)
            error = failure(done)
            if not error:
                error = self._seal_replica(key, arena, wanted)
            self._evicted_incoming.discard(key)
            if error:
                self._recycle_arena(arena)
            ended(wanted.rank, error)

        fetch.completion.add_done_callback(lambda done: self._post(lambda: fetched(done)))

    def handle_disconnect(self, source: str) -> None:
        """Agent `source` has disconnected: cancels the copies from it at once, before their transfers time out."""
        for key in [key for key, name in self._sources_by_key.items() if name == source]:
            self._incoming[key][0].cancel()

    def _seal_replica(self, key: Key, arena: Arena, wanted: DescribedSnapshot) -> str:
        if key in self._evicted_incoming or self.parity_store.is_outdated(key[0]):
            return f"nobody goes on from {key[0]} any more"
        arena.write_header_page(wanted.first_page)
        found = find_sealed_snapshot(arena)
        if found is None or found[0] != key:
            arena.begin_fill()
            return f"what came as rank {key[1]} of {key[0]} says that it is something else"
        self.arenas_by_key[key] = arena
        return ""

    # -- letting go

    def record_transfer(self, identity: Identity, source: str, succeeded: bool) -> None:
        """Records whether the last transfer of that checkpoint from `source` brought all of it."""
        (self._failed_transfers.discard if succeeded else self._failed_transfers.add)((identity, source))

    def evict_superseded(
        self,
        identity: Identity,
        safe: Identity | None,
        sizes: Collection[int] = (),
        needed: Collection[int] | None = None,
    ) -> None:
        """Evicts replicas of the epoch that those of `identity`, of `sizes` bytes, supersede.

        - `safe`, the newest replicated checkpoint, stays. Others came of failed attempts, and go.
        - If none of `safe` is here (this node was away), `announced_replicated` stays while there is room.
        - If `safe` is None (unknown, or none): `announced_replicated` and the newest checkpoint that did not fail here
          stay. While there is room, older ones stay, too, up to FAILED_MAX. One of them may be all that survives a
          loss.
        - `needed`: the ranks of `safe` whose copies here it needs; None: unknown. If room is short, other copies of
          `safe` go. With no ranks needed, its parity goes, too.

        Errors: AgentError, see `check_eviction`."""
        self.check_eviction(identity.epoch)
        others = {i for i in self.identities if i.epoch == identity.epoch and i not in (identity, safe)}
        stay, may_stay = set[Identity | None](), set[Identity | None]()  # in any case; while there is room
        if safe is None:
            left = sorted(others - {each for each, _ in self._failed_transfers} - {self.announced_replicated})[
                -FAILED_MAX:
            ]
            stay, may_stay = {self.announced_replicated, *left[-1:]}, {*left[:-1]}
        elif safe not in self.identities:
            may_stay = {self.announced_replicated}
        wanted = {identity, safe} | stay | may_stay
        self.evict(lambda each: each.epoch == identity.epoch and each not in wanted)  # cancels transfers, too
        if not self.fits(sizes):
            self.evict((others & may_stay).__contains__)
        if needed is not None and safe != identity and not self.fits(sizes):
            self._evict_keys([key for key in self.arenas_by_key if key[0] == safe and key[1] not in needed])
            if not needed:
                self.parity_store.evict(lambda each: each == safe)

    def evict(self, goes: Callable[[Identity], bool]) -> None:
        """Evicts these checkpoints, and cancels what is still on its way of them. Leased copies go at `release`."""
        for key in [key for key in self._incoming if goes(key[0])]:
            self._evicted_incoming.add(key)
            self._incoming[key][0].cancel()
        for name in list(self._readers_by_offer):
            if goes(_identity_of(name)):
                self._end_offer(name)
        self.parity_store.evict(goes)
        self._failed_transfers = {each for each in self._failed_transfers if not goes(each[0])}
        self._evict_keys([key for key in self.arenas_by_key if goes(key[0])])

    def _evict_keys(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._end_offer(transfer_name(*key))
            arena = self.arenas_by_key.pop(key)
            if self._leases[key[0]]:
                self._evicted_leased[key] = arena
            else:
                self._recycle_arena(arena)

    def _end_offer(self, name: str) -> None:
        """Ends an offer even while it has readers: its memory will be used again."""
        if self._transport is not None and name in self._readers_by_offer:
            self._transport.withdraw(name)
            del self._readers_by_offer[name]
            self._urgent_offers.discard(name)

    def lease(self, identity: Identity) -> None:
        """Protects the copies of that checkpoint from reuse until `release`. Leases are counted."""
        self._leases[identity] += 1

    def release(self, identity: Identity) -> None:
        """Ends one lease. After the last, the memory of evicted copies is reused."""
        self._leases[identity] -= 1
        if not self._leases[identity]:
            del self._leases[identity]
            for key in [key for key in self._evicted_leased if key[0] == identity]:
                self._recycle_arena(self._evicted_leased.pop(key))

    def evict_older_than(self, newer: Identity) -> None:
        """Evicts all checkpoints older than `newer`, which is replicated, also of earlier epochs. Errors: AgentError,
        see `check_eviction`."""
        self.check_eviction(newer.epoch)
        self.parity_store.evict_replaced(newer)
        self.announced_replicated = max(newer, self.announced_replicated or newer)
        self.evict(lambda identity: identity < newer)

    def evict_epoch(self, epoch: Epoch) -> None:
        """Evicts all checkpoints of that epoch: its job replicates no longer. Errors: AgentError, see
        `check_eviction`."""
        self.check_eviction(epoch)
        if self.announced_replicated is not None and self.announced_replicated.epoch == epoch:
            self.announced_replicated = None
        self.evict(lambda identity: identity.epoch == epoch)

    def evict_epochs_before(self, epoch: Epoch) -> None:
        """Evicts all epochs before `epoch`, now and in future. Errors: AgentError, see `check_eviction`."""
        self.check_eviction(epoch)
        self.parity_store.oldest_epoch = max(epoch, self.parity_store.oldest_epoch or epoch)
        self.evict(self.parity_store.is_outdated)

    def close_spares(self, missing: int) -> int:
        """Closes spare arenas until about `missing` bytes are free. Returns the bytes freed."""
        freed = 0
        while self._spare_arenas and freed < missing:
            freed += self._spare_arenas[0].size_bytes
            self._workers.close_arenas([self._spare_arenas.pop(0)])
        return freed + (self.parity_store.close_spares(missing - freed) if freed < missing else 0)

    def close(self) -> None:
        for fetch, _ in self._incoming.values():
            fetch.cancel()
        self._workers.close_arenas([arena for _, arena in self._incoming.values()])
        self._workers.close_arenas([*self.arenas_by_key.values(), *self._evicted_leased.values(), *self._spare_arenas])
        self.arenas_by_key.clear()
        self._evicted_leased.clear()
        self._spare_arenas.clear()
        self.parity_store.close()

    def arenas_of(self, identity: Identity) -> dict[int, Arena]:
        """The complete copies of that checkpoint, by rank."""
        return {rank: arena for (each, rank), arena in self.arenas_by_key.items() if each == identity}

    def status_fields(self) -> dict[str, list[int]]:
        """For display: of the newest SHOWN checkpoints, the ranks of which copies are kept."""
        return {str(each): sorted(self.arenas_of(each))[:RANKS_SHOWN] for each in sorted(self.identities)[-SHOWN:]}

    def add_rebuilt(self, key: Key, arena: Arena) -> None:
        """Adds a copy that was rebuilt here; closes it if there is one already."""
        if key in self.arenas_by_key:
            self._workers.close_arenas([arena])
        else:
            self.arenas_by_key[key] = arena

    def arenas(self) -> Iterable[Arena]:
        return self.arenas_by_key.values()

    def inventory(self) -> Inventory:
        """The inventory of the copies, without parity."""
        found = Inventory()
        found.add_arenas(self.arenas_by_key.values())
        return found

    def _take_arena(self, size: int) -> Arena:
        """An arena of exactly that size, a spare one if possible. Errors: AgentError if there is no room, OSError."""
        for arena in self._spare_arenas:
            if arena.size_bytes == size:
                self._spare_arenas.remove(arena)
                return arena
        if self._get_limit_bytes is not None:
            room = self._get_limit_bytes()
            self._close_spares_to_fit(size, room)
            if self.bytes + size > room:
                used, wanted = self.bytes >> 20, size >> 20
                raise AgentError(
                    f"{used} MiB of the {room >> 20} MiB that it has for others are in use, {wanted} more are not left"
                )
        return Arena.create(size)

    def begin_chunk(self, name: ParityChunkName) -> Arena:
        """Memory for a parity chunk that `fits`; see ParityStore.begin."""
        if self._get_limit_bytes is not None and not self.parity_store.has_spare(name.stripe.length):
            self._close_spares_to_fit(name.stripe.length, self._get_limit_bytes())
        return self.parity_store.begin_chunk(name)

    def _close_spares_to_fit(self, size: int, room: int) -> None:
        """Closes spare arenas until `size` more bytes fit in `room`, or none is left."""
        while self.bytes + size > room:
            if self._spare_arenas:
                self._workers.close_arenas([self._spare_arenas.pop(0)])
            elif not self.parity_store.close_one_spare():
                return

    def _recycle_arena(self, arena: Arena) -> None:
        """Keeps the arena as a warm spare. Closes the oldest spares beyond the bytes of the copies that are kept."""
        arena.begin_fill()
        self._spare_arenas.append(arena)
        kept_bytes = sum(each.size_bytes for each in self.arenas_by_key.values())
        while sum(each.size_bytes for each in self._spare_arenas) > kept_bytes:
            self._workers.close_arenas([self._spare_arenas.pop(0)])
