"""Reader of a checkpoint in the store: its record, and its frames by ranged gets. Each frame is checked by its hash.

Frames that are close in a pack are fetched together. Several such gets run at once, and frames are decoded straight
into memory that the caller gives. Some stores show a new object late, so a missing pack is asked for again for some
seconds. Then it counts as missing: it was deleted by hand, or by a prune while the reader held no lease.
`use_newest_readable` then lists once more before it goes on to an older checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ckpt.errors import DamagedData, MissingData, NewerFormat, NoCheckpoint, NotFound, StorageError
from ckpt.format import codecs, record, values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import RANK_VALUES, VALUES, Record
from ckpt.storage.contract import Backend
from ckpt.store import keys
from ckpt.store.lineage import CommitRef, broken_history
from ckpt.store.run import Patience, Run, RunView
from ckpt.threads import Tasks
from ckpt.types import Identity, split_by_bytes

T = TypeVar("T")

GET_BYTES = 16 << 20  # of one get, which may hold several frames
GAP_BYTES_MAX = 64 << 10  # that may be read and dropped between two frames of a get
GETS_MAX = 8  # at once
HELD_BYTES_MAX = 256 << 20  # fetched and not yet decoded (one get is always allowed)


def candidates(view: RunView) -> list[CommitRef]:
    """The records that may be restored, newest first: the branch history, and behind each checkpoint its further
    records. A further record stands in for a damaged one. Errors: DamagedData if nothing is left of the branch history
    because a claim cannot be read. That run is not a fresh one."""
    line = view.history
    newest = view.newest_epoch
    broken = view.lineage.broken_epoch(newest) if newest is not None else None
    if not line and broken is not None:
        raise broken_history(broken)
    return [ref for newest_first in reversed(line) for ref in view.records_by_identity[newest_first.identity]]


def open_record(backend: Backend, ref: CommitRef, patience: Patience | None = None) -> Record:
    """The record that a listing has shown. `patience`: see Run. Errors: NotFound; DamagedData names the record."""
    key = keys.record_key(ref.identity, ref.writer)
    patience = patience or Patience()
    return record.decode(patience.retry_missing(lambda: backend.get(key, record.RECORD_BYTES_MAX)), key)


def use_readable_record(run: Run, records: Sequence[CommitRef], use: Callable[[Record], T]) -> T:
    """The result of `use` for the first readable record of one checkpoint (RunView.records). An event names a damaged
    record. Errors: NoCheckpoint if the checkpoint was retired meanwhile. If no record is readable: the first
    NewerFormat, else the first DamagedData or NotFound. Other errors of `use`."""
    wrong: list[DamagedData | NotFound] = []
    for ref in records:
        try:
            found = use(open_record(run.backend, ref, run.patience))
        except (DamagedData, NotFound) as exc:
            wrong.append(exc)
            continue
        if wrong:
            run.events.emit(
                "restore.skipped",
                f"{run.backend.url}: a record of {ref.identity} cannot be read, so another one is used: {wrong[0]}",
                loud=True,
                identity=str(ref.identity),
            )
        return found
    if any(is_missing(exc) for exc in wrong) and run.is_retired(records[0].identity):
        raise NoCheckpoint(
            f"{run.backend.url}: step {records[0].identity.version.label} has been retired and deleted; `ckpt ls` "
            "lists the remaining checkpoints"
        ) from wrong[0]
    raise next((exc for exc in wrong if isinstance(exc, NewerFormat)), wrong[0])


def missing_pack_error(key: str, identity: Identity, cause: NotFound) -> MissingData:
    """The error for a pack that the checkpoint needs and that is missing."""
    error = MissingData(f"{key} is missing, a pack of {identity}: {cause}")
    error.__cause__ = cause
    return error


def is_missing(error: Exception) -> bool:
    """Whether the error says that an object is missing."""
    return isinstance(error, NotFound | MissingData)


def use_newest_readable(run: Run, use: Callable[[Record], T]) -> T:
    """The first result of `use` over the candidates, newest first.

    A candidate that is damaged or was deleted meanwhile is passed over, with a warning event. At the first missing
    object the store is listed anew.

    Errors: NoCheckpoint; DamagedData if none was readable; NewerFormat if a newer ckpt saved the newest candidate that
    is not damaged: no older one is taken instead."""
    refs = candidates(run.view())
    struck: set[CommitRef] = set()
    # Another record of the same checkpoint may still be readable.
    newer: tuple[Identity, NewerFormat] | None = None
    listed_again = False
    while True:
        left = [ref for ref in refs if ref not in struck]
        if newer is not None and (not left or left[0].identity != newer[0]):
            step = newer[0].version.step
            raise NewerFormat(
                f"{run.backend.url}: step {step}, the newest remaining checkpoint, was saved by a newer ckpt "
                f"({newer[1]}). ckpt takes no older one instead. Install that ckpt here, too"
            ) from newer[1]
        if not left:
            if struck:
                raise DamagedData(f"{run.backend.url}: none of its newest checkpoints ({len(struck)}) can be read")
            raise NoCheckpoint(f"no checkpoint is committed to {run.backend.url}")
        try:
            return use(open_record(run.backend, left[0], run.patience))
        except (DamagedData, NotFound) as exc:
            struck.add(left[0])
            if isinstance(exc, NewerFormat):
                newer = left[0].identity, exc
                continue
            run.events.emit(
                "restore.skipped",
                f"{run.backend.url}: {left[0].identity} cannot be read and is skipped: {exc}",
                loud=True,
                identity=str(left[0].identity),
            )
            if is_missing(exc) and not listed_again:
                listed_again = True
                refs = candidates(run.view())


@dataclass(frozen=True, slots=True)
class _Get:
    """One ranged get: bytes [start, start + length) of a pack, which hold these frames."""

    pack: int
    start: int
    length: int
    frames: tuple[int, ...]


class FrameReader:
    """A reader of one record's frames, with at most `gets` requests at once, each of at most `get_bytes` (or one
    frame). `patience`: waits for packs that are shown late, see Run.patience. Thread-safe; holds nothing open."""

    def __init__(
        self,
        backend: Backend,
        source: Record,
        patience: Patience | None = None,
        *,
        gets: int = GETS_MAX,
        get_bytes: int = GET_BYTES,
    ) -> None:
        self.backend = backend
        self.record = source
        self._gets = gets
        self._get_bytes = get_bytes
        self.patience = patience or Patience()

    def read(
        self,
        frames: Iterable[int],
        deliver: Callable[[int], None],
        out: Callable[[int], memoryview],
        failed: Callable[[int, Exception], None] | None = None,
    ) -> None:
        """Fetches the frames, in any order.

        For each frame, `out(frame)` gives writable memory of its raw length, and may wait for it. The memory is filled
        and checked. Then `deliver(frame)` is called; or `failed(frame, error)`, so that the caller can try another
        source. All three are called from several threads at once.

        Errors: those of `out`, `deliver` and `failed`. Without `failed`, the error of the first frame: StorageError, or
        DamagedData, which names the pack and the frame (or says that the pack is missing). When it raises, no thread is
        left and no further call is made."""
        gets = self._plan_gets(frames)
        if not gets:
            return
        largest = max(get.length for get in gets)
        width = min(self._gets, len(gets), max(1, HELD_BYTES_MAX // max(1, largest)))
        stop = threading.Event()
        local = threading.local()

        def run(get: _Get) -> None:
            if stop.is_set():
                return
            if not hasattr(local, "scratch"):
                local.scratch = codecs.CodecScratch()
            try:
                self._read_get(get, deliver, out, failed, local.scratch, stop)
            except BaseException:
                stop.set()
                raise

        with Tasks("frames", pool_size=width) as tasks:
            futures = [tasks.submit(run, get) for get in gets]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                stop.set()
                raise

    def read_bytes(self, frames: Iterable[int]) -> dict[int, bytearray]:
        """The raw bytes of each frame. Errors: as `read`."""
        lengths = self.record.manifest.frames["length"]
        held = {frame: bytearray(int(lengths[frame])) for frame in frames}
        self.read(held, lambda frame: None, lambda frame: memoryview(held[frame]))
        return held

    def check(
        self,
        frames: Iterable[int],
        checked: Callable[[int], None] = lambda frame: None,
        failed: Callable[[int, Exception], None] | None = None,
    ) -> None:
        """Fetches and hashes the frames, and keeps none. Calls `checked(frame)` for each good one. Memory: one frame
        per thread. Otherwise as `read`."""
        lengths = self.record.manifest.frames["length"]
        local = threading.local()

        def out(frame: int) -> memoryview:
            length = int(lengths[frame])
            if len(getattr(local, "one", b"")) < length:
                local.one = bytearray(length)
            return memoryview(local.one)[:length]

        self.read(frames, checked, out, failed)

    def _plan_gets(self, frames: Iterable[int]) -> list[_Get]:
        numbers = np.unique(np.fromiter(frames, np.int64))
        places = self.record.places[numbers]
        order = np.lexsort((places["offset"], places["pack"]))
        gets: list[_Get] = []
        pack, start, stop, held = -1, 0, 0, list[int]()

        def close() -> None:
            if held:
                gets.append(_Get(pack, start, stop - start, tuple(held)))

        for number, at in zip(numbers[order].tolist(), places[order].tolist(), strict=True):
            its_pack, offset, length, _ = at
            end = offset + length
            if its_pack != pack or offset - stop > GAP_BYTES_MAX or end - start > self._get_bytes:
                close()
                pack, start, stop, held = its_pack, offset, end, []
            stop = max(stop, end)
            held.append(number)
        close()
        return gets

    def _read_get(
        self,
        get: _Get,
        deliver: Callable[[int], None],
        out: Callable[[int], memoryview],
        failed: Callable[[int, Exception], None] | None,
        scratch: codecs.CodecScratch,
        stop: threading.Event,
    ) -> None:
        key = self.record.packs[get.pack][0]
        try:
            read = self.patience.retry_missing(lambda: self.backend.get_range(key, get.start, get.length))
            data = memoryview(read).cast("B")
        except DamagedData as exc:
            # The pack is cut short: the frames before the cut may still be good.
            if len(get.frames) > 1:
                for frame in get.frames:
                    self._read_get(self._plan_gets([frame])[0], deliver, out, failed, scratch, stop)
                return
            error: Exception = exc
        except NotFound as exc:
            error = missing_pack_error(key, self.record.identity, exc)
        except StorageError as exc:
            error = exc
        else:
            for frame in get.frames:
                if stop.is_set():
                    return
                target = out(frame)
                try:
                    self._decode_frame(frame, data, get.start, target, scratch)
                except DamagedData as exc:
                    if failed is None:
                        raise
                    failed(frame, exc)
                else:
                    deliver(frame)
            return
        if failed is None:
            raise error
        for frame in get.frames:
            failed(frame, error)

    def _decode_frame(
        self, frame: int, data: memoryview, start: int, out: memoryview, scratch: codecs.CodecScratch
    ) -> None:
        spec = self.record.manifest.frames[frame]
        pack, offset, length, codec = self.record.places[frame].tolist()
        at = offset - start
        key = self.record.packs[pack][0]
        try:
            codecs.decode(codec, int(spec["dtype"]), data[at : at + length], out, scratch)
        except DamagedData as exc:
            raise DamagedData(f"{key}: frame {frame} at byte {offset}: {exc}") from exc
        if frame_hash(out) != (int(spec["hash_hi"]), int(spec["hash_lo"])):
            raise DamagedData(f"{key}: frame {frame} at byte {offset} does not match its recorded hash")


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a checkpoint: all that is not a tensor. `shared`: the tree that is the same on every rank.
    `shared_by_coordinate`: by coordinate, the differing copies of some ranks. `own_by_coordinate`: by coordinate, each
    rank's generators and loaders."""

    shared: Any
    shared_by_coordinate: dict[str, Any]
    own_by_coordinate: dict[str, Any]


