"""Frames that other nodes hold, straight into the tensors of the one rank here that wants them.

What lies in a tensor as one run, and is wanted by one rank only, need not pass through the window: that costs a copy
more of everything. So the connection that gives it is made, and asked, here, and then handed to the rank, which reads
nothing but bytes from it, in the order that it is told, and checks them. What does not come by it is brought through
the window like all the rest (`peerframes`), where it is asked for again, or elsewhere. Main thread only.
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
from ckpt.ipc.addresses import cut

log = logging.getLogger("ckpt")

STREAMS = 2  # at a time from one holder: as many as a transfer has connections
RANK_STREAMS = 3  # at a time to one rank, which has a thread for each, and one for what comes by the window
SHARE_MIN = 8  # frames: fewer are not divided among connections


class StreamPeer(Protocol):
    """A rank's connection. Sending to one that is gone does nothing."""

    def send(self, fields: dict[str, Any], fds: Iterable[int] = ..., blobs: Sequence[bytes] = ...) -> None: ...


@dataclass(eq=False, slots=True)
class FrameStream:
    """`open(numbers)`: begins the connection. `left`: told of the frames that did not come by it."""

    receiver: StreamPeer
    holder: str
    frames: list[int]
    open: Callable[[list[int]], Future[socket.socket]]
    left: Callable[[list[int]], None]
    coming: set[int] = field(default_factory=set)
    sock: socket.socket | None = None


class DirectStreams:
    """The streams of one restore. `post`: runs what it is given on the main thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._waiting: collections.deque[FrameStream] = collections.deque()
        self._open: dict[int, FrameStream] = {}  # by number, those that are being made among them
        self._numbers = itertools.count()
        self._by_frame: dict[tuple[int, int], FrameStream] = {}  # frame, receiver

    def add(
        self,
        receiver: StreamPeer,
        holder: str,
        frames: list[int],
        open: Callable[[list[int]], Future[socket.socket]],
        left: Callable[[list[int]], None],
    ) -> None:
        """These frames of one offer of `holder`, ascending. Begin with `pump`."""
        count = max(1, min(STREAMS, len(frames) // SHARE_MIN))
        share = min(STREAM_FRAMES, -(-len(frames) // count))
        for first in range(0, len(frames), share):
            part = frames[first : first + share]
            stream = FrameStream(receiver, holder, part, open, left, set(part))
            self._waiting.append(stream)
            self._by_frame.update(((frame, id(receiver)), stream) for frame in part)

    def pump(self) -> None:
        """Begins what waits, as far as its holder has not enough to give, and its rank not enough to take."""
        while (stream := self._next()) is not None:
            self._waiting.remove(stream)
            served = stream.receiver
            self._waiting = collections.deque(sorted(self._waiting, key=lambda each: each.receiver is served))
            self._begin(stream)

    def has_come(self, frame: int, receiver: StreamPeer) -> bool:
        """That rank has it, and it came by a stream; False where it did not."""
        stream = self._by_frame.pop((frame, id(receiver)), None)
        if stream is not None:
            stream.coming.discard(frame)
        return stream is not None

    def ended(self, receiver: StreamPeer, number: int) -> None:
        """That rank reads no more from that stream."""
        stream = self._open.get(number)
        if stream is not None and stream.receiver is receiver:
            self._end(number)

    def drop(self, receiver: StreamPeer) -> None:
        """It is gone, or asks anew."""
        for stream in [each for each in self._waiting if each.receiver is receiver]:
            self._waiting.remove(stream)
            self._forget(stream)
        for number in [n for n, each in self._open.items() if each.receiver is receiver]:
            self._forget(self._open.pop(number))
        self.pump()

    def source_gone(self, name: str) -> None:
        """That agent is not connected any more: what it was to give comes from elsewhere, or by the window once it is
        back. Ranks find a connection at its end, and say so."""
        while (stream := next((each for each in self._waiting if each.holder == name), None)) is not None:
            self._waiting.remove(stream)
            self._give_up(stream)
        for stream in self._open.values():
            if stream.holder == name and stream.sock is not None:
                cut(stream.sock)

    def close(self) -> None:
        for stream in [*self._waiting, *self._open.values()]:
            self._forget(stream)
        self._waiting.clear()
        self._open.clear()

    # -- inside

    def _next(self) -> FrameStream | None:
        """Of a rank that gets the least now, and got something longest ago: none waits until others have all theirs."""
        busy = collections.Counter(stream.holder for stream in self._open.values())
        gets = collections.Counter(id(stream.receiver) for stream in self._open.values())
        able = [
            each for each in self._waiting if busy[each.holder] < STREAMS and gets[id(each.receiver)] < RANK_STREAMS
        ]
        return min(able, key=lambda stream: gets[id(stream.receiver)], default=None)

    def _begin(self, stream: FrameStream) -> None:
        number = next(self._numbers)
        self._open[number] = stream
        try:
            opening = stream.open(stream.frames)
        except (CkptError, OSError) as exc:
            log.info("no stream from agent %s: %s", stream.holder, exc)
            self._post(lambda: self._end(number))
            return
        opening.add_done_callback(lambda done: self._post(functools.partial(self._opened, number, done)))

    def _opened(self, number: int, done: Future[socket.socket]) -> None:
        stream, error = self._open.get(number), failure(done)
        if error:
            if stream is not None:
                log.info("no stream from agent %s: %s", stream.holder, error)
                self._end(number)
            return
        sock = done.result()
        if stream is None:  # nobody waits for it any more
            sock.close()
            return
        stream.sock = sock
        stream.receiver.send({"t": "stream", "stream": number, "frames": stream.frames}, [sock.fileno()])

    def _end(self, number: int) -> None:
        stream = self._open.pop(number, None)
        if stream is not None:
            self._give_up(stream)
            self.pump()

    def _give_up(self, stream: FrameStream) -> None:
        left = sorted(stream.coming)
        self._forget(stream)
        if left:
            stream.left(left)

    def _forget(self, stream: FrameStream) -> None:
        for frame in stream.coming:
            del self._by_frame[frame, id(stream.receiver)]
        stream.coming.clear()
        if stream.sock is not None:
            cut(stream.sock)  # the rank has a descriptor of its own
            stream.sock.close()
            stream.sock = None
