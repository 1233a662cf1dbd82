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
error. Main thread only, except for threads that read and wait in `Window.cell`.
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

from ckpt.agent.net.progress import SAY_S, Progress
from ckpt.agent.restore.direct_stream import StreamPeer
from ckpt.agent.restore.store_source import StoreSource
from ckpt.agent.restore.window_cells import From, WindowCells
from ckpt.agent.runtime.memory_plan import WINDOW_BYTES
from ckpt.agent.runtime.workers import Workers, told
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

TOGETHER_S = 1.0  # the first rank's request waits so long for the others', so that frames are read once
AT_ONCE = 1024  # frames named in one message
_WINDOW = 1 << 20  # the window's region number; an arena's is its rank
_HOME = 1 << 18  # the first region number of the memory into which this node reads for all nodes


@dataclass(slots=True)
class RankRequest:
    """One rank's request. `left`: frames not acknowledged as good. `whole`: frames that go into a tensor as one run.
    `regions`: numbers of the arenas that the rank was shown. `home`: frames given from this node's shared read.
    `files`: frames that the rank reads from the store's folder itself. `sources`: bytes received, by level."""

    receiver: StreamPeer
    left: set[int]
    whole: set[int]
    regions: set[int] = field(default_factory=set)
    home: set[int] = field(default_factory=set)
    files: set[int] = field(default_factory=set)
    sources: dict[str, int] = field(default_factory=dict)


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
        bulk: Workers,
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
        self.sources: dict[str, int] = {}  # bytes received by all ranks, by level
        self._lengths = manifest.frames["length"].astype(np.int64)
        self._cells = WindowCells(int(self._lengths.max(initial=0)), window_bytes, self._pump)
        self._later = later
        self._waiting: list[RankRequest] = []
        self._asked: dict[int, RankRequest] = {}  # by id of the receiver
        self._peers = peers
        if peers is not None:
            peers.window, peers.guard = self._cells.window, self._guard
            peers.landed, peers.lacking = self._came, self._lacks
        self.fan = fan
        if fan is not None:
            fan.window, fan.opened, fan.guard = self._cells.window, self._opened, self._guard
            fan.read, fan.landed, fan.lacking = self._home_read, self._fanned, self._no_home
        self._coming: dict[int, set[int]] = {}  # frames expected from peers -> receivers
        self._shared: dict[int, set[int]] = {}  # frames expected from the shared read -> receivers
        self._wanted: dict[int, set[int]] = {}  # frames expected from the store -> receivers
        self._bad: set[int] = set()  # frames found damaged in this node's memory
        # Frames found damaged or missing at these sources.
        self._bad_from: dict[From, set[int]] = {From.PEER: set(), From.HOME: set(), From.FILE: set()}
        self._store = StoreSource(manifest, open_record, bulk, post, folder) if open_record is not None else None
        if (store := self._store) is not None:
            store.window, store.opened, store.guard = self._cells.window, self._opened, self._guard
            store.wanted, store.landed, store.free = self._wanted.keys, self._was_read, self._cells.free
            store.lacking, store.unreadable = self._lacking, self._unreadable
            store.named, store.misread = self._named, self._bad_from[From.FILE]
        self._closed = False
        self._progress = Progress()
        self._said: int | None = None  # progress count at the last look; None: no look is scheduled

    def request(self, receiver: StreamPeer, frames: Collection[int], whole: Collection[int] = ()) -> None:
        """A rank requests frames, by number in the manifest. `whole`: those of them that go into one of its tensors as
        one run. A new request replaces the rank's former one. Errors: AgentError for a number that does not exist."""
        wanted = set(frames)
        if wanted and not 0 <= min(wanted) <= max(wanted) < len(self._lengths):
            raise AgentError(f"a rank asked for a frame that {self.identity} does not have")
        self.drop(receiver)
        self._waiting.append(RankRequest(receiver, wanted, wanted & set(whole)))
        if len(self._waiting) == self._count:
            self._begin()
        elif len(self._waiting) == 1:
            first = self._waiting[0]
            self._later(TOGETHER_S, lambda: self._guard(self._begin) if first in self._waiting else None)

    def got(self, receiver: StreamPeer, ok: Iterable[int], bad: Iterable[int]) -> None:
        """A rank acknowledges frames, verified or damaged. Damaged ones come again, from the next source."""
        asked = self._asked.get(id(receiver))
        if asked is None:
            return
        again: set[int] = set()
        for frame, good in [*((f, True) for f in ok), *((f, False) for f in bad)]:
            if frame not in asked.left:
                continue
            source = self._release(frame, asked)
            read_here = source in (From.STORE, From.FILE) or (source is None and frame in asked.home)
            self._progress.moved()
            if good:
                asked.left.discard(frame)
                level = "store" if read_here else "local" if source is None else "peer"
                for sources in (asked.sources, self.sources):
                    sources[level] = sources.get(level, 0) + int(self._lengths[frame])
            elif source is From.STORE:
                self._fail(asked, f"frame {frame} of {self.identity} arrived damaged from the store", {frame})
                return
            else:
                asked.home.discard(frame)
                (self._bad if source is None and not read_here else self._bad_from[source or From.HOME]).add(frame)
                again.add(frame)
        self._send(asked, again)
        self._finish(asked)

    def streamed(self, receiver: StreamPeer, stream: int) -> None:
        """A rank has stopped reading from that direct stream."""
        if self._peers is not None:
            self._peers.straight.ended(receiver, stream)

    def drop(self, receiver: StreamPeer) -> None:
        """Ends a rank's request: the rank is gone, done, or requests anew."""
        self._waiting = [asked for asked in self._waiting if asked.receiver is not receiver]
        if self._asked.pop(id(receiver), None) is None:
            return
        self._cells.drop(receiver)
        if self._peers is not None:
            self._peers.straight.drop(receiver)
        for frame in list(self._wanted):
            self._unwant(frame, id(receiver))
        for receivers in [*self._coming.values(), *self._shared.values()]:
            receivers.discard(id(receiver))

    def source_gone(self, name: str) -> None:
        """Agent `name` has disconnected."""
        if self._peers is not None:
            self._peers.source_gone(name)
        if self.fan is not None:
            self.fan.source_gone(name)

    def close(self) -> None:
        """Ends the restore: closes all sources and the window. Ranks hear nothing more."""
        self._closed = True
        self._asked.clear()
        self._waiting.clear()
        self._wanted.clear()
        self._coming.clear()
        self._shared.clear()
        if self._store is not None:
            self._store.close()
        if self.fan is not None:
            self.fan.close()
        if self._peers is not None:
            self._peers.close()
        self._cells.close()

    # -- inside

    def _guard(self, what: Callable[[], None]) -> None:
        """Runs `what`. An unexpected exception fails all requests, so that no rank waits for ever."""
        try:
            what()
        except Exception as exc:
            log.exception("the agent made a mistake in handing out %s", self.identity)
            for asked in [*self._waiting, *self._asked.values()]:
                self._asked[id(asked.receiver)] = asked
                text = f"{self.identity} cannot be handed out: {type(exc).__name__}: {exc}"
                self._fail(asked, text, error=AgentError(text))  # The checkpoint itself may be good.

    def _begin(self) -> None:
        batch, self._waiting = self._waiting, []
        if self._closed:
            return
        for asked in batch:
            self._asked[id(asked.receiver)] = asked
        wanted = Counter(itertools.chain.from_iterable(asked.left for asked in self._asked.values()))
        for asked in batch:
            asked.whole = {frame for frame in asked.whole if wanted[frame] == 1}
            self._send(asked, set(asked.left))
            self._finish(asked)
        if self._said is None:
            self._said = self._progress.count
            self._later(SAY_S, self._say_moving)

    def _say_moving(self) -> None:
        """Tells waiting ranks, every SAY_S, that the restore advances: then a rank does not time out."""
        said, self._said = self._said, None
        if self._closed or not self._asked:
            return
        self._said = self._progress.count
        if self._said != said:
            for asked in self._asked.values():
                asked.receiver.send({"t": "moving"})
        self._later(SAY_S, self._say_moving)

    def _send(self, asked: RankRequest, frames: set[int]) -> None:
        """Requests each frame from the nearest source that is not known to lack it."""
        near = {frame for frame in frames if self._is_near(frame)}
        if near and self.memory is not None:
            self._name_frames(asked, near, self.memory)
        ready = {frame: offset for frame in frames - near if (offset := self._ready(frame)) is not None}
        rest, bad = frames - near - ready.keys(), self._bad_from
        far = {frame for frame in rest - bad[From.PEER] if self._peers is not None and self._peers.can_have(frame)}
        rest -= far
        shared = self.fan.has_homes(rest - bad[From.HOME]) if self.fan is not None else set()
        straight, asked.whole = far & asked.whole, set()
        for frame in sorted(ready):  # already in the window, for earlier requests
            self._name_cell(asked, frame, ready[frame])
        self._from_store(asked, rest - shared)
        self._straight(asked, straight)
        self._from_peers(asked, far - straight)
        self._from_homes(asked, shared)

    def _is_near(self, frame: int) -> bool:
        memory = self.memory
        return memory is not None and frame not in self._bad and int(memory.ranks[frame]) in memory.arenas

    def _ready(self, frame: int) -> int | None:
        """The frame's offset in the window; None if it is not there, or was found damaged from that source."""
        found = self._cells.find(frame)
        return found[0] if found is not None and frame not in self._bad_from.get(found[1], ()) else None

    def _name_frames(self, asked: RankRequest, frames: Iterable[int], memory: Memory, first_region: int = 0) -> None:
        """Tells the rank where these frames lie in arenas."""
        at: list[list[int]] = []
        for frame in sorted(frames):
            rank = int(memory.ranks[frame])
            region = first_region + rank
            _show(asked, region, memory.arenas[rank])
            at.append([frame, region, int(memory.offsets[frame]), int(self._lengths[frame])])
        for first in range(0, len(at), AT_ONCE):
            asked.receiver.send({"t": "frames", "at": at[first : first + AT_ONCE]})

    def _straight(self, asked: RankRequest, frames: set[int]) -> None:
        """Sends frames that only this rank wants as direct streams; what fails comes through the window."""

        def left(these: list[int]) -> None:
            if self._asked.get(id(asked.receiver)) is asked:
                self._from_peers(asked, set(these))

        if self._peers is not None and frames:
            self._peers.stream(asked.receiver, frames, left)

    def _from_peers(self, asked: RankRequest, frames: set[int]) -> None:
        peers = self._peers
        if peers is None or not frames:
            return
        for frame in frames:
            self._coming.setdefault(frame, set()).add(id(asked.receiver))
        peers.want(frames)

    def _came(self, frame: int, offset: int) -> None:
        """A frame from a peer is in the window."""
        self._guard(lambda: self._arrived([frame], offset, From.PEER, self._coming))

    def _lacks(self, frames: list[int], why: str) -> None:
        """No peer gives these frames: they come from the store."""
        log.warning("%d frames of %s are not to be had from other nodes: %s", len(frames), self.identity, why)
        self._bad_from[From.PEER].update(frames)
        self._hand_on(frames, self._coming, self._from_store)

    def _from_homes(self, asked: RankRequest, frames: set[int]) -> None:
        fan = self.fan
        if fan is None or not frames:
            return
        here = fan.here(frames)
        self._name_home(asked, here, fan)
        for frame in frames - here:
            self._shared.setdefault(frame, set()).add(id(asked.receiver))
        fan.want(frames - here)

    def _name_home(self, asked: RankRequest, frames: Collection[int], fan: SharedRead) -> None:
        if frames:
            asked.home.update(frames)
            self._name_frames(asked, frames, fan.memory, _HOME)

    def _home_read(self, frames: list[int]) -> None:
        """This node has read these frames for all nodes."""
        fan = self.fan
        assert fan is not None
        self._hand_on(frames, self._shared, lambda asked, mine: self._name_home(asked, mine, fan))

    def _fanned(self, frames: list[int], offset: int) -> None:
        """Bytes that another node has read are in the window. All of `frames` have these bytes."""
        self._guard(lambda: self._arrived(frames, offset, From.HOME, self._shared))

    def _no_home(self, frames: list[int], why: str) -> None:
        """The shared read does not give these frames: this node reads them itself."""
        log.info("%d frames of %s are read by this node itself: %s", len(frames), self.identity, why)
        self._bad_from[From.HOME].update(frames)
        self._hand_on(frames, self._shared, self._from_store)

    def _hand_on(
        self, frames: list[int], waiting: dict[int, set[int]], give: Callable[[RankRequest, set[int]], None]
    ) -> None:
        """Calls `give` for each rank in `waiting` for some of `frames`, and removes the frames from `waiting`."""
        for who in {who for frame in frames for who in waiting.get(frame, ())}:
            asked = self._asked.get(who)
            if asked is not None:
                mine = {frame for frame in frames if who in waiting.get(frame, ())}
                self._guard(functools.partial(give, asked, mine))
        for frame in frames:
            waiting.pop(frame, None)

    def _opened(self, record: Record) -> None:
        self.record = record

    def _pump(self) -> None:
        """A cell of the window became free."""
        if self._peers is not None:
            self._peers.pump()
        if self.fan is not None:
            self.fan.pump()

    def _from_store(self, asked: RankRequest, frames: set[int]) -> None:
        if not frames:
            return
        if self._store is None:
            what = f"frame {min(frames - self._unreached or frames)} of {self.identity}"
            self._fail(asked, f"{what} is not to be had from memory and not in the store", frames)
            return
        for frame in frames:
            self._wanted.setdefault(frame, set()).add(id(asked.receiver))
        self._store.pump()

    def _named(self, files: FileList) -> None:
        """Has the ranks read these frames from the store's files themselves."""

        def give(asked: RankRequest, mine: set[int]) -> None:
            asked.files.update(mine)
            asked.receiver.send({"t": "files"}, (), files.only(mine).blobs())

        self._hand_on(files.rows["frame"].tolist(), self._wanted, give)

    def _was_read(self, frames: list[int], offset: int) -> None:
        self._arrived(frames, offset, From.STORE, self._wanted)

    def _unreadable(self, error: BaseException) -> None:
        text = f"{self.identity} cannot be read from the store: {told(error)}"
        for asked in list(self._asked.values()):
            if frames := {frame for frame, receivers in self._wanted.items() if id(asked.receiver) in receivers}:
                self._fail(asked, text, frames, error)

    def _arrived(self, frames: list[int], offset: int, source: From, waiting: dict[int, set[int]]) -> None:
        """Bytes from `source` lie at `offset`; all of `frames` have them. `waiting`: frame -> waiting receivers."""
        if self._closed:
            return
        self._progress.moved()
        self._cells.put(frames, offset, source)
        for frame in frames:
            for who in waiting.pop(frame, set()):
                if who in self._asked:
                    self._name_cell(self._asked[who], frame, offset)
        self._cells.let_go(offset)

    def _name_cell(self, asked: RankRequest, frame: int, offset: int) -> None:
        self._cells.give(frame, offset, asked.receiver)
        _show(asked, _WINDOW, self._cells.window().arena)
        asked.receiver.send({"t": "frames", "at": [[frame, _WINDOW, offset, int(self._lengths[frame])]]})

    def _release(self, frame: int, asked: RankRequest) -> From | None:
        """A rank is done with a frame. Returns the frame's source; None: this node's memory."""
        if self._peers is not None and self._peers.straight.has_come(frame, asked.receiver):
            return From.PEER
        if frame in asked.files:
            asked.files.remove(frame)
            return From.FILE
        return self._cells.take_back(frame, asked.receiver)

    def _unwant(self, frame: int, who: int) -> None:
        self._wanted[frame].discard(who)
        if not self._wanted[frame]:
            del self._wanted[frame]

    def _lacking(self, frame: int, error: Exception) -> None:
        for asked in [self._asked[who] for who in self._wanted.get(frame, ()) if who in self._asked]:
            self._fail(asked, f"frame {frame} of {self.identity} cannot be had: {error}", {frame}, error)

    @property
    def _unreached(self) -> Set[int]:
        return self._peers.unreached if self._peers is not None else set()

    def _fail(self, asked: RankRequest, message: str, frames: Set[int] = frozenset(), error: object = None) -> None:
        """Ends a rank's request with an error. `frames`: those that no source gives. If unreached nodes may have all of
        them, the kind is not "damaged": the checkpoint may be good."""
        if self._asked.get(id(asked.receiver)) is asked:
            kind = kind_of(error)
            if kind == DamagedData.kind and frames and frames <= self._unreached:
                kind, message = AgentError.kind, f"{message}; a node that has it could not be reached"
            self.drop(asked.receiver)
            fields = {
                "t": "fetched",
                "ok": False,
                "message": message[:4000],
                "sources": asked.sources,
                "kind": kind,
            }
            asked.receiver.send(fields)

    def _finish(self, asked: RankRequest) -> None:
        if not asked.left and self._asked.get(id(asked.receiver)) is asked:
            self.drop(asked.receiver)
            asked.receiver.send({"t": "fetched", "ok": True, "message": "", "sources": asked.sources})


def _show(asked: RankRequest, region: int, arena: Arena) -> None:
    """Sends the rank the arena's descriptor, once, before any frame in it is named."""
    if region not in asked.regions:
        asked.regions.add(region)
        asked.receiver.send({"t": "region", "region": region, "bytes": arena.bytes}, [arena.fd])


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


def frames_asked(message: Message) -> tuple[list[int], list[int]]:
    """Decodes a rank's `fetch` message: the frames it wants, and those it takes as one run. Errors: AgentError."""
    blobs = message.blobs
    if not 1 <= len(blobs) <= 2 or any(len(blob) % 4 or len(blob) > 4 * FRAMES_MAX for blob in blobs):
        raise AgentError("fetch comes with the numbers of frames")
    wanted, whole = (np.frombuffer(blob, dtype="<u4").tolist() for blob in (blobs[0], b"".join(blobs[1:])))
    return wanted, whole
