"""The coordinator's client of the memory-only nodes that a job names: which are reachable, and how much memory each
lends.

Nodes are configured by address; their names come with their answers. An unreachable node delays a start by at most
ANSWER_TIMEOUT_S and fails no training. It is called again as long as the job runs. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.replication.replication_manager import LentMemory
from ckpt.agent.runtime.coroutines import CallLater, gather, race, sleep, spawn, time_out
from ckpt.errors import AgentError, CkptError, UsageError
from ckpt.events import Event
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt, limit_domains
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork

# How long a start waits for one node: as long as a node takes to see that its former coordinator is gone.
ANSWER_TIMEOUT_S = 30.0
CALL_S = 5.0  # between calls while a job runs
BUSY_S = 1.0  # until a node that lends to another job is asked again
MEMORY_NODES_MAX = 64


def parse_addresses(given: Any) -> tuple[Address, ...]:
    """The addresses in rank 0's message. Errors: UsageError."""
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > MEMORY_NODES_MAX:
        raise UsageError(f"CKPT_PEERS names more than {MEMORY_NODES_MAX} memory-only nodes")
    return tuple(dict.fromkeys(Address.parse(str(each)) for each in given))


@dataclass(slots=True)
class _Node:
    """What is known of the node at `address`. `lent`: what it lends; None: it is not reachable. `error`: why it was
    of no use at the last call; None: it was of use, or was not called. `cut`: set while it was cut off just now, and
    may still be alive."""

    address: Address
    lent: LentMemory | None = None
    error: str | None = None
    cut: object | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether it may be alive without being reachable."""
        return self.cut is not None or (self.lent is None and self.error is None)


class MemoryNodeClients:
    """All memory-only nodes of the newest job. `tell`: receives events. `changed`: called when the set of reachable
    nodes, or what one lends, has changed."""

    def __init__(
        self,
        url: str,
        network: Callable[[], PeerNetwork | None],
        later: CallLater,
        tell: Callable[[Event], None],
        changed: Callable[[], None],
    ) -> None:
        self._url, self._network, self._call_later = url, network, later
        self._emit_event, self._on_change = tell, changed
        self._nodes: dict[Address, _Node] = {}  # of the newest job
        self._terms: CommitTerms | None = None  # of the job under way, once it has begun
        self._call_round = 0  # the number of the newest round of calls; older rounds stop

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(self._nodes)

    @property
    def is_borrowing(self) -> bool:
        """True if a job of this agent borrows memory from memory-only nodes."""
        return self._terms is not None

    @property
    def has_pending_nodes(self) -> bool:
        """True while it is unknown whether some node is reachable: it has not answered yet, or was cut off just now."""
        return self.is_borrowing and any(node.is_unknown for node in self._nodes.values())

    def reachable_nodes(self) -> tuple[LentMemory, ...]:
        """The reachable nodes, in a fixed order; a node with several addresses appears once."""
        found = [lent for address in sorted(self._nodes) if (lent := self._nodes[address].lent) is not None]
        return tuple({lent.node.name: lent for lent in found}.values())

    def nodes(self) -> list[NodeAt]:
        return [each.node for each in self.reachable_nodes()]

    def table(self) -> list[dict[str, Any]]:
        """One row per address, for people."""
        found = []
        for address, node in self._nodes.items():
            about: dict[str, Any] = {}
            if (lent := node.lent) is not None:
                about = {"name": lent.node.name, "lends_bytes": lent.lend_bytes, "domains": list(lent.node.domains)}
            found.append({"address": str(address), **about, "error": node.error})
        return found

    def _set_addresses(self, wanted: Sequence[Address]) -> None:
        self._nodes = {address: self._nodes.get(address) or _Node(address) for address in wanted}

    async def survey_nodes(
        self, wanted: Sequence[Address], launch: str, take_over: bool
    ) -> list[tuple[Address, Message | None]]:
        """Asks each node, for a start, what it holds. Returns the answers within ANSWER_TIMEOUT_S; None: it is of no
        use."""
        self.stop_borrowing()
        self._set_addresses(wanted)
        fields = {"t": "survey", "launch": launch, "take_over": take_over, "url": self._url}
        return await gather(self._survey_node(node, fields) for node in self._nodes.values())

    def begin_borrowing(self, terms: CommitTerms, wanted: Sequence[Address]) -> None:
        """The job has begun an epoch, or its coordinator is back: calls the nodes until `stop_borrowing`."""
        self._set_addresses(wanted)
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
        for node in self.nodes():
            if network is not None:
                network.notify(node.name, fields)

    def on_disconnect(self, name: str) -> bool:
        """The connection to that agent is gone. Returns True if the agent was one of the memory-only nodes."""
        network = self._network()
        if network is not None and network.channel(name) is not None:
            return False  # a new connection exists
        found = [each for each in self._nodes.values() if each.lent is not None and each.lent.node.name == name]
        for node in found:
            self._mark_disconnected(node, "the connection has ended")
        return bool(found)

    # -- inside

    def _mark_disconnected(self, node: _Node, why: str) -> None:
        """Marks a node as disconnected; it may still be alive."""
        self._mark_unreachable(node, why)
        node.cut = cut = object()

        def forget() -> None:
            if node.cut is cut:
                node.cut = None

        self._call_later(ANSWER_TIMEOUT_S, forget)

    def _mark_unreachable(self, node: _Node, why: str) -> None:
        is_news = node.lent is not None or node.error is None
        node.lent, node.error = None, why
        if is_news:
            text = (
                f"the memory-only node at {node.address} cannot be used ({why}): training goes on without it, and it "
                f"is called again. There, `ckpt agent {redact_url(self._url)} --listen {node.address} --memory SIZE` "
                "has to run, for this job alone and with the same CKPT_SECRET_FILE, and this node has to reach it"
            )
            self._emit_event(Event("memory_node.unreachable", text, True, {"address": str(node.address)}))
            self._on_change()

    def _record_answer(self, node: _Node, answer: Message | None, error: str) -> str:
        """Records what the node lends, by its answer; returns the error if it lends nothing, else ""."""
        if answer is None:
            return error
        try:
            lent = _parse_lent_memory(node.address, answer.fields)
        except AgentError as exc:
            return str(exc)
        before, error_before = node.lent, node.error
        node.lent, node.error, node.cut = lent, None, None
        if before is None or before.node != lent.node:
            text = f"the memory-only node at {node.address} lends {lent.lend_bytes >> 20:,} MiB"
            about = {"address": str(node.address), "lends_bytes": lent.lend_bytes}
            self._emit_event(Event("memory_node.joined", text, error_before is not None, about))
        if before != lent:
            self._on_change()
        return ""

    def _is_connected(self, node: _Node) -> bool:
        network = self._network()
        return node.lent is not None and network is not None and network.channel(node.lent.node.name) is not None

    async def _ask(
        self, node: _Node, fields: dict[str, Any], blobs: Sequence[bytes] = ()
    ) -> tuple[Message | None, str, bool]:
        """Asks one node. Returns the answer or an error, and True if a connection existed."""
        network = self._network()
        if network is None:
            return None, "this agent was not told to listen", False
        was_there = False
        try:
            if node.lent is not None and self._is_connected(node):
                name = node.lent.node.name
            else:
                name = await network.connect_to_address(node.address)
            was_there = True
            return await network.request(name, fields, blobs), "", True
        except CkptError as exc:
            return None, str(exc), was_there

    async def _survey_node(self, node: _Node, fields: dict[str, Any]) -> tuple[Address, Message | None]:
        answer: Message | None = None
        try:
            answer, error = await race(self._await_lease(node, fields), time_out(self._call_later, ANSWER_TIMEOUT_S))
        except TimeoutError:
            error = node.error or f"it has not answered within {ANSWER_TIMEOUT_S:g} s"
        if error:
            self._mark_unreachable(node, error)
        return node.address, None if error else answer

    async def _await_lease(self, node: _Node, fields: dict[str, Any]) -> tuple[Message | None, str]:
        """Asks the node until it does not lend to another job any more. Returns its answer, and why it is of no use."""
        while True:
            answer, error, _ = await self._ask(node, fields)
            error = self._record_answer(node, answer, error)
            if answer is None or not answer.fields.get("busy"):
                return answer, error
            node.error = error
            await sleep(self._call_later, BUSY_S)

    def _call_nodes(self, number: int) -> None:
        """Asks all nodes for their memory, every CALL_S. So a node is used again once it is back, or once another start
        releases it."""
        terms = self._terms
        if terms is None or number != self._call_round:
            return
        for node in self._nodes.values():
            spawn(self._call_node(number, node, terms))
        self._call_later(CALL_S, lambda: self._call_nodes(number))

    async def _call_node(self, number: int, node: _Node, terms: CommitTerms) -> None:
        fields = {"t": "borrow-memory", "url": self._url}
        answer, error, was_there = await self._ask(node, fields, [terms.encode()])
        if number != self._call_round:
            return
        if not was_there:
            node.cut = None
        elif answer is None and node.lent is not None and not self._is_connected(node):
            return  # `on_disconnect` is called next, and handles the lost replicas
        error = self._record_answer(node, answer, error)
        if error and answer is None and was_there and node.error is None:
            self._mark_disconnected(node, error)
        elif error:
            self._mark_unreachable(node, error)


def _parse_lent_memory(address: Address, fields: dict[str, Any]) -> LentMemory:
    """What the node lends, as it has answered. Errors: AgentError if it lends nothing."""
    if fields.get("busy"):
        raise AgentError(f"it lends to launch {fields['busy']!r:.200}, whose coordinator is connected")
    try:
        lends = fields.get("lent_bytes")
        if type(lends) is not int or lends < 0:
            raise AgentError("the agent there lends no memory; it is that of a job's node")
        name = str(fields["name"])[:100]
        domains = limit_domains([str(each) for each in list(fields["domains"]) if each])
        if not name or "\0" in "".join((name, *domains)):
            raise AgentError("it has answered a name or a domain that is none")
        link = max(0, int(fields["link_bytes_s"]))
    except (LookupError, TypeError, ValueError) as exc:
        raise AgentError(f"it has answered what cannot be read: {exc!r:.200}") from exc
    return LentMemory(NodeAt(name, (address,), (), domains, link), lends)
