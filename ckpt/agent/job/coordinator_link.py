"""What a coordinator on another node reaches here: the ranks of this node, whose messages are relayed, and their share
of the job, which is served to its RemoteShare. The LocalShare does the same work on the coordinator's own node."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.agent.job.job_context import RankTable
from ckpt.agent.net.progress import Answer, serve_request
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.remote_share import encode_parts
from ckpt.agent.state.step_timing import REPORT_DELAY_S
from ckpt.errors import AgentError
from ckpt.ipc.control_page import ControlWord
from ckpt.ipc.messages import Message
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel


@dataclass(slots=True)
class FollowerRank:
    """A rank on this node. `connection_number`: of its connection. `join_request_id`, `leave_request_id`: the ids of
    its requests to join and to leave, until they are answered. `has_left`: the rank was told that it may leave, or its
    process is dead."""

    peer: Peer
    connection_number: int
    join_request_id: int | None
    leave_request_id: int | None = None
    has_left: bool = False


class RankRelay:
    """`connections`: the ranks that have joined. `tell`: sends a message to the coordinator. `on_joined`: called once
    the coordinator has accepted a rank."""

    def __init__(
        self, share: LocalShare, tell: Callable[[dict[str, Any], Sequence[bytes]], None], on_joined: Callable[[], None]
    ) -> None:
        self.connections: RankTable[FollowerRank] = RankTable()
        self._share, self._tell, self._on_joined = share, tell, on_joined
        self._numbers = itertools.count(1)
        self._reported_steps: list[list[int]] = []
        self._is_closed = False

    @property
    def has_ranks(self) -> bool:
        """True if some rank is connected, and was not told that it may leave."""
        return any(each.peer.is_open and not each.has_left for each in self.connections)

    # -- to the coordinator

    def join(self, rank: int, peer: Peer, message: Message) -> None:
        """A rank joins, or joins again. Its arenas are taken at once; the coordinator answers its request."""
        slots = [int(slot) for slot in message.fields["arenas"]] if message.fields["resume"] else []
        self._share.take_arenas(rank, slots, message.fds, is_new=rank not in self.connections.by_rank)
        self.connections.connect(rank, FollowerRank(peer, next(self._numbers), int(message.fields["id"])))
        # The coordinator knows the nodes, so the list is not sent again for each rank.
        message.blobs = message.blobs[:2]
        self.forward(rank, message)

    def forward(self, rank: int, message: Message) -> None:
        here = self.connections.by_rank[rank]
        if message.kind == "leave":
            here.leave_request_id = int(message.fields["id"])
        self._send(rank, here, {"message": message.fields}, message.blobs)

    def report_gone(self, rank: int, how: str) -> None:
        """Reports that the rank's connection has "ended", or its process has "died"."""
        here = self.connections.by_rank[rank]
        here.has_left = here.has_left or how == "died"
        self._send(rank, here, {"message": None, "cause": how})

    def _send(self, rank: int, here: FollowerRank, body: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        head = {"t": "from-rank", "rank": rank, "connection_number": here.connection_number, "pid": here.peer.pid}
        self._tell({**head, **body}, blobs)

    def report_steps(self, later: Callable[[float, Callable[[], None]], None]) -> None:
        """Reports each rank's step and polls, if they have changed; again every REPORT_DELAY_S until `close`."""
        if self._is_closed:
            return
        page = self._share.control_page
        steps = [[rank, page.entered_step(rank), page.poll_count(rank)] for rank in sorted(self.connections.by_rank)]
        if steps != self._reported_steps:
            self._reported_steps = steps
            self._tell({"t": "node-report", "steps": steps}, ())
        later(REPORT_DELAY_S, lambda: self.report_steps(later))

    def close(self) -> None:
        """Stops the reports, and the watch over the ranks' processes."""
        self._is_closed = True
        self.connections.unwatch()

    # -- from the coordinator

    def to_rank(self, channel: Channel, message: Message) -> None:
        """Passes the coordinator's message on to the rank."""
        fields = message.fields
        here, rank, body = self._find_connection(fields), int(fields["rank"]), fields["message"]
        if here is None:
            return
        if body is None:
            here.peer.disconnect()
            return
        body = dict(body)
        fds: list[int] = []
        if body.get("t") in ("reply", "error") and body.get("id") == here.join_request_id:
            here.join_request_id = None
            if body["t"] == "reply":
                fds = self._share.connect_rank(rank, here.peer)
                self._on_joined()
        elif body.get("t") == "reply" and body.get("id") == here.leave_request_id:
            here.has_left = True
        # The deadline travels as seconds from now.
        if body.get("leave_deadline_s") is not None:
            body["leave_deadline_s"] = float(body["leave_deadline_s"]) + time.monotonic()
        here.peer.send(body, fds, message.blobs)

    def decline_staging(self, fields: dict[str, Any], why: str) -> bool:
        """If the coordinator's message would have a rank stage now, tells the rank that it cannot and the coordinator
        that the rank missed. Returns whether that was so."""
        here, rank, body = self._find_connection(fields), int(fields["rank"]), dict(fields["message"] or {})
        if here is None or body.get("saved") is not False:
            return False
        here.peer.send({"t": "error", "id": int(body["id"]), "kind": "not-staged", "message": why})
        self.forward(rank, Message({"t": "snapshot-staged", "attempt": int(body["attempt"]), "why": why}, [], []))
        return True

    def disconnect_all(self) -> None:
        """Disconnects the ranks that were not told that they may leave. They join again and hear the present state."""
        for here in self.connections:
            if not here.has_left:
                here.peer.disconnect()

    def _find_connection(self, fields: dict[str, Any]) -> FollowerRank | None:
        """The rank whose connection the message names; None if that connection is gone."""
        here = self.connections.by_rank.get(int(fields["rank"]))
        return here if here is not None and here.connection_number == fields["connection_number"] else None


class ShareServer:
    """`ranks`: the ranks of this node. `tell`: sends a message to the coordinator. `handlers`: by kind of message.
    Errors of a handler: AgentError, or any exception that a malformed message causes."""

    def __init__(
        self,
        share: LocalShare,
        ranks: Collection[int],
        tell: Callable[[dict[str, Any]], None],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._share, self._ranks, self._tell = share, frozenset(ranks), tell
        self.handlers: dict[str, Callable[[Channel, Message], None]] = {
            "control-word": self._announce,
            "offer-slot": self._offer_slot,
            "plan-memory": functools.partial(serve_request, self._plan_memory, share.progress, later),
            "make-arenas": functools.partial(serve_request, self._make_arenas, share.progress, later),
            "hash-snapshots": functools.partial(serve_request, self._hash_snapshots, share.progress, later),
        }

    def _announce(self, channel: Channel, message: Message) -> None:
        slot, word = message.fields["slot"], int(message.fields["word"])
        if slot is None:
            self._share.announce_verdict(word)
        else:
            self._share.announce(int(slot), ControlWord.unpack(word))

    def _offer_slot(self, channel: Channel, message: Message) -> None:
        slot, division = int(message.fields["slot"]), message.fields["division"]
        if division is None:
            self._share.close_arenas(slot)
        elif self._share.has_missing_arena(slot):  # it was lost with a former agent
            self._tell({"t": "node-report", "lost_slot": slot})
        else:
            self._share.offer_slot(slot, str(division))

    async def _plan_memory(self, channel: Channel, message: Message) -> Answer:
        fields, sizes = message.fields, self._parse_sizes(message)
        slots, limit = int(fields["slots"]), int(fields["limit_bytes"]) if fields["limit_bytes"] is not None else None
        return {"plan": (await self._share.plan_memory(sizes, slots, limit)).table()}, ()

    async def _make_arenas(self, channel: Channel, message: Message) -> Answer:
        slot, sizes = int(message.fields["slot"]), self._parse_sizes(message)
        return {"sizes": list((await self._share.make_arenas(slot, sizes)).items())}, ()

    async def _hash_snapshots(self, channel: Channel, message: Message) -> Answer:
        fields = message.fields
        known = {int(rank): bytes(digest) for rank, digest in fields["known"]}
        slot, identity = int(fields["slot"]), Identity.parse(str(fields["identity"]))
        parts = await self._share.hash_snapshots(slot, identity)
        return {}, [encode_parts(parts, known, self._share.reader.encoded_declarations())]

    def _parse_sizes(self, message: Message) -> dict[int, int]:
        sizes = {int(rank): int(size) for rank, size in message.fields["sizes"]}
        if not sizes.keys() <= self._ranks or any(size < 0 for size in sizes.values()):
            raise AgentError("the coordinator speaks of arenas that this node has not")
        return sizes
