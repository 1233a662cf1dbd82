"""What a trainer said before it closed its connection is heard, whatever the agent was about to tell it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.ipc import messages
from tests.agent.node.test_mistakes import server

__all__ = ["server"]

BOUND_S = 60.0


class Answering:
    """Says something to whoever speaks first, and keeps what it hears until the connection has ended."""

    def __init__(self, trainer: socket.socket, closes_first: bool) -> None:
        self.trainer, self.closes_first = trainer, closes_first
        self.heard: list[str] = []
        self.done = False
        self._end_s = time.monotonic() + BOUND_S

    def message(self, peer: Peer, message: messages.Message) -> None:
        self.heard.append(message.kind)
        if message.kind == "first":
            self._leave(lambda: peer.send({"t": "staging-plan"}))

    def _leave(self, tell: Callable[[], None]) -> None:
        """The trainer leaves at that moment, without having read what it is told."""
        if not self.closes_first:
            tell()
        messages.send(self.trainer, {"t": "leave"})
        self.trainer.close()
        if self.closes_first:
            tell()
            tell()

    def peer_disconnected(self, peer: Peer) -> None:
        self.done = True

    def peer_died(self, peer: Peer) -> None: ...

    def settle(self) -> float | None:
        assert time.monotonic() < self._end_s, self.heard
        return time.monotonic() + 0.5

    def can_exit(self) -> bool:
        return self.done


@pytest.mark.parametrize("closes_first", [True, False])
def test_a_rank_that_leaves_and_closes_at_once_is_heard_to_leave(
    closes_first: bool, server: EventLoop, tmp_path: Path
) -> None:
    """It is told something after it has closed, or has not read what it was told before."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trainer:
        trainer.connect(os.fspath(tmp_path / "s"))
        messages.send(trainer, {"t": "first"})
        handler = Answering(trainer, closes_first)
        server.run(handler)
    assert handler.heard == ["first", "leave"]
    assert not server.peers
