"""The executor of one job: carries out the scheduler's actions on arenas, the control page and checkpoints in memory.

`group` is the job's scheduler. Actions that concern the store are in job_commit. Everything runs on the agent's main
thread. Slow work goes to a lane of `Workers` and returns as a fact.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.agent.job.job_commit import JobCommits
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.runtime import memory_plan, memory_report
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.division import Division, make_division
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, StagedPart, put_together
from ckpt.agent.snapshots.replica_check import ReplicaCheck
from ckpt.agent.state import actions as do
from ckpt.agent.state.memory_pressure import PERIOD_S
from ckpt.agent.state.replica_state import OUTDONE, ROOMLESS, UNKEPT
from ckpt.agent.state.retention_rule import outlived
from ckpt.errors import AgentError
from ckpt.events import Event
from ckpt.ipc import outcome_file
from ckpt.ipc.control_page import SLOTS_MAX
from ckpt.placement.placement import Kept
from ckpt.types import Identity, Tick, counted

if TYPE_CHECKING:
    from ckpt.agent.replication.survey import SafeCheckpoint

AWAIT_S = 0.2  # between checks whether all memory-only nodes have answered
FULL_S = 60.0  # after an allocation failed, until memory is planned again
# A slot in use gives way to replicas after this time without room for them: room may come back sooner.
SHORT_S = 60.0
AGAIN_S = 600.0  # until a slot that gave way may come back
PARTS = 8  # a change of free memory below this part of a slot is no reason to plan anew
# Ranks change their layouts at the same step, but their reports arrive one after the other.
MIXED_S = 1.0


class JobExecutor(JobCommits):
    """Carries out the actions of one job's scheduler."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._division: Division | None = None
        self._mixed = False  # a division waits for other ranks' layouts of the same version
        self._disagreed: set[str] = set()
        self._planned_parts: dict[str, int] = {}  # see `_parts_free`
        self._not_before_s = -math.inf  # memory is not planned again before this time
        self._patience_s = PERIOD_S  # from a plan that finds nothing new until the next one
        # Since when some node's part has had no replica. It restarts when another part loses its replica.
        self._short_since_s = math.inf
        self._fewer_until_s = -math.inf  # until then a slot gives way to replicas
        self._least_slots = SLOTS_MAX  # the smallest number of slots that was reported as available
        self._told_copies: dict[str, int] = {}  # by node: bytes of other nodes' replicas, as reported
        self._told_placed = False  # whether a placement was reported
        # Other nodes were told that no replicas are kept, and no replication has begun since.
        self._unkept = False
        self._distrusted: set[str] = set()  # tensors that ceased to be replicas
        self._comparing = ReplicaCheck()

    def _act(self, action: do.Action) -> None:
        match action:
            case do.SetWord(slot, word):
                self.ranks.announce(slot, word)
            case do.SetVerdict(number):
                self.ranks.leave(number)
            case do.Divide():
                self._divide()
            case do.MakeArenas(slot, sizes):
                self._make_arenas(slot, sizes)
            case do.OfferSlot(slot):
                self.ranks.offer(slot, self.group.division)
            case do.CloseArenas(slot):
                self.ranks.close_arenas(slot)
            case do.Assemble(slot, number, tick):
                self._assemble(slot, number, tick)
            case do.Replicate(slot, _, tick):
                self._replicate(slot, Identity(self.epoch, tick))
            case do.Commit(slot):
                self._commit(slot)
            case do.GiveUp():
                self._give_up_commit()
            case do.Recycle(slot):
                self.checkpoints.pop(slot, None)
            case do.ReplicaDegraded(tick):
                self._unprotect(tick, "its memory is needed, since copies of newer ones have failed")
            case do.Unkeep():
                self._unkeep()
            case do.AnswerRequest((peer, request_id), body):
                peer.reply(request_id, body)
            case do.Refuse((peer, request_id), kind, message):
                peer.send({"t": "error", "id": request_id, "kind": kind, "message": message})
            case do.ReportProgress((peer, request_id)):
                peer.send({"t": "moving", "id": request_id})
            case do.Tell(body):
                for member in self._members.values():
                    member.peer.send(body)
            case do.Emit(name, message, loud, data):
                self.emit(name, message, loud, data)
            case do.WriteOutcome(body):
                self._write_outcome(body)
            case do.Acknowledge(source, key, node):
                self._acknowledge(source, key, node)
            case do.LeftBy(source, key, node):
                self._left_by(source, key, node)
            case do.Close(reason):
                self._close(reason)

    def _divide(self, patient: bool = True) -> None:
        """Makes a new division. If ranks report layouts of different versions, it waits MIXED_S for the other ranks'
        reports."""
        self._mixed = patient and self._is_mixed()
        if self._mixed:
            self._later(MIXED_S, lambda: self._divide(False) if self._mixed else None)
            return
        version, before = self.group.layouts_version, self._division
        ranks = [self._members[rank].held for rank in range(self.world)]
        distrusted = frozenset(self._distrusted)
        self._run(
            Lane.MEMORY, lambda: make_division(ranks, before, distrusted), lambda done: self._divided(version, done)
        )

    def _divided(self, version: int, done: Future[Division]) -> None:
        if self._dropped:
            return
        if error := failure(done):
            self.emit("division.failed", f"the state cannot be divided among the ranks: {error}", True)
            self.group.unplannable(version, error)
            return
        division = done.result()
        sizes = dict(enumerate(division.arena_bytes))

        def measured(plan: memory_plan.MemoryPlan | None, error: str) -> None:
            self._measured(version, division, plan, error)

        slots = memory_plan.slots_for(self.group.policy)
        self.ranks.measure(sizes, slots, self.options.limits.memory, self._guarded(measured))

    def _measured(self, version: int, division: Division, plan: memory_plan.MemoryPlan | None, error: str) -> None:
        if plan is None:
            self.group.unplannable(version, f"the memory for it cannot be planned: {error}")
            return
        slots = self._place(division, plan.slots)
        if slots != plan.slots:
            plan = replace(plan, slots=slots)
        if not self.group.planned(version, division.id, division.arena_bytes, plan.slots):
            return
        if division.differing and (self._division is None or division.differing != self._division.differing):
            names = ", ".join(sorted(division.differing)[:5])
            tensors = counted(len(division.differing), "tensor")
            text = f"{tensors} of one name, with different values on the ranks: saved per rank"
            self.emit("layout.differs", f"{text}: {names}", True, {"names": sorted(division.differing)[:100]})
        self.plan_soon()
        before, self.plan, self._division = self.plan, plan, division
        self._planned_parts = self._parts_free(plan)
        self._tell_memory(before is None or (plan.slots, plan.slot_bytes) != (before.slots, before.slot_bytes))
        for rank in self._members:
            fields = {
                "t": "plan",
                "division": division.id,
                "frame_bytes": division.frame_bytes,
                "arena_bytes": division.arena_bytes[rank],
            }
            self.ranks.send(rank, fields, division.plans[rank])

    @property
    def is_cramped(self) -> bool:
        """True if the job has fewer slots or replicas than it wants."""
        group, protection = self.group, self.protection
        if self.plan is None or not group.is_planned or group.superseded_by or group.all_gone:
            return False  # in these cases memory is planned anew anyway
        is_kept = group.is_kept_whole and not group.copies_fail
        unkept = protection is not None and protection.is_wanted and not is_kept
        return unkept or group.slots_in_use < self.plan.wanted

    def _parts_free(self, plan: memory_plan.MemoryPlan) -> dict[str, int]:
        """By node: the free memory for this job when it was last measured, in units of a PARTS-th of a slot."""
        plans = self.ranks.plans_by_name() if isinstance(self.ranks, AllShares) else {"": plan}
        return {name: each.left_bytes(0) * PARTS // max(1, each.slot_bytes) for name, each in plans.items()}

    def plan_again(self) -> None:
        """Plans the memory of the same division again, since the free memory may have changed. More memory may be free
        once earlier starts' checkpoints or other processes are gone. Less may be free if replication fails; the
        placement is then decided anew. If there was no room for replicas for SHORT_S, a third slot gives way. While
        nothing changes, other nodes are asked less and less often."""
        division, version, now_s = self._division, self.group.layouts_version, time.monotonic()
        if now_s < self._not_before_s:
            return
        if self._fewer_until_s <= now_s and self._fewer_until_s > -math.inf:
            self._fewer_until_s, self._planned_parts = -math.inf, {}
        if len(self.nodes) > 1:
            self._not_before_s, self._patience_s = now_s + self._patience_s, min(2 * self._patience_s, FULL_S)

        def measured(plan: memory_plan.MemoryPlan | None, error: str) -> None:
            if plan is None or division is None or self._division is not division:
                return
            if version != self.group.layouts_version:
                return  # the new layouts are planned anyway
            parts = self._parts_free(plan)
            is_more = any(count > self._planned_parts.get(name, -1) for name, count in parts.items())
            gives_way = now_s >= self._short_since_s + SHORT_S and not self.group.store_fails
            if not (is_more or gives_way) and (parts == self._planned_parts or not self.group.copies_fail):
                return
            self._planned_parts = parts
            used = self.group.slots_in_use
            slots = self._place(division, max(plan.slots, used), used, gives_way)
            if slots < used:
                self._fewer_until_s = now_s + AGAIN_S
            self.plan = replace(plan, slots=slots, wanted=(self.plan or plan).wanted)
            self.group.use_slots(slots)
            self._tell_memory(slots != used)

        if division is not None:
            most = SLOTS_MIN if now_s < self._fewer_until_s else memory_plan.slots_for(self.group.policy)
            sizes = dict(enumerate(division.arena_bytes))
            self.ranks.measure(sizes, most, self.options.limits.memory, self._guarded(measured))

    def plan_soon(self) -> None:
        """Has the memory planned again without delay, since more may be free now."""
        self._not_before_s, self._patience_s = -math.inf, PERIOD_S

    def _place(self, division: Division, slots: int, used: int = 0, gives_way: bool = False) -> int:
        """Decides the placement of replicas; returns how many of `slots` remain beside them. `used`: slots already in
        use. `gives_way`: one of those may go for replicas, once it holds nothing needed."""
        nodes, protection = self.ranks, self.protection
        if protection is None or not isinstance(nodes, AllShares):
            return slots
        before, sizes = protection.table(), nodes.by_name(dict(enumerate(division.arena_bytes)))
        kept_before = outlived(protection.kept)
        slots = protection.place(sizes, nodes.plans_by_name(), used, gives_way)
        self.group.replicates, self.group.kept = protection.protects, protection.kept
        self.group.wants_copies = protection.is_wanted
        is_whole = self.group.is_kept_whole
        is_short = protection.is_wanted and not is_whole
        # If a node's part has lost its replica, the shortage is a new one and counts from now.
        since_s = self._short_since_s if kept_before <= outlived(protection.kept) else math.inf
        self._short_since_s = min(since_s, time.monotonic()) if is_short else math.inf
        if self.learning is not None and self.learning.peers != is_whole:
            self.learning.peers = is_whole
            self.follow_learning()
        if protection.table() != before or (protection.is_wanted and not self._told_placed):
            self._told_placed = True
            loud = bool(protection.warnings) or not (is_whole or protection.is_alone)
            self.emit("replication.placed", protection.describe(), loud, protection.shown())
        return slots

    def place_again(self) -> None:
        """Decides the placement anew for the present slots, since the nodes that can keep replicas have changed."""
        if self._division is not None and self.group.slots_in_use:
            # Less may be free now than was planned with, so the next `plan_again` must act.
            self._planned_parts = {}
            self._place(self._division, self.group.slots_in_use, self.group.slots_in_use)
            self._tell_memory(False)

    def memory_table(self) -> dict[str, Any] | None:
        """The memory table of all nodes; None: not planned yet."""
        plan, nodes = self.plan, self.ranks
        if plan is None:
            return None
        plans = {"": plan}
        if isinstance(nodes, AllShares):
            found = nodes.plans_by_name()
            plans = {node.name: found[node.name] for node in self.nodes if node.name in found}
        peers = self.protection.table() if self.protection is not None else None
        return {**plan.table(), **memory_report.table(plans, plan.slots, peers)}

    def _tell_memory(self, changed: bool) -> None:
        """Reports the memory plan if the slots changed (`changed`), or the memory for other nodes' replicas did."""
        table = self.memory_table()
        if table is None or self.plan is None:
            return
        copies = {row["node"]: row["copies_bytes"] for row in table["nodes"]}
        if changed or copies != self._told_copies:
            most = max(copies.values(), default=0)
            more = f"; up to {most >> 20:,} MiB for other nodes" if most else ""
            more += "" if self.plan.slots else "; nothing is saved until one fits: free memory, or save less"
            self.emit(
                "memory.plan",
                f"memory: {self.plan}{more}",
                self.plan.slots < min(memory_plan.SLOTS, self.plan.wanted),
                table,
            )
        self._told_copies = copies

    def _replicate(self, slot: int, identity: Identity) -> None:
        protection = self.protection
        assert protection is not None  # else nothing is replicated
        began_s = time.monotonic()

        def ended(error: str, found: bool = False) -> bool:
            """True if peers may drop older replicas now. `found`: the version was replicated already, and nothing was
            copied."""
            now_s = time.monotonic()
            why_not, seconds = self.group.replicated(slot, error, now_s), now_s - began_s
            if why_not:
                text = f"step {identity.tick.step} is not in other nodes' memory: {why_not}"
                loud = why_not not in (UNKEPT, ROOMLESS, OUTDONE)  # the placement reported these, or nothing is lost
                self.emit("replication.failed", text, loud, {"identity": str(identity)})
                return self.group.lets_older_go(why_not)
            if self.learning is not None and not found:
                self.learning.replicated(seconds)
            made = self.checkpoints.get(slot)
            count = int(made.manifest.frames["length"].sum()) if made is not None else 0
            self._services.account.replicated(self.epoch, identity.tick, count)
            facts = {"identity": str(identity), "seconds": seconds}
            self.emit(
                "replication.done",
                f"step {identity.tick.step} is in other nodes' memory after {seconds:.2f} s",
                data=facts,
            )
            return True

        def found_safe(found: SafeCheckpoint | None) -> None:
            if found is None:
                ended("a node that may have copies has not said which")
                return
            newest, kept = found.newest, []
            for node in self.nodes if newest is not None else ():
                name = "" if node is self.nodes[0] else node.name
                kept.append(Kept(name, max(0, min(found.outlives[rank] for rank in node.ranks))))
            is_so = self.group.found_safe(newest.tick if newest is not None else None, kept, found.whole == newest)
            if is_so and found.whole is not None and self.group.is_kept_whole:
                self._services.account.found("peer", self.epoch, found.whole.tick)
            self._replicate(slot, identity)

        if self.group.unsure and self._services.awaits_lenders():
            self._later(AWAIT_S, lambda: self._replicate(slot, identity))
            return
        if self.group.unsure:
            tick = self.group.safe_tick
            safe = Identity(self.epoch, tick) if tick is not None else None
            held = [made.identity for made in self.checkpoints.values()]
            protection.find_safe(self.epoch, safe, held, self.world, self._guarded(found_safe))
            return
        why_not = self.group.why_not_copied(identity.tick)
        if why_not is not None:
            ended(why_not, found=True)
            return
        own, stays = dict(self.own.arenas.get(slot, {})), self.group.stays_tick
        safe = Identity(self.epoch, stays) if stays is not None else None
        self._unkept = False
        protection.replicate(identity, safe, own, self._guarded(ended), self.group.safe_needed)

    def _unprotect(self, tick: Tick, why: str) -> None:
        """Reports that this version no longer meets the replication target, if it was reported as replicated."""
        account, identity = self._services.account, Identity(self.epoch, tick)
        if "peer" not in account.safe or account.safe["peer"][0] != tick:
            return
        account.unprotected()
        text = f"step {tick.step} has fewer copies in other nodes' memory than was asked for: {why}"
        self.emit("replica.lost", text, True, {"identity": str(identity)})

    def _unkeep(self) -> None:
        network, copies = self._services.network(), self._services.copies
        assert network is not None  # else no replica was ever kept
        assert copies is not None
        try:
            copies.unkeep(self.epoch)
        except AgentError:  # a start surveys this node: its replicas stay
            return
        self._unkept = True
        for node in (*self.nodes[1:], *(each.node for each in self._services.lenders())):
            network.tell(node.name, {"t": "unkeep", "epoch": str(self.epoch)})

    def _make_arenas(self, slot: int, sizes: tuple[int, ...]) -> None:
        def made(sizes_made: dict[int, int], error: str) -> None:
            if not error:
                self.group.made(slot, tuple(sizes_made[rank] for rank in range(self.world)))
            elif self.group.needs(slot, sizes):
                self._fewer(slot, error)
            else:  # these sizes are no longer needed
                self.group.made(slot, ())

        self.ranks.make(slot, dict(enumerate(sizes)), self._guarded(made))

    def _fewer(self, slot: int, why: str) -> None:
        had = self.group.slots_had
        message = f"there is no memory for slot {slot} ({why}); in use: {counted(had, 'slot')}"
        self.emit("memory.short", message, had < self._least_slots)
        self._least_slots = min(had, self._least_slots)
        self._not_before_s, self._planned_parts = time.monotonic() + FULL_S, {}  # less was free than planned
        self.group.fewer_slots(had, f"not one arena fits into memory: {why}; free memory, or save less")
        self.group.made(slot, ())

    def _assemble(self, slot: int, number: int, tick: Tick) -> None:
        identity = Identity(self.epoch, tick)
        round_ = self.group.slots[slot].round
        if round_ is not None:
            self._services.account.staged(time.monotonic(), tick, max(round_.staged.values()))
        if self.learning is not None and round_ is not None:
            self.learning.stalled(max(round_.staged.values()), tick.step + 1)
            self.follow_learning()

        def read(parts: list[StagedPart], error: str) -> None:
            if error:
                self.group.assembled(slot, number, error)
                return
            arenas = self.ranks.arenas[slot]
            self._run(
                Lane.MEMORY,
                lambda: put_together(identity, parts, arenas),
                lambda done: self._assembled(slot, number, done),
            )

        self.ranks.read(slot, identity, self._guarded(read))

    def _assembled(self, slot: int, number: int, done: Future[MemoryCheckpoint]) -> None:
        error = failure(done)
        if not error:
            made = done.result()
            self.checkpoints[slot] = made
            tick, count = made.identity.tick, int(made.manifest.frames["length"].sum())
            self._services.account.complete(self.epoch, tick, count)
            text, facts = f"step {tick.step} is whole in memory", {"identity": str(made.identity), "bytes": count}
            self._services.told(Event("snapshot.done", text, data=facts))
            if set(made.disagreed) - self._disagreed:
                self._disagreed.update(made.disagreed)
                text = f"{counted(len(made.disagreed), 'tensor')} turned out to differ between the ranks"
                names = ", ".join(made.disagreed[:5])
                self.emit("snapshot.differs", f"{text}, saved per rank: {names}", True)
        self.group.assembled(slot, number, error)

    def _write_outcome(self, body: dict[str, Any]) -> None:
        if self.outcome_path is None:
            return
        try:
            outcome_file.write(self.outcome_path, self.epoch, self.launch, body)
        except OSError as exc:
            text = f"what was saved could not be written to {self.outcome_path}: {exc}"
            self.emit("outcome.failed", text, True, body)

    def _left_by(self, source: str, key: str, node: str) -> None:
        if node and isinstance(self.ranks, AllShares):
            self.ranks.others[node].tell({"t": "left-by", "source": source, "key": key})
        elif self._services.listening is not None:
            self._services.listening.left_by(source, key)

    def _acknowledge(self, source: str, key: str, node: str) -> None:
        def ended(error: str) -> None:
            self.group.acknowledged()
            what = f"{source} was told that {key} may begin: the job has left, and its checkpoint is in the store"
            text = f"{source} was not told that {key} may begin: {error}" if error else what
            facts = {"source": source, "key": key, "error": error}
            self.emit("notice.unacknowledged" if error else "notice.acknowledged", text, not error, facts)

        then = self._guarded(ended)
        if node and isinstance(self.ranks, AllShares):
            self.ranks.others[node].acknowledge(source, key, then)
        elif self._services.listening is not None:
            self._services.listening.acknowledge(source, key, then)
        else:
            ended("nothing is listened to")

    def _is_mixed(self) -> bool:
        return len({member.held.tick for member in self._members.values()}) > 1
