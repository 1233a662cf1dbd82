"""The replica state of one job: which of its checkpoints peers keep, and which node losses these survive.

Pure, like job_facts.py. `Kept` tells for one node's state how many losses it survives, and which nodes hold copies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ckpt.agent.state.job_facts import RETRY_S_MAX, JobFacts, Round, Slot, State, Store
from ckpt.agent.state.retention_rule import left_of, outlived
from ckpt.placement.placement import Kept
from ckpt.types import Tick

UNKEPT = "no other node has memory for a part of it"
ROOMLESS = "no other node has memory left for any of it"
OUTDONE = "a newer one is in other nodes' memory already"
FOUND_LESS = "fewer copies were found in other nodes' memory than were asked for"
LOST = "an agent that had a part of it was lost meanwhile"


class ReplicaState(JobFacts):
    """The facts of one job, its replicas included."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.replicates = False  # peers keep replicas
        self.wants_copies = False  # peers should keep replicas, whether or not they have room
        self.kept: tuple[Kept, ...] = ()  # the placement: per node, the holders of its replicas; "" is this node
        self.replicating: int | None = None  # the slot
        # Which checkpoint is replicated is unknown: another agent was coordinator, or a holder was away.
        # Nothing is evicted before a survey has answered.
        self.unsure = False
        self.safe_tick: Tick | None = None  # newest replicated version, even if its slot is free
        self.safe_kept: tuple[Kept, ...] = ()  # the placement of that version
        self.given_up_tick: Tick | None = None  # newest version whose replicas peers were told to drop; committed
        self._retry_copy_s = math.inf
        self._copy_failures = 0
        # Lost agents that held replicas of the newest replicated version, until a replication succeeds.
        self._lost_with: set[str] = set()
        self._lost_meanwhile = False  # a holder was lost during the replication under way
        # Newest version of which peers may hold anything, even from a failed replication.
        self._copied_tick: Tick | None = None

    # -- facts

    def begin_copies(self, slot: Slot, round_: Round, now_s: float) -> None:
        """Replication of that slot has begun; it lasts until `replicated`."""
        self._lost_meanwhile, self._copied_tick = False, max(round_.tick, self._copied_tick or round_.tick)
        # A version that is already replicated stays so: its other replicas may be in place.
        if round_.peer is not Store.DONE:
            round_.peer = Store.RUNNING
        round_.copy_began_s, round_.kept = now_s, self.kept
        slot.leases += 1
        self.replicating = slot.number

    def why_not_copied(self, tick: Tick) -> str | None:
        """Why the version of a `Replicate` is not copied after the survey, as the `error` for `replicated`; None: it is
        copied."""
        if self.replicates and not self.undoes_safe:
            return None
        if self.safe_tick is not None and tick <= self.safe_tick:
            return OUTDONE if tick < self.safe_tick else ""
        return UNKEPT if self.replicates else ROOMLESS

    def replicated(self, slot: int, error: str, now_s: float) -> str:
        """Outcome of `Replicate`. `error`: "" if every replica is where the placement says, and verified.
        Returns why the version is not replicated; "": it is."""
        entry = self.slots[slot]
        round_ = entry.round
        if not error and self._lost_meanwhile:
            error = LOST
        kept = round_.kept if round_ is not None else ()
        if round_ is not None:
            before = {each.node: each for each in self._stays(round_.tick, kept)}
            kept = tuple(each if each.losses else before.get(each.node, each) for each in kept)
        why_not = error or ("" if _is_whole(kept) else UNKEPT)
        self.replicating = None
        entry.leases -= 1
        if not error:
            self._lost_with.clear()
        self._copy_failures = min(self._copy_failures + 1, 16) if error else 0
        self._retry_copy_s = now_s + min(2.0**self._copy_failures, RETRY_S_MAX) if error else math.inf
        told = self._told.get((round_.tick, "peer")) if round_ is not None else None
        is_whole_now = told is not None and not (told["ok"] or why_not)
        # A version that was replicated before this attempt stays so.
        if round_ is not None and (round_.peer is not Store.DONE or is_whole_now):
            round_.peer = Store.FAILED if error else Store.DONE
            # Where peers keep no replicas, the outcome of the commit answers waits for this level.
            if self.replicates or not error:
                self._tell_level(round_.tick, "peer", not why_not, why_not)
        if round_ is not None and not error and (self.safe_tick is None or round_.tick >= self.safe_tick):
            self.safe_tick, self.safe_kept = round_.tick, kept
        return why_not

    def lets_older_go(self, why_not: str) -> bool:
        """Whether peers may drop older replicas, by the answer of `replicated`: replication succeeded, or reached
        every node that has memory for replicas."""
        return not why_not or (why_not == UNKEPT and self.outdoes_former)

    @property
    def is_kept_whole(self) -> bool:
        """Whether the present placement gives every node's state a replica."""
        return self.replicates and _is_whole(self.kept)

    @property
    def copies_fail(self) -> bool:
        """Whether the last replication failed: a peer may have less memory than planned."""
        return self._copy_failures > 0

    def found_safe(self, tick: Tick | None, kept: Sequence[Kept], whole: bool) -> bool:
        """The survey has answered: `tick` is the newest replicated version; None: there is none. `kept`: per node; the
        holders are unknown and left out. `whole`: the version meets the replication target. Returns whether the answer
        holds: no agent was lost meanwhile."""
        self.unsure = False
        self.safe_tick, self.safe_kept = tick, tuple(kept)
        # If an agent was lost meanwhile, replicas that it reported may be gone.
        if not self._lost_meanwhile:
            self._lost_with.clear()
        found, under_way = self.safe.round if self.safe is not None else None, self._under_way
        # The version under way is reported by `replicated`.
        if found is not None and found is not under_way:
            found.peer = Store.DONE
            why_not = FOUND_LESS if not whole else LOST if self._lost_meanwhile else ""
            self._tell_level(found.tick, "peer", not why_not, why_not)
        # The placement may have changed, or the version under way stays where the survey found it.
        if under_way is not None:
            under_way.kept = self.kept if self.replicates and not self.undoes_safe else self.safe_kept
        return not self._lost_meanwhile

    def copies_lost(self, name: str, ticks: Collection[Tick]) -> None:
        """The agent of that node is disconnected: its replicas of these versions may be lost."""
        if self.unsure or self.safe_tick in ticks:
            self._lost_with.add(name)
        if self.unsure or (self._under_way is not None and self._under_way.tick in ticks):
            self._lost_meanwhile = True

    @property
    def _under_way(self) -> Round | None:
        """The save attempt that is being replicated."""
        return self.slots[self.replicating].round if self.replicating is not None else None

    @property
    def copied_ticks(self) -> list[Tick]:
        """The versions that peers have or are receiving."""
        under_way = self._under_way
        ticks = (self.safe_tick, under_way.tick if under_way is not None else None)
        return [tick for tick in ticks if tick is not None]

    # -- queries

    @property
    def safe(self) -> Slot | None:
        """The slot of the newest replicated checkpoint; None: there is none, or its slot was reused."""
        complete = [(slot, slot.round) for slot in self.slots if slot.state is State.COMPLETE]
        return next((slot for slot, each in complete if each is not None and each.tick == self.safe_tick), None)

    @property
    def stays_tick(self) -> Tick | None:
        """The version that peers must keep while a newer one is being replicated; they drop all older ones.

        The newest replicated version. If there is none, the newest one that peers were told to drop, since a peer that
        was away may still hold it. After a second failed replication the newest committed version counts too: replicas
        of failed attempts may exceed the planned memory."""
        if self.safe_tick is not None:
            return self.safe_tick
        stored = self.committed_tick if self._copy_failures > 1 else None
        return max(filter(None, (self.given_up_tick, stored)), default=None)

    @property
    def safe_needed(self) -> tuple[Kept, ...] | None:
        """The holders of `stays_tick` that must keep it while a newer version is replicated; () if none must.
        None: the holders are unknown, since a survey found the replicas or they are parity."""
        if self.safe_tick is None or self._safe_gives_way:
            return ()
        return self.safe_kept if all(each.holders or not each.losses for each in self.safe_kept) else None

    @property
    def _safe_gives_way(self) -> bool:
        """Whether peers may evict the newest replicated version to make room for a newer one: it is committed, and
        replication failed twice. Attempts under several placements may have left more replicas than planned."""
        tick, stored, newest = self.safe_tick, self.committed_tick, self.newest
        if tick is None or stored is None or newest is None or newest.round is None:
            return False
        return self._copy_failures > 1 and tick <= stored and tick < newest.round.tick

    @property
    def _safe_is_outdone(self) -> bool:
        """Whether the newest committed version is newer than the newest replicated one."""
        stored = self.committed_tick
        return stored is not None and self.safe_tick is not None and stored > self.safe_tick

    @property
    def _safe_whole(self) -> Round | None:
        """The newest replicated save attempt, if every node's state has a replica."""
        round_ = self.safe.round if self.safe is not None else None
        return round_ if _is_whole(self.safe_kept) else None

    @property
    def _safe_left(self) -> tuple[Kept, ...]:
        """The replication of the newest replicated version that certainly remains after the known agent losses."""
        return left_of(self.safe_kept, self._lost_with)

    @property
    def _keeps_more(self) -> bool:
        """Whether replicating that version again would protect no node's state less than it certainly is, and some
        node's state more."""
        left = {each.node: each.losses for each in self._safe_left}
        gains = [each.losses - left.get(each.node, 0) for each in self.kept]
        return self.replicates and max(gains, default=0) > 0 and min(gains) >= 0

    @property
    def undoes_safe(self) -> bool:
        """Whether the next replication would protect less: the newest replicated version certainly survives the loss of
        a node that the next version would not survive."""
        return self._would_undo(self._safe_left)

    @property
    def _may_undo_safe(self) -> bool:
        """As `undoes_safe`, if disconnected agents still have their replicas."""
        return self._would_undo(self.safe_kept)

    def _would_undo(self, safe: Iterable[Kept]) -> bool:
        newest, stored = self.newest, self.committed_tick
        copied = self._under_way or (newest.round if newest is not None else None)
        if self.safe_tick is None or copied is None or (stored is not None and stored >= self.safe_tick):
            return False
        if copied.tick < self.safe_tick:
            return True  # an older version must not be reported as the newest replicated one
        kept = self.kept if self.replicates else ()
        return not outlived(safe) <= outlived(kept) | outlived(self._stays(copied.tick, kept))

    def _stays(self, tick: Tick, kept: Iterable[Kept]) -> tuple[Kept, ...]:
        """The certain replicas that stay when version `tick` is replicated. Copies of the same version stay beside the
        new ones; parity is replaced by the new parity."""
        by_parity = any(each.losses and not each.holders for each in kept)
        return self._safe_left if tick == self.safe_tick and not by_parity else ()

    @property
    def _is_stuck(self) -> bool:
        """Whether no slot becomes free before the newest checkpoint is committed: there is one slot only; or, of two,
        the other holds the newest replicated checkpoint, and replication of the newest failed or is off."""
        newest, safe = self.newest, self.safe
        if self.slots_in_use != 2 or newest is None or newest.round is None or safe in (newest, None):
            return self.slots_in_use == 1
        return newest.round.peer is Store.FAILED or not self.replicates

    @property
    def outdoes_former(self) -> bool:
        """Whether this job's newest checkpoint supersedes what earlier epochs may have left in memory."""
        # A checkpoint on this node alone supersedes no replicated one. So it does not suffice while the placement is
        # undecided after an agent restart, or while replicas are wanted and no peer has room.
        elsewhere = self.replicates or self.unsure or self.wants_copies
        return self.outlives_a_node or (self.newest is not None and not elsewhere)

    @property
    def outlives_a_node(self) -> bool:
        """Whether a checkpoint of this job is committed, or survives the loss of any one node."""
        return self.committed_tick is not None or (self.safe is not None and _is_whole(self._safe_left))

    @property
    def at_work(self) -> bool:
        """As `JobFacts.at_work`; a replication counts too."""
        return self.replicating is not None or super().at_work

    @property
    def only_copies(self) -> bool:
        """Whether a replication is the only work under way."""
        return self.replicating is not None and not super().at_work

    def next_wake_s(self, now_s: float) -> float | None:
        again_s = self._retry_copy_s if now_s < self._retry_copy_s < math.inf else None
        return min((each for each in (super().next_wake_s(now_s), again_s) if each is not None), default=None)

    # -- helpers

    def _tell_level(self, tick: Tick, level: str, ok: bool, message: str) -> None:
        super()._tell_level(tick, level, ok, message)
        # Without replication nothing else answers a rank that waits for "peer".
        if level == "store" and not ok and not self.replicates:
            self._tell_level(tick, "peer", False, f"no other node keeps copies, and the store has none: {message}")


def _is_whole(kept: Iterable[Kept]) -> bool:
    """Whether every node's state has a replica. Where memory is short a replication may succeed without that; a state
    without a replica is lost with its node."""
    return all(each.losses for each in kept)
