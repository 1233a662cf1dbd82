"""The parity worker: encodes parity from snapshots and rebuilds snapshots from parity, on one thread.

A rank's staged bytes are the frames of its description, end to end (see placement/rebuild.py). The worker waits for
frames of other nodes. It fetches whole frames and verifies each by its hash before it uses a byte; it holds at most two
batches at a time. A rebuilt snapshot is verified by the same hashes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.agent.net.tcp_receiver import Fetch
from ckpt.agent.net.tcp_sender import Transport
from ckpt.agent.net.transport import Frames
from ckpt.agent.runtime.workers import PARITY_THREADS
from ckpt.agent.snapshots.described import DescribedSnapshot, ParityChunk, ParityChunkName, chunk_frames
from ckpt.agent.snapshots.inventory import find_sealed_snapshot
from ckpt.errors import AgentError, DamagedData
from ckpt.format.frames import frame_hash
from ckpt.format.parity import Buffer, ParityScratch, Row, add_data, pieces, solve_lost
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import WARM_BYTES, Arena
from ckpt.placement.rebuild import StagedRun, Striped, StripeWindow, solvable_windows
from ckpt.types import Identity

BATCH_BYTES = 16 << 20  # of frames fetched at once; the next batch is on its way while one is added
WINDOW_BYTES = 32 << 20  # of a stripe solved at once
SCRATCH_BYTES = 2 * BATCH_BYTES + 2 * WINDOW_BYTES  # of one thread, if no frame is larger than a batch
# Of all threads that run beside training. Rebuilds for a start are not counted: a start has no slots yet.
WORK_BYTES = PARITY_THREADS * SCRATCH_BYTES


@dataclass(frozen=True, slots=True)
class FrameOrigin:
    """Where the frames of one transfer can be read: from agent `node` as the offer `name`, or, if `local_data` is
    given, at their offsets in this node's memory."""

    name: str
    frames: Frames
    node: str = ""
    addresses: tuple[Address, ...] = ()
    local_data: memoryview | None = None


