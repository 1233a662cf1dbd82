"""What the parts of one job share: its identity and facts, the guard that keeps its errors from other jobs, and its
events. Everything runs on the agent's main thread.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.job_options import JobOptions
from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.preemption.notice_listener import NoticeListeners
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.coroutines import Coro, Promise, Task, run_on, spawn, work_on
from ckpt.agent.runtime.event_loop import EventLoop
from ckpt.agent.runtime.workers import MESSAGE_MAX, Lane, Workers
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.division import RankContents
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import AnyPeer, RemoteShare
from ckpt.agent.state.accounting import Accounting
from ckpt.agent.state.cost_model import CostModel
from ckpt.agent.state.rank_presence import Presence
from ckpt.agent.state.slots import WorkState
from ckpt.errors import AgentError
from ckpt.events import Event
from ckpt.ipc.control_page import ATTEMPT_MAX
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.interval_solver import START_S
from ckpt.policy.known import PRIORS_ONLY
from ckpt.policy.save_options import Every
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.agent.replication.replication_manager import LentMemory
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.lineage import Claim

T = TypeVar("T")

log = logging.getLogger("ckpt")


@dataclass(slots=True)
class Services:
    """What the agent provides to its jobs.

    - `memory_use(epoch)`: memory in use beside the slots of that epoch's job.
    - `notice_listeners`: the sources of preemption notices. `outcome_path`: the file for a notice's outcome unless a
      job names another; None: no file.
    - `replicas`: the replicas that this node keeps for others. `replica_service`: its part in making replicas.
    - `network`: the other nodes; None until there is one. `memory_nodes`: the reachable memory-only nodes.
      `awaits_memory_nodes`: True while the state of some is unknown.
    - `account`: the measured costs. `on_event`: receives each event. `alarm_scores`: figures on the sources of
      predictions."""

    server: EventLoop
    workers: Workers
    store: StoreClient
    heartbeat_s: float
    memory_use: Callable[[Epoch], memory_plan.MemoryUse]
    notice_listeners: NoticeListeners
    outcome_path: Path | None
    replicas: ReplicaStore
    network: Callable[[], PeerNetwork | None]
    account: Accounting
    on_event: Callable[[Event], None]
    alarm_scores: Callable[[], dict[str, dict[str, float]]]
    replica_service: ReplicaService
    memory_nodes: Callable[[], Sequence[LentMemory]] = tuple
    awaits_memory_nodes: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class RankConnection:
    """One rank as its coordinator knows it. `peer`: its newest connection."""

    peer: AnyPeer
    contents: RankContents


class HasPeer(Protocol):
    @property
    def peer(self) -> AnyPeer: ...


ConnectionT = TypeVar("ConnectionT", bound=HasPeer)


class RankTable(Generic[ConnectionT]):
    """The newest connection of each rank that has joined a job through this agent, `by_rank`. Ranks of other nodes have
    one, too, if the job is coordinated here."""

    def __init__(self) -> None:
        self.by_rank: dict[int, ConnectionT] = {}
        self._ranks_by_peer: dict[AnyPeer, int] = {}

    def __iter__(self) -> Iterator[ConnectionT]:
        """The connections, lowest rank first."""
        return (self.by_rank[rank] for rank in sorted(self.by_rank))

    def rank_of(self, peer: AnyPeer) -> int | None:
        return self._ranks_by_peer.get(peer)

    def connect(self, rank: int, connection: ConnectionT) -> None:
        """Takes the rank's connection, and closes its former one."""
        known = self.by_rank.get(rank)
        if known is not None and known.peer is not connection.peer:
            known.peer.unwatch_death()
            known.peer.disconnect()
            del self._ranks_by_peer[known.peer]
        self.by_rank[rank] = connection
        self._ranks_by_peer[connection.peer] = rank

    def send_event(self, event: Event) -> None:
        """Logs an event, and sends it to the lowest connected rank: one rank is enough."""
        peer = next((each.peer for each in self if each.peer.is_open), None)
        level = logging.WARNING if event.loud else logging.INFO
        log.log(level, "%s", event.message, extra={"told": peer is not None})
        if peer is not None:
            send_event(peer, event)

    def unwatch(self) -> None:
        """Stops watching the ranks' processes."""
        for each in self:
            each.peer.unwatch_death()


