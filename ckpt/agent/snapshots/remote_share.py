"""The share of a job that lies on another node, as the job's coordinator uses it: by way of that node's agent.

What is said here may be lost with the connection; then the ranks there come back and join again, and what was asked has
failed. `following` is the other end, and docs/architecture.md has the table of messages.
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
from ckpt.agent.runtime.node_names import NodeNames
from ckpt.agent.snapshots.memory_checkpoint import StagedPart
from ckpt.errors import AgentError
from ckpt.format.codecs import CodecOption
from ckpt.format.declaration import decode
from ckpt.format.manifest import FRAME, PLACE
from ckpt.ipc.bounded_msgpack import unpacked
from ckpt.ipc.control_page import STEP_MAX, SUB_MAX, ControlWord
from ckpt.ipc.messages import Message, error_fields
from ckpt.layout.assemble import Blob
from ckpt.layout.layout import Array, Declaration
from ckpt.types import FRAMES_MAX, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.packs import Written

T = TypeVar("T")


class RemotePeer:
    """The connection of a rank on another node: what `server.Peer` is for one on this. `number`: which of the rank's
    connections it is, as its agent counts them. `called`: what nodes are called, memory-only ones among them, of which
    only this agent knows."""

    role = "trainer"

    def __init__(
        self, network: PeerNetwork, node: str, epoch: Epoch, rank: int, number: int, pid: int, called: NodeNames
    ) -> None:
        self.node, self.epoch, self.rank, self.number, self.pid = node, epoch, rank, number, pid
        self.open = True
        self._network, self._called = network, called

    def send(self, fields: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()) -> None:
        if not self.open:
            return
        if fields.get("by_s") is not None:  # each host has a clock of its own
            fields = {**fields, "by_s": fields["by_s"] - time.monotonic()}
        head = {"t": "to", "epoch": str(self.epoch), "rank": self.rank, "number": self.number}
        self._network.tell(self.node, {**head, "m": self._called.sent(fields)}, blobs)

    def reply(
        self, request_id: int, body: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()
    ) -> None:
        self.send({"t": "reply", "id": request_id, **body}, fds, blobs)

    def refuse(self, request_id: int, error: BaseException) -> None:
        self.send(error_fields(request_id, error))

    def lose(self) -> None:
        """It is of no more use; its agent says so once it is gone."""
        if self.open:
            head = {"t": "lose", "epoch": str(self.epoch), "rank": self.rank, "number": self.number}
            self._network.tell(self.node, head)

    def watch_death(self) -> None:
        """Its agent does."""

    def forget(self) -> None:
        """Its agent does."""


AnyPeer = Peer | RemotePeer


class RemoteShare:
    """As `Ranks`, for the ranks of another node. `name`: of its agent. `called`: see RemotePeer; None: it has none."""

    def __init__(
        self,
        network: PeerNetwork,
        name: str,
        epoch: Epoch,
        world: int,
        ranks: Sequence[int],
        called: NodeNames | None = None,
    ) -> None:
        self.name, self.world, self.ranks = name, world, frozenset(ranks)
        self.peers: dict[int, RemotePeer] = {}  # by rank: the one that has joined
        self.dropped = False
        self._latest: dict[int, RemotePeer] = {}
        self._network, self._epoch, self._called = network, epoch, called or NodeNames()
        self._entered: dict[int, tuple[int, int]] = {}  # by rank: the step it is in, and its polls since
        self._declared: dict[int, tuple[bytes, Declaration]] = {}

    def connected(self, rank: int, number: int, pid: int) -> RemotePeer:
        """That connection of the rank; a new one takes the place of the one before. Errors: AgentError."""
        if rank not in self.ranks:
            raise AgentError(f"rank {rank} is not on node {self.name}")
        found = self._latest.get(rank)
        if found is None or found.number < number:
            peer = RemotePeer(self._network, self.name, self._epoch, rank, number, pid, self._called)
            found = self._latest[rank] = peer
        elif found.number > number:
            raise AgentError(f"that connection of rank {rank} is gone")
        return found

    def connection(self, rank: int, number: int) -> RemotePeer | None:
        found = self._latest.get(rank)
        return found if found is not None and found.number == number else None

    def close(self) -> list[RemotePeer]:
        """The connection to the node is gone, and those of its ranks with it: which were open."""
        lost = [peer for peer in self._latest.values() if peer.open]
        for peer in lost:
            peer.open = False
        self._latest.clear()
        return lost

    def entered(self, ranks: Mapping[int, tuple[int, int]]) -> None:
        """These ranks are in that step, and have polled so often since the last ended one. Errors: AgentError for
        numbers that no rank can have published."""
        if not all(0 <= step <= STEP_MAX // 2 and 0 <= polls <= SUB_MAX for step, polls in ranks.values()):
            raise AgentError(f"agent {self.name} says of its ranks' steps what cannot be: {dict(ranks)!s:.300}")
        self._entered.update({rank: at for rank, at in ranks.items() if rank in self.ranks})

    @property
    def published(self) -> Mapping[int, tuple[int, int]]:
        """By rank, of those of which it is known: the step that it is in, and its polls since the last ended one."""
        return self._entered

    def announce(self, slot: int, word: ControlWord | None) -> None:
        self._tell({"t": "word", "slot": slot, "word": word.pack() if word is not None else 0})

    def leave(self, round_: int) -> None:
        self._tell({"t": "verdict", "round": round_})

    def offer(self, slot: int, division: str) -> None:
        self._tell({"t": "offer", "slot": slot, "division": division})

    def close_arenas(self, slot: int) -> None:
        self._tell({"t": "close-arenas", "slot": slot})

    def tell(self, fields: dict[str, Any]) -> None:
        """That node's agent; lost where it is not connected."""
        self._tell(fields)

    def limit_copies(self, bytes_per_s: float | None) -> None:
        """What copies may take of that node's network, each way."""
        self._tell({"t": "limit", "bandwidth": bytes_per_s})

    def acknowledge(self, source: str, key: str, then: Callable[[str], None]) -> None:
        """Their agent tells that source that what it plans may begin: "" when it said yes."""
        self._ask({"t": "acknowledge", "source": source, "key": key}, (), lambda _: None, None, lambda _, e: then(e))

    def drop(self) -> None:
        if not self.dropped:
            self.dropped = True
            self._tell({"t": "drop"})

    def measure(
        self,
        sizes: Mapping[int, int],
        slots: int,
        limit_bytes: int | None,
        then: Callable[[memory_plan.MemoryPlan | None, str], None],
    ) -> None:
        fields = {"t": "measure", "sizes": list(sizes.items()), "slots": slots, "limit": limit_bytes}
        self._ask(fields, (), lambda answer: memory_plan.plan_told(answer.fields["plan"]), None, then)

    def make(self, slot: int, sizes: Mapping[int, int], then: Callable[[dict[int, int], str], None]) -> None:
        def made(answer: Message) -> dict[int, int]:
            found = {int(rank): int(size) for rank, size in answer.fields["sizes"]}
            if found.keys() != sizes.keys() or any(found[rank] < size for rank, size in sizes.items()):
                raise AgentError(f"agent {self.name} has made other arenas than it was asked to")
            return found

        fields = {"t": "make", "slot": slot, "sizes": list(sizes.items())}
        nothing: dict[int, int] = {}
        self._ask(fields, (), made, nothing, then)

    def read(self, slot: int, identity: Identity, then: Callable[[list[StagedPart], str], None]) -> None:
        """Their agent hashes them, and says what each rank has staged; its bytes stay there."""

        def read(answer: Message) -> list[StagedPart]:
            parts = decode_parts(answer.blobs[0], self._declared)
            if sorted(part.declaration.rank for part in parts) != sorted(self.ranks):
                raise AgentError(f"agent {self.name} tells of other ranks than it has")
            return parts

        known = {rank: digest for rank, (digest, _) in self._declared.items()}
        fields = {"t": "read", "slot": slot, "identity": str(identity), "known": list(known.items())}
        nothing: list[StagedPart] = []
        self._ask(fields, (), read, nothing, then)

    def write(self, wanted: WantedPart, then: Callable[[Written | None, str], None]) -> None:
        """Their agent puts frames that it has into packs; no record."""

        fields = {
            "t": "write",
            "identity": str(wanted.identity),
            "codec": wanted.codec,
            "bandwidth": wanted.bandwidth,
        }
        self._ask(fields, [wanted.encode()], lambda answer: _written(answer, wanted), None, then)

    # -- inside

    def _tell(self, fields: dict[str, Any]) -> None:
        self._network.tell(self.name, {**fields, "epoch": str(self._epoch)})

    def _ask(
        self,
        fields: dict[str, Any],
        blobs: Sequence[bytes],
        read: Callable[[Message], T],
        nothing: T,
        then: Callable[[T, str], None],
    ) -> None:
        """`then` hears what `read` makes of the answer, or `nothing` and what went wrong; so too where the answer is
        malformed: the connection is sound, and the agent at its end is not."""

        def answered(answer: Message | None, error: str) -> None:
            if self.dropped and fields["t"] != "write":  # who waits for that one waits on a thread
                return
            result = nothing
            if answer is not None:
                try:
                    result = read(answer)
                except Exception as exc:  # whatever another agent may have sent: somebody waits for this
                    error = f"agent {self.name} has answered {fields['t']} with what cannot be read: {exc!r:.500}"
            then(result, error)

        self._network.ask(self.name, {**fields, "epoch": str(self._epoch)}, blobs, answered)


