"""What only the memory of a superseded job has reaches the store, also where the start that superseded it comes to
nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ckpt.errors import AgentError
from tests.agent.fake import OPTIONS, FakeRank
from tests.agent.node import test_agent
from tests.agent.node.test_agent import checkpoint, committed_steps, start, together, wait_gone

url, ranks = test_agent.url, test_agent.ranks  # the fixtures
SLOW = {**OPTIONS, "limits": {"memory": None, "bandwidth": 500_000.0}}  # so that the next one waits for its turn


Launch = Callable[[str], list[FakeRank]]


@pytest.fixture
def launch(ranks: Callable[..., list[FakeRank]], monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Makes the two connected ranks of the launch of that name."""
    monkeypatch.setenv("CKPT_LINGER_S", "0")
    return lambda name: ranks(2, name, SLOW)


@pytest.fixture
def last(launch: Launch) -> tuple[list[FakeRank], int]:
    """A job at work whose newest step is complete in memory, while the one before it is being committed."""
    job = launch("first")
    start(job)
    checkpoint(job)
    return job, checkpoint(job)


def leave(job: Sequence[FakeRank], outcome: str) -> int:
    """Without saving anything. The agent's process."""
    agent: int = job[0].connection.agent_pid  # type: ignore[union-attr]
    together(job, lambda rank: rank.leave(outcome))
    close(job)
    return agent


def close(job: Sequence[FakeRank]) -> None:
    for rank in job:
        rank.connection.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("outcome", ["normal", "exception"])
def test_who_leaves_before_it_has_saved_anything_waits_until_what_it_went_on_from_is_committed(
    outcome: str, url: str, launch: Launch, last: tuple[list[FakeRank], int]
) -> None:
    old, step = last
    new = launch("second")
    decision = start(new)
    candidate: dict[str, Any] = decision.fields["candidate"]
    assert (candidate["step"], candidate["level"]) == (step, "local")
    assert candidate["stored"] == (step in committed_steps(url))
    close(old)
    agent = leave(new, outcome)
    assert committed_steps(url)[-1] == step
    wait_gone(agent)


def test_a_start_that_fails_on_entry_loses_nothing_of_the_living_job_that_it_superseded(
    url: str, launch: Launch, last: tuple[list[FakeRank], int]
) -> None:
    old, step = last
    new = launch("second")
    decision = new[0].begin()
    together(new, lambda rank: rank.join(decision.fields["epoch"]))
    for rank in new:
        with pytest.raises(AgentError):
            rank.leave_at_once()
    close(new)
    agent = leave(old, "notice")  # they leave at their next step, and their last word waits as well
    wait_gone(agent)
    assert committed_steps(url)[-1] == step


def test_a_start_that_saves_something_is_what_counts(
    url: str, launch: Launch, last: tuple[list[FakeRank], int]
) -> None:
    old, _ = last
    new = launch("second")
    start(new)
    close(old)
    newer = checkpoint(new)
    agent = leave(new, "exception")
    wait_gone(agent)
    assert committed_steps(url)[-1] == newer
