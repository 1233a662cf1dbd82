"""Agents and ranks in a world of its own time: the same objects as in their processes, but for what lies between them.

An agent's main loop, the sockets to its ranks, the connections between agents, and what moves frames are stood in for;
messages are packed and unpacked as they are there, arrive in order, late, or not at all where a connection is cut.
Everything else is what users run: the agents, their threads, the ranks' side of the protocol, the store.
"""

from __future__ import annotations

import itertools
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.agent.net import framing
from ckpt.agent.net.peer_network import PeerNetwork, secret_id_of
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.agent import Agent
from ckpt.agent.node.memory_node import MemoryNode, MemoryNodeOptions
from ckpt.agent.runtime.coroutines import Promise
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.errors import AgentError, CkptError, DamagedData
from ckpt.format.frames import frame_hash
from ckpt.ipc import client, messages
from ckpt.ipc.addresses import Address
from ckpt.ipc.node_list import NodeAt
from ckpt.settings import Settings
from tests.sim.world import World

DIALS, DIALS_EVERY_S = 4, 0.5  # for what is not offered
STARTS_S = 0.3  # an agent's process, until it serves


class Way:
    """Messages in one direction: in order, each after some delay."""

    def __init__(self, world: World, delay_s: float) -> None:
        self._world, self._delay_s = world, delay_s
        self._last_s = world.now_s

    def send(self, deliver: Callable[[], None], owner: Any = None) -> None:
        """It arrives unless the owner, if there is one, is dead by then."""
        world = self._world
        self._last_s = max(self._last_s, world.now_s + world.rng.expovariate(1 / self._delay_s))
        with world.owned_by(owner):
            world.at(self._last_s - world.now_s, deliver)


class Fabric:
    """What is between the nodes. `channels`: both ends of each connection of two agents. `offers`: what may be fetched,
    by the agent that offers it and its name."""

    def __init__(self, world: World, url: str, settings: Settings) -> None:
        self.world, self.url = world, url
        self.agents: dict[int, AgentProcess] = {}  # by node; those that live
        self.ever: list[AgentProcess] = []
        self.listening: dict[Address, tuple[SimNetwork, int]] = {}
        self.offers: dict[tuple[str, str], tuple[memoryview, Frames]] = {}
        self.moved: list[tuple[str, bool]] = []  # what was offered and fetched, and whether a start waits for it
        self.channels: list[SimChannel] = []
        self.local_delay_s, self.link_delay_s = 0.0002, 0.001
        self.frame_s = 0.01  # that a frame takes from one node to another
        self.starting: dict[int, threading.Condition] = {}
        self._settings = settings
        self._carried: list[messages.Message] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ckpt-sim-")
        self._left, self._right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pids, self._ports = itertools.count(1000), itertools.count(7000)

    def settings(self, node: int) -> Settings:
        return replace(self._settings, runtime_dir=self.folder(node), listen="10.0.0.1:0")

    def folder(self, node: int) -> Path:
        path = Path(self._folder.name, str(node))
        path.mkdir(exist_ok=True)
        return path

    def carry(self, fields: dict[str, Any], fds: Iterable[int], blobs: Sequence[bytes]) -> messages.Message:
        """As it arrives at the other end of a Unix socket."""
        messages.send(self._left, fields, list(fds), blobs)
        message = messages.receive(self._right)
        assert message is not None
        if message.fds:
            self._carried.append(message)  # it may never arrive
        return message

    def pid(self) -> int:
        return next(self._pids)

    def port(self) -> int:
        return next(self._ports)

    def lend(self, node: int, lend: MemoryNodeOptions) -> AgentProcess:
        """Starts the agent of a memory-only node."""

        def make(agent: AgentProcess) -> MemoryNode:
            return MemoryNode(self.url, self.settings(node), agent.server, lend, agent.make_network)

        made = self.agents[node] = AgentProcess(self, node, make)
        self.ever.append(made)
        return made

    def lose(self, node: int) -> None:
        """The machine: its agent, and what was on its way from there."""
        agent = self.agents.get(node)
        if agent is not None:
            for channel in [each for each in self.channels if each.agent is agent]:
                self.cut(channel.agent_name, channel.peer)
            self.kill(node)

    def agent_of(self, node: int) -> AgentProcess:
        """Started if there is none. On a rank's thread."""
        while node not in self.agents:
            starts = node not in self.starting
            served = self.starting.setdefault(node, threading.Condition())
            if starts:
                time.sleep(self.world.rng.uniform(0.5, 1.5) * STARTS_S)
                self.agents[node] = AgentProcess(self, node)
                self.ever.append(self.agents[node])
                del self.starting[node]
                with served:
                    served.notify_all()
            else:
                with served:
                    served.wait(1.0)
        return self.agents[node]

    def kill(self, node: int) -> None:
        """The agent's process."""
        agent = self.agents.pop(node, None)
        if agent is not None:
            agent.end(killed=True)

    def cut(self, a: str, b: str) -> None:
        """The connection of two agents."""
        for channel in list(self.channels):
            if (channel.agent_name, channel.peer) == (a, b):
                channel.cut("was cut")
                channel.far.cut("was cut")

    def close(self) -> None:
        self._left.close()
        self._right.close()
        self._folder.cleanup()
        for message in self._carried:
            message.close()


