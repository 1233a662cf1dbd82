"""Reading a checkpoint from the store: its record, and its frames by ranged gets, each checked by its hash.

Frames that lie near one another in a pack are fetched together, several such runs at once, decoded straight into the
memory that the caller gives. A pack that a record names and that is not there is asked for again for some seconds,
since some stores show a new object late. Then it counts as missing: deleted by hand, or by a prune of a reader that
holds no lease. `newest_readable` lists once more then, before it goes on to an older checkpoint.
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
from ckpt.store.lineage import CommitRef, broken_line
from ckpt.store.patience import Patience
from ckpt.store.run import Run, RunView
from ckpt.threads import Tasks
from ckpt.types import Identity

T = TypeVar("T")

GET_BYTES = 16 << 20  # frames are fetched together up to this
GAP_BYTES_MAX = 64 << 10  # what may be read and thrown away between two of them
GETS_MAX = 8  # at once
HELD_BYTES_MAX = 256 << 20  # fetched and not yet decoded (one get always may)


def candidates(view: RunView) -> list[CommitRef]:
    """What may be restored, newest first: the line, and behind each checkpoint its further records, which stand in for
    a damaged one.

    Errors: DamagedData where nothing is left of the line because a claim cannot be read: that is no fresh run."""
    line = view.line
    newest = view.newest_epoch
    broken = view.lineage.broken(newest) if newest is not None else None
    if not line and broken is not None:
        raise broken_line(broken)
    return [ref for newest_first in reversed(line) for ref in view.records[newest_first.identity]]


def open_record(backend: Backend, ref: CommitRef, patience: Patience | None = None) -> Record:
    """The record that a listing has shown. `patience`: see Run. Errors: NotFound; DamagedData names the record."""
    key = keys.record_key(ref.identity, ref.writer)
    patience = patience or Patience()
    return record.decode(patience.get(lambda: backend.get(key, record.RECORD_BYTES_MAX)), key)


def any_readable(run: Run, records: Sequence[CommitRef], use: Callable[[Record], T]) -> T:
    """The result of `use` over the records of one checkpoint (RunView.records): one that is damaged is passed over,
    which an event says.

    Errors: NoCheckpoint where it was retired meanwhile; else, of the first that fails so, NewerFormat, DamagedData,
    NotFound; what `use` raises besides."""
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
                f"{run.backend.url}: a record of {ref.identity} cannot be read and another one is taken: {wrong[0]}",
                loud=True,
                identity=str(ref.identity),
            )
        return found
    if any(is_missing(exc) for exc in wrong) and run.is_retired(records[0].identity):
        raise NoCheckpoint(
            f"{run.backend.url}: step {records[0].identity.tick.label} was retired meanwhile, and deleted; ckpt ls "
            "shows what is left"
        ) from wrong[0]
    raise next((exc for exc in wrong if isinstance(exc, NewerFormat)), wrong[0])


def missing_pack(key: str, identity: Identity, cause: NotFound) -> MissingData:
    """The error that a pack is not there, which that checkpoint needs."""
    error = MissingData(f"{key} is missing, which the record of {identity} names: {cause}")
    error.__cause__ = cause
    return error


def is_missing(error: Exception) -> bool:
    """Whether it says that an object is not there."""
    return isinstance(error, NotFound | MissingData)


def newest_readable(run: Run, use: Callable[[Record], T]) -> T:
    """The first result of `use` over the candidates, newest first. One that is damaged, or was deleted meanwhile, is
    passed over with a loud event; the first time that something is not there, the store is listed anew.

    Errors: NoCheckpoint; NewerFormat where a newer ckpt saved the first one that is sound: what is older is not taken
    for it; DamagedData where none was readable."""
    refs = candidates(run.view())
    struck: set[CommitRef] = set()
    newer: tuple[Identity, NewerFormat] | None = None  # another record of the same checkpoint may still do
    listed_again = False
    while True:
        left = [ref for ref in refs if ref not in struck]
        if newer is not None and (not left or left[0].identity != newer[0]):
            step = newer[0].tick.step
            raise NewerFormat(
                f"{run.backend.url}: step {step}, the newest that is left, was saved by a newer ckpt ({newer[1]}); "
                "what is older is not taken instead. Install that ckpt here, too"
            ) from newer[1]
        if not left:
            if struck:
                raise DamagedData(f"{run.backend.url}: of its newest checkpoints ({len(struck)}) none could be read")
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
                f"{run.backend.url}: {left[0].identity} cannot be read and is passed over: {exc}",
                loud=True,
                identity=str(left[0].identity),
            )
            if is_missing(exc) and not listed_again:
                listed_again = True
                refs = candidates(run.view())


@dataclass(frozen=True, slots=True)
class _Get:
    """Bytes [start, start + length) of a pack, which hold these frames."""

    pack: int
    start: int
    length: int
    frames: tuple[int, ...]


class FrameReader:
    """Reads frames of one record, by at most `gets` requests at once, of up to `get_bytes` each (or one frame).
    `patience`: for packs that are shown late, see Run.patience. Thread-safe; holds nothing open."""

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
        """Fetches the frames, in any order. For each: `out(frame)` gives writable memory of its raw length (and may
        wait for it), which is filled and checked; then `deliver(frame)`, or `failed(frame, error)` so that another
        source can be tried. All three are called from several threads at once.

        Errors: what `out`, `deliver` or `failed` raise; without `failed` the first frame's error: DamagedData names
        the pack, and the frame or that it is missing; StorageError. No thread is left then, and no further call is
        made."""
        gets = self._plan(frames)
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
                self._read(get, deliver, out, failed, local.scratch, stop)
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

    def _plan(self, frames: Iterable[int]) -> list[_Get]:
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

    def _read(
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
            read = self.patience.get(lambda: self.backend.get_range(key, get.start, get.length))
            data = memoryview(read).cast("B")
        except DamagedData as exc:
            if len(get.frames) > 1:  # the pack is cut short: what lies before may still be good
                for frame in get.frames:
                    self._read(self._plan([frame])[0], deliver, out, failed, scratch, stop)
                return
            error: Exception = exc
        except NotFound as exc:
            error = missing_pack(key, self.record.identity, exc)
        except StorageError as exc:
            error = exc
        else:
            for frame in get.frames:
                if stop.is_set():
                    return
                target = out(frame)
                try:
                    self._decode(frame, data, get.start, target, scratch)
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

    def _decode(self, frame: int, data: memoryview, start: int, out: memoryview, scratch: codecs.CodecScratch) -> None:
        spec = self.record.manifest.frames[frame]
        pack, offset, length, codec = self.record.places[frame].tolist()
        at = offset - start
        key = self.record.packs[pack][0]
        try:
            codecs.decode(codec, int(spec["dtype"]), data[at : at + length], out, scratch)
        except DamagedData as exc:
            raise DamagedData(f"{key}: frame {frame} at byte {offset}: {exc}") from exc
        if frame_hash(out) != (int(spec["hash_hi"]), int(spec["hash_lo"])):
            raise DamagedData(f"{key}: frame {frame} at byte {offset} does not hash to what was recorded")


@dataclass(frozen=True, slots=True)
class Values:
    """What a checkpoint holds besides tensors. `shared`: the tree that is the same on every rank; `own_shared`: by
    coordinate, of ranks whose copy differs from it; `own`: by coordinate, each rank's generators and loaders."""

    shared: Any
    own_shared: dict[str, Any]
    own: dict[str, Any]


