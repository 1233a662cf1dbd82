"""One job on the coordinator's node, as its trainers see it: its ranks, their messages, and the end of the job."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.store_client import options_from, policy_from
from ckpt.agent.job.job_context import RankConnection, Services
from ckpt.agent.job.job_executor import JobExecutor
from ckpt.agent.preemption.notice_relay import ExitTiming, StandingNotice, strip_node
from ckpt.agent.preemption.preemption import NOTICES_MAX
from ckpt.agent.replication.replication_manager import ReplicationManager
from ckpt.agent.replication.rereplicate import Rereplication
from ckpt.agent.restore.restore_session import RestoreSession
from ckpt.agent.snapshots.division import RankContents, parse_hashes, parse_layout
from ckpt.agent.snapshots.inventory import find_sealed_snapshot
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import AnyPeer, RemotePeer, RemoteShare
from ckpt.agent.state.cost_model import CostModel
from ckpt.agent.state.job_facts import SaveReason, SlotState, WorkState
from ckpt.agent.state.rank_presence import Presence
from ckpt.errors import AgentError, Superseded, UsageError
from ckpt.ipc.messages import Message
from ckpt.ipc.notice_sources import SIGNAL_SOURCE, Sources
from ckpt.placement.placement import Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.interval import not_negative
from ckpt.policy.interval_solver import START_S
from ckpt.policy.known import PRIORS_ONLY
from ckpt.policy.save_options import Every
from ckpt.preemption.notice import Notice, NoticeChange, Withdrawn
from ckpt.types import Epoch, Identity, Version, format_count

if TYPE_CHECKING:
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")

VALUES_BYTES_MAX = 1 << 40  # more than any machine's memory: a larger size is a mistake
REJOIN_S = 120.0  # how long a restarted agent waits for the last rank to bring its arenas
SOON_S = 3600.0  # a notice with more time left is not reported as a warning
Sampled = tuple[str, tuple[int, ...]]  # a tensor's name, and the offset and shape of a box of it
NAMES_MAX = 100  # in one event
CUT_OFF_SHOWN = 8  # nodes


class Job(JobExecutor):
    """One job that this agent coordinates. `first`: the connection of rank 0 that began it. `nodes`: the nodes of its
    ranks, if there are several. `restore`: the candidate that the ranks are fetching. `trainers_gone_s`: when the last
    trainer was gone; None: not yet."""

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
        super().__init__(services, epoch, world, launch, nodes, others)
        self.has_announced_checkpoint = False  # whether other nodes know that this job has a complete checkpoint
        self.starter_peer = first
        self.restore: RestoreSession | None = None
        # Re-replication of the parent checkpoint, until this job has one that is replicated as well.
        self.rereplication: Rereplication | None = None
        self.trainers_gone_s: float | None = None
        self._samples: tuple[int, dict[Sampled, bytes]] = (0, {})  # of the save attempt that was reported last

    # -- what the node asks

    @property
    def is_needed(self) -> bool:
        """True if the job still has work to do, or a process that needs it."""
        if self.internal_error:
            return False
        group = self.scheduler
        if group.is_at_work or self._has_waiting_rank or self._pending_prunes:
            return True
        return not group.superseded_by and (
            not group.all_gone or not group.is_closed_in_store or group.is_acknowledging
        )

    @property
    def needs_commit_retry(self) -> bool:
        """True if the newest checkpoint failed to commit and no trainer is left to hear it."""
        group = self.scheduler
        if not group.all_gone or group.superseded_by or group.is_at_work or group.is_closed_in_store:
            return False
        return group.newest_commit_state is WorkState.FAILED and not self.internal_error

    @property
    def is_orphaned(self) -> bool:
        """True if a newer start superseded this job, and its checkpoints may have to be committed if that start
        fails."""
        return bool(self.checkpoints) and not self.internal_error and self.scheduler.has_uncommitted_newest

    @property
    def ended_without_checkpoint(self) -> bool:
        """True if all ranks are gone, and the job has no complete checkpoint and will make none."""
        return self.scheduler.all_gone and not (self.scheduler.is_at_work or self.checkpoints or self.has_unread_arenas)

    @property
    def has_unread_arenas(self) -> bool:
        """True if arenas of a former agent may hold the newest checkpoint, for a start on several nodes to find."""
        return self.is_taken_over and bool(self.nodes) and not self.checkpoints

    @property
    def is_idle(self) -> bool:
        """True if no rank is here or waits for an answer, no work on the job's memory is under way, and no lease is
        held."""
        group = self.scheduler
        at_work = group.is_at_work or self._has_waiting_rank
        return group.all_gone and not at_work and not any(slot.leases for slot in group.slots)

    @property
    def _has_waiting_rank(self) -> bool:
        return bool(self.scheduler.rank_states.summary.waiting_to_leave)

    @property
    def has_complete(self) -> bool:
        """True if a complete checkpoint exists that, with several nodes, survives the loss of one node."""
        return self.scheduler.survives_node_loss or bool(self.checkpoints and not self.nodes)

    @property
    def terms(self) -> CommitTerms | None:
        """The terms by which other nodes commit the job's checkpoints; None: the job has not begun to train."""
        options = self.options
        return CommitTerms(self.claim, options.codec, options.limits.bandwidth) if self.claim is not None else None

    def checkpoint_identities(self) -> tuple[Identity, ...]:
        """The complete checkpoints in memory."""
        return tuple(checkpoint.identity for checkpoint in self.checkpoints.values())

    def find_checkpoint(self, identity: Identity) -> tuple[int, MemoryCheckpoint] | None:
        """The slot and the checkpoint; None: not in memory. The caller must take a lease on the slot to use it."""
        return next(((slot, c) for slot, c in self.checkpoints.items() if c.identity == identity), None)

    def rank_of(self, peer: AnyPeer) -> int | None:
        return self._ranks_by_peer.get(peer)

    def find_share(self, node: str) -> RemoteShare | None:
        """Another node's share of the job; None: that node has none."""
        return self.ranks.remote_shares.get(node)

    def share_of(self, node: str) -> RemoteShare:
        """Another node's share of the job. Errors: AgentError if that node has no rank of the job."""
        found = self.find_share(node)
        if found is None:
            raise AgentError(f"agent {node} has no rank of {self.epoch}")
        return found

    def spare_bytes_by_node(self) -> dict[str, int]:
        """By node: the bytes left beside its slots and one generation of replicas."""
        nodes = self.ranks
        placement = self.replication_manager.placement if self.replication_manager is not None else None
        if self.plan is None:
            return {}
        keeps = {load.node: load.keeps_bytes for load in placement.loads} if placement is not None else {}
        left = {name: plan.replica_bytes_max(self.plan.slots) for name, plan in nodes.plans_by_name().items()}
        return {name: max(0, count - keeps.get(name, 0)) for name, count in left.items()}

    def involves(self, peer: AnyPeer) -> bool:
        return self.starter_peer is peer or self.rank_of(peer) is not None

    def status(self) -> dict[str, Any]:
        group = self.scheduler
        return {
            "epoch": str(self.epoch),
            "launch": self.launch,
            "world": self.world,
            "ranks": [m.presence.value for m in group.rank_states],
            "steps": self.ranks.steps(),
            "cut_off": self.disconnected_ranks(),
            "division": group.division,
            "slots": [
                {
                    "slot": slot.number,
                    "state": slot.state.value,
                    "version": str(slot.attempt.version) if slot.attempt else None,
                    "store": slot.attempt.commit_state.value
                    if slot.attempt and slot.state is SlotState.COMPLETE
                    else None,
                    "peer": slot.attempt.replication_state.value if slot.attempt and group.is_replication_on else None,
                    "leases": slot.leases,
                    "bytes": sum(slot.arena_bytes),
                }
                for slot in group.slots
                if slot.arena_bytes or slot.is_making_arenas or slot.attempt
            ],
            "committed": str(group.committed_version) if group.committed_version else None,
            "error": self.internal_error or group.last_error or group.refusal_reason or None,
            "superseded_by": group.superseded_by or None,
            "frozen": group.is_frozen,
            "memory": self.memory_table(),
            "peers": self.replication_manager.status_fields() if self.replication_manager is not None else None,
            "notices": self._notice_status(),
            "policy": self.cost_model.decision.explain().splitlines() if self.cost_model and self.is_adaptive else None,
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

    # -- messages

    def join(self, peer: AnyPeer, message: Message) -> None:
        """A rank joins, or joins again: after its connection broke, or with its arenas after an agent restart. Errors:
        AgentError, UsageError, Superseded."""
        fields = message.fields
        rank, resume = int(fields["rank"]), bool(fields["resume"])
        if not 0 <= rank < self.world or int(fields["world"]) != self.world:
            raise AgentError(f"rank {rank} of {fields['world']} cannot join a job of {self.world} ranks")
        elsewhere = rank != peer.rank if isinstance(peer, RemotePeer) else bool(self.ranks.node_of(rank))
        if elsewhere:
            raise AgentError(f"rank {rank} of {self.epoch} is not where it joins from")
        if self.scheduler.superseded_by:
            raise Superseded(f"{self.epoch} was superseded by {self.scheduler.superseded_by}")
        # Every connection is closed, so that this agent ends if it has no other job, and another one takes over.
        if self.internal_error:
            peer.refuse(
                int(fields["id"]), AgentError(f"the agent cannot go on with {self.epoch}: {self.internal_error}")
            )
            peer.disconnect()
            return
        if not self.scheduler.may_join(rank):
            raise AgentError(f"rank {rank} has left {self.epoch}; start the job again")
        known = self._members.get(rank)
        if known is not None and known.pid != peer.pid:
            raise AgentError(f"rank {rank} of {self.epoch} is process {known.pid} already")
        held = self._parse_contents(message, str(fields["coordinate"]))
        request_id = int(fields["id"])
        policy = policy_from(fields["options"])
        options = options_from(fields["options"])
        sources = Sources.parse(fields.get("notice_sources"))
        peer.watch_death()
        if resume and not self.ranks.node_of(rank):
            slots = [int(slot) for slot in fields["arenas"]]
            self.local_share.take_arenas(rank, slots, message.fds, is_new=known is None)
        if known is not None and known.peer is not peer:
            known.peer.unwatch_death()
            known.peer.disconnect()
            del self._ranks_by_peer[known.peer]
        self._members[rank] = RankConnection(peer, peer.pid, held)
        self._ranks_by_peer[peer] = rank
        fds = self.ranks.connect_rank(rank, peer)
        if rank == 0:
            if self._services.notice_listeners is not None:
                self._services.notice_listeners.listen_to(sources)
            self.scheduler.can_acknowledge = sources.acknowledge
            self.outcome_path = Path(sources.outcome) if sources.outcome else self.outcome_path
            self.options = options
            self._set_up_replication(options.peers)
            self._set_up_exports(options.export)
            self._apply_policy(policy)
        self._send_bandwidth_limit(rank)
        self.scheduler.record_former_verdict(int(fields.get("leave_attempt") or 0))
        self.scheduler.record_join(rank)
        self.scheduler.record_layout()
        # Sent before the rank can ask for the same versions again.
        for body in self.scheduler.reconnect_messages() if resume else ():
            peer.send(body)
        peer.reply(request_id, {}, fds)
        if len(self._members) == self.world:
            self._end_takeover()

    def take_over(self, claim: Claim) -> None:
        """Takes over a running job whose agent died: its trainers bring their arenas within REJOIN_S."""
        self.is_taken_over = self.scheduler.is_taking_over = True
        for slot in self.scheduler.slots:
            slot.is_handed_out = True
        self._call_later(REJOIN_S, self._end_takeover)
        self.begin_training(claim, resumed=True)
        self._report_newest_stored(claim)

    def _end_takeover(self) -> None:
        """All ranks of a job that was taken over have joined, or are waited for no longer. Their arenas are empty slots
        now. On several nodes complete snapshots stay until a newer one is safe, as far as there are slots: they may be
        the primary copies of what peers keep."""
        if not self.scheduler.is_taking_over:
            return
        inherited: dict[int, Version] = {}
        for slot, by_rank in self.local_share.arenas.items():
            if len(by_rank) == self.world:
                self.scheduler.record_arenas(slot, tuple(by_rank[rank].size_bytes for rank in range(self.world)))
            held = {found[0][0] if found else None for found in map(find_sealed_snapshot, by_rank.values())}
            identity = held.pop() if len(held) == 1 else None
            if self.nodes and identity is not None and identity.epoch == self.epoch:
                inherited[slot] = identity.version
        self.needs_rereplication = len(self.nodes) > 1
        self.scheduler.end_takeover(time.monotonic(), inherited)

    def message(self, rank: int, peer: AnyPeer, message: Message) -> None:
        fields, group = message.fields, self.scheduler
        match message.kind:
            case "layout":
                member = self._members[rank]
                member.contents = self._parse_contents(message, member.contents.coordinate)
                group.record_layout()
                if self._awaits_layouts and not self._has_mixed_layouts():
                    self._divide(patient=False)
            case "arena-warm":
                group.record_warm_arena(rank, int(fields["slot"]), str(fields["division"]))
            case "snapshot-staged":
                if why := str(fields.get("why") or ""):
                    group.record_miss(rank, int(fields["attempt"]), why)
                else:
                    version = Version.parse(str(fields["version"]))
                    self._compare_samples(rank, fields)
                    at = (int(fields["attempt"]), version, int(fields["slot"]), str(fields["division"]))
                    group.record_staging(rank, *at, not_negative("stall_s", float(fields["stall_s"])))
            case "snapshot-missed":
                last, every = fields.get("updates") or (0, 0)
                group.record_miss(rank, int(fields["attempt"]), str(fields["why"]), (int(last), int(every)))
            case "save":
                kind = _save_reason(fields)
                metrics = {str(k): float(v) for k, v in dict(fields.get("metrics") or {}).items()}
                same = Version.parse(str(fields["unchanged_since"])) if fields.get("unchanged_since") else None
                group.record_save_request(
                    rank, Version.parse(str(fields["version"])), kind, metrics, (peer, int(fields["id"])), same
                )
            case "unsavable":
                group.record_unsavable(rank, Version.parse(str(fields["version"])), str(fields["why"])[:1000])
            case "rank-holds":
                group.record_hold(rank, int(fields["attempt"]), (peer, int(fields["id"])))
            case "require-commit":
                group.require_commit(Version.parse(str(fields["version"])), _save_reason(fields))
            case "leave":
                in_order = fields.get("outcome") != "exception"
                sent_away = fields.get("outcome") == "notice"
                if sent_away:
                    self._has_left_by_notice = True
                    by_s = time.monotonic() + parse_seconds(fields.get("left_s") or 0.0, "leave: left_s")
                    committed = fields.get("committed")
                    why = str(fields.get("why") or "")[:1000]
                    came = [str(each)[:200] for each in list(fields.get("notices") or ())[:NOTICES_MAX]]
                    group.record_exit_order(why, by_s, Version.parse(str(committed)) if committed else None, came)
                group.record_leave_request(rank, (peer, int(fields["id"])), in_order, insists=sent_away)
                # This rank is done without the others.
                if in_order and not sent_away and group.all_gone:
                    self._end_takeover()
            case "notice":
                name, left_s = str(fields["key"])[:50], parse_seconds(fields["left_s"], "notice: left_s")
                told = Notice(time.time() + left_s, SIGNAL_SOURCE, True, name, f"rank {rank} got {name}")
                self.on_notice(told, ExitTiming.AT_ONCE, node=self.ranks.node_of(rank))
                peer.reply(int(fields["id"]), {})
            case "frames-received" if self.restore is not None:
                self.restore.acknowledge_frames(peer, _parse_integers(fields["ok"]), _parse_integers(fields["bad"]))
            case "stream-ended" if self.restore is not None:
                self.restore.end_stream(peer, int(fields["stream"]))
            case "frames-received" | "stream-ended":
                pass  # of a fetch that is over
            case _:
                raise AgentError(f"the agent does not know the message {message.kind!r} from a rank")

    def _compare_samples(self, rank: int, fields: dict[str, Any]) -> None:
        """Compares samples of this rank's replicated tensors with other ranks' samples. On a difference the save
        attempt is abandoned, and from then on every rank saves its own copy."""
        number, division, differing = int(fields["attempt"]), self._division, set[str]()
        samples, sample = fields.get("samples"), fields.get("sample")
        if division is not None and fields["division"] == division.id and isinstance(samples, bytes):
            differing.update(self._replica_check.find_differing(number, division.shared_boxes, rank, samples))
        if isinstance(sample, list) and len(sample) == 3 and isinstance(sample[2], bytes):
            name, box, digest = str(sample[0]), tuple(_parse_integers(sample[1])), sample[2]
            if self._samples[0] != number:
                self._samples = (number, {})
            if self._samples[1].setdefault((name, box), digest) != digest:
                differing.add(name)
        if new := sorted(differing - self._diverged_tensors):
            self._mark_diverged(rank, number, new)

    def _mark_diverged(self, rank: int, number: int, names: list[str]) -> None:
        self._diverged_tensors.update(names)
        what = (
            f"{names[0]} differs"
            if len(names) == 1
            else f"{names[0]} and {format_count(len(names) - 1, 'more tensor')} differ"
        )
        self.scheduler.record_miss(rank, number, f"{what} between the ranks")
        self.scheduler.record_layout()
        what = names[0] if len(names) == 1 else f"{len(names)} tensors, {', '.join(names[:5])}"
        text = f"not the same on all ranks any more: {what}. From now on each rank saves its own"
        self.emit("replica.differs", text, True, {"tensor": names[0], "names": names[:NAMES_MAX]})

    def peer_disconnected(self, peer: AnyPeer) -> None:
        """A connection of this job is gone."""
        rank = self.rank_of(peer)
        if rank is not None:
            self.scheduler.record_disconnect(rank, time.monotonic())
        elif self.starter_peer is peer and not self._members:
            self.scheduler.record_death(0)  # entering the block failed there: no rank will join this epoch
        if self.restore is not None:
            self.restore.drop_request(peer)

    def peer_died(self, peer: AnyPeer) -> None:
        """The process of a rank is dead, or the process that began the job, before it joined."""
        rank = self.rank_of(peer)
        if rank is None:
            rank = 0 if self.starter_peer is peer and 0 not in self._members else None
        if rank is not None:
            self.scheduler.record_death(rank)
            self._end_takeover()

    def on_holder_lost(self, name: str) -> None:
        """The agent of that name is disconnected, and its replicas for this job may be lost. They are made anew as soon
        as possible. Until then, the affected versions do not count as replicated."""
        if self.rereplication is not None:
            self.rereplication.survey_again()
        replication_manager, version = self.replication_manager, self.scheduler.replicated_version
        if replication_manager is None:
            return
        lost = [
            each
            for each in self.scheduler.peer_versions
            if replication_manager.depends_on(name, Identity(self.epoch, each))
        ]
        if lost:
            self.scheduler.record_lost_holder(name, lost)
        if version in lost and version is not None and self._services.account.clear_replicated() is not None:
            facts = {"identity": str(Identity(self.epoch, version)), "agent": name}
            text = (
                f"step {version.step} has fewer copies in other nodes' memory than was asked for: agent {name} is gone "
            )
            text += "or cut off, and its copies may be lost. They are made again as soon as possible"
            self.emit("replica.lost", text, True, facts)

    def report_parent_replication(self, is_safe: bool) -> None:
        """Shows whether the parent checkpoint meets the replication target."""
        account, parent = self._services.account, self.claim.parent if self.claim is not None else None
        if parent is not None and is_safe:
            account.record_found("peer", parent.epoch, parent.version)
        elif parent is not None and account.newest_by_level.get("peer", (None, None))[0] == parent.version:
            account.clear_replicated()

    def _apply_policy(self, policy: Every | Adaptive) -> None:
        now_s = time.monotonic()
        known = self.cost_model.measurements if self.cost_model is not None else PRIORS_ONLY
        self.policy = policy
        limits, given = (Adaptive(), policy) if isinstance(policy, Every) else (policy, Every(seconds=START_S))
        self.cost_model = CostModel(limits, known, max(1, len(self.nodes)), self.options.limits.unsaved_s)
        self.cost_model.has_replicas = self.scheduler.is_placement_complete
        self.scheduler.set_policy(given, now_s)
        if self.claim is not None:  # this agent took over a running job
            self.cost_model.record_start(now_s, self.local_share.slowest_step())
        self.apply_cost_model()

    def _set_up_replication(self, option: Replicas | Parity | None) -> None:
        """Sets up replicas or parity on other nodes, if there are any."""
        network, copies, service = self._services.network(), self._services.replicas, self._services.replica_service
        if not self.nodes or network is None or copies is None or service is None:
            return
        if self.replication_manager is None or self.replication_manager.option != option:
            self.replication_manager = ReplicationManager(
                network, copies, service, self.nodes, option, self._services.memory_nodes
            )
            self.scheduler.is_survey_pending = self.is_taken_over and option is not None

    def _send_bandwidth_limit(self, rank: int) -> None:
        """Sends rank 0's bandwidth limit to the other nodes: to all, and to one that joins later or whose agent
        restarted. A node that was away also hears that replicas are no longer kept."""
        network, nodes = self._services.network(), self.ranks
        if network is None or not self.nodes:
            return
        rate = self.options.limits.peer_bandwidth
        if rank == 0:
            network.set_rate_limit(rate)
        own = nodes.remote_shares.get(nodes.node_of(rank))
        for share in nodes.remote_shares.values() if rank == 0 else [own] if own is not None else ():
            # A message before the join would reach a node that does not know the job.
            if share.peers:
                share.limit_replication(rate)
                if self._has_released_replicas:
                    share.notify({"t": "forget-replicas"})

    def begin_training(self, claim: Claim, resumed: bool) -> None:
        """The job's parent is settled: begins to appoint snapshots, and claims the epoch in the store. `resumed`: this
        agent took over a running job."""
        self.claim = claim
        now_s = time.monotonic()
        if resumed:
            self.scheduler.record_agent_restart(now_s)
        else:
            step = claim.parent.version.step if claim.parent else 0
            self.scheduler.record_start(step, now_s)
            if self.cost_model is not None:
                self.cost_model.record_start(now_s, step)
        self._put_claim(claim)
        self._call_later(self._services.heartbeat_s, self._send_heartbeat)
        with contextlib.suppress(OSError):
            if not resumed and self.outcome_path is not None and self.outcome_path.is_file():
                self.outcome_path.unlink()  # of an earlier start
        if self._services.notice_listeners is not None:
            for notice, when in self._services.notice_listeners.list_notices():
                if (notice.source, notice.key) not in self.scheduler.notices:
                    self.on_notice(notice, when)

    # -- notices

    def on_notice(self, word: NoticeChange, when: ExitTiming = ExitTiming.IN_TIME, node: str = "") -> None:
        """Passes a notice on to the scheduler, which decides what follows, and reports it to people. `node`: the node
        that it concerns; "" is this one."""
        name = word.source, word.key
        known = self.scheduler.notices.get(name)
        if isinstance(word, Withdrawn):
            self.scheduler.withdraw_notice(*name)
            if known is not None:
                # An operator takes back a notice from any node.
                node = min(known.nodes)
                text = f"{word.source} {strip_node(word.key, node)}: {_machine_name(node)} stays after all"
                self.emit("notice.withdrawn", text, True, {"source": word.source, "key": word.key})
            return
        now_s = time.monotonic()
        left_s = word.remaining_s
        told = StandingNotice(*name, now_s + left_s, now_s, word.certain, when, frozenset({node}))
        when = self.scheduler.add_notice(told).exit_timing
        if known is not None and word.source == SIGNAL_SOURCE:
            return  # another rank got the signal too
        what = f"{_machine_name(node)} {'goes' if word.certain else 'may go'} away"
        leaves = word.certain and when is not ExitTiming.NOT_AGAIN
        then = "the job saves and leaves before" if leaves else "one more checkpoint is taken"
        if when is ExitTiming.NOT_AGAIN:
            then = "the job has left because of this notice before, and does not leave again; " + then
        facts = {"source": word.source, "key": word.key, "left_s": round(left_s, 1), "certain": word.certain}
        text = f"{what} in {max(0.0, left_s):.1f} s ({word.message}): {then}"
        self.emit("notice", text, left_s < SOON_S, facts)

    def notice_left_s(self) -> dict[tuple[str, str], float]:
        """Seconds left for each notice, by source and key."""
        now_s = time.monotonic()
        return {name: each.deadline_s - now_s for name, each in self.scheduler.notices.items()}

    def _notice_status(self) -> dict[str, Any]:
        group, now_s = self.scheduler, time.monotonic()
        return {
            "standing": [
                {
                    "source": each.source,
                    "key": each.key,
                    "certain": each.certain,
                    "left_s": round(each.deadline_s - now_s, 1),
                    # "" is this node.
                    "nodes": sorted(each.nodes),
                }
                for each in sorted(group.notices.values(), key=lambda each: each.deadline_s)
            ],
            "needs_s": round(group.lead_time_s, 1),
            "step_s": round(group.step_timing.boundary_interval_s, 4),
        }

    def settle(self) -> float | None:
        """Decides and acts until nothing is left to do now. Returns when to look again, on the monotonic clock; None:
        not before something happens."""
        if self._is_dropped or self.internal_error:
            return None
        now_s = time.monotonic()
        self.guard(lambda: self._decide(now_s))
        if self.scheduler.all_gone and self.trainers_gone_s is None:
            self.trainers_gone_s = now_s
        return self.scheduler.next_wake_s(now_s) if not self.internal_error else None

    def _decide(self, now_s: float) -> None:
        found = True
        while found:
            actions = self.scheduler.decide(now_s, self.ranks.steps(), self.ranks.polls(), self.ranks.steps_entered_s())
            for action in actions:
                self._execute_action(action)
            found = bool(actions)

    def free_outdated_slots(self, outdated: Callable[[Identity], bool]) -> None:
        """Frees slots on this node that hold nothing needed, once the job is idle. `outdated`: whether a checkpoint is
        superseded."""
        used = {attempt.version for attempt in self.scheduler.attempts()}
        if self.is_idle:
            self.local_share.free_outdated_slots(
                lambda identity: outdated(identity) and not (identity.epoch == self.epoch and identity.version in used)
            )

    def drop(self, leave_others: bool = False) -> None:
        """Frees the job's memory. The caller ensures that no work is under way and no lease is held. `leave_others`:
        the other nodes keep their memory of the job."""
        self._is_dropped = True
        if self.restore is not None:
            self.restore.close()
        self.checkpoints.clear()
        if leave_others:
            self.ranks.detach_remotes()
        self.ranks.drop()
        for member in self._members.values():
            member.peer.unwatch_death()
        self.starter_peer.unwatch_death()

    # -- small steps

    def _parse_contents(self, message: Message, coordinate: str) -> RankContents:
        fields = message.fields
        if len(message.blobs) != 2:
            raise AgentError(f"{message.kind!r} comes with a layout and hashes")
        layout, hashes = parse_layout(message.blobs[0]), parse_hashes(message.blobs[1])
        values_bytes = int(fields["values_bytes"])
        if not 0 <= values_bytes <= VALUES_BYTES_MAX:
            raise UsageError(f"values_bytes is {values_bytes}, not within 0 and {VALUES_BYTES_MAX}")
        return RankContents(coordinate, layout, hashes, str(fields["version"]), values_bytes)


def _machine_name(node: str) -> str:
    """The name of a node's machine, for people."""
    return f"node {node}" if node else "this machine"


def _save_reason(fields: dict[str, Any]) -> SaveReason:
    return {"exit": SaveReason.EXIT, "due": SaveReason.DUE}.get(str(fields["why"]), SaveReason.SAVE)


def parse_seconds(value: Any, name: str) -> float:
    """The value as a finite number of seconds. Errors: UsageError."""
    number = float(value)
    if not math.isfinite(number):
        raise UsageError(f"{name} is {number}, not a number of seconds")
    return number


def _parse_integers(value: Any) -> list[int]:
    return [int(number) for number in value]
