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
    look_for,
    newest_stored,
    which_committed,
)
from ckpt.agent.job.job_executor import JobExecutor
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.inventory import whose
from ckpt.agent.snapshots.manifest_gather import GatheredManifest, ManifestGather
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.ipc.arena import Arena
from ckpt.ipc.messages import Message
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel

log = logging.getLogger("ckpt")

AGAIN_S = 1.0  # until a disconnected node is asked again


class AgentRestart(JobExecutor):
    """A job's behaviour until all ranks have joined an agent that took it over. Main thread only."""

    _recovery: ArenaHandover | None = None
    # A rank was lost before all had joined: the other ranks' arenas are kept unread, here and on other nodes.
    holds_unread = False

    def recover_from_trainers(self) -> None:
        """Begins the takeover of a running job: the trainers bring their arenas within RECOVERY_S."""
        self.taken_over = self.group.recovering = True
        self._recovery = ArenaHandover(self.world, len(self.group.slots))
        for slot in self.group.slots:
            slot.handed = True
        self._later(RECOVERY_S, lambda: self._give_up_recovery("a rank did not come back"))

    def _take_arenas(self, rank: int, slots: list[int], message: Message) -> None:
        # Only the connection broke. Messages that were lost with it are sent again.
        if self._recovery is None:
            self.ranks.has(rank, slots, message.fds)
            return
        if self.ranks.node_of(rank):
            self._recovery.take_elsewhere(rank, slots)
        else:
            self._recovery.take(rank, slots, message.fds)
        for slot in slots:
            self.group.slots[slot].making = True

    def _recover(self, recovery: ArenaHandover) -> None:
        """All ranks have joined: looks for whole checkpoints in their arenas."""
        self._recovery = None
        whole, lost = recovery.end(keep=True)
        for slot in lost:
            self.group.made(slot, ())
        if isinstance(self.ranks, AllShares):
            self._recover_nodes(whole, self.ranks)
            return
        store = self._services.store
        self._run(
            Lane.MEMORY,
            lambda: look_for(self.epoch, whole, self.own.reader, store),
            lambda done: self._recovered(whole, done),
        )

    def _recover_nodes(self, whole: dict[int, dict[int, Arena]], nodes: AllShares) -> None:
        """Like `_recover`, for a job on several nodes. A disconnected node is waited for, since a checkpoint may be
        whole with its part. If a node is gone for good, the arenas here stay as they are."""
        found: dict[int, MemoryCheckpoint] = {}
        network, bulk = self._services.network(), self._services.bulk
        assert network is not None  # a job on several nodes has a network
        for slot, by_rank in whole.items():  # a start may survey this node meanwhile
            self.own.adopt(slot, by_rank)

        def connections() -> list[Channel | None]:
            return [network.channel(name) for name in nodes.others]

        def is_one_away() -> bool:
            seen = self.group.members.seen
            return None in connections() or (bool(seen.lost) and not seen.any_gone)

        def looked() -> None:
            store, identities = self._services.store, [checkpoint.identity for checkpoint in found.values()]

            def ended(done: Future[frozenset[Identity]]) -> None:
                committed: Future[RecoveredCheckpoints] = Future()
                committed.set_result(RecoveredCheckpoints(found, frozenset() if failure(done) else done.result()))
                self._recovered(whole, committed)

            self._run(Lane.STORE, lambda: which_committed(identities, store), ended)

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
                    self._later(AGAIN_S, lambda: again(missed))
                elif not left:
                    looked()

            missed: dict[int, Identity] = {}
            for slot, identity in wanted.items():
                then = self._guarded(functools.partial(gathered, slot))
                ManifestGather(network, bulk, identity, nodes.holders(), whole[slot], then).begin()

        def again(missed: Mapping[int, Identity]) -> None:
            if not is_one_away():
                ask(missed)
            elif self._dropped or self.group.members.seen.any_gone:
                self.holds_unread = True
                looked()
            else:
                self._later(AGAIN_S, lambda: again(missed))

        staged: dict[int, Identity] = {}
        for slot, by_rank in whole.items():
            held = {whose(arena) for arena in by_rank.values()}
            keys = {each[0][0] for each in held if each is not None}  # missing hashes are computed anew
            if None in held or len(keys) != 1 or next(iter(keys)).epoch != self.epoch:
                log.info("slot %d holds no whole snapshot: not every rank has staged the same there", slot)
            else:
                staged[slot] = keys.pop()
        if staged:
            ask(staged)
        else:
            looked()

    def _recovered(self, arenas: dict[int, dict[int, Arena]], done: Future[RecoveredCheckpoints]) -> None:
        if error := failure(done):
            self.emit("recovery.failed", f"what the trainers had in memory cannot be read: {error}", True)
        found = RecoveredCheckpoints({}, frozenset()) if error else done.result()
        for slot, by_rank in arenas.items():
            if self._dropped:
                for arena in by_rank.values():
                    arena.close()
                continue
            self.own.adopt(slot, by_rank)
            sizes = {rank: arena.bytes for rank, arena in by_rank.items()}
            self.group.made(slot, tuple(sizes.get(rank, 0) for rank in range(self.world)))
            if slot in found.checkpoints:
                checkpoint = found.checkpoints[slot]
                self.checkpoints[slot] = checkpoint
                tick, committed = checkpoint.identity.tick, checkpoint.identity in found.committed
                self.group.holds(slot, tick, committed)
                for level in ("local", *(["store"] if committed else [])):
                    self._services.account.found(level, self.epoch, tick)
        self.group.recovered()
        self.asks_for_former = len(self.nodes) > 1
        steps = sorted(checkpoint.identity.tick.step for checkpoint in found.checkpoints.values())
        hold = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" if steps else "no whole checkpoint"
        self.emit("agent.recovered", f"the arenas were taken over; they hold {hold}", data={"steps": steps})
        self._show_stored()

    def _show_stored(self) -> None:
        """Shows the newest checkpoint in the store, which may be in no arena any more."""
        claim, store, account = self.claim, self._services.store, self._services.account

        def looked(done: Future[Identity | None]) -> None:
            identity = done.result() if not failure(done) else None
            if identity is not None:
                account.found("store", identity.epoch, identity.tick)

        if claim is not None:
            self._run(Lane.STORE, lambda: newest_stored(claim, store), looked)

    def _give_up_recovery(self, why: str) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return
        if not why:
            for slot in recovery.end(keep=False)[1]:
                self.group.made(slot, ())
            return
        log.warning("what the trainers had in memory cannot be taken over: %s", why)
        self.holds_unread = True
        self.group.recovered()
        for slot, by_rank in recovery.hand_over().items():
            self.own.adopt(slot, by_rank)
            self.group.made(slot, ())
