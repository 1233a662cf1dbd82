"""Lives of a job on nodes whose memory is short, in a world of its own time: whole agents, as in
tests/sim/test_losses_sim.py, of which each has room for some slots and some copies, and now for more, now for less, as
other processes come and go and earlier starts have left something or not.

After whatever happens: what the coordinator was told to be safe in the memory of nodes can be had from what is left
after the loss of any more of them, as many as the placement had promised in all; until something newer was told to be
safe, or is in the store. It is what the next start goes on from, or something newer. And where there comes to be room
a job has its copies, and nothing of earlier starts stays for ever. Where other processes take the memory of its copies
its slots stay, it commits, and it has its copies again once the memory is there.

A schedule is one seed. CKPT_SIM_SCHEDULES: a thousand times how many, with CKPT_SIM_DEEP two hundred times;
CKPT_TEST_SEED: the first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ckpt.agent.node.memory_node import MemoryNodeOptions
from ckpt.agent.replication.replication_manager import ReplicationManager
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.state import memory_pressure
from ckpt.agent.state.accounting import Accounting
from ckpt.backends.memory import MemoryBackend
from ckpt.ipc.arena import Arena
from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import place
from ckpt.settings import Settings
from ckpt.types import Epoch, Identity, Version
from tests.agent import fake
from tests.sim.agents import AgentProcess
from tests.sim.jobs import SimJob, SimRank
from tests.sim.test_losses_sim import LENDER, LONG_S, Life, a_life, live
from tests.sim.world import World, each_life

EACH = 200 if os.environ.get("CKPT_SIM_DEEP") else 1000
SCHEDULES = max(10, int(os.environ.get("CKPT_SIM_SCHEDULES", "4000")) // EACH)
SLOT = 1_090_000  # bytes of one rank's snapshot, about
SHORT_S = 60.0  # that a job waits for room for a slot, until there is plenty
PLENTY = 1000.0  # slots
RESERVE = 1.1 * SLOT  # what a node leaves to others
TWO_SLOTS = 2.4
LEAST = 4.2  # one for each rank, and what is reserved for commits
ROOMS = (5.6, 6.6, 7.6, 8.6, 10.0, 13.0)  # in slots of the ranks of one node: for none, for some, for all


@dataclass(frozen=True, slots=True)
class Promise:
    """`losses`: as many of these nodes may be lost."""

    identity: Identity
    losses: int
    agents: dict[int, AgentProcess]


class Short(Life):
    """`rooms`: bytes that a node has for its agent. `committed`: the newest record that was put."""

    def __init__(self, world: World, seed: int, settings: Settings) -> None:
        super().__init__(world, seed, settings)
        rng = self.rng
        self.refuses = rng.random() < 0.8
        self.step_s = rng.uniform(0.3, 1.0)
        self.fabric.frame_s = 10 ** rng.uniform(-2.5, 0.0)  # what is safe may be far behind what is complete
        if len(self.nodes) > 2 and rng.random() < 0.3:
            self.options["peers"] = {"replicas": 2} if rng.random() < 0.5 else {"data": 2, "parity": 2}
        self.rooms: dict[int, float] = {}
        self.promise: Promise | None = None
        self.begun: dict[Identity, tuple[Promise, object]] = {}  # and who began it
        self.committed: Identity | None = None
        self.changed = True
        self.changes_s = rng.choice((3.0, 10.0, 30.0))
        self.plenty = self.squeezed = False
        world.at(rng.expovariate(1 / self.changes_s), self._change_room)

    # -- memory

    def _draw(self) -> float:
        return SLOT * self.rng.choice((1, 2)) * self.rng.choice((LEAST, *ROOMS))

    def _room(self, node: int) -> float:
        return self.rooms.setdefault(node, self._draw()) if not self.plenty else PLENTY * SLOT

    def _change_room(self) -> None:
        if self.rooms and not self.squeezed:
            self.rooms[self.rng.choice(sorted(self.rooms))] = self._draw()
        self.world.at(self.rng.expovariate(1 / self.changes_s), self._change_room)

    def free_bytes(self) -> int:
        agent = self.world.owner
        if not isinstance(agent, AgentProcess) or agent.number == LENDER:
            return 8 << 30
        node = agent.node
        shares = [share for _, share in node.context.jobs.shares()]
        used = sum(share.arena_bytes for share in shares) + node.memory.replicas.arenas.allocated_bytes
        used += node.context.workers.closing_bytes
        return max(0, int(self._room(agent.number)) - used)

    # -- what is owed

    def begins(self, protection: ReplicationManager, identity: Identity, safe: Identity | None) -> None:
        placement = protection.placement
        assert placement is not None
        names = {name for kept in placement.protected_states for name in (kept.node, *kept.holders)}
        names |= {name for group in placement.groups for name in group.members}
        agents = self.fabric.agents.items()
        part = {node: each for node, each in agents if each.network is not None and each.network.agent_name in names}
        losses = min(kept.losses_max for kept in placement.protected_states)
        if identity == safe and not losses and identity in self.begun:  # copies that there are stay beside these
            former = self.begun[identity][0]
            lost = self._lost(former)
            part = {node: agent for node, agent in former.agents.items() if node not in lost} | part
            losses = 1
        self.begun[identity] = Promise(identity, losses, part), self.world.owner

    def promised(self, epoch: Epoch, version: Version) -> None:
        made, by = self.begun[Identity(epoch, version)]
        if by is not self.world.owner:  # it was found, with as much as is asked for now, which may be less
            made = replace(made, losses=min(made.losses, 1))
        assert made.losses, f"some node's part of {made.identity} is kept by nobody, and it was said to be safe"
        if self.promise is None or made.identity >= self.promise.identity or self._left(self.promise) < 0:
            self.promise = made
            self.changed = True

    def _lost(self, promise: Promise) -> set[int]:
        return {node for node, agent in promise.agents.items() if self.fabric.agents.get(node) is not agent}

    def _left(self, promise: Promise) -> int:
        """How many more may be lost; less than none: it is void."""
        if self.committed is not None and self.committed >= promise.identity:
            return -1
        return promise.losses - len(self._lost(promise))

    def look(self) -> None:
        """At what is owed, where something went."""
        promise = self.promise
        if not self.changed or promise is None:
            return
        self.changed = False
        left = self._left(promise)
        jobs = [agent.node.context.jobs.current for agent in self.fabric.agents.values()]
        led = [each for each in jobs if each is not None and each.context.is_taken_over]
        led = [each for each in led if each.epoch == promise.identity.epoch]
        if any(job.scheduler.arenas.has_division and job.scheduler.arenas.slot_limit < 3 for job in led):
            self.promise = None  # of a former agent, one of whose slots the next snapshot takes
            return
        if left < 0:
            return
        lost = self._lost(promise)
        left_agents = {node: agent for node, agent in self.fabric.agents.items() if node not in lost}
        held = {node: agent.node.memory.inventory(True) for node, agent in left_agents.items()}
        for more in itertools.combinations(sorted(promise.agents.keys() - lost), left):
            every = Inventory()
            for node, inventory in held.items():
                if node not in more:
                    every.merge(inventory, str(node))
            newest = max(every.complete_checkpoints(), default=None)
            is_there = newest is not None and newest >= promise.identity
            assert is_there, (
                f"{promise.identity} was safe from {promise.losses} losses; with {sorted(lost)} lost and {more} to be, "
                f"there is {newest}, after {self.world.now_s - 1000:.3f} s"
            )

    # -- what happens

    def run(self) -> Counter[str]:
        seen: Counter[str] = Counter()
        for _ in range(self.rng.choice((2, 3, 4))):
            job = self.begin(seen)
            self._until_something(job, seen)
            self._end(job, seen)
        self.nodes = self.nodes if len(self.nodes) > 1 else [*self.nodes, max(self.nodes) + 10]
        job = self.begin(seen, everywhere=True)
        self.plenty, self.refuses = True, False
        began_s = self.world.now_s
        self.world.run(lambda: self._is_settled(job) or job.is_over, LONG_S)
        seen["settled s"] = round(self.world.now_s - began_s)
        assert not job.is_over, f"it has not come to have all its copies, or kept what is older: {self._why(job)}"
        self._squeeze(job, seen)
        job.die(0.1)
        self.until_all_have_ended()
        return seen

    def _squeeze(self, job: SimJob, seen: Counter[str]) -> None:
        """There comes to be room for two slots and the copies, and not for a third slot, and maybe no memory-only node
        is there any more. Later there is plenty again."""
        led, began_s = self.fabric.agents[job.ranks[0].node].node.context.jobs.current, self.world.now_s
        assert led is not None
        assert led.replication.manager is not None
        assert led.replication.manager.option is not None
        assert led.memory.division.newest is not None
        assert isinstance(led.ranks, AllShares)
        numbers = {agent.network.agent_name: number for number, agent in self.fabric.agents.items() if agent.network}
        sizes = led.ranks.sum_by_node(dict(enumerate(led.memory.division.newest.arena_bytes)))
        each_lends = [PlacementNode(name, state_bytes=size, lend_bytes=1 << 40) for name, size in sizes.items()]
        for load in place(each_lends, led.replication.manager.option).loads:
            self.rooms[numbers[load.node]] = TWO_SLOTS * load.own_bytes + load.keeps_all_bytes + RESERVE
        self.squeezed, self.plenty = True, False
        self.refuses = False
        if LENDER in self.fabric.agents and self.rng.random() < 0.7:
            self.take_away(job, LENDER)
            seen["lost the lender for good"] += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "ckpt.agent.runtime.memory_plan.COMMIT_BYTES", SLOT // 16
            )  # it is little beside a large state
            slots, stored = led.scheduler.arenas.slot_limit, self.told(job, "store")
            self.wait(self.rng.uniform(0.0, 120.0))
            self.world.run(lambda: self.told(job, "store") > stored, LONG_S)
            assert led.scheduler.arenas.slot_limit >= slots, "no slot goes as long as the layout stays"
            seen["copies" if led.scheduler.replicas.is_placement_complete else "no copies"] += 1
            self.plenty = True
            self.until_copies_are_made(job)
        seen["squeezed s"] = round(self.world.now_s - began_s)
        seen[f"{led.scheduler.arenas.slot_limit} slots in the end"] += 1

    def until_copies_are_made(self, job: SimJob) -> None:
        """Of what is taken from now on."""
        now, until_s = self.told(job, "local"), self.world.now_s + LONG_S
        are_made = lambda: self.told(job, "peer") > now and not self._why(job)  # noqa: E731
        self.world.run(lambda: are_made() or self.world.now_s > until_s, 2 * LONG_S)
        assert are_made(), f"no copies of what is newer than {now}: {self._why(job)}"

    def begin(self, seen: Counter[str], everywhere: bool = False) -> SimJob:
        rng = self.rng
        some = (
            self.nodes if everywhere else rng.sample(self.nodes, rng.randint(min(2, len(self.nodes)), len(self.nodes)))
        )
        spread = sorted(node for node in some for _ in range(rng.choice((1, 1, 2))))
        owed = self.promise.identity if self.promise is not None and self._left(self.promise) >= 0 else None
        owed = max(filter(None, (owed, self.committed)), default=None)
        job = self.start(spread, steps=round((2000.0 if everywhere else 80.0) / self.step_s))
        until_s = self.world.now_s + SHORT_S
        self.world.run(lambda: job.trains or job.is_over or self.world.now_s > until_s, LONG_S)
        if not job.trains:
            seen["no room for a slot"] += 1
            self.plenty = True
            self.world.run(lambda: job.trains or job.is_over, LONG_S)
            self.plenty = False
        parent = job.ranks[0].parent
        found = Identity.parse(parent) if parent is not None else None
        assert owed is None or (found is not None and found >= owed), f"{owed} was safe, and it goes on from {found}"
        kind = "restored" if found is not None else "fresh"
        seen[f"{kind} {'what is newer than what is safe' if owed is not None and found != owed else ''}"] += 1
        return job

    def _until_something(self, job: SimJob, seen: Counter[str]) -> None:
        rng = self.rng
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            self._pass(rng.uniform(0.0, 10.0), job)
            if rng.random() < 0.5:
                self.fabric.kill(rng.choice((job.ranks[0].node, *self.nodes)))
                seen["agent killed"] += 1
        until_s = self.world.now_s + rng.uniform(2.0, 30.0)
        self.world.run(lambda: self.told(job, "peer") > 0 or self.world.now_s > until_s or job.is_over, LONG_S)
        seen["safe" if self.told(job, "peer") else "not safe"] += 1
        self._pass(rng.expovariate(0.1), job)

    def _end(self, job: SimJob, seen: Counter[str]) -> None:
        if self.rng.random() < 0.6:
            self.lose_one(job)
            seen["lost"] += 1
        self.go_down(job)

    def _is_settled(self, job: SimJob) -> bool:
        if not job.trains or not self.told(job, "peer"):
            return False
        return not self._why(job)

    def _why(self, job: SimJob) -> str:
        """It is not settled."""
        agents = [self.fabric.agents[node] for node in sorted({rank.node for rank in job.ranks})]
        led = agents[0].node.context.jobs.current
        if led is None or str(led.epoch) != job.ranks[0].epoch or not led.scheduler.replicas.is_placement_complete:
            return "no copies"
        for agent in agents:
            held = agent.node.memory.inventory(True).world_sizes
            old = {identity for identity in held if identity.epoch != led.epoch}
            jobs = agent.node.context.jobs
            if old or jobs.former or len(jobs.followed) > 1:
                return f"node {agent.number} has {sorted(map(str, old))}"
        return ""

    @contextlib.contextmanager
    def lived(self) -> Iterator[None]:
        world, life = self.world, self
        until_of, put = world.run, MemoryBackend.put
        replicate, record_level = ReplicationManager.replicate, Accounting.record_level
        begin_fill, close = Arena.begin_fill, Arena.close

        def run_and_look(until: Callable[[], bool], limit_s: float) -> None:
            def looked() -> bool:
                life.look()
                return until()

            until_of(looked, limit_s)

        def begins(protection: ReplicationManager, identity: Identity, safe: Identity | None, *given: Any) -> Any:
            life.begins(protection, identity, safe)
            return replicate(protection, identity, safe, *given)

        def records(account: Accounting, level: str, epoch: Epoch, version: Version, *given: Any) -> None:
            if level == "peer" and given:  # else a survey found it
                life.promised(epoch, version)
            record_level(account, level, epoch, version, *given)

        def stored(backend: MemoryBackend, key: str, *given: Any, **named: Any) -> None:
            put(backend, key, *given, **named)
            if found := re.match(r"commits/(\d+-[0-9a-f]+-\d+\.\d+)-", key):
                life.committed = max(filter(None, (Identity.parse(found[1]), life.committed)))

        def fills(arena: Arena) -> None:
            life.changed = True
            begin_fill(arena)

        def closes(arena: Arena) -> None:
            life.changed = True
            close(arena)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world, "run", run_and_look)
            patch.setattr(MemoryBackend, "put", stored)
            patch.setattr(ReplicationManager, "replicate", begins)
            patch.setattr(Accounting, "record_level", records)
            patch.setattr(Arena, "begin_fill", fills)
            patch.setattr(Arena, "close", closes)
            patch.setattr(SimRank, "wait_warm", lambda rank: fake.FakeRank.wait_warm(rank, LONG_S))
            patch.setattr("ckpt.agent.runtime.memory_plan.total_bytes", lambda: memory_pressure.RESERVE_PARTS * SLOT)
            patch.setattr("ckpt.agent.replication.replication_manager.WORK_BYTES", 1 << 16)
            patch.setattr("ckpt.agent.replication.rebuild_queue.SCRATCH_BYTES", 1 << 16)
            with super().lived():
                yield


@pytest.mark.timeout(300 * max(1, SCHEDULES // 50))
@pytest.mark.parametrize("part", range(10))
def test_what_is_safe_stays_so_where_memory_is_short(part: int) -> None:
    each_life(lambda seed: live(seed, Short), SCHEDULES, part)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_safe_stays_where_an_agent_is_started_again_and_nobody_has_room_for_copies_any_more(seed: int) -> None:
    """Two of three nodes may be lost, and with the coordinator's agent one of these went; what is newer lies on one
    node each."""
    options = {"peers": {"replicas": 2}, "policy": {"steps": 3, "seconds": None}}
    with a_life(Short, seed, nodes=[0, 1, 2], refuses=True, plenty=True, **options) as life:
        job = life.start((0, 1, 2), 0.5)
        life.world.run(lambda: life.told(job, "peer") > 0, LONG_S)
        for rank in job.ranks:  # what it says when it comes back: three slots, and nothing for others
            rank.options = {**life.options, "limits": {"memory": int(5.2 * SLOT), "bandwidth": None}}
        life.fabric.kill(0)
        safe, newest = life.told(job, "peer"), life.told(job, "local")
        life.world.run(lambda: life.told(job, "local") > newest + 10, 60.0)
        life.refuses = False
        agents = [life.fabric.agents[node] for node in (1, 2)]
        assert all(agent.node.memory.replicas.kept.identities for agent in agents)
        life.world.run(lambda: not any(agent.node.memory.replicas.arenas.bytes for agent in agents), 120.0)
        assert life.told(job, "store") > safe, "they have gone for something newer"
        job.die(0.1)


class Little(Short):
    """Two nodes of one rank each, and room is what the test says. What commits take is little, as beside a large
    state."""

    def __init__(self, world: World, seed: int, settings: Settings) -> None:
        super().__init__(world, seed, settings)
        self.nodes, self.refuses, self.squeezed = [0, 1], False, True
        self.options |= {"policy": {"steps": 10, "seconds": None}}
        self.step_s, self.fabric.frame_s = 0.5, 0.01

    def has_room(self, slots: float) -> None:
        """Where it is for three slots of a node's own it is 4.1, and a SLOT more for each generation of copies: with
        what the node leaves to others, and what commits take."""
        self.rooms |= dict.fromkeys(self.nodes, slots * SLOT)

    def lend(self, at: str) -> str:
        """Where the agent of a memory-only node listens that is started there."""
        agent = self.fabric.lend(LENDER, MemoryNodeOptions(self.key, at, 1 << 30, commit_after_s=20.0))
        return str(agent.node.addresses[0])

    def begin_here(self) -> SimJob:
        job = self.start((0, 1), self.step_s, steps=100_000)
        self.until_step(job, 50, "peer")
        assert self.slots(job) == [3, 3]
        return job

    def until_step(self, job: SimJob, step: int, level: str = "local") -> None:
        """Until one after that step is at that level."""
        self.world.run(lambda: self.told(job, level) > step, LONG_S)

    def warnings(self, job: SimJob) -> int:
        """How often it was said that not all have copies."""
        told = (each for rank in job.ranks for each in rank.events if each["name"] == "replication.placed")
        return sum(each["loud"] for each in told)

    def until_copies_have_gone(self, job: SimJob, warnings: int) -> None:
        """It is said, all slots stay, and steps are committed."""
        self.world.run(lambda: self.warnings(job) > warnings, LONG_S)
        self.until_step(job, self.told(job, "local"), "store")
        assert self.slots(job) == [3, 3]

    def slots(self, job: SimJob) -> list[int]:
        """How many each rank has."""
        return [len(rank.slots) for rank in job.ranks]

    @contextlib.contextmanager
    def lived(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, super().lived():
            patch.setattr("ckpt.agent.runtime.memory_plan.COMMIT_BYTES", SLOT // 16)
            yield


def test_copies_are_planned_with_no_memory_that_nodes_keep_free_for_other_processes() -> None:
    """Of a large machine with little left that is more than a plan leaves: the copies gave way to a third slot, and of
    nothing but the first checkpoint any could be made."""
    with a_life(Little, refuses=True) as life, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.agent.runtime.memory_plan.total_bytes", lambda: 5 * SLOT * memory_pressure.RESERVE_PARTS)
        life.has_room(9.5)
        job = life.start((0, 1), life.step_s)
        life.until_step(job, 100)
        assert life.told(job, "peer") > 80, "each has copies"
        job.die(0.1)


@contextlib.contextmanager
def state_of(more: Callable[[int], int]) -> Iterator[None]:
    """In each step a rank has so many elements more."""

    def train(rank: SimRank, step: int) -> None:
        if rank.extra != more(step):
            rank.relayout(more(step))
        fake.FakeRank.train(rank, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimRank, "train", train)
        yield


GROWN = 2 * SLOT // 4  # elements: the state is three times as large


@pytest.mark.parametrize(
    ("dies", "seed"), [*((None, seed) for seed in range(3)), *((n, seed) for n in (0, 1) for seed in range(10))]
)
def test_a_state_that_grows_leaves_no_memory_in_slots_that_it_has_no_more(dies: int | None, seed: int) -> None:
    """An optimizer's state appears in the first step, and of three slots there are two. The third one counted as free,
    and for ever no copy could be made where it lay. Also where an agent is lost just then, maybe with the word."""
    with a_life(Little, seed, refuses=dies is None) as life, state_of(lambda step: GROWN if step >= 4 else 0):
        life.has_room(9.4)
        job = life.start((0, 1), life.step_s)
        life.world.run(lambda: job.trains and job.ranks[0].extra > 0, LONG_S)
        assert sorted(job.ranks[0].slots) == [0, 1, 2]
        if dies is not None:
            life.world.at(life.world.rng.uniform(0.0, 0.3), lambda: life.fabric.kill(dies))
        life.until_step(job, 100)
        assert life.told(job, "peer") > 80, "each has copies"
        assert [sorted(rank.slots) for rank in job.ranks] == [[0, 1]] * 2
        node, other = (life.fabric.agents[number].node for number in (0, 1))
        led = node.context.jobs.current
        assert led is not None
        shares = led.local_share, other.context.jobs.followed[0].local_share
        assert [sorted(share.arenas) for share in shares] == [[0, 1]] * 2
        job.die(0.1)


def test_a_state_that_shrinks_leaves_no_memory_in_arenas_that_are_too_large_for_it() -> None:
    """They were used as they were, and what they had more counted as free: for ever no copy could be made there."""
    with a_life(Little) as life, state_of(lambda step: GROWN if step < 40 else 0):
        life.has_room(7.2)
        job = SimJob(life.fabric, (0, 1), life.key, life.options)
        for rank in job.ranks:
            rank.extra = GROWN
        job.start(1000, lambda rank: life.step_s)
        life.until_step(job, 20)
        large = job.ranks[0].slots[0].size_bytes
        assert life.told(job, "peer") == 0, "there is room for slots only"
        life.until_step(job, 120)
        assert life.told(job, "peer") > 100, "each has copies"
        assert all(arena.size_bytes < large / 2 for rank in job.ranks for arena in rank.slots.values())
        job.die(0.1)


def test_slots_stay_and_copies_go_where_a_memory_only_node_is_lost_and_come_back_with_it() -> None:
    with a_life(Little) as life:
        life.has_room(5.5)
        life.fabric.lose(LENDER)
        life.lender = life.lend("10.0.0.1:0")
        job = life.begin_here()
        warnings = life.warnings(job)
        life.fabric.lose(LENDER)
        life.until_copies_have_gone(job, warnings)
        life.lend(life.lender)
        life.until_copies_are_made(job)
        assert life.slots(job) == [3, 3]
        job.die(0.1)


def test_slots_stay_and_copies_go_where_other_processes_take_memory_until_the_layout_changes() -> None:
    more = 0
    with a_life(Little) as life, state_of(lambda step: more):
        life.has_room(8.0)
        job = life.begin_here()
        for is_back in (True, False):
            warnings = life.warnings(job)
            life.has_room(5.3)
            life.until_copies_have_gone(job, warnings)
            if is_back:
                life.has_room(8.0)
                life.until_copies_are_made(job)
                assert life.slots(job) == [3, 3]
        more = SLOT // 100
        life.until_copies_are_made(job)
        assert life.slots(job) == [2, 2]
        life.has_room(8.0)
        life.wait(100.0)
        assert life.slots(job) == [2, 2]
        job.die(0.1)
