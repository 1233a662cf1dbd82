"""The replica store of one node: keeps copies and parity chunks for peers.

It evicts when it is told: by a coordinator (`evict_superseded`, `evict_older_than`, `evict_epoch`), by a start
(`evict_epochs_before`), and by node_memory.py when memory runs short (`evict`).

A copy is an arena with the same bytes as the original, and is used like the original. Every frame is verified by its
hash on arrival. The first page says what the arena holds; it is written last, so a partial copy is never taken for a
whole one. A parity chunk is a replica that this node makes of other nodes' frames (parity_worker.py). The replicas'
memory is in replica_arenas.py. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ckpt.agent.net.progress import Progress
from ckpt.agent.net.tcp_sender import Transport
from ckpt.agent.replication.replica_arenas import (
    IncomingReplica,
    KeptReplicas,
    ReplicaArenas,
    ReplicaName,
    checkpoint_of,
)
from ckpt.agent.replication.replica_offers import ReplicaOffers, transfer_name
from ckpt.agent.runtime.coroutines import gather, promise_of
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.described import DescribedSnapshot, ParityChunk, ParityChunkName
from ckpt.agent.snapshots.inventory import Inventory, Key, find_sealed_snapshot
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena
from ckpt.types import Epoch, Identity

# Checkpoints kept beside `announced_replicated` while it is unknown which one is replicated.
FAILED_MAX = 2


class ReplicaStore:
    """Replicas that this node keeps for peers: how they arrive, and which are evicted. `kept`: the complete ones.
    `arenas`: their memory. `offers`: the transfers that this node offers peers."""

    def __init__(self, workers: Workers, post: Callable[[Callable[[], None]], None]) -> None:
        self._incoming: dict[ReplicaName, IncomingReplica] = {}
        self.kept = KeptReplicas()
        self.arenas = ReplicaArenas(workers, self.kept, self._incoming)
        self.offers = ReplicaOffers(workers)
        self.progress = Progress()  # of copies that arrive, and of parity that is made here
        self._workers, self._post = workers, post
        # By checkpoint, the chunks that replace its other chunks once it is replicated.
        self._replacements: dict[Identity, frozenset[ParityChunkName]] = {}
        self.oldest_epoch: Epoch | None = None  # earlier epochs are not kept any more
        self.announced_replicated: Identity | None = None  # the newest checkpoint that a coordinator called replicated
        self._failed_transfers: set[tuple[Identity, str]] = set()  # (checkpoint, source) whose last transfer failed
        # Returns a predicate: which checkpoints may be evicted when memory is short.
        self.get_eviction_rule: Callable[[], Callable[[Identity], bool]] = lambda: lambda identity: False
        # Raises AgentError if that epoch may not have older replicas dropped now.
        self.check_eviction: Callable[[Epoch], None] = lambda epoch: None

    def evict_to_fit(self, sizes: Iterable[int]) -> None:
        """Evicts what `get_eviction_rule` permits, if arenas of these sizes do not fit."""
        if not self.arenas.fits(sizes):
            self.evict(self.get_eviction_rule())

    # -- as the node that keeps it

    async def fetch_replicas(
        self,
        transport: Transport,
        identity: Identity,
        source: str,
        addresses: Sequence[Address],
        wanted: Sequence[DescribedSnapshot],
    ) -> None:
        """Copies these snapshots from agent `source`. Errors: the first error, once all have come or failed."""
        errors: list[CkptError] = []

        async def fetch(each: DescribedSnapshot) -> None:
            try:
                await self._fetch_replica(transport, (identity, each.rank), source, addresses, each)
            except CkptError as exc:
                errors.append(exc)

        kept = self.kept.arenas_by_key
        self.evict_to_fit([each.arena_bytes for each in wanted if (identity, each.rank) not in kept])
        await gather(map(fetch, wanted))
        if wanted:
            self.record_transfer(identity, source, not errors)
        if errors:
            raise errors[0]

    async def _fetch_replica(
        self,
        transport: Transport,
        key: Key,
        source: str,
        addresses: Sequence[Address],
        wanted: DescribedSnapshot,
    ) -> None:
        if key in self._incoming:
            await self._incoming[key].landed
            if key not in self.kept.arenas_by_key:
                raise AgentError("it was on its way already, and has not come")
        if key in self.kept.arenas_by_key:
            return
        try:
            arena = self.arenas.take(wanted.arena_bytes)
        except (OSError, AgentError) as exc:
            raise AgentError(f"no memory for a copy: {exc}") from exc
        arena.begin_fill()
        at, room = (source, addresses, transfer_name(*key)), arena.view[: arena.size_bytes]
        fetch = transport.fetch(*at, room, wanted.frames, landed=self.progress.advance)
        incoming = self._incoming[key] = IncomingReplica(arena, source, fetch)
        try:
            await promise_of(fetch.completion, self._post)
            self._seal_replica(key, incoming, wanted)
        except Exception:
            self.arenas.recycle(arena)
            raise
        finally:
            del self._incoming[key]
            incoming.landed.set_result(None)

    def handle_disconnect(self, source: str) -> None:
        """Agent `source` has disconnected: cancels the copies from it at once, before their transfers time out."""
        for each in list(self._incoming.values()):
            if each.fetch is not None and each.source == source:
                each.fetch.cancel()

    def _seal_replica(self, key: Key, incoming: IncomingReplica, wanted: DescribedSnapshot) -> None:
        """Errors: AgentError if the replica is not wanted any more, or is not what it should be."""
        if incoming.is_evicted or self._is_outdated(key[0]):
            raise AgentError(f"nobody goes on from {key[0]} any more")
        incoming.arena.write_header_page(wanted.first_page)
        found = find_sealed_snapshot(incoming.arena)
        if found is None or found[0] != key:
            raise AgentError(f"what came as rank {key[1]} of {key[0]} says that it is something else")
        self.kept.arenas_by_key[key] = incoming.arena

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
        others = {i for i in self.kept.identities if i.epoch == identity.epoch and i not in (identity, safe)}
        stay, may_stay = set[Identity | None](), set[Identity | None]()  # in any case; while there is room
        if safe is None:
            left = sorted(others - {each for each, _ in self._failed_transfers} - {self.announced_replicated})[
                -FAILED_MAX:
            ]
            stay, may_stay = {self.announced_replicated, *left[-1:]}, {*left[:-1]}
        elif safe not in self.kept.identities:
            may_stay = {self.announced_replicated}
        wanted = {identity, safe} | stay | may_stay
        self.evict(lambda each: each.epoch == identity.epoch and each not in wanted)  # cancels transfers, too
        if not self.arenas.fits(sizes):
            self.evict((others & may_stay).__contains__)
        if needed is not None and safe != identity and not self.arenas.fits(sizes):
            self._evict_replicas([key for key in self.kept.arenas_by_key if key[0] == safe and key[1] not in needed])
            if not needed:
                self._evict_replicas([name for name in self.kept.chunks_by_name if name.identity == safe])

    def evict(self, goes: Callable[[Identity], bool]) -> None:
        """Evicts these checkpoints, and cancels what is still on its way of them. Leased copies go at `release`."""
        for each in [each for name, each in self._incoming.items() if goes(checkpoint_of(name))]:
            each.is_evicted = True
            if each.fetch is not None:
                each.fetch.cancel()
        self.offers.end_all(goes)
        self._failed_transfers = {each for each in self._failed_transfers if not goes(each[0])}
        self._replacements = {identity: names for identity, names in self._replacements.items() if not goes(identity)}
        self._evict_replicas([name for name in self.kept.by_name if goes(checkpoint_of(name))])

    def _evict_replicas(self, names: Iterable[ReplicaName]) -> None:
        for name in names:
            self.offers.end(name.transfer_name if isinstance(name, ParityChunkName) else transfer_name(*name))
            self.arenas.retire(checkpoint_of(name), self.kept.pop(name))

    def evict_other_chunks(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """Evicts all other chunks of that checkpoint: they came of a failed attempt."""
        self._replacements.pop(identity, None)
        self._evict_replicas(
            [name for name in self.kept.chunks_by_name if name.identity == identity and name not in names]
        )

    def plan_replacement(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """As `evict_other_chunks`, but once the checkpoint is replicated: until then the other chunks replicate it."""
        self._replacements[identity] = frozenset(names)

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

    def close(self) -> None:
        for each in list(self._incoming.values()):
            if each.fetch is not None:
                each.fetch.cancel()
        self.arenas.close()
        self.kept.arenas_by_key.clear()
        self.kept.chunks_by_name.clear()

    def add_rebuilt(self, key: Key, arena: Arena) -> None:
        """Adds a copy that was rebuilt here; closes it if there is one already."""
        if key in self.kept.arenas_by_key:
            self._workers.close_arenas([arena])
        else:
            self.kept.arenas_by_key[key] = arena

    def inventory(self) -> Inventory:
        found = Inventory(announced_replicated=self.announced_replicated)
        found.add_arenas(self.kept.arenas_by_key.values())
        found.add_chunks(self.kept.chunks_by_name.values())
        return found

    # -- parity that is made here

    def is_incoming(self, name: ReplicaName) -> bool:
        return name in self._incoming

    def begin_chunk(self, name: ParityChunkName) -> Arena:
        """An arena for that chunk, with arbitrary contents, until `end_chunks`. Errors: AgentError, OSError."""
        arena = self.arenas.take(name.stripe.length)
        self._incoming[name] = IncomingReplica(arena)
        return arena

    def end_chunks(self, names: Iterable[ParityChunkName], made: Collection[ParityChunk]) -> str:
        """Ends chunks that were begun; `made` are complete. Returns why some of `made` are not kept; "" if all are."""
        incoming = {name: self._incoming.pop(name) for name in names}
        unwanted = {c.name for c in made if incoming[c.name].is_evicted or self._is_outdated(c.name.identity)}
        self.kept.chunks_by_name.update((chunk.name, chunk) for chunk in made if chunk.name not in unwanted)
        for name, each in incoming.items():
            if name not in self.kept.chunks_by_name:
                self.arenas.recycle(each.arena)
        return f"nobody goes on from {next(iter(unwanted)).identity} any more" if unwanted else ""
