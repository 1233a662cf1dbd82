"""The restore session of one node: gives a checkpoint's frames to the local ranks, each from the nearest source.

The sources, in order:
1. This node's memory: the rank gets the place of the frame, and maps the arena.
2. A peer (peer_source.py): the frame passes through a window of shared memory, once for all ranks here. A frame that
   only one rank wants goes to that rank directly (direct_stream.py).
3. The store, if no node's memory has the frame and the job has several nodes: one node reads each frame for all nodes
   (shared_read.py). A frame that its peers failed to give skips this source.
4. The store (store_source.py), through the window. The ranks read the files of a local folder themselves.

A cell of the window is reused after every rank that was given its frame has acknowledged it. The ranks verify each
frame; one that a rank finds damaged comes from the next source. If no source is left, the rank's fetch ends with an
error. Main thread only, except for threads that read and wait in `Window.wait_for_cell`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.net.progress import REPORT_INTERVAL_S, Progress
from ckpt.agent.restore.direct_stream import StreamPeer
from ckpt.agent.restore.store_source import StoreSource
from ckpt.agent.restore.window_cells import From, WindowCells
from ckpt.agent.runtime.memory_plan import WINDOW_BYTES
from ckpt.agent.runtime.workers import Workers, error_text
from ckpt.agent.snapshots.memory_checkpoint import Memory
from ckpt.errors import AgentError, DamagedData, MissingData, NewerFormat, NotFound, StorageError
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from ckpt.ipc.file_list import FileList
from ckpt.ipc.messages import Message
from ckpt.types import FRAMES_MAX, Identity

if TYPE_CHECKING:
    from ckpt.agent.restore.peer_source import PeerSource
    from ckpt.agent.restore.shared_read import SharedRead
    from ckpt.format.manifest import Record
    from ckpt.store.reader import FrameReader

log = logging.getLogger("ckpt")

BATCH_DELAY_S = 1.0  # the first rank's request waits so long for the others', so that frames are read once
FRAMES_PER_MESSAGE = 1024  # frames named in one message
_WINDOW_REGION = 1 << 20  # the window's region number; an arena's is its rank
_HOME_REGION_FIRST = 1 << 18  # the first region number of the memory into which this node reads for all nodes


@dataclass(slots=True)
class RankRequest:
    """One rank's request. `left`: frames not acknowledged as good. `whole`: frames that go into a tensor as one run.
    `shown_regions`: numbers of the arenas that the rank was shown. `home_frames`: frames given from this node's shared
    read. `files`: frames that the rank reads from the store's folder itself. `sources`: bytes received, by level."""

    receiver: StreamPeer
    pending_frames: set[int]
    contiguous_frames: set[int]
    shown_regions: set[int] = field(default_factory=set)
    home_frames: set[int] = field(default_factory=set)
    file_frames: set[int] = field(default_factory=set)
    bytes_by_level: dict[str, int] = field(default_factory=dict)


