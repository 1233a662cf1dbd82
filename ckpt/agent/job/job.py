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
from ckpt.agent.job.agent_restart import AgentRestart
from ckpt.agent.job.job_context import RankConnection, Services
from ckpt.agent.preemption.deadline_strategy import When
from ckpt.agent.preemption.notice_relay import StandingNotice, bare
from ckpt.agent.preemption.preemption import NOTICES_MAX
from ckpt.agent.replication.replication_manager import ReplicationManager
from ckpt.agent.replication.rereplicate import Rereplication
from ckpt.agent.replication.restart_survey import RestartSurvey
from ckpt.agent.restore.restore_session import RestoreSession
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.division import RankContents, hashes_from, layout_from
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import AnyPeer, RemotePeer, RemoteShare
from ckpt.agent.state.cost_model import CostModel
from ckpt.agent.state.job_facts import State, Store, Why
from ckpt.agent.state.rank_presence import Presence
from ckpt.errors import AgentError, Superseded, UsageError
from ckpt.ipc.messages import Message
from ckpt.ipc.notice_sources import SIGNAL, Sources
from ckpt.placement.placement import Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.interval import not_negative
from ckpt.policy.interval_solver import START_S
from ckpt.policy.known import NOTHING
from ckpt.policy.save_options import Every
from ckpt.preemption.notice import Notice, Withdrawn, Word
from ckpt.types import Epoch, Identity, Tick, counted

if TYPE_CHECKING:
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")

VALUES_BYTES_MAX = 1 << 40  # more than any machine's memory: a larger size is a mistake
SOON_S = 3600.0  # a notice with more time left is not reported as a warning
Sampled = tuple[str, tuple[int, ...]]  # a tensor's name, and the offset and shape of a box of it
NAMES_MAX = 100  # in one event
CUT_OFF_SHOWN = 8  # nodes


