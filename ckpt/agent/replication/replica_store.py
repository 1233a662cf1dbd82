"""The replica store of one node: keeps copies and parity chunks for peers, and offers its memory to peers.

It evicts when it is told: by a coordinator (`evict_superseded`, `evict_older_than`, `evict_epoch`), by a start
(`evict_epochs_before`), and by node_memory.py when memory runs short (`evict`).

A copy is an arena with the same bytes as the original, and is used like the original. Every frame is verified by its
hash on arrival. The first page says what the arena holds; it is written last, so a partial copy is never taken for a
whole one. A parity chunk is a replica that this node makes of other nodes' frames (parity_worker.py). Main thread only.
Arenas are filled and closed by worker threads: zeroing 1 GiB would block the main thread for half a second.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future

from ckpt.agent.net.progress import Progress
from ckpt.agent.net.tcp_receiver import Fetch
from ckpt.agent.net.tcp_sender import Transport
from ckpt.agent.net.transport import Frames
from ckpt.agent.runtime.workers import Lane, Workers, failure
from ckpt.agent.snapshots.described import DescribedSnapshot, ParityChunk, ParityChunkName, describe_snapshots
from ckpt.agent.snapshots.inventory import Inventory, Key, find_sealed_snapshot
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena, created_bytes
from ckpt.types import Epoch, Identity

log = logging.getLogger("ckpt")

SHOWN, RANKS_SHOWN = 4, 64
# Checkpoints kept beside `announced_replicated` while it is unknown which one is replicated.
FAILED_MAX = 2

ReplicaName = Key | ParityChunkName


def transfer_name(identity: Identity, rank: int) -> str:
    """The name under which that rank's whole snapshot is offered."""
    return f"copy/{identity}/{rank}"


def _identity_of(transfer: str) -> Identity:
    """The checkpoint that an offer is of: the second part of its name."""
    return Identity.parse(transfer.split("/")[1])


def _checkpoint_of(name: ReplicaName) -> Identity:
    return name.identity if isinstance(name, ParityChunkName) else name[0]


def _bytes(arenas: Iterable[Arena]) -> int:
    return sum(arena.size_bytes for arena in arenas)