def load_values(reader: FrameReader) -> Values:
    """All values of the checkpoint. Errors: DamagedData; StorageError."""
    trees = dict(each_values(reader))
    return Values(
        shared=trees.get((VALUES, "")),
        shared_by_coordinate={owner: tree for (name, owner), tree in trees.items() if name == VALUES and owner},
        own_by_coordinate={owner: tree for (name, owner), tree in trees.items() if name == RANK_VALUES},
    )


def each_values(reader: FrameReader, held_bytes: int = HELD_BYTES_MAX) -> Iterator[tuple[tuple[str, str], Any]]:
    """(name, owner) and tree of each blob of values. At most `held_bytes` of their bytes are held at a time, or one
    blob. Errors: DamagedData; StorageError."""
    manifest = reader.record.manifest
    of_values = np.array([spec.values for spec in manifest.tensors], bool)
    tensors = manifest.tensor_by_box
    is_its = of_values[np.array(tensors, np.int64)]
    # The key is the frame: each blob of values is one frame (format/record.py).
    owners: dict[int, list[tuple[str, str]]] = {}
    for box, frame in manifest.extents[is_its[manifest.extents["box"]]][["box", "frame"]].tolist():
        spec = manifest.tensors[tensors[box]]
        owners.setdefault(frame, []).append((spec.name, spec.owner))
    frames = sorted(owners)
    for batch in split_by_bytes(manifest.frames["length"][frames].tolist(), held_bytes):
        held = reader.read_bytes(frames[batch])
        for frame in frames[batch]:
            data = bytes(held.pop(frame))
            for key in owners[frame]:
                yield key, values.decode(data)
