"""Lives of a job of several nodes, whole agents and all: notices that come to any of them, agents that die,
connections that are cut, slow stores, slow steps, evaluations with polls, and the same job started again on machines
that are about to go. Whatever happens, in whichever order:

- all ranks leave at one step, or none does;
- they leave only by a notice that is certain and stands; where nothing breaks they do in time, and it is committed;
- by what a start has left the next one does not leave again;
- nobody waits for ever, and every agent ends by itself;
- what was said to be committed is in the store, whole.

A schedule is one seed. CKPT_SIM_SCHEDULES: forty times how many; CKPT_TEST_SEED: the first.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import ckpt.preemption.detect
from ckpt.backends import memory
from ckpt.backends.memory import MemoryBackend
from ckpt.errors import CkptError
from ckpt.ipc import secret
from ckpt.ipc.notice_sources import Sources
from ckpt.preemption.notice import Notice
from ckpt.settings import Settings, read_settings
from ckpt.types import Identity, Version
from tests.agent import fake
from tests.agent.nodes.cluster import line
from tests.sim.agents import Fabric, SimConnection
from tests.sim.jobs import SimJob, SimListener, SimRank
from tests.sim.world import BEGIN_S, EPOCH_S, World, each_life, living

SCHEDULES = max(20, int(os.environ.get("CKPT_SIM_SCHEDULES", "4000")) // 40)
SPREADS = ((0, 1), (0, 0, 1, 1), (0, 1, 1), (0, 1, 2), (0, 0, 1, 2))
LONG_S = 600.0  # nothing takes longer than that
SOON_S = 28.0  # with so much time, and nothing that breaks, a job of such a size has left by then
ENTERS_S = 10.0  # it trains after that
BACK_S = 15.0  # from something that broke until all know again what stands
LATE_S = 5.0  # so much later what was taken back is known to be


class Life:
    """One schedule. `faults`: whether an agent or a connection goes, or a rank takes long over a step."""

    def __init__(self, world: World, seed: int, settings: Settings) -> None:
        self.world, rng = world, random.Random(seed)
        self.rng = rng
        self.url = f"memory://life-{seed}"
        self.fabric = Fabric(world, self.url, replace(settings, linger_s=20.0))
        self.spread = rng.choice(SPREADS)
        self.nodes = sorted(set(self.spread))
        self.fabric.local_delay_s = 10 ** rng.uniform(-4.5, -2)
        self.fabric.link_delay_s = 10 ** rng.uniform(-4, -1.3)
        self.put_s = 10 ** rng.uniform(-3, 0)
        self.trains_s = rng.choice((rng.uniform(10.0, 150.0), 150.0))
        self.step_s = self.trains_s / rng.uniform(40, 120)
        self.broke_s = -LONG_S  # when something did last, or ends doing so
        self.faults = False
        self.held_s = 0.0  # when a rank first did
        self.on_hold: list[tuple[str, Callable[[], None]]] = []  # what breaks then
        self.stands: dict[int, dict[str, Notice]] = {node: {} for node in self.nodes}
        self.notices: list[tuple[float, Notice, float | None]] = []  # from when, what, and when taken back
        self.operator: list[float] = []
        self.slow: dict[int, float] = {}  # by rank: seconds that its next step takes more
        self.evaluations: dict[int, list[float]] = {}  # before which step: the seconds up to each poll
        for _ in range(rng.choice((0, 1, 2))):
            step, polls, apart_s = rng.randrange(1, 60), rng.randint(2, 40), 10 ** rng.uniform(-1, 0.3)
            self.evaluations[step] = [rng.uniform(0.5, 1.0) * apart_s for _ in range(polls)]
        steps, seconds = rng.choice(((3, None), (10, None), (1000, None), (None, 1.0), (None, 10.0)))
        self.options = {**fake.OPTIONS, "policy": {"steps": steps, "seconds": seconds}}
        if rng.random() < 0.5:
            self.options["peers"] = {"replicas": 1}
        self.key = secret.make_secret()
        self.job: SimJob | None = None

    # -- what happens

    def plan(self) -> None:
        rng, world = self.rng, self.world
        for number in range(rng.choice((0, 1, 1, 1, 1, 2, 3))):
            self._warn(rng.uniform(0.0, 15.0), f"n{number}")
        if rng.random() < 0.15:
            world.at(rng.uniform(1.0, 15.0), lambda: world.spawn("operator", self._preempt))
        if rng.random() < 0.6:
            self.faults = True
            for _ in range(rng.choice((1, 1, 2))):
                often = (self._kill_cut, self._hang_up)
                what = rng.choice((*often, *often, self._kill, self._cut, self._linger))
                if rng.random() < 0.4:
                    world.at(rng.uniform(0.5, 20.0), lambda what=what: self._break(what))
                else:
                    self.on_hold.append((rng.choice(("holds", "told", "asks")), what))

    def _warn(self, at_s: float, key: str) -> None:
        rng, world = self.rng, self.world
        node, certain = rng.choice(self.nodes), rng.random() < 0.8
        lead_s = rng.choice((2.0, 5.0, 15.0, 30.0, 60.0, 60.0, 120.0, 240.0))
        notice = Notice(EPOCH_S + world.now_s - BEGIN_S + at_s + lead_s, "owner", certain, key, "it goes away")
        back_s = at_s + rng.uniform(0.0, lead_s) if rng.random() < 0.35 else None
        self.notices.append((world.now_s + at_s, notice, world.now_s + back_s if back_s is not None else None))
        world.at(at_s, lambda: self.stands[node].__setitem__(key, notice))
        if back_s is not None:
            world.at(back_s, lambda: self.stands[node].__delitem__(key))

    def _preempt(self) -> None:
        """An operator, on some node. Where no job runs it is refused."""
        agent = self.fabric.agents.get(self.rng.choice(self.nodes))
        with contextlib.suppress(CkptError):
            if agent is not None:
                tool = SimConnection(
                    agent, self.fabric.pid(), lambda message: message.close(), lambda why: None, "tool"
                )
                self.operator.append(self.world.now_s)
                tool.request("preempt", {"source": "me", "deadline_s": 60.0})
                tool.close()

    def _break(self, what: Callable[[], None]) -> None:
        """While it trains or ends: a start that meets with it fails, and is for a launcher to repeat."""
        if self.job is None or not (self.job.trains or self.job.left):
            self.world.at(1.0, lambda: self._break(what))
        elif not self.job.is_over:
            self.broke_s = max(self.broke_s, self.world.now_s)
            what()

    def _holds(self, what: str) -> None:
        """A rank does, or is told the verdict, or asks to leave."""
        if what == "holds":
            self.held_s = self.held_s or self.world.now_s
        for each in [each for each in self.on_hold if each[0] == what]:
            self.on_hold.remove(each)
            with self.world.owned_by(None):
                self.world.at(self.rng.choice((0.0, self.rng.expovariate(1 / self.fabric.link_delay_s))), each[1])
            self.broke_s = self.world.now_s

    def _kill(self) -> None:
        self.fabric.kill(self.rng.choice((self.spread[0], *self.nodes)))

    def _kill_cut(self) -> None:
        """What the coordinator had sent is lost with it."""
        self.fabric.lose(self.spread[0])

    def _cut(self) -> None:
        if self.fabric.channels:
            channel = self.rng.choice(self.fabric.channels)
            self.fabric.cut(channel.agent_name, channel.peer)

    def _hang_up(self) -> None:
        agent = self.fabric.agents.get(self.rng.choice(self.nodes))
        if agent is not None and agent.server.peers:
            peer = self.rng.choice(list(agent.server.peers))
            agent.happens(lambda: peer.disconnect())

    def _linger(self) -> None:
        """A rank takes long over a step, as over an evaluation."""
        self.slow[self.rng.randrange(len(self.spread))] = slow_s = self.rng.uniform(1.0, 20.0)
        self.broke_s = max(self.broke_s, self.world.now_s + slow_s)

    def pace(self, rank: SimRank) -> float:
        return self.rng.uniform(0.8, 1.2) * self.step_s + self.slow.pop(rank.rank, 0.0)

    def polls_s(self, rank: SimRank) -> list[float]:
        return self.evaluations.get(rank.step + 1, [])

    def heard(self, rank: SimRank) -> dict[str, Any]:
        """Where its agent is to listen."""
        return Sources("given", file=f"/nowhere/{rank.node}").fields()

    def listeners(self, *given: Any, **named: Any) -> list[SimListener]:
        return [SimListener(self.stands[int(named["file"].name)], named["first"])]

    # -- a life

    def run(self) -> Counter[str]:
        seen: Counter[str] = Counter()
        self.plan()
        first = self._start(seen)
        left = first.left[0]
        if left[0] and self.rng.random() < 0.5:
            seen["again"] += 1
            self._goes_on(first, self._start(seen))
        self.world.run(lambda: all(a.closed or a in self.world.dead for a in self.fabric.ever), LONG_S)
        return seen

    def check(self, committed: list[Identity]) -> None:
        """Once all is over. `committed`: what a restart would go on from."""

    def launch(self) -> SimJob:
        job = self.job = SimJob(self.fabric, self.spread, self.key, self.options)
        for rank in job.ranks:
            rank.on_hold = self._holds
            rank.notices = self.heard(rank)
        self.held_s = 0.0
        job.start(round(self.trains_s / self.step_s), self.pace, self.polls_s)
        return job

    def _start(self, seen: Counter[str]) -> SimJob:
        began_s = self.world.now_s
        job = self.launch()
        self.world.run(lambda: job.is_over, LONG_S)
        outcomes = set(job.left.values())
        assert len(outcomes) == 1, f"some leave and some do not, or at another step: {job.left}"
        leave, step = next(iter(outcomes))
        seen["left" if leave else "stayed"] += 1
        if leave and not self.operator:
            stood = [each for each in self.notices if each[1].certain and each[0] <= job.left_s]
            stood = [each for each in stood if each[2] is None or self.held_s <= self._known_s(each[2])]
            assert stood, f"nothing made them leave after {self.held_s}: {self.notices}"
        if not self.faults:
            committed = {Version.parse(answer["committed"]).step for answer in job.answers.values()}
            assert committed == {step}, (committed, step, job.answers)
        if not seen["again"]:
            for from_s, notice, back_s in self.notices:
                deadline_s = notice.deadline_s - EPOCH_S + BEGIN_S
                if (
                    notice.certain
                    and back_s is None
                    and deadline_s - max(began_s + ENTERS_S, from_s, self.broke_s) >= SOON_S
                ):
                    assert job.left_s < deadline_s, f"they have not left by {notice}"
                    seen["in time"] += leave
        return job

    def _known_s(self, back_s: float) -> float:
        """Until when a rank may hold by what was taken back then."""
        return max(back_s, self.broke_s + BACK_S) + LATE_S + 3 * self.step_s

    def _goes_on(self, first: SimJob, again: SimJob) -> None:
        restored = again.restored_step
        if not self.faults:
            assert restored == first.left[0][1]
        certain = [n for _, n, _ in self.notices if n.certain]
        if len(certain) == 1 and not (self.operator or self.faults):
            assert not again.left[0][0], "it leaves again by what it has left by"


def live(seed: int) -> Counter[str]:
    return lived(Life, seed)


def lived(kind: type[Life], seed: int) -> Counter[str]:
    settings = replace(read_settings(), notices="off")
    with living(seed) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "ROWS", 4)
        patch.setattr("ckpt.agent.runtime.memory_plan.free_bytes", lambda: 8 << 30)
        life = kind(world, seed, settings)
        patch.setattr(ckpt.preemption.detect, "listeners", life.listeners)
        put = MemoryBackend.put

        def slow(backend: MemoryBackend, *given: Any, **named: Any) -> None:
            if world.current is not None:
                time.sleep(life.rng.expovariate(1 / life.put_s))
            put(backend, *given, **named)

        patch.setattr(MemoryBackend, "put", slow)
        try:
            seen = life.run()
        finally:
            life.fabric.close()
    life.check(line(life.url))
    del memory._STORES[life.url]
    seen["happened"] = world.happened
    return seen


@pytest.mark.timeout(300 * max(1, SCHEDULES // 250))
@pytest.mark.parametrize("part", range(10))
def test_lives(part: int) -> None:
    each_life(live, SCHEDULES, part)
