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
from ckpt.agent.net.tcp_receiver import Fetch
from ckpt.agent.restore.direct_stream import DirectStreams, StreamPeer
from ckpt.agent.restore.peer_fetch import fetch_frames
from ckpt.agent.restore.window import Window
from ckpt.agent.runtime.workers import error_text
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
HolderOrder = tuple[int, tuple[str, ...]]


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
        self.get_window: Callable[[], Window]
        self.on_received: Callable[[int, int], None] = lambda frame, cell: None
        self.on_unavailable: Callable[[list[int], str], None] = lambda frames, why: None
        self.guard: Callable[[Callable[[], None]], None] = lambda what: what()
        self._places, self._manifest = places, manifest
        self._network, self._post_unguarded = network, post
        self._nodes: Mapping[str, NodeAt] = {node.name: node for node in nodes}
        self._frames_by_rank = {rank: places.numbers(rank) for rank in places.holders}
        self._pending_frames: set[int] = set()  # requested, not here yet
        self._queued_frames: dict[
            HolderOrder, collections.deque[int]
        ] = {}  # frames in `_pending_frames` whose fetch has not begun
        self._orders_by_fetch: dict[Fetch, HolderOrder] = {}
        self.unreached_frames: set[int] = set()  # frames that a holder did not give, though it may have them
        self._disconnected_agents: set[str] = set()  # agents that disconnected; asked last, since they may be back
        self._closed = False
        self.direct_streams = DirectStreams(self._post)

    def has_holder(self, frame: int) -> bool:
        """Whether another node says that it holds it."""
        return bool(self._holders_of(int(self._places.ranks[frame])))

    def request_frames(self, frames: Iterable[int]) -> None:
        """Requests frames; repeated requests are ignored while a frame is on its way."""
        new = sorted(set(frames) - self._pending_frames)
        self._pending_frames.update(new)
        for frame in new:
            rank = int(self._places.ranks[frame])
            self._queue_frames((rank, self._holders_of(rank)), [frame], "nobody holds them")
        self.start_fetches()

    def request_streams(self, receiver: StreamPeer, frames: Iterable[int], left: Callable[[list[int]], None]) -> None:
        """Sends frames to a rank past the window. `left` hears, in parts, the frames that do not come so."""
        lines: dict[HolderOrder, list[int]] = {}
        for frame in sorted(frames):
            rank = int(self._places.ranks[frame])
            lines.setdefault((rank, self._holders_of(rank)), []).append(frame)
        for (rank, holders), mine in lines.items():
            self.direct_streams.queue_streams(
                receiver, holders[0], mine, functools.partial(self._open_stream, rank, holders[0]), left
            )
        self.direct_streams.start_streams()

    def start_fetches(self) -> None:
        """Begins transfers of waiting frames, from each holder in turn, while the window has free cells."""
        while sum(self._begin_fetch(line) for line in list(self._queued_frames)):
            pass

    def handle_disconnect(self, name: str) -> None:
        """Agent `name` has disconnected: frames that another node holds, too, are asked of that node at once. Frames
        that no other node holds are still awaited, since the agent may come back."""
        self._disconnected_agents.add(name)
        self.direct_streams.handle_disconnect(name)
        for line in [line for line in self._queued_frames if line[1][0] == name and len(line[1]) > 1]:
            self._try_next_holder(line, list(self._queued_frames.pop(line)), AgentError(f"agent {name} is gone"))
        for fetch in [fetch for fetch, (_, held) in self._orders_by_fetch.items() if held[0] == name and len(held) > 1]:
            fetch.cancel()
        self.start_fetches()

    def close(self) -> None:
        self._closed = True
        self.direct_streams.close()
        self._queued_frames.clear()
        for fetch in list(self._orders_by_fetch):
            fetch.cancel()

    # -- inside

    def _open_stream(self, rank: int, holder: str, frames: list[int]) -> Future[socket.socket]:
        node, name = self._nodes[holder], offer_name(self._places.identity, rank)
        numbers = np.searchsorted(self._frames_by_rank[rank], frames).tolist()
        return self._network.transport.stream(node.name, self._network.addresses(node), name, numbers)

    def _holders_of(self, rank: int) -> tuple[str, ...]:
        known = [name for name in self._places.holders.get(rank, ()) if name in self._nodes]
        return tuple(sorted(known, key=self._disconnected_agents.__contains__))

    def _fetches_by_holder(self) -> collections.Counter[str]:
        """The number of transfers under way, by holder."""
        return collections.Counter(held[0] for _, held in self._orders_by_fetch.values())

    def _queue_frames(self, line: HolderOrder, frames: list[int], why: str) -> None:
        if line[1]:
            self._queued_frames.setdefault(line, collections.deque()).extend(frames)
            return
        self._pending_frames.difference_update(frames)
        self.on_unavailable(frames, why)

    def _try_next_holder(self, line: HolderOrder, frames: list[int], error: BaseException | None) -> None:
        if not isinstance(error, DamagedData):
            self.unreached_frames.update(frames)
        self._queue_frames((line[0], line[1][1:]), frames, error_text(error))

    def _begin_fetch(self, line: HolderOrder) -> bool:
        """Begins one transfer of that line's frames. Returns whether anything changed: it began, or failed to begin."""
        if self._closed or line not in self._queued_frames:
            return False
        (rank, holders), waiting, window = line, self._queued_frames[line], self.get_window()
        busy = self._fetches_by_holder()
        sources = len({held[0] for _, held in self._queued_frames} | busy.keys())
        if busy[holders[0]] >= max(1, FETCHES // sources):
            return False
        most = max(1, min(FETCH_FRAMES, window.cell_count // (IN_FLIGHT * max(FETCHES, sources))))
        if not window.free_count or (self._orders_by_fetch and window.free_count < min(most, len(waiting))):
            return False  # waits until a larger transfer fits
        cells: dict[int, int] = {}
        while waiting and len(cells) < most and (cell := window.take_cell_nowait()) is not None:
            cells[waiting.popleft()] = cell
        if not waiting:
            del self._queued_frames[line]
        node, name = self._nodes[holders[0]], offer_name(self._places.identity, rank)
        try:
            fetch = fetch_frames(
                *(self._network, self._post, window, node, name, self._manifest, cells, self._frames_by_rank[rank]),
                self._receive_frame,
                self._end_fetch,
            )
        except (CkptError, OSError) as exc:
            self._try_next_holder(line, list(cells), exc)
            return True
        self._orders_by_fetch[fetch] = line
        return True

    def _receive_frame(self, frame: int, cell: int) -> None:
        if not self._closed:
            self._pending_frames.discard(frame)
            self.on_received(frame, cell)

    def _end_fetch(self, fetch: Fetch, left: list[int], error: BaseException | None) -> None:
        line = self._orders_by_fetch.pop(fetch)
        if self._closed:
            return
        if left:
            log.warning("frames of rank %d of %s: %s", line[0], self._places.identity, error_text(error))
            self._try_next_holder(line, left, error)
        self.start_fetches()

    def _post(self, what: Callable[[], None]) -> None:
        self._post_unguarded(lambda: self.guard(what))


def offer_name(identity: Identity, rank: int) -> str:
    """The name of the offer of that rank's frames."""
    return f"{identity}/{rank}"
