"""Lives of a job that loses nodes, again and again, in a world of its own time: whole agents, memory-only nodes too.

After each loss the job is started again on the nodes that are left, and on new ones, by other numbers of ranks. What
was said to be safe (in the store, or in so many nodes' memory as were not lost) is what it goes on from, or something
newer; never a mixture; and nobody waits for ever, whichever agent dies meanwhile. In some of them failures are
predicted all the time, mostly wrongly: alarms come and pass, and copies go elsewhere for each.

A schedule is one seed. CKPT_SIM_SCHEDULES: two hundred times how many; CKPT_TEST_SEED: the first.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from ckpt.agent.adaptive.alarms import Alarms
from ckpt.agent.job import job as job_module
from ckpt.agent.node.agent import Agent
from ckpt.agent.node.memory_node import MemoryNodeOptions
from ckpt.backends import memory
from ckpt.backends.memory import MemoryBackend
from ckpt.errors import AccessDenied, AgentError
from ckpt.ipc import secret
from ckpt.predict import outcomes
from ckpt.settings import Settings, read_settings
from ckpt.types import Version
from tests.agent import fake
from tests.agent.adaptive.test_alarms import good
from tests.agent.nodes.cluster import line
from tests.sim.agents import Fabric
from tests.sim.jobs import SimJob
from tests.sim.world import World, each_life, living

SCHEDULES = max(20, int(os.environ.get("CKPT_SIM_SCHEDULES", "4000")) // 200)
LONG_S = 600.0
LENDER = 100  # a memory-only node
LINGER_S = 30.0
ALARM_S = 5.0  # that one stands here


class Life:
    """One schedule. `safe`: the newest step that a rank was told to be safe."""

    def __init__(self, world: World, seed: int, settings: Settings) -> None:
        self.world, self.rng = world, random.Random(seed)
        rng = self.rng
        self.url = f"memory://losses-{seed}"
        self.fabric = Fabric(world, self.url, replace(settings, linger_s=LINGER_S))
        self.fabric.local_delay_s = 10 ** rng.uniform(-4.5, -2)
        self.fabric.link_delay_s = 10 ** rng.uniform(-4, -1.5)
        self.fabric.frame_s = 10 ** rng.uniform(-3, -1)
        self.put_s = 10 ** rng.uniform(-3, 0)
        self.step_s = 10 ** rng.uniform(-1, 0)
        self.refuses = rng.random() < 0.5  # the store, whatever is not a claim
        self.key = secret.make_secret()
        self.nodes = list(range(rng.choice((2, 2, 3, 4))))
        self.losses = 1
        peers: dict[str, Any] = {"replicas": 1}
        if len(self.nodes) >= 3 and rng.random() < 0.4:
            peers = {"data": len(self.nodes) - 1, "parity": 1}
        self.options = {**fake.OPTIONS, "policy": {"steps": rng.choice((3, 10)), "seconds": None}, "peers": peers}
        self.lender: str | None = None
        if rng.random() < 0.4:
            agent = self.fabric.lend(LENDER, MemoryNodeOptions(self.key, "10.0.0.1:0", 1 << 30, commit_after_s=20.0))
            self.lender = str(agent.node.addresses[0])
        self.safe = 0
        self.committed_steps: list[int] = []  # that a restart would go on from, once all is over
        self.alarms = random.Random(f"{seed} alarms")
        self.alarmed = 0
        if self.alarms.random() < 0.5:
            world.at(self._quiet_s(), self._alarm)

    def run(self) -> Counter[str]:
        seen: Counter[str] = Counter()
        starts = self.rng.choice((2, 2, 3))
        for number in range(starts):
            job = self.begin(seen)
            if number == starts - 1:
                break
            self.ends(job, number, seen)
        if self.refuses:
            self.refuses = False
            seen["allowed"] += 1
        self.world.run(lambda: job.is_over, LONG_S)
        self.until_all_have_ended()
        return seen

    def until_all_have_ended(self) -> None:
        """Each agent by itself, but for the memory-only node's, which is told to."""
        if LENDER in self.fabric.agents:
            self.fabric.agents[LENDER].server.is_end_requested = True
            self.fabric.agents[LENDER].happens(lambda: None)
        self.world.run(lambda: all(a.closed or a in self.world.dead for a in self.fabric.ever), LONG_S)

    def ends(self, job: SimJob, number: int, seen: Counter[str]) -> None:
        """What becomes of every start but the last."""
        if number and self.rng.random() < 0.5:
            self._until_protected_again(job, seen)
        else:
            self._until_safe(job, seen)
        self._lose(job, seen)

    def begin(self, seen: Counter[str]) -> SimJob:
        rng = self.rng
        spread = sorted(node for node in self.nodes for _ in range(rng.choice((1, 1, 2))))
        job = self.start(spread, steps=round(40.0 / self.step_s))
        self.world.run(lambda: job.trains or job.is_over, LONG_S)
        restored = job.restored_step
        assert restored >= self.safe, f"step {self.safe} was safe, and it goes on from {restored}"
        seen[f"restored {'newer' if restored > self.safe else 'it'}" if self.safe else "first"] += 1
        return job

    def _until_safe(self, job: SimJob, seen: Counter[str]) -> None:
        """Until something of its own is safe, and a while. An agent may die before: what it kept for others goes with
        it, and what is safe is what came after."""
        world, rng = self.world, self.rng
        after = job.restored_step
        if rng.random() < 0.4:
            self._pass(rng.uniform(0.0, 8.0), job)
            self.fabric.kill(rng.choice((job.ranks[0].node, *self.nodes)))
            after = max(rank.step for rank in job.ranks) + 1
            seen["agent killed"] += 1
        world.run(lambda: self.told(job) > after or job.is_over, LONG_S)
        self._pass(rng.expovariate(0.5), job)
        if self.told(job) > after:
            self.safe = max(self.safe, self.told(job))
        else:
            seen["nothing safe"] += 1

    def _until_protected_again(self, job: SimJob, seen: Counter[str]) -> None:
        """Until what it goes on from has as many copies as it had, or something of its own is safe."""
        self.world.run(lambda: self._is_again(job) or self.told(job) > 0 or job.is_over, LONG_S)
        seen["protected again"] += self._is_again(job)
        self.safe = max(self.safe, self.told(job))

    def _is_again(self, job: SimJob) -> bool:
        return any(each["name"] == "replica.restored" for rank in job.ranks for each in rank.events)

    def _quiet_s(self) -> float:
        return self.alarms.expovariate(2 / ALARM_S)

    def _alarm(self) -> None:
        """By a proven source, of any node of a job, with whoever coordinates it."""
        for agent in self.fabric.agents.values():
            if isinstance(agent.node, Agent):
                agent.happens(functools.partial(self._tell, agent.node.alarms))
        self.world.at(self._quiet_s(), self._alarm)

    def _tell(self, alarms: Alarms) -> None:
        job = alarms._job
        if job is None:
            return
        if not alarms.outcomes.proven_scores():
            alarms.inherit_scores({"memory": good().numbers()})
        node = self.alarms.choice(["", *(node.name for node in job.nodes[1:])])
        alarms.on_peer_signals(job, node, {"sources": ["memory"], "alarms": [["memory", None]]})
        assert alarms._internal_error_s == -math.inf, "it made a mistake"
        self.alarmed += 1

    def wait(self, seconds: float) -> None:
        until_s = self.world.now_s + seconds
        self.world.at(seconds, lambda: None)
        self.world.run(lambda: self.world.now_s >= until_s, LONG_S)

    def _pass(self, seconds: float, job: SimJob) -> None:
        until_s = self.world.now_s + seconds
        self.world.run(lambda: self.world.now_s >= until_s or bool(job.left), LONG_S)

    def told(self, job: SimJob, *wanted: str) -> int:
        """The newest step of this job that its ranks were told to be safe, at one of these levels; 0: none."""
        levels = [each for rank in job.ranks for each in rank.levels.items()]
        wanted = wanted or ("peer", "store")
        safe = [Version.parse(version).step for (version, level), (ok, _) in levels if ok and level in wanted]
        return max(safe, default=0)

    def _lose(self, job: SimJob, seen: Counter[str]) -> None:
        seen["lost the lender" if self.lose_one(job) == LENDER else "lost a node"] += 1
        self.go_down(job)

    def lose_one(self, job: SimJob) -> int:
        """Which machine that is."""
        lost = self.rng.choice((*self.nodes, *([LENDER] if LENDER in self.fabric.agents else [])))
        self.take_away(job, lost)
        if lost == LENDER:
            self.lender = None
        else:
            self.nodes.remove(lost)
        return lost

    def go_down(self, job: SimJob) -> None:
        """What is left of it, until the next start."""
        job.die(self.rng.choice((0.01, 1.0)))
        self.wait(self.rng.uniform(1.0, 10.0))
        self.replace_some()

    def start(self, spread: Sequence[int], step_s: float | None = None, steps: int = 1000) -> SimJob:
        """A job with a rank on each of these nodes, whose steps take so long, or about as long as this life has it."""
        job = SimJob(self.fabric, spread, self.key, self.options)
        for rank in job.ranks:
            rank.peers = [self.lender] if self.lender is not None else []
        job.start(steps, lambda rank: step_s or self.rng.uniform(0.8, 1.2) * self.step_s)
        return job

    def start_again(self, spread: Sequence[int], step_s: float) -> SimJob:
        """One that trains, and has gone on from what was safe or from something newer."""
        job = self.start(spread, step_s)
        self.world.run(lambda: job.trains, LONG_S)
        assert job.restored_step >= self.safe
        return job

    def until_told(self, job: SimJob, *levels: str) -> None:
        """Until something of it is at one of these levels, which is safe from then on."""
        self.world.run(lambda: self.told(job, *levels) > 0, LONG_S)
        self.safe = self.told(job, *levels)

    def until_agents_are_gone(self) -> None:
        """The store takes all again, and what is left is committed."""
        self.refuses = False
        self.world.run(lambda: not self.fabric.agents, 3 * LINGER_S)

    def take_away(self, job: SimJob, lost: int) -> None:
        """The machine, with all that runs there."""
        for rank in job.ranks:
            if rank.node == lost:
                rank.die()
        self.fabric.lose(lost)

    def replace_some(self) -> None:
        if len(self.nodes) < 2 or self.rng.random() < 0.3:
            self.nodes.append(max(self.nodes, default=0) + 10)

    def free_bytes(self) -> int:
        """That the machine has on which this is asked."""
        return 8 << 30

    @contextlib.contextmanager
    def lived(self) -> Iterator[None]:
        """The world is as this life has it, and nothing of that is left afterwards."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake, "ROWS", 16)
            patch.setattr(outcomes, "WINDOW_S", ALARM_S)
            patch.setattr("ckpt.agent.runtime.memory_plan.free_bytes", self.free_bytes)
            put = MemoryBackend.put

            def slow(backend: MemoryBackend, key: str, *given: Any, **named: Any) -> None:
                if self.world.current is not None:
                    time.sleep(self.rng.expovariate(1 / self.put_s))
                if self.refuses and key.startswith("data/"):
                    raise AccessDenied(f"{key}: no")
                put(backend, key, *given, **named)

            patch.setattr(MemoryBackend, "put", slow)
            try:
                yield
            finally:
                self.fabric.close()


def live(seed: int, kind: type[Life] = Life) -> Counter[str]:
    with living(seed) as world:
        life = kind(world, seed, replace(read_settings(), notices="off"))
        with life.lived():
            seen = life.run()
        seen["alarms"] = life.alarmed
    line(life.url)
    del memory._STORES[life.url]
    seen["happened"] = world.happened
    return seen


L = TypeVar("L", bound=Life)


@contextlib.contextmanager
def a_life(kind: type[L], seed: int = 0, **given: Any) -> Iterator[L]:
    """One of which the test says what happens, without a memory-only node and with one copy, until it is left. `given`:
    attributes of it, or options of its jobs."""
    with living(seed) as world:
        life = kind(world, seed, replace(read_settings(), notices="off"))
        life.lender = None
        life.options |= {"peers": {"replicas": 1}}
        for name, value in given.items():
            if name in life.options:
                life.options[name] = value
            else:
                setattr(life, name, value)
        with life.lived():
            yield life
    life.committed_steps = [identity.version.step for identity in line(life.url)]
    del memory._STORES[life.url]


def test_what_a_restarted_agent_could_not_take_over_before_a_rank_died_is_what_the_next_start_goes_on_from() -> None:
    """The coordinator's agent dies, and before all ranks have come to the next one a rank of its node does, too."""
    for seed in range(20):
        with a_life(Life, seed, nodes=[0, 1], refuses=True) as life:
            job = life.start((0, 0, 1, 1), 0.1)
            life.until_told(job)
            life.fabric.kill(0)
            life.wait(life.rng.uniform(0.0, 2.0))
            job.ranks[0].die()
            life.wait(life.rng.uniform(0.0, 2.0))
            job.die(0.1)
            life.wait(5.0)
            life.begin(Counter()).die(0.1)


