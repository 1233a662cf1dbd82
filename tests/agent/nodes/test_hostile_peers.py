"""What other agents say to a real one: from a stranger nothing is heard; from one who knows the secret every malformed
message is an error to it, or the end of its connection, and never of the agent, nor of the job that it has part in."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from ckpt.agent.net.channel import Channel
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.runtime.coroutines import start
from ckpt.ipc import secret
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.threads import Tasks
from tests.agent.net.loop import TurnedLoop
from tests.agent.nodes.cluster import Cluster, pid_of
from tests.agent.nodes.staged import WRONG, spoiled

OTHER = "00000099-0123456789abcdef"
WHICH = f"{OTHER}-000000000005.0000"

SAID: dict[str, dict[str, Any]] = {
    "survey": {"launch": "other", "take_over": False, "id": 1},
    "describe-snapshots": {"identity": WHICH, "ranks": [0], "world": 2, "id": 1},
    "publish": {"identity": WHICH, "ranks": [0], "reader": "x", "id": 1},
    "rebuild": {"identity": WHICH, "rank": 0, "parity_order": [0, 1], "reserve_bytes": 0, "id": 1},
    "write-frames": {"identity": WHICH, "codec": "raw", "bandwidth": None, "id": 1},
    "start-outcome": {"epoch": OTHER},
    "replicate": {
        "identity": WHICH,
        "world": 2,
        "source": "x",
        "rereplication": False,
        "replicated": None,
        "needed_ranks": None,
        "id": 1,
    },
    "evict": {"what": "older-epochs", "epoch": OTHER},
    "withdraw": {"identity": WHICH, "writes": True},
    "reply": {"id": 1},
    "error": {"id": 1, "kind": "agent", "message": "x"},
    "nonsense": {"epoch": OTHER, "id": 1},
}
OF_A_NODE: dict[str, dict[str, Any]] = {
    "from-rank": {
        "rank": 1,
        "connection_number": 1,
        "pid": 1,
        "message": {"t": "arena-warm", "slot": 0, "division": "x"},
    },
    "locate-candidate": {"identity": WHICH, "id": 1},
    "read-frames": {"identity": WHICH, "id": 1},
    "frames-read": {"identity": WHICH},
    "node-report": {
        "steps": [[1, 5, 0]],
        "sources": ["memory", "model"],
        "alarms": [["memory", None], ["model", 0.5]],
        "lost_slot": 0,
        "notices": [{"source": "x", "key": "y", "left_s": 9.0, "certain": True, "message": "", "when": "in time"}],
    },
    "withdraw-notice": {"source": "x"},
}
OF_A_BORROWER: dict[str, dict[str, Any]] = {
    "borrow-memory": {
        "epoch": OTHER,
        "parent": WHICH,
        "ancestors": [[OTHER, None]],
        "launch": "other",
        "host": "h",
        "time_s": 1.0,
        "run": "",
        "agents": [],
        "codec": "raw",
        "bandwidth": None,
        "id": 1,
    },
}
OF_A_COORDINATOR: dict[str, dict[str, Any]] = {
    "to-rank": {"rank": 1, "connection_number": 1, "message": {"t": "checkpoint-level"}},
    "control-word": {"slot": None, "word": 0},
    "job-state": {},
    "offer-slot": {"slot": 3, "division": None},
    "node-lost": {"name": "x"},
    "plan-memory": {"sizes": [[1, 4096]], "limit_bytes": None, "id": 1},
    "make-arenas": {"slot": 3, "sizes": [[1, 4096]], "id": 1},
    "hash-snapshots": {"slot": 3, "identity": WHICH, "known": [[1, b"x"]], "id": 1},
    "frames-read": {"identity": WHICH},
    "notice-answered": {"source": "x", "key": "y", "id": 1},
    "withdraw-notice": {"source": "x"},
    "other": {"id": 1},
}
CALLS_MAX = 10
BLOBS: list[list[bytes]] = [
    [],
    [b""],
    [msgpack.packb({"epoch": OTHER})],
    [b"x" * 33],
    [msgpack.packb([[0, 4096, b"", b""]])],
    [b"", b"", b""],
]


class Liar:
    """An agent of the run, played by the test. `heard`: what it is told."""

    def __init__(self, known: bytes, name: str) -> None:
        self.loop = TurnedLoop()
        self._tasks = Tasks("liar", pool_size=1)
        self.heard: list[Message] = []
        self.network = PeerNetwork(self.loop, self, name, self)
        (self.address,) = self.network.listen(known, "127.0.0.1:0")

    def run(self, lane: Any, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """As Bulk."""
        future = self._tasks.submit(work)
        future.add_done_callback(lambda done: self.loop.post(lambda: then(done)))

    def peer_message(self, channel: Channel, message: Message) -> None:
        self.heard.append(message)

    def peer_closed(self, channel: Channel) -> None: ...

    def connect(self, node: NodeAt) -> str:
        """What went wrong; "" once there is a connection."""
        said: list[str] = []
        start(self.network.connect(node), lambda _, error: said.append(error))
        self.loop.until(lambda: said)
        return said[0]

    def say(self, node: NodeAt, fields: dict[str, Any], blobs: list[bytes]) -> None:
        """On a new connection where the last one was closed for what was said on it."""
        while True:
            channel = self.network.channel(node.name)
            if channel is not None and channel.is_open:
                channel.send(fields, blobs)
                self.loop.turn(0)
                return
            self.connected(node)

    def connected(self, node: NodeAt) -> None:
        """An agent that is busy on a busy machine may not greet within the time that a handshake has."""
        errors = []
        for _ in range(CALLS_MAX):
            if not (error := self.connect(node)):
                return
            errors.append(error)
        raise AssertionError(errors)

    def alive(self, node: NodeAt) -> None:
        """The agent still answers whoever connects."""
        answers: list[str] = []
        while not answers:
            if self.network.channel(node.name) is None:
                self.connected(node)
            fields = {"t": "describe-snapshots", "identity": WHICH, "ranks": [0], "world": 1}
            heard: list[str] = []
            start(self.network.request(node.name, fields), lambda answer, error, heard=heard: heard.append(error))  # type: ignore[misc]
            self.loop.until(lambda heard=heard: heard)  # type: ignore[misc]
            answers = [error for error in heard if "held here" in error]

    def close(self) -> None:
        self.network.close()
        self._tasks.close()
        self.loop.close()


MakeLiar = Callable[..., Liar]


@pytest.fixture
def liar(cluster: Cluster) -> Iterator[MakeLiar]:
    with contextlib.ExitStack() as stack:
        yield lambda name="liar", known=None: stack.enter_context(
            contextlib.closing(Liar(known or cluster.secret, name))
        )


def node_of(cluster: Cluster, rank: int) -> NodeAt:
    told = next(node for node in cluster.job[0].nodes if rank in node["ranks"])
    return NodeAt(told["name"], tuple(Address.parse(text) for text in told["addresses"]), (rank,))


def is_whole(look: dict[str, Any]) -> bool:
    """Whether it says all that a question has to say."""
    with contextlib.suppress(LookupError, OverflowError, ValueError, TypeError):
        return int(look["id"]) is not None
    return False


def ways(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Right and wrong ones, those that a message can hold."""
    found: list[dict[str, Any]] = []
    for each in (*spoiled(fields), fields, {}):
        with contextlib.suppress(OverflowError, ValueError, TypeError):
            if msgpack.packb(each) and all(isinstance(name, str) for name in each):
                found.append(each)
    return found


