"""Verification: reads and hashes everything that checkpoints consist of, and reports the damage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.errors import CkptError, DamagedData, NotFound
from ckpt.format.manifest import Manifest, Record
from ckpt.storage.contract import ObjectInfo
from ckpt.store import keys
from ckpt.store.lineage import CommitRef
from ckpt.store.packs import raw_bytes_of
from ckpt.store.reader import FrameReader, each_values, is_missing, missing_pack_error, open_record
from ckpt.store.run import Run, RunView, map_parallel
from ckpt.store.tensor_stream import exported_name
from ckpt.types import Identity, format_count

NAMED_MAX = 20
PACK_CHECKS_MAX = 16  # at once, at packs
# Pack, offset, codec, raw hash (2), raw length.
FramePlace = tuple[str, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Problem:
    """One damaged or missing object. `key`: of the object. `tensors`: up to 20 names of tensors that cannot be restored
    because of it; `tensors_more`: how many more there are."""

    key: str
    what: str
    tensors: tuple[str, ...] = ()
    is_missing: bool = False
    tensors_more: int = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """The report on one checkpoint.

    `ref`: its first record without a problem, else its first record. `is_good`: there is a record without a problem.
    `is_retired`: the checkpoint was retired meanwhile, so its missing objects were deleted on purpose. `problems`: of
    all its records. `frames`: of `ref`. `checked_bytes`: raw bytes read and hashed for this checkpoint; frames that an
    earlier checkpoint of the same call has verified are not read again."""

    ref: CommitRef
    problems: tuple[Problem, ...]
    frames: int
    checked_bytes: int
    is_good: bool
    is_retired: bool = False


def verify(run: Run, refs: Sequence[CommitRef], progress: Callable[[int, int], None] | None = None) -> list[Verified]:
    """One report per checkpoint, in the order of its first record in `refs`. A checkpoint may have several records
    (RunView.records).

    Records are read one after another; memory stays at a few frames per thread. `progress(done, total)`: raw bytes,
    from any thread; the total is known after all records are read.

    Errors: StorageError other than NotFound, which says nothing about the checkpoint."""
    opened: list[tuple[CommitRef, Record | Problem]] = []
    for ref in refs:
        try:
            opened.append((ref, open_record(run.backend, ref, run.patience)))
        except (DamagedData, NotFound) as exc:
            problem = Problem(keys.record_key(ref.identity, ref.writer), str(exc), is_missing=is_missing(exc))
            opened.append((ref, problem))
    meter = Meter(progress, sum(raw_bytes_of(r.manifest.frames) for _, r in opened if isinstance(r, Record)))
    sizes = {info.key: info.size for info in run.backend.list(keys.DATA)}
    good: set[FramePlace] = set()
    by_checkpoint: dict[Identity, list[_Checked]] = {}
    for ref, found in opened:
        one = (
            _Checked(ref, (found,)) if isinstance(found, Problem) else _verify_one(run, ref, found, sizes, good, meter)
        )
        by_checkpoint.setdefault(ref.identity, []).append(one)
    return [_merge_results(run, records) for records in by_checkpoint.values()]


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """A checkpoint that has packs in the store and no record. `is_lost`: another checkpoint refers to its packs, so
    there was a record. Otherwise it is unknown whether the commit never finished or its record was removed."""

    identity: Identity
    packs: int
    bytes: int
    is_lost: bool


def find_unrecorded(run: Run, view: RunView, referred: Collection[str]) -> list[Unrecorded]:
    """The checkpoints without a record, by identity. Leaves out retired ones, and those whose commit may still be
    running: the newest of an epoch that is not over. `referred`: the keys of packs to which records refer. Errors:
    StorageError."""
    packs: dict[Identity, list[ObjectInfo]] = {}
    for info in run.backend.list(keys.DATA):
        found = keys.parse_pack(info.key)
        if (
            found is not None
            and found.identity not in view.records_by_identity
            and found.identity not in view.retired_at_s
        ):
            packs.setdefault(found.identity, []).append(info)
    newest = {ref.identity.epoch: ref.identity for ref in sorted(view.commits)}
    listed = []
    for identity, its in sorted(packs.items()):
        epoch = identity.epoch
        is_lost = any(info.key in referred for info in its)
        is_over = epoch in view.closed_epochs or (view.newest_epoch is not None and epoch < view.newest_epoch)
        if is_lost or is_over or (epoch in newest and identity < newest[epoch]):
            listed.append(Unrecorded(identity, len(its), sum(info.size for info in its), is_lost))
    return listed


def check_record(run: Run, record: Record, *, read: bool) -> Record:
    """The record itself, after a check of its packs. `read`: reads and hashes its frames; else only looks whether its
    packs are there. Errors: DamagedData names the first pack that is missing, cut short or damaged; StorageError."""
    if read:
        FrameReader(run.backend, record, run.patience).check(range(len(record.places)))
        return record

    def look(pack: tuple[str, int]) -> None:
        key, size = pack
        try:
            found = run.backend.head(key).size
        except NotFound as exc:
            raise missing_pack_error(key, record.identity, exc) from exc
        if found < size:
            raise DamagedData(f"{key} has {found} bytes instead of the recorded {size}")

    map_parallel(look, record.packs, PACK_CHECKS_MAX)
    return record


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result for one record."""

    ref: CommitRef
    problems: tuple[Problem, ...]
    frames: int = 0
    checked_bytes: int = 0