def send_event(peer: AnyPeer, event: Event) -> None:
    """Sends an event to a trainer."""
    text = event.message[:4000].encode(errors="replace").decode()
    fields = {"t": "event", "name": event.name, "message": text, "loud": event.loud, "data": event.data}
    try:
        peer.send(fields)
    except (AgentError, ValueError, OverflowError):  # too large for a message, or not encodable
        peer.send({**fields, "data": {}})


class JobContext:
    """One job's identity and facts. `epoch`: of this start. `nodes`: the nodes of its ranks if there are several, this
    one first. `claim`: the claim for the store, once the parent checkpoint is known. `checkpoints`: the complete
    checkpoints by slot. `connections`: all ranks that have joined. `shares`: all ranks by node. `internal_error`: an
    unexpected error in this agent, or "". After it, nothing is decided for the job any more and its ranks are
    disconnected. `is_taken_over`: from an agent that has died. `has_left_by_notice`: a rank left because of a notice: a
    start may follow."""

    def __init__(
        self,
        services: Services,
        epoch: Epoch,
        world: int,
        launch: str,
        nodes: tuple[NodeAt, ...] = (),
        others: Sequence[RemoteShare] = (),
    ) -> None:
        """`others`: the shares of the other nodes. Errors: AgentError if a job cannot have so many ranks."""
        self.services = services
        self.epoch, self.world, self.launch, self.nodes = epoch, world, launch, nodes
        own = LocalShare(world, services.workers, lambda: services.memory_use(epoch))
        self.shares = AllShares(own, others, nodes[0].name if nodes else "")
        self.scheduler = Scheduler(world, Every(seconds=600), random.randrange(1, ATTEMPT_MAX))
        self.scheduler.facts.is_single_node = len(nodes) <= 1
        self.connections: RankTable[RankConnection] = RankTable()
        self.checkpoints: dict[int, MemoryCheckpoint] = {}
        self.options = JobOptions()
        self.claim: Claim | None = None
        self.internal_error = ""
        self.is_taken_over = False
        self.is_dropped = False
        self.has_left_by_notice = False

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
            for each in self.connections:
                each.peer.disconnect()
            return None

    def spawn(self, coroutine: Coro[None]) -> Task[None]:
        """Starts a task of this job, each step of which runs under `guard`."""
        return spawn(coroutine, self.guard)

    def work_on(self, lane: Lane, work: Callable[[], T]) -> Promise[T]:
        """Runs `work` on a worker thread. Errors: those of `work`."""
        return work_on(self.services.workers, lane, work)

    def run_on(self, lane: Lane, work: Callable[[], T]) -> Coro[T]:
        """Runs `work` on a worker thread. Errors: CkptError, also for any other error of `work`."""
        return run_on(self.services.workers, lane, work)

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Runs `what` under `guard` after a delay."""
        self.services.server.call_later(delay_s, lambda: self.guard(what))

    def emit(self, name: str, message: str, loud: bool = False, data: dict[str, Any] | None = None) -> None:
        """Emits an event and sends it to the lowest connected rank."""
        self.services.on_event(Event(name, message, loud, {"epoch": str(self.epoch), **(data or {})}))
        self.connections.send_event(Event(name, message, loud, data or {}))

    # -- the end of the job

    @property
    def ended_cleanly(self) -> bool:
        """True if no work was lost: each rank came to its end, or left when told to."""
        scheduler = self.scheduler
        return (
            not scheduler.facts.superseded_by
            and scheduler.facts.all_gone
            and all(m.presence is Presence.LEFT and not m.has_failed for m in scheduler.rank_states)
        )

    @property
    def is_finished(self) -> bool:
        """True if the job is done and needs no restart: each rank came to its end, and none left because of a
        notice."""
        return self.ended_cleanly and not self.has_left_by_notice

    @property
    def needs_commit_retry(self) -> bool:
        """True if the newest checkpoint failed to commit and no trainer is left to hear it."""
        scheduler = self.scheduler
        if (
            not scheduler.facts.all_gone
            or scheduler.facts.superseded_by
            or scheduler.is_at_work
            or scheduler.facts.is_closed_in_store
        ):
            return False
        return scheduler.slots.newest_commit_state is WorkState.FAILED and not self.internal_error

    @property
    def is_orphaned(self) -> bool:
        """True if a newer start superseded this job, and its checkpoints may have to be committed if that start
        fails."""
        return bool(self.checkpoints) and not self.internal_error and self.scheduler.commits.has_uncommitted_newest

    @property
    def ended_without_checkpoint(self) -> bool:
        """True if all ranks are gone, and the job has no complete checkpoint and will make none."""
        return self.scheduler.facts.all_gone and not (
            self.scheduler.is_at_work or self.checkpoints or self.has_unread_arenas
        )

    # -- its memory

    @property
    def has_unread_arenas(self) -> bool:
        """True if arenas of a former agent may hold the newest checkpoint, for a start on several nodes to find."""
        return self.is_taken_over and bool(self.nodes) and not self.checkpoints

    @property
    def has_complete(self) -> bool:
        """True if a complete checkpoint exists that, with several nodes, survives the loss of one node."""
        return self.scheduler.replicas.survives_node_loss or bool(self.checkpoints and not self.nodes)

    @property
    def terms(self) -> CommitTerms | None:
        """The terms by which other nodes commit the job's checkpoints; None: the job has not begun to train."""
        options = self.options
        return CommitTerms(self.claim, options.codec, options.limits.bandwidth) if self.claim is not None else None

    def find_checkpoint(self, identity: Identity) -> tuple[int, MemoryCheckpoint] | None:
        """The slot and the checkpoint; None: not in memory. The caller must take a lease on the slot to use it."""
        return next(((slot, c) for slot, c in self.checkpoints.items() if c.identity == identity), None)


