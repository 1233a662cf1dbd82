"""The agent of a node with ranks: its parts, and what it does after each event.

The parts are below; each gets what it needs when it is made:
- NodeContext: the name, store, threads and network. NodeJobs: the jobs and the start under way.
- NodeMemory: what this node holds. MemoryRelief: what is given back when memory runs short.
- NodeNotices: the preemption notices. Coordinator: what other nodes of the current job are told.
- Startup (with StartSurvey, CandidateService): the start.
- OrphanCommitter: commits without a coordinator. Lifetime: retried commits, and the end.
- ProcessHandlers: the messages of trainers and tools. SnapshotHandlers, PeerHandlers: those of other agents.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from ckpt.agent.adaptive.alarms import Alarms
from ckpt.agent.adaptive.history import LearntHistory
from ckpt.agent.commit.commit_turns import CommitTurns
from ckpt.agent.job.job_context import Services
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.node.coordinator import Coordinator
from ckpt.agent.node.dispatch import Dispatch, Permissions
from ckpt.agent.node.lifetime import Lifetime
from ckpt.agent.node.node_context import MakeNetwork, NodeContext
from ckpt.agent.node.node_memory import MemoryRelief, NodeMemory
from ckpt.agent.node.node_notices import NodeNotices
from ckpt.agent.node.orphan_committer import OrphanCommitter, find_uncoordinated_job
from ckpt.agent.node.peer_handlers import PeerHandlers
from ckpt.agent.node.process_handlers import ProcessHandlers
from ckpt.agent.node.snapshot_handlers import SnapshotHandlers
from ckpt.agent.node.startup import Startup
from ckpt.agent.observability.status import job_facts
from ckpt.agent.runtime.event_loop import EventLoop
from ckpt.agent.runtime.priority import Priority
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.ipc.addresses import SILENCE_S_MAX
from ckpt.ipc.messages import Message
from ckpt.settings import Settings

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel

log = logging.getLogger("ckpt")

# Left out of a former job's status, since they grow with the job.
FORMER_STATUS_OMITTED: dict[str, None] = dict.fromkeys(("ranks", "steps", "peers"))


class Agent:
    """The agent of one node. Main thread only. `priority`: tends the process's priority; None: it stays as it is."""

    def __init__(
        self, url: str, settings: Settings, server: EventLoop, make_network: MakeNetwork = PeerNetwork
    ) -> None:
        self.priority: Priority | None = None
        self.context = context = NodeContext(url, settings, server, self.status, self, make_network)
        self._jobs = context.jobs
        self.memory = memory = NodeMemory(context)
        self.notices = notices = NodeNotices(context)
        self.alarms = Alarms(settings, url, server, context.events)
        self.coordinator = Coordinator(context, memory)
        self._history = LearntHistory(context.workers, context.store, self.alarms, context.events)
        services = self._make_services()
        self.startup = Startup(context, memory, self.coordinator, services, self._history)
        self.orphans = OrphanCommitter(
            context, memory, CommitTurns(settings.linger_s), lambda: find_uncoordinated_job(context)
        )
        lifetime = self.lifetime = Lifetime(context, memory, notices, self.orphans)
        starting = self.coordinator, self.startup, self.orphans
        processes = ProcessHandlers(context, memory, notices, *starting, lifetime, services)
        permissions = Permissions(
            self._jobs, memory.inventory_lease, self._jobs.is_coordinator, lambda: processes.awaits_start
        )
        self.snapshots = SnapshotHandlers(context, memory, permissions)
        self.relief = MemoryRelief(context, memory, self.snapshots.is_written)
        storing = self.startup, self.orphans, self.snapshots
        self.peers = PeerHandlers(context, memory, notices, *storing, self.alarms, self)
        self.dispatch = Dispatch(permissions, [*processes.routes(), *self.peers.routes()])

    def _make_services(self) -> Services:
        context, memory, memory_nodes = self.context, self.memory, self.coordinator.memory_nodes
        return Services(
            context.server,
            context.workers,
            context.store,
            context.settings.heartbeat_s,
            memory.memory_use,
            self.notices.listeners,
            context.server.path.with_suffix(".outcome.json"),
            memory.replicas,
            lambda: context.network,
            context.status_view.account,
            context.status_view.record_event,
            self.alarms.scores_by_source,
            memory.replica_service,
            memory_nodes.reachable_nodes,
            lambda: memory_nodes.has_pending_nodes,
        )

    def close(self) -> None:
        self.orphans.end_attempt()
        self.notices.listeners.close()
        self.alarms.close()
        self.coordinator.drop_lent_replicas()
        for job in self._jobs.coordinated():
            # Somebody may still need what other nodes hold of this job.
            unknown = self.context.server.is_end_requested or job.context.has_unread_arenas
            job.drop(leave_others=unknown and not job.context.ended_cleanly)
            job.commits.abandon()
        for followed_job in self._jobs.followed:
            followed_job.drop()
        self.memory.replicas.close()
        self.context.close()

    # -- what the event loop calls

    def message(self, peer: AnyPeer, message: Message) -> None:
        """Handles a message of a trainer or a tool. Errors: see Dispatch.handle."""
        self.dispatch.handle(peer, message)

    def peer_disconnected(self, peer: AnyPeer) -> None:
        self._jobs.peer_disconnected(peer)
        self.startup.give_up(peer)

    def peer_died(self, peer: AnyPeer) -> None:
        self._jobs.peer_died(peer)
        self.startup.give_up(peer)

    def process_suspended(self, for_s: float) -> None:
        has_network, job = self.context.network is not None, self._jobs.current
        text = f"this agent did not run for {for_s:.0f} s: it was stopped, or its machine had no time for it"
        if has_network:
            text += f". Other nodes cut off one that says nothing for {SILENCE_S_MAX:g} s; their ranks join again by "
            text += "themselves"
        if job is not None:
            job.context.emit("agent.stood_still", text, has_network, {"for_s": round(for_s, 1)})
        else:
            log.warning("%s", text)

    def settle(self) -> float | None:
        """Does what follows from the newest messages and the time. Returns when to call again (monotonic seconds)."""
        now_s, jobs = time.monotonic(), self._jobs
        self.notices.convert_signals(now_s)
        self._history.load_history(jobs.current)
        self.memory.drop_ended_followed_jobs()
        self.coordinator.release_idle_memory_nodes()
        times = [
            self._update_leases(now_s),
            self.lifetime.retry_commits(now_s),
            self.orphans.schedule(now_s),
            self.alarms.update(jobs.current, jobs.followed),
        ]
        times += [job.settle() for job in jobs.coordinated()]
        self._update_status_view()
        self.coordinator.advance_rereplication()
        self.coordinator.announce_complete_checkpoint()
        self.memory.drop_superseded_jobs()
        times += [self.relief.relieve_pressure(now_s), self.relief.replan_cramped_job(now_s)]
        times.append(self.lifetime.end_due_s(now_s))
        if self.priority is not None:
            times.append(self.priority.apply_priority(self._has_urgent_save(now_s), now_s))
        return min((each for each in times if each is not None), default=None)

    def can_exit(self) -> bool:
        end_s, network = self.lifetime.end_due_s(time.monotonic()), self.context.network
        if end_s is None or time.monotonic() < end_s:
            return False
        return network is None or not network.has_waiting_bytes

    def _update_leases(self, now_s: float) -> float | None:
        """Tells the outcome of a start that ended, and does what follows from the leases. Returns when to look
        again."""
        self.startup.survey.announce_outcomes()
        if self.memory.replicas.offers.readers or self._jobs.followed:
            self.memory.end_expired_serving()
        return self.coordinator.report_if_frozen(now_s)

    def _has_urgent_save(self, now_s: float) -> bool:
        """Whether this node saves something before a deadline: then the agent takes processor time from training."""
        led = any(job.is_needed and job.scheduler.preemption.is_due(now_s) for job in self._jobs.coordinated())
        leaves = any(each.is_needed and each.is_leaving for each in self._jobs.followed)
        return led or leaves or self.notices.kill_expected_s < math.inf

    # -- what other agents say

    def peer_message(self, channel: Channel, message: Message) -> None:
        """Handles a message from another agent. Errors: see Dispatch.handle."""
        self.memory.inventory_lease.on_holder_connected(channel.peer)
        self.dispatch.handle(channel, message)

    def peer_closed(self, channel: Channel) -> None:
        """A connection to another agent has ended: its ranks are gone, and no frames are awaited from it."""
        name, job = channel.peer, self._jobs.current
        if self.coordinator.memory_nodes.on_disconnect(name) and job is not None:
            job.replication.on_holder_lost(name)
        if self.context.channel(name) is None:
            self.memory.inventory_lease.on_holder_lost(name)
        self.peers.on_source_lost(name)
        for followed_job in self._jobs.followed:
            if followed_job.coordinator.name == name:
                followed_job.on_coordinator_lost()
        for each in self._jobs.coordinated():
            share = each.ranks.remote_shares.get(name)
            if share is not None:
                for peer in share.close():
                    self.peer_disconnected(peer)
                each.replication.on_holder_lost(name)
        self.coordinator.announce_absence(name)
        self.coordinator.reconnect_later(name)

    # -- what is shown

    def status(self) -> dict[str, Any]:
        """What `ckpt watch` and the metrics page show."""
        self._update_status_view()
        job, start, former = self._jobs.current, self._jobs.start, self._jobs.former[-4:]
        return {
            **self.memory.status_fields(),
            "predictions": self.alarms.table(),
            "starting": start.launch if start is not None else None,
            "job": {**job.status(), **job_facts(job)} if job is not None else None,
            "followed_jobs": [each.status() for each in self._jobs.followed],
            "former": [{**each.status(), **job_facts(each), **FORMER_STATUS_OMITTED} for each in former],
            "lenders": self.coordinator.memory_nodes.table(),
            "struck": {str(identity): why[:500] for identity, why in list(self.startup.struck.items())[-20:]},
        }

    def _update_status_view(self) -> None:
        self.context.status_view.update(self._jobs.current, self._jobs.start is not None)
