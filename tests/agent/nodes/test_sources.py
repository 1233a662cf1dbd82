"""A frame that a rank finds wrong comes from the next source that has it: this node's memory, another's, the store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.agent.nodes.cluster import COPIED, Cluster


@dataclass
class WrongOnce:
    """What a rank says of each frame that it is given for the first time."""

    seen: Counter[int] = field(default_factory=Counter)

    def __call__(self, frame: int, raw: memoryview) -> bool:
        self.seen[frame] += 1
        return self.seen[frame] == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_is_wrong_in_a_nodes_memory_comes_from_another_node(rank: int, cluster: Cluster) -> None:
    """Each node has all of it, and the store has nothing."""
    cluster.forbid_commits()
    cluster.options = {**COPIED, "peers": {"replicas": 2}}
    cluster.start(0, 1, 2)
    step = cluster.checkpoint("peer")
    cluster.hang_up()
    wrong = cluster.connect(0, 1, 2)[rank].spoil = WrongOnce()
    assert cluster.enter().fields["candidate"]["step"] == step
    got = [{level for level, count in each.fetched.items() if count} for each in cluster.job]
    assert got.pop(rank) == {"peer"}
    assert got == [{"local"}] * 2
    assert set(wrong.seen.values()) == {2}


def test_what_other_nodes_have_wrong_comes_from_the_store(cluster: Cluster) -> None:
    cluster.start(0, 1)
    step = cluster.checkpoint("peer", "store")
    cluster.hang_up()
    wrong = cluster.connect(2)[0].spoil = WrongOnce()
    candidate = cluster.enter().fields["candidate"]
    assert (candidate["step"], candidate["level"]) == (step, "peer")
    assert set(cluster.fetched()) == {"store"}
    assert set(wrong.seen.values()) == {2}
