"""A start on other machines finds what it needs in the memory of nodes that have no part in it: agents of earlier
starts, which the claims in the store name, and which know the same secret."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from ckpt.agent.node.start_survey import StartSurvey, nodes_from_claims
from ckpt.agent.node.startup_state import Start
from ckpt.agent.runtime.coroutines import Promise, spawn
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.ipc import secret
from ckpt.ipc.node_list import NodeAt
from ckpt.store.lineage import Claim
from ckpt.store.run import RunView
from ckpt.types import Epoch, Identity, Version
from tests.agent.nodes.cluster import COPIED, Cluster
from tests.agent.nodes.staged import Net
from tests.agent.parts import bare_context


def newer_in_memory(cluster: Cluster, *spread: int) -> tuple[int, int]:
    """A job that has one checkpoint in the store, and a newer one in its nodes' memory only; their steps."""
    cluster.start(*spread)
    stored = cluster.checkpoint("store")
    Path(cluster.url, "data").rename(Path(cluster.url, "away"))
    cluster.forbid_commits()
    return stored, cluster.checkpoint("peer")


def allow_reading(cluster: Cluster) -> None:
    cluster.allow_commits()
    Path(cluster.url, "away").rename(Path(cluster.url, "data"))


@pytest.mark.parametrize(
    ("before", "lost", "after"), [((0, 1), (0,), (2, 3)), ((0, 1, 1), (1,), (2,)), ((0, 1, 2), (2,), (3, 4, 3))]
)
def test_a_start_on_other_nodes_goes_on_from_what_is_left_of_those_before(
    before: tuple[int, ...], lost: tuple[int, ...], after: tuple[int, ...], cluster: Cluster
) -> None:
    _, step = newer_in_memory(cluster, *before)
    cluster.lose(*lost)
    candidate = cluster.restart(*after)
    assert (candidate["step"], candidate["level"]) == (step, "peer")
    assert set(cluster.fetched()) == {"peer"}


def test_lost_ranks_are_made_again_from_parity_that_is_kept_there(cluster: Cluster) -> None:
    cluster.options = {**COPIED, "peers": {"data": 2, "parity": 2}}
    _, step = newer_in_memory(cluster, 0, 1, 2, 3)
    cluster.lose(0, 2)
    assert cluster.restart(4, 5)["step"] == step
    assert not cluster.fetched().get("store")


def at(number: int) -> Epoch:
    return Epoch(number, f"{number:016x}")


def claim(number: int, run: str, *names: str) -> Claim:
    agents = tuple((name, (f"10.0.0.{number}:7", "no address")[: 1 if name != "odd" else 2]) for name in names)
    return Claim(at(number), None, secret_name=run, agents=agents)


def test_agents_of_the_newest_starts_with_this_secret_are_asked_each_once_where_it_was_last() -> None:
    claims = (claim(1, "r", "old"), claim(2, "r", "a", "b"), claim(3, "other", "c"), claim(4, "r", "b", "odd", "here"))
    view = RunView(claims, frozenset(), (), {}, frozenset(), {})
    found = nodes_from_claims(view, "r", {"here"})
    assert [(node.name, [str(each) for each in node.addresses]) for node in found] == [
        ("b", ["10.0.0.4:7"]),
        ("a", ["10.0.0.2:7"]),
    ]
    assert nodes_from_claims(view, "none", set()) == []


def survey_previous(start: Start, net: object, timers: list[Callable[[], None]]) -> None:
    server = SimpleNamespace(call_later=lambda seconds, what: timers.append(what))
    context = bare_context(network=net, server=server)
    context.jobs.start = start
    start.nodes = (NodeAt("me", (), (0,)),)
    spawn(StartSurvey(context, cast(Any, None), cast(Any, None))._survey_previous_nodes(start))


@pytest.mark.parametrize("newest", [True, False])
def test_nobody_is_asked_where_the_nodes_that_take_part_hold_the_newest_epoch(newest: bool) -> None:
    asked: list[str] = []

    class Net:
        agent_name, secret_id = "me", "r"

        def connect(self, node: NodeAt) -> Promise[str]:
            asked.append(node.name)
            return Promise()

    start = Start(None, 1, "l", 1, False)  # type: ignore[arg-type]
    start.run_view = RunView((claim(1, "r", "a"), claim(2, "r", "b")), frozenset(), (), {}, frozenset(), {})
    held = Identity(at(2 if newest else 1), Version(5))
    start.inventory.world_sizes[held] = 1
    start.inventory.holders[held, 0] = [""]
    survey_previous(start, Net(), [])
    assert asked == ([] if newest else ["b", "a"])


@pytest.mark.parametrize("is_late", [False, True])
def test_who_was_asked_hears_the_outcome_also_where_the_answer_came_too_late(is_late: bool) -> None:
    connected: list[Promise[str]] = []

    class Asking(Net):
        secret_id = "r"

        def connect(self, node: NodeAt) -> Promise[str]:
            connected.append(Promise())
            return connected[-1]

    net = Asking(agent_name="me")
    start = Start(None, 1, "l", 1, False)  # type: ignore[arg-type]
    start.run_view = RunView((claim(2, "r", "a"),), frozenset(), (), {}, frozenset(), {})
    timers: list[Callable[[], None]] = []
    survey_previous(start, net, timers)
    connected[0].set_result("a")
    if is_late:
        timers[0]()
    theirs = Inventory()
    theirs.add_epoch(None, at(2), 5)
    net.asked[0].answer({}, [msgpack.packb(theirs.fields())])
    assert [node.name for node in start.previous_nodes] == ["a"], (
        "or it would do nothing for as long as this agent lives"
    )
    assert start.inventory.steps == ({} if is_late else {at(2): 5})


def test_who_knows_another_secret_learns_nothing_and_starts_from_the_store(cluster: Cluster) -> None:
    stored, _ = newer_in_memory(cluster, 0, 1)
    cluster.lose(0)
    allow_reading(cluster)
    cluster.secret = secret.make_secret()
    candidate = cluster.restart(2, 3)
    assert (candidate["step"], candidate["level"]) == (stored, "store")


def test_agents_that_are_gone_or_hang_keep_no_start_waiting_for_long(cluster: Cluster) -> None:
    stored, _ = newer_in_memory(cluster, 0, 1)
    cluster.lose(0)
    os.kill(cluster.pids[1], signal.SIGSTOP)
    allow_reading(cluster)
    decision = cluster.start(2, 3)
    os.kill(cluster.pids[1], signal.SIGCONT)
    assert decision.fields["candidate"]["step"] == stored