@pytest.mark.parametrize(("first", "then"), [((0,), (0, 1)), ((0, 0), (0, 0, 1, 2)), ((1,), (0, 1))])
def test_what_a_job_of_one_node_has_in_memory_only_is_what_several_nodes_go_on_from(
    first: tuple[int, ...], then: tuple[int, ...]
) -> None:
    with a_life(Life, refuses=True) as life:
        job = life.start(first, 0.1)
        life.until_told(job, "local")
        job.die(0.1)
        life.wait(3.0)
        life.start_again(then, 0.1).die(0.1)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_start_makes_again_from_parity_goes_before_training_and_what_training_keeps_does_not(seed: int) -> None:
    parity = {"peers": {"data": 2, "parity": 1}, "policy": {"steps": 20, "seconds": None}}
    with a_life(Life, seed, nodes=[0, 1, 2], refuses=False, put_s=1e-4, **parity) as life:
        job, moved = life.start((0, 1, 2), 0.1), life.fabric.moved
        # In the store, too: a commit under way would have the lost part made again for itself.
        life.world.run(lambda: min(life.told(job, "peer"), life.told(job, "store")) > 0, LONG_S)
        life.safe = life.told(job)
        life.take_away(job, 2)
        job.die(0.1)
        assert moved
        assert not any(urgent for _, urgent in moved)
        moved.clear()
        again = life.start_again((0, 1), 0.1)
        assert {urgent for name, urgent in moved if name.startswith("parity/")} == {True}
        again.die(0.1)


