"""One job's part in the store: its claim and heartbeats, its commits, prunes and exports, and the end of its epoch.

With several nodes, each node writes the frames that it holds. Slow work runs in a lane of `Workers` and returns as a
fact of the scheduler. Everything here runs on the agent's main thread.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.agent.commit.distributed_write import DistributedWrite, OnWritten, write_part
from ckpt.agent.commit.exports import Exports
from ckpt.agent.commit.job_options import option_fields
from ckpt.agent.commit.orphan_commit import check_due
from ckpt.agent.job.job_context import JobContext, JobPolicy
from ckpt.agent.job.job_replication import JobReplication
from ckpt.agent.runtime.workers import Lane, failure, outcome
from ckpt.agent.snapshots.candidates import MemoryEpoch, find_candidates
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import RemoteShare, WriteRequest
from ckpt.agent.state.cost_model import ABOUT, COSTS
from ckpt.errors import Superseded, TransientError, Unsettled
from ckpt.policy.export_rule import ExportRule
from ckpt.policy.save_options import Keep
from ckpt.types import Identity, format_count

if TYPE_CHECKING:
    from ckpt.store.commit import Committed
    from ckpt.store.lineage import Claim
    from ckpt.store.packs import Written

log = logging.getLogger("ckpt")


class JobCommits:
    """`pending_prunes`: prunes under way."""

    def __init__(self, context: JobContext, policy: JobPolicy, replication: JobReplication) -> None:
        self.pending_prunes = 0
        self._context, self._policy, self._replication = context, policy, replication
        self._store = context.services.store
        self._is_claiming = False  # the claim is being put
        self._pending_close_reason = ""  # the reason to close the epoch once the claim has settled
        self._distributed_write: DistributedWrite | None = None  # of the newest commit, with several nodes
        self._cancel = threading.Event()  # of the newest commit
        self._heartbeat_count = 0
        self._exports: Exports | None = None

    # -- one commit

    def commit(self, slot: int) -> None:
        """Commits the checkpoint in that slot."""
        context, store = self._context, self._store
        checkpoint, claim, options = context.checkpoints[slot], context.claim, context.options
        assert claim is not None  # nothing is appointed before the claim is known
        model, own = self._policy.cost_model, context.shares.local_share
        model.record_commit_begin(own.slowest_entered_s(), own.slowest_step())
        about: dict[str, Any] = {
            ABOUT: model.record_fields(context.services.alarm_scores()),
            COSTS: {**model.cost_fields(), **option_fields(self._policy.value, options.peers)},
        }
        left_over = bool(context.scheduler.facts.superseded_by)
        manager = self._replication.manager
        self._cancel = cancel = threading.Event()
        self._distributed_write = None
        if (manager is not None and manager.has_holders) or context.shares.remote_shares:
            self._distributed_write = self._prepare_distributed_write(checkpoint)
        elsewhere = self._distributed_write  # None: only this node has any of it

        def commit() -> Committed:
            if left_over:  # a newer start may have passed over this checkpoint
                check_due(store, claim, checkpoint.identity)
            return store.commit(claim, checkpoint, options, about, elsewhere, cancel)

        context.run(Lane.COMMIT, commit, lambda done: self._on_commit_done(slot, checkpoint.identity, done))

    def _prepare_distributed_write(self, checkpoint: MemoryCheckpoint) -> DistributedWrite:
        """The distributed write of this commit: each node writes its own frames, or a holder of replicas does."""

        services, ranks, manager = self._context.services, self._context.shares.ranks_by_node, self._replication.manager
        find_holders = functools.partial(manager.find_holders, checkpoint.identity) if manager is not None else None
        write = functools.partial(self._write_part, checkpoint)
        what = checkpoint, self._context.options, ranks, find_holders or (lambda name: ()), write
        return DistributedWrite(*what, services.server.post, services.server.call_later, services.heartbeat_s)

    def _write_part(
        self, checkpoint: MemoryCheckpoint, name: str, wanted: WriteRequest, cancel: threading.Event, then: OnWritten
    ) -> None:
        """Has the part written by that node: its own one, or one that holds a replica of it. A memory-only node has no
        share in the job. Parameters: see distributed_write.RequestWrite."""
        context, network = self._context, self._context.services.network()
        if name and network is not None:
            node = context.shares.remote_shares.get(name) or RemoteShare(
                network, name, context.epoch, context.world, ()
            )
            node.write_frames(wanted, then)
            return
        replicas, ranks = context.services.replicas, set(np.unique(wanted.ranks).tolist())
        is_own = ranks <= checkpoint.arenas.keys()
        arenas = checkpoint.arenas if is_own else replicas.kept.arenas_of(wanted.identity)
        if not ranks <= arenas.keys():
            then(None, "it has no copies of them")
            return

        def written(done: Future[Written]) -> None:
            if not is_own:
                replicas.arenas.release(wanted.identity)
            then(*outcome(done))

        if not is_own:
            replicas.arenas.lease(wanted.identity)  # a newer checkpoint may be replicated meanwhile
        # Not in the COMMIT lane, which waits for it.
        lane = Lane.PART if is_own else Lane.MEMORY
        context.run(lane, lambda: write_part(self._store, wanted, arenas, cancel=cancel), written)

    def abandon(self) -> None:
        """Abandons the distributed write, since the agent ends: its results are not handled any more, and the
        committing thread must not wait for them."""
        if self._distributed_write is not None:
            self._distributed_write.abandon("the agent ends")

    def cancel(self) -> None:
        """Cancels the running commit, here and on other nodes."""
        self._cancel.set()
        network, slot = self._context.services.network(), self._context.scheduler.slots.committing_slot
        if self._distributed_write is None or network is None or slot is None:
            return
        identity = str(self._context.checkpoints[slot].identity)
        for name in self._distributed_write.give_up():
            network.notify(name, {"t": "withdraw", "identity": identity, "writes": True})

    def _on_commit_done(self, slot: int, identity: Identity, done: Future[Committed]) -> None:
        context, error, is_cancelled = self._context, failure(done), self._cancel.is_set()
        if error and is_cancelled:
            error = "it was given up for that of the last step, which would have come too late"
        self._check_superseded(done, error)
        # Reported before any waiting rank goes on, since that rank's run report counts it.
        if not error:
            self._report(identity, done.result())
        context.scheduler.commits.record_commit(slot, error, time.monotonic(), passes=_is_transient(done.exception()))
        took = None if error else (done.result().seconds, done.result().stored_bytes)
        own = context.shares.local_share
        self._policy.cost_model.record_commit_end(own.slowest_entered_s(), own.slowest_step(), took)
        self._policy.apply()
        if error:
            context.services.account.totals.commits_failed += 1
            context.emit("commit.failed", f"step {identity.version.step} was not committed: {error}", True)
        elif self._exports is not None:
            self._exports.note_commit(identity)
        if not error or (not is_cancelled and _may_be_full(done.exception())):
            self.prune()

    def _check_superseded(self, done: Future[Any], error: str) -> None:
        """If the store has shown that a newer start owns the run, nothing more is committed."""
        if isinstance(done.exception(), Superseded):
            self._context.scheduler.supersede(error)
            self._context.scheduler.commits.stop()

    def _report(self, identity: Identity, result: Committed) -> None:
        context, sizes = self._context, (result.raw_bytes, result.stored_bytes)
        context.services.account.record_commit(context.epoch, identity.version, result.seconds, *sizes)
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
        context.emit("commit.done", text, data=facts)

    # -- what follows a commit

    def set_up_exports(self, rule: ExportRule | None) -> None:
        if rule is not None and (self._exports is None or self._exports.rule != rule):
            run = functools.partial(self._context.run, Lane.EXPORT)
            self._exports = Exports(rule, self._store.export, run, self._context.emit)

    def prune(self) -> None:
        """Prunes the store by the user's rule, if there is one."""
        keep, store, epoch = self._context.options.keep, self._store, self._context.epoch
        if keep != Keep() and not self._context.scheduler.facts.superseded_by and store.is_claimed(epoch):
            self.pending_prunes += 1
            self._context.run(Lane.COMMIT, lambda: store.prune(epoch, keep), self._on_prune_done)

    def _on_prune_done(self, done: Future[dict[str, Any]]) -> None:
        self.pending_prunes -= 1
        if error := failure(done):
            self._context.emit("prune.failed", f"old checkpoints could not be pruned now: {error}", True)

    def report_newest_stored(self, claim: Claim) -> None:
        """Shows the newest checkpoint in the store of this epoch or its ancestors: this agent has committed none."""
        store, account = self._store, self._context.services.account
        # Now: the answer may come within this turn, before the account hears of the job.
        account.adopt_epoch(claim.epoch, claim.parent.version if claim.parent is not None else None)

        def find() -> Identity | None:
            line = find_candidates(store.open_run(impatient=True).view(), [MemoryEpoch(claim, ())])
            return next((each.identity for each in line if each.records and each.identity.epoch <= claim.epoch), None)

        def found(done: Future[Identity | None]) -> None:
            if error := failure(done):
                log.warning("what the store has is not known now, and is shown once something is committed: %s", error)
            elif (identity := done.result()) is not None:
                account.record_level("store", identity.epoch, identity.version)

        self._context.run(Lane.STORE, find, found)

    # -- the epoch

    def begin_epoch(self, claim: Claim) -> None:
        """Puts the claim into the store, and heartbeats from now on."""
        self._is_claiming = True
        self._context.run(Lane.STORE, lambda: self._store.claim(claim), self._on_claim_done)
        self._context.call_later(self._context.services.heartbeat_s, self.send_heartbeat)

    def _on_claim_done(self, done: Future[None]) -> None:
        error = failure(done)
        self._is_claiming = False
        if self._pending_close_reason:
            self.close_epoch(self._pending_close_reason)
        self._check_superseded(done, error)
        if error and not isinstance(done.exception(), Superseded):
            message = f"the store did not take the claim of this start, which is tried again before a commit: {error}"
            self._context.emit("claim.postponed", message, True)

    def send_heartbeat(self) -> None:
        """Puts heartbeats into the store as long as the epoch is alive."""
        context, scheduler = self._context, self._context.scheduler
        if context.is_dropped or context.internal_error or scheduler.facts.all_gone or scheduler.facts.superseded_by:
            return
        self._heartbeat_count += 1
        count = self._heartbeat_count
        context.run(Lane.STORE, lambda: self._store.heartbeat(context.epoch, count), self._on_heartbeat_sent)

    def _on_heartbeat_sent(self, done: Future[None]) -> None:
        error = failure(done)
        self._check_superseded(done, error)
        if error:
            log.info("no heartbeat: %s", error)
        # Not before: a slow store would only get several that say the same.
        self._context.call_later(self._context.services.heartbeat_s, self.send_heartbeat)

    def close_epoch(self, reason: str) -> None:
        """Closes the epoch, after a claim under way has settled: a claim that lands later would leave an epoch open for
        ever. At the end of training the last commit is exported first. A notice leaves no time for that."""
        context = self._context
        if self._is_claiming:
            self._pending_close_reason = reason
            return
        exports, self._exports = self._exports, None
        if exports is not None and context.is_finished:
            parent = context.claim.parent if context.claim is not None else None
            exports.finish(parent, lambda: self.close_epoch(reason))
            return
        context.run(Lane.STORE, lambda: self._store.close_epoch(context.epoch, reason), self._on_epoch_closed)

    def _on_epoch_closed(self, done: Future[None]) -> None:
        if error := failure(done):
            log.warning("epoch %s could not be closed in the store: %s", self._context.epoch, error)
        self._context.scheduler.leave_requests.record_close()


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
