"""The replica state of one job: which of its checkpoints peers keep, and which node losses these survive. Pure.

`Kept` tells for one node's state how many losses it survives, and which nodes hold copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ckpt.agent.state.actions import DropReplicas, ReplicaDegraded, Replicate
from ckpt.agent.state.job_facts import JobFacts
from ckpt.agent.state.retention_rule import remaining_placement, surviving_nodes
from ckpt.agent.state.slots import Backoff, SaveAttempt, SaveReason, SlotState, WorkState
from ckpt.placement.placement import Kept
from ckpt.types import Version

NO_PEER_MEMORY = "no other node has memory for a part of it"
NO_PEER_ROOM = "no other node has memory left for any of it"
SUPERSEDED = "a newer one is in other nodes' memory already"
FOUND_INCOMPLETE = "fewer copies were found in other nodes' memory than were asked for"
HOLDER_LOST = "an agent that had a part of it was lost meanwhile"


@dataclass(eq=False)
class ReplicaState:
    """The replicas of one job."""

    _facts: JobFacts
    is_replication_on: bool = False  # peers keep replicas
    is_replication_wanted: bool = False  # peers should keep replicas, whether or not they have room
    placement: tuple[Kept, ...] = ()  # per node, the holders of its replicas; "" is this node
    replicating_slot: int | None = None
    # Which checkpoint is replicated is unknown: another agent was coordinator, or a holder was away.
    # Nothing is evicted before a survey has answered.
    is_survey_pending: bool = False
    replicated_version: Version | None = None  # the newest replicated version, even if its slot is free
    replicated_placement: tuple[Kept, ...] = ()  # the placement of that version
    dropped_version: Version | None = None  # newest version whose replicas peers were told to drop; committed
    backoff: Backoff = field(default_factory=Backoff)
    # Lost agents that held replicas of the newest replicated version, until a replication succeeds.
    lost_holders: set[str] = field(default_factory=set)
    _is_holder_lost: bool = False  # a holder was lost during the replication under way
    # Newest version of which peers may hold anything, even from a failed replication.
    _sent_version: Version | None = None
    _sent_placement: tuple[Kept, ...] = ()  # as planned when replication last began

    # -- facts

    def why_not_replicated(self, version: Version) -> str | None:
        """Why the version of a `Replicate` is not copied after the survey, as the `error` for `record_replication`;
        None: it is copied."""
        if self.is_replication_on and not self.would_reduce_protection:
            return None
        if self.replicated_version is not None and version <= self.replicated_version:
            return SUPERSEDED if version < self.replicated_version else ""
        return NO_PEER_MEMORY if self.is_replication_on else NO_PEER_ROOM

    def record_replication(self, slot: int, error: str, now_s: float) -> str:
        """Outcome of `Replicate`. `error`: "" if every replica is where the placement says, and verified.
        Returns why the version is not replicated; "": it is."""
        levels, attempt = self._facts.levels, self._facts.slots[slot].attempt
        assert attempt is not None  # the slot was leased
        if not error and self._is_holder_lost:
            error = HOLDER_LOST
        before = {each.node: each for each in self._retained_replicas(attempt.version, self._sent_placement)}
        kept = tuple(each if each.losses_max else before.get(each.node, each) for each in self._sent_placement)
        why_not = error or ("" if _is_complete(kept) else NO_PEER_MEMORY)
        self.replicating_slot = None
        self._facts.slots.release_lease(slot)
        if not error:
            self.lost_holders.clear()
        self.backoff.record(bool(error), now_s)
        told = levels.find(attempt.version, "peer")
        is_whole_now = told is not None and not (told["ok"] or why_not)
        # A version that was replicated before this attempt stays so.
        if attempt.replication_state is not WorkState.DONE or is_whole_now:
            attempt.replication_state = WorkState.FAILED if error else WorkState.DONE
            # Where peers keep no replicas, the outcome of the commit answers waits for this level.
            if self.is_replication_on or not error:
                levels.report(attempt.version, "peer", not why_not, why_not)
        if not error and (self.replicated_version is None or attempt.version >= self.replicated_version):
            self.replicated_version, self.replicated_placement = attempt.version, kept
        return why_not

    def can_drop_older(self, why_not: str) -> bool:
        """Whether peers may drop older replicas, by the answer of `record_replication`: replication succeeded, or
        reached every node that has memory for replicas."""
        return not why_not or (why_not == NO_PEER_MEMORY and self.supersedes_former)

    def record_survey(self, version: Version | None, kept: Sequence[Kept], whole: bool) -> bool:
        """The survey has answered: `version` is the newest replicated version; None: there is none. `kept`: per node;
        the holders are unknown and left out. `whole`: the version meets the replication target. Returns whether the
        answer holds: no agent was lost meanwhile."""
        self.is_survey_pending = False
        self.replicated_version, self.replicated_placement = version, tuple(kept)
        # If an agent was lost meanwhile, replicas that it reported may be gone.
        if not self._is_holder_lost:
            self.lost_holders.clear()
        found, under_way = self.replicated, self._replicating_attempt
        # The version under way is reported by `record_replication`.
        if found is not None and found is not under_way:
            found.replication_state = WorkState.DONE
            why_not = FOUND_INCOMPLETE if not whole else HOLDER_LOST if self._is_holder_lost else ""
            self._facts.levels.report(found.version, "peer", not why_not, why_not)
        # The placement may have changed, or the version under way stays where the survey found it.
        if under_way is not None:
            is_copied = self.is_replication_on and not self.would_reduce_protection
            self._sent_placement = self.placement if is_copied else self.replicated_placement
        return not self._is_holder_lost

    def record_lost_holder(self, name: str, versions: Collection[Version]) -> None:
        """The agent of that node is disconnected: its replicas of these versions may be lost."""
        under_way = self._replicating_attempt
        if self.is_survey_pending or self.replicated_version in versions:
            self.lost_holders.add(name)
        if self.is_survey_pending or (under_way is not None and under_way.version in versions):
            self._is_holder_lost = True

    # -- queries

    @property
    def _replicating_attempt(self) -> SaveAttempt | None:
        """The save attempt that is being replicated."""
        return self._facts.slots[self.replicating_slot].attempt if self.replicating_slot is not None else None

    @property
    def peer_versions(self) -> list[Version]:
        """The versions that peers have or are receiving."""
        under_way = self._replicating_attempt
        versions = (self.replicated_version, under_way.version if under_way is not None else None)
        return [version for version in versions if version is not None]

    @property
    def is_placement_complete(self) -> bool:
        """Whether the present placement gives every node's state a replica."""
        return self.is_replication_on and _is_complete(self.placement)

    @property
    def is_replication_failing(self) -> bool:
        """Whether the last replication failed: a peer may have less memory than planned."""
        return self.backoff.failures > 0

    @property
    def replicated(self) -> SaveAttempt | None:
        """The newest replicated checkpoint; None: there is none, or its slot was reused."""
        complete = self._facts.slots.attempts(SlotState.COMPLETE)
        return next((each for each in complete if each.version == self.replicated_version), None)

    @property
    def retained_version(self) -> Version | None:
        """The version that peers must keep while a newer one is being replicated; they drop all older ones.

        The newest replicated version. If there is none, the newest one that peers were told to drop, since a peer that
        was away may still hold it. After a second failed replication the newest committed version counts too: replicas
        of failed attempts may exceed the planned memory."""
        if self.replicated_version is not None:
            return self.replicated_version
        stored = self._facts.committed_version if self.backoff.failures > 1 else None
        return max(filter(None, (self.dropped_version, stored)), default=None)

    @property
    def retained_placement(self) -> tuple[Kept, ...] | None:
        """The holders of `retained_version` that must keep it while a newer version is replicated; () if none must.
        None: the holders are unknown, since a survey found the replicas or they are parity."""
        if self.replicated_version is None or self._can_evict_replicated:
            return ()
        is_known = all(each.holders or not each.losses_max for each in self.replicated_placement)
        return self.replicated_placement if is_known else None

    @property
    def _can_evict_replicated(self) -> bool:
        """Whether peers may evict the newest replicated version to make room for a newer one: it is committed, and
        replication failed twice. Attempts under several placements may have left more replicas than planned."""
        version, stored, newest = self.replicated_version, self._facts.committed_version, self._facts.slots.newest
        if version is None or stored is None or newest is None:
            return False
        return self.backoff.failures > 1 and version <= stored and version < newest.version

    @property
    def is_superseded(self) -> bool:
        """Whether the newest committed version is newer than the newest replicated one."""
        stored = self._facts.committed_version
        return stored is not None and self.replicated_version is not None and stored > self.replicated_version

    @property
    def remaining_placement(self) -> tuple[Kept, ...]:
        """The replication of the newest replicated version that certainly remains after the known agent losses."""
        return remaining_placement(self.replicated_placement, self.lost_holders)

    @property
    def would_reduce_protection(self) -> bool:
        """Whether the next replication would protect less: the newest replicated version certainly survives the loss of
        a node that the next version would not survive."""
        return self._reduces_protection_of(self.remaining_placement)

    def _reduces_protection_of(self, safe: Iterable[Kept]) -> bool:
        copied, stored = self._replicating_attempt or self._facts.slots.newest, self._facts.committed_version
        if self.replicated_version is None or copied is None or (stored and stored >= self.replicated_version):
            return False
        if copied.version < self.replicated_version:
            return True  # an older version must not be reported as the newest replicated one
        kept = self.placement if self.is_replication_on else ()
        stays = surviving_nodes(kept) | surviving_nodes(self._retained_replicas(copied.version, kept))
        return not surviving_nodes(safe) <= stays

    def _retained_replicas(self, version: Version, kept: Iterable[Kept]) -> tuple[Kept, ...]:
        """The certain replicas that stay when version `version` is replicated. Copies of the same version stay beside
        the new ones; parity is replaced by the new parity."""
        by_parity = any(each.losses_max and not each.holders for each in kept)
        return self.remaining_placement if version == self.replicated_version and not by_parity else ()

    @property
    def supersedes_former(self) -> bool:
        """Whether this job's newest checkpoint supersedes what earlier epochs may have left in memory."""
        # A checkpoint on this node alone supersedes no replicated one. So it does not suffice while the placement is
        # undecided after an agent restart, or while replicas are wanted and no peer has room.
        elsewhere = self.is_replication_on or self.is_survey_pending or self.is_replication_wanted
        return self.survives_node_loss or (self._facts.slots.newest is not None and not elsewhere)

    @property
    def survives_node_loss(self) -> bool:
        """Whether a checkpoint of this job is committed, or survives the loss of any one node."""
        is_replicated = self.replicated is not None and _is_complete(self.remaining_placement)
        return self._facts.committed_version is not None or is_replicated

    # -- decisions

    def drop_replicas(self) -> None:
        """Lets peers drop their replicas if no node has room for new ones. They go once the store has a checkpoint at
        least as new as any replica, and the replicated slot is free. Until then they stay, including those of failed
        attempts: they may be all that survives this node."""
        sent, stored = self._sent_version, self._facts.committed_version
        if self.is_replication_on or self.replicating_slot is not None or self._facts.superseded_by or sent is None:
            return
        is_outdone = self.replicated_version is None or self.is_superseded
        if self.replicated is None and is_outdone and stored is not None and stored >= sent:
            self.replicated_version, self._sent_version, self.dropped_version = None, None, sent
            self._facts.actions.append(DropReplicas())

    def replicate_newest(self, now_s: float) -> None:
        """Begins to replicate the newest attempt, one at a time; an attempt that is overtaken meanwhile is not
        replicated. It is repeated after a failure, and when a node returns that may have lost its replicas or has
        memory for more. The first call has peers surveyed for what is replicated, even if none of them keeps replicas
        now."""
        facts, newest = self._facts, self._facts.slots.newest
        if newest is None or self.replicating_slot is not None or facts.superseded_by:
            return
        # Before the first division the placement is not known.
        if not (self.is_replication_on if not self.is_survey_pending else facts.arenas.division):
            return
        if facts.all_gone and newest.reason is not SaveReason.HOLD:
            return
        peer = newest.replication_state
        is_same = newest.version == self.replicated_version and self.is_replication_on
        more = is_same and _improves(self.placement, self.remaining_placement)
        short = (bool(self.lost_holders) or more) and not facts.rank_states.summary.disconnected
        waits = self.is_replication_failing and now_s < self.backoff.retry_s
        again = peer is WorkState.FAILED or (peer is WorkState.DONE and short)
        if peer is not WorkState.NEW and (not again or waits or facts.any_gone):
            return
        # A replication now would reduce the protection of the replicated version. If a survey is still due, more may be
        # lost of that version than is known, and replication goes on.
        if self.would_reduce_protection and not self.is_survey_pending:
            if peer is WorkState.NEW:
                newest.replication_state = WorkState.FAILED
                facts.levels.report(newest.version, "peer", False, NO_PEER_MEMORY)
            return
        # Disconnected agents may still have their replicas.
        self.is_survey_pending |= self._reduces_protection_of(self.replicated_placement)
        if self._can_evict_replicated and self.replicated_version is not None:
            facts.actions.append(ReplicaDegraded(self.replicated_version))
        self.begin_replication(newest)
        facts.actions.append(Replicate(newest.slot, newest.version))

    def begin_replication(self, attempt: SaveAttempt) -> None:
        """Replication of that attempt has begun; it lasts until `record_replication`."""
        self._is_holder_lost, self._sent_version = False, max(attempt.version, self._sent_version or attempt.version)
        # A version that is already replicated stays so: its other replicas may be in place.
        if attempt.replication_state is not WorkState.DONE:
            attempt.replication_state = WorkState.RUNNING
        self._sent_placement = self.placement
        self._facts.slots.take_lease(attempt.slot)
        self.replicating_slot = attempt.slot

    def check(self) -> None:
        """Asserts the invariants of replication."""
        attempt = self._replicating_attempt
        running = [each for each in self._facts.slots.attempts() if each.replication_state is WorkState.RUNNING]
        assert running in ([], [attempt]), f"{running} are replicated at once"
        if self.replicating_slot is not None:
            assert attempt is not None
            assert attempt.state is SlotState.COMPLETE, f"{attempt.version} is replicated, and {attempt.state}"
            assert self._facts.slots[self.replicating_slot].leases, "what is replicated may be overwritten"


def _is_complete(kept: Iterable[Kept]) -> bool:
    """Whether every node's state has a replica. Where memory is short a replication may succeed without that; a state
    without a replica is lost with its node."""
    return all(each.losses_max for each in kept)


def _improves(placement: tuple[Kept, ...], remaining: tuple[Kept, ...]) -> bool:
    """Whether replicas by that placement protect no node's state less than the remaining ones, and some state more."""
    if remaining == placement:
        return False
    left = {each.node: each.losses_max for each in remaining}
    gains = [each.losses_max - left.get(each.node, 0) for each in placement]
    return max(gains, default=0) > 0 and min(gains) >= 0
