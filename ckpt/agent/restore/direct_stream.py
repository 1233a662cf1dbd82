"""Direct streams: connections on which a peer sends frames to one local rank, past the window.

A frame that only one rank wants, as one run of a tensor, needs no window, which would cost one more copy. The agent
connects to the holder, requests the frames, and hands the socket to the rank. The rank reads the bytes in the order it
was told, and verifies them. Frames that fail come through the window instead (peer_source.py). Main thread only.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt.agent.net.transport import STREAM_FRAMES
from ckpt.agent.runtime.workers import failure
from ckpt.errors import CkptError
from ckpt.ipc.addresses import shut_down

log = logging.getLogger("ckpt")

HOLDER_STREAMS_MAX = 2  # at a time from one holder: as many as a transfer has connections
RANK_STREAMS_MAX = 3  # at a time to one rank, which reads each on its own thread
SHARE_MIN = 8  # frames per connection; fewer are not divided further


class StreamPeer(Protocol):
    """A local rank's connection. Sending to a rank that is gone does nothing."""

    def send(self, fields: dict[str, Any], fds: Iterable[int] = ..., blobs: Sequence[bytes] = ...) -> None: ...


@dataclass(eq=False, slots=True)
class FrameStream:
    """One stream. `open(frames)`: begins the connection. `left(frames)`: hears the frames that did not come by it.
    `pending_frames`: frames that the rank has not acknowledged yet."""

    receiver: StreamPeer
    holder: str
    frames: list[int]
    open_socket: Callable[[list[int]], Future[socket.socket]]
    on_missing: Callable[[list[int]], None]
    pending_frames: set[int] = field(default_factory=set)
    sock: socket.socket | None = None


class DirectStreams:
    """The direct streams of one restore. `post`: runs a function on the main thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._queued_streams: collections.deque[FrameStream] = collections.deque()
        self._streams_by_number: dict[int, FrameStream] = {}  # by number, also those that are still connecting
        self._numbers = itertools.count()
        self._streams_by_frame: dict[tuple[int, int], FrameStream] = {}  # (frame, id of the receiver) -> its stream

    def queue_streams(
        self,
        receiver: StreamPeer,
        holder: str,
        frames: list[int],
        open: Callable[[list[int]], Future[socket.socket]],
        left: Callable[[list[int]], None],
    ) -> None:
        """Queues streams for these frames of one offer of `holder`, ascending. `start_streams` begins them."""
        count = max(1, min(HOLDER_STREAMS_MAX, len(frames) // SHARE_MIN))
        share = min(STREAM_FRAMES, -(-len(frames) // count))
        for first in range(0, len(frames), share):
            part = frames[first : first + share]
            stream = FrameStream(receiver, holder, part, open, left, set(part))
            self._queued_streams.append(stream)
            self._streams_by_frame.update(((frame, id(receiver)), stream) for frame in part)

    def start_streams(self) -> None:
        """Begins waiting streams, within the limits STREAMS per holder and RANK_STREAMS_MAX per rank."""
        while (stream := self._next_stream()) is not None:
            self._queued_streams.remove(stream)
            served = stream.receiver
            self._queued_streams = collections.deque(
                sorted(self._queued_streams, key=lambda each: each.receiver is served)
            )
            self._begin_stream(stream)

    def acknowledge_frame(self, frame: int, receiver: StreamPeer) -> bool:
        """A rank has acknowledged the frame. Returns whether it came by a stream."""
        stream = self._streams_by_frame.pop((frame, id(receiver)), None)
        if stream is not None:
            stream.pending_frames.discard(frame)
        return stream is not None

    def end_stream(self, receiver: StreamPeer, number: int) -> None:
        """A rank has stopped reading from the stream."""
        stream = self._streams_by_number.get(number)
        if stream is not None and stream.receiver is receiver:
            self._close_stream(number)

    def drop_receiver(self, receiver: StreamPeer) -> None:
        """Ends all streams of a rank that is gone, done, or requests anew."""
        for stream in [each for each in self._queued_streams if each.receiver is receiver]:
            self._queued_streams.remove(stream)
            self._discard_stream(stream)
        for number in [n for n, each in self._streams_by_number.items() if each.receiver is receiver]:
            self._discard_stream(self._streams_by_number.pop(number))
        self.start_streams()

    def handle_disconnect(self, name: str) -> None:
        """Agent `name` has disconnected: gives up its waiting streams, and cuts its open ones. A rank that was cut off
        reports so; `end_stream` follows. The frames come from other sources, or through the window once it is back."""
        while (stream := next((each for each in self._queued_streams if each.holder == name), None)) is not None:
            self._queued_streams.remove(stream)
            self._return_frames(stream)
        for stream in self._streams_by_number.values():
            if stream.holder == name and stream.sock is not None:
                shut_down(stream.sock)

    def close(self) -> None:
        for stream in [*self._queued_streams, *self._streams_by_number.values()]:
            self._discard_stream(stream)
        self._queued_streams.clear()
        self._streams_by_number.clear()

    # -- inside

    def _next_stream(self) -> FrameStream | None:
        """The next stream to begin: of the rank with the fewest open ones; among equals the one served longest ago."""
        busy = collections.Counter(stream.holder for stream in self._streams_by_number.values())
        gets = collections.Counter(id(stream.receiver) for stream in self._streams_by_number.values())
        able = [
            each
            for each in self._queued_streams
            if busy[each.holder] < HOLDER_STREAMS_MAX and gets[id(each.receiver)] < RANK_STREAMS_MAX
        ]
        return min(able, key=lambda stream: gets[id(stream.receiver)], default=None)

    def _begin_stream(self, stream: FrameStream) -> None:
        number = next(self._numbers)
        self._streams_by_number[number] = stream
        try:
            opening = stream.open_socket(stream.frames)
        except (CkptError, OSError) as exc:
            log.info("no stream from agent %s: %s", stream.holder, exc)
            self._post(lambda: self._close_stream(number))
            return
        opening.add_done_callback(lambda done: self._post(functools.partial(self._hand_over_socket, number, done)))

    def _hand_over_socket(self, number: int, done: Future[socket.socket]) -> None:
        stream, error = self._streams_by_number.get(number), failure(done)
        if error:
            if stream is not None:
                log.info("no stream from agent %s: %s", stream.holder, error)
                self._close_stream(number)
            return
        sock = done.result()
        if stream is None:  # ended while it connected
            sock.close()
            return
        stream.sock = sock
        stream.receiver.send({"t": "frame-stream", "stream": number, "frames": stream.frames}, [sock.fileno()])

    def _close_stream(self, number: int) -> None:
        stream = self._streams_by_number.pop(number, None)
        if stream is not None:
            self._return_frames(stream)
            self.start_streams()

    def _return_frames(self, stream: FrameStream) -> None:
        left = sorted(stream.pending_frames)
        self._discard_stream(stream)
        if left:
            stream.on_missing(left)

    def _discard_stream(self, stream: FrameStream) -> None:
        for frame in stream.pending_frames:
            del self._streams_by_frame[frame, id(stream.receiver)]
        stream.pending_frames.clear()
        if stream.sock is not None:
            shut_down(stream.sock)  # ends the rank's duplicate of the descriptor, too
            stream.sock.close()
            stream.sock = None
