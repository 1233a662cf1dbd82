"""The sources of a restore, in their order:

1. This node's memory: the rank gets the place of the frame, and maps the arena.
2. A peer, directly (direct_stream.py): a frame that only one rank wants, as one run of a tensor, goes to that rank.
3. A peer (peer_source.py), through the window, once for all ranks here.
4. The store, if no node's memory has the frame and the job has several nodes: one node reads each frame for all nodes
   (shared_read.py).
5. The files of a local folder, which the ranks read themselves (store_source.py).
6. The store (store_source.py), through the window.
"""

from __future__ import annotations

from ckpt.agent.restore.direct_stream import DirectStreams
from ckpt.agent.restore.peer_source import PeerSource
from ckpt.agent.restore.rank_request import Origin, RankRequest
from ckpt.agent.restore.restore_session import FrameSource, RestoreSession
from ckpt.agent.restore.shared_read import SharedRead
from ckpt.agent.restore.store_source import OpenReader, StoreSource
from ckpt.agent.runtime.connections import Loop
from ckpt.agent.runtime.memory_plan import WINDOW_BYTES
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.memory_checkpoint import Memory
from ckpt.format.manifest import Manifest
from ckpt.types import Identity


class MemorySource(FrameSource):
    """This node's memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def select(self, frames: set[int], asked: RankRequest) -> set[int]:
        return {frame for frame in frames if int(self._memory.ranks[frame]) in self._memory.arenas}

    def request(self, frames: set[int], asked: RankRequest) -> None:
        self.session.receive_places(Origin(self.number, "local"), frames, self._memory)


def open_session(
    identity: Identity,
    manifest: Manifest,
    count: int,
    memory: Memory | None,
    open_reader: OpenReader | None,
    workers: Workers,
    loop: Loop,
    window_bytes: int = WINDOW_BYTES,
    peers: PeerSource | None = None,
    fan: SharedRead | None = None,
    folder: str | None = None,
) -> RestoreSession:
    """The restore of one candidate. `memory`: its frames in this node's memory, if any. `open_reader`: opens its
    record; None if the store has none. `peers`: its frames in peers' memory. `fan`: the shared read of the job's nodes.
    `folder`: the path of the store if it is a local folder. For the rest see RestoreSession."""
    sources: list[FrameSource | None] = [
        MemorySource(memory) if memory is not None else None,
        DirectStreams(peers) if peers is not None else None,
        peers,
        fan,
        StoreSource(open_reader, folder) if open_reader is not None and folder is not None else None,
        StoreSource(open_reader) if open_reader is not None else None,
    ]
    known = [source for source in sources if source is not None]
    return RestoreSession(identity, manifest, count, known, workers, loop, window_bytes)
