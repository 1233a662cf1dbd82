"""A checkpoint of which it was said who holds what: put together, with what is made again from parity on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt.agent.arena import Arena
from ckpt.agent.bulk import Bulk
from ckpt.agent.gathering import Gathered, Gathering
from ckpt.agent.holdings import Inventory
from ckpt.agent.parities import Parities
from ckpt.agent.rebuilding import Made, Rebuilding
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.network import Network, NodeAt

log = logging.getLogger("ckpt")


class Collecting:
    """Of one identity. What nobody holds is made again from parity first; so is what turns out to be damaged where it
    lies. `then` hears what came of it, or None and why nothing did; once. Everything runs on the main thread."""

    def __init__(
        self,
        network: Network | None,
        bulk: Bulk,
        parities: Parities,
        arenas_of: Callable[[Identity], Mapping[int, Arena]],
        inventory: Inventory,
        nodes: Sequence[NodeAt],
        others: Sequence[NodeAt],
        guard: Callable[[Callable[[], None]], None],
        then: Callable[[Gathered | None, str], None],
    ) -> None:
        """`inventory`: what all of them hold; it is kept true. `nodes`: which may make something again, this one first;
        () where it is the only one. `others`: which only hold something. `guard`: runs what follows as long as somebody
        waits for it."""
        self._network, self._bulk, self._parities, self._arenas_of = network, bulk, parities, arenas_of
        self._inventory, self._nodes, self._others = inventory, list(nodes), list(others)
        self._guard, self._then = guard, then
        self._me = network.me if network is not None else ""

    def begin(self, identity: Identity) -> None:
        if self._inventory.missing(identity):
            self._rebuild(identity)
        else:
            self._gather(identity)

    def _rebuild(self, identity: Identity) -> None:
        inventory, me = self._inventory, self._me

        def made(found: Made, error: str) -> None:
            for rank, name in found.items():
                inventory.made(identity, rank, "" if name == me else name)
            if error:
                self._then(None, error)
            else:
                self.begin(identity)

        missing = inventory.missing(identity)
        holders = {rank: [name or me for name in names] for rank, names in inventory.by_rank(identity).items()}
        unfit = {rank: [name or me for name in inventory.unfit.get((identity, rank), ())] for rank in missing}
        names = [node.name for node in self._nodes] or [me]
        at = {rank: [name for name in names if name not in unfit[rank]] for rank in missing}
        ended = lambda found, error: self._guard(lambda: made(found, error))  # noqa: E731
        givers = [*self._nodes, *self._others] if self._nodes else []
        Rebuilding(self._parities, givers, identity, holders, at, ended, me).begin()

    def _gather(self, identity: Identity) -> None:
        inventory, arenas = self._inventory, self._arenas_of(identity)

        def gathered(found: Gathered | None, error: str) -> None:
            lacking = gathering.lacking
            if found is None and lacking is not None:
                inventory.without(identity, lacking)
                if identity in inventory.complete():
                    log.warning("%s: %s; it is made again from parity", identity, error)
                    self._rebuild(identity)
                    return
            self._then(found, error)

        ended = lambda found, error: self._guard(lambda: gathered(found, error))  # noqa: E731
        gathering = Gathering(self._network, self._bulk, identity, inventory.by_rank(identity), arenas, ended)
        gathering.begin()
