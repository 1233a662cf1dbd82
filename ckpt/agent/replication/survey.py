"""What is safe in other nodes' memory, where its coordinator does not know, since it was started again, or had no
connection to who keeps it: each node says what it has of the epoch, and what it was told to be safe. Main thread only.

Safe is the newest that any of them was told of, if there is anything of it: nothing went for a newer one. Where none
was told of any there may be one all the same of which others keep a part, the first then that outlives a node. A newer
one counts as well that lies, in copies, in parity, or both, where as many nodes may be lost of it as is asked for, or
as of the one before: that word may have reached nobody. All of it was checked where it arrived. If a node does not
answer nothing is known.
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
    """What one node has of an epoch; `safe`: the newest that it was told to be."""

    safe: Identity | None
    held: Inventory

    @staticmethod
    def of(inventory: Inventory, safe: Identity | None, epoch: Epoch) -> KeptReplica:
        return KeptReplica(safe if safe is not None and safe.epoch == epoch else None, inventory.of_epoch(epoch))

    def fields(self) -> dict[str, Any]:
        return {"safe": str(self.safe) if self.safe is not None else None}

    def blobs(self) -> list[bytes]:
        packed: bytes = msgpack.packb(self.held.fields())
        return [packed]

    @staticmethod
    def parse(epoch: Epoch, fields: Mapping[str, Any], blobs: Sequence[bytes]) -> KeptReplica:
        """Errors: CkptError, ValueError, TypeError, LookupError, AttributeError, OverflowError."""
        told, held = fields["safe"], Inventory.unpack(blobs[0])
        safe = Identity.parse(str(told)) if told is not None else None
        if any(identity.epoch != epoch for identity in (*held.worlds, *([safe] if safe is not None else []))):
            raise AgentError(f"a node was asked for {epoch} and tells of another epoch")
        return KeptReplica(safe, held)


@dataclass(frozen=True, slots=True)
class SafeCheckpoint:
    """`newest`: what is safe, as far as all nodes know; None: nothing is known to be. `whole`: the newest of which as
    many nodes may be lost as is asked for, by what they have now; None: there is none. `outlives`: how many nodes each
    rank of the newest may lose, of so many; -1: it is lost."""

    newest: Identity | None
    whole: Identity | None
    outlives: Sequence[int] = field(default=(), compare=False)


def newest_safe(kept: Mapping[str, KeptReplica], losses: Sequence[int]) -> SafeCheckpoint:
    """Of what all nodes say, by their names. `losses`: of each rank of the job, how many nodes it is to outlive."""
    every = Inventory()
    for name, each in kept.items():
        every.add(each.held, name)
    whole = max((identity for identity in every.worlds if _outlives(every, identity, losses)), default=None)
    told = [each.safe for each in kept.values() if each.safe in every.worlds]
    partly = (each for each in every.complete() if max(_outlived(every, each, losses), default=0) > 0)
    newest = max([*filter(None, told), *([whole] if whole is not None else [])], default=None) or next(partly, None)
    for newer in [identity for identity in every.complete() if newest is not None and identity > newest]:
        if newest is not None and _outlives(every, newer, _outlived(every, newest, losses)):
            newest = newer
    return SafeCheckpoint(newest, whole, _outlived(every, newest, losses) if newest is not None else ())


def _outlives(every: Inventory, identity: Identity, losses: Sequence[int]) -> bool:
    """Whether each rank of it may lose so many nodes."""
    return every.worlds[identity] == len(losses) and _outlived(every, identity, losses) == [*losses]


def _outlived(every: Inventory, identity: Identity, losses: Sequence[int]) -> list[int]:
    """How many nodes each rank of it may lose, of so many; -1: it is lost."""
    by_parity = functools.cache(lambda count: every.protected(identity, count))
    held = [len(every.holders.get((identity, rank), ())) for rank in range(len(losses))]
    return [
        next((count for count in range(most, -1, -1) if held[rank] > count or rank in by_parity(count)), -1)
        for rank, most in enumerate(losses)
    ]


def find_safe(
    network: PeerNetwork,
    nodes: Iterable[str],
    own: KeptReplica,
    epoch: Epoch,
    losses: Sequence[int],
    then: Callable[[SafeCheckpoint | None], None],
) -> None:
    """`then` hears None where that is not known. The rest: see `ask_keeps` and `newest_safe`."""

    def asked(found: Mapping[str, KeptReplica], silent: Sequence[str]) -> None:
        then(newest_safe(found, losses) if not silent else None)

    ask_keeps(network, nodes, own, epoch, asked)


def ask_keeps(
    network: PeerNetwork,
    nodes: Iterable[str],
    own: KeptReplica,
    epoch: Epoch,
    then: Callable[[Mapping[str, KeptReplica], Sequence[str]], None],
) -> None:
    """`nodes`: all that may keep something, by name, of which this one has `own`. `then` hears what each has, and who
    has not said it; once, later than this call, unless there is no other node."""
    names: Sequence[str] = sorted({*nodes} - {network.me})
    left, found = set(names), {network.me: own}

    def end() -> None:
        if not left:
            then(found, [name for name in names if name not in found])

    def answered(name: str, answer: Message | None, error: str) -> None:
        left.discard(name)
        try:
            if answer is None:
                raise AgentError(error)
            found[name] = KeptReplica.parse(epoch, answer.fields, answer.blobs)
        except Exception as exc:  # whatever another agent may have sent: copies wait for this
            log.warning("what agent %s keeps is not known: %s", name, exc)
        end()

    end()
    for name in names:
        fields = {"t": "keeps", "epoch": str(epoch)}
        network.ask(name, fields, (), functools.partial(answered, name))
