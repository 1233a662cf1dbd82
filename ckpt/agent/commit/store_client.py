"""The agent's store client: claims, commits, retention and the end of an epoch. It runs on worker threads.

The store is opened at its first use. Its libraries cost memory and time that a job should not pay before it needs the
store.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.claims import Claims
from ckpt.agent.commit.job_options import JobOptions
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.errors import CkptError, DamagedData, NewerFormat, NotFound, StorageError, UsageError
from ckpt.events import Events
from ckpt.policy.export_rule import ExportRule, exported_step
from ckpt.policy.save_options import Keep
from ckpt.settings import Settings
from ckpt.storage.names import redact_url
from ckpt.storage.usage import StoreUsage
from ckpt.types import CodecOption, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.format.manifest import Record
    from ckpt.layout.layout import Array
    from ckpt.storage.contract import Backend
    from ckpt.store.commit import Committed, Committer, OtherWriters
    from ckpt.store.lineage import Claim, CommitRef
    from ckpt.store.packs import Written
    from ckpt.store.prune import Pruner
    from ckpt.store.reader import FrameReader
    from ckpt.store.run import Run

# How long a failing store is retried when this node's memory could serve instead.
SHORT_RETRY_S = 5.0


class PrunePass(Enum):
    """What a prune does.

    - `REPORT`: report only.
    - `DUE`: delete what is due, with as few requests as possible; runs after each commit.
    - `ALL`: also abort unfinished uploads that nobody continues, which no plan can name."""

    REPORT = auto()
    DUE = auto()
    ALL = auto()


class LostStore(StorageError):
    """The store has lost its contents."""

    kind = "lost-store"


class StoreClient:
    """The store, as one agent uses it. Thread-safe except for `commit`, which one lane runs one call at a time."""

    def __init__(self, url: str, settings: Settings, events: Events, owner: str) -> None:
        """`owner`: this node's name in the keys of its packs."""
        self.url = url
        self.events = events
        self.usage = StoreUsage()
        self.claims = Claims(url, self.open_run, settings.heartbeat_s, events)
        self._settings = settings
        self._owner = owner
        self._lock = threading.Lock()
        self._runs: dict[bool, Run] = {}
        self._replaced_runs: list[Run] = []
        self._committers: dict[tuple[str, float | None], Committer] = {}
        self._base_record: Record | None = None
        # The newest checkpoint whose commit failed since. Its record may be in the store.
        self._uncertain_commit: Identity | None = None
        self._pruners: dict[Epoch | None, Pruner] = {}  # each caches the records that it has read

    def open_run(self, impatient: bool = False) -> Run:
        """The opened run. `impatient`: failed requests are retried for SHORT_RETRY_S at most. Errors: UsageError,
        StorageError."""
        from ckpt.storage import open as open_store
        from ckpt.store.run import Run

        with self._lock:
            if impatient not in self._runs:
                retry_s = min(SHORT_RETRY_S, self._settings.retry_s) if impatient else self._settings.retry_s
                settings = replace(self._settings, retry_s=retry_s)
                backend = open_store(self.url, settings=settings, events=self.events, usage=self.usage)
                self._runs[impatient] = Run(backend, events=self.events)
            return self._runs[impatient]

    @property
    def folder(self) -> str | None:
        """The URL of the store if it is a local folder, else None."""
        from ckpt.storage.url import scheme_of

        return self.url if scheme_of(self.url) == "file" else None

    @property
    def backend(self) -> Backend:
        return self.open_run().backend

    def claim(self, claim: Claim) -> None:
        """Puts the claim once; a second call does nothing. Errors: as Claims.claim."""
        self.claims.claim(claim)

    def is_claimed(self, epoch: Epoch) -> bool:
        return self.claims.is_claimed(epoch)

    def heartbeat(self, epoch: Epoch, count: int) -> None:
        """Puts the heartbeat numbered `count`. At the 1st, 2nd, 4th, 8th ... it also looks for checkpoints that the
        store listed late.

        Errors: StorageError; Superseded, see Claims."""
        if self.is_claimed(epoch):
            run = self.open_run(impatient=True)
            run.put_heartbeat(epoch, count, self._settings.heartbeat_s)
            if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ..
                self.claims.check_overlooked(run, epoch)

    def close_epoch(self, epoch: Epoch, reason: str) -> None:
        """Closes the epoch in the store. Errors: StorageError."""
        if self.is_claimed(epoch):
            self.open_run(impatient=True).close_epoch(epoch, reason)

    def open_reader(self, refs: Collection[CommitRef], known: Record | None = None) -> FrameReader:
        """A reader of the first record that can be read. `known`: that record, if it was read before. Errors: the last
        record's error; NewerFormat if any record needs a newer format."""
        from ckpt.store.reader import FrameReader, open_record

        run = self.open_run()
        if known is not None:
            return FrameReader(run.backend, known, run.patience)
        failed: CkptError | None = None
        for ref in refs:
            try:
                return FrameReader(run.backend, open_record(run.backend, ref, run.patience), run.patience)
            except CkptError as exc:
                failed = failed if isinstance(failed, NewerFormat) else exc
        raise failed or StorageError("no record of it is in the store")

    def record_restore(self, parent: Identity | None, record: Record | None) -> None:
        """Training goes on from `parent`. `record`: its record, if its frames were just read from the store and
        verified. Then the next commit may refer to its unchanged frames. It may also refer to what this agent has
        committed itself."""
        if record is not None or self._base_record is None or self._base_record.identity != parent:
            self._base_record, self._uncertain_commit = record, None

    def commit(
        self,
        claim: Claim,
        checkpoint: MemoryCheckpoint,
        options: JobOptions,
        about: dict[str, Any],
        elsewhere: OtherWriters | None = None,
        cancel: threading.Event | None = None,
    ) -> Committed:
        """Commits one checkpoint. `about`, `elsewhere`, `cancel`: see `put_checkpoint`.

        Errors: SaveFailed; Superseded if another agent's newer epoch owns the run, or as `claim`; StorageError."""
        epoch = claim.epoch

        def check() -> None:
            self.check_owner(epoch)
            self.claims.check_first(epoch)

        self.claims.check_refused(epoch)
        with contextlib.suppress(LostStore):
            self.check_owner(epoch)
        self.claim(claim)
        if self._uncertain_commit is not None:
            self._settle_base(self._uncertain_commit)
        self._uncertain_commit = checkpoint.identity
        how = options.codec, options.limits.bandwidth
        done = self.put_checkpoint(claim, checkpoint, *how, about, check, cancel, elsewhere, self._base_record)
        self._base_record, self._uncertain_commit = done.record, None
        self.claims.record_commit(epoch)
        return done

    def _settle_base(self, failed: Identity) -> None:
        """Settles which record the next commit may refer to. The record of a failed commit may have landed and is then
        the newest. An older record may be retired. Errors: StorageError."""
        from ckpt.store import keys
        from ckpt.store.lineage import CommitRef
        from ckpt.store.reader import open_record

        is_retired = self.open_run().is_retired
        for info in self.backend.list(keys.COMMITS):
            found = keys.parse_record(info.key)
            if found is not None and found[0] == failed and not is_retired(failed):
                with contextlib.suppress(NotFound, DamagedData):
                    self._base_record = open_record(self.backend, CommitRef(*found, info.size))
                    return
        if self._base_record is not None and is_retired(self._base_record.identity):
            self._base_record = None

    def put_checkpoint(
        self,
        claim: Claim,
        checkpoint: MemoryCheckpoint,
        codec: CodecOption,
        bandwidth: float | None,
        about: dict[str, Any],
        check: Callable[[], None],
        cancel: threading.Event | None,
        elsewhere: OtherWriters | None = None,
        base: Record | None = None,
    ) -> Committed:
        """Commits a checkpoint of the epoch with that claim. Only `check` looks at the epoch. `about`: further facts
        for the record. `check`, `cancel`, `elsewhere`, `base` and errors: see store.commit.Committer.commit."""
        facts = {
            "host": socket.gethostname(),
            "launch": claim.launch,
            "world": len(checkpoint.manifest.coordinates),
            "time_s": time.time(),
            "disagreed": list(checkpoint.differing_tensors[:100]),
        }
        return self._committer(codec, bandwidth).commit(
            checkpoint.identity,
            checkpoint.manifest,
            checkpoint.frame,
            check=check,
            base=base,
            owner=self._owner,
            metrics=checkpoint.metrics,
            about=facts | about,
            cancel=cancel,
            elsewhere=elsewhere,
        )

    def write_packs(
        self,
        identity: Identity,
        frames: Array,
        frame: Callable[[int], memoryview],
        codec: CodecOption,
        bandwidth: float | None,
        cancel: threading.Event | None = None,
    ) -> Written:
        """Writes this node's part of another agent's commit: the packs without the record. Each call has a writer name
        of its own. `cancel`: set it to give up. Errors: SaveFailed; StorageError."""
        from ckpt.store.keys import new_writer

        committer = self._committer(codec, bandwidth)
        numbers, cancel = range(len(frames)), cancel or threading.Event()
        return committer.write(identity, frames, numbers, frame, self._owner, new_writer(), cancel)

    def _committer(self, codec: CodecOption, bandwidth: float | None) -> Committer:
        """The committer of a codec and bandwidth. In a local folder "auto" means raw: decoding takes longer than the
        disk time that compression saves."""
        from ckpt.store.commit import Committer
        from ckpt.store.keys import new_writer

        if codec == "auto" and self.folder is not None:
            codec = "raw"
        if (codec, bandwidth) not in self._committers:
            made = Committer(self.backend, new_writer(), codec, bandwidth, events=self.events)
            self._committers[codec, bandwidth] = made
        return self._committers[codec, bandwidth]

    def check_owner(self, epoch: Epoch) -> None:
        """Checks that the epoch still owns the run.

        Errors: Superseded by a newer epoch of another agent; this agent's newer epochs continue this one. LostStore if
        this epoch's claim is gone: probably all else is too, so commits must not refer to earlier packs."""
        run = self.open_run()
        # Read before the listing, since the claim may land meanwhile.
        claimed = self.is_claimed(epoch)
        epochs = run.epochs()
        if claimed and epoch not in epochs:
            self.claims.forget_claim(epoch)
            self._base_record = self._uncertain_commit = None
            text = f"{redact_url(self.url)} has lost its content; the next save writes everything anew"
            self.events.emit("store.lost", f"ckpt: {text}", loud=True)
            raise LostStore(text)
        self.claims.check_newer(run, epoch, epochs)

    def prune(
        self, epoch: Epoch | None, keep: Keep, also: Collection[Identity] = (), what: PrunePass = PrunePass.DUE
    ) -> dict[str, Any]:
        """Runs one prune pass and returns what it did or would do. `epoch`: of the job here that decides for the run.
        None: no job here decides, so another agent's open epoch is first watched for signs of life.

        Errors: RunInUse if that epoch is alive; Superseded; StorageError; UsageError."""
        from ckpt.store.branch import LAUNCH
        from ckpt.store.prune import Pruner

        run = self.open_run()
        view = run.view()
        if epoch is None and what is not PrunePass.REPORT and view.newest_epoch not in self.claims.own_epochs:
            run.check_not_in_use(view, LAUNCH, self._settings.heartbeat_s)
            view = run.view()
        with self._lock:
            pruner = self._pruners.setdefault(epoch, Pruner(run, epoch))
        plan = pruner.plan(view, keep, also)
        if what is not PrunePass.DUE:
            pruner.check_metric(view, keep)
        aborted = pruner.execute(plan) if what is PrunePass.ALL or (what is PrunePass.DUE and plan) else 0
        facts = {field.name: getattr(plan, field.name) for field in fields(plan)} | {"uploads_aborted": aborted}
        for name in ("retire", "abandoned", "waiting", "damaged"):
            facts[name] = [str(identity) for identity in facts[name]]
        return facts

    def export(self, rule: ExportRule, identity: Identity, is_wanted: bool) -> bool:
        """Exports the committed checkpoint if the rule says so, or in any case if `is_wanted`, unless it is there
        already. Returns whether it did. No prune takes the checkpoint meanwhile. What an export that was killed has
        left is removed. An empty folder step-N marks an uploaded export.

        Errors: as export.export and hub.upload; UsageError if another checkpoint's export has the name; NotFound if the
        checkpoint is not in the store."""
        from ckpt.store import hub
        from ckpt.store.export import export, is_export_of, remove_unfinished
        from ckpt.store.lease import Lease
        from ckpt.store.reader import FrameReader, use_readable_record

        if rule.repository:
            rule = replace(rule, to=str(hub.folder_of(rule.repository, self.url)))
            Path(rule.to).mkdir(parents=True, exist_ok=True)
        folder, step = Path(rule.to), identity.version.step
        target = folder / "uploading" if rule.repository else rule.path(step)
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        exported = {number for name in names if (number := exported_step(name)) is not None}
        if not (is_wanted or rule.is_due(step, exported - {step})):
            return False
        if step in exported:
            if not rule.repository and not is_export_of(identity, target):
                raise UsageError(f"{target} is an export of another checkpoint: move it away, or give another folder")
            return False
        remove_unfinished(folder, "step-*")
        if rule.repository:
            shutil.rmtree(target, ignore_errors=True)
        run = self.open_run()
        how: dict[str, Any] = {name: getattr(rule, name) for name in ("only", "strip", "names", "dtype", "format")}
        beside = [rule.beside] if rule.beside else []
        with Lease(run.backend, [identity], events=self.events):
            refs = run.view().records_by_identity.get(identity, [])
            if not refs:
                raise NotFound(f"{redact_url(self.url)} has no checkpoint {identity}")
            use_readable_record(
                run,
                refs,
                lambda record: export(FrameReader(run.backend, record, run.patience), target, beside=beside, **how),
            )
        if rule.repository:
            hub.upload(target, rule.repository, f"step {step}")
            rule.path(step).mkdir()
            shutil.rmtree(target, ignore_errors=True)
        return True

    def reopen(self) -> None:
        """Has the next use open the store anew, for example with new credentials. Operations under way end as they
        began."""
        with self._lock:
            self._replaced_runs += self._runs.values()
            self._runs.clear()
            self._committers.clear()
            self._pruners.clear()

    def close(self) -> None:
        for run in [*self._replaced_runs, *self._runs.values()]:
            run.backend.close()
        self._runs.clear()
