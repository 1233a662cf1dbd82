"""Frames of a checkpoint that other nodes hold, on their way into this one's memory.

What comes of a rank's arena lies where it lay there, in memory of which only those pages are used. Frames that one
holder does not give are asked of the next. Main thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import numpy as np

from ckpt.agent.arena import Arena
from ckpt.agent.gathering import Places
from ckpt.agent.network import Network, NodeAt
from ckpt.agent.peers.transport import Fetch, Frames
from ckpt.errors import CkptError
from ckpt.format.manifest import Manifest
from ckpt.types import Identity

log = logging.getLogger("ckpt")


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
    ) -> None:
        self.places = places
        self.arenas: dict[int, Arena] = {}
        self.here: set[int] = set()
        self.arrived: Callable[[int], None] = lambda frame: None
        self.lacking: Callable[[list[int], str], None] = lambda frames, why: None
        self._manifest, self._network, self._post = manifest, network, post
        self._nodes: Mapping[str, NodeAt] = {node.name: node for node in nodes}
        self._frames: dict[int, Frames] = {}
        self._coming: set[int] = set()
        self._fetches: dict[Fetch, tuple[str, list[str]]] = {}  # from whom, and who else holds the same
        self._closed = False

    def can_have(self, frame: int) -> bool:
        """Whether another node says that it holds it."""
        return bool(self._holders(int(self.places.ranks[frame])))

    def want(self, frames: Iterable[int]) -> None:
        """Brings those that are not here, nor on their way."""
        by_rank: dict[int, list[int]] = {}
        for frame in sorted(set(frames) - self.here - self._coming):
            by_rank.setdefault(int(self.places.ranks[frame]), []).append(frame)
        for rank, wanted in by_rank.items():
            self._coming.update(wanted)
            self._fetch(rank, wanted, self._holders(rank), "nobody holds them")

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

    # -- inside

    def _holders(self, rank: int) -> list[str]:
        return [name for name in self.places.holders.get(rank, []) if name in self._nodes]

    def _fetch(self, rank: int, wanted: list[int], holders: list[str], why: str) -> None:
        if not holders:
            self._coming.difference_update(wanted)
            self.lacking(wanted, why)
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
