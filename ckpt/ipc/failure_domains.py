"""On which machine a node is. Containers of one host are nodes of their own, and are lost together: so each node tells
its host as the narrowest of its failure domains, below those that CKPT_DOMAIN names. Pure, but for `domains_here`.

The host is known by the kernel's boot id, which all containers on it have in common, whatever they are called.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.placement.placement import Placement

HOST = "host-"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Domains = Mapping[str, Sequence[str]]  # by node, widest first


def domains_here(named: str, boot_id: Path = BOOT_ID) -> list[str]:
    """This node's, widest first. `named`: with "/" between them, as CKPT_DOMAIN has them."""
    found = [each for each in named.split("/") if each]
    with contextlib.suppress(OSError):  # then each node counts as a host of its own
        found.append(HOST + hashlib.blake2b(boot_id.read_bytes().strip(), digest_size=6).hexdigest())
    return found


def named(domains: Sequence[str]) -> Sequence[str]:
    """Those of them that CKPT_DOMAIN names."""
    return domains[:-1] if _host(domains) else domains


def told_apart(domains: Domains) -> dict[str, tuple[str, ...]]:
    """Without hosts that have one node only, which is a domain of its own anyway; and where all are on one host without
    that: it says nothing of where to keep what."""
    hosts = {node: _host(each) for node, each in domains.items()}
    count = Counter(hosts.values())
    useful = {host for host in count if host and 1 < count[host] < len(domains)}
    return {node: tuple(each if hosts[node] in ("", *useful) else each[:-1]) for node, each in domains.items()}


def lost_with_hosts(domains: Domains, placement: Placement) -> dict[str, list[str]]:
    """By host: the nodes whose state goes with it. Only of hosts that have several nodes."""
    by_host: dict[str, list[str]] = {}
    for node, each in domains.items():
        by_host.setdefault(_host(each), []).append(node)
    lost = {host: placement.lost(names) for host, names in by_host.items() if host and len(names) > 1}
    return {host: sorted(names) for host, names in lost.items() if names}


def _host(domains: Sequence[str]) -> str:
    """ "": it has not told."""
    return domains[-1] if domains and domains[-1].startswith(HOST) else ""
