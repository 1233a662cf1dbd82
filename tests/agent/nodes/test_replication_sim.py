"""Copies of snapshots under random schedules: nodes are lost at any moment of a save, one after the other or several at
once, messages are late, connections end before or after what they were for is done, jobs are started again on whoever
is left and on new nodes, placements change, agents are started again empty, and the coordinator loses its connection to
others that live on. A start asks one node after the other what it holds, while a coordinator that lives on ends what it
has begun. Whatever was said to be safe, and has not lost more nodes since than the placement says it may, is there at
each start, whole: it, or something newer.

The agents' own code decides: Replication, Copies, Facts, the placement, the inventories. Around it one seed decides
what happens when; `run(seed)` replays a schedule. Memory is a few bytes that say whose they are.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.inventory_lease import InventoryLease
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replicate import Assignment, replicate
from ckpt.agent.replication.survey import find_replicated
from ckpt.agent.runtime.coroutines import spawn
from ckpt.agent.runtime.workers import Lane, Workers
from ckpt.agent.snapshots.described import DescribedSnapshot
from ckpt.agent.snapshots.inventory import Inventory, Key
from ckpt.errors import AgentError, DamagedData
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import PAGE
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Placement, Replicas, place
from ckpt.types import OWN_NODE, Epoch, Identity, Version
from tests.agent.nodes.copying import Copying
from tests.agent.nodes.staged import close_arenas

SCHEDULES = int(os.environ.get("CKPT_SIM_SCHEDULES", "4000"))
GENERATIONS = 12  # that a schedule stages, over all its starts
ADDRESS = (Address("h", 1),)
FRAMES = Frames.from_columns(
    np.array([PAGE], np.uint64), np.array([16], np.uint64), np.zeros((1, 2), np.uint64), PAGE + 16
)


class Cell:
    """An arena, as far as copies are concerned: its page says whose it is, and 16 bytes are its data."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PAGE + 16))
        self.size_bytes = PAGE + 16

    @staticmethod
    def create(size: int) -> Cell:
        assert size == PAGE + 16
        return Cell()

    def begin_fill(self) -> None:
        self.view[:PAGE] = bytes(PAGE)

    def fill(self, identity: Identity, rank: int, world: int) -> None:
        self.view[PAGE:] = content(identity, rank)
        self.write_header_page(msgpack.packb([str(identity), rank, world]).ljust(PAGE, b"\0"))

    def write_header_page(self, page: bytes) -> None:
        self.view[:PAGE] = page

    def header_page(self) -> bytes:
        return bytes(self.view[:PAGE])

    def close(self) -> None:
        self.begin_fill()


def content(identity: Identity, rank: int) -> bytes:
    return f"{identity.epoch.number:05d}{identity.version.step:06d}{rank:05d}".encode()


def sealed(cell: Cell) -> tuple[Key, int] | None:
    if not cell.view[0]:
        return None
    unpacker = msgpack.Unpacker()
    unpacker.feed(cell.header_page())
    text, rank, world = unpacker.unpack()
    return (Identity.parse(text), rank), world


def described(identity: Identity, cells: Mapping[int, Cell]) -> list[DescribedSnapshot]:
    for rank, cell in cells.items():
        found = sealed(cell)
        if found is None or found[0] != (identity, rank):
            raise DamagedData(f"the arena of rank {rank} does not hold {identity} any more")
    return [
        DescribedSnapshot(rank, cell.size_bytes, cell.header_page(), FRAMES) for rank, cell in sorted(cells.items())
    ]


@pytest.fixture(autouse=True)
def cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.agent.replication.replica_arenas.Arena", Cell)
    monkeypatch.setattr("ckpt.agent.replication.replica_arenas.created_bytes", lambda size: size)
    monkeypatch.setattr("ckpt.agent.replication.replica_store.find_sealed_snapshot", sealed)
    monkeypatch.setattr("ckpt.agent.replication.replica_offers.describe_snapshots", described)
    monkeypatch.setattr("ckpt.agent.snapshots.inventory.find_sealed_snapshot", sealed)


