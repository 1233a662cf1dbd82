"""A commit: what is written, what is referred to, and that a failure leaves no record and no thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from ckpt.clock import ManualClock
from ckpt.errors import AccessDenied, SaveFailed, TransientError, UsageError
from ckpt.events import Event, Events
from ckpt.storage.contract import ObjectInfo
from ckpt.store import keys, packs
from ckpt.store.commit import Committer
from ckpt.store.reader import open_record
from tests.store.build import Snapshot, Tensor, commit, floats, identity, read_all, rows, same, snapshot
from tests.store.sim import Fault, Sim
from tests.threads import running


def some(seed: int = 0, **more: Tensor) -> Snapshot:
    weight = floats(64, 48, seed=seed)
    sharded = Tensor("float32", floats(30, 20, seed=seed + 1).bits, rows((30, 20), 4))
    tensors = {"w": weight, "x": sharded, "0d": floats(seed=3), "empty": floats(0, 4), **more}
    return snapshot(tensors, shared={"lr": 0.1}, own={"rank=0": {"position": seed}})


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes", "auto"])
def test_a_commit_comes_back_bit_for_bit(codec: str) -> None:
    store, snap = Sim(), some()
    done = commit(store, 10, snap, codec=codec, metrics={"loss": 0.5}, about={"host": "here"}, owner="node-3")
    found = open_record(store, done.ref)
    assert same(read_all(store, found), snap.tensors)
    assert (found.metrics, found.about, found.writer) == ({"loss": 0.5}, {"host": "here"}, "w")
    assert done.packs == len(found.packs) > 2
    assert all(key.startswith(f"data/{identity(1, 10)}/node-3/w-") for key, _ in found.packs)
    assert done.stored_bytes == sum(size for _, size in found.packs)
    assert done.raw_bytes == snap.manifest.frames["length"].sum()
    assert done.referred_bytes == 0


def test_all_packs_are_there_before_the_record_is_begun() -> None:
    store = Sim()
    done = commit(store, 10, some())
    began = store.log.index(("begin", "put", keys.record_key(identity(1, 10), "w")))
    assert {key for what, _, key in store.log[:began] if what == "end"} == {key for key, _ in done.record.packs}
    assert began == len(store.log) - 2


def test_frames_that_did_not_change_are_referred_to_and_not_written() -> None:
    store, frozen = Sim(), floats(100, 40, seed=9)
    first = commit(store, 10, some(1, frozen=frozen))
    second = commit(store, 20, some(2, frozen=frozen), base=first.record)
    assert 16000 <= second.referred_bytes < 17000
    assert second.stored_bytes < first.stored_bytes - 15000
    assert same(read_all(store, open_record(store, second.ref)), some(2, frozen=frozen).tensors)
    third = commit(store, 30, some(2, frozen=frozen), base=second.record)
    assert third.packs == 0
    assert same(read_all(store, open_record(store, third.ref)), some(2, frozen=frozen).tensors)


def test_equal_bytes_of_another_dtype_are_not_referred_to_because_codecs_depend_on_it() -> None:
    store, bits = Sim(), floats(64, 64).bits
    first = commit(store, 10, snapshot({"w": Tensor("float32", bits)}), codec="planes")
    again = snapshot({"w": Tensor("bfloat16", bits.view(np.uint16))})
    second = commit(store, 20, again, codec="planes", base=first.record)
    assert second.referred_bytes == 0
    assert same(read_all(store, second.record), again.tensors)


def test_equal_frames_of_one_checkpoint_are_written_once() -> None:
    store, zeros = Sim(), Tensor("float32", np.zeros((64, 64), np.float32))
    snap = snapshot({"exp_avg": zeros, "exp_avg_sq": zeros})
    done = commit(store, 10, snap)
    assert done.stored_bytes == 1024
    assert same(read_all(store, done.record), snap.tensors)


def test_a_pack_of_which_little_is_still_wanted_is_not_kept_alive_by_reference() -> None:
    store = Sim()
    parts = {f"t{i}": floats(16, 16, seed=i) for i in range(8)}  # one frame each, four to a pack
    first = commit(store, 10, snapshot(parts))
    assert first.packs == 2
    changed = snapshot(
        {name: floats(16, 16, seed=100 + i) if i < 3 else t for i, (name, t) in enumerate(parts.items())}
    )
    second = commit(store, 20, changed, base=first.record)
    assert second.referred_bytes == 4096  # all of the second pack, and not the last quarter of the first
    assert same(read_all(store, second.record), changed.tensors)


class Refusing(Sim):
    """One that answers no head of data, but with that error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def head(self, key: str) -> ObjectInfo:
        if key.startswith(keys.DATA):
            raise self.error
        return super().head(key)