def started_by_the_other_node(life: Life, level: str) -> SimJob:
    """A start that trains, by which rank 0 is on another node than in the one before, which saved at `level`."""
    job = life.start((0, 1), 0.5)
    life.until_told(job, level)
    job.die(0.1)
    life.wait(2.0)
    return life.start_again((1, 0), 0.5)


SELDOM = {"policy": {"steps": 10, "seconds": None}}


@pytest.mark.parametrize("refuses", [False, True], ids=["all in the store", "the newest in memory only"])
def test_agents_that_have_led_one_start_each_do_not_keep_each_other_for_ever(refuses: bool) -> None:
    """The second one, by which rank 0 is on another node, ends before it has made anything complete."""
    with a_life(Life, refuses=refuses, **SELDOM) as life:
        started_by_the_other_node(life, "peer").die(0.1)
        life.wait(1.0)
        life.until_agents_are_gone()
    assert life.committed_steps[-1] >= life.safe


@pytest.mark.parametrize("copies", [False, True], ids=["all are there, each with its part", "the later one's is lost"])
def test_what_a_start_has_left_is_committed_where_its_coordinator_follows_a_later_one_that_saved_nothing(
    copies: bool,
) -> None:
    with a_life(Life, refuses=True, peers={"replicas": 1} if copies else None, **SELDOM) as life:
        started_by_the_other_node(life, "peer" if copies else "local").die(0.1)
        life.wait(1.0)
        if copies:
            life.fabric.lose(1)
        life.until_agents_are_gone()
    assert life.committed_steps[-1] >= life.safe


