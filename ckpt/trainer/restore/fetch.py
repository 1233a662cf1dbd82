"""The fetch of one checkpoint's frames: the agent says where each lies in shared memory; this rank copies and checks
it.

A frame counts as fetched only if its hash was right at, or after, the copy. A wrong frame is reported, and comes again
from the agent's next source. The agent reuses its windows only after they were acknowledged.

Two kinds of frames may bypass the windows:
- For frames that this rank takes as one run, and no other rank of this node wants, the agent may hand over a connection
  to the node that has them. The bytes are received where they belong.
- For frames in a local folder the agent may name the files. This rank reads them itself (file_reads.py).

A frame that does not arrive this way, or arrives damaged, then comes through a window.
"""

from __future__ import annotations

import logging
import queue
import socket
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import numpy as np

from ckpt.errors import AgentError, from_kind
from ckpt.format.frames import FrameHasher
from ckpt.ipc.addresses import PIECE_BYTES, SocketReceiver, shut_down
from ckpt.ipc.arena import Arena
from ckpt.ipc.file_list import FileList
from ckpt.ipc.messages import Message
from ckpt.threads import Flag, Outcome, Tasks
from ckpt.trainer.link.link import Link
from ckpt.trainer.restore import file_reads
from ckpt.trainer.restore.file_reads import BATCH_BYTES, Deliver
from ckpt.trainer.restore.fill import Filler
from ckpt.types import Identity, split_by_bytes

log = logging.getLogger("ckpt")

# The longest time without a frame, or a message that others get theirs. The store's operations give up long before.
SILENCE_S = 600.0
STALL_S = 30.0  # a connection that moves no byte for so long is given up


def fetch(
    link: Link,
    tasks: Tasks,
    identity: Identity,
    frames: Collection[int],
    deliver: Deliver,
    rooms: Filler | None = None,
) -> dict[str, int]:
    """Fetches `frames`: calls `deliver` for each, on several threads at once, or fills its `Filler.frame_memory`.
    Returns the bytes by level. Errors: DamagedData if no source has a frame; AgentError if the agent goes away."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link.fetch_inbox = inbox
    regions: dict[int, Arena] = {}
    jobs: list[Outcome[None]] = []

    def begin(work: Callable[..., None], *args: Any) -> None:
        job = tasks.submit(work, link, *args, into=jobs)
        job.add_done_callback(lambda done: inbox.put(done) if done.exception() is not None else None)

    ended = Flag()
    streams: list[socket.socket] = []  # closed once they have ended
    try:
        blobs = [
            np.array(sorted(each), dtype="<u4").tobytes() for each in (frames, rooms.whole_frames if rooms else ())
        ]
        link.connection.request("fetch", {"identity": str(identity)}, blobs=blobs)
        while True:
            try:
                message = inbox.get(timeout=SILENCE_S)
            except queue.Empty:
                # The agent does not report what comes by streams. A stream that moves no byte for STALL_S ends.
                if any(sock.fileno() >= 0 for sock in streams):
                    continue
                raise AgentError(f"the agent delivered nothing for {SILENCE_S:g} s while restoring") from None
            if message is None:
                raise AgentError("the agent went away while restoring")
            if isinstance(message, Future):
                # This raises. The job will never acknowledge its frames, so nothing may wait for them.
                message.result()
            if message.kind == "frame-region":
                regions[int(message.fields["region"])] = Arena.adopt(message.fds.pop())
            elif message.kind == "frame-places":
                places = message.fields["places"]
                for batch in split_by_bytes((length for _, _, _, length in places), BATCH_BYTES):
                    begin(_copy_batch, regions, places[batch], deliver)
            elif message.kind == "frame-stream" and rooms is not None:
                sock = socket.socket(fileno=message.fds.pop())
                number, coming = int(message.fields["stream"]), list(message.fields["frames"])
                streams.append(sock)
                begin(_receive_stream, sock, number, coming, rooms)
            elif message.kind == "frame-files":
                begin(_read_files, FileList.decode(message), deliver, rooms, ended)
            elif message.kind != "progress":
                for job in jobs:
                    job.result()
                if not message.fields["ok"]:
                    raise from_kind(str(message.fields["kind"]), str(message.fields["message"]))
                return {str(k): int(v) for k, v in dict(message.fields.get("sources") or {}).items()}
            jobs[:] = [job for job in jobs if not job.done()]
    finally:
        link.fetch_inbox = None
        ended.set()
        # After a success the streams have ended already.
        for sock in streams:
            shut_down(sock)
        for job in jobs:
            job.wait_until_done()
        # Close the descriptors of messages that were not handled.
        while not inbox.empty():
            left = inbox.get()
            if isinstance(left, Message):
                left.close()
        # The kernel unmaps the pages one by one. A separate thread waits for that.
        tasks.start("unmap", lambda: _close_regions(regions))


def _close_regions(regions: dict[int, Arena]) -> None:
    for arena in regions.values():
        arena.close()


def _acknowledge(link: Link, good: list[int], bad: list[int], **fields: int) -> None:
    """Tells the agent which frames are there, and which came damaged or not at all."""
    link.connection.notify("frames-received", {"ok": good, "bad": bad, **fields})


def _receive_stream(link: Link, sock: socket.socket, number: int, frames: list[int], rooms: Filler) -> None:
    """Receives these frames, in order, from a connection that carries only them. A damaged or missing one ends it."""
    good: list[int] = []
    pending = 0
    with sock:
        receiver = SocketReceiver(sock, STALL_S)
        for frame in frames:
            room, hasher = rooms.frame_memory(frame), FrameHasher()
            try:
                for first in range(0, len(room), PIECE_BYTES):
                    piece = room[first : first + PIECE_BYTES]
                    receiver.fill(piece)
                    hasher.update(piece)
            except (OSError, EOFError) as exc:
                log.info("a stream of %d frames ended at frame %d: %s", len(frames), frame, exc)
                break
            if not rooms.has_right_hash(frame, hasher.result()):
                log.warning("frame %d came damaged by a stream", frame)
                break
            good.append(frame)
            pending += len(room)
            if pending >= BATCH_BYTES:
                _acknowledge(link, good, [])
                good, pending = [], 0
    _acknowledge(link, good, [], stream=number)


def _read_files(link: Link, listed: FileList, deliver: Deliver, rooms: Filler | None, ended: Flag) -> None:
    file_reads.read_frames(listed, deliver, rooms, lambda good, bad: _acknowledge(link, good, bad), ended)


def _copy_batch(link: Link, regions: dict[int, Arena], at: list[list[int]], deliver: Deliver) -> None:
    good: list[int] = []
    bad: list[int] = []
    for frame, region, offset, length in at:
        right = deliver(frame, regions[region].view[offset : offset + length])
        (good if right else bad).append(frame)
    _acknowledge(link, good, bad)
