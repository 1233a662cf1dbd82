"""A node's ranks ask where the candidate lies, and no word of it comes: nobody has seen that anything is damaged."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.ipc.messages import Message
from tests.agent.nodes.staged import EPOCH, Net, Turned, identity
from tests.agent.nodes.test_clocks import NODES, Rank, follower_services


class Asking(Rank):
    def reply(self, number: int, fields: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "kind"), [(None, "agent"), ([], "agent"), ([b"no manifest"], "damaged")], ids=["none", "odd", "damaged"]
)
def test_only_what_was_seen_to_be_damaged_is_called_so(answer: list[bytes] | None, kind: str, turned: Turned) -> None:
    net, rank = Net("b"), Asking()
    services = follower_services(turned.workers)
    followed_job = FollowerJob(services, cast(PeerNetwork, net), EPOCH, NODES, lambda each: {})
    words = {"t": "fetch", "id": 1, "identity": str(identity(5))}
    followed_job.restore.fetch(cast(Any, rank), Message(words, [], [np.array([0], "<u4").tobytes()]))
    if answer is None:
        net.asked[0].refuse("the connection to agent a has ended")
    else:
        net.asked[0].answer({"records": []}, answer)
    (told,) = rank.heard
    assert (told["ok"], told["kind"]) == (False, kind)
    assert str(identity(5)) in told["message"]
    followed_job.drop()
