"""Which memory-only nodes a job uses, as its coordinator knows them; with their agents see nodes/test_lending.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ckpt.agent.lenders import Lenders
from ckpt.agent.peers.sockets import Address
from ckpt.agent.terms import Terms


def test_nobody_waits_for_one_that_is_not_called_any_more() -> None:
    """It has not answered by then: what is safe is found out without it."""
    network = SimpleNamespace(find=lambda address, then: None)
    lenders = Lenders("url", lambda: cast(Any, network), lambda *_: None, lambda _: None, lambda: None)
    terms = cast(Terms, SimpleNamespace(encode=lambda: b""))
    lenders.led(terms, [Address.parse("127.0.0.1:9")])
    assert lenders.awaited
    lenders.end()
    assert not lenders.awaited