def test_what_a_later_start_went_on_from_is_found_by_the_agent_whose_own_start_of_it_may_save_no_more() -> None:
    """The later one is led by the other node, and ends before it has saved anything; the third one by this node."""
    with a_life(Life, refuses=True, **SELDOM) as life:
        started_by_the_other_node(life, "peer").die(0.1)
        first_led_by = life.fabric.agents[0]
        life.world.run(lambda: bool(first_led_by.node.context.store.claims.refusal_reasons), LONG_S)
        third = life.start_again((0, 1), 0.5)
        assert life.fabric.agents[0] is first_led_by
        third.die(0.1)


def test_who_coordinates_a_job_that_goes_on_does_not_stand_still_for_who_would_commit_what_earlier_ones_left() -> None:
    with a_life(Life, nodes=[0, 1], refuses=False) as life:
        job = life.start_again((0, 1), 1.0)
        node = life.fabric.agents[0].node
        with pytest.raises(AgentError, match="goes on"):
            node.orphans.grant_lease("another", for_orphans=True)
        assert not node.memory.inventory_lease.is_held
        job.die(0.1)


@pytest.mark.parametrize("again", [False, True], ids=["at the start", "by an agent that was started again"])
def test_what_a_start_goes_on_from_is_shown_to_be_safe_once_it_has_its_copies_again(again: bool) -> None:
    # A node is lost, and then what an agent kept.
    options = {"peers": {"replicas": 1 + again}, "policy": {"steps": 5, "seconds": None}}
    with a_life(Life, nodes=[0, 1, 2], refuses=True, **options) as life:
        life.fabric.frame_s = 1.0
        job = life.start((0, 1, 2), 5.0)
        life.until_told(job, "peer")
        life.take_away(job, 2)
        job.die(0.1)
        life.wait(3.0)
        job = life.start((0, 1), 100.0)
        if again:
            life.world.run(lambda: job.trains, LONG_S)
            life.fabric.kill(0)
            life.world.run(lambda: 0 in life.fabric.agents, LONG_S)
        node, copying = life.fabric.agents[0].node, 0

        def is_shown() -> bool:
            nonlocal copying
            now, safe = node.context.jobs.current, node.context.status_view.account.newest_by_level.get("peer")
            copies = now.replication.rereplication if now is not None else None
            stores = [agent.node.memory.replicas for agent in life.fabric.agents.values()]
            if copies is not None and any(store._incoming for store in stores):
                assert safe is None, "they are on their way"
                copying += 1
            return copying > 0 and safe is not None

        life.world.run(is_shown, LONG_S)
        assert node.context.status_view.account.newest_by_level["peer"][0].step == life.safe == job.restored_step
        life.world.run(lambda: life._is_again(job), LONG_S)
        job.die(0.1)


@pytest.mark.timeout(300 * max(1, SCHEDULES // 50))
@pytest.mark.parametrize("part", range(10))
def test_lives(part: int) -> None:
    each_life(live, SCHEDULES, part)


@pytest.mark.timeout(300 * max(1, SCHEDULES // 50))
def test_lives_of_a_job_so_large_that_it_collects_what_it_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "DECIDES_AT_ONCE_RANKS", 0)
    monkeypatch.setattr(job_module, "COLLECT_S_PER_RANK", 0.005)
    each_life(live, SCHEDULES, 0)
