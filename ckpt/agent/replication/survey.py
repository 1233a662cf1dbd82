"""The survey for the newest replicated checkpoint of an epoch, run by a coordinator that does not know it.

It runs after the coordinator's agent was restarted, or was cut off from holders. Each node answers with its replicas
and with the newest checkpoint that it was told is replicated. The result is the newest checkpoint that
- a node was told is replicated, if any replica of it is left: such are never evicted for an unreplicated one; or
- survives as many losses as the job asks for: the message that it is replicated may have reached nobody.
If there is neither, the oldest complete one counts of which some rank survives a loss. Then any newer one takes its
place that survives at least as many losses. If a node does not answer, nothing is known. Main thread only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from ckpt.agent.snapshots.inventory import Inventory
from ckpt.errors import AgentError
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.messages import Message

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class KeptReplica:
    """One node's answer to the survey. `held`: its replicas of the epoch. `safe`: the newest checkpoint of the epoch
    that it was told is replicated."""

    replicated: Identity | None
    inventory: Inventory

    @staticmethod
    def from_inventory(inventory: Inventory, safe: Identity | None, epoch: Epoch) -> KeptReplica:
        return KeptReplica(safe if safe is not None and safe.epoch == epoch else None, inventory.filter_epoch(epoch))

    def fields(self) -> dict[str, Any]:
        return {"replicated": str(self.replicated) if self.replicated is not None else None}

    def blobs(self) -> list[bytes]:
        packed: bytes = msgpack.packb(self.inventory.fields())
        return [packed]

    @staticmethod
    def parse(epoch: Epoch, fields: Mapping[str, Any], blobs: Sequence[bytes]) -> KeptReplica:
        """Errors: CkptError, ValueError, TypeError, LookupError, AttributeError, OverflowError."""
        told, held = fields["replicated"], Inventory.unpack(blobs[0])
        safe = Identity.parse(str(told)) if told is not None else None
        if any(identity.epoch != epoch for identity in (*held.world_sizes, *([safe] if safe is not None else []))):
            raise AgentError(f"a node was asked for {epoch} and tells of another epoch")
        return KeptReplica(safe, held)


@dataclass(frozen=True, slots=True)
class SafeCheckpoint:
    """The survey's result. `newest`: the newest replicated checkpoint; None: none is known. `whole`: the newest whose
    replicas survive as many losses as asked for; None: none does. `survived_losses`: by rank of `newest`, how many
    losses it survives, counted up to the number asked for; -1: the rank is lost."""

    newest: Identity | None
    fully_replicated: Identity | None
    survived_losses: Sequence[int] = field(default=(), compare=False)


def newest_replicated(kept: Mapping[str, KeptReplica], losses: Sequence[int]) -> SafeCheckpoint:
    """The result of all answers, by node name. `losses`: by rank, how many lost nodes it should survive."""
    every = Inventory()
    for name, each in kept.items():
        every.merge(each.inventory, name)
    whole = max((identity for identity in every.world_sizes if _survives(every, identity, losses)), default=None)
    told = [each.replicated for each in kept.values() if each.replicated in every.world_sizes]
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
    """By rank, how many losses it survives, counted up to `losses`; -1: it is lost."""
    by_parity = functools.cache(lambda count: every.parity_protected_ranks(identity, count))
    held = [len(every.holders.get((identity, rank), ())) for rank in range(len(losses))]
    return [
        next((count for count in range(most, -1, -1) if held[rank] > count or rank in by_parity(count)), -1)
        for rank, most in enumerate(losses)
    ]


def find_replicated(
    network: PeerNetwork,
    nodes: Iterable[str],
    own: KeptReplica,
    epoch: Epoch,
    losses: Sequence[int],
    then: Callable[[SafeCheckpoint | None], None],
) -> None:
    """Surveys the nodes. `then` hears the result, or None if a node did not answer. See `survey_nodes`,
    `newest_replicated`."""

    def asked(found: Mapping[str, KeptReplica], silent: Sequence[str]) -> None:
        then(newest_replicated(found, losses) if not silent else None)

    survey_nodes(network, nodes, own, epoch, asked)


def survey_nodes(
    network: PeerNetwork,
    nodes: Iterable[str],
    own: KeptReplica,
    epoch: Epoch,
    then: Callable[[Mapping[str, KeptReplica], Sequence[str]], None],
) -> None:
    """Asks `nodes`, all that may keep replicas, by name. `own`: this node's answer. `then` hears the answers by node,
    and the nodes that did not answer. It is called once: later, or within this call if there is no other node."""
    names: Sequence[str] = sorted({*nodes} - {network.agent_name})
    left, found = set(names), {network.agent_name: own}

    def end() -> None:
        if not left:
            then(found, [name for name in names if name not in found])

    def answered(name: str, answer: Message | None, error: str) -> None:
        left.discard(name)
        try:
            if answer is None:
                raise AgentError(error)
            found[name] = KeptReplica.parse(epoch, answer.fields, answer.blobs)
        except Exception as exc:  # Any malformed answer: replication waits for the survey.
            log.warning("what agent %s keeps is not known: %s", name, exc)
        end()

    end()
    for name in names:
        fields = {"t": "survey-replicas", "epoch": str(epoch)}
        network.request(name, fields, (), functools.partial(answered, name))