class ReplicaStore:
    """Replicas that this node keeps for peers, and the transfers it offers them. `arenas_by_key`: complete, verified
    copies. `chunks_by_name`: complete parity chunks."""

    def __init__(self, workers: Workers, post: Callable[[Callable[[], None]], None]) -> None:
        self.arenas_by_key: dict[Key, Arena] = {}
        self.chunks_by_name: dict[ParityChunkName, ParityChunk] = {}
        self.progress = Progress()  # of copies that arrive, and of parity that is made here
        self._workers, self._post = workers, post
        self._spare_arenas: list[Arena] = []  # free arenas with warm pages
        self._readers_by_offer: dict[str, set[str]] = {}  # name of an offer -> its readers
        self._urgent_offers: set[str] = set()  # names of the urgent offers
        self._transport: Transport | None = None  # the transport of the offers
        self._incoming: dict[ReplicaName, Arena] = {}  # copies that are being fetched, and chunks that are being made
        self._fetches: dict[Key, tuple[Fetch, str]] = {}  # of the copies in `_incoming`, with the agent each comes from
        self._evicted_incoming: set[ReplicaName] = set()  # those in `_incoming` that were evicted meanwhile
        self._get_limit_bytes: Callable[[], int] | None = None  # the memory limit in bytes; None: unlimited
        self._leases: Counter[Identity] = Counter()
        self._evicted_leased: list[tuple[Identity, Arena]] = []  # evicted, but still leased
        # By checkpoint, the chunks that replace its other chunks once it is replicated.
        self._replacements: dict[Identity, frozenset[ParityChunkName]] = {}
        self.oldest_epoch: Epoch | None = None  # earlier epochs are not kept any more
        self.announced_replicated: Identity | None = None  # the newest checkpoint that a coordinator called replicated
        self._failed_transfers: set[tuple[Identity, str]] = set()  # (checkpoint, source) whose last transfer failed
        # Returns a predicate: which checkpoints may be evicted when memory is short.
        self.get_eviction_rule: Callable[[], Callable[[Identity], bool]] = lambda: lambda identity: False
        # Raises AgentError if that epoch may not have older replicas dropped now.
        self.check_eviction: Callable[[Epoch], None] = lambda epoch: None

    @property
    def bytes(self) -> int:
        """Bytes of all arenas: kept, leased, on their way, and spare."""
        return self.used_bytes + _bytes(self._spare_arenas)

    @property
    def used_bytes(self) -> int:
        """`bytes` without the spare arenas."""
        return _bytes([*self._kept.values(), *self._incoming.values(), *(each for _, each in self._evicted_leased)])

    @property
    def allocated_bytes(self) -> int:
        """The part of `bytes` whose pages the machine has allocated."""
        return self.bytes - self.unallocated_bytes

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that replicas on their way will still allocate: pages are taken as the data arrives."""
        return sum(arena.untouched_bytes for arena in self._incoming.values())

    @property
    def _kept(self) -> dict[ReplicaName, Arena]:
        chunks = ((name, chunk.arena) for name, chunk in self.chunks_by_name.items())
        return dict([*self.arenas_by_key.items(), *chunks])

    @property
    def identities(self) -> set[Identity]:
        """The checkpoints of which a copy or parity is kept."""
        return {_checkpoint_of(name) for name in self._kept}

    def set_limit(self, room: Callable[[], int]) -> None:
        """From now on a copy that does not fit is refused. `room`: the current limit of `bytes`."""
        self._get_limit_bytes = room

    def fits(self, sizes: Iterable[int]) -> bool:
        """Whether arenas of these sizes fit in the limit once the spare ones are closed."""
        return self._get_limit_bytes is None or self.used_bytes + sum(sizes) <= self._get_limit_bytes()

    def evict_to_fit(self, sizes: Iterable[int]) -> None:
        """Evicts what `get_eviction_rule` permits, if arenas of these sizes do not fit."""
        if not self.fits(sizes):
            self.evict(self.get_eviction_rule())

    def bytes_of(self, epoch: Epoch) -> int:
        """Bytes kept and on their way of that epoch's checkpoints, with all spare memory."""
        of_epoch = [
            arena
            for name, arena in [*self._kept.items(), *self._incoming.items()]
            if _checkpoint_of(name).epoch == epoch
        ]
        return _bytes([*of_epoch, *self._spare_arenas])

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

    @property
    def readers(self) -> set[str]:
        """The readers of all offers."""
        return set[str]().union(*self._readers_by_offer.values())

    def is_offered(self, identity: Identity) -> bool:
        return any(_identity_of(name) == identity for name in self._readers_by_offer)

    def withdraw(self, identity: Identity | None, reader: str = "") -> None:
        """Ends that reader's use of all offers of the checkpoint; None: of all checkpoints. An offer without readers
        ends."""
        for name, readers in list(self._readers_by_offer.items()):
            if reader in readers and identity in (None, _identity_of(name)):
                readers.discard(reader)
                if not readers:
                    self._end_offer(name)

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
            self._fetches[key][0].completion.add_done_callback(lambda done: self._post(landed))
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
        self._incoming[key], self._fetches[key] = arena, (fetch, source)

        def fetched(done: Future[None]) -> None:
            self._incoming.pop(key, None)
            self._fetches.pop(key, None)
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
        for fetch, _ in [each for each in self._fetches.values() if each[1] == source]:
            fetch.cancel()

    def _seal_replica(self, key: Key, arena: Arena, wanted: DescribedSnapshot) -> str:
        if key in self._evicted_incoming or self._is_outdated(key[0]):
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
            self._evict_replicas([key for key in self.arenas_by_key if key[0] == safe and key[1] not in needed])
            if not needed:
                self._evict_replicas([name for name in self.chunks_by_name if name.identity == safe])

    def evict(self, goes: Callable[[Identity], bool]) -> None:
        """Evicts these checkpoints, and cancels what is still on its way of them. Leased copies go at `release`."""
        self._evicted_incoming.update(name for name in self._incoming if goes(_checkpoint_of(name)))
        for fetch in [fetch for key, (fetch, _) in self._fetches.items() if goes(key[0])]:
            fetch.cancel()
        for offer in [offer for offer in self._readers_by_offer if goes(_identity_of(offer))]:
            self._end_offer(offer)
        self._failed_transfers = {each for each in self._failed_transfers if not goes(each[0])}
        self._replacements = {identity: names for identity, names in self._replacements.items() if not goes(identity)}
        self._evict_replicas([name for name in self._kept if goes(_checkpoint_of(name))])

    def _evict_replicas(self, names: Iterable[ReplicaName]) -> None:
        for name in names:
            if isinstance(name, ParityChunkName):
                self._end_offer(name.transfer_name)
                arena = self.chunks_by_name.pop(name).arena
            else:
                self._end_offer(transfer_name(*name))
                arena = self.arenas_by_key.pop(name)
            if self._leases[_checkpoint_of(name)]:
                self._evicted_leased.append((_checkpoint_of(name), arena))
            else:
                self._recycle_arena(arena)

    def evict_other_chunks(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """Evicts all other chunks of that checkpoint: they came of a failed attempt."""
        self._replacements.pop(identity, None)
        self._evict_replicas([name for name in self.chunks_by_name if name.identity == identity and name not in names])

    def plan_replacement(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """As `evict_other_chunks`, but once the checkpoint is replicated: until then the other chunks replicate it."""
        self._replacements[identity] = frozenset(names)

    def _end_offer(self, name: str) -> None:
        """Ends an offer even while it has readers: its memory will be used again."""
        if self._transport is not None and name in self._readers_by_offer:
            self._transport.withdraw(name)
            del self._readers_by_offer[name]
            self._urgent_offers.discard(name)

    def lease(self, identity: Identity) -> None:
        """Protects the replicas of that checkpoint from reuse until `release`. Leases are counted."""
        self._leases[identity] += 1

    def release(self, identity: Identity) -> None:
        """Ends one lease. After the last, the memory of evicted replicas is reused."""
        self._leases[identity] -= 1
        if not self._leases[identity]:
            del self._leases[identity]
            for each in [each for each in self._evicted_leased if each[0] == identity]:
                self._evicted_leased.remove(each)
                self._recycle_arena(each[1])

    def evict_older_than(self, newer: Identity) -> None:
        """Evicts all checkpoints older than `newer`, which is replicated, also of earlier epochs. Errors: AgentError,
        see `check_eviction`."""
        self.check_eviction(newer.epoch)
        names = self._replacements.get(newer)
        if names is not None:
            self.evict_other_chunks(newer, names)
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
        self.oldest_epoch = max(epoch, self.oldest_epoch or epoch)
        self.evict(self._is_outdated)

    def _is_outdated(self, identity: Identity) -> bool:
        return self.oldest_epoch is not None and identity.epoch < self.oldest_epoch

    def close_spares(self, missing: int) -> int:
        """Closes spare arenas until about `missing` bytes are free. Returns the bytes freed."""
        freed = 0
        while self._spare_arenas and freed < missing:
            freed += self._spare_arenas[0].size_bytes
            self._workers.close_arenas([self._spare_arenas.pop(0)])
        return freed

    def close(self) -> None:
        for fetch, _ in self._fetches.values():
            fetch.cancel()
        leased = [arena for _, arena in self._evicted_leased]
        self._workers.close_arenas([*self._incoming.values(), *self._kept.values(), *leased, *self._spare_arenas])
        self.arenas_by_key.clear()
        self.chunks_by_name.clear()
        self._evicted_leased.clear()
        self._spare_arenas.clear()

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

    def chunks_of(self, identity: Identity) -> list[ParityChunk]:
        return [chunk for name, chunk in self.chunks_by_name.items() if name.identity == identity]

    def inventory(self) -> Inventory:
        """The inventory of the replicas."""
        found = Inventory(announced_replicated=self.announced_replicated)
        found.add_arenas(self.arenas_by_key.values())
        found.add_chunks(self.chunks_by_name.values())
        return found

    # -- memory

    def is_incoming(self, name: ReplicaName) -> bool:
        return name in self._incoming

    def begin_chunk(self, name: ParityChunkName) -> Arena:
        """An arena for that chunk, with arbitrary contents, until `end_chunks`. Errors: AgentError, OSError."""
        self._incoming[name] = arena = self._take_arena(name.stripe.length)
        return arena

    def end_chunks(self, names: Iterable[ParityChunkName], made: Collection[ParityChunk]) -> str:
        """Ends chunks that were begun; `made` are complete. Returns why some of `made` are not kept; "" if all are."""
        unwanted = {c.name for c in made if c.name in self._evicted_incoming or self._is_outdated(c.name.identity)}
        self.chunks_by_name.update((chunk.name, chunk) for chunk in made if chunk.name not in unwanted)
        for name in names:
            arena = self._incoming.pop(name)
            self._evicted_incoming.discard(name)
            if name not in self.chunks_by_name:
                self._recycle_arena(arena)
        return f"nobody goes on from {next(iter(unwanted)).identity} any more" if unwanted else ""

    def _take_arena(self, size: int) -> Arena:
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

    def _recycle_arena(self, arena: Arena) -> None:
        """Keeps the arena as a warm spare. Closes the oldest spares beyond the bytes of the replicas that are kept."""
        arena.begin_fill()
        self._spare_arenas.append(arena)
        self.close_spares(_bytes(self._spare_arenas) - _bytes(self._kept.values()))
