"""What is kept, what goes, and that nothing goes that somebody may still need."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.backends.local import open_local
from ckpt.errors import StorageError, Superseded, TransientError, UsageError
from ckpt.events import Event, Events
from ckpt.policy.save_options import Best, Keep
from ckpt.store import keys
from ckpt.store.commit import Committed, Committer
from ckpt.store.lease import Lease
from ckpt.store.lineage import Claim
from ckpt.store.prune import FOLDER_GRACE_S, PrunePlan, Pruner
from ckpt.store.reader import open_record, use_newest_readable
from ckpt.store.retention import retention
from ckpt.store.run import Run
from ckpt.types import Identity, Version
from tests.store.build import Snapshot, Tensor, epoch, floats, identity, read_all, same, snapshot
from tests.store.sim import Fault, Sim

GRACE_S = 100.0
FROZEN = floats(40, 24, seed=99)


def line(*steps: int) -> list[Identity]:
    return [identity(1, step) for step in steps]


def kept(steps: Sequence[int], keep: Keep, metrics: dict[int, dict[str, float]] | None = None) -> list[int]:
    found = retention(line(*steps), keep, {identity(1, step): m for step, m in (metrics or {}).items()})
    return sorted(each.version.step for each in found)


def test_retention_keeps_the_last_the_multiples_and_the_best() -> None:
    steps = [10, 20, 25, 30, 40, 45]
    losses = {10: {"loss": 3.0}, 20: {"loss": 1.0}, 25: {"loss": 2.0}, 30: {"loss": float("nan")}, 40: {}}
    assert kept(steps, Keep()) == steps
    assert kept(steps, Keep(last=2)) == [40, 45]
    assert kept(steps, Keep(every=20)) == [20, 40, 45]
    assert kept(steps, Keep(best=Best("loss")), losses) == [20, 45]
    assert kept(steps, Keep(best=Best("loss", "max")), losses) == [10, 45]
    assert kept(steps, Keep(last=1, every=25, best=Best("loss")), losses) == [20, 25, 45]
    assert kept([10, 20], Keep(best=Best("loss")), {10: {"loss": 1.0}, 20: {"loss": 1.0}}) == [20]
    assert kept([], Keep(last=3)) == []
    assert kept([10, 20, 30], Keep(best=Best("los")), {20: {"loss": 1.0}}) == [10, 20, 30]
    assert kept([10, 20, 30], Keep(last=2, best=Best("los")), {10: {"loss": 1.0}}) == [20, 30]


def test_two_checkpoints_of_one_step_count_once() -> None:
    first, saved, left = identity(1, 10), Identity(epoch(1), Version(20, 1)), Identity(epoch(1), Version(20, 2))
    assert retention([first, saved, left], Keep(last=2), {}) == {first, left}
    assert retention([first, saved, left], Keep(every=20), {}) == {left}
    assert retention([first, saved, left], Keep(best=Best("loss")), {saved: {"loss": 1.0}}) == {saved, left}


@given(
    st.lists(st.integers(0, 60), unique=True).map(sorted),
    st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_retention_never_lets_the_newest_go(steps: list[int], last: int | None, every: int | None) -> None:
    found = kept(steps, Keep(last=last, every=every))
    assert not steps or steps[-1] in found
    assert last is None or len(found) >= min(last, len(steps))
    assert set(found) <= set(steps)


class Job:
    """One epoch of a run that saves, and prunes under a store clock that the test moves."""

    def __init__(self, number: int = 1, parent: Identity | None = None, store: Sim | None = None) -> None:
        self.store = store or Sim()
        self.epoch = epoch(number)
        self.told: list[Event] = []
        self.run = Run(self.store, events=Events(self.told.append))
        self.run.put_claim(Claim(self.epoch, parent, launch="job"))
        self.pruner = Pruner(self.run, self.epoch, grace_s=GRACE_S)
        self.writer = f"w{number}"
        self.base: Committed | None = None

    def save(self, step: int, snap: Snapshot | None = None, *, dedup: bool = False, loss: float = 0.0) -> Committed:
        snap = snap or snapshot({"w": floats(32, 16, seed=step), "frozen": FROZEN})
        committer = Committer(self.store, self.writer, "raw", pack_bytes=2048)
        at = Identity(self.epoch, identity(1, step).version)
        base = self.base.record if dedup and self.base else None
        self.base = committer.commit(
            at, snap.manifest, snap.frame, check=lambda: None, base=base, metrics={"loss": loss}
        )
        return self.base

    def plan(self, keep: Keep, **more: Any) -> PrunePlan:
        return self.pruner.plan(self.run.view(), keep, **more)

    def prune(self, keep: Keep, passes: int = 1) -> PrunePlan:
        for _ in range(passes):
            plan = self.plan(keep)
            self.pruner.execute(plan)
            self.store.advance(2 * GRACE_S)
        return plan

    def steps(self) -> list[int]:
        return [ref.identity.version.step for ref in self.run.view().history]

    def packs_of(self, step: int) -> list[str]:
        return self.store.held(f"{keys.DATA}{Identity(self.epoch, identity(1, step).version)}/")

    def is_whole(self) -> bool:
        """Everything that is listed can be read."""
        return all(read_all(self.store, open_record(self.store, ref)) for ref in self.run.view().history)


def saved(*steps: int, store: Sim | None = None) -> Job:
    """A job that has saved these steps."""
    job = Job(store=store)
    for step in steps:
        job.save(step)
    return job


class Full(Sim):
    """A store that has room for nothing before something was deleted."""

    full = False

    def put(self, key: str, *rest: Any, **more: Any) -> None:
        if self.full:
            raise StorageError(f"put {key}: no space left on device")
        super().put(key, *rest, **more)

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        self.full = False

    def abort_uploads(self, *rest: Any) -> int:
        self.full = False
        return super().abort_uploads(*rest)


@pytest.mark.parametrize("room", ["by what it deletes", "by uploads that nobody ends"])
def test_a_prune_makes_room_in_a_full_store_although_a_tombstone_takes_some(room: str) -> None:
    store = Full()
    job = saved(10, 20, 30, store=store)
    if room == "by what it deletes":
        job.prune(Keep(last=2))
    store.full = True
    job.prune(Keep(last=1))
    assert job.steps() == [30]
    assert (job.packs_of(10) == []) == (room == "by what it deletes")


def test_the_first_pass_only_retires_and_the_second_deletes_after_the_grace() -> None:
    job = saved(10, 20, 30)
    job.store.advance(2 * GRACE_S)
    plan = job.plan(Keep(last=1))
    assert [each.version.step for each in plan.retire] == [10, 20]
    assert (plan.records, plan.packs) == ((), ())
    assert plan.freed_later_bytes > 0
    job.pruner.execute(plan)
    assert job.steps() == [30]
    assert job.packs_of(10)
    job.store.advance(GRACE_S / 2)
    assert not job.plan(Keep(last=1))
    assert [each.version.step for each in job.plan(Keep(last=1)).waiting] == [10, 20]
    job.store.advance(GRACE_S)
    job.prune(Keep(last=1))
    assert job.packs_of(10) == job.packs_of(20) == []
    assert len(job.store.held(keys.COMMITS)) == 1
    assert len(job.store.held(keys.RETIRED)) == 2  # tombstones stay
    assert job.is_whole()


def test_in_a_folder_the_grace_is_short_while_nobody_reads(tmp_path: Path) -> None:
    job = Job(store=open_local(str(tmp_path)))
    job.pruner = Pruner(job.run, job.epoch)
    for step in (10, 20):
        job.save(step)
    job.pruner.execute(job.plan(Keep(last=1)))
    assert [each.version.step for each in job.plan(Keep(last=1)).waiting] == [10]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            os.utime(path, (path.stat().st_mtime - FOLDER_GRACE_S - 1,) * 2)
    with Lease(job.store, [job.run.view().history[-1].identity]):
        assert job.plan(Keep(last=1)).records == ()
    plan = job.plan(Keep(last=1))
    assert len(plan.records) == 1
    assert plan.packs


def test_deleting_all_but_the_newest_never_deletes_the_newest() -> None:
    job = saved(10)
    job.prune(Keep(last=1), passes=5)
    assert job.steps() == [10]
    assert job.is_whole()


def test_packs_that_an_unretired_record_refers_to_stay_when_their_checkpoint_goes() -> None:
    job = Job()
    first = job.save(10)
    job.store.advance(2 * GRACE_S)
    job.save(20, dedup=True)
    assert job.base is not None
    assert job.base.referred_bytes > 0
    job.prune(Keep(last=1), passes=4)
    assert job.steps() == [20]
    assert job.is_whole()
    referred = {key for key, _ in job.base.record.packs} & {key for key, _ in first.record.packs}
    assert set(job.packs_of(10)) == referred
    job.base = None
    job.save(30)
    job.prune(Keep(last=1), passes=4)
    assert job.packs_of(10) == job.packs_of(20) == []
    assert job.is_whole()


def test_a_record_goes_before_its_packs_so_that_nothing_listed_is_incomplete() -> None:
    job = saved(10, 20)
    job.prune(Keep(last=1))
    job.store.log.clear()
    job.prune(Keep(last=1))
    deleted = [key for what, operation, key in job.store.log if (what, operation) == ("begin", "delete")]
    assert deleted[0].startswith(keys.COMMITS)
    assert all(key.startswith(keys.DATA) for key in deleted[1:])
    assert len(deleted) > 2


def test_a_record_that_lands_after_its_retirement_is_born_retired() -> None:
    job = saved(10)
    key = keys.record_key(identity(1, 10), "w1")
    record = job.store.get(key, 1 << 20)
    job.save(20)
    job.prune(Keep(last=1), passes=2)
    job.store.put(key, [record])
    assert job.steps() == [20]
    assert job.run.view().branches == []
    job.prune(Keep(last=1), passes=2)
    assert job.store.held(keys.COMMITS) == [keys.record_key(identity(1, 20), "w1")]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_what_a_reader_holds_is_not_deleted_until_it_lets_go() -> None:
    job = Job()
    old = job.save(10)
    with Lease(job.store.client(), [old.ref.identity], refresh_s=GRACE_S * 10 / 2):
        job.save(20)
        job.prune(Keep(last=1), passes=4)
        assert job.steps() == [20]
        assert same(
            read_all(job.store, open_record(job.store, old.ref)),
            snapshot({"w": floats(32, 16, seed=10), "frozen": FROZEN}).tensors,
        )
    assert job.store.held(keys.LEASES) == []
    job.prune(Keep(last=1), passes=2)
    assert job.packs_of(10) == []


def test_a_lease_that_was_not_refreshed_for_two_periods_does_not_count() -> None:
    job = Job()
    old = job.save(10)
    lease = Lease(job.store.client(), [old.ref.identity], refresh_s=30.0)
    lease.refresh()  # and its process dies
    job.save(20)
    job.store.advance(59.0)
    job.prune(Keep(last=1))
    assert job.store.held(keys.LEASES) == [lease.key]
    job.prune(Keep(last=1), passes=2)
    assert job.store.held(keys.LEASES) == []
    assert job.packs_of(10) == []


def test_a_lease_is_refreshed_while_its_block_runs() -> None:
    store, refreshed = Sim(), threading.Event()

    def fault(operation: str, key: str) -> Fault | None:
        if len(store.log) > 5:
            refreshed.set()
        return Fault.FAIL if len(store.log) == 3 else None  # one refresh fails, and the next is tried

    store.fault = fault
    told: list[Event] = []
    with Lease(store, [identity(1, 10)], refresh_s=0.001, events=Events(told.append)):
        assert refreshed.wait(60)
    assert [event.name for event in told] == ["lease.late"]
    assert store.held(keys.LEASES) == []


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        b'{"identities": []}',
        b'{"identities": [], "refresh_s": 1%s}' % (b"0" * 400),
        b'{"identities": [], "refresh_s": NaN}',
    ],
)
def test_a_lease_that_cannot_be_read_holds_everything_for_a_while_and_then_nothing(body: bytes) -> None:
    job = saved(10, 20)
    job.prune(Keep(last=1))
    job.store.put(keys.lease_key("strange"), [body])
    plan = job.plan(Keep(last=1))
    assert "leases/strange" in plan.blocked
    assert plan.packs == ()
    job.store.advance(10_000)
    plan = job.prune(Keep(last=1))
    assert plan.leases == (keys.lease_key("strange"),)
    assert job.packs_of(10) == []


# --- what was never committed ----------------------------------------------------------------------------------------


def failed_save(job: Job, step: int) -> None:
    job.store.fault = lambda operation, key: Fault.FAIL if key.startswith(keys.COMMITS) else None
    with pytest.raises(Exception, match="not accepted"):
        job.save(step)
    job.store.fault = lambda operation, key: None


def test_packs_without_a_record_stay_as_long_as_their_epoch_may_still_commit() -> None:
    job = saved(10)
    failed_save(job, 20)
    job.store.advance(100 * GRACE_S)
    job.prune(Keep(last=1), passes=3)
    assert job.packs_of(20)


@pytest.mark.parametrize("how", ["closed", "superseded"])
def test_packs_without_a_record_go_by_two_passes_once_their_epoch_is_over(how: str) -> None:
    job = saved(10)
    failed_save(job, 20)
    if how == "closed":
        job.run.close_epoch(job.epoch, "done")
        decider = job
    else:
        decider = Job(2, identity(1, 10), job.store)
    assert decider.plan(Keep()).abandoned == ()  # younger than the grace
    job.store.advance(2 * GRACE_S)
    plan = decider.plan(Keep())
    assert plan.abandoned == (identity(1, 20),)
    assert plan.packs == ()
    decider.prune(Keep(), passes=2)
    assert job.packs_of(20) == []
    assert decider.steps() == [10]
    assert decider.is_whole()


def test_a_late_record_whose_packs_are_being_given_up_is_a_checkpoint_if_it_comes_before_the_tombstone() -> None:
    job = saved(10)
    done = job.save(20)
    key = keys.record_key(identity(1, 20), "w1")
    record = job.store.get(key, 1 << 20)
    job.store.delete([key])
    newer = Job(2, identity(1, 30), job.store)  # it went on from step 30, in memory
    job.store.advance(2 * GRACE_S)
    plan = newer.plan(Keep())
    assert plan.abandoned == (identity(1, 20),)
    job.store.put(key, [record])
    newer.pruner.execute(plan)
    assert newer.steps() == [10, 20]
    newer.prune(Keep(), passes=3)
    assert newer.steps() == [10, 20]
    assert newer.is_whole()
    assert done.packs > 0


def test_packs_of_a_failed_attempt_at_what_was_then_committed_go_once_the_epoch_is_over() -> None:
    job = Job()
    failed_save(job, 10)
    first = set(job.packs_of(10))
    job.writer = "second"
    job.save(10)
    job.store.advance(2 * GRACE_S)
    job.prune(Keep(), passes=2)
    assert first < set(job.packs_of(10))
    job.run.close_epoch(job.epoch, "done")
    job.prune(Keep(), passes=1)
    assert first.isdisjoint(job.packs_of(10))
    assert job.is_whole()


# --- what may not be decided -----------------------------------------------------------------------------------------


def test_a_superseded_decider_deletes_nothing() -> None:
    job = saved(10, 20)
    plan = job.plan(Keep(last=1))
    Job(2, identity(1, 20), job.store)
    before = job.store.held()
    with pytest.raises(Superseded):
        job.pruner.execute(plan)
    assert job.store.held() == before


@pytest.mark.parametrize("damage", ["flipped", "newer version"])
def test_while_a_record_cannot_be_read_no_pack_is_deleted(damage: str) -> None:
    job = saved(10, 20, 30)
    job.prune(Keep(last=2))
    at = 9 if damage == "newer version" else 200
    job.store.spoil(keys.record_key(identity(1, 20), "w1"), lambda d: d[:at] + bytes([d[at] ^ 0xFF]) + d[at + 1 :])
    job.pruner = Pruner(job.run, job.epoch, grace_s=GRACE_S)
    plan = job.prune(Keep(last=2))
    assert str(identity(1, 20)) in plan.blocked
    assert job.packs_of(10)
    assert any("no pack could be deleted" in event.message and event.loud for event in job.told)
    assert plan.records == (keys.record_key(identity(1, 10), "w1"),)
    # retiring the damaged one by hand is the way out
    job.pruner.execute(job.plan(Keep(last=2), also=[identity(1, 20)]))
    job.store.advance(2 * GRACE_S)
    job.prune(Keep(last=2), passes=2)
    assert job.packs_of(10) == job.packs_of(20) == []
    assert job.steps() == [30]


@pytest.mark.parametrize("lost", ["record", "a pack", "half a pack"])
def test_a_checkpoint_that_cannot_be_restored_does_not_count_as_kept(lost: str) -> None:
    job = saved(10, 20)
    if lost == "record":
        job.store.spoil(keys.record_key(identity(1, 20), "w1"), lambda data: data[:-1])
    elif lost == "a pack":
        job.store.delete(job.packs_of(20)[:1])
    else:
        job.store.spoil(job.packs_of(20)[0], lambda data: data[: len(data) // 2])
    job.pruner = Pruner(job.run, job.epoch, grace_s=GRACE_S)
    job.prune(Keep(last=1), passes=4)
    assert job.steps() == [10, 20]
    assert use_newest_readable(job.run, lambda record: read_all(job.store, record) and record.identity) == identity(
        1, 10
    )


def test_also_retires_what_is_named_branches_too_but_never_the_newest() -> None:
    job = saved(10, 20, 30)
    newer = Job(2, identity(1, 20), job.store)
    newer.save(25)
    with pytest.raises(UsageError, match="is the newest"):
        newer.plan(Keep(), also=[Identity(epoch(2), identity(2, 25).version)])
    with pytest.raises(UsageError, match="holds no checkpoint"):
        newer.plan(Keep(), also=[identity(1, 99)])
    assert newer.plan(Keep(last=1)).retire == (identity(1, 10), identity(1, 20))  # the branch stays
    newer.pruner.execute(newer.plan(Keep(), also=[identity(1, 30)]))
    assert newer.run.view().branches == []
    assert newer.steps() == [10, 20, 25]


def test_a_prune_whose_store_fails_can_be_done_again() -> None:
    job = Job()
    for step in (10, 20, 30):
        job.save(step, snapshot({"w": floats(16, 8, seed=step), "t": Tensor("float32", FROZEN.bits)}))
    job.prune(Keep(last=1))
    plan = job.plan(Keep(last=1))
    job.store.fault = lambda operation, key: Fault.LOST if operation == "delete" else None
    with pytest.raises(TransientError):
        job.pruner.execute(plan)
    job.store.fault = lambda operation, key: None
    job.pruner.execute(plan)
    assert job.packs_of(10) == job.packs_of(20) == []
    assert job.is_whole()
