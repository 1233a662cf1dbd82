"""`ckpt.open(url)`: reads the checkpoints of a run, without a training job.

Guarantees:
- Nothing at the URL is changed, except the lease that `Reader.held` takes and gives back.
- The listing is read when the reader is opened and at `refresh()`. A record is read once, when it is first needed. Of a
  tensor, only the frames that hold the requested part are read.
- All returned bytes have the hash that was recorded. Nothing is unpickled. torch is imported only for a torch tensor.
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
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.storage import Backend
    from ckpt.store.run import Run, RunView
    from ckpt.store.verify import Unrecorded, Verified

CONTACT_S = 15.0  # how long the first answer of a store is waited for
RECORDS_MAX = 8  # records that are read at once
DEPTH_MAX = 3
FOLDERS_MAX = 2000


def open(url: str | os.PathLike[str]) -> Reader:
    """Opens the run at that URL for reading. The reader is a context manager; `close()` closes it too.

    A store that does not answer at all is given up after 15 s, or after CKPT_RETRY_S if that differs from its default.
    After the first answer a failing operation is retried for as long as in a training job.

    Errors: UsageError if the URL is not valid; NoCheckpoint if no run has saved there; StorageError."""
    from ckpt.storage.url import check_not_dcp

    reader = Reader(open_store(os.fspath(url)))
    try:
        reader.refresh()
        if not reader.view.commits and not reader.view.epochs:
            check_not_dcp(reader.url)
            raise NoCheckpoint(
                f"{redact_url(reader.url)}: no run has saved there; give the URL that ckpt.Checkpointer was given"
            )
    except BaseException:
        reader.close()
        raise
    return reader


def open_store(url: str) -> Backend:
    """Opens the store at that URL for a caller who waits, so it gives up early, as `open` does. The caller closes the
    store. Errors: UsageError."""
    from ckpt import storage
    from ckpt.settings import read_settings

    settings = read_settings()
    contact_s = CONTACT_S if settings.retry_s == read_settings({}).retry_s else None
    return storage.open(url, settings=settings, contact_s=contact_s)


def runs_below(url: str | os.PathLike[str]) -> list[str]:
    """The URLs of the runs below a folder or bucket, sorted. At most DEPTH_MAX levels and FOLDERS_MAX folders are
    looked at. Skipped are the insides of runs, and folders to which access is denied. Errors: UsageError; StorageError.
    """
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
    """A run at one URL. Thread-safe.

    `checkpoints`: those of the branch history, oldest first; the next start goes on from the last one. `branches`: all
    others, which no start restores by itself. Retired checkpoints are in neither."""

    def __init__(self, backend: Backend) -> None:
        """Use `ckpt.open`. The reader owns the backend from now on."""
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
        """Closes the store: checkpoints of this reader cannot be read any more. May be called again."""
        self._backend.close()

    def refresh(self) -> None:
        """Reads the listing again. Checkpoint objects that were handed out before do not change. Errors:
        StorageError."""
        self.view = self.run.view()
        records = self.view.records_by_identity
        self.checkpoints = tuple(Checkpoint(self.run, records[ref.identity], True) for ref in self.view.history)
        self.branches = tuple(Checkpoint(self.run, records[ref.identity], False) for ref in self.view.branches)

    @property
    def newest(self) -> Checkpoint:
        """The last checkpoint of the branch history. Errors: NoCheckpoint."""
        if not self.checkpoints:
            raise self.none_yet
        return self.checkpoints[-1]

    @property
    def none_yet(self) -> NoCheckpoint:
        """The error that says that the branch history has no checkpoint."""
        return NoCheckpoint(f"{redact_url(self.url)}: the run has no checkpoint yet{self._branches_hint}")

    def find(self, which: str | int) -> Checkpoint:
        """The checkpoint that `which` names. A step: the newest checkpoint of that step in the branch history. A label
        such as "300.1": exactly that one. An identity: any checkpoint, on a branch too. Errors: NoCheckpoint, which
        names the newest ones."""
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
            f"{redact_url(self.url)}: no checkpoint {which!r:.80} in the history of the run; the newest are "
            f"{near}{self._branches_hint}"
        )

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> Checkpoint:
        """The checkpoint of the branch history with the lowest (or highest) `metric`, as given to `ck.save(metrics=)`.
        Of equal ones it is the newest; NaN does not count. Reads all records. Skipped are checkpoints whose record
        cannot be read, or of which a pack is missing or cut short.

        Errors: NoCheckpoint if the history is empty; UsageError if no checkpoint has the metric; DamagedData if every
        checkpoint with the metric is skipped; StorageError."""
        from ckpt.store.retention import best_checkpoint, unknown_metric_error
        from ckpt.store.verify import check_record

        if mode not in ("min", "max"):
            raise UsageError(f"mode {mode!r}: give min or max")
        if not self.checkpoints:
            raise self.none_yet
        self.read_records(self.checkpoints)
        known = {each.ref.identity: each.record.metrics for each in self.checkpoints if each.error is None}
        damaged: DamagedData | None = None
        while (found := best_checkpoint(list(known), metric, mode, known)) is not None:
            best = next(each for each in self.checkpoints if each.ref.identity == found)
            try:
                check_record(self.run, best.record, read=False)
                return best
            except DamagedData as exc:
                damaged = exc
                del known[found]
        raise damaged or unknown_metric_error(metric, known.values())

    def restorable(self, *, check: bool = False) -> Checkpoint | None:
        """The checkpoint that the next start would restore from the store; None if it would begin from nothing. As a
        start does, this skips, with a warning, a checkpoint whose record cannot be read, or of which a pack is missing
        or cut short. `check`: also read and hash the data. Checkpoints that are only in an agent's memory are not seen
        here.

        Errors: DamagedData if there are checkpoints but none is sound; NewerFormat; StorageError."""
        from ckpt.store.reader import use_newest_readable
        from ckpt.store.verify import check_record

        try:
            found = use_newest_readable(self.run, lambda record: check_record(self.run, record, read=check))
        except NoCheckpoint:
            return None
        self.refresh()
        return self.find(str(found.identity))

    def verify(
        self, checkpoints: Sequence[Checkpoint] | None = None, progress: Progress | None = None
    ) -> list[Verified]:
        """Reads and hashes all data of these checkpoints, by default of the branch history. Returns a report for each.

        Errors: StorageError if the store does not answer."""
        from ckpt.store.verify import verify

        chosen = self.checkpoints if checkpoints is None else checkpoints
        return verify(self.run, [ref for each in chosen for ref in each.records], progress)

    def unrecorded(self) -> list[Unrecorded]:
        """Checkpoints whose packs exist without their record: no start can restore them. Reads all records.

        Errors: StorageError."""
        from ckpt.store.verify import find_unrecorded

        every = (*self.checkpoints, *self.branches)
        self.read_records(every)
        referred = {key for each in every if each.error is None for key, _ in each.record.packs}
        return find_unrecorded(self.run, self.view, referred)

    @contextmanager
    def held(self, checkpoints: Collection[Checkpoint] | None = None) -> Iterator[None]:
        """Keeps a lease at the URL for the time of the block: no prune deletes data of these checkpoints (by default
        all). If the lease cannot be taken, since the store is read-only or full, a warning says so and the block runs
        without it."""
        from ckpt.store.lease import LEASE_IDENTITIES_MAX, Lease

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
        """Reads the records of these checkpoints, several at once. A record that cannot be read is the checkpoint's
        `error`."""
        from ckpt.store.run import map_parallel

        map_parallel(lambda each: each.error, checkpoints, RECORDS_MAX)

    @property
    def _branches_hint(self) -> str:
        return "; there are branches, see `ckpt ls --all`" if self.branches else ""
