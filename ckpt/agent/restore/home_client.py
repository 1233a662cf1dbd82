"""One home of a shared read, as another node sees it: requests frames there, and fetches those that the home has read.

A home that refuses, hangs, or cannot be reached is given up: its frames come from the next source. Main thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.restore.peer_fetch import PeerOffer
from ckpt.agent.runtime.coroutines import Semaphore, sleep, spawn
from ckpt.agent.runtime.workers import error_text
from ckpt.errors import AgentError, CkptError

if TYPE_CHECKING:
    from ckpt.agent.restore.restore_session import RestoreSession
    from ckpt.ipc.node_list import NodeAt

log = logging.getLogger("ckpt")

HOME_TIMEOUT_S = 20.0  # a home that was silent for so long is given up
CHECK_S = 1.0  # between looks whether the home is silent
RETRY_S = 0.2  # until a home that has not begun its restore is asked again
ATTEMPTS_MAX = 6  # times that the connection may end with no frame in between, for the home and for each request


class HomeClient:
    """`node`: the home's. `offer_name`, `numbers`: of the home's frames. `fields`: of the requests. `dials`: limits the
    connections being made: a home called by all at once would refuse some. `on_received(frame, cell)`: a frame is in
    that cell. `on_failed(frames, error)`: these do not come from here."""

    def __init__(
        self,
        session: RestoreSession,
        network: PeerNetwork,
        node: NodeAt,
        offer_name: str,
        numbers: npt.NDArray[np.int64],
        fields: dict[str, Any],
        dials: Semaphore,
        on_received: Callable[[int, int], None],
        on_failed: Callable[[list[int], BaseException], None],
    ) -> None:
        self._session, self._network, self._node, self._fields, self._dials = session, network, node, fields, dials
        self._on_received, self._on_failed = on_received, on_failed
        self._offer = PeerOffer(network, node, offer_name, numbers, self._receive, lambda _, why: self._give_up(why))
        self._pending_frames: set[int] = set()  # requested, and not here
        self._unanswered_frames: set[int] = set()  # those of the pending ones that the home has not answered for
        self._last_heard_s = 0.0
        self._cuts = 0  # ends of the connection since the last frame
        self._is_given_up = False
        spawn(self._watch(), self._guard)

    def request(self, frames: Collection[int]) -> None:
        if self._is_given_up:
            self._on_failed(list(frames), AgentError(f"agent {self._node.name} did not give others"))
            return
        if not self._unanswered_frames:
            self._last_heard_s = time.monotonic()  # the home owed no answer until now
        new = set(frames) - self._pending_frames
        self._pending_frames |= new
        self._unanswered_frames |= new
        if new:
            spawn(self._ask(), self._guard)

    def handle_disconnect(self) -> None:
        """Connects again if frames are still awaited."""
        if not self._pending_frames or self._is_given_up:
            return
        self._cuts += 1
        ended = AgentError(f"the connection to agent {self._node.name} has ended")
        if self._cuts > ATTEMPTS_MAX:
            self._give_up(ended)
        else:
            spawn(self._ask(ended), self._guard)

    def handle_report(self, here: Iterable[int], lacking: Iterable[int]) -> None:
        """The home has read frames, or cannot have them. Frames that were not requested, or were reported before, are
        ignored."""
        self._last_heard_s = time.monotonic()
        lost = sorted(self._unanswered_frames & set(lacking))
        self._unanswered_frames.difference_update(lost)
        self._pending_frames.difference_update(lost)
        ready = [frame for frame in dict.fromkeys(here) if frame in self._unanswered_frames]
        self._unanswered_frames.difference_update(ready)
        self._on_failed(lost, AgentError(f"agent {self._node.name} cannot read them"))
        self._session.fetches.queue(self._offer, ready)
        self._session.fetches.start()

    # -- inside

    def _guard(self, step: Callable[[], None]) -> None:
        if not self._is_given_up:
            self._session.guard(step)

    async def _ask(self, broken: CkptError | None = None) -> None:
        """Asks for all that the home has not answered for. Even an empty request shows whether the home is alive.
        `broken`: why the last connection has ended."""
        fields, name, attempts = {"t": "read-frames", **self._fields}, self._node.name, 0
        try:
            while True:
                if broken is not None:
                    attempts += 1
                    if attempts > ATTEMPTS_MAX:
                        raise broken
                async with self._dials:
                    await self._network.connect(self._node)
                channel, broken = self._network.channel(name), None
                try:
                    answer = await self._network.request(name, fields, [encode_frames(self._unanswered_frames)])
                except CkptError as exc:
                    # The connection has ended, for example since both nodes dialled at once: the home did not refuse.
                    if self._network.channel(name) is channel:
                        raise
                    broken = exc
                    continue
                if answer.fields.get("ready") is True:
                    self._last_heard_s = time.monotonic()
                    return
                await sleep(self._session.call_later, RETRY_S)
        except CkptError as exc:
            self._give_up(exc)

    async def _watch(self) -> None:
        """Gives up the home once it hangs."""
        while not self._unanswered_frames or time.monotonic() - self._last_heard_s <= HOME_TIMEOUT_S:
            await sleep(self._session.call_later, CHECK_S)
        self._give_up(AgentError(f"agent {self._node.name} has said nothing for {HOME_TIMEOUT_S:g} s"))

    def _receive(self, frame: int, cell: int) -> None:
        self._last_heard_s, self._cuts = time.monotonic(), 0
        self._pending_frames.discard(frame)
        self._on_received(frame, cell)

    def _give_up(self, error: BaseException) -> None:
        if self._is_given_up:
            return
        self._is_given_up = True
        lost = sorted(self._pending_frames)
        self._pending_frames.clear()
        if lost:
            text = error_text(error)  # the error itself would keep the window's memory
            log.warning("%d frames do not come from agent %s for all nodes: %s", len(lost), self._node.name, text)
        self._on_failed(lost, error)
        self._session.fetches.withdraw(self._offer, AgentError("its home was given up"))


def encode_frames(frames: Collection[int]) -> bytes:
    """Frame numbers, for a message."""
    return np.array(sorted(frames), "<u4").tobytes()
