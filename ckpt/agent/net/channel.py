"""A control connection to another agent, after the handshake: carries authenticated messages in order until it ends.

The agent's main thread drives a channel and never blocks on it. A channel closes itself and tells its handler if
- a record is not authentic, or a message is malformed;
- the peer is silent for SILENT_S (both sides send a sign of life every BEAT_S);
- the peer takes nothing for SILENT_S, or more than OUTBOX_BYTES_MAX are waiting.

Time in which this process itself was stopped does not count. Sent messages may be lost with the connection. The end of
a connection proves nothing, since anybody on the network can cut it. Messages that arrived before the end are handled,
also if the end is noticed while sending.
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
AT_ONCE_BYTES = 1 << 20  # read from or written to one peer before other peers get their turn
_SMALL = 64  # overhead in bytes that is counted for each waiting payload


class ChannelHandler(Protocol):
    """Handles the events of a channel. Runs on the main thread; `closed` never runs inside a call to the channel."""

    def message(self, channel: Channel, message: Message) -> None:
        """Handles a message. A CkptError is sent back if the message has an id; any other error closes the channel."""
        ...

    def closed(self, channel: Channel, why: AgentError) -> None:
        """The channel has closed itself. Called once; not called after `Channel.close`."""
        ...


class Channel:
    """One control connection; owns the socket. `peer`: the authenticated name of the other agent. Main thread only."""

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
        self._sending = memoryview(b"")  # the rest of the record that is being sent
        self._room = bytearray(handshake.RECORD_HEADER_BYTES)
        self._got = 0
        self._heard_s = self._moved_s = self._said_s = self._beat_s = self._clock.now_s()
        self._deaf = ""  # why nothing can be sent any more
        self._watched = 0
        self._watch()
        loop.later(BEAT_S, self._beat)

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait to be sent."""
        return self._outbox_bytes + len(self._sending)

    def send(self, fields: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        """Sends a message now, or when the socket has room; does nothing once the connection is gone. The blobs must
        not change until they are sent. Errors: AgentError if the message is larger than allowed."""
        made = framing.payloads(fields, blobs)
        if not self.open or self._deaf:
            return
        idle = not self.waiting_bytes
        for kind, payload in made:
            self._outbox.append((kind, payload))
            self._outbox_bytes += len(payload) + _SMALL
        if idle:
            # The peer's time to take something begins now, since nothing waited before.
            self._moved_s = self._clock.now_s()
            self._flush()
        if self._outbox_bytes > OUTBOX_BYTES_MAX:
            self._lose(f"does not take what it is sent: {self._outbox_bytes} bytes wait")

    def reply(self, request_id: int, body: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        self.send({"t": "reply", "id": request_id, **body}, blobs)

    def refuse(self, request_id: int, error: BaseException) -> None:
        self.send(error_fields(request_id, error))

    def close(self) -> None:
        """Closes the channel at once. Waiting messages are dropped, and `ChannelHandler.closed` is not called."""
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
        """Handles the messages that arrived before the peer stopped taking ours, then closes the channel."""
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
        """Sends a sign of life if the channel is idle, and closes the channel if the peer shows none."""
        if not self.open:
            return
        now_s = self._clock.now_s()
        late_s, self._beat_s = now_s - self._beat_s - BEAT_S, now_s
        # This process was stopped itself, so it could not hear the peer.
        if late_s >= BEAT_S:
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
        """Sends waiting records, until the socket is full or AT_ONCE_BYTES are sent."""
        room = AT_ONCE_BYTES
        try:
            while room > 0 and self._more():
                sent = self._sock.send(self._sending)
                self._sending = self._sending[sent:]
                self._moved_s = self._said_s = self._clock.now_s()
                room -= sent
        except BlockingIOError:
            pass  # the socket is full
        except OSError as exc:
            self._drop_waiting()
            self._deaf = f"cannot be sent to: {exc.strerror or exc}"
            # Posted, since this may run inside the handler of one of the peer's messages.
            self._loop.post(self._hear_the_rest)
            return
        self._watch()

    def _more(self) -> bool:
        """Whether there is something to send. Seals the next record, so records are numbered in sending order."""
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
        """Goes on after the awaited bytes have arrived: the header of a record, or the whole record."""
        if self._got == handshake.RECORD_HEADER_BYTES:
            self._room.extend(bytes(self._session.opener.rest_bytes(self._room)))
            return
        kind, payload = self._session.opener.open(self._room)
        # Only an authentic record shows that the peer lives.
        self._heard_s = self._clock.now_s()
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
