"""The agent's main thread: one loop over its socket, its peers, their processes' ends, timers and results of threads.

Nothing here waits but the loop itself, and it sleeps until something happens: an idle agent uses no processor time.
A message that cannot be understood, or whose handling fails, closes the connection that it came on, and nothing else.
Whatever else fails is logged with its traceback, and the loop goes on: it serves more than one job.
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

from ckpt.agent.runtime.node_names import NodeNames
from ckpt.errors import AgentError, CkptError
from ckpt.ipc import messages
from ckpt.settings import WARNINGS

log = logging.getLogger("ckpt")

OUTBOX_MAX = 10_000  # packets for a peer that does not read; then it is let go
AT_ONCE = 64  # messages of one peer before the others have their turn
WAIT_S_MAX = 3600.0  # what the kernel is asked to wait at once: it counts in 32 bits of milliseconds
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOOD_STILL_S = 10.0  # that the loop comes round later than it was to, and was at no work
AGAIN_S = 1.0  # until what failed, settling or accepting, is tried again
_UCRED = struct.Struct("3i")


class Handler(Protocol):
    """What the messages mean. All of it runs on the main thread."""

    def message(self, peer: Peer, message: messages.Message) -> None:
        """Errors: CkptError is answered where the message has an id; any other closes the connection."""
        ...

    def ended(self, peer: Peer) -> None:
        """Its connection is gone; its process may live."""
        ...

    def died(self, peer: Peer) -> None:
        """Its process is dead (see `Server.watch_death`). Every message that it sent before has been handled."""
        ...

    def stood_still(self, for_s: float) -> None:
        """This process did not run for so long."""
        ...

    def settle(self) -> float | None:
        """Called after anything happened; when to call again at the latest, on the monotonic clock."""
        ...

    def finished(self) -> bool:
        """Whether the agent may end now."""
        ...


class Peer:
    """One connection. `pid`: the process at its other end, as the kernel says. `role`: "" until hello. `hung_up`: the
    other end is closed, and nothing is sent any more; what it said before that is still to be read."""

    def __init__(self, server: EventLoop, sock: socket.socket, pid: int) -> None:
        self.server = server
        self.sock = sock
        self.pid = pid
        self.pidfd: int | None = None
        self.role = ""
        self.open = True
        self.hung_up = self.was_reset = False
        self.outbox: collections.deque[messages.Packet] = collections.deque()

    def send(self, fields: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()) -> None:
        """Sends now, or when there is room; does nothing once the connection is gone."""
        if not self.open or self.hung_up:
            return
        packet = messages.pack(self.server.called.sent(fields), list(fds), blobs)
        if not self.outbox:
            try:
                packet.send(self.sock)
            except BlockingIOError:
                pass  # it has to wait
            except ConnectionError:
                packet.close()
                self._hang_up()
                return
            except OSError:
                packet.close()
                self.server.lose(self)
                return
            else:
                packet.close()
                return
        copies = [os.dup(fd) for fd in packet.fds]  # the owner may close its own before there is room
        packet.close()
        self.outbox.append(messages.Packet(packet.data, copies, list(copies)))
        if len(self.outbox) > OUTBOX_MAX:
            self.server.lose(self)
        else:
            self.server.update(self)

    def reply(
        self, request_id: int, body: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()
    ) -> None:
        self.send({"t": "reply", "id": request_id, **body}, fds, blobs)

    def refuse(self, request_id: int, error: BaseException) -> None:
        self.send(messages.error_fields(request_id, error))

    def flush(self) -> None:
        """Sends what waits, as far as there is room."""
        try:
            while self.outbox:
                self.outbox[0].send(self.sock)
                self.outbox.popleft().close()
        except BlockingIOError:
            return
        except ConnectionError:
            self._hang_up()
        except OSError:
            self.server.lose(self)

    def _hang_up(self) -> None:
        self.hung_up = True
        while self.outbox:
            self.outbox.popleft().close()

    def watch_death(self) -> None:
        """From here on the end of its process is told. A socket's end would not do: forked children hold it."""
        self.server.watch_death(self)

    def forget(self) -> None:
        """Its process' end is of no interest any more."""
        self.server.forget(self)

    def lose(self) -> None:
        """The connection is of no more use; the handler hears of it at the end of the round."""
        self.server.lose(self)

    def close(self) -> None:
        self.open = False
        self.sock.close()
        while self.outbox:
            self.outbox.popleft().close()


