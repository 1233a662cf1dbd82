"""Two starts of one run, each with an agent of its own, as on two machines: neither has listed the other's claim.

The start that claims first trains and commits. The other one restores more slowly. How long that takes is the test's to
say: a restore is held until the next line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.ipc import messages
from ckpt.settings import read_settings
from ckpt.storage import open as open_store
from ckpt.store.run import Run
from ckpt.types import Identity
from tests.agent.fake import FakeRank
from tests.agent.node import test_agent
from tests.agent.node.test_agent import checkpoint, end_agent, finish, start, train, wait_for

url = test_agent.url  # the fixture
HEARTBEAT_S = "2"
BEFORE = 7  # the step that both go on from
Machines = Callable[..., FakeRank]


@pytest.fixture
def machines(url: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Makes the one rank of a job on a machine of that name, connected and closed at the end."""
    monkeypatch.setenv("CKPT_HEARTBEAT_S", HEARTBEAT_S)
    with ExitStack() as stack:

        def make(machine: str, launch: str) -> FakeRank:
            settings = replace(read_settings(), runtime_dir=runtime_dir / machine)
            rank = stack.enter_context(closing(FakeRank(url, 0, 1, launch, settings)))
            rank.connect()
            return rank

        yield make


@pytest.fixture
def before(machines: Machines) -> None:
    """A job that has come to its end."""
    job = [machines("first", "before")]
    start(job)
    train(job, BEFORE)
    finish(job)
    end_agent([job[0]])


def hold(rank: FakeRank, take_over: bool = False) -> messages.Message:
    """It has listed the store, and restores. Its epoch is newer than those of the starts before: of one number that of
    the later second is."""
    before_s = int(time.time())
    wait_for(lambda: int(time.time()) > before_s)
    decision = rank.begin(take_over)
    assert decision.fields["candidate"]["step"] == BEFORE
    rank.join(decision.fields["epoch"])
    return decision


def go_on(rank: FakeRank, decision: messages.Message) -> None:
    """It has restored: it claims, and trains."""
    identity = rank.restore(decision)
    rank.request("restored", {"epoch": rank.epoch, "identity": str(identity)})
    rank.wait_warm()


def epochs(url: str) -> list[str]:
    """Those that have saved something after `BEFORE`, on the line or not."""
    with closing(open_store(url)) as store:
        return sorted(
            {str(ref.identity.epoch) for ref in Run(store).view().commits if ref.identity.version.step > BEFORE}
        )


def claimed(url: str) -> list[str]:
    """Oldest first."""
    return sorted(path.name for path in Path(url, "epochs").iterdir() if path.name[0] != ".")


def finish_and_leave(rank: FakeRank) -> None:
    """It saves, comes to its end, and closes its epoch."""
    checkpoint([rank], "store")
    finish([rank])
    end_agent([rank])


def overlooked(rank: FakeRank) -> int | None:
    """The newest step that it was told to have passed over."""
    told = [each["data"]["newest"] for each in rank.events if each["name"] == "restore.overlooked"]
    return Identity.parse(told[-1]).version.step if told else None


def superseded_at_next_save(rank: FakeRank) -> str:
    checkpoint([rank])
    return superseded(rank)


def superseded(rank: FakeRank) -> str:
    with rank.changed:
        assert rank.changed.wait_for(lambda: rank.superseded is not None, 60)
    assert rank.superseded is not None
    return rank.superseded


def restart_goes_on(machines: Machines, step: int) -> None:
    again = machines("c", "C")
    assert start([again]).fields["candidate"]["step"] == step
    finish([again])
    end_agent([again])


@pytest.mark.usefixtures("before")
def test_a_start_that_was_refused_commits_nothing_once_the_other_has_ended(url: str, machines: Machines) -> None:
    a, b = machines("a", "A"), machines("b", "B")
    decisions = hold(a), hold(b)
    go_on(a, decisions[0])
    wait_for(lambda: a.epoch in claimed(url))
    go_on(b, decisions[1])
    checkpoint([b])  # its commit waits while A is watched
    assert "'A'" in superseded(b)
    finish_and_leave(a)
    end_agent([b])
    assert epochs(url) == [a.epoch]
    restart_goes_on(machines, a.step)


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("when", ["restores", "watches"])
def test_a_start_is_refused_where_another_has_saved_and_ended_while_it(when: str, url: str, machines: Machines) -> None:
    a, b = machines("a", "A"), machines("b", "B")
    decisions = hold(a), hold(b)
    go_on(a, decisions[0])
    wait_for(lambda: a.epoch in claimed(url))
    if when == "restores":
        finish_and_leave(a)
        go_on(b, decisions[1])
    else:
        go_on(b, decisions[1])
        wait_for(lambda: any(each["name"] == "run.watched" for each in b.events))
        finish_and_leave(a)
    told = superseded(b)
    assert "'A'" in told
    assert f"goes on from step {a.step}" in told
    end_agent([b])
    assert epochs(url) == [a.epoch]
    assert claimed(url)[-1] == a.epoch
    restart_goes_on(machines, a.step)


@pytest.mark.usefixtures("before")
def test_a_start_that_takes_over_goes_on_and_says_what_it_has_passed_over(url: str, machines: Machines) -> None:
    a, b = machines("a", "A"), machines("b", "B")
    decisions = hold(a), hold(b, take_over=True)
    go_on(a, decisions[0])
    checkpoint([a], "store")
    go_on(b, decisions[1])
    wait_for(lambda: overlooked(b) == a.step)
    checkpoint([b], "store")
    assert "'B'" in superseded_at_next_save(a)
    finish_and_leave(b)
    end_agent([a])
    restart_goes_on(machines, b.step)


@pytest.mark.usefixtures("before")
def test_the_memory_of_a_refused_start_is_no_place_to_go_on_from(
    url: str, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = machines("a", "A")
    monkeypatch.setenv("CKPT_LINGER_S", "60")  # the agent of b stays, with what it remembers
    b = machines("b", "B")
    decisions = hold(a), hold(b)
    go_on(a, decisions[0])
    wait_for(lambda: a.epoch in claimed(url))
    go_on(b, decisions[1])
    checkpoint([b])
    assert "'A'" in superseded(b)
    finish_and_leave(a)
    b.close()
    again = machines("b", "C")
    decision = start([again])
    assert decision.fields["parent"].startswith(a.epoch)
    assert decision.fields["candidate"]["step"] == a.step
    finish([again])
