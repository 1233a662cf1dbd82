"""Deletion of checkpoints: one decider, two passes, times by the store's clock.

Pass 1 retires: a tombstone `retired/<identity>` says that the checkpoint no longer exists. The tombstone stays for
ever, so a record that lands later is retired already. Pass 2 deletes when the tombstone is older than the grace: first
the records, then the packs. A pack is deleted only if

- no unretired record refers to it, nor a record whose tombstone is younger than the grace,
- no reader's lease names a checkpoint whose record refers to it,
- it is itself older than the grace, and
- its identity has been retired for longer than the grace; or it belongs to a failed attempt. That means: the identity
  is committed, its epoch is closed or superseded, and all its packs are older than the grace.

The packs of a commit that never happened (epoch over, no record) are retired and deleted by the same two passes. The
newest checkpoint of the branch history is never retired. Only a checkpoint with its record and packs counts as kept. If
a record that counts cannot be read, no pack is deleted, since the packs that it needs are unknown.

In a folder a put is over when it returns, and readers hold leases. So the grace of a retired checkpoint is short there
(FOLDER_GRACE_S) while no reader holds a lease. If the disk has no room for another checkpoint like the newest, the
grace is zero: a pass then deletes at once what it has retired.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import CkptError, DamagedData, NewerFormat, NotFound, UsageError
from ckpt.policy.save_options import Keep
from ckpt.store import keys
from ckpt.store.lease import LEASE_BYTES_MAX, LEASE_REFRESH_S_MAX, decode_lease
from ckpt.store.lineage import CommitRef
from ckpt.store.reader import open_record
from ckpt.store.retention import retention, unknown_metric_error
from ckpt.store.run import Run, RunView, map_parallel
from ckpt.types import Epoch, Identity, format_count

GRACE_S = 900.0
FOLDER_GRACE_S = 10.0
_READERS = 16


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What one pass will do.

    - `retire`: checkpoints that get a tombstone now.
    - `abandoned`: the same for identities that were never committed.
    - `waiting`: retired checkpoints whose grace is not over.
    - `damaged`: checkpoints of the branch history that do not count as kept: no record can be read, or a pack is
      missing or has another size.
    - `records`, `packs`, `leases`: keys to delete now; `deleted_bytes`: the size of these records and packs.
    - `freed_later_bytes`: the size of packs that nothing will refer to when the grace of all retired checkpoints is
      over.
    - `grace_s`: the grace of retired checkpoints.
    - `blocked`: why no pack can be deleted, or ""."""

    retire: tuple[Identity, ...]
    abandoned: tuple[Identity, ...]
    waiting: tuple[Identity, ...]
    damaged: tuple[Identity, ...]
    records: tuple[str, ...]
    packs: tuple[str, ...]
    leases: tuple[str, ...]
    deleted_bytes: int
    freed_later_bytes: int
    grace_s: float
    blocked: str = ""

    def __bool__(self) -> bool:
        return bool(self.retire or self.abandoned or self.records or self.packs or self.leases)


