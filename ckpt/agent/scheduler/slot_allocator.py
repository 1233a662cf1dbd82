"""The slot allocator of one job: which slot the next save attempt gets, and which slots are freed. Pure.

- A new attempt gets only a free slot. A slot is not free while its attempt is open or a lease on it is held.
- The newest complete attempt stays until a newer one is complete; with one slot, until it is committed itself.
- The newest replicated attempt stays until a newer one is replicated. If replication is off, or slots run out after it
  failed, it stays until a newer one is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt.agent.scheduler.commit_queue import CommitQueue
from ckpt.agent.state.actions import ClearSlot, CloseArenas, MakeArenas, OfferSlot, ReplicaDegraded
from ckpt.agent.state.job_facts import JobFacts
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.slots import SaveAttempt, SaveReason, Slot, SlotState, WorkState
from ckpt.types import Version


@dataclass(eq=False)
class SlotAllocator:
    """The slot allocator of one job."""

    _facts: JobFacts
    _replicas: ReplicaState
    _commits: CommitQueue
    _held: dict[str, Version | None] = field(default_factory=dict)  # as of the last `check`

    def find_free(self, slots: Sequence[Slot] | None = None) -> Slot | None:
        """A slot, of `slots` if given, that is free and warm on all ranks; else None. A job's only slot counts if its
        attempt is committed; it is then freed."""
        arenas = self._facts.arenas
        for slot in arenas.used_slots if slots is None else slots:
            if slot.is_making_arenas or slot.leases or len(slot.warm_ranks) < self._facts.world:
                continue
            if not (arenas.division and slot.has_fitting_arenas):
                continue
            if slot.attempt is not None:
                if not self._can_reuse_only(slot):
                    continue
                self.free(slot.attempt)
            return slot
        return None

    def can_spare(self, slot: Slot) -> bool:
        """Whether a hold would still find a slot after this one is taken. Other slots may still be in the making, which
        may take as long as a commit beside training. The hold might then have to wait for a slot that is being
        committed."""
        others = [each for each in self._facts.arenas.used_slots if each is not slot]
        if all(each.attempt or each.leases for each in others) or self.find_free(others) is not None:
            return True
        staged = (SlotState.STAGED, SlotState.COMPLETE)
        rest = [each.attempt for each in others if each.attempt and each.attempt.state in staged and not each.leases]
        is_idle = self._facts.slots.committing_slot is None
        next_one = is_idle and any(attempt.commit_state is WorkState.NEW for attempt in rest)
        return len(rest) > next_one  # a newer complete attempt frees the others

    def _can_reuse_only(self, slot: Slot) -> bool:
        """Whether this is the only slot in use and its attempt is in the store. It is False while a retired slot still
        holds an older attempt, which would become the newest again."""
        attempt, others = slot.attempt, (each for each in self._facts.slots if each is not slot)
        if self._facts.arenas.slot_limit != 1 or any(each.attempt for each in others) or attempt is None:
            return False
        is_stored = attempt.state is SlotState.COMPLETE and attempt.commit_state is WorkState.DONE
        return is_stored and not attempt.is_verdict_pending

    def free(self, attempt: SaveAttempt) -> None:
        """Empties the attempt's slot."""
        if attempt is self._replicas.replicated:
            self._facts.actions.append(ReplicaDegraded(attempt.version))
        self._facts.slots[attempt.slot].attempt = None
        self._facts.actions.append(ClearSlot(attempt.slot))

    def release_inherited(self) -> None:
        """Lets slots be used that have complete snapshots of a former agent. Before this agent's first one, one slot is
        needed. Once it is known which version is replicated, only that one stays until a newer one is safe. None stays
        where no newer one can come."""
        facts, inherited = self._facts, self._facts.slots.inherited_versions
        newest = facts.slots.newest
        stays = list(inherited)
        if facts.any_gone or facts.superseded_by:
            stays = []
        elif newest is None:
            stays = stays[: max(0, facts.arenas.slot_limit - 1)] if facts.arenas.has_division else stays
        elif newest.commit_state is WorkState.DONE:
            stays = []
        elif not self._replicas.is_survey_pending:
            stays = [slot for slot in stays if inherited[slot] == self._replicas.replicated_version]
        for slot in inherited.keys() - stays:
            facts.slots.release_lease(slot)
            del inherited[slot]

    def free_superseded(self) -> None:
        """Frees the slots of complete attempts that nothing needs any more."""
        slots, levels, replicas = self._facts.slots, self._facts.levels, self._replicas
        newest, safe = slots.newest, replicas.replicated
        # The replicated attempt then stays until a newer one is replicated.
        waits = replicas.is_replication_on and not self._commits.is_awaited
        if not waits and replicas.is_superseded:
            safe = None
        for attempt in slots.attempts(SlotState.COMPLETE):
            is_held = attempt in (newest, safe) or slots[attempt.slot].leases or attempt.is_verdict_pending
            if is_held or self._commits.is_waiting(attempt):
                continue
            why = "a newer one was complete before its turn"
            if attempt.commit_state is WorkState.NEW:
                self._commits.report(attempt.version, f"skipped: {why}")
                if attempt.reason is SaveReason.DUE:
                    self._facts.report_skipped(1, f"step {attempt.version.step} is not committed: {why}")
            is_told = attempt.replication_state is WorkState.DONE or levels.find(attempt.version, "peer") is not None
            if not is_told and (replicas.is_replication_on or attempt.commit_state is WorkState.FAILED):
                levels.report(attempt.version, "peer", False, f"skipped: {why}")
            self.free(attempt)

    def make_arenas(self) -> None:
        """Has arenas made for the slots in use, and offers these to the ranks."""
        arenas = self._facts.arenas
        if not arenas.division:
            return
        self._close_unused()
        # One slot at a time, so that the first can be used soon.
        making = any(slot.is_making_arenas for slot in self._facts.slots)
        for slot in arenas.used_slots:
            if slot.leases or slot.is_making_arenas:
                continue
            is_ready = slot.has_fitting_arenas and slot.is_offered
            if slot.attempt is not None and not is_ready and self._can_reuse_only(slot):
                self.free(slot.attempt)
            if slot.attempt is not None or is_ready:
                continue
            if slot.has_fitting_arenas:
                slot.is_offered = True
                slot.warm_ranks.clear()
                self._facts.actions.append(OfferSlot(slot.number))
            elif not making:
                making = slot.is_making_arenas = True
                slot.warm_ranks.clear()
                arenas.set_arenas(slot, ())
                self._facts.actions.append(MakeArenas(slot.number, arenas.needed_bytes))

    def _close_unused(self) -> None:
        """Closes the arenas of slots that are no longer in use; their memory would count as free for ever."""
        for slot in self._facts.arenas.slots_by_use[self._facts.arenas.slot_limit :]:
            if slot.is_handed_out and slot.attempt is None and not slot.leases and not slot.is_making_arenas:
                slot.is_handed_out = False
                self._facts.arenas.set_arenas(slot, ())
                self._facts.actions.append(CloseArenas(slot.number))

    def check(self) -> None:
        """Asserts that the newest and the newest replicated checkpoint stay until a newer one is, or the store has
        one as new."""
        slots, stored = self._facts.slots, self._facts.committed_version
        versions = {attempt.version for attempt in slots.attempts(SlotState.COMPLETE)}
        for what, attempt in (("newest", slots.newest), ("replicated", self._replicas.replicated)):
            former, version = self._held.get(what), attempt.version if attempt is not None else None
            is_kept = former in versions or (version is not None and former is not None and version > former)
            is_stored = stored is not None and former is not None and stored >= former
            assert former is None or is_kept or is_stored, f"the {what} checkpoint, {former}, was given away"
            self._held[what] = version
