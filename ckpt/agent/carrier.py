"""What one job on this node has, and the carrying out of what its state machine decides.

The arenas, the control page and the checkpoints in memory are here; rounds and slots are in `group`. Everything runs on
the agent's main thread; what takes long goes to a lane of `Bulk` and comes back as a fact.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from ckpt.agent import actions as do
from ckpt.agent import memory, outcome
from ckpt.agent.account import Account
from ckpt.agent.bulk import MESSAGE_MAX, Bulk, Lane, failure
from ckpt.agent.checkpoint import Checkpoint, Part, put_together
from ckpt.agent.control import ROUND_MAX
from ckpt.agent.copies import Copies
from ckpt.agent.divide import Division, Held, make_division
from ckpt.agent.facts import Store
from ckpt.agent.group import Group
from ckpt.agent.learning import ABOUT, Learning
from ckpt.agent.listening import Listening
from ckpt.agent.nodes import Nodes
from ckpt.agent.parities import Parities
from ckpt.agent.protection import Protection
from ckpt.agent.ranks import Ranks
from ckpt.agent.remote import AnyPeer, RemoteRanks, Wanted
from ckpt.agent.server import Server
from ckpt.agent.storeside import Options, StoreSide
from ckpt.agent.writing import Parts, write_part
from ckpt.errors import AgentError, Superseded
from ckpt.events import Event
from ckpt.policy.every import Every, Keep
from ckpt.types import Epoch, Identity, Tick

if TYPE_CHECKING:
    from ckpt.agent.finding import Safe
    from ckpt.agent.lenders import Lent
    from ckpt.agent.network import Network, NodeAt
    from ckpt.store.commit import Committed, Elsewhere
    from ckpt.store.lineage import Claim
    from ckpt.store.packs import Written

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("ckpt")

AWAIT_S = 0.2  # until it is looked again whether all memory-only nodes have said that they are there
MIXED_S = 1.0  # ranks change their layouts at the same step, but their words for it arrive one after the other


@dataclass(slots=True)
class Services:
    """What the agent lends to its jobs. `taken(epoch)`: memory, beside the slots of that epoch's job. `copies`: what it
    keeps for other nodes; `network`: the way to them, once there is one; `lenders`: the memory-only ones that are
    there; `awaits_lenders`: whether that is not known of some yet. `listening`: to what the machine's owner says of its
    end. `outcome`: where it is written what a notice came to, unless a job says another place; None: nowhere.
    `account`: what all of it costs. `told`: hears each event. `foreseen`: what is known of the sources of predictions,
    as numbers. `parities`: its part in parity."""

    server: Server
    bulk: Bulk
    store: StoreSide
    heartbeat_s: float
    taken: Callable[[Epoch], memory.Taken]
    listening: Listening | None = None
    outcome: Path | None = None
    copies: Copies | None = None
    network: Callable[[], Network | None] = lambda: None
    account: Account = field(default_factory=Account)
    told: Callable[[Event], None] = lambda event: None
    foreseen: Callable[[], dict[str, dict[str, float]]] = dict
    parities: Parities | None = None
    lenders: Callable[[], Sequence[Lent]] = tuple
    awaits_lenders: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class Member:
    """One rank as this agent knows it. `peer`: its newest connection."""

    peer: AnyPeer
    pid: int
    held: Held


def tell(peer: AnyPeer, event: Event) -> None:
    """Sends an event to a trainer."""
    text = event.message[:4000].encode(errors="replace").decode()
    fields = {"t": "event", "name": event.name, "message": text, "loud": event.loud, "data": event.data}
    try:
        peer.send(fields)
    except (AgentError, ValueError, OverflowError):  # too large for a message, or no text: names may be
        peer.send({**fields, "data": {}})


class Carrier:
    """A job's hands. `epoch`: of this start. `claim`: what the store is told of it, once it is known what it goes on
    from. `checkpoints`: by slot, what is complete. `ranks`: all of them; `own`: those of this node. `failed`: what
    nobody foresaw and went wrong here: nothing more is decided for this job, and its ranks are let go; "" as long as
    nothing did."""

    def __init__(
        self,
        services: Services,
        epoch: Epoch,
        world: int,
        launch: str,
        nodes: tuple[NodeAt, ...] = (),
        others: Sequence[RemoteRanks] = (),
    ) -> None:
        """`nodes`: where the ranks are, if on several, this one first; `others`: the shares on the others."""
        self.own = Ranks(world, services.bulk, lambda: services.taken(epoch))  # first: there may be too many
        self.ranks: Ranks | Nodes = Nodes(self.own, others, nodes[0].name) if nodes else self.own
        self.nodes = nodes
        self.epoch = epoch
        self.world = world
        self.launch = launch
        self.failed = ""
        self.taken_over = False  # from an agent that has died
        self.asks_for_safe = False  # what is safe in other nodes' memory only they know
        self.group = Group(world, Every(seconds=600), random.randrange(1, ROUND_MAX))
        self.protection: Protection | None = None  # where there are several nodes
        self.claim: Claim | None = None
        self.options = Options()
        self.learning: Learning | None = None  # where the policy is to be learnt
        self.outcome_path = services.outcome
        self.checkpoints: dict[int, Checkpoint] = {}
        self.plan: memory.MemoryPlan | None = None
        self._services = services
        self._members: dict[int, Member] = {}
        self._division: Division | None = None
        self._mixed = False  # a division waits for the other ranks' word of the same tick
        self._disagreed: set[str] = set()
        self._distrusted: set[str] = set()  # tensors that ceased to be replicas
        self._claiming = False  # the claim is on its way to the store
        self._closing = ""  # why the epoch is to be closed as soon as that is settled
        self._beats = 0
        self._beating = False
        self._dropped = False

    def supersede(self, by: str) -> None:
        self.group.supersede(by)

    def _guard(self, what: Callable[[], None]) -> None:
        """A mistake in what is done for this job ends it in this agent, and no other job. That is told, and its ranks
        are let go: as after the death of an agent, they bring their arenas to the next one."""
        try:
            what()
        except Exception as exc:
            if self.failed:
                return
            self.failed = f"{type(exc).__name__}: {exc}"[:MESSAGE_MAX]
            log.exception("epoch %s failed in the agent", self.epoch)
            self.emit("job.failed", f"the agent made a mistake and cannot go on with this job: {self.failed}", True)
            for member in self._members.values():
                member.peer.lose()

    def _run(self, lane: Lane, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        self._services.bulk.run(lane, work, lambda done: self._guard(lambda: then(done)))

    def _guarded(self, then: Callable[P, None]) -> Callable[P, None]:
        return lambda *given, **named: self._guard(lambda: then(*given, **named))

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._services.server.later(delay_s, lambda: self._guard(what))

    def emit(self, name: str, message: str, loud: bool = False, data: dict[str, Any] | None = None) -> None:
        """An event, told to the lowest rank that is there: one is enough."""
        members = [member for _, member in sorted(self._members.items()) if member.peer.open]
        log.log(logging.WARNING if loud else logging.INFO, "%s", message, extra={"told": bool(members)})
        self._services.told(Event(name, message, loud, {"epoch": str(self.epoch), **(data or {})}))
        if members:
            tell(members[0].peer, Event(name, message, loud, data or {}))

    def _act(self, action: do.Action) -> None:
        match action:
            case do.SetWord(word):
                self.ranks.announce(word)
            case do.SetVerdict(number):
                self.ranks.leave(number)
            case do.Divide():
                self._divide()
            case do.MakeArenas(slot, sizes):
                self._make_arenas(slot, sizes)
            case do.Offer(slot):
                self.ranks.offer(slot, self.group.division)
            case do.Assemble(slot, number, tick):
                self._assemble(slot, number, tick)
            case do.Replicate(slot, _, tick):
                self._replicate(slot, Identity(self.epoch, tick))
            case do.Commit(slot):
                self._commit(slot)
            case do.Recycle(slot):
                self.checkpoints.pop(slot, None)
            case do.Answer((peer, request_id), body):
                peer.reply(request_id, body)
            case do.Refuse((peer, request_id), kind, message):
                peer.send({"t": "error", "id": request_id, "kind": kind, "message": message})
            case do.Tell(body):
                for member in self._members.values():
                    member.peer.send(body)
            case do.Emit(name, message, loud, data):
                self.emit(name, message, loud, data)
            case do.Outcome(body):
                self._write_outcome(body)
            case do.Acknowledge(source, key, node):
                self._acknowledge(source, key, node)
            case do.Close(reason):
                self._close(reason)

    def _divide(self, patient: bool = True) -> None:
        """Where ranks speak of different ticks, the others' words for the newest are probably on their way."""
        self._mixed = patient and self._is_mixed()
        if self._mixed:
            self._later(MIXED_S, lambda: self._divide(False) if self._mixed else None)
            return
        version, before = self.group.layouts_version, self._division
        ranks = [self._members[rank].held for rank in range(self.world)]
        distrusted = frozenset(self._distrusted)
        self._run(
            Lane.MEMORY, lambda: make_division(ranks, before, distrusted), lambda done: self._divided(version, done)
        )

    def _divided(self, version: int, done: Future[Division]) -> None:
        if self._dropped:
            return
        if error := failure(done):
            self.emit("division.failed", f"the state cannot be divided among the ranks: {error}", True)
            self.group.unplannable(version, error)
            return
        division = done.result()
        sizes = dict(enumerate(division.arena_bytes))

        def measured(plan: memory.MemoryPlan | None, error: str) -> None:
            self._measured(version, division, plan, error)

        self.ranks.measure(sizes, self.options.limits.memory, self._guarded(measured))

    def _measured(self, version: int, division: Division, plan: memory.MemoryPlan | None, error: str) -> None:
        if plan is None:
            self.group.unplannable(version, f"the memory for it cannot be planned: {error}")
            return
        slots = self._place(division, plan.slots)
        if slots != plan.slots:
            plan = replace(plan, slots=slots)
        if not self.group.planned(version, division.id, division.arena_bytes, plan.slots):
            return
        if division.differing and (self._division is None or division.differing != self._division.differing):
            names = ", ".join(sorted(division.differing)[:5])
            text = f"{len(division.differing)} tensors have one name and other values on each rank: saved per rank"
            self.emit("layout.differs", f"{text}: {names}", True, {"names": sorted(division.differing)[:100]})
        if self.plan is None or (plan.slots, plan.slot_bytes) != (self.plan.slots, self.plan.slot_bytes):
            self.emit("memory.plan", f"memory: {plan}", plan.slots < memory.SLOTS, plan.table())
        self.plan, self._division = plan, division
        for rank in self._members:
            fields = {
                "t": "plan",
                "division": division.id,
                "frame_bytes": division.frame_bytes,
                "arena_bytes": division.arena_bytes[rank],
            }
            self.ranks.send(rank, fields, division.plans[rank])

    def _place(self, division: Division, slots: int, fixed: int | None = None) -> int:
        """Decides which nodes keep copies of whose snapshots; how many of so many slots that leaves. `fixed`: as many
        are in use already."""
        nodes, protection = self.ranks, self.protection
        if protection is None or not isinstance(nodes, Nodes):
            return slots
        before, sizes = protection.table(), nodes.by_name(dict(enumerate(division.arena_bytes)))
        slots = protection.place(sizes, nodes.plans_by_name(), fixed)
        self.group.replicates, self.group.kept = protection.protects, protection.kept
        self.group.unsure = self.group.unsure and (protection.protects or self._services.awaits_lenders())
        if self.learning is not None and self.learning.peers != protection.protects:
            self.learning.peers = protection.protects
            self.follow_learning()
        if protection.table() != before:
            self.emit("peers.placed", protection.describe(), not protection.protects, protection.shown())
        return slots

    def place_again(self) -> None:
        """Whom copies may be had at is news: who keeps them is decided anew, for the slots that there are."""
        if self._division is not None and self.group.slots_in_use:
            self._place(self._division, self.group.slots_in_use, self.group.slots_in_use)

    def _replicate(self, slot: int, identity: Identity) -> None:
        protection = self.protection
        assert protection is not None  # else nothing is replicated
        began_s = time.monotonic()

        def ended(error: str) -> None:
            now_s = time.monotonic()
            self.group.replicated(slot, error, now_s)
            seconds = now_s - began_s
            if error:
                text = f"step {identity.tick.step} is not in other nodes' memory: {error}"
                self.emit("peers.failed", text, True, {"identity": str(identity)})
                return
            if self.learning is not None:
                self.learning.replicated(seconds)
            made = self.checkpoints.get(slot)
            count = int(made.manifest.frames["length"].sum()) if made is not None else 0
            self._services.account.replicated(self.epoch, identity.tick, count)
            facts = {"identity": str(identity), "seconds": seconds}
            self.emit(
                "peers.done", f"step {identity.tick.step} is in other nodes' memory after {seconds:.2f} s", data=facts
            )

        def found_safe(found: Safe | None) -> None:
            if found is None:
                ended("a node that may keep what is safe has not said what it has")
                return
            self.asks_for_safe = False
            self.group.found_safe(found.newest.tick if found.newest is not None else None)
            if found.whole is not None:
                self._services.account.found("peer", self.epoch, found.whole.tick)
            self._replicate(slot, identity)

        if not self.group.replicates:
            ended("no other node has room for any of it any more")
            return
        if self.asks_for_safe and self._services.awaits_lenders():
            self._later(AWAIT_S, lambda: self._replicate(slot, identity))
            return
        if self.asks_for_safe:
            held = [made.identity for made in self.checkpoints.values()]
            protection.find_safe(self.epoch, held, self.world, self._guarded(found_safe))
            return
        own = dict(self.own.arenas.get(slot, {}))
        safe = Identity(self.epoch, self.group.safe_tick) if self.group.safe_tick is not None else None
        protection.replicate(identity, safe, own, self._guarded(ended))

    def _make_arenas(self, slot: int, sizes: tuple[int, ...]) -> None:
        def made(sizes_made: dict[int, int], error: str) -> None:
            if error:
                self._fewer(slot, error)
            else:
                self.group.made(slot, tuple(sizes_made[rank] for rank in range(self.world)))

        self.ranks.make(slot, dict(enumerate(sizes)), self._guarded(made))

    def _fewer(self, slot: int, why: str) -> None:
        message = f"slot {slot} cannot be had ({why}): {slot} slots are in use"
        self.emit("memory.short", message, True)
        self.group.fewer_slots(slot, f"not one arena fits into memory: {why}; free some, or save less")
        self.group.made(slot, ())

    def _assemble(self, slot: int, number: int, tick: Tick) -> None:
        identity = Identity(self.epoch, tick)
        round_ = self.group.slots[slot].round
        if round_ is not None:
            self._services.account.staged(time.monotonic(), tick, max(round_.staged.values()))
        if self.learning is not None and round_ is not None:
            self.learning.stalled(max(round_.staged.values()))
            self.follow_learning()

        def read(parts: list[Part], error: str) -> None:
            if error:
                self.group.assembled(slot, number, error)
                return
            arenas = self.ranks.arenas[slot]
            self._run(
                Lane.MEMORY,
                lambda: put_together(identity, parts, arenas),
                lambda done: self._assembled(slot, number, done),
            )

        self.ranks.read(slot, identity, self._guarded(read))

    def _assembled(self, slot: int, number: int, done: Future[Checkpoint]) -> None:
        error = failure(done)
        if not error:
            made = done.result()
            self.checkpoints[slot] = made
            tick, count = made.identity.tick, int(made.manifest.frames["length"].sum())
            self._services.account.complete(self.epoch, tick, count)
            text, facts = f"step {tick.step} is whole in memory", {"identity": str(made.identity), "bytes": count}
            self._services.told(Event("snapshot.done", text, data=facts))
            if set(made.disagreed) - self._disagreed:
                self._disagreed.update(made.disagreed)
                text = "tensors turned out to differ between the ranks that hold them and were saved per rank"
                self.emit("snapshot.differs", f"{len(made.disagreed)} {text}: {', '.join(made.disagreed[:5])}", True)
        self.group.assembled(slot, number, error)

    def _commit(self, slot: int) -> None:
        checkpoint, claim, store = self.checkpoints[slot], self.claim, self._services.store
        assert claim is not None  # nothing is appointed before it is there
        options = self.options
        about: dict[str, Any] = {
            "host": socket.gethostname(),
            "launch": self.launch,
            "world": self.world,
            "time_s": time.time(),
            "disagreed": list(checkpoint.disagreed[:100]),
        }
        if self.learning is not None:
            self.learning.commit_began(time.monotonic(), self.ranks.hindmost())
            about[ABOUT] = self.learning.about(self._services.foreseen())
        ranks = self.ranks
        elsewhere = self._elsewhere(slot, checkpoint, ranks) if isinstance(ranks, Nodes) else None
        self._run(
            Lane.COMMIT,
            lambda: store.commit(claim, checkpoint, options, about, elsewhere),
            lambda done: self._committed(slot, checkpoint.identity, done),
        )

    def _elsewhere(self, slot: int, checkpoint: Checkpoint, nodes: Nodes) -> Elsewhere:
        """Each other node writes the frames that lie there, or who keeps copies of them does."""
        round_ = self.group.slots[slot].round

        def holders() -> dict[str, list[str]]:
            if self.protection is None or round_ is None or round_.peer is not Store.DONE:
                return {}
            return self.protection.holders(checkpoint.identity)

        server, margin_s = self._services.server, self._services.heartbeat_s
        ask = self._have_written
        spared = self.group.left_to_others
        services = ask, server.post, server.later, margin_s
        return Parts(checkpoint, self.options, nodes.ranks_elsewhere, holders, *services, spared=spared)

    def _have_written(self, name: str, wanted: Wanted, then: Callable[[Written | None, str], None]) -> None:
        """By the node whose ranks staged it, or by another one, which has copies, or makes them from parity."""
        owners = {self.ranks.node_of(rank) for rank in np.unique(wanted.ranks).tolist()}
        if self.protection is None or name in owners:
            self._have_copies_written(name, wanted, then)
            return

        def made(holder: str, error: str) -> None:
            if error:
                then(None, error)
            else:
                self._have_copies_written(holder, wanted, then)

        (owner,) = owners
        self.protection.remake(wanted.identity, owner, name, self._guarded(made))

    def _have_copies_written(self, name: str, wanted: Wanted, then: Callable[[Written | None, str], None]) -> None:
        nodes, copies = self.ranks, self._services.copies
        if isinstance(nodes, Nodes) and name in nodes.others:
            nodes.others[name].write(wanted, then)
            return
        network = self._services.network()
        if name and network is not None:  # a memory-only node
            RemoteRanks(network, name, self.epoch, self.world, ()).write(wanted, then)
            return
        held = copies.of(wanted.identity) if copies is not None else {}
        if copies is None or not set(np.unique(wanted.ranks).tolist()) <= held.keys():
            then(None, "it has no copies of them")
            return

        def written(done: Future[Written]) -> None:
            copies.release(wanted.identity)
            then(None if failure(done) else done.result(), failure(done))

        store = self._services.store  # in a lane of its own: the one that commits waits for it
        copies.lease(wanted.identity)  # a newer checkpoint may become safe meanwhile
        self._run(Lane.MEMORY, lambda: write_part(store, wanted, held), written)

    def _committed(self, slot: int, identity: Identity, done: Future[Committed]) -> None:
        error = failure(done)
        if isinstance(done.exception(), Superseded):
            self.supersede(error)
        if not error:  # told before anybody who waits for it goes on: the receipt counts it
            self._tell_committed(identity, done.result())
        now_s = time.monotonic()
        self.group.committed(slot, error, now_s)
        if self.learning is not None:
            took = None if error else (done.result().seconds, done.result().stored_bytes)
            self.learning.commit_ended(now_s, self.ranks.hindmost(), took)
            self.follow_learning()
        if error:
            self._services.account.commit_failed()
            self.emit("commit.failed", f"step {identity.tick.step} was not committed: {error}", True)
            return
        keep, store = self.options.keep, self._services.store
        if keep != Keep() and not self.group.superseded_by:
            self._run(Lane.COMMIT, lambda: store.prune(self.epoch, keep), self._pruned)

    def _tell_committed(self, identity: Identity, result: Committed) -> None:
        sizes = result.raw_bytes, result.stored_bytes
        self._services.account.committed(self.epoch, identity.tick, result.seconds, *sizes)
        text = (
            f"step {identity.tick.step} is committed: {result.raw_bytes} bytes, {result.stored_bytes} stored in "
            f"{result.packs} packs, {result.referred_bytes} unchanged, in {result.seconds:.2f} s"
        )
        facts = {
            "identity": str(identity),
            "raw_bytes": result.raw_bytes,
            "stored_bytes": result.stored_bytes,
            "referred_bytes": result.referred_bytes,
            "seconds": result.seconds,
        }
        self.emit("commit.done", text, data=facts)

    def follow_learning(self) -> None:
        """Asks how often to save, and does so from now on."""
        assert self.learning is not None
        before, now_s = self.learning.decision, time.monotonic()
        decision = self.learning.decide(now_s)
        self.group.paced(decision.local_s, decision.store_s, now_s)
        if (decision.local_s, decision.snapshots) != (before.local_s, before.snapshots):
            facts = {
                "local_s": decision.local_s,
                "store_s": decision.store_s,
                "local_by": decision.local_by,
                "store_by": decision.store_by,
                "overhead": decision.overhead,
                "unmet": list(decision.unmet),
            }
            self.emit("policy.changed", decision.explain(), data=facts)

    def _pruned(self, done: Future[dict[str, Any]]) -> None:
        if error := failure(done):
            self.emit("prune.failed", f"old checkpoints could not be pruned now: {error}", True)

    def _claim(self, claim: Claim) -> None:
        store = self._services.store
        self._claiming = True
        self._run(Lane.STORE, lambda: store.claim(claim), lambda done: self._claimed(failure(done)))

    def _claimed(self, error: str) -> None:
        self._claiming = False
        if self._closing:
            self._close(self._closing)
        if error:
            message = f"the store does not answer; this start is claimed before its first commit: {error}"
            self.emit("claim.postponed", message, True)

    def _beat(self) -> None:
        """Shows in the store that the epoch lives, as long as it does."""
        if self._dropped or self.failed or self.group.all_gone or self.group.superseded_by:
            return
        if not self._beating:  # else the store is slow: the beats behind one another would say no more than one
            self._beating = True
            self._beats += 1
            beats, store = self._beats, self._services.store
            self._run(Lane.STORE, lambda: store.heartbeat(self.epoch, beats), self._beaten)
        self._later(self._services.heartbeat_s, self._beat)

    def _beaten(self, done: Future[None]) -> None:
        self._beating = False
        if error := failure(done):
            log.info("no heartbeat: %s", error)

    def _write_outcome(self, body: dict[str, Any]) -> None:
        if self.outcome_path is None:
            return
        try:
            outcome.write(self.outcome_path, self.epoch, self.launch, body)
        except OSError as exc:
            self.emit("outcome.failed", f"what was saved could not be written to {self.outcome_path}: {exc}", True)

    def _acknowledge(self, source: str, key: str, node: str) -> None:
        def ended(error: str) -> None:
            self.group.acknowledged()
            what = f"{source} was told that {key} may begin: the job has left, and is in the store"
            text = f"{source} was not told that {key} may begin: {error}" if error else what
            facts = {"source": source, "key": key, "error": error}
            self.emit("notice.unacknowledged" if error else "notice.acknowledged", text, not error, facts)

        then = self._guarded(ended)
        if node and isinstance(self.ranks, Nodes):
            self.ranks.others[node].acknowledge(source, key, then)
        elif self._services.listening is not None:
            self._services.listening.acknowledge(source, key, then)
        else:
            ended("nothing is listened to")

    def _close(self, reason: str) -> None:
        """Not beside the claim: one that lands after it would leave an epoch that nobody closes."""
        if self._claiming:
            self._closing = reason
            return
        store = self._services.store
        self._run(Lane.STORE, lambda: store.end(self.epoch, reason), self._ended)

    def _ended(self, done: Future[None]) -> None:
        if error := failure(done):
            log.warning("epoch %s could not be closed in the store: %s", self.epoch, error)
        self.group.closed()

    def _is_mixed(self) -> bool:
        return len({member.held.tick for member in self._members.values()}) > 1
