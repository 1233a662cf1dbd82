"""The base of a job on this node: its ranks, memory, options and events, and the guard that keeps its errors from other
jobs. Everything runs on the agent's main thread.
"""

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
from ckpt.agent.replication.replica_service import ReplicaService
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
from ckpt.agent.state.rank_presence import Presence
from ckpt.errors import AgentError
from ckpt.events import Event
from ckpt.ipc.control_page import ATTEMPT_MAX
from ckpt.policy.adaptive import Adaptive
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
    """What the agent provides to its jobs.

    - `taken(epoch)`: memory in use beside the slots of that epoch's job.
    - `replicas`: the replicas that this node keeps for others. `replica_service`: its part in making replicas.
    - `network`: the other nodes; None until there is one. `memory_nodes`: the reachable memory-only nodes.
      `awaits_memory_nodes`: True while the state of some is unknown.
    - `notice_listeners`: the sources of preemption notices. `outcome_path`: the file for a notice's outcome unless a
      job names another; None: no file.
    - `account`: the measured costs. `on_event`: receives each event. `alarm_scores`: figures on the sources of
      predictions."""

    server: EventLoop
    workers: Workers
    store: StoreClient
    heartbeat_s: float
    memory_use: Callable[[Epoch], memory_plan.MemoryUse]
    notice_listeners: NoticeListeners | None = None
    outcome_path: Path | None = None
    replicas: ReplicaStore | None = None
    network: Callable[[], PeerNetwork | None] = lambda: None
    account: Accounting = field(default_factory=Accounting)
    on_event: Callable[[Event], None] = lambda event: None
    alarm_scores: Callable[[], dict[str, dict[str, float]]] = dict
    replica_service: ReplicaService | None = None
    memory_nodes: Callable[[], Sequence[LentMemory]] = tuple
    awaits_memory_nodes: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class RankConnection:
    """One rank as this agent knows it. `peer`: its newest connection."""

    peer: AnyPeer
    pid: int
    contents: RankContents


def send_event(peer: AnyPeer, event: Event) -> None:
    """Sends an event to a trainer."""
    text = event.message[:4000].encode(errors="replace").decode()
    fields = {"t": "event", "name": event.name, "message": text, "loud": event.loud, "data": event.data}
    try:
        peer.send(fields)
    except (AgentError, ValueError, OverflowError):  # too large for a message, or not encodable
        peer.send({**fields, "data": {}})


