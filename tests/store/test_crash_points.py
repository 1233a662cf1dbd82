"""Every crash point of a save, and what a restore finds after it: exactly the old checkpoint or exactly the new one.

The packs of a save are put in parallel and the record after all of them (test_commit holds that order), so the store's
states after a crash are the downward-closed sets of that order: any subset of the packs, or everything. Each set is
tried alone, with what was missing landing late, with another epoch's saves and with deletion in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt.types
from ckpt.clock import ManualClock
from ckpt.errors import SaveFailed, TransientError
from ckpt.events import Event, Events
from ckpt.format.manifest import Record
from ckpt.policy.save_options import Keep
from ckpt.storage.retry import Retrying
from ckpt.store import keys
from ckpt.store.commit import Committed, Committer
from ckpt.store.lineage import Claim, next_epoch
from ckpt.store.prune import Pruner
from ckpt.store.reader import open_record, use_newest_readable
from ckpt.store.run import Run
from ckpt.types import Epoch, Identity, Version
from tests.store.build import Bits, Snapshot, epoch, floats, identity, read_all, same, snapshot
from tests.store.sim import Crash, Fault, Sim

GRACE_S = 100.0
Content = dict[tuple[str, str], Bits]
FROZEN = floats(32, 24, seed=99)


def state(seed: int) -> Snapshot:
    """Three packs of its own, and one frozen tensor."""
    return snapshot({"frozen": FROZEN, **{f"w{i}": floats(16, 20, seed=10 * seed + i) for i in range(3)}})


def save(store: Any, at: Identity, snap: Snapshot, writer: str, base: Record | None) -> Committed:
    committer = Committer(store, writer, "raw", pack_bytes=1280 if base else 2560)
    return committer.commit(
        at, snap.manifest, snap.frame, check=lambda: Run(store).check_not_superseded(at.epoch), base=base
    )


def restored(store: Sim) -> tuple[Identity, Content] | None:
    """What a start finds; nothing that it comes across on the way may be damaged."""
    told: list[Event] = []
    backend = store.client()
    run = Run(backend, events=Events(told.append))
    if not run.view().history:
        return None
    found = use_newest_readable(run, lambda record: (record.identity, read_all(backend, record)))
    assert told == []
    return found


def is_exactly(store: Sim, at: Identity, snap: Snapshot) -> bool:
    found = restored(store)
    return found is not None and found[0] == at and same(found[1], snap.tensors)


@dataclass
class Saved:
    """A store with the old checkpoint, and the objects that the save of the new one puts, the record last."""

    store: Sim
    old: Snapshot
    new: Snapshot
    objects: list[tuple[str, bytes]]

    def sets(self) -> Iterator[tuple[list[tuple[str, bytes]], list[tuple[str, bytes]]]]:
        """(what has landed, what has not) for every crash point."""
        packs = self.objects[:-1]
        for landed in chain.from_iterable(combinations(packs, n) for n in range(len(packs) + 1)):
            yield list(landed), [each for each in self.objects if each not in landed]
        yield self.objects, []


OLDER, OLD, NEW = identity(1, 5), identity(1, 10), identity(1, 20)


def prepared(dedup: bool, honest: bool = True) -> Saved:
    store = Sim(honest=honest)
    Run(store).put_claim(Claim(epoch(1), None, launch="job"))
    older = save(store, OLDER, state(0), "a", None)
    old = save(store, OLD, state(1), "a", older.record if dedup else None)
    trial = store.copy()
    known = set(trial.held())
    done = save(trial, NEW, state(2), "a", old.record if dedup else None)
    keys_put = [key for key in trial.held() if key not in known and key != keys.record_key(NEW, "a")]
    assert done.packs == len(keys_put) >= 3
    assert (done.referred_bytes > 0) == dedup
    objects = [(key, trial.get(key, 1 << 20)) for key in [*keys_put, keys.record_key(NEW, "a")]]
    return Saved(store, state(1), state(2), objects)


def put(store: Sim, objects: list[tuple[str, bytes]]) -> None:
    for key, data in objects:
        store.put(key, [data])


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("honest", [True, False])
def test_after_every_crash_a_restore_gives_exactly_the_old_or_the_new(dedup: bool, honest: bool) -> None:
    saved = prepared(dedup, honest)
    for landed, late in saved.sets():
        store = saved.store.copy()
        put(store, landed)
        assert is_exactly(store, NEW, saved.new) if not late else is_exactly(store, OLD, saved.old)
        for n in range(len(late)):  # the rest lands one by one, the record too, in any case after its packs
            put(store, late[n : n + 1])
            is_whole = n == len(late) - 1
            assert is_exactly(store, NEW, saved.new) if is_whole else is_exactly(store, OLD, saved.old)


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("honest", [True, False])
@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize("fault", list(Fault))
def test_each_put_may_fail_lose_its_reply_land_late_or_be_the_last(
    fault: Fault, retried: bool, honest: bool, dedup: bool
) -> None:
    saved = prepared(dedup, honest)
    for key, _ in saved.objects:
        store = saved.store.copy()
        base = open_record(store, Run(store).view().history[-1]) if dedup else None
        faults = [fault]
        store.fault = lambda operation, asked, key=key, faults=faults: faults.pop() if asked == key and faults else None
        client: Any = Retrying(store, 60.0, pause=lambda seconds: None) if retried else store
        try:
            save(client, NEW, saved.new, "a", base)
            is_committed = True
        except (SaveFailed, Crash):
            is_committed = False
        may_land = fault is Fault.LATE and key == saved.objects[-1][0]
        # Without retries only the record's lost reply is settled.
        settles = retried or (fault is Fault.LOST and key.startswith(keys.COMMITS))
        assert is_committed == (fault is not Fault.CRASH and settles)
        assert is_exactly(store, NEW, saved.new) if is_committed else is_exactly(store, OLD, saved.old)
        store.crashed = False
        store.land()
        is_new = is_committed or may_land
        assert is_exactly(store, NEW, saved.new) if is_new else is_exactly(store, OLD, saved.old)


# --- a newer epoch, and the old one's writer that is not dead --------------------------------------------------------


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("fork", [OLD, Identity(epoch(1), Version(15)), NEW, Identity(epoch(1), Version(30))], ids=str)
def test_a_zombie_that_lands_late_is_on_the_line_only_up_to_the_fork_point(fork: Identity, dedup: bool) -> None:
    """The newer epoch went on from `fork` (from memory where that was never committed), and runs step 20 again."""
    saved = prepared(dedup)
    again = Identity(epoch(2), Version(fork.version.step + 10))
    for landed, late in saved.sets():
        store = saved.store.copy()
        put(store, landed)
        Run(store).put_claim(Claim(epoch(2), fork, launch="job"))
        on_line = fork >= NEW
        assert is_exactly(store, NEW, saved.new) if on_line and not late else is_exactly(store, OLD, saved.old)
        put(store, late)
        assert is_exactly(store, NEW, saved.new) if on_line else is_exactly(store, OLD, saved.old)
        base = open_record(store, Run(store).view().history[-1]) if dedup else None
        save(store, again, state(7), "b", base)
        assert is_exactly(store, again, state(7))


def test_a_zombie_that_asks_before_its_record_puts_none() -> None:
    saved = prepared(dedup=True)
    store = saved.store.copy()
    base = open_record(store, Run(store).view().history[-1])
    newer = Run(store.client())

    def supersede(operation: str, key: str) -> None:
        if key.endswith(".pack") and epoch(2) not in newer.epochs():
            newer.put_claim(Claim(epoch(2), OLD, launch="job"))

    store.fault = supersede
    with pytest.raises(Exception, match="has taken over"):
        save(store, NEW, saved.new, "a", base)
    store.fault = lambda operation, key: None
    assert is_exactly(store, OLD, saved.old)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_claim_that_lands_late_hides_nothing_that_the_next_start_has_committed(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start dies with its claim on the way, which nobody sees; so the next one takes the same number. The claim lands
    before the next one's, before its record, or after it."""
    drawn, now_s = iter(["ff", "00"]), iter([1e9, 1e9 + 5])
    monkeypatch.setattr(ckpt.types, "secrets", SimpleNamespace(token_hex=lambda count: next(drawn) * count))
    monkeypatch.setattr(ckpt.types, "time", SimpleNamespace(time=lambda: next(now_s)))
    store = prepared(dedup=False).store
    lost, again = (next_epoch(Run(store).epochs()) for _ in range(2))
    assert lost.number == again.number
    store.fault = lambda operation, key: Fault.LATE
    with pytest.raises(TransientError):
        Run(store).put_claim(Claim(lost, OLD, launch="job"))
    store.fault = lambda operation, key: None
    if nth == 1:
        store.land()
    Run(store).put_claim(Claim(again, OLD, launch="job"))
    if nth == 2:
        store.land()
    assert is_exactly(store, OLD, state(1))
    save(store, Identity(again, Version(20)), state(5), "b", None)
    store.land()
    assert is_exactly(store, Identity(again, Version(20)), state(5))
    Run(store).check_not_superseded(again)


