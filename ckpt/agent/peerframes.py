"""Frames of a checkpoint that other nodes hold, on their way into this one's memory.

What comes of a rank's arena lies where it lay there, in memory of which only those pages are used. No more is on its
way and here at a time than there is room for: what the ranks have copied is given back, and more is fetched then.
Frames that one holder does not give are asked of the next. Main thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import numpy as np

from ckpt.agent.arena import Arena
from ckpt.agent.gathering import Places
from ckpt.agent.memory import WINDOW_BYTES
from ckpt.agent.network import Network, NodeAt
from ckpt.agent.peers.transport import Fetch, Frames
from ckpt.errors import CkptError
from ckpt.format.manifest import Manifest
from ckpt.types import Identity

log = logging.getLogger("ckpt")

AGAIN_PARTS = 4  # more is fetched once this part of the room is free: in transfers of some size


class PeerFrames:
    """`arrived(frame)`: told of each that is here and right. `lacking(frames, why)`: of those that no node gives.
    `arenas`: by rank, where they are."""

    def __init__(
        self,
        places: Places,
        manifest: Manifest,
        network: Network,
        nodes: Iterable[NodeAt],
        post: Callable[[Callable[[], None]], None],
        room: Callable[[], int],
        least_bytes: int = WINDOW_BYTES,
    ) -> None:
        """`room`: bytes that may be taken until all ranks have restored; `least_bytes` are in any case."""
        self.places = places
        self.arenas: dict[int, Arena] = {}
        self.here: set[int] = set()
        self.arrived: Callable[[int], None] = lambda frame: None
        self.lacking: Callable[[list[int], str], None] = lambda frames, why: None
        self._manifest, self._network, self._post = manifest, network, post
        self._nodes: Mapping[str, NodeAt] = {node.name: node for node in nodes}
        self._frames: dict[int, Frames] = {}
        self._lengths = manifest.frames["length"].astype(np.int64)
        self._room, self._least_bytes = room, least_bytes
        self._room_bytes = 0  # once it was asked for
        self._taken_bytes = 0  # of frames that are fetched, or here
        self._coming: set[int] = set()  # fetched, or to be
        self._waiting: dict[int, list[int]] = {}  # of these: to be fetched once there is room, by rank
        self._waiting_bytes = 0
        self._fetches: dict[Fetch, tuple[str, list[str]]] = {}  # from whom, and who else holds the same
        self._closed = False

    def can_have(self, frame: int) -> bool:
        """Whether another node says that it holds it."""
        return bool(self._holders(int(self.places.ranks[frame])))

    def want(self, frames: Iterable[int]) -> None:
        """Brings those that are not here, nor on their way."""
        new = sorted(set(frames) - self.here - self._coming)
        self._coming.update(new)
        for frame in new:
            self._waiting.setdefault(int(self.places.ranks[frame]), []).append(frame)
        self._waiting_bytes += int(self._lengths[new].sum())
        self._go_on()

    def release(self, frames: Iterable[int]) -> None:
        """Nobody here reads them any more: their memory is given back, and they are not `here`."""
        for frame in self.here & set(frames):
            self.here.discard(frame)
            self._taken_bytes -= int(self._lengths[frame])
            rank, offset = int(self.places.ranks[frame]), int(self.places.offsets[frame])
            self.arenas[rank].give_back(offset, int(self._lengths[frame]))
        self._go_on()

    def source_gone(self, name: str) -> None:
        """That agent is not connected any more: what another holds, too, is not waited for from there for as long as a
        transfer would. What nobody else holds is: it may only have been cut off."""
        for fetch in [fetch for fetch, (source, others) in self._fetches.items() if source == name and others]:
            fetch.cancel()

    def close(self) -> None:
        self._closed = True
        for fetch in list(self._fetches):
            fetch.cancel()
        for arena in self.arenas.values():
            arena.close()  # what a transfer still writes to stays mapped until it ends
        self.arenas.clear()
        self.here.clear()
        self._waiting.clear()

    # -- inside

    def _go_on(self) -> None:
        """Fetches of what waits as much as there is room for; one frame in any case."""
        if not self._waiting:
            return
        self._room_bytes = self._room_bytes or max(self._least_bytes, self._room())
        free = self._room_bytes - self._taken_bytes
        if self._taken_bytes and free < min(self._waiting_bytes, self._room_bytes // AGAIN_PARTS):
            return
        begun: dict[int, list[int]] = {}
        for rank, waiting in list(self._waiting.items()):
            ends = np.cumsum(self._lengths[waiting])
            count = int(np.searchsorted(ends, self._room_bytes - self._taken_bytes, "right"))
            count = count or (0 if self._taken_bytes else 1)
            if count:
                begun[rank], self._waiting[rank] = waiting[:count], waiting[count:]
                self._taken_bytes += int(ends[count - 1])
                self._waiting_bytes -= int(ends[count - 1])
            if not self._waiting[rank]:
                del self._waiting[rank]
        for rank, wanted in begun.items():
            self._fetch(rank, wanted, self._holders(rank), "nobody holds them")

    def _holders(self, rank: int) -> list[str]:
        return [name for name in self.places.holders.get(rank, []) if name in self._nodes]

    def _fetch(self, rank: int, wanted: list[int], holders: list[str], why: str) -> None:
        if not holders:
            self._coming.difference_update(wanted)
            self._taken_bytes -= int(self._lengths[wanted].sum())
            self.lacking(wanted, why)
            self._go_on()
            return
        name, others = holders[0], holders[1:]
        numbers = self.places.numbers(rank)
        try:
            if rank not in self.arenas:
                self.arenas[rank] = Arena.create(self.places.sizes[rank])
                self._frames[rank] = self.places.frames(rank, self._manifest)
            fetch = self._network.transport.fetch(
                name,
                self._network.addresses(self._nodes[name]),
                name_of(self.places.identity, rank),
                self.arenas[rank].view,
                self._frames[rank],
                np.searchsorted(numbers, wanted).tolist(),
                lambda number: self._post(lambda: self._landed(int(numbers[number]))),
                urgent=True,
            )
        except (CkptError, OSError) as exc:
            self._fetch(rank, wanted, others, str(exc))
            return
        self._fetches[fetch] = name, others
        fetch.done.add_done_callback(lambda done: self._post(lambda: self._ended(rank, wanted, others, fetch, done)))

    def _landed(self, frame: int) -> None:
        if not self._closed and frame in self._coming:
            self._coming.discard(frame)
            self.here.add(frame)
            self.arrived(frame)

    def _ended(self, rank: int, wanted: list[int], others: list[str], fetch: Fetch, done: Future[None]) -> None:
        self._fetches.pop(fetch, None)
        error = done.exception()
        if error is None or self._closed:
            return
        log.warning("frames of rank %d of %s: %s", rank, self.places.identity, error)
        left = [frame for frame in wanted if frame in self._coming]
        if left:
            self._fetch(rank, left, others, str(error))


def name_of(identity: Identity, rank: int) -> str:
    """Of the transfer of that rank's frames."""
    return f"{identity}/{rank}"
