"""Nodes that keep copies or parity for each other within one process: the agents' own parts, and between them a network
and a transport that carry what the test lets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgpack

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.net.transport import WRONG_MAX, Frames
from ckpt.agent.node.inventory_lease import InventoryLease
from ckpt.agent.replication.rebuild import Rebuild
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replicate import Assignment, assign_parity, evict_older, replicate
from ckpt.agent.replication.survey import SafeCheckpoint, find_replicated
from ckpt.agent.runtime.coroutines import Promise, Task
from ckpt.agent.runtime.workers import error_text
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import encode_local_parts
from ckpt.agent.state.job_facts import JobFacts
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.slots import AttemptTimes, SaveAttempt, SaveReason
from ckpt.errors import AgentError, DamagedData
from ckpt.format.frames import frame_hash
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Parity, Placement, Replicas, place
from ckpt.types import OWN_NODE, Identity
from tests.agent.nodes.staged import Turned, staged


class Link:
    """One node's transport and network: what it asks reaches the others as it would over a connection."""

    def __init__(self, fleet: Fleet, me: str) -> None:
        self.agent_name, self._fleet = me, fleet
        self.offers: dict[str, tuple[memoryview, Frames]] = {}

    @property
    def transport(self) -> Link:
        return self

    # -- as a transport

    def offer(self, name: str, source: memoryview, frames: Frames, urgent: bool) -> None:
        if name in self.offers:
            raise AgentError(f"{name} is offered already")
        self.offers[name] = source, frames
        self._fleet.moved.append((name, urgent))

    def withdraw(self, name: str) -> None:
        del self.offers[name]

    def fetch(
        self,
        peer: str,
        addresses: Sequence[Address],
        name: str,
        target: memoryview,
        frames: Frames,
        landed: Callable[[int], None] = lambda number: None,
        urgent: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> Fetched:
        self._fleet.moved.append((name, urgent))
        done: Future[None] = Future()
        if name in self._fleet.unending:
            return Fetched(done)
        given = self._fleet.links[peer].offers.get(name) if peer not in self._fleet.gone else None
        if given is None or name in self._fleet.broken:
            done.set_exception(AgentError(f"agent {peer} does not offer {name}"))
            return Fetched(done)
        source, theirs = given
        every, places = frames.byte_ranges(), theirs.byte_ranges()
        order = range(len(every)) if numbers is None else numbers
        for number, (at, length), value in zip(order, every, frames.hashes.tolist(), strict=True):
            offset, there = places[number]
            assert there == length
            target[at : at + length] = source[offset : offset + length]
            if list(frame_hash(target[at : at + length])) != value:
                done.set_exception(DamagedData(f"frame {number} of {name} arrived {WRONG_MAX} times with another hash"))
                return Fetched(done)
            landed(number)
        done.set_result(None)
        return Fetched(done)

    # -- as a network

    def addresses(self, node: NodeAt) -> list[Address]:
        return list(node.addresses)

    def request(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> Promise[Message]:
        return Task(self._request(name, fields, blobs))

    async def _request(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes]) -> Message:
        arrival, reply = Promise[None](), {"t": "reply", "id": 1}
        self._fleet.turned.post(lambda: arrival.set_result(None))
        await arrival
        if name in self._fleet.gone:
            raise AgentError(f"there is no connection to agent {name}")
        self._fleet.said.append((fields, blobs))
        if fields["t"] == "replicate" and self._fleet.midst:
            self._fleet.midst.pop(0)()
        if name in self._fleet.stuck and fields["t"] == "rebuild":
            await Promise[None]()
        if fields["t"] == "describe-snapshots":
            which, world = Identity.parse(fields["identity"]), int(fields["world"])
            theirs = {rank: self._fleet.held(name, which)[rank] for rank in fields["ranks"]}
            sizes = [[rank, arena.size_bytes] for rank, arena in theirs.items()]
            return Message({**reply, "sizes": sizes}, [], [encode_local_parts(which, world, theirs, fields["sealed"])])
        if fields["t"] == "survey":
            return Message(reply, [], [msgpack.packb(self._fleet.keeps(name).fields())])
        try:
            return Message(reply, [], await self._fleet.parities[name].serve(fields, blobs))
        except Exception as exc:  # as `serve_request` tells it
            raise AgentError(error_text(exc)) from exc

    def notify(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        identity = Identity.parse(fields["identity"])
        if name in self._fleet.gone or (fields["t"] == "evict" and name in self._fleet.deaf):
            return
        if fields["t"] == "evict":
            self._fleet.copies[name].evict_older_than(identity)
        else:
            self._fleet.parities[name].withdraw(identity, fields.get("reader", ""))

    def channel(self, name: str) -> object:
        return None if name in self._fleet.gone else object()


class Fetched:
    def __init__(self, done: Future[None]) -> None:
        self.completion = done

    def cancel(self) -> None:
        if not self.completion.done():
            self.completion.set_exception(AgentError("called off"))


class Copying:
    """The word of the coordinator's state machine on one checkpoint after the other: what ends well there is safe."""

    def __init__(self) -> None:
        self._facts = JobFacts(1)
        self._replicas = ReplicaState(self._facts)

    def begin(self, identity: Identity) -> None:
        times = AttemptTimes(0.0)
        attempt = self._facts.slots[0].attempt = SaveAttempt(1, 0, SaveReason.STEP, identity.version, "", times)
        self._replicas.begin_replication(attempt)

    def lost(self) -> None:
        """An agent is not connected any more."""
        self._replicas.record_lost_holder("b", self._replicas.peer_versions)

    def ended(self, error: str) -> str:
        """Why it is not safe; "": it is."""
        return self._replicas.record_replication(0, error, 0.0)


class Fleet:
    """`ranks`: of each node, by its name, the coordinator's first. `gone`: nodes that are lost. `deaf`: nodes that do
    not hear what is safe. `stuck`: nodes that make nothing again, and do not say so. `broken`, `unending`: offers of
    which nothing comes, with or without an error. `midst`: what happens each time that another node is asked to keep
    something."""

    def __init__(self, ranks: Mapping[str, Sequence[int]], option: Parity | Replicas) -> None:
        self.turned = Turned()
        self.copying = Copying()  # the coordinator's word on what is made
        self.said: list[tuple[dict[str, Any], Sequence[bytes]]] = []  # by nodes to others
        self.moved: list[tuple[str, bool]] = []  # what was offered and fetched, and whether a start waits for it
        self.ranks, self.option = ranks, option
        self.world = sum(map(len, ranks.values()))
        self.nodes = [NodeAt(name, (Address("h", 1),), tuple(held)) for name, held in ranks.items()]
        self.gone: set[str] = set()
        self.deaf: set[str] = set()
        self.stuck: set[str] = set()
        self.broken: set[str] = set()
        self.unending: set[str] = set()
        self.free_bytes: Callable[[str], int] = lambda name: 1 << 40  # what that node's machine has left
        self.midst: list[Callable[[], None]] = []
        self.arenas: dict[Identity, dict[int, Arena]] = {}  # all originals
        self.links = {name: Link(self, name) for name in ranks}
        self.leases: dict[str, InventoryLease] = {}
        self.copies: dict[str, ReplicaStore] = {}
        self.parities: dict[str, ReplicaService] = {}
        for name in ranks:
            self._begin(name)

    def _begin(self, name: str) -> None:
        """That node has an agent that keeps nothing yet."""
        lease = self.leases[name] = InventoryLease({}.__setitem__)
        network, held = cast(PeerNetwork, self.links[name]), lambda identity: self.held(name, identity)
        self.copies[name] = ReplicaStore(self.turned.workers, self.turned.post)
        self.copies[name].check_eviction = lambda epoch: lease.check(OWN_NODE, epoch)
        services = self.turned.workers, self.turned.post, self.copies[name], held, lambda: network
        self.parities[name] = ReplicaService(*services, lambda: self.free_bytes(name))

    def held(self, name: str, identity: Identity) -> dict[int, Arena]:
        """What that node has of it, by rank."""
        own = {rank: self.arenas[identity][rank] for rank in self.ranks[name]}
        return {**self.copies[name].kept.arenas_of(identity), **own}

    @property
    def me(self) -> str:
        """The first that is left."""
        return next(name for name in self.ranks if name not in self.gone)

    def protect(
        self,
        identity: Identity,
        safe: Identity | None = None,
        spoil: Callable[[], None] | None = None,
        needed: Mapping[str, Sequence[int]] | None = None,
    ) -> str:
        """Why it is not safe by what is made of it; "": it is. `spoil`: what goes wrong once all is staged.
        `needed`: as of Replication."""
        if identity not in self.arenas:
            self.arenas[identity] = staged(identity, self.world)
        placed = self.placed(identity)
        if isinstance(self.option, Parity):
            wanted = assign_parity(placed.groups, self.ranks)
        else:
            pairs = ((each.node, holder) for each in placed.protected_states for holder in each.holders)
            wanted = [Assignment(holder, {node: self.ranks[node]}) for node, holder in pairs]
        self.copying.begin(identity)
        if spoil is not None:
            spoil()
        store = self.copies[self.me]
        replicating = Task(replicate(store, self.parities[self.me], self.nodes, identity, wanted, safe, needed))
        self.turned.until(lambda: replicating.is_settled)
        assert isinstance(replicating.error, AgentError | None)
        why_not = self.copying.ended(str(replicating.error or ""))
        if not why_not:
            evict_older(cast(PeerNetwork, self.links[self.me]), store, replicating.result(), identity)
        assert not any(link.offers for name, link in self.links.items() if name not in self.gone)
        return why_not

    def placed(self, identity: Identity) -> Placement:
        sizes = {
            name: sum(self.arenas[identity][rank].size_bytes for rank in held) for name, held in self.ranks.items()
        }
        return place([PlacementNode(name, size, 1 << 40) for name, size in sizes.items()], self.option)

    def restart(self, name: str) -> None:
        """Its agent died, and is there again: it has what its ranks staged, and nothing of what it kept for others."""
        self.copies[name].close()
        self.links[name] = Link(self, name)
        self._begin(name)

    def keeps(self, name: str) -> Inventory:
        held = self.copies[name].inventory()
        for arenas in self.arenas.values():
            held.add_arenas(arenas[rank] for rank in self.ranks[name])
        return held

    def find(self, identity: Identity) -> SafeCheckpoint | None:
        """What the coordinator finds out of what is safe, if it would place now as it did for that one."""
        losses = {
            rank: kept.losses_max for kept in self.placed(identity).protected_states for rank in self.ranks[kept.node]
        }
        needs, network = [losses[rank] for rank in range(self.world)], cast(PeerNetwork, self.links[self.me])
        finding = Task(find_replicated(network, self.nodes, self.keeps(self.me), identity.epoch, needs))
        self.turned.until(lambda: finding.is_settled)
        return finding.result()

    def rebuild(
        self, identity: Identity, missing: Sequence[int] | None = None, urgent: bool = False
    ) -> tuple[dict[int, str], str]:
        """Who made which rank again, of what is lost with the nodes that are gone, and what else is `missing`.
        `urgent`: for a start."""
        made, running = self.begin_rebuild(identity, missing, urgent)
        self.turned.until(lambda: running.is_settled)
        assert not any(link.offers for name, link in self.links.items() if name not in self.gone)
        return made.node_by_rank, running.result()

    def check_rebuild(self, identity: Identity, *ranks: int, **how: Any) -> dict[int, str]:
        """Those ranks are made again, bit for bit, and no others. Who made which. `how`: as of `rebuild`."""
        made, error = self.rebuild(identity, **how)
        assert (sorted(made), error) == (list(ranks), "")
        self.check(identity, made)
        return made

    def begin_rebuild(
        self, identity: Identity, missing: Sequence[int] | None = None, urgent: bool = False
    ) -> tuple[Rebuild, Task[str]]:
        left = [node for node in self.nodes if node.name not in self.gone]
        held = {rank: [node.name] for node in left for rank in node.ranks if rank not in (missing or ())}
        lost = sorted(set(range(self.world)) - held.keys()) if missing is None else missing
        at = {rank: [node.name for node in left if rank not in node.ranks] for rank in lost}
        made = Rebuild(self.parities[self.me], left, identity, held, at, urgent=urgent)
        return made, Task(made.run())

    def kept(self, name: str) -> set[int]:
        """The steps of which that node keeps something."""
        return {each.version.step for each in self.copies[name].kept.identities}

    def forget_rebuilt(self) -> None:
        """What was made again is gone."""
        for copies in self.copies.values():
            while copies.kept.arenas_by_key:
                copies.kept.arenas_by_key.popitem()[1].close()

    def check(self, identity: Identity, made: Mapping[int, str]) -> None:
        """What was made is what was lost, bit for bit."""
        for rank, name in made.items():
            original, again = self.arenas[identity][rank], self.copies[name].kept.arenas_of(identity)[rank]
            at, length = original.tail()
            assert bytes(again.view[: at + length]) == bytes(original.view[: at + length])

    def close(self) -> None:
        for link in self.links.values():
            link.offers.clear()
        for copies in self.copies.values():
            copies.close()
        self.turned.close()
        for arenas in self.arenas.values():
            for arena in arenas.values():
                arena.close()
