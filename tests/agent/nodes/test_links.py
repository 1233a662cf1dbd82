"""Links that break and agents that hang: what was safe comes back, the job goes on where it can, and an agent that was
away brings nothing old back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ckpt.ipc.addresses import Address
from ckpt.types import Identity, Version
from tests.agent.fake import FakeRank
from tests.agent.net.proxy import Fault, Proxy
from tests.agent.node.test_agent import together, wait_gone
from tests.agent.nodes.cluster import Cluster, come_back, line
from tests.agent.nodes.test_previous_nodes import allow_reading

NAME = "0123456789abcdef"  # as long as agents' names are


class Link(Proxy):
    def hang(self) -> None:
        """Whatever connects from now on gets nothing but a greeting."""
        self._every = Fault(after=0, hang=True)

    def flip(self, after: int | None) -> None:
        """On whatever connects from now on one byte is changed after so many; None: none is any more."""
        self._every = Fault(after=after, flip=True) if after is not None else None

    def mend(self) -> None:
        """All of what connects from now on passes."""
        self._every = None

    def cut(self) -> None:
        """All that is connected now."""
        for sock in list(self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Links:
    """One for each address of an agent, made when it is first told of."""

    def __init__(self, stack: ExitStack) -> None:
        self.of: dict[int, Link] = {}  # by node
        self._stack = stack
        self._made: dict[str, Link] = {}

    def route(self, node: int, address: str) -> str:
        if address not in self._made:
            link = Link(Address.parse(address), NAME, [])
            self._made[address] = self.of[node] = self._stack.enter_context(link)
        return str(self._made[address].address)


@pytest.fixture
def links(cluster: Cluster) -> Iterator[Links]:
    with ExitStack() as stack:
        made = Links(stack)
        cluster.route = made.route
        yield made
        cluster.close()  # before their links


def cut(cluster: Cluster, links: Links, node: int) -> list[FakeRank]:
    """That node is not to be reached: its agent, its ranks and all that they hold live on. The ranks, which know it."""
    away = [rank for rank in cluster.job if cluster.at[rank.rank] == node]
    links.of[node].cut()
    for rank in away:
        assert rank.lost.wait(60)
    return away


def mend(away: list[FakeRank]) -> None:
    together(away, come_back)
    together(away, lambda rank: rank.wait_warm())


def test_a_job_goes_on_after_the_link_between_its_nodes_was_cut(cluster: Cluster, links: Links) -> None:
    cluster.start(0, 1, 1)
    first = cluster.checkpoint("peer")
    for _ in range(2):
        away = cut(cluster, links, 1)
        job = cluster.await_status(0, lambda status: bool(status["job"]["cut_off"]))["job"]
        assert [(each["node"], each["ranks"]) for each in job["cut_off"]] == [(away[0].nodes[1]["name"], [1, 2])]
        mend(away)
        assert cluster.status(0)["job"]["cut_off"] == []
        again = cluster.checkpoint("peer")
        assert again > first
        first = again
    assert cluster.save("peer", "store") == Version(first, 1)
    cluster.finish()


def await_kept(cluster: Cluster, step: int, *nodes: int) -> None:
    """Until each of these has all of that step that it is to keep."""
    for node in nodes:
        cluster.await_status(node, lambda status: step in steps_of(status))


def steps_of(status: dict[str, Any]) -> set[int]:
    """Of which that agent keeps something for others."""
    return {Identity.parse(text).version.step for text in status["copies"]}


def lose_the_coordinator_on_the_way(cluster: Cluster, failed: int) -> None:
    """While a newer one than that, of which all had come that was to come, is on its way. What was safe comes back."""
    rank = cluster.job[0]
    cluster.checkpoint("local")
    for node in range(3):  # it gives way to the newer one, unless it has become safe meanwhile
        cluster.await_status(
            node, lambda status: failed not in steps_of(status) or rank.levels[str(Version(failed)), "peer"][0]
        )
    safe = [
        Version.parse(version).step for (version, level), (ok, _) in list(rank.levels.items()) if level == "peer" and ok
    ]
    cluster.lose(0)
    cluster.route = lambda node, address: address
    assert cluster.restart(1, 2)["step"] >= max(safe)


def test_a_link_that_is_cut_for_a_moment_takes_nothing_from_what_is_safe_though_all_copies_have_come(
    cluster: Cluster, links: Links
) -> None:
    """Who had its copies already may have lost them: they are not safe, and what is stays, also for the next ones."""
    cluster.forbid_commits()
    cluster.start(0, 1, 2)
    cluster.checkpoint("peer")
    (slow,) = cluster.keepers()[0]
    (quick,) = {1, 2} - {slow}
    links.of[0].hang()
    step = cluster.checkpoint("local")
    await_kept(cluster, step, 0, quick)
    mend(cut(cluster, links, quick))
    links.of[0].mend()
    links.of[0].cut()
    assert not cluster.job[0].wait_level(Version(step), "peer")
    links.of[0].hang()
    links.of[0].cut()
    lose_the_coordinator_on_the_way(cluster, step)


def test_what_a_node_staged_is_written_by_who_has_its_copy_though_other_copies_are_still_on_their_way(
    cluster: Cluster, links: Links, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "20")  # a commit that has failed is tried again after a quarter of that
    cluster.forbid_commits()
    cluster.start(0, 1, 2)
    (keeper,) = cluster.keepers()[1]
    links.of[0].hang()
    version = cluster.save("local")
    assert not cluster.job[0].wait_level(version, "store")
    cluster.await_status(keeper, lambda status: [1] in status["copies"].values())
    cluster.job[1].leave("exception")
    cluster.await_event("commit.failed", 2)  # the last try while ranks are there
    cluster.kill(1)
    cluster.allow_commits()
    assert not cluster.job[0].levels.get((str(version), "peer"), (False, ""))[0], "it was not safe as a whole"
    for rank in (cluster.job[0], cluster.job[2]):
        rank.leave("exception")
        rank.close()
    wait_gone(cluster.pids[0])
    assert [each.version for each in line(url)] == [version]


def test_copies_whose_bytes_are_always_changed_on_the_way_are_not_kept_and_training_goes_on(
    cluster: Cluster, links: Links
) -> None:
    cluster.start(0, 1)
    for link in links.of.values():
        link.flip(100_000)
    wrong = cluster.checkpoint("local")
    assert not cluster.job[0].wait_level(Version(wrong), "peer")
    assert "another hash than was announced" in cluster.job[0].levels[str(Version(wrong)), "peer"][1]
    assert cluster.status(0)["copies"] == cluster.status(1)["copies"] == {}
    for link in links.of.values():
        link.flip(None)
    step = cluster.checkpoint("peer")
    assert step > wrong
    cluster.lose(0)
    assert cluster.restart(1, 2)["step"] == step
    assert set(cluster.fetched()) <= {"local", "peer"}


def test_an_agent_that_hung_and_wakes_up_later_brings_nothing_old_back(cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    first = cluster.checkpoint("peer")
    hung = cluster.pids[1]
    os.kill(hung, signal.SIGSTOP)
    cluster.hang_up()
    assert cluster.restart(0, 2)["step"] == first
    second = cluster.checkpoint("peer")
    assert second > first
    cluster.hang_up()
    os.kill(hung, signal.SIGCONT)
    assert cluster.restart(1, 2, 0)["step"] == second, "who hung coordinates"
    assert cluster.checkpoint("peer", "store") > second
    cluster.finish()


def test_an_agent_that_was_started_again_with_old_content_brings_nothing_old_back(cluster: Cluster) -> None:
    """Its ranks have lived on, and give it the memory of a step that nobody could go on from while it was gone. By now
    others have, from an older one, and have not come as far."""
    cluster.start(2, 2)
    stored = cluster.checkpoint("store")
    Path(cluster.url, "data").rename(Path(cluster.url, "away"))
    cluster.forbid_commits()
    cluster.checkpoint("local")
    later = cluster.checkpoint("local")
    cluster.kill_agent(2)
    old, cluster.job = cluster.job, []
    allow_reading(cluster)
    assert cluster.restart(0, 1)["step"] == stored
    again = cluster.checkpoint("peer")
    assert again < later
    cluster.hang_up()
    for rank in old:
        rank.known = {"secret": cluster.secret, "address": rank.nodes[0]["addresses"][0], "name": rank.nodes[0]["name"]}
        come_back(rank)
    # Its slots are kept, unread.
    cluster.await_status(2, lambda status: any(slot["leases"] for slot in status["job"]["slots"]))
    assert cluster.restart(2, 0, 1)["step"] == again, "who has the old content coordinates"
    assert cluster.checkpoint("peer", "store") > again


def test_an_agent_hears_that_the_job_is_over_though_its_coordinator_is_gone_before_it_has_looked(
    cluster: Cluster,
) -> None:
    """It has more to say than it has heard: what the ranks said last goes to a connection that is closed already."""
    cluster.start(0, 1)
    version = cluster.save("peer", "store")
    together(cluster.job, lambda rank: rank.save(Version(version.step, 2), "exit"))
    together(cluster.job, lambda rank: rank.leave())
    os.kill(cluster.pids[1], signal.SIGSTOP)
    cluster.hang_up(1)
    cluster.hang_up(0)
    wait_gone(cluster.pids[0])
    os.kill(cluster.pids[1], signal.SIGCONT)
    wait_gone(cluster.pids[1])