class RestoreSession:
    """The restore of one candidate to the `count` ranks of this node. `memory`: its frames in this node's memory, if
    any. `peers`: its frames in peers' memory. `open_record`: opens its record; None if the store has none.
    `fan`: the shared read of the job's nodes. `folder`: the path of the store if it is a local folder.
    `later(delay_s, what)`: a timer of the main thread; `post(what)`: runs on the main thread, from any thread."""

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        count: int,
        memory: Memory | None,
        open_record: Callable[[], FrameReader] | None,
        workers: Workers,
        later: Callable[[float, Callable[[], None]], None],
        post: Callable[[Callable[[], None]], None],
        window_bytes: int = WINDOW_BYTES,
        peers: PeerSource | None = None,
        fan: SharedRead | None = None,
        folder: str | None = None,
    ) -> None:
        self.identity = identity
        self.manifest = manifest
        self.memory = memory
        self._count = count
        self.record: Record | None = None  # set once the store's record is open
        self.bytes_by_level: dict[str, int] = {}  # bytes received by all ranks, by level
        self._lengths = manifest.frames["length"].astype(np.int64)
        self._cells = WindowCells(int(self._lengths.max(initial=0)), window_bytes, self._resume_sources)
        self._call_later = later
        self._waiting_requests: list[RankRequest] = []
        self._requests_by_receiver: dict[int, RankRequest] = {}  # by id of the receiver
        self._peer_source = peers
        if peers is not None:
            peers.get_window, peers.guard = self._cells.get_window, self._guard
            peers.on_received, peers.on_unavailable = self._receive_from_peer, self._handle_no_peer
        self.shared_read = fan
        if fan is not None:
            fan.get_window, fan.on_record_opened, fan.guard = self._cells.get_window, self._set_record, self._guard
            fan.on_read = self._serve_home_frames
            fan.on_received = self._receive_from_home
            fan.on_unavailable = self._handle_no_home
        self._receivers_from_peers: dict[int, set[int]] = {}  # frames expected from peers -> receivers
        self._receivers_from_homes: dict[int, set[int]] = {}  # frames expected from the shared read -> receivers
        self._receivers_from_store: dict[int, set[int]] = {}  # frames expected from the store -> receivers
        self._damaged_frames: set[int] = set()  # frames found damaged in this node's memory
        # Frames found damaged or missing at these sources.
        self._failed_by_source: dict[From, set[int]] = {From.PEER: set(), From.HOME: set(), From.FILE: set()}
        self._store_source = (
            StoreSource(manifest, open_record, workers, post, folder) if open_record is not None else None
        )
        if (store := self._store_source) is not None:
            store.get_window = self._cells.get_window
            store.on_record_opened = self._set_record
            store.guard = self._guard
            store.get_wanted_frames = self._receivers_from_store.keys
            store.on_received = self._receive_from_store
            store.release_cell = self._cells.free_cell
            store.on_unavailable, store.on_error = self._fail_frame, self._fail_store_requests
            store.on_files_listed, store.failed_file_frames = self._send_files, self._failed_by_source[From.FILE]
        self._closed = False
        self._progress = Progress()
        self._reported_progress: int | None = None  # progress count at the last look; None: no look is scheduled

    def request(self, receiver: StreamPeer, frames: Collection[int], whole: Collection[int] = ()) -> None:
        """A rank requests frames, by number in the manifest. `whole`: those of them that go into one of its tensors as
        one run. A new request replaces the rank's former one. Errors: AgentError for a number that does not exist."""
        wanted = set(frames)
        if wanted and not 0 <= min(wanted) <= max(wanted) < len(self._lengths):
            raise AgentError(f"a rank asked for a frame that {self.identity} does not have")
        self.drop_request(receiver)
        self._waiting_requests.append(RankRequest(receiver, wanted, wanted & set(whole)))
        if len(self._waiting_requests) == self._count:
            self._begin_requests()
        elif len(self._waiting_requests) == 1:
            first = self._waiting_requests[0]
            self._call_later(
                BATCH_DELAY_S, lambda: self._guard(self._begin_requests) if first in self._waiting_requests else None
            )

    def acknowledge_frames(self, receiver: StreamPeer, ok: Iterable[int], bad: Iterable[int]) -> None:
        """A rank acknowledges frames, verified or damaged. Damaged ones come again, from the next source."""
        asked = self._requests_by_receiver.get(id(receiver))
        if asked is None:
            return
        again: set[int] = set()
        for frame, good in [*((f, True) for f in ok), *((f, False) for f in bad)]:
            if frame not in asked.pending_frames:
                continue
            source = self._release_frame(frame, asked)
            read_here = source in (From.STORE, From.FILE) or (source is None and frame in asked.home_frames)
            self._progress.advance()
            if good:
                asked.pending_frames.discard(frame)
                level = "store" if read_here else "local" if source is None else "peer"
                for sources in (asked.bytes_by_level, self.bytes_by_level):
                    sources[level] = sources.get(level, 0) + int(self._lengths[frame])
            elif source is From.STORE:
                self._fail_request(asked, f"frame {frame} of {self.identity} arrived damaged from the store", {frame})
                return
            else:
                asked.home_frames.discard(frame)
                (
                    self._damaged_frames
                    if source is None and not read_here
                    else self._failed_by_source[source or From.HOME]
                ).add(frame)
                again.add(frame)
        self._request_nearest(asked, again)
        self._finish_if_complete(asked)

    def end_stream(self, receiver: StreamPeer, stream: int) -> None:
        """A rank has stopped reading from that direct stream."""
        if self._peer_source is not None:
            self._peer_source.direct_streams.end_stream(receiver, stream)

    def drop_request(self, receiver: StreamPeer) -> None:
        """Ends a rank's request: the rank is gone, done, or requests anew."""
        self._waiting_requests = [asked for asked in self._waiting_requests if asked.receiver is not receiver]
        if self._requests_by_receiver.pop(id(receiver), None) is None:
            return
        self._cells.end_all_reads(receiver)
        if self._peer_source is not None:
            self._peer_source.direct_streams.drop_receiver(receiver)
        for frame in list(self._receivers_from_store):
            self._remove_receiver(frame, id(receiver))
        for receivers in [*self._receivers_from_peers.values(), *self._receivers_from_homes.values()]:
            receivers.discard(id(receiver))

    def handle_disconnect(self, name: str) -> None:
        """Agent `name` has disconnected."""
        if self._peer_source is not None:
            self._peer_source.handle_disconnect(name)
        if self.shared_read is not None:
            self.shared_read.handle_disconnect(name)

    def close(self) -> None:
        """Ends the restore: closes all sources and the window. Ranks hear nothing more."""
        self._closed = True
        self._requests_by_receiver.clear()
        self._waiting_requests.clear()
        self._receivers_from_store.clear()
        self._receivers_from_peers.clear()
        self._receivers_from_homes.clear()
        if self._store_source is not None:
            self._store_source.close()
        if self.shared_read is not None:
            self.shared_read.close()
        if self._peer_source is not None:
            self._peer_source.close()
        self._cells.close()

    # -- inside

    def _guard(self, what: Callable[[], None]) -> None:
        """Runs `what`. An unexpected exception fails all requests, so that no rank waits for ever."""
        try:
            what()
        except Exception as exc:
            log.exception("the agent made a mistake in handing out %s", self.identity)
            for asked in [*self._waiting_requests, *self._requests_by_receiver.values()]:
                self._requests_by_receiver[id(asked.receiver)] = asked
                text = f"{self.identity} cannot be handed out: {type(exc).__name__}: {exc}"
                self._fail_request(asked, text, error=AgentError(text))  # The checkpoint itself may be good.

    def _begin_requests(self) -> None:
        batch, self._waiting_requests = self._waiting_requests, []
        if self._closed:
            return
        for asked in batch:
            self._requests_by_receiver[id(asked.receiver)] = asked
        wanted = Counter(
            itertools.chain.from_iterable(asked.pending_frames for asked in self._requests_by_receiver.values())
        )
        for asked in batch:
            asked.contiguous_frames = {frame for frame in asked.contiguous_frames if wanted[frame] == 1}
            self._request_nearest(asked, set(asked.pending_frames))
            self._finish_if_complete(asked)
        if self._reported_progress is None:
            self._reported_progress = self._progress.count
            self._call_later(REPORT_INTERVAL_S, self._report_progress)

    def _report_progress(self) -> None:
        """Tells waiting ranks, every REPORT_INTERVAL_S, that the restore advances: then a rank does not time out."""
        said, self._reported_progress = self._reported_progress, None
        if self._closed or not self._requests_by_receiver:
            return
        self._reported_progress = self._progress.count
        if self._reported_progress != said:
            for asked in self._requests_by_receiver.values():
                asked.receiver.send({"t": "progress"})
        self._call_later(REPORT_INTERVAL_S, self._report_progress)

    def _request_nearest(self, asked: RankRequest, frames: set[int]) -> None:
        """Requests each frame from the nearest source that is not known to lack it."""
        near = {frame for frame in frames if self._is_in_memory(frame)}
        if near and self.memory is not None:
            self._send_places(asked, near, self.memory)
        ready = {frame: offset for frame in frames - near if (offset := self._window_offset(frame)) is not None}
        rest, bad = frames - near - ready.keys(), self._failed_by_source
        far = {
            frame
            for frame in rest - bad[From.PEER]
            if self._peer_source is not None and self._peer_source.has_holder(frame)
        }
        rest -= far
        shared = self.shared_read.select_homed(rest - bad[From.HOME]) if self.shared_read is not None else set()
        straight, asked.contiguous_frames = far & asked.contiguous_frames, set()
        for frame in sorted(ready):  # already in the window, for earlier requests
            self._send_cell(asked, frame, ready[frame])
        self._request_from_store(asked, rest - shared)
        self._request_streams(asked, straight)
        self._request_from_peers(asked, far - straight)
        self._request_from_homes(asked, shared)

    def _is_in_memory(self, frame: int) -> bool:
        memory = self.memory
        return memory is not None and frame not in self._damaged_frames and int(memory.ranks[frame]) in memory.arenas

    def _window_offset(self, frame: int) -> int | None:
        """The frame's offset in the window; None if it is not there, or was found damaged from that source."""
        found = self._cells.find_frame(frame)
        return found[0] if found is not None and frame not in self._failed_by_source.get(found[1], ()) else None

    def _send_places(self, asked: RankRequest, frames: Iterable[int], memory: Memory, first_region: int = 0) -> None:
        """Tells the rank where these frames lie in arenas."""
        at: list[list[int]] = []
        for frame in sorted(frames):
            rank = int(memory.ranks[frame])
            region = first_region + rank
            _send_region(asked, region, memory.arenas[rank])
            at.append([frame, region, int(memory.offsets[frame]), int(self._lengths[frame])])
        for first in range(0, len(at), FRAMES_PER_MESSAGE):
            asked.receiver.send({"t": "frame-places", "places": at[first : first + FRAMES_PER_MESSAGE]})

    def _request_streams(self, asked: RankRequest, frames: set[int]) -> None:
        """Sends frames that only this rank wants as direct streams; what fails comes through the window."""

        def left(these: list[int]) -> None:
            if self._requests_by_receiver.get(id(asked.receiver)) is asked:
                self._request_from_peers(asked, set(these))

        if self._peer_source is not None and frames:
            self._peer_source.request_streams(asked.receiver, frames, left)

    def _request_from_peers(self, asked: RankRequest, frames: set[int]) -> None:
        peers = self._peer_source
        if peers is None or not frames:
            return
        for frame in frames:
            self._receivers_from_peers.setdefault(frame, set()).add(id(asked.receiver))
        peers.request_frames(frames)

    def _receive_from_peer(self, frame: int, offset: int) -> None:
        """A frame from a peer is in the window."""
        self._guard(lambda: self._receive_frames([frame], offset, From.PEER, self._receivers_from_peers))

    def _handle_no_peer(self, frames: list[int], why: str) -> None:
        """No peer gives these frames: they come from the store."""
        log.warning("%d frames of %s are not to be had from other nodes: %s", len(frames), self.identity, why)
        self._failed_by_source[From.PEER].update(frames)
        self._dispatch_frames(frames, self._receivers_from_peers, self._request_from_store)

    def _request_from_homes(self, asked: RankRequest, frames: set[int]) -> None:
        fan = self.shared_read
        if fan is None or not frames:
            return
        here = fan.select_read(frames)
        self._send_home_places(asked, here, fan)
        for frame in frames - here:
            self._receivers_from_homes.setdefault(frame, set()).add(id(asked.receiver))
        fan.request_frames(frames - here)

    def _send_home_places(self, asked: RankRequest, frames: Collection[int], fan: SharedRead) -> None:
        if frames:
            asked.home_frames.update(frames)
            self._send_places(asked, frames, fan.home_memory, _HOME_REGION_FIRST)

    def _serve_home_frames(self, frames: list[int]) -> None:
        """This node has read these frames for all nodes."""
        fan = self.shared_read
        assert fan is not None
        self._dispatch_frames(
            frames, self._receivers_from_homes, lambda asked, mine: self._send_home_places(asked, mine, fan)
        )

    def _receive_from_home(self, frames: list[int], offset: int) -> None:
        """Bytes that another node has read are in the window. All of `frames` have these bytes."""
        self._guard(lambda: self._receive_frames(frames, offset, From.HOME, self._receivers_from_homes))

    def _handle_no_home(self, frames: list[int], why: str) -> None:
        """The shared read does not give these frames: this node reads them itself."""
        log.info("%d frames of %s are read by this node itself: %s", len(frames), self.identity, why)
        self._failed_by_source[From.HOME].update(frames)
        self._dispatch_frames(frames, self._receivers_from_homes, self._request_from_store)

    def _dispatch_frames(
        self, frames: list[int], waiting: dict[int, set[int]], give: Callable[[RankRequest, set[int]], None]
    ) -> None:
        """Calls `give` for each rank in `waiting` for some of `frames`, and removes the frames from `waiting`."""
        for who in {who for frame in frames for who in waiting.get(frame, ())}:
            asked = self._requests_by_receiver.get(who)
            if asked is not None:
                mine = {frame for frame in frames if who in waiting.get(frame, ())}
                self._guard(functools.partial(give, asked, mine))
        for frame in frames:
            waiting.pop(frame, None)

    def _set_record(self, record: Record) -> None:
        self.record = record

    def _resume_sources(self) -> None:
        """A cell of the window became free."""
        if self._peer_source is not None:
            self._peer_source.start_fetches()
        if self.shared_read is not None:
            self.shared_read.start_fetches()

    def _request_from_store(self, asked: RankRequest, frames: set[int]) -> None:
        if not frames:
            return
        if self._store_source is None:
            what = f"frame {min(frames - self._unreached_frames or frames)} of {self.identity}"
            self._fail_request(asked, f"{what} is not to be had from memory and not in the store", frames)
            return
        for frame in frames:
            self._receivers_from_store.setdefault(frame, set()).add(id(asked.receiver))
        self._store_source.start_pass()

    def _send_files(self, files: FileList) -> None:
        """Has the ranks read these frames from the store's files themselves."""

        def give(asked: RankRequest, mine: set[int]) -> None:
            asked.file_frames.update(mine)
            asked.receiver.send({"t": "frame-files"}, (), files.select_frames(mine).encode())

        self._dispatch_frames(files.rows["frame"].tolist(), self._receivers_from_store, give)

    def _receive_from_store(self, frames: list[int], offset: int) -> None:
        self._receive_frames(frames, offset, From.STORE, self._receivers_from_store)

    def _fail_store_requests(self, error: BaseException) -> None:
        text = f"{self.identity} cannot be read from the store: {error_text(error)}"
        for asked in list(self._requests_by_receiver.values()):
            if frames := {
                frame for frame, receivers in self._receivers_from_store.items() if id(asked.receiver) in receivers
            }:
                self._fail_request(asked, text, frames, error)

    def _receive_frames(self, frames: list[int], offset: int, source: From, waiting: dict[int, set[int]]) -> None:
        """Bytes from `source` lie at `offset`; all of `frames` have them. `waiting`: frame -> waiting receivers."""
        if self._closed:
            return
        self._progress.advance()
        self._cells.add_cell(frames, offset, source)
        for frame in frames:
            for who in waiting.pop(frame, set()):
                if who in self._requests_by_receiver:
                    self._send_cell(self._requests_by_receiver[who], frame, offset)
        self._cells.free_if_unread(offset)

    def _send_cell(self, asked: RankRequest, frame: int, offset: int) -> None:
        self._cells.begin_read(frame, offset, asked.receiver)
        _send_region(asked, _WINDOW_REGION, self._cells.get_window().arena)
        asked.receiver.send(
            {"t": "frame-places", "places": [[frame, _WINDOW_REGION, offset, int(self._lengths[frame])]]}
        )

    def _release_frame(self, frame: int, asked: RankRequest) -> From | None:
        """A rank is done with a frame. Returns the frame's source; None: this node's memory."""
        if self._peer_source is not None and self._peer_source.direct_streams.acknowledge_frame(frame, asked.receiver):
            return From.PEER
        if frame in asked.file_frames:
            asked.file_frames.remove(frame)
            return From.FILE
        return self._cells.end_read(frame, asked.receiver)

    def _remove_receiver(self, frame: int, who: int) -> None:
        self._receivers_from_store[frame].discard(who)
        if not self._receivers_from_store[frame]:
            del self._receivers_from_store[frame]

    def _fail_frame(self, frame: int, error: Exception) -> None:
        for asked in [
            self._requests_by_receiver[who]
            for who in self._receivers_from_store.get(frame, ())
            if who in self._requests_by_receiver
        ]:
            self._fail_request(asked, f"frame {frame} of {self.identity} cannot be had: {error}", {frame}, error)

    @property
    def _unreached_frames(self) -> Set[int]:
        return self._peer_source.unreached_frames if self._peer_source is not None else set()

    def _fail_request(
        self, asked: RankRequest, message: str, frames: Set[int] = frozenset(), error: object = None
    ) -> None:
        """Ends a rank's request with an error. `frames`: those that no source gives. If unreached nodes may have all of
        them, the kind is not "damaged": the checkpoint may be good."""
        if self._requests_by_receiver.get(id(asked.receiver)) is asked:
            kind = kind_of(error)
            if kind == DamagedData.kind and frames and frames <= self._unreached_frames:
                kind, message = AgentError.kind, f"{message}; a node that has it could not be reached"
            self.drop_request(asked.receiver)
            fields = {
                "t": "fetch-ended",
                "ok": False,
                "message": message[:4000],
                "sources": asked.bytes_by_level,
                "kind": kind,
            }
            asked.receiver.send(fields)

    def _finish_if_complete(self, asked: RankRequest) -> None:
        if not asked.pending_frames and self._requests_by_receiver.get(id(asked.receiver)) is asked:
            self.drop_request(asked.receiver)
            asked.receiver.send({"t": "fetch-ended", "ok": True, "message": "", "sources": asked.bytes_by_level})


