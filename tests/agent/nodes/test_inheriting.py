"""A job's coordinator is lost and nothing is started again: what the nodes that are left have in memory is
committed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt.agent.inheriting import AFTER_S, TURNS, due_s, shares
from tests.agent.nodes.cluster import Cluster, await_, await_end, line

COPIES: dict[str, Any] = {"replicas": 1}
PARITY: dict[str, Any] = {"data": 2, "parity": 1}
NO_LIMITS: dict[str, Any] = {"memory": None, "bandwidth": None, "peer_bandwidth": None}


@pytest.fixture
def soon(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn comes after 2 s."""
    monkeypatch.setenv("CKPT_LINGER_S", "8")


def save_nowhere_but_in_memory(cluster: Cluster, peers: Mapping[str, Any], *spread: int) -> int:
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": dict(peers)}
    cluster.start(*spread)
    return cluster.checkpoint("peer")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("peers", [COPIES, PARITY])
def test_what_is_safe_with_others_is_committed_by_them_when_its_coordinator_is_lost(
    cluster: Cluster, peers: dict[str, Any]
) -> None:
    step = save_nowhere_but_in_memory(cluster, peers, 0, 0, 1, 2)
    cluster.kill(0)
    cluster.allow_commits()
    cluster.hang_up(1, 2)
    await_(lambda: bool(line(cluster.url)))
    assert [identity.tick.step for identity in line(cluster.url)] == [step]


@pytest.mark.usefixtures("soon")
def test_what_is_not_whole_any_more_is_left_alone(cluster: Cluster) -> None:
    """Two of three are lost, where one may be; the third one ends in its time."""
    save_nowhere_but_in_memory(cluster, COPIES, 0, 1, 2)
    cluster.kill(0, 2)
    cluster.allow_commits()
    cluster.hang_up(1)
    await_end(cluster.pids[1])
    assert line(cluster.url) == []


@pytest.mark.usefixtures("soon")
def test_a_start_that_comes_while_it_is_written_goes_on_from_memory(cluster: Cluster) -> None:
    cluster.options = {**cluster.options, "codec": "raw", "limits": {**NO_LIMITS, "bandwidth": 2e5}}
    step = save_nowhere_but_in_memory(cluster, COPIES, 0, 1, 2)
    cluster.kill(0)
    cluster.allow_commits()
    cluster.hang_up(1, 2)
    data = Path(cluster.url) / "data"
    await_(lambda: data.is_dir() and any(data.iterdir()))
    cluster.options = {**cluster.options, "limits": NO_LIMITS}
    decision = cluster.start(1, 2, 3)
    assert decision.fields["candidate"]["step"] == step
    assert set(cluster.fetched()) <= {"local", "peer"}
    newer = cluster.checkpoint("store")
    assert [identity.tick.step for identity in line(cluster.url)] in ([newer], [step, newer])
    cluster.finish()


def test_each_node_has_a_turn_while_the_memory_is_kept() -> None:
    for linger_s in (0.0, 1.0, 300.0, 1e6):
        turns = [due_s(100.0, turn, linger_s) for turn in range(10)]
        assert turns == sorted(turns)
        assert len(set(turns)) == (TURNS if linger_s else 1)
        assert 100.0 <= turns[0] <= 100.0 + AFTER_S
        assert turns[-1] <= 100.0 + linger_s


def test_every_frame_is_written_by_who_has_it_and_another_may_do_it_who_has_all_of_that_share() -> None:
    holders = {0: ["", "b"], 1: ["b", "c", "d"], 2: ["b", "d"], 3: ["c"]}
    ranks, rest = shares(holders)
    assert ranks == {"b": frozenset((1, 2)), "c": frozenset((3,))}
    assert rest == {"b": ["d"], "c": []}