class Pruner:
    """The one decider of a run's deletions. `epoch`: the running epoch that it decides for. None: the run is closed,
    which the caller has checked with Run.watch_other. Each record is read once and remembered. Several threads may plan
    at once."""

    def __init__(self, run: Run, epoch: Epoch | None, *, grace_s: float = GRACE_S) -> None:
        self.run = run
        self.epoch = epoch
        self.grace_s = grace_s
        self._packs_by_ref: dict[CommitRef, tuple[tuple[str, int], ...]] = {}
        self._metrics_by_ref: dict[CommitRef, dict[str, float]] = {}

    def plan(self, view: RunView, keep: Keep, also: Collection[Identity] = ()) -> PrunePlan:
        """The next pass, without doing it. `also`: further checkpoints to retire; they may be on branches. Errors:
        UsageError if one of `also` is not committed or is the newest of the branch history; StorageError."""
        now_s = self.run.backend.now_s()
        unread = self._read_records(view.commits)
        listed = [(found, info) for info in self.run.backend.list(keys.DATA) if (found := keys.parse_pack(info.key))]
        whole = self._restorable_records(view, {info.key: info.size for _, info in listed})
        retire = self._identities_to_retire(whole, keep) | self._check_also(also, view)
        leased, stale, lease_problem = self._read_leases(now_s)
        grace_s = self._retired_grace_s(whole, bool(leased or lease_problem))

        def is_over(since_s: float) -> bool:
            """Whether the grace that began at `since_s` is over. Without a grace the store's clock does not matter."""
            return grace_s == 0 or now_s - since_s > grace_s

        expired = {each for each, since_s in view.retired_at_s.items() if is_over(since_s)}
        dead = {ref for ref in view.commits if ref.identity in expired and ref.identity not in leased}
        staying = [ref for ref in view.commits if ref not in dead]
        unread_one = next((ref for ref in staying if ref in unread), None)
        blocked = lease_problem or (self._blocked_reason(view, unread_one, unread, retire) if unread_one else "")
        if math.inf in view.retired_at_s.values():
            blocked = blocked or (
                f"{self.run.backend.url} gives no age of its objects, so the end of the grace period is unknown. Use "
                "another URL of the same store that gives ages"
            )

        gone_later = retire | set(view.retired_at_s)
        live = self._referred_packs(staying)
        live_later = self._referred_packs(ref for ref in staying if ref.identity not in gone_later)
        committed = {ref.identity for ref in view.commits}
        youngest_s: dict[Identity, float] = {}
        for found, info in listed:
            youngest_s[found.identity] = max(info.modified_s, youngest_s.get(found.identity, info.modified_s))
        settled = {
            identity
            for identity, since_s in youngest_s.items()
            if now_s - since_s > self.grace_s and self._is_epoch_over(identity.epoch, view)
        }
        abandoned = settled - committed - gone_later
        packs, packs_bytes, later_bytes = [], 0, 0
        for found, info in listed:
            failed = found.identity in settled & committed and now_s - info.modified_s > self.grace_s
            loose = failed or (found.identity in expired and is_over(info.modified_s))
            if loose and info.key not in live and not blocked:
                packs.append(info.key)
                packs_bytes += info.size
            elif info.key not in live_later and found.identity in gone_later | abandoned:
                later_bytes += info.size
        return PrunePlan(
            retire=tuple(sorted(retire)),
            abandoned=tuple(sorted(abandoned)),
            waiting=tuple(sorted((set(view.retired_at_s) - expired) & committed)),
            damaged=tuple(sorted({ref.identity for ref in view.history} - {ref.identity for ref in whole})),
            records=tuple(sorted(keys.record_key(ref.identity, ref.writer) for ref in dead)),
            packs=tuple(packs),
            leases=tuple(sorted(stale)),
            deleted_bytes=sum(ref.size for ref in dead) + packs_bytes,
            freed_later_bytes=later_bytes,
            grace_s=grace_s,
            blocked=blocked,
        )

    def check_metric(self, view: RunView, keep: Keep) -> None:
        """Checks a plan made by hand; call it after `plan`. Errors: UsageError if no checkpoint of the branch history
        has the metric of `keep.best`. The name is misspelt then, and the best checkpoint would be deleted."""
        if keep.best is None:
            return
        known = [self._metrics_by_ref.get(ref, {}) for ref in view.history]
        if not any(keep.best.metric in metrics for metrics in known):
            raise unknown_metric_error(keep.best.metric, known)

    def leased_identities(self) -> set[Identity]:
        """The checkpoints that readers hold by a lease. Errors: StorageError."""
        return self._read_leases(self.run.backend.now_s())[0]

    def execute(self, plan: PrunePlan) -> int:
        """Carries out the plan, also an empty one. May be repeated after any failure. Also aborts orphaned uploads that
        are older than the grace; returns their number. Errors: Superseded; StorageError."""
        if self.epoch is not None:
            self.run.check_not_superseded(self.epoch)
        backend = self.run.backend
        # First delete what former tombstones allow, and what killed writers have left. A store that is full has no room
        # for another tombstone before.
        # Records go before packs: no record is ever seen without its packs.
        for gone in filter(None, (plan.records, plan.packs, plan.leases)):
            backend.delete(gone)
        ended = backend.abort_uploads(self.grace_s, keys.PREFIXES, keys.is_ours)
        # A record that has landed since the plan was made is a checkpoint, whether or not its writer is alive.
        landed = {found[0] for info in backend.list(keys.COMMITS) if (found := keys.parse_record(info.key))}
        abandoned = [identity for identity in plan.abandoned if identity not in landed]
        body = json.dumps({"by": str(self.epoch) if self.epoch else "prune of a closed run"}).encode()
        map_parallel(lambda identity: backend.put(keys.retired_key(identity), [body]), [*plan.retire, *abandoned], 8)
        self.run.events.emit(
            "prune.done",
            f"{backend.url}: retired {format_count(len(plan.retire), 'checkpoint')} and "
            f"{format_count(len(abandoned), 'abandoned commit')}, deleted {format_count(len(plan.records), 'record')} "
            "and "
            f"{format_count(len(plan.packs), 'pack')} ({plan.deleted_bytes} bytes)"
            + (f"; no pack could be deleted: {plan.blocked}" if plan.blocked else ""),
            loud=bool(plan.blocked),
            uploads_aborted=ended,
        )
        if plan.retire and plan.grace_s == 0:
            self.execute(self.plan(self.run.view(), Keep()))
        return ended

    def _retired_grace_s(self, whole: Sequence[CommitRef], is_read: bool) -> float:
        folder = self.run.backend.url
        if "://" in folder:
            return self.grace_s
        if whole and shutil.disk_usage(folder).free < sum(size for _, size in self._packs_by_ref[whole[-1]]):
            return min(self.grace_s, 0.0)
        return self.grace_s if is_read else min(self.grace_s, FOLDER_GRACE_S)

    def _restorable_records(self, view: RunView, sizes: Mapping[str, int]) -> list[CommitRef]:
        """For each checkpoint of the branch history that can be restored, a record that can be used. Retention counts
        only these: if the newest records or packs are gone, older checkpoints stay."""

        def is_whole(ref: CommitRef) -> bool:
            return ref in self._packs_by_ref and all(sizes.get(key) == size for key, size in self._packs_by_ref[ref])

        found = (next(filter(is_whole, view.records_by_identity[ref.identity]), None) for ref in view.history)
        return [ref for ref in found if ref is not None]

    def _identities_to_retire(self, whole: Sequence[CommitRef], keep: Keep) -> set[Identity]:
        line = [ref.identity for ref in whole]
        return set(line) - retention(line, keep, {ref.identity: self._metrics_by_ref[ref] for ref in whole})

    def _blocked_reason(
        self, view: RunView, ref: CommitRef, unread: Mapping[CommitRef, CkptError], retire: Collection[Identity]
    ) -> str:
        """Why an unread record blocks all deletion (its packs are unknown): what is wrong with it, and what to do."""
        wrong, identity = unread[ref], ref.identity
        if identity in view.retired_at_s or identity in retire:
            return f"{wrong}. A prune after its grace period can delete; nothing else is needed"
        if isinstance(wrong, NewerFormat):
            return f"{wrong}. Prune with that newer ckpt"
        if view.history and identity == view.history[-1].identity:
            return f"{wrong}. It is the newest one: `ckpt branch` to an older step, then `ckpt prune --also {identity}`"
        return f"{wrong}. To retire this checkpoint too, run `ckpt prune --also {identity}`"

    def _check_also(self, also: Collection[Identity], view: RunView) -> set[Identity]:
        committed = {ref.identity for ref in view.commits}
        for identity in also:
            if view.history and identity == view.history[-1].identity:
                raise UsageError(
                    f"{identity} is the newest checkpoint of the run, which a prune keeps; name another one"
                )
            if identity not in committed:
                raise UsageError(f"{self.run.backend.url} holds no checkpoint {identity}; `ckpt ls --all` lists all")
        return set(also) - set(view.retired_at_s)

    def _is_epoch_over(self, epoch: Epoch, view: RunView) -> bool:
        """Whether nothing more is expected of that epoch. (What lands all the same meets a tombstone.)"""
        return epoch in view.closed_epochs or (view.newest_epoch is not None and view.newest_epoch > epoch)

    def _referred_packs(self, refs: Iterable[CommitRef]) -> set[str]:
        return {key for ref in refs for key, _ in self._packs_by_ref.get(ref, ())}

    def _read_records(self, refs: Sequence[CommitRef]) -> dict[CommitRef, CkptError]:
        """Reads the records, and remembers their packs and metrics. Returns the error of each record that could not be
        read."""

        def read(ref: CommitRef) -> CkptError | None:
            try:
                found = open_record(self.run.backend, ref, self.run.patience)
            except (DamagedData, NotFound) as exc:
                return exc
            self._metrics_by_ref[ref] = found.metrics
            # Set last: from now on a plan on another thread takes this record as read.
            self._packs_by_ref[ref] = found.packs
            return None

        new = [ref for ref in refs if ref not in self._packs_by_ref]
        return {ref: wrong for ref, wrong in zip(new, map_parallel(read, new, _READERS), strict=True) if wrong}

    def _read_leases(self, now_s: float) -> tuple[set[Identity], set[str], str]:
        """The checkpoints that readers hold; the keys of leases that were not refreshed for two periods; what is wrong
        with a lease, or ""."""
        held: set[Identity] = set()
        stale: set[str] = set()
        problem = ""
        for info in self.run.backend.list(keys.LEASES):
            if not keys.is_ours(info.key):
                continue
            try:
                period_s, identities = decode_lease(self.run.backend.get(info.key, LEASE_BYTES_MAX), info.key)
            except NotFound:
                continue
            except DamagedData as exc:
                period_s, identities, wrong = LEASE_REFRESH_S_MAX, [], str(exc)
            else:
                wrong = ""
            if now_s - info.modified_s > 2 * period_s:
                stale.add(info.key)
            else:
                held.update(identities)
                problem = problem or wrong
        return held, stale, problem
