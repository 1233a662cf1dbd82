"""Ranks that do not belong together are told so on entry."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt import Every, Keep, Limits, Replicas
from ckpt.errors import UsageError
from ckpt.trainer.asked import make_options
from ckpt.trainer.entry import _check_facts, _texts

FACTS: dict[str, Any] = {
    "url": "/run",
    "host": "boot-1",
    "agent": "a",
    "coordinate": "rank=0",
    "options": {},
    "state": ["model"],
    "switches": [True],
}


def second(**changes: Any) -> list[dict[str, Any]]:
    return [FACTS, {**FACTS, "coordinate": "rank=1", **changes}]


def test_equal_facts_pass() -> None:
    _check_facts(second())


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"url": "/other"}, UsageError, "url"),
        ({"state": ["model", "optim"]}, UsageError, "optim"),
        ({"coordinate": "rank=0"}, UsageError, "same mesh coordinate"),
        ({"options": {"codec": "'raw'"}}, UsageError, "codec is not given on rank 0 and 'raw' on rank 1"),
        ({"switches": [False]}, UsageError, r"switches is \[True\] on rank 0 and \[False\] on rank 1"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        _check_facts(second(**changes))


def test_of_the_options_only_what_differs_is_named() -> None:
    one, other = (
        _texts(make_options(Every(seconds=600), Keep(last=3), Limits(memory=memory), "auto", Replicas(1)))
        for memory in (None, 1 << 30)
    )
    with pytest.raises(UsageError) as raised:
        _check_facts([{**FACTS, "options": one}, {**FACTS, "coordinate": "rank=1", "options": other}])
    assert str(raised.value).endswith("alike: limits.memory is None on rank 0 and 1073741824 on rank 1")
