"""The parity service of one node: carries out a coordinator's four requests about parity. Main thread only.

    stripe    keep parity chunks of what other nodes' ranks staged; their bytes are fetched from those nodes
    publish   let others read the snapshots that lie here, and describe them; also used for copies
    lend      let others read the parity kept here of a checkpoint, and describe it
    rebuild   rebuild a rank's snapshot from parity and other ranks' snapshots, and keep it as a copy. `leave` bytes
              must stay free beside it. If source bytes were damaged, the answer names their transfer

The coordinator's own node gets the same requests. The last three are `urgent` when a start waits for them: they then
run at normal priority, and outside the network limit of replication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from ckpt.agent.net.transport import Frames
from ckpt.agent.replication.parity_worker import FrameOrigin, ParityWorker
from ckpt.agent.replication.rebuild_queue import RebuildQueue, RebuildWork
from ckpt.agent.replication.replica_store import ReplicaStore, decode_described, encode_described, transfer_of
from ckpt.agent.runtime.workers import Lane, Workers, failure
from ckpt.agent.snapshots.described import DescribedSnapshot, ParityChunk, ParityChunkName, row_from
from ckpt.errors import AgentError, CkptError
from ckpt.format.parity import Row
from ckpt.ipc.addresses import Address
from ckpt.ipc.bounded_msgpack import unpacked
from ckpt.ipc.node_list import NodeAt
from ckpt.placement.rebuild import Striped, rebuildable
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.arena import Arena

CHUNKS_MAX = 4096  # parity chunks named in one message
PARITY = "parity"  # the source name, in ReplicaStore.attempted, of chunks made here


Then = Callable[[list[bytes], str], None]


@dataclass(frozen=True, slots=True)
class Where:
    """Where the parts of a checkpoint lie. `nodes`: addresses of the nodes named in the rest. `ranks`: rank -> a node
    with its snapshot. `chunks`: (node, parity chunk, its bytes as frames); frames are None before it is made."""

    nodes: Mapping[str, tuple[Address, ...]]
    ranks: Mapping[int, str]
    chunks: Sequence[tuple[str, ParityChunkName, Frames | None]]

    def encode(self) -> bytes:
        chunks = [
            [name, int(chunk.row), chunk.striped.length, chunk.striped.rows(), frames.encode() if frames else None]
            for name, chunk, frames in self.chunks
        ]
        nodes = [[name, [str(address) for address in addresses]] for name, addresses in self.nodes.items()]
        packed: bytes = msgpack.packb([nodes, list(self.ranks.items()), chunks])
        return packed

    @staticmethod
    def decode(identity: Identity, blob: bytes) -> Where:
        """Errors: AgentError."""
        try:
            nodes, ranks, chunks = unpacked(blob, "where a checkpoint is to be had")
            if len(chunks) > CHUNKS_MAX:
                raise AgentError("more parities are spoken of than there can be")
            return Where(
                {str(name): tuple(Address.parse(str(text)) for text in texts) for name, texts in nodes},
                {int(rank): str(name) for rank, name in ranks},
                [
                    (
                        str(name),
                        ParityChunkName(identity, row_from(row), Striped.of(length, sources)),
                        Frames.decode(frames, int(length)) if frames is not None else None,
                    )
                    for name, row, length, sources, frames in chunks
                ],
            )
        except (ValueError, TypeError, OverflowError, AttributeError) as exc:
            raise AgentError(f"where a checkpoint is to be had was told wrong: {exc}") from exc

    def check(self, snapshots: Mapping[int, DescribedSnapshot]) -> None:
        """Errors: AgentError if a parity chunk covers bytes that no rank staged."""
        sizes = {rank: each.staged_bytes for rank, each in snapshots.items()}
        for _, chunk, _ in self.chunks:
            for run in (run for source in chunk.striped.sources for run in source):
                if run.stop > sizes.get(run.rank, 0):
                    raise AgentError(f"a parity of bytes that rank {run.rank} has not staged")


class ParityService:
    """`arenas_of`: the snapshots of a checkpoint that lie here, copies included, by rank. `free_bytes`: memory that may
    still be taken on this machine."""

    def __init__(
        self,
        bulk: Workers,
        post: Callable[[Callable[[], None]], None],
        copies: ReplicaStore,
        arenas_of: Callable[[Identity], dict[int, Arena]],
        network: Callable[[], PeerNetwork | None],
        free_bytes: Callable[[], int],
    ) -> None:
        self._bulk, self._post, self._copies = bulk, post, copies
        self._arenas_of, self._network, self._free_bytes = arenas_of, network, free_bytes
        self._making = RebuildQueue(copies, free_bytes)

    def have(self, node: str, fields: dict[str, Any], blobs: Sequence[bytes], then: Then) -> None:
        """Sends a request to `node` ("" is this one). `then` hears the blobs of its answer and "", or the error. It is
        called after this method has returned."""
        network = self._network()
        if not node or (network is not None and node == network.me):
            self._post(lambda: self._here(fields, blobs, then))
        elif network is None:
            self._post(lambda: then([], f"there is no way to agent {node}"))
        else:
            network.ask(node, fields, blobs, lambda answer, error: then(answer.blobs if answer else [], error))

    def end_reading(self, identity: Identity, nodes: Sequence[str], reader: str) -> None:
        """Ends that reader's use of what `nodes` lent and published of the checkpoint."""
        network = self._network()
        if network is None:
            return
        for node in nodes:
            if not node or node == network.me:
                self.withdraw(identity, reader)
            else:
                network.tell(node, {"t": "withdraw", "identity": str(identity), "reader": reader})

    def withdraw(self, identity: Identity, reader: str) -> None:
        """Ends that reader's use of the offers of the checkpoint here, and refuses its waiting rebuilds."""
        network = self._network()
        if network is not None:
            self._copies.withdraw(network.transport, identity, reader)
        self._making.unwanted(reader, f"nobody waits for {identity} any more")

    def _here(self, fields: dict[str, Any], blobs: Sequence[bytes], then: Then) -> None:
        try:
            self.asked(fields, blobs, then)
        except CkptError as exc:
            then([], str(exc))

    def asked(self, fields: Mapping[str, Any], blobs: Sequence[bytes], then: Then) -> None:
        """Serves one request. Errors: AgentError, or any error of a malformed message; then `then` is not called."""
        identity = Identity.parse(str(fields["identity"]))
        match fields["t"]:
            case "stripe":
                where, snapshots = Where.decode(identity, blobs[0]), _by_rank(blobs[1])
                where.check(snapshots)
                world, told = int(fields["world"]), fields["safe"]
                safe = Identity.parse(str(told)) if told is not None else None
                sizes = [name.striped.length for _, name, _ in where.chunks]
                self._copies.make_room(identity, safe, sizes, ranks_told(fields.get("needed")))
                chunks = self._copies.chunks
                # `identity` may be replicated by its present chunks (`safe` is None: unknown). Then they stay for now.
                drop = chunks.replace if safe in (None, identity) else chunks.only
                drop(identity, [name for _, name, _ in where.chunks])
                self._copies.attempted(identity, PARITY, False)  # until it succeeds
                self._keep(identity, world, where, snapshots, then)
            case "lend":
                then([*self._lend(identity, str(fields["reader"]), bool(fields.get("urgent")))], "")
            case "rebuild":
                where, snapshots = Where.decode(identity, blobs[0]), _by_rank(blobs[1])
                order = [row_from(row) for row in fields["order"]]
                self._rebuild(identity, int(fields["rank"]), where, snapshots, order, fields, then)
            case "publish":
                self._publish(identity, [int(rank) for rank in fields["ranks"]], fields, then)

    # -- keeping

    def _keep(
        self, identity: Identity, world: int, where: Where, snapshots: Mapping[int, DescribedSnapshot], then: Then
    ) -> None:
        chunks = self._copies.chunks
        new = [name for name in dict.fromkeys(name for _, name, _ in where.chunks) if name not in chunks.kept]
        if any(chunks.is_coming(name) for name in new):
            raise AgentError("it is on its way already")
        lengths = [name.striped.length for name in new]
        self._copies.make_way(lengths)
        if not self._copies.fits(lengths):
            raise AgentError(
                f"there is no room for {sum(lengths) >> 20} MiB of parity in what this node has for others"
            )
        short = sum(lengths) + self._making.to_take_bytes + self._copies.to_take_bytes - self._free_bytes()
        if short > 0:
            raise AgentError(f"{short >> 20} MiB of memory are missing for parity")
        origins = self._origins(identity, where, snapshots)
        arenas: dict[ParityChunkName, Arena] = {}
        try:
            for name in new:
                arenas[name] = self._copies.begin_chunk(name)
        except OSError as exc:
            chunks.end(arenas, [])
            raise AgentError(f"no memory for {sum(lengths) >> 20} MiB of parity") from exc
        folding = self._folding()

        def make() -> list[ParityChunk]:
            return [
                folding.make(name, world, origins, {rank: snapshots[rank] for rank in name.striped.ranks}, arena)
                for name, arena in arenas.items()
            ]

        def made(done: Future[list[ParityChunk]]) -> None:
            error = failure(done)
            error = chunks.end(arenas, [] if error else done.result()) or error
            self._copies.attempted(identity, PARITY, not error)
            then([], error)

        self._bulk.run(Lane.PARITY, make, made)

    # -- lending

    def _lend(self, identity: Identity, reader: str, urgent: bool) -> tuple[bytes, bytes]:
        lent, network = self._copies.chunks.of(identity), self._network()
        if network is not None:
            for chunk in lent:
                name = chunk.name.transfer
                self._copies.offer(network.transport, name, chunk.data, chunk.frames, reader, urgent)
        snapshots = {rank: described for chunk in lent for rank, described in chunk.snapshots.items()}
        where = Where({}, {}, [("", chunk.name, chunk.frames) for chunk in lent])
        return where.encode(), encode_described([snapshots[rank] for rank in sorted(snapshots)])

    def _publish(self, identity: Identity, ranks: Sequence[int], fields: Mapping[str, Any], then: Then) -> None:
        """Offers snapshots of this node's ranks, and copies, to other nodes."""
        network, arenas = self._network(), self._arenas_of(identity)
        if not set(ranks) <= arenas.keys():
            raise AgentError(f"not all of the ranks {list(ranks)[:8]} of {identity} are held here")
        if network is None:
            then([], "")
            return

        def published(found: list[DescribedSnapshot], error: str) -> None:
            then([] if error else [encode_described(found)], error)

        given = {rank: arenas[rank] for rank in ranks}
        reader, urgent = str(fields.get("reader", "")), bool(fields.get("urgent"))
        self._copies.publish(network.transport, identity, given, published, reader, urgent)

    # -- making again

    def _rebuild(
        self,
        identity: Identity,
        rank: int,
        where: Where,
        snapshots: Mapping[int, DescribedSnapshot],
        order: Sequence[Row],
        fields: Mapping[str, Any],
        then: Then,
    ) -> None:
        if rank in self._arenas_of(identity):
            then([], "")
            return
        where.check(snapshots)
        missing = {each for _, name, _ in where.chunks for each in name.striped.ranks} - where.ranks.keys()
        origins, parities = self._origins(identity, where, snapshots), self._parities(where)
        sizes = {each: found.staged_bytes for each, found in snapshots.items()}
        if rank not in rebuildable(missing, sizes, parities):
            raise AgentError(f"rank {rank} of {identity} cannot be made again from what is told to be left of it")
        urgent = bool(fields.get("urgent"))
        key, folding = (identity, rank), self._folding(urgent)

        def begin() -> None:
            remake = lambda: folding.remake(key, snapshots[rank], missing, parities, origins, order)  # noqa: E731
            self._bulk.run(Lane.REBUILD if urgent else Lane.PARITY, remake, made)

        def made(done: Future[Arena]) -> None:
            error = failure(done)
            if not error:
                self._copies.add(key, done.result())
            self._making.ended(work)
            if folding.spoiled:
                then([folding.spoiled.encode()], "")
            else:
                then([], error)

        size, leave, reader = snapshots[rank].size, int(fields["leave"]), str(fields.get("reader", ""))
        work = RebuildWork(size, leave, urgent, reader, lambda: folding.filled_bytes, begin, lambda why: then([], why))
        self._making.want(work)

    # -- small steps

    def _folding(self, urgent: bool = False) -> ParityWorker:
        network = self._network()
        return ParityWorker(network.transport if network is not None else None, self._copies.progress.moved, urgent)

    def _origins(
        self, identity: Identity, where: Where, snapshots: Mapping[int, DescribedSnapshot]
    ) -> dict[int, FrameOrigin]:
        """By rank, where its snapshot can be read, of those ranks that are held. Errors: AgentError."""
        here, found = self._arenas_of(identity), {}
        for rank in where.ranks.keys() & snapshots.keys():
            name, frames = transfer_of(identity, rank), snapshots[rank].frames
            if rank in here and here[rank].bytes >= snapshots[rank].size:
                found[rank] = FrameOrigin(name, frames, here=here[rank].view)
            else:
                node = where.ranks[rank]
                found[rank] = FrameOrigin(name, frames, node, self._addresses(node, where))
        return found

    def _parities(self, where: Where) -> dict[Striped, dict[Row, FrameOrigin]]:
        found: dict[Striped, dict[Row, FrameOrigin]] = {}
        for node, name, frames in where.chunks:
            kept = self._copies.chunks.kept.get(name)
            if kept is not None:
                origin = FrameOrigin(name.transfer, kept.frames, here=kept.data)
            elif frames is not None:
                origin = FrameOrigin(name.transfer, frames, node, self._addresses(node, where))
            else:
                continue
            found.setdefault(name.striped, {})[name.row] = origin
        return found

    def _addresses(self, node: str, where: Where) -> tuple[Address, ...]:
        """Errors: AgentError."""
        network = self._network()
        if network is None or node not in where.nodes:
            raise AgentError(f"nothing says where agent {node} is")
        return tuple(network.addresses(NodeAt(node, where.nodes[node], ())))


def ranks_told(needed: Any) -> list[int] | None:
    """Decodes `needed`: the ranks whose copies have to stay; None: unknown. Errors: ValueError, TypeError."""
    return [int(rank) for rank in needed] if needed is not None else None


def _by_rank(blob: bytes) -> dict[int, DescribedSnapshot]:
    """Errors: AgentError."""
    return {described.rank: described for described in decode_described(blob)}
