"""Commit of a checkpoint: writes its frames into packs, then puts one record. The record's put makes the checkpoint
exist.

Order of writes: first all packs of the attempt, in parallel. When the last pack is stored, three checks: are the
other writers' packs there, is this epoch superseded (`check`), is the base retired? Then the record. So after a crash
the store holds either a whole checkpoint, or only packs that nothing refers to.

Must-invariants:
- No key is ever written by two attempts. Each further attempt at an identity takes a new writer name.
- A record refers to another checkpoint's packs only through `base`. The base must be unretired when the record is put.
  Each pack referred to was present, with its recorded size, when the commit began.
- When `commit` raises, the attempt's threads have ended, and they write nothing more. Other nodes (`OtherWriters`) may
  still finish a put for this attempt; no record refers to their packs.
- Each frame is hashed again just before it is encoded. A frame that changed in memory since it was staged fails the
  commit.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ckpt.clock import Clock, SystemClock
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    NotFound,
    SaveFailed,
    Superseded,
    TransientError,
    Unsettled,
    UsageError,
)
from ckpt.events import Events
from ckpt.format import record
from ckpt.format.manifest import Manifest, Record
from ckpt.layout.layout import Array
from ckpt.storage.contract import Backend
from ckpt.store import keys
from ckpt.store.dedup import Placing
from ckpt.store.lineage import CommitRef
from ckpt.store.packs import PACK_BYTES, Indices, Packs, PutRateLimit, Written
from ckpt.store.run import Run, map_parallel, put_once
from ckpt.types import CodecOption, Identity

# At once, when looking at packs that were put before.
PACK_CHECKS_MAX = 16
# Between two looks at `cancel`, while a commit waits for other writers.
CANCEL_S = 1.0


class OtherWriters(Protocol):
    """The other nodes of a distributed commit, which write the frames that they hold."""

    def __call__(self, todo: Indices) -> list[tuple[Indices, Future[Written]]]:
        """Has the other writers begin to write their part of the frames `todo`. Returns parts: each has the frame
        numbers of one writer, and a future of what it has written."""
        ...

    def end_commit(self) -> None:
        """Tells the other writers that the commit has ended, well or not. They must write nothing more for it."""
        ...


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a commit. `raw_bytes`: of all frames. `stored_bytes`: size of the new packs. `packs`: number of new
    packs. `referred_bytes`: raw bytes of frames that were not written, because a pack of the base or another frame of
    this checkpoint holds the same bytes."""

    record: Record
    ref: CommitRef
    raw_bytes: int
    stored_bytes: int
    referred_bytes: int
    packs: int
    seconds: float


