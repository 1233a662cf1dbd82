"""Agent restart: a new agent takes over a running job whose agent died. The trainers bring their arenas, and whole
checkpoints in them are complete again, on this node and on others. The parts that
need no job are in arena_handover.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ckpt.agent.job.arena_handover import (
    RECOVERY_S,
    ArenaHandover,
    RecoveredCheckpoints,
    filter_committed,
    find_checkpoints,
    find_newest_stored,
)
from ckpt.agent.job.job_executor import JobExecutor
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.inventory import find_snapshot
from ckpt.agent.snapshots.manifest_gather import GatheredManifest, ManifestGather
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.ipc.arena import Arena
from ckpt.ipc.messages import Message
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel

log = logging.getLogger("ckpt")

RETRY_S = 1.0  # until a disconnected node is asked again


class AgentRestart(JobExecutor):
    """A job's behaviour until all ranks have joined an agent that took it over. Main thread only."""

    _arena_handover: ArenaHandover | None = None
    # A rank was lost before all had joined: the other ranks' arenas are kept unread, here and on other nodes.
    has_unread_arenas = False

    def recover_from_trainers(self) -> None:
        """Begins the takeover of a running job: the trainers bring their arenas within RECOVERY_S."""
        self.is_taken_over = self.scheduler.is_recovering = True
        self._arena_handover = ArenaHandover(self.world, len(self.scheduler.slots))
        for slot in self.scheduler.slots:
            slot.is_handed_out = True
        self._call_later(RECOVERY_S, lambda: self._give_up_recovery("a rank did not come back"))

    def _take_arenas(self, rank: int, slots: list[int], message: Message) -> None:
        # Only the connection broke. Messages that were lost with it are sent again.
        if self._arena_handover is None:
            self.ranks.record_arenas(rank, slots, message.fds)
            return
        if self.ranks.node_of(rank):
            self._arena_handover.add_remote_arenas(rank, slots)
        else:
            self._arena_handover.add_arenas(rank, slots, message.fds)
        for slot in slots:
            self.scheduler.slots[slot].is_making_arenas = True

    def _recover_checkpoints(self, recovery: ArenaHandover) -> None:
        """All ranks have joined: looks for whole checkpoints in their arenas."""
        self._arena_handover = None
        whole, lost = recovery.finish(keep=True)
        for slot in lost:
            self.scheduler.record_arenas(slot, ())
        if isinstance(self.ranks, AllShares):
            self._recover_from_nodes(whole, self.ranks)
            return
        store = self._services.store
        self._run(
            Lane.MEMORY,
            lambda: find_checkpoints(self.epoch, whole, self.local_share.reader, store),
            lambda done: self._on_recovered(whole, done),
        )

    def _recover_from_nodes(self, whole: dict[int, dict[int, Arena]], nodes: AllShares) -> None:
        """Like `_recover_checkpoints`, for a job on several nodes. A disconnected node is waited for, since a
        checkpoint may be whole with its part. If a node is gone for good, the arenas here stay as they are."""
        found: dict[int, MemoryCheckpoint] = {}
        network, workers = self._services.network(), self._services.workers
        assert network is not None  # a job on several nodes has a network
        for slot, by_rank in whole.items():  # a start may survey this node meanwhile
            self.local_share.adopt_slot_arenas(slot, by_rank)

        def connections() -> list[Channel | None]:
            return [network.channel(name) for name in nodes.remote_shares]

        def is_one_away() -> bool:
            seen = self.scheduler.rank_states.summary
            return None in connections() or (bool(seen.disconnected) and not seen.any_gone)

        def looked() -> None:
            store, identities = self._services.store, [checkpoint.identity for checkpoint in found.values()]

            def ended(done: Future[frozenset[Identity]]) -> None:
                committed: Future[RecoveredCheckpoints] = Future()
                committed.set_result(RecoveredCheckpoints(found, frozenset() if failure(done) else done.result()))
                self._on_recovered(whole, committed)

            self._run(Lane.STORE, lambda: filter_committed(identities, store), ended)

        def ask(wanted: Mapping[int, Identity]) -> None:
            left, before = dict(wanted), connections()

            def gathered(slot: int, result: GatheredManifest | None, error: str) -> None:
                identity = left.pop(slot)
                if result is not None:
                    found[slot] = result.checkpoint
                else:
                    missed[slot] = identity
                    log.info("slot %d holds no whole snapshot: %s", slot, error)
                if not left and missed and (is_one_away() or connections() != before):
                    self._call_later(RETRY_S, lambda: again(missed))
                elif not left:
                    looked()

            missed: dict[int, Identity] = {}
            for slot, identity in wanted.items():
                then = self._guard_callback(functools.partial(gathered, slot))
                ManifestGather(network, workers, identity, nodes.holders(), whole[slot], then).begin()

        def again(missed: Mapping[int, Identity]) -> None:
            if not is_one_away():
                ask(missed)
            elif self._is_dropped or self.scheduler.rank_states.summary.any_gone:
                self.has_unread_arenas = True
                looked()
            else:
                self._call_later(RETRY_S, lambda: again(missed))

        staged: dict[int, Identity] = {}
        for slot, by_rank in whole.items():
            held = {find_snapshot(arena) for arena in by_rank.values()}
            keys = {each[0][0] for each in held if each is not None}  # missing hashes are computed anew
            if None in held or len(keys) != 1 or next(iter(keys)).epoch != self.epoch:
                log.info("slot %d holds no whole snapshot: not every rank has staged the same there", slot)
            else:
                staged[slot] = keys.pop()
        if staged:
            ask(staged)
        else:
            looked()

    def _on_recovered(self, arenas: dict[int, dict[int, Arena]], done: Future[RecoveredCheckpoints]) -> None:
        if error := failure(done):
            self.emit("recovery.failed", f"what the trainers had in memory cannot be read: {error}", True)
        found = RecoveredCheckpoints({}, frozenset()) if error else done.result()
        for slot, by_rank in arenas.items():
            if self._is_dropped:
                for arena in by_rank.values():
                    arena.close()
                continue
            self.local_share.adopt_slot_arenas(slot, by_rank)
            sizes = {rank: arena.size_bytes for rank, arena in by_rank.items()}
            self.scheduler.record_arenas(slot, tuple(sizes.get(rank, 0) for rank in range(self.world)))
            if slot in found.checkpoints:
                checkpoint = found.checkpoints[slot]
                self.checkpoints[slot] = checkpoint
                version, committed = checkpoint.identity.version, checkpoint.identity in found.committed
                self.scheduler.record_held_snapshot(slot, version, committed)
                for level in ("local", *(["store"] if committed else [])):
                    self._services.account.record_found(level, self.epoch, version)
        self.scheduler.finish_recovery()
        self.needs_restart_survey = len(self.nodes) > 1
        steps = sorted(checkpoint.identity.version.step for checkpoint in found.checkpoints.values())
        hold = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" if steps else "no whole checkpoint"
        self.emit("agent.recovered", f"the arenas were taken over; they hold {hold}", data={"steps": steps})
        self._report_newest_stored()

    def _report_newest_stored(self) -> None:
        """Shows the newest checkpoint in the store, which may be in no arena any more."""
        claim, store, account = self.claim, self._services.store, self._services.account

        def looked(done: Future[Identity | None]) -> None:
            identity = done.result() if not failure(done) else None
            if identity is not None:
                account.record_found("store", identity.epoch, identity.version)

        if claim is not None:
            self._run(Lane.STORE, lambda: find_newest_stored(claim, store), looked)

    def _give_up_recovery(self, why: str) -> None:
        recovery, self._arena_handover = self._arena_handover, None
        if recovery is None:
            return
        if not why:
            for slot in recovery.finish(keep=False)[1]:
                self.scheduler.record_arenas(slot, ())
            return
        log.warning("what the trainers had in memory cannot be taken over: %s", why)
        self.has_unread_arenas = True
        self.scheduler.finish_recovery()
        for slot, by_rank in recovery.pop_arenas().items():
            self.local_share.adopt_slot_arenas(slot, by_rank)
            self.scheduler.record_arenas(slot, ())
