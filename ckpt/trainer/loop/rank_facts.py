"""The facts that the ranks tell each other on entry, and what must be the same on all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckpt.errors import UsageError
from ckpt.events import Events
from ckpt.ipc import secret
from ckpt.ipc.addresses import Address
from ckpt.ipc.client import Connection
from ckpt.settings import Settings, store_environment
from ckpt.trainer.link.options import UserOptions
from ckpt.trainer.state.mesh_coordinate import Coordinate

ALIKE = "all ranks must construct the Checkpointer alike"


def find_facts(asked: UserOptions, settings: Settings, agent: Connection, coordinate: Coordinate) -> dict[str, Any]:
    """What this rank tells all others. Errors: UsageError if the store's variables could not be sent to an agent, as
    one of the ranks will do."""
    store_environment()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Each network namespace of a machine counts as a host of its own.
    network = os.stat("/proc/self/ns/net").st_ino
    return {
        "url": asked.url,
        "host": f"{boot}-{network}",
        "agent": agent.incarnation,
        "coordinate": coordinate.text,
        "options": compared_options(asked),
        "state": sorted(asked.state),
        "peers": list(settings.peers),
        "launch": settings.launch,
        "secret": secret.secret_fingerprint(settings),
        # What the agent knows of earlier starts on several nodes: the newest epoch, and the run's secret.
        "known": agent.known_secret,
    }


def compared_options(asked: UserOptions) -> dict[str, Any]:
    switches = {name: getattr(asked, name) for name in ("strict", "generators", "take_over", "init", "trainable_only")}
    return {**asked.options, **switches}


def _find_difference(one: Any, other: Any, name: str = "options") -> tuple[str, Any, Any] | None:
    """The first option in which two ranks differ, by name such as `limits.memory`, and both values; None: none. Options
    of different kinds are compared as a whole."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        inside = f"{name}." if name != "options" else ""
        return next(filter(None, (_find_difference(one[key], other[key], inside + key) for key in one)), None)
    return None if one == other else (name, one, other)


def check_facts(facts: list[dict[str, Any]]) -> None:
    """Compares the ranks' facts. All ranks have the same facts, and so raise the same error. Errors: UsageError."""
    first = facts[0]
    for rank, said in enumerate(facts):
        whole = ((name, first[name], said[name]) for name in ("url", "state") if first[name] != said[name])
        found = _find_difference(first["options"], said["options"]) or next(whole, None)
        if found is not None:
            raise UsageError(f"{ALIKE}: {found[0]} is {found[1]!r} on rank 0 and {found[2]!r} on rank {rank}")
    seen: dict[str, int] = {}
    for rank, said in enumerate(facts):
        other = seen.setdefault(said["coordinate"], rank)
        if other != rank:
            raise UsageError(
                f"ranks {other} and {rank} have the same mesh coordinate {said['coordinate']!r}: give mesh= one that "
                "names every rank of the job"
            )


def warn_differing_settings(events: Events, facts: list[dict[str, Any]]) -> None:
    """Warns of settings that differ between ranks and that only count on rank 0's node: at the next start the launcher
    may place rank 0 on any other node."""
    for name, variable in (("peers", "CKPT_PEERS"), ("secret", "CKPT_SECRET_FILE")):
        # The order of peers does not matter.
        found = [{*said[name]} if name == "peers" else said[name] for said in facts]
        rank = next((rank for rank, each in enumerate(found) if each != found[0]), None)
        if rank is not None:
            events.emit(
                "nodes.differ",
                f"ckpt: {variable} of rank {rank} is not that of rank 0, which counts. The next start may have rank 0 "
                "on another node. Then it may not find the memory-only nodes, or what other nodes hold. Set it on all "
                f"nodes, to {'the same' if name == 'peers' else 'a file of the same secret'}",
                loud=True,
                variable=variable,
                rank=rank,
            )


def choose_secret(settings: Settings, former: bytes) -> bytes:
    """The run's secret, on rank 0. `former`: the secret of the newest start of which an agent is left; b"" if there is
    none. Errors: UsageError."""
    for each in settings.peers:
        Address.parse(each, "CKPT_PEERS")
    if settings.peers and settings.secret_file is None:
        raise UsageError(
            "CKPT_PEERS names memory-only nodes, which know the run by its secret: set CKPT_SECRET_FILE to the file "
            "that they were started with"
        )
    return secret.choose_secret(settings, former)
