"""What other nodes keep of one job's checkpoints, and how safe these are by it. Pure, as `facts` is."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ckpt.agent.state.job_facts import RETRY_S_MAX, JobFacts, Round, Slot, State, Store
from ckpt.agent.state.retention_rule import left_of, outlived
from ckpt.placement.placement import Kept
from ckpt.types import Tick

UNKEPT = "no other node has memory for a part of it"
ROOMLESS = "no other node has room for any of it any more"
OUTDONE = "a newer one is safe in other nodes' memory already"
FOUND_LESS = "less of it was found in other nodes' memory than they are to keep"
LOST = "an agent that had a part of it already was lost meanwhile"


class ReplicaState(JobFacts):
    """The facts of one job, those of what other nodes keep of it among them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.replicates = False  # whether other nodes keep copies
        self.wants_copies = False  # whether they are to, be there room for them or not
        self.kept: tuple[Kept, ...] = ()  # who keeps those of which node; "" is this one
        self.replicating: int | None = None  # the slot
        # Which is safe there, since another agent led until now, or who keeps it was away: nothing goes before that is
        # found.
        self.unsure = False
        self.safe_tick: Tick | None = None  # the newest that was safe, also once its slot is free
        self.safe_kept: tuple[Kept, ...] = ()  # who keeps that
        self.given_up_tick: Tick | None = None  # the newest of which all were to let go; it is in the store
        self._retry_copy_s = math.inf
        self._copy_failures = 0
        self._lost_with: set[str] = set()  # with whose agents copies of what is safe went, until there are copies again
        self._lost_meanwhile = False  # whether some went of those that are under way
        self._copied_tick: Tick | None = None  # the newest of which other nodes may have any, if an attempt failed, too

    # -- facts

    def begin_copies(self, slot: Slot, round_: Round, now_s: float) -> None:
        """What that slot holds is on its way to other nodes from here on, until `replicated`."""
        self._lost_meanwhile, self._copied_tick = False, max(round_.tick, self._copied_tick or round_.tick)
        if round_.peer is not Store.DONE:  # else it stays what is safe: other copies of it may be where they were
            round_.peer = Store.RUNNING
        round_.copy_began_s, round_.kept = now_s, self.kept
        slot.leases += 1
        self.replicating = slot.number

    def why_not_copied(self, tick: Tick) -> str | None:
        """Why what `Replicate` asked for is not copied, now that it is known what is safe, as `replicated` is to hear
        it; None: it is copied."""
        if self.replicates and not self.undoes_safe:
            return None
        if self.safe_tick is not None and tick <= self.safe_tick:
            return OUTDONE if tick < self.safe_tick else ""
        return UNKEPT if self.replicates else ROOMLESS

    def replicated(self, slot: int, error: str, now_s: float) -> str:
        """What `Replicate` asked for has ended. `error`: "" when every copy was where the placement says, and right.
        Returns why it is not safe in other nodes' memory; "": it is."""
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
        if round_ is not None and (round_.peer is not Store.DONE or is_whole_now):  # else it was safe, and stays so
            round_.peer = Store.FAILED if error else Store.DONE
            if self.replicates or not error:  # else what becomes of it in the store is told to who waits for this
                self._tell_level(round_.tick, "peer", not why_not, why_not)
        if round_ is not None and not error and (self.safe_tick is None or round_.tick >= self.safe_tick):
            self.safe_tick, self.safe_kept = round_.tick, kept
        return why_not

    def lets_older_go(self, why_not: str) -> bool:
        """Whether older copies may go elsewhere, by what `replicated` has answered: it is safe, or there is all of it
        that is to be had."""
        return not why_not or (why_not == UNKEPT and self.outdoes_former)

    @property
    def is_kept_whole(self) -> bool:
        """Whether each node's part of what is taken now is kept by others."""
        return self.replicates and _is_whole(self.kept)

    @property
    def copies_fail(self) -> bool:
        """Whether the last ones have: somebody may have less memory for them than was planned with."""
        return self._copy_failures > 0

    def found_safe(self, tick: Tick | None, kept: Sequence[Kept], whole: bool) -> bool:
        """They were asked what is safe in other nodes' memory; None: nothing is. `kept`: of each node, without the
        holders, who are not known. `whole`: it outlives as many losses as it is to. Returns whether it is so: no agent
        was lost meanwhile."""
        self.unsure = False
        self.safe_tick, self.safe_kept = tick, tuple(kept)
        if not self._lost_meanwhile:  # else what one of them has said may be gone by now
            self._lost_with.clear()
        found, under_way = self.safe.round if self.safe is not None else None, self._under_way
        if found is not None and found is not under_way:  # else `replicated` tells it
            found.peer = Store.DONE
            why_not = FOUND_LESS if not whole else LOST if self._lost_meanwhile else ""
            self._tell_level(found.tick, "peer", not why_not, why_not)
        if under_way is not None:  # who is to keep it may be others by now; or it stays where it was found
            under_way.kept = self.kept if self.replicates and not self.undoes_safe else self.safe_kept
        return not self._lost_meanwhile

    def copies_lost(self, name: str, ticks: Collection[Tick]) -> None:
        """The agent of that node is not connected any more: what it kept of these for others may have gone with it."""
        if self.unsure or self.safe_tick in ticks:
            self._lost_with.add(name)
        if self.unsure or (self._under_way is not None and self._under_way.tick in ticks):
            self._lost_meanwhile = True

    @property
    def _under_way(self) -> Round | None:
        """What is being copied."""
        return self.slots[self.replicating].round if self.replicating is not None else None

    @property
    def copied_ticks(self) -> list[Tick]:
        """What other nodes have, or are getting."""
        under_way = self._under_way
        ticks = (self.safe_tick, under_way.tick if under_way is not None else None)
        return [tick for tick in ticks if tick is not None]

    # -- what others ask

    @property
    def safe(self) -> Slot | None:
        """The slot of the newest round that other nodes' memory holds as well; None: there is none, or its slot was
        needed."""
        complete = [(slot, slot.round) for slot in self.slots if slot.state is State.COMPLETE]
        return next((slot for slot, each in complete if each is not None and each.tick == self.safe_tick), None)

    @property
    def stays_tick(self) -> Tick | None:
        """What does not go elsewhere while something newer is copied, where all that is older does: what is safe. While
        nothing is that of which all were to let go: who was away then has that, and what is older, too; or, once copies
        have failed again, what the store has: attempts that failed may have left more than there is memory for."""
        if self.safe_tick is not None:
            return self.safe_tick
        stored = self.committed_tick if self._copy_failures > 1 else None
        return max(filter(None, (self.given_up_tick, stored)), default=None)

    @property
    def safe_needed(self) -> tuple[Kept, ...] | None:
        """Who keeps what of `stays_tick` that has to stay while something newer is copied: none of it where nothing is
        safe. None: that is not known, since it was found to be safe, or is so by parity."""
        if self.safe_tick is None or self._safe_gives_way:
            return ()
        return self.safe_kept if all(each.holders or not each.losses for each in self.safe_kept) else None

    @property
    def _safe_gives_way(self) -> bool:
        """Whether what is safe goes where there is no room for something newer beside it: it is in the store, and
        copies have failed again. What attempts have left of it under several placements is more than was planned."""
        tick, stored, newest = self.safe_tick, self.committed_tick, self.newest
        if tick is None or stored is None or newest is None or newest.round is None:
            return False
        return self._copy_failures > 1 and tick <= stored and tick < newest.round.tick

    @property
    def _safe_is_outdone(self) -> bool:
        """Whether the store has something newer than what other nodes keep."""
        stored = self.committed_tick
        return stored is not None and self.safe_tick is not None and stored > self.safe_tick

    @property
    def _safe_whole(self) -> Round | None:
        """The newest round that other nodes' memory holds, if it has each node's part."""
        round_ = self.safe.round if self.safe is not None else None
        return round_ if _is_whole(self.safe_kept) else None

    @property
    def _safe_left(self) -> tuple[Kept, ...]:
        """What others have for certain of what is safe."""
        return left_of(self.safe_kept, self._lost_with)

    @property
    def _keeps_more(self) -> bool:
        """Whether others would keep as much of what is safe of each node as they do for certain, and more of some, were
        it copied now."""
        left = {each.node: each.losses for each in self._safe_left}
        gains = [each.losses - left.get(each.node, 0) for each in self.kept]
        return self.replicates and max(gains, default=0) > 0 and min(gains) >= 0

    @property
    def undoes_safe(self) -> bool:
        """Whether what is safe outlives a node, for certain, that what is copied next and takes its place does not."""
        return self._would_undo(self._safe_left)

    @property
    def _may_undo_safe(self) -> bool:
        """The same, if agents that are not connected still have what they kept of it."""
        return self._would_undo(self.safe_kept)

    def _would_undo(self, safe: Iterable[Kept]) -> bool:
        newest, stored = self.newest, self.committed_tick
        copied = self._under_way or (newest.round if newest is not None else None)
        if self.safe_tick is None or copied is None or (stored is not None and stored >= self.safe_tick):
            return False
        if copied.tick < self.safe_tick:
            return True  # it cannot take its place, and would be told to be safe all the same
        kept = self.kept if self.replicates else ()
        return not outlived(safe) <= outlived(kept) | outlived(self._stays(copied.tick, kept))

    def _stays(self, tick: Tick, kept: Iterable[Kept]) -> tuple[Kept, ...]:
        """What others have for certain of what is safe, where that is copied again, so: copies stay beside the new
        ones, and parity goes for what is made anew."""
        by_parity = any(each.losses and not each.holders for each in kept)
        return self._safe_left if tick == self.safe_tick and not by_parity else ()

    @property
    def _is_stuck(self) -> bool:
        """Whether no slot is to be had before the newest is in the store: there is one only, or, of two, the other
        holds the newest that is safe, since copies of the newest have failed, or nobody keeps any more."""
        newest, safe = self.newest, self.safe
        if self.slots_in_use != 2 or newest is None or newest.round is None or safe in (newest, None):
            return self.slots_in_use == 1
        return newest.round.peer is Store.FAILED or not self.replicates

    @property
    def outdoes_former(self) -> bool:
        """Whether what it has made complete is as safe as what former epochs left in memory may be."""
        # After a restart of the agent who keeps what is not decided yet; and where nobody has room for copies what lies
        # here alone is not as safe as what was elsewhere, too.
        elsewhere = self.replicates or self.unsure or self.wants_copies
        return self.outlives_a_node or (self.newest is not None and not elsewhere)

    @property
    def outlives_a_node(self) -> bool:
        """Whether a checkpoint of it is in the store, or outlives the loss of any one node."""
        return self.committed_tick is not None or (self.safe is not None and _is_whole(self._safe_left))

    @property
    def at_work(self) -> bool:
        return self.replicating is not None or super().at_work

    @property
    def only_copies(self) -> bool:
        """Whether copies are all that is under way."""
        return self.replicating is not None and not super().at_work

    def next_wake_s(self, now_s: float) -> float | None:
        again_s = self._retry_copy_s if now_s < self._retry_copy_s < math.inf else None
        return min((each for each in (super().next_wake_s(now_s), again_s) if each is not None), default=None)

    # -- small steps

    def _tell_level(self, tick: Tick, level: str, ok: bool, message: str) -> None:
        super()._tell_level(tick, level, ok, message)
        if level == "store" and not ok and not self.replicates:  # nothing else will be said to who waits for "peer"
            self._tell_level(tick, "peer", False, f"no other node keeps copies, and the store has none: {message}")


def _is_whole(kept: Iterable[Kept]) -> bool:
    """Whether somebody keeps each node's part. Else all is where it was to be, for want of memory, and gone with that
    node."""
    return all(each.losses for each in kept)
