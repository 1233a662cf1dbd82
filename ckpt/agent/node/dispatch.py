"""The one table by which an agent dispatches messages, and who may send which kind: a trainer or tool on its socket, or
another agent.

A process proves by the socket that it belongs to the user; another agent proves by the handshake that it knows the
run's secret. Each kind needs one condition more.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.agent.node.inventory_lease import InventoryLease
from ckpt.agent.node.node_jobs import NodeJobs
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.snapshots.remote_share import RemotePeer
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message
from ckpt.types import Epoch, Identity


class Sender(enum.Enum):
    """The condition that a message's sender must meet."""

    # Processes: trainers and tools.
    NEWCOMER = "a process of this host"
    PROCESS = "a process of this host that has said hello"
    TRAINER = "a trainer, here or on another node of its job"
    RANK = "a trainer that has joined a job"
    # Other agents of the run.
    ANYONE = "any agent; the message only asks for information"
    START_PENDING = "an agent, while a rank of this node waits for a start"
    SURVEYOR = "an agent that holds a lease on the inventory of this node"
    COORDINATOR = "the coordinator of the epoch that the message names, which this node has a part in"
    EVICTING_COORDINATOR = "as COORDINATOR, unless a newer start forbids that something is evicted (InventoryLease)"
    COORDINATOR_OR_SURVEYOR = "the coordinator of some epoch that this node has a part in, or SURVEYOR"
    FOLLOWER = "an agent with ranks in the named job, which is coordinated here"
    JOB_NODE = "FOLLOWER, or else COORDINATOR"
    OWNER = "any agent; the message affects only what that agent has begun itself"


PROCESSES = frozenset((Sender.NEWCOMER, Sender.PROCESS, Sender.TRAINER, Sender.RANK))


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of message. `sender`: who may send it. `handle`: called with the connection and the message; errors as
    those of `Dispatch.handle`."""

    kind: str
    sender: Sender
    handle: Callable[[Any, Message], None]


class Dispatch:
    """The table of one agent. Each kind has one route."""

    def __init__(self, permissions: Permissions, routes: Iterable[Route]) -> None:
        self._permissions = permissions
        self.routes: dict[str, Route] = {}
        for route in routes:
            if route.kind in self.routes:
                raise ValueError(f"two routes for the message {route.kind!r}")
            self.routes[route.kind] = route

    def handle(self, connection: Any, message: Message) -> None:
        """Has the message handled, if its sender may send it. `connection`: the channel to another agent, or the peer
        of a process. Errors: AgentError for an unknown kind or a sender without permission; any other error of the
        handler, also whatever a malformed message leads to."""
        route = self.routes.get(message.kind)
        if route is None:
            self._permissions.require_hello(connection)
            raise AgentError(f"the agent does not know the message {message.kind!r:.100}")
        self._permissions.check(route.sender, connection, message.fields)
        route.handle(connection, message)


class Permissions:
    """`is_coordinator`: whether an agent coordinates an epoch (None: any) that this node has a part in. `awaits_start`:
    whether a rank of this node waits for a start."""

    def __init__(
        self,
        jobs: NodeJobs,
        inventory_lease: InventoryLease,
        is_coordinator: Callable[[str, Epoch | None], bool],
        awaits_start: Callable[[], bool],
    ) -> None:
        self._jobs, self._inventory_lease = jobs, inventory_lease
        self.is_coordinator, self._awaits_start = is_coordinator, awaits_start

    def check(self, sender: Sender, connection: Any, fields: Mapping[str, Any]) -> None:
        """Errors: AgentError if that connection may not send the message; ValueError if it may send none; whatever a
        malformed message leads to."""
        if isinstance(connection, Peer | RemotePeer):
            self._check_process(sender, connection)
        elif sender in PROCESSES:
            raise AgentError(f"{fields['t']!r} is a message of {sender.value}, and comes from agent {connection.peer}")
        else:
            self._check_agent(_required_sender(sender, fields), connection.peer, fields)

    def require_hello(self, connection: Any) -> None:
        """Errors: ValueError for a process that has not said hello."""
        if isinstance(connection, Peer) and not connection.role:
            raise ValueError("the first message on a connection is hello")

    def _check_process(self, sender: Sender, peer: Peer | RemotePeer) -> None:
        if sender is not Sender.NEWCOMER:
            self.require_hello(peer)
        match sender:
            case Sender.NEWCOMER | Sender.PROCESS if isinstance(peer, RemotePeer):
                raise AgentError("only a rank of this node can ask for that")
            case Sender.RANK if self._jobs.followed_rank_of(peer) is None:
                self._jobs.member_of(peer)
            case _ if sender not in PROCESSES:
                raise AgentError(f"that is a message of {sender.value}, and comes from process {peer.pid}")

    def _check_agent(self, sender: Sender, name: str, fields: Mapping[str, Any]) -> None:
        lease = self._inventory_lease
        if sender is Sender.JOB_NODE:
            sender = Sender.COORDINATOR if self._jobs.job_of(epoch_of(fields)) is None else Sender.FOLLOWER
        match sender:
            case Sender.START_PENDING if not self._awaits_start():
                raise AgentError("no rank of this node waits for a start")
            case Sender.SURVEYOR if not lease.has_lease(name):
                raise AgentError(f"no start of agent {name} has asked what lies here")
            case Sender.COORDINATOR_OR_SURVEYOR if not (self.is_coordinator(name, None) or lease.has_lease(name)):
                raise AgentError(f"agent {name} coordinates nothing that this node has a part in")
            case Sender.FOLLOWER:
                epoch = epoch_of(fields)
                job = self._jobs.job_of(epoch)
                if job is None:
                    raise AgentError(f"{epoch} is not coordinated here")
                job.share_of(name)
            case Sender.COORDINATOR | Sender.EVICTING_COORDINATOR as who:
                epoch = epoch_of(fields)
                if not self.is_coordinator(name, epoch):
                    raise AgentError(f"this node has no part in {epoch}, or agent {name} does not coordinate it")
                if _tells_of_checkpoint(fields):
                    lease.on_epoch_begun(name, epoch)
                if who is Sender.EVICTING_COORDINATOR:
                    lease.check(name, epoch)


def _required_sender(sender: Sender, fields: Mapping[str, Any]) -> Sender:
    """The sender that a message with these fields needs, where they do more or less than most of its kind."""
    match fields["t"]:
        case "survey" if "launch" in fields:
            return Sender.START_PENDING  # a start takes this node
        case "start-outcome" if fields["epoch"] is None and fields.get("settled") is None:
            return Sender.OWNER  # it only ends what the sender holds
        case "replicate" if fields.get("rereplication"):
            return Sender.COORDINATOR_OR_SURVEYOR  # a replica of an older epoch
        case "control-word" if fields["slot"] is None or fields["word"] == 0:
            return Sender.COORDINATOR  # a verdict, or an appointment is cleared
    return sender


def _tells_of_checkpoint(fields: Mapping[str, Any]) -> bool:
    """Whether a message tells of a checkpoint of the epoch that it names: then the start of the sender has begun that
    epoch. That the job is over says nothing: the start may have come to nothing."""
    return fields["t"] == "replicate" or (fields["t"] == "evict" and fields["what"] in ("older", "older-epochs"))


def epoch_of(fields: Mapping[str, Any]) -> Epoch:
    """The epoch that a message names. Errors: ValueError, LookupError."""
    if "epoch" in fields:
        return Epoch.parse(str(fields["epoch"]))
    return Identity.parse(str(fields["identity"])).epoch
