"""What the parts of one agent share: its name, its store, threads, status, jobs and network."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.job.job_context import send_event
from ckpt.agent.net.peer_network import PeerMessageHandler, PeerNetwork
from ckpt.agent.node.node_jobs import NodeJobs
from ckpt.agent.observability.status import Status
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.workers import Workers
from ckpt.events import Event, Events
from ckpt.ipc.messages import Message
from ckpt.settings import Settings, adopt_store_environment

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel

MakeNetwork = Callable[[EventLoop, Workers, str, PeerMessageHandler], PeerNetwork]


class NodeContext:
    """The shared objects of one agent; owns them. Main thread only. `network`: the connections to other agents; None in
    a job of one node."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        server: EventLoop,
        status: Callable[[], dict[str, Any]],
        peers: PeerMessageHandler,
        make_network: MakeNetwork,
    ) -> None:
        """`status`: returns all that is shown of the agent. `peers`: handles the messages of other agents."""
        self.url, self.settings, self.server, self.status = url, settings, server, status
        host = owner_of(socket.gethostname())
        self.incarnation = secrets.token_hex(8)
        # The name of this agent among others, for people too. Containers may share the host's name and the process id.
        self.agent_name = f"{host}:{os.getpid()}-{self.incarnation[:6]}"
        self.jobs = NodeJobs()
        self.network: PeerNetwork | None = None
        self.workers = Workers(server.post)
        self.events = Events(lambda event: server.post(lambda: self.emit_event(event)))
        self.store = StoreClient(url, settings, self.events, host)
        self.status_view = Status(url, settings, server, status, self.emit_event)
        self._peers, self._make_network = peers, make_network

    def emit_event(self, event: Event) -> None:
        """Shows the event, and sends it to a trainer of the current job or of the start under way."""
        job, start = self.jobs.current, self.jobs.start
        if job is not None:
            job.context.emit(event.name, event.message, event.loud, event.data)
            return
        self.status_view.record_event(event)
        if start is not None:
            send_event(start.peer, event)

    def send_status(self, peer: Peer, message: Message) -> None:
        """Answers a process with the status, as a blob, since it grows with the job."""
        peer.reply(int(message.fields["id"]), {}, blobs=[msgpack.packb(self.status())])

    def open_network(self, name: str) -> PeerNetwork:
        """The network of this agent. The first call makes it, and names this agent in it."""
        if self.network is None:
            self.network = self._make_network(self.server, self.workers, name, self._peers)
        return self.network

    def channel(self, name: str) -> Channel | None:
        """The channel to that agent; None if there is none."""
        return self.network.channel(name) if self.network is not None else None

    def notify(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a hint to another agent; it may be lost."""
        if self.network is not None:
            self.network.notify(name, fields, blobs)

    def adopt_environment(self, fields: dict[str, Any]) -> None:
        """Reopens the store if the newest start has other store settings in its environment."""
        if "store_env" in fields and adopt_store_environment(dict(fields["store_env"])):
            self.store.reopen()

    def close(self) -> None:
        if self.network is not None:
            self.network.close()
        self.workers.close()
        self.store.close()
        self.status_view.close()


def owner_of(host: str) -> str:
    """The host's name in the characters that a key may have (types.PATH_NAME)."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", host)[:40].lstrip(".") or "node"
