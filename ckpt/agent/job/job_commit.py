"""One job's part in the store: its claim and heartbeats, its commits, prunes and exports, and the end of its epoch.

With several nodes, each node writes the frames that it holds. Slow work runs in a lane of `Workers` and returns as a
fact of the scheduler. Everything here runs on the agent's main thread.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.agent.commit.distributed_write import DistributedWrite, write_part
from ckpt.agent.commit.exports import Exports
from ckpt.agent.commit.job_options import option_fields
from ckpt.agent.commit.orphan_commit import check_due
from ckpt.agent.job.job_context import JobContext, JobPolicy
from ckpt.agent.job.job_replication import JobReplication
from ckpt.agent.runtime.coroutines import sleep
from ckpt.agent.runtime.workers import Lane, error_text
from ckpt.agent.snapshots.candidates import MemoryEpoch, find_candidates
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import RemoteShare, WriteRequest
from ckpt.agent.state.cost_model import ABOUT, COSTS
from ckpt.errors import AgentError, CkptError, Superseded, TransientError, Unsettled
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

        context.spawn(self._commit(slot, checkpoint.identity, commit))

    def _prepare_distributed_write(self, checkpoint: MemoryCheckpoint) -> DistributedWrite:
        """The distributed write of this commit: each node writes its own frames, or a holder of replicas does."""

        services, ranks, manager = self._context.services, self._context.shares.ranks_by_node, self._replication.manager
        find_holders = functools.partial(manager.find_holders, checkpoint.identity) if manager is not None else None
        write = functools.partial(self._write_part, checkpoint)
        what = checkpoint, self._context.options, ranks, find_holders or (lambda name: ()), write
        return DistributedWrite(*what, services.server.post, services.server.call_later, services.heartbeat_s)

    async def _write_part(
        self, checkpoint: MemoryCheckpoint, name: str, wanted: WriteRequest, cancel: threading.Event
    ) -> Written:
        """Has the part written by that node: its own one, or one that holds a replica of it. A memory-only node has no
        share in the job. Parameters: see distributed_write.RequestWrite."""
        context, network = self._context, self._context.services.network()
        if name and network is not None:
            node = context.shares.remote_shares.get(name) or RemoteShare(
                network, name, context.epoch, context.world, ()
            )
            return await node.write_frames(wanted)
        replicas, ranks = context.services.replicas, set(np.unique(wanted.ranks).tolist())
        is_own = ranks <= checkpoint.arenas.keys()
        arenas = checkpoint.arenas if is_own else replicas.kept.arenas_of(wanted.identity)
        if not ranks <= arenas.keys():
            raise AgentError("it has no copies of them")
        write = functools.partial(write_part, self._store, wanted, arenas, cancel=cancel)
        if is_own:
            return await context.run_on(Lane.PART, write)  # not in the COMMIT lane, which waits for it
        written = context.work_on(Lane.MEMORY, write)
        replicas.arenas.lease_until(wanted.identity, written)
        return await written

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

    async def _commit(self, slot: int, identity: Identity, commit: Callable[[], Committed]) -> None:
        context, result, failure = self._context, None, None
        try:
            result = await context.work_on(Lane.COMMIT, commit)
        except Exception as exc:
            failure = exc
        error, is_cancelled = error_text(failure), self._cancel.is_set()
        if error and is_cancelled:
            error = "it was given up for that of the last step, which would have come too late"
        self._check_superseded(failure, error)
        # Reported before any waiting rank goes on, since that rank's run report counts it.
        if result is not None:
            self._report(identity, result)
        context.scheduler.commits.record_commit(slot, error, time.monotonic(), passes=_is_transient(failure))
        took = (result.seconds, result.stored_bytes) if result is not None else None
        own = context.shares.local_share
        self._policy.cost_model.record_commit_end(own.slowest_entered_s(), own.slowest_step(), took)
        self._policy.apply()
        if error:
            context.services.account.totals.commits_failed += 1
            context.emit("commit.failed", f"step {identity.version.step} was not committed: {error}", True)
        elif self._exports is not None:
            self._exports.note_commit(identity)
        if not error or (not is_cancelled and _may_be_full(failure)):
            self.prune()

    def _check_superseded(self, failure: BaseException | None, error: str) -> None:
        """If the store has shown that a newer start owns the run, nothing more is committed."""
        if isinstance(failure, Superseded):
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
            self._exports = Exports(rule, self._export, self._context.spawn, self._context.emit)

    async def _export(self, rule: ExportRule, identity: Identity, is_wanted: bool) -> bool:
        return await self._context.run_on(Lane.EXPORT, lambda: self._store.export(rule, identity, is_wanted))

    def prune(self) -> None:
        """Prunes the store by the user's rule, if there is one."""
        context, keep = self._context, self._context.options.keep
        if keep != Keep() and not context.scheduler.facts.superseded_by and self._store.is_claimed(context.epoch):
            self.pending_prunes += 1
            context.spawn(self._prune(keep))

    async def _prune(self, keep: Keep) -> None:
        context = self._context
        try:
            await context.run_on(Lane.COMMIT, lambda: self._store.prune(context.epoch, keep))
        except CkptError as exc:
            context.emit("prune.failed", f"old checkpoints could not be pruned now: {error_text(exc)}", True)
        finally:
            self.pending_prunes -= 1

    def report_newest_stored(self, claim: Claim) -> None:
        """Shows the newest checkpoint in the store of this epoch or its ancestors: this agent has committed none."""
        # Now: the answer may come within this turn, before the account hears of the job.
        parent = claim.parent.version if claim.parent is not None else None
        self._context.services.account.adopt_epoch(claim.epoch, parent)
        self._context.spawn(self._show_newest_stored(claim))

    async def _show_newest_stored(self, claim: Claim) -> None:
        def find() -> Identity | None:
            line = find_candidates(self._store.open_run(impatient=True).view(), [MemoryEpoch(claim, ())])
            return next((each.identity for each in line if each.records and each.identity.epoch <= claim.epoch), None)

        try:
            identity = await self._context.run_on(Lane.STORE, find)
        except CkptError as exc:
            log.warning("what the store has is not known now, and is shown once something is committed: %s", exc)
            return
        if identity is not None:
            self._context.services.account.record_level("store", identity.epoch, identity.version)

    # -- the epoch

    def begin_epoch(self, claim: Claim) -> None:
        """Puts the claim into the store, and heartbeats from now on."""
        self._is_claiming = True
        self._context.spawn(self._put_claim(claim))
        self._context.spawn(self._put_heartbeats())

    async def _put_claim(self, claim: Claim) -> None:
        failure = None
        try:
            await self._context.work_on(Lane.STORE, lambda: self._store.claim(claim))
        except Exception as exc:
            failure = exc
        self._is_claiming = False
        if self._pending_close_reason:
            self.close_epoch(self._pending_close_reason)
        error = error_text(failure)
        self._check_superseded(failure, error)
        if error and not isinstance(failure, Superseded):
            message = f"the store did not take the claim of this start, which is tried again before a commit: {error}"
            self._context.emit("claim.postponed", message, True)

    async def _put_heartbeats(self) -> None:
        """Puts heartbeats into the store as long as the epoch is alive. The next one waits for the last: a slow store
        would only get several that say the same."""
        context, facts = self._context, self._context.scheduler.facts
        for count in itertools.count(1):
            await sleep(context.call_later, context.services.heartbeat_s)
            if context.is_dropped or context.internal_error or facts.all_gone or facts.superseded_by:
                return
            try:
                await context.work_on(Lane.STORE, functools.partial(self._store.heartbeat, context.epoch, count))
            except Exception as exc:
                self._check_superseded(exc, error_text(exc))
                log.info("no heartbeat: %s", error_text(exc))

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
        context.spawn(self._close(reason))

    async def _close(self, reason: str) -> None:
        context = self._context
        try:
            await context.run_on(Lane.STORE, lambda: self._store.close_epoch(context.epoch, reason))
        except CkptError as exc:
            log.warning("epoch %s could not be closed in the store: %s", context.epoch, exc)
        context.scheduler.leave_requests.record_close()


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
