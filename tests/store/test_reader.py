"""Reading frames: few large gets, every byte checked, and what is damaged or gone is passed over, loudly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from ckpt.backends.memory import open_memory
from ckpt.errors import (
    AccessDenied,
    DamagedData,
    MissingData,
    NewerFormat,
    NoCheckpoint,
    NotFound,
    StorageError,
    TransientError,
)
from ckpt.events import Event, Events
from ckpt.policy.save_options import Keep
from ckpt.store import keys, reader
from ckpt.store.commit import Committed
from ckpt.store.prune import Pruner
from ckpt.store.reader import FrameReader, candidates, use_newest_readable
from ckpt.store.run import Run
from tests.storage.faulty import Fault, FaultyBackend, Rule
from tests.store.build import Snapshot, Tensor, begun, commit, epoch, floats, identity, read_all, rows, same, snapshot
from tests.store.sim import Sim


def saved(store: Any, step: int = 10, *, codec: Any = "raw", snap: Snapshot | None = None, **options: Any) -> Committed:
    snap = snap or snapshot({"w": floats(64, 48, seed=step), "v": floats(40, seed=step)}, shared={"step": step})
    return commit(store, step, snap, options.pop("writer", f"w{step}"), codec, **options)


def a_run(store: Any, *steps: int) -> Run:
    told: list[Event] = []
    run = begun(store, Events(told.append))
    run.told = told  # type: ignore[attr-defined]
    for step in steps:
        saved(store, step)
    return run


def step_of(run: Run) -> int:
    def use(record: Any) -> int:
        read_all(run.backend, record)
        return int(record.identity.version.step)

    return use_newest_readable(run, use)


class Frames:
    """Takes frames into memory, and notes what became of each."""

    def __init__(self, source: FrameReader) -> None:
        self.lengths = source.record.manifest.frames["length"].tolist()
        self.held = {i: bytearray(n) for i, n in enumerate(self.lengths)}
        self.good: list[int] = []
        self.bad: dict[int, Exception] = {}
        self.lock = threading.Lock()

    def out(self, frame: int) -> memoryview:
        return memoryview(self.held[frame])

    def deliver(self, frame: int) -> None:
        with self.lock:
            self.good.append(frame)

    def failed(self, frame: int, error: Exception) -> None:
        with self.lock:
            self.bad[frame] = error


def test_each_wanted_frame_is_delivered_once_with_its_bytes() -> None:
    store, snap = Sim(), snapshot({"w": floats(64, 48), "v": floats(40)})
    source = FrameReader(store, saved(store, snap=snap, codec="auto").record)
    wanted = [0, 3, 3, 7, 11, 2]
    frames = Frames(source)
    source.read(wanted, frames.deliver, frames.out)
    assert sorted(frames.good) == [0, 2, 3, 7, 11]
    assert all(frames.held[i] == bytes(snap.frame(i)) for i in set(wanted))


def test_frames_that_lie_together_are_fetched_together() -> None:
    store = Sim()
    source = FrameReader(store, saved(store, pack_bytes=1 << 20).record)
    frames = Frames(source)
    source.read(range(len(frames.lengths)), frames.deliver, frames.out)
    assert len(store.reads) == 1
    assert len(frames.good) == len(frames.lengths)


def test_frames_far_apart_are_fetched_without_what_lies_between() -> None:
    store = Sim()
    snap = snapshot({"w": floats(1 << 17), "x": floats(1 << 17, seed=1)}, frame_bytes=1 << 16)
    source = FrameReader(store, saved(store, snap=snap, pack_bytes=1 << 24).record)
    frames = Frames(source)
    source.read([0, len(frames.lengths) - 1], frames.deliver, frames.out)
    assert sorted(length for _, length in store.reads) == [1 << 16, 1 << 16]


def test_a_get_has_a_limit_and_several_run_at_once() -> None:
    snap = snapshot({"w": floats(10 << 20)}, frame_bytes=4 << 20)
    store = open_memory("memory://large")
    record = saved(store, snap=snap, pack_bytes=1 << 30).record
    meeting = threading.Barrier(2, timeout=60)
    lengths: list[int] = []

    class Meeting(FaultyBackend):
        def get_range(self, key: str, start: int, length: int) -> Any:
            lengths.append(length)
            meeting.wait()  # a single thread would stay here alone
            return store.get_range(key, start, length)

    source = FrameReader(Meeting(store), record)
    frames = Frames(source)
    source.read(range(8), frames.deliver, frames.out)
    assert len(lengths) >= 2
    assert max(lengths) <= reader.GET_BYTES
    assert all(frames.held[i] == bytes(snap.frame(i)) for i in range(8))


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes"])
def test_a_flipped_bit_is_found_wherever_it_is_and_only_its_frame_fails(codec: str) -> None:
    snap = snapshot({"w": Tensor("float32", np.round(floats(16, 24).bits, 1)), "n": Tensor("int64", np.arange(99))})
    store = Sim()
    done = saved(store, codec=codec, snap=snap, pack_bytes=1 << 20)
    ((key, size),) = done.record.packs
    for at in range(0, size, 7):
        spoilt = store.copy()
        spoilt.spoil(key, flip(at))
        source = FrameReader(spoilt, done.record)
        frames = Frames(source)
        source.read(range(len(frames.lengths)), frames.deliver, frames.out, frames.failed)
        place = done.record.places
        hit = [i for i, p in enumerate(place.tolist()) if p[1] <= at < p[1] + p[2]]
        assert list(frames.bad) in ([hit] if codec == "raw" else [hit, []])  # some bits of a coding mean nothing
        assert sorted([*frames.good, *frames.bad]) == list(range(len(frames.lengths)))
        assert all(frames.held[i] == bytes(snap.frame(i)) for i in frames.good)
        assert all(isinstance(e, DamagedData) and key in str(e) for e in frames.bad.values())
        if frames.bad:
            with pytest.raises(DamagedData, match=f"frame {hit[0]}"):
                source.read_bytes(range(len(frames.lengths)))


def test_of_a_truncated_pack_the_frames_before_the_end_are_good() -> None:
    store = Sim()
    done = saved(store, pack_bytes=1 << 20)
    ((key, _),) = done.record.packs
    store.spoil(key, lambda data: data[: 3 * 1024 + 5])
    source = FrameReader(store, done.record)
    frames = Frames(source)
    source.read(range(len(frames.lengths)), frames.deliver, frames.out, frames.failed)
    assert sorted(frames.good) == [i for i, p in enumerate(done.record.places.tolist()) if p[1] + p[2] <= 3 * 1024 + 5]
    assert all(isinstance(error, DamagedData) for error in frames.bad.values())
    assert len(frames.good) + len(frames.bad) == len(frames.lengths)


@pytest.mark.parametrize("error", [AccessDenied, TransientError])
def test_a_store_that_fails_is_told_apart_from_damage(error: type[StorageError]) -> None:
    store = Sim()
    done = saved(store)
    faulty = FaultyBackend(store, [Rule("get_range", Fault.BEFORE, count=99, error=error)])
    with pytest.raises(error):
        FrameReader(faulty, done.record).read_bytes([0, 5])
    frames = Frames(FrameReader(faulty, done.record))
    FrameReader(faulty, done.record).read([0, 5], frames.deliver, frames.out, frames.failed)
    assert sorted(frames.bad) == [0, 5]


def test_a_pack_that_a_record_names_and_that_is_not_there_is_missing() -> None:
    store = Sim()
    done = saved(store)
    lost = done.record.packs[0][0]
    store.delete([lost])
    source = FrameReader(store, done.record)
    every = range(len(done.record.places))
    with pytest.raises(MissingData, match=f"{lost} is missing") as found:
        source.read_bytes(every)
    assert isinstance(found.value.__cause__, NotFound)
    frames = Frames(source)
    source.read(every, frames.deliver, frames.out, frames.failed)
    assert sorted(frames.bad) == [i for i, pack in enumerate(done.record.places["pack"].tolist()) if pack == 0]
    assert all(isinstance(error, MissingData) for error in frames.bad.values())


@pytest.mark.parametrize("which", ["out", "deliver", "failed"])
def test_an_error_of_the_caller_ends_the_read_and_no_call_follows(which: str) -> None:
    store = Sim()
    done = saved(store)
    if which == "failed":
        store.spoil(done.record.packs[0][0], flip(3))
    source = FrameReader(store, done.record, gets=1)
    frames = Frames(source)
    calls: list[str] = []

    def raising(name: str, normal: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            if name == which:
                raise KeyboardInterrupt
            return normal(*args)

        return call

    with pytest.raises(KeyboardInterrupt):
        source.read(
            range(len(frames.lengths)),
            raising("deliver", frames.deliver),
            raising("out", frames.out),
            raising("failed", frames.failed),
        )
    assert calls.count(which) == 1
    assert calls[-1] == which


# --- which checkpoint ------------------------------------------------------------------------------------------------


def test_the_newest_that_can_be_read_is_taken_and_the_others_are_told() -> None:
    store = Sim()
    run = a_run(store, 10, 20, 30, 40)
    store.spoil(keys.record_key(identity(1, 40), "w40"), flip(100))
    store.spoil(store.held(f"data/{identity(1, 30)}/")[1], flip(100))
    assert step_of(run) == 20
    told = [(e.name, e.loud, e.data["identity"]) for e in run.told]  # type: ignore[attr-defined]
    assert told == [("restore.skipped", True, str(identity(1, step))) for step in (40, 30)]


def test_a_second_record_of_a_checkpoint_stands_in_for_a_damaged_one() -> None:
    store = Sim()
    run = a_run(store, 10)
    for writer in ("a", "b"):
        saved(store, 20, writer=writer)
    assert [(ref.identity.version.step, ref.writer) for ref in candidates(run.view())] == [
        (20, "a"),
        (20, "b"),
        (10, "w10"),
    ]
    store.delete([store.held(f"data/{identity(1, 20)}/node/")[0]])
    assert step_of(run) == 20


def test_where_nothing_is_there_it_says_so_and_where_nothing_is_good_it_does_not_say_fresh() -> None:
    store = Sim()
    with pytest.raises(NoCheckpoint):
        step_of(Run(store))
    run = a_run(store, 10)
    store.spoil(keys.record_key(identity(1, 10), "w10"), lambda data: b"")
    with pytest.raises(DamagedData, match=r"none of its newest checkpoints \(1\) can be read"):
        step_of(run)


def test_a_run_whose_newest_claim_cannot_be_read_is_no_fresh_run() -> None:
    store = Sim()
    run = a_run(store, 10)
    store.put(keys.epoch_key(epoch(2)), [b"junk"])
    with pytest.raises(DamagedData, match=str(epoch(2))):
        step_of(run)


def test_a_reader_that_loses_its_checkpoint_to_prune_lists_again_and_takes_the_newer_one() -> None:
    store = Sim()
    run = a_run(store, 10)
    tried: list[int] = []

    def use(record: Any) -> int:
        tried.append(record.identity.version.step)
        if len(tried) == 1:  # meanwhile the job saves, and prunes what this reader holds no lease of
            saved(store, 20)
            pruner = Pruner(Run(store), epoch(1), grace_s=1.0)
            for _ in range(3):
                pruner.execute(pruner.plan(Run(store).view(), Keep(last=1)))
                store.advance(10.0)
        read_all(store, record)
        return int(record.identity.version.step)

    assert use_newest_readable(run, use) == 20
    assert tried == [10, 20]


def test_what_a_newer_ckpt_saved_is_an_error_and_nothing_older_is_taken_for_it() -> None:
    store = Sim()
    run = a_run(store, 10, 20)
    newer(store, keys.record_key(identity(1, 20), "w20"))
    with pytest.raises(NewerFormat, match=r"step 20.*format version 99"):
        step_of(run)
    saved(store, 20, writer="x")  # another record of it, which this ckpt can read
    assert step_of(run) == 20
    assert step_of(a_run(Sim(), 10, 20)) == 20


def newer(store: Sim, key: str) -> None:
    """Makes it a sound record of another format version."""
    version_at, hash_bytes = 8, 16

    def change(data: bytes) -> bytes:
        body = data[:version_at] + b"\x63\x00" + data[version_at + 2 : -hash_bytes]
        return body + xxhash.xxh3_128_digest(body)

    store.spoil(key, change)


# --- values and slabs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("parts", [1, 3, 7])
def test_tensors_come_back_in_slabs_however_they_were_sharded(dim: int, parts: int) -> None:
    store = Sim()
    shape = (13, 11, 17)
    tensors = {
        "w": Tensor("float32", floats(*shape, seed=1).bits, rows(shape, parts, dim)),
        "b": Tensor("bfloat16", np.arange(2431, dtype=np.uint16).reshape(shape), rows(shape, parts, dim)),
        "c": Tensor("complex128", np.ones(5, np.complex128)),
        "0d": floats(),
        "empty": floats(0, 3),
    }
    snap = snapshot(tensors, frame_bytes=256)
    assert same(read_all(store, saved(store, snap=snap, codec="auto").record), snap.tensors)
