"""The shared read of a job of several nodes: each frame leaves the store once, and goes to all nodes that want it.

Every frame has one home among the nodes (layout/read_sharding.py). The home reads it into memory that lasts until the
restore is over. Its own ranks map that memory. Other nodes are told while the read goes on, and fetch the frame into
their window. A node waits for a home without a thread, and a home waits for no node, so no deadlock is possible. Frames
that their home does not give come from the next source. Main thread only, but for store reads.
"""

from __future__ import annotations

import collections
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.restore.peer_fetch import PeerOffer
from ckpt.agent.restore.restore_session import FrameSource, Origin, RankRequest, RestoreSession
from ckpt.agent.restore.shared_read_state import Given, HomeRequest
from ckpt.agent.restore.store_source import OpenReader, RecordPasses
from ckpt.agent.runtime.workers import error_text
from ckpt.agent.snapshots.manifest_gather import place_frames
from ckpt.agent.snapshots.memory_checkpoint import LocalMemory
from ckpt.errors import AgentError, CkptError
from ckpt.events import Event
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from ckpt.layout.read_sharding import Numbers, shard_reads
from ckpt.types import OWN_NODE, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.messages import Message
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.reader import FrameReader

log = logging.getLogger("ckpt")

HOME_TIMEOUT_S = 20.0  # a home that was silent for so long is given up
CHECK_S = 1.0  # between looks for silent homes
RETRY_S = 0.2  # until a home that has not begun its restore is asked again
REPORT_DELAY_S = 0.02  # frames read within so long are announced together
ATTEMPTS_MAX = 6  # times that a home is asked again after its connection has ended
DIALS_MAX = 32  # connections to homes being made at a time
_FIRST_REGION = 1 << 18  # the number of the memory into which this node reads for all nodes


