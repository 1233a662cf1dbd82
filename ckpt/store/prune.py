"""Deleting checkpoints: one decider, two passes, the store's clock.

Pass 1 retires: a tombstone `retired/<identity>` says that the checkpoint exists no more. It stays for ever, so that a
record that lands later is born retired. Pass 2, when the tombstone is older than the grace, deletes: first the
records, then the packs. A pack goes only when

- no unretired record refers to it, nor one whose tombstone is younger than the grace,
- no lease of a reader names a checkpoint whose record refers to it,
- it is itself older than the grace, and
- its identity has been retired for longer than the grace, or is committed and settled: of a closed or superseded
  epoch, all its packs older than the grace (then the pack is that of an attempt that failed).

What was left behind by commits that never happened (settled, without a record) is retired and deleted by the same
two passes. The newest checkpoint of the line is never retired, and only what has its record and packs counts as kept.
If a record that counts cannot be read, no pack is deleted: nobody knows what it refers to.

In a folder a put is over when it returns, and readers hold leases. So there a checkpoint that was committed and retired
has a short grace (FOLDER_GRACE_S) while nobody holds a lease. It has none where the disk has no room for another one
like the newest: then a pass deletes what it has just retired.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from ckpt.errors import CkptError, DamagedData, NewerFormat, NotFound, StorageError, UsageError
from ckpt.events import Events
from ckpt.policy.save_options import Keep
from ckpt.storage.contract import Backend
from ckpt.store import keys
from ckpt.store.lineage import CommitRef, decode_json
from ckpt.store.reader import open_record
from ckpt.store.run import Run, RunView, in_parallel
from ckpt.threads import Tasks
from ckpt.types import Epoch, Identity, counted

GRACE_S = 900.0
FOLDER_GRACE_S = 10.0
LEASE_REFRESH_S = 30.0
LEASE_REFRESH_S_MAX = 600.0
LEASE_CLOSE_S = 180.0  # longer than a refresh is tried again
LEASE_IDENTITIES_MAX = 1000
_LEASE_BYTES_MAX = 64 << 10
_READERS = 16


def retention(line: Sequence[Identity], keep: Keep, metrics: Mapping[Identity, Mapping[str, float]]) -> set[Identity]:
    """Which checkpoints of a line (oldest first) stay. `metrics`: needed for keep.best only.

    The newest stays always; all stay where `keep` has no rule, or only one by a metric that none has. Of several at one
    step (a save, and then the exit) the rules by number count the newest."""
    best = None if keep.best is None else best_of(line, keep.best.metric, keep.best.mode, metrics)
    if keep.last is None and keep.every is None and best is None:
        return set(line)
    newest = {identity.tick.step: identity for identity in line}
    kept = set(list(newest.values())[-(keep.last or 1) :])
    if keep.every is not None:
        kept.update(identity for step, identity in newest.items() if step % keep.every == 0)
    if best is not None:
        kept.add(best)
    return kept


def best_of(
    line: Iterable[Identity], metric: str, mode: Literal["min", "max"], metrics: Mapping[Identity, Mapping[str, float]]
) -> Identity | None:
    """Of equal ones the newest; one that is not a number is none."""
    sign = 1.0 if mode == "min" else -1.0
    found, lowest = None, float("inf")
    for identity in line:
        value = sign * metrics.get(identity, {}).get(metric, float("nan"))
        if value <= lowest:
            found, lowest = identity, value
    return found


def unknown_metric(metric: str, known: Iterable[Mapping[str, float]]) -> UsageError:
    """That no checkpoint has this metric. `known`: the metrics of each checkpoint."""
    names = sorted({name for metrics in known for name in metrics})
    there = ", ".join(names[:20]) or "none: ck.save(metrics=) gives them"
    return UsageError(f"no checkpoint has a metric {metric!r}; there are {there}")


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What a pass would do. `retire`: checkpoints that get a tombstone now. `abandoned`: the same for identities that
    were never committed. `waiting`: retired ones whose grace is not over. `damaged`: those of the line that do not
    count as kept: no record can be read, or a pack is not there in its size. `records`, `packs`, `leases`: keys that
    are deleted now. `deleted_bytes`: of those. `freed_later_bytes`: of packs that nothing will refer to once the grace
    of all that is retired is over. `grace_s`: of checkpoints that are retired. `blocked`: why no pack can be deleted,
    or ""."""

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
    """The one decider of a run's deletions.

    `epoch`: the running epoch that it decides for; None for a closed run (the caller has made sure of that, by
    Run.watch_other). Records are read once and remembered. Several threads may plan at once."""

    def __init__(self, run: Run, epoch: Epoch | None, *, grace_s: float = GRACE_S) -> None:
        self.run = run
        self.epoch = epoch
        self.grace_s = grace_s
        self._packs_of: dict[CommitRef, tuple[tuple[str, int], ...]] = {}
        self._metrics_of: dict[CommitRef, dict[str, float]] = {}

    def plan(self, view: RunView, keep: Keep, also: Collection[Identity] = ()) -> PrunePlan:
        """`also`: checkpoints to retire besides, branches among them.

        Errors: UsageError for an `also` that is not committed or is the newest of the line; StorageError."""
        now_s = self.run.backend.now_s()
        unread = self._read(view.commits)
        listed = [(found, info) for info in self.run.backend.list(keys.DATA) if (found := keys.parse_pack(info.key))]
        whole = self._whole(view, {info.key: info.size for _, info in listed})
        retire = self._to_retire(whole, keep) | self._checked(also, view)
        leased, stale, lease_problem = self._leases(now_s)
        grace_s = self._grace_of_retired_s(whole, bool(leased or lease_problem))

        def is_over(since_s: float) -> bool:
            """Whether the grace that began then is over. Without a grace the file system's clock does not matter."""
            return grace_s == 0 or now_s - since_s > grace_s

        expired = {each for each, since_s in view.retired.items() if is_over(since_s)}
        dead = {ref for ref in view.commits if ref.identity in expired and ref.identity not in leased}
        staying = [ref for ref in view.commits if ref not in dead]
        unread_one = next((ref for ref in staying if ref in unread), None)
        blocked = lease_problem or (self._why_blocked(view, unread_one, unread, retire) if unread_one else "")
        if math.inf in view.retired.values():
            blocked = blocked or (
                f"{self.run.backend.url} tells no times, so nothing is ever known to be older than the grace; give "
                "another URL of it that tells them"
            )

        gone_later = retire | set(view.retired)
        live = self._referred(staying)
        live_later = self._referred(ref for ref in staying if ref.identity not in gone_later)
        committed = {ref.identity for ref in view.commits}
        youngest_s: dict[Identity, float] = {}
        for found, info in listed:
            youngest_s[found.identity] = max(info.modified_s, youngest_s.get(found.identity, info.modified_s))
        settled = {
            identity
            for identity, since_s in youngest_s.items()
            if now_s - since_s > self.grace_s and self._over(identity.epoch, view)
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
            waiting=tuple(sorted((set(view.retired) - expired) & committed)),
            damaged=tuple(sorted({ref.identity for ref in view.line} - {ref.identity for ref in whole})),
            records=tuple(sorted(keys.record_key(ref.identity, ref.writer) for ref in dead)),
            packs=tuple(packs),
            leases=tuple(sorted(stale)),
            deleted_bytes=sum(ref.size for ref in dead) + packs_bytes,
            freed_later_bytes=later_bytes,
            grace_s=grace_s,
            blocked=blocked,
        )

    def check_metric(self, view: RunView, keep: Keep) -> None:
        """For whoever has just planned by hand. Errors: UsageError where `keep.best` goes by a metric that no
        checkpoint of the line has: it is misspelt, and what is best would go."""
        if keep.best is None:
            return
        known = [self._metrics_of.get(ref, {}) for ref in view.line]
        if not any(keep.best.metric in metrics for metrics in known):
            raise unknown_metric(keep.best.metric, known)

    def leased(self) -> set[Identity]:
        """The checkpoints that readers hold. Errors: StorageError."""
        return self._leases(self.run.backend.now_s())[0]

    def execute(self, plan: PrunePlan) -> int:
        """Carries the plan out, empty or not, and aborts uploads that nobody will end, older than the grace: how many.
        May be done again after any failure. Errors: Superseded; StorageError."""
        if self.epoch is not None:
            self.run.check(self.epoch)
        backend = self.run.backend
        # What former tombstones allow, and what killed writers have left, comes first: in a store that is full there is
        # no room for another tombstone before.
        if plan.records:
            backend.delete(plan.records)  # before any pack: no record is ever seen without its packs
        if plan.packs:
            backend.delete(plan.packs)
        if plan.leases:
            backend.delete(plan.leases)
        ended = backend.abort_uploads(self.grace_s, keys.PREFIXES, keys.is_ours)
        # A record that has landed since the plan was made is a checkpoint, whatever became of its writer.
        landed = {found[0] for info in backend.list(keys.COMMITS) if (found := keys.parse_record(info.key))}
        abandoned = [identity for identity in plan.abandoned if identity not in landed]
        body = json.dumps({"by": str(self.epoch) if self.epoch else "prune of a closed run"}).encode()
        in_parallel(lambda identity: backend.put(keys.retired_key(identity), [body]), [*plan.retire, *abandoned], 8)
        self.run.events.emit(
            "prune.done",
            f"{backend.url}: retired {counted(len(plan.retire), 'checkpoint')} and "
            f"{counted(len(abandoned), 'abandoned commit')}, deleted {counted(len(plan.records), 'record')} and "
            f"{counted(len(plan.packs), 'pack')} ({plan.deleted_bytes} bytes)"
            + (f"; no pack could be deleted: {plan.blocked}" if plan.blocked else ""),
            loud=bool(plan.blocked),
            uploads_aborted=ended,
        )
        if plan.retire and plan.grace_s == 0:
            self.execute(self.plan(self.run.view(), Keep()))
        return ended

    def _grace_of_retired_s(self, whole: Sequence[CommitRef], is_read: bool) -> float:
        folder = self.run.backend.url
        if "://" in folder:
            return self.grace_s
        if whole and shutil.disk_usage(folder).free < sum(size for _, size in self._packs_of[whole[-1]]):
            return min(self.grace_s, 0.0)
        return self.grace_s if is_read else min(self.grace_s, FOLDER_GRACE_S)

    def _whole(self, view: RunView, sizes: Mapping[str, int]) -> list[CommitRef]:
        """Of each checkpoint of the line that can be restored the record that can. Only these count: a line whose
        newest records or packs are gone keeps its older ones."""

        def is_whole(ref: CommitRef) -> bool:
            return ref in self._packs_of and all(sizes.get(key) == size for key, size in self._packs_of[ref])

        found = (next(filter(is_whole, view.records[ref.identity]), None) for ref in view.line)
        return [ref for ref in found if ref is not None]

    def _to_retire(self, whole: Sequence[CommitRef], keep: Keep) -> set[Identity]:
        line = [ref.identity for ref in whole]
        return set(line) - retention(line, keep, {ref.identity: self._metrics_of[ref] for ref in whole})

    def _why_blocked(
        self, view: RunView, ref: CommitRef, unread: Mapping[CommitRef, CkptError], retire: Collection[Identity]
    ) -> str:
        """Nobody knows which packs that record refers to: what is wrong with it, and the way out."""
        wrong, identity = unread[ref], ref.identity
        if identity in view.retired or identity in retire:
            return f"{wrong}. It goes itself: a prune after its grace can delete"
        if isinstance(wrong, NewerFormat):
            return f"{wrong}. Prune with that ckpt"
        if view.line and identity == view.line[-1].identity:
            return f"{wrong}. It is the newest: ckpt branch to an older step, then ckpt prune --also {identity}"
        return f"{wrong}. To let it go, too: ckpt prune --also {identity}"

    def _checked(self, also: Collection[Identity], view: RunView) -> set[Identity]:
        committed = {ref.identity for ref in view.commits}
        for identity in also:
            if view.line and identity == view.line[-1].identity:
                raise UsageError(f"{identity} is the newest checkpoint of the run and stays")
            if identity not in committed:
                raise UsageError(f"{identity} is not committed to {self.run.backend.url}; see ckpt ls --all")
        return set(also) - set(view.retired)

    def _over(self, epoch: Epoch, view: RunView) -> bool:
        """Whether nothing of that epoch is expected any more. (What comes nevertheless meets a tombstone.)"""
        return epoch in view.closed or (view.newest_epoch is not None and view.newest_epoch > epoch)

    def _referred(self, refs: Iterable[CommitRef]) -> set[str]:
        return {key for ref in refs for key, _ in self._packs_of.get(ref, ())}

    def _read(self, refs: Sequence[CommitRef]) -> dict[CommitRef, CkptError]:
        """Remembers the packs and metrics of these records; what is wrong with those that could not be read."""

        def read(ref: CommitRef) -> CkptError | None:
            try:
                found = open_record(self.run.backend, ref, self.run.patience)
            except (DamagedData, NotFound) as exc:
                return exc
            self._metrics_of[ref] = found.metrics
            self._packs_of[ref] = found.packs  # the last: for a plan on another thread it is read from now on
            return None

        new = [ref for ref in refs if ref not in self._packs_of]
        return {ref: wrong for ref, wrong in zip(new, in_parallel(read, new, _READERS), strict=True) if wrong}

    def _leases(self, now_s: float) -> tuple[set[Identity], set[str], str]:
        """What readers hold; the keys of leases that were not refreshed for two periods; what is wrong with one."""
        held: set[Identity] = set()
        stale: set[str] = set()
        problem = ""
        for info in self.run.backend.list(keys.LEASES):
            if not keys.is_ours(info.key):
                continue
            try:
                period_s, identities = _decode_lease(self.run.backend.get(info.key, _LEASE_BYTES_MAX), info.key)
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


