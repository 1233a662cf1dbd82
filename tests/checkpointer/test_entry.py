"""Ranks that do not belong together are told so on entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt import Adaptive, Every, Keep, Limits, Parity, Replicas
from ckpt.errors import UsageError
from ckpt.trainer.link.options import UserOptions, make_options
from ckpt.trainer.loop.rank_facts import check_facts, compared_options

FACTS: dict[str, Any] = {
    "url": "/run",
    "host": "boot-1",
    "agent": "a",
    "coordinate": "rank=0",
    "options": {},
    "state": ["model"],
}


def second(**changes: Any) -> list[dict[str, Any]]:
    return [FACTS, {**FACTS, "coordinate": "rank=1", **changes}]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"url": "/other"}, "url"),
        ({"state": ["model", "optim"]}, "optim"),
        ({"coordinate": "rank=0"}, "same mesh coordinate"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], named: str) -> None:
    check_facts(second())
    with pytest.raises(UsageError, match=named):
        check_facts(second(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"limits": Limits(memory=1 << 30)}, "limits.memory is None on rank 0 and 1073741824 on rank 1"),
        (
            {"policy": Adaptive()},
            "policy is {'kind': 'every', 'steps': None, 'seconds': 600} on rank 0 and {'kind': 'ad",
        ),
        ({"peers": Parity(2, 1)}, "peers is {'replicas': 1} on rank 0 and {'data': 2, 'parity': 1} on rank 1"),
        ({"peers": Replicas(2)}, "peers.replicas is 1 on rank 0 and 2 on rank 1"),
        ({"strict": False}, "strict is True on rank 0 and False on rank 1"),
    ],
)
def test_of_the_options_only_what_differs_is_named_with_what_it_is(changes: dict[str, Any], named: str) -> None:
    one, other = (compared_options(asked(**given)) for given in ({}, changes))
    with pytest.raises(UsageError) as raised:
        check_facts([{**FACTS, "options": one}, {**FACTS, "coordinate": "rank=1", "options": other}])
    assert f"alike: {named}" in str(raised.value)


def asked(**changes: Any) -> UserOptions:
    given: dict[str, Any] = {"policy": Every(seconds=600), "keep": Keep(last=3), "limits": Limits()}
    given |= {"codec": "auto", "peers": Replicas(1)}
    given |= {name: changes[name] for name in given.keys() & changes}
    switches = {"strict": True, "generators": True, "take_over": False, "trainable_only": False}
    rest = {**switches, "init": None, **changes}
    return cast(UserOptions, SimpleNamespace(**{**rest, "options": make_options(**given)}))