@dataclass(frozen=True, slots=True)
class WantedPart:
    """Frames that a node is to write. `frames`: array of FRAME. `ranks`, `offsets`: where each lies: bytes of the memfd
    of that rank's arena."""

    identity: Identity
    frames: Array
    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    codec: CodecOption
    bandwidth: float | None

    def encode(self) -> bytes:
        columns = np.ascontiguousarray(self.frames), self.ranks.astype("<i8"), self.offsets.astype("<i8")
        return b"".join(column.tobytes() for column in columns)

    @staticmethod
    def decode(identity: Identity, blob: bytes, codec: CodecOption, bandwidth: float | None) -> WantedPart:
        """Errors: AgentError."""
        count, rest = divmod(len(blob), FRAME.itemsize + 16)
        if rest or count > FRAMES_MAX:
            raise AgentError("frames to be written are malformed")
        frames = np.frombuffer(blob, FRAME, count)
        places = np.frombuffer(blob, "<i8", 2 * count, FRAME.itemsize * count).astype(np.int64)
        return WantedPart(identity, frames, places[:count], places[count:], codec, bandwidth)


def _written(answer: Message, wanted: WantedPart) -> Written:
    """Errors: AgentError where it is not what such a node can have written: nobody could read a record that says so."""
    from ckpt.format.record import misplaced
    from ckpt.store.keys import parse_pack
    from ckpt.store.packs import Written

    packs = tuple((str(key), int(size)) for key, size in unpacked(answer.blobs[1], "packs"))
    places = np.frombuffer(answer.blobs[0], PLACE).copy()
    keys = [parse_pack(key) for key, _ in packs]
    if any(key is None or key.identity != wanted.identity for key in keys) or len(set(keys)) < len(keys):
        raise AgentError("packs of another checkpoint were written, or one twice")
    if why := misplaced(places, wanted.frames, [size for _, size in packs]):
        raise AgentError(f"its frames were not written: {why}")
    return Written(packs, places)


