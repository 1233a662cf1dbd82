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

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replicate import Assignment, make_replicas
from ckpt.agent.replication.survey import survey
from ckpt.agent.runtime.coroutines import CallLater, Coro, Promise, sleep
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.errors import AgentError, CkptError
from ckpt.placement.groups import PlacementNode
from ckpt.placement.rereplication import Copy, Reprotection, plan_rereplication
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


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted now. `nodes`: of the job, and memory-only ones. `lends`: node -> bytes lent. `copies`: how many
    beside the original."""

    nodes: Sequence[NodeAt]
    lends: Mapping[str, int]
    copies: int


class Rereplication:
    """The re-replication of one checkpoint, `identity`. `own`: this node's inventory. `rebuild`: rebuilds what no node
    holds, or raises CkptError. `report(is_safe)`: hears whether the checkpoint meets the replication target now."""

    def __init__(
        self,
        network: PeerNetwork,
        service: ReplicaService,
        identity: Identity,
        target: Callable[[], Target],
        own: Callable[[], Inventory],
        rebuild: Callable[[Inventory], Coro[None]],
        later: CallLater,
        emit: Emit,
        report: Callable[[bool], None],
    ) -> None:
        self.identity = identity
        self._network, self._service = network, service
        self._get_target, self._get_own, self._rebuild = target, own, rebuild
        self._call_later, self._emit, self._report_replicated = later, emit, report
        self._failures_by_source: Counter[tuple[int, str]] = Counter()  # (rank, source) -> failed copies
        self._unreliable_holders: set[tuple[int, str]] = set()  # (rank, holder) of snapshots that count no more
        self._short_ranks: tuple[int, ...] = ()  # ranks reported to lack memory for copies
        self._last_action: object = None  # the ranks that the last attempt rebuilt, or the copies that it made
        self._changed = Promise[None]()  # settled once a node has come or gone, or it is time to try again

    async def run(self) -> None:
        """Makes attempts until it is cancelled."""
        failures = 0
        while True:
            # Whoever said that a node is gone may still be at work on that.
            await sleep(self._call_later, 0.0)
            if self._changed.is_settled:
                self._changed, self._last_action = Promise(), None
            try:
                is_done = await self._try(self._get_target())
            except CkptError as exc:
                log.warning("%s: %s", self.identity, exc)
                failures, is_done = failures + 1, True
                self._call_later(retry_delay_s(failures), functools.partial(self._changed.set_result, None))
            if is_done:
                await self._changed

    def survey_again(self) -> None:
        """A node has come or gone: begins anew."""
        self._changed.set_result(None)

    # -- inside

    async def _try(self, target: Target) -> bool:
        """One attempt. Returns whether nothing is left to do until a node comes or goes. Errors: CkptError; the next
        attempt follows later."""
        found, silent = await survey(self._network, target.nodes)
        if self._changed.is_settled:
            return False
        held = Inventory()
        for name, theirs in {"": self._get_own(), **found}.items():
            held.merge(theirs, name)
        if self.identity not in held.complete_checkpoints():
            if silent:
                raise AgentError("nodes that may have a part of it have not answered")
            log.info("%s is not whole in memory any more", self.identity)
            return True
        if missing := held.missing_ranks(self.identity):
            self._begin_action(missing)
            await self._rebuild(held)
            return False
        plan, sizes = self._plan(held, target)
        if plan.replicas:
            self._begin_action(plan.replicas)
            await self._copy(target.nodes, plan.replicas, sizes)
        return not plan.replicas

    def _plan(self, held: Inventory, target: Target) -> tuple[Reprotection, dict[int, int]]:
        """The plan, and the bytes of each rank's snapshot."""
        me, intact = self._network.agent_name, held.parity_protected_ranks(self.identity, target.copies)
        holders: dict[int, list[str]] = {}
        for rank, names in held.holders_by_rank(self.identity).items():
            named = [name or me for name in names]
            if rank not in intact:
                holders[rank] = [name for name in named if (rank, name) not in self._unreliable_holders] or named
        sizes = {rank: held.arena_bytes.get((self.identity, rank), 0) for rank in holders}
        places = [
            PlacementNode(
                node.name, lend_bytes=target.lends.get(node.name, 0), domains=node.domains, has_state=bool(node.ranks)
            )
            for node in target.nodes
        ]
        plan = plan_rereplication(holders, sizes, places, target.copies, self._failures_by_source)
        if plan.short_ranks and plan.short_ranks != self._short_ranks:
            ranks = format_count(len(plan.short_ranks), "rank")
            text = f"{ranks} of step {self.identity.version.step} on fewer nodes than was asked for"
            self._emit(
                "replication.short", f"{text}: too little memory is left", True, {"ranks": list(plan.short_ranks[:100])}
            )
        self._short_ranks = plan.short_ranks
        self._report_replicated(not (plan.replicas or plan.short_ranks))
        return plan, sizes

    async def _copy(self, nodes: Sequence[NodeAt], copies: Sequence[Copy], sizes: Mapping[int, int]) -> None:
        """Makes these copies. Errors: AgentError if one of them fails."""
        began_s = time.monotonic()
        assignments = [Assignment(copy.holder, {copy.source: copy.ranks}) for copy in copies]
        errors = await make_replicas(self._service, nodes, self.identity, assignments, evicts=False)
        made: list[tuple[str, str, list[int]]] = []
        for each in assignments:
            ((source, ranks),) = each.ranks_by_source.items()
            if each in errors:
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
        if errors:
            error = next(iter(errors.values()))
            text = f"step {step} has lost copies, and not all are made again: {error}"
            self._emit("replication.failed", text, True, facts)
            raise AgentError(error)
        text = f"step {step} had lost copies: {count >> 20:,} MiB are in other nodes' memory again"
        self._emit("replica.restored", f"{text} after {seconds:.2f} s", False, facts)

    def _begin_action(self, action: object) -> None:
        """Errors: AgentError if the last attempt did the same, without a lasting effect."""
        is_repeated, self._last_action = action == self._last_action, action
        if is_repeated:
            raise AgentError("replicas did not stay where they were made")
