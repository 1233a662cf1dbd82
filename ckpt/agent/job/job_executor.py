"""The executor of one job: carries out the scheduler's actions on arenas, the control page and checkpoints in memory.

`group` is the job's scheduler. Actions that concern the store are in job_commit. Everything runs on the agent's main
thread. Slow work goes to a lane of `Workers` and returns as a fact.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.agent.job.job_commit import JobCommits
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.runtime import memory_plan, memory_report
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.division import Division, make_division
from ckpt.agent.snapshots.inventory import find_sealed_snapshot
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, StagedPart, assemble_checkpoint
from ckpt.agent.snapshots.replica_check import ReplicaCheck
from ckpt.agent.state import actions as do
from ckpt.agent.state.memory_pressure import PERIOD_S
from ckpt.agent.state.replica_state import NO_PEER_MEMORY, NO_PEER_ROOM, SUPERSEDED
from ckpt.errors import AgentError
from ckpt.events import Event
from ckpt.ipc import outcome_file
from ckpt.ipc.control_page import SLOTS_MAX
from ckpt.placement.placement import Kept
from ckpt.types import Identity, Version, format_count

if TYPE_CHECKING:
    from ckpt.agent.replication.survey import SafeCheckpoint

MEMORY_NODES_POLL_S = 0.2  # between checks whether all memory-only nodes have answered
REPLAN_PAUSE_S = 60.0  # after an allocation failed, until memory is planned again
FREE_PARTS = 8  # a change of free memory below this part of a slot is no reason to plan anew
# Ranks change their layouts at the same step, but their reports arrive one after the other.
LAYOUTS_WAIT_S = 1.0


class JobExecutor(JobCommits):
    """Carries out the actions of one job's scheduler."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._division: Division | None = None
        self._awaits_layouts = False  # a division waits for other ranks' layouts of the same version
        self._reported_differing: set[str] = set()
        self._planned_free_parts: dict[str, int] = {}  # see `_free_parts_by_node`
        self._next_plan_s = -math.inf  # memory is not planned again before this time
        self._plan_backoff_s = PERIOD_S  # from a plan that finds nothing new until the next one
        self._is_cramped = False  # earlier starts' checkpoints took memory at the layout's plan, and still do
        self._reported_slots_min = SLOTS_MAX  # the smallest number of slots that was reported as available
        self._reported_replica_bytes: dict[str, int] = {}  # by node: bytes of other nodes' replicas, as reported
        self._has_reported_placement = False  # whether a placement was reported
        # Other nodes were told that no replicas are kept, and no replication has begun since.
        self._has_released_replicas = False
        self._diverged_tensors: set[str] = set()  # tensors that ceased to be replicas
        self._replica_check = ReplicaCheck()

    def _execute_action(self, action: do.Action) -> None:
        match action:
            case do.SetWord(slot, word):
                self.ranks.announce(slot, word)
            case do.SetVerdict(number):
                self.ranks.announce_verdict(number)
            case do.Divide():
                self._divide()
            case do.MakeArenas(slot, sizes):
                self._make_arenas(slot, sizes)
            case do.OfferSlot(slot):
                self.ranks.offer_slot(slot, self.scheduler.division)
            case do.CloseArenas(slot):
                self.ranks.close_arenas(slot)
            case do.Assemble(slot, number, version):
                self._assemble(slot, number, version)
            case do.Replicate(slot, _, version):
                self._replicate(slot, Identity(self.epoch, version))
            case do.Commit(slot):
                self._commit(slot)
            case do.CancelCommit():
                self._cancel_commit()
            case do.ClearSlot(slot):
                self.checkpoints.pop(slot, None)
            case do.ReplicaDegraded(version):
                self._report_degraded(version, "its memory is needed, since copies of newer ones have failed")
            case do.DropReplicas():
                self._release_replicas()
            case do.AnswerRequest((peer, request_id), body):
                peer.reply(request_id, body)
            case do.Refuse((peer, request_id), kind, message):
                peer.send({"t": "error", "id": request_id, "kind": kind, "message": message})
            case do.ReportProgress((peer, request_id)):
                peer.send({"t": "progress", "id": request_id})
            case do.NotifyRanks(body):
                for member in self._members.values():
                    member.peer.send(body)
            case do.Emit(name, message, loud, data):
                self.emit(name, message, loud, data)
            case do.WriteOutcome(body):
                self._write_outcome(body)
            case do.Acknowledge(source, key, node):
                self._acknowledge_notice(source, key, node)
            case do.RecordExit(source, key, node):
                self._mark_notice_answered(source, key, node)
            case do.Close(reason):
                self._close_epoch(reason)

    def _divide(self, patient: bool = True) -> None:
        """Makes a new division. If ranks report layouts of different versions, it waits LAYOUTS_WAIT_S for the other
        ranks' reports."""
        self._awaits_layouts = patient and self._has_mixed_layouts()
        if self._awaits_layouts:
            self._call_later(LAYOUTS_WAIT_S, lambda: self._divide(False) if self._awaits_layouts else None)
            return
        layouts_version, before = self.scheduler.layouts_version, self._division
        ranks = [self._members[rank].contents for rank in range(self.world)]
        distrusted = frozenset(self._diverged_tensors)
        self._run(
            Lane.MEMORY,
            lambda: make_division(ranks, before, distrusted),
            lambda done: self._on_division_done(layouts_version, done),
        )

    def _on_division_done(self, layouts_version: int, done: Future[Division]) -> None:
        if self._is_dropped:
            return
        if error := failure(done):
            self.emit("division.failed", f"the state cannot be divided among the ranks: {error}", True)
            self.scheduler.record_division_failure(layouts_version, error)
            return
        division = done.result()
        sizes = dict(enumerate(division.arena_bytes))

        def measured(plan: memory_plan.MemoryPlan | None, error: str) -> None:
            self._on_memory_measured(layouts_version, division, plan, error)

        slots = memory_plan.slots_for(self.scheduler.policy)
        self.ranks.plan_memory(sizes, slots, self.options.limits.memory, self._guard_callback(measured))

    def _on_memory_measured(
        self, layouts_version: int, division: Division, plan: memory_plan.MemoryPlan | None, error: str
    ) -> None:
        if plan is None:
            self.scheduler.record_division_failure(layouts_version, f"the memory for it cannot be planned: {error}")
            return
        slots = self._place_replicas(division, plan.slots)
        if slots != plan.slots:
            plan = replace(plan, slots=slots)
        if not self.scheduler.record_division(layouts_version, division.id, division.arena_bytes, plan.slots):
            return
        if division.differing_tensors and (
            self._division is None or division.differing_tensors != self._division.differing_tensors
        ):
            names = ", ".join(sorted(division.differing_tensors)[:5])
            tensors = format_count(len(division.differing_tensors), "tensor")
            text = f"{tensors} of one name, with different values on the ranks: saved per rank"
            self.emit("layout.differs", f"{text}: {names}", True, {"names": sorted(division.differing_tensors)[:100]})
        self.request_replan()
        before, self.plan, self._division = self.plan, plan, division
        self._planned_free_parts, self._is_cramped = self._free_parts_by_node(plan), self._has_earlier_starts(plan)
        self._report_memory(before is None or (plan.slots, plan.slot_bytes) != (before.slots, before.slot_bytes))
        for rank in self._members:
            fields = {
                "t": "staging-plan",
                "division": division.id,
                "frame_bytes": division.frame_bytes,
                "arena_bytes": division.arena_bytes[rank],
            }
            self.ranks.send(rank, fields, division.encoded_plans[rank])

    @property
    def is_short_of_memory(self) -> bool:
        """True if the job has fewer replicas than it wants, or still awaits memory for slots."""
        group, replication_manager = self.scheduler, self.replication_manager
        if self.plan is None or not group.has_division or group.superseded_by or group.all_gone:
            return False  # in these cases memory is planned anew anyway
        is_kept = group.is_placement_complete and not group.is_replication_failing
        unkept = replication_manager is not None and replication_manager.is_requested and not is_kept
        return unkept or (self._awaits_slots and group.slot_limit < self.plan.wanted)

    @property
    def _awaits_slots(self) -> bool:
        """Whether the number of slots may still grow: there are too few to save well, or earlier starts' checkpoints
        were in the way. Otherwise the number stays until the layout changes."""
        return self._is_cramped or self.scheduler.slot_limit < SLOTS_MIN

    def _plans_by_node(self, plan: memory_plan.MemoryPlan) -> Mapping[str, memory_plan.MemoryPlan]:
        return self.ranks.plans_by_name() if self.nodes else {"": plan}

    def _free_parts_by_node(self, plan: memory_plan.MemoryPlan) -> dict[str, int]:
        """By node: the free memory for this job when it was last measured, in units of a PARTS-th of a slot."""
        plans = self._plans_by_node(plan)
        return {name: each.replica_bytes_max(0) * FREE_PARTS // max(1, each.slot_bytes) for name, each in plans.items()}

    def _has_earlier_starts(self, plan: memory_plan.MemoryPlan) -> bool:
        """Whether some node still holds a checkpoint of an earlier start."""
        return any(each.kept_bytes for each in self._plans_by_node(plan).values())

    def replan_memory(self) -> None:
        """Plans the replicas of the same division again, since the free memory may have changed. More may be free once
        earlier starts' checkpoints or other processes are gone. Less may be free if replication fails. The slots stay;
        more come only to a job that awaits them. While nothing changes, other nodes are asked less and less often."""
        division, layouts_version, now_s = self._division, self.scheduler.layouts_version, time.monotonic()
        if now_s < self._next_plan_s:
            return
        if len(self.nodes) > 1:
            self._next_plan_s = now_s + self._plan_backoff_s
            self._plan_backoff_s = min(2 * self._plan_backoff_s, REPLAN_PAUSE_S)

        def measured(plan: memory_plan.MemoryPlan | None, error: str) -> None:
            if plan is None or division is None or self._division is not division:
                return
            if layouts_version != self.scheduler.layouts_version:
                return  # the new layouts are planned anyway
            parts = self._free_parts_by_node(plan)
            is_cramped = self._is_cramped and self._has_earlier_starts(plan)
            is_more = any(count > self._planned_free_parts.get(name, -1) for name, count in parts.items())
            is_more = is_more or is_cramped != self._is_cramped
            if not is_more and (parts == self._planned_free_parts or not self.scheduler.is_replication_failing):
                return
            self._planned_free_parts, self._is_cramped = parts, is_cramped
            used = self.scheduler.slot_limit
            slots = self._place_replicas(division, max(plan.slots, used), used)
            self.plan = replace(plan, slots=slots, wanted=(self.plan or plan).wanted)
            self.scheduler.raise_slot_limit(slots)
            self._report_memory(slots != used)

        if division is not None:
            wanted, sizes = memory_plan.slots_for(self.scheduler.policy), dict(enumerate(division.arena_bytes))
            most = wanted if self._awaits_slots else self.scheduler.slot_limit
            self.ranks.plan_memory(sizes, most, self.options.limits.memory, self._guard_callback(measured))

    def request_replan(self) -> None:
        """Has the memory planned again without delay, since more may be free now."""
        self._next_plan_s, self._plan_backoff_s = -math.inf, PERIOD_S

    def _place_replicas(self, division: Division, slots: int, used: int = 0) -> int:
        """Decides the placement of replicas; returns how many of `slots` remain beside them. `used`: slots already in
        use, which stay."""
        nodes, replication_manager = self.ranks, self.replication_manager
        if replication_manager is None:
            return slots
        before, sizes = replication_manager.placement_fields(), nodes.sum_by_node(dict(enumerate(division.arena_bytes)))
        slots = replication_manager.update_placement(sizes, nodes.plans_by_name(), used)
        self.scheduler.is_replication_on = replication_manager.has_holders
        self.scheduler.placement = replication_manager.holders_by_node
        self.scheduler.is_replication_wanted = replication_manager.is_requested
        is_whole = self.scheduler.is_placement_complete
        if self.cost_model is not None and self.cost_model.has_replicas != is_whole:
            self.cost_model.has_replicas = is_whole
            self.apply_cost_model()
        if replication_manager.placement_fields() != before or (
            replication_manager.is_requested and not self._has_reported_placement
        ):
            self._has_reported_placement = True
            loud = bool(replication_manager.warnings) or not (is_whole or replication_manager.is_alone)
            self.emit("replication.placed", replication_manager.describe(), loud, replication_manager.status_fields())
        return slots

    def replan_placement(self) -> None:
        """Decides the placement anew for the present slots, since the nodes that can keep replicas have changed."""
        if self._division is not None and self.scheduler.slot_limit:
            # Less may be free now than was planned with, so the next `replan_memory` must act.
            self._planned_free_parts = {}
            self._place_replicas(self._division, self.scheduler.slot_limit, self.scheduler.slot_limit)
            self._report_memory(False)

    def memory_table(self) -> dict[str, Any] | None:
        """The memory table of all nodes; None: not planned yet."""
        plan = self.plan
        if plan is None:
            return None
        plans = {"": plan}
        if self.nodes:
            found = self.ranks.plans_by_name()
            plans = {node.name: found[node.name] for node in self.nodes if node.name in found}
        peers = self.replication_manager.placement_fields() if self.replication_manager is not None else None
        return {**plan.table(), **memory_report.make_table(plans, plan.slots, peers)}

    def _report_memory(self, changed: bool) -> None:
        """Reports the memory plan if the slots changed (`changed`), or the memory for other nodes' replicas did."""
        table = self.memory_table()
        if table is None or self.plan is None:
            return
        copies = {row["node"]: row["copies_bytes"] for row in table["nodes"]}
        if changed or copies != self._reported_replica_bytes:
            most = max(copies.values(), default=0)
            more = f"; up to {most >> 20:,} MiB for other nodes" if most else ""
            more += "" if self.plan.slots else "; nothing is saved until one fits: free memory, or save less"
            self.emit(
                "memory.plan",
                f"memory: {self.plan}{more}",
                self.plan.slots < min(memory_plan.SLOTS, self.plan.wanted),
                table,
            )
        self._reported_replica_bytes = copies

    def _replicate(self, slot: int, identity: Identity) -> None:
        replication_manager = self.replication_manager
        assert replication_manager is not None  # else nothing is replicated
        began_s = time.monotonic()

        def ended(error: str, found: bool = False) -> bool:
            """True if peers may drop older replicas now. `found`: the version was replicated already, and nothing was
            copied."""
            now_s = time.monotonic()
            why_not, seconds = self.scheduler.record_replication(slot, error, now_s), now_s - began_s
            if why_not:
                text = f"step {identity.version.step} is not in other nodes' memory: {why_not}"
                loud = why_not not in (
                    NO_PEER_MEMORY,
                    NO_PEER_ROOM,
                    SUPERSEDED,
                )  # the placement reported these, or nothing is lost
                self.emit("replication.failed", text, loud, {"identity": str(identity)})
                return self.scheduler.can_drop_older(why_not)
            if self.cost_model is not None and not found:
                self.cost_model.record_replication(seconds)
            made = self.checkpoints.get(slot)
            count = int(made.manifest.frames["length"].sum()) if made is not None else 0
            self._services.account.record_replication(self.epoch, identity.version, count)
            facts = {"identity": str(identity), "seconds": seconds}
            self.emit(
                "replication.done",
                f"step {identity.version.step} is in other nodes' memory after {seconds:.2f} s",
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
                kept.append(Kept(name, max(0, min(found.survived_losses[rank] for rank in node.ranks))))
            is_so = self.scheduler.record_survey(
                newest.version if newest is not None else None, kept, found.fully_replicated == newest
            )
            if is_so and found.fully_replicated is not None and self.scheduler.is_placement_complete:
                self._services.account.record_found("peer", self.epoch, found.fully_replicated.version)
            self._replicate(slot, identity)

        if self.scheduler.is_survey_pending and self._services.awaits_memory_nodes():
            self._call_later(MEMORY_NODES_POLL_S, lambda: self._replicate(slot, identity))
            return
        if self.scheduler.is_survey_pending:
            version = self.scheduler.replicated_version
            safe = Identity(self.epoch, version) if version is not None else None
            arenas = (self.local_share.arenas.get(slot, {}).values() for slot in self.scheduler.inherited_versions)
            sealed = map(find_sealed_snapshot, itertools.chain.from_iterable(arenas))
            held = {
                *(made.identity for made in self.checkpoints.values()),
                *(found[0][0] for found in sealed if found is not None),
            }
            replication_manager.find_replicated(self.epoch, safe, held, self.world, self._guard_callback(found_safe))
            return
        why_not = self.scheduler.why_not_replicated(identity.version)
        if why_not is not None:
            ended(why_not, found=True)
            return
        stays = self.scheduler.retained_version
        safe = Identity(self.epoch, stays) if stays is not None else None
        self._has_released_replicas = False
        replication_manager.replicate(identity, safe, self._guard_callback(ended), self.scheduler.retained_placement)

    def _report_degraded(self, version: Version, why: str) -> None:
        """Reports that this version no longer meets the replication target, if it was reported as replicated."""
        account, identity = self._services.account, Identity(self.epoch, version)
        if "peer" not in account.newest_by_level or account.newest_by_level["peer"][0] != version:
            return
        account.clear_replicated()
        text = f"step {version.step} has fewer copies in other nodes' memory than was asked for: {why}"
        self.emit("replica.lost", text, True, {"identity": str(identity)})

    def _release_replicas(self) -> None:
        network, copies = self._services.network(), self._services.replicas
        assert network is not None  # else no replica was ever kept
        assert copies is not None
        try:
            copies.evict_epoch(self.epoch)
        except AgentError:  # a start surveys this node: its replicas stay
            return
        self._has_released_replicas = True
        for node in (*self.nodes[1:], *(each.node for each in self._services.memory_nodes())):
            network.notify(node.name, {"t": "forget-replicas", "epoch": str(self.epoch)})

    def _make_arenas(self, slot: int, sizes: tuple[int, ...]) -> None:
        def made(sizes_made: dict[int, int], error: str) -> None:
            if not error:
                self.scheduler.record_arenas(slot, tuple(sizes_made[rank] for rank in range(self.world)))
            elif self.scheduler.needs_arenas(slot, sizes):
                self._reduce_slots(slot, error)
            else:  # these sizes are no longer needed
                self.scheduler.record_arenas(slot, ())

        self.ranks.make_arenas(slot, dict(enumerate(sizes)), self._guard_callback(made))

    def _reduce_slots(self, slot: int, why: str) -> None:
        had = self.scheduler.usable_slot_count
        message = f"there is no memory for slot {slot} ({why}); in use: {format_count(had, 'slot')}"
        self.emit("memory.short", message, had < self._reported_slots_min)
        self._reported_slots_min = min(had, self._reported_slots_min)
        self._next_plan_s, self._planned_free_parts = (
            time.monotonic() + REPLAN_PAUSE_S,
            {},
        )  # less was free than planned
        self.scheduler.limit_slots(had, f"not one arena fits into memory: {why}; free memory, or save less")
        if self.plan is not None:
            self.plan = replace(self.plan, slots=self.scheduler.slot_limit)
        self.scheduler.record_arenas(slot, ())

    def _assemble(self, slot: int, number: int, version: Version) -> None:
        identity = Identity(self.epoch, version)
        attempt = self.scheduler.slots[slot].attempt
        if attempt is not None:
            self._services.account.record_staging(time.monotonic(), version, max(attempt.staged_ranks.values()))
        if self.cost_model is not None and attempt is not None:
            self.cost_model.record_stall(max(attempt.staged_ranks.values()), version.step + 1)
            self.apply_cost_model()

        def read(parts: list[StagedPart], error: str) -> None:
            if error:
                self.scheduler.record_assembly(slot, number, error)
                return
            arenas = self.local_share.arenas[slot]
            self._run(
                Lane.MEMORY,
                lambda: assemble_checkpoint(identity, parts, arenas),
                lambda done: self._on_assembled(slot, number, done),
            )

        self.ranks.hash_snapshots(slot, identity, self._guard_callback(read))

    def _on_assembled(self, slot: int, number: int, done: Future[MemoryCheckpoint]) -> None:
        error = failure(done)
        if not error:
            made = done.result()
            self.checkpoints[slot] = made
            version, count = made.identity.version, int(made.manifest.frames["length"].sum())
            self._services.account.record_completion(self.epoch, version, count)
            text, facts = f"step {version.step} is whole in memory", {"identity": str(made.identity), "bytes": count}
            self._services.on_event(Event("snapshot.done", text, data=facts))
            if set(made.differing_tensors) - self._reported_differing:
                self._reported_differing.update(made.differing_tensors)
                text = f"{format_count(len(made.differing_tensors), 'tensor')} turned out to differ between the ranks"
                names = ", ".join(made.differing_tensors[:5])
                self.emit("snapshot.differs", f"{text}, saved per rank: {names}", True)
        self.scheduler.record_assembly(slot, number, error)

    def _write_outcome(self, body: dict[str, Any]) -> None:
        if self.outcome_path is None:
            return
        try:
            outcome_file.write_outcome(self.outcome_path, self.epoch, self.launch, body)
        except OSError as exc:
            text = f"what was saved could not be written to {self.outcome_path}: {exc}"
            self.emit("outcome.failed", text, True, body)

    def _mark_notice_answered(self, source: str, key: str, node: str) -> None:
        if node:
            self.ranks.remote_shares[node].notify({"t": "leave-ordered", "source": source, "key": key})
        elif self._services.notice_listeners is not None:
            self._services.notice_listeners.record_exit(source, key)

    def _acknowledge_notice(self, source: str, key: str, node: str) -> None:
        def ended(error: str) -> None:
            self.scheduler.record_acknowledgement()
            what = f"{source} was told that {key} may begin: the job has left, and its checkpoint is in the store"
            text = f"{source} was not told that {key} may begin: {error}" if error else what
            facts = {"source": source, "key": key, "error": error}
            self.emit("notice.unacknowledged" if error else "notice.acknowledged", text, not error, facts)

        then = self._guard_callback(ended)
        if node:
            self.ranks.remote_shares[node].acknowledge_event(source, key, then)
        elif self._services.notice_listeners is not None:
            self._services.notice_listeners.acknowledge_event(source, key, then)
        else:
            ended("nothing is listened to")

    def _has_mixed_layouts(self) -> bool:
        return len({member.contents.version for member in self._members.values()}) > 1
