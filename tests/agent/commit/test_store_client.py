"""What the agent does with a store that failed before: what a commit refers to, and whose run it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.agent.commit.job_options import JobOptions
from ckpt.agent.commit.store_client import PrunePass, StoreClient
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.clock import Clock
from ckpt.errors import RunInUse, SaveFailed, Superseded, TransientError
from ckpt.events import Event, Events
from ckpt.format.manifest import Codec
from ckpt.policy.save_options import Keep
from ckpt.settings import read_settings
from ckpt.store import keys
from ckpt.store.lineage import Claim
from ckpt.store.run import Run
from ckpt.types import Epoch, Identity, Version
from tests.store.build import Snapshot, Tensor, epoch, floats, snapshot
from tests.store.sim import Fault, Sim
from tests.store.test_run import Beating

FROZEN = floats(40, 24, seed=99)
FROZEN_BYTES = 40 * 24 * 4


class Store(Sim):
    """One that may also fail to read."""

    deaf = False

    def get(self, key: str, size_max: int) -> bytes:
        if self.deaf:
            raise TransientError(f"get {key}")
        return super().get(key, size_max)


class Side(StoreClient):
    """That of an agent whose store the test has made."""

    def __init__(self, store: Sim, clock: Clock | None = None) -> None:
        self.told: list[Event] = []
        events = Events(self.told.append)
        super().__init__(store.url, replace(read_settings(), heartbeat_s=10.0), events, "node")
        self.opened = Run(store, clock, events)

    def open_run(self, impatient: bool = False) -> Run:
        return self.opened


class Memory:
    """The arena in which a snapshot lies."""

    def __init__(self, snap: Snapshot) -> None:
        self.snap = snap

    def part(self, at: tuple[int, int]) -> memoryview:
        return memoryview(self.snap.memory)[at[0] : at[0] + at[1]]


def complete(of: Epoch, step: int) -> MemoryCheckpoint:
    snap = snapshot({"w": floats(32, 16, seed=step), "frozen": FROZEN})
    at = np.array(snap.at, np.int64)
    arenas: Any = {0: Memory(snap)}
    ranks = np.zeros(len(at), np.int64)
    return MemoryCheckpoint(Identity(of, Version(step)), snap.manifest, arenas, ranks, at[:, 0], at[:, 1], {}, ())


def steps(store: Sim) -> list[int]:
    return [ref.identity.version.step for ref in Run(store).view().history]


class Saver:
    def __init__(self, store: Sim, side: Side, claim: Claim) -> None:
        self.store, self.side, self.claim = store, side, claim

    def save(self, step: int) -> int:
        """How many bytes it did not have to write."""
        done = self.side.commit(self.claim, complete(self.claim.epoch, step), JobOptions(codec="raw"), {})
        return done.referred_bytes

    def fail(self, step: int) -> None:
        """Its record is not put."""
        self.store.fault = lambda operation, key: Fault.FAIL if key.startswith(keys.COMMITS) else None
        with pytest.raises(SaveFailed):
            self.save(step)
        self.store.fault = lambda operation, key: None


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def saver(store: Store) -> Saver:
    return Saver(store, Side(store), Claim(epoch(1), None, launch="job"))


def test_a_record_that_landed_although_its_commit_failed_is_what_the_next_one_refers_to(
    store: Store, saver: Saver
) -> None:
    """And not to what was the newest before: a prune may have let that go since."""
    saver.save(100)

    def reply_lost(operation: str, key: str) -> Fault | None:
        store.deaf = key.startswith(keys.COMMITS)
        return Fault.LOST if store.deaf else None

    store.fault = reply_lost
    with pytest.raises(SaveFailed):
        saver.save(200)
    store.fault, store.deaf = lambda operation, key: None, False
    assert steps(store) == [100, 200]
    saver.side.prune(saver.claim.epoch, Keep(last=1))
    assert steps(store) == [200]
    assert [saver.save(step) for step in (300, 400)] == [FROZEN_BYTES] * 2
    assert steps(store) == [200, 300, 400]


def test_after_a_failed_commit_what_has_been_retired_is_referred_to_no_more(store: Store, saver: Saver) -> None:
    saver.save(100)
    saver.fail(200)
    store.put(keys.retired_key(Identity(saver.claim.epoch, Version(100))), [b"{}"])
    assert saver.save(300) == 0
    assert saver.save(400) == FROZEN_BYTES


def test_a_failed_commit_costs_no_full_one_where_what_it_referred_to_is_still_there(store: Store, saver: Saver) -> None:
    saver.save(100)
    saver.fail(200)
    assert saver.save(300) == FROZEN_BYTES


def test_data_that_somebody_removes_is_written_anew_once_and_that_is_told(store: Store, saver: Saver) -> None:
    saver.save(100)
    assert saver.save(200) == FROZEN_BYTES
    store.delete(store.held(f"{keys.DATA}{Identity(saver.claim.epoch, Version(100))}/"))
    assert [saver.save(step) for step in (300, 400)] == [0, FROZEN_BYTES]
    assert [event.name for event in saver.side.told if event.loud] == ["packs.lost"]


def test_a_claim_that_lands_beside_a_commit_is_not_taken_for_lost(
    store: Store, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the commit listed before the claim of this start was there."""
    saver.save(100)
    saver.claim = Claim(epoch(2), Identity(epoch(1), Version(100)), launch="job")
    run = saver.side.opened
    listing = run.epochs

    def overtaken() -> frozenset[Epoch]:
        monkeypatch.setattr(run, "epochs", listing)
        before = listing()
        saver.side.claim(saver.claim)
        return before

    monkeypatch.setattr(run, "epochs", overtaken)
    assert saver.save(200) == FROZEN_BYTES
    assert [event.name for event in saver.side.told if event.loud] == []


