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
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ckpt.agent.job.memory_node_client import MemoryNodeClients
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.startup_state import Start
from ckpt.agent.replication.survey import survey
from ckpt.agent.runtime.coroutines import spawn
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.errors import AgentError, CkptError, StorageError
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.types import OWN_NODE, Epoch

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.store.run import RunView

log = logging.getLogger("ckpt")

CONNECT_TRIES_MAX = 3  # connections tried to tell a node of a start
# The newest claims that are looked at: more than one, since a start that failed early staged nothing.
CLAIMS_MAX = 3


class StartSurvey:
    """The surveys by this node's starts. Main thread only, but for `_list_store`."""

    def __init__(self, context: NodeContext, memory: NodeMemory, memory_nodes: MemoryNodeClients) -> None:
        self._context, self._jobs, self._memory, self._memory_nodes = context, context.jobs, memory, memory_nodes
        self._surveying_start: Start | None = None  # the start that surveyed nodes and owes them its outcome

    def begin(self, start: Start) -> None:
        """Surveys this node, the other nodes of the start, the memory-only nodes, and the store."""
        if start.nodes:
            self._memory.grant_inventory_lease(OWN_NODE)
        start.survey.inventory = self._memory.inventory(whole=bool(start.nodes))
        for node in start.nodes[1:]:
            self._survey_node(start, node)
        self._survey_memory_nodes(start)
        in_memory = any(each.claim is not None for each in self._memory.known_epochs(start))
        then = lambda done: self._on_store_listed(start, in_memory, done)  # noqa: E731
        self._context.run_for_start(start, lambda: self._list_store(start, in_memory), then)

    def _survey_node(self, start: Start, node: NodeAt) -> None:
        """Tells one node of the start and adds its inventory. The start fails if that node does not take part."""
        network = self._context.network
        assert network is not None
        start.survey.pending_nodes.add(node.name)
        tries = itertools.count(1)

        def connect() -> None:
            network.connect(node, lambda error: self._jobs.guard_start(start, lambda: connected(error)))

        def connected(error: str) -> None:
            if error:
                raise AgentError(
                    f"agent {node.name} cannot be reached from the node of rank 0 ({error}): "
                    "let the nodes connect to each other, or name an address that they can with CKPT_LISTEN=HOST:PORT"
                )
            fields = {"t": "survey", "launch": start.launch, "take_over": start.take_over}
            asked = network.channel(node.name)
            network.request(
                node.name, fields, (), lambda *found: self._jobs.guard_start(start, lambda: answered(asked, *found))
            )

        def answered(asked: Channel | None, answer: Message | None, error: str) -> None:
            # The connection ended, as when both nodes dial each other at once: the start was not refused.
            if answer is None and network.channel(node.name) is not asked and next(tries) < CONNECT_TRIES_MAX:
                connect()
                return
            if answer is None:
                raise AgentError(f"agent {node.name} does not take part: {error}")
            start.survey.inventory.merge(Inventory.unpack(answer.blobs[0]), node.name)
            start.survey.pending_nodes.discard(node.name)

        connect()

    def _survey_memory_nodes(self, start: Start) -> None:
        """Surveys the memory-only nodes. The start does without those that do not answer."""

        def answered(address: Address, answer: Message | None, error: str) -> None:
            try:
                if answer is not None:
                    start.survey.inventory.merge(Inventory.unpack(answer.blobs[0]), str(answer.fields["name"]))
            # A malformed answer can raise anything, and the start waits for this one.
            except Exception as exc:
                log.warning("what the memory-only node at %s says it holds cannot be read: %r", address, exc)
            start.survey.pending_nodes.discard(str(address))

        start.survey.pending_nodes.update(map(str, start.memory_node_addresses))
        then = lambda *found: self._jobs.guard_start(start, lambda: answered(*found))  # noqa: E731
        self._memory_nodes.survey_nodes(start.memory_node_addresses, start.launch, start.take_over, then)

    def survey_previous_nodes(self, start: Start) -> None:
        """Surveys agents of earlier starts, unless the nodes of this start hold a checkpoint of the newest epoch. Adds
        them to `start.survey.previous_nodes`, which hear the outcome. Without a network there are none to ask."""
        start.survey.has_surveyed_previous = True
        network, view = self._context.network, start.survey.run_view
        if network is None or not start.nodes or view is None:
            return
        if any(identity.epoch == view.newest_epoch for identity in start.survey.inventory.complete_checkpoints()):
            return
        known = {network.agent_name, *(node.name for node in start.nodes)}
        nodes = nodes_from_claims(view, network.secret_id, known)
        names = {node.name for node in nodes}

        async def run() -> None:
            later, asked = self._context.server.call_later, start.survey.previous_nodes.append
            found, _ = await survey(network, nodes, {}, later, asked)
            for name, theirs in found.items():
                start.survey.inventory.merge(theirs, name)
            start.survey.pending_nodes -= names

        start.survey.pending_nodes |= names
        spawn(run(), lambda what: self._jobs.guard_start(start, what))

    def _list_store(self, start: Start, in_memory: bool) -> RunView:
        """Lists the store, after it has made sure that no other agent's job uses the run. On a thread. `in_memory`: a
        checkpoint may be in memory, so the store is retried only briefly. Errors: RunInUse; StorageError."""
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

    def _on_store_listed(self, start: Start, in_memory: bool, done: Future[RunView]) -> None:
        error = done.exception()
        if error is None:
            start.survey.run_view = done.result()
        elif not (isinstance(error, StorageError) and in_memory):
            self._jobs.fail_start(start, error)
            return
        else:
            log.warning("the store does not answer; the start uses this node's memory alone: %s", error)
        start.survey.is_store_listed = True

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
        for node in [*ended.nodes[1:], *ended.survey.previous_nodes]:
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
