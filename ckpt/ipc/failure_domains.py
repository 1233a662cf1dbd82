"""The failure domains of nodes: the ones that CKPT_DOMAIN names and, as the narrowest one, the host.

Containers on one host are separate nodes, but they are lost together. So each node reports its host as a failure
domain. The kernel's boot id identifies the host, since all its containers share it. Only `find_own_domains` does I/O.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.placement.placement import Placement

HOST_PREFIX = "host-"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Domains = Mapping[str, Sequence[str]]  # by node, widest first


def find_own_domains(named: str, boot_id: Path = BOOT_ID) -> list[str]:
    """The failure domains of this node, widest first. `named`: the value of CKPT_DOMAIN, names separated by "/"."""
    found = [each for each in named.split("/") if each]
    # Without a readable boot id each node counts as a host of its own.
    with contextlib.suppress(OSError):
        found.append(HOST_PREFIX + hashlib.blake2b(boot_id.read_bytes().strip(), digest_size=6).hexdigest())
    return found


def without_host(domains: Sequence[str]) -> Sequence[str]:
    """The domains that CKPT_DOMAIN named: all but the host."""
    return domains[:-1] if _host(domains) else domains


def relevant_domains(domains: Domains) -> dict[str, tuple[str, ...]]:
    """The domains of each node, without the hosts that do not matter for placement. A host is left out if it has only
    one node, since every node is a domain of its own. It is also left out if all nodes are on it."""
    hosts = {node: _host(each) for node, each in domains.items()}
    count = Counter(hosts.values())
    useful = {host for host in count if host and 1 < count[host] < len(domains)}
    return {node: tuple(each if hosts[node] in ("", *useful) else each[:-1]) for node, each in domains.items()}


def find_lost_with_hosts(domains: Domains, placement: Placement) -> dict[str, list[str]]:
    """For each host with several nodes: the nodes whose state is lost when the host is lost. Hosts without a loss are
    left out."""
    by_host: dict[str, list[str]] = {}
    for node, each in domains.items():
        by_host.setdefault(_host(each), []).append(node)
    lost = {host: placement.lost_nodes(names) for host, names in by_host.items() if host and len(names) > 1}
    return {host: sorted(names) for host, names in lost.items() if names}


def _host(domains: Sequence[str]) -> str:
    """The host among a node's domains; "" if the node reported none."""
    return domains[-1] if domains and domains[-1].startswith(HOST_PREFIX) else ""