A, B = Epoch(5, "a" * 16), Epoch(4, "b" * 16)
WENT_ON = Claim(A, Identity(Epoch(3, "c" * 16), Version(40)), launch="A")  # from memory, while the store was down


class Late:
    """A start that has claimed nothing yet, and another one that the store knows. `lives`: the latter does."""

    def __init__(self, other: Claim, *, lives: bool, closed: bool = False) -> None:
        self.store, self.beats = Sim(), 0
        self.other, self.lives = Run(self.store.client()), lives
        self.epoch = other.epoch
        self.other.put_claim(other)
        self.beat()
        if closed:
            self.other.close_epoch(self.epoch, "it came to its end")
        self.clock = Beating(lambda: self.beat() if lives else None)
        self.side = Side(self.store.client(), self.clock)
        self.side.claims.own_epochs.add(A)

    def beat(self) -> None:
        self.beats += 1
        self.other.put_heartbeat(self.epoch, self.beats, 10.0)

    def save(self, claim: Claim = WENT_ON) -> None:
        Saver(self.store, self.side, claim).save(50)


@pytest.mark.parametrize("number", [4, 5])
def test_a_late_claim_does_not_take_the_run_from_a_living_job_of_another_launch(number: int) -> None:
    """Whose number may be equal, and its nonce smaller."""
    late = Late(Claim(Epoch(number, "0" * 16), None, launch="B"), lives=True)
    with pytest.raises(Superseded, match="'B'"):
        late.save()
    with pytest.raises(Superseded, match="'B'"):
        late.side.claim(WENT_ON)
    late.other.check_not_superseded(late.epoch)
    assert steps(late.store) == []


def test_a_late_claim_takes_the_run_from_who_is_silent_for_two_heartbeats() -> None:
    late = Late(Claim(B, None, launch="B"), lives=False)
    late.save()
    assert late.clock.slept_s == 20.0
    with pytest.raises(Superseded):
        late.other.check_not_superseded(B)


AT_ONCE = [
    "it went on from that one",
    "that one is a start of the same launch",
    "that one has ended",
    "it was to take over",
    "that one was looked at when it began",
    "that one was begun here",
]


@pytest.mark.parametrize("why", AT_ONCE)
def test_a_late_claim_is_made_at_once_where_nobody_lives_whom_it_does_not_know(why: str) -> None:
    launch, ended = "A" if why == "that one is a start of the same launch" else "B", why == "that one has ended"
    late = Late(Claim(B, None, launch=launch), lives=not ended, closed=ended)
    side, claim = late.side, WENT_ON
    if why == "it went on from that one":
        claim = Claim(A, Identity(B, Version(40)), launch="A")
    elif why == "it was to take over":
        side.claims.takeover_epochs.add(A)
    elif why == "that one was looked at when it began":
        side.claims.replaceable_epochs.add(B)
    elif why == "that one was begun here":
        side.claims.own_epochs.add(B)
    late.save(claim)
    assert late.clock.slept_s == 0.0
    assert steps(late.store) == [50]


def test_an_agent_without_a_job_lets_nothing_of_a_living_job_elsewhere_go() -> None:
    late = Late(Claim(B, None, launch="B"), lives=True)
    theirs = Saver(late.store, Side(late.store.client()), Claim(B, None, launch="B"))
    for step in (10, 20):
        theirs.save(step)
    assert late.side.prune(None, Keep(last=1), what=PrunePass.REPORT)["retire"]
    assert late.clock.slept_s == 0.0, "only looking disturbs nobody"
    with pytest.raises(RunInUse, match="'B'"):
        late.side.prune(None, Keep(last=1), what=PrunePass.ALL)
    assert steps(late.store) == [10, 20]


@pytest.mark.parametrize("whose", ["another's that is silent", "another's that has ended", "begun here"])
def test_an_agent_without_a_job_prunes_a_run_that_nobody_is_at_work_on(whose: str) -> None:
    late = Late(Claim(B, None, launch="B"), lives=False, closed=whose == "another's that has ended")
    theirs = Saver(late.store, Side(late.store.client()), Claim(B, None, launch="B"))
    for step in (10, 20):
        theirs.save(step)
    if whose == "begun here":
        late.side.claims.own_epochs.add(B)
    late.side.prune(None, Keep(last=1), what=PrunePass.ALL)
    assert late.clock.slept_s == (20.0 if whose == "another's that is silent" else 0.0)
    assert steps(late.store) == [20]


@pytest.mark.parametrize(
    ("asked", "folder", "memory"), [("auto", Codec.RAW, Codec.PLANES), ("zstd", Codec.ZSTD, Codec.ZSTD)]
)
def test_by_itself_a_local_folder_gets_frames_as_they_are(
    tmp_path: Path, asked: Any, folder: Codec, memory: Codec
) -> None:
    """They come back fastest."""
    bits = np.zeros((64, 64), np.float32)
    snap = snapshot({"w": Tensor("float32", bits)}, frame_bytes=16384)
    for url, codec in ((str(tmp_path), folder), ("memory://by-itself", memory)):
        side = StoreClient(url, read_settings(), Events(), "node")
        done = side.write_packs(Identity(epoch(1), Version(1)), snap.manifest.frames, snap.frame, asked, None)
        assert set(done.places["codec"].tolist()) == {codec}
