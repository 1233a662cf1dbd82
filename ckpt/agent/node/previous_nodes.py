"""The survey of agents of earlier starts that have no rank in a start, but may hold the checkpoint that it needs.

A start on other machines finds these agents in the claims in the store, which name the agents of their starts. The
survey ends nothing on their nodes. It asks only agents with the same run secret (ipc/secret.py): others would refuse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt.agent.replication.survey import survey_nodes
from ckpt.errors import CkptError
from ckpt.ipc.addresses import Address
from ckpt.ipc.node_list import NodeAt

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.agent.node.startup_state import Start
    from ckpt.agent.snapshots.inventory import Inventory
    from ckpt.store.run import RunView

log = logging.getLogger("ckpt")

# The newest claims that are looked at: more than one, since a start that failed early staged nothing.
CLAIMS_MAX = 3


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
    nodes = nodes_from_claims(view, network.secret_id, known)
    names = {node.name for node in nodes}

    def surveyed(found: Mapping[str, Inventory], silent: Sequence[str]) -> None:
        for name, theirs in found.items():
            start.inventory.merge(theirs, name)
        start.pending_nodes -= names

    start.pending_nodes |= names
    survey_nodes(network, nodes, surveyed, {}, guard, later, start.previous_nodes.append)
