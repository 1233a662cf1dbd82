"""Copies and parity under random schedules: nodes are lost, or agents are started again empty, between checkpoints and
while one is replicated, connections end that are there again at once, what is safe is made anew for others,
coordinators that are started again find out what is safe, and a start asks all nodes what they hold while the
coordinator lives on. As long as no more is lost than what was said to be safe can bear, that checkpoint, or a newer
one, comes back bit for bit.

The agents' own code decides, and real bytes are kept (see fleet.py); one seed decides what happens when. Lost and late
messages, and whole starts, are in tests/sim."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from ckpt.agent.snapshots.inventory import Inventory
from ckpt.placement.placement import Parity, Replicas
from ckpt.types import Identity
from tests.agent.nodes.fleet import Fleet
from tests.agent.nodes.staged import EPOCH, identity

SCHEDULES = max(1, int(os.environ.get("CKPT_SIM_SCHEDULES", "4000")) // 20)
GENERATIONS = 6
TOTALS = ("came_back", "made_again", "copied", "failed", "emptied", "found", "unsafe", "surveyed")
SHAPES: tuple[tuple[Parity | Replicas, dict[str, list[int]]], ...] = (
    (Parity(3, 1), {"a": [0], "b": [1], "c": [2], "d": [3]}),
    (Parity(2, 2), {"a": [0], "b": [1], "c": [2], "d": [3]}),
    (Parity(1, 1), {"a": [0, 1], "b": [2], "c": [3]}),
    (Parity(2, 1), {"a": [0], "b": [1], "m": []}),  # the last is a memory-only node
    (Replicas(1), {"a": [0], "b": [1], "c": [2]}),
    (Replicas(1), {"a": [0, 1], "b": [2], "c": [3], "m": []}),
    (Replicas(2), {"a": [0], "b": [1], "c": [2], "d": [3]}),
)


class Schedule:
    """`bears`: how many nodes may be lost; `hit`: those that were lost or emptied since the safe one was made so."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        option, ranks = self.random.choice(SHAPES)
        self.fleet = Fleet(ranks, option)
        self.safe: Identity | None = None
        self.bears = 0
        self.hit: set[str] = set()
        self.failed = self.emptied = self.found = self.unsafe = self.surveyed = 0
        self.came_back = self.made_again = self.copied = 0

    def left(self) -> list[str]:
        return [name for name in self.fleet.ranks if name not in self.fleet.gone]

    def strike(self, spared: str = "") -> None:
        """A node is lost, or its agent is started again and has nothing of what it kept for others."""
        name = self.random.choice([name for name in self.left() if name != spared])
        self.hit.add(name)
        self.fleet.copying.lost()
        if self.random.random() < 0.5:
            self.fleet.restart(name)
            self.emptied += 1
        else:
            self.fleet.gone.add(name)

    def cut(self) -> None:
        """One that loses nothing is not connected for a moment."""
        self.fleet.copying.lost()

    def checkpoint(self, step: int) -> None:
        which, spoils = identity(step), self.random.choice((self.strike, self.cut, None, None, None))
        lead = self.fleet.me
        self.fleet.midst = [lambda: None] * self.random.randint(0, 2)
        if spoils is None:
            self.fleet.midst += self.random.choice(([lambda: self.strike(lead)], [], []))
        known = self.safe
        if known is not None and self.random.random() < 0.2:  # a coordinator that was started again
            found = self.fleet.find(known)
            assert found is not None
            known = found.newest
            self.found += 1
        before = set(self.hit)
        error = self.fleet.protect(which, known, spoils)
        if error:
            self.failed += 1
            self.unsafe += "meanwhile" in error
        else:
            self.safe, self.hit = which, self.hit - before  # what was struck meanwhile may have had it
            self.bears = min(kept.losses_max for kept in self.fleet.placed(which).protected_states)

    def inventory(self, names: Sequence[str]) -> Inventory:
        """What these nodes say together."""
        held = Inventory()
        for name in names:
            held.merge(self.fleet.keeps(name), name)
        return held

    def survey(self, step: int) -> None:
        """A start asks all nodes what lies here, or the coordinator while something is on its way to others. It comes
        to nothing; until then nothing goes of what it was told."""
        names = self.random.choice((self.left(), [self.fleet.me]))
        told: list[Inventory] = []

        def ask() -> None:
            for name in names:
                self.fleet.leases[name].take_lease("start", EPOCH)
            told.append(self.inventory(names))

        self.fleet.midst = [ask]
        if len(names) > 1:
            self.fleet.midst.pop()()
        assert "asked what lies here" in self.fleet.protect(identity(step), self.safe)
        now = self.inventory(names)
        assert all(set(now.holders[key]) >= set(held) for key, held in told[0].holders.items())
        assert all(now.parity_holders[which] == each for which, each in told[0].parity_holders.items())
        for name in names:
            self.fleet.leases[name].end_lease("start")
        self.surveyed += 1

    def look(self) -> None:
        """What a start finds on the nodes that are left."""
        if self.safe is None or len(self.hit) > self.bears:
            return
        held = self.inventory(self.left())
        complete = held.complete_checkpoints()
        assert complete, f"{self.safe} was safe, {self.hit} are hit, and nothing is left"
        newest = complete[-1]
        assert newest >= self.safe, f"{self.safe} was safe, {self.hit} are hit, and {newest} is left"
        missing = held.missing_ranks(newest)
        made = self.fleet.check_rebuild(newest, *missing) if missing else {}
        for name in self.left():
            copies = self.fleet.copies[name].kept.arenas_of(newest)
            self.fleet.check(newest, dict.fromkeys(copies, name))
            self.copied += len(copies.keys() - made.keys())
        self.came_back += 1
        self.made_again += len(made)

    def run(self) -> None:
        for step in range(10, 10 * GENERATIONS + 1, 10):
            if self.random.random() < 0.15:
                self.survey(step - 5)
            self.checkpoint(step)
            while self.random.random() < 0.4 and len(self.left()) > 1:
                self.strike()
            if self.fleet.gone:  # the job is over
                break
        self.look()


@pytest.mark.timeout(900 * max(1, SCHEDULES // 100))
def test_what_was_safe_comes_back_whole_whoever_is_lost_and_whenever() -> None:
    totals = dict.fromkeys(TOTALS, 0)
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except Exception as exc:
            raise AssertionError(f"schedule {seed}: {exc}") from exc
        finally:
            schedule.fleet.close()
        for name in totals:
            totals[name] += getattr(schedule, name)
    if SCHEDULES >= 100:  # they have to reach what they are there for
        assert all(count > SCHEDULES // 10 for count in totals.values()), totals
