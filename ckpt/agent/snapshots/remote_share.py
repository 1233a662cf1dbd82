"""The ranks of a job on another node, as the job's coordinator uses them: through that node's agent.

Messages may be lost with the connection. Then open requests fail, and the ranks there rejoin. The other end is
agent/job/coordinator_link.py; docs/protocol.md has the table of messages.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.snapshots.memory_checkpoint import StagedPart
from ckpt.errors import AgentError
from ckpt.format.declaration import decode
from ckpt.format.manifest import FRAME, PLACE
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.ipc.control_page import STEP_MAX, SUB_MAX, ControlWord
from ckpt.ipc.messages import Message, error_fields
from ckpt.layout.assemble import Blob
from ckpt.layout.layout import Array, Declaration
from ckpt.types import FRAMES_MAX, CodecOption, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.packs import Written

T = TypeVar("T")


class RemotePeer:
    """The connection of a rank on another node, as `event_loop.Peer` is for a local rank. `number`: counts the rank's
    connections, by its agent."""

    role = "trainer"

    def __init__(self, network: PeerNetwork, node: str, epoch: Epoch, rank: int, number: int, pid: int) -> None:
        self.node, self.epoch, self.rank, self.connection_number, self.pid = node, epoch, rank, number, pid
        self.is_open = True
        self._network = network

    def send(self, fields: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()) -> None:
        if not self.is_open:
            return
        # Each host has its own monotonic clock: send the seconds left.
        if fields.get("leave_deadline_s") is not None:
            fields = {**fields, "leave_deadline_s": fields["leave_deadline_s"] - time.monotonic()}
        self._notify(fields, blobs)

    def _notify(self, message: dict[str, Any] | None, blobs: Sequence[bytes] = ()) -> None:
        """Sends a message for the rank to its agent. `message`: None ends the connection."""
        head = {"t": "to-rank", "epoch": str(self.epoch), "rank": self.rank}
        about = {"connection_number": self.connection_number, "message": message}
        self._network.notify(self.node, {**head, **about}, blobs)

    def reply(
        self, request_id: int, body: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()
    ) -> None:
        self.send({"t": "reply", "id": request_id, **body}, fds, blobs)

    def refuse(self, request_id: int, error: BaseException) -> None:
        self.send(error_fields(request_id, error))

    def disconnect(self) -> None:
        """Asks the rank's agent to end the connection; that agent reports when it is gone."""
        if self.is_open:
            self._notify(None)

    def watch_death(self) -> None:
        """Does nothing: the rank's agent watches."""

    def unwatch_death(self) -> None:
        """Does nothing: the rank's agent forgets."""


AnyPeer = Peer | RemotePeer


