"""The inventory lease: decides which agent may have something dropped on this node, during surveys and after them.
Pure: no clock of its own.

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

from ckpt.errors import AgentError
from ckpt.types import OWN_NODE, Epoch

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
