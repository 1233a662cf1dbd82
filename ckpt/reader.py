"""`ckpt.open(url)`: the checkpoints of a run, read without a training job.

Guarantees:
- Nothing at the URL is changed, but for the lease that `Reader.held` takes and gives back.
- A listing is read when the reader is opened and at `refresh()`. A record is read when something of it is asked for,
  and once. Of tensors only the frames are read that hold the part which is asked for.
- Every byte that is given out has the hash that was recorded. Nothing is unpickled, and torch is not imported, unless a
  torch tensor is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from ckpt.checkpoint import Checkpoint, Progress
from ckpt.errors import AccessDenied, DamagedData, NoCheckpoint, StorageError, UsageError
from ckpt.events import Events
from ckpt.storage.names import shown

if TYPE_CHECKING:
    from ckpt.storage import Backend
    from ckpt.store.run import Run, RunView
    from ckpt.store.verify import Unrecorded, Verified

CONTACT_S = 15.0  # how long a store that does not answer at all is waited for
RECORDS_MAX = 8  # read at once
DEPTH_MAX = 3
FOLDERS_MAX = 2000


def open(url: str | os.PathLike[str]) -> Reader:
    """The run at that URL, for reading: a context manager, also a plain object with `close()`.

    A store that does not answer at all is given up after 15 s, or after CKPT_RETRY_S where that is set to something
    else than its default. After the first answer a failing operation is tried again as long as in a run.

    Errors: UsageError for what is no URL; NoCheckpoint where no run has saved; StorageError."""
    reader = Reader(open_store(os.fspath(url)))
    try:
        reader.refresh()
        if not reader.view.commits and not reader.view.epochs:
            raise NoCheckpoint(
                f"{shown(reader.url)}: no run has saved there; give the URL that ckpt.Checkpointer was given"
            )
    except BaseException:
        reader.close()
        raise
    return reader


def open_store(url: str) -> Backend:
    """The store at that URL, for somebody who waits. Whoever opens closes. Errors: UsageError."""
    from ckpt import storage
    from ckpt.settings import read

    settings = read()
    contact_s = CONTACT_S if settings.retry_s == read({}).retry_s else None
    return storage.open(url, settings=settings, contact_s=contact_s)


def runs_below(url: str | os.PathLike[str]) -> list[str]:
    """The URLs of runs below a folder or bucket, sorted: up to DEPTH_MAX levels down, in up to FOLDERS_MAX folders. Not
    looked at is what lies in a run, or in a folder that may not be read. Errors: UsageError; StorageError."""
    backend = open_store(os.fspath(url))
    found: list[str] = []
    left, seen = [""], 0
    try:
        while left and seen < FOLDERS_MAX:
            prefix = left.pop(0)
            seen += 1
            try:
                names = backend.folders(prefix)
            except AccessDenied:
                continue
            if prefix and {"commits", "epochs"} & set(names):
                found.append(f"{backend.url.rstrip('/')}/{prefix.rstrip('/')}")
            elif prefix.count("/") < DEPTH_MAX:
                left += [f"{prefix}{name}/" for name in names]
    finally:
        backend.close()
    return sorted(found)


class Reader:
    """A run at one URL. `checkpoints` are those of its line, oldest first: the last one is where the next start goes
    on. `branches` are the rest, which no start goes on from by itself. Retired ones are in neither. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        """Owns the backend from now on. Use `ckpt.open`."""
        from ckpt.store.run import Run

        self.url = backend.url
        self.run: Run = Run(backend, events=Events())
        self.view: RunView
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self.branches: tuple[Checkpoint, ...] = ()
        self._backend = backend

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Checkpoints of this reader cannot be read any more. May be called again."""
        self._backend.close()

    def refresh(self) -> None:
        """Lists anew. Checkpoints that were handed out before stay as they are. Errors: StorageError."""
        self.view = self.run.view()
        records = self.view.records
        self.checkpoints = tuple(Checkpoint(self.run, records[ref.identity], True) for ref in self.view.line)
        self.branches = tuple(Checkpoint(self.run, records[ref.identity], False) for ref in self.view.branches)

    @property
    def newest(self) -> Checkpoint:
        """The last of the line. Errors: NoCheckpoint."""
        if not self.checkpoints:
            raise self.none_yet
        return self.checkpoints[-1]

    @property
    def none_yet(self) -> NoCheckpoint:
        """The error that the line has no checkpoint."""
        return NoCheckpoint(f"{shown(self.url)}: the run has no checkpoint yet{self._or_branches}")

    def find(self, which: str | int) -> Checkpoint:
        """A step: that checkpoint of the line; of several at one step the newest. "300.1", as `label` says it: exactly
        that one. An identity: any checkpoint, on a branch too. Errors: NoCheckpoint names the newest."""
        which = str(which)
        for each in reversed([*self.branches, *self.checkpoints]):
            if which == each.identity:
                return each
        for each in reversed(self.checkpoints):
            if which in (f"{each.step}.{each.sub}", str(each.step)):
                return each
        if not self.checkpoints:
            raise self.none_yet
        near = ", ".join(each.label for each in self.checkpoints[-8:])
        raise NoCheckpoint(
            f"{shown(self.url)}: no checkpoint {which!r:.80} on the line of the run; the newest are "
            f"{near}{self._or_branches}"
        )

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> Checkpoint:
        """The checkpoint of the line whose metric, as given to `ck.save(metrics=)`, is the lowest (or highest). Of
        equal ones the newest; NaN is none. Reads all records. Passed over are those that cannot be read, and
        checkpoints of which a pack is missing or cut short.

        Errors: NoCheckpoint where the line has none; UsageError where no checkpoint has that metric; DamagedData where
        each that has it is passed over; StorageError."""
        from ckpt.store.prune import best_of, unknown_metric
        from ckpt.store.verify import check_whole

        if mode not in ("min", "max"):
            raise UsageError(f"mode {mode!r}: give min or max")
        if not self.checkpoints:
            raise self.none_yet
        self.read_records(self.checkpoints)
        known = {each.ref.identity: each.record.metrics for each in self.checkpoints if each.error is None}
        damaged: DamagedData | None = None
        while (found := best_of(list(known), metric, mode, known)) is not None:
            best = next(each for each in self.checkpoints if each.ref.identity == found)
            try:
                check_whole(self.run, best.record, read=False)
                return best
            except DamagedData as exc:
                damaged = exc
                del known[found]
        raise damaged or unknown_metric(metric, known.values())

    def restorable(self, *, check: bool = False) -> Checkpoint | None:
        """What the next start would restore from the store; None where it would begin from nothing. A checkpoint whose
        record cannot be read, or of which a pack is missing or cut short, is passed over, as a start does, with a
        warning. `check`: the data is read and hashed as well. What is only in an agent's memory is not seen here.

        Errors: DamagedData where there are checkpoints and none is sound; NewerFormat; StorageError."""
        from ckpt.store.reader import newest_readable
        from ckpt.store.verify import check_whole

        try:
            found = newest_readable(self.run, lambda record: check_whole(self.run, record, read=check))
        except NoCheckpoint:
            return None
        self.refresh()
        return self.find(str(found.identity))

    def verify(
        self, checkpoints: Sequence[Checkpoint] | None = None, progress: Progress | None = None
    ) -> list[Verified]:
        """Reads and hashes everything of these checkpoints, by default of the line: a report for each.

        Errors: StorageError where the store does not answer."""
        from ckpt.store.verify import verify

        chosen = self.checkpoints if checkpoints is None else checkpoints
        return verify(self.run, [ref for each in chosen for ref in each.records], progress)

    def unrecorded(self) -> list[Unrecorded]:
        """Checkpoints whose packs are there and whose record is not, which no start can restore. Reads all records.

        Errors: StorageError."""
        from ckpt.store.verify import unrecorded

        every = (*self.checkpoints, *self.branches)
        self.read_records(every)
        referred = {key for each in every if each.error is None for key, _ in each.record.packs}
        return unrecorded(self.run, self.view, referred)

    @contextmanager
    def held(self, checkpoints: Collection[Checkpoint] | None = None) -> Iterator[None]:
        """While the block runs no prune deletes what these checkpoints (by default all) consist of. A lease at the URL
        says so. Where none can be left, since the store may only be read or is full, a warning says that."""
        from ckpt.store.prune import LEASE_IDENTITIES_MAX, Lease

        chosen = (*self.checkpoints, *self.branches) if checkpoints is None else checkpoints
        identities = sorted({each.ref.identity for each in chosen})
        with ExitStack() as stack:
            try:
                for start in range(0, len(identities), LEASE_IDENTITIES_MAX):
                    part = identities[start : start + LEASE_IDENTITIES_MAX]
                    stack.enter_context(Lease(self._backend, part, events=self.run.events))
            except StorageError as exc:
                text = f"no lease can be taken, so a prune may delete what is being read: {exc}"
                self.run.events.emit("lease.refused", text, loud=True)
            yield

    def read_records(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Reads the records of these checkpoints, several at once. What is wrong with one is its `error`."""
        from ckpt.store.run import in_parallel

        in_parallel(lambda each: each.error, checkpoints, RECORDS_MAX)

    @property
    def _or_branches(self) -> str:
        return "; there are branches, see `ckpt ls --all`" if self.branches else ""
