"""The peer source: fetches a checkpoint's frames from other nodes' memory, through the window, for the ranks here.

The window's cells have warm pages; fetching into fresh memory would cost more than the transfer. Frames that only one
rank wants, as one run, go past the window (direct_stream.py). If a holder does not give frames, the next holder is
asked. Main thread only.
"""

from __future__ import annotations

import collections
import functools
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import numpy as np

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.net.transport import Fetch
from ckpt.agent.restore.direct_stream import DirectStreams, StreamPeer
from ckpt.agent.restore.peer_fetch import pull
from ckpt.agent.restore.window import Window
from ckpt.agent.runtime.workers import told
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.errors import AgentError, CkptError, DamagedData
from ckpt.format.manifest import Manifest
from ckpt.ipc.node_list import NodeAt
from ckpt.types import Identity

log = logging.getLogger("ckpt")

FETCHES = 2  # transfers at a time, divided among the holders; at least one from each
FETCH_FRAMES = 16  # in one transfer, at most
IN_FLIGHT = 2  # transfers fill at most 1 / IN_FLIGHT of the window's cells at a time

# (the rank whose arena the frames lie in, the holders that are still to be asked, in order)
Line = tuple[int, tuple[str, ...]]


class PeerSource:
    """The frames of one checkpoint that peers hold. Its RestoreSession sets `window` and the callbacks.
    `landed(frame, cell)`: a verified frame lies at that offset of the window; the session owns the cell.
    `lacking(frames, why)`: no node gives these. `guard(what)`: runs `what` and reports exceptions, since ranks wait."""

    def __init__(
        self,
        places: FramePlaces,
        manifest: Manifest,
        network: PeerNetwork,
        nodes: Iterable[NodeAt],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.window: Callable[[], Window]
        self.landed: Callable[[int, int], None] = lambda frame, cell: None
        self.lacking: Callable[[list[int], str], None] = lambda frames, why: None
        self.guard: Callable[[Callable[[], None]], None] = lambda what: what()
        self._places, self._manifest = places, manifest
        self._network, self._run_soon = network, post
        self._nodes: Mapping[str, NodeAt] = {node.name: node for node in nodes}
        self._numbers = {rank: places.numbers(rank) for rank in places.holders}
        self._wanted: set[int] = set()  # requested, not here yet
        self._waiting: dict[Line, collections.deque[int]] = {}  # frames in `_wanted` whose fetch has not begun
        self._fetches: dict[Fetch, Line] = {}
        self.unreached: set[int] = set()  # frames that a holder did not give, though it may have them
        self._gone: set[str] = set()  # agents that disconnected; asked last, since they may be back
        self._closed = False
        self.straight = DirectStreams(self._post)

    def can_have(self, frame: int) -> bool:
        """Whether another node says that it holds it."""
        return bool(self._holders(int(self._places.ranks[frame])))

    def want(self, frames: Iterable[int]) -> None:
        """Requests frames; repeated requests are ignored while a frame is on its way."""
        new = sorted(set(frames) - self._wanted)
        self._wanted.update(new)
        for frame in new:
            rank = int(self._places.ranks[frame])
            self._wait((rank, self._holders(rank)), [frame], "nobody holds them")
        self.pump()

    def stream(self, receiver: StreamPeer, frames: Iterable[int], left: Callable[[list[int]], None]) -> None:
        """Sends frames to a rank past the window. `left` hears, in parts, the frames that do not come so."""
        lines: dict[Line, list[int]] = {}
        for frame in sorted(frames):
            rank = int(self._places.ranks[frame])
            lines.setdefault((rank, self._holders(rank)), []).append(frame)
        for (rank, holders), mine in lines.items():
            self.straight.add(receiver, holders[0], mine, functools.partial(self._open, rank, holders[0]), left)
        self.straight.pump()

    def pump(self) -> None:
        """Begins transfers of waiting frames, from each holder in turn, while the window has free cells."""
        while sum(self._begin(line) for line in list(self._waiting)):
            pass

    def source_gone(self, name: str) -> None:
        """Agent `name` has disconnected: frames that another node holds, too, are asked of that node at once. Frames
        that no other node holds are still awaited, since the agent may come back."""
        self._gone.add(name)
        self.straight.source_gone(name)
        for line in [line for line in self._waiting if line[1][0] == name and len(line[1]) > 1]:
            self._elsewhere(line, list(self._waiting.pop(line)), AgentError(f"agent {name} is gone"))
        for fetch in [fetch for fetch, (_, held) in self._fetches.items() if held[0] == name and len(held) > 1]:
            fetch.cancel()
        self.pump()

    def close(self) -> None:
        self._closed = True
        self.straight.close()
        self._waiting.clear()
        for fetch in list(self._fetches):
            fetch.cancel()

    # -- inside

    def _open(self, rank: int, holder: str, frames: list[int]) -> Future[socket.socket]:
        node, name = self._nodes[holder], name_of(self._places.identity, rank)
        numbers = np.searchsorted(self._numbers[rank], frames).tolist()
        return self._network.transport.stream(node.name, self._network.addresses(node), name, numbers)

    def _holders(self, rank: int) -> tuple[str, ...]:
        known = [name for name in self._places.holders.get(rank, ()) if name in self._nodes]
        return tuple(sorted(known, key=self._gone.__contains__))

    def _busy(self) -> collections.Counter[str]:
        """The number of transfers under way, by holder."""
        return collections.Counter(held[0] for _, held in self._fetches.values())

    def _wait(self, line: Line, frames: list[int], why: str) -> None:
        if line[1]:
            self._waiting.setdefault(line, collections.deque()).extend(frames)
            return
        self._wanted.difference_update(frames)
        self.lacking(frames, why)

    def _elsewhere(self, line: Line, frames: list[int], error: BaseException | None) -> None:
        if not isinstance(error, DamagedData):
            self.unreached.update(frames)
        self._wait((line[0], line[1][1:]), frames, told(error))

    def _begin(self, line: Line) -> bool:
        """Begins one transfer of that line's frames. Returns whether anything changed: it began, or failed to begin."""
        if self._closed or line not in self._waiting:
            return False
        (rank, holders), waiting, window = line, self._waiting[line], self.window()
        busy = self._busy()
        sources = len({held[0] for _, held in self._waiting} | busy.keys())
        if busy[holders[0]] >= max(1, FETCHES // sources):
            return False
        most = max(1, min(FETCH_FRAMES, window.count // (IN_FLIGHT * max(FETCHES, sources))))
        if not window.free or (self._fetches and window.free < min(most, len(waiting))):
            return False  # waits until a larger transfer fits
        cells: dict[int, int] = {}
        while waiting and len(cells) < most and (cell := window.free_cell()) is not None:
            cells[waiting.popleft()] = cell
        if not waiting:
            del self._waiting[line]
        node, name = self._nodes[holders[0]], name_of(self._places.identity, rank)
        try:
            fetch = pull(
                *(self._network, self._post, window, node, name, self._manifest, cells, self._numbers[rank]),
                self._has_landed,
                self._ended,
            )
        except (CkptError, OSError) as exc:
            self._elsewhere(line, list(cells), exc)
            return True
        self._fetches[fetch] = line
        return True

    def _has_landed(self, frame: int, cell: int) -> None:
        if not self._closed:
            self._wanted.discard(frame)
            self.landed(frame, cell)

    def _ended(self, fetch: Fetch, left: list[int], error: BaseException | None) -> None:
        line = self._fetches.pop(fetch)
        if self._closed:
            return
        if left:
            log.warning("frames of rank %d of %s: %s", line[0], self._places.identity, told(error))
            self._elsewhere(line, left, error)
        self.pump()

    def _post(self, what: Callable[[], None]) -> None:
        self._run_soon(lambda: self.guard(what))


def name_of(identity: Identity, rank: int) -> str:
    """The name of the offer of that rank's frames."""
    return f"{identity}/{rank}"
