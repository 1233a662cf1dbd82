"""The restore session of one node: gives a checkpoint's frames to the local ranks, each from the nearest source.

The sources are asked in their order (sources.py). A frame that a source fails to give, or gives damaged, comes from the
next one. The ranks verify each frame. If no source is left, the rank's fetch ends with an error. Frames from peers and
the store pass through a window of shared memory; a cell of it is reused after every rank that was given its frame has
acknowledged it. Main thread only, except for threads that read and wait in `Window.wait_for_cell`.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.agent.net.progress import REPORT_INTERVAL_S, Progress
from ckpt.agent.restore.peer_fetch import PeerFetches
from ckpt.agent.restore.rank_request import AwaitedFrames, Origin, RankRequest, StreamPeer
from ckpt.agent.restore.window import Window
from ckpt.agent.runtime.connections import Loop
from ckpt.agent.runtime.coroutines import sleep, spawn
from ckpt.agent.runtime.workers import Workers, error_text
from ckpt.agent.snapshots.memory_checkpoint import Memory
from ckpt.errors import AgentError, DamagedData, MissingData, NewerFormat, NotFound, StorageError
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from ckpt.ipc.file_list import FileList
from ckpt.ipc.messages import Message
from ckpt.types import FRAMES_MAX, Identity

if TYPE_CHECKING:
    from ckpt.format.manifest import Record

log = logging.getLogger("ckpt")

BATCH_DELAY_S = 1.0  # the first rank's request waits so long for the others', so that frames are read once
FRAMES_PER_MESSAGE = 1024  # frames named in one message
_WINDOW_REGION = 1 << 20  # the window's region number; an arena's is its rank


class FrameSource:
    """A source of frames. `number`: its place in the session's order. A frame is awaited from one source at a time.
    Main thread only."""

    session: RestoreSession
    number: int

    def begin(self, session: RestoreSession, number: int) -> None:
        """The session takes the source. Nothing is called before."""
        self.session, self.number = session, number

    def select(self, frames: set[int], asked: RankRequest) -> set[int]:
        """Those of the frames that this source may have for the rank."""
        raise NotImplementedError

    def request(self, frames: set[int], asked: RankRequest) -> None:
        """Requests frames that `select` returned. Each one is received, given or failed, in this call or later."""
        raise NotImplementedError

    def drop_receiver(self, receiver: StreamPeer) -> None:
        """A rank is gone, done, or requests anew."""

    def end_stream(self, receiver: StreamPeer, number: int) -> None:
        """A rank has stopped reading from that direct stream."""

    def handle_disconnect(self, name: str) -> None:
        """Agent `name` has disconnected."""

    def close(self) -> None:
        """The restore is over."""


class RestoreSession:
    """The restore of one candidate to the `count` ranks of this node. `sources`: in order of preference."""

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        count: int,
        sources: Sequence[FrameSource],
        workers: Workers,
        loop: Loop,
        window_bytes: int,
    ) -> None:
        self.identity = identity
        self.manifest = manifest
        self.workers = workers
        self.record: Record | None = None  # its record, if the start has read it
        self.bytes_by_level: dict[str, int] = {}  # bytes received by all ranks, by level
        self.unreached_frames: set[int] = set()  # frames that a node did not give, though it may have them
        self.is_closed = False
        self._count, self._loop = count, loop
        largest_bytes = int(manifest.frames["length"].max(initial=0))
        self.window = Window(largest_bytes, window_bytes, lambda: self.fetches.start())
        self.fetches = PeerFetches(manifest, self.window, self.post)
        self.sources = list(sources)
        for number, source in enumerate(self.sources):
            source.begin(self, number)
        self._requests_by_receiver: dict[int, RankRequest] = {}  # by id of the receiver
        self._awaited = AwaitedFrames()
        self._progress = Progress()

    def request(self, receiver: StreamPeer, frames: Collection[int], whole: Collection[int] = ()) -> None:
        """A rank requests frames, by number in the manifest. `whole`: those of them that go into one of its tensors as
        one run. A new request replaces the rank's former one. Errors: AgentError for a number that does not exist."""
        wanted = set(frames)
        if wanted and not 0 <= min(wanted) <= max(wanted) < len(self.manifest.frames):
            raise AgentError(f"a rank asked for a frame that {self.identity} does not have")
        self.drop_request(receiver)
        asked = self._requests_by_receiver[id(receiver)] = RankRequest(receiver, wanted, wanted & set(whole))
        if len(self._waiting_requests) == self._count:
            self._begin_requests()
        else:
            self.call_later(BATCH_DELAY_S, lambda: self._begin_requests() if asked in self._waiting_requests else None)

    def handle_received(self, receiver: StreamPeer, fields: Mapping[str, Any]) -> None:
        """Handles a rank's message `frames-received`. `stream`: a direct stream that the rank has stopped reading."""
        ok, bad = ([int(number) for number in fields[name]] for name in ("ok", "bad"))
        self.acknowledge_frames(receiver, ok, bad)
        if fields.get("stream") is not None:
            stream = int(fields["stream"])
            for source in self.sources:
                source.end_stream(receiver, stream)

    def acknowledge_frames(self, receiver: StreamPeer, ok: Iterable[int], bad: Collection[int]) -> None:
        """A rank acknowledges frames, verified or damaged. Damaged ones come again, from the next source."""
        asked = self._requests_by_receiver.get(id(receiver))
        if asked is None or not asked.has_begun:
            return
        for frame in ok:
            origin = self._take_back(asked, frame)
            if origin is not None:
                asked.pending_frames.discard(frame)
                for sources in (asked.bytes_by_level, self.bytes_by_level):
                    sources[origin.level] = sources.get(origin.level, 0) + self._length(frame)
        self.reject(asked, bad, DamagedData("it arrived damaged"))
        if not asked.pending_frames:
            self._end_request(asked, "", ok=True)

    def drop_request(self, receiver: StreamPeer) -> None:
        """Ends a rank's request: the rank is gone, done, or requests anew."""
        asked = self._requests_by_receiver.pop(id(receiver), None)
        if asked is None:
            return
        self._awaited.drop(asked)
        given, asked.given_frames = asked.given_frames, {}
        for origin in given.values():
            if origin.cell is not None:
                self.window.end_read(origin.cell)
        for source in self.sources:
            source.drop_receiver(receiver)

    def handle_disconnect(self, name: str) -> None:
        """Agent `name` has disconnected."""
        # The last first: what one gives up is asked of sources that know it already.
        for source in reversed(self.sources):
            source.handle_disconnect(name)

    def close(self) -> None:
        """Ends the restore: closes all sources and the window. Ranks hear nothing more."""
        self.is_closed = True
        self._requests_by_receiver.clear()
        for source in self.sources:
            source.close()
        self.fetches.close()
        self.window.close()

    # -- what sources call

    def post(self, what: Callable[[], None]) -> None:
        """Runs `what` on the main thread, guarded. Any thread."""
        self._loop.post(lambda: self.guard(what))

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Runs `what` after a delay, guarded."""
        self._loop.call_later(delay_s, lambda: self.guard(what))

    def guard(self, what: Callable[[], None]) -> None:
        """Runs `what` unless the restore is over. An unexpected exception fails all requests, so that no rank waits for
        ever."""
        if self.is_closed:
            return
        try:
            what()
        except Exception as exc:
            log.exception("the agent made a mistake in handing out %s", self.identity)
            for asked in list(self._requests_by_receiver.values()):
                text = f"{self.identity} cannot be handed out: {type(exc).__name__}: {exc}"
                self._fail_request(asked, text, error=AgentError(text))  # The checkpoint itself may be good.

    def receive(self, origin: Origin, frames: Collection[int], offset: int) -> None:
        """Bytes that all of `frames` have lie in the window's cell at `offset`, which is the session's now."""
        self._progress.advance()
        for asked, mine in self._awaited.take(origin.number, frames).items():
            _send_region(asked, _WINDOW_REGION, self.window.arena)
            for frame in mine:
                asked.given_frames[frame] = origin._replace(cell=offset)
                self.window.begin_read(offset)
            places = [[frame, _WINDOW_REGION, offset, self._length(frame)] for frame in sorted(mine)]
            asked.receiver.send({"t": "frame-places", "places": places})
        self.window.free_if_unread(offset)

    def receive_places(self, origin: Origin, frames: Collection[int], memory: Memory, first_region: int = 0) -> None:
        """The frames lie in that memory until the restore ends. `first_region`: the number of rank 0's arena."""
        for asked, mine in self._awaited.take(origin.number, frames).items():
            at: list[list[int]] = []
            for frame in sorted(mine):
                rank = int(memory.ranks[frame])
                _send_region(asked, first_region + rank, memory.arenas[rank])
                at.append([frame, first_region + rank, int(memory.offsets[frame]), self._length(frame)])
            asked.given_frames.update(dict.fromkeys(mine, origin))
            for first in range(0, len(at), FRAMES_PER_MESSAGE):
                asked.receiver.send({"t": "frame-places", "places": at[first : first + FRAMES_PER_MESSAGE]})

    def receive_files(self, origin: Origin, files: FileList) -> None:
        """The ranks can read these files themselves."""
        for asked, mine in self._awaited.take(origin.number, files.rows["frame"].tolist()).items():
            asked.given_frames.update(dict.fromkeys(mine, origin))
            asked.receiver.send({"t": "frame-files"}, (), files.select_frames(mine).encode())

    def give(self, origin: Origin, asked: RankRequest, frames: Collection[int]) -> None:
        """The source gives these frames to that rank itself. `reject` takes back those that it did not."""
        self._awaited.take(origin.number, frames)
        asked.given_frames.update(dict.fromkeys(frames, origin))

    def reject(self, asked: RankRequest, frames: Collection[int], error: BaseException) -> None:
        """Frames that were given to the rank have not come right: they come from the next source."""
        again: set[int] = set()
        for frame in frames:
            origin = self._take_back(asked, frame)
            if origin is not None:
                self._awaited.skip_source(frame, origin.number)
                again.add(frame)
        self._request_nearest(asked, again, error)

    def fail(self, number: int, frames: Collection[int], error: BaseException) -> None:
        """Source `number` does not give those of these frames that are still awaited from it."""
        lost = self._awaited.of_source(number, frames)
        if lost:
            log.info("%d frames of %s come from the next source: %s", len(lost), self.identity, error_text(error))
        for frame in lost:
            self._awaited.skip_source(frame, number)
        for asked, mine in self._awaited.take(number, lost).items():
            self._request_nearest(asked, mine, error)
        self.fetches.start()

    # -- inside

    @property
    def _waiting_requests(self) -> list[RankRequest]:
        return [asked for asked in self._requests_by_receiver.values() if not asked.has_begun]

    def _begin_requests(self) -> None:
        if self.is_closed:
            return
        batch = self._waiting_requests
        wanted = Counter(
            itertools.chain.from_iterable(asked.pending_frames for asked in self._requests_by_receiver.values())
        )
        for asked in batch:
            asked.has_begun = True
        for asked in batch:
            asked.contiguous_frames = {frame for frame in asked.contiguous_frames if wanted[frame] == 1}
            self._request_nearest(asked, set(asked.pending_frames))
            if not asked.pending_frames:
                self._end_request(asked, "", ok=True)
            spawn(self._report_progress(asked))

    async def _report_progress(self, asked: RankRequest) -> None:
        """Tells a waiting rank, every REPORT_INTERVAL_S, that the restore advances: then the rank does not time out."""
        said = self._progress.count
        await sleep(self.call_later, REPORT_INTERVAL_S)
        while self._is_current(asked):
            if self._progress.count != said:
                said = self._progress.count
                asked.receiver.send({"t": "progress"})
            await sleep(self.call_later, REPORT_INTERVAL_S)

    def _request_nearest(self, asked: RankRequest, frames: set[int], error: BaseException | None = None) -> None:
        """Requests each frame from the nearest source that has not failed to give it. `error`: of the last source that
        has."""
        if not self._is_current(asked):
            return
        rest = self._awaited.join(frames, asked)
        for source in self.sources:
            able = self._awaited.possible_frames(rest, source.number)
            if not able or not self._is_current(asked):
                continue
            taken = source.select(able, asked)
            rest -= taken
            self._awaited.add(taken, source.number, asked)
            if taken:
                source.request(taken, asked)
        if rest:
            why = (
                f"cannot be had: {error_text(error)}" if error else "is not to be had from memory and not in the store"
            )
            what = f"frame {min(rest - self.unreached_frames or rest)} of {self.identity}"
            self._fail_request(asked, f"{what} {why}", rest, error)

    def _take_back(self, asked: RankRequest, frame: int) -> Origin | None:
        """The rank is done with a frame. Returns its origin; None if the rank was not given it."""
        origin = asked.given_frames.pop(frame, None)
        if origin is not None:
            self._progress.advance()
            if origin.cell is not None:
                self.window.end_read(origin.cell)
        return origin

    def _length(self, frame: int) -> int:
        return int(self.manifest.frames["length"][frame])

    def _is_current(self, asked: RankRequest) -> bool:
        return self._requests_by_receiver.get(id(asked.receiver)) is asked

    def _fail_request(
        self, asked: RankRequest, message: str, frames: Set[int] = frozenset(), error: object = None
    ) -> None:
        """Ends a rank's request with an error. `frames`: those that no source gives. If unreached nodes may have all of
        them, the kind is not "damaged": the checkpoint may be good."""
        kind = kind_of(error)
        if kind in (DamagedData.kind, AgentError.kind) and frames and frames <= self.unreached_frames:
            kind, message = AgentError.kind, f"{message}; a node that has it could not be reached"
        self._end_request(asked, message[:4000], ok=False, kind=kind)

    def _end_request(self, asked: RankRequest, message: str, **fields: object) -> None:
        if self._is_current(asked):
            self.drop_request(asked.receiver)
            asked.receiver.send({"t": "fetch-ended", **fields, "message": message, "sources": asked.bytes_by_level})


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
