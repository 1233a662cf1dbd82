"""What the connections of an agent share: the loop that drives them, listening sockets, and delivery of messages."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ckpt.clock import Clock, SystemClock
from ckpt.errors import CkptError
from ckpt.ipc.messages import Message

log = logging.getLogger("ckpt")

# Connections before the loop's other sockets have their turn: more than wait in the backlog of any listener here.
ACCEPTED_PER_TURN = 300
BACKLOG = 256
RETRY_S = 1.0  # the pause before accepting again after `accept` failed
SWEEP_S = 0.1  # the least time between checks for overdue guests


class Loop(Protocol):
    """The part of the agent's main loop that connections need. Only `post` may be called from any thread."""

    def watch(self, sock: socket.socket, events: int, what: Callable[[int], None]) -> None:
        """Calls `what(events)` whenever the socket is ready for some of `events` (selectors.EVENT_READ, EVENT_WRITE).

        A second call for the same socket replaces the first. `what` may be called once more after `unwatch`, in the
        same iteration of the loop."""
        ...

    def unwatch(self, sock: socket.socket) -> None: ...

    def post(self, what: Callable[[], None]) -> None:
        """Runs `what` on the main thread, soon; calls run in order."""
        ...

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Runs `what` on the main thread after `delay_s`. It cannot be cancelled."""
        ...


class Guest(Protocol):
    """A connection that has not proved itself, or that lives only for one answer."""

    def time_out(self) -> None:
        """Ends the connection, since its time is over."""
        ...

    def cancel(self) -> None:
        """Ends the connection without a report."""
        ...


class ServerSocket:
    """A listening socket and its guests; owns them. Main thread only.

    `on_connection`: takes over each connection, a non-blocking socket, with the caller's address. It may make the
    connection a guest by `add_guest`. `guests`: the guests with their deadlines, oldest first; who ends one, removes
    it."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_connection: Callable[[socket.socket, Any], None],
        clock: Clock | None = None,
    ) -> None:
        self.guests: dict[Guest, float] = {}
        self._loop, self._sock, self._on_connection = loop, sock, on_connection
        self._clock = clock or SystemClock()
        self._is_sweep_scheduled = False
        sock.setblocking(False)
        self._start_accepting()

    def accept(self, events: int = selectors.EVENT_READ) -> None:
        """Accepts the connections that wait, at most ACCEPTED_PER_TURN."""
        for _ in range(ACCEPTED_PER_TURN):
            if self._sock.fileno() < 0:
                return
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the caller has closed the connection already
            except OSError as exc:
                # No more descriptors. Accepting again at once would keep the loop busy.
                log.warning("connections cannot be accepted: %s", exc)
                self._loop.unwatch(self._sock)
                self._loop.call_later(RETRY_S, self._start_accepting)
                return
            sock.setblocking(False)
            self._on_connection(sock, address)

    def add_guest(self, guest: Guest, life_s: float) -> None:
        """Has the guest time out after `life_s`, the same for all guests. One timer serves all, since a flood of
        connections would leave a flood of timers."""
        self.guests[guest] = self._clock.now_s() + life_s
        if not self._is_sweep_scheduled:
            self._sweep()

    def cancel_oldest(self) -> None:
        oldest = next(iter(self.guests))
        del self.guests[oldest]
        oldest.cancel()

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock)
            self._sock.close()
        while self.guests:
            self.cancel_oldest()

    def _start_accepting(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock, selectors.EVENT_READ, self.accept)

    def _sweep(self) -> None:
        now_s = self._clock.now_s()
        for guest in [guest for guest, end_s in self.guests.items() if end_s <= now_s]:
            guest.time_out()
        self._is_sweep_scheduled = bool(self.guests)
        if self._is_sweep_scheduled:
            self._loop.call_later(max(next(iter(self.guests.values())) - now_s, SWEEP_S), self._sweep)


def create_server(family: int, address: tuple[str | int | bytes, ...]) -> socket.socket:
    """A listening TCP socket. The IPv6 address "::" takes IPv4 connections too. Errors: OSError."""
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)


class MessageSender(Protocol):
    """The sender of a message."""

    def refuse(self, request_id: int, error: BaseException) -> None: ...


MessageSenderT = TypeVar("MessageSenderT", bound=MessageSender)


def deliver(
    handle: Callable[[MessageSenderT, Message], None], sender: MessageSenderT, message: Message, name: str
) -> bool:
    """Has a message handled. A CkptError is sent back if the message has an id, else logged. Returns False after any
    other error: the message is malformed, and the caller closes the connection. `name`: the sender's, for the log."""
    try:
        handle(sender, message)
    except CkptError as exc:
        request_id = message.fields.get("id")
        if isinstance(request_id, int):
            sender.refuse(request_id, exc)
        else:
            log.warning("%s of %s: %s", message.kind, name, exc)
    except Exception as exc:
        what = "the connection of %s was closed: its message %r is malformed: %r"
        log.warning(what, name, message.kind[:100], exc, exc_info=True)
        return False
    return True
