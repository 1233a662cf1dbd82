"""Fetching frames of one checkpoint: the agent says where each lies in shared memory, this rank copies and checks it.

A frame counts as fetched only when its hash was right at, or after, the copy; a wrong one is reported and comes again
from the agent's next source. The agent's windows are reused only after they were acknowledged.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from ckpt.agent.arena import Arena
from ckpt.errors import AgentError, from_kind
from ckpt.tasks import Tasks
from ckpt.trainer.link import Link
from ckpt.types import Identity

SILENCE_S = 600.0  # how long the agent may deliver nothing; its own store operations give up long before
BATCH_BYTES = 16 << 20  # per job of a copying thread: each ends with a message to the agent

Deliver = Callable[[int, memoryview], bool]  # (frame number, its raw bytes) -> whether its hash was right


def fetch(link: Link, tasks: Tasks, identity: Identity, frames: Collection[int], deliver: Deliver) -> dict[str, int]:
    """Calls `deliver` for each frame, on several threads at once; bytes by level they came from.

    Errors: DamagedData when a frame cannot be had from any source; AgentError when the agent goes away.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link.fetching = inbox
    regions: dict[int, Arena] = {}
    jobs: list[Future[None]] = []
    try:
        wanted = np.array(sorted(frames), dtype="<u4")
        link.connection.request("fetch", {"identity": str(identity)}, blobs=[wanted.tobytes()])
        while True:
            try:
                message = inbox.get(timeout=SILENCE_S)
            except queue.Empty:
                raise AgentError(f"the agent delivered nothing for {SILENCE_S:g} s while restoring") from None
            if message is None:
                raise AgentError("the agent went away while restoring")
            if message.kind == "region":
                regions[int(message.fields["region"])] = Arena.adopt(message.fds.pop())
            elif message.kind == "frames":
                for batch in _batches(message.fields["at"]):
                    jobs.append(tasks.submit(_copy, link, regions, batch, deliver))
            else:
                for job in jobs:
                    job.result()
                if not message.fields["ok"]:
                    raise from_kind(str(message.fields["kind"]), str(message.fields["message"]))
                return {str(k): int(v) for k, v in dict(message.fields.get("sources") or {}).items()}
            done = [job for job in jobs if job.done()]
            for job in done:
                job.result()
            jobs = [job for job in jobs if job not in done] if done else jobs
    finally:
        link.fetching = None
        for job in jobs:
            job.exception()
        # The kernel takes the pages out of our address space one by one: nobody has to wait for that.
        tasks.start("unmap", lambda: _close(regions))


def _close(regions: dict[int, Arena]) -> None:
    for arena in regions.values():
        arena.close()


def _batches(at: list[list[int]]) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    total = 0
    for entry in at:
        batch.append(entry)
        total += entry[3]
        if total >= BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _copy(link: Link, regions: dict[int, Arena], at: list[list[int]], deliver: Deliver) -> None:
    good: list[int] = []
    bad: list[int] = []
    for frame, region, offset, length in at:
        right = deliver(frame, regions[region].view[offset : offset + length])
        (good if right else bad).append(frame)
    link.connection.notify("got", {"ok": good, "bad": bad})
