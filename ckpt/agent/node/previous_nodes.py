"""The survey of agents of earlier starts that have no rank in a start, but may hold the checkpoint that it needs.

A start on other machines finds these agents in the claims in the store, which name the agents of their starts. The
survey ends nothing on their nodes. It asks only agents with the same run secret (ipc/secret.py): others would refuse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.snapshots.inventory import Inventory
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.agent.node.startup_state import Start
    from ckpt.store.run import RunView

log = logging.getLogger("ckpt")

# The newest claims that are looked at: more than one, since a start that failed early staged nothing.
CLAIMS_MAX = 3
# The start waits so long for an answer: lost nodes never give one.
ANSWER_TIMEOUT_S = 5.0


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


def survey_previous_nodes(
    network: PeerNetwork,
    start: Start,
    guard: Callable[[Callable[[], None]], None],
    later: Callable[[float, Callable[[], None]], None],
) -> None:
    """Surveys agents of earlier starts, unless the nodes of this start hold a checkpoint of the newest epoch. Adds them
    to `start.previous_nodes`, which hear the outcome. `guard`: runs a function only while the start is under way."""
    view, complete = start.run_view, start.inventory.complete_checkpoints()
    if view is None or any(identity.epoch == view.newest_epoch for identity in complete):
        return
    known = {network.agent_name, *(node.name for node in start.nodes)}
    start.previous_nodes += nodes_from_claims(view, network.secret_id, known)
    what = {"t": "survey"}, start.inventory, start.pending_nodes
    survey_inventories(network, start.previous_nodes, *what, guard, later, lambda node: None)


def survey_inventories(
    network: PeerNetwork,
    nodes: Sequence[NodeAt],
    fields: dict[str, Any],
    inventory: Inventory,
    pending: set[str],
    guard: Callable[[Callable[[], None]], None],
    later: Callable[[float, Callable[[], None]], None],
    then: Callable[[NodeAt | None], None],
) -> None:
    """Asks these agents, with the message `fields`, what they hold, and merges the answers into `inventory`. An agent
    that was asked drops nothing until it hears the outcome. `pending`: the names of those that have not answered yet;
    an answer counts only within ANSWER_TIMEOUT_S. `guard`: runs a function while the answers are wanted. `then` hears
    each node that has answered, None for each that refused, and None at the end."""

    def ask(node: NodeAt) -> None:
        def connected(error: str) -> None:
            if error:
                answered(None, error)
            elif node.name in pending:
                network.request(node.name, fields, (), lambda *found: guard(lambda: answered(*found)))

        def answered(answer: Message | None, error: str) -> None:
            if node.name not in pending:
                return  # too late
            pending.discard(node.name)
            try:
                if answer is None:
                    raise AgentError(error)
                inventory.merge(Inventory.unpack(answer.blobs[0]), node.name)
            # A malformed answer can raise anything; the survey does without that node.
            except Exception as exc:
                level = logging.INFO if answer is None else logging.WARNING
                log.log(level, "agent %s does not say what it holds: %s", node.name, exc)
                then(None)
            else:
                then(node)

        network.connect(node, lambda error: guard(lambda: connected(error)))

    def end() -> None:
        pending.difference_update(node.name for node in nodes)
        then(None)

    pending.update(node.name for node in nodes)
    for node in nodes:
        ask(node)
    if nodes:
        later(ANSWER_TIMEOUT_S, lambda: guard(end))
    else:
        end()
