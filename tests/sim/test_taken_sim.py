"""Lives of a job whose machines are taken away at the deadline that their owner has given, whether it has left by then
or not: 2 to 40 s, which is enough for a commit, for a copy to a node that stays, or for neither.

What was said to be committed, or to be safe in so many nodes' memory as were not lost, is what the next start goes on
from, or something newer; whoever was told to leave comes to its end though the machine that was to go has gone; and
every agent ends by itself.

A schedule is one seed. CKPT_SIM_SCHEDULES: two hundred times how many; CKPT_TEST_SEED: the first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import ckpt.notices.cloud
from ckpt.agent.listening import Sources
from ckpt.backends import memory
from ckpt.notices.notice import Notice
from ckpt.settings import Settings, read
from ckpt.types import Tick
from tests.agent.nodes.cluster import line
from tests.sim.jobs import SimJob, SimListener, SimRank
from tests.sim.test_losses_sim import LONG_S, SCHEDULES, Life
from tests.sim.world import BEGIN_S, EPOCH_S, World, each_life, living

LEADS_S = (2.0, 5.0, 10.0, 20.0, 40.0)


class Taken(Life):
    """One schedule. `stands`: by node, what its machine's owner says. `stored`: the newest step that was said to be in
    the store."""

    def __init__(self, world: World, seed: int, settings: Settings) -> None:
        super().__init__(world, seed, settings)
        self.stands: dict[int, dict[str, Notice]] = {}
        self.stored = 0

    def listeners(self, *given: Any, **named: Any) -> list[SimListener]:
        return [SimListener(self.stands.setdefault(int(named["file"].name), {}), named["first"])]

    def before_it_starts(self, rank: SimRank) -> None:
        rank.notices = Sources("given", file=f"/nowhere/{rank.node}").fields()

    def run(self) -> Counter[str]:
        seen: Counter[str] = Counter()
        starts = self.rng.choice((2, 2, 3))
        for number in range(starts):
            job = self.begin(seen)
            if number == starts - 1:
                break
            self._pass(self.rng.expovariate(0.2), job)
            self._goes(job, seen)
        self.refuses = False
        self.all_end(job)
        return seen

    def _goes(self, job: SimJob, seen: Counter[str]) -> None:
        """A node does, by its deadline. Its launcher ends who is still there, unless all of them leave."""
        world, node, lead_s = self.world, self.rng.choice(self.nodes), self.rng.choice(LEADS_S)
        deadline_s = world.now_s + lead_s
        notice = Notice(EPOCH_S - BEGIN_S + deadline_s, "owner", True, f"n{node}", "it goes away")
        self.stands.setdefault(node, {})[notice.key] = notice
        world.at(lead_s, lambda: None)
        world.run(lambda: world.now_s >= deadline_s, LONG_S)
        self.take_away(job, node)
        self.nodes.remove(node)
        self.note(job)
        leave = {leave for leave, _ in job.left.values()}
        assert len(leave) <= 1, f"some leave and some do not: {job.left}"
        if len(job.left) == len(job.ranks) and leave == {True}:
            stay = [rank for rank in job.ranks if rank.node != node]
            world.run(lambda: all(rank.rank in job.answers for rank in stay), LONG_S)
            seen["left in time" if len(job.answers) == len(job.ranks) else "left"] += 1
        else:
            seen["came to its end" if leave else "was too slow"] += 1
            job.die(self.rng.choice((0.01, 1.0)))
        self.wait(self.rng.uniform(1.0, 10.0))
        self.note(job)
        self.replace_some()

    def note(self, job: SimJob) -> None:
        """What was said to be safe. What the start before has left is so in memory once it has as many copies again, or
        is known to be in the store."""
        told = {
            level: max(
                (
                    Tick.parse(tick).step
                    for rank in job.ranks
                    for (tick, where), (ok, _) in rank.levels.items()
                    if ok and where == level
                ),
                default=0,
            )
            for level in ("peer", "store")
        }
        committed = [answer["committed"] for answer in job.answers.values() if answer.get("committed")]
        self.stored = max(self.stored, told["store"], *(Tick.parse(each).step for each in committed))
        self.safe = max(self.stored, told["peer"], self.safe if self._is_again(job) else 0)


def live(seed: int) -> Counter[str]:
    with living(seed) as world, pytest.MonkeyPatch.context() as patch:
        life = Taken(world, seed, replace(read(), notices="off"))
        patch.setattr(ckpt.notices.cloud, "listeners", life.listeners)
        seen = life.live()
        seen["alarms"] = life.alarmed
    line(life.url)
    del memory._STORES[life.url]
    seen["happened"] = world.happened
    return seen


@pytest.mark.parametrize("part", range(10))
def test_lives(part: int) -> None:
    each_life(live, SCHEDULES, part)
