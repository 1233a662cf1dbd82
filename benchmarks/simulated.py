"""A job of up to a thousand nodes in one process: its coordinator is the real agent, the other nodes are stand-ins.

The coordinator's node is whole: the agent with its worker threads, eight ranks with arenas, a store in memory. It runs
in a world of its own time (tests/sim). Each other node answers as an agent with eight ranks does, with the product's
own encoders, and with one small arena per rank. A test holds what they send against what real agents send.

The agent's loop is as in its process: what comes while a turn is under way is handled together in the next one. So the
world's clock moves on by the CPU time that a turn takes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
import pytest

from ckpt import storage
from ckpt.agent.net import framing
from ckpt.agent.replication.replica_offers import transfer_name
from ckpt.agent.runtime import memory_plan
from ckpt.agent.snapshots.described import decode_described, describe_snapshots, encode_described
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.memory_checkpoint import StagedReader
from ckpt.agent.snapshots.remote_share import WriteRequest, encode_parts
from ckpt.agent.state.step_timing import REPORT_DELAY_S
from ckpt.backends import memory
from ckpt.format import values
from ckpt.format.declaration import decode_layout, decode_share, encode, encode_layout
from ckpt.format.manifest import PLACE
from ckpt.ipc import secret
from ckpt.ipc.addresses import Address
from ckpt.ipc.arena import Arena
from ckpt.ipc.control_page import ControlWord
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import coordinator_of
from ckpt.layout.layout import Declaration, Entry, Layout
from ckpt.layout.staging import stage
from ckpt.settings import read_settings
from ckpt.store import keys
from ckpt.types import Box, Epoch, Identity, Version
from tests.agent.fake import OPTIONS
from tests.sim import world as worlds
from tests.sim.agents import AgentProcess, Fabric, SimChannel, SimNetwork
from tests.sim.jobs import SimRank
from tests.sim.world import Turn, World, living

RANKS = 8  # on each node
STEP_S = 0.5
STAGED_S = 0.01  # at most, from the end of a step until a rank has staged it
LIMIT_S = 3600.0  # of the world
VALUES_BYTES = 100
HOST = "10.0.0.1"
FREE_BYTES = 64 << 30  # of each machine


@dataclass
class Traffic:
    """What the coordinator has sent and received, by kind, without what lies within its node."""

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, fields: dict[str, Any], payloads: Sequence[framing.Payload]) -> None:
        kind = kind_of(fields)
        self.messages[kind] += 1
        self.bytes[kind] += sum(len(payload) for _, payload in payloads)

    def copy(self) -> Traffic:
        return Traffic(self.messages.copy(), self.bytes.copy())

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.messages - before.messages, self.bytes - before.bytes)


def kind_of(fields: dict[str, Any]) -> str:
    """ "from-rank snapshot-staged" of a rank on another node, "to-rank checkpoint-level" to one, else the kind."""
    kind = str(fields["t"])
    message = fields.get("message") if kind in ("from-rank", "to-rank") else None
    return f"{kind} {message['t']}" if message is not None else kind


def sharded_layout(rank: int, world: int, tensors: int, columns: int = 4) -> Layout:
    """Tensors as FSDP2 shards them: each rank has one row of each."""
    shape, box = (world, columns), Box((rank, 0), (1, columns))
    return Layout(tuple(Entry(f"model.layers.{i:05d}.weight", "float32", shape, (box,)) for i in range(tensors)))


# --- the coordinator's node -------------------------------------------------------------------------------------


class Coordinator(AgentProcess):
    """The agent of the first node. `cpu_s`: of its main thread and its workers. `turns`: of its loop."""

    def __init__(self, fabric: Fabric, traffic: Traffic) -> None:
        self.cpu_s, self.turns = 0.0, 0
        self._waiting: list[Callable[[], None]] = []
        self._is_scheduled = False
        self._busy_until_s = 0.0
        self._traffic = traffic
        super().__init__(fabric, 0)
        self._count_workers()

    def make_network(self, server: Any, workers: Any, name: str, node: Any) -> NetworkToNodes:
        made = NetworkToNodes(self.fabric, self, workers, name, node)
        made.traffic = self._traffic
        return made

    def turn(self, what: Callable[[], None]) -> None:
        """Is handled in the next turn of the loop, with all else that has come by then."""
        self._waiting.append(what)
        if not self._is_scheduled:
            self._is_scheduled = True
            before, self.world.owner = self.world.owner, self
            self.world.at(self._busy_until_s - self.world.now_s, self._take_turn)
            self.world.owner = before

    def _take_turn(self) -> None:
        self._is_scheduled = False
        waiting, self._waiting = self._waiting, []
        began_s = time.process_time()
        super().turn(lambda: [self._guard(each) for each in waiting])  # type: ignore[arg-type,func-returns-value]
        took_s = time.process_time() - began_s
        self.cpu_s += took_s
        self.turns += 1
        self._busy_until_s = self.world.now_s + took_s

    def _count_workers(self) -> None:
        let_go = self.world._let_go

        def let_go_counted(turn: Turn) -> None:
            began_s = time.process_time()
            let_go(turn)
            if turn.owner is self:
                self.cpu_s += time.process_time() - began_s

        self.world._let_go = let_go_counted  # type: ignore[method-assign]


class NetworkToNodes(SimNetwork):
    traffic: Traffic

    def _dialled_to(self, found: Any) -> None:
        channel = found.channel = ChannelToNode(self, found)
        self._add_channel(channel)  # type: ignore[arg-type]
        self._record_dial(channel)  # type: ignore[arg-type]
        channel.send({"t": "keep-connection"})


class ChannelToNode(SimChannel):
    """The coordinator's end of its connection to a node."""

    def __init__(self, network: NetworkToNodes, node: Node) -> None:
        super().__init__(network, node.agent_name)
        self._traffic, self._node = network.traffic, node

    def send(self, fields: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        payloads = [(kind, bytes(payload)) for kind, payload in framing.make_payloads(fields, blobs)]
        self._traffic.count(fields, payloads)
        self._say(lambda: self._node.handle(assemble(payloads)))

    def close(self) -> None:
        self.is_open = False

    def arrive(self, fields: dict[str, Any], payloads: Sequence[framing.Payload]) -> None:
        """What the node has said."""
        self._traffic.count(fields, payloads)
        self.agent.turn(lambda: self._handle(assemble(payloads)))


def assemble(payloads: Sequence[framing.Payload]) -> Message:
    assembler, message = framing.Assembler(), None
    for kind, payload in payloads:
        message = assembler.add(kind, bytes(payload))
    assert message is not None
    return message


class NearRank(SimRank):
    """A rank on the coordinator's node."""

    tensor_count = 1

    def mine(self, name: str, step: int) -> Any:
        return np.zeros((1, 4), np.float32)

    def layout(self) -> Layout:
        return sharded_layout(self.rank, self.world, self.tensor_count)

    def array(self, name: str) -> Any:
        return np.full((1, 4), self.step * self.world + self.rank, np.float32)

    def hashes(self) -> bytes:
        return b""

    def train(self, step: int) -> None:
        self.step = step


# --- all other nodes --------------------------------------------------------------------------------------------


class FarRank:
    """A rank on another node. `arena`: the newest snapshot, whatever its slot."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.declaration: Declaration | None = None
        self.encoded = b""
        self.arena: Arena | None = None
        self.arena_bytes = 0

    def take_plan(self, fields: dict[str, Any], blobs: Sequence[bytes]) -> None:
        layout, share = decode_layout(blobs[0]), decode_share(blobs[1])
        staging = stage(layout, share, fields["frame_bytes"])
        coordinate = f"rank={self.rank}"
        self.declaration = Declaration(self.rank, self.world, coordinate, fields["division"], layout, staging)
        self.encoded = encode(self.declaration)
        self.arena_bytes = fields["arena_bytes"]

    def stage(self, identity: Identity) -> Arena:
        """As a trainer stages a snapshot."""
        assert self.declaration is not None
        if self.arena is None or self.arena.size_bytes < self.arena_bytes:
            self.close()
            self.arena = Arena.create(self.arena_bytes)
        arena, data_bytes = self.arena, self.declaration.staging.data_bytes
        arena.begin_fill()
        number = identity.version.step * self.world + self.rank  # no rank's bytes are another's, or an earlier step's
        arena.data(0, data_bytes)[:] = number.to_bytes(4, "little") * (data_bytes // 4)
        declared = arena.write_declaration(data_bytes, self.encoded)
        shared = values.encode({"step": identity.version.step, "branch": identity.epoch.number})
        about = values.encode({"metrics": {"loss": 1.0 / (1 + identity.version.step)}, "ancestors": []})
        own = values.encode({"rank": self.rank})
        arena.seal(identity, self.rank, self.world, data_bytes, declared, shared, own, about)
        return arena

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
            self.arena = None


class Node:
    """A node without the coordinator. Answers as its agent (FollowerJob, PeerHandlers) and its ranks do."""

    channel: ChannelToNode

    def __init__(self, job: SimulatedJob, number: int) -> None:
        self.job, self.agent_name = job, f"n{number:04d}"
        self.ranks = {rank: FarRank(rank, job.world) for rank in range(RANKS * number, RANKS * (number + 1))}
        self.address = Address(HOST, job.fabric.port())
        self._words: dict[int, ControlWord] = {}
        self._reader = StagedReader()
        self._step = 0  # that was reported
        self.network = self  # where the coordinator fetches from
        job.fabric.agents[number] = self  # type: ignore[assignment]
        job.fabric.listening[self.address] = self, self.address.port  # type: ignore[assignment]

    def send(self, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        payloads = [(kind, bytes(payload)) for kind, payload in framing.make_payloads(fields, blobs)]
        rng = self.job.sim.rng
        self.job.sim.at(
            rng.expovariate(1 / self.job.fabric.link_delay_s), lambda: self.channel.arrive(fields, payloads)
        )

    def tell(self, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self.send({**fields, "epoch": str(self.job.epoch)}, blobs)

    def say(self, rank: int, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """What a rank says, passed on."""
        self.tell(
            {"t": "from-rank", "rank": rank, "connection_number": 1, "pid": 1000 + rank, "message": fields}, blobs
        )

    def reply(self, message: Message, body: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self.send({"t": "reply", "id": message.fields["id"], **body}, blobs)

    def join(self) -> None:
        for rank in self.ranks:
            layout = sharded_layout(rank, self.job.world, self.job.tensors)
            self.say(rank, self.job.join_fields(rank), [encode_layout(layout), b""])

    def report_steps(self) -> None:
        """Each second, where its ranks are."""
        entered = self.job.step + 1
        if entered != self._step:
            self._step = entered
            self.tell({"t": "node-report", "steps": [[rank, entered, 0] for rank in self.ranks]})
        self.job.sim.at(REPORT_DELAY_S, self.report_steps)

    def end_step(self, step: int) -> None:
        """Its ranks look for appointments."""
        for slot, word in list(self._words.items()):
            if word.step > step:
                continue
            del self._words[slot]
            version = str(Version(word.step))
            for rank, each in self.ranks.items():
                assert each.declaration is not None
                body: dict[str, Any] = {
                    "t": "snapshot-staged",
                    "attempt": word.attempt_number,
                    "version": version,
                    "why": "late",
                }
                if word.step == step:
                    told = {"slot": slot, "division": each.declaration.division}
                    body = {**body, **told, "stall_s": 0.001, "lazy": False, "why": ""}
                late_s = self.job.sim.rng.uniform(0.0, STAGED_S)
                self.job.sim.at(late_s, lambda rank=rank, body=body: self.say(rank, body))  # type: ignore[misc]

    def handle(self, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "keep-connection" | "job-state" | "start-outcome" | "evict":
                pass
            case "withdraw":
                for rank in self.ranks:
                    self.job.fabric.offers.pop(
                        (self.agent_name, transfer_name(Identity.parse(fields["identity"]), rank))
                    )
            case "survey":
                self.reply(message, {}, [msgpack.packb(Inventory().fields())])
            case "to-rank" if fields["message"]["t"] == "staging-plan":
                self.ranks[int(fields["rank"])].take_plan(fields["message"], message.blobs)
            case "to-rank":
                assert fields["message"]["t"] in ("reply", "checkpoint-level", "event"), fields
            case "plan-memory":
                plan = memory_plan.make_plan(
                    sum(n for _, n in fields["sizes"]), 0, 0, None, FREE_BYTES, fields["slots"]
                )
                self.reply(message, {"plan": plan.table()})
            case "make-arenas":
                self.reply(message, {"sizes": fields["sizes"]})
            case "offer-slot":
                for rank in self.ranks:
                    self.say(rank, {"t": "arena-warm", "slot": fields["slot"], "division": fields["division"]})
            case "control-word":
                word = ControlWord.unpack(int(fields["word"]))
                self._words.pop(int(fields["slot"]), None)
                if word is not None:
                    self._words[word.slot] = word
                    self.end_step(self.job.step)
            case "hash-snapshots":
                identity = Identity.parse(fields["identity"])
                arenas = {rank: each.stage(identity) for rank, each in self.ranks.items()}
                parts = self._reader.read(identity, self.job.world, arenas)
                known = {int(rank): bytes(digest) for rank, digest in fields["known"]}
                self.reply(message, {}, [encode_parts(parts, known, self._reader.encoded_declarations())])
            case "publish":
                self._publish(message, Identity.parse(fields["identity"]))
            case "replicate":
                decode_described(message.blobs[1])
                self.reply(message, {})
            case "write-frames":
                self._write(message)
            case _:
                raise AssertionError(f"the stand-in of a node does not know the message {message.kind!r}: {fields}")

    def _publish(self, message: Message, identity: Identity) -> None:
        arenas = {rank: each.arena for rank, each in self.ranks.items() if each.arena is not None}
        described = describe_snapshots(identity, arenas)
        for each in described:
            self.job.fabric.offers[self.agent_name, transfer_name(identity, each.rank)] = (
                arenas[each.rank].view,
                each.frames,
            )
        self.reply(message, {}, [encode_described(described)])

    def _write(self, message: Message) -> None:
        identity = Identity.parse(message.fields["identity"])
        wanted = WriteRequest.decode(identity, message.blobs[0], message.fields["codec"], None)
        lengths = wanted.frames["length"].astype(np.int64)
        places = np.zeros(len(lengths), PLACE)
        places["length"], places["offset"] = lengths, np.cumsum(lengths) - lengths
        key = keys.pack_key(identity, self.agent_name, keys.new_writer(), 0)
        self.job.store.put(key, [bytes(int(lengths.sum()))])
        self.reply(message, {}, [places.tobytes(), msgpack.packb([(key, int(lengths.sum()))])])

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()


# --- the job ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """What one save cost the coordinator. `idle_cpu_s`: in each second without a save."""

    traffic: Traffic
    cpu_s: float
    idle_cpu_s: float
    turns: int
    start_cpu_s: float  # from the ranks' joins until all arenas are warm


class SimulatedJob:
    """A job of so many nodes, whose ranks hold so many tensors. `step`: that all have ended."""

    def __init__(self, sim: World, nodes: int, tensors: int, options: dict[str, Any]) -> None:
        self.sim, self.world, self.tensors, self.options = sim, RANKS * nodes, tensors, options
        self.url = f"memory://scale-{nodes}-{tensors}"
        self.fabric = Fabric(sim, self.url, replace(read_settings(), notices="off"))
        self.store = storage.open(self.url)
        self.traffic = Traffic()
        self.coordinator = Coordinator(self.fabric, self.traffic)
        self.fabric.agents[0] = self.coordinator
        self.fabric.ever.append(self.coordinator)
        self.nodes = [Node(self, number) for number in range(1, nodes)]
        self.near = [NearRank(self.fabric, 0, rank, self.world, "scale") for rank in range(RANKS)]
        self.epoch: Epoch | None = None
        self.step, self.is_training, self.is_over = 0, False, False
        self.start_cpu_s = 0.0
        self._fields: dict[str, Any] = {}
        self._meet = threading.Barrier(RANKS)
        self._decision: Any = None
        self._secret = secret.make_secret()

    def join_fields(self, rank: int) -> dict[str, Any]:
        return {**self._fields, "rank": rank, "coordinate": f"rank={rank}"}

    def start(self) -> None:
        for rank in self.near:
            rank.tensor_count, rank.options = self.tensors, self.options
            self.sim.owner = rank
            self.sim.spawn(f"rank {rank.rank}", lambda rank=rank: self._live(rank))  # type: ignore[misc]
            self.sim.owner = None
        self.sim.run(lambda: self.is_training, LIMIT_S)
        for node in self.nodes:
            self.sim.at(self.sim.rng.uniform(0.0, REPORT_DELAY_S), node.report_steps)

    def _live(self, rank: NearRank) -> None:
        rank.connect()
        told = rank.listen(self._secret)
        rank.nodes = [{**told, "ranks": list(range(RANKS))}] + [
            {
                "name": n.agent_name,
                "addresses": [str(n.address)],
                "domains": [],
                "link_bytes_s": 0,
                "ranks": list(n.ranks),
            }
            for n in self.nodes
        ]
        if len(rank.nodes) == 1:
            rank.nodes = []
        self._meet.wait()
        if rank.rank == 0:
            self._decision = rank.begin()
            self.epoch = Epoch.parse(self._decision.fields["epoch"])
            self.start_cpu_s = -self.coordinator.cpu_s
            leader = coordinator_of(rank.nodes)
            about = {
                "launch": rank.launch,
                "parent": None,
                "ancestors": [],
                "standing_notices": [],
                "leave_attempt": 0,
                "peers": [],
            }
            asked = {
                "id": 1,
                "world": self.world,
                "options": self.options,
                "version": str(Version(0)),
                "coordinator": leader,
            }
            asked |= {"values_bytes": VALUES_BYTES, "resume": False, "arenas": [], "notice_sources": None}
            self._fields = {"t": "join", "epoch": str(self.epoch), **asked, **about}
            for node in self.nodes:
                node.join()
        self._meet.wait()
        rank.join(self._decision.fields["epoch"])
        rank.restore(self._decision)
        self._meet.wait()
        if rank.rank == 0:
            rank.request("restored", {"epoch": rank.epoch, "identity": None})
        rank.wait_warm(LIMIT_S)
        self._meet.wait()
        if rank.rank == 0:
            self.start_cpu_s += self.coordinator.cpu_s
            self.is_training = True
        while not self.is_over:
            rank.enter(rank.step + 1)
            time.sleep(STEP_S)
            self._meet.wait()
            rank.train(rank.step + 1)
            if rank.rank == 0:
                self.step = rank.step
                for node in self.nodes:
                    node.end_step(self.step)
            rank.boundary()

    def saves(self, count: int, idle_s: float) -> list[Saved]:
        """So many saves after the first one, which has to tell more. Before each an idle time is measured."""
        levels = ("local", "store", *(["peer"] * bool(self.nodes)))
        self._await_save(levels)
        found = []
        for _ in range(count):
            self._pass(2 * REPORT_DELAY_S)
            at_rest_s = self.coordinator.cpu_s
            self._pass(idle_s)
            idle_cpu_s = (self.coordinator.cpu_s - at_rest_s) / idle_s
            before, cpu_s, turns, now_s = (
                self.traffic.copy(),
                self.coordinator.cpu_s,
                self.coordinator.turns,
                self.sim.now_s,
            )
            self._await_save(levels)
            self._pass(1.0)
            took_s = self.coordinator.cpu_s - cpu_s - idle_cpu_s * (self.sim.now_s - now_s)
            traffic = self.traffic.since(before)
            traffic.messages.pop("node-report", None)  # which come each second, whether anything is saved or not
            traffic.bytes.pop("node-report", None)
            found.append(Saved(traffic, took_s, idle_cpu_s, self.coordinator.turns - turns, self.start_cpu_s))
        return found

    def _await_save(self, levels: Sequence[str]) -> None:
        """Until the next step that is saved is so at all levels."""
        known = self.near[0].levels
        known.clear()

        def is_done() -> bool:
            failed = {key: why for key, (ok, why) in known.items() if not ok}
            assert not failed, failed
            return any(all((version, level) in known for level in levels) for version, _ in list(known))

        self.sim.run(is_done, LIMIT_S)

    def _pass(self, seconds: float) -> None:
        until_s = self.sim.now_s + seconds
        self.sim.at(seconds, lambda: None)
        self.sim.run(lambda: self.sim.now_s >= until_s, LIMIT_S)

    def close(self) -> None:
        self.is_over = True
        for node in self.nodes:
            node.close()
        self.fabric.close()


@contextlib.contextmanager
def simulated_job(nodes: int, tensors: int, interval_s: float) -> Iterator[SimulatedJob]:
    """A job that trains, and saves once in so many seconds: in memory, on one other node each, in the store."""
    options = {**OPTIONS, "policy": {"steps": None, "seconds": interval_s}, "peers": {"replicas": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "STILL_MAX", 1 << 30)
        patch.setattr(memory_plan, "free_bytes", lambda *_: FREE_BYTES)
        with living(0) as sim:
            job = SimulatedJob(sim, nodes, tensors, options)
            try:
                job.start()
                yield job
            finally:
                job.close()
                memory._STORES.pop(job.url, None)
