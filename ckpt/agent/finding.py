"""What is safe in other nodes' memory, where its coordinator was started again and does not know: each node says what
it has of the epoch, and what it was told to be safe. Main thread only.

Safe is the newest that any of them was told of: nothing went for a newer one. A newer one that nevertheless lies on as
many nodes as was asked for counts as well: it was checked where it arrived. If a node does not answer nothing is known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import AgentError, CkptError
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.holdings import Inventory
    from ckpt.agent.network import Network
    from ckpt.agent.wire import Message

log = logging.getLogger("ckpt")

KEPT_MAX = 64  # checkpoints of one epoch at one node
RANKS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Keeps:
    """What one node has of an epoch: by checkpoint, the ranks; `safe`: the newest that it was told to be."""

    safe: Identity | None
    ranks: Mapping[Identity, frozenset[int]]

    @staticmethod
    def of(inventory: Inventory, safe: Identity | None, epoch: Epoch) -> Keeps:
        found: dict[Identity, set[int]] = {}
        for identity, rank in inventory.holders:
            if identity.epoch == epoch:
                found.setdefault(identity, set()).add(rank)
        return Keeps(
            safe if safe is not None and safe.epoch == epoch else None,
            {identity: frozenset(found[identity]) for identity in sorted(found)[-KEPT_MAX:]},
        )

    def fields(self) -> dict[str, Any]:
        kept = [[str(identity), sorted(ranks)] for identity, ranks in self.ranks.items()]
        return {"safe": str(self.safe) if self.safe is not None else None, "kept": kept}

    @staticmethod
    def parse(epoch: Epoch, fields: Mapping[str, Any]) -> Keeps:
        """Errors: AgentError, ValueError, TypeError, LookupError."""
        rows, told = fields["kept"], fields["safe"]
        if len(rows) > KEPT_MAX or any(len(ranks) > RANKS_MAX for _, ranks in rows):
            raise AgentError("a node says that it keeps more than it can")
        ranks = {Identity.parse(str(text)): frozenset(int(rank) for rank in theirs) for text, theirs in rows}
        safe = Identity.parse(str(told)) if told is not None else None
        if any(identity.epoch != epoch for identity in (*ranks, *([safe] if safe is not None else []))):
            raise AgentError(f"a node was asked for {epoch} and tells of another epoch")
        return Keeps(safe, ranks)


def newest_safe(kept: Iterable[Keeps], world: int, copies: int) -> Identity | None:
    """Of what all nodes say. `copies`: how many further ones each of `world` ranks' snapshots was to have."""
    nodes = list(kept)
    told = [each.safe for each in nodes if each.safe is not None]
    there = {identity for each in nodes for identity in each.ranks}

    def is_there(identity: Identity) -> bool:
        return all(sum(rank in each.ranks.get(identity, ()) for each in nodes) > copies for rank in range(world))

    return max([*told, *filter(is_there, there)], default=None)


def find_safe(
    network: Network,
    nodes: Iterable[str],
    own: Keeps,
    epoch: Epoch,
    world: int,
    copies: int,
    then: Callable[[Identity | None], None],
) -> None:
    """`nodes`: all that may keep something, by name, of which this one has `own`. `then` hears None where that is not
    known; later than this call, unless there is no other node. The rest: see `newest_safe`."""
    names: Sequence[str] = sorted({*nodes} - {network.me})
    left, found = set(names), [own]

    def end() -> None:
        if not left:
            then(newest_safe(found, world, copies) if len(found) == len(names) + 1 else None)

    def answered(name: str, answer: Message | None) -> None:
        left.discard(name)
        try:
            if answer is not None:
                found.append(Keeps.parse(epoch, answer.fields))
        except (CkptError, ValueError, TypeError, LookupError) as exc:
            log.warning("what agent %s says it keeps cannot be read: %s", name, exc)
        end()

    end()
    for name in names:
        fields = {"t": "keeps", "epoch": str(epoch)}
        network.ask(name, fields, (), lambda answer, error, name=name: answered(name, answer))  # type: ignore[misc]
