"""The memory lease: decides to which job a memory-only node lends, and when the node commits its replicas by itself.
Pure: no I/O, no clock of its own.

- The node lends to one job at a time. A job of another launch waits until the former coordinator is gone, unless it
  takes over. From a start's survey until it names its epoch, no replica is accepted: the inventory stays as listed.
- An epoch older than one that was lent to is never lent to again.
- The node commits only after no coordinator was connected for a while: a connected one may still commit by itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.errors import AgentError, Superseded
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim

RETRY_S = 30.0  # pause after a failed commit, doubled each time up to RETRY_S_MAX
RETRY_S_MAX = 600.0


class MemoryLease:
    """The lease of one node. `coordinator`: the agent that coordinates the job lent to, now or last; `is_connected`:
    whether it is. `launch`, `epoch`: of that job; `epoch` is None until one has begun. `terms`: by epoch, what a commit
    needs. `alone_since_s`: since when no coordinator is connected."""

    def __init__(self, commit_after_s: float, now_s: float) -> None:
        """`commit_after_s`: this node commits once no coordinator was connected for so long."""
        self.coordinator = ""
        self.launch = ""
        self.is_connected = False
        self.epoch: Epoch | None = None
        self.terms: dict[Epoch, CommitTerms] = {}
        self.alone_since_s = now_s
        self._commit_after_s = commit_after_s
        self._newest_epoch: Epoch | None = None  # the newest ever lent to
        self._settled_identity: Identity | None = None  # the checkpoint after whose attempt nothing is left to commit
        self._retry_s = -math.inf
        self._failures = 0

    # -- what coordinators say

    def lease_for_start(self, name: str, launch: str, take_over: bool) -> str:
        """The start of agent `name` surveys this node. Returns "", or the launch that holds the lease."""
        if self.is_connected and name != self.coordinator and launch != self.launch and not take_over:
            return self.launch or "another one"
        self.coordinator, self.launch, self.is_connected, self.epoch = name, launch, True, None
        return ""

    def borrow(self, name: str, terms: CommitTerms) -> str:
        """The job of agent `name` borrows: its epoch has begun, or its coordinator is back. Returns as
        `lease_for_start`. Errors: Superseded by a newer epoch."""
        epoch = terms.claim.epoch
        if self.is_connected and name != self.coordinator:
            return self.launch or "another one"
        if self._newest_epoch is not None and epoch < self._newest_epoch:
            raise Superseded(f"{epoch} was superseded by {self._newest_epoch}, to which this node lends")
        self.coordinator, self.launch, self.is_connected, self.epoch = name, terms.claim.launch, True, epoch
        self.terms[epoch] = terms
        self._newest_epoch = epoch
        return ""

    def check(self, name: str, identity: Identity) -> None:
        """Errors: AgentError if agent `name` may not have replicas of that checkpoint kept here."""
        if not self.is_connected or name != self.coordinator or identity.epoch != self.epoch:
            raise AgentError(f"this node does not lend to {identity.epoch} now")

    def on_coordinator_lost(self, name: str, now_s: float) -> None:
        """The connection to that agent has ended: the wait before a commit begins."""
        if self.is_connected and name == self.coordinator:
            self.is_connected = False
            self.alone_since_s = now_s
            self._settled_identity = None  # newer replicas may have come
            self._retry_s = -math.inf

    # -- what follows

    @property
    def claim(self) -> Claim | None:
        """The claim of the epoch that is lent to."""
        terms = self.terms.get(self.epoch) if self.epoch is not None else None
        return terms.claim if terms is not None else None

    def drop_old_terms(self, held: set[Epoch]) -> None:
        """Forgets the terms of epochs that are not in `held`, but for the newest one."""
        for epoch in [epoch for epoch in self.terms if epoch not in held and epoch != self._newest_epoch]:
            del self.terms[epoch]

    def commit_due_s(self, newest: Identity | None) -> float | None:
        """When the commit of `newest`, the newest checkpoint kept here, is due; None: not as things are."""
        if newest is None or self.is_connected or newest == self._settled_identity:
            return None
        return max(self.alone_since_s + self._commit_after_s, self._retry_s)

    def record_commit_attempt(self, newest: Identity, settled: bool, now_s: float) -> None:
        """An attempt to commit `newest` has ended. `settled`: nothing is left to commit; else it is retried."""
        self._failures = 0 if settled else self._failures + 1
        if settled:
            self._settled_identity = newest
        else:
            self._retry_s = now_s + min(RETRY_S * 2 ** min(self._failures - 1, 16), RETRY_S_MAX)
