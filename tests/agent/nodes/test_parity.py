"""Parity of snapshots in other nodes' memory: as many nodes as it has parities may be lost, and all comes back bit for
bit from what is left, with nothing read from the store. The store has no checkpoint here, but where a test says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from ckpt.errors import NoCheckpoint
from tests.agent.nodes.cluster import Cluster

TWO = {"data": 2, "parity": 2}
ONE = {"data": 3, "parity": 1}


def start(cluster: Cluster, peers: dict[str, int], spread: Sequence[int], extra: int = 0) -> None:
    """Without a store. `extra`: elements that each rank holds besides, of which each stages a part."""
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": peers}
    cluster.connect(*spread)
    for rank in cluster.job:
        rank.extra = extra
    cluster.enter()


def check_memory(cluster: Cluster, candidate: dict[str, Any], *steps: int) -> None:
    """One of these came back, and all of it from memory. That it is right each rank has seen for itself on entry."""
    assert candidate["step"] in steps
    assert candidate["level"] in ("local", "peer")
    assert set(cluster.fetched()) <= {"local", "peer"}


@pytest.mark.parametrize("lost", list(itertools.combinations(range(4), 2)))
def test_with_two_parities_any_two_of_four_nodes_may_be_lost_and_two_more_after_that(
    cluster: Cluster, lost: tuple[int, int]
) -> None:
    start(cluster, TWO, (0, 1, 2, 3))
    step = cluster.checkpoint("peer")
    cluster.lose(*lost)
    left = [node for node in range(4) if node not in lost]
    check_memory(cluster, cluster.restart(*left, 4, 5), step)
    again = cluster.checkpoint("peer")
    assert again > step
    cluster.lose(*left)
    check_memory(cluster, cluster.restart(5, 4), again)


def test_after_more_losses_than_there_are_parities_nothing_is_made_up_and_it_is_said_loudly_what_is_lost(
    cluster: Cluster,
) -> None:
    """The store has nothing either."""
    start(cluster, ONE, (0, 1, 2, 3))
    step = cluster.checkpoint("peer")
    cluster.lose(0, 2)
    assert cluster.start(1, 3).fields["candidate"] is None
    assert not cluster.fetched()
    (told,) = [each for each in cluster.job[0].events if each["name"] == "restore.lost"]
    assert told["loud"]
    assert told["data"]["ranks"] == [0, 2]
    assert f"step {step} was in memory" in told["message"]


def test_what_is_damaged_where_it_lies_is_made_again_as_if_it_were_lost(cluster: Cluster) -> None:
    """One node is gone, and what another one holds has changed: with two parities that is not too much."""
    start(cluster, TWO, (0, 1, 2, 3))
    step = cluster.checkpoint("peer")
    cluster.damage(1)
    cluster.lose(2)
    check_memory(cluster, cluster.restart(0, 1, 3), step)


def test_with_more_damage_than_there_is_parity_nothing_wrong_is_restored(cluster: Cluster) -> None:
    start(cluster, ONE, (0, 1, 2, 3))
    cluster.checkpoint("peer")
    cluster.damage(1)
    cluster.lose(2)
    cluster.connect(0, 1, 3)
    with pytest.raises(NoCheckpoint, match="step"):
        cluster.enter()


def test_a_start_that_has_lost_nothing_copies_nothing_and_one_that_has_does(cluster: Cluster) -> None:
    start(cluster, TWO, (0, 1, 2, 3))
    step = cluster.checkpoint("peer")
    cluster.hang_up()
    check_memory(cluster, cluster.restart(0, 1, 2, 3), step)
    step = cluster.checkpoint("peer")
    assert not any(event["name"] in ("replica.restored", "replication.short") for event in cluster.job[0].events)
    cluster.kill(2)  # not the node of rank 1: it has most of the state, and may keep no parity
    cluster.hang_up()
    check_memory(cluster, cluster.restart(0, 1, 4, 3), step)
    cluster.await_event("replica.restored")
    cluster.lose(1)
    check_memory(cluster, cluster.restart(0, 4, 3), step)


@pytest.mark.parametrize("lost", [(1, 2), (3, 0), (1, 3)])
def test_nodes_that_die_while_parity_is_made_leave_the_checkpoint_before_as_safe_as_it_was(
    cluster: Cluster, lost: tuple[int, int]
) -> None:
    """The next one is whole on each node, and its parity is on its way."""
    start(cluster, TWO, (0, 1, 2, 3), extra=2 << 20)
    safe = cluster.checkpoint("peer")
    step = cluster.checkpoint("local")
    cluster.lose(*lost)
    left = [node for node in range(4) if node not in lost]
    check_memory(cluster, cluster.restart(*left), safe, step)
