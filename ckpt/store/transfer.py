"""Copying a run's checkpoints to another store. Each frame is checked on the way.

Order of writes: first the claims of the epochs that lead to the checkpoints. Then, oldest checkpoint first, its packs,
and last its record. So an interrupted copy leaves whole checkpoints, and packs that the next try finds.

Must-invariants:
- An object has the same key and the same bytes in both stores. So identities and the branch history do not change.
- A record is put only after every frame that it names was decoded and hashed: from the bytes that were put, or, for a
  pack that the target already had, from the bytes that the target returns.
- A target that holds anything of another run is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ckpt.errors import DamagedData, NotFound, UsageError
from ckpt.format.manifest import Record
from ckpt.format.record import RECORD_BYTES_MAX
from ckpt.storage.contract import Backend, Buffer
from ckpt.store import keys
from ckpt.store.lineage import CLAIM_BYTES_MAX, CommitRef
from ckpt.store.reader import HELD_BYTES_MAX, FrameReader, missing_pack_error, use_readable_record
from ckpt.store.run import Run, RunView, map_parallel, put_once
from ckpt.store.verify import FramePlace, Meter, frame_places
from ckpt.types import Epoch, Identity

PACKS_MAX = 4  # copied at once
_CLOSED_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Transferred:
    """The result of a copy. `copied`: checkpoints that are new at the target. `there`: checkpoints that it already had.
    `retired`: checkpoints retired at the target, which stay so. `bytes`: size of the packs that were put."""

    copied: tuple[Identity, ...]
    existing: tuple[Identity, ...]
    retired: tuple[Identity, ...]
    bytes: int


def transfer(
    source: Run,
    target: Run,
    view: RunView,
    chosen: Sequence[Identity],
    epochs: Sequence[Epoch],
    progress: Callable[[int, int], None] | None = None,
) -> Transferred:
    """Copies these checkpoints of `view`, and the claims of these epochs.

    May be repeated after any failure: existing objects stay as they are. `progress(done, total)`: bytes of packs, from
    any thread.

    Errors: UsageError if the target holds another run; DamagedData names what is damaged at the source, after all older
    checkpoints were copied; StorageError."""
    there = target.view()
    foreign = sorted(there.epochs - view.epochs)
    if foreign:
        raise UsageError(
            f"{target.backend.url} holds another run (epoch {foreign[-1]}); give an empty URL, or that of an earlier "
            "copy of this run"
        )
    todo = [each for each in sorted(chosen) if each not in there.records_by_identity and each not in there.retired_at_s]
    _copy_claims(source, target, view, epochs)
    checkpoints = [view.records_by_identity[each] for each in todo]
    copier = _Copier(source, target, checkpoints, progress)
    for refs in checkpoints:
        copier.copy(refs)
    return Transferred(
        copied=tuple(todo),
        existing=tuple(each for each in sorted(chosen) if each in there.records_by_identity),
        retired=tuple(
            each for each in sorted(chosen) if each in there.retired_at_s and each not in there.records_by_identity
        ),
        bytes=copier.meter.done,
    )


def _copy_claims(source: Run, target: Run, view: RunView, epochs: Sequence[Epoch]) -> None:
    damaged = dict(view.damaged_claims)
    for epoch in sorted(epochs):
        key = keys.epoch_key(epoch)
        if key in damaged:
            raise DamagedData(f"{damaged[key]}; without this claim the start of epoch {epoch} is unknown")
        if epoch in view.lineage.claims:
            _copy_object(source.backend, target.backend, key, CLAIM_BYTES_MAX)
        if epoch in view.closed_epochs:
            _copy_object(source.backend, target.backend, keys.closed_key(epoch), _CLOSED_BYTES_MAX)


def _copy_object(source: Backend, target: Backend, key: str, size_max: int) -> None:
    body = source.get(key, size_max)
    if put_once(target, key, body, CLAIM_BYTES_MAX + len(body)) not in (None, body):
        raise UsageError(f"{target.url}: {key} exists already with other content; give another URL")


class _Copier:
    """Copies one checkpoint after the other. `checkpoints`: the records of each. `meter`: of the packs that are put."""

    def __init__(
        self,
        source: Run,
        target: Run,
        checkpoints: Sequence[Sequence[CommitRef]],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source, self._target = source, target
        self._target_sizes = {info.key: info.size for info in target.backend.list(keys.DATA)}
        # Frames that were checked.
        self._checked_places: set[FramePlace] = set()
        packs: dict[str, int] = {}
        for refs in checkpoints:
            packs.update(use_readable_record(source, refs, lambda record: record.packs))
        self.meter = Meter(progress, sum(n for key, n in packs.items() if self._target_sizes.get(key) != n))

    def copy(self, refs: Sequence[CommitRef]) -> None:
        """Copies one checkpoint, by the first of its records that can be read. Errors: DamagedData."""
        made = use_readable_record(self._source, refs, lambda record: record)
        frames = self._unchecked_frames(made)
        missing = [n for n, (key, size) in enumerate(made.packs) if n in frames and self._target_sizes.get(key) != size]
        have = [frame for n in frames.keys() - set(missing) for frame in frames[n]]
        again = self._damaged_packs(made, have)
        packs = sorted({*missing, *again})
        largest = max((made.packs[n][1] for n in packs), default=1)
        width = max(1, min(PACKS_MAX, HELD_BYTES_MAX // max(1, largest)))
        map_parallel(lambda n: self._copy_pack(made, n, frames[n]), packs, width)
        self._checked_places.update(frame_places(made))
        key = keys.record_key(made.identity, made.writer)
        _copy_object(self._source.backend, self._target.backend, key, RECORD_BYTES_MAX)

    def _unchecked_frames(self, made: Record) -> dict[int, list[int]]:
        """The frames that were not checked yet, by pack."""
        found: dict[int, list[int]] = {}
        for frame, (place, pack) in enumerate(zip(frame_places(made), made.places["pack"].tolist(), strict=True)):
            if place not in self._checked_places:
                found.setdefault(pack, []).append(frame)
        return found

    def _damaged_packs(self, made: Record, frames: Sequence[int]) -> set[int]:
        """The packs at the target in which one of these frames is damaged. They are put once more."""
        bad: set[int] = set()

        def failed(frame: int, error: Exception) -> None:
            if not isinstance(error, DamagedData):
                raise error
            bad.add(int(made.places["pack"][frame]))

        FrameReader(self._target.backend, made).check(frames, failed=failed)
        return bad

    def _copy_pack(self, made: Record, number: int, frames: Sequence[int]) -> None:
        key, size = made.packs[number]
        try:
            data = self._source.backend.get_range(key, 0, size)
        except NotFound as exc:
            raise missing_pack_error(key, made.identity, exc) from exc
        FrameReader(cast(Backend, _InMemory(data)), made).check(frames)
        self._target.backend.put(key, [data])
        self.meter.add(size)


class _InMemory:
    """A stand-in for a backend: the bytes of one pack, for a FrameReader."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")

    def get_range(self, key: str, start: int, length: int) -> Any:
        return self._data[start : start + length]