def blobs_for(fields: dict[str, Any]) -> list[bytes]:
    return BLOBS[len(str(fields)) % len(BLOBS)]


def test_whoever_does_not_know_the_secret_gets_no_connection_and_no_answer(cluster: Cluster, liar: MakeLiar) -> None:
    cluster.start(0, 1)
    stranger = liar(known=secret.make_secret())
    for rank in range(2):
        assert stranger.connect(node_of(cluster, rank))
        address = node_of(cluster, rank).addresses[0]
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096)):
            with (
                socket.create_connection((address.host, address.port), timeout=30) as sock,
                contextlib.suppress(OSError),
            ):
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(1) == b""
    assert not stranger.heard
    assert cluster.checkpoint("peer")
    cluster.finish()


def test_no_message_of_an_agent_that_has_no_part_in_the_job_ends_an_agent_or_the_job(
    cluster: Cluster, liar: MakeLiar
) -> None:
    """But for the question of a start on other nodes: it is believed, since its sender knows the secret, and nothing
    goes until its outcome."""
    cluster.start(0, 1)
    cluster.checkpoint("peer")
    pids = [pid_of(rank) for rank in cluster.job]
    hostile, epoch = liar(), cluster.job[0].epoch
    right = {**SAID, **{kind: {"epoch": epoch, **fields} for kind, fields in {**OF_A_NODE, **OF_A_COORDINATOR}.items()}}
    for node in (node_of(cluster, 0), node_of(cluster, 1)):
        for kind, fields in right.items():
            for each in ways(fields):
                # Such a question is believed: until its outcome nothing that is listed goes.
                if kind == "survey" and "launch" not in each and is_whole(each):
                    continue
                hostile.say(node, {"t": kind, **each}, blobs_for(each))
        hostile.alive(node)
    assert [pid_of(rank) for rank in cluster.job] == pids
    assert not any(rank.lost.is_set() for rank in cluster.job)
    assert cluster.checkpoint("peer", "store")
    cluster.finish()


