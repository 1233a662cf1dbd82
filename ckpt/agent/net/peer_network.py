"""The peer network of an agent: its listener, its connections to other agents of the run, and requests on them.

A job on one node has no peer network. Everything runs on the agent's main thread, except the look-up of host names.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil

from ckpt.agent.net.channel import Channel
from ckpt.agent.net.dialer import Handshaking, Loop, PeerListener, dial
from ckpt.agent.net.handshake import Answerer, Dialler, Role, Session
from ckpt.agent.net.progress import ANSWER_S, LOOK_S, PeerRequest, Progress, Then
from ckpt.agent.net.tcp_sender import TcpTransport
from ckpt.agent.net.transport import MakeTransport, Transport
from ckpt.agent.runtime.workers import Lane, Workers
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError, UsageError
from ckpt.ipc.addresses import Address, SocketAddress, resolve
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import ADDRESSES_MAX, NodeAt
from ckpt.ipc.secret import SECRET_BYTES

log = logging.getLogger("ckpt")

SECRETS_MAX = 8  # each start may bring a new one, and work of earlier starts may still be under way
AT_ONCE_S = 5.0  # two agents that dial each other within this time count as doing so at once
ANYWHERE = Address("0.0.0.0", 0)
EVERYWHERE = ("", "0.0.0.0", "::")  # hosts that mean all interfaces


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
        bulk: Workers,
        me: str,
        receiver: PeerMessageHandler,
        clock: Clock | None = None,
        transport: MakeTransport = TcpTransport,
    ) -> None:
        """`clock`: for the time-outs of requests. `transport`: makes the transport that moves frames."""
        self.me = me
        self._clock = clock or SystemClock()
        self.transport: Transport = transport(self._greet)
        self.limit_bytes_s: float | None = None
        self.progress = Progress()  # of the requests to other agents
        self._loop, self._bulk, self._receiver = loop, bulk, receiver
        self._secrets: dict[str, bytes] = {}  # by run, newest last
        self._listeners: dict[Address, PeerListener] = {}  # by requested address
        self._channels: dict[str, Channel] = {}
        # Channels that other agents dialled, with the peer's host. A peer dials all our addresses, and sends its first
        # message on the channel that it keeps.
        self._called: dict[Channel, str] = {}
        self._hosts: dict[str, str] = {}
        # By peer, channels that this agent dialled within the last AT_ONCE_S.
        self._dialled: dict[str, Channel] = {}
        self._dialling: dict[str, _Dialling] = {}
        self._finding: dict[Address, _Finding] = {}
        self._asked: dict[int, PeerRequest] = {}
        self._looking = False
        self._numbers = itertools.count(1)

    def listen(self, secret: bytes, at: str) -> list[Address]:
        """Lets agents that know the secret connect; returns the addresses to reach this agent.

        `at`: the address to listen on; "": any. Existing listeners stay open, since other agents know their addresses.
        Errors: AgentError if it cannot listen there; UsageError for a malformed secret or address."""
        if len(secret) != SECRET_BYTES:
            raise UsageError(f"the run's secret has {len(secret)} bytes instead of {SECRET_BYTES}")
        run = run_of(secret)
        self._secrets.pop(run, None)
        self._secrets[run] = secret
        while len(self._secrets) > SECRETS_MAX:
            del self._secrets[next(iter(self._secrets))]
        wanted = Address.parse(at) if at else ANYWHERE
        for asked, listener in self._listeners.items():
            if wanted in (asked, listener.address):
                return addresses_of(listener.address)
            if listener.address.port == wanted.port and listener.address.host in EVERYWHERE:
                return addresses_of(wanted)  # this listener covers the address already
        made = PeerListener(self._loop, wanted, lambda: Answerer(self._secrets.get, self.me), self._greeted)
        self._listeners[wanted] = made
        return addresses_of(made.address)

    @property
    def run(self) -> str:
        """The name of the newest secret in handshakes; "" before there is one."""
        return next(reversed(self._secrets), "")

    @property
    def secret(self) -> bytes:
        """The newest secret; b"" before there is one."""
        return self._secrets.get(self.run, b"")

    @property
    def waiting(self) -> bool:
        """Whether some channel has bytes to send."""
        return any(channel.waiting_bytes for channel in self._channels.values())

    def channel(self, name: str) -> Channel | None:
        """The channel to that agent; None if there is none."""
        return self._channels.get(name)

    def connect(self, node: NodeAt, then: Callable[[str], None]) -> None:
        """Connects to an agent, unless a channel exists. Calls `then("")`, or `then(why)` on failure; never inside this
        call."""
        if node.name in self._channels:
            self._loop.post(lambda: then(""))
        elif node.name in self._dialling:
            self._dialling[node.name].then.append(then)
        else:
            dialling = self._dialling[node.name] = _Dialling(node, [then])
            self._bulk.run(
                Lane.FRONT, lambda: _look_up(node.addresses), lambda done: self._dial(dialling, done.result())
            )

    def find(self, address: Address, then: Callable[[str, str], None]) -> None:
        """Connects to the agent at `address`, whose name is not known yet. Calls `then(its name, "")`, or
        `then("", why)` on failure; never inside this call."""
        if address in self._finding:
            self._finding[address].then.append(then)
            return
        finding = self._finding[address] = _Finding([then])

        def over() -> bool:
            return self._finding.get(address) is not finding

        def end(name: str, error: str) -> None:
            del self._finding[address]
            finding.cancel()
            for each in finding.then:
                each(name, error)

        def done(sock: socket.socket, session: Session) -> None:
            # A channel may exist already, by another address.
            if over() or session.peer in self._channels:
                sock.close()
            else:
                channel = Channel(self._loop, sock, session, self)
                self._keep(channel, str(sock.getpeername()[0]))
                channel.send({"t": "here"})
            if not over():
                end(session.peer, "")

        def failed(error: AgentError) -> None:
            finding.errors.append(str(error))
            if len(finding.errors) >= finding.places and not over():
                end("", "; ".join(finding.errors[:3]))

        def looked(places: list[SocketAddress]) -> None:
            finding.places = max(1, len(places))
            if not places:
                failed(AgentError(f"{address} cannot be looked up"))
            run, secret = next(reversed(self._secrets.items()))
            for place in places if not over() else ():
                try:
                    handshake = Dialler(secret, run, Role.CONTROL, self.me)
                    finding.greetings.append(dial(self._loop, place, handshake, done, failed))
                except AgentError as exc:
                    failed(exc)

        self._bulk.run(Lane.FRONT, lambda: _look_up([address]), lambda found: looked(found.result()))

    def addresses(self, node: NodeAt) -> list[Address]:
        """The addresses of that agent. Those on the host that its channel leads to come first."""
        host = self._hosts.get(node.name)
        return sorted(node.addresses, key=lambda address: address.host != host)

    def limit(self, bytes_per_s: float | None) -> None:
        """Limits the bytes per second of all transfers that are not urgent, in each direction. Errors: ValueError."""
        self.transport.set_rate(bytes_per_s)
        self.limit_bytes_s = bytes_per_s

    def tell(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a hint. It is lost if there is no channel to the agent."""
        channel = self._channels.get(name)
        if channel is not None:
            channel.send(fields, blobs)

    def ask(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes], then: Then) -> None:
        """Sends a request. Calls `then(answer, "")`, or `then(None, why)` on failure; never inside this call. The
        request may take as long as the peer reports progress (see the module progress)."""
        channel = self._channels.get(name)
        if channel is None:
            self._loop.post(lambda: then(None, f"there is no connection to agent {name}"))
            return
        number = next(self._numbers)
        self._asked[number] = PeerRequest(channel, then, self._clock.now_s() + ANSWER_S)
        channel.send({**fields, "id": number}, blobs)
        self._look_soon()

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        for dialling in self._dialling.values():
            dialling.cancel()
        for finding in self._finding.values():
            finding.cancel()
        self._finding.clear()
        for channel in [*self._channels.values(), *self._called]:
            channel.close()
        self._channels.clear()
        self._called.clear()
        self._asked.clear()
        self.transport.close()

    # -- ChannelHandler

    def message(self, channel: Channel, message: Message) -> None:
        if channel in self._called and not self._keep_called(channel, self._called.pop(channel)):
            return
        if message.kind in ("reply", "error"):
            number = int(message.fields["id"])
            if number in self._asked and self._asked[number].channel is not channel:
                raise ValueError(f"it answers request {number}, which another agent was asked")
            error = str(message.fields.get("message", ""))[:2000] or "refused"
            self._answered(number, *((message, "") if message.kind == "reply" else (None, error)))
        elif message.kind == "moving":
            asked = self._asked.get(int(message.fields["id"]))
            if asked is not None and asked.channel is channel:
                asked.moves(self._clock.now_s())
                self.progress.moved()
        elif message.kind == "here":
            pass
        else:
            self._receiver.peer_message(channel, message)

    def closed(self, channel: Channel, why: AgentError) -> None:
        log.info("%s", why)
        if channel in self._called:
            del self._called[channel]
            return
        if self._channels.get(channel.peer) is channel:
            del self._channels[channel.peer]
        self._end_asked(channel, why)
        self._receiver.peer_closed(channel)

    # -- inside

    def _answered(self, number: int, message: Message | None, error: str) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            self.progress.moved()
            asked.then(message, error)

    def _look_soon(self) -> None:
        """Starts the timer for overdue requests. One timer serves all, since there may be many requests a second."""
        if not self._looking:
            self._looking = True
            self._loop.later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = False
        now_s = self._clock.now_s()
        late = [number for number, asked in self._asked.items() if asked.due_s <= now_s]
        if len(self._asked) > len(late):
            self._look_soon()
        for number in late:
            asked = self._asked.get(number)
            if asked is not None:
                self._answered(number, None, f"agent {asked.channel.peer} has not answered in time")

    def _greet(self, about: str, peer: str) -> Dialler:
        """The dialling side of a handshake for the transfer `about` from agent `peer`."""
        run, secret = next(reversed(self._secrets.items()))
        return Dialler(secret, run, Role.DATA, self.me, about, peer)

    def _greeted(self, sock: socket.socket, session: Session) -> None:
        if session.role is Role.DATA:
            self.transport.accept(sock, session)
        else:
            host = str(sock.getpeername()[0])
            self._called[Channel(self._loop, sock, session, self)] = host

    def _keep_called(self, channel: Channel, host: str) -> bool:
        """Keeps a channel that another agent dialled and has chosen for its messages. Returns whether it is kept.

        It replaces an older channel to that agent, whose end may not have been noticed yet. If both agents dialled each
        other at once, the channel that the agent with the lower name dialled stays."""
        old = self._channels.get(channel.peer)
        at_once = old is not None and self._dialled.get(channel.peer) is old
        if at_once and self.me < channel.peer:
            channel.close()
            return False
        self._keep(channel, host)
        if old is not None:
            old.close()
            why = AgentError(f"agent {channel.peer} has connected anew")
            if at_once:
                self._end_asked(old, why)
            else:
                self.closed(old, why)
        return True

    def _keep(self, channel: Channel, host: str) -> None:
        self._channels[channel.peer] = channel
        self._hosts[channel.peer] = host
        self._dialled.pop(channel.peer, None)

    def _note_dialled(self, channel: Channel) -> None:
        self._dialled[channel.peer] = channel

        def later() -> None:
            if self._dialled.get(channel.peer) is channel:
                del self._dialled[channel.peer]

        self._loop.later(AT_ONCE_S, later)

    def _end_asked(self, channel: Channel, why: AgentError) -> None:
        for number in [number for number, asked in self._asked.items() if asked.channel is channel]:
            self._answered(number, None, str(why))

    def _dial(self, dialling: _Dialling, places: list[SocketAddress]) -> None:
        """Dials all addresses at once, since some may lead nowhere or to another agent."""
        node = dialling.node
        run, secret = next(reversed(self._secrets.items()))

        def done(sock: socket.socket, session: Session) -> None:
            if self._dialling.pop(node.name, None) is dialling:
                dialling.cancel()
                # The peer has dialled this agent meanwhile, and does not know of this connection yet.
                if node.name in self._channels:
                    sock.close()
                else:
                    channel = Channel(self._loop, sock, session, self)
                    self._keep(channel, str(sock.getpeername()[0]))
                    self._note_dialled(channel)
                    channel.send({"t": "here"})
                dialling.end("")
            else:
                sock.close()

        def failed(error: AgentError) -> None:
            dialling.errors.append(str(error))
            if len(dialling.errors) >= len(places) and self._dialling.get(node.name) is dialling:
                del self._dialling[node.name]
                dialling.end("; ".join(dialling.errors[:3]) or "it has no address that can be looked up")

        if not places:
            failed(AgentError(f"none of {', '.join(map(str, node.addresses))} can be looked up"))
        for place in places:
            try:
                handshake = Dialler(secret, run, Role.CONTROL, self.me, "", node.name)
                dialling.greetings.append(dial(self._loop, place, handshake, done, failed))
            except AgentError as exc:
                failed(exc)


