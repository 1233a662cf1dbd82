"""The survey of a start: it lists the store, asks every node what its memory holds, and tells each node the outcome.

The surveyed nodes are those of the start, which have to answer; the memory-only nodes; and agents of earlier starts
that have no rank in this one, but may hold the checkpoint that it needs. A start on other machines finds these in the
claims in the store, which name the agents of their starts. The survey ends nothing on their nodes. It asks only agents
with the same run secret (ipc/secret.py): others would refuse.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from ckpt.agent.job.memory_node_client import MemoryNodeClients
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.startup_state import Start
from ckpt.agent.replication.survey import survey
from ckpt.agent.runtime.coroutines import gather, work_on
from ckpt.agent.runtime.workers import Lane
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.errors import AgentError, CkptError, StorageError
from ckpt.ipc.addresses import Address
from ckpt.ipc.node_list import NodeAt
from ckpt.types import OWN_NODE, Epoch

if TYPE_CHECKING:
    from ckpt.store.run import RunView

log = logging.getLogger("ckpt")

CONNECT_TRIES_MAX = 3  # connections tried to tell a node of a start
# The newest claims that are looked at: more than one, since a start that failed early staged nothing.
CLAIMS_MAX = 3


class StartSurvey:
    """The surveys by this node's starts. Main thread only, but for `_view_run`."""

    def __init__(self, context: NodeContext, memory: NodeMemory, memory_nodes: MemoryNodeClients) -> None:
        self._context, self._jobs, self._memory, self._memory_nodes = context, context.jobs, memory, memory_nodes
        self._surveying_start: Start | None = None  # the start that surveyed nodes and owes them its outcome

    async def run(self, start: Start) -> None:
        """Surveys this node, the other nodes of the start, the memory-only nodes, the store, and agents of earlier
        starts. Errors: CkptError if the store is in use or does not answer, or a node of the start does not take
        part."""
        if start.nodes:
            self._memory.grant_inventory_lease(OWN_NODE)
        start.inventory = self._memory.inventory(whole=bool(start.nodes))
        nodes = [self._survey_node(start, node) for node in start.nodes[1:]]
        await gather([*nodes, self._survey_memory_nodes(start), self._list_store(start)])
        await self._survey_previous_nodes(start)

    async def _survey_node(self, start: Start, node: NodeAt) -> None:
        """Tells one node of the start and adds its inventory. Errors: AgentError if that node does not take part."""
        network = self._context.network
        assert network is not None
        fields = {"t": "survey", "launch": start.launch, "take_over": start.take_over}
        for tries in itertools.count(1):
            try:
                await network.connect(node)
            except CkptError as exc:
                raise AgentError(
                    f"agent {node.name} cannot be reached from the node of rank 0 ({exc}): "
                    "let the nodes connect to each other, or name an address that they can with CKPT_LISTEN=HOST:PORT"
                ) from exc
            asked = network.channel(node.name)
            try:
                answer = await network.request(node.name, fields)
                break
            except AgentError as exc:
                # Another connection: this one ended, as when both nodes dial each other at once.
                if network.channel(node.name) is asked or tries == CONNECT_TRIES_MAX:
                    raise AgentError(f"agent {node.name} does not take part: {exc}") from exc
        start.inventory.merge(Inventory.unpack(answer.blobs[0]), node.name)
        start.progress.advance()

    async def _survey_memory_nodes(self, start: Start) -> None:
        """Surveys the memory-only nodes. The start does without those that do not answer."""
        found = self._memory_nodes.survey_nodes(start.memory_node_addresses, start.launch, start.take_over)
        for address, answer in await found:
            try:
                if answer is not None:
                    start.inventory.merge(Inventory.unpack(answer.blobs[0]), str(answer.fields["name"]))
            # A malformed answer can raise anything, and the start waits for this one.
            except Exception as exc:
                log.warning("what the memory-only node at %s says it holds cannot be read: %r", address, exc)
            start.progress.advance()

    async def _survey_previous_nodes(self, start: Start) -> None:
        """Surveys agents of earlier starts, unless the nodes of this start hold a checkpoint of the newest epoch. Adds
        them to `start.previous_nodes`, which hear the outcome. Without a network there are none to ask."""
        network, view = self._context.network, start.run_view
        if network is None or not start.nodes or view is None:
            return
        if any(identity.epoch == view.newest_epoch for identity in start.inventory.complete_checkpoints()):
            return
        known = {network.agent_name, *(node.name for node in start.nodes)}
        nodes, later = nodes_from_claims(view, network.secret_id, known), self._context.server.call_later
        found, _ = await survey(network, nodes, {}, later, start.previous_nodes.append)
        for name, theirs in found.items():
            start.inventory.merge(theirs, name)
        start.progress.advance()

    async def _list_store(self, start: Start) -> None:
        """Lists the store. Where a checkpoint may be in memory, the start does without a store that does not answer.
        Errors: RunInUse; StorageError."""
        in_memory = any(each.claim is not None for each in self._memory.known_epochs(start))
        try:
            start.run_view = await work_on(self._context.workers, Lane.FRONT, lambda: self._view_run(start, in_memory))
        except StorageError as exc:
            if not in_memory:
                raise
            log.warning("the store does not answer; the start uses this node's memory alone: %s", exc)
        start.progress.advance()

    def _view_run(self, start: Start, in_memory: bool) -> RunView:
        """The run, after it was made sure that no other agent's job uses it. On a thread. `in_memory`: a checkpoint may
        be in memory, so the store is retried only briefly. Errors: RunInUse; StorageError."""
        store = self._context.store
        run = store.open_run(impatient=in_memory)
        view = run.view()
        if view.newest_epoch in store.claims.own_epochs:
            return view  # this agent began that epoch
        before = (view.newest_epoch, view.closed_epochs)
        run.check_not_in_use(view, start.launch, self._context.settings.heartbeat_s, take_over=start.take_over)
        if view.newest_epoch is not None:
            store.claims.replaceable_epochs.add(view.newest_epoch)
        return view if view.newest_epoch is None or view.newest_epoch in before[1] else run.view()

    def announce_outcomes(self) -> None:
        """Tells the surveyed nodes the outcome of a start that is not under way any more."""
        ended, start = self._surveying_start, self._jobs.start
        if ended is not start:
            if ended is not None:
                claim = ended.job.claim if ended.job is not None else None
                self._announce_outcome(ended, claim.epoch if claim is not None else None)
            self._surveying_start = start if start is not None and start.nodes else None

    def _announce_outcome(self, ended: Start, epoch: Epoch | None) -> None:
        """`epoch`: the epoch that the start has begun; None: it came to nothing."""
        lease, start = self._memory.inventory_lease, self._jobs.start
        if epoch is not None:
            lease.on_epoch_begun(OWN_NODE, epoch)
        elif start is None:
            lease.end_lease(OWN_NODE)
        fields = {"t": "start-outcome", "epoch": str(epoch) if epoch is not None else None}
        # Nodes that a newer start has surveyed again hear only the newer outcome.
        again = {node.name for node in start.nodes} if start is not None else set()
        for node in [*ended.nodes[1:], *ended.previous_nodes]:
            if node.name not in again:
                self._context.notify(node.name, fields)
        # Memory-only nodes learn of a begun epoch when it borrows from them.
        if epoch is None and start is None:
            self._memory_nodes.broadcast_hint(fields)


def nodes_from_claims(view: RunView, run: str, known: Collection[str]) -> list[NodeAt]:
    """The agents that the newest claims name, but for the `known` ones. `run`: the name of the run's secret; claims
    with another one are skipped."""
    found: dict[str, NodeAt] = {}
    for claim in sorted(view.claims, key=lambda claim: claim.epoch)[: -CLAIMS_MAX - 1 : -1]:
        for name, texts in claim.agents if claim.secret_name == run else ():
            try:
                addresses = tuple(Address.parse(text) for text in texts)
            except CkptError as exc:
                log.warning("the claim of %s names an agent that cannot be called: %s", claim.epoch, exc)
                continue
            if name not in known:
                found.setdefault(name, NodeAt(name, addresses, ()))
    return list(found.values())
