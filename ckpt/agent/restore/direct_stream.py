"""Direct streams: connections on which a peer sends frames to one local rank, past the window.

A frame that only one rank wants, as one run of a tensor, needs no window, which would cost one more copy. The agent
connects to the holder, requests the frames, and hands the socket to the rank. The rank reads the bytes in the order it
was told, and verifies them. Frames that fail come from the next source, through the window. Main thread only.
"""

from __future__ import annotations

import collections
import itertools
import logging
import socket
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from ckpt.agent.net.transport import STREAM_FRAMES
from ckpt.agent.restore.peer_source import PeerSource
from ckpt.agent.restore.rank_request import Origin, RankRequest, StreamPeer
from ckpt.agent.restore.restore_session import FrameSource
from ckpt.agent.runtime.coroutines import Promise, Task, promise_of, spawn
from ckpt.agent.runtime.workers import error_text
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import shut_down

log = logging.getLogger("ckpt")

HOLDER_STREAMS_MAX = 2  # at a time from one holder: as many as a transfer has connections
RANK_STREAMS_MAX = 3  # at a time to one rank, which reads each on its own thread
SHARE_MIN = 8  # frames per connection; fewer are not divided further


@dataclass(eq=False, slots=True)
class FrameStream:
    """One stream of frames of that rank's arena on `holder`. `task`: None while the stream waits for its turn. `sock`:
    its connection, once it is made. `end`: fails with what ends the stream."""

    asked: RankRequest
    rank: int
    holder: str
    frames: list[int]
    task: Task[None] | None = None
    sock: socket.socket | None = None
    end: Promise[NoReturn] = field(default_factory=Promise)


class DirectStreams(FrameSource):
    """The frames of a peer source that go to one rank as one run."""

    def __init__(self, peers: PeerSource) -> None:
        self._peers = peers
        self._streams: dict[int, FrameStream] = {}  # by number, in the order of turns
        self._numbers = itertools.count()

    def select(self, frames: set[int], asked: RankRequest) -> set[int]:
        return self._peers.select(frames & asked.contiguous_frames, asked)

    def request(self, frames: set[int], asked: RankRequest) -> None:
        self.session.give(Origin(self.number, "peer"), asked, frames)
        for rank, mine in self._peers.by_rank(frames):
            holder = self._peers.holders_of(rank)[0]
            count = max(1, min(HOLDER_STREAMS_MAX, len(mine) // SHARE_MIN))
            share = min(STREAM_FRAMES, -(-len(mine) // count))
            for first in range(0, len(mine), share):
                stream = FrameStream(asked, rank, holder, mine[first : first + share])
                self._streams[next(self._numbers)] = stream
        self._start()

    def end_stream(self, receiver: StreamPeer, number: int) -> None:
        """A rank has stopped reading from the stream."""
        stream = self._streams.get(number)
        if stream is not None and stream.asked.receiver is receiver:
            stream.end.set_error(AgentError("the rank has stopped reading"))

    def drop_receiver(self, receiver: StreamPeer) -> None:
        self._drop(number for number, each in self._streams.items() if each.asked.receiver is receiver)
        self._start()

    def handle_disconnect(self, name: str) -> None:
        """Gives up the waiting streams of agent `name`, and cuts its open ones. A rank that was cut off reports so;
        `end_stream` follows."""
        theirs = {number: each for number, each in self._streams.items() if each.holder == name}
        waiting = [self._streams.pop(number) for number, each in theirs.items() if each.task is None]
        for stream in waiting:
            self._return_frames(stream, f"agent {name} is gone")
        for stream in theirs.values():
            if stream.sock is not None:
                shut_down(stream.sock)

    def close(self) -> None:
        self._drop(self._streams)

    # -- inside

    def _start(self) -> None:
        """Begins waiting streams, within the limits: first of the rank with the fewest, which was served longest
        ago."""
        while True:
            begun = [each for each in self._streams.values() if each.task is not None]
            busy = collections.Counter(each.holder for each in begun)
            served = collections.Counter(id(each.asked.receiver) for each in begun)
            able = [
                (number, each)
                for number, each in self._streams.items()
                if each.task is None
                and busy[each.holder] < HOLDER_STREAMS_MAX
                and served[id(each.asked.receiver)] < RANK_STREAMS_MAX
            ]
            if not able:
                return
            number, stream = min(able, key=lambda each: served[id(each[1].asked.receiver)])
            who = stream.asked.receiver
            self._streams = dict(sorted(self._streams.items(), key=lambda each: each[1].asked.receiver is who))
            stream.task = spawn(self._run(number, stream), self.session.guard)

    async def _run(self, number: int, stream: FrameStream) -> None:
        """Connects, and has the rank read from the connection until the stream's end."""
        peers, node = self._peers, self._peers.nodes[stream.holder]
        numbers = np.searchsorted(peers.numbers[stream.rank], stream.frames).tolist()
        name, addresses = peers.offer_name(stream.rank), peers.network.addresses(node)
        opening: Future[socket.socket] | None = None
        try:
            opening = peers.network.transport.stream(node.name, addresses, name, numbers)
            stream.sock = await promise_of(opening, self.session.post)
            fields = {"t": "frame-stream", "stream": number, "frames": stream.frames}
            stream.asked.receiver.send(fields, [stream.sock.fileno()])
            await stream.end
        except (CkptError, OSError) as exc:
            why = error_text(exc)
        finally:
            if opening is not None:
                opening.add_done_callback(_close)  # after a cancel, the connection may be made later
        del self._streams[number]
        self._return_frames(stream, why)
        self.session.post(self._start)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            task = self._streams.pop(number).task
            if task is not None:
                task.cancel()

    def _return_frames(self, stream: FrameStream, why: str) -> None:
        """What the rank has not acknowledged comes from the next source."""
        given, mine = stream.asked.given_frames, Origin(self.number, "peer")
        left = [frame for frame in stream.frames if given.get(frame) == mine]
        if left:
            log.info("%d frames have not come by a stream from agent %s: %s", len(left), stream.holder, why)
            self.session.reject(stream.asked, left, AgentError(why))


def _close(opening: Future[socket.socket]) -> None:
    if opening.exception() is None:
        shut_down(opening.result())  # ends the rank's duplicate of the descriptor, too
        opening.result().close()