class Committer:
    """Commits checkpoints, one at a time, under one writer name. `writer`: matches keys.WRITER; no other process may
    ever use it. `codec`: "auto", "raw", "zstd" or "planes". `bandwidth`: average limit in bytes per second to the
    store; None: no limit. `pack_bytes`: approximate raw bytes per pack."""

    def __init__(
        self,
        backend: Backend,
        writer: str,
        codec: CodecOption = "auto",
        bandwidth: float | None = None,
        *,
        clock: Clock | None = None,
        pack_bytes: int = PACK_BYTES,
        events: Events | None = None,
    ) -> None:
        self.backend = backend
        self.writer = writer
        self.codec = codec
        self.bandwidth = bandwidth
        self.pack_bytes = pack_bytes
        self._clock = clock or SystemClock()
        self._events = events or Events()
        self._rate_limit = PutRateLimit(self._clock, bandwidth)
        self._attempted_identities: set[Identity] = set()
        self._commit_lock = threading.Lock()

    def commit(
        self,
        identity: Identity,
        manifest: Manifest,
        frame: Callable[[int], memoryview],
        *,
        check: Callable[[], None],
        base: Record | None = None,
        owner: str = "node",
        metrics: Mapping[str, float] | None = None,
        about: Mapping[str, Any] | None = None,
        cancel: threading.Event | None = None,
        elsewhere: OtherWriters | None = None,
    ) -> Committed:
        """Puts the packs, then the record. Blocks until the record is stored or the commit has failed.

        `frame(i)`: the raw bytes of frame i, contiguous; called from several threads; the bytes must not change before
        the return. `check`: called right before the record is put; raises Superseded. `base`: the newest record of the
        branch history, to whose packs unchanged frames may refer; only the coordinator gives one. `owner`: whose data
        it is, a part of the packs' keys. `cancel`: set it to stop the commit. `elsewhere`: the other nodes that write
        some of the frames; `frame` is called only for the rest.

        Errors: SaveFailed: no record was put, or its outcome is unknown and harmless. Superseded: raised by `check`."""
        if not self._commit_lock.acquire(blocking=False):
            raise UsageError("a Committer commits one checkpoint at a time")
        try:
            began_s = self._clock.now_s()
            writer = self._writer_name(identity)
            cancel = cancel or threading.Event()
            try:
                placing = self._place_frames(manifest.frames, base)
                theirs = elsewhere(placing.frames_to_write) if elsewhere is not None else []
                own = np.setdiff1d(
                    placing.frames_to_write, [n for numbers, _ in theirs for n in numbers], assume_unique=True
                )
                written = [
                    (own, self.write(identity, manifest.frames[own], own.tolist(), frame, owner, writer, cancel))
                ]
                written += [(numbers, _await_written(future, cancel)) for numbers, future in theirs]
                self._check_packs_stored([pack for _, each in written[1:] for pack in each.packs])
                for numbers, each in written:
                    placing.add_written(numbers, each)
                packs, places = tuple(placing.packs), placing.places
                if len({key for key, _ in packs}) < len(packs):
                    raise SaveFailed("two nodes reported the same pack, or one node reported a pack twice")
                made = Record(identity, writer, manifest, packs, places, dict(metrics or {}), dict(about or {}))
                body = record.encode(made)
                if cancel.is_set():
                    raise SaveFailed("the commit was cancelled")
                check()
                self._put_record(made, body, base)
            except Superseded:
                raise
            except Exception as exc:
                raise SaveFailed(f"{identity}: {exc}") from exc
            finally:
                if elsewhere is not None:
                    elsewhere.end_commit()
            return Committed(
                record=made,
                ref=CommitRef(identity, writer, len(body)),
                raw_bytes=placing.raw_bytes,
                stored_bytes=sum(each.stored_bytes for _, each in written),
                referred_bytes=placing.referred_bytes,
                packs=sum(len(each.packs) for _, each in written),
                seconds=self._clock.now_s() - began_s,
            )
        finally:
            self._commit_lock.release()

    def write(
        self,
        identity: Identity,
        frames: Array,
        numbers: Sequence[int],
        frame: Callable[[int], memoryview],
        owner: str,
        writer: str,
        cancel: threading.Event,
        first: int = 0,
    ) -> Written:
        """Puts frames into packs, and no record. `frames`: array of FRAME. `frame(numbers[i])`: the bytes of the i-th
        of them. `first`: the number of the first pack. Errors: as Packs.write."""
        key = lambda n: keys.pack_key(identity, owner, writer, first + n)  # noqa: E731
        at = lambda i: frame(numbers[i])  # noqa: E731
        try:
            return Packs(self.backend, frames, at, key, self.codec, self.pack_bytes, self._rate_limit, cancel).write()
        except Exception as exc:
            _clear_tracebacks(exc)
            raise

    def _place_frames(self, frames: Array, base: Record | None) -> Placing:
        """The placement of the frames, after a check that the base's packs still exist. A pack may have been deleted
        since, by a person or by a rule of the bucket. Its frames are in memory here, so they are written again.
        Otherwise every later checkpoint would count as committed, and none could be restored."""
        placing = Placing(frames, base)
        lost = self._unusable_packs(placing.packs)
        if not lost:
            return placing
        self._events.emit(
            "packs.lost",
            f"ckpt: packs with unchanged parts of the state are missing or damaged in {self.backend.url}. These parts "
            f"are written again (packs: {len(lost)}; the first: {next(iter(lost.values()))}). `ckpt verify "
            f"{self.backend.url}` shows which older checkpoints are damaged",
            loud=True,
            packs=len(lost),
        )
        return Placing(frames, base, lost)

    def _check_packs_stored(self, packs: Sequence[tuple[str, int]]) -> None:
        """Checks that the packs which other writers report are in the store: a record must refer to no missing pack.
        Errors: SaveFailed names the first pack that is missing or has another size."""
        for key, why in self._unusable_packs(packs).items():
            raise SaveFailed(
                f"another node reported the pack {key}, which this node cannot use: {why}. The URL must lead all nodes "
                "to the same store; a folder must be shared by all nodes"
            )

    def _unusable_packs(self, packs: Sequence[tuple[str, int]]) -> dict[str, str]:
        """The keys of packs that no record may refer to, each with the reason: missing, of another size, or access
        denied. Errors: StorageError if the store gives no answer."""

        def look(pack: tuple[str, int]) -> str:
            key, size = pack
            try:
                found = self.backend.head(key).size
            except (NotFound, AccessDenied) as exc:
                return str(exc)
            return "" if found == size else f"{key} has {found} bytes instead of {size}"

        told = map_parallel(look, packs, PACK_CHECKS_MAX)
        return {key: why for (key, _), why in zip(packs, told, strict=True) if why}

    def _writer_name(self, identity: Identity) -> str:
        """The writer name of this attempt. A second attempt gets a new one: the puts of the first may still land."""
        if identity in self._attempted_identities:
            return keys.new_writer()
        self._attempted_identities.add(identity)
        return self.writer

    def _put_record(self, made: Record, body: bytes, base: Record | None) -> None:
        """Puts the record. A put whose reply was lost is settled by reading the record back, and is not tried again
        here: a second put would create the record anew if it had been deleted meanwhile."""
        key = keys.record_key(made.identity, made.writer)
        self._check_unretired(made, base)
        doubts = (AlreadyExists, TransientError, Unsettled)
        try:
            found = put_once(self.backend, key, body, record.RECORD_BYTES_MAX, doubts)
        except doubts as exc:
            then = "if the record appears later, the checkpoint is complete"
            raise SaveFailed(f"the store has not accepted its record ({exc}); {then}") from exc
        if found not in (None, body):
            raise SaveFailed(f"{key} belongs to another writer; give each writer its own name")
        if found is not None:
            self._check_unretired(made, base)

    def _check_unretired(self, made: Record, base: Record | None) -> None:
        needed = {made.identity}
        if base is not None and not set(base.packs).isdisjoint(made.packs):
            needed.add(base.identity)
        for identity in sorted(needed):
            if Run(self.backend).is_retired(identity):
                raise SaveFailed(f"{identity} was retired during the commit")


def _await_written(future: Future[Written], cancel: threading.Event) -> Written:
    """What the other writer has written. Errors: SaveFailed if cancelled; else the other writer's error."""
    while not cancel.is_set():
        with contextlib.suppress(TimeoutError):
            return future.result(CANCEL_S)
    raise SaveFailed("the commit was cancelled")


def _clear_tracebacks(exc: BaseException | None) -> None:
    """Clears the frames of the error's tracebacks: they hold views of memory that its owner wants to close."""
    while exc is not None:
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__cause__ or exc.__context__
