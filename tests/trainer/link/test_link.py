"""The trainer's end of the socket: what it tells of its node, and how long an agent that is away is waited for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.errors import AgentError, NoCoordinator
from ckpt.events import Event, Events
from ckpt.ipc import messages
from ckpt.ipc.client import Connection
from ckpt.ipc.control_page import ControlPage
from ckpt.ipc.failure_domains import find_own_domains
from ckpt.settings import read_settings
from ckpt.threads import Tasks
from ckpt.trainer.link import agent_connection
from ckpt.trainer.link.agent_connection import AgentConnection
from ckpt.trainer.link.control_view import ControlView
from ckpt.trainer.link.link import Link
from ckpt.trainer.link.membership import JoinTerms, Membership
from ckpt.types import Version


class Away:
    """A rank whose agent is away. `says`: what each try meets; after that it is let in. `incarnation`: that of the
    agent which lets it in. `flaps`: and cuts it off again at once, the first time."""

    def __init__(self, tasks: Tasks, *says: AgentError) -> None:
        self.says, self.seen, self.incarnation, self.flaps = list(says), list[Event](), "a", False
        nothing: Any = lambda *given: None  # noqa: E731
        self.agent = AgentConnection(nothing, self.rejoin, nothing, nothing, Events(self.seen.append), tasks)
        self.agent.is_wanted, self._stopping = True, tasks.stopping

    def rejoin(self) -> None:
        if self.says:
            raise self.says.pop(0)
        self.agent.present = cast(Connection, self.connection())
        if self.flaps:
            self.flaps = False
            self.lose()

    def connection(self) -> SimpleNamespace:
        return SimpleNamespace(is_open=True, close=lambda: None, incarnation=self.incarnation)

    def lose(self, is_follower: bool = False) -> None:
        if (present := self.agent.present) is not None:
            present.is_open = False  # type: ignore[misc]
        self.agent.on_lost("it closed the connection", is_follower)

    def settle(self) -> None:
        while not (self.agent.is_rejoined or self.agent.is_given_up):
            self._stopping.wait(0.01)


def test_a_rank_tells_the_failure_domains_of_its_node_and_its_machine_below_them(runtime_dir: Path) -> None:
    given = {"CKPT_RUNTIME_DIR": str(runtime_dir), "CKPT_LAUNCH": "launch", "CKPT_DOMAIN": "zone-a/rack-7"}
    answer = SimpleNamespace(fields={"name": "agent", "addresses": ["10.0.0.7:7777"], "link_bytes_s": 125})
    connection = SimpleNamespace(request=lambda *given: answer)
    told = Membership(read_settings(given), cast(Any, None)).listen(cast(Connection, connection), b"")
    assert (told["domains"], told["link_bytes_s"]) == (find_own_domains("zone-a/rack-7"), 125)


def test_a_page_that_the_training_thread_may_be_reading_stays_when_another_agent_brings_its_own() -> None:
    view = ControlView()
    view.use(ControlPage.create(1), 0)
    words = view.words
    view.use(ControlPage.create(1), 0)
    assert words[0] == 0
    assert view.words is not words
    view.close()
    with pytest.raises(ValueError, match="released"):
        words[0]


@pytest.mark.parametrize(
    ("error", "comes_back"),
    [(NoCoordinator("rank 0's is not connected"), True), (AgentError("it does not start"), False)],
)
def test_an_agent_that_waits_for_rank_0s_is_tried_for_longer_than_one_that_does_not_start(
    error: AgentError, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_connection, "RECONNECT_TRIES", 2)
    with Tasks("away") as tasks:
        away = Away(tasks, *[error] * 4)
        away.lose()
        away.settle()
    assert away.agent.is_rejoined == comes_back
    assert [event.name for event in away.seen][-1] == ("agent.restarted" if comes_back else "agent.given_up")


@pytest.mark.parametrize("apart_s", [agent_connection.SERVED_S, agent_connection.SERVED_S - 1.0])
def test_a_connection_that_is_lost_now_and_then_comes_back_however_rarely_anything_is_saved(
    apart_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(agent_connection, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(agent_connection, "FAILED_RESTARTS_MAX", 2)
    with Tasks("away") as tasks:
        away = Away(tasks)
        for _ in range(4):
            now.s += apart_s
            away.lose()
            away.settle()
        assert away.agent.is_rejoined == (apart_s >= agent_connection.SERVED_S)


@pytest.mark.parametrize("says", [[], [AgentError("it does not start")]])
def test_a_rank_that_leaves_waits_for_another_agent_until_its_deadline(says: list[AgentError]) -> None:
    with Tasks("away") as tasks:
        away = Away(tasks, *says * 1000)
        away.agent.is_wanted = False
        until_s = agent_connection.time.monotonic() + (0.2 if says else 60.0)
        if says:
            with pytest.raises(AgentError, match="none could be started again before the end"):
                away.agent.await_another(until_s, says[0])
        else:
            away.agent.await_another(until_s, AgentError("it died"))
            assert away.agent.restarts == 1
        away.agent.is_wanted = False


@pytest.mark.parametrize("why", ["save", "exit"])
def test_an_agent_that_is_started_again_hears_what_a_rank_waits_for_and_whether_that_is_the_last(why: str) -> None:
    """Once it knows what the ranks have: it looks at that after all of them have come."""
    told: list[Any] = []
    with Tasks("away") as tasks:
        nothing: Any = lambda *given: None  # noqa: E731
        made = Link("url", read_settings({}), Events(), tasks, nothing, nothing, nothing)
        notify = lambda kind, fields, blobs: told.append({"t": kind, **fields})  # noqa: E731
        made.announce_wait(Version(7), why)
        made.agent.present = cast(Connection, SimpleNamespace(notify=notify, close=lambda: None))
        made._on_message(messages.Message({"t": "known-versions", "versions": [str(Version(7))]}))
        made.close()
    assert told == [{"t": "require-commit", "version": str(Version(7)), "why": why}]


@pytest.mark.parametrize(("rank", "flaps"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize(("after", "said"), [("a", "is the same as before"), ("b", "was started again")])
def test_of_an_agent_that_was_only_cut_off_from_rank_0s_it_is_not_said_that_it_died(
    after: str, said: str, flaps: bool, rank: int
) -> None:
    """Of that of rank 0's node it is: it has nobody to be cut off from."""
    nodes = [{"ranks": [0]}, {"ranks": [1]}]
    terms = JoinTerms("1-a", rank, 2, f"rank={rank}", {}, "launch", None, [], nodes, [])
    with Tasks("away") as tasks:
        away = Away(tasks, NoCoordinator("not now"))
        away.agent.present = cast(Connection, away.connection())
        away.incarnation, away.flaps = after, flaps
        away.lose(terms.is_follower)
        away.settle()
    lost, failed, back = (event.message for event in away.seen)
    where = "gone, or cut off from that of rank 0's node" if rank else "gone"
    assert f"the agent is {where} (it closed the connection); " in lost
    assert failed == "ckpt: the agent serves no rank yet: not now"
    assert back == f"ckpt: the agent {said} and has the arenas"