class Job(AgentRestart):
    """One job that this agent coordinates. `first`: the connection of rank 0 that began it. `nodes`: the nodes of its
    ranks, if there are several. `restore`: the candidate that the ranks are fetching. `gone_s`: when the last trainer
    was gone; None: not yet."""

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
        self.told_newer = False  # whether other nodes know that this job has a complete checkpoint
        self.first = first
        self.restore: RestoreSession | None = None
        # Re-replication of the parent checkpoint, until this job has one that is replicated as well.
        self.reprotecting: Rereplication | None = None
        self.refinding: RestartSurvey | None = None  # the survey for it after an agent restart
        self.gone_s: float | None = None
        self._sent_away = False  # a rank left because of a notice: a start may follow
        self._samples: tuple[int, dict[Sampled, bytes]] = (0, {})  # of the save attempt that was reported last

    # -- what the node asks

    @property
    def needed(self) -> bool:
        """True if the job still has work to do, or a process that needs it."""
        if self.failed:
            return False
        group = self.group
        if group.at_work or self._is_awaited or self._prunes:
            return True
        return not group.superseded_by and (not group.all_gone or not group.closed_in_store or group.acknowledging)

    @property
    def is_orphan(self) -> bool:
        """True if the newest checkpoint failed to commit and no trainer is left to hear it."""
        newest, group = self.group.newest, self.group
        if newest is None or newest.round is None or not group.all_gone or group.superseded_by or group.at_work:
            return False
        return newest.round.store is Store.FAILED and not group.closed_in_store and not self.failed

    @property
    def is_left_over(self) -> bool:
        """True if a newer start superseded this job, and its checkpoints may have to be committed if that start
        fails."""
        return bool(self.checkpoints) and not self.failed and self.group.leaves_uncommitted

    @property
    def came_to_nothing(self) -> bool:
        """True if all ranks are gone, and the job has no complete checkpoint and will make none."""
        return self.group.all_gone and not (self.group.at_work or self.checkpoints or self.holds_unread)

    @property
    def ended_in_order(self) -> bool:
        """True if no work was lost: each rank came to its end, or left when told to."""
        group = self.group
        return not group.superseded_by and all(m.presence is Presence.LEFT and not m.broke for m in group.members)

    @property
    def came_to_its_end(self) -> bool:
        """True if the job is done and needs no restart: each rank came to its end, and none left because of a
        notice."""
        return self.ended_in_order and not self._sent_away

    @property
    def is_idle(self) -> bool:
        """True if no rank is here or waits for an answer, no work on the job's memory is under way, and no lease is
        held."""
        group = self.group
        at_work = group.at_work or self._is_awaited
        return group.all_gone and not at_work and not any(slot.leases for slot in group.slots)

    @property
    def _is_awaited(self) -> bool:
        return any(member.leave is not None for member in self.group.members)

    @property
    def has_complete(self) -> bool:
        """True if a complete checkpoint exists that, with several nodes, survives the loss of one node."""
        return self.group.outlives_a_node or bool(self.checkpoints and not self.nodes)

    @property
    def terms(self) -> CommitTerms | None:
        """The terms by which other nodes commit the job's checkpoints; None: the job has not begun to train."""
        options = self.options
        return CommitTerms(self.claim, options.codec, options.limits.bandwidth) if self.claim is not None else None

    def held(self) -> tuple[Identity, ...]:
        """The complete checkpoints in memory."""
        return tuple(checkpoint.identity for checkpoint in self.checkpoints.values())

    def checkpoint(self, identity: Identity) -> tuple[int, MemoryCheckpoint] | None:
        """The slot and the checkpoint; None: not in memory. The caller must take a lease on the slot to use it."""
        return next(((slot, c) for slot, c in self.checkpoints.items() if c.identity == identity), None)

    def rank_of(self, peer: AnyPeer) -> int | None:
        return next((rank for rank, member in self._members.items() if member.peer is peer), None)

    def find_share(self, node: str) -> RemoteShare | None:
        """Another node's share of the job; None: that node has none."""
        return self.ranks.others.get(node) if isinstance(self.ranks, AllShares) else None

    def share_of(self, node: str) -> RemoteShare:
        """Another node's share of the job. Errors: AgentError if that node has no rank of the job."""
        found = self.find_share(node)
        if found is None:
            raise AgentError(f"agent {node} has no rank of {self.epoch}")
        return found

    def lends(self) -> dict[str, int]:
        """By node: the bytes left beside its slots and one generation of replicas."""
        nodes, placement = self.ranks, self.protection.placement if self.protection is not None else None
        if self.plan is None or not isinstance(nodes, AllShares):
            return {}
        keeps = {load.node: load.keeps_bytes for load in placement.loads} if placement is not None else {}
        left = {name: plan.left_bytes(self.plan.slots) for name, plan in nodes.plans_by_name().items()}
        return {name: max(0, count - keeps.get(name, 0)) for name, count in left.items()}

    def involves(self, peer: AnyPeer) -> bool:
        return self.first is peer or self.rank_of(peer) is not None

    def status(self) -> dict[str, Any]:
        group = self.group
        return {
            "epoch": str(self.epoch),
            "launch": self.launch,
            "world": self.world,
            "ranks": [m.presence.value for m in group.members],
            "steps": self.ranks.steps(),
            "cut_off": self.cut_off(),
            "division": group.division,
            "slots": [
                {
                    "slot": slot.number,
                    "state": slot.state.value,
                    "tick": str(slot.round.tick) if slot.round else None,
                    "store": slot.round.store.value if slot.round and slot.state is State.COMPLETE else None,
                    "peer": slot.round.peer.value if slot.round and group.replicates else None,
                    "leases": slot.leases,
                    "bytes": sum(slot.bytes),
                }
                for slot in group.slots
                if slot.bytes or slot.making or slot.round
            ],
            "committed": str(group.committed_tick) if group.committed_tick else None,
            "error": self.failed or group.last_error or group.refusal or None,
            "superseded_by": group.superseded_by or None,
            "frozen": group.frozen,
            "memory": self.memory_table(),
            "peers": self.protection.shown() if self.protection is not None else None,
            "notices": self._notices(),
            "policy": self.learning.decision.explain().splitlines() if self.learning and self.is_adaptive else None,
        }

    def cut_off(self) -> list[dict[str, Any]]:
        """By node (None for this one): the ranks that are not connected, though not known to be gone."""
        now_s = time.monotonic()
        found: dict[str, dict[str, Any]] = {}
        for member in self.group.members.seen.lost:
            if member.lost_s is not None and (member.presence is Presence.HERE or member.away):
                node = self.ranks.node_of(member.rank)
                each = found.setdefault(node, {"node": node or None, "ranks": [], "for_s": 0.0})
                each["ranks"].append(member.rank)
                each["for_s"] = max(each["for_s"], now_s - member.lost_s)
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
        if self.group.superseded_by:
            raise Superseded(f"{self.epoch} was superseded by {self.group.superseded_by}")
        # Every connection is closed, so that this agent ends if it has no other job, and another one takes over.
        if self.failed:
            peer.refuse(int(fields["id"]), AgentError(f"the agent cannot go on with {self.epoch}: {self.failed}"))
            peer.lose()
            return
        if not self.group.may_join(rank):
            raise AgentError(f"rank {rank} has left {self.epoch}; start the job again")
        known = self._members.get(rank)
        if known is not None and known.pid != peer.pid:
            raise AgentError(f"rank {rank} of {self.epoch} is process {known.pid} already")
        held = self._held(message, str(fields["coordinate"]))
        request_id = int(fields["id"])
        policy = policy_from(fields["options"])
        options = options_from(fields["options"])
        sources = Sources.parse(fields.get("notices"))
        peer.watch_death()
        if resume:
            self._take_arenas(rank, [int(slot) for slot in fields["arenas"]], message)
        if known is not None and known.peer is not peer:
            known.peer.forget()
            known.peer.lose()
        self._members[rank] = RankConnection(peer, peer.pid, held)
        fds = self.ranks.welcome(rank, peer)
        if rank == 0:
            if self._services.listening is not None:
                self._services.listening.follow(sources)
            self.group.may_acknowledge = sources.acknowledge
            self.outcome_path = Path(sources.outcome) if sources.outcome else self.outcome_path
            self.options = options
            self._protect(options.peers)
            self._follow(policy)
        self._limit_copies(rank)
        self.group.told_before(int(fields.get("verdict") or 0))
        self.group.joined(rank)
        self.group.layout(rank)
        # Sent before the rank can ask for the same versions again.
        for body in self.group.again() if resume else ():
            peer.send(body)
        peer.reply(request_id, {}, fds)
        if self._recovery is not None and len(self._members) == self.world:
            self._recover(self._recovery)

    def message(self, rank: int, peer: AnyPeer, message: Message) -> None:
        fields, group = message.fields, self.group
        match message.kind:
            case "layout":
                member = self._members[rank]
                member.held = self._held(message, member.held.coordinate)
                group.layout(rank)
                if self._mixed and not self._is_mixed():
                    self._divide(patient=False)
            case "warm":
                group.warm(rank, int(fields["slot"]), str(fields["division"]))
            case "staged":
                if why := str(fields.get("why") or ""):
                    group.missed(rank, int(fields["round"]), why)
                else:
                    tick = Tick.parse(str(fields["tick"]))
                    self._compare(rank, fields)
                    at = (int(fields["round"]), tick, int(fields["slot"]), str(fields["division"]))
                    group.staged(rank, *at, not_negative("stall_s", float(fields["stall_s"])))
            case "missed":
                last, every = fields.get("updates") or (0, 0)
                group.missed(rank, int(fields["round"]), str(fields["why"]), (int(last), int(every)))
            case "save":
                kind = _why(fields)
                metrics = {str(k): float(v) for k, v in dict(fields.get("metrics") or {}).items()}
                same = Tick.parse(str(fields["same"])) if fields.get("same") else None
                group.save(rank, Tick.parse(str(fields["tick"])), kind, metrics, (peer, int(fields["id"])), same)
            case "unsavable":
                group.unsavable(rank, Tick.parse(str(fields["tick"])), str(fields["why"])[:1000])
            case "held":
                group.held(rank, int(fields["round"]), (peer, int(fields["id"])))
            case "wanted":
                group.wanted(Tick.parse(str(fields["tick"])), _why(fields))
            case "leave":
                in_order = fields.get("outcome") != "exception"
                sent_away = fields.get("outcome") == "notice"
                if sent_away:
                    self._sent_away = True
                    by_s = time.monotonic() + finite(fields.get("left_s") or 0.0, "leave: left_s")
                    committed = fields.get("committed")
                    why = str(fields.get("why") or "")[:1000]
                    came = [str(each)[:200] for each in list(fields.get("notices") or ())[:NOTICES_MAX]]
                    group.sent_away(why, by_s, Tick.parse(str(committed)) if committed else None, came)
                group.leave(rank, (peer, int(fields["id"])), in_order, insists=sent_away)
                # This rank is done without the others.
                if in_order and not sent_away and group.all_gone:
                    self._give_up_recovery(f"rank {rank} has come to its end, and no other has come")
            case "notice":
                name, left_s = str(fields["key"])[:50], finite(fields["left_s"], "notice: left_s")
                told = Notice(time.time() + left_s, SIGNAL, True, name, f"rank {rank} got {name}")
                self.hear(told, When.AT_ONCE, node=self.ranks.node_of(rank))
                peer.reply(int(fields["id"]), {})
            case "got" if self.restore is not None:
                self.restore.got(peer, _numbers(fields["ok"]), _numbers(fields["bad"]))
            case "streamed" if self.restore is not None:
                self.restore.streamed(peer, int(fields["stream"]))
            case "got" | "streamed":
                pass  # of a fetch that is over
            case _:
                raise AgentError(f"the agent does not know the message {message.kind!r} from a rank")

    def _compare(self, rank: int, fields: dict[str, Any]) -> None:
        """Compares samples of this rank's replicated tensors with other ranks' samples. On a difference the save
        attempt is abandoned, and from then on every rank saves its own copy."""
        number, division, differing = int(fields["round"]), self._division, set[str]()
        samples, sample = fields.get("samples"), fields.get("sample")
        if division is not None and fields["division"] == division.id and isinstance(samples, bytes):
            differing.update(self._comparing.differing(number, division.places, rank, samples))
        if isinstance(sample, list) and len(sample) == 3 and isinstance(sample[2], bytes):
            name, box, digest = str(sample[0]), tuple(_numbers(sample[1])), sample[2]
            if self._samples[0] != number:
                self._samples = (number, {})
            if self._samples[1].setdefault((name, box), digest) != digest:
                differing.add(name)
        if new := sorted(differing - self._distrusted):
            self._distrust(rank, number, new)

    def _distrust(self, rank: int, number: int, names: list[str]) -> None:
        self._distrusted.update(names)
        what = (
            f"{names[0]} differs"
            if len(names) == 1
            else f"{names[0]} and {counted(len(names) - 1, 'more tensor')} differ"
        )
        self.group.missed(rank, number, f"{what} between the ranks")
        self.group.layout(rank)
        what = names[0] if len(names) == 1 else f"{len(names)} tensors, {', '.join(names[:5])}"
        text = f"not the same on all ranks any more: {what}. From now on each rank saves its own"
        self.emit("replica.differs", text, True, {"tensor": names[0], "names": names[:NAMES_MAX]})

    def ended(self, peer: AnyPeer) -> None:
        """A connection of this job is gone."""
        rank = self.rank_of(peer)
        if rank is not None:
            self.group.lost(rank, time.monotonic())
        elif self.first is peer and not self._members:
            self.group.died(0)  # entering the block failed there: no rank will join this epoch
        if self.restore is not None:
            self.restore.drop(peer)

    def died(self, peer: AnyPeer) -> None:
        """The process of a rank is dead, or the process that began the job, before it joined."""
        rank = self.rank_of(peer)
        if rank is None:
            rank = 0 if self.first is peer and 0 not in self._members else None
        if rank is not None:
            self.group.died(rank)
            self._give_up_recovery(f"rank {rank} died")

    def copies_lost(self, name: str) -> None:
        """The agent of that name is disconnected, and its replicas for this job may be lost. They are made anew as soon
        as possible. Until then, the affected versions do not count as replicated."""
        if self.reprotecting is not None:
            self.reprotecting.lost(name)
        if self.refinding is not None:
            self.refinding.lost()
        protection, tick = self.protection, self.group.safe_tick
        if protection is None:
            return
        lost = [each for each in self.group.copied_ticks if protection.involves(name, Identity(self.epoch, each))]
        if lost:
            self.group.copies_lost(name, lost)
        if tick in lost and tick is not None and self._services.account.unprotected() is not None:
            facts = {"identity": str(Identity(self.epoch, tick)), "agent": name}
            text = f"step {tick.step} has fewer copies in other nodes' memory than was asked for: agent {name} is gone "
            text += "or cut off, and its copies may be lost. They are made again as soon as possible"
            self.emit("replica.lost", text, True, facts)

    def parent_is_safe(self, is_safe: bool) -> None:
        """Shows whether the parent checkpoint meets the replication target."""
        account, parent = self._services.account, self.claim.parent if self.claim is not None else None
        if parent is not None and is_safe:
            account.found("peer", parent.epoch, parent.tick)
        elif parent is not None and account.safe.get("peer", (None, None))[0] == parent.tick:
            account.unprotected()

    def _follow(self, policy: Every | Adaptive) -> None:
        now_s = time.monotonic()
        known = self.learning.known if self.learning is not None else NOTHING
        self.is_adaptive = isinstance(policy, Adaptive)
        limits, given = (Adaptive(), policy) if isinstance(policy, Every) else (policy, Every(seconds=START_S))
        self.learning = CostModel(limits, known, max(1, len(self.nodes)), self.options.limits.unsaved_s)
        self.learning.peers = self.group.is_kept_whole
        self.group.follow(given, now_s)
        if self.claim is not None:  # this agent took over a running job
            self.learning.started(now_s, self.ranks.hindmost())
        self.follow_learning()

    def _protect(self, option: Replicas | Parity | None) -> None:
        """Sets up replicas or parity on other nodes, if there are any."""
        network, copies, parities = self._services.network(), self._services.copies, self._services.parities
        if not self.nodes or network is None or copies is None or parities is None:
            return
        if self.protection is None or self.protection.option != option:
            self.protection = ReplicationManager(network, copies, parities, self.nodes, option, self._services.lenders)
            self.group.unsure = self.taken_over and option is not None

    def _limit_copies(self, rank: int) -> None:
        """Sends rank 0's bandwidth limit to the other nodes: to all, and to one that joins later or whose agent
        restarted. A node that was away also hears that replicas are no longer kept."""
        network, nodes = self._services.network(), self.ranks
        if network is None or not isinstance(nodes, AllShares):
            return
        rate = self.options.limits.peer_bandwidth
        if rank == 0:
            network.limit(rate)
        for name, share in nodes.others.items():
            # A message before the join would reach a node that does not know the job.
            if share.peers and (rank == 0 or nodes.node_of(rank) == name):
                share.limit_copies(rate)
                if self._unkept:
                    share.tell({"t": "unkeep"})

    def begin_training(self, claim: Claim, resumed: bool) -> None:
        """The job's parent is settled: begins to appoint snapshots, and claims the epoch in the store. `resumed`: this
        agent took over a running job."""
        self.claim = claim
        now_s = time.monotonic()
        if resumed:
            self.group.resumed(now_s)
        else:
            step = claim.parent.tick.step if claim.parent else 0
            self.group.started(step, now_s)
            if self.learning is not None:
                self.learning.started(now_s, step)
        self._claim(claim)
        self._later(self._services.heartbeat_s, self._beat)
        with contextlib.suppress(OSError):
            if not resumed and self.outcome_path is not None and self.outcome_path.is_file():
                self.outcome_path.unlink()  # of an earlier start
        if self._services.listening is not None:
            for notice, when in self._services.listening.heard():
                if (notice.source, notice.key) not in self.group.notices:
                    self.hear(notice, when)

    # -- notices

    def hear(self, word: Word, when: When = When.IN_TIME, node: str = "") -> None:
        """Passes a notice on to the scheduler, which decides what follows, and reports it to people. `node`: the node
        that it concerns; "" is this one."""
        name = word.source, word.key
        known = self.group.notices.get(name)
        if isinstance(word, Withdrawn):
            # An operator takes back a notice from any node.
            node = min(known.nodes) if known is not None else node
        machine = f"node {node}" if node else "this machine"
        if isinstance(word, Withdrawn):
            self.group.withdrawn(*name)
            if known is not None:
                text = f"{word.source} {bare(word.key, node)}: {machine} stays after all"
                self.emit("notice.withdrawn", text, True, {"source": word.source, "key": word.key})
            return
        now_s = time.monotonic()
        left_s = word.left_s
        told = StandingNotice(*name, now_s + left_s, now_s, word.certain, when, frozenset({node}))
        when = self.group.warn(told).when
        if known is not None and word.source == SIGNAL:
            return  # another rank got the signal too
        what = f"{machine} goes away" if word.certain else f"{machine} may go away"
        leaves = word.certain and when is not When.NOT_AGAIN
        then = "the job saves and leaves before" if leaves else "one more checkpoint is taken"
        if when is When.NOT_AGAIN:
            then = "the job has left because of this notice before, and does not leave again; " + then
        facts = {"source": word.source, "key": word.key, "left_s": round(left_s, 1), "certain": word.certain}
        text = f"{what} in {max(0.0, left_s):.1f} s ({word.message}): {then}"
        self.emit("notice", text, left_s < SOON_S, facts)

    def notices_left(self) -> dict[tuple[str, str], float]:
        """Seconds left for each notice, by source and key."""
        now_s = time.monotonic()
        return {name: each.deadline_s - now_s for name, each in self.group.notices.items()}

    def _notices(self) -> dict[str, Any]:
        group, now_s = self.group, time.monotonic()
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
            "course": group.course.value,
            "needs_s": round(group.need_s, 1),
            "step_s": round(group.pace.step_s, 4),
        }

    def settle(self) -> float | None:
        """Decides and acts until nothing is left to do now. Returns when to look again, on the monotonic clock; None:
        not before something happens."""
        if self._dropped or self.failed:
            return None
        now_s = time.monotonic()
        self.guard(lambda: self._decide(now_s))
        if self.group.all_gone and self.gone_s is None:
            self.gone_s = now_s
        return self.group.next_wake_s(now_s) if not self.failed else None

    def _decide(self, now_s: float) -> None:
        found = True
        while found:
            actions = self.group.decide(now_s, self.ranks.steps(), self.ranks.polls(), self.ranks.since_s())
            for action in actions:
                self._act(action)
            found = bool(actions)

    def give_back(self, outdated: Callable[[Identity], bool]) -> None:
        """Frees slots on this node that hold nothing needed, once the job is idle. `outdated`: whether a checkpoint is
        superseded."""
        used = {slot.round.tick for slot in self.group.slots if slot.state is not State.FREE and slot.round is not None}
        if self.is_idle:
            self.own.give_back(
                lambda identity: outdated(identity) and not (identity.epoch == self.epoch and identity.tick in used)
            )

    def drop(self, leave_others: bool = False) -> None:
        """Frees the job's memory. The caller ensures that no work is under way and no lease is held. `leave_others`:
        the other nodes keep their memory of the job."""
        self._dropped = True
        self._give_up_recovery("")
        if self.restore is not None:
            self.restore.close()
        self.checkpoints.clear()
        if isinstance(self.ranks, AllShares) and leave_others:
            self.ranks.leave_others()
        self.ranks.drop()
        for member in self._members.values():
            member.peer.forget()
        self.first.forget()

    # -- small steps

    def _held(self, message: Message, coordinate: str) -> RankContents:
        fields = message.fields
        if len(message.blobs) != 2:
            raise AgentError(f"{message.kind!r} comes with a layout and hashes")
        layout, hashes = layout_from(message.blobs[0]), hashes_from(message.blobs[1])
        values_bytes = int(fields["values_bytes"])
        if not 0 <= values_bytes <= VALUES_BYTES_MAX:
            raise UsageError(f"values_bytes is {values_bytes}, not within 0 and {VALUES_BYTES_MAX}")
        return RankContents(coordinate, layout, hashes, str(fields["tick"]), values_bytes)


def _why(fields: dict[str, Any]) -> Why:
    return {"exit": Why.EXIT, "due": Why.DUE}.get(str(fields["why"]), Why.SAVE)


def finite(value: Any, name: str) -> float:
    """The value as a finite number of seconds. Errors: UsageError."""
    number = float(value)
    if not math.isfinite(number):
        raise UsageError(f"{name} is {number}, not a number of seconds")
    return number


def _numbers(value: Any) -> list[int]:
    return [int(number) for number in value]
