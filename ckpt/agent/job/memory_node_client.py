"""The coordinator's client of the memory-only nodes that a job names: which are reachable, and how much memory each
lends.

Nodes are configured by address; their names come with their answers. An unreachable node delays a start by at most
PATIENCE_S and fails no training. It is called again as long as the job runs. Main thread only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.replication.replication_manager import LentMemory
from ckpt.errors import UsageError
from ckpt.events import Event
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt, limit_domains
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork

log = logging.getLogger("ckpt")

# How long a start waits for one node: as long as a node takes to see that its former coordinator is gone.
ANSWER_TIMEOUT_S = 30.0
CALL_S = 5.0  # between calls while a job runs
BUSY_S = 1.0  # until a node that lends to another job is asked again
MEMORY_NODES_MAX = 64

Later = Callable[[float, Callable[[], None]], None]
Answered = Callable[[Message | None, str, bool], None]


def parse_addresses(given: Any) -> tuple[Address, ...]:
    """The addresses in rank 0's message. Errors: UsageError."""
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > MEMORY_NODES_MAX:
        raise UsageError(f"CKPT_PEERS names more than {MEMORY_NODES_MAX} memory-only nodes")
    return tuple(dict.fromkeys(Address.parse(str(each)) for each in given))


class MemoryNodeClients:
    """All memory-only nodes of the newest job. `tell`: receives events. `changed`: called when the set of reachable
    nodes, or what one lends, has changed."""

    def __init__(
        self,
        url: str,
        network: Callable[[], PeerNetwork | None],
        later: Later,
        tell: Callable[[Event], None],
        changed: Callable[[], None],
    ) -> None:
        self._url = url
        self._network = network
        self._call_later = later
        self._emit_event = tell
        self._on_change = changed
        self.addresses: tuple[Address, ...] = ()  # of the newest job
        self._reachable_by_address: dict[Address, LentMemory] = {}
        self._errors_by_address: dict[Address, str] = {}  # the error of each unreachable node
        # Those of the unreachable nodes that were cut off just now, and may still be alive.
        self._recently_lost: dict[Address, object] = {}
        self._terms: CommitTerms | None = None  # of the job under way, once it has begun
        self._call_round = 0  # the number of the newest round of calls; older rounds stop

    @property
    def is_borrowing(self) -> bool:
        """True if a job of this agent borrows memory from memory-only nodes."""
        return self._terms is not None

    @property
    def has_pending_nodes(self) -> bool:
        """True while it is unknown whether some node is reachable: it has not answered yet, or was cut off just now."""
        known = {*self._reachable_by_address, *self._errors_by_address} - self._recently_lost.keys()
        return self.is_borrowing and any(address not in known for address in self.addresses)

    def reachable_nodes(self) -> tuple[LentMemory, ...]:
        """The reachable nodes, in a fixed order; a node with several addresses appears once."""
        by_name = {
            self._reachable_by_address[address].node.name: self._reachable_by_address[address]
            for address in sorted(self._reachable_by_address)
        }
        return tuple(by_name.values())

    def nodes(self) -> list[NodeAt]:
        return [each.node for each in self.reachable_nodes()]

    def table(self) -> list[dict[str, Any]]:
        """One row per address, for people."""
        found = []
        for address in self.addresses:
            lent = self._reachable_by_address.get(address)
            about: dict[str, Any] = {}
            if lent is not None:
                about = {"name": lent.node.name, "lends_bytes": lent.lend_bytes, "domains": list(lent.node.domains)}
            found.append({"address": str(address), **about, "error": self._errors_by_address.get(address, "") or None})
        return found

    def survey_nodes(self, wanted: Sequence[Address], launch: str, take_over: bool, then: Callable[..., None]) -> None:
        """Asks each node, for a start, what it holds. Calls `then(address, answer, error)` once for each address,
        within PATIENCE_S."""
        self.stop_borrowing()
        self.addresses = tuple(wanted)
        self._reachable_by_address = {
            each: lent for each, lent in self._reachable_by_address.items() if each in self.addresses
        }
        for address in self.addresses:
            self._survey_node(address, {"t": "start", "launch": launch, "take_over": take_over, "url": self._url}, then)

    def begin_borrowing(self, terms: CommitTerms, wanted: Sequence[Address]) -> None:
        """The job has begun an epoch, or its coordinator is back: calls the nodes again and again until `end`."""
        self.addresses = tuple(wanted)
        self._terms = terms
        self._call_round += 1
        self._call_nodes(self._call_round)

    def stop_borrowing(self) -> None:
        """The job is over, or another one is about to follow: stops the calls."""
        self._terms = None
        self._call_round += 1

    def broadcast_hint(self, fields: dict[str, Any]) -> None:
        """Sends a hint to each reachable node; it may be lost."""
        network = self._network()
        for lent in self.reachable_nodes():
            if network is not None:
                network.notify(lent.node.name, fields)

    def on_disconnect(self, name: str) -> bool:
        """The connection to that agent is gone. Returns True if the agent was one of the memory-only nodes."""
        network = self._network()
        if network is not None and network.channel(name) is not None:
            return False  # a new connection exists
        found = [address for address, lent in self._reachable_by_address.items() if lent.node.name == name]
        for address in found:
            self._mark_disconnected(address, "the connection has ended")
        return bool(found)

    def _mark_disconnected(self, address: Address, why: str) -> None:
        """Marks a node as disconnected; it may still be alive."""
        self._mark_unreachable(address, why)
        self._recently_lost[address] = token = object()
        self._call_later(ANSWER_TIMEOUT_S, functools.partial(self._forget_lost_node, address, token))

    def _forget_lost_node(self, address: Address, cut: object) -> None:
        if self._recently_lost.get(address) is cut:
            del self._recently_lost[address]

    # -- inside

    def _ask_node(self, address: Address, fields: dict[str, Any], then: Answered, blobs: Sequence[bytes] = ()) -> None:
        """Asks one node. `then` receives the answer or an error, and True if a connection existed."""
        network = self._network()
        if network is None:
            then(None, "this agent was not told to listen", False)
            return

        def found(name: str, error: str) -> None:
            if error:
                then(None, error, False)
            else:
                network.request(name, fields, blobs, lambda answer, why: then(answer, why, True))

        known = self._reachable_by_address.get(address)
        if known is not None and network.channel(known.node.name) is not None:
            found(known.node.name, "")
        else:
            network.connect_to_address(address, found)

    def _survey_node(self, address: Address, fields: dict[str, Any], then: Callable[..., None]) -> None:
        over = False

        def end(answer: Message | None, error: str) -> None:
            nonlocal over
            if not over:
                over = True
                then(address, answer, error)

        def ask() -> None:
            if not over:
                self._ask_node(address, fields, answered)

        def answered(answer: Message | None, error: str, was_there: bool) -> None:
            if over:
                return
            busy = self._busy_reason(answer)
            if busy:
                self._errors_by_address[address] = busy
                self._call_later(BUSY_S, ask)
                return
            if answer is not None:
                error = self._record_lent_memory(address, answer)
            if error:
                self._mark_unreachable(address, error)
            end(None if error else answer, error)

        def late() -> None:
            if not over:
                why = self._errors_by_address.get(address) or f"it has not answered within {ANSWER_TIMEOUT_S:g} s"
                self._mark_unreachable(address, why)
                end(None, why)

        self._call_later(ANSWER_TIMEOUT_S, late)
        ask()

    def _call_nodes(self, number: int) -> None:
        """Asks all nodes for their memory, every CALL_S. So a node is used again once it is back, or once another start
        releases it."""
        terms = self._terms
        if terms is None or number != self._call_round:
            return
        for address in self.addresses:
            self._ask_node(
                address,
                {"t": "borrow-memory", "url": self._url},
                self._make_borrow_callback(address, number),
                [terms.encode()],
            )
        self._call_later(CALL_S, lambda: self._call_nodes(number))

    def _make_borrow_callback(self, address: Address, number: int) -> Answered:
        def answered(answer: Message | None, error: str, was_there: bool) -> None:
            if number != self._call_round:
                return
            if not was_there:
                self._recently_lost.pop(address, None)
            elif answer is None and self._is_disconnected(address):
                # `on_disconnect` is called next, and handles the lost replicas.
                return
            error = self._busy_reason(answer) or error
            if not error and answer is not None:
                error = self._record_lent_memory(address, answer)
            if error and answer is None and was_there and address not in self._errors_by_address:
                self._mark_disconnected(address, error)
            elif error:
                self._mark_unreachable(address, error)

        return answered

    def _is_disconnected(self, address: Address) -> bool:
        lent, network = self._reachable_by_address.get(address), self._network()
        return lent is not None and network is not None and network.channel(lent.node.name) is None

    def _busy_reason(self, answer: Message | None) -> str:
        launch = answer.fields.get("busy") if answer is not None else None
        return f"it lends to launch {launch!r:.200}, whose coordinator is connected" if launch else ""

    def _record_lent_memory(self, address: Address, answer: Message) -> str:
        """Records what the node lends; returns the error if it lends nothing, else ""."""
        try:
            lends = answer.fields.get("lent_bytes")
            if type(lends) is not int or lends < 0:
                return "the agent there lends no memory; it is that of a job's node"
            name = str(answer.fields["name"])[:100]
            domains = limit_domains([str(each) for each in list(answer.fields["domains"]) if each])
            if not name or "\0" in "".join((name, *domains)):
                return "it has answered a name or a domain that is none"
            link = max(0, int(answer.fields["link_bytes_s"]))
            lent = LentMemory(NodeAt(name, (address,), (), domains, link), lends)
        except (LookupError, TypeError, ValueError) as exc:
            return f"it has answered what cannot be read: {exc!r:.200}"
        before = self._reachable_by_address.get(address)
        self._reachable_by_address[address] = lent
        self._recently_lost.pop(address, None)
        if before is None or before.node != lent.node:
            known = self._errors_by_address.pop(address, None)
            text = f"the memory-only node at {address} lends {lends >> 20:,} MiB"
            about = {"address": str(address), "lends_bytes": lends}
            self._emit_event(Event("memory_node.joined", text, known is not None, about))
        if before != lent:
            self._on_change()
        return ""

    def _mark_unreachable(self, address: Address, why: str) -> None:
        was = self._reachable_by_address.pop(address, None)
        if was is not None or not self._errors_by_address.get(address):
            text = (
                f"the memory-only node at {address} cannot be used ({why}): training goes on without it, and it is "
                f"called again. There, `ckpt agent {redact_url(self._url)} --listen {address} --memory SIZE` has to "
                "run, "
                "for this job alone and with the same CKPT_SECRET_FILE, and this node has to reach it"
            )
            self._emit_event(Event("memory_node.unreachable", text, True, {"address": str(address)}))
        news = was is not None or address not in self._errors_by_address
        self._errors_by_address[address] = why
        if news:
            self._on_change()
