"""What is lost with a node, or damaged in its memory, comes back from another's; and where nobody has it, a start is an
error and never a fresh one. The store has no checkpoint here."""

from __future__ import annotations

import pytest

from ckpt.errors import NoCheckpoint
from ckpt.types import Version
from tests.agent.nodes.cluster import ADAPTIVE, LEVELS, Cluster, train


@pytest.fixture(autouse=True)
def no_commits(cluster: Cluster) -> None:
    cluster.forbid_commits()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_damaged_in_one_nodes_memory_comes_from_a_copy(rank: int, cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    step = cluster.checkpoint("peer")
    cluster.damage(rank)
    cluster.hang_up()
    assert cluster.restart(0, 1, 2)["step"] == step


def test_a_start_whose_only_checkpoint_cannot_be_had_any_more_is_an_error_and_no_fresh_one(cluster: Cluster) -> None:
    cluster.start(0, 1)
    cluster.checkpoint("peer")
    cluster.damage(0)
    cluster.lose(1)
    cluster.connect(0, 1)
    for _ in range(2):
        with pytest.raises(NoCheckpoint, match="step"):
            cluster.enter()


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2), (1, 0, 2)])
def test_one_node_after_the_other_may_be_lost_once_what_has_lost_its_copies_has_them_again(
    order: tuple[int, int, int], cluster: Cluster
) -> None:
    """Three nodes, one copy of each. No snapshot is taken after the first: memory of it is all there is."""
    first, second, last = order
    cluster.start(0, 1, 2)
    step = cluster.checkpoint("peer")
    cluster.lose(first)
    decision = cluster.start(second, last)
    assert decision.fields["candidate"]["step"] == step
    told = cluster.await_event("replica.restored")
    assert told["identity"] == decision.fields["candidate"]["identity"]
    assert told["bytes"] > 0
    assert cluster.job[0].levels == {}
    cluster.lose(second)
    assert cluster.restart(last)["step"] == step
    assert set(cluster.fetched()) == {"local"}
    assert cluster.checkpoint("local") > step


def test_a_rank_whose_agent_was_gone_hears_what_has_become_of_its_snapshots_meanwhile(cluster: Cluster) -> None:
    cluster.start(0, 1)
    version = Version(cluster.checkpoint("peer"))
    far = cluster.job[1]
    cluster.kill_agent(1)
    assert far.lost.wait(60)
    far.levels.clear()
    cluster.allow_commits()
    near = cluster.job[0]
    with near.changed:
        assert near.changed.wait_for(lambda: near.levels.get((str(version), "store"), (False, ""))[0], 60), near.levels
    cluster.come_back(1)
    assert {level: ok for (at, level), (ok, _) in far.levels.items() if at == str(version)} == dict.fromkeys(
        LEVELS, True
    )


def test_what_an_agent_kept_for_others_is_copied_to_it_again_once_it_is_back(cluster: Cluster) -> None:
    """Its ranks have their own memory; copies of the others' died with it. No snapshot is taken after that."""
    cluster.start(0, 1)
    step = cluster.checkpoint("peer")
    rank = cluster.job[1]
    cluster.kill_agent(1)
    assert rank.lost.wait(60)
    cluster.come_back(1)
    rank.wait_warm()
    cluster.await_event("replication.done", 2)
    cluster.lose(0)
    assert cluster.restart(1)["step"] == step
    assert set(cluster.fetched()) == {"local"}


def test_a_start_that_begins_afresh_since_a_part_of_the_newest_is_lost_says_so_loudly(cluster: Cluster) -> None:
    cluster.options = {**cluster.options, "peers": None}
    cluster.start(0, 1)
    step = cluster.checkpoint("local")
    cluster.lose(1)
    decision = cluster.start(0, 2)
    assert decision.fields["candidate"] is None
    (told,) = [each for each in cluster.job[0].events if each["name"] == "restore.lost"]
    assert told["loud"]
    assert told["data"]["ranks"] == [1]
    assert f"step {step} was in memory" in told["message"]
    assert "afresh" in told["message"]


@pytest.mark.parametrize("lost", [True, False])
def test_a_node_that_was_lost_counts_as_one_and_dead_ranks_alone_do_not(lost: bool, cluster: Cluster) -> None:
    cluster.options = {**cluster.options, "policy": ADAPTIVE}
    cluster.start(0, 1)
    train(cluster.job, 3)
    cluster.save("peer")
    assert cluster.status(0)["job"]["rates"]["node"]["seen"] == 0
    if lost:
        cluster.kill(1)
    cluster.hang_up()
    cluster.start(0, 2 if lost else 1)
    rates = cluster.status(0)["job"]["rates"]
    assert (rates["node"]["seen"], rates["process"]["seen"]) == ((1, 0) if lost else (0, 1))