@pytest.mark.parametrize("what", ["is gone", "has another size"])
def test_frames_of_a_pack_of_the_base_that_is_gone_are_written_anew_and_that_is_told(what: str) -> None:
    """Somebody, or a rule of the bucket, may remove data that a living job refers to, and has in memory."""
    store, told = Sim(), list[Event]()
    events = Events(told.append)
    parts = {f"t{i}": floats(16, 16, seed=i) for i in range(12)}  # one frame each, four to a pack
    first = commit(store, 10, snapshot(parts), events=events)
    assert first.packs == 3
    gone, _ = first.record.packs[1]
    if what == "is gone":
        store.delete([gone])
    else:
        store.spoil(gone, lambda data: data[:-1])
    second = commit(store, 20, snapshot(parts), base=first.record, events=events)
    assert (second.packs, second.referred_bytes) == (1, 8192)
    assert gone not in dict(second.record.packs)
    assert same(read_all(store, open_record(store, second.ref)), snapshot(parts).tensors)
    assert [(event.name, event.loud, event.data) for event in told] == [("packs.lost", True, {"packs": 1})]
    assert gone in told[0].message
    third = commit(store, 30, snapshot(parts), base=second.record, events=events)
    assert (third.packs, len(told)) == (0, 1)


def test_what_may_not_be_looked_at_is_not_referred_to_and_what_cannot_be_now_fails_the_save() -> None:
    store, snap = Refusing(AccessDenied("head: 403")), some()
    first = commit(store, 10, snap)
    second = commit(store, 20, snap, base=first.record)
    assert second.referred_bytes == 0
    store.error = TransientError("head: 503")
    with pytest.raises(SaveFailed, match="head: 503"):
        commit(store, 30, snap, base=second.record)


def test_packs_grow_when_there_would_be_more_than_the_limit() -> None:
    store, snap = Sim(), snapshot({"w": floats(80, 64)}, frame_bytes=16)
    done = commit(store, 10, snap, pack_bytes=16)
    assert len(snap.at) == 1280
    assert packs.PACKS_MAX / 2 < done.packs <= packs.PACKS_MAX
    assert same(read_all(store, done.record), snap.tensors)


def test_a_frame_that_changed_in_memory_since_it_was_staged_is_not_committed() -> None:
    store, snap = Sim(), some()
    snap.memory[snap.at[2][0]] ^= 1
    with pytest.raises(SaveFailed, match="frame 2 has changed in memory"):
        commit(store, 10, snap)
    assert store.held(keys.COMMITS) == []


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_an_error_in_any_pack_leaves_no_record_and_says_which(number: int) -> None:
    store = Sim()
    store.fault = lambda operation, key: Fault.FAIL if key.endswith(f"-{number}.pack") else None
    with pytest.raises(SaveFailed, match=rf"{identity(1, 10)}: .*w-{number}\.pack") as error:
        commit(store, 10, some())
    assert error.value.__cause__ is not None
    assert store.held(keys.COMMITS) == []
    assert not running("ckpt-commit")


@pytest.mark.parametrize("how", ["a frame", "a put", "a put of a part"])
def test_what_fails_keeps_none_of_the_memory_that_it_was_to_write(how: str) -> None:
    """Nor do the packs that are written meanwhile, and not only until rubbish is collected."""
    store, snap, in_second, failed = Sim(), some(), threading.Event(), threading.Event()

    def frame(i: int) -> memoryview:
        if how == "a frame" and i == 0:
            assert in_second.wait(10.0)
            failed.set()
            raise ZeroDivisionError("a bug")
        view = snap.frame(i)
        if how == "a frame":
            in_second.set()
            assert failed.wait(10.0)
        return view

    store.fault = lambda operation, key: Fault.FAIL
    frames = snap.manifest.frames
    gc.disable()
    try:
        if how == "a put of a part":
            part = frames, range(len(frames)), frame, "node", "w2", threading.Event()
            with pytest.raises(TransientError):
                Committer(store, "w", "raw", pack_bytes=4096).write(identity(1, 10), *part)
        else:
            with pytest.raises(SaveFailed, match="a bug" if how == "a frame" else "FAIL") as error:
                commit(store, 10, snap, frame=frame)
            assert isinstance(error.value.__cause__, ZeroDivisionError if how == "a frame" else TransientError)
        snap.memory.clear()  # BufferError while any view of it is alive
    finally:
        gc.enable()


