"""The coordinator's replication manager: decides which nodes keep whose copies or parity, and starts the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.agent.replication.parity_worker import WORK_BYTES
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replicate import Assignment, assign_parity, evict_older, replicate
from ckpt.agent.replication.survey import SafeCheckpoint, find_replicated
from ckpt.agent.runtime.memory_plan import MemoryPlan
from ckpt.agent.state.retention_rule import surviving_nodes
from ckpt.ipc.failure_domains import find_lost_with_hosts, relevant_domains, without_host
from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import GENERATIONS, Kept, Parity, Placement, Replicas, place
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.node_list import NodeAt

PLACEMENTS_USED_MAX = 8  # more than there are slots
NODES_SHOWN = 64
HOLDERS_SHOWN = 8
NOTES_SHOWN = 16
SLOTS_MIN = 2  # with fewer, each snapshot waits for the replication of the one before


class ReplicationManager:
    """Manages the replicas of one job. `nodes`: its nodes, this one first. `lenders`: connected memory-only nodes."""

    def __init__(
        self,
        network: PeerNetwork,
        copies: ReplicaStore,
        service: ReplicaService,
        nodes: Sequence[NodeAt],
        option: Replicas | Parity | None,
        memory_nodes: Callable[[], Sequence[LentMemory]] = tuple,
    ) -> None:
        self.option = option
        self.placement: Placement | None = None
        self.nodes_lost_with_host: dict[str, list[str]] = {}  # machine -> nodes whose state is lost with that machine
        self._placements_used: dict[
            Identity, Placement
        ] = {}  # newest checkpoints -> the placement each was replicated under
        self._nodes_involved: dict[Identity, set[str]] = {}  # newest checkpoints -> nodes that took part in any attempt
        self._memory_nodes = memory_nodes
        self._network, self._replicas, self._service, self._nodes = network, copies, service, tuple(nodes)
        unnamed = [min(node.ranks) for node in self._nodes if not without_host(node.domains)]
        # One rank of each node without CKPT_DOMAIN, if other nodes have it.
        self._ranks_without_domain = unnamed if len(unnamed) < len(self._nodes) else []

    @property
    def has_holders(self) -> bool:
        """Whether the placement has any node keep a replica of another node."""
        return self.placement is not None and any(kept.losses_max for kept in self.placement.protected_states)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other node that could keep a replica."""
        return len(self._nodes) == 1 and not self._memory_nodes()

    @property
    def is_requested(self) -> bool:
        """Whether the user asked for replicas and there are other nodes, with or without room for them."""
        return self.option is not None and not self.is_alone

    @property
    def losses_to_survive(self) -> int:
        """How many nodes the user wants each checkpoint to survive the loss of."""
        if self.option is None:
            return 0
        return self.option.parity if isinstance(self.option, Parity) else self.option.n

    @property
    def holders_by_node(self) -> tuple[Kept, ...]:
        """For each node, the nodes that keep its replicas; "" is this node."""

        def name(node: str) -> str:
            return "" if node == self._network.agent_name else node

        every = self.placement.protected_states if self.placement is not None else ()
        return tuple(Kept(name(each.node), each.losses_max, tuple(map(name, each.holders))) for each in every)

    def update_placement(self, sizes: Mapping[str, int], plans: Mapping[str, MemoryPlan], used: int = 0) -> int:
        """Decides which nodes keep whose replicas. Returns the number of slots that there is room for beside them.

        Replicas take precedence over a third slot, but not over the `used` slots. A third slot also waits for the
        memory of earlier starts' checkpoints if that is what the replicas lack. The former placement stays while it
        fits, if the new one would leave out one of its nodes. `sizes`: bytes of one slot's arenas, by node. `plans`:
        by node; all use the smallest slot count."""
        slots = max(used, min(plan.slots for plan in plans.values()))
        if self.option is None or slots < SLOTS_MIN:
            self.placement, self.nodes_lost_with_host = None, {}
            return slots
        former = self.placement
        scratch_bytes = WORK_BYTES if isinstance(self.option, Parity) else 0
        names = {node.name for node in self._nodes}
        lent = [each for each in self._memory_nodes() if each.node.name not in names]
        told = {node.name: node.domains for node in (*self._nodes, *(each.node for each in lent))}
        domains = relevant_domains(told)
        memory_nodes = [
            PlacementNode(
                each.node.name,
                lend_bytes=each.lend_bytes,
                domains=domains[each.node.name],
                link_bytes_s=each.node.link_bytes_s,
                has_state=False,
            )
            for each in lent
        ]
        chosen, left = None, slots
        for wanted in range(slots, max(SLOTS_MIN, used) - 1, -1):
            nodes = [
                PlacementNode(
                    node.name,
                    state_bytes=sizes[node.name],
                    lend_bytes=max(0, plans[node.name].replica_bytes_max(wanted) - scratch_bytes),
                    domains=domains[node.name],
                    link_bytes_s=node.link_bytes_s,
                )
                for node in self._nodes
            ]
            nodes += memory_nodes
            found = place(nodes, self.option, former)
            if former is not None and not surviving_nodes(former.protected_states) <= surviving_nodes(
                found.protected_states
            ):
                found = former if _fits(former, nodes) else found
            chosen, left = found, wanted
            possible = min(self.losses_to_survive, len(nodes) - 1)
            if all(each.achieved >= possible for each in found.shortfalls):
                break  # More memory would not improve the protection.
        assert chosen is not None  # The first pass of the loop has set it.
        self.placement, self.nodes_lost_with_host = chosen, find_lost_with_hosts(told, chosen)
        awaits_memory = any(plan.kept_bytes for plan in plans.values())
        return left if self.has_holders or awaits_memory else slots

    def depends_on(self, name: str, identity: Identity) -> bool:
        """Whether that checkpoint is less protected without agent `name`'s memory. True if its holders are unknown."""
        return identity not in self._nodes_involved or name in self._nodes_involved[identity]

    def find_holders(self, identity: Identity, node: str) -> list[str]:
        """The nodes that were given copies of what `node` staged of that checkpoint; "" is this node. Parity has none:
        nothing is rebuilt for a commit."""
        me, placement = self._network.agent_name, self._placements_used.get(identity)
        if placement is None or isinstance(placement.option, Parity):
            return []
        return ["" if name == me else name for name in self._keepers_by_node(placement).get(node or me, [])]

    def _keepers_by_node(self, placement: Placement | None) -> dict[str, list[str]]:
        if placement is None:
            return {}
        if isinstance(placement.option, Replicas):
            return {kept.node: list(kept.holders) for kept in placement.protected_states}
        found: dict[str, list[str]] = {kept.node: [] for kept in placement.protected_states}
        for group in placement.groups:
            for at, node in enumerate(group.members):
                if group.parity and node in group.home_members:
                    found[node] = [*group.members[at + 1 :], *group.members[:at]]
        return found

    def placement_fields(self) -> dict[str, Any]:
        """The placement for display: who keeps whose replicas, bytes in memory and on the network per checkpoint."""
        placement, option = self.placement, self.option
        parity = {"data": option.data, "parity": option.parity} if isinstance(option, Parity) else None
        copies = option.n if isinstance(option, Replicas) else None
        if placement is None:
            return {"copies": copies, "parity": parity, "nodes": [], "shortfalls": []}
        holders = self._keepers_by_node(placement)
        return {
            "copies": copies,
            "parity": parity,
            "nodes": [
                {
                    "node": load.node,
                    "kept_by": holders.get(load.node, []),
                    "own_bytes": load.own_bytes,
                    "keeps_bytes": load.keeps_all_bytes,
                    "sends_bytes": load.sends_bytes,
                    "receives_bytes": load.receives_bytes,
                    "seconds": load.seconds,
                }
                for load in placement.loads
            ],
            "generations": GENERATIONS,
            "scratch_bytes": WORK_BYTES if parity else 0,
            "shortfalls": [
                f"{each.node}: {each.achieved} of {each.requested}: {each.reason}" for each in placement.shortfalls
            ],
            "exposed": list(placement.exposed_domains),
            "notes": [*self.warnings, *placement.notes],
        }

    def status_fields(self) -> dict[str, Any]:
        """`table`, cut to NODES_SHOWN nodes so that it fits into one message; `nodes_left_out` counts the rest."""
        table = self.placement_fields()
        rows = [{**row, "kept_by": row["kept_by"][:HOLDERS_SHOWN]} for row in table["nodes"][:NODES_SHOWN]]
        notes = {name: told[:NOTES_SHOWN] for name, told in table.items() if name in ("shortfalls", "exposed", "notes")}
        return {**table, **notes, "nodes": rows, "nodes_left_out": len(table["nodes"]) - len(rows)}

    def describe(self) -> str:
        """The placement in one line."""
        placement, parity = self.placement, isinstance(self.option, Parity)
        if placement is None or not self.has_holders:
            short = placement.shortfalls if placement is not None else ()
            why = short[0].reason if short else "they were not asked for, or there is too little memory"
            return f"no node keeps {'parity' if parity else 'copies'} of another's snapshots: {why}"
        most = max(load.keeps_all_bytes for load in placement.loads)
        sends = max(load.sends_bytes for load in placement.loads)
        least = min(kept.losses_max for kept in placement.protected_states)
        text = f"any {least} of {len(placement.loads)} nodes may be lost"
        for each in [each for each in placement.shortfalls if each.achieved == least][:1]:
            text += f", not {each.requested} as was asked for ({each.reason})"
        if not least:
            unkept = [kept.node for kept in placement.protected_states if not kept.losses_max]
            text = f"no node has memory for the state of {', '.join(unkept[:HOLDERS_SHOWN])}: if that is lost, so is "
            text += "every checkpoint in memory"
        notes = "".join(f"; {note}" for note in [*self.warnings, *placement.notes][:3])
        how = f"each node keeps up to {most >> 20:,} MiB for others, and sends up to {sends >> 20:,} MiB each time"
        return f"{'parity' if parity else 'copies'}: {text}; {how}{notes}"

    @property
    def warnings(self) -> list[str]:
        """Which nodes share a machine or failure domain, or may, and which state would be lost with it."""
        if self.placement is None or not self.has_holders:
            return []
        found = [
            f"{', '.join(names[:HOLDERS_SHOWN])} and the nodes that keep their state are on one machine: if it is "
            "lost, so is that state"
            for _, names in sorted(self.nodes_lost_with_host.items())
        ]
        domains = [
            each for each in self.placement.exposed_domains if each.rpartition("/")[2] not in self.nodes_lost_with_host
        ]
        found += [f"if {each} is lost as a whole, so is state that is nowhere else" for each in domains]
        if self._ranks_without_domain:
            ranks = ", ".join(map(str, self._ranks_without_domain[:HOLDERS_SHOWN]))
            which = f"those of ranks {ranks}" if len(self._ranks_without_domain) > 1 else f"that of rank {ranks}"
            found.append(f"CKPT_DOMAIN is set on other nodes and not on {which}: each counts as a domain of its own")
        return found

    async def replicate(
        self, identity: Identity, safe: Identity | None, needed: Sequence[Kept] | None = None
    ) -> Sequence[NodeAt]:
        """Replicates a checkpoint under the current placement. `safe`: the newest replicated checkpoint so far.
        `needed`: who keeps the replicas of `safe` that must stay; None: unknown. Returns the nodes for `evict_older`,
        once every replica is in place and verified. Errors: AgentError."""
        placement = self.placement
        assert placement is not None
        # A checkpoint that is replicated already keeps its placement until this replication succeeds.
        if identity != safe or identity not in self._placements_used:
            self._placements_used[identity] = placement
        # The holders of a checkpoint that a survey found to be replicated are unknown.
        if identity in self._nodes_involved or identity != safe:
            self._nodes_involved.setdefault(identity, set()).update(_involved_nodes(placement))
        while len(self._placements_used) > PLACEMENTS_USED_MAX:
            oldest = next(iter(self._placements_used))
            del self._placements_used[oldest]
            self._nodes_involved.pop(oldest, None)
        ranks = {node.name: node.ranks for node in self._nodes}
        named: dict[str, list[int]] = {}
        for kept in needed or ():
            for holder in kept.holders:
                named.setdefault(holder or self._network.agent_name, []).extend(
                    ranks[kept.node or self._network.agent_name]
                )
        if isinstance(placement.option, Parity):
            assignments = assign_parity(placement.groups, ranks)
        else:
            assignments = [
                Assignment(holder, {kept.node: ranks[kept.node]})
                for kept in placement.protected_states
                for holder in kept.holders
            ]
        about = self._replicas, self._service, self._all_nodes, identity, assignments, safe
        nodes = await replicate(*about, named if needed is not None else None)
        self._placements_used[identity] = placement
        return nodes

    def evict_older(self, nodes: Sequence[NodeAt], identity: Identity) -> None:
        """That checkpoint, which `replicate` has replicated, counts as such: peers may drop older replicas."""
        evict_older(self._network, self._replicas, nodes, identity)

    async def find_replicated(
        self, epoch: Epoch, safe: Identity | None, held: Iterable[Identity], world: int
    ) -> SafeCheckpoint | None:
        """Surveys the nodes for the newest replicated checkpoint of that epoch (see survey.py). Returns the result, or
        None if a node did not answer. `safe`: the newest that this agent knows to be replicated, even if only in part,
        which peers are not told. `held`: the checkpoints in this node's slots. Each node's part is searched for, also
        if no node has memory for it now: a replica may have been kept before."""
        own = self._replicas.inventory()
        ranks = {node.name: node.ranks for node in self._nodes}
        for identity in held:
            own.add_local_snapshots(identity, world, ranks.get(self._network.agent_name, ()))
        losses = {
            rank: kept.losses_max
            for kept in self.holders_by_node
            for rank in ranks[kept.node or self._network.agent_name]
        }
        own.announced_replicated = max(filter(None, (safe, own.announced_replicated)), default=None)
        wanted = [max(1, losses.get(rank, 0)) for rank in range(world)]
        found = await find_replicated(self._network, self._all_nodes, own, epoch, wanted)
        if found is not None and found.newest is not None:
            # Its holders are unknown: a peer may keep a replica from before this agent was started.
            self._nodes_involved.pop(found.newest, None)
        return found

    @property
    def _all_nodes(self) -> list[NodeAt]:
        return [*self._nodes, *(each.node for each in self._memory_nodes())]


def _involved_nodes(placement: Placement) -> set[str]:
    """The nodes that give or keep some replica in that placement."""
    kept = {name for each in placement.protected_states for name in (each.node, *each.holders)}
    return kept | {name for group in placement.groups if group.parity for name in group.members}


def _fits(placement: Placement, nodes: Iterable[PlacementNode]) -> bool:
    """Whether `nodes` have the memory that the placement needs, and the state sizes that it was made for."""
    found = {node.id: node for node in nodes}
    return all(
        load.node in found
        and found[load.node].state_bytes == load.own_bytes
        and found[load.node].lend_bytes >= load.keeps_all_bytes
        for load in placement.loads
    )


@dataclass(frozen=True, slots=True)
class LentMemory:
    """A memory-only node that is connected. `node` has no ranks."""

    node: NodeAt
    lend_bytes: int
