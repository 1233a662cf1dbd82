"""Re-replication: the coordinator restores the replication target of the checkpoint that a job was restored from.

After nodes were lost, that checkpoint lies on fewer nodes than the user asked for. Until a newer checkpoint is
replicated, one more loss could destroy it. So it is replicated again at once, in attempts:

1. A survey of the job's nodes and the memory-only nodes tells who holds which snapshot (survey.py). A node that does
   not answer counts as empty if the others have everything. Otherwise all are asked again later.
2. Snapshots that only parity has are rebuilt (rebuild.py); a new survey follows. Else the missing copies are planned
   (placement/rereplication.py) and made (replicate.py).
3. The next attempt follows, after a failure later, until a plan is empty. A node that comes or goes begins anew.

The restart of the coordinator's agent needs nothing else: the new agent begins with a survey. Nothing is evicted for
it, and nothing waits for it. A source that fails is asked again only if no other node has the snapshot. It counts as a
holder no more once another source has given the snapshot. Main thread only.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replicate import Assignment, Replication
from ckpt.agent.replication.survey import survey_nodes
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.placement.groups import PlacementNode
from ckpt.placement.rereplication import plan_rereplication
from ckpt.types import Identity, format_count

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.node_list import NodeAt

log = logging.getLogger("ckpt")

RETRY_S_MAX = 60.0
TRANSFERS_SHOWN = 64  # copies listed in an event

# (name, message, is_warning, data): see JobContext.emit.
Emit = Callable[[str, str, bool, dict[str, Any]], None]


def retry_delay_s(failures: int) -> float:
    """Seconds to wait before the next attempt, after so many failures."""
    return min(2.0 ** min(failures, 16), RETRY_S_MAX)


class Rereplication:
    """The re-replication of one checkpoint, `identity`. `nodes`: of the job, and memory-only ones. `own`: this node's
    inventory. `rebuild(inventory, then)`: rebuilds what no node holds; `then` hears "" or the error. `guard`: runs a
    function of the job. `later(delay_s, what)`: a timer. `report(is_safe)`: hears whether the checkpoint meets the
    replication target now."""

    def __init__(
        self,
        network: PeerNetwork,
        copies: ReplicaStore,
        service: ReplicaService,
        identity: Identity,
        nodes: Callable[[], Sequence[NodeAt]],
        own: Callable[[], Inventory],
        rebuild: Callable[[Inventory, Callable[[str], None]], None],
        guard: Callable[[Callable[[], None]], None],
        later: Callable[[float, Callable[[], None]], object],
        emit: Emit,
        report: Callable[[bool], None],
    ) -> None:
        self.identity = identity
        self._network, self._replicas, self._service = network, copies, service
        self._get_nodes, self._get_own, self._rebuild = nodes, own, rebuild
        self._guard, self._call_later, self._emit, self._report_replicated = guard, later, emit, report
        self._replication: Replication | None = None  # the copies under way
        self._failures_by_source: Counter[tuple[int, str]] = Counter()  # (rank, source) -> failed copies
        self._unreliable_holders: set[tuple[int, str]] = set()  # (rank, holder) of snapshots that count no more
        self._short_ranks: tuple[int, ...] = ()  # ranks reported to lack memory for copies
        self._last_action: object = None  # the ranks that the last attempt rebuilt, or the copies that it made
        self._is_running = self._is_stale = self._is_settled = self._is_ended = False
        self._next_attempt_s = -math.inf
        self._failed_attempts = 0

    @property
    def is_copying(self) -> bool:
        return self._replication is not None

    @property
    def is_due(self) -> bool:
        """Whether `begin_attempt` is to be called now."""
        is_idle = not (self._is_running or self._is_settled or self._is_ended)
        return is_idle and time.monotonic() >= self._next_attempt_s

    def begin_attempt(self, lends: Mapping[str, int], copies: int) -> None:
        """Begins an attempt, when it is due. `lends`: node -> bytes lent. `copies`: how many beside the original."""
        self._is_running, self._is_stale = True, False
        nodes = self._get_nodes()

        def surveyed(found: Mapping[str, Inventory], silent: Sequence[str]) -> None:
            held = Inventory()
            for name, theirs in {"": self._get_own(), **found}.items():
                held.merge(theirs, name)
            if self._is_ended:
                return
            if self._is_stale:
                self._end_attempt()
            elif self.identity not in held.complete_checkpoints():
                if silent:
                    log.warning("%s is not whole on the nodes that answer", self.identity)
                    self._end_attempt("nodes that may have a part of it have not answered")
                else:
                    log.info("%s is not whole in memory any more", self.identity)
                    self._is_running, self._is_settled = False, True
            elif missing := held.missing_ranks(self.identity):
                if not self._is_in_vain(missing):
                    self._rebuild(held, self._end_attempt)
            else:
                self._copy(held, nodes, lends, copies)

        survey_nodes(self._network, nodes, surveyed, guard=self._guard)

    def survey_again(self) -> None:
        """A node has come or gone: begins anew."""
        self._is_stale, self._is_settled, self._next_attempt_s = self._is_running, False, -math.inf
        self._last_action = None

    def end(self) -> None:
        """Ends the re-replication; later answers are ignored."""
        self._is_ended = True
        if self._replication is not None:
            self._replication.withdraw()

    # -- inside

    def _copy(self, held: Inventory, nodes: Sequence[NodeAt], lends: Mapping[str, int], copies: int) -> None:
        me, intact = self._network.agent_name, held.parity_protected_ranks(self.identity, copies)
        holders: dict[int, list[str]] = {}
        for rank, names in held.holders_by_rank(self.identity).items():
            named = [name or me for name in names]
            if rank not in intact:
                holders[rank] = [name for name in named if (rank, name) not in self._unreliable_holders] or named
        sizes = {rank: held.arena_bytes.get((self.identity, rank), 0) for rank in holders}
        places = [
            PlacementNode(
                node.name, lend_bytes=lends.get(node.name, 0), domains=node.domains, has_state=bool(node.ranks)
            )
            for node in nodes
        ]
        plan = plan_rereplication(holders, sizes, places, copies, self._failures_by_source)
        if plan.short_ranks and plan.short_ranks != self._short_ranks:
            ranks = format_count(len(plan.short_ranks), "rank")
            text = f"{ranks} of step {self.identity.version.step} on fewer nodes than was asked for"
            self._emit(
                "replication.short", f"{text}: too little memory is left", True, {"ranks": list(plan.short_ranks[:100])}
            )
        self._short_ranks = plan.short_ranks
        self._report_replicated(not (plan.replicas or plan.short_ranks))
        if not plan.replicas:
            self._is_running, self._is_settled = False, True
            return
        if self._is_in_vain(plan.replicas):
            return
        began_s = time.monotonic()
        assignments = [Assignment(copy.holder, {copy.source: copy.ranks}) for copy in plan.replicas]
        then = lambda error: self._on_copied(assignments, sizes, error, began_s)  # noqa: E731
        services = self._network, self._replicas, self._service, nodes
        self._replication = Replication(*services, self.identity, assignments, then, evicts=False)
        self._replication.begin()

    def _on_copied(
        self, assignments: Sequence[Assignment], sizes: Mapping[int, int], error: str, began_s: float
    ) -> None:
        replication, self._replication = self._replication, None
        if self._is_ended or replication is None:
            return
        made: list[tuple[str, str, list[int]]] = []
        for each in assignments:
            ((source, ranks),) = each.ranks_by_source.items()
            if each in replication.errors:
                self._failures_by_source.update((rank, source) for rank in ranks)
                continue
            made.append((source, each.holder, list(ranks)))
            for rank, name in [key for key in self._failures_by_source if key[0] in ranks]:
                del self._failures_by_source[rank, name]
                self._unreliable_holders.update([(rank, name)] if name != source else [])
            self._unreliable_holders.difference_update((rank, each.holder) for rank in ranks)
        step, seconds = self.identity.version.step, time.monotonic() - began_s
        count = sum(sizes[rank] for *_, ranks in made for rank in ranks)
        facts = {
            "identity": str(self.identity),
            "copies": [[source, holder, ranks[:100]] for source, holder, ranks in made[:TRANSFERS_SHOWN]],
            "bytes": count,
            "seconds": seconds,
        }
        if error:
            text = f"step {step} has lost copies, and not all are made again: {error}"
            self._emit("replication.failed", text, True, facts)
        else:
            text = f"step {step} had lost copies: {count >> 20:,} MiB are in other nodes' memory again"
            self._emit("replica.restored", f"{text} after {seconds:.2f} s", False, facts)
        self._end_attempt(error)

    def _is_in_vain(self, action: object) -> bool:
        """Whether the last attempt did the same, without a lasting effect. The attempt ends then, and is made later."""
        is_repeated, self._last_action = action == self._last_action, action
        if is_repeated:
            log.warning("replicas of %s did not stay where they were made", self.identity)
            self._end_attempt("replicas did not stay where they were made")
        return is_repeated

    def _end_attempt(self, error: str = "") -> None:
        """The next attempt is due: now, or after `error` later."""
        self._is_running = False
        if error:
            self._failed_attempts, self._last_action = self._failed_attempts + 1, None
            again_s = retry_delay_s(self._failed_attempts)
            self._next_attempt_s = time.monotonic() + again_s if not self._is_stale else -math.inf
            self._call_later(again_s, lambda: None)  # wakes the event loop, which calls `begin_attempt`
