"""To whom a memory-only node lends, and what follows from that: whose copies it takes, what of older ones may go, and
when it commits by itself what it keeps. Pure: no I/O, no clock of its own.

- It lends to one job at a time. A job of another launch waits until the coordinator of the one before is gone, unless
  it takes over. From a start's question until its word which epoch it has begun nothing is taken from anybody: what
  was listed for it stays as it is.
- An epoch older than one that was lent to is never lent to again.
- It commits only while no coordinator is connected, and has not been for a while: what such a one has not committed
  yet it may still commit itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.errors import AgentError, Superseded
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim

RETRY_S = 30.0  # until a commit that failed is tried again, doubled each time up to RETRY_S_MAX
RETRY_S_MAX = 600.0


class MemoryLease:
    """`leader`: the name of the agent that coordinates the job that is lent to, or was; `connected`: whether it is
    there. `epoch`: of that job, None until it has begun one. `terms`: by epoch. `alone_s`: since when nobody is there.
    """

    def __init__(self, commit_after_s: float, now_s: float) -> None:
        """`commit_after_s`: how long nobody may be there until this node commits."""
        self.leader = ""
        self.launch = ""
        self.connected = False
        self.epoch: Epoch | None = None
        self.terms: dict[Epoch, CommitTerms] = {}
        self.alone_s = now_s
        self._commit_after_s = commit_after_s
        self._newest: Epoch | None = None  # that was ever lent to
        self._settled: Identity | None = None  # of which nothing more is to be done
        self._retry_s = -math.inf
        self._failures = 0

    # -- what coordinators say

    def start(self, name: str, launch: str, take_over: bool) -> str:
        """A start asks what lies here. Returns "", or the launch that is in its way."""
        if self.connected and name != self.leader and launch != self.launch and not take_over:
            return self.launch or "another one"
        self.leader, self.launch, self.connected, self.epoch = name, launch, True, None
        return ""

    def borrow(self, name: str, terms: CommitTerms) -> str:
        """An epoch has begun, or its coordinator is back. Returns as `start`. Errors: Superseded."""
        epoch = terms.claim.epoch
        if self.connected and name != self.leader:
            return self.launch or "another one"
        if self._newest is not None and epoch < self._newest:
            raise Superseded(f"{epoch} was superseded by {self._newest}, to which this node lends")
        self.leader, self.launch, self.connected, self.epoch = name, terms.claim.launch, True, epoch
        self.terms[epoch] = terms
        self._newest = epoch
        return ""

    def check(self, name: str, identity: Identity) -> None:
        """Whether copies of that checkpoint may be brought by that agent. Errors: AgentError."""
        if not self.connected or name != self.leader or identity.epoch != self.epoch:
            raise AgentError(f"this node does not lend to {identity.epoch} now")

    def gone(self, name: str, now_s: float) -> None:
        """The connection to that agent has ended."""
        if self.connected and name == self.leader:
            self.connected = False
            self.alone_s = now_s
            self._settled = None  # more may have come
            self._retry_s = -math.inf

    # -- what follows

    @property
    def claim(self) -> Claim | None:
        """Of the epoch that is lent to."""
        terms = self.terms.get(self.epoch) if self.epoch is not None else None
        return terms.claim if terms is not None else None

    def keep_terms(self, held: set[Epoch]) -> None:
        """Those of epochs of which nothing is held any more are forgotten."""
        for epoch in [epoch for epoch in self.terms if epoch not in held and epoch != self._newest]:
            del self.terms[epoch]

    def due_s(self, newest: Identity | None) -> float | None:
        """When `newest`, of what is kept as a whole, is to be committed from here; None: not as things are."""
        if newest is None or self.connected or newest == self._settled:
            return None
        return max(self.alone_s + self._commit_after_s, self._retry_s)

    def tried(self, newest: Identity, settled: bool, now_s: float) -> None:
        """An attempt for `newest` has ended. `settled`: it is committed, or nothing newer than what is can be."""
        self._failures = 0 if settled else self._failures + 1
        if settled:
            self._settled = newest
        else:
            self._retry_s = now_s + min(RETRY_S * 2 ** min(self._failures - 1, 16), RETRY_S_MAX)