class _Dialling:
    """The attempts to connect to one agent. `then`: the callbacks that wait for the result."""

    def __init__(self, node: NodeAt, then: list[Callable[[str], None]]) -> None:
        self.node = node
        self.then = then
        self.greetings: list[Handshaking] = []
        self.errors: list[str] = []

    def cancel(self) -> None:
        for greeting in self.greetings:
            greeting.cancel()

    def end(self, error: str) -> None:
        for each in self.then:
            each(error)


class _Finding:
    """The attempts to connect to an agent whose name is unknown. `places`: how many socket addresses are tried."""

    def __init__(self, then: list[Callable[[str, str], None]]) -> None:
        self.then = then
        self.greetings: list[Handshaking] = []
        self.errors: list[str] = []
        self.places = 1

    def cancel(self) -> None:
        for greeting in self.greetings:
            greeting.cancel()


def run_of(secret: bytes) -> str:
    """The name of a secret in handshakes: a hash that does not reveal the secret."""
    return hashlib.blake2b(secret, digest_size=8, person=b"ckpt-run").hexdigest()


def addresses_of(at: Address) -> list[Address]:
    """The addresses at which others reach a listener at `at`. For "all interfaces" they are this host's addresses, the
    loopback ones last."""
    if at.host not in EVERYWHERE:
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


def _look_up(addresses: Sequence[Address]) -> list[SocketAddress]:
    places = []
    for address in addresses:
        try:
            places += resolve(address)
        except AgentError as exc:
            log.info("%s", exc)
    return places
