"""One node as a home of a shared read: reads frames from the store into memory that all nodes fetch from.

The memory lasts until the restore is over. Each frame is read once, and each node that waits is told once, while the
read goes on, that it is read or cannot be had. Main thread only, but for store reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.restore.restore_session import RestoreSession
from ckpt.agent.restore.store_source import OpenReader, RecordPasses
from ckpt.agent.runtime.workers import error_text
from ckpt.agent.snapshots.manifest_gather import place_frames
from ckpt.agent.snapshots.memory_checkpoint import LocalMemory
from ckpt.errors import AgentError, CkptError
from ckpt.events import Event
from ckpt.ipc.arena import Arena
from ckpt.layout.read_sharding import ReadSharding
from ckpt.types import OWN_NODE

if TYPE_CHECKING:
    from ckpt.agent.net.tcp_sender import Transport
    from ckpt.store.reader import FrameReader

log = logging.getLogger("ckpt")

REPORT_DELAY_S = 0.02  # frames read within so long are announced together
ALIVE_S = 1.0  # between messages to a waiting node for which nothing was read

# Hears, for a node, which frames are read and which cannot be had. Both are empty if only the sign of life is due.
Report = Callable[[str, Sequence[int], Sequence[int]], None]


class SharedHome:
    """`number`: of this node among the homes. `room`: bytes that this node may use for the memory. `memory`: where the
    frames lie; None before the first request, and after `close`. `tell`: emits an event."""

    def __init__(
        self,
        session: RestoreSession,
        transport: Transport,
        offer_name: str,
        sharding: ReadSharding,
        number: int,
        open_reader: OpenReader,
        room: Callable[[], int],
        tell: Callable[[Event], None],
        report: Report,
    ) -> None:
        self.memory: LocalMemory | None = None
        self._session, self._transport, self._offer_name = session, transport, offer_name
        self._sharding, self._number = sharding, number
        self._get_room_bytes, self._emit_event, self._report = room, tell, report
        self._passes = RecordPasses(session, open_reader, self._read, self._end_pass)
        self._requests = ReadRequests()
        self._has_reported_no_room = self._is_report_scheduled = False

    def request(self, frames: Iterable[int], who: str) -> None:
        """Node `who` requests frames. Errors: AgentError if memory is short."""
        if self.memory is None:
            try:
                self.memory = self._create_memory()
            except (CkptError, OSError) as exc:
                self._report_no_room(str(exc))
                raise AgentError(str(exc)) from exc
        self._passes.request(self._requests.add(frames, who))
        self._schedule_report()

    def close(self) -> None:
        if self.memory is not None:
            self._transport.withdraw(self._offer_name)
            self._session.workers.close_arenas(self.memory.arenas.values())  # mapped while they are read or sent
            self.memory = None

    # -- inside

    def _create_memory(self) -> LocalMemory:
        size, room = self._sharding.node_bytes[self._number], self._get_room_bytes()
        if self._session.is_closed or size > room:
            raise AgentError(f"{size >> 20} MiB to hold for all nodes, and {room >> 20} MiB may be taken for it")
        mine, offsets = self._sharding.frames_of(self._number), self._sharding.offsets
        frames = place_frames(self._session.manifest, mine, offsets[mine], size)
        region = Arena.create(size)
        try:
            self._transport.offer(self._offer_name, region.view, frames, urgent=True)
        except CkptError:
            region.close()
            raise
        return LocalMemory({0: region}, np.zeros_like(offsets), offsets)

    def _report_no_room(self, why: str) -> None:
        """Emits the event once, however many nodes ask."""
        if not self._has_reported_no_room and not self._session.is_closed:
            self._has_reported_no_room = True
            identity = self._session.identity
            what = f"the part of step {identity.version.step} that this node was to read for all"
            text = f"each node reads for itself {what}: {why}"
            self._emit_event(Event("restore.unshared", text, False, {"identity": str(identity)}))

    def _read(self, reader: FrameReader, ours: dict[int, list[int]]) -> None:
        """On a worker, which starts further threads: reads frames into the memory."""
        memory, lengths = self.memory, self._session.manifest.frames["length"]
        if memory is None:  # closed
            return

        def out(their: int) -> memoryview:
            frame = ours[their][0]
            return memory.arenas[0].part((int(self._sharding.offsets[frame]), int(lengths[frame])))

        def deliver(their: int) -> None:
            self._session.post(lambda: self._end_frame(ours[their][0], True))

        def failed(their: int, error: Exception) -> None:
            log.warning("frame %d of %s cannot be read: %s", ours[their][0], self._session.identity, error)

        reader.read(ours, deliver, out, failed)

    def _end_frame(self, frame: int, is_read: bool) -> None:
        self._requests.end_frame(frame, is_read)
        self._schedule_report()

    def _end_pass(self, frames: list[int], error: BaseException | None) -> None:
        if error:
            log.warning("%s cannot be read from the store for all nodes: %s", self._session.identity, error_text(error))
        for frame in frames:
            self._end_frame(frame, False)  # no effect if it was read

    def _schedule_report(self) -> None:
        if not self._is_report_scheduled:
            self._is_report_scheduled = True
            self._session.call_later(REPORT_DELAY_S, self._report_reads)

    def _report_reads(self) -> None:
        self._is_report_scheduled = False
        for who, (here, lacking) in self._requests.take_reports(time.monotonic()).items():
            self._report(who, here, lacking)


class ReadRequests:
    """Which node waits for which frame of a home. Each frame is read once, and each waiting node is told of it once.
    Pure."""

    def __init__(self) -> None:
        self._is_read: dict[int, bool] = {}  # by frame whose read has ended; False: it cannot be had
        self._waiters_by_frame: dict[int, set[str]] = {}  # by frame that is being read
        self._reports_by_node: dict[str, tuple[list[int], list[int]]] = {}
        self._last_reported_s: dict[str, float] = {}

    def add(self, frames: Iterable[int], who: str) -> list[int]:
        """Adds a node's requests. Returns the frames that are to be read for them now."""
        new: list[int] = []
        for frame in frames:
            if frame in self._is_read:
                self._add_report(who, frame)
                continue
            if frame not in self._waiters_by_frame:
                new.append(frame)
            self._waiters_by_frame.setdefault(frame, set()).add(who)
        return new

    def end_frame(self, frame: int, is_read: bool) -> None:
        """A frame is read, or cannot be had; the latter has no effect on a frame that was read."""
        if not self._is_read.get(frame):
            self._is_read[frame] = is_read
            for who in sorted(self._waiters_by_frame.pop(frame, ())):
                self._add_report(who, frame)

    def take_reports(self, now_s: float) -> dict[str, tuple[list[int], list[int]]]:
        """By waiting node: (frames read, frames that cannot be had) since the last call. Both are empty if
        only the sign of life is due, every ALIVE_S."""
        told, self._reports_by_node = self._reports_by_node, {}
        for who in {who for waiting in self._waiters_by_frame.values() for who in waiting} - {OWN_NODE}:
            if now_s >= self._last_reported_s.get(who, 0.0) + ALIVE_S:
                told.setdefault(who, ([], []))
        self._last_reported_s.update(dict.fromkeys(told, now_s))
        return told

    def _add_report(self, who: str, frame: int) -> None:
        here, lacking = self._reports_by_node.setdefault(who, ([], []))
        (here if self._is_read[frame] else lacking).append(frame)