def load_values(reader: FrameReader) -> Values:
    """Errors: DamagedData; StorageError."""
    trees = dict(each_values(reader))
    return Values(
        shared=trees.get((VALUES, "")),
        own_shared={owner: tree for (name, owner), tree in trees.items() if name == VALUES and owner},
        own={owner: tree for (name, owner), tree in trees.items() if name == RANK_VALUES},
    )


def each_values(reader: FrameReader, held_bytes: int = HELD_BYTES_MAX) -> Iterator[tuple[tuple[str, str], Any]]:
    """(name, owner) and tree of each blob of values. Of their bytes no more than `held_bytes` are held, or one blob.

    Errors: DamagedData; StorageError."""
    manifest = reader.record.manifest
    of_values = np.array([spec.values for spec in manifest.tensors], bool)
    is_its = of_values[np.array([tensor for tensor, _ in manifest.boxes], np.int64)]
    owners: dict[int, list[tuple[str, str]]] = {}  # by frame: a blob is one (format/record.py)
    for box, frame in manifest.extents[is_its[manifest.extents["box"]]][["box", "frame"]].tolist():
        spec = manifest.tensors[manifest.boxes[box][0]]
        owners.setdefault(frame, []).append((spec.name, spec.owner))
    batch, batch_bytes = list[int](), 0
    for frame in sorted(owners):
        length = int(manifest.frames["length"][frame])
        if batch and batch_bytes + length > held_bytes:
            yield from _parsed(reader, batch, owners)
            batch, batch_bytes = [], 0
        batch.append(frame)
        batch_bytes += length
    yield from _parsed(reader, batch, owners)


def _parsed(
    reader: FrameReader, frames: list[int], owners: dict[int, list[tuple[str, str]]]
) -> Iterator[tuple[tuple[str, str], Any]]:
    held = reader.read_bytes(frames)
    for frame in frames:
        data = bytes(held.pop(frame))
        for key in owners[frame]:
            yield key, values.decode(data)
