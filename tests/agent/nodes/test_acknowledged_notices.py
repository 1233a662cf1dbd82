"""An event of Azure's that names the machines of two nodes begins once the job has left, by the word of one of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest

from ckpt.ipc.notice_sources import Sources
from ckpt.types import Version
from tests.agent.node.test_agent import together, wait_gone
from tests.agent.nodes.cluster import BOUND_S, Cluster, line
from tests.agent.nodes.test_relayed_notices import leave
from tests.preemption.fakes import Asked, FakeService, Says, serving


class Machine(FakeService):
    """The service as one VM sees it. `told`: set once one of the VMs has said that the event may begin. `committed`:
    what was in the store then."""

    def __init__(self, name: str, url: str, told: threading.Event) -> None:
        super().__init__()
        self.name, self.url, self.told = name, url, told
        self.now_s = time.time
        self.events: list[Any] = []
        self.started: list[Any] = []
        self.committed: list[list[int]] = []
        self.refuses = 0  # so many words of that kind
        self.answer = self._answer

    def _answer(self, asked: Asked) -> Says:
        if asked.path.startswith("/metadata/instance/compute/name?"):
            return Says(body=self.name)
        if asked.method == "POST":
            if self.refuses:
                self.refuses -= 1
                return Says(500, "later")
            self.started += json.loads(asked.body)["StartRequests"]
            self.committed.append([identity.version.step for identity in line(self.url)])
            self.told.set()
            return Says(200)
        return Says(body=json.dumps({"DocumentIncarnation": 1, "Events": self.events}))


@pytest.fixture
def machines(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Machine]]:
    monkeypatch.setenv("CKPT_LINGER_S", "5")  # else agents stay until the event begins, to tell it to another start
    told = threading.Event()
    with serving(Machine("vm_0", cluster.url, told)) as first, serving(Machine("vm_1", cluster.url, told)) as second:
        yield [first, second]


def start(cluster: Cluster, machines: list[Machine]) -> None:
    cluster.options = {**cluster.options, "policy": {"steps": 100_000, "seconds": None}}
    for rank, machine in zip(cluster.connect(0, 1), machines, strict=True):
        named = (("CKPT_AZURE_METADATA_ENDPOINT", machine.endpoint),)
        rank.notices = Sources("given", named, acknowledge=True).fields()
    cluster.enter()


def plan(machines: list[Machine], *names: str) -> None:
    told = {"EventId": "E1", "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": names}
    told |= {"EventStatus": "Scheduled", "NotBefore": formatdate(time.time() + 60, usegmt=True)}
    for machine in machines:
        machine.events = [told]


def go(cluster: Cluster) -> None:
    leave(cluster)
    answers = together(cluster.job, lambda rank: rank.leave("notice"))
    assert {answer["committed"] for answer in answers} == {str(Version(cluster.job[0].step))}


def test_one_node_of_those_that_it_names_acknowledges_once_when_the_last_step_is_in_the_store(
    cluster: Cluster, machines: list[Machine]
) -> None:
    start(cluster, machines)
    plan(machines, "vm_0", "vm_1")
    go(cluster)
    assert machines[0].told.wait(BOUND_S)
    cluster.hang_up()
    for pid in cluster.pids.values():  # what they have not said by then they never will
        wait_gone(pid)
    # By which one is a matter of who has heard of it when the job has left: machines ask once in a second.
    first, second = machines
    assert first.started + second.started == [{"EventId": "E1"}]
    assert first.committed + second.committed == [[cluster.job[0].step]]


def test_the_node_that_it_names_does_it_and_asks_again_where_the_service_did_not_say_yes(
    cluster: Cluster, machines: list[Machine]
) -> None:
    start(cluster, machines)
    plan(machines, "vm_1")
    machines[1].refuses = 1
    go(cluster)
    assert machines[1].told.wait(BOUND_S)
    assert [machine.started for machine in machines] == [[], [{"EventId": "E1"}]]
