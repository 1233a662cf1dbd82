"""Lives of a job whose machines are taken away at the deadline that their owner has given, whether it has left by then
or not: 2 to 40 s, which is enough for a commit, for a copy to a node that stays, or for neither.

What was said to be committed, or to be safe in so many nodes' memory as were not lost, is what the next start goes on
from, or something newer; whoever was told to leave comes to its end though the machine that was to go has gone; and
every agent ends by itself.

A schedule is one seed. CKPT_SIM_SCHEDULES: two hundred times how many; CKPT_TEST_SEED: the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import ckpt.preemption.detect
from ckpt.ipc.notice_sources import Sources
from ckpt.preemption.notice import Notice
from ckpt.settings import Settings
from ckpt.types import Version
from tests.sim.jobs import SimJob, SimListener, SimRank
from tests.sim.test_losses_sim import LONG_S, SCHEDULES, Life, live
from tests.sim.world import BEGIN_S, EPOCH_S, World, each_life

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

    def live(self, run: Callable[[], Counter[str]] | None = None) -> Counter[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ckpt.preemption.detect, "listeners", self.listeners)
            return super().live(run)

    def ends(self, job: SimJob, number: int, seen: Counter[str]) -> None:
        self._pass(self.rng.expovariate(0.2), job)
        self._goes(job, seen)

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
        committed = [answer["committed"] for answer in job.answers.values() if answer.get("committed")]
        self.stored = max(self.stored, self.told(job, "store"), *(Version.parse(each).step for each in committed))
        self.safe = max(self.stored, self.told(job, "peer"), self.safe if self._is_again(job) else 0)


@pytest.mark.timeout(300 * max(1, SCHEDULES // 50))
@pytest.mark.parametrize("part", range(10))
def test_lives(part: int) -> None:
    each_life(lambda seed: live(seed, Taken), SCHEDULES, part)