def test_after_a_cancel_nothing_more_is_written() -> None:
    store, snap, cancel = Sim(), some(), threading.Event()
    at_cancel: list[int] = []

    def frame(number: int) -> memoryview:
        if not cancel.is_set() and any(entry[0] == "end" for entry in store.log):
            cancel.set()
            at_cancel.append(len(store.log))
        return snap.frame(number)

    with pytest.raises(SaveFailed, match="cancelled"):
        commit(store, 10, snap, codec="auto", pack_bytes=512, frame=frame, cancel=cancel)
    begun = [entry for entry in store.log[at_cancel[0] :] if entry[0] == "begin"]
    assert len(snap.at) > 15
    assert len(begun) < packs.PUTS_MAX  # those that had passed their last look
    after = len(store.log)
    assert store.held(keys.COMMITS) == []
    assert len(store.log) == after


def test_what_was_retired_meanwhile_is_not_committed_and_is_no_base() -> None:
    store = Sim()
    first = commit(store, 10, some(1))
    store.put(keys.retired_key(identity(1, 10)), [b""])
    with pytest.raises(SaveFailed, match=f"{identity(1, 10)} was retired"):
        commit(store, 20, some(1), base=first.record)
    commit(store, 30, some(2, other=floats(3)), base=None)
    store.put(keys.retired_key(identity(1, 40)), [b""])
    with pytest.raises(SaveFailed, match=f"{identity(1, 40)} was retired"):
        commit(store, 40, some(2))


@pytest.mark.parametrize("honest", [True, False])
def test_a_lost_reply_to_the_record_is_settled_by_reading_back(honest: bool) -> None:
    store = Sim(honest=honest)
    store.fault = lambda operation, key: Fault.LOST if key.startswith(keys.COMMITS) else None
    done = commit(store, 10, some())
    assert open_record(store, done.ref).identity == identity(1, 10)
    assert sum(entry == ("begin", "put", keys.record_key(identity(1, 10), "w")) for entry in store.log) == 1


def test_a_second_attempt_shares_no_key_with_the_first_whose_puts_may_still_land() -> None:
    store, snap = Sim(), some()
    committer = Committer(store, "w", "raw", pack_bytes=4096)
    store.fault = lambda operation, key: Fault.LATE
    with pytest.raises(SaveFailed):
        committer.commit(identity(1, 10), snap.manifest, snap.frame, check=lambda: None)
    store.fault = lambda operation, key: None
    done = committer.commit(identity(1, 10), snap.manifest, snap.frame, check=lambda: None)
    assert done.record.writer != "w"
    before = {key: store.get(key, 1 << 20) for key in store.held()}
    store.land()
    assert all(store.get(key, 1 << 20) == data for key, data in before.items())


def test_a_commit_key_that_somebody_else_has_is_not_taken_for_our_own() -> None:
    store = Sim()
    store.put(keys.record_key(identity(1, 10), "w"), [b"theirs"])
    with pytest.raises(SaveFailed, match="another writer"):
        commit(store, 10, some())
    assert store.get(keys.record_key(identity(1, 10), "w"), 100) == b"theirs"


def test_a_committer_refuses_to_commit_twice_at_once() -> None:
    store, snap = Sim(), some()
    committer = Committer(store, "w")
    refused: list[BaseException] = []

    def check() -> None:
        with pytest.raises(UsageError, match="one checkpoint at a time") as error:
            committer.commit(identity(1, 20), snap.manifest, snap.frame, check=lambda: None)
        refused.append(error.value)

    committer.commit(identity(1, 10), snap.manifest, snap.frame, check=check)
    assert len(refused) == 1


# --- pace ------------------------------------------------------------------------------------------------------------


def test_commits_keep_to_the_bandwidth_together_and_owe_nothing_after_a_pause() -> None:
    clock, store, snap = ManualClock(), Sim(), some()
    committer = Committer(store, "w", "raw", bandwidth=1000.0, clock=clock)
    sent = 0
    for step in (10, 20):
        done = committer.commit(identity(1, step), snap.manifest, snap.frame, check=lambda: None)
        sent += done.stored_bytes
        assert clock.now_s() >= sent / 1000.0 * 0.99
    clock.sleep_s(1000.0)
    began_s = clock.now_s()
    committer.commit(identity(1, 30), snap.manifest, snap.frame, check=lambda: None)
    assert clock.now_s() - began_s == pytest.approx(done.stored_bytes / 1000.0)


def test_what_was_never_sent_is_not_paid_for_by_the_next_commit() -> None:
    clock = ManualClock()
    pace = packs.PutRateLimit(clock, 1000.0)

    def stop() -> None:
        raise SaveFailed("it was cancelled")

    for _ in range(3):
        with pytest.raises(SaveFailed):
            pace.await_budget(10**9, stop)
    pace.await_budget(1000, lambda: None)
    assert clock.now_s() == pytest.approx(1.0)


