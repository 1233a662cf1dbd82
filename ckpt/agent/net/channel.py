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
import contextlib
import logging
import selectors
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from ckpt.agent.net import framing, handshake
from ckpt.agent.net.handshake import Session
from ckpt.agent.runtime.connections import Loop, deliver
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import SILENCE_S_MAX
from ckpt.ipc.messages import Message, error_fields

log = logging.getLogger("ckpt")

BEAT_S = 5.0
OUTBOX_BYTES_MAX = framing.BLOB_BYTES_MAX + (8 << 20)
BYTES_PER_TURN = 1 << 20  # read from or written to one peer before other peers get their turn
_SMALL = 64  # overhead in bytes that is counted for each waiting payload


class ChannelHandler(Protocol):
    """Handles the events of a channel. Runs on the main thread; `channel_closed` never runs inside a call to the
    channel."""

    def message(self, channel: Channel, message: Message) -> None:
        """Handles a message. A CkptError is sent back if the message has an id; any other error closes the channel."""
        ...

    def channel_closed(self, channel: Channel, why: AgentError) -> None:
        """The channel has closed itself. Called once; not called after `Channel.close`."""
        ...


class Channel:
    """One control connection; owns the socket. `peer`: the authenticated name of the other agent. `host`: the address
    that it leads to; "" if the peer has reset the connection already. Main thread only."""

    def __init__(
        self, loop: Loop, sock: socket.socket, session: Session, receiver: ChannelHandler, clock: Clock | None = None
    ) -> None:
        self.peer, self.host = session.peer, ""
        with contextlib.suppress(OSError):
            self.host = str(sock.getpeername()[0])
        self.secret_id = session.secret_id
        self.is_open = True
        self._loop, self._sock, self._session, self._handler = loop, sock, session, receiver
        self._clock = clock or SystemClock()
        self._assembler = framing.Assembler()
        self._outbox: collections.deque[framing.Payload] = collections.deque()
        self._outbox_bytes = 0
        self._unsent_record = memoryview(b"")  # the rest of the record that is being sent
        self._buffer = bytearray(handshake.RECORD_HEADER_BYTES)
        self._received_bytes = 0
        self._last_received_s = self._last_taken_s = self._last_sent_s = self._last_beat_s = self._clock.now_s()
        self._send_error = ""  # why nothing can be sent any more
        self._watched = 0
        self._watch()
        loop.call_later(BEAT_S, self._check_liveness)

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait to be sent."""
        return self._outbox_bytes + len(self._unsent_record)

    def send(self, fields: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        """Sends a message now, or when the socket has room; does nothing once the connection is gone. The blobs must
        not change until they are sent. Errors: AgentError if the message is larger than allowed."""
        made = framing.make_payloads(fields, blobs)
        if not self.is_open or self._send_error:
            return
        idle = not self.waiting_bytes
        for kind, payload in made:
            self._outbox.append((kind, payload))
            self._outbox_bytes += len(payload) + _SMALL
        if idle:
            # The peer's time to take something begins now, since nothing waited before.
            self._last_taken_s = self._clock.now_s()
            self._flush()
        if self._outbox_bytes > OUTBOX_BYTES_MAX:
            self._end_connection(f"does not take what it is sent: {self._outbox_bytes} bytes wait")

    def reply(self, request_id: int, body: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        self.send({"t": "reply", "id": request_id, **body}, blobs)

    def refuse(self, request_id: int, error: BaseException) -> None:
        self.send(error_fields(request_id, error))

    def close(self) -> None:
        """Closes the channel at once. Waiting messages are dropped, and `ChannelHandler.channel_closed` is not
        called."""
        if self.is_open:
            self.is_open = False
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._drop_waiting()

    # -- inside

    def _drop_waiting(self) -> None:
        self._outbox.clear()
        self._outbox_bytes, self._unsent_record = 0, memoryview(b"")

    def _read_remaining(self) -> None:
        """Handles the messages that arrived before the peer stopped taking ours, then closes the channel."""
        self._read(OUTBOX_BYTES_MAX)
        self._end_connection(self._send_error)

    def _end_connection(self, why: str) -> None:
        if self.is_open:
            self.close()
            error = AgentError(f"the connection to agent {self.peer} has ended: it {why}")
            self._loop.post(lambda: self._handler.channel_closed(self, error))

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.waiting_bytes else 0)
        if self.is_open and events != self._watched:
            self._watched = events
            self._loop.watch(self._sock, events, self._on_ready)

    def _check_liveness(self) -> None:
        """Sends a sign of life if the channel is idle, and closes the channel if the peer shows none."""
        if not self.is_open:
            return
        now_s = self._clock.now_s()
        late_s, self._last_beat_s = now_s - self._last_beat_s - BEAT_S, now_s
        # This process was stopped itself, so it could not hear the peer.
        if late_s >= BEAT_S:
            self._last_received_s, self._last_taken_s = (
                min(now_s, each + late_s) for each in (self._last_received_s, self._last_taken_s)
            )
        if now_s - self._last_received_s >= SILENCE_S_MAX:
            self._end_connection(f"has been silent for {now_s - self._last_received_s:.0f} s")
            return
        if self.waiting_bytes and now_s - self._last_taken_s >= SILENCE_S_MAX:
            self._end_connection(f"has taken nothing of what it was sent for {now_s - self._last_taken_s:.0f} s")
            return
        if not (self.waiting_bytes or self._send_error) and now_s - self._last_sent_s >= BEAT_S / 2:
            self._outbox.append((framing.ALIVE, b""))
            self._outbox_bytes += _SMALL
            self._last_taken_s = now_s
            self._flush()
        self._loop.call_later(BEAT_S, self._check_liveness)

    def _on_ready(self, events: int) -> None:
        if self.is_open and events & selectors.EVENT_WRITE:
            self._flush()
        if self.is_open and events & selectors.EVENT_READ:
            self._read()

    def _flush(self) -> None:
        """Sends waiting records, until the socket is full or BYTES_PER_TURN are sent."""
        room = BYTES_PER_TURN
        try:
            while room > 0 and self._load_next_record():
                sent = self._sock.send(self._unsent_record)
                self._unsent_record = self._unsent_record[sent:]
                self._last_taken_s = self._last_sent_s = self._clock.now_s()
                room -= sent
        except BlockingIOError:
            pass  # the socket is full
        except OSError as exc:
            self._drop_waiting()
            self._send_error = f"cannot be sent to: {exc.strerror or exc}"
            # Posted, since this may run inside the handler of one of the peer's messages.
            self._loop.post(self._read_remaining)
            return
        self._watch()

    def _load_next_record(self) -> bool:
        """Whether there is something to send. Seals the next record, so records are numbered in sending order."""
        if not self._unsent_record and self._outbox:
            kind, payload = self._outbox.popleft()
            self._outbox_bytes -= len(payload) + _SMALL
            self._unsent_record = memoryview(self._session.sealer.seal(kind, payload))
        return bool(self._unsent_record)

    def _read(self, room: int = BYTES_PER_TURN) -> None:
        try:
            while self.is_open and room > 0:
                got = self._sock.recv_into(memoryview(self._buffer)[self._received_bytes :])
                if not got:
                    self._end_connection("closed it" + (" in the middle of a message" if self._received_bytes else ""))
                    return
                self._received_bytes += got
                room -= got + _SMALL
                if self._received_bytes == len(self._buffer):
                    self._handle_bytes()
        except BlockingIOError:
            pass
        except OSError as exc:
            self._end_connection(f"cannot be heard: {exc.strerror or exc}")
        except CkptError as exc:
            log.warning("the connection to agent %s was closed: %s", self.peer, exc)
            self._end_connection(f"sent what is not sound: {exc}")

    def _handle_bytes(self) -> None:
        """Goes on after the awaited bytes have arrived: the header of a record, or the whole record."""
        if self._received_bytes == handshake.RECORD_HEADER_BYTES:
            self._buffer.extend(bytes(self._session.opener.rest_bytes(self._buffer)))
            return
        kind, payload = self._session.opener.open(self._buffer)
        # Only an authentic record shows that the peer lives.
        self._last_received_s = self._clock.now_s()
        self._buffer, self._received_bytes = bytearray(handshake.RECORD_HEADER_BYTES), 0
        message = self._assembler.add(kind, payload)
        if message is not None and not deliver(self._handler.message, self, message, f"agent {self.peer}"):
            self._end_connection(f"sent a malformed message: {message.kind[:100]}")
