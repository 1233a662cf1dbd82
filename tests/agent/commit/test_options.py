"""What the user asked for arrives at the agent as it was asked for, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

import ckpt
from ckpt.agent.commit.job_options import options_from
from ckpt.errors import UsageError
from ckpt.trainer.link.options import make_options


def told(peers: Any) -> dict[str, Any]:
    return make_options(ckpt.Every(steps=5), ckpt.Keep(last=3), ckpt.Limits(memory=1 << 30), "raw", peers)


@pytest.mark.parametrize("peers", [None, ckpt.Replicas(1), ckpt.Replicas(3), ckpt.Parity(2, 2), ckpt.Parity(5, 1)])
def test_what_other_nodes_are_to_keep_arrives_as_it_was_asked_for(peers: Any) -> None:
    assert options_from(told(peers)).peers == peers


@pytest.mark.parametrize("peers", [1, "parity", (2, 2), ckpt.Keep()])
def test_what_is_none_of_the_options_is_refused_where_it_is_given(peers: Any) -> None:
    with pytest.raises(UsageError, match=r"ckpt\.Parity"):
        told(peers)


WRONG: list[Any] = [5, "x", [], {}, {"data": 2}, {"parity": 1}, {"data": 0, "parity": 1}, {"data": 2, "parity": 3}]


@pytest.mark.parametrize("peers", [*WRONG, {"replicas": 0}, {"replicas": "1"}, {"data": 2.0, "parity": 1}])
def test_what_a_message_cannot_mean_is_refused_by_name(peers: Any) -> None:
    with pytest.raises(UsageError, match=r"peers|ckpt\.(Parity|Replicas)"):
        options_from({**told(None), "peers": peers})
