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

from ckpt.agent.net.transport import Fetch
from ckpt.agent.restore.peer_fetch import pull
from ckpt.agent.restore.shared_read_state import Given, HomeRequest
from ckpt.agent.restore.store_source import same_frames
from ckpt.agent.restore.window import Window
from ckpt.agent.runtime.workers import Lane, Workers, failure, told
from ckpt.agent.snapshots.manifest_gather import placed
from ckpt.agent.snapshots.memory_checkpoint import Near
from ckpt.errors import AgentError, CkptError
from ckpt.events import Event
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from ckpt.layout.read_sharding import Numbers, homes
from ckpt.types import HERE, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.format.manifest import Record
    from ckpt.ipc.messages import Message
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.reader import FrameReader

log = logging.getLogger("ckpt")

PATIENCE_S = 20.0  # a home that was silent for so long is given up
LOOK_S = 1.0  # between looks for silent homes
AGAIN_S = 0.2  # until a home that has not begun its restore is asked again
TELL_S = 0.02  # frames read within so long are announced together
TRIES = 6  # times that a home is asked again after its connection has ended
FETCH_FRAMES = 16  # in one transfer
FETCHES = 4  # transfers at a time, divided among the homes; at least one from each
FETCHES_MAX = 16  # transfers at a time from all homes
DIALS_MAX = 32  # connections to homes being made at a time


