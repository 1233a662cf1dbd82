"""Committing a checkpoint: frames into packs, then one record. After the record's put it exists; before, nothing does.

Order of writes: all packs of the attempt, in parallel; when the last has returned, `check` (is this epoch superseded?)
and the tombstones; then the record. So at any crash the store holds some packs that nothing refers to, or everything.

Must-invariants:
- No key is ever written by two attempts: every attempt at an identity after the first takes a new writer name.
- A record refers to another checkpoint's packs only through `base`, which must be unretired when the record is put, and
  to those only that were there, with their size, when the commit began.
- After an error or a cancel the attempt's threads have ended when `commit` raises, and nothing more is written by them.
  What others write for it (`Elsewhere`) may still land then, and nothing refers to it.
- Frames are hashed again just before they are encoded: what changed in memory since it was staged is not committed.
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
from ckpt.format.codecs import CodecOption
from ckpt.format.manifest import Manifest, Record
from ckpt.layout.layout import Array
from ckpt.storage.contract import Backend, PutMode
from ckpt.store import keys
from ckpt.store.dedup import Placing
from ckpt.store.lineage import CommitRef
from ckpt.store.packs import PACK_BYTES, Indices, Packs, PutRateLimit, Written, pack_keys
from ckpt.store.run import in_parallel
from ckpt.types import Identity

LOOKS_MAX = 16  # at once, at packs that were put before
CANCEL_S = 1.0  # between looks at whether a commit that waits for others was cancelled


class OtherWriters(Protocol):
    """Other writers that hold some of the frames, or all of them."""

    def __call__(self, todo: Indices) -> list[tuple[Indices, Future[Written]]]:
        """Of the frames with these numbers, which ones they write, in parts, and when each is done. Has them begin."""
        ...

    def ended(self) -> None:
        """The commit is over, whatever came of it: nothing more is to be written for it."""
        ...


@dataclass(frozen=True, slots=True)
class Committed:
    """`raw_bytes`: of all frames. `stored_bytes`: put in new packs. `referred_bytes`: raw bytes of the frames that
    were found in packs of the base, or twice in this checkpoint, and so not written. `packs`: new ones."""

    record: Record
    ref: CommitRef
    raw_bytes: int
    stored_bytes: int
    referred_bytes: int
    packs: int
    seconds: float


class Committer:
    """Commits checkpoints, one at a time, as one writing incarnation.

    `writer`: matches keys.WRITER, never used by another process. `codec`: "auto", "raw", "zstd" or "planes".
    `bandwidth`: bytes per second to the store on average; None: no limit. `pack_bytes`: raw bytes per pack, about."""

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
        self._pace = PutRateLimit(self._clock, bandwidth)
        self._attempted: set[Identity] = set()
        self._busy = threading.Lock()

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
        """Puts the packs, then the record; blocks until it is there or has failed.

        `frame(i)`: the raw bytes of frame i, contiguous, unchanged until the return; called from several threads.
        `check`: raises Superseded; called right before the record. `base`: the newest record of the line, to whose
        packs unchanged frames may refer; None for whoever is not the coordinator. `owner`: whose data it is, part of
        the packs' keys. `cancel`: set it to give up. `elsewhere`: where other writers hold some of the frames: has them
        write theirs of the frames with these numbers, and says which those are and when they are written; `frame` is
        asked for the others only.

        Errors: SaveFailed (no record was put, or nobody knows and it is harmless); Superseded from `check`."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("a Committer commits one checkpoint at a time")
        try:
            began_s = self._clock.now_s()
            writer = self._writer_for(identity)
            cancel = cancel or threading.Event()
            try:
                placing = self._placing(manifest.frames, base)
                theirs = elsewhere(placing.todo) if elsewhere is not None else []
                own = np.setdiff1d(placing.todo, [n for numbers, _ in theirs for n in numbers], assume_unique=True)
                written = [
                    (own, self.write(identity, manifest.frames[own], own.tolist(), frame, owner, writer, cancel))
                ]
                written += [(numbers, _result(future, cancel)) for numbers, future in theirs]
                self._check_there([pack for _, each in written[1:] for pack in each.packs])
                for numbers, each in written:
                    placing.add(numbers, each)
                packs, places = tuple(placing.packs), placing.places
                if len({key for key, _ in packs}) < len(packs):
                    raise SaveFailed("two nodes say that they have put one pack, or one says it twice")
                made = Record(identity, writer, manifest, packs, places, dict(metrics or {}), dict(about or {}))
                body = record.encode(made)
                if cancel.is_set():
                    raise SaveFailed("it was cancelled")
                check()
                self._put_record(made, body, base)
            except Superseded:
                raise
            except Exception as exc:
                _let_go(exc)
                raise SaveFailed(f"{identity}: {exc}") from exc
            finally:
                if elsewhere is not None:
                    elsewhere.ended()
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
            self._busy.release()

    def write(
        self,
        identity: Identity,
        frames: Array,
        numbers: Sequence[int],
        frame: Callable[[int], memoryview],
        owner: str,
        writer: str,
        cancel: threading.Event,
    ) -> Written:
        """Puts frames into packs, and no record. `frames`: array of FRAME; `frame(numbers[i])`: the bytes of the i-th.
        Errors: as those of Packs.write."""
        keys_of = pack_keys(identity, owner, writer)
        at = lambda i: frame(numbers[i])  # noqa: E731
        try:
            return Packs(self.backend, frames, at, keys_of, self.codec, self.pack_bytes, self._pace, cancel).write()
        except Exception as exc:
            _let_go(exc)
            raise

    def _placing(self, frames: Array, base: Record | None) -> Placing:
        """Data that was put once may have been removed since, by somebody or by a rule of the bucket. What is in memory
        here can be written again: else no later checkpoint could be restored, and all of them would say committed."""
        placing = Placing(frames, base)
        lost = self._not_there(placing.packs)
        if not lost:
            return placing
        self._events.emit(
            "packs.lost",
            f"ckpt: unchanged parts of the state are gone from {self.backend.url}, or cannot be trusted there, and are "
            f"written anew (packs: {len(lost)}; the first: {next(iter(lost.values()))}). ckpt verify "
            f"{self.backend.url} says which older checkpoints are damaged",
            loud=True,
            packs=len(lost),
        )
        return Placing(frames, base, lost)

    def _check_there(self, packs: Sequence[tuple[str, int]]) -> None:
        """What others say they have put is not taken on trust: a record must refer to nothing that is not there.
        Errors: SaveFailed names the first that is not, or has another size."""
        for key, why in self._not_there(packs).items():
            raise SaveFailed(
                f"another node says it has put {key}: {why}. All nodes have to reach one store by this URL: a folder "
                "is one that they share"
            )

    def _not_there(self, packs: Sequence[tuple[str, int]]) -> dict[str, str]:
        """The keys of those that nothing should refer to, since they are gone, have another size or may not be looked
        at, and what the store says of them. Errors: StorageError where it says nothing."""

        def look(pack: tuple[str, int]) -> str:
            key, size = pack
            try:
                found = self.backend.head(key).size
            except (NotFound, AccessDenied) as exc:
                return str(exc)
            return "" if found == size else f"{key} has {found} bytes where {size} were put"

        told = in_parallel(look, packs, LOOKS_MAX)
        return {key: why for (key, _), why in zip(packs, told, strict=True) if why}

    def _writer_for(self, identity: Identity) -> str:
        """The first attempt's puts may still land, so a second one must not share its keys."""
        if identity in self._attempted:
            return keys.new_writer()
        self._attempted.add(identity)
        return self.writer

    def _put_record(self, made: Record, body: bytes, base: Record | None) -> None:
        """A put whose reply was lost is settled by reading back and not tried again here: the record would be created
        anew if it had been deleted meanwhile."""
        key = keys.record_key(made.identity, made.writer)
        self._check_unretired(made, base)
        try:
            self.backend.put(key, [body], PutMode.IF_ABSENT)
        except (AlreadyExists, TransientError, Unsettled) as exc:
            try:
                found = self.backend.get(key, record.RECORD_BYTES_MAX)
            except NotFound:
                raise SaveFailed(f"its record was not accepted ({exc}); if it lands later, it is complete") from exc
            if found != body:
                raise SaveFailed(f"{key} is another writer's; give each writer a name of its own") from exc
            self._check_unretired(made, base)

    def _check_unretired(self, made: Record, base: Record | None) -> None:
        needed = {made.identity}
        if base is not None and not set(base.packs).isdisjoint(made.packs):
            needed.add(base.identity)
        for identity in sorted(needed):
            try:
                self.backend.head(keys.retired_key(identity))
            except NotFound:
                continue
            raise SaveFailed(f"{identity} was retired meanwhile")


def _result(future: Future[Written], cancel: threading.Event) -> Written:
    """Errors: SaveFailed where it was cancelled; whatever went wrong there."""
    while not cancel.is_set():
        with contextlib.suppress(TimeoutError):
            return future.result(CANCEL_S)
    raise SaveFailed("it was cancelled")


def _let_go(exc: BaseException | None) -> None:
    """The tracebacks hold views of memory that its owner wants to close."""
    while exc is not None:
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__cause__ or exc.__context__