class Lease:
    """While the block runs nothing that the checkpoints' records refer to is deleted: up to LEASE_IDENTITIES_MAX.

    Take it before the record is opened: what was there then stays. It is refreshed by a thread of its own; where that
    fails for two periods the reader may lose packs, which are damage to it then."""

    def __init__(
        self,
        backend: Backend,
        identities: Collection[Identity],
        *,
        refresh_s: float = LEASE_REFRESH_S,
        events: Events | None = None,
    ) -> None:
        if not 0 < refresh_s <= LEASE_REFRESH_S_MAX:
            raise UsageError(f"a lease is refreshed every 0 to {LEASE_REFRESH_S_MAX:g} s, not {refresh_s:g}")
        self.key = keys.lease_key(keys.new_writer())
        self._backend = backend
        self._identities = sorted(identities)
        self._refresh_s = refresh_s
        self._events = events or Events()
        self._tasks = Tasks("lease")
        self._count = 0

    def __enter__(self) -> Self:
        self.refresh()
        self._tasks.start("refresh", self._keep_fresh)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._tasks.close(LEASE_CLOSE_S)
        try:
            self._backend.delete([self.key])
        except StorageError as exc:
            self._events.emit("lease.left", f"{self.key} could not be removed and will go stale: {exc}")

    def refresh(self) -> None:
        self._count += 1
        body = {"identities": [str(each) for each in self._identities], "refresh_s": self._refresh_s, "n": self._count}
        self._backend.put(self.key, [json.dumps(body).encode()])

    def _keep_fresh(self) -> None:
        while not self._tasks.stopping.wait(self._refresh_s):
            try:
                self.refresh()
            except StorageError as exc:
                self._events.emit("lease.late", f"{self.key} could not be refreshed: {exc}", loud=True)


def _decode_lease(data: bytes, key: str) -> tuple[float, list[Identity]]:
    body = decode_json(data, key)
    try:
        period_s = float(body["refresh_s"])
        identities = [Identity.parse(text) for text in body["identities"]]
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise DamagedData(f"{key} is not a lease: {exc!s:.200}") from exc
    if math.isnan(period_s):  # nothing is older than that
        raise DamagedData(f"{key} is not a lease: it is refreshed every {period_s} s")
    return min(max(period_s, 0.0), LEASE_REFRESH_S_MAX), identities
