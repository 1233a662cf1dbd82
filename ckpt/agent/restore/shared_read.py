"""The shared read of a job of several nodes: each frame leaves the store once, and goes to all nodes that want it.

Every frame has one home among the nodes (layout/read_sharding.py). The home reads it into memory that lasts until the
restore is over. Its own ranks map that memory. Other nodes are told while the read goes on, and fetch the frame into
their window. A node waits for a home without a thread, and a home waits for no node, so no deadlock is possible. Frames
that their home does not give are `lacking`, and the node reads them itself. Main thread only, but for store reads.
"""

from __future__ import annotations

import collections
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.net.tcp_receiver import Fetch
from ckpt.agent.restore.peer_fetch import fetch_frames
from ckpt.agent.restore.shared_read_state import Given, HomeRequest
from ckpt.agent.restore.store_source import same_frames
from ckpt.agent.restore.window import Window
from ckpt.agent.runtime.workers import Lane, Workers, error_text, failure
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
    from ckpt.format.manifest import Record
    from ckpt.ipc.messages import Message
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.reader import FrameReader

log = logging.getLogger("ckpt")

HOME_TIMEOUT_S = 20.0  # a home that was silent for so long is given up
CHECK_S = 1.0  # between looks for silent homes
RETRY_S = 0.2  # until a home that has not begun its restore is asked again
REPORT_DELAY_S = 0.02  # frames read within so long are announced together
ATTEMPTS_MAX = 6  # times that a home is asked again after its connection has ended
FETCH_FRAMES = 16  # in one transfer
FETCHES = 4  # transfers at a time, divided among the homes; at least one from each
FETCHES_MAX = 16  # transfers at a time from all homes
DIALS_MAX = 32  # connections to homes being made at a time


