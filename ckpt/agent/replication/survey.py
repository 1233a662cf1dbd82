"""The survey: asks nodes which snapshots and parity chunks they hold, and finds the newest replicated checkpoint.

A coordinator that does not know that checkpoint surveys its nodes: its agent was restarted, or was cut off from
holders. The result is the newest checkpoint that
- a node was told is replicated, if any replica of it is left: such are never evicted for an unreplicated one; or
- survives as many losses as the job asks for: the message that it is replicated may have reached nobody.
If there is neither, the oldest complete one counts of which some rank survives a loss. Then any newer one takes its
place that survives at least as many losses. If a node does not answer, nothing is known. Main thread only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.runtime.coroutines import CallLater, gather, race, time_out
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.errors import AgentError
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.ipc.node_list import NodeAt

log = logging.getLogger("ckpt")

# How long a survey waits that dials nodes: lost ones never answer.
SURVEY_TIMEOUT_S = 5.0

NO_LEASE: Mapping[str, Any] = {"lease": False}  # a survey that has nothing stay as listed


@dataclass(frozen=True, slots=True)
class SafeCheckpoint:
    """The survey's result. `newest`: the newest replicated checkpoint; None: none is known. `whole`: the newest whose
    replicas survive as many losses as asked for; None: none does. `survived_losses`: by rank of `newest`, how many
    losses it survives, counted up to the number asked for; -1 for all: one is lost."""

    newest: Identity | None
    fully_replicated: Identity | None
    survived_losses: Sequence[int] = field(default=(), compare=False)


def newest_replicated(held: Mapping[str, Inventory], losses: Sequence[int]) -> SafeCheckpoint:
    """The result of all nodes' inventories of one epoch. `losses`: by rank, how many lost nodes it should survive."""
    every = Inventory()
    for name, each in held.items():
        every.merge(each, name)
    whole = max((identity for identity in every.world_sizes if _survives(every, identity, losses)), default=None)
    told = [each.announced_replicated for each in held.values() if each.announced_replicated in every.world_sizes]
    partly = (
        each for each in every.complete_checkpoints() if max(_survived_losses(every, each, losses), default=0) > 0
    )
    newest = max([*filter(None, told), *([whole] if whole is not None else [])], default=None) or next(partly, None)
    for newer in [identity for identity in every.complete_checkpoints() if newest is not None and identity > newest]:
        if newest is not None and _survives(every, newer, _survived_losses(every, newest, losses)):
            newest = newer
    return SafeCheckpoint(newest, whole, _survived_losses(every, newest, losses) if newest is not None else ())


def _survives(every: Inventory, identity: Identity, losses: Sequence[int]) -> bool:
    """Whether each rank of that checkpoint survives its number of losses."""
    return every.world_sizes[identity] == len(losses) and _survived_losses(every, identity, losses) == [*losses]


def _survived_losses(every: Inventory, identity: Identity, losses: Sequence[int]) -> list[int]:
    """By rank, how many losses it survives, counted up to `losses`; -1 for all if one is lost: nothing can be restored
    from the others."""
    by_parity = functools.cache(lambda count: every.parity_protected_ranks(identity, count))
    held = [len(every.holders.get((identity, rank), ())) for rank in range(len(losses))]
    found = [
        next((count for count in range(most, -1, -1) if held[rank] > count or rank in by_parity(count)), -1)
        for rank, most in enumerate(losses)
    ]
    return [-1] * len(found) if -1 in found else found


async def find_replicated(
    network: PeerNetwork, nodes: Iterable[NodeAt], own: Inventory, epoch: Epoch, losses: Sequence[int]
) -> SafeCheckpoint | None:
    """Surveys the nodes. Returns the result, or None if a node did not answer. `own`: this node's inventory. See
    `survey`, `newest_replicated`."""
    found, silent = await survey(network, nodes)
    held = {name: each.filter_epoch(epoch) for name, each in {network.agent_name: own, **found}.items()}
    return newest_replicated(held, losses) if not silent else None


async def survey(
    network: PeerNetwork,
    nodes: Iterable[NodeAt],
    fields: Mapping[str, Any] = NO_LEASE,
    later: CallLater | None = None,
    asked: Callable[[NodeAt], object] = lambda node: None,
) -> tuple[dict[str, Inventory], list[str]]:
    """Asks the other nodes among `nodes` for their inventories. Returns these by node, and the nodes that did not
    answer. `fields`: of the message. `later`: a timer; nodes are dialled then, and those that do not answer within
    SURVEY_TIMEOUT_S count as silent. `asked`: hears each node that gets the message."""
    others = {node.name: node for node in nodes if node.name != network.agent_name}
    found: dict[str, Inventory] = {}

    async def ask_node(node: NodeAt) -> None:
        answer = None
        try:
            if later is not None:
                await network.connect(node)
            asked(node)
            answer = await network.request(node.name, {"t": "survey", **fields})
            found[node.name] = Inventory.unpack(answer.blobs[0])
        except Exception as exc:  # A malformed answer can raise anything, and someone waits for the result.
            level = logging.INFO if isinstance(exc, AgentError) and answer is None else logging.WARNING
            log.log(level, "what agent %s holds is not known: %s", node.name, exc)

    asking = gather(map(ask_node, others.values()))
    if later is None or not others:
        await asking
    else:
        with contextlib.suppress(TimeoutError):
            await race(asking, time_out(later, SURVEY_TIMEOUT_S))
    return found, [name for name in others if name not in found]