# --- deletion in between ---------------------------------------------------------------------------------------------


def prune(store: Sim, at: Epoch | None, keep: Keep, passes: int) -> None:
    """So many passes of a decider that lives on, each later than the last one by more than the grace."""
    run = Run(store, ManualClock())
    pruner = Pruner(run, at, grace_s=GRACE_S)
    for _ in range(passes):
        pruner.execute(pruner.plan(run.view(), keep))
        store.advance(2 * GRACE_S)


def operations_of_prune(saved: Saved, landed: list[tuple[str, bytes]], at: Epoch) -> int:
    store = saved.store.copy()
    put(store, landed)
    store.log.clear()
    prune(store, at, Keep(last=1), 2)
    return sum(what == "begin" for what, _, _ in store.log)


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("honest", [True, False])
def test_a_save_and_a_prune_that_both_die_anywhere_lose_nothing(dedup: bool, honest: bool) -> None:
    """The decider prunes while its own save is on the way, and dies at each of its operations; the rest of the save
    lands after that; the next start prunes to the end."""
    saved = prepared(dedup, honest)
    for landed, late in saved.sets():
        for crash_at in range(operations_of_prune(saved, landed, epoch(1)) + 1):
            store = saved.store.copy()
            put(store, landed)
            die_at(store, crash_at)
            with suppress(Crash):
                prune(store, epoch(1), Keep(last=1), 2)
            store.crashed, store.fault = False, lambda operation, key: None
            assert is_exactly(store, NEW, saved.new) if not late else is_exactly(store, OLD, saved.old)
            put(store, late)
            assert is_exactly(store, NEW, saved.new)
            prune(store, epoch(1), Keep(last=1), 3)
            assert is_exactly(store, NEW, saved.new)
            assert [ref.identity for ref in Run(store).view().commits] == [NEW]


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("fork", [15, 30])
def test_what_lands_late_during_and_after_the_next_epochs_prune_harms_nothing(fork: int, dedup: bool) -> None:
    """Epoch 2 went on from `fork`, in memory, while epoch 1's save of step 20 was on the way. Beyond the fork point
    that save is a branch, wherever it stops. Up to there it is on the line, unless it comes after its retirement."""
    saved = prepared(dedup)
    third = Identity(epoch(2), Version(40))
    for landed, late in saved.sets():
        for after in range(4):
            store = saved.store.copy()
            put(store, landed)
            Run(store).put_claim(Claim(epoch(2), Identity(epoch(1), Version(fork)), launch="job"))
            if fork == 15:
                base = open_record(store, Run(store).view().history[-1]) if dedup else None
                save(store, third, state(3), "b", base)
            prune(store, epoch(2), Keep(last=1), after)
            put(store, late)
            is_on_line = NEW in {ref.identity for ref in Run(store).view().history}
            expected = (third, state(3)) if fork == 15 else (NEW, saved.new) if is_on_line else (OLD, saved.old)
            assert is_exactly(store, *expected)
            prune(store, epoch(2), Keep(last=1), 4)
            assert is_exactly(store, *expected)
            for ref in Run(store).view().branches:  # what is still listed restores, too
                assert same(read_all(store, open_record(store, ref)), saved.new.tensors)


def die_at(store: Sim, number: int) -> None:
    left = [number]

    def fault(operation: str, key: str) -> Fault | None:
        left[0] -= 1
        return Fault.CRASH if left[0] < 0 else None

    store.fault = fault
