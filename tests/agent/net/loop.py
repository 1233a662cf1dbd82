"""What connections between agents need of the agent's main thread, turned by a test, and two agents on it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable

from ckpt.agent.net.channel import Channel
from ckpt.agent.net.dialer import PeerListener, dial
from ckpt.agent.net.handshake import Answerer, Dialler, Role, Session
from ckpt.agent.net.tcp_sender import Transport
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError
from ckpt.ipc.addresses import Address, resolve
from ckpt.ipc.messages import Message

BOUND_S = 60.0  # a test that waits longer fails
RUN = "00000007-0123456789abcdef"
SECRET = bytes(range(32))


class TurnedLoop:
    """Does nothing by itself: `turn` handles what is ready, `until` turns until something holds. Timers go by `clock`,
    so that with a manual one they run when the test moves it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._selector = selectors.DefaultSelector()
        self._posted: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def watch(self, sock: socket.socket, events: int, what: Callable[[int], None]) -> None:
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, what)
        else:
            self._selector.register(sock, events, what)

    def unwatch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)

    def post(self, what: Callable[[], None]) -> None:
        self._posted.append(what)
        os.eventfd_write(self._wake, 1)

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.clock.now_s() + delay_s, next(self._numbers), what))

    def turn(self, timeout_s: float = 0.05) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                os.eventfd_read(self._wake)
            else:
                key.data(events)
        while self._posted:
            self._posted.popleft()()
        while self._timers and self._timers[0][0] <= self.clock.now_s():
            heapq.heappop(self._timers)[2]()

    def until(self, holds: Callable[[], object], bound_s: float = BOUND_S) -> None:
        end_s = time.monotonic() + bound_s
        while not holds():
            assert time.monotonic() < end_s, "it did not happen in time"
            self.turn()

    def watched(self) -> int:
        return len(self._selector.get_map()) - 1

    def timers(self) -> int:
        return len(self._timers)

    def close(self) -> None:
        self._selector.close()
        os.close(self._wake)


class Noted:
    """A Receiver that keeps what it is told. `on_message`: what else to do with one."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ends: list[AgentError] = []
        self.on_message: Callable[[Channel, Message], None] = lambda channel, message: None

    def message(self, channel: Channel, message: Message) -> None:
        self.messages.append(message)
        self.on_message(channel, message)

    def channel_closed(self, channel: Channel, why: AgentError) -> None:
        self.ends.append(why)


class Node:
    """An agent as far as its connections go: it listens, accepts control channels, and serves data."""

    def __init__(
        self,
        loop: TurnedLoop,
        name: str,
        host: str = "127.0.0.1",
        secret: bytes = SECRET,
        transport: Callable[[Callable[[str, str], Dialler]], Transport] = Transport,
    ) -> None:
        self.loop, self.name, self.secret = loop, name, secret
        self.noted = Noted()
        self.channels: list[Channel] = []
        self.failures: list[AgentError] = []
        self.transport = transport(lambda about, peer: Dialler(secret, RUN, Role.DATA, name, about, peer))
        self.listener = PeerListener(loop, Address(host, 0), self.answerer, self._greeted, loop.clock)
        self.address = self.listener.address

    def answerer(self) -> Answerer:
        return Answerer({RUN: self.secret}.get, self.name)

    def _greeted(self, sock: socket.socket, session: Session) -> None:
        if session.role is Role.DATA:
            self.transport.accept(sock, session)
        else:
            self.channels.append(Channel(self.loop, sock, session, self.noted, self.loop.clock))

    def dial(self, address: Address, expect: str | None = None) -> None:
        """Its outcome is one more of `channels` or of `failures`."""
        handshake = Dialler(self.secret, RUN, Role.CONTROL, self.name, expect=expect)
        dial(self.loop, resolve(address)[0], handshake, self._greeted, self.failures.append)

    def connect(self, other: Node) -> tuple[Channel, Channel]:
        """Our end and theirs."""
        mine, theirs = len(self.channels), len(other.channels)
        self.dial(other.address, other.name)
        self.loop.until(lambda: len(self.channels) > mine and len(other.channels) > theirs)
        return self.channels[-1], other.channels[-1]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.listener.close()
        self.transport.close()
