"""Fetches of frames from other nodes' memory into cells of a restore's window: the limits, and the turns of the nodes.

The window's cells have warm pages; fetching into fresh memory would cost more than the transfer. Main thread only.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt.agent.net.tcp_receiver import Fetch
from ckpt.agent.restore.window import Window
from ckpt.agent.runtime.coroutines import promise_of, spawn
from ckpt.agent.snapshots.manifest_gather import place_frames
from ckpt.errors import AgentError
from ckpt.format.manifest import Manifest

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.node_list import NodeAt

FETCHES = 4  # transfers at a time, divided among the nodes; at least one from each
FETCHES_MAX = 16  # transfers at a time from all nodes
NODE_FETCHES_MAX = 2  # transfers at a time from one node
FETCH_FRAMES = 16  # in one transfer, at most
IN_FLIGHT = 2  # transfers fill at most 1 / IN_FLIGHT of the window's cells at a time


@dataclass(eq=False, slots=True)
class PeerOffer:
    """Frames that another node offers. `numbers`: of all its frames, ascending. `on_received(frame, cell)`: a verified
    frame is in that cell, now the owner's. `on_failed(frames, error)`: these do not come.
    `queued_frames`: those to be fetched. `fetches`: the transfers under way."""

    network: PeerNetwork
    node: NodeAt
    name: str
    numbers: npt.NDArray[np.int64]
    on_received: Callable[[int, int], None]
    on_failed: Callable[[list[int], BaseException], None]
    queued_frames: collections.deque[int] = field(default_factory=collections.deque)
    fetches: set[Fetch] = field(default_factory=set)


class PeerFetches:
    """The fetches of one restore. `post`: runs a function on the main thread until the restore is over; any thread may
    call it."""

    def __init__(self, manifest: Manifest, window: Window, post: Callable[[Callable[[], None]], None]) -> None:
        self._manifest, self._window, self._post = manifest, window, post
        self._offers: dict[PeerOffer, None] = {}  # those with queued frames or transfers; the next in turn first

    def queue(self, offer: PeerOffer, frames: list[int]) -> None:
        """Queues frames; `start` begins their transfers."""
        offer.queued_frames.extend(frames)
        self._offers.setdefault(offer)

    def withdraw(self, offer: PeerOffer, error: Exception) -> None:
        """Fails what is queued of an offer, and soon what is being fetched."""
        frames = list(offer.queued_frames)
        offer.queued_frames.clear()
        for fetch in list(offer.fetches):
            fetch.cancel()
        self._drop_if_idle(offer)
        if frames:
            offer.on_failed(frames, error)

    def start(self) -> None:
        """Begins transfers, from each node in turn, while the window has free cells."""
        while sum(self._begin(offer) for offer in list(self._offers)):
            pass

    def close(self) -> None:
        for offer in self._offers:
            for fetch in offer.fetches:
                fetch.cancel()

    # -- inside

    def _begin(self, offer: PeerOffer) -> bool:
        """Begins one transfer, if there is room. Returns whether it has."""
        waiting, window = offer.queued_frames, self._window
        if not waiting:
            return False
        busy = dict.fromkeys((each.node.name for each in self._offers), 0)
        for each in self._offers:
            busy[each.node.name] += len(each.fetches)
        most_each, total = max(1, min(NODE_FETCHES_MAX, FETCHES // len(busy))), sum(busy.values())
        if busy[offer.node.name] >= most_each or total >= FETCHES_MAX:
            return False
        count = max(NODE_FETCHES_MAX, min(FETCHES_MAX, most_each * len(busy)))
        most = max(1, min(FETCH_FRAMES, window.cell_count // (IN_FLIGHT * count)))
        if not window.free_count or (total and window.free_count < min(most, len(waiting))):
            return False  # waits until a larger transfer fits
        cells: dict[int, int] = {}
        while waiting and len(cells) < most and (cell := window.take_cell_nowait()) is not None:
            cells[waiting.popleft()] = cell
        del self._offers[offer]
        self._offers[offer] = None  # at the end of the turns
        spawn(self._transfer(offer, cells))
        return True

    async def _transfer(self, offer: PeerOffer, cells: dict[int, int]) -> None:
        """Fetches frames into their cells. `cells`: by frame, those that have not come."""
        numbers, network = list(cells), offer.network
        fetch: Fetch | None = None
        error: Exception = AgentError("the transfer has ended early")
        try:
            memory = self._window.arena
            fetch = network.transport.fetch(
                offer.node.name,
                network.addresses(offer.node),
                offer.name,
                memory.view,
                place_frames(self._manifest, numbers, list(cells.values()), memory.size_bytes),
                lambda at: self._post(lambda: offer.on_received(numbers[at], cells.pop(numbers[at]))),
                urgent=True,
                numbers=np.searchsorted(offer.numbers, numbers).tolist(),
            )
            offer.fetches.add(fetch)
            await promise_of(fetch.completion, self._post)
        except Exception as exc:
            error = exc
        if fetch is not None:
            offer.fetches.discard(fetch)
        for cell in cells.values():
            self._window.release(cell)
        self._drop_if_idle(offer)
        if cells:
            offer.on_failed(list(cells), error)
        if fetch is not None:  # else this is within a call of `start`, which goes on
            self.start()

    def _drop_if_idle(self, offer: PeerOffer) -> None:
        if not offer.queued_frames and not offer.fetches:
            self._offers.pop(offer, None)