def test_no_message_of_another_agent_takes_anything_from_the_job_that_a_memory_only_node_lends_to(
    cluster: Cluster, liar: MakeLiar
) -> None:
    """But for those of a start that says it takes over: that is believed, since its sender knows the secret."""
    told = cluster.lend()
    cluster.peers = told["listen"]
    cluster.start(0)
    step = cluster.checkpoint("peer")
    hostile = liar()
    name = cluster.status(0)["lenders"][0]["name"]
    node = NodeAt(name, tuple(Address.parse(text) for text in told["listen"]), ())
    for kind, fields in {**SAID, **OF_A_BORROWER}.items():
        for each in ways(fields):
            if kind != "survey" or not each.get("take_over"):
                hostile.say(node, {"t": kind, "url": cluster.url, **each}, blobs_for(each))
    for each in ways(OF_A_BORROWER["borrow-memory"]):
        hostile.say(node, {"t": "borrow-memory", "id": 1, "url": cluster.url}, [msgpack.packb(each)])
    hostile.alive(node)
    status = cluster.lending_status()
    assert (status["launch"], status["connected"]) == ("test", True)
    assert len(status["whole"]) == 1
    assert cluster.checkpoint("peer") > step


def test_nothing_is_dropped_on_the_word_of_an_agent_that_does_not_coordinate_the_job(
    cluster: Cluster, liar: MakeLiar
) -> None:
    cluster.forbid_commits()
    cluster.start(0, 1)
    step = cluster.checkpoint("peer")
    cluster.hang_up(1)
    hostile, epoch = liar(), cluster.job[0].epoch
    for node in (node_of(cluster, 0), node_of(cluster, 1)):
        for named in (epoch, OTHER):
            said = [("evict", {"what": what}) for what in ("older", "epoch", "older-epochs", "job")]
            said += [(kind, OF_A_COORDINATOR.get(kind, {})) for kind in ("node-lost", "job-state")]
            for kind, fields in said:
                which = {"epoch": named, "identity": f"{named}-999999999999.0000"}
                hostile.say(node, {"t": kind, **fields, **which}, [])
        hostile.alive(node)
    cluster.lose(0)
    assert cluster.restart(1)["step"] == step
    assert set(cluster.fetched()) == {"local"}