class JobContext:
    """One job. `epoch`: of this start. `claim`: the claim for the store, once the parent checkpoint is known.
    `checkpoints`: the complete checkpoints by slot. `ranks`: all ranks; `local_share`: those of this node.
    `internal_error`: an unexpected error in this agent, or "". After it, nothing is decided for the job any more and
    its ranks are disconnected."""

    def __init__(
        self,
        services: Services,
        epoch: Epoch,
        world: int,
        launch: str,
        nodes: tuple[NodeAt, ...] = (),
        others: Sequence[RemoteShare] = (),
    ) -> None:
        """`nodes`: the nodes of the ranks if there are several, this one first. `others`: the shares of the other
        nodes."""
        # Made first, since it fails if there are too many ranks.
        self.local_share = LocalShare(world, services.workers, lambda: services.memory_use(epoch))
        self.ranks = AllShares(self.local_share, others, nodes[0].name if nodes else "")
        self.nodes = nodes
        self.epoch = epoch
        self.world = world
        self.launch = launch
        self.internal_error = ""
        self.is_taken_over = False  # from an agent that has died
        # Whether the parent checkpoint may be replicated again: it is whole in memory, or only other nodes know that.
        self.needs_rereplication = False
        self.scheduler = Scheduler(world, Every(seconds=600), random.randrange(1, ATTEMPT_MAX))
        self.scheduler.is_single_node = len(nodes) <= 1
        self.replication_manager: ReplicationManager | None = None  # None for a single node
        self.claim: Claim | None = None
        self.options = JobOptions()
        self.cost_model: CostModel | None = None  # once rank 0 has sent the policy
        self.policy: Every | Adaptive = Every(seconds=600)  # until rank 0 has sent one
        self.outcome_path = services.outcome_path
        self.checkpoints: dict[int, MemoryCheckpoint] = {}
        self.plan: memory_plan.MemoryPlan | None = None
        self._services = services
        self._members: dict[int, RankConnection] = {}
        self._ranks_by_peer: dict[AnyPeer, int] = {}  # of `_members`
        self._is_dropped = False
        self._has_left_by_notice = False  # a rank left because of a notice: a start may follow

    def supersede(self, by: str) -> None:
        self.scheduler.supersede(by)

    def guard(self, what: Callable[[], T]) -> T | None:
        """Runs `what` and returns its result. An exception ends this job in this agent, and no other job. The error is
        reported, the ranks are disconnected, and None is returned. As after an agent's death, the ranks bring their
        arenas to the next agent."""
        try:
            return what()
        except Exception as exc:
            if self.internal_error:
                return None
            self.internal_error = f"{type(exc).__name__}: {exc}"[:MESSAGE_MAX]
            log.exception("epoch %s failed in the agent", self.epoch)
            self.emit(
                "job.failed", f"the agent made a mistake and cannot go on with this job: {self.internal_error}", True
            )
            for member in self._members.values():
                member.peer.disconnect()
            return None

    def _run(self, lane: Lane, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        self._services.workers.run(lane, work, lambda done: self.guard(lambda: then(done)))

    def _guard_callback(self, then: Callable[P, T]) -> Callable[P, T | None]:
        return lambda *given, **named: self.guard(lambda: then(*given, **named))

    def _call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._services.server.call_later(delay_s, lambda: self.guard(what))

    def emit(self, name: str, message: str, loud: bool = False, data: dict[str, Any] | None = None) -> None:
        """Emits an event and sends it to the lowest connected rank: one rank is enough."""
        members = [member for _, member in sorted(self._members.items()) if member.peer.is_open]
        log.log(logging.WARNING if loud else logging.INFO, "%s", message, extra={"told": bool(members)})
        self._services.on_event(Event(name, message, loud, {"epoch": str(self.epoch), **(data or {})}))
        if members:
            send_event(members[0].peer, Event(name, message, loud, data or {}))

    @property
    def ended_cleanly(self) -> bool:
        """True if no work was lost: each rank came to its end, or left when told to."""
        group = self.scheduler
        return (
            not group.superseded_by
            and group.all_gone
            and all(m.presence is Presence.LEFT and not m.has_failed for m in group.rank_states)
        )

    @property
    def is_finished(self) -> bool:
        """True if the job is done and needs no restart: each rank came to its end, and none left because of a
        notice."""
        return self.ended_cleanly and not self._has_left_by_notice

    @property
    def is_adaptive(self) -> bool:
        """Whether the cost model sets the intervals. If not, it still learns for later starts."""
        return isinstance(self.policy, Adaptive)

    def apply_cost_model(self) -> None:
        """Has the cost model choose the save intervals, unless the user fixed them, and applies them from now on."""
        assert self.cost_model is not None
        before, now_s = self.cost_model.decision, time.monotonic()
        if not self.is_adaptive:
            self.cost_model.record_run_time(now_s)
            return
        self.cost_model.slots = self.scheduler.slot_limit
        decision = self.cost_model.decide(now_s)
        self.scheduler.set_intervals(decision.local_s, decision.store_s, now_s)
        if (decision.local_s, decision.snapshots) != (before.local_s, before.snapshots):
            facts = {
                "local_s": decision.local_s,
                "store_s": decision.store_s,
                "local_by": decision.local_by,
                "store_by": decision.store_by,
                "overhead": decision.overhead,
                "unmet": list(decision.unmet_limits),
            }
            self.emit("policy.changed", decision.explain(), data=facts)
