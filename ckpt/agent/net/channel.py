"""A control connection to another agent, after the handshake: numbered, authentic messages, in order, until it ends.

The agent's main thread drives it and never waits for it. It is let go, and its owner told, when anything arrives that
is not authentic or not sound, when the peer has been silent for SILENT_S (both sides say that they live every BEAT_S),
or when it does not take what is sent: nothing for SILENT_S, or OUTBOX_BYTES_MAX are waiting. Time in which this process
stood still itself, as one that is stopped does, does not count. What was sent may be lost with the connection; an end
proves nothing, for anybody can cut it. But what has arrived from a peer that is gone is heard, also where its end is
found out by sending to it.
"""

from __future__ import annotations

import collections
import logging
import selectors
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from ckpt.agent.net import framing, handshake
from ckpt.agent.net.dialer import Loop
from ckpt.agent.net.handshake import Session
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import SILENT_S
from ckpt.ipc.messages import Message, error_fields

log = logging.getLogger("ckpt")

BEAT_S = 5.0
OUTBOX_BYTES_MAX = framing.BLOB_BYTES_MAX + (8 << 20)
AT_ONCE_BYTES = 1 << 20  # read or written of one peer before the others have their turn
_SMALL = 64  # what a waiting message costs beside its bytes


class ChannelHandler(Protocol):
    """Who is told. All of it runs on the main thread, and `closed` never from inside a call of the channel's."""

    def message(self, channel: Channel, message: Message) -> None:
        """Errors: CkptError is answered where the message has an id; any other closes the connection."""
        ...

    def closed(self, channel: Channel, why: AgentError) -> None:
        """It is gone, and not because `close` was called. Told once."""
        ...


