"""The leases of a node. Pure: no clock of their own.

The inventory lease decides which agent may have something dropped on this node, during surveys and after them:

- A start that surveys this node holds a lease from the answer until its outcome. Nothing that was listed is dropped:
  drop requests for every epoch known by then are refused, also those of this agent's own jobs.
- Once the start has begun its epoch, that epoch decides. Drop requests for older epochs are refused for good, and
  leases of starts that surveyed before it end.
- A node that commits orphaned checkpoints surveys as a start does, and begins no epoch. Its lease gives way to every
  start: it is refused while a start holds a lease, and ends when a start takes one.
- A start that comes to nothing says so. A lease whose holder has not been connected for LEASE_TIMEOUT_S ends: then
  requests for the epochs before it count again. The end of a lease frees nothing by itself.
- An epoch that has begun is known here, even if it is not in the store: the next start takes a larger one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.errors import AgentError, Superseded
from ckpt.types import OWN_NODE, Epoch

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim

# A lost connection is noticed up to 25 s late; from then on that coordinator fetches nothing from here.
LEASE_TIMEOUT_S = 60.0
EPOCH_GAP_MAX = 10_000  # successive starts of the run that a node may not have heard of


@dataclass(slots=True)
class _Lease:
    """One lease. `newest_epoch`: the newest epoch known here at the survey. `is_for_orphans`: held to commit orphaned
    checkpoints, not by a start. `expiry`: identifies the timer that ends it; None: its holder is connected."""

    newest_epoch: Epoch
    is_for_orphans: bool
    expiry: object = None


class InventoryLease:
    """The leases on one node's inventory, by the name of the agent that holds each; this agent is OWN_NODE."""

    def __init__(self, later: Callable[[float, Callable[[], None]], None]) -> None:
        """`later`: calls a function after so many seconds."""
        self.epoch_floor = Epoch(0, "0" * 16)  # requests for older epochs are refused for good
        self._leases_by_agent: dict[str, _Lease] = {}  # oldest first
        self._call_later = later

    @property
    def is_held(self) -> bool:
        """Whether any lease stands."""
        return bool(self._leases_by_agent)

    def take_lease(self, by: str, newest: Epoch, for_orphans: bool = False) -> None:
        """Agent `by` surveys this node for its start, and takes a lease. `newest`: the newest epoch known here.
        `for_orphans`: the survey is for an orphan commit. Errors: AgentError if an orphan commit has to give way
        to a start."""
        starts = {name: each for name, each in self._leases_by_agent.items() if not each.is_for_orphans}
        if for_orphans and starts:
            raise AgentError("a start has asked what lies here, and its outcome is not known")
        self._leases_by_agent = self._leases_by_agent if for_orphans else starts
        self._leases_by_agent.pop(by, None)
        self._leases_by_agent[by] = _Lease(newest, for_orphans)

    def has_lease(self, by: str) -> bool:
        """Whether that agent holds a lease."""
        return by in self._leases_by_agent

    def on_epoch_begun(self, by: str, epoch: Epoch) -> bool:
        """The start of agent `by` has begun `epoch`: ends its lease and all older ones. False, without effect, if the
        agent holds no lease or the epoch was known at its survey."""
        if by not in self._leases_by_agent or epoch <= self._leases_by_agent[by].newest_epoch:
            return False
        names = list(self._leases_by_agent)
        for name in names[: names.index(by) + 1]:
            del self._leases_by_agent[name]
        self.epoch_floor = max(self.epoch_floor, epoch)
        return True

    def end_lease(self, by: str) -> None:
        """The start of that agent came to nothing: ends its lease."""
        self._leases_by_agent.pop(by, None)

    def on_holder_lost(self, by: str) -> None:
        """That agent is not connected any more."""
        lease = self._leases_by_agent.get(by)
        if lease is not None and lease.expiry is None:
            expiry = lease.expiry = object()
            self._call_later(LEASE_TIMEOUT_S, lambda: self._expire(by, expiry))

    def on_holder_connected(self, by: str) -> None:
        """That agent is connected."""
        if by in self._leases_by_agent:
            self._leases_by_agent[by].expiry = None

    def _expire(self, by: str, expiry: object) -> None:
        if by in self._leases_by_agent and self._leases_by_agent[by].expiry is expiry:
            del self._leases_by_agent[by]

    def refusal(self, by: str, epoch: Epoch) -> str:
        """Why agent `by` may not drop or overwrite anything for that epoch now; "" if it may."""
        if epoch < self.epoch_floor:
            return f"{epoch} decides nothing any more: {self.epoch_floor} has begun"
        if not self.is_held:
            return ""
        last, each = next(reversed(self._leases_by_agent.items()))
        if by == last and epoch > each.newest_epoch:
            return ""  # the epoch that its start begins
        who = f"of agent {last}" if last != OWN_NODE else "on this node"
        what = f"a start {who} has asked what lies here, and its outcome is not known"
        return f"nothing is dropped for {epoch} now: {what}"

    def check(self, by: str, epoch: Epoch) -> None:
        """Errors: AgentError with the text of `refusal`, if there is one."""
        if why := self.refusal(by, epoch):
            raise AgentError(why)


class MemoryLease:
    """Decides to which job a memory-only node lends.

    - The node lends to one job at a time. A job of another launch waits until the former coordinator is gone, unless it
      takes over. What a start's survey has listed stays by the inventory lease.
    - An epoch older than one that was lent to is never lent to again.

    `coordinator`: the agent that coordinates the job lent to, now or last; `is_connected`: whether it is. `launch`,
    `epoch`: of that job; `epoch` is None until one has begun. `terms`: by epoch, what a commit needs. `memory_bytes`:
    the most memory that is lent."""

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