class SharedRead(FrameSource):
    """One node's side of the shared read."""

    def __init__(
        self,
        identity: Identity,
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
        self._identity, self._epoch, self._manifest = identity, epoch, manifest
        self._nodes, self.network, self._open_reader = list(nodes), network, open_reader
        self._get_room_bytes, self._emit_event, self._has_reported_no_room = room, tell, False
        self._number_by_node = {node.name: number for number, node in enumerate(nodes)}
        self._own_number = self._number_by_node[network.agent_name]
        self._homes = shard_reads(manifest.frames, len(nodes), only)
        self._equal_frames: dict[int, list[int]] = {}  # first frame of several of equal bytes -> all of them
        first_equal = self._homes.first_equal
        for frame in np.flatnonzero(first_equal != np.arange(len(first_equal))).tolist():
            first = int(first_equal[frame])
            self._equal_frames.setdefault(first, [first]).append(frame)
        self._lengths = manifest.frames["length"].astype(np.int64)
        self._home_reads = Given()
        self.home_memory: LocalMemory | None = None  # where the frames lie that this node has read for all
        self._passes: RecordPasses
        self._is_report_scheduled = self._closed = self._is_watching = False
        self._requests_by_home: dict[int, HomeRequest] = {}  # home -> what is requested of it
        self._offers_by_home: dict[int, PeerOffer] = {}
        self._queued_homes: collections.deque[int] = collections.deque()  # to be asked
        self._dial_count = 0

    def begin(self, session: RestoreSession, number: int) -> None:
        super().begin(session, number)
        self._passes = RecordPasses(session, self._manifest, self._open_reader, self._read, self._end_pass)

    def select(self, frames: set[int], asked: RankRequest) -> set[int]:
        return {frame for frame in frames if self._homes.home_nodes[frame] >= 0}

    def request(self, frames: set[int], asked: RankRequest) -> None:
        by_home: dict[int, set[int]] = {}
        for frame in frames:
            first = int(self._homes.first_equal[frame])
            by_home.setdefault(int(self._homes.home_nodes[frame]), set()).add(first)
        # From this node on, so that nodes do not all ask the same home first.
        for home in sorted(by_home, key=lambda home: (home - self._own_number) % len(self._nodes)):
            if home != self._own_number:
                self._request_from(home, by_home[home])
                continue
            try:
                self._schedule_reads(by_home[home], OWN_NODE)
            except AgentError as exc:
                self._fail(by_home[home], exc)

    def handle_disconnect(self, name: str) -> None:
        """Connects again if frames are still awaited from the agent."""
        home = self._number_by_node.get(name, -1)
        if home in self._requests_by_home and self._requests_by_home[home].pending_frames and not self._closed:
            self._reconnect(home, f"the connection to agent {name} has ended")

    def close(self) -> None:
        self._closed = True
        self._passes.close()
        self._queued_homes.clear()
        if self.home_memory is not None:
            self.network.transport.withdraw(self._offer_name)
            self.session.workers.close_arenas(self.home_memory.arenas.values())  # mapped while they are read or sent
            self.home_memory = None

    # -- what other agents say

    def handle_read_frames(self, channel: Channel, message: Message) -> None:
        """Message "read-frames": another node requests frames whose home is here. Errors: AgentError."""
        if channel.peer not in self._number_by_node:
            raise AgentError(f"agent {channel.peer} has no part in {self._epoch}")
        frames = self._decode_frames(message.blobs[0] if message.blobs else b"")
        if any(
            self._homes.home_nodes[frame] != self._own_number or self._homes.first_equal[frame] != frame
            for frame in frames
        ):
            raise AgentError(f"not all of these frames of {self._identity} are read here")
        self._schedule_reads(frames, channel.peer)
        channel.reply(int(message.fields["id"]), {"ready": True})

    def handle_frames_read(self, channel: Channel, message: Message) -> None:
        """Message "frames-read": a home has read frames, or cannot. Errors: AgentError."""
        home = self._number_by_node.get(channel.peer, -1)
        asked = self._requests_by_home.get(home)
        if asked is None:
            return
        here, lacking = (self._decode_frames(blob) for blob in message.blobs)
        ready, lost = asked.record_answer(here, lacking, time.monotonic())
        self._fail(lost, AgentError(f"agent {channel.peer} cannot read them"))
        self.session.fetches.queue(self._offers_by_home[home], ready)
        self.session.fetches.start()

    # -- as a home

    @property
    def _offer_name(self) -> str:
        return f"store/{self._epoch}/{self._identity}"

    def _schedule_reads(self, frames: Iterable[int], who: str) -> None:
        """Schedules frames to be read for node `who`. Errors: AgentError if memory is short."""
        if self.home_memory is None:
            try:
                self.home_memory = self._create_home_memory()
            except (CkptError, OSError) as exc:
                self._report_no_room(str(exc))
                raise AgentError(str(exc)) from exc
        self._passes.request(self._home_reads.add_requests(frames, who))
        self._schedule_report()

    def _report_no_room(self, why: str) -> None:
        """Emits the event once, however many nodes ask."""
        if not self._has_reported_no_room and not self._closed:
            self._has_reported_no_room = True
            text = (
                f"each node reads for itself the part of step {self._identity.version.step} that this node was to read"
            )
            text = f"{text} for all: {why}"
            self._emit_event(Event("restore.unshared", text, False, {"identity": str(self._identity)}))

    def _create_home_memory(self) -> LocalMemory:
        size, room = self._homes.node_bytes[self._own_number], self._get_room_bytes()
        if self._closed or size > room:
            raise AgentError(f"{size >> 20} MiB to hold for all nodes, and {room >> 20} MiB may be taken for it")
        mine = self._homes.frames_of(self._own_number)
        frames = place_frames(self._manifest, mine, self._homes.offsets[mine], size)
        region = Arena.create(size)
        try:
            self.network.transport.offer(self._offer_name, region.view, frames, urgent=True)
        except CkptError:
            region.close()
            raise
        return LocalMemory({0: region}, np.zeros_like(self._homes.offsets), self._homes.offsets)

    def _read(self, reader: FrameReader, ours: dict[int, list[int]]) -> None:
        """On a worker, which starts further threads: reads frames into this node's memory for all."""
        memory = self.home_memory
        if memory is None:  # closed
            return

        def out(their: int) -> memoryview:
            frame = ours[their][0]
            return memory.arenas[0].part((int(self._homes.offsets[frame]), int(self._lengths[frame])))

        def deliver(their: int) -> None:
            self.session.post(lambda: self._record_read(ours[their][0]))

        def failed(their: int, error: Exception) -> None:
            log.warning("frame %d of %s cannot be read: %s", ours[their][0], self._identity, error)

        reader.read(ours, deliver, out, failed)

    def _record_read(self, frame: int) -> None:
        self._home_reads.mark_read(frame)
        self._schedule_report()

    def _end_pass(self, frames: list[int], error: BaseException | None) -> None:
        if error:
            log.warning("%s cannot be read from the store for all nodes: %s", self._identity, error_text(error))
        for frame in frames:
            self._home_reads.mark_unavailable(frame)  # no effect if it was read
        self._schedule_report()

    def _schedule_report(self) -> None:
        if not self._is_report_scheduled:
            self._is_report_scheduled = True
            self.session.call_later(REPORT_DELAY_S, self._report_reads)

    def _report_reads(self) -> None:
        self._is_report_scheduled = False
        if self._closed:
            return
        for who, (here, lacking) in self._home_reads.take_reports(time.monotonic()).items():
            if who != OWN_NODE:
                fields = {"t": "frames-read", "epoch": str(self._epoch), "identity": str(self._identity)}
                self.network.notify(who, fields, [_encode_frames(here), _encode_frames(lacking)])
                continue
            assert self.home_memory is not None
            origin = Origin(self.number, "store")
            self.session.receive_places(origin, self._with_equal(here), self.home_memory, _FIRST_REGION)
            self._fail(lacking, AgentError("this node cannot read them for all"))

    # -- towards homes

    def _request_from(self, home: int, frames: set[int]) -> None:
        asked = self._requests_by_home.get(home)
        if asked is None:
            asked = self._requests_by_home[home] = HomeRequest(time.monotonic())
            self._offers_by_home[home] = PeerOffer(
                self._nodes[home],
                self._offer_name,
                self._homes.frames_of(home),
                functools.partial(self._receive_frame, asked),
                lambda frames, error: self._give_up_home(home, error),
            )
        if asked.given_up:
            self._fail(frames, AgentError(f"agent {self._nodes[home].name} did not give others"))
            return
        if asked.add_frames(frames, time.monotonic()):
            self._queue_request(home)
        if not self._is_watching:
            self._is_watching = True
            self.session.call_later(CHECK_S, self._check_silent_homes)

    def _queue_request(self, home: int) -> None:
        """Queues a request; at most DIALS_MAX connect at a time: a home called by all at once would refuse some."""
        self._queued_homes.append(home)
        self._dial_next()

    def _dial_next(self) -> None:
        while self._queued_homes and self._dial_count < DIALS_MAX:
            home = self._queued_homes.popleft()
            self._dial_count += 1
            self.network.connect(self._nodes[home], functools.partial(self._end_dial, home))

    def _end_dial(self, home: int, error: str) -> None:
        self._dial_count -= 1
        self.session.guard(lambda: self._send_request(home, error))
        self._dial_next()

    def _send_request(self, home: int, error: str) -> None:
        """Asks for all that the home has not answered for. Even an empty request shows whether the home is alive."""
        asked, name = self._requests_by_home[home], self._nodes[home].name
        if self._closed or asked.given_up:
            return
        if error:
            self._give_up_home(home, AgentError(error))
            return
        asked_on = self.network.channel(name)
        fields = {"t": "read-frames", "epoch": str(self._epoch), "identity": str(self._identity)}
        then = lambda answer, error: self._handle_answer(home, asked_on, answer, error)  # noqa: E731
        self.network.request(name, fields, [_encode_frames(sorted(asked.unanswered_frames))], then)

    def _handle_answer(self, home: int, asked_on: Channel | None, answer: Message | None, error: str) -> None:
        asked = self._requests_by_home[home]
        if self._closed or asked.given_up:
            return
        if answer is None and self.network.channel(self._nodes[home].name) is asked_on:
            self._give_up_home(home, AgentError(error))
        elif answer is None:  # The connection has ended, for example since both nodes dialled at once.
            self._reconnect(home, error)
        elif answer.fields.get("ready") is True:
            asked.record_contact(time.monotonic())
        else:
            self.session.call_later(RETRY_S, lambda: None if self._closed else self._queue_request(home))

    def _reconnect(self, home: int, why: str) -> None:
        asked = self._requests_by_home[home]
        if asked.given_up:
            return
        asked.attempts += 1
        if asked.attempts > ATTEMPTS_MAX:
            self._give_up_home(home, AgentError(why))
        else:
            self._queue_request(home)

    def _check_silent_homes(self) -> None:
        """Gives up homes that hang."""
        if self._closed:
            return
        for home, asked in list(self._requests_by_home.items()):
            if asked.silent_s(time.monotonic()) > HOME_TIMEOUT_S:
                name = self._nodes[home].name
                self._give_up_home(home, AgentError(f"agent {name} has said nothing for {HOME_TIMEOUT_S:g} s"))
        self.session.call_later(CHECK_S, self._check_silent_homes)

    def _receive_frame(self, asked: HomeRequest, frame: int, cell: int) -> None:
        asked.record_contact(time.monotonic())
        asked.pending_frames.discard(frame)
        self.session.receive(Origin(self.number, "peer"), self._with_equal([frame]), cell)

    def _give_up_home(self, home: int, error: BaseException) -> None:
        if not self._requests_by_home[home].given_up:
            lost = self._requests_by_home[home].give_up()
            if lost:
                text = error_text(error)  # the error itself would keep the window's memory
                log.warning("%d frames of %s do not come from their home: %s", len(lost), self._identity, text)
            self._fail(lost, error)
            self.session.fetches.withdraw(self._offers_by_home[home], AgentError("its home was given up"))

    # -- small steps

    def _with_equal(self, frames: Iterable[int]) -> list[int]:
        return [each for frame in frames for each in self._equal_frames.get(frame, (frame,))]

    def _fail(self, frames: Iterable[int], error: BaseException) -> None:
        self.session.fail(self.number, self._with_equal(frames), error)

    def _decode_frames(self, blob: bytes) -> list[int]:
        """Errors: AgentError."""
        count = len(self._lengths)
        if len(blob) % 4 or len(blob) > 4 * count:
            raise AgentError("the numbers of frames are malformed")
        frames: list[int] = np.frombuffer(blob, "<u4").tolist()
        if frames and max(frames) >= count:
            raise AgentError(f"{self._identity} has no frame {max(frames)}")
        return frames


def _encode_frames(frames: Sequence[int]) -> bytes:
    return np.asarray(frames, "<u4").tobytes()


def shared_read_of(session: RestoreSession | None) -> SharedRead | None:
    """The shared read of a session, if it has one."""
    sources = session.sources if session is not None else ()
    return next((source for source in sources if isinstance(source, SharedRead)), None)
