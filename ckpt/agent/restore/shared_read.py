"""The shared read of a job of several nodes: each frame leaves the store once, and goes to all nodes that want it.

Every frame has one home among the nodes (layout/read_sharding.py). The home reads it into memory that lasts until the
restore is over. Its own ranks map that memory. Other nodes are told while the read goes on, and fetch the frame into
their window. A node waits for a home without a thread, and a home waits for no node, so no deadlock is possible. Frames
that their home does not give come from the next source. shared_home.py is a node as a home, home_client.py a home as
the other nodes see it. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.restore.home_client import HomeClient, encode_frames
from ckpt.agent.restore.rank_request import Origin, RankRequest
from ckpt.agent.restore.restore_session import FrameSource, RestoreSession
from ckpt.agent.restore.shared_home import SharedHome
from ckpt.agent.restore.store_source import OpenReader
from ckpt.agent.runtime.coroutines import Semaphore
from ckpt.errors import AgentError
from ckpt.events import Event
from ckpt.format.manifest import Manifest
from ckpt.layout.read_sharding import Numbers, shard_reads
from ckpt.types import OWN_NODE, Epoch

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.messages import Message
    from ckpt.ipc.node_list import NodeAt

DIALS_MAX = 32  # connections to homes being made at a time
_FIRST_REGION = 1 << 18  # the number of the memory into which this node reads for all nodes


class SharedRead(FrameSource):
    """One node's side of the shared read. `home`: this node as a home."""

    home: SharedHome

    def __init__(
        self,
        epoch: Epoch,
        manifest: Manifest,
        nodes: Sequence[NodeAt],
        network: PeerNetwork,
        open_reader: OpenReader,
        room: Callable[[], int],
        tell: Callable[[Event], None],
        only: Numbers | None = None,
    ) -> None:
        """`nodes`: all nodes of the job, in the same order on each. `room`: bytes that this node may use for the shared
        memory until all ranks have restored. `tell`: emits an event. `only`: the frames to share; None: all."""
        self.network = network
        self._epoch, self._nodes = epoch, list(nodes)
        self._open_reader, self._get_room_bytes, self._emit_event = open_reader, room, tell
        self._number_by_node = {node.name: number for number, node in enumerate(nodes)}
        self._own_number = self._number_by_node[network.agent_name]
        self._sharding = shard_reads(manifest.frames, len(nodes), only)
        self._equal_frames: dict[int, list[int]] = {}  # first frame of several of equal bytes -> all of them
        first_equal = self._sharding.first_equal
        for frame in np.flatnonzero(first_equal != np.arange(len(first_equal))).tolist():
            first = int(first_equal[frame])
            self._equal_frames.setdefault(first, [first]).append(frame)
        self._clients: dict[int, HomeClient] = {}  # by number of the home
        self._dials = Semaphore(DIALS_MAX)

    def begin(self, session: RestoreSession, number: int) -> None:
        super().begin(session, number)
        about = self._offer_name, self._sharding, self._own_number
        services = self._open_reader, self._get_room_bytes, self._emit_event
        self.home = SharedHome(session, self.network.transport, *about, *services, self._report)

    def select(self, frames: set[int], asked: RankRequest) -> set[int]:
        return {frame for frame in frames if self._sharding.home_nodes[frame] >= 0}

    def request(self, frames: set[int], asked: RankRequest) -> None:
        by_home: dict[int, set[int]] = {}
        for frame in frames:
            first = int(self._sharding.first_equal[frame])
            by_home.setdefault(int(self._sharding.home_nodes[frame]), set()).add(first)
        # From this node on, so that nodes do not all ask the same home first.
        for home in sorted(by_home, key=lambda home: (home - self._own_number) % len(self._nodes)):
            if home != self._own_number:
                self._client(home).request(by_home[home])
                continue
            try:
                self.home.request(by_home[home], OWN_NODE)
            except AgentError as exc:
                self._fail(by_home[home], exc)

    def handle_disconnect(self, name: str) -> None:
        client = self._clients.get(self._number_by_node.get(name, -1))
        if client is not None:
            client.handle_disconnect()

    def close(self) -> None:
        self.home.close()

    # -- what other agents say

    def handle_read_frames(self, channel: Channel, message: Message) -> None:
        """Message "read-frames": another node requests frames whose home is here. Errors: AgentError."""
        if channel.peer not in self._number_by_node:
            raise AgentError(f"agent {channel.peer} has no part in {self._epoch}")
        frames = self._decode_frames(message.blobs[0] if message.blobs else b"")
        homes, first_equal = self._sharding.home_nodes, self._sharding.first_equal
        if any(homes[frame] != self._own_number or first_equal[frame] != frame for frame in frames):
            raise AgentError(f"not all of these frames of {self.session.identity} are read here")
        self.home.request(frames, channel.peer)
        channel.reply(int(message.fields["id"]), {"ready": True})

    def handle_frames_read(self, channel: Channel, message: Message) -> None:
        """Message "frames-read": a home has read frames, or cannot. Errors: AgentError."""
        client = self._clients.get(self._number_by_node.get(channel.peer, -1))
        if client is not None:
            here, lacking = (self._decode_frames(blob) for blob in message.blobs)
            client.handle_report(here, lacking)

    # -- inside

    @property
    def _offer_name(self) -> str:
        return f"store/{self._epoch}/{self.session.identity}"

    def _client(self, home: int) -> HomeClient:
        client = self._clients.get(home)
        if client is None:
            fields = {"epoch": str(self._epoch), "identity": str(self.session.identity)}
            at = self._nodes[home], self._offer_name, self._sharding.frames_of(home)
            client = self._clients[home] = HomeClient(
                self.session, self.network, *at, fields, self._dials, self._receive_frame, self._fail
            )
        return client

    def _report(self, who: str, here: Sequence[int], lacking: Sequence[int]) -> None:
        """Tells a node which frames this node has read for it, or cannot have."""
        if who != OWN_NODE:
            fields = {"t": "frames-read", "epoch": str(self._epoch), "identity": str(self.session.identity)}
            self.network.notify(who, fields, [encode_frames(here), encode_frames(lacking)])
            return
        assert self.home.memory is not None
        origin = Origin(self.number, "store")
        self.session.receive_places(origin, self._with_equal(here), self.home.memory, _FIRST_REGION)
        self._fail(lacking, AgentError("this node cannot read them for all"))

    def _receive_frame(self, frame: int, cell: int) -> None:
        self.session.receive(Origin(self.number, "peer"), self._with_equal([frame]), cell)

    def _with_equal(self, frames: Iterable[int]) -> list[int]:
        return [each for frame in frames for each in self._equal_frames.get(frame, (frame,))]

    def _fail(self, frames: Iterable[int], error: BaseException) -> None:
        self.session.fail(self.number, self._with_equal(frames), error)

    def _decode_frames(self, blob: bytes) -> list[int]:
        """Errors: AgentError."""
        count = len(self.session.manifest.frames)
        if len(blob) % 4 or len(blob) > 4 * count:
            raise AgentError("the numbers of frames are malformed")
        frames: list[int] = np.frombuffer(blob, "<u4").tolist()
        if frames and max(frames) >= count:
            raise AgentError(f"{self.session.identity} has no frame {max(frames)}")
        return frames


def shared_read_of(session: RestoreSession | None) -> SharedRead | None:
    """The shared read of a session, if it has one."""
    sources = session.sources if session is not None else ()
    return next((source for source in sources if isinstance(source, SharedRead)), None)
