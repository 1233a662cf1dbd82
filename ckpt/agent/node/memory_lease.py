"""The memory lease: decides to which job a memory-only node lends. Pure: no I/O, no clock.

- The node lends to one job at a time. A job of another launch waits until the former coordinator is gone, unless it
  takes over. What a start's survey has listed stays by the inventory lease.
- An epoch older than one that was lent to is never lent to again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.errors import Superseded
from ckpt.types import Epoch

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim


class MemoryLease:
    """The lease of one node. `coordinator`: the agent that coordinates the job lent to, now or last; `is_connected`:
    whether it is. `launch`, `epoch`: of that job; `epoch` is None until one has begun. `terms`: by epoch, what a commit
    needs. `memory_bytes`: the most memory that is lent."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.coordinator = ""
        self.launch = ""
        self.is_connected = False
        self.epoch: Epoch | None = None
        self.terms: dict[Epoch, CommitTerms] = {}

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
        if epoch < (newest := max(self.terms, default=epoch)):
            raise Superseded(f"{epoch} was superseded by {newest}, to which this node lends")
        self.coordinator, self.launch, self.is_connected, self.epoch = name, terms.claim.launch, True, epoch
        self.terms[epoch] = terms
        return ""

    def is_coordinator(self, name: str, epoch: Epoch | None = None) -> bool:
        """Whether agent `name` coordinates the job that is lent to, and in that epoch if one is named."""
        return name == self.coordinator and epoch in (self.epoch, None)

    def on_coordinator_lost(self, name: str) -> None:
        """That agent is not connected any more, or its job does not need the memory now."""
        if name == self.coordinator:
            self.is_connected = False

    @property
    def claim(self) -> Claim | None:
        """The claim of the epoch that is lent to."""
        terms = self.terms.get(self.epoch) if self.epoch is not None else None
        return terms.claim if terms is not None else None

    def drop_old_terms(self, held: set[Epoch]) -> None:
        """Forgets the terms of epochs that are not in `held`, but for the newest one."""
        newest = max(self.terms, default=None)
        self.terms = {epoch: each for epoch, each in self.terms.items() if epoch in held or epoch == newest}
