"""Frames of a checkpoint that other nodes hold, on their way through a start's window to its ranks.

They pass through the window's cells, whose pages are warm: memory of their own would cost more than all the rest, for
its fresh pages. What one rank alone wants, and takes as it is, goes past it (`straight`). Frames that one holder does
not give are asked of the next. Main thread only.
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

FETCHES = 2  # at a time, where one node holds all; else one from each
FETCH_FRAMES = 16  # in one, at most
IN_FLIGHT = 2  # the part of the window's cells that is fetched into at a time: one of so many

Line = tuple[int, tuple[str, ...]]  # a rank whose arena frames lie in, and who is still to be asked for them, in turn


class PeerSource:
    """`landed(frame, cell)`: told of each that is right and lies at that offset of the window; the cell is the
    listener's. `lacking(frames, why)`: of those that no node gives. `guard`: runs what must not fail unnoticed, since
    ranks wait for it. The restore sets these and `window`."""

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
        self._wanted: set[int] = set()  # fetched, or to be
        self._waiting: dict[Line, collections.deque[int]] = {}  # of these: to be fetched once there are cells
        self._fetches: dict[Fetch, Line] = {}
        self.unreached: set[int] = set()  # which a node may have all the same that did not give them
        self._gone: set[str] = set()  # asked last: they may only have been cut off
        self._closed = False
        self.straight = DirectStreams(self._post)

    def can_have(self, frame: int) -> bool:
        """Whether another node says that it holds it."""
        return bool(self._holders(int(self._places.ranks[frame])))

    def want(self, frames: Iterable[int]) -> None:
        """Brings those that are not on their way."""
        new = sorted(set(frames) - self._wanted)
        self._wanted.update(new)
        for frame in new:
            rank = int(self._places.ranks[frame])
            self._wait((rank, self._holders(rank)), [frame], "nobody holds them")
        self.pump()

    def stream(self, receiver: StreamPeer, frames: Iterable[int], left: Callable[[list[int]], None]) -> None:
        """Gives them to that rank past the window. `left`: told of those that do not come so, in parts."""
        lines: dict[Line, list[int]] = {}
        for frame in sorted(frames):
            rank = int(self._places.ranks[frame])
            lines.setdefault((rank, self._holders(rank)), []).append(frame)
        for (rank, holders), mine in lines.items():
            self.straight.add(receiver, holders[0], mine, functools.partial(self._open, rank, holders[0]), left)
        self.straight.pump()

    def pump(self) -> None:
        """Fetches what waits, as far as the window has room, from each holder in turn."""
        while sum(self._begin(line) for line in list(self._waiting)):
            pass

    def source_gone(self, name: str) -> None:
        """That agent is not connected any more: what another holds, too, is not waited for from there for as long as a
        transfer would. What nobody else holds is: it may only have been cut off."""
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
        """Transfers that are on their way, by holder."""
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
        """One more transfer of what waits there; whether there is, or others are asked for it now."""
        if self._closed or line not in self._waiting:
            return False
        (rank, holders), waiting, window = line, self._waiting[line], self.window()
        busy = self._busy()
        sources = len({held[0] for _, held in self._waiting} | busy.keys())
        if busy[holders[0]] >= max(1, FETCHES // sources):
            return False
        most = max(1, min(FETCH_FRAMES, window.count // (IN_FLIGHT * max(FETCHES, sources))))
        if not window.free or (self._fetches and window.free < min(most, len(waiting))):
            return False  # until there is room for a transfer of some size
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
    """Of the transfer of that rank's frames."""
    return f"{identity}/{rank}"
