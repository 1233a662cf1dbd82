"""The peer network of an agent: its listener, its connections to other agents of the run, and requests on them.

A job on one node has no peer network. Everything runs on the agent's main thread, except the look-up of host names.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import socket
from collections.abc import Sequence
from typing import Any, Protocol

import psutil

from ckpt.agent.net.channel import Channel
from ckpt.agent.net.dialer import PeerListener, PendingHandshake, dial
from ckpt.agent.net.handshake import Answerer, Dialler, Role, Session
from ckpt.agent.net.progress import PeerRequests, Progress
from ckpt.agent.net.tcp_sender import Transport
from ckpt.agent.runtime.connections import Loop
from ckpt.agent.runtime.coroutines import Promise, Task, run_on
from ckpt.agent.runtime.workers import Lane, Workers
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError, UsageError
from ckpt.ipc.addresses import Address, SocketAddress, resolve
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import ADDRESSES_MAX, NodeAt
from ckpt.ipc.secret import SECRET_BYTES

log = logging.getLogger("ckpt")

SECRETS_MAX = 8  # each start may bring a new one, and work of earlier starts may still be under way
SIMULTANEOUS_DIAL_S = 5.0  # two agents that dial each other within this time count as doing so at once
ANY_ADDRESS = Address("0.0.0.0", 0)
WILDCARD_HOSTS = ("", "0.0.0.0", "::")  # hosts that mean all interfaces


class PeerMessageHandler(Protocol):
    """Handles the messages of other agents."""

    def peer_message(self, channel: Channel, message: Message) -> None:
        """Handles a message. A CkptError is sent back if the message has an id; any other error closes the channel."""
        ...

    def peer_closed(self, channel: Channel) -> None:
        """The channel has ended or was replaced by a newer one. Requests on it have failed by now."""
        ...


class PeerNetwork:
    """The connections of this agent to others; owns the listeners, the channels and the transport. `me`: its name."""

    def __init__(
        self,
        loop: Loop,
        workers: Workers,
        me: str,
        receiver: PeerMessageHandler,
        clock: Clock | None = None,
    ) -> None:
        """`clock`: for the time-outs of requests."""
        self.agent_name = me
        self.transport = Transport(self._make_dialler)
        self.rate_limit_bytes_s: float | None = None
        self.progress = Progress()  # of the requests to other agents
        self._requests = PeerRequests(self.progress, loop.call_later, clock or SystemClock())
        self._loop, self._workers, self._handler = loop, workers, receiver
        self._secrets: dict[str, bytes] = {}  # by run, newest last
        self._listeners: dict[Address, PeerListener] = {}  # by requested address
        self._channels: dict[str, Channel] = {}
        # Channels that other agents dialled, in order. A peer dials all our addresses, and sends its first message on
        # the channel that it keeps.
        self._incoming_channels: dict[Channel, None] = {}
        # By peer, channels that this agent dialled within the last SIMULTANEOUS_DIAL_S.
        self._recent_dials: dict[str, Channel] = {}
        self._pending_dials: dict[str | Address, Task[str]] = {}  # by name, or by address if that is unknown

    def listen(self, secret: bytes, at: str) -> list[Address]:
        """Lets agents that know the secret connect; returns the addresses to reach this agent.

        `at`: the address to listen on; "": any. Existing listeners stay open, since other agents know their addresses.
        Errors: AgentError if it cannot listen there; UsageError for a malformed secret or address."""
        if len(secret) != SECRET_BYTES:
            raise UsageError(f"the run's secret has {len(secret)} bytes instead of {SECRET_BYTES}")
        run = secret_id_of(secret)
        self._secrets.pop(run, None)
        self._secrets[run] = secret
        while len(self._secrets) > SECRETS_MAX:
            del self._secrets[next(iter(self._secrets))]
        wanted = Address.parse(at) if at else ANY_ADDRESS
        for asked, listener in self._listeners.items():
            if wanted in (asked, listener.address):
                return reachable_addresses(listener.address)
            if listener.address.port == wanted.port and listener.address.host in WILDCARD_HOSTS:
                return reachable_addresses(wanted)  # this listener covers the address already
        made = PeerListener(
            self._loop, wanted, lambda: Answerer(self._secrets.get, self.agent_name), self._accept_connection
        )
        self._listeners[wanted] = made
        return reachable_addresses(made.address)

    @property
    def secret_id(self) -> str:
        """The name of the newest secret in handshakes; "" before there is one."""
        return next(reversed(self._secrets), "")

    @property
    def secret(self) -> bytes:
        """The newest secret; b"" before there is one."""
        return self._secrets.get(self.secret_id, b"")

    @property
    def has_waiting_bytes(self) -> bool:
        """Whether some channel has bytes to send."""
        return any(channel.waiting_bytes for channel in self._channels.values())

    def channel(self, name: str) -> Channel | None:
        """The channel to that agent; None if there is none."""
        return self._channels.get(name)

    def connect(self, node: NodeAt) -> Promise[str]:
        """Connects to an agent, unless a channel exists. Returns a promise of its name, which this call never settles.
        Errors of the promise: AgentError."""
        if node.name not in self._channels:
            return self._start_dial(node.name, node.addresses, node.name)
        name = Promise[str]()
        self._loop.post(lambda: name.set_result(node.name))
        return name

    def connect_to_address(self, address: Address) -> Promise[str]:
        """As `connect`, to the agent at `address`, whose name is not known yet."""
        return self._start_dial(address, [address], None)

    def addresses(self, node: NodeAt) -> list[Address]:
        """The addresses of that agent. Those on the host that its channel leads to come first."""
        channel = self._channels.get(node.name)
        return sorted(node.addresses, key=lambda address: channel is None or address.host != channel.host)

    def set_rate_limit(self, bytes_per_s: float | None) -> None:
        """Limits the bytes per second of all transfers that are not urgent, in each direction. Errors: ValueError."""
        self.transport.set_rate(bytes_per_s)
        self.rate_limit_bytes_s = bytes_per_s

    def notify(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a hint. It is lost if there is no channel to the agent."""
        channel = self._channels.get(name)
        if channel is not None:
            channel.send(fields, blobs)

    def request(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> Promise[Message]:
        """Sends a request. Returns a promise of the answer, which this call never settles. Errors of the promise:
        AgentError. The request may take as long as the peer reports progress (see the module progress)."""
        channel = self._channels.get(name)
        if channel is not None:
            return self._requests.send(channel, fields, blobs)
        answer = Promise[Message]()
        self._loop.post(lambda: answer.set_error(AgentError(f"there is no connection to agent {name}")))
        return answer

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        for dialling in list(self._pending_dials.values()):
            dialling.drop_listeners()
            dialling.cancel()
        self._pending_dials.clear()
        for channel in [*self._channels.values(), *self._incoming_channels]:
            channel.close()
        self._channels.clear()
        self._incoming_channels.clear()
        self._requests.clear()
        self.transport.close()

    # -- ChannelHandler

    def message(self, channel: Channel, message: Message) -> None:
        if channel in self._incoming_channels and not self._keep_incoming(channel):
            return
        if message.kind in ("reply", "error"):
            self._requests.handle_answer(channel, message)
        elif message.kind == "progress":
            self._requests.extend(channel, int(message.fields["id"]))
        elif message.kind == "keep-connection":
            pass
        else:
            self._handler.peer_message(channel, message)

    def channel_closed(self, channel: Channel, why: AgentError) -> None:
        log.info("%s", why)
        if channel in self._incoming_channels:
            del self._incoming_channels[channel]
            return
        if self._channels.get(channel.peer) is channel:
            del self._channels[channel.peer]
        self._requests.fail(channel, why)
        self._handler.peer_closed(channel)

    # -- inside

    def _make_dialler(self, about: str, peer: str) -> Dialler:
        """The dialling side of a handshake for the transfer `about` from agent `peer`."""
        run, secret = next(reversed(self._secrets.items()))
        return Dialler(secret, run, Role.DATA, self.agent_name, about, peer)

    def _accept_connection(self, sock: socket.socket, session: Session) -> None:
        if session.role is Role.DATA:
            self.transport.accept(sock, session)
        else:
            self._incoming_channels[Channel(self._loop, sock, session, self)] = None

    def _keep_incoming(self, channel: Channel) -> bool:
        """Keeps a channel that another agent dialled and has chosen for its messages. Returns whether it is kept.

        It replaces an older channel to that agent, whose end may not have been noticed yet. If both agents dialled each
        other at once, the channel that the agent with the lower name dialled stays."""
        self._incoming_channels.pop(channel, None)
        old = self._channels.get(channel.peer)
        at_once = old is not None and self._recent_dials.get(channel.peer) is old
        if at_once and self.agent_name < channel.peer:
            channel.close()
            return False
        self._add_channel(channel)
        if old is not None:
            old.close()
            why = AgentError(f"agent {channel.peer} has connected anew")
            if at_once:
                self._requests.fail(old, why)
            else:
                self.channel_closed(old, why)
        return True

    def _add_channel(self, channel: Channel) -> None:
        self._channels[channel.peer] = channel
        self._recent_dials.pop(channel.peer, None)

    def _record_dial(self, channel: Channel) -> None:
        self._recent_dials[channel.peer] = channel

        def later() -> None:
            if self._recent_dials.get(channel.peer) is channel:
                del self._recent_dials[channel.peer]

        self._loop.call_later(SIMULTANEOUS_DIAL_S, later)

    def _start_dial(self, key: str | Address, addresses: Sequence[Address], name: str | None) -> Task[str]:
        """Dials an agent. `key`: two calls with the same one share the attempts. `name`: the agent's name; None:
        unknown."""
        dialling = self._pending_dials.get(key)
        if dialling is None:
            dialling = self._pending_dials[key] = Task(self._dial(addresses, name))
            dialling.when_settled(lambda: self._pending_dials.pop(key, None))
        return dialling

    async def _dial(self, addresses: Sequence[Address], name: str | None) -> str:
        """Dials all addresses of an agent at once, since some may lead nowhere or to another agent. Returns its name.
        Errors: AgentError."""
        places = await run_on(self._workers, Lane.FRONT, lambda: _resolve_addresses(addresses))
        if not places:
            raise AgentError(f"none of {', '.join(map(str, addresses))} can be looked up")
        first, errors, handshakes = Promise[str](), list[str](), list[PendingHandshake]()

        def done(sock: socket.socket, session: Session) -> None:
            # A channel may exist already: by another address, or since the peer has dialled this agent meanwhile.
            if session.peer in self._channels:
                sock.close()
            else:
                channel = Channel(self._loop, sock, session, self)
                self._add_channel(channel)
                self._record_dial(channel)
                channel.send({"t": "keep-connection"})
            first.set_result(session.peer)

        def failed(error: AgentError) -> None:
            errors.append(str(error))
            if len(errors) == len(places):
                first.set_error(AgentError("; ".join(errors[:3])))

        run, secret = next(reversed(self._secrets.items()))
        try:
            for place in places:
                try:
                    exchange = Dialler(secret, run, Role.CONTROL, self.agent_name, "", name)
                    handshakes.append(dial(self._loop, place, exchange, done, failed))
                except AgentError as exc:
                    failed(exc)
            return await first
        finally:
            for each in handshakes:
                each.cancel()


def secret_id_of(secret: bytes) -> str:
    """The name of a secret in handshakes: a hash that does not reveal the secret."""
    return hashlib.blake2b(secret, digest_size=8, person=b"ckpt-run").hexdigest()


def reachable_addresses(at: Address) -> list[Address]:
    """The addresses at which others reach a listener at `at`. For "all interfaces" they are this host's addresses, the
    loopback ones last."""
    if at.host not in WILDCARD_HOSTS:
        return [at]
    found: list[tuple[int, Address]] = []
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET or (each.family == socket.AF_INET6 and at.host == "::"):
                ip = ipaddress.ip_address(each.address.split("%")[0])
                if not ip.is_link_local:
                    found.append((int(ip.is_loopback), Address(str(ip), at.port)))
    return [address for _, address in sorted(found)][:ADDRESSES_MAX]


def link_bytes_s(address: Address) -> int:
    """The speed of the network link with that address, in bytes/s each way, as the system reports it; 0 if unknown, as
    for the loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == address.host for each in addresses):
            stats = psutil.net_if_stats().get(name)
            return stats.speed * 1_000_000 // 8 if stats is not None else 0  # Mbit/s; 0: unknown
    return 0


def _resolve_addresses(addresses: Sequence[Address]) -> list[SocketAddress]:
    places = []
    for address in addresses:
        try:
            places += resolve(address)
        except AgentError as exc:
            log.info("%s", exc)
    return places
