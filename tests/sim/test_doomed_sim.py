"""Lives of a job whose machines really go: at the deadline of a notice a node is gone, with its agent, its ranks and
all that it was sending; where the job has not left by then, the launcher ends what is left of it soon after. Whatever
happens:

- what the outcome says to be in the store is there, and so is, in the end, what it says to be in the memory of nodes
  that stay: these commit it, unless one of them goes by a notice that was not heard by then, or its agent is killed;
- who was told to leave leaves, nobody waits for ever, and every agent that is left ends by itself.

A schedule is one seed, as in tests/sim/test_notices_sim.py.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt.ipc.notice_sources import Sources
from ckpt.preemption.notice import Notice
from ckpt.settings import Settings
from ckpt.types import Identity
from tests.sim.jobs import SimRank
from tests.sim.test_notices_sim import LONG_S, SCHEDULES, Life, lived
from tests.sim.world import BEGIN_S, EPOCH_S, World, each_life

LEADS_S = (4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
ENDED_S = 2.0  # from the end of a machine until a launcher has ended the rest


class Doomed(Life):
    """`outcomes`: where it is written what came of it, by node. `told`: that. `going`: the nodes that go.
    `killed_s`: when an agent was killed, Unix time."""

    def __init__(self, world: World, seed: int, settings: Settings) -> None:
        super().__init__(world, seed, settings)
        self.put_s = self.rng.choice((0.02, 0.2, 3.0))  # the last one: other nodes' memory may be all that is reached
        self.trains_s = 300.0
        self.outcomes: dict[int, Path] = {node: self.fabric.folder(node) / "outcome" for node in self.nodes}
        self.told: list[dict[str, Any]] = []
        self.going: list[int] = []
        self.killed_s = -math.inf

    def heard(self, rank: SimRank) -> dict[str, Any]:
        return Sources("given", file=f"/nowhere/{rank.node}", outcome=str(self.outcomes[rank.node])).fields()

    def plan(self) -> None:
        rng, world = self.rng, self.world
        self.going = rng.sample(self.nodes, 2 if len(self.nodes) > 2 and rng.random() < 0.25 else 1)
        for node in self.going:
            at_s, lead_s = rng.uniform(2.0, 20.0), rng.choice(LEADS_S)
            notice = Notice(EPOCH_S + world.now_s - BEGIN_S + at_s + lead_s, "owner", True, f"n{node}", "it goes away")
            world.at(at_s, partial(self.stands[node].__setitem__, "it", notice))
            world.at(at_s + lead_s, partial(self._goes, node))
        if rng.random() < 0.3:
            world.at(rng.uniform(2.0, 60.0), lambda: self._break(self._kill))

    def _kill(self) -> None:
        self.killed_s = EPOCH_S + self.world.now_s - BEGIN_S
        super()._kill()

    def _goes(self, node: int) -> None:
        assert self.job is not None
        for rank in self.job.ranks:
            if rank.node == node:
                rank.die()
        self.fabric.lose(node)
        self.job.die(ENDED_S)

    def run(self) -> Counter[str]:
        seen: Counter[str] = Counter()
        self.plan()
        job = self.launch()
        self.world.run(lambda: all(rank.over for rank in job.ranks), LONG_S)
        assert len({each for each in job.left.values() if each[0]}) <= 1, f"not at one step: {job.left}"
        self.world.run(lambda: all(a.closed or a in self.world.dead for a in self.fabric.ever), LONG_S)
        self.told = [json.loads(path.read_text()) for path in self.outcomes.values() if path.exists()]
        for told in self.told:
            seen[f"{told['how']}, {told['level']}"] += 1
        return seen

    def check(self, committed: list[Identity]) -> None:
        newest = max((identity.version.step for identity in committed), default=-1)
        for told in self.told:
            there = [told["committed_step"]] + [told["step"]] * (told["level"] == "store")
            if len(told["notices"]) == len(self.going) and self.killed_s < told["time_s"]:
                there += [told["peer_step"]] + [told["step"]] * (told["level"] == "peer")
            assert newest >= max((step for step in there if step is not None), default=-1), (told, committed)


def live(seed: int) -> Counter[str]:
    return lived(Doomed, seed)


@pytest.mark.timeout(300 * max(1, SCHEDULES // 250))
@pytest.mark.parametrize("part", range(10))
def test_what_is_said_to_be_saved_outlives_the_machines_that_go(part: int) -> None:
    each_life(live, SCHEDULES // 2, part)
