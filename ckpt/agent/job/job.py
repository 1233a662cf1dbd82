"""One job that this agent coordinates: its life, and what its scheduler decides.

The scheduler is a pure state machine. Messages, connections and finished work are recorded in it as facts. `settle` has
it decide, and passes each action to the part of the job that carries it out. Everything runs on the agent's main
thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.job_options import options_from, policy_from
from ckpt.agent.job.job_commit import JobCommits
from ckpt.agent.job.job_context import JobContext, JobPolicy, RankConnection, Services
from ckpt.agent.job.job_memory import JobMemory
from ckpt.agent.job.job_notices import JobNotices
from ckpt.agent.job.job_replication import JobReplication
from ckpt.agent.job.rank_messages import RankMessages, parse_contents
from ckpt.agent.restore.restore_session import RestoreSession, decode_request
from ckpt.agent.snapshots.inventory import find_sealed_snapshot
from ckpt.agent.snapshots.remote_share import AnyPeer, RemotePeer, RemoteShare
from ckpt.agent.state import actions as do
from ckpt.agent.state.cost_model import CostModel
from ckpt.agent.state.rank_presence import Presence
from ckpt.agent.state.slots import SlotState
from ckpt.errors import AgentError, Superseded
from ckpt.ipc.messages import Message
from ckpt.ipc.notice_sources import Sources
from ckpt.types import Epoch, Identity, Version

if TYPE_CHECKING:
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.lineage import Claim

REJOIN_S = 120.0  # how long a restarted agent waits for the last rank to bring its arenas
CUT_OFF_SHOWN = 8  # nodes
# A decision looks at every rank. So a job of more ranks waits for so long, for each of them, between two decisions, and
# collects what it hears meanwhile.
DECIDES_AT_ONCE_RANKS = 256
COLLECT_S_PER_RANK = 2e-6


class Job:
    """One job that this agent coordinates. `starter_peer`: the connection of rank 0 that began it. `ranks`: all ranks
    by node; `local_share`: those of this node. `restore`: the candidate that the ranks are fetching. `trainers_gone_s`:
    when the last trainer was gone; None: not yet. `collect_s`: the least time between two decisions."""

    def __init__(
        self,
        services: Services,
        epoch: Epoch,
        world: int,
        launch: str,
        first: AnyPeer,
        nodes: tuple[NodeAt, ...] = (),
        others: Sequence[RemoteShare] = (),
    ) -> None:
        """`nodes`: the nodes of its ranks, if there are several. `others`: the shares of the other nodes."""
        self.context = context = JobContext(services, epoch, world, launch, nodes, others)
        self.epoch, self.nodes, self.scheduler = epoch, nodes, context.scheduler
        self.ranks, self.local_share = context.shares, context.shares.local_share
        self.policy = JobPolicy(context)
        self.replication = JobReplication(context, self.policy)
        self.memory = JobMemory(context, self.policy, self.replication)
        self.commits = JobCommits(context, self.policy, self.replication)
        self.notices = JobNotices(context)
        self.messages = RankMessages(context, self.memory.division, self.notices, self.end_takeover)
        self.starter_peer = first
        self.restore: RestoreSession | None = None
        self.trainers_gone_s: float | None = None
        self.collect_s = COLLECT_S_PER_RANK * world if world > DECIDES_AT_ONCE_RANKS else 0.0
        self._decide_next_s = -math.inf

    # -- what the node asks

    @property
    def claim(self) -> Claim | None:
        return self.context.claim

    @property
    def terms(self) -> CommitTerms | None:
        return self.context.terms

    @property
    def cost_model(self) -> CostModel:
        return self.policy.cost_model

    @property
    def is_needed(self) -> bool:
        """True if the job still has work to do, or a process that needs it."""
        if self.context.internal_error:
            return False
        scheduler = self.scheduler
        if scheduler.is_at_work or self._has_waiting_rank or self.commits.pending_prunes:
            return True
        return not scheduler.facts.superseded_by and (
            not scheduler.facts.all_gone
            or not scheduler.facts.is_closed_in_store
            or scheduler.exit_report.is_acknowledging
        )

    @property
    def is_idle(self) -> bool:
        """True if no rank is here or waits for an answer, no work on the job's memory is under way, and no lease is
        held."""
        at_work = self.scheduler.is_at_work or self._has_waiting_rank
        return self.scheduler.facts.all_gone and not at_work and not any(slot.leases for slot in self.scheduler.slots)

    @property
    def _has_waiting_rank(self) -> bool:
        return bool(self.scheduler.rank_states.summary.waiting_to_leave)

    def share_of(self, node: str) -> RemoteShare:
        """Another node's share of the job. Errors: AgentError if that node has no rank of the job."""
        found = self.ranks.remote_shares.get(node)
        if found is None:
            raise AgentError(f"agent {node} has no rank of {self.epoch}")
        return found

    def involves(self, peer: AnyPeer) -> bool:
        return self.starter_peer is peer or self.context.connections.rank_of(peer) is not None

    def status(self) -> dict[str, Any]:
        scheduler, context = self.scheduler, self.context
        manager = self.replication.manager
        return {
            "epoch": str(self.epoch),
            "launch": context.launch,
            "world": context.world,
            "ranks": [m.presence.value for m in scheduler.rank_states],
            "steps": self.ranks.steps(),
            "cut_off": self.disconnected_ranks(),
            "division": scheduler.arenas.division,
            "slots": [
                {
                    "slot": slot.number,
                    "state": slot.state.value,
                    "version": str(slot.attempt.version) if slot.attempt else None,
                    "store": slot.attempt.commit_state.value
                    if slot.attempt and slot.state is SlotState.COMPLETE
                    else None,
                    "peer": slot.attempt.replication_state.value
                    if slot.attempt and scheduler.replicas.is_replication_on
                    else None,
                    "leases": slot.leases,
                    "bytes": sum(slot.arena_bytes),
                }
                for slot in scheduler.slots
                if slot.arena_bytes or slot.is_making_arenas or slot.attempt
            ],
            "committed": str(scheduler.facts.committed_version) if scheduler.facts.committed_version else None,
            "error": context.internal_error or scheduler.facts.last_error or scheduler.arenas.refusal_reason or None,
            "superseded_by": scheduler.facts.superseded_by or None,
            "frozen": scheduler.facts.is_frozen,
            "memory": self.memory.table(),
            "peers": manager.status_fields() if manager is not None else None,
            "notices": self.notices.status(),
            "policy": self.cost_model.decision.explain().splitlines() if self.policy.is_adaptive else None,
        }

    def disconnected_ranks(self) -> list[dict[str, Any]]:
        """By node (None for this one): the ranks that are not connected, though not known to be gone."""
        now_s = time.monotonic()
        found: dict[str, dict[str, Any]] = {}
        for member in self.scheduler.rank_states.summary.disconnected:
            if member.disconnected_s is not None and (member.presence is Presence.HERE or member.is_away):
                node = self.ranks.node_of(member.rank)
                each = found.setdefault(node, {"node": node or None, "ranks": [], "for_s": 0.0})
                each["ranks"].append(member.rank)
                each["for_s"] = max(each["for_s"], now_s - member.disconnected_s)
        return list(found.values())[:CUT_OFF_SHOWN]

    # -- ranks

    def join(self, peer: AnyPeer, message: Message) -> None:
        """A rank joins, or joins again: after its connection broke, or with its arenas after an agent restart. Errors:
        AgentError, UsageError, Superseded."""
        context, fields = self.context, message.fields
        rank, resume, request_id = int(fields["rank"]), bool(fields["resume"]), int(fields["id"])
        if not 0 <= rank < context.world or int(fields["world"]) != context.world:
            raise AgentError(f"rank {rank} of {fields['world']} cannot join a job of {context.world} ranks")
        elsewhere = rank != peer.rank if isinstance(peer, RemotePeer) else bool(self.ranks.node_of(rank))
        if elsewhere:
            raise AgentError(f"rank {rank} of {self.epoch} is not where it joins from")
        if self.scheduler.facts.superseded_by:
            raise Superseded(f"{self.epoch} was superseded by {self.scheduler.facts.superseded_by}")
        # Every connection is closed, so that this agent ends if it has no other job, and another one takes over.
        if context.internal_error:
            peer.refuse(request_id, AgentError(f"the agent cannot go on with {self.epoch}: {context.internal_error}"))
            peer.disconnect()
            return
        if not self.scheduler.leave_requests.may_join(rank):
            raise AgentError(f"rank {rank} has left {self.epoch}; start the job again")
        known = context.connections.by_rank.get(rank)
        if known is not None and known.peer.pid != peer.pid:
            raise AgentError(f"rank {rank} of {self.epoch} is process {known.peer.pid} already")
        held = parse_contents(message, str(fields["coordinate"]))
        options, policy = options_from(fields["options"]), policy_from(fields["options"])
        sources, share = Sources.parse(fields.get("notice_sources")), self.ranks.share_of(rank)
        peer.watch_death()
        if resume:
            slots = [int(slot) for slot in fields["arenas"]]
            share.take_arenas(rank, slots, message.fds, is_new=known is None)
        context.connections.connect(rank, RankConnection(peer, held))
        fds = share.connect_rank(rank, peer)
        network = context.services.network()
        if rank == 0:
            context.services.notice_listeners.listen_to(sources)
            self.scheduler.exit_report.can_acknowledge = sources.acknowledge
            self.notices.outcome_path = Path(sources.outcome) if sources.outcome else self.notices.outcome_path
            context.options = options
            if network is not None:
                network.set_rate_limit(options.limits.peer_bandwidth)
            self.replication.set_option(options.peers)
            self.commits.set_up_exports(options.export)
            self.policy.set(policy)
        self.scheduler.exit_vote.record_former_verdict(int(fields.get("leave_attempt") or 0))
        self.scheduler.record_join(rank)
        self.scheduler.arenas.record_layout()
        # Sent before the rank can ask for the same versions again.
        for body in self.scheduler.reconnect_messages() if resume else ():
            peer.send(body)
        peer.reply(request_id, {}, fds)
        if len(context.connections.by_rank) == context.world:
            self.end_takeover()

    def message(self, rank: int, peer: AnyPeer, message: Message) -> None:
        """Handles a message of a rank that has joined. Errors: AgentError; whatever a malformed message leads to."""
        match message.kind:
            case "fetch":
                self._fetch(peer, message)
            case "frames-received":
                if self.restore is not None:  # else that is over
                    self.restore.handle_received(peer, message.fields)
            case _:
                self.messages.handle(rank, peer, message)

    def _fetch(self, peer: AnyPeer, message: Message) -> None:
        """A rank of this node fetches frames. Errors: AgentError."""
        if isinstance(peer, RemotePeer):
            raise AgentError("a rank of another node fetches from the agent of that node")
        identity = Identity.parse(str(message.fields["identity"]))
        if self.restore is None or self.restore.identity != identity:
            raise AgentError(f"{identity} is not being restored now")
        frames, whole = decode_request(message)
        peer.reply(int(message.fields["id"]), {})
        self.restore.request(peer, frames, whole)

    def peer_disconnected(self, peer: AnyPeer) -> None:
        """A connection of this job is gone."""
        rank = self.context.connections.rank_of(peer)
        if rank is not None:
            self.scheduler.record_disconnect(rank, time.monotonic())
        elif self.starter_peer is peer and not self.context.connections.by_rank:
            self.scheduler.record_death(0)  # entering the block failed there: no rank will join this epoch
        if self.restore is not None:
            self.restore.drop_request(peer)

    def peer_died(self, peer: AnyPeer) -> None:
        """The process of a rank is dead, or the process that began the job, before it joined."""
        rank = self.context.connections.rank_of(peer)
        if rank is None and self.starter_peer is peer and 0 not in self.context.connections.by_rank:
            rank = 0
        if rank is not None:
            self.scheduler.record_death(rank)
            self.end_takeover()

    # -- the life of the job

    def begin_training(self, claim: Claim, resumed: bool) -> None:
        """The job's parent is settled: begins to appoint snapshots, and claims the epoch in the store. `resumed`: this
        agent took over a running job."""
        self.context.claim = claim
        now_s = time.monotonic()
        if resumed:
            self.scheduler.appointments.record_agent_restart(now_s)
        else:
            step = claim.parent.version.step if claim.parent else 0
            self.scheduler.appointments.record_start(step, now_s)
            self.cost_model.record_start(now_s, step)
        self.commits.begin_epoch(claim)
        self.notices.begin_training(resumed)

    def take_over(self, claim: Claim) -> None:
        """Takes over a running job whose agent died: its trainers bring their arenas within REJOIN_S."""
        self.context.is_taken_over = self.scheduler.slots.is_taking_over = True
        for slot in self.scheduler.slots:
            slot.is_handed_out = True
        self.context.call_later(REJOIN_S, self.end_takeover)
        self.begin_training(claim, resumed=True)
        self.commits.report_newest_stored(claim)

    def end_takeover(self) -> None:
        """All ranks of a job that was taken over have joined, or are waited for no longer. Their arenas are empty slots
        now. On several nodes complete snapshots stay until a newer one is safe, as far as there are slots: first the
        primary copies of what peers keep, then the newest."""
        if not self.scheduler.slots.is_taking_over:
            return
        inherited: dict[int, tuple[bool, Version]] = {}
        world = self.context.world
        for slot, by_rank in self.local_share.arenas.items():
            if len(by_rank) == world:
                self.scheduler.arenas.record_arenas(slot, tuple(by_rank[rank].size_bytes for rank in range(world)))
            held = {found[0][0] if found else None for found in map(find_sealed_snapshot, by_rank.values())}
            identity = held.pop() if len(held) == 1 else None
            if self.nodes and identity is not None and identity.epoch == self.epoch:
                inherited[slot] = all(arena.is_replicated for arena in by_rank.values()), identity.version
        self.replication.needs_rereplication = len(self.nodes) > 1
        ordered = sorted(inherited, key=inherited.__getitem__, reverse=True)
        self.scheduler.end_takeover(time.monotonic(), {slot: inherited[slot][1] for slot in ordered})

    def settle(self) -> float | None:
        """Decides and acts until nothing is left to do now. Returns when to look again, on the monotonic clock; None:
        not before something happens."""
        context = self.context
        if context.is_dropped or context.internal_error:
            return None
        now_s = time.monotonic()
        if now_s < self._decide_next_s:
            return self._decide_next_s
        self._decide_next_s = now_s + self.collect_s
        context.guard(lambda: self._decide(now_s))
        if self.scheduler.facts.all_gone and self.trainers_gone_s is None:
            self.trainers_gone_s = now_s
        return self.scheduler.next_wake_s(now_s) if not context.internal_error else None

    def _decide(self, now_s: float) -> None:
        found = True
        while found:
            actions = self.scheduler.decide(now_s, self.ranks.steps(), self.ranks.polls(), self.ranks.steps_entered_s())
            for action in actions:
                self._execute_action(action)
            found = bool(actions)

    def _execute_action(self, action: do.Action) -> None:
        match action:
            case do.SetWord(slot, word):
                for share in self.ranks:
                    share.announce(slot, word)
            case do.SetVerdict(number):
                for share in self.ranks:
                    share.announce_verdict(number)
            case do.Divide():
                self.memory.division.make()
            case do.MakeArenas(slot, sizes):
                self.memory.make_arenas(slot, sizes)
            case do.OfferSlot(slot):
                for share in self.ranks:
                    share.offer_slot(slot, self.scheduler.arenas.division)
            case do.CloseArenas(slot):
                self.ranks.close_arenas(slot)
            case do.Assemble(slot, number, version):
                self.memory.assemble(slot, number, version)
            case do.Replicate(slot, version):
                self.replication.replicate(slot, version)
            case do.Commit(slot):
                self.commits.commit(slot)
            case do.CancelCommit():
                self.commits.cancel()
            case do.ClearSlot(slot):
                self.context.checkpoints.pop(slot, None)
            case do.ReplicaDegraded(version):
                why = "its memory is needed, since copies of newer ones have failed"
                self.replication.report_degraded(version, why)
            case do.DropReplicas():
                self.replication.release_replicas()
            case do.AnswerRequest((peer, request_id), body):
                peer.reply(request_id, body)
            case do.Refuse((peer, request_id), kind, message):
                peer.send({"t": "error", "id": request_id, "kind": kind, "message": message})
            case do.ReportProgress((peer, request_id)):
                peer.send({"t": "progress", "id": request_id})
            case do.NotifyRanks(body):
                for each in self.context.connections.by_rank.values():
                    each.peer.send(body)
            case do.Emit(name, message, loud, data):
                self.context.emit(name, message, loud, data)
            case do.WriteOutcome(body):
                self.notices.write_outcome(body)
            case do.Acknowledge(source, key, node):
                self.notices.acknowledge(source, key, node)
            case do.RecordExit(source, key, node):
                self.notices.record_exit(source, key, node)
            case do.Close(reason):
                self.commits.close_epoch(reason)

    def free_outdated_slots(self, outdated: Callable[[Identity], bool]) -> None:
        """Frees slots on this node that hold nothing needed, once the job is idle. `outdated`: whether a checkpoint is
        superseded."""
        used = {Identity(self.epoch, attempt.version) for attempt in self.scheduler.slots.attempts()}
        if self.is_idle:
            self.local_share.free_outdated_slots(lambda identity: outdated(identity) and identity not in used)

    def drop(self, leave_others: bool = False) -> None:
        """Frees the job's memory. The caller ensures that no work is under way and no lease is held. `leave_others`:
        the other nodes keep their memory of the job."""
        self.context.is_dropped = True
        self.replication.end_rereplication()
        if self.restore is not None:
            self.restore.close()
        self.context.checkpoints.clear()
        if leave_others:
            self.ranks.detach_remotes()
        self.ranks.drop()
        self.context.connections.unwatch()
        self.starter_peer.unwatch_death()
