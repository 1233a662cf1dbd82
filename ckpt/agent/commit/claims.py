"""The claims of this agent's starts: when a start takes the run, and when it is refused. Thread-safe.

A start may restore for minutes, and another start may claim the run meanwhile. So each start compares its first listing
of the store with later listings:
1. The start lists the store, chooses its checkpoint, and records what it saw (`record_start`).
2. Once it has restored, `claim` lists again. The start is refused if another start has committed since, or is alive.
3. The claim is put, and the store is listed again. Of two starts that claim at once, at least one sees the other. If
   another start has committed, this claim is retracted, and this start is refused.
4. The same check runs once more before the start's first record. From then on only a newer claim ends the start.

A refusal is final. Two kinds of start are not refused: a restart, which has the same launch, and a start with
take_over=True. If such a start passes over checkpoints, an event names the command that goes back to them. The same
event reports checkpoints of the parent's epoch that the store listed late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ckpt.errors import RunInUse, Superseded
from ckpt.events import Events
from ckpt.storage.late import late_listing_cause
from ckpt.storage.names import redact_url
from ckpt.types import Epoch, Identity, format_count

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim, CommitRef
    from ckpt.store.run import Run, RunView


class Claims:
    """The claims of one agent. `run`: opens the run, see StoreClient.run. All epochs here belong to this agent's jobs,
    except those in `passed`."""

    def __init__(self, url: str, run: Callable[[], Run], heartbeat_s: float, events: Events) -> None:
        self.own_epochs: set[Epoch] = set()  # epochs begun by this agent
        self.takeover_epochs: set[Epoch] = set()  # the ones of `own_epochs` that have take_over
        # Epochs of other agents that a start here found to be over, or was told to take over.
        self.replaceable_epochs: set[Epoch] = set()
        self._url = url
        self._open_run = run
        self._heartbeat_s = heartbeat_s
        self._events = events
        self._claim_lock, self._report_lock = threading.Lock(), threading.Lock()
        self._claims_by_epoch: dict[Epoch, Claim] = {}
        self._listed_commits: dict[Epoch, frozenset[Identity]] = {}  # the listing of the newest start
        self._uncommitted_epochs: set[Epoch] = set()  # epochs without a commit
        self.refusal_reasons: dict[Epoch, str] = {}  # with the reason
        self._reported_commits: set[Identity] = set()
        self._has_warned_late = False

    def record_start(self, epoch: Epoch, view: RunView | None, insists: bool) -> None:
        """Records a start of this agent. `view`: what the start chose from; None: the store did not answer. `insists`:
        take_over."""
        self.own_epochs.add(epoch)
        self._uncommitted_epochs.add(epoch)
        self._listed_commits = {
            epoch: frozenset(ref.identity for ref in view.commits) if view is not None else frozenset()
        }
        if insists:
            self.takeover_epochs.add(epoch)

    def is_claimed(self, epoch: Epoch) -> bool:
        return epoch in self._claims_by_epoch

    def forget_claim(self, epoch: Epoch) -> None:
        """The store has lost the claim of this epoch; the next `claim` puts it again."""
        self._claims_by_epoch.pop(epoch, None)

    def record_commit(self, epoch: Epoch) -> None:
        self._uncommitted_epochs.discard(epoch)

    def refuse(self, epoch: Epoch, why: str) -> None:
        """Refuses this epoch for good. A later call does not change the first reason."""
        self.refusal_reasons.setdefault(epoch, why)

    def check_refused(self, epoch: Epoch) -> None:
        """Errors: Superseded if the epoch was refused."""
        if epoch in self.refusal_reasons:
            raise Superseded(self.refusal_reasons[epoch])

    def claim(self, claim: Claim) -> None:
        """Puts the claim, unless it is in the store already. Calls run one at a time, so that the call at entry and the
        one before the first commit watch another start only once.

        Errors: Superseded; StorageError; UsageError."""
        epoch = claim.epoch
        with self._claim_lock:
            self.check_refused(epoch)
            if epoch in self._claims_by_epoch:
                return
            run = self._open_run()
            if epoch not in run.epochs():
                self._listed_commits.setdefault(epoch, frozenset())
                self._check_others(run, claim)
                run.put_claim(claim)
                self._warn_late_listing()
            self._get_checked_view(run, claim)
            self._claims_by_epoch[epoch] = claim

    def check_newer(self, run: Run, epoch: Epoch, epochs: Collection[Epoch]) -> None:
        """Checks for a newer claim. `epochs`: all epochs that are claimed now. Errors: Superseded by a newer epoch of
        another agent. Newer epochs of this agent continue this one, and are no error."""
        if any(each > epoch and each not in self.own_epochs for each in epochs):
            try:
                run.check_not_superseded(epoch)
            except Superseded as exc:
                self.refuse(epoch, str(exc))
                raise

    def check_first(self, epoch: Epoch) -> None:
        """Checks right before the first record whether another start has committed. Errors: Superseded;
        StorageError."""
        if epoch in self._uncommitted_epochs:
            self.check_overlooked(self._open_run(), epoch)

    def check_overlooked(self, run: Run, epoch: Epoch) -> None:
        """Lists the store and reports checkpoints that this start passed over. Errors: Superseded; StorageError."""
        claim = self._claims_by_epoch.get(epoch)
        if claim is not None:
            self._get_checked_view(run, claim)

    def _check_others(self, run: Run, claim: Claim) -> None:
        """Checks the other starts before the claim. Errors: Superseded by a start that has committed or is alive."""
        view = self._get_checked_view(run, claim)
        newest = view.newest_epoch
        if newest is None or newest >= claim.epoch or claim.epoch in self.takeover_epochs:
            # A claim below a newer one is in no branch history: see StoreClient.check.
            return
        if newest in self.own_epochs or newest in self.replaceable_epochs or newest in _ancestry(view, claim):
            return
        try:
            run.check_not_in_use(view, claim.launch, self._heartbeat_s)
        except RunInUse as exc:
            why = f"another start claimed it while {claim.epoch} restored, or could not list it: {exc}"
            self.refuse(claim.epoch, why)
            raise Superseded(why) from exc
        self.replaceable_epochs.add(newest)
        self._get_checked_view(run, claim)

    def _get_checked_view(self, run: Run, claim: Claim) -> RunView:
        """The present view of the store. Errors: Superseded by a newer start, or if another start, unknown to this one,
        has committed. In the second case the claim is retracted, since the next start would otherwise pass over those
        commits."""
        view = run.view()
        if claim.epoch not in self._listed_commits:
            return view  # the start ran in another agent, which has claimed it
        self.check_newer(run, claim.epoch, view.epochs)
        passed = view.overlooked_commits(claim, self._listed_commits[claim.epoch])
        others = [ref for ref in passed if self._is_foreign(view, claim, ref.identity.epoch)]
        if others and claim.epoch in self._uncommitted_epochs and claim.epoch not in self.takeover_epochs:
            why = _refusal_text(view, claim, others)
            self.refuse(claim.epoch, why)
            self._claims_by_epoch.pop(claim.epoch, None)
            if claim.epoch in view.epochs:
                run.delete_claim(claim.epoch)
            raise Superseded(why)
        with self._report_lock:
            new = [ref for ref in passed if ref.identity not in self._reported_commits]
            self._reported_commits.update(ref.identity for ref in new)
        if new:
            self._report_commits(claim, new)
        return view

    def _is_foreign(self, view: RunView, claim: Claim, epoch: Epoch) -> bool:
        """True if the epoch belongs to another job that this job did not continue."""
        known = view.lineage.claims.get(epoch)
        is_restart = known is not None and known.launch == claim.launch
        return not (is_restart or epoch in self.own_epochs or epoch in _ancestry(view, claim))

    def _warn_late_listing(self) -> None:
        """Warns once if a listing of this store may lack what another machine has put."""
        late = late_listing_cause(self._url)
        if late is None or self._has_warned_late:
            return
        self._has_warned_late = True
        text = (
            f"ckpt: {redact_url(self._url)} is on {late}, which may list new checkpoints of other machines up to a "
            "minute "
            "late: this start may have missed the newest one. ckpt looks again while the job trains, and says so where "
            "it finds one. After a restart on another machine see docs/guides/stores.md"
        )
        self._events.emit("store.late", text, loud=True, why=late)

    def _report_commits(self, claim: Claim, passed: Sequence[CommitRef]) -> None:
        newest = passed[-1].identity
        went_on = (
            f"went on from step {claim.parent.version.label}" if claim.parent is not None else "began from nothing"
        )
        url = redact_url(self._url)
        text = (
            f"ckpt: {url} has {format_count(len(passed), 'checkpoint')} that this start did not find in the listing, "
            "or "
            f"that came later. The newest is step {newest.version.label} of epoch {newest.epoch.number}; this job "
            f"{went_on} instead. To go back: stop this job, run ckpt branch {url} --at {newest}, and start again"
        )
        parent = str(claim.parent) if claim.parent is not None else None
        facts = {"newest": str(newest), "count": len(passed), "parent": parent}
        self._events.emit("restore.overlooked", text, loud=True, **facts)


def _ancestry(view: RunView, claim: Claim) -> set[Epoch]:
    """The epoch of the claim, and its ancestors."""
    from ckpt.store.lineage import Lineage

    return {epoch for epoch, _ in Lineage([*view.claims, claim], view.epochs).ancestry(claim.epoch)}


def _refusal_text(view: RunView, claim: Claim, others: Sequence[CommitRef]) -> str:
    newest = others[-1].identity
    known = view.lineage.claims.get(newest.epoch)
    who = f"launch {known.launch!r} on host {known.host!r}" if known is not None else f"epoch {newest.epoch.number}"
    went_on = (
        f"it went on from step {claim.parent.version.label}" if claim.parent is not None else "it began from nothing"
    )
    then = "" if newest.epoch in view.closed_epochs else ", once that job has ended, or now with take_over=True"
    return (
        f"{who} has saved step {newest.version.label} since {claim.epoch} listed the run, and {went_on}. Start again: "
        "the "
        f"start goes on from step {newest.version.label}{then}"
    )
