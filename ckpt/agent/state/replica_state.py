"""The replica state of one job: which of its checkpoints peers keep, and which node losses these survive.

Pure, like job_facts.py. `Kept` tells for one node's state how many losses it survives, and which nodes hold copies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ckpt.agent.state.job_facts import RETRY_S_MAX, JobFacts, SaveAttempt, SlotState, WorkState
from ckpt.agent.state.retention_rule import remaining_placement, surviving_nodes
from ckpt.placement.placement import Kept
from ckpt.types import Version

NO_PEER_MEMORY = "no other node has memory for a part of it"
NO_PEER_ROOM = "no other node has memory left for any of it"
SUPERSEDED = "a newer one is in other nodes' memory already"
FOUND_INCOMPLETE = "fewer copies were found in other nodes' memory than were asked for"
HOLDER_LOST = "an agent that had a part of it was lost meanwhile"


class ReplicaState(JobFacts):
    """The facts of one job, its replicas included."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.is_replication_on = False  # peers keep replicas
        self.is_replication_wanted = False  # peers should keep replicas, whether or not they have room
        self.placement: tuple[Kept, ...] = ()  # the placement: per node, the holders of its replicas; "" is this node
        self.replicating_slot: int | None = None  # the slot
        # Which checkpoint is replicated is unknown: another agent was coordinator, or a holder was away.
        # Nothing is evicted before a survey has answered.
        self.is_survey_pending = False
        self.replicated_version: Version | None = None  # newest replicated version, even if its slot is free
        self.replicated_placement: tuple[Kept, ...] = ()  # the placement of that version
        self.dropped_version: Version | None = None  # newest version whose replicas peers were told to drop; committed
        self._retry_replication_s = math.inf
        self._replication_failures = 0
        # Lost agents that held replicas of the newest replicated version, until a replication succeeds.
        self._lost_holders: set[str] = set()
        self._is_holder_lost = False  # a holder was lost during the replication under way
        # Newest version of which peers may hold anything, even from a failed replication.
        self._sent_version: Version | None = None

    # -- facts

    def begin_replication(self, attempt: SaveAttempt) -> None:
        """Replication of that attempt has begun; it lasts until `record_replication`."""
        self._is_holder_lost, self._sent_version = False, max(attempt.version, self._sent_version or attempt.version)
        # A version that is already replicated stays so: its other replicas may be in place.
        if attempt.replication_state is not WorkState.DONE:
            attempt.replication_state = WorkState.RUNNING
        attempt.placement = self.placement
        self.take_lease(attempt.slot)
        self.replicating_slot = attempt.slot

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
        attempt = self.slots[slot].attempt
        assert attempt is not None  # the slot was leased
        if not error and self._is_holder_lost:
            error = HOLDER_LOST
        before = {each.node: each for each in self._retained_replicas(attempt.version, attempt.placement)}
        kept = tuple(each if each.losses_max else before.get(each.node, each) for each in attempt.placement)
        why_not = error or ("" if _is_complete(kept) else NO_PEER_MEMORY)
        self.replicating_slot = None
        self.release_lease(slot)
        if not error:
            self._lost_holders.clear()
        self._replication_failures = min(self._replication_failures + 1, 16) if error else 0
        self._retry_replication_s = now_s + min(2.0**self._replication_failures, RETRY_S_MAX) if error else math.inf
        told = self._level_messages.get((attempt.version, "peer"))
        is_whole_now = told is not None and not (told["ok"] or why_not)
        # A version that was replicated before this attempt stays so.
        if attempt.replication_state is not WorkState.DONE or is_whole_now:
            attempt.replication_state = WorkState.FAILED if error else WorkState.DONE
            # Where peers keep no replicas, the outcome of the commit answers waits for this level.
            if self.is_replication_on or not error:
                self._report_level(attempt.version, "peer", not why_not, why_not)
        if not error and (self.replicated_version is None or attempt.version >= self.replicated_version):
            self.replicated_version, self.replicated_placement = attempt.version, kept
        return why_not

    def can_drop_older(self, why_not: str) -> bool:
        """Whether peers may drop older replicas, by the answer of `record_replication`: replication succeeded, or
        reached every node that has memory for replicas."""
        return not why_not or (why_not == NO_PEER_MEMORY and self.supersedes_former)

    @property
    def is_placement_complete(self) -> bool:
        """Whether the present placement gives every node's state a replica."""
        return self.is_replication_on and _is_complete(self.placement)

    @property
    def is_replication_failing(self) -> bool:
        """Whether the last replication failed: a peer may have less memory than planned."""
        return self._replication_failures > 0

    def record_survey(self, version: Version | None, kept: Sequence[Kept], whole: bool) -> bool:
        """The survey has answered: `version` is the newest replicated version; None: there is none. `kept`: per node;
        the holders are unknown and left out. `whole`: the version meets the replication target. Returns whether the
        answer holds: no agent was lost meanwhile."""
        self.is_survey_pending = False
        self.replicated_version, self.replicated_placement = version, tuple(kept)
        # If an agent was lost meanwhile, replicas that it reported may be gone.
        if not self._is_holder_lost:
            self._lost_holders.clear()
        found, under_way = self.replicated, self._replicating_attempt
        # The version under way is reported by `record_replication`.
        if found is not None and found is not under_way:
            found.replication_state = WorkState.DONE
            why_not = FOUND_INCOMPLETE if not whole else HOLDER_LOST if self._is_holder_lost else ""
            self._report_level(found.version, "peer", not why_not, why_not)
        # The placement may have changed, or the version under way stays where the survey found it.
        if under_way is not None:
            under_way.placement = (
                self.placement
                if self.is_replication_on and not self.would_reduce_protection
                else self.replicated_placement
            )
        return not self._is_holder_lost

    def record_lost_holder(self, name: str, versions: Collection[Version]) -> None:
        """The agent of that node is disconnected: its replicas of these versions may be lost."""
        if self.is_survey_pending or self.replicated_version in versions:
            self._lost_holders.add(name)
        if self.is_survey_pending or (
            self._replicating_attempt is not None and self._replicating_attempt.version in versions
        ):
            self._is_holder_lost = True

    @property
    def _replicating_attempt(self) -> SaveAttempt | None:
        """The save attempt that is being replicated."""
        return self.slots[self.replicating_slot].attempt if self.replicating_slot is not None else None

    @property
    def peer_versions(self) -> list[Version]:
        """The versions that peers have or are receiving."""
        under_way = self._replicating_attempt
        versions = (self.replicated_version, under_way.version if under_way is not None else None)
        return [version for version in versions if version is not None]

    # -- queries

    @property
    def replicated(self) -> SaveAttempt | None:
        """The newest replicated checkpoint; None: there is none, or its slot was reused."""
        complete = self.attempts(SlotState.COMPLETE)
        return next((each for each in complete if each.version == self.replicated_version), None)

    @property
    def retained_version(self) -> Version | None:
        """The version that peers must keep while a newer one is being replicated; they drop all older ones.

        The newest replicated version. If there is none, the newest one that peers were told to drop, since a peer that
        was away may still hold it. After a second failed replication the newest committed version counts too: replicas
        of failed attempts may exceed the planned memory."""
        if self.replicated_version is not None:
            return self.replicated_version
        stored = self.committed_version if self._replication_failures > 1 else None
        return max(filter(None, (self.dropped_version, stored)), default=None)

    @property
    def retained_placement(self) -> tuple[Kept, ...] | None:
        """The holders of `retained_version` that must keep it while a newer version is replicated; () if none must.
        None: the holders are unknown, since a survey found the replicas or they are parity."""
        if self.replicated_version is None or self._can_evict_replicated:
            return ()
        return (
            self.replicated_placement
            if all(each.holders or not each.losses_max for each in self.replicated_placement)
            else None
        )

    @property
    def _can_evict_replicated(self) -> bool:
        """Whether peers may evict the newest replicated version to make room for a newer one: it is committed, and
        replication failed twice. Attempts under several placements may have left more replicas than planned."""
        version, stored, newest = self.replicated_version, self.committed_version, self.newest
        if version is None or stored is None or newest is None:
            return False
        return self._replication_failures > 1 and version <= stored and version < newest.version

    @property
    def _is_replicated_superseded(self) -> bool:
        """Whether the newest committed version is newer than the newest replicated one."""
        stored = self.committed_version
        return stored is not None and self.replicated_version is not None and stored > self.replicated_version

    @property
    def _remaining_placement(self) -> tuple[Kept, ...]:
        """The replication of the newest replicated version that certainly remains after the known agent losses."""
        return remaining_placement(self.replicated_placement, self._lost_holders)

    @property
    def _would_improve_replication(self) -> bool:
        """Whether replicating that version again would protect no node's state less than it certainly is, and some
        node's state more."""
        remaining = self._remaining_placement
        if remaining == self.placement:
            return False
        left = {each.node: each.losses_max for each in remaining}
        gains = [each.losses_max - left.get(each.node, 0) for each in self.placement]
        return self.is_replication_on and max(gains, default=0) > 0 and min(gains) >= 0

    @property
    def would_reduce_protection(self) -> bool:
        """Whether the next replication would protect less: the newest replicated version certainly survives the loss of
        a node that the next version would not survive."""
        return self._reduces_protection_of(self._remaining_placement)

    @property
    def _may_reduce_protection(self) -> bool:
        """As `would_reduce_protection`, if disconnected agents still have their replicas."""
        return self._reduces_protection_of(self.replicated_placement)

    def _reduces_protection_of(self, safe: Iterable[Kept]) -> bool:
        copied, stored = self._replicating_attempt or self.newest, self.committed_version
        if self.replicated_version is None or copied is None or (stored and stored >= self.replicated_version):
            return False
        if copied.version < self.replicated_version:
            return True  # an older version must not be reported as the newest replicated one
        kept = self.placement if self.is_replication_on else ()
        return not surviving_nodes(safe) <= surviving_nodes(kept) | surviving_nodes(
            self._retained_replicas(copied.version, kept)
        )

    def _retained_replicas(self, version: Version, kept: Iterable[Kept]) -> tuple[Kept, ...]:
        """The certain replicas that stay when version `version` is replicated. Copies of the same version stay beside
        the new ones; parity is replaced by the new parity."""
        by_parity = any(each.losses_max and not each.holders for each in kept)
        return self._remaining_placement if version == self.replicated_version and not by_parity else ()

    @property
    def _is_blocked_on_commit(self) -> bool:
        """Whether no slot becomes free before the newest checkpoint is committed: there is one slot only; or, of two,
        the other holds the newest replicated checkpoint, and replication of the newest failed or is off."""
        newest, safe = self.newest, self.replicated
        if self.slot_limit != 2 or newest is None or safe is None or safe is newest:
            return self.slot_limit == 1
        return newest.replication_state is WorkState.FAILED or not self.is_replication_on

    @property
    def supersedes_former(self) -> bool:
        """Whether this job's newest checkpoint supersedes what earlier epochs may have left in memory."""
        # A checkpoint on this node alone supersedes no replicated one. So it does not suffice while the placement is
        # undecided after an agent restart, or while replicas are wanted and no peer has room.
        elsewhere = self.is_replication_on or self.is_survey_pending or self.is_replication_wanted
        return self.survives_node_loss or (self.newest is not None and not elsewhere)

    @property
    def survives_node_loss(self) -> bool:
        """Whether a checkpoint of this job is committed, or survives the loss of any one node."""
        return self.committed_version is not None or (
            self.replicated is not None and _is_complete(self._remaining_placement)
        )

    @property
    def is_at_work(self) -> bool:
        """As `JobFacts.is_at_work`; a replication counts too."""
        return self.replicating_slot is not None or super().is_at_work

    @property
    def is_only_replicating(self) -> bool:
        """Whether a replication is the only work under way."""
        return self.replicating_slot is not None and not super().is_at_work

    def next_wake_s(self, now_s: float) -> float | None:
        again_s = self._retry_replication_s if now_s < self._retry_replication_s < math.inf else None
        return min((each for each in (super().next_wake_s(now_s), again_s) if each is not None), default=None)

    # -- helpers

    def _report_level(self, version: Version, level: str, ok: bool, message: str) -> None:
        super()._report_level(version, level, ok, message)
        # Without replication nothing else answers a rank that waits for "peer".
        if level == "store" and not ok and not self.is_replication_on:
            self._report_level(version, "peer", False, f"no other node keeps copies, and the store has none: {message}")


def _is_complete(kept: Iterable[Kept]) -> bool:
    """Whether every node's state has a replica. Where memory is short a replication may succeed without that; a state
    without a replica is lost with its node."""
    return all(each.losses_max for each in kept)
