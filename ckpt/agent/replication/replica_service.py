"""The replica service of one node: carries out a coordinator's requests about replicas. Main thread only.

    replicate            keep copies of snapshots, or parity chunks made of them; the bytes are fetched from other nodes
    publish              let others read these ranks' snapshots, or (ranks: null) the parity, and describe them
    rebuild              rebuild a rank's snapshot from parity and other ranks' snapshots, and keep it as a copy.
                         `reserve_bytes` must stay free beside it. If source bytes were damaged, the answer names their
                         transfer

The coordinator's own node gets the same requests. The last three are `urgent` when a start waits for them: they then
run at normal priority, and outside the network limit of replication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from ckpt.agent.net.transport import Frames
from ckpt.agent.replication.parity_worker import FrameOrigin, ParityWorker
from ckpt.agent.replication.rebuild_queue import RebuildQueue, RebuildWork
from ckpt.agent.replication.replica_offers import transfer_name
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.runtime.coroutines import Cancelled, Promise, run_on, start
from ckpt.agent.runtime.workers import Lane, Workers
from ckpt.agent.snapshots.described import (
    DescribedSnapshot,
    ParityChunk,
    ParityChunkName,
    decode_described,
    encode_described,
    parse_row,
)
from ckpt.errors import AgentError, CkptError
from ckpt.format.parity import Row
from ckpt.ipc.addresses import Address
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.ipc.node_list import NodeAt
from ckpt.placement.rebuild import Striped, rebuildable_ranks
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.arena import Arena

CHUNKS_MAX = 4096  # parity chunks named in one message
PARITY_SOURCE = "parity"  # the source name, in ReplicaStore.record_transfer, of chunks made here


@dataclass(frozen=True, slots=True)
class Where:
    """Where the parts of a checkpoint lie. `nodes`: addresses of the nodes named in the rest. `ranks`: rank -> a node
    with its snapshot. `chunks`: (node, parity chunk, its bytes as frames); frames are None before it is made."""

    addresses_by_node: Mapping[str, tuple[Address, ...]]
    node_by_rank: Mapping[int, str]
    chunks: Sequence[tuple[str, ParityChunkName, Frames | None]]

    def encode(self) -> bytes:
        chunks = [
            [name, int(chunk.row), chunk.stripe.length, chunk.stripe.source_rows(), frames.encode() if frames else None]
            for name, chunk, frames in self.chunks
        ]
        nodes = [[name, [str(address) for address in addresses]] for name, addresses in self.addresses_by_node.items()]
        packed: bytes = msgpack.packb([nodes, list(self.node_by_rank.items()), chunks])
        return packed

    @staticmethod
    def decode(identity: Identity, blob: bytes) -> Where:
        """Errors: AgentError."""
        try:
            nodes, ranks, chunks = unpack_bounded(blob, "where a checkpoint is to be had")
            if len(chunks) > CHUNKS_MAX:
                raise AgentError("more parities are spoken of than there can be")
            return Where(
                {str(name): tuple(Address.parse(str(text)) for text in texts) for name, texts in nodes},
                {int(rank): str(name) for rank, name in ranks},
                [
                    (
                        str(name),
                        ParityChunkName(identity, parse_row(row), Striped.from_rows(length, sources)),
                        Frames.decode(frames, int(length)) if frames is not None else None,
                    )
                    for name, row, length, sources, frames in chunks
                ],
            )
        except (ValueError, TypeError, OverflowError, AttributeError) as exc:
            raise AgentError(f"where a checkpoint is to be had was told wrong: {exc}") from exc

    def check_sizes(self, snapshots: Mapping[int, DescribedSnapshot]) -> None:
        """Errors: AgentError if a parity chunk covers bytes that no rank staged."""
        sizes = {rank: each.staged_bytes for rank, each in snapshots.items()}
        for _, chunk, _ in self.chunks:
            for run in (run for source in chunk.stripe.sources for run in source):
                if run.stop > sizes.get(run.rank, 0):
                    raise AgentError(f"a parity of bytes that rank {run.rank} has not staged")


class ReplicaService:
    """`arenas_of`: the snapshots of a checkpoint that lie here, copies included, by rank. `free_bytes`: memory that may
    still be taken on this machine."""

    def __init__(
        self,
        workers: Workers,
        post: Callable[[Callable[[], None]], None],
        copies: ReplicaStore,
        arenas_of: Callable[[Identity], dict[int, Arena]],
        network: Callable[[], PeerNetwork | None],
        free_bytes: Callable[[], int],
    ) -> None:
        self._workers, self._post, self._replicas = workers, post, copies
        self._arenas_of, self._network, self._free_bytes = arenas_of, network, free_bytes
        self._rebuild_queue = RebuildQueue(copies.arenas, free_bytes)

    def ask(self, node: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> Promise[list[bytes]]:
        """Sends a request to `node` ("" is this one). Returns the promise of the blobs of its answer. The request goes
        on if nobody waits for it any more. Errors of the promise: AgentError."""
        answer = Promise[list[bytes]]()
        start(self._ask(node, fields, blobs), answer.set_outcome)
        return answer

    async def _ask(self, node: str, fields: dict[str, Any], blobs: Sequence[bytes]) -> list[bytes]:
        network = self._network()
        if not node or (network is not None and node == network.agent_name):
            # Later, as at the other nodes: this one begins no sooner than they.
            turn = Promise[None]()
            self._post(lambda: turn.set_result(None))
            await turn
            return await self.serve(fields, blobs)
        if network is None:
            raise AgentError(f"there is no way to agent {node}")
        return (await network.request(node, fields, blobs)).blobs

    async def ask_for_offers(self, node: str, identity: Identity, fields: dict[str, Any], reader: str) -> list[bytes]:
        """Has `node` offer what lies there of the checkpoint ("publish"). A caller that is cancelled meanwhile leaves
        no offer. Errors: AgentError."""
        answer = self.ask(node, {**fields, "identity": str(identity), "reader": reader})
        try:
            return await answer
        except Cancelled:
            answer.when_settled(lambda: self.end_offers(identity, [node], reader))
            raise

    def end_offers(self, identity: Identity, nodes: Sequence[str], reader: str) -> None:
        """Ends that reader's use of what `nodes` lent and published of the checkpoint."""
        network = self._network()
        if network is None:
            return
        for node in nodes:
            if not node or node == network.agent_name:
                self.withdraw(identity, reader)
            else:
                network.notify(node, {"t": "withdraw", "identity": str(identity), "reader": reader})

    def withdraw(self, identity: Identity, reader: str) -> None:
        """Ends that reader's use of the offers of the checkpoint here, and refuses its waiting rebuilds."""
        self._replicas.offers.withdraw(identity, reader)
        self._rebuild_queue.refuse_queued(reader, f"nobody waits for {identity} any more")

    async def serve(self, fields: Mapping[str, Any], blobs: Sequence[bytes]) -> list[bytes]:
        """Serves one request. Returns the blobs of the answer. Errors: CkptError; before its first wait any error of a
        malformed message."""
        identity = Identity.parse(str(fields["identity"]))
        match fields["t"]:
            case "replicate":
                where, snapshots = Where.decode(identity, blobs[0]), _decode_by_rank(blobs[1])
                await self._keep_replicas(identity, where, snapshots, fields)
            case "publish" if fields["ranks"] is None:
                return self._offer_chunks(identity, str(fields["reader"]), bool(fields.get("urgent")))
            case "rebuild":
                where, snapshots = Where.decode(identity, blobs[0]), _decode_by_rank(blobs[1])
                order = [parse_row(row) for row in fields["parity_order"]]
                return await self._rebuild(identity, int(fields["rank"]), where, snapshots, order, fields)
            case "publish":
                return await self._offer_snapshots(identity, [int(rank) for rank in fields["ranks"]], fields)
        return []

    # -- keeping

    async def _keep_replicas(
        self,
        identity: Identity,
        where: Where,
        snapshots: Mapping[int, DescribedSnapshot],
        fields: Mapping[str, Any],
    ) -> None:
        """Keeps copies of the described snapshots, fetched from `source`, or chunks that are made of them (`source` is
        None). They evict older replicas, unless they are a re-replication, which may be older than what is kept."""
        where.check_sizes(snapshots)
        store, source = self._replicas, str(fields["source"]) if fields["source"] is not None else None
        copies = list(snapshots.values()) if source is not None else []
        chunks = [name for _, name, _ in where.chunks] if source is None else []
        if not fields["rereplication"]:
            told, needed = fields["replicated"], fields["needed_ranks"]
            safe = Identity.parse(str(told)) if told is not None else None
            sizes = [*(each.arena_bytes for each in copies), *(name.stripe.length for name in chunks)]
            store.evict_superseded(
                identity, safe, sizes, [int(rank) for rank in needed] if needed is not None else None
            )
            if source is None:
                # `identity` may be replicated by its present chunks (`safe` is None: unknown). Then they stay for now.
                drop = store.plan_replacement if safe in (None, identity) else store.evict_other_chunks
                drop(identity, chunks)
        if source is None:
            store.record_transfer(identity, PARITY_SOURCE, False)  # until it succeeds
            await self._make_chunks(identity, int(fields["world"]), where, snapshots)
            return
        addresses, network = self._addresses(source, where), self._network()
        assert network is not None  # `_addresses` has checked that
        await store.fetch_replicas(network.transport, identity, source, addresses, copies)

    async def _make_chunks(
        self, identity: Identity, world: int, where: Where, snapshots: Mapping[int, DescribedSnapshot]
    ) -> None:
        store = self._replicas
        kept = store.kept.chunks_by_name
        new = [name for name in dict.fromkeys(name for _, name, _ in where.chunks) if name not in kept]
        if any(store.is_incoming(name) for name in new):
            raise AgentError("it is on its way already")
        lengths = [name.stripe.length for name in new]
        store.evict_to_fit(lengths)
        if not store.arenas.fits(lengths):
            raise AgentError(
                f"there is no room for {sum(lengths) >> 20} MiB of parity in what this node has for others"
            )
        unallocated_bytes = self._rebuild_queue.unallocated_bytes + store.arenas.unallocated_bytes
        short = sum(lengths) + unallocated_bytes - self._free_bytes()
        if short > 0:
            raise AgentError(f"{short >> 20} MiB of memory are missing for parity")
        origins = self._origins(identity, where, snapshots)
        arenas: dict[ParityChunkName, Arena] = {}
        try:
            for name in new:
                arenas[name] = store.begin_chunk(name)
        except (OSError, AgentError) as exc:
            store.end_chunks(arenas, [])
            raise AgentError(f"no memory for {sum(lengths) >> 20} MiB of parity") from exc
        folding = self._create_worker()

        def make() -> list[ParityChunk]:
            return [
                folding.encode_chunk(name, world, origins, {rank: snapshots[rank] for rank in name.stripe.ranks}, arena)
                for name, arena in arenas.items()
            ]

        try:
            made = await run_on(self._workers, Lane.PARITY, make)
        except CkptError:
            store.end_chunks(arenas, [])
            raise
        if error := store.end_chunks(arenas, made):
            raise AgentError(error)
        store.record_transfer(identity, PARITY_SOURCE, True)

    # -- lending

    def _offer_chunks(self, identity: Identity, reader: str, urgent: bool) -> list[bytes]:
        lent, network = self._replicas.kept.chunks_of(identity), self._network()
        if network is not None:
            for chunk in lent:
                name = chunk.name.transfer_name
                self._replicas.offers.add(network.transport, name, chunk.data, chunk.frames, reader, urgent)
        snapshots = {rank: described for chunk in lent for rank, described in chunk.snapshots.items()}
        where = Where({}, {}, [("", chunk.name, chunk.frames) for chunk in lent])
        return [where.encode(), encode_described([snapshots[rank] for rank in sorted(snapshots)])]

    async def _offer_snapshots(
        self, identity: Identity, ranks: Sequence[int], fields: Mapping[str, Any]
    ) -> list[bytes]:
        """Offers snapshots of this node's ranks, and copies, to other nodes."""
        network, arenas = self._network(), self._arenas_of(identity)
        if not set(ranks) <= arenas.keys():
            raise AgentError(f"not all of the ranks {list(ranks)[:8]} of {identity} are held here")
        if network is None:
            return []
        given = {rank: arenas[rank] for rank in ranks}
        reader, urgent = str(fields.get("reader", "")), bool(fields.get("urgent"))
        offers = self._replicas.offers
        return [encode_described(await offers.publish(network.transport, identity, given, reader, urgent))]

    # -- making again

    async def _rebuild(
        self,
        identity: Identity,
        rank: int,
        where: Where,
        snapshots: Mapping[int, DescribedSnapshot],
        order: Sequence[Row],
        fields: Mapping[str, Any],
    ) -> list[bytes]:
        if rank in self._arenas_of(identity):
            return []
        where.check_sizes(snapshots)
        missing = {each for _, name, _ in where.chunks for each in name.stripe.ranks} - where.node_by_rank.keys()
        origins, parities = self._origins(identity, where, snapshots), self._parity_origins(where)
        sizes = {each: found.staged_bytes for each, found in snapshots.items()}
        if rank not in rebuildable_ranks(missing, sizes, parities):
            raise AgentError(f"rank {rank} of {identity} cannot be made again from what is told to be left of it")
        urgent, described = bool(fields.get("urgent")), snapshots[rank]
        key, worker = (identity, rank), self._create_worker(urgent)
        work = RebuildWork(
            described.arena_bytes,
            int(fields["reserve_bytes"]),
            urgent,
            str(fields.get("reader", "")),
            lambda: worker.filled_bytes,
        )
        await self._rebuild_queue.enqueue(work)
        remake = lambda: worker.rebuild_snapshot(key, described, missing, parities, origins, order)  # noqa: E731
        try:
            arena = await run_on(self._workers, Lane.REBUILD if urgent else Lane.PARITY, remake)
        except CkptError:
            self._rebuild_queue.end_work(work)
            if not worker.damaged_transfer:
                raise
            return [worker.damaged_transfer.encode()]
        self._replicas.add_rebuilt(key, arena)
        self._rebuild_queue.end_work(work)
        return []

    # -- small steps

    def _create_worker(self, urgent: bool = False) -> ParityWorker:
        network = self._network()
        return ParityWorker(network.transport if network is not None else None, self._replicas.progress.advance, urgent)

    def _origins(
        self, identity: Identity, where: Where, snapshots: Mapping[int, DescribedSnapshot]
    ) -> dict[int, FrameOrigin]:
        """By rank, where its snapshot can be read, of those ranks that are held. Errors: AgentError."""
        here, found = self._arenas_of(identity), {}
        for rank in where.node_by_rank.keys() & snapshots.keys():
            name, frames = transfer_name(identity, rank), snapshots[rank].frames
            if rank in here and here[rank].size_bytes >= snapshots[rank].arena_bytes:
                found[rank] = FrameOrigin(name, frames, local_data=here[rank].view)
            else:
                node = where.node_by_rank[rank]
                found[rank] = FrameOrigin(name, frames, node, self._addresses(node, where))
        return found

    def _parity_origins(self, where: Where) -> dict[Striped, dict[Row, FrameOrigin]]:
        found: dict[Striped, dict[Row, FrameOrigin]] = {}
        for node, name, frames in where.chunks:
            kept = self._replicas.kept.chunks_by_name.get(name)
            if kept is not None:
                origin = FrameOrigin(name.transfer_name, kept.frames, local_data=kept.data)
            elif frames is not None:
                origin = FrameOrigin(name.transfer_name, frames, node, self._addresses(node, where))
            else:
                continue
            found.setdefault(name.stripe, {})[name.row] = origin
        return found

    def _addresses(self, node: str, where: Where) -> tuple[Address, ...]:
        """Errors: AgentError."""
        network = self._network()
        if network is None or node not in where.addresses_by_node:
            raise AgentError(f"nothing says where agent {node} is")
        return tuple(network.addresses(NodeAt(node, where.addresses_by_node[node], ())))


def _decode_by_rank(blob: bytes) -> dict[int, DescribedSnapshot]:
    """Errors: AgentError."""
    return {described.rank: described for described in decode_described(blob)}
