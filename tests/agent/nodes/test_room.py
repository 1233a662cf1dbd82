"""A start that goes on from memory finds that memory taken, by what it goes on from among others. What the job has room
for is planned around that, and anew once it has gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.runtime.memory_plan import make_plan
from tests.agent.nodes.cluster import Cluster
from tests.agent.nodes.staged import EPOCH
from tests.agent.parts import bare_context


def slots_of(status: dict[str, Any]) -> int:
    return int(status["job"]["memory"]["slots"])


def all_kept(peers: dict[str, Any]) -> bool:
    return bool(peers["nodes"]) and all(row["kept_by"] for row in peers["nodes"])


def limit(cluster: Cluster, slots: float) -> None:
    """From the next start on: what a job takes of each node with so many slots, copies for others among them. Now it
    has all its slots."""
    cluster.await_status(0, lambda status: len(status["job"]["slots"]) == 3)
    memory = cluster.status(0)["job"]["memory"]
    allowed = int(slots * memory["slot_bytes"]) + memory["commit_bytes"]
    cluster.options = {**cluster.options, "limits": {"memory": allowed, "bandwidth": None}}


@pytest.mark.parametrize("slots", [4.5, 3.5])
@pytest.mark.parametrize("spread", [(0,), (0, 1)])
def test_a_job_that_is_started_again_has_all_its_slots_again_once_it_has_saved(
    spread: tuple[int, ...], slots: float, cluster: Cluster
) -> None:
    """With the least memory there is not one at first: what the three slots of the start before it take that hold
    nothing of use is given back."""
    cluster.options = {**cluster.options, "peers": None}
    cluster.start(*spread)
    cluster.checkpoint("store")
    limit(cluster, slots)
    for _ in range(2):
        cluster.hang_up()
        step = cluster.job[0].step
        assert cluster.restart(*spread)["step"] == step
        assert cluster.await_event("memory.plan")["slots"] == (1 if slots > 4 else 0), "it was planned around it"
        cluster.await_status(0, lambda status: slots_of(status) > 0)
        cluster.checkpoint("local", "store")
        cluster.await_status(0, lambda status: slots_of(status) == 3)
        cluster.checkpoint("local", "store")


def test_where_there_is_no_room_for_copies_what_was_safe_before_stays_until_the_store_has_something_newer(
    cluster: Cluster,
) -> None:
    """What is newer lies on one node each."""
    cluster.forbid_commits()
    cluster.start(0, 1)
    step = cluster.checkpoint("peer")
    limit(cluster, 4.5)
    cluster.hang_up()
    assert cluster.restart(0, 1)["step"] == step
    assert not all_kept(cluster.await_event("replication.placed"))
    assert cluster.checkpoint("local") > step
    cluster.await_event("commit.failed")
    cluster.lose(1)
    assert cluster.restart(0, 2)["step"] == step


def test_nodes_that_are_started_again_keep_each_others_copies_again_once_what_was_in_the_way_has_gone(
    cluster: Cluster,
) -> None:
    cluster.start(0, 1)
    cluster.checkpoint("peer", "store")
    limit(cluster, 4.5)
    for _ in range(2):
        cluster.hang_up()
        cluster.start(0, 1)
        assert not all_kept(cluster.await_event("replication.placed"))
        cluster.checkpoint("local", "store")
        cluster.await_status(0, lambda status: all_kept(status["job"]["peers"]))
        cluster.checkpoint("peer")


def test_copies_leave_a_users_limit_to_a_slot_that_is_not_in_use_any_more_until_it_has_gone() -> None:
    """It still holds what is being committed, say, when copies may have its room."""
    slot, share = 100 << 20, SimpleNamespace(limited_plan=None, arenas={0: {}, 1: {}})
    job = SimpleNamespace(epoch=EPOCH, local_share=share)
    context = bare_context(workers=SimpleNamespace(free_bytes=lambda: 1 << 50))
    context.jobs.current = cast(Any, job)
    keeper = NodeMemory(context)
    job.local_share.limited_plan = make_plan(slot, 0, 0, 6 * slot, 1 << 50, 2)
    beside_two = job.local_share.limited_plan.replica_bytes_max(2)
    assert keeper.replica_bytes_max() == beside_two
    job.local_share.arenas[2] = {}
    assert keeper.replica_bytes_max() == beside_two - slot
    del job.local_share.arenas[2], job.local_share.arenas[1]
    assert keeper.replica_bytes_max() == beside_two, "it comes, or comes again"