def _merge_results(run: Run, records: Sequence[_Checked]) -> Verified:
    best = next((each for each in records if not each.problems), records[0])
    problems = tuple(problem for each in records for problem in each.problems)
    is_good = not best.problems
    may_be_retired = not is_good and any(problem.is_missing for problem in problems)
    return Verified(
        ref=best.ref,
        problems=problems,
        frames=best.frames,
        checked_bytes=sum(each.checked_bytes for each in records),
        is_good=is_good,
        is_retired=may_be_retired and run.is_retired(best.ref.identity),
    )


def _verify_one(
    run: Run, ref: CommitRef, record: Record, sizes: Mapping[str, int], good: set[FramePlace], meter: Meter
) -> _Checked:
    places = frame_places(record)
    lengths = record.manifest.frames["length"].tolist()
    todo = [frame for frame, place in enumerate(places) if place not in good]
    meter.add(sum(lengths) - sum(lengths[frame] for frame in todo))
    reader = FrameReader(run.backend, record, run.patience)
    bad: dict[int, Exception] = {}

    def deliver(frame: int) -> None:
        meter.add(lengths[frame])

    def failed(frame: int, error: Exception) -> None:
        if not isinstance(error, (DamagedData, NotFound)):
            raise error
        bad[frame] = error
        meter.add(lengths[frame])

    reader.check(todo, deliver, failed)
    good.update(places[frame] for frame in todo if frame not in bad)
    problems = _problems(record, bad)
    problems += _size_problems(record, sizes, {problem.key for problem in problems})
    if not problems:
        try:
            # One after the other, to save memory.
            for _ in each_values(reader):
                pass
        except CkptError as exc:
            problems = (Problem(keys.record_key(ref.identity, ref.writer), f"its values cannot be decoded: {exc}"),)
    return _Checked(ref, problems, len(places), sum(lengths[frame] for frame in todo))


def _problems(record: Record, bad: dict[int, Exception]) -> tuple[Problem, ...]:
    """One problem per pack. It names the tensors that have lost bytes."""
    by_pack: dict[int, list[int]] = {}
    for frame in sorted(bad):
        by_pack.setdefault(int(record.places["pack"][frame]), []).append(frame)
    problems = []
    for pack, frames in sorted(by_pack.items()):
        more = f" (and {format_count(len(frames) - 1, 'more frame')} of this pack)" if len(frames) > 1 else ""
        names, names_more = _affected_tensors(record.manifest, frames)
        missing = any(is_missing(bad[frame]) for frame in frames)
        problems.append(Problem(record.packs[pack][0], f"{bad[frames[0]]}{more}", names, missing, names_more))
    return tuple(problems)


def _size_problems(record: Record, sizes: Mapping[str, int], known: Collection[str]) -> tuple[Problem, ...]:
    """Problems for packs of another size whose frames are all good. The checkpoint can be restored, but retention does
    not count it as kept."""
    return tuple(
        Problem(key, f"it has {sizes[key]} bytes instead of the recorded {size}")
        for key, size in record.packs
        if key not in known and sizes.get(key, size) != size
    )


def _affected_tensors(manifest: Manifest, frames: Sequence[int]) -> tuple[tuple[str, ...], int]:
    """Some names, and how many more there are."""
    boxes = manifest.extents["box"][np.isin(manifest.extents["frame"], frames)]
    tensors = dict.fromkeys(manifest.boxes[box][0] for box in np.unique(boxes).tolist())
    names = tuple(exported_name(manifest.tensors[each]) for each in list(tensors)[:NAMED_MAX])
    return names, len(tensors) - len(names)


def frame_places(record: Record) -> list[FramePlace]:
    """Where each frame lies, and what it must hold."""
    frames = record.manifest.frames[["hash_hi", "hash_lo", "length"]].tolist()
    rows = record.places[["pack", "offset", "codec"]].tolist()
    return [(record.packs[p][0], o, c, *frame) for (p, o, c), frame in zip(rows, frames, strict=True)]


class Meter:
    """Sums up what is done, and tells `progress(done, total)`. Thread-safe."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.done = 0
        self._progress, self._total = progress, total
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self._total)