class RemoteShare:
    """As LocalShare, for the ranks of another node. `name`: its agent's."""

    def __init__(self, network: PeerNetwork, name: str, epoch: Epoch, world: int, ranks: Sequence[int]) -> None:
        self.name, self.world, self.ranks = name, world, frozenset(ranks)
        self.has_joined = False  # a rank there has joined, so that the node knows the job
        self.is_dropped = False
        self._newest_connections: dict[int, RemotePeer] = {}
        self._network, self._epoch = network, epoch
        # By rank, if reported: the step that it entered, and its polls since the last ended one. AllShares puts its own
        # lists here, so that it need not ask each node.
        self.steps_by_rank: dict[int, int] | list[int] = {}
        self.polls_by_rank: dict[int, int] | list[int] = {}
        self._declarations: dict[int, tuple[bytes, Declaration]] = {}

    def ensure_connection(self, rank: int, number: int, pid: int) -> RemotePeer:
        """The rank's connection of that number, made if it is newer than the former one. Errors: AgentError if the rank
        is not there, or has a newer connection."""
        if rank not in self.ranks:
            raise AgentError(f"rank {rank} is not on node {self.name}")
        found = self._newest_connections.get(rank)
        if found is None or found.connection_number < number:
            found = RemotePeer(self._network, self.name, self._epoch, rank, number, pid)
            self._newest_connections[rank] = found
        elif found.connection_number > number:
            raise AgentError(f"that connection of rank {rank} is gone")
        return found

    def connection(self, rank: int, number: int) -> RemotePeer | None:
        """The rank's connection of that number, if it is the newest; else None."""
        found = self._newest_connections.get(rank)
        return found if found is not None and found.connection_number == number else None

    def close(self) -> list[RemotePeer]:
        """The node's agent is disconnected: closes its ranks' connections, and returns those that were open."""
        lost = [peer for peer in self._newest_connections.values() if peer.is_open]
        for peer in lost:
            peer.is_open = False
        self._newest_connections.clear()
        return lost

    def record_steps(self, ranks: Mapping[int, tuple[int, int]]) -> None:
        """Records by rank the entered step, and the polls since the last ended one. Errors: AgentError for numbers that
        no rank can have published."""
        if not all(0 <= step <= STEP_MAX // 2 and 0 <= polls <= SUB_MAX for step, polls in ranks.values()):
            raise AgentError(f"agent {self.name} says of its ranks' steps what cannot be: {dict(ranks)!s:.300}")
        for rank, (step, polls) in ranks.items():
            if rank in self.ranks:
                self.steps_by_rank[rank], self.polls_by_rank[rank] = step, polls

    def take_arenas(self, rank: int, slots: Sequence[int], fds: list[int], is_new: bool) -> None:
        """Does nothing: the node's own agent has taken them."""

    def connect_rank(self, rank: int, peer: object) -> list[int]:
        """A rank there has joined."""
        self.has_joined = True
        return []

    def announce(self, slot: int, word: ControlWord | None) -> None:
        self.notify({"t": "control-word", "slot": slot, "word": word.pack() if word is not None else 0})

    def announce_verdict(self, attempt: int) -> None:
        self.notify({"t": "control-word", "slot": None, "word": attempt})

    def offer_slot(self, slot: int, division: str) -> None:
        self.notify({"t": "offer-slot", "slot": slot, "division": division})

    def close_arenas(self, slot: int) -> None:
        self.notify({"t": "offer-slot", "slot": slot, "division": None})

    def record_exit(self, source: str, key: str) -> None:
        """The ranks leave because of this notice of that node's machine."""
        self.notify({"t": "notice-answered", "source": source, "key": key})

    async def acknowledge_event(self, source: str, key: str) -> None:
        """Has that node's agent acknowledge a planned event. Errors: AgentError, also if the source did not agree."""
        await self._ask({"t": "notice-answered", "source": source, "key": key}, (), lambda _: None)

    def drop(self) -> None:
        if not self.is_dropped:
            self.is_dropped = True
            self.notify({"t": "evict", "what": "job"})

    async def plan_memory(
        self, sizes: Mapping[int, int], slots: int, limit_bytes: int | None
    ) -> memory_plan.MemoryPlan:
        fields = {"t": "plan-memory", "sizes": list(sizes.items()), "slots": slots, "limit_bytes": limit_bytes}
        return await self._ask(fields, (), lambda answer: memory_plan.parse_plan(answer.fields["plan"]))

    async def make_arenas(self, slot: int, sizes: Mapping[int, int]) -> dict[int, int]:
        def read(answer: Message) -> dict[int, int]:
            found = {int(rank): int(size) for rank, size in answer.fields["sizes"]}
            if found.keys() != sizes.keys() or any(found[rank] < size for rank, size in sizes.items()):
                raise AgentError(f"agent {self.name} has made other arenas than it was asked to")
            return found

        return await self._ask({"t": "make-arenas", "slot": slot, "sizes": list(sizes.items())}, (), read)

    async def hash_snapshots(self, slot: int, identity: Identity) -> list[StagedPart]:
        """Has that node's agent hash the staged snapshots and describe them; their bytes stay there."""

        def read(answer: Message) -> list[StagedPart]:
            parts = decode_parts(answer.blobs[0], self._declarations)
            if sorted(part.declaration.rank for part in parts) != sorted(self.ranks):
                raise AgentError(f"agent {self.name} tells of other ranks than it has")
            return parts

        known = {rank: digest for rank, (digest, _) in self._declarations.items()}
        fields = {"t": "hash-snapshots", "slot": slot, "identity": str(identity), "known": list(known.items())}
        return await self._ask(fields, (), read)

    async def write_frames(self, wanted: WriteRequest) -> Written:
        """Has that node's agent write its frames into packs, without a commit record. Errors: AgentError."""
        about = {"identity": str(wanted.identity), "codec": wanted.codec, "bandwidth": wanted.bandwidth}
        fields = {"t": "write-frames", **about}
        return await self._ask(fields, [wanted.encode()], lambda answer: _parse_written(answer, wanted))

    def notify(self, fields: dict[str, Any]) -> None:
        """Sends a message to that node's agent; lost if the agent is not connected."""
        self._network.notify(self.name, {**fields, "epoch": str(self._epoch)})

    async def _ask(self, fields: dict[str, Any], blobs: Sequence[bytes], read: Callable[[Message], T]) -> T:
        """Sends a request; returns `read` of the answer. Errors: AgentError. A malformed answer is an error too, and
        does not end the connection."""
        answer = await self._network.request(self.name, {**fields, "epoch": str(self._epoch)}, blobs)
        try:
            return read(answer)
        except Exception as exc:
            why = f"agent {self.name} has answered {fields['t']} with what cannot be read: {exc!r:.500}"
            raise AgentError(why) from exc


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """The frames that a node has to write in a commit. `frames`: array of FRAME. `ranks`, `offsets`: by frame, the rank
    of its arena, and the bytes of that memfd. `bandwidth`: bytes per second; None: no limit."""

    identity: Identity
    frames: Array
    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    codec: CodecOption
    bandwidth: float | None

    def encode(self) -> bytes:
        """The columns, for `decode`; identity, codec and bandwidth are sent apart."""
        columns = np.ascontiguousarray(self.frames), self.ranks.astype("<i8"), self.offsets.astype("<i8")
        return b"".join(column.tobytes() for column in columns)

    @staticmethod
    def decode(identity: Identity, blob: bytes, codec: CodecOption, bandwidth: float | None) -> WriteRequest:
        """The inverse of `encode`. Errors: AgentError for malformed bytes."""
        count, rest = divmod(len(blob), FRAME.itemsize + 16)
        if rest or count > FRAMES_MAX:
            raise AgentError("frames to be written are malformed")
        frames = np.frombuffer(blob, FRAME, count)
        places = np.frombuffer(blob, "<i8", 2 * count, FRAME.itemsize * count).astype(np.int64)
        return WriteRequest(identity, frames, places[:count], places[count:], codec, bandwidth)


def _parse_written(answer: Message, wanted: WriteRequest) -> Written:
    """What a node has written of `wanted`, by its answer. Errors: AgentError if the answer cannot be true: a record
    made from such an answer would be unreadable."""
    from ckpt.format.record import placement_fault
    from ckpt.store.keys import parse_pack
    from ckpt.store.packs import Written

    packs = tuple((str(key), int(size)) for key, size in unpack_bounded(answer.blobs[1], "packs"))
    places = np.frombuffer(answer.blobs[0], PLACE).copy()
    keys = [parse_pack(key) for key, _ in packs]
    if any(key is None or key.identity != wanted.identity for key in keys) or len(set(keys)) < len(keys):
        raise AgentError("packs of another checkpoint were written, or one twice")
    if why := placement_fault(places, wanted.frames, [size for _, size in packs]):
        raise AgentError(f"its frames were not written: {why}")
    return Written(packs, places)


def encode_parts(parts: Collection[StagedPart], known: Mapping[int, bytes], declared: Mapping[int, bytes]) -> bytes:
    """Encodes parts for a message. `declared`: the encoded declarations, by rank. `known`: the digests of those that
    the receiver has, which are left out."""
    rows = []
    for part in parts:
        rank = part.declaration.rank
        data = declared[rank]
        rows.append(
            [
                rank,
                None if known.get(rank) == declaration_digest(data) else data,
                part.hashes.astype("<u8").tobytes(),
                [[blob.hash, blob.length] for blob in (part.shared_values, part.own_values)],
                list(part.value_offsets),
                part.metrics,
            ]
        )
    packed: bytes = msgpack.packb(rows)
    return packed


def decode_parts(blob: bytes, declared: dict[int, tuple[bytes, Declaration]]) -> list[StagedPart]:
    """Decodes the parts in a message. `declared`: the known declarations with their digests, by rank; new ones are
    added. Errors: CkptError; any Exception for malformed bytes."""
    parts = []
    rows = unpack_bounded(blob, "what a node says of its ranks")
    for rank, data, hashes, (shared, own), (shared_at, own_at), metrics in rows:
        if data is not None:
            declared[rank] = declaration_digest(data), decode(data, f"the declaration of rank {rank}")
        declaration = declared[rank][1]
        table = np.frombuffer(hashes, "<u8").reshape(-1, 2).astype(np.uint64)
        if declaration.rank != rank or len(table) != len(declaration.staging.frames):
            raise AgentError(f"what is said of rank {rank} contradicts its declaration")
        blobs = [Blob(bytes(value), int(length)) for value, length in (shared, own)]
        at = int(shared_at), int(own_at)
        numbers = {str(name): float(value) for name, value in metrics.items()}
        parts.append(StagedPart(declaration, table, blobs[0], blobs[1], at, numbers))
    return parts


def declaration_digest(declaration: bytes) -> bytes:
    """The digest by which two agents compare an encoded declaration."""
    return hashlib.blake2b(declaration, digest_size=16).digest()
