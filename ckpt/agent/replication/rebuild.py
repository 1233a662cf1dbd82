"""The rebuild of lost ranks' snapshots from parity, as the coordinator runs it. Main thread only.

1. All nodes are asked which parity they keep of the checkpoint ("publish").
2. Holders of the other snapshots that are needed let them be read ("publish").
3. Each lost rank is given to one node, which rebuilds its snapshot and keeps it as a copy ("rebuild").

A rank that cannot be rebuilt does not stop the others. Data that turns out to be damaged is left out as if lost, and
step 2 is repeated. After any other failure another node tries, with the other parity first.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.net.transport import Frames
from ckpt.agent.replication.replica_offers import transfer_name
from ckpt.agent.replication.replica_service import ReplicaService, Where
from ckpt.agent.runtime.coroutines import gather
from ckpt.agent.snapshots.described import DescribedSnapshot, ParityChunkName, decode_described, encode_described
from ckpt.errors import AgentError, CkptError
from ckpt.format.parity import Row
from ckpt.placement.rebuild import Striped, rebuildable_ranks
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.ipc.node_list import NodeAt

log = logging.getLogger("ckpt")

ATTEMPTS = 3  # per rank, or one per node if those are more: some may lack the memory

NodeByRank = dict[int, str]  # rank -> the node that rebuilt it


class Rebuild:
    """Rebuilds the ranks in `at`. `nodes`: those that are left, this one first; () if it is the only one. `holders`:
    rank -> nodes with its snapshot. `at`: lost rank -> nodes that may rebuild it, the best first. `node_by_rank`: the
    ranks that are rebuilt, also after a cancel."""

    def __init__(
        self,
        service: ReplicaService,
        nodes: Sequence[NodeAt],
        identity: Identity,
        holders: Mapping[int, Sequence[str]],
        at: Mapping[int, Sequence[str]],
        me: str = "",
        leave: Mapping[str, int] | None = None,
        urgent: bool = False,
    ) -> None:
        """`me`: the name of this node if it is the only one. `leave`: by node, replica bytes that must stay free beside
        its rebuilds, else it refuses them; 0 by default. `urgent`: a start waits for it."""
        self.node_by_rank: NodeByRank = {}
        self._service, self._identity = service, identity
        self._reader = secrets.token_hex(8)  # another rebuild may read the same offers
        self._addresses_by_node = {node.name: node.addresses for node in nodes}
        self._names = list(self._addresses_by_node) or [me]
        self._holders = {rank: [name for name in names if name in self._names] for rank, names in holders.items()}
        self._rebuilders_by_rank = {rank: list(names) for rank, names in sorted(at.items())}
        self._reserved_bytes, self._urgent = leave or {}, urgent
        self._chunks: list[tuple[str, ParityChunkName, Frames | None]] = []
        self._encoded_by_rank: dict[int, bytes] = {}
        self._snapshots: dict[int, DescribedSnapshot] = {}
        self._attempts_by_rank: Counter[int] = Counter()
        # Nodes that hold little rebuild more.
        self._load_by_node = Counter(names[0] for names in self._holders.values() if names)
        self._errors_by_rank: dict[int, str] = {}  # ranks that cannot be rebuilt -> why
        self._damaged_transfers: set[str] = set()  # transfers found damaged since the snapshots were published

    async def run(self) -> str:
        """Returns "", or why some rank could not be rebuilt."""
        try:
            await gather(map(self._request_parity, self._names))
            while self._pending_ranks:
                await self._request_snapshots()
                where = self._locations
                self._fail_impossible_ranks(where)
                await gather(self._rebuild_rank(rank, _part_of(where, rank)) for rank in self._pending_ranks)
        finally:
            self._service.end_offers(self._identity, self._names, self._reader)
        return self._errors_by_rank[min(self._errors_by_rank)] if self._errors_by_rank else ""

    @property
    def _pending_ranks(self) -> list[int]:
        return [
            rank
            for rank in self._rebuilders_by_rank
            if rank not in self.node_by_rank and rank not in self._errors_by_rank
        ]

    # -- what there is

    async def _request_parity(self, name: str) -> None:
        blobs: list[bytes] | None = None
        try:
            blobs = await self._ask_for_offers(name, {"t": "publish", "ranks": None})
            if len(blobs) != 2:
                raise AgentError("its answer has not what belongs to it")
            where, snapshots = Where.decode(self._identity, blobs[0]), decode_described(blobs[1])
            where.check_sizes({each.rank: each for each in snapshots})
        except CkptError as exc:
            log.warning("agent %s has no parity of %s to give: %s", name or "here", self._identity, exc)
            if blobs is None:  # A malformed answer excludes only the node's parity.
                self._exclude_holder(name)
                self._rebuilders_by_rank = {
                    rank: [each for each in names if each != name] for rank, names in self._rebuilders_by_rank.items()
                }
            return
        if self._record_snapshots(name, snapshots):
            self._chunks += [(name, chunk, frames) for _, chunk, frames in where.chunks]

    def _record_snapshots(self, name: str, snapshots: Sequence[DescribedSnapshot]) -> bool:
        """Whether the node describes the snapshots as the others do: all parity must be of the same bytes."""
        for each in snapshots:
            if self._encoded_by_rank.setdefault(each.rank, encode_described([each])) != encode_described([each]):
                log.warning("agent %s describes rank %d of %s unlike others do", name, each.rank, self._identity)
                return False
            self._snapshots.setdefault(each.rank, each)
        return True

    def _exclude_holder(self, name: str) -> None:
        self._holders = {rank: [each for each in names if each != name] for rank, names in self._holders.items()}

    async def _request_snapshots(self) -> None:
        """Has the holders of the needed snapshots let them be read."""
        self._damaged_transfers.clear()
        todo = set(self._pending_ranks)
        stripes = [chunk.stripe for _, chunk, _ in self._chunks if not chunk.stripe.ranks.isdisjoint(todo)]
        needed = {rank for striped in stripes for rank in striped.ranks}
        by_node: dict[str, list[int]] = {}
        for rank in sorted(needed - todo):
            if self._holders.get(rank):
                by_node.setdefault(self._holders[rank][0], []).append(rank)

        async def request(name: str, ranks: list[int]) -> None:
            try:
                await self._ask_for_offers(name, {"t": "publish", "ranks": ranks})
            except CkptError as exc:
                log.warning("agent %s does not give what it has of %s: %s", name or "here", self._identity, exc)
                self._exclude_holder(name)

        await gather(request(name, ranks) for name, ranks in by_node.items())

    async def _ask_for_offers(self, name: str, fields: dict[str, Any]) -> list[bytes]:
        return await self._service.ask_for_offers(
            name, self._identity, {**fields, "urgent": self._urgent}, self._reader
        )

    # -- making them

    @property
    def _locations(self) -> Where:
        todo = set(self._pending_ranks)
        held = {rank: names[0] for rank, names in self._holders.items() if names and rank not in todo}
        return Where(self._addresses_by_node, held, self._chunks)

    def _fail_impossible_ranks(self, where: Where) -> None:
        sizes = {rank: each.staged_bytes for rank, each in self._snapshots.items()}
        rows: dict[Striped, set[Row]] = {}
        for _, chunk, _ in self._chunks:
            rows.setdefault(chunk.stripe, set()).add(chunk.row)
        missing = {rank for _, chunk, _ in self._chunks for rank in chunk.stripe.ranks} - where.node_by_rank.keys()
        possible = rebuildable_ranks(missing, sizes, rows)
        for rank in self._pending_ranks:
            if rank not in possible:
                self._fail(rank, "too much of what it was kept with is lost, too")
            elif not self._rebuilders_by_rank[rank]:
                self._fail(rank, "no node is left that could")

    async def _rebuild_rank(self, rank: int, where: Where) -> None:
        at = every = self._rebuilders_by_rank[rank]
        needed = {each for _, chunk, _ in where.chunks for each in chunk.stripe.ranks}
        blobs = [where.encode(), encode_described([self._snapshots[each] for each in sorted(needed)])]
        while True:
            name = min(at, key=lambda each: (self._load_by_node[each], every.index(each)))
            order = list(Row) if self._attempts_by_rank[rank] % 2 == 0 else list(Row)[::-1]
            self._attempts_by_rank[rank] += 1
            self._load_by_node[name] += 1
            fields = {
                "t": "rebuild",
                "identity": str(self._identity),
                "rank": rank,
                "parity_order": [int(row) for row in order],
                "reserve_bytes": self._reserved_bytes.get(name, 0),
                "reader": self._reader,
                "urgent": self._urgent,
            }
            try:
                damaged = await self._service.ask(name, fields, blobs)
            except CkptError as exc:
                if self._attempts_by_rank[rank] >= max(ATTEMPTS, len(every)):
                    self._fail(rank, f"at agent {name or 'here'}: {exc}")
                    return
                log.warning("rank %d of %s from parity at agent %s: %s", rank, self._identity, name or "here", exc)
                at = [each for each in at if each != name] or at
                continue
            if damaged:
                self._exclude_damaged(rank, bytes(damaged[0]).decode(errors="replace"))
            else:
                self.node_by_rank[rank], self._holders[rank] = name, [name]
            return

    def _exclude_damaged(self, rank: int, transfer: str) -> None:
        """Excludes a damaged source; fails the rank if that source was not one of ours."""
        if transfer in self._damaged_transfers:
            return  # another rank's rebuild has reported it
        log.warning("%s: what lies there is not what it was; it is done without", transfer[:200])
        before = len(self._chunks), self._holders
        self._chunks = [each for each in self._chunks if each[1].transfer_name != transfer]
        self._holders = {
            each: names[1:] if transfer == transfer_name(self._identity, each) else names
            for each, names in self._holders.items()
        }
        if before == (len(self._chunks), self._holders):
            self._fail(rank, f"{transfer:.200} is said to be damaged, and was not asked for")
        else:
            self._damaged_transfers.add(transfer)

    def _fail(self, rank: int, why: str) -> None:
        self._errors_by_rank[rank] = f"rank {rank} cannot be made again from parity: {why}"


def _part_of(where: Where, rank: int) -> Where:
    """The part of `where` that concerns the stripes of that rank."""
    chunks = [each for each in where.chunks if rank in each[1].stripe.ranks]
    needed = {each for _, chunk, _ in chunks for each in chunk.stripe.ranks}
    ranks = {each: name for each, name in where.node_by_rank.items() if each in needed}
    names = {*ranks.values(), *(name for name, _, _ in chunks)}
    return Where({name: at for name, at in where.addresses_by_node.items() if name in names}, ranks, chunks)
