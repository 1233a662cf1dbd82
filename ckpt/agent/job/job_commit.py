"""The store side of a job: its claim, its heartbeats, its commits, and the end of its epoch.

Everything runs on the agent's main thread. Slow work goes to a lane of `Workers` and returns as a fact for the
scheduler.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.agent.commit.distributed_write import DistributedWrite, Then, write_part
from ckpt.agent.commit.orphan_commit import check_due
from ckpt.agent.job.job_context import JobContext
from ckpt.agent.replication.rebuild import UNWANTED
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import RemoteShare, WantedPart
from ckpt.agent.state.cost_model import ABOUT
from ckpt.agent.state.job_facts import Store
from ckpt.errors import Superseded, TransientError, Unsettled
from ckpt.ipc.arena import Arena
from ckpt.policy.save_options import Keep
from ckpt.types import Identity, counted

if TYPE_CHECKING:
    from ckpt.store.commit import Committed
    from ckpt.store.lineage import Claim
    from ckpt.store.packs import Written

log = logging.getLogger("ckpt")


class JobCommits(JobContext):
    """A job's part in the store. With several nodes, each node writes the frames that it holds."""

    _claiming = False  # the claim is being put
    _closing = ""  # the reason to close the epoch once the claim has settled
    _parts: DistributedWrite | None = None  # of the newest commit, with several nodes
    _cancel: threading.Event | None = None  # of the newest commit
    _beats = 0
    _beating = False
    _prunes = 0  # prunes under way

    def _commit(self, slot: int) -> None:
        checkpoint, claim, store = self.checkpoints[slot], self.claim, self._services.store
        assert claim is not None  # nothing is appointed before the claim is known
        options = self.options
        about: dict[str, Any] = {
            "host": socket.gethostname(),
            "launch": self.launch,
            "world": self.world,
            "time_s": time.time(),
            "disagreed": list(checkpoint.disagreed[:100]),
        }
        if self.learning is not None:
            self.learning.commit_began(self._entered_s(), self.ranks.hindmost())
            about[ABOUT] = self.learning.about(self._services.foreseen())
        ranks, left_over = self.ranks, bool(self.group.superseded_by)
        kept = self.protection is not None and self.protection.protects
        elsewhere: DistributedWrite | None = None
        self._cancel = cancel = threading.Event()
        self._parts = None
        if isinstance(ranks, AllShares) and (kept or ranks.others):  # else only this node has any of it
            elsewhere = self._elsewhere(slot, checkpoint, ranks)
        self._tell_commits(checkpoint.identity)

        def commit() -> Committed:
            if left_over:  # a newer start may have passed over this checkpoint
                check_due(store, claim, checkpoint.identity)
            return store.commit(claim, checkpoint, options, about, elsewhere, cancel)

        self._run(Lane.COMMIT, commit, lambda done: self._committed(slot, checkpoint.identity, done))

    def _tell_commits(self, identity: Identity | None) -> None:
        """Tells the other nodes which commit is under way, so that they keep their parts of it; None: it is over. A
        long commit may ask for their parts late."""
        if isinstance(self.ranks, AllShares):
            for share in self.ranks.others.values():
                share.tell({"t": "commits", "identity": str(identity) if identity is not None else None})

    def _elsewhere(self, slot: int, checkpoint: MemoryCheckpoint, nodes: AllShares) -> DistributedWrite:
        """The distributed write of this commit: each node writes its own frames, or a holder of replicas writes or
        rebuilds them. A node without a verified replica refuses, and the next one is asked."""
        round_ = self.group.slots[slot].round

        def safe() -> bool | None:
            peer = round_.peer if round_ is not None else None
            return None if peer is Store.RUNNING else peer is Store.DONE

        def others(name: str, slow: bool) -> list[str]:
            return self.protection.others(checkpoint.identity, name, slow) if self.protection is not None else []

        server, margin_s = self._services.server, self._services.heartbeat_s
        ask = functools.partial(self._have_written, checkpoint.arenas)
        # Without this node: once it is gone, nothing waits for any part.
        spared = self.group.left_to_others - {""}
        services = ask, server.post, server.later, margin_s
        ranks = nodes.ranks_by_node
        self._parts = DistributedWrite(checkpoint, self.options, ranks, others, *services, spared=spared, safe=safe)
        return self._parts

    def abandon_commit(self) -> None:
        """Abandons the distributed write, since the agent ends: its results are not handled any more, and the
        committing thread must not wait for them."""
        if self._parts is not None:
            self._parts.abandon("the agent ends")

    def _give_up_commit(self) -> None:
        """Cancels the running commit, here and on other nodes."""
        if self._cancel is not None:
            self._cancel.set()
        network, slot = self._services.network(), self.group.committing
        if self._parts is None or network is None or slot is None:
            return
        identity = str(self.checkpoints[slot].identity)
        for name in self._parts.give_up():
            network.tell(name, {"t": "unwrite", "identity": identity})

    def _have_written(
        self,
        own: Mapping[int, Arena],
        name: str,
        wanted: WantedPart,
        slow: frozenset[str],
        cancel: threading.Event,
        then: Then,
    ) -> None:
        """Has the part written by its own node, or by another one from a replica or by a rebuild. `own`: the arenas of
        this node's ranks. Other parameters: see distributed_write.Ask."""
        owners = {self.ranks.node_of(rank) for rank in np.unique(wanted.ranks).tolist()}
        if not name and name in owners:
            self._write(Lane.PART, wanted, own, cancel, then)
            return
        if self.protection is None or name in owners:
            self._have_copies_written(name, wanted, cancel, then)
            return

        def made(holder: str, error: str) -> None:
            if error or cancel.is_set():
                then(None, error or UNWANTED)
            else:
                self._have_copies_written(holder, wanted, cancel, then)

        (owner,) = owners
        self.protection.remake(wanted.identity, owner, name, slow, cancel.is_set, self._guarded(made))

    def _have_copies_written(self, name: str, wanted: WantedPart, cancel: threading.Event, then: Then) -> None:
        nodes, copies = self.ranks, self._services.copies
        if isinstance(nodes, AllShares) and name in nodes.others:
            nodes.others[name].write(wanted, then)
            return
        network = self._services.network()
        if name and network is not None:  # a memory-only node
            RemoteShare(network, name, self.epoch, self.world, ()).write(wanted, then)
            return
        held = copies.of(wanted.identity) if copies is not None else {}
        if copies is None or not set(np.unique(wanted.ranks).tolist()) <= held.keys():
            then(None, "it has no copies of them")
            return

        def written(result: Written | None, error: str) -> None:
            copies.release(wanted.identity)
            then(result, error)

        copies.lease(wanted.identity)  # a newer checkpoint may be replicated meanwhile
        self._write(Lane.MEMORY, wanted, held, cancel, written)

    def _write(
        self, lane: Lane, wanted: WantedPart, arenas: Mapping[int, Arena], cancel: threading.Event, then: Then
    ) -> None:
        """Writes the part from this node. It must not use the COMMIT lane, which waits for it."""

        def written(done: Future[Written]) -> None:
            then(None if failure(done) else done.result(), failure(done))

        store = self._services.store
        self._run(lane, lambda: write_part(store, wanted, arenas, cancel=cancel), written)

    def _committed(self, slot: int, identity: Identity, done: Future[Committed]) -> None:
        error = failure(done)
        self._tell_commits(None)
        if isinstance(done.exception(), Superseded):
            self.supersede(error)
            self.group.give_up()
        # Reported before any waiting rank goes on, since that rank's run report counts it.
        if not error:
            self._tell_committed(identity, done.result())
        now_s = time.monotonic()
        self.group.committed(slot, error, now_s, passes=_passes(done.exception()))
        if self.learning is not None:
            took = None if error else (done.result().seconds, done.result().stored_bytes)
            self.learning.commit_ended(self._entered_s(), self.ranks.hindmost(), took)
            self.follow_learning()
        round_ = self.group.slots[slot].round
        if error and round_ is not None and round_.gave_way:
            self.emit("commit.given_up", f"step {identity.tick.step} was not committed: {round_.gave_way}", True)
            return
        if error:
            self._services.account.commit_failed()
            self.emit("commit.failed", f"step {identity.tick.step} was not committed: {error}", True)
        if not error or _may_be_full(done.exception()):
            self._prune()

    def _entered_s(self) -> float:
        """When the hindmost rank entered its present step; now, if unknown."""
        since_s = self.ranks.hindmost_since_s()
        return time.monotonic() if since_s is None else since_s

    def _prune(self) -> None:
        keep, store = self.options.keep, self._services.store
        if keep != Keep() and not self.group.superseded_by and store.is_claimed(self.epoch):
            self._prunes += 1
            self._run(Lane.COMMIT, lambda: store.prune(self.epoch, keep), self._pruned)

    def _tell_committed(self, identity: Identity, result: Committed) -> None:
        sizes = result.raw_bytes, result.stored_bytes
        self._services.account.committed(self.epoch, identity.tick, result.seconds, *sizes)
        text = (
            f"step {identity.tick.step} is committed: {result.raw_bytes} bytes, {result.stored_bytes} stored in "
            f"{counted(result.packs, 'pack')}, {result.referred_bytes} unchanged, in {result.seconds:.2f} s"
        )
        facts = {
            "identity": str(identity),
            "raw_bytes": result.raw_bytes,
            "stored_bytes": result.stored_bytes,
            "referred_bytes": result.referred_bytes,
            "seconds": result.seconds,
        }
        self.emit("commit.done", text, data=facts)

    def _pruned(self, done: Future[dict[str, Any]]) -> None:
        self._prunes -= 1
        if error := failure(done):
            self.emit("prune.failed", f"old checkpoints could not be pruned now: {error}", True)

    def _claim(self, claim: Claim) -> None:
        store = self._services.store
        self._claiming = True
        self._run(Lane.STORE, lambda: store.claim(claim), self._claimed)

    def _claimed(self, done: Future[None]) -> None:
        error = failure(done)
        self._claiming = False
        if self._closing:
            self._close(self._closing)
        if isinstance(done.exception(), Superseded):
            self.supersede(error)
            self.group.give_up()
        elif error:
            message = f"the store did not take the claim of this start, which is tried again before a commit: {error}"
            self.emit("claim.postponed", message, True)

    def _beat(self) -> None:
        """Puts heartbeats into the store as long as the epoch is alive."""
        if self._dropped or self.failed or self.group.all_gone or self.group.superseded_by:
            return
        if not self._beating:  # else the store is slow: queued heartbeats would say no more than one
            self._beating = True
            self._beats += 1
            beats, store = self._beats, self._services.store
            self._run(Lane.STORE, lambda: store.heartbeat(self.epoch, beats), self._beaten)
        self._later(self._services.heartbeat_s, self._beat)

    def _beaten(self, done: Future[None]) -> None:
        self._beating = False
        error = failure(done)
        if isinstance(done.exception(), Superseded):
            self.supersede(error)
            self.group.give_up()
        elif error:
            log.info("no heartbeat: %s", error)

    def _close(self, reason: str) -> None:
        """Closes the epoch, after a claim under way has settled: a claim that lands later would leave an epoch open for
        ever."""
        if self._claiming:
            self._closing = reason
            return
        store = self._services.store
        self._run(Lane.STORE, lambda: store.end(self.epoch, reason), self._ended)

    def _ended(self, done: Future[None]) -> None:
        if error := failure(done):
            log.warning("epoch %s could not be closed in the store: %s", self.epoch, error)
        self.group.closed()


def _passes(error: BaseException | None) -> bool:
    """True if the commit failed because the store does not answer just now."""
    while error is not None:
        if isinstance(error, TransientError | Unsettled):
            return True
        error = error.__cause__
    return False


def _may_be_full(error: BaseException | None) -> bool:
    """True if the commit failed for another reason than a store that does not answer, so the store may be full. Stores
    report a full disk in different ways, and another node's error is only a text. A needless prune does no harm."""
    return error is not None and not _passes(error) and not isinstance(error, Superseded)