class Late:
    """The lanes of an agent: each piece of work is done some time, and told of some time later."""

    def __init__(self, sim: Sim, owner: Holder) -> None:
        self._sim, self._owner = sim, owner

    def run(self, lane: Lane, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        def do() -> None:
            done: Future[Any] = Future()
            try:
                done.set_result(work())
            except Exception as exc:
                done.set_exception(exc)
            self._sim.later(self._owner, lambda: then(done))

        self._sim.later(self._owner, do)

    close_arenas = staticmethod(close_arenas)


class Fetched:
    def __init__(self) -> None:
        self.completion: Future[None] = Future()

    def cancel(self) -> None:
        self.fail("it was called off")

    def fail(self, why: str) -> None:
        if not self.completion.done():
            self.completion.set_exception(AgentError(why))


class Holder:
    """A node's agent: its network and transport, what its ranks have staged, and what it keeps for others."""

    def __init__(self, sim: Sim, name: str) -> None:
        self.agent_name, self._sim = name, sim
        self.alive = True
        self.own: dict[Key, Cell] = {}
        self.offers: dict[str, memoryview] = {}
        services = cast(Workers, Late(sim, self)), lambda what: sim.later(self, what)
        self.copies = ReplicaStore(*services)
        held, network = lambda identity: cast(Any, self.held(identity)), lambda: cast(PeerNetwork, self)
        self.service = ReplicaService(*services, self.copies, held, network, lambda: 1 << 40)
        self.fence = InventoryLease({}.__setitem__)
        self.copies.check_eviction = lambda epoch: self.fence.check(OWN_NODE, epoch)

    @property
    def transport(self) -> Any:
        return self

    def offer(self, name: str, source: memoryview, frames: Frames, urgent: bool) -> None:
        if name in self.offers:
            raise AgentError(f"{name} is offered already")
        self.offers[name] = source

    def withdraw(self, name: str) -> None:
        del self.offers[name]

    def addresses(self, node: NodeAt) -> list[Address]:
        return list(node.addresses)

    def held(self, identity: Identity) -> dict[int, Cell]:
        own = {rank: cell for (each, rank), cell in self.own.items() if each == identity}
        return {**cast(Any, self.copies.kept.arenas_of(identity)), **own}

    def fetch(self, peer: str, addresses: Any, name: str, target: memoryview, frames: Frames, landed: Any) -> Fetched:
        """The bytes are those that lie there when they come; a hash that does not fit is told by the content."""
        fetched, giver = Fetched(), self._sim.nodes[peer]

        def come() -> None:
            source = giver.offers.get(name) if giver.alive else None
            if source is None or self._sim.breaks():
                fetched.fail(f"agent {peer} does not give {name}")
            elif not fetched.completion.done():
                target[PAGE:] = source[PAGE:]
                _, text, rank = name.split("/")
                if bytes(source[PAGE:]) == content(Identity.parse(text), int(rank)):
                    fetched.completion.set_result(None)
                else:
                    fetched.fail("arrived with another hash")

        self._sim.later(self, come)
        return fetched

    def request(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes], then: Any) -> None:
        """What is asked may be done although the answer is lost."""
        other, answered = self._sim.nodes[name], [False]

        def end(answer: Message | None, error: str) -> None:
            if not answered[0]:
                answered[0] = True
                then(answer, error)

        def arrive() -> None:
            if not other.alive:
                self._sim.later(self, lambda: end(None, f"there is no connection to agent {name}"))
                return
            lost = self._sim.breaks()
            if lost:
                self._sim.later(self, lambda: end(None, f"the connection to agent {name} has ended"))

            def reply(found: list[bytes], error: str) -> None:
                answer = None if error else Message({"t": "reply", "id": 1}, [], found)
                self._sim.after(other, self, lambda: end(answer, error))

            try:
                other.asked(self.agent_name, fields, blobs, reply)
            except AgentError as exc:
                reply([], str(exc))
            self._sim.watch(self, other, lambda: end(None, f"agent {name} is gone"))

        if self._sim.breaks():
            self._sim.later(self, lambda: end(None, f"the connection to agent {name} has ended"))
        else:
            self._sim.after(self, other, arrive, always=True)

    def notify(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        other = self._sim.nodes[name]
        if not self._sim.breaks():
            self._sim.after(self, other, lambda: other.told(self.agent_name, fields))

    def asked(
        self, by: str, fields: dict[str, Any], blobs: Sequence[bytes], reply: Callable[[list[bytes], str], None]
    ) -> None:
        """As Others has it."""
        if fields["t"] == "survey":
            reply([msgpack.packb(self.inventory().fields())], "")
            return
        identity, keeps = Identity.parse(fields["identity"]), fields["t"] == "replicate"
        if keeps:
            self.fence.check(by, identity.epoch)

        def done(found: list[bytes], error: str) -> None:
            reply(found, error or (self.fence.refusal(by, identity.epoch) if keeps else ""))

        self.service.serve_request(fields, blobs, done)

    def told(self, by: str, fields: dict[str, Any]) -> None:
        try:
            if fields["t"] == "withdraw":
                self.service.withdraw(Identity.parse(fields["identity"]), fields["reader"])
            elif fields["what"] == "older":
                self.copies.evict_older_than(Identity.parse(fields["identity"]))
            elif fields["what"] == "older-epochs":
                self.forget(Epoch.parse(fields["epoch"]))
        except AgentError:
            self._sim.refused += 1

    def forget(self, before: Epoch) -> None:
        self.copies.evict_epochs_before(before)
        self.own = {key: cell for key, cell in self.own.items() if key[0].epoch >= before}

    def inventory(self) -> Inventory:
        found = self.copies.inventory()
        found.add_arenas(cast(Any, self.own.values()))
        return found


class Job:
    """One epoch on some nodes: snapshots one after the other, of which one at a time is on its way to other nodes. What
    is not safe yet keeps its slot as long as it is under way, and what is safe until something newer is."""

    def __init__(self, sim: Sim, epoch: Epoch, nodes: Sequence[str], ranks: Mapping[str, Sequence[int]]) -> None:
        self.sim, self.epoch, self.names, self.ranks = sim, epoch, list(nodes), ranks
        self.world = sum(map(len, ranks.values()))
        self.at = [NodeAt(name, ADDRESS, tuple(ranks[name])) for name in nodes]
        self.safe: Identity | None = None
        self.under_way: Identity | None = None
        self.unsure = False  # what is safe is being found out: no slot is used again
        self.copying = Copying()
        self.failed: Identity | None = None
        self.emptied: set[str] = set()  # agents that were started again since what is under way began
        self.step = sim.step
        self.placement = self.placed(None)

    def placed(self, before: Placement | None) -> Placement:
        rng = self.sim.random
        lends = [rng.choice((1 << 30, 1 << 30, 0)) if self.sim.tight else 1 << 30 for _ in self.names]
        nodes = [
            PlacementNode(name, len(self.ranks[name]) * (PAGE + 16), lend)
            for name, lend in zip(self.names, lends, strict=True)
        ]
        return place(nodes, Replicas(self.sim.copies), before)

    def snapshot(self) -> None:
        """All ranks stage one; it goes to other nodes unless one is on its way."""
        self.step += 1
        identity = Identity(self.epoch, Version(self.step))
        for name in self.names:
            holder = self.sim.nodes[name]
            for rank in self.ranks[name]:
                self.stage(holder, identity, rank)
        if self.under_way is None and any(kept.holders for kept in self.placement.protected_states):
            self.replicate(identity)

    def stage(self, holder: Holder, identity: Identity, rank: int) -> None:
        """Into a slot that nobody needs: one is kept for what is safe, one for what is on its way."""
        own = [key for key in holder.own if key[1] == rank and key[0].epoch == self.epoch]
        spare = [key for key in own if key[0] not in (self.safe, self.under_way)]
        cell = holder.own.pop(spare[0]) if len(own) >= 3 and spare and not self.unsure else Cell()
        cell.begin_fill()
        cell.fill(identity, rank, self.world)
        holder.own[identity, rank] = cell

    def disconnected(self, name: str, emptied: bool) -> None:
        """What it kept may be gone, and is where it is `emptied`; the coordinator hears of the first only, and late.
        The newest, where it was safe or has failed, is copied again, then or when what is under way ends."""
        self.emptied |= {name} if emptied else set()

        def heard() -> None:
            self.copying.lost()
            self.copy_again()

        self.sim.later(self.sim.nodes[self.names[0]], heard)

    def copy_again(self) -> None:
        newest = Identity(self.epoch, Version(self.step))
        if self.under_way is None and newest in (self.safe, self.failed):
            self.sim.again += 1
            self.replicate(newest)

    def replicate(self, identity: Identity) -> None:
        self.under_way, placement = identity, self.placement
        self.emptied.clear()
        self.copying.begin(identity)
        lead = self.sim.nodes[self.names[0]]
        kept = placement.protected_states
        wanted = [Assignment(holder, {each.node: self.ranks[each.node]}) for each in kept for holder in each.holders]

        def then(error: str) -> bool:
            self.under_way, why_not = None, self.copying.ended(error)
            if why_not:
                self.failed = identity
                self.sim.failed += 1
                if not error:
                    self.sim.unsafe += 1
                    self.sim.later(lead, self.copy_again)
                return False
            self.safe = identity
            self.sim.safe(identity, placement, self.emptied)
            lead.told(lead.agent_name, {"t": "evict", "what": "older-epochs", "epoch": str(self.epoch)})
            for name in self.names[1:]:
                lead.notify(name, {"t": "evict", "what": "older-epochs", "epoch": str(self.epoch)})
            if self.sim.random.random() < 0.1:
                self.placement = self.placed(placement)
            return True

        network = cast(PeerNetwork, lead)
        forgot = self.sim.random.random() < self.sim.forgets  # as a coordinator that was started again

        def begin(known: Identity | None) -> None:
            self.safe = max(filter(None, (known, self.safe)), default=None)
            spawn(replicate(network, lead.copies, lead.service, self.at, identity, wanted, then, known))

        async def find() -> None:
            safe = await find_replicated(network, self.at, lead.inventory(), self.epoch, needs)
            if safe is None:
                then("it is not known what is safe")
                return
            self.unsure = False
            begin(safe.newest)

        if forgot or self.unsure:
            self.unsure = True
            losses = {rank: kept.losses_max for kept in placement.protected_states for rank in self.ranks[kept.node]}
            needs = [losses[rank] for rank in range(self.world)]
            spawn(find())
        else:
            begin(self.safe)


class Sim:
    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.copies = rng.choice((1, 1, 1, 2))
        self.tight = rng.random() < 0.2
        self.forgets = rng.choice((0.0, 0.1, 0.5))
        self.break_rate = rng.choice((0.0, 0.0, 0.01, 0.05))
        self.loss_rate = rng.choice((0.0, 0.002, 0.005, 0.02))
        self.now_s = 0.0
        self.order = itertools.count()
        self.queue: list[tuple[float, int, Holder, Callable[[], None]]] = []
        self.last: dict[tuple[str, str], float] = {}  # by connection: when what was sent last arrives
        self.watched: list[tuple[Holder, Holder, Callable[[], None]]] = []
        self.nodes: dict[str, Holder] = {}
        self.promised: tuple[Identity, Placement] | None = None
        self.gone: set[str] = set()  # since that was promised
        self.job: Job | None = None
        self.led_by = ""  # the newest
        self.epochs = itertools.count(1)
        self.step = 0  # that the line has come to
        self.restart_rate = rng.choice((0.0, 0.0, 0.002, 0.01))
        self.cut_rate = rng.choice((0.0, 0.0, 0.005, 0.02))
        self.failed = self.starts = self.kept = self.losses = self.refused = self.restarts = self.again = 0
        self.unsafe = 0  # copies that all came, while an agent that had some was not connected for a while

    # -- what happens when

    def later(self, holder: Holder, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + self.random.expovariate(10.0), next(self.order), holder, what))

    def after(self, sender: Holder, receiver: Holder, what: Callable[[], None], always: bool = False) -> None:
        """In order on each connection. `always`: also where the receiver is dead, which it is to find out."""
        way = sender.agent_name, receiver.agent_name
        at_s = max(self.now_s + self.random.expovariate(10.0), self.last.get(way, 0.0) + 1e-9)
        self.last[way] = at_s
        heapq.heappush(self.queue, (at_s, next(self.order), sender if always else receiver, what))

    def breaks(self) -> bool:
        return self.random.random() < self.break_rate

    def watch(self, who: Holder, other: Holder, what: Callable[[], None]) -> None:
        self.watched.append((who, other, what))

    def turn(self) -> bool:
        if not self.queue:
            return False
        self.now_s, _, holder, what = heapq.heappop(self.queue)
        if holder.alive:
            what()
        return True

    # -- nodes

    def add(self) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes[name] = Holder(self, name)
        return name

    def lose(self, name: str) -> None:
        lost = self.nodes[name]
        lost.alive = False
        self.losses += 1
        self.gone.add(name)
        lost.own.clear()
        self.end_watched(lost)

    def end_watched(self, lost: Holder) -> None:
        for who, _, what in [each for each in self.watched if each[1] is lost]:
            self.later(who, what)
        self.watched = [each for each in self.watched if each[1] is not lost and each[0] is not lost]

    def restart(self, name: str) -> None:
        """Its agent dies, and another takes its place: it has what the ranks there staged, and nothing that it kept."""
        old = self.nodes[name]
        old.alive = False
        new = self.nodes[name] = Holder(self, name)
        new.own = old.own
        self.restarts += 1
        self.gone.add(name)
        self.end_watched(old)
        assert self.job is not None
        self.job.disconnected(name, emptied=True)

    def cut(self, name: str) -> None:
        """The coordinator has no connection to it for a while: what it waits for from there it does not hear."""
        assert self.job is not None
        lead, other = self.nodes[self.job.names[0]], self.nodes[name]
        for who, _, what in [each for each in self.watched if each[:2] == (lead, other)]:
            self.later(who, what)
        self.job.disconnected(name, emptied=False)

    def safe(self, identity: Identity, placement: Placement, emptied: set[str]) -> None:
        """Told by the coordinator: from here on it has to outlive what its placement says, counted from now. `emptied`:
        who may have lost it since it had it."""
        if self.promised is not None and identity < self.promised[0]:
            return  # what a job before had begun came to its end late
        dead = {kept.node for kept in placement.protected_states if not self.nodes[kept.node].alive}
        self.promised, self.gone = (identity, placement), dead | emptied

    # -- a run

    def start(self) -> None:
        """On whoever is left, and some new ones: from the newest that the inventories give."""
        cut_off = (
            {self.led_by} if self.random.random() < 0.3 else set()
        )  # a coordinator that lives on, and is not asked
        alive = [name for name, node in self.nodes.items() if node.alive and name not in cut_off]
        epoch = Epoch(next(self.epochs), "0" * 16)
        whole = Inventory()
        for name in self.random.sample(alive, len(alive)):
            self.nodes[name].fence.take_lease("start", Epoch(epoch.number - 1, "0" * 16))
            whole.merge(self.nodes[name].inventory(), name)
            self.turns((0, 1, 5, 20))
        found = whole.complete_checkpoints()
        self.turns((0, 10, 30))
        if self.promised is not None:
            identity, placement = self.promised
            if not placement.lost_nodes(self.gone | cut_off):
                assert found, f"{identity} was safe, {self.gone} are gone, and nothing is left"
                assert found[-1] >= identity, f"{identity} was safe, {self.gone} are gone, and {found[-1]} is left"
                self.kept += 1
            for rank, names in whole.holders_by_rank(found[-1]).items() if found else ():
                for name in names:
                    cell = self.nodes[name].held(found[-1]).get(rank)
                    assert cell is not None, (
                        f"{name} has dropped rank {rank} of {found[-1]}, which a start goes on from"
                    )
                    assert bytes(cell.view[PAGE:]) == content(found[-1], rank)
            self.promised = None  # what comes back has lost some of its holders: see Reprotecting
        for name in alive:
            self.nodes[name].fence.on_epoch_begun("start", epoch)
        self.starts += 1
        self.step = found[-1].version.step if found else 0
        names = self.random.sample(alive, self.random.randint(min(1, len(alive)), len(alive)))
        names += [self.add() for _ in range(max(self.random.randint(0, 2), 2 - len(names)))]
        self.random.shuffle(names)
        ranks, at = dict[str, list[int]](), itertools.count()
        for name in names:
            ranks[name] = [next(at) for _ in range(self.random.choice((1, 1, 2)))]
        self.job, self.led_by = Job(self, epoch, names, ranks), names[0]
        self.gone = set()

    def run(self) -> None:
        for _ in range(GENERATIONS):
            if self.job is None:
                self.turns(range(31))  # what was under way goes on for a while, or comes to its end
                self.start()
            assert self.job is not None
            self.job.snapshot()
            for _ in range(self.random.choice((0, 3, 10, 30, 100))):
                self.turn()
                if self.random.random() < self.loss_rate:
                    self.fail()
                    break
                others = [n for n in self.job.names[1:] if self.nodes[n].alive]
                if self.random.random() < self.restart_rate:
                    self.restart(self.random.choice(others))
                if self.random.random() < self.cut_rate:
                    self.cut(self.random.choice(others))
            else:
                if self.random.random() < 0.15:
                    self.fail()

    def turns(self, among: Sequence[int]) -> None:
        for _ in range(self.random.choice(among)):
            self.turn()

    def fail(self) -> None:
        """Some of its nodes are lost, or none: the job is over either way, and is started again."""
        assert self.job is not None
        most = min(len(self.job.names) - 1, 3)
        for name in self.random.sample(self.job.names, self.random.choice((0, 1, 1, 1, min(2, most), most))):
            if self.nodes[name].alive:
                self.lose(name)
        self.job = None


def run(seed: int) -> Sim:
    sim = Sim(seed)
    try:
        sim.run()
    except Exception as exc:
        raise AssertionError(f"schedule {seed}: {exc}") from exc
    return sim


@pytest.mark.timeout(900 * max(1, SCHEDULES // 4000))
def test_what_was_safe_comes_back_whole_whoever_is_lost_and_whenever() -> None:
    losses = kept = failed = refused = restarts = again = unsafe = 0
    for seed in range(SCHEDULES):
        sim = run(seed)
        losses, kept, failed = losses + sim.losses, kept + sim.kept, failed + sim.failed
        refused += sim.refused
        restarts, again, unsafe = restarts + sim.restarts, again + sim.again, unsafe + sim.unsafe
    if SCHEDULES >= 1000:  # the schedules have to reach what they are there for
        assert losses > SCHEDULES
        assert kept > SCHEDULES // 2
        assert failed > SCHEDULES // 20
        assert refused > SCHEDULES // 20
        assert restarts > SCHEDULES // 4
        assert again > SCHEDULES // 20
        assert unsafe > SCHEDULES // 20
