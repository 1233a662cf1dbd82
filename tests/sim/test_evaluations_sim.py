"""Lives of a job whose machine goes in a long evaluation with polls, with a certain notice, with one that is not, or
with none, after shorter ones like it. What it goes on from is of the last step that had ended, though the last snapshot
was to be taken by the clock behind the evaluation. No rank waits for another in one: those of some nodes are quicker.

A schedule is one seed, as in tests/sim/test_notices_sim.py.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from ckpt.agent.state.step_timing import LONG_FACTOR, STEP_S
from ckpt.preemption.notice import Notice
from ckpt.settings import Settings
from ckpt.types import Identity
from tests.agent import fake
from tests.sim.jobs import SimRank
from tests.sim.test_doomed_sim import Doomed
from tests.sim.test_notices_sim import SCHEDULES, lived
from tests.sim.world import BEGIN_S, EPOCH_S, World, each_life

LASTS_S, SHORTER_S = 200.0, 40.0
SAVES_S = 10.0  # so long nothing takes from when it is staged until it is in the store


class Evaluated(Doomed):
    def __init__(self, world: World, seed: int, settings: Settings) -> None:
        super().__init__(world, seed, settings)
        rng = self.rng
        self.put_s, self.step_s = rng.choice((0.02, 0.3)), rng.choice((0.3, 1.0, 3.0))
        seconds, apart_s, self.before = rng.choice((1.0, 8.0, 20.0)), rng.uniform(0.2, 2.0), rng.randint(20, 30)
        self.options = {**fake.OPTIONS, "policy": {"steps": None, "seconds": seconds}}
        self.evaluations = {self.before: [apart_s] * round(LASTS_S / apart_s)}
        for earlier in range(rng.randint(0, 2)):
            self.evaluations[self.before - 8 * (1 + earlier)] = [apart_s] * round(SHORTER_S / apart_s)
        self.takes = {node: rng.choice((1.0, 0.9)) for node in self.nodes}  # of the time
        due_s = max(seconds, (LONG_FACTOR + 1) * max(STEP_S, self.step_s))
        self.goes_s = rng.uniform(due_s + 6 * apart_s + SAVES_S, 0.8 * LASTS_S)  # after the evaluation has begun

    def plan(self) -> None:
        """All of it is, once the evaluation begins."""

    def polls_s(self, rank: SimRank) -> list[float]:
        if rank.step + 1 == self.before and not self.notices:
            with self.world.owned_by(None):
                self._evaluates()
        return [self.takes[rank.node] * each_s for each_s in super().polls_s(rank)]

    def _evaluates(self) -> None:
        rng, world = self.rng, self.world
        node, lead_s = rng.choice(self.nodes), rng.choice((0.0, 4.0, 15.0, 30.0))
        deadline_s = EPOCH_S + world.now_s - BEGIN_S + self.goes_s
        notice = Notice(deadline_s, "owner", rng.random() < 0.5, "n", "it goes away")
        self.notices.append((world.now_s, notice, None))
        if lead_s:
            world.at(max(0.0, self.goes_s - lead_s), partial(self.stands[node].__setitem__, "it", notice))
        world.at(self.goes_s, partial(self._goes, node))

    def check(self, committed: list[Identity]) -> None:
        super().check(committed)
        newest = max((identity.version.step for identity in committed), default=-1)
        assert newest == self.before - 1, (newest, self.before, self.goes_s, self.notices, self.options["policy"])


def live(seed: int) -> Counter[str]:
    return lived(Evaluated, seed)


@pytest.mark.parametrize("part", range(10))
def test_a_machine_that_goes_in_an_evaluation_with_polls_takes_no_step_with_it(part: int) -> None:
    each_life(live, SCHEDULES // 4, part)
