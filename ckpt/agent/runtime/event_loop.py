"""The agent's main thread: one loop over its socket, its peers, process deaths, timers and results of worker threads.

Only the loop itself blocks. It sleeps until something happens, so an idle agent uses no processor time. If a message is
malformed or its handler fails unexpectedly, the loop closes that message's connection and no other. Any other failure
is logged with its traceback, and the loop goes on, since it serves more than one job.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import heapq
import itertools
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckpt.agent.runtime.connections import BACKLOG, RETRY_S, ServerSocket, deliver
from ckpt.errors import AgentError
from ckpt.ipc import messages
from ckpt.settings import WARNING_SIGNALS

log = logging.getLogger("ckpt")

# Packets that wait for a peer that does not read. Beyond that the peer is disconnected.
OUTBOX_MAX = 10_000
MESSAGES_PER_TURN = 64  # messages of one peer before the other peers have their turn
# The longest wait in one call of the kernel, which counts milliseconds in 32 bits.
WAIT_S_MAX = 3600.0
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A wait that ends this much too late means that the process was stopped, provided the thread was not at work.
SUSPENDED_S_MIN = 10.0
_UCRED = struct.Struct("3i")


class Handler(Protocol):
    """Gives messages and peer events their meaning. All methods run on the main thread."""

    def message(self, peer: Peer, message: messages.Message) -> None:
        """Handles one message of `peer`. Errors: a CkptError is sent as the reply if the message has an id, else
        logged; any other exception closes the connection."""
        ...

    def peer_disconnected(self, peer: Peer) -> None:
        """The peer's connection is gone. Its process may still live."""
        ...

    def peer_died(self, peer: Peer) -> None:
        """The peer's process is dead (see `EventLoop.watch_death`). Every message that it sent before was handled."""
        ...

    def process_suspended(self, for_s: float) -> None:
        """This process was stopped for `for_s` seconds, for example by a suspended machine."""
        ...

    def settle(self) -> float | None:
        """Called after each event. Returns the latest time for the next call, on the monotonic clock; None: no time
        limit."""
        ...

    def can_exit(self) -> bool:
        """True if the agent may end now."""
        ...