class SharedRead:
    """One node's side of the shared read. Its RestoreSession sets `window` and the callbacks:

    `read(frames)`: these frames lie in `memory` now. `landed(frames, offset)`: their bytes are in the window's cell at
    that offset, which the session then owns. `lacking(frames, why)`: their home does not give them. `opened(record)`:
    the record was read. `guard(what)`: runs `what`, and reports exceptions, since ranks wait."""

    def __init__(
        self,
        identity: Identity,
        epoch: Epoch,
        manifest: Manifest,
        nodes: Sequence[NodeAt],
        network: PeerNetwork,
        bulk: Workers,
        later: Callable[[float, Callable[[], None]], None],
        post: Callable[[Callable[[], None]], None],
        open_record: Callable[[], FrameReader],
        room: Callable[[], int],
        tell: Callable[[Event], None],
        only: Numbers | None = None,
    ) -> None:
        """`nodes`: all nodes of the job, in the same order on each. `room`: bytes that this node may use for the shared
        memory until all ranks have restored. `tell`: emits an event. `only`: the frames to share; None: all."""
        self.window: Callable[[], Window]
        self.read: Callable[[list[int]], None] = lambda frames: None
        self.landed: Callable[[list[int], int], None] = lambda frames, offset: None
        self.lacking: Callable[[list[int], str], None] = lambda frames, why: None
        self.opened: Callable[[Record], None] = lambda record: None
        self.guard: Callable[[Callable[[], None]], None] = lambda what: what()
        self._identity, self._epoch, self._manifest = identity, epoch, manifest
        self._nodes, self._network = list(nodes), network
        self._bulk, self._open_record = bulk, open_record
        self._room, self._tell_ranks, self._told = room, tell, False
        self._run_later, self._run_soon = later, post
        self._me = next(number for number, node in enumerate(nodes) if node.name == network.me)
        self._at_once = max(1, FETCHES // max(1, len(nodes) - 1))
        self._number = {node.name: number for number, node in enumerate(nodes)}
        self._homes = homes(manifest.frames, len(nodes), only)
        self._lengths = manifest.frames["length"].astype(np.int64)
        self._wanted: dict[int, set[int]] = {}  # first frame of equal bytes -> equal frames that are awaited
        self._given = Given()
        self._region: Arena | None = None
        self._reader: FrameReader | None = None
        self._reading = self._unreadable = self._telling = self._closed = self._watching = False
        self._asked: dict[int, HomeRequest] = {}  # home -> what is requested of it
        self._tries: dict[int, int] = {}
        self._to_reach: collections.deque[tuple[int, list[int]]] = collections.deque()
        self._dialling = 0
        self._fetches: dict[int, set[Fetch]] = {}

    @property
    def memory(self) -> Near:
        """Where the frames that are `here` lie. Its only arena has number 0."""
        assert self._region is not None
        return Near({0: self._region}, np.zeros_like(self._homes.offsets), self._homes.offsets)

    def here(self, frames: Collection[int]) -> set[int]:
        """The subset that this node has read already."""
        same = self._homes.same
        return {frame for frame in frames if int(same[frame]) in self._given.here}

    def has_homes(self, frames: Collection[int]) -> set[int]:
        """The subset that has a home."""
        return {frame for frame in frames if self._homes.nodes[frame] >= 0}

    def want(self, frames: Iterable[int]) -> None:
        """Requests frames that have a home. Repeated frames are requested once. No callback runs within this call."""
        by_home: dict[int, set[int]] = {}
        for frame in frames:
            same = int(self._homes.same[frame])
            self._wanted.setdefault(same, set()).add(frame)
            by_home.setdefault(int(self._homes.nodes[frame]), set()).add(same)
        for home in self._in_turn(by_home):
            if home == self._me:
                self._give(by_home[home], HERE)
            else:
                self._ask(home, by_home[home])
        self._read()  # reads at least the record: the next commit may refer to it

    def pump(self) -> None:
        """Fetches frames that homes have ready, as far as the window has free cells."""
        for home in self._in_turn(self._asked):
            asked = self._asked[home]
            while not self._closed and asked.ready() is not None and len(self._fetches.get(home, ())) < self._at_once:
                if sum(map(len, self._fetches.values())) >= FETCHES_MAX:
                    return  # pump() runs again when a transfer ends
                if not self._fetch(home, asked):
                    break

    def close(self) -> None:
        self._closed = True
        self._to_reach.clear()
        for fetches in self._fetches.values():
            for fetch in fetches:
                fetch.cancel()
        if self._region is not None:
            self._network.transport.withdraw(self._name)
            self._bulk.close_arenas([self._region])  # stays mapped while it is read or sent
            self._region = None

    # -- what other agents say

    def bring(self, channel: Channel, message: Message) -> None:
        """Message "bring": another node requests frames whose home is here. Errors: AgentError."""
        if channel.peer not in self._number:
            raise AgentError(f"agent {channel.peer} has no part in {self._epoch}")
        frames = self._frames_of(message.blobs[0] if message.blobs else b"")
        if any(self._homes.nodes[frame] != self._me or self._homes.same[frame] != frame for frame in frames):
            raise AgentError(f"not all of these frames of {self._identity} are read here")
        self._give(frames, channel.peer)
        channel.reply(int(message.fields["id"]), {"ready": True})
        self._read()

    def brought(self, channel: Channel, message: Message) -> None:
        """Message "brought": a home has read frames, or cannot. Errors: AgentError."""
        home = self._number.get(channel.peer)
        asked = self._asked.get(home) if home is not None else None
        if home is None or asked is None or asked.given_up:
            return
        here, lacking = (self._frames_of(blob) for blob in message.blobs)
        self._lack(asked.told(here, lacking, time.monotonic()), f"agent {channel.peer} cannot read them")
        self.pump()

    def source_gone(self, name: str) -> None:
        """Agent `name` has disconnected: connects again if frames are still awaited from it."""
        if self._network.channel(name) is None:
            self._given.gone(name)
        home = self._number.get(name)
        if home is not None and home in self._asked and self._asked[home].waits and not self._closed:
            self._try_again(home, f"the connection to agent {name} has ended")

    # -- as a home

    @property
    def _name(self) -> str:
        return f"store/{self._epoch}/{self._identity}"

    def _give(self, frames: Iterable[int], who: str) -> None:
        """Schedules frames to be read for node `who`. Errors: AgentError if another node asks and memory is short."""
        if self._region is None:
            try:
                self._make_region()
            except (CkptError, OSError) as exc:
                lost, why = sorted(frames), str(exc)
                self._tell_of_no_room(why)
                if who != HERE:
                    raise AgentError(why) from exc
                self._post(lambda: self._lack(lost, why))
                return
        self._given.want(frames, who)
        self._tell_soon()

    def _tell_of_no_room(self, why: str) -> None:
        """Emits the event once, however many nodes ask."""
        if not self._told and not self._closed:
            self._told = True
            text = f"each node reads for itself the part of step {self._identity.tick.step} that this node was to read"
            text = f"{text} for all: {why}"
            self._tell_ranks(Event("restore.unshared", text, False, {"identity": str(self._identity)}))

    def _make_region(self) -> None:
        size, room = self._homes.sizes[self._me], self._room()
        if self._closed or size > room:
            raise AgentError(f"{size >> 20} MiB to hold for all nodes, and {room >> 20} MiB may be taken for it")
        mine = self._homes.of(self._me)
        frames = placed(self._manifest, mine, self._homes.offsets[mine], size)
        region = Arena.create(size)
        try:
            self._network.transport.offer(self._name, region.view, frames, urgent=True)
        except CkptError:
            region.close()
            raise
        self._region = region

    def _read(self) -> None:
        """Starts a read pass unless one runs. Frames requested meanwhile are read by the next pass."""
        if self._closed or self._reading:
            return
        frames = self._given.take()
        if not frames and (self._reader is not None or self._unreadable):
            return
        self._reading = True
        region = self._region
        self._bulk.run(
            Lane.FRONT, lambda: self._pass(frames, region), lambda done: self.guard(lambda: self._passed(frames, done))
        )

    def _pass(self, frames: list[int], region: Arena | None) -> None:
        """Reads frames into `region`. Runs on a worker, which starts further threads."""
        reader = self._reader or self._open_record()
        if self._reader is None:
            self._post(lambda: self._was_opened(reader))
        numbers = same_frames(self._manifest, reader.record.manifest, frames)
        ours = {their: frame for frame, their in zip(frames, numbers, strict=True) if their is not None}

        def out(their: int) -> memoryview:
            assert region is not None  # `_give` has made it
            frame = ours[their]
            return region.part((int(self._homes.offsets[frame]), int(self._lengths[frame])))

        def deliver(their: int) -> None:
            self._post(lambda: self._was_read(ours[their]))

        def failed(their: int, error: Exception) -> None:
            log.warning("frame %d of %s cannot be read: %s", ours[their], self._identity, error)

        reader.read(ours, deliver, out, failed)

    def _was_read(self, frame: int) -> None:
        self._given.read(frame)
        self._tell_soon()

    def _was_opened(self, reader: FrameReader) -> None:
        self._reader = reader
        self.opened(reader.record)

    def _passed(self, frames: list[int], done: Future[None]) -> None:
        self._reading = False
        if self._closed:
            return
        error = failure(done)
        self._unreadable = bool(error)
        if error:
            log.warning("%s cannot be read from the store for all nodes: %s", self._identity, error)
        for frame in frames:
            self._given.lacks(frame)  # no effect if it was read
        self._tell_soon()
        self._read()

    def _tell_soon(self) -> None:
        if not self._telling:
            self._telling = True
            self._later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._telling = False
        if self._closed:
            return
        for who, (here, lacking) in self._given.news(time.monotonic()).items():
            if who == HERE:
                frames = [frame for same in here for frame in sorted(self._wanted.pop(same, ()))]
                self.read(frames)
                self._lack(lacking, "this node cannot read them for all")
            else:
                fields = {"t": "brought", "epoch": str(self._epoch), "identity": str(self._identity)}
                self._network.tell(who, fields, [_blob(here), _blob(lacking)])

    # -- towards homes

    def _ask(self, home: int, frames: set[int]) -> None:
        asked = self._asked.setdefault(home, HomeRequest(time.monotonic()))
        if asked.given_up:
            why = f"agent {self._nodes[home].name} did not give others"
            self._post(lambda: self._lack(sorted(frames), why))
            return
        new = asked.want(frames, time.monotonic())
        if new:
            self._reach(home, new)
        if not self._watching:
            self._watching = True
            self._later(LOOK_S, self._look)

    def _in_turn(self, homes: Iterable[int]) -> list[int]:
        """The homes in order, starting after this node, so that nodes do not all ask the same one first."""
        return sorted(homes, key=lambda home: (home - self._me) % len(self._nodes))

    def _reach(self, home: int, frames: list[int]) -> None:
        """Queues a request; at most DIALS_MAX connect at a time: a home called by all at once would refuse some."""
        self._to_reach.append((home, frames))
        self._dial()

    def _dial(self) -> None:
        while self._to_reach and self._dialling < DIALS_MAX:
            home, frames = self._to_reach.popleft()
            self._dialling += 1
            self._network.connect(self._nodes[home], functools.partial(self._dialled, home, frames))

    def _dialled(self, home: int, frames: list[int], error: str) -> None:
        self._dialling -= 1
        self.guard(lambda: self._reached(home, frames, error))
        self._dial()

    def _reached(self, home: int, frames: list[int], error: str) -> None:
        if self._closed or self._asked[home].given_up:
            return
        if error:
            self._give_up(home, error)
            return
        name = self._nodes[home].name
        asked_on = self._network.channel(name)
        fields = {"t": "bring", "epoch": str(self._epoch), "identity": str(self._identity)}
        then = lambda answer, error: self._answered(home, frames, asked_on, answer, error)  # noqa: E731
        self._network.ask(name, fields, [_blob(frames)], then)

    def _answered(
        self, home: int, frames: list[int], asked_on: Channel | None, answer: Message | None, error: str
    ) -> None:
        asked = self._asked[home]
        if self._closed or asked.given_up:
            return
        if answer is None and self._network.channel(self._nodes[home].name) is asked_on:
            self._give_up(home, error)
        elif answer is None:  # The connection has ended, for example since both nodes dialled at once.
            self._try_again(home, error)
        elif answer.fields.get("ready") is True:
            asked.heard(time.monotonic())
        else:
            self._later(AGAIN_S, lambda: self._once_more(home, frames))

    def _once_more(self, home: int, frames: list[int]) -> None:
        if not self._closed and not self._asked[home].given_up:
            self._reach(home, frames)

    def _try_again(self, home: int, why: str) -> None:
        asked = self._asked[home]
        if asked.given_up:
            return
        self._tries[home] = self._tries.get(home, 0) + 1
        if self._tries[home] > TRIES:
            self._give_up(home, why)
        else:
            self._reach(home, asked.open)  # Even an empty request shows whether the home is alive.

    def _look(self) -> None:
        """Gives up homes that hang."""
        if self._closed:
            return
        for home, asked in list(self._asked.items()):
            if asked.silent_s(time.monotonic()) > PATIENCE_S:
                self._give_up(home, f"agent {self._nodes[home].name} has said nothing for {PATIENCE_S:g} s")
        self._later(LOOK_S, self._look)

    def _fetch(self, home: int, asked: HomeRequest) -> bool:
        """Starts a transfer of the home's next frames into the window. False if no cell was free, or it failed."""
        window, cells = self.window(), dict[int, int]()
        while len(cells) < FETCH_FRAMES and (frame := asked.ready()) is not None:
            cell = window.free_cell()
            if cell is None:
                break
            asked.take(frame)
            cells[frame] = cell
        if not cells:
            return False
        node, offered = self._nodes[home], self._homes.of(home)
        try:
            fetch = pull(
                *(self._network, self._post, window, node, self._name, self._manifest, cells, offered),
                functools.partial(self._has_landed, home),
                functools.partial(self._ended, home),
            )
        except (CkptError, OSError) as exc:
            self._give_up(home, str(exc))
            return False
        self._fetches.setdefault(home, set()).add(fetch)
        return True

    def _has_landed(self, home: int, frame: int, cell: int) -> None:
        if self._closed:
            return
        asked = self._asked[home]
        asked.heard(time.monotonic())
        wanted = asked.landed(frame)
        self.landed(sorted(self._wanted.pop(frame, ())) if wanted else [], cell)

    def _ended(self, home: int, fetch: Fetch, left: list[int], error: BaseException | None) -> None:
        self._fetches[home].discard(fetch)
        if self._closed:
            return
        if error is not None:
            self._give_up(home, told(error))
        self.pump()

    def _give_up(self, home: int, why: str) -> None:
        asked = self._asked[home]
        if asked.given_up:
            return
        lost = asked.give_up()
        if lost:
            log.warning("%d frames of %s are read here and not by their home: %s", len(lost), self._identity, why)
        for fetch in self._fetches.get(home, ()):
            fetch.cancel()
        self._lack(lost, why)

    def _lack(self, lost: list[int], why: str) -> None:
        frames = [frame for same in lost for frame in sorted(self._wanted.pop(same, ()))]
        if frames and not self._closed:
            self.lacking(frames, why)

    # -- small steps

    def _post(self, what: Callable[[], None]) -> None:
        self._run_soon(lambda: self.guard(what))

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._run_later(delay_s, lambda: self.guard(what))

    def _frames_of(self, blob: bytes) -> list[int]:
        """Errors: AgentError."""
        count = len(self._lengths)
        if len(blob) % 4 or len(blob) > 4 * count:
            raise AgentError("the numbers of frames are malformed")
        frames: list[int] = np.frombuffer(blob, "<u4").tolist()
        if frames and max(frames) >= count:
            raise AgentError(f"{self._identity} has no frame {max(frames)}")
        return frames


def _blob(frames: Sequence[int]) -> bytes:
    return np.asarray(frames, "<u4").tobytes()