class JobPolicy:
    """The save policy of one job, and its cost model. The cost model sets the save intervals if the policy is adaptive.
    If not, it still learns for later starts."""

    def __init__(self, context: JobContext) -> None:
        self.value: Every | Adaptive = Every(seconds=600)  # until rank 0 has sent one
        self.cost_model = CostModel(Adaptive(), PRIORS_ONLY, max(1, len(context.nodes)))
        self._context = context

    @property
    def is_adaptive(self) -> bool:
        """Whether the cost model sets the intervals."""
        return isinstance(self.value, Adaptive)

    def set(self, policy: Every | Adaptive) -> None:
        """Takes the policy that rank 0 has sent."""
        context, now_s = self._context, time.monotonic()
        self.value = policy
        limits, given = (Adaptive(), policy) if isinstance(policy, Every) else (policy, Every(seconds=START_S))
        known, unsaved_s = self.cost_model.measurements, context.options.limits.unsaved_s
        self.cost_model = CostModel(limits, known, max(1, len(context.nodes)), unsaved_s)
        self.cost_model.has_replicas = context.scheduler.replicas.is_placement_complete
        context.scheduler.clock.set_policy(given, now_s)
        if context.claim is not None:  # this agent took over a running job
            self.cost_model.record_start(now_s, context.shares.local_share.slowest_step())
        self.apply()

    def apply(self) -> None:
        """Has the cost model choose the save intervals, unless the user fixed them, and applies them from now on."""
        model, now_s = self.cost_model, time.monotonic()
        if not self.is_adaptive:
            model.record_run_time(now_s)
            return
        before, scheduler = model.decision, self._context.scheduler
        model.slots = scheduler.arenas.slot_limit
        decision = model.decide(now_s)
        scheduler.clock.set_intervals(decision.local_s, decision.store_s, now_s)
        if (decision.local_s, decision.snapshots) != (before.local_s, before.snapshots):
            facts = {
                "local_s": decision.local_s,
                "store_s": decision.store_s,
                "local_by": decision.local_by,
                "store_by": decision.store_by,
                "overhead": decision.overhead,
                "unmet": list(decision.unmet_limits),
            }
            self._context.emit("policy.changed", decision.explain(), data=facts)