def test_puts_that_wait_at_once_are_paid_for_one_after_the_other() -> None:
    clock, ends_s = ManualClock(), list[float]()
    pace, others = packs.PutRateLimit(clock, 1000.0), iter([1000])

    def wait_too() -> None:
        for size in others:
            pace.await_budget(size, lambda: None)
            ends_s.append(clock.now_s())

    pace.await_budget(1000, wait_too)
    assert ends_s == [pytest.approx(2.0)]


def test_a_cancel_ends_the_wait_for_bandwidth() -> None:
    store, snap, cancel = Sim(), some(), threading.Event()

    class Cancelling(ManualClock):
        def sleep_s(self, seconds: float) -> None:
            super().sleep_s(seconds)
            cancel.set()

    clock = Cancelling()
    committer = Committer(store, "w", "raw", bandwidth=1.0, clock=clock, pack_bytes=2048)
    with pytest.raises(SaveFailed, match="cancelled"):
        committer.commit(identity(1, 10), snap.manifest, snap.frame, check=lambda: None, cancel=cancel)
    assert clock.now_s() <= packs.PUTS_MAX  # and not half an hour for each pack


# --- several writers -------------------------------------------------------------------------------------------------


class Others:
    """Another writer that has every second frame, or each `nth`, and says of its packs what `told` makes of them."""

    def __init__(
        self,
        store: Any,
        snap: Snapshot,
        told: Callable[[str, int], tuple[str, int]] = lambda key, size: (key, size),
        codec: Any = "raw",
        nth: int = 2,
    ) -> None:
        self.store, self.snap, self.told, self.codec, self.nth = store, snap, told, codec, nth
        self.over = False

    def __call__(self, todo: Any) -> list[tuple[Any, Future[packs.Written]]]:
        numbers = todo[:: self.nth]
        committer, frames = Committer(self.store, "o", self.codec, pack_bytes=4096), self.snap.manifest.frames[numbers]
        which = identity(1, 20), frames, numbers.tolist(), self.snap.frame
        made = committer.write(*which, "other", "o", threading.Event())
        done: Future[packs.Written] = Future()
        done.set_result(packs.Written(tuple(self.told(*pack) for pack in made.packs), made.places))
        return [(numbers, done)]

    def end_commit(self) -> None:
        self.over = True


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_a_commit_all_of_whose_frames_others_write_has_the_bytes_of_one_that_writes_them_itself(codec: str) -> None:
    """As on several nodes, where the part of the node that commits is one of the parts. On one node nobody is asked."""
    alone, parted, snap = Sim(), Sim(), some()
    own = commit(alone, 20, snap, codec=codec)
    theirs = commit(parted, 20, snap, codec=codec, elsewhere=Others(parted, snap, codec=codec, nth=1))
    assert {key.rpartition("/")[2].partition("-")[0] for key, _ in own.record.packs} == {"w"}
    assert {key.rpartition("/")[2].partition("-")[0] for key, _ in theirs.record.packs} == {"o"}
    assert theirs.record.places.tobytes() == own.record.places.tobytes()
    assert (theirs.stored_bytes, theirs.packs) == (own.stored_bytes, own.packs)
    for (key, _), (other, _) in zip(own.record.packs, theirs.record.packs, strict=True):
        assert alone.get(key, 1 << 20) == parted.get(other, 1 << 20)
    assert same(read_all(parted, open_record(parted, theirs.ref)), snap.tensors)


def test_packs_that_another_node_says_it_has_put_are_looked_at_before_a_record_refers_to_them() -> None:
    store, snap = Sim(), some()
    lies: list[Callable[[str, int], tuple[str, int]]] = [
        lambda key, size: (key.replace("-0.pack", "-77.pack"), size),
        lambda key, size: (key, size + 1),
    ]
    first: list[tuple[str, int]] = []
    lies.append(lambda *pack: first[0] if first else first.append(pack) or pack)  # nobody could read that record
    for told in lies:
        liar = Others(store, snap, told)
        with pytest.raises(SaveFailed, match=r"another node reported.*a folder must be shared|the same pack"):
            commit(store, 20, snap, elsewhere=liar)
        assert liar.over
    assert not list(store.list("commits/"))
    honest = Others(store, snap)
    done = commit(store, 20, snap, writer="again", elsewhere=honest)
    assert honest.over
    assert same(read_all(store, open_record(store, done.ref)), snap.tensors)
