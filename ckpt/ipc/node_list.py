"""The node list of a job: trainers send it to their agents as a blob, since a large job does not fit in a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from ckpt.errors import AgentError, UsageError
from ckpt.ipc.addresses import Address
from ckpt.ipc.bounded_msgpack import unpack_bounded

BLOB_BYTES_MAX = 16 << 20
NODES_MAX = 4096
ADDRESSES_MAX = 32
DOMAINS_MAX = 8


def encode_nodes(nodes: Sequence[Mapping[str, Any]]) -> bytes:
    """The node list as a blob. `nodes`: each with name, addresses, domains, ranks and, if known, link_bytes_s (see
    NodeAt); the node of rank 0 first."""
    keys = "name", "addresses", "domains", "ranks"
    rows = [[*(node[key] for key in keys), node.get("link_bytes_s", 0)] for node in nodes]
    packed: bytes = msgpack.packb(rows)
    return packed


def coordinator_of(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The name of rank 0's agent; "" if the list is empty, which means that all ranks are on one node."""
    return str(nodes[0]["name"]) if nodes else ""


@dataclass(frozen=True, slots=True)
class NodeAt:
    """One node of a job.

    `name`: the name of its agent. `addresses`: where the agent listens, best first. `ranks`: the ranks on the node.
    `domains`: its failure domains, widest first. `link_bytes_s`: speed of its link each way; 0: unknown."""

    name: str
    addresses: tuple[Address, ...]
    ranks: tuple[int, ...]
    domains: tuple[str, ...] = ()
    link_bytes_s: int = 0


def parse_nodes(blob: bytes, world: int) -> tuple[NodeAt, ...]:
    """The nodes of a job of `world` ranks, the node of rank 0 first. Errors: UsageError if the blob is malformed, names
    a node twice, or does not name each rank exactly once."""
    if len(blob) > BLOB_BYTES_MAX:
        raise UsageError(f"the list of nodes has {len(blob)} bytes; at most {BLOB_BYTES_MAX} are allowed")
    try:
        rows = unpack_bounded(blob, "the list of nodes")
        if not isinstance(rows, list) or not 0 < len(rows) <= NODES_MAX:
            raise UsageError(f"it must name 1 to {NODES_MAX} nodes")
        nodes = [_parse_node(*row) for row in rows]
    except (AgentError, ValueError, TypeError, OverflowError) as exc:
        raise UsageError(f"the list of nodes is not valid: {exc!r:.200}") from exc
    if sorted(rank for node in nodes for rank in node.ranks) != list(range(world)) or 0 not in nodes[0].ranks:
        raise UsageError(f"the list of nodes must name each of the {world} ranks once, rank 0 on the first node")
    if len({node.name for node in nodes}) < len(nodes):
        raise UsageError("the list of nodes names a node twice")
    return tuple(nodes)


def _parse_node(name: Any, addresses: Any, domains: Any, ranks: Any, link_bytes_s: Any) -> NodeAt:
    where = tuple(Address.parse(str(each)) for each in list(addresses)[:ADDRESSES_MAX])
    named = limit_domains([str(each) for each in domains])
    return NodeAt(str(name)[:100], where, tuple(map(int, ranks)), named, max(0, int(link_bytes_s)))


def limit_domains(domains: Sequence[str]) -> tuple[str, ...]:
    """At most DOMAINS_MAX of the domains: the widest ones, and always the narrowest, which is the node's host (see
    failure_domains)."""
    kept = domains if len(domains) <= DOMAINS_MAX else [*domains[: DOMAINS_MAX - 1], domains[-1]]
    return tuple(domain[:100] for domain in kept)