def _send_region(asked: RankRequest, region: int, arena: Arena) -> None:
    """Sends the rank the arena's descriptor, once, before any frame in it is named."""
    if region not in asked.shown_regions:
        asked.shown_regions.add(region)
        asked.receiver.send({"t": "frame-region", "region": region, "bytes": arena.size_bytes}, [arena.fd])


def kind_of(error: object) -> str:
    """The error kind of a failed fetch. Only "damaged" and "missing" exclude the candidate, for later restores by this
    agent, too."""
    if isinstance(error, NotFound):
        return MissingData.kind
    if isinstance(error, StorageError):
        return StorageError.kind
    if isinstance(error, NewerFormat | MissingData):
        return error.kind
    return AgentError.kind if isinstance(error, AgentError | OSError | MemoryError) else DamagedData.kind


def decode_request(message: Message) -> tuple[list[int], list[int]]:
    """Decodes a rank's `fetch` message: the frames it wants, and those it takes as one run. Errors: AgentError."""
    blobs = message.blobs
    if not 1 <= len(blobs) <= 2 or any(len(blob) % 4 or len(blob) > 4 * FRAMES_MAX for blob in blobs):
        raise AgentError("fetch comes with the numbers of frames")
    wanted, whole = (np.frombuffer(blob, dtype="<u4").tolist() for blob in (blobs[0], b"".join(blobs[1:])))
    return wanted, whole