class Channel:
    """Takes over the socket. `peer`: the name that the other agent proved to have. Main thread only."""

    def __init__(
        self, loop: Loop, sock: socket.socket, session: Session, receiver: ChannelHandler, clock: Clock | None = None
    ) -> None:
        self.peer = session.peer
        self.run = session.run
        self.open = True
        self._loop, self._sock, self._session, self._receiver = loop, sock, session, receiver
        self._clock = clock or SystemClock()
        self._assembler = framing.Assembler()
        self._outbox: collections.deque[framing.Payload] = collections.deque()
        self._outbox_bytes = 0
        self._sending = memoryview(b"")  # what is left of the record that is being sent
        self._room = bytearray(handshake.RECORD_HEADER_BYTES)
        self._got = 0
        self._heard_s = self._moved_s = self._said_s = self._beat_s = self._clock.now_s()
        self._deaf = ""  # why it takes nothing any more
        self._watched = 0
        self._watch()
        loop.later(BEAT_S, self._beat)

    @property
    def waiting_bytes(self) -> int:
        """How much of what was to be sent is still here."""
        return self._outbox_bytes + len(self._sending)

    def send(self, fields: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        """Sends now, or when there is room; does nothing once the connection is gone. The blobs must not change until
        they are sent. Errors: AgentError for a message that is larger than allowed."""
        made = framing.payloads(fields, blobs)
        if not self.open or self._deaf:
            return
        idle = not self.waiting_bytes
        for kind, payload in made:
            self._outbox.append((kind, payload))
            self._outbox_bytes += len(payload) + _SMALL
        if idle:
            self._moved_s = self._clock.now_s()  # nothing was to be moved before
            self._flush()
        if self._outbox_bytes > OUTBOX_BYTES_MAX:
            self._lose(f"does not take what it is sent: {self._outbox_bytes} bytes wait")

    def reply(self, request_id: int, body: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        self.send({"t": "reply", "id": request_id, **body}, blobs)

    def refuse(self, request_id: int, error: BaseException) -> None:
        self.send(error_fields(request_id, error))

    def close(self) -> None:
        """At once: what waits is dropped, and `Receiver.closed` is not called."""
        if self.open:
            self.open = False
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._drop_waiting()

    # -- inside

    def _drop_waiting(self) -> None:
        self._outbox.clear()
        self._outbox_bytes, self._sending = 0, memoryview(b"")

    def _hear_the_rest(self) -> None:
        """It takes nothing any more; what it said before that is here, or lost."""
        self._read(OUTBOX_BYTES_MAX)
        self._lose(self._deaf)

    def _lose(self, why: str) -> None:
        if self.open:
            self.close()
            error = AgentError(f"the connection to agent {self.peer} has ended: it {why}")
            self._loop.post(lambda: self._receiver.closed(self, error))

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.waiting_bytes else 0)
        if self.open and events != self._watched:
            self._watched = events
            self._loop.watch(self._sock, events, self._on_ready)

    def _beat(self) -> None:
        """Tells the peer that we live, and whether it does."""
        if not self.open:
            return
        now_s = self._clock.now_s()
        late_s, self._beat_s = now_s - self._beat_s - BEAT_S, now_s
        if late_s >= BEAT_S:  # we stood still ourselves: nobody was heard, since nobody listened
            self._heard_s, self._moved_s = (min(now_s, each + late_s) for each in (self._heard_s, self._moved_s))
        if now_s - self._heard_s >= SILENT_S:
            self._lose(f"has been silent for {now_s - self._heard_s:.0f} s")
            return
        if self.waiting_bytes and now_s - self._moved_s >= SILENT_S:
            self._lose(f"has taken nothing of what it was sent for {now_s - self._moved_s:.0f} s")
            return
        if not (self.waiting_bytes or self._deaf) and now_s - self._said_s >= BEAT_S / 2:
            self._outbox.append((framing.ALIVE, b""))
            self._outbox_bytes += _SMALL
            self._moved_s = now_s
            self._flush()
        self._loop.later(BEAT_S, self._beat)

    def _on_ready(self, events: int) -> None:
        if self.open and events & selectors.EVENT_WRITE:
            self._flush()
        if self.open and events & selectors.EVENT_READ:
            self._read()

    def _flush(self) -> None:
        """Sends what waits, as far as there is room and it is our turn."""
        room = AT_ONCE_BYTES
        try:
            while room > 0 and self._more():
                sent = self._sock.send(self._sending)
                self._sending = self._sending[sent:]
                self._moved_s = self._said_s = self._clock.now_s()
                room -= sent
        except BlockingIOError:
            pass  # it has to wait
        except OSError as exc:
            self._drop_waiting()
            self._deaf = f"cannot be sent to: {exc.strerror or exc}"
            self._loop.post(self._hear_the_rest)  # not from here: one of its messages may be being handled
            return
        self._watch()

    def _more(self) -> bool:
        """Whether there is something to send. Records are numbered here, in the order in which they go out."""
        if not self._sending and self._outbox:
            kind, payload = self._outbox.popleft()
            self._outbox_bytes -= len(payload) + _SMALL
            self._sending = memoryview(self._session.sealer.seal(kind, payload))
        return bool(self._sending)

    def _read(self, room: int = AT_ONCE_BYTES) -> None:
        try:
            while self.open and room > 0:
                got = self._sock.recv_into(memoryview(self._room)[self._got :])
                if not got:
                    self._lose("closed it" + (" in the middle of a message" if self._got else ""))
                    return
                self._got += got
                room -= got + _SMALL
                if self._got == len(self._room):
                    self._took()
        except BlockingIOError:
            pass
        except OSError as exc:
            self._lose(f"cannot be heard: {exc.strerror or exc}")
        except CkptError as exc:
            log.warning("the connection to agent %s was closed: %s", self.peer, exc)
            self._lose(f"sent what is not sound: {exc}")

    def _took(self) -> None:
        """What was waited for is here: the header of a record, or all of it."""
        if self._got == handshake.RECORD_HEADER_BYTES:
            self._room.extend(bytes(self._session.opener.rest_bytes(self._room)))
            return
        kind, payload = self._session.opener.open(self._room)
        self._heard_s = self._clock.now_s()  # only what is authentic shows that the peer lives
        self._room, self._got = bytearray(handshake.RECORD_HEADER_BYTES), 0
        message = self._assembler.add(kind, payload)
        if message is not None:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        try:
            self._receiver.message(self, message)
        except CkptError as exc:
            request_id = message.fields.get("id")
            if isinstance(request_id, int):
                self.refuse(request_id, exc)
            else:
                log.warning("%s of agent %s: %s", message.kind, self.peer, exc)
        except Exception as exc:
            what = "the connection to agent %s was closed: its message %r is malformed: %r"
            log.warning(what, self.peer, message.kind[:100], exc, exc_info=True)
            self._lose(f"sent a malformed message: {message.kind[:100]}")
