"""Random histories of saves, faults, restarts, branches, zombies and deletion, against a model that is a dict."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt.errors import SaveFailed, Superseded
from ckpt.events import Event, Events
from ckpt.policy.save_options import Keep
from ckpt.store.branch import branch
from ckpt.store.commit import Committer
from ckpt.store.keys import COMMITS, new_writer
from ckpt.store.lineage import Ancestor, Claim
from ckpt.store.prune import Pruner
from ckpt.store.reader import candidates, open_record, use_newest_readable
from ckpt.store.run import Run
from ckpt.types import Epoch, Identity, Version
from tests.store.build import Snapshot, Tensor, read_all, same, snapshot
from tests.store.sim import Crash, Fault, Sim

GRACE_S = 100.0
Content = dict[str, int]  # tensor: what it is filled with


def snapshot_of(content: Content) -> Snapshot:
    return snapshot({name: Tensor("int32", np.arange(300, dtype=np.int32) * fill) for name, fill in content.items()})


class Histories(RuleBasedStateMachine):
    """`memory`: every checkpoint that was ever taken, committed or not. `committed`: those whose record is in the
    store. `parents`: each epoch's fork point. `pending`: commits whose record may still land."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Sim()
        self.memory: dict[Identity, Content] = {}
        self.committed: set[Identity] = set()
        self.retired: set[Identity] = set()
        self.parents: dict[Epoch, Identity | None] = {}
        self.claimed: set[Epoch] = set()
        self.epoch = Epoch(0, "0" * 16)
        self.version = Version(0)
        self.state: Content = {}
        self.pending: list[tuple[Sim, Identity]] = []

    @initialize(honest=st.booleans())
    def begin(self, honest: bool) -> None:
        self.store = Sim(honest=honest)
        self.state = {"frozen": 1, "a": 2, "b": 3}
        self.start(None, claim=True)

    def start(self, parent: Identity | None, claim: bool) -> None:
        self.epoch = Run(self.store).view().new_epoch(self.parents)
        self.parents[self.epoch] = parent
        self.version = Version(parent.version.step if parent else 0)
        self.state = dict(self.memory[parent]) if parent else self.state
        if claim:
            self.claim()

    def claim(self) -> None:
        chain = []
        parent = self.parents[self.epoch]
        while parent is not None and parent.epoch not in self.claimed:
            chain.append(Ancestor(parent.epoch, self.parents[parent.epoch]))
            parent = self.parents[parent.epoch]
        Run(self.store).put_claim(Claim(self.epoch, self.parents[self.epoch], tuple(chain), "job"))
        self.claimed.add(self.epoch)

    def line(self) -> list[Identity]:
        """By a walk back from the newest epoch, newest first."""
        found = []
        at: Epoch | None = max(self.claimed)
        limit = Version(10**9)
        while at is not None:
            live = self.committed - self.retired
            found += sorted((i for i in live if i.epoch == at and i.version <= limit), reverse=True)
            parent = self.parents[at]
            at, limit = (parent.epoch, parent.version) if parent else (None, limit)
        return found

    # --- what a job does

    @rule(changes=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 3)), steps=st.integers(1, 3))
    def train(self, changes: Content, steps: int) -> None:
        self.state = {**self.state, **changes}
        self.version = Version(self.version.step + steps)

    @rule(
        fault=st.sampled_from([None, None, *Fault]),
        at=st.integers(0, 4),
        dedup=st.booleans(),
        codec=st.sampled_from(["raw", "auto"]),
    )
    def save(self, fault: Fault | None, at: int, dedup: bool, codec: Any) -> None:
        self.version = Version(self.version.step, self.version.sub + 1)
        if self.epoch not in self.claimed:
            self.claim()
        self.commit(Identity(self.epoch, self.version), fault, at, dedup, codec)

    def commit(self, identity: Identity, fault: Fault | None, at: int, dedup: bool, codec: Any) -> None:
        client = self.store.client()
        run = Run(client)
        view = run.view()
        base = open_record(client, view.history[-1]) if dedup and view.history else None
        self.memory[identity] = dict(self.state)
        snap = snapshot_of(self.state)
        count = [at]

        def plan(operation: str, key: str) -> Fault | None:
            count[0] -= 1
            return fault if count[0] == -1 or (fault is Fault.CRASH and count[0] < 0) else None

        client.fault = plan
        committer = Committer(client, new_writer(), codec, pack_bytes=1024)
        try:
            committer.commit(
                identity, snap.manifest, snap.frame, check=lambda: run.check_not_superseded(identity.epoch), base=base
            )
        except (SaveFailed, Crash):
            if client.late:
                self.pending.append((client, identity))
        except Superseded:
            assert max(self.claimed) > identity.epoch
        else:
            assert max(self.claimed) == identity.epoch
            self.committed.add(identity)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """A put that failed lands after all. Only a record makes a checkpoint of it."""
        client, identity = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        before = set(self.store.held(COMMITS))
        client.crashed = False
        client.land()
        if set(self.store.held(COMMITS)) - before:
            self.committed.add(identity)

    # --- what happens to it

    @rule(claim=st.booleans())
    def restart_from_the_store(self, claim: bool) -> None:
        line = self.line()
        self.start(line[0] if line else None, claim=claim or not line)

    @precondition(lambda self: any(i.epoch == self.epoch for i in self.memory))
    @rule(claim=st.booleans())
    def restart_from_memory(self, claim: bool) -> None:
        """The newest checkpoint of this epoch, which may never have been committed."""
        self.start(max(i for i in self.memory if i.epoch == self.epoch), claim=claim)

    @precondition(lambda self: self.line())
    @rule(data=st.data())
    def branch_off(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.committed - self.retired)))
        made = branch(Run(self.store), at)
        self.parents[made.epoch] = at
        self.claimed.add(made.epoch)
        self.start(at, claim=True)

    @rule(dedup=st.booleans())
    def zombie_tries_to_save(self, dedup: bool) -> None:
        older = sorted(e for e in self.claimed if e < max(self.claimed))
        if older:
            self.commit(Identity(older[-1], Version(10**6)), None, 0, dedup, "raw")
            assert Identity(older[-1], Version(10**6)) not in self.committed

    @rule(last=st.integers(1, 3), passes=st.integers(1, 3))
    def prune(self, last: int, passes: int) -> None:
        run = Run(self.store)
        pruner = Pruner(run, max(self.claimed), grace_s=GRACE_S)
        for _ in range(passes):
            keep = Keep(last=last)
            plan = pruner.plan(run.view(), keep)
            line = self.line()
            steps = sorted({each.version.step for each in line}, reverse=True)[:last]
            kept = {next(each for each in line if each.version.step == step) for step in steps}
            assert set(plan.retire) == set(line) - kept
            assert plan.blocked == ""
            pruner.execute(plan)
            self.retired |= {*plan.retire, *plan.abandoned}
            self.store.advance(2 * GRACE_S)

    # --- what always holds

    @invariant()
    def a_start_finds_the_newest_of_the_line_bit_for_bit(self) -> None:
        if not self.claimed:
            return
        told: list[Event] = []
        run = Run(self.store, events=Events(told.append))
        view = run.view()
        assert [ref.identity for ref in reversed(view.history)] == self.line()
        assert {ref.identity for ref in (*view.history, *view.branches)} == self.committed - self.retired
        if view.history:
            found, tensors = use_newest_readable(run, lambda record: (record.identity, read_all(self.store, record)))
            assert found == self.line()[0]
            assert same(tensors, snapshot_of(self.memory[found]).tensors)
        assert told == []

    def teardown(self) -> None:
        """Whatever is listed at the end restores, branches too."""
        if not self.claimed:
            return
        view = Run(self.store).view()
        for ref in (*candidates(view), *view.branches):
            tensors = read_all(self.store, open_record(self.store, ref))
            assert same(tensors, snapshot_of(self.memory[ref.identity]).tensors)


TestHistories = Histories.TestCase
# Shrinking a failure takes longer than a test may; add Phase.shrink to do so by hand.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, phases=PHASES)
