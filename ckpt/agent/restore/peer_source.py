"""The peer source: a checkpoint's frames in other nodes' memory. If a holder does not give frames, the next one is
asked. Main thread only."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.restore.peer_fetch import PeerOffer
from ckpt.agent.restore.rank_request import Origin, RankRequest
from ckpt.agent.restore.restore_session import FrameSource
from ckpt.agent.runtime.workers import error_text
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.errors import AgentError, DamagedData
from ckpt.ipc.node_list import NodeAt
from ckpt.types import Identity

log = logging.getLogger("ckpt")


class PeerSource(FrameSource):
    """The frames that peers hold, through the window. `nodes`: those that may be asked."""

    def __init__(self, places: FramePlaces, network: PeerNetwork, nodes: Iterable[NodeAt]) -> None:
        self.network, self._places = network, places
        self.nodes = {node.name: node for node in nodes}
        self._held_ranks = {rank for rank, names in places.holders.items() if self.nodes.keys() & set(names)}
        self.numbers = {rank: places.numbers(rank) for rank in places.holders}  # frames by rank, in an offer's order
        self._disconnected_agents: set[str] = set()  # asked last, since they may be back
        self._offers: dict[tuple[int, tuple[str, ...]], PeerOffer] = {}  # by rank, and holders still to be asked

    def select(self, frames: set[int], asked: RankRequest) -> set[int]:
        return {frame for frame in frames if int(self._places.ranks[frame]) in self._held_ranks}

    def request(self, frames: set[int], asked: RankRequest) -> None:
        for rank, mine in self.by_rank(frames):
            self._queue(rank, self.holders_of(rank), mine, AgentError("nobody holds them"))
        self.session.fetches.start()

    def handle_disconnect(self, name: str) -> None:
        """Frames that another node holds, too, are asked of that node at once. Frames that no other node holds are
        still awaited, since the agent may come back."""
        self._disconnected_agents.add(name)
        for (_, holders), offer in list(self._offers.items()):
            if holders[0] == name and len(holders) > 1:
                self.session.fetches.withdraw(offer, AgentError(f"agent {name} is gone"))
        self.session.fetches.start()

    def by_rank(self, frames: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """The frames, ascending, by the rank whose arena they lie in."""
        found: dict[int, list[int]] = {}
        for frame in sorted(frames):
            found.setdefault(int(self._places.ranks[frame]), []).append(frame)
        yield from found.items()

    def holders_of(self, rank: int) -> tuple[str, ...]:
        """The holders of that rank's frames, in the order in which to ask them."""
        known = [name for name in self._places.holders.get(rank, ()) if name in self.nodes]
        return tuple(sorted(known, key=self._disconnected_agents.__contains__))

    def offer_name(self, rank: int) -> str:
        return offer_name(self._places.identity, rank)

    # -- inside

    def _queue(self, rank: int, holders: tuple[str, ...], frames: list[int], error: BaseException) -> None:
        if not holders:
            self.session.fail(self.number, frames, error)
            return
        offer = self._offers.get((rank, holders))
        if offer is None:
            failed = functools.partial(self._try_next_holder, rank, holders)
            offered = self.network, self.nodes[holders[0]], self.offer_name(rank), self.numbers[rank]
            offer = PeerOffer(*offered, self._receive_frame, failed)
            self._offers[rank, holders] = offer
        self.session.fetches.queue(offer, frames)

    def _receive_frame(self, frame: int, cell: int) -> None:
        self.session.receive(Origin(self.number, "peer"), [frame], cell)

    def _try_next_holder(self, rank: int, holders: tuple[str, ...], frames: list[int], error: BaseException) -> None:
        log.warning("frames of rank %d of %s: %s", rank, self._places.identity, error_text(error))
        if not isinstance(error, DamagedData):
            self.session.unreached_frames.update(frames)
        self._queue(rank, holders[1:], frames, error)


def offer_name(identity: Identity, rank: int) -> str:
    """The name of the offer of that rank's frames."""
    return f"frames/{identity}/{rank}"