class ParityWorker:
    """One encoding or rebuild; it runs on the calling thread, and blocks. `damaged_transfer`: the name of the transfer
    whose bytes failed their hash, "" if none did. `filled_bytes`: bytes rebuilt so far; may be read on any thread."""

    def __init__(
        self, transport: Transport | None, moved: Callable[[], None] = lambda: None, urgent: bool = False
    ) -> None:
        """`transport`: None if all origins are on this node. `moved`: called after each frame. `urgent`: as in
        Transport.fetch."""
        self.damaged_transfer = ""
        self.filled_bytes = 0
        self._on_progress, self._urgent = moved, urgent
        self._transport = transport
        self._scratch = ParityScratch()

    def encode_chunk(
        self,
        name: ParityChunkName,
        world: int,
        origins: Mapping[int, FrameOrigin],
        snapshots: Mapping[int, DescribedSnapshot],
        arena: Arena,
    ) -> ParityChunk:
        """Encodes the parity chunk `name` into `arena`, whose former contents are overwritten. `origins`: by rank.

        Errors: AgentError, DamagedData."""
        data = arena.part((0, name.stripe.length))
        for at in range(0, len(data), WARM_BYTES):
            np.frombuffer(data[at : at + WARM_BYTES], np.uint8).fill(0)
            self._on_progress()
        # In random order, so that not all holders read from the same node at once.
        for place in random.sample(range(len(name.stripe.sources)), len(name.stripe.sources)):
            self._add_source({name.row: data}, place, name.stripe.sources[place], origins)
        return ParityChunk(name, world, arena, chunk_frames(data, name.stripe.length), snapshots)

    def rebuild_snapshot(
        self,
        key: tuple[Identity, int],
        described: DescribedSnapshot,
        missing: Collection[int],
        chunks: Mapping[Striped, Mapping[Row, FrameOrigin]],
        origins: Mapping[int, FrameOrigin],
        order: Sequence[Row] = tuple(Row),
    ) -> Arena:
        """Rebuilds the snapshot of `key` (checkpoint, rank) into a new arena. `missing`: the ranks that no node holds.
        `order`: the parity rows by preference, where fewer are needed. The caller has checked that it is rebuildable.

        Errors: AgentError, OSError; DamagedData, also if verified inputs give a wrong result."""
        arena = Arena.create(described.arena_bytes)
        try:
            for window in solvable_windows(missing, chunks):
                if any(window.runs[place].rank == key[1] for place in window.unknown_sources):
                    for part in window.split(WINDOW_BYTES):
                        self._solve(key[1], described, part, chunks[window.stripe], origins, order, arena)
            _verify_and_seal(key, described, arena)
            return arena
        except BaseException:
            arena.close()
            raise

    # -- inside

    def _solve(
        self,
        rank: int,
        described: DescribedSnapshot,
        window: StripeWindow,
        held: Mapping[Row, FrameOrigin],
        origins: Mapping[int, FrameOrigin],
        order: Sequence[Row],
        arena: Arena,
    ) -> None:
        length = window.stop - window.start
        used = [row for row in order if row in held][: len(window.unknown_sources)]
        left = {row: bytearray(length) for row in used}
        for row in used:
            whole = [StagedRun(0, window.start, window.stop)]
            self._add_source({Row.P: left[row]}, 0, whole, {0: held[row]})  # copied as it is
        for place, run in window.runs.items():
            if place not in window.unknown_sources:
                self._add_source(left, place, [run], origins)
        for place, data in zip(
            window.unknown_sources, solve_lost(window.unknown_sources, left, self._scratch), strict=True
        ):
            run = window.runs[place]
            if run.rank == rank:
                for piece in pieces(described.frames.lengths, run.start, run.stop):
                    at = int(described.frames.offsets[piece.frame]) + piece.offset
                    arena.view[at : at + piece.length] = memoryview(data)[
                        piece.stripe_offset : piece.stripe_offset + piece.length
                    ]
                    self.filled_bytes += piece.length

    def _add_source(
        self, targets: Mapping[Row, Buffer], place: int, source: Sequence[StagedRun], origins: Mapping[int, FrameOrigin]
    ) -> None:
        at = 0
        for run in source:
            origin = origins[run.rank]
            wanted = {piece.frame: piece for piece in pieces(origin.frames.lengths, run.start, run.stop)}
            with contextlib.closing(self._frames(origin, list(wanted))) as frames:
                for frame, data in frames:
                    piece = wanted[frame]
                    part = data[piece.offset : piece.offset + piece.length]
                    for row, target in targets.items():
                        add_data(target, at + piece.stripe_offset, {place: part}, row, self._scratch)
                    self._on_progress()
            at += run.stop - run.start

    def _frames(self, origin: FrameOrigin, numbers: list[int]) -> Generator[tuple[int, memoryview], None, None]:
        """Yields (number, verified bytes) of these frames. The bytes are valid until the next frame is requested."""
        if origin.local_data is not None:
            for number, (offset, length) in zip(numbers, _places(origin.frames, numbers), strict=True):
                data = origin.local_data[offset : offset + length]
                if list(frame_hash(data)) != origin.frames.hashes[number].tolist():
                    self.damaged_transfer = origin.name
                    raise DamagedData(f"frame {number} of {origin.name} has changed in this node's memory")
                yield number, data
            return
        batches = list(_batches(origin.frames, numbers))
        if not batches:
            return
        room = max(sum(length for _, length in batch) for batch in batches)
        buffers = [memoryview(bytearray(room)) for _ in batches[:2]]
        coming: list[Fetch] = []
        try:
            for n in range(len(batches) + 1):
                if n < len(batches):
                    coming.append(self._fetch(origin, batches[n], buffers[n % 2]))
                if n:
                    try:
                        coming[0].completion.result()
                    except DamagedData:
                        self.damaged_transfer = origin.name
                        raise
                    del coming[0]
                    at = 0
                    for number, length in batches[n - 1]:
                        yield number, buffers[(n - 1) % 2][at : at + length]
                        at += length
        finally:
            for fetch in coming:
                fetch.cancel()
            for fetch in coming:
                fetch.completion.exception()  # waits: then nothing writes to the buffers

    def _fetch(self, origin: FrameOrigin, batch: list[tuple[int, int]], buffer: memoryview) -> Fetch:
        if self._transport is None:
            raise AgentError(f"there is no way to agent {origin.node}, which has {origin.name}")
        numbers = [number for number, _ in batch]
        lengths = origin.frames.lengths[numbers]
        offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths)[:-1].astype(np.uint64)])
        frames = Frames.from_columns(offsets, lengths, origin.frames.hashes[numbers], buffer.nbytes)
        at, urgent = (origin.node, origin.addresses), self._urgent
        return self._transport.fetch(*at, origin.name, buffer, frames, urgent=urgent, numbers=numbers)


def _verify_and_seal(key: tuple[Identity, int], described: DescribedSnapshot, arena: Arena) -> None:
    """Verifies every frame, then writes the first page, which seals the arena. Errors: DamagedData."""
    frames = described.frames
    for number, (offset, length) in enumerate(frames.byte_ranges()):
        with arena.view[offset : offset + length] as data:
            if list(frame_hash(data)) != frames.hashes[number].tolist():
                raise DamagedData(f"frame {number} of rank {key[1]} of {key[0]} came out of the parity damaged")
    arena.write_header_page(described.first_page)
    found = find_sealed_snapshot(arena)
    if found is None or found[0] != key:
        raise DamagedData(f"what came out of the parity as rank {key[1]} of {key[0]} says that it is something else")


def _places(frames: Frames, numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(frames.offsets[numbers].tolist(), frames.lengths[numbers].tolist(), strict=True))


def _batches(frames: Frames, numbers: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Batches of (frame number, length), each fetched at once; at most BATCH_BYTES, or one frame."""
    batch: list[tuple[int, int]] = []
    room = BATCH_BYTES
    for number, (_, length) in zip(numbers, _places(frames, numbers), strict=True):
        if batch and length > room:
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append((number, length))
        room -= length
    if batch:
        yield batch