class AgentProcess:
    """One process: its loop, a turn of which follows each thing that happens."""

    def __init__(
        self, fabric: Fabric, node: int, make: Callable[[AgentProcess], Agent | MemoryNode] | None = None
    ) -> None:
        self.fabric, self.world, self.number = fabric, fabric.world, node
        self.over = self.closed = False
        self.lost: list[SimPeer] = []
        self.pid = fabric.pid()
        with self.world.owned_by(self):
            self.server = SimServer(self)
            self.node = make(self) if make is not None else self._make_node()
        self._wakes = 0
        self.happens(lambda: None)

    @property
    def network(self) -> SimNetwork | None:
        network = self.node.context.network
        assert network is None or isinstance(network, SimNetwork)
        return network

    def make_network(self, server: EventLoop, workers: Any, name: str, node: Any) -> SimNetwork:
        return SimNetwork(self.fabric, self, workers, name, node)

    def _make_node(self) -> Agent:
        made = Agent(self.fabric.url, self.fabric.settings(self.number), self.server, self.make_network)
        made.alarms.signal_reader.set_reading = lambda on: None
        return made

    def happens(self, what: Callable[[], None], delay_s: float = 0.0) -> None:
        with self.world.owned_by(self):
            self.world.at(delay_s, lambda: self.turn(what))

    def turn(self, what: Callable[[], None]) -> None:
        """What happens to it, and what follows."""
        if self.over:
            return
        self._guard(what)
        wake_s = self._settle()
        while self.lost and not self.over:
            peer = self.lost.pop()
            self._guard(lambda peer=peer: self.node.peer_disconnected(peer))
            wake_s = self._settle()
        if self.node.can_exit():
            self.end()
        elif wake_s is not None:
            self._wakes += 1
            number = self._wakes
            if wake_s <= self.world.now_s:
                self.happens(lambda: None)
            else:
                self._later(wake_s - self.world.now_s, number)

    def _later(self, delay_s: float, number: int) -> None:
        self.world.at(delay_s, lambda: self.turn(lambda: None) if number == self._wakes else None)

    def _settle(self) -> float | None:
        found: list[float | None] = [None]
        self._guard(lambda: found.__setitem__(0, self.node.settle()))
        return found[0]

    def _guard(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:
            self.world.mistakes.append(f"agent {self.number}: {traceback.format_exc()}")

    def end(self, killed: bool = False) -> None:
        """Everybody sees the end of its connections; at an end in order after what it has said."""
        if self.over:
            return
        self.over = True
        if self.fabric.agents.get(self.number) is self:
            del self.fabric.agents[self.number]
        if self.network is not None:
            self.network.deafen()
        if killed and self.network is not None:
            self.network.transport.close()
        if killed:
            self.world.kill(self)
            self._hang_up()
        else:
            self.world.spawn(f"end of agent {self.number}", self._end)

    def _end(self) -> None:
        self.node.close()
        self._hang_up()
        self.closed = True

    def _hang_up(self) -> None:
        for peer in list(self.server.peers):
            peer.close()
        for channel in list(self.fabric.channels):
            if self.network is not None and channel.agent_name == self.network.agent_name:
                channel.close()


class SimServer(EventLoop):
    def __init__(self, agent: AgentProcess) -> None:
        self.path = agent.fabric.folder(agent.number) / "agent.sock"
        self.peers: dict[SimPeer, None] = {}
        self.is_end_requested = self.pending_warning = False
        self.agent = agent

    def post(self, what: Callable[[], None]) -> None:
        self.agent.happens(what)

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.agent.happens(what, delay_s)

    def disconnect_peer(self, peer: Peer) -> None:
        if peer.is_open:
            self.peers.pop(peer, None)
            peer.close()
            self.agent.lost.append(peer)

    def close(self) -> None:
        pass


class SimPeer(Peer):
    """The agent's end of a rank's connection."""

    def __init__(self, agent: AgentProcess, far: SimConnection, pid: int) -> None:
        self.loop, self.pid, self.role = agent.server, pid, ""
        self.is_open, self.is_remote_closed, self.was_reset = True, False, False
        self.outbox = ()
        self._fabric, self._far = agent.fabric, far
        self._way = Way(agent.world, agent.fabric.local_delay_s)

    def send(self, fields: dict[str, Any], fds: Iterable[int] = (), blobs: Sequence[bytes] = ()) -> None:
        if self.is_open:
            message = self._fabric.carry(fields, fds, blobs)
            self._way.send(lambda: self._far.arrived(message))

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._way.send(lambda: self._far.ended("it closed the connection"))

    def watch_death(self) -> None:
        pass

    def unwatch_death(self) -> None:
        pass


class SimConnection(client.Connection):
    """A rank's end: all of it but for the socket."""

    def __init__(
        self,
        agent: AgentProcess,
        pid: int,
        on_message: Callable[[messages.Message], None],
        on_lost: Callable[[str], None],
        role: str = "trainer",
    ) -> None:
        self.agent, self._on_message, self._on_lost = agent, on_message, on_lost
        self._peer = SimPeer(agent, self, pid)
        self._way = Way(agent.world, agent.fabric.local_delay_s)
        self._lock, self._next_id, self._is_closed = threading.Lock(), 0, False
        self._pending_by_id: dict[int, client.Pending] = {}
        agent.server.peers[self._peer] = None
        hello = self.request("hello", {"version": client.VERSION, "role": role})
        self.incarnation, self.agent_pid = str(hello.fields["incarnation"]), agent.pid

    def _send(self, fields: dict[str, Any], fds: Any, blobs: Any) -> None:
        if self._is_closed:
            raise AgentError("the agent is gone")
        agent, message = self.agent, self.agent.fabric.carry(fields, fds, blobs)
        self._way.send(lambda: agent.turn(lambda: self._handle(message)), agent)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed, agent = True, self.agent
            self._way.send(lambda: agent.turn(lambda: agent.server.disconnect_peer(self._peer)), agent)
            self._fail_pending()

    def died(self) -> None:
        """The rank's process is dead."""
        self._is_closed = True
        agent, peer = self.agent, self._peer

        def seen() -> None:
            agent.node.peer_died(peer)
            agent.server.disconnect_peer(peer)

        self._way.send(lambda: agent.turn(seen), agent)

    # -- at the agent

    def _handle(self, message: messages.Message) -> None:
        peer, node = self._peer, self.agent.node
        if not peer.is_open:
            message.close()
            return
        try:
            node.message(peer, message)
        except CkptError as exc:
            if isinstance(message.fields.get("id"), int):
                peer.refuse(message.fields["id"], exc)
        finally:
            message.close()

    # -- at the rank

    def arrived(self, message: messages.Message) -> None:
        if self._is_closed:
            message.close()
        elif message.kind in ("reply", "error"):
            asked = self._pending_by_id.pop(message.fields["id"], None)
            if asked is not None:
                asked.future.set_result(message)
            else:
                message.close()
        elif "id" in message.fields and message.kind == "progress":
            moving = self._pending_by_id.get(message.fields["id"])
            if moving is not None:
                moving.progress.set()
        else:
            self._on_message(message)

    def ended(self, why: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._fail_pending()
            self._on_lost(why)


class _Clock:
    def now_s(self) -> float:
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        time.sleep(seconds)


class SimNetwork(PeerNetwork):
    def __init__(self, fabric: Fabric, agent: AgentProcess, workers: Any, me: str, node: Any) -> None:
        self._fabric, self.agent = fabric, agent
        super().__init__(agent.server, workers, me, node, _Clock())
        self.transport = SimTransport(fabric, me)
        self.at: Address | None = None

    def listen(self, secret: bytes, at: str) -> list[Address]:
        self._secrets[secret_id_of(secret)] = secret
        if self.at is None:
            port = int(at.rpartition(":")[2]) or self._fabric.port()
            self.at = Address("10.0.0.1", port)
            self._fabric.listening[self.at] = self, port
        return [self.at]

    def deafen(self) -> None:
        if self.at is not None and self._fabric.listening.get(self.at, (None, 0))[0] is self:
            del self._fabric.listening[self.at]

    def connect(self, node: NodeAt) -> Promise[str]:
        name = Promise[str]()

        def dial() -> None:
            found = next(
                (self._fabric.listening[each][0] for each in node.addresses if each in self._fabric.listening), None
            )
            if node.name not in self._channels:
                if found is None or found.agent_name != node.name:
                    name.set_error(AgentError("nobody listens there"))
                    return
                self._dialled_to(found)
            name.set_result(node.name)

        delay_s = self._fabric.world.rng.expovariate(1 / (4 * self._fabric.link_delay_s))
        self._loop.call_later(delay_s, dial)
        return name

    def connect_to_address(self, address: Address) -> Promise[str]:
        name = Promise[str]()

        def dial() -> None:
            found = self._fabric.listening.get(address)
            if found is None:
                name.set_error(AgentError("nobody listens there"))
                return
            if found[0].agent_name not in self._channels:
                self._dialled_to(found[0])
            name.set_result(found[0].agent_name)

        self._loop.call_later(4 * self._fabric.link_delay_s, dial)
        return name

    def _dialled_to(self, found: SimNetwork) -> None:
        here, there = SimChannel(self, found.agent_name), SimChannel(found, self.agent_name)
        here.far, there.far = there, here
        self._fabric.channels += [here, there]
        found._incoming_channels[there] = None
        self._add_channel(here)
        self._record_dial(here)
        here.send({"t": "keep-connection"})


class SimChannel:
    """One agent's end of a connection to another, as peers.channel.Channel."""

    far: SimChannel

    def __init__(self, network: SimNetwork, peer: str) -> None:
        self.agent_name, self.peer, self.secret_id = network.agent_name, peer, network.secret_id
        self.is_open, self.host = True, "10.0.0.1"
        self.waiting_bytes = 0
        self._network, self.agent = network, network.agent
        self._fabric = network._fabric
        self._way = Way(self._fabric.world, self._fabric.link_delay_s)

    def send(self, fields: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        if not self.is_open:
            return
        assembler, message = framing.Assembler(), None
        for kind, payload in framing.make_payloads(fields, blobs):
            message = assembler.add(kind, bytes(payload))
        assert message is not None
        self._say(lambda: self.far._arrived(message))

    def reply(self, request_id: int, body: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        self.send({"t": "reply", "id": request_id, **body}, blobs)

    def refuse(self, request_id: int, error: BaseException) -> None:
        self.send(messages.error_fields(request_id, error))

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._gone()
            self._say(lambda: self.far.cut("closed it"))

    def cut(self, why: str) -> None:
        """It has ended by something else than this agent: it is told, and what is on its way here is lost."""
        if self.is_open:
            self.is_open = False
            self._gone()
            error = AgentError(f"the connection to agent {self.peer} has ended: it {why}")
            self.agent.happens(
                lambda: self._network.channel_closed(self, error), self._fabric.world.rng.uniform(0.0, 0.05)
            )

    def _gone(self) -> None:
        if self in self._fabric.channels:
            self._fabric.channels.remove(self)

    def _say(self, what: Callable[[], None]) -> None:
        self._way.send(what)

    def _arrived(self, message: messages.Message) -> None:
        with self.agent.world.owned_by(self.agent):
            self.agent.turn(lambda: self._handle(message))

    def _handle(self, message: messages.Message) -> None:
        if not self.is_open:
            return
        try:
            self._network.message(self, message)
        except CkptError as exc:
            if isinstance(message.fields.get("id"), int):
                self.refuse(message.fields["id"], exc)


class SimTransport:
    """Moves frames, as net.tcp_sender.Transport."""

    def __init__(self, fabric: Fabric, me: str) -> None:
        self._fabric, self._me = fabric, me

    def offer(self, name: str, source: memoryview, frames: Frames, urgent: bool = False) -> None:
        if (self._me, name) in self._fabric.offers:
            raise AgentError(f"{name} is offered already")
        # A view of its own, as over TCP: the memory stays for readers though its owner closes it meanwhile.
        self._fabric.offers[self._me, name] = source.cast("B"), frames
        self._fabric.moved.append((name, urgent))

    def withdraw(self, name: str) -> Future[None]:
        self._fabric.offers.pop((self._me, name), None)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def fetch(
        self,
        peer: str,
        addresses: Sequence[Address],
        name: str,
        target: memoryview,
        frames: Frames,
        landed: Callable[[int], None] | None = None,
        urgent: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> SimFetch:
        self._fabric.moved.append((name, urgent))
        return SimFetch(self._fabric, peer, name, target, frames, landed, numbers)

    def stream(self, peer: str, addresses: Sequence[Address], name: str, numbers: Sequence[int]) -> Any:
        raise AgentError("there are no connections here")

    def accept(self, sock: Any, session: Any) -> None:
        raise AssertionError("nobody connects here")

    def set_rate(self, bytes_per_s: float | None) -> None:
        pass

    def close(self) -> None:
        for key in [key for key in self._fabric.offers if key[0] == self._me]:
            del self._fabric.offers[key]


class SimFetch:
    def __init__(
        self,
        fabric: Fabric,
        peer: str,
        name: str,
        target: memoryview,
        frames: Frames,
        landed: Callable[[int], None] | None,
        numbers: Sequence[int] | None,
    ) -> None:
        self.completion: Future[None] = Future()
        self._fabric, self._peer, self._name, self._target, self._frames = fabric, peer, name, target, frames
        self._missing, self._landed, self._numbers = list(range(len(frames))), landed, numbers
        self._cancelled = False
        fabric.world.remember(self)
        fabric.world.spawn(f"fetch {name}", self._work)

    def missing(self) -> list[int]:
        return sorted(self._missing)

    def cancel(self) -> None:
        self._cancelled = True

    def close(self) -> None:
        self._target.release()

    def _work(self) -> None:
        try:
            for number in list(self._missing):
                time.sleep(self._fabric.world.rng.uniform(0.5, 1.5) * self._fabric.frame_s)
                self._bring(number)
        except CkptError as exc:
            self.completion.set_exception(exc)
        else:
            self.completion.set_result(None)

    def _offer(self) -> tuple[memoryview, Frames]:
        """Which may come a little later than it is asked for: then the connection is made anew."""
        for _ in range(DIALS):
            alive = any(
                a.network is not None and a.network.agent_name == self._peer for a in self._fabric.agents.values()
            )
            offer = self._fabric.offers.get((self._peer, self._name)) if alive else None
            if offer is not None:
                return offer
            time.sleep(self._fabric.world.rng.uniform(0.5, 1.5) * DIALS_EVERY_S)
        raise AgentError(f"agent {self._peer} does not offer {self._name}")

    def _bring(self, number: int) -> None:
        if self._cancelled:
            raise AgentError("it was cancelled")
        source, theirs = self._offer()
        at = self._numbers[number] if self._numbers is not None else number
        (start, length), (to, _) = theirs.byte_ranges()[at], self._frames.byte_ranges()[number]
        self._target[to : to + length] = source[start : start + length]
        found = frame_hash(self._target[to : to + length])
        if list(found) != self._frames.hashes[number].astype(np.uint64).tolist():
            raise DamagedData(f"frame {number} of {self._name} arrived with another hash")
        self._missing.remove(number)
        if self._landed is not None:
            self._landed(number)