class SharedRead:
    """One node's side of the shared read. Its RestoreSession sets `window` and the callbacks:

    `read(frames)`: these frames lie in `home_memory` now. `landed(frames, offset)`: their bytes are in the window's
    cell at that offset, which the session then owns. `lacking(frames, why)`: their home does not give them.
    `opened(record)`: the record was read. `guard(what)`: runs `what`, and reports exceptions, since ranks wait."""

    def __init__(
        self,
        identity: Identity,
        epoch: Epoch,
        manifest: Manifest,
        nodes: Sequence[NodeAt],
        network: PeerNetwork,
        workers: Workers,
        later: Callable[[float, Callable[[], None]], None],
        post: Callable[[Callable[[], None]], None],
        open_record: Callable[[], FrameReader],
        room: Callable[[], int],
        tell: Callable[[Event], None],
        only: Numbers | None = None,
    ) -> None:
        """`nodes`: all nodes of the job, in the same order on each. `room`: bytes that this node may use for the shared
        memory until all ranks have restored. `tell`: emits an event. `only`: the frames to share; None: all."""
        self.get_window: Callable[[], Window]
        self.on_read: Callable[[list[int]], None] = lambda frames: None
        self.on_received: Callable[[list[int], int], None] = lambda frames, offset: None
        self.on_unavailable: Callable[[list[int], str], None] = lambda frames, why: None
        self.on_record_opened: Callable[[Record], None] = lambda record: None
        self.guard: Callable[[Callable[[], None]], None] = lambda what: what()
        self._identity, self._epoch, self._manifest = identity, epoch, manifest
        self._nodes, self._network = list(nodes), network
        self._workers, self._open_record = workers, open_record
        self._get_room_bytes, self._emit_event, self._has_reported_no_room = room, tell, False
        self._call_later_unguarded, self._post_unguarded = later, post
        self._own_number = next(number for number, node in enumerate(nodes) if node.name == network.agent_name)
        self._fetches_per_home = max(1, FETCHES // max(1, len(nodes) - 1))
        self._number_by_node = {node.name: number for number, node in enumerate(nodes)}
        self._homes = shard_reads(manifest.frames, len(nodes), only)
        self._lengths = manifest.frames["length"].astype(np.int64)
        self._awaited_frames: dict[int, set[int]] = {}  # first frame of equal bytes -> equal frames that are awaited
        self._home_reads = Given()
        self._home_arena: Arena | None = None
        self._reader: FrameReader | None = None
        self._is_reading = self._is_unreadable = self._is_report_scheduled = self._closed = self._is_watching = False
        self._requests_by_home: dict[int, HomeRequest] = {}  # home -> what is requested of it
        self._attempts_by_home: dict[int, int] = {}
        self._queued_requests: collections.deque[tuple[int, list[int]]] = collections.deque()
        self._dial_count = 0
        self._fetches_by_home: dict[int, set[Fetch]] = {}

    @property
    def home_memory(self) -> LocalMemory:
        """Where the frames that are `here` lie. Its only arena has number 0."""
        assert self._home_arena is not None
        return LocalMemory({0: self._home_arena}, np.zeros_like(self._homes.offsets), self._homes.offsets)

    def select_read(self, frames: Collection[int]) -> set[int]:
        """The subset that this node has read already."""
        same = self._homes.first_equal
        return {frame for frame in frames if int(same[frame]) in self._home_reads.read_frames}

    def select_homed(self, frames: Collection[int]) -> set[int]:
        """The subset that has a home."""
        return {frame for frame in frames if self._homes.home_nodes[frame] >= 0}

    def request_frames(self, frames: Iterable[int]) -> None:
        """Requests frames that have a home. Repeated frames are requested once. No callback runs within this call."""
        by_home: dict[int, set[int]] = {}
        for frame in frames:
            same = int(self._homes.first_equal[frame])
            self._awaited_frames.setdefault(same, set()).add(frame)
            by_home.setdefault(int(self._homes.home_nodes[frame]), set()).add(same)
        for home in self._rotate_homes(by_home):
            if home == self._own_number:
                self._schedule_reads(by_home[home], OWN_NODE)
            else:
                self._request_from(home, by_home[home])
        self._start_pass()  # reads at least the record: the next commit may refer to it

    def start_fetches(self) -> None:
        """Fetches frames that homes have ready, as far as the window has free cells."""
        for home in self._rotate_homes(self._requests_by_home):
            asked = self._requests_by_home[home]
            while (
                not self._closed
                and asked.next_ready_frame() is not None
                and len(self._fetches_by_home.get(home, ())) < self._fetches_per_home
            ):
                if sum(map(len, self._fetches_by_home.values())) >= FETCHES_MAX:
                    return  # pump() runs again when a transfer ends
                if not self._fetch(home, asked):
                    break

    def close(self) -> None:
        self._closed = True
        self._queued_requests.clear()
        for fetches in self._fetches_by_home.values():
            for fetch in fetches:
                fetch.cancel()
        if self._home_arena is not None:
            self._network.transport.withdraw(self._offer_name)
            self._workers.close_arenas([self._home_arena])  # stays mapped while it is read or sent
            self._home_arena = None

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
        self._start_pass()

    def handle_frames_read(self, channel: Channel, message: Message) -> None:
        """Message "frames-read": a home has read frames, or cannot. Errors: AgentError."""
        home = self._number_by_node.get(channel.peer)
        asked = self._requests_by_home.get(home) if home is not None else None
        if home is None or asked is None or asked.given_up:
            return
        here, lacking = (self._decode_frames(blob) for blob in message.blobs)
        self._hand_back(asked.record_answer(here, lacking, time.monotonic()), f"agent {channel.peer} cannot read them")
        self.start_fetches()

    def handle_disconnect(self, name: str) -> None:
        """Agent `name` has disconnected: connects again if frames are still awaited from it."""
        if self._network.channel(name) is None:
            self._home_reads.drop_waiter(name)
        home = self._number_by_node.get(name)
        if (
            home is not None
            and home in self._requests_by_home
            and self._requests_by_home[home].has_pending
            and not self._closed
        ):
            self._reconnect(home, f"the connection to agent {name} has ended")

    # -- as a home

    @property
    def _offer_name(self) -> str:
        return f"store/{self._epoch}/{self._identity}"

    def _schedule_reads(self, frames: Iterable[int], who: str) -> None:
        """Schedules frames to be read for node `who`. Errors: AgentError if another node asks and memory is short."""
        if self._home_arena is None:
            try:
                self._create_home_arena()
            except (CkptError, OSError) as exc:
                lost, why = sorted(frames), str(exc)
                self._report_no_room(why)
                if who != OWN_NODE:
                    raise AgentError(why) from exc
                self._post(lambda: self._hand_back(lost, why))
                return
        self._home_reads.add_requests(frames, who)
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

    def _create_home_arena(self) -> None:
        size, room = self._homes.node_bytes[self._own_number], self._get_room_bytes()
        if self._closed or size > room:
            raise AgentError(f"{size >> 20} MiB to hold for all nodes, and {room >> 20} MiB may be taken for it")
        mine = self._homes.frames_of(self._own_number)
        frames = place_frames(self._manifest, mine, self._homes.offsets[mine], size)
        region = Arena.create(size)
        try:
            self._network.transport.offer(self._offer_name, region.view, frames, urgent=True)
        except CkptError:
            region.close()
            raise
        self._home_arena = region

    def _start_pass(self) -> None:
        """Starts a read pass unless one runs. Frames requested meanwhile are read by the next pass."""
        if self._closed or self._is_reading:
            return
        frames = self._home_reads.take_requested()
        if not frames and (self._reader is not None or self._is_unreadable):
            return
        self._is_reading = True
        region = self._home_arena
        self._workers.run(
            Lane.FRONT,
            lambda: self._run_pass(frames, region),
            lambda done: self.guard(lambda: self._end_pass(frames, done)),
        )

    def _run_pass(self, frames: list[int], region: Arena | None) -> None:
        """Reads frames into `region`. Runs on a worker, which starts further threads."""
        reader = self._reader or self._open_record()
        if self._reader is None:
            self._post(lambda: self._set_reader(reader))
        numbers = same_frames(self._manifest, reader.record.manifest, frames)
        ours = {their: frame for frame, their in zip(frames, numbers, strict=True) if their is not None}

        def out(their: int) -> memoryview:
            assert region is not None  # `_schedule_reads` has made it
            frame = ours[their]
            return region.part((int(self._homes.offsets[frame]), int(self._lengths[frame])))

        def deliver(their: int) -> None:
            self._post(lambda: self._record_read(ours[their]))

        def failed(their: int, error: Exception) -> None:
            log.warning("frame %d of %s cannot be read: %s", ours[their], self._identity, error)

        reader.read(ours, deliver, out, failed)

    def _record_read(self, frame: int) -> None:
        self._home_reads.mark_read(frame)
        self._schedule_report()

    def _set_reader(self, reader: FrameReader) -> None:
        self._reader = reader
        self.on_record_opened(reader.record)

    def _end_pass(self, frames: list[int], done: Future[None]) -> None:
        self._is_reading = False
        if self._closed:
            return
        error = failure(done)
        self._is_unreadable = bool(error)
        if error:
            log.warning("%s cannot be read from the store for all nodes: %s", self._identity, error)
        for frame in frames:
            self._home_reads.mark_unavailable(frame)  # no effect if it was read
        self._schedule_report()
        self._start_pass()

    def _schedule_report(self) -> None:
        if not self._is_report_scheduled:
            self._is_report_scheduled = True
            self._call_later(REPORT_DELAY_S, self._report_reads)

    def _report_reads(self) -> None:
        self._is_report_scheduled = False
        if self._closed:
            return
        for who, (here, lacking) in self._home_reads.take_reports(time.monotonic()).items():
            if who == OWN_NODE:
                frames = [frame for same in here for frame in sorted(self._awaited_frames.pop(same, ()))]
                self.on_read(frames)
                self._hand_back(lacking, "this node cannot read them for all")
            else:
                fields = {"t": "frames-read", "epoch": str(self._epoch), "identity": str(self._identity)}
                self._network.notify(who, fields, [_encode_frames(here), _encode_frames(lacking)])

    # -- towards homes

    def _request_from(self, home: int, frames: set[int]) -> None:
        asked = self._requests_by_home.setdefault(home, HomeRequest(time.monotonic()))
        if asked.given_up:
            why = f"agent {self._nodes[home].name} did not give others"
            self._post(lambda: self._hand_back(sorted(frames), why))
            return
        new = asked.add_frames(frames, time.monotonic())
        if new:
            self._queue_request(home, new)
        if not self._is_watching:
            self._is_watching = True
            self._call_later(CHECK_S, self._check_silent_homes)

    def _rotate_homes(self, homes: Iterable[int]) -> list[int]:
        """The homes in order, starting after this node, so that nodes do not all ask the same one first."""
        return sorted(homes, key=lambda home: (home - self._own_number) % len(self._nodes))

    def _queue_request(self, home: int, frames: list[int]) -> None:
        """Queues a request; at most DIALS_MAX connect at a time: a home called by all at once would refuse some."""
        self._queued_requests.append((home, frames))
        self._dial_next()

    def _dial_next(self) -> None:
        while self._queued_requests and self._dial_count < DIALS_MAX:
            home, frames = self._queued_requests.popleft()
            self._dial_count += 1
            self._network.connect(self._nodes[home], functools.partial(self._end_dial, home, frames))

    def _end_dial(self, home: int, frames: list[int], error: str) -> None:
        self._dial_count -= 1
        self.guard(lambda: self._send_request(home, frames, error))
        self._dial_next()

    def _send_request(self, home: int, frames: list[int], error: str) -> None:
        if self._closed or self._requests_by_home[home].given_up:
            return
        if error:
            self._give_up_home(home, error)
            return
        name = self._nodes[home].name
        asked_on = self._network.channel(name)
        fields = {"t": "read-frames", "epoch": str(self._epoch), "identity": str(self._identity)}
        then = lambda answer, error: self._handle_answer(home, frames, asked_on, answer, error)  # noqa: E731
        self._network.request(name, fields, [_encode_frames(frames)], then)

    def _handle_answer(
        self, home: int, frames: list[int], asked_on: Channel | None, answer: Message | None, error: str
    ) -> None:
        asked = self._requests_by_home[home]
        if self._closed or asked.given_up:
            return
        if answer is None and self._network.channel(self._nodes[home].name) is asked_on:
            self._give_up_home(home, error)
        elif answer is None:  # The connection has ended, for example since both nodes dialled at once.
            self._reconnect(home, error)
        elif answer.fields.get("ready") is True:
            asked.record_contact(time.monotonic())
        else:
            self._call_later(RETRY_S, lambda: self._repeat_request(home, frames))

    def _repeat_request(self, home: int, frames: list[int]) -> None:
        if not self._closed and not self._requests_by_home[home].given_up:
            self._queue_request(home, frames)

    def _reconnect(self, home: int, why: str) -> None:
        asked = self._requests_by_home[home]
        if asked.given_up:
            return
        self._attempts_by_home[home] = self._attempts_by_home.get(home, 0) + 1
        if self._attempts_by_home[home] > ATTEMPTS_MAX:
            self._give_up_home(home, why)
        else:
            self._queue_request(home, asked.unanswered_frames)  # Even an empty request shows whether the home is alive.

    def _check_silent_homes(self) -> None:
        """Gives up homes that hang."""
        if self._closed:
            return
        for home, asked in list(self._requests_by_home.items()):
            if asked.silent_s(time.monotonic()) > HOME_TIMEOUT_S:
                self._give_up_home(home, f"agent {self._nodes[home].name} has said nothing for {HOME_TIMEOUT_S:g} s")
        self._call_later(CHECK_S, self._check_silent_homes)

    def _fetch(self, home: int, asked: HomeRequest) -> bool:
        """Starts a transfer of the home's next frames into the window. False if no cell was free, or it failed."""
        window, cells = self.get_window(), dict[int, int]()
        while len(cells) < FETCH_FRAMES and (frame := asked.next_ready_frame()) is not None:
            cell = window.take_cell_nowait()
            if cell is None:
                break
            asked.begin_fetch(frame)
            cells[frame] = cell
        if not cells:
            return False
        node, offered = self._nodes[home], self._homes.frames_of(home)
        try:
            fetch = fetch_frames(
                *(self._network, self._post, window, node, self._offer_name, self._manifest, cells, offered),
                functools.partial(self._receive_frame, home),
                functools.partial(self._end_fetch, home),
            )
        except (CkptError, OSError) as exc:
            self._give_up_home(home, str(exc))
            return False
        self._fetches_by_home.setdefault(home, set()).add(fetch)
        return True

    def _receive_frame(self, home: int, frame: int, cell: int) -> None:
        if self._closed:
            return
        asked = self._requests_by_home[home]
        asked.record_contact(time.monotonic())
        wanted = asked.end_fetch(frame)
        self.on_received(sorted(self._awaited_frames.pop(frame, ())) if wanted else [], cell)

    def _end_fetch(self, home: int, fetch: Fetch, left: list[int], error: BaseException | None) -> None:
        self._fetches_by_home[home].discard(fetch)
        if self._closed:
            return
        if error is not None:
            self._give_up_home(home, error_text(error))
        self.start_fetches()

    def _give_up_home(self, home: int, why: str) -> None:
        asked = self._requests_by_home[home]
        if asked.given_up:
            return
        lost = asked.give_up()
        if lost:
            log.warning("%d frames of %s are read here and not by their home: %s", len(lost), self._identity, why)
        for fetch in self._fetches_by_home.get(home, ()):
            fetch.cancel()
        self._hand_back(lost, why)

    def _hand_back(self, lost: list[int], why: str) -> None:
        frames = [frame for same in lost for frame in sorted(self._awaited_frames.pop(same, ()))]
        if frames and not self._closed:
            self.on_unavailable(frames, why)

    # -- small steps

    def _post(self, what: Callable[[], None]) -> None:
        self._post_unguarded(lambda: self.guard(what))

    def _call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._call_later_unguarded(delay_s, lambda: self.guard(what))

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
