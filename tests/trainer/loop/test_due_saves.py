"""How long training waits for the answer to a save that the policy names."""

from __future__ import annotations

import itertools
import time
from typing import Any, cast

import pytest

from ckpt.errors import AgentError
from ckpt.ipc import messages
from ckpt.ipc.client import Connection, Pending
from ckpt.trainer.loop.due_saves import SavePatience

LONG_S = 60.0


class Silent:
    """An agent that answers when the test does."""

    def __init__(self) -> None:
        self.asked: list[Pending] = []
        self._numbers = itertools.count()

    def ask(self) -> Pending:
        self.asked.append(Pending(cast("Connection", self), next(self._numbers), "save"))
        return self.asked[-1]

    def answer(self, what: str = "reply", **fields: Any) -> None:
        self.asked[-1].future.set_result(messages.Message({"t": what, **fields}))


def until_s() -> float:
    return time.monotonic() + LONG_S


def test_training_waits_once_for_an_agent_that_is_silent_and_again_once_it_has_answered() -> None:
    agent, patience = Silent(), SavePatience(0.01)
    with pytest.raises(AgentError, match="made no progress"):
        patience.request_save(agent.ask, until_s())
    for _ in range(3):
        with pytest.raises(AgentError, match="has not answered"):
            patience.request_save(agent.ask, until_s())
    assert len(agent.asked) == 1, "nothing more is asked of it"
    agent.answer("error", kind="save-failed", message="rank 0 does not wait for it any more")

    def ask() -> Pending:
        asked = agent.ask()
        agent.answer(attempt=7)
        return asked

    assert patience.request_save(ask, until_s())["attempt"] == 7


def test_training_waits_as_long_as_the_agent_says_that_the_save_waits() -> None:
    agent, patience, signs = Silent(), SavePatience(0.01), 5

    class Moves(Pending):
        def wait_while_progressing(self, timeout_s: float) -> messages.Message | None:
            nonlocal signs
            signs -= 1
            if signs:
                self.progress.set()
            else:
                agent.answer(attempt=3)
            return super().wait_while_progressing(timeout_s)

    def ask() -> Pending:
        agent.asked.append(Moves(cast("Connection", agent), 1, "save"))
        return agent.asked[-1]

    assert patience.request_save(ask, until_s())["attempt"] == 3