def encode_parts(parts: Collection[StagedPart], known: Mapping[int, bytes], declared: Mapping[int, bytes]) -> bytes:
    """For a message. `declared`: the ranks' declarations, encoded. `known`: of those that the reader has, what
    `digest_of` says."""
    rows = []
    for part in parts:
        rank = part.declaration.rank
        data = declared[rank]
        rows.append(
            [
                rank,
                None if known.get(rank) == digest_of(data) else data,
                part.hashes.astype("<u8").tobytes(),
                [[blob.hash, blob.length] for blob in (part.shared, part.own)],
                list(part.at),
                part.metrics,
            ]
        )
    packed: bytes = msgpack.packb(rows)
    return packed


def decode_parts(blob: bytes, declared: dict[int, tuple[bytes, Declaration]]) -> list[StagedPart]:
    """`declared`: what is known of earlier ones, by rank; what is new goes there. Errors: CkptError; for what is no
    such message any Exception."""
    parts = []
    rows = unpacked(blob, "what a node says of its ranks")
    for rank, data, hashes, (shared, own), (shared_at, own_at), metrics in rows:
        if data is not None:
            declared[rank] = digest_of(data), decode(data, f"the declaration of rank {rank}")
        declaration = declared[rank][1]
        table = np.frombuffer(hashes, "<u8").reshape(-1, 2).astype(np.uint64)
        if declaration.rank != rank or len(table) != len(declaration.staging.frames):
            raise AgentError(f"what is said of rank {rank} contradicts its declaration")
        blobs = [Blob(bytes(value), int(length)) for value, length in (shared, own)]
        at = int(shared_at), int(own_at)
        numbers = {str(name): float(value) for name, value in metrics.items()}
        parts.append(StagedPart(declaration, table, blobs[0], blobs[1], at, numbers))
    return parts


def digest_of(declaration: bytes) -> bytes:
    return hashlib.blake2b(declaration, digest_size=16).digest()
