"""The clocks of two hosts have nothing to do with each other: until when is said in seconds from now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.job.job_context import Services
from ckpt.agent.net.channel import Channel
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.runtime.memory_plan import MemoryUse
from ckpt.agent.snapshots.remote_share import RemotePeer
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from tests.agent.fake import OPTIONS
from tests.agent.nodes.staged import EPOCH, Net

HERE_S, THERE_S = 50_000.0, 90.0  # how long each host has been up
NODES = (NodeAt("a", (), (0,)), NodeAt("b", (), (1,)))


class Rank:
    """The connection of rank 1 to the agent of its own node."""

    pid = 1

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send(self, fields: dict[str, Any], fds: Any = (), blobs: Any = ()) -> None:
        self.heard.append(fields)

    def watch_death(self) -> None:
        pass

    unwatch_death = disconnect = watch_death


def follower_services(workers: Any = None) -> Services:
    """Of an agent on which nothing happens by itself."""
    server = SimpleNamespace(call_later=lambda delay_s, what: None, post=lambda what: None)
    listeners = SimpleNamespace(list_notices=tuple)
    services = SimpleNamespace(
        server=server,
        workers=workers,
        store=SimpleNamespace(folder=None),
        memory_use=lambda epoch: MemoryUse(),
        notice_listeners=listeners,
    )
    return cast(Services, services)


class Led(Net):
    def channel(self, name: str) -> object:
        return self

    def set_rate_limit(self, bytes_per_s: float | None) -> None:
        pass


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def there(rank: Rank) -> Iterator[FollowerJob]:
    """The second node's part of the job."""
    made = FollowerJob(follower_services(), cast(PeerNetwork, Led("b")), EPOCH, NODES, lambda identity: {})
    said = {"t": "join", "rank": 1, "resume": False, "arenas": [], "options": OPTIONS, "id": 1}
    made.join(cast(Peer, rank), Message(said, [], []))
    yield made
    made.drop()


@pytest.mark.parametrize(
    "body",
    [
        {"t": "reply", "id": 7, "leave": True, "leave_deadline_s": HERE_S + 30.0},
        {"t": "end-process", "why": "", "wait_for_saves": True, "leave_deadline_s": HERE_S + 30.0},
        {"t": "leave-deadline", "leave_deadline_s": HERE_S + 30.0},
    ],
)
def test_until_when_a_rank_of_another_node_may_stay_is_by_the_clock_of_its_host(
    body: dict[str, Any], there: FollowerJob, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    monkeypatch.setattr(time, "monotonic", lambda: HERE_S)
    RemotePeer(cast(PeerNetwork, net), "b", EPOCH, 1, 1, 1).send(body)
    ((name, told),) = net.told
    assert name == "b"
    monkeypatch.setattr(time, "monotonic", lambda: THERE_S)
    there.on_coordinator_message(cast(Channel, None), Message(told, [], []))
    assert rank.heard == [{**body, "leave_deadline_s": THERE_S + 30.0}]
