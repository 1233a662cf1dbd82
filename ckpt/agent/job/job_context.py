"""What every part of a job on this node stands on: who is in it, what it has, its events, and that a mistake made for
it ends no other job. Everything runs on the agent's main thread."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ckpt.agent.commit.store_client import JobOptions, StoreClient
from ckpt.agent.job.scheduler import Scheduler
from ckpt.agent.preemption.notice_listener import NoticeListeners
from ckpt.agent.replication.parity_service import ParityService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replication_manager import ReplicationManager
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.event_loop import EventLoop
from ckpt.agent.runtime.workers import MESSAGE_MAX, Lane, Workers
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.division import RankContents
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import AnyPeer, RemoteShare
from ckpt.agent.state.accounting import Accounting
from ckpt.agent.state.cost_model import CostModel
from ckpt.errors import AgentError
from ckpt.events import Event
from ckpt.ipc.control_page import ROUND_MAX
from ckpt.policy.save_options import Every
from ckpt.types import Epoch

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.agent.replication.replication_manager import LentMemory
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.lineage import Claim

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("ckpt")


@dataclass(slots=True)
class Services:
    """What the agent lends to its jobs. `taken(epoch)`: memory, beside the slots of that epoch's job. `copies`: what it
    keeps for other nodes; `network`: the way to them, once there is one; `lenders`: the memory-only ones that are
    there; `awaits_lenders`: whether that is not known of some yet. `listening`: to what the machine's owner says of its
    end. `outcome`: where it is written what a notice came to, unless a job says another place; None: nowhere.
    `account`: what all of it costs. `told`: hears each event. `foreseen`: what is known of the sources of predictions,
    as numbers. `parities`: its part in parity."""

    server: EventLoop
    bulk: Workers
    store: StoreClient
    heartbeat_s: float
    taken: Callable[[Epoch], memory_plan.MemoryUse]
    listening: NoticeListeners | None = None
    outcome: Path | None = None
    copies: ReplicaStore | None = None
    network: Callable[[], PeerNetwork | None] = lambda: None
    account: Accounting = field(default_factory=Accounting)
    told: Callable[[Event], None] = lambda event: None
    foreseen: Callable[[], dict[str, dict[str, float]]] = dict
    parities: ParityService | None = None
    lenders: Callable[[], Sequence[LentMemory]] = tuple
    awaits_lenders: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class RankConnection:
    """One rank as this agent knows it. `peer`: its newest connection."""

    peer: AnyPeer
    pid: int
    held: RankContents


def tell(peer: AnyPeer, event: Event) -> None:
    """Sends an event to a trainer."""
    text = event.message[:4000].encode(errors="replace").decode()
    fields = {"t": "event", "name": event.name, "message": text, "loud": event.loud, "data": event.data}
    try:
        peer.send(fields)
    except (AgentError, ValueError, OverflowError):  # too large for a message, or no text: names may be
        peer.send({**fields, "data": {}})


class JobContext:
    """One job. `epoch`: of this start. `claim`: what the store is told of it, once it is known what it goes on
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
        others: Sequence[RemoteShare] = (),
    ) -> None:
        """`nodes`: where the ranks are, if on several, this one first; `others`: the shares on the others."""
        self.own = LocalShare(world, services.bulk, lambda: services.taken(epoch))  # first: there may be too many
        self.ranks: LocalShare | AllShares = AllShares(self.own, others, nodes[0].name) if nodes else self.own
        self.nodes = nodes
        self.epoch = epoch
        self.world = world
        self.launch = launch
        self.failed = ""
        self.taken_over = False  # from an agent that has died
        self.asks_for_former = False  # what other nodes have of the checkpoint that it goes on from only they know
        self.group = Scheduler(world, Every(seconds=600), random.randrange(1, ROUND_MAX))
        self.group.one_page = len(nodes) <= 1
        self.protection: ReplicationManager | None = None  # where there are several nodes
        self.claim: Claim | None = None
        self.options = JobOptions()
        self.learning: CostModel | None = None  # once a rank has said what the policy is
        self.is_adaptive = False  # whether the intervals follow from that; else it is learnt for the starts after this
        self.outcome_path = services.outcome
        self.checkpoints: dict[int, MemoryCheckpoint] = {}
        self.plan: memory_plan.MemoryPlan | None = None
        self._services = services
        self._members: dict[int, RankConnection] = {}
        self._dropped = False

    def supersede(self, by: str) -> None:
        self.group.supersede(by)

    def guard(self, what: Callable[[], T]) -> T | None:
        """A mistake in what is done for this job ends it in this agent, and no other job. That is told, and its ranks
        are let go: as after the death of an agent, they bring their arenas to the next one. Returns None then."""
        try:
            return what()
        except Exception as exc:
            if self.failed:
                return None
            self.failed = f"{type(exc).__name__}: {exc}"[:MESSAGE_MAX]
            log.exception("epoch %s failed in the agent", self.epoch)
            self.emit("job.failed", f"the agent made a mistake and cannot go on with this job: {self.failed}", True)
            for member in self._members.values():
                member.peer.lose()
            return None

    def _run(self, lane: Lane, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        self._services.bulk.run(lane, work, lambda done: self.guard(lambda: then(done)))

    def _guarded(self, then: Callable[P, T]) -> Callable[P, T | None]:
        return lambda *given, **named: self.guard(lambda: then(*given, **named))

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._services.server.later(delay_s, lambda: self.guard(what))

    def emit(self, name: str, message: str, loud: bool = False, data: dict[str, Any] | None = None) -> None:
        """An event, told to the lowest rank that is there: one is enough."""
        members = [member for _, member in sorted(self._members.items()) if member.peer.open]
        log.log(logging.WARNING if loud else logging.INFO, "%s", message, extra={"told": bool(members)})
        self._services.told(Event(name, message, loud, {"epoch": str(self.epoch), **(data or {})}))
        if members:
            tell(members[0].peer, Event(name, message, loud, data or {}))

    def follow_learning(self) -> None:
        """Asks how often to save, and does so from now on, unless that is given."""
        assert self.learning is not None
        before, now_s = self.learning.decision, time.monotonic()
        if not self.is_adaptive:
            self.learning.ran(now_s)
            return
        self.learning.slots = self.group.slots_in_use
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
