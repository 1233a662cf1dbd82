"""The membership of one rank: what it tells each agent that it joins, the first one and those that take its place."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ckpt.format.declaration import encode_layout
from ckpt.ipc.addresses import Address
from ckpt.ipc.client import Connection
from ckpt.ipc.control_page import ControlPage
from ckpt.ipc.failure_domains import find_own_domains
from ckpt.ipc.node_list import coordinator_of, encode_nodes
from ckpt.ipc.notice_sources import Sources
from ckpt.settings import Settings, store_environment
from ckpt.trainer.link.slots import Slots, mark_differing_hashes
from ckpt.types import Version


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """What this rank tells each agent that it joins. `peers`: the addresses of memory-only nodes. `nodes`: see
    `Membership.listen`; empty if all ranks are on one node, with neither memory-only nodes nor a secret file."""

    epoch: str
    rank: int
    world: int
    coordinate: str
    options: dict[str, Any]
    launch: str
    parent: str | None
    ancestors: list[Any]
    nodes: list[dict[str, Any]]
    peers: list[str]

    @property
    def is_follower(self) -> bool:
        """Whether the coordinator is the agent of another node, that of rank 0."""
        return bool(self.nodes) and self.rank not in self.nodes[0]["ranks"]


class Membership:
    """`terms`: None before the join. `awaited_version`: the version that somebody waits for in the store, and why.
    `unsavable`: the newest save that this rank cannot do, or has given up."""

    def __init__(self, settings: Settings, slots: Slots) -> None:
        self.terms: JoinTerms | None = None
        self.awaited_version: tuple[Version, str] | None = None
        self.unsavable: dict[str, str] | None = None
        self._settings = settings
        self._slots = slots
        self._listen_request: dict[str, Any] | None = None  # the fields of the last `listen` request
        self._standing_notices: tuple[float, list[dict[str, Any]]] = (0.0, [])  # when they were told, and the notices

    def listen(self, connection: Connection, secret: bytes) -> dict[str, Any]:
        """Has the agent take part in a job of several nodes. Returns this node: its name, addresses, failure domains,
        link speed and host. Errors: AgentError, UsageError."""
        settings = self._settings
        if settings.listen:
            Address.parse(settings.listen, "CKPT_LISTEN")
        wanted = {"secret": secret, "address": settings.listen, "name": ""}
        answer = connection.request("listen", wanted).fields
        node = {
            "name": str(answer["name"]),
            "addresses": [str(each) for each in answer["addresses"]],
            "domains": find_own_domains(settings.domain),
            "link_bytes_s": int(answer["link_bytes_s"]),
        }
        host = settings.listen.rpartition(":")[0] or "0.0.0.0"
        port = str(answer["addresses"][0]).rpartition(":")[2]
        self._listen_request = {**wanted, "address": f"{host}:{port}", "name": node["name"]}
        return node

    def listen_again(self, connection: Connection) -> None:
        """Has another agent listen at the same address and name, by which the other nodes know this one."""
        if self._listen_request is not None:
            connection.request("listen", self._listen_request)

    def join(self, connection: Connection, leave_attempt: int, resume: bool) -> ControlPage:
        """Makes this rank a member of the epoch, and returns the agent's control page. `resume`: the agent takes the
        place of another one, and gets the arenas. `leave_attempt`: see ControlView. Errors: AgentError."""
        terms, offer, slots = self.terms, self._slots.present_offer, self._slots.by_number
        assert terms is not None
        assert offer is not None
        handed = sorted(slots) if resume else []
        fields = {
            **{name: getattr(terms, name) for name in terms.__slots__ if name != "nodes"},
            "coordinator": coordinator_of(terms.nodes),
            "version": str(offer.version),
            "values_bytes": offer.values_bytes,
            "resume": resume,
            "arenas": handed,
            "leave_attempt": leave_attempt,
            "standing_notices": self._remaining_notices() if resume else [],
            "notice_sources": Sources.from_settings(self._settings).fields(),
            "store_env": store_environment(),
        }
        hashes = mark_differing_hashes(offer, self._slots.differing_tensors, terms.rank)
        nodes = [encode_nodes(terms.nodes)] if terms.nodes else []
        answer = connection.request(
            "join",
            fields,
            fds=[slots[number].arena.fd for number in handed],
            blobs=[encode_layout(offer.layout), hashes, *nodes],
        )
        return ControlPage(answer.fds.pop())

    def keep_notices(self, notices: list[dict[str, Any]]) -> None:
        """Keeps the notices that the agent has heard on this node: the next agent may not hear them again."""
        self._standing_notices = time.monotonic(), notices

    def _remaining_notices(self) -> list[dict[str, Any]]:
        told_s, notices = self._standing_notices
        gone_s = time.monotonic() - told_s
        return [{**each, "left_s": float(each["left_s"]) - gone_s} for each in notices]