class Peer:
    """One connection. `pid`: the process at the other end, as the kernel reports it. `role`: "" until its hello.
    `is_remote_closed`: the other end is closed. Nothing more is sent then, but its earlier messages are still read."""

    def __init__(self, server: EventLoop, sock: socket.socket, pid: int) -> None:
        self.loop = server
        self.sock = sock
        self.pid = pid
        self.pidfd: int | None = None
        self.role = ""
        self.is_open = True
        self.is_remote_closed = self.was_reset = False
        self.outbox: collections.deque[messages.Packet] = collections.deque()

    def send(self, fields: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()) -> None:
        """Sends the message now, or as soon as the socket has room. Does nothing if the connection is gone."""
        if not self.is_open or self.is_remote_closed:
            return
        packet = messages.pack(fields, list(fds), blobs)
        self.outbox.append(packet)
        if len(self.outbox) == 1:
            self.flush()
        if not self.outbox or self.outbox[-1] is not packet:
            return  # sent, or dropped with the connection
        # The caller may close its descriptors before the socket has room.
        self.outbox.pop()
        copies = [os.dup(fd) for fd in packet.fds]
        packet.close()
        self.outbox.append(messages.Packet(packet.data, copies, list(copies)))
        if len(self.outbox) > OUTBOX_MAX:
            self.loop.disconnect_peer(self)
        else:
            self.loop.update_watch(self)

    def reply(
        self, request_id: int, body: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()
    ) -> None:
        self.send({"t": "reply", "id": request_id, **body}, fds, blobs)

    def refuse(self, request_id: int, error: BaseException) -> None:
        self.send(messages.error_fields(request_id, error))

    def flush(self) -> None:
        """Sends waiting packets as long as the socket has room."""
        try:
            while self.outbox:
                self.outbox[0].send(self.sock)
                self.outbox.popleft().close()
        except BlockingIOError:
            return
        except ConnectionError:
            self._mark_remote_closed()
        except OSError:
            self.loop.disconnect_peer(self)

    def _mark_remote_closed(self) -> None:
        self.is_remote_closed = True
        while self.outbox:
            self.outbox.popleft().close()

    def watch_death(self) -> None:
        """Reports the end of the peer's process from now on. The socket's end is no proof, since forked children hold
        it open. Errors: AgentError."""
        if self.pidfd is None:
            try:
                self.pidfd = os.pidfd_open(self.pid)
            except OSError as exc:
                raise AgentError(f"cannot watch process {self.pid}: {exc}; is it in another pid namespace?") from exc
            self.loop.watch(self.pidfd, selectors.EVENT_READ, lambda _: self.loop.report_death(self))

    def unwatch_death(self) -> None:
        """Stops watching the peer's process."""
        if self.pidfd is not None:
            self.loop.unwatch(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = None

    def disconnect(self) -> None:
        """Closes the connection. The loop calls the handler's `peer_disconnected` after the current event."""
        self.loop.disconnect_peer(self)

    def close(self) -> None:
        self.is_open = False
        self.sock.close()
        while self.outbox:
            self.outbox.popleft().close()


class EventLoop:
    """Owns the listening socket, the peers and the timers. Any thread may call `post`; everything else is for the main
    thread only."""

    def __init__(self, path: Path) -> None:
        """Binds the socket. The caller must hold the run lock. Errors: OSError."""
        self.path = path
        self.peers: set[Peer] = set()
        self.is_end_requested = False  # set by a signal of ENDS
        # The name of a warning signal that the handler has not taken yet.
        self.pending_warning = ""
        self._selector = selectors.DefaultSelector()
        self._disconnected_peers: list[Peer] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._posted_calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
        self._listen()

    def run(self, handler: Handler, warnings: Sequence[signal.Signals] = WARNING_SIGNALS) -> None:
        """Serves until the handler has finished. `warnings`: signals that count as preemption notices and do not end
        the agent."""
        self._handler = handler
        for number in END_SIGNALS:
            # nohup sets SIGHUP to be ignored; keep that.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        for number in warnings:
            # Slurm sends the warning to every process of a step.
            signal.signal(number, self._on_warning)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        idle_s = _idle_s()
        while True:
            wake_s = self._settle()
            while self._disconnected_peers:
                self._call_guarded(handler.peer_disconnected, self._disconnected_peers.pop())
                wake_s = self._settle()
            if handler.can_exit() and self._try_to_end():
                return
            if self._timers:
                wake_s = min(self._timers[0][0], wake_s if wake_s is not None else self._timers[0][0])
            timeout_s = None if wake_s is None else min(max(0.0, wake_s - time.monotonic()), WAIT_S_MAX)
            ready = self._selector.select(timeout_s)
            idle_s, before_s = _idle_s(), idle_s
            late_s = idle_s - before_s - timeout_s if timeout_s is not None else 0.0
            if late_s >= SUSPENDED_S_MIN:
                self._call_guarded(handler.process_suspended, late_s)
            for key, events in ready:
                self._call_guarded(key.data, events)
            while self._posted_calls:
                self._call_guarded(self._posted_calls.popleft())
            # The clock is read once, since a timer that sets itself anew must not keep the loop here.
            now_s = time.monotonic()
            while self._timers and self._timers[0][0] <= now_s:
                self._call_guarded(heapq.heappop(self._timers)[2])

    def post(self, what: Callable[[], None]) -> None:
        """Queues `what` to run on the main thread, soon and in order. Any thread may call this."""
        self._posted_calls.append(what)
        # The descriptor is closed once the loop has ended; then nothing waits for this call.
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), what))

    def watch(self, sock: socket.socket | int, events: int, what: Callable[[int], None]) -> None:
        """As `Loop.watch`; `sock` may be another descriptor."""
        try:
            self._selector.modify(sock, events, what)
        except KeyError:
            self._selector.register(sock, events, what)

    def unwatch(self, sock: socket.socket | int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)

    def report_death(self, peer: Peer) -> None:
        """The peer's process is dead: handles its last messages, then tells the handler."""
        while self._receive(peer):
            pass
        peer.unwatch_death()
        self._call_guarded(self._handler.peer_died, peer)
        self.disconnect_peer(peer)

    def disconnect_peer(self, peer: Peer) -> None:
        if peer.is_open:
            self.unwatch(peer.sock)
            self.peers.discard(peer)
            peer.close()
            self._disconnected_peers.append(peer)

    def update_watch(self, peer: Peer) -> None:
        """Watches the peer's socket for room to send as long as packets wait."""
        if peer.is_open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
            self.watch(peer.sock, events, functools.partial(self._on_peer, peer))

    def close(self) -> None:
        for peer in list(self.peers):
            peer.unwatch_death()
            self.unwatch(peer.sock)
            peer.close()
        self.peers.clear()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_fd)

    # -- inside

    def _call_guarded(self, what: Callable[..., None], *given: object) -> None:
        """Calls `what` and logs its exception: an error in one callback must not end all jobs."""
        try:
            what(*given)
        except Exception:
            log.exception("the agent made a mistake, and goes on")

    def _settle(self) -> float | None:
        found: list[float | None] = []
        self._call_guarded(lambda: found.append(self._handler.settle()))
        return found[0] if found else time.monotonic() + RETRY_S

    def _listen(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError):
            # A killed agent has left this file. Nobody uses it, since this process holds the run lock.
            self.path.unlink()
        sock.bind(os.fspath(self.path))
        sock.listen(BACKLOG)
        self._listener = ServerSocket(self, sock, self._on_connection)

    def _try_to_end(self) -> bool:
        """Removes the socket and returns True. Returns False while a peer is just connecting or has unsent messages."""
        if any(peer.outbox for peer in self.peers):
            return False
        self.path.unlink(missing_ok=True)
        before = len(self.peers)
        self._listener.accept()
        self._listener.close()
        if len(self.peers) > before:
            self._listen()
            return False
        return True

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_end_requested = True
        os.eventfd_write(self._wake_fd, 1)

    def _on_warning(self, number: int, frame: object) -> None:
        self.pending_warning = signal.Signals(number).name
        os.eventfd_write(self._wake_fd, 1)

    def _on_wake(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):  # an earlier wake-up has taken the count
            os.eventfd_read(self._wake_fd)

    def _on_connection(self, sock: socket.socket, address: object) -> None:
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != os.getuid():
            log.warning("a connection of user %d was refused", uid)
            sock.close()
            return
        peer = Peer(self, sock, pid)
        self.peers.add(peer)
        self.update_watch(peer)

    def _on_peer(self, peer: Peer, events: int) -> None:
        if not peer.is_open:
            return
        if events & selectors.EVENT_WRITE:
            peer.flush()
            self.update_watch(peer)
        if events & selectors.EVENT_READ:
            for _ in range(MESSAGES_PER_TURN):
                if not self._receive(peer):
                    return

    def _receive(self, peer: Peer) -> bool:
        """Handles one message and returns True. Returns False if there is none."""
        if not peer.is_open:
            return False
        try:
            message = messages.receive(peer.sock)
        except BlockingIOError:
            return False
        # The peer closed its end without reading all that was sent. The kernel reports this once, before the peer's
        # last messages, so reading goes on after the first report.
        except ConnectionResetError:
            if not peer.was_reset:
                peer.was_reset = True
                return True
            message = None
        except OSError:
            message = None
        except Exception as exc:
            log.warning("a connection of process %d was closed: %s", peer.pid, exc)
            message = None
        if message is None:
            self.disconnect_peer(peer)
            return False
        try:
            if not deliver(self._handler.message, peer, message, f"process {peer.pid}"):
                self.disconnect_peer(peer)
        finally:
            message.close()
        return True


def _idle_s() -> float:
    """Seconds during which this thread did not work. Kernel work for this thread counts as work, such as mapping much
    memory."""
    return time.monotonic() - time.thread_time()
