"""The offers of one node: what other nodes may fetch from its memory, each until its last reader withdraws it.

Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ckpt.agent.net.transport import Frames
from ckpt.agent.runtime.coroutines import run_on
from ckpt.agent.runtime.workers import Lane, Workers
from ckpt.agent.snapshots.described import DescribedSnapshot, describe_snapshots
from ckpt.errors import AgentError
from ckpt.ipc.arena import Arena
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.tcp_sender import Transport


def transfer_name(identity: Identity, rank: int) -> str:
    """The name under which that rank's whole snapshot is offered."""
    return f"copy/{identity}/{rank}"


def _identity_of(offer: str) -> Identity:
    """The checkpoint that an offer is of: the second part of its name."""
    return Identity.parse(offer.split("/")[1])


class ReplicaOffers:
    """The offers by name, and their readers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._transport: Transport | None = None
        self._readers_by_offer: dict[str, set[str]] = {}
        self._urgent_offers: set[str] = set()  # names

    @property
    def readers(self) -> set[str]:
        return set[str]().union(*self._readers_by_offer.values())

    def is_offered(self, identity: Identity) -> bool:
        return any(_identity_of(name) == identity for name in self._readers_by_offer)

    async def publish(
        self,
        transport: Transport,
        identity: Identity,
        arenas: Mapping[int, Arena],
        reader: str = "",
        urgent: bool = False,
    ) -> list[DescribedSnapshot]:
        """Offers these ranks' snapshots. Returns the descriptions that the readers need. The caller leaves the arenas
        unchanged until `withdraw`. `reader`: who will `withdraw`, where there are several readers. `urgent`: a start
        waits for the snapshots. Errors: CkptError."""
        lane = Lane.FRONT if urgent else Lane.MEMORY
        described = await run_on(self._workers, lane, lambda: describe_snapshots(identity, arenas))
        for each in described:
            try:
                source = arenas[each.rank].view
            except ValueError as exc:  # the arena was closed
                raise AgentError(str(exc)) from exc
            self.add(transport, transfer_name(identity, each.rank), source, each.frames, reader, urgent)
        return described

    def add(
        self, transport: Transport, name: str, source: memoryview, frames: Frames, reader: str, urgent: bool = False
    ) -> None:
        """Lets other nodes fetch `source` under `name`, until `withdraw`. `urgent`: see Transport.offer; an existing
        offer becomes urgent, and its readers connect anew. Errors: AgentError; ValueError if the memory was closed."""
        if name in self._readers_by_offer and urgent and name not in self._urgent_offers:
            transport.withdraw(name)
            transport.offer(name, source, frames, urgent)
        elif name not in self._readers_by_offer:
            transport.offer(name, source, frames, urgent)
        if urgent:
            self._urgent_offers.add(name)
        self._transport = transport
        self._readers_by_offer.setdefault(name, set()).add(reader)

    def withdraw(self, identity: Identity | None, reader: str = "") -> None:
        """Ends that reader's use of all offers of the checkpoint; None: of all checkpoints. An offer without readers
        ends."""
        for name, readers in list(self._readers_by_offer.items()):
            if reader in readers and identity in (None, _identity_of(name)):
                readers.discard(reader)
                if not readers:
                    self.end(name)

    def end(self, name: str) -> None:
        """Ends an offer even while it has readers: its memory will be used again."""
        if self._transport is not None and name in self._readers_by_offer:
            self._transport.withdraw(name)
            del self._readers_by_offer[name]
            self._urgent_offers.discard(name)

    def end_all(self, goes: Callable[[Identity], bool]) -> None:
        for name in [name for name in self._readers_by_offer if goes(_identity_of(name))]:
            self.end(name)
