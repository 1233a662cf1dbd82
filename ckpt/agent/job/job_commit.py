"""The store side of a job: its claim, its heartbeats, its commits, and the end of its epoch.

Everything runs on the agent's main thread. Slow work goes to a lane of `Workers` and returns as a fact for the
scheduler.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.agent.commit.distributed_write import DistributedWrite, OnWritten, write_part
from ckpt.agent.commit.exports import Exports
from ckpt.agent.commit.orphan_commit import check_due
from ckpt.agent.commit.store_client import option_fields
from ckpt.agent.job.job_context import JobContext
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.candidates import MemoryEpoch, find_candidates
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import RemoteShare, WriteRequest
from ckpt.agent.state.cost_model import ABOUT, COSTS
from ckpt.errors import Superseded, TransientError, Unsettled
from ckpt.ipc.arena import Arena
from ckpt.policy.export_rule import ExportRule
from ckpt.policy.save_options import Keep
from ckpt.types import Identity, format_count

if TYPE_CHECKING:
    from ckpt.store.commit import Committed
    from ckpt.store.lineage import Claim
    from ckpt.store.packs import Written

log = logging.getLogger("ckpt")


class JobCommits(JobContext):
    """A job's part in the store. With several nodes, each node writes the frames that it holds."""

    _is_claiming = False  # the claim is being put
    _pending_close_reason = ""  # the reason to close the epoch once the claim has settled
    _distributed_write: DistributedWrite | None = None  # of the newest commit, with several nodes
    _cancel: threading.Event | None = None  # of the newest commit
    _heartbeat_count = 0
    _is_heartbeat_pending = False
    _pending_prunes = 0  # prunes under way
    _exports: Exports | None = None

    def _commit(self, slot: int) -> None:
        checkpoint, claim, store = self.checkpoints[slot], self.claim, self._services.store
        assert claim is not None  # nothing is appointed before the claim is known
        options = self.options
        about: dict[str, Any] = {}
        if self.cost_model is not None:
            self.cost_model.record_commit_begin(self._hindmost_entered_s(), self.local_share.slowest_step())
            about[ABOUT] = self.cost_model.record_fields(self._services.alarm_scores())
            about[COSTS] = {**self.cost_model.cost_fields(), **option_fields(self.policy, options.peers)}
        left_over = bool(self.scheduler.superseded_by)
        kept = self.replication_manager is not None and self.replication_manager.has_holders
        elsewhere: DistributedWrite | None = None
        self._cancel = cancel = threading.Event()
        self._distributed_write = None
        if kept or self.ranks.remote_shares:  # else only this node has any of it
            elsewhere = self._prepare_distributed_write(checkpoint)
        self._announce_commit(checkpoint.identity)

        def commit() -> Committed:
            if left_over:  # a newer start may have passed over this checkpoint
                check_due(store, claim, checkpoint.identity)
            return store.commit(claim, checkpoint, options, about, elsewhere, cancel)

        self._run(Lane.COMMIT, commit, lambda done: self._on_commit_done(slot, checkpoint.identity, done))

    def _announce_commit(self, identity: Identity | None) -> None:
        """Tells the other nodes which commit is under way, so that they keep their parts of it; None: it is over. A
        long commit may ask for their parts late."""
        for share in self.ranks.remote_shares.values():
            share.notify({"t": "pending-commit", "identity": str(identity) if identity is not None else None})

    def _prepare_distributed_write(self, checkpoint: MemoryCheckpoint) -> DistributedWrite:
        """The distributed write of this commit: each node writes its own frames, or a holder of replicas does."""

        def holders(name: str) -> list[str]:
            manager = self.replication_manager
            return manager.find_holders(checkpoint.identity, name) if manager is not None else []

        server, margin_s = self._services.server, self._services.heartbeat_s
        ask = functools.partial(self._request_part_write, checkpoint.arenas)
        what = checkpoint, self.options, self.ranks.ranks_by_node, holders, ask
        self._distributed_write = DistributedWrite(*what, server.post, server.call_later, margin_s)
        return self._distributed_write

    def abandon_commit(self) -> None:
        """Abandons the distributed write, since the agent ends: its results are not handled any more, and the
        committing thread must not wait for them."""
        if self._distributed_write is not None:
            self._distributed_write.abandon("the agent ends")

    def _cancel_commit(self) -> None:
        """Cancels the running commit, here and on other nodes."""
        if self._cancel is not None:
            self._cancel.set()
        network, slot = self._services.network(), self.scheduler.committing_slot
        if self._distributed_write is None or network is None or slot is None:
            return
        identity = str(self.checkpoints[slot].identity)
        for name in self._distributed_write.give_up():
            network.notify(name, {"t": "cancel-write", "identity": identity})

    def _request_part_write(
        self,
        own: Mapping[int, Arena],
        name: str,
        wanted: WriteRequest,
        cancel: threading.Event,
        then: OnWritten,
    ) -> None:
        """Has the part written by its own node, or by another one from a replica. `own`: the arenas of this node's
        ranks. Other parameters: see distributed_write.RequestWrite."""
        copies, network, ranks = (
            self._services.replicas,
            self._services.network(),
            set(np.unique(wanted.ranks).tolist()),
        )
        if name in self.ranks.remote_shares:
            self.ranks.remote_shares[name].write_frames(wanted, then)
            return
        if name and network is not None:  # a memory-only node
            RemoteShare(network, name, self.epoch, self.world, ()).write_frames(wanted, then)
            return
        if ranks <= own.keys():
            self._write_own_part(Lane.PART, wanted, own, cancel, then)
            return
        held = copies.arenas_of(wanted.identity) if copies is not None else {}
        if copies is None or not ranks <= held.keys():
            then(None, "it has no copies of them")
            return

        def written(result: Written | None, error: str) -> None:
            copies.release(wanted.identity)
            then(result, error)

        copies.lease(wanted.identity)  # a newer checkpoint may be replicated meanwhile
        self._write_own_part(Lane.MEMORY, wanted, held, cancel, written)

    def _write_own_part(
        self, lane: Lane, wanted: WriteRequest, arenas: Mapping[int, Arena], cancel: threading.Event, then: OnWritten
    ) -> None:
        """Writes the part from this node. It must not use the COMMIT lane, which waits for it."""

        def written(done: Future[Written]) -> None:
            then(None if failure(done) else done.result(), failure(done))

        store = self._services.store
        self._run(lane, lambda: write_part(store, wanted, arenas, cancel=cancel), written)

    def _on_commit_done(self, slot: int, identity: Identity, done: Future[Committed]) -> None:
        error = failure(done)
        is_cancelled = self._cancel is not None and self._cancel.is_set()
        if error and is_cancelled:
            error = "it was given up for that of the last step, which would have come too late"
        self._announce_commit(None)
        if isinstance(done.exception(), Superseded):
            self.supersede(error)
            self.scheduler.stop_commits()
        # Reported before any waiting rank goes on, since that rank's run report counts it.
        if not error:
            self._report_commit(identity, done.result())
        now_s = time.monotonic()
        self.scheduler.record_commit(slot, error, now_s, passes=_is_transient(done.exception()))
        if self.cost_model is not None:
            took = None if error else (done.result().seconds, done.result().stored_bytes)
            self.cost_model.record_commit_end(self._hindmost_entered_s(), self.local_share.slowest_step(), took)
            self.apply_cost_model()
        if error:
            self._services.account.record_commit_failure()
            self.emit("commit.failed", f"step {identity.version.step} was not committed: {error}", True)
        if not error and self._exports is not None:
            self._exports.note_commit(identity)
        if not error or (not is_cancelled and _may_be_full(done.exception())):
            self._prune()

    def _set_up_exports(self, rule: ExportRule | None) -> None:
        if rule is not None and (self._exports is None or self._exports.rule != rule):
            run = functools.partial(self._run, Lane.EXPORT)
            self._exports = Exports(rule, self._services.store.export, run, self.emit)

    def _hindmost_entered_s(self) -> float:
        """When the hindmost rank entered its present step; now, if unknown."""
        since_s = self.local_share.slowest_entered_s()
        return time.monotonic() if since_s is None else since_s

    def _report_newest_stored(self, claim: Claim) -> None:
        """Shows the newest checkpoint in the store of this epoch or its ancestors: this agent has committed none."""
        store, account = self._services.store, self._services.account

        def find() -> Identity | None:
            line = find_candidates(store.open_run(impatient=True).view(), [MemoryEpoch(claim, ())])
            return next((each.identity for each in line if each.records and each.identity.epoch <= claim.epoch), None)

        def found(done: Future[Identity | None]) -> None:
            if error := failure(done):
                log.warning("what the store has is not known now, and is shown once something is committed: %s", error)
            elif (identity := done.result()) is not None:
                account.record_found("store", identity.epoch, identity.version)

        self._run(Lane.STORE, find, found)

    def _prune(self) -> None:
        keep, store = self.options.keep, self._services.store
        if keep != Keep() and not self.scheduler.superseded_by and store.is_claimed(self.epoch):
            self._pending_prunes += 1
            self._run(Lane.COMMIT, lambda: store.prune(self.epoch, keep), self._on_prune_done)

    def _report_commit(self, identity: Identity, result: Committed) -> None:
        sizes = result.raw_bytes, result.stored_bytes
        self._services.account.record_commit(self.epoch, identity.version, result.seconds, *sizes)
        text = (
            f"step {identity.version.step} is committed: {result.raw_bytes} bytes, {result.stored_bytes} stored in "
            f"{format_count(result.packs, 'pack')}, {result.referred_bytes} unchanged, in {result.seconds:.2f} s"
        )
        facts = {
            "identity": str(identity),
            "raw_bytes": result.raw_bytes,
            "stored_bytes": result.stored_bytes,
            "referred_bytes": result.referred_bytes,
            "seconds": result.seconds,
        }
        self.emit("commit.done", text, data=facts)

    def _on_prune_done(self, done: Future[dict[str, Any]]) -> None:
        self._pending_prunes -= 1
        if error := failure(done):
            self.emit("prune.failed", f"old checkpoints could not be pruned now: {error}", True)

    def _put_claim(self, claim: Claim) -> None:
        store = self._services.store
        self._is_claiming = True
        self._run(Lane.STORE, lambda: store.claim(claim), self._on_claim_done)

    def _on_claim_done(self, done: Future[None]) -> None:
        error = failure(done)
        self._is_claiming = False
        if self._pending_close_reason:
            self._close_epoch(self._pending_close_reason)
        if isinstance(done.exception(), Superseded):
            self.supersede(error)
            self.scheduler.stop_commits()
        elif error:
            message = f"the store did not take the claim of this start, which is tried again before a commit: {error}"
            self.emit("claim.postponed", message, True)

    def _send_heartbeat(self) -> None:
        """Puts heartbeats into the store as long as the epoch is alive."""
        if self._is_dropped or self.internal_error or self.scheduler.all_gone or self.scheduler.superseded_by:
            return
        if not self._is_heartbeat_pending:  # else the store is slow: queued heartbeats would say no more than one
            self._is_heartbeat_pending = True
            self._heartbeat_count += 1
            beats, store = self._heartbeat_count, self._services.store
            self._run(Lane.STORE, lambda: store.heartbeat(self.epoch, beats), self._on_heartbeat_sent)
        self._call_later(self._services.heartbeat_s, self._send_heartbeat)

    def _on_heartbeat_sent(self, done: Future[None]) -> None:
        self._is_heartbeat_pending = False
        error = failure(done)
        if isinstance(done.exception(), Superseded):
            self.supersede(error)
            self.scheduler.stop_commits()
        elif error:
            log.info("no heartbeat: %s", error)

    def _close_epoch(self, reason: str) -> None:
        """Closes the epoch, after a claim under way has settled: a claim that lands later would leave an epoch open for
        ever. At the end of training the last commit is exported first. A notice leaves no time for that."""
        if self._is_claiming:
            self._pending_close_reason = reason
            return
        exports, self._exports = self._exports, None
        if exports is not None and self.is_finished:
            parent = self.claim.parent if self.claim is not None else None
            exports.finish(parent, lambda: self._close_epoch(reason))
            return
        store = self._services.store
        self._run(Lane.STORE, lambda: store.close_epoch(self.epoch, reason), self._on_epoch_closed)

    def _on_epoch_closed(self, done: Future[None]) -> None:
        if error := failure(done):
            log.warning("epoch %s could not be closed in the store: %s", self.epoch, error)
        self.scheduler.record_close()


def _is_transient(error: BaseException | None) -> bool:
    """True if the commit failed because the store does not answer just now."""
    while error is not None:
        if isinstance(error, TransientError | Unsettled):
            return True
        error = error.__cause__
    return False


def _may_be_full(error: BaseException | None) -> bool:
    """True if the commit failed for another reason than a store that does not answer, so the store may be full. Stores
    report a full disk in different ways, and another node's error is only a text. A needless prune does no harm."""
    return error is not None and not _is_transient(error) and not isinstance(error, Superseded)
