"""What the agent does with a store that failed before: what a commit refers to, and whose run it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpt.agent.checkpoint import Checkpoint
from ckpt.agent.storeside import Options, StoreSide
from ckpt.errors import SaveFailed, TransientError
from ckpt.events import Event, Events
from ckpt.policy.every import Keep
from ckpt.settings import read
from ckpt.store import keys
from ckpt.store.lineage import Claim
from ckpt.store.run import Run
from ckpt.types import Epoch, Identity, Tick
from tests.store.build import Snapshot, epoch, floats, snapshot
from tests.store.sim import Fault, Sim

FROZEN = floats(40, 24, seed=99)
FROZEN_BYTES = 40 * 24 * 4


class Store(Sim):
    """One that may also fail to read."""

    deaf = False

    def get(self, key: str, size_max: int) -> bytes:
        if self.deaf:
            raise TransientError(f"get {key}")
        return super().get(key, size_max)


class Side(StoreSide):
    """That of an agent whose store the test has made."""

    def __init__(self, store: Sim, heartbeat_s: float = 0.05) -> None:
        self.told: list[Event] = []
        events = Events(self.told.append)
        super().__init__(store.url, replace(read(), heartbeat_s=heartbeat_s), events, "node")
        self.opened = Run(store, events=events)

    def run(self, impatient: bool = False) -> Run:
        return self.opened


class Memory:
    """The arena in which a snapshot lies."""

    def __init__(self, snap: Snapshot) -> None:
        self.snap = snap

    def part(self, at: tuple[int, int]) -> memoryview:
        return memoryview(self.snap.memory)[at[0] : at[0] + at[1]]


def complete(of: Epoch, step: int) -> Checkpoint:
    snap = snapshot({"w": floats(32, 16, seed=step), "frozen": FROZEN})
    at = np.array(snap.at, np.int64)
    arenas: Any = {0: Memory(snap)}
    ranks = np.zeros(len(at), np.int64)
    return Checkpoint(Identity(of, Tick(step)), snap.manifest, arenas, ranks, at[:, 0], at[:, 1], {}, ())


def steps(store: Sim) -> list[int]:
    return [ref.identity.tick.step for ref in Run(store).view().line]


class Saver:
    def __init__(self, store: Sim, side: Side, claim: Claim) -> None:
        self.store, self.side, self.claim = store, side, claim

    def save(self, step: int) -> int:
        """How many bytes it did not have to write."""
        done = self.side.commit(self.claim, complete(self.claim.epoch, step), Options(codec="raw"), {})
        return done.referred_bytes


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
    store.fault = lambda operation, key: Fault.FAIL if key.startswith(keys.COMMITS) else None
    with pytest.raises(SaveFailed):
        saver.save(200)
    store.fault = lambda operation, key: None
    store.put(keys.retired_key(Identity(saver.claim.epoch, Tick(100))), [b"{}"])
    assert saver.save(300) == 0
    assert saver.save(400) == FROZEN_BYTES


def test_a_failed_commit_costs_no_full_one_where_what_it_referred_to_is_still_there(store: Store, saver: Saver) -> None:
    saver.save(100)
    store.fault = lambda operation, key: Fault.FAIL if key.startswith(keys.COMMITS) else None
    with pytest.raises(SaveFailed):
        saver.save(200)
    store.fault = lambda operation, key: None
    assert saver.save(300) == FROZEN_BYTES