class EventLoop:
    """Owns the listening socket, the peers and the timers. `called`: what nodes are called in what it says to people.
    `post` may be called from any thread; all else is for the main thread only."""

    def __init__(self, path: Path) -> None:
        """Binds the socket; whoever calls this holds the run lock. Errors: OSError."""
        self.path = path
        self.called = NodeNames()
        self.peers: set[Peer] = set()
        self.end_asked = False  # by a signal
        self.warned = ""  # by that signal, and nobody has taken notice yet
        self._selector = selectors.DefaultSelector()
        self._lost: list[Peer] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
        self._listen()

    def run(self, handler: Handler, warnings: Sequence[signal.Signals] = WARNINGS) -> None:
        """Serves until the handler has finished. `warnings`: the signals that do not end it, and are notices."""
        self._handler = handler
        for number in ENDS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
                signal.signal(number, self._on_signal)
        for number in warnings:
            signal.signal(number, self._on_warning)  # Slurm sends it to every process of a step
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        idle_s = _idle_s()
        while True:
            wake_s = self._settle()
            while self._lost:
                self._guard(handler.ended, self._lost.pop())
                wake_s = self._settle()
            if handler.finished() and self._end():
                return
            if self._timers:
                wake_s = min(self._timers[0][0], wake_s if wake_s is not None else self._timers[0][0])
            timeout_s = None if wake_s is None else min(max(0.0, wake_s - time.monotonic()), WAIT_S_MAX)
            ready = self._selector.select(timeout_s)
            idle_s, before_s = _idle_s(), idle_s
            late_s = idle_s - before_s - timeout_s if timeout_s is not None else 0.0
            if late_s >= STOOD_STILL_S:
                self._guard(handler.stood_still, late_s)
            for key, events in ready:
                self._guard(key.data, events)
            while self._posted:
                self._guard(self._posted.popleft())
            now_s = time.monotonic()  # read once: a timer that sets itself anew must not keep the loop
            while self._timers and self._timers[0][0] <= now_s:
                self._guard(heapq.heappop(self._timers)[2])

    def post(self, what: Callable[[], None]) -> None:
        """Runs it on the main thread, soon and in order."""
        self._posted.append(what)
        with contextlib.suppress(OSError):  # the loop has ended, and with it all that waited for this
            os.eventfd_write(self._wake, 1)

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), what))

    def watch(self, sock: socket.socket, events: int, what: Callable[[int], None]) -> None:
        """Calls `what(events)` whenever the socket is ready for some of `events`; a second call for it replaces the
        first."""
        try:
            self._selector.modify(sock, events, what)
        except KeyError:
            self._selector.register(sock, events, what)

    def unwatch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)

    def watch_death(self, peer: Peer) -> None:
        if peer.pidfd is not None:
            return
        try:
            peer.pidfd = os.pidfd_open(peer.pid)
        except OSError as exc:
            raise AgentError(f"cannot watch process {peer.pid}: {exc}; is it in another pid namespace?") from exc
        self._selector.register(peer.pidfd, selectors.EVENT_READ, functools.partial(self._on_death, peer))

    def forget(self, peer: Peer) -> None:
        if peer.pidfd is not None:
            self._selector.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None

    def lose(self, peer: Peer) -> None:
        if peer.open:
            self._selector.unregister(peer.sock)
            self.peers.discard(peer)
            peer.close()
            self._lost.append(peer)

    def update(self, peer: Peer) -> None:
        """Watches for room as long as something waits to be sent."""
        if peer.open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
            self._selector.modify(peer.sock, events, functools.partial(self._on_peer, peer))

    def close(self) -> None:
        for peer in list(self.peers):
            self.forget(peer)
            self._selector.unregister(peer.sock)
            peer.close()
        self.peers.clear()
        self._selector.close()
        self._listener.close()
        os.close(self._wake)

    # -- inside

    def _guard(self, what: Callable[..., None], *given: object) -> None:
        """A mistake in one callback is not the end of all jobs."""
        try:
            what(*given)
        except Exception:
            log.exception("the agent made a mistake, and goes on")

    def _settle(self) -> float | None:
        try:
            return self._handler.settle()
        except Exception:
            log.exception("the agent made a mistake, and goes on")
            return time.monotonic() + AGAIN_S

    def _listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()  # of an agent that was killed: the run lock is ours
        self._listener.bind(os.fspath(self.path))
        self._listener.listen(256)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connect)

    def _rest(self) -> None:
        """Who waits to be accepted is left alone for a while: it would keep the loop busy, to no end."""
        listener = self._listener
        self._deafen()

        def again() -> None:
            if listener.fileno() >= 0:  # else it was closed meanwhile
                self._selector.register(listener, selectors.EVENT_READ, self._on_connect)

        self.later(AGAIN_S, again)

    def _deafen(self) -> None:
        self.unwatch(self._listener)  # unless it rests

    def _end(self) -> bool:
        """Takes the socket away, unless somebody is just connecting or has not got all of its messages."""
        if any(peer.outbox for peer in self.peers):
            return False
        self.path.unlink(missing_ok=True)
        before = len(self.peers)
        self._on_connect(selectors.EVENT_READ)
        self._deafen()
        self._listener.close()
        if len(self.peers) > before:
            self._listen()
            return False
        return True

    def _on_signal(self, number: int, frame: object) -> None:
        self.end_asked = True
        os.eventfd_write(self._wake, 1)

    def _on_warning(self, number: int, frame: object) -> None:
        self.warned = signal.Signals(number).name
        os.eventfd_write(self._wake, 1)

    def _on_wake(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):  # another wake-up has taken the count
            os.eventfd_read(self._wake)

    def _on_connect(self, events: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:  # no more descriptors, or the caller is gone again
                log.warning("a connection could not be accepted: %s", exc)
                self._rest()
                return
            sock.setblocking(False)
            pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid != os.getuid():
                log.warning("a connection of user %d was refused", uid)
                sock.close()
                continue
            peer = Peer(self, sock, pid)
            self.peers.add(peer)
            self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._on_peer, peer))

    def _on_peer(self, peer: Peer, events: int) -> None:
        if not peer.open:
            return
        if events & selectors.EVENT_WRITE:
            peer.flush()
            self.update(peer)
        if events & selectors.EVENT_READ:
            for _ in range(AT_ONCE):
                if not self._receive(peer):
                    return

    def _receive(self, peer: Peer) -> bool:
        """Handles one message; False where there is none."""
        if not peer.open:
            return False
        try:
            message = messages.receive(peer.sock)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it closed without reading all of ours; the kernel says so once, and first
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
            self.lose(peer)
            return False
        try:
            self._handler.message(peer, message)
        except CkptError as exc:
            request_id = message.fields.get("id")
            if isinstance(request_id, int):
                peer.refuse(request_id, exc)
            else:
                log.warning("%s of process %d: %s", message.kind, peer.pid, exc)
        except Exception as exc:
            what = "a connection of process %d was closed: its message %r is malformed: %r"
            log.warning(what, peer.pid, message.kind[:100], exc, exc_info=True)
            self.lose(peer)
        finally:
            message.close()
        return True

    def _on_death(self, peer: Peer, events: int) -> None:
        while self._receive(peer):
            pass
        self.forget(peer)
        self._guard(self._handler.died, peer)
        self.lose(peer)


def _idle_s() -> float:
    """On a clock that stands while this thread is at work, be it the kernel's for it, as where much memory goes."""
    return time.monotonic() - time.thread_time()