def test_a_coordinator_that_says_nonsense_is_let_go_of_and_the_agent_stays(cluster: Cluster, liar: MakeLiar) -> None:
    """The liar coordinates a job whose rank 1 is on a real node."""
    coordinator = liar("coordinator")
    (rank, _) = cluster.connect(1, 1)[:2]
    told = {"name": "coordinator", "addresses": [str(coordinator.address)], "domains": [], "ranks": [0]}
    real = {**rank.nodes[0], "ranks": [1]}
    node = NodeAt(real["name"], tuple(Address.parse(text) for text in real["addresses"]), (1,))
    rank.rank, rank.nodes = 1, [told, real]
    pid = pid_of(rank)
    assert coordinator.connect(node) == ""
    coordinator.alive(node)  # it knows that the connection is the one that is kept
    with Tasks("joining", pool_size=1) as joining:
        joined = joining.submit(lambda: rank.join(OTHER))
        coordinator.loop.until(lambda: coordinator.heard)
        asked = coordinator.heard[0].fields
        assert (asked["t"], asked["rank"]) == ("from-rank", 1)
        assert len(coordinator.heard[0].blobs) == 2, "a coordinator knows the nodes: not once for each rank of all"
        head = {"t": "to-rank", "epoch": OTHER, "rank": 1, "connection_number": asked["connection_number"]}
        coordinator.say(node, {**head, "message": {"t": "reply", "id": asked["message"]["id"]}}, [])
        while not joined.done():
            coordinator.loop.turn(0.05)
        joined.result()
    for kind, fields in OF_A_COORDINATOR.items():
        for each in (*ways(fields), *({"id": wrong} for wrong in WRONG)):
            coordinator.say(node, {"t": kind, "epoch": OTHER, **each}, blobs_for(each))
    coordinator.alive(node)
    assert pid_of(rank) == pid
    assert cluster.status(1)["pid"] == pid
    assert math.isfinite(cluster.status(1)["followed_jobs"][0]["arena_bytes"])


def test_a_node_of_the_job_that_says_nonsense_ends_neither_its_coordinators_agent_nor_what_is_safe(
    cluster: Cluster, liar: MakeLiar
) -> None:
    """The liar has taken the place of one of two real nodes. What it says of the job it may say, and so end that."""
    cluster.forbid_commits()
    cluster.start(0, 1)
    step = cluster.checkpoint("peer")
    node, epoch, pid = node_of(cluster, 0), cluster.job[0].epoch, pid_of(cluster.job[0])
    hostile = liar(node_of(cluster, 1).name)
    os.kill(cluster.pids[1], signal.SIGSTOP)
    try:
        for kind, fields in OF_A_NODE.items():
            for each in ways(fields):
                hostile.say(node, {"t": kind, "epoch": epoch, **each}, blobs_for(each))
        hostile.alive(node)
    finally:
        hostile.network.close()
        os.kill(cluster.pids[1], signal.SIGCONT)
    assert pid_of(cluster.job[0]) == cluster.status(0)["pid"] == pid
    cluster.hang_up()
    assert cluster.restart(0, 1)["step"] == step
    assert cluster.checkpoint("peer") > step


def test_nobody_answers_for_another_agent(liar: MakeLiar) -> None:
    asker, asked, other = liar("asker"), liar("asked"), liar("other")
    nodes = {
        each.network.agent_name: NodeAt(each.network.agent_name, (each.address,), ()) for each in (asker, asked, other)
    }

    def until(holds: Callable[[], object]) -> None:
        for _ in range(6000):
            if holds():
                return
            for each in (asker, asked, other):
                each.loop.turn(0.005)
        raise AssertionError

    connected = [asker.network.connect(nodes[name]) for name in ("asked", "other")]
    until(lambda: all(each.is_settled for each in connected))
    assert [each.result() for each in connected] == ["asked", "other"]
    until(lambda: asked.network.channel("asker") and other.network.channel("asker"))
    heard: list[Message | None] = []
    start(asker.network.request("asked", {"t": "describe-snapshots"}), lambda answer, error: heard.append(answer))
    until(lambda: asked.heard)
    number = int(asked.heard[0].fields["id"])
    for kind in ("reply", "error"):
        other.network.notify("asker", {"t": kind, "id": number, "message": "lie", "who": "other"})
    until(lambda: asker.network.channel("other") is None)
    assert not heard
    asked.network.notify("asker", {"t": "reply", "id": number, "who": "asked"})
    until(lambda: heard)
    assert [each.fields["who"] for each in heard if each is not None] == ["asked"]
