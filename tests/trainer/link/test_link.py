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
from ckpt.settings import Settings, read_settings
from ckpt.threads import Tasks
from ckpt.trainer.link import link
from ckpt.trainer.link.link import JoinTerms, Link
from ckpt.types import Version


class Away(Link):
    """`says`: what each try meets; after that it is let in. `told`: what the agent was told then."""

    says: list[AgentError]
    told: list[dict[str, Any]]
    incarnation = "a"  # of the agent that lets it in
    flaps = False  # and cuts it off again at once, the first time

    def _rejoin(self) -> None:
        if self.says:
            raise self.says.pop(0)
        notify = lambda kind, fields, blobs: self.told.append({"t": kind, **fields})  # noqa: E731
        self._connection = cast(Connection, self.it(notify=notify))
        if self.flaps:
            self.flaps = False
            self._on_lost("it closed the connection")

    def it(self, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(is_open=True, close=lambda: None, incarnation=self.incarnation, **more)


def test_a_rank_tells_the_failure_domains_of_its_node_and_its_machine_below_them(runtime_dir: Path) -> None:
    given = {"CKPT_RUNTIME_DIR": str(runtime_dir), "CKPT_LAUNCH": "launch", "CKPT_DOMAIN": "zone-a/rack-7"}
    answer = SimpleNamespace(fields={"name": "agent", "addresses": ["10.0.0.7:7777"], "link_bytes_s": 125})
    connection = SimpleNamespace(request=lambda *given: answer, is_open=True, close=lambda: None)
    with Tasks("told") as tasks:
        nothing: Any = lambda *given: None  # noqa: E731
        made = Link("url", read_settings(given), Events(), tasks, nothing, nothing, nothing)
        made._connection = cast(Connection, connection)
        told = made.listen(b"")
        assert (told["domains"], told["link_bytes_s"]) == (find_own_domains("zone-a/rack-7"), 125)
        made.close()


def test_a_page_that_the_training_thread_may_be_reading_stays_when_another_agent_brings_its_own() -> None:
    with Tasks("page") as tasks:
        nothing: Any = lambda *given: None  # noqa: E731
        made = Link("url", read_settings({}), Events(), tasks, nothing, nothing, nothing)
        made._use_control_page(ControlPage.create(1))
        words = made.control_words
        made._use_control_page(ControlPage.create(1))
        assert words[0] == 0
        assert made.control_words is not words
        made.close()
        with pytest.raises(ValueError, match="released"):
            words[0]


@pytest.mark.parametrize(
    ("error", "comes_back"),
    [(NoCoordinator("rank 0's is not connected"), True), (AgentError("it does not start"), False)],
)
def test_an_agent_that_waits_for_rank_0s_is_tried_for_longer_than_one_that_does_not_start(
    error: AgentError, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "RECONNECT_TRIES", 2)
    seen: list[Event] = []
    with Tasks("away") as tasks:
        nothing: Any = lambda *given: None  # noqa: E731
        made = Away("url", Settings(Path("/nowhere"), "launch"), Events(seen.append), tasks, nothing, nothing, nothing)
        made.says = [error] * 4
        made._reconnect()
        assert made.is_rejoined == comes_back
        assert made.is_given_up != comes_back
        made.close()
    assert [event.name for event in seen][-1] == ("agent.restarted" if comes_back else "agent.given_up")


@pytest.mark.parametrize(("apart_s", "comes_back"), [(link.SERVED_S, True), (link.SERVED_S - 1.0, False)])
def test_a_connection_that_is_lost_now_and_then_comes_back_however_rarely_anything_is_saved(
    apart_s: float, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(link, "FAILED_RESTARTS_MAX", 2)
    with Tasks("away") as tasks:
        nothing: Any = lambda *given: None  # noqa: E731
        made = Away("url", Settings(Path("/nowhere"), "launch"), Events(), tasks, nothing, nothing, nothing)
        made.says, made.told, made.terms = [], [], cast(JoinTerms, SimpleNamespace(epoch="1-a", is_follower=False))
        for _ in range(4):
            now.s += apart_s
            made._on_lost("a link was cut")
            while not (made.is_rejoined or made.is_given_up):
                tasks.stopping.wait(0.01)
        assert (made.is_rejoined, made.is_given_up) == (comes_back, not comes_back)
        made.close()


@pytest.mark.parametrize("why", ["save", "exit"])
def test_an_agent_that_is_started_again_hears_what_a_rank_waits_for_and_whether_that_is_the_last(why: str) -> None:
    """Once it knows what the ranks have: it looks at that after all of them have come."""
    with Tasks("away") as tasks:
        nothing: Any = lambda *given: None  # noqa: E731
        made = Away("url", Settings(Path("/nowhere"), "launch"), Events(), tasks, nothing, nothing, nothing)
        made.says, made.told = [], []
        made.announce_wait(Version(7), why)
        made._reconnect()
        made.told.clear()
        made._on_message(messages.Message({"t": "known-versions", "versions": [str(Version(7))]}))
        assert made.told == [{"t": "require-commit", "version": str(Version(7)), "why": why}]
        made.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("flaps", [False, True])
@pytest.mark.parametrize(("after", "said"), [("a", "is the same as before"), ("b", "was started again")])
def test_of_an_agent_that_was_only_cut_off_from_rank_0s_it_is_not_said_that_it_died(
    after: str, said: str, flaps: bool, rank: int
) -> None:
    """Of that of rank 0's node it is: it has nobody to be cut off from."""
    seen: list[Event] = []
    with Tasks("away") as tasks:
        nothing: Any = lambda *given: None  # noqa: E731
        made = Away("url", Settings(Path("/nowhere"), "launch"), Events(seen.append), tasks, nothing, nothing, nothing)
        made._connection, made._listen_request = cast(Connection, made.it()), {"address": "10.0.0.7:7777"}
        nodes = [{"ranks": [0]}, {"ranks": [1]}]
        made.says, made.told = [NoCoordinator("not now")], []
        made.terms = JoinTerms("1-a", rank, 2, f"rank={rank}", {}, "launch", None, [], nodes, [])
        made.incarnation, made.flaps = after, flaps
        made._on_lost("it closed the connection")
        while not made.is_rejoined:
            tasks.stopping.wait(0.01)
        made.close()
    lost, failed, back = (event.message for event in seen)
    where = "gone, or cut off from that of rank 0's node" if rank else "gone"
    assert f"the agent is {where} (it closed the connection); " in lost
    assert failed == "ckpt: the agent serves no rank yet: not now"
    assert back == f"ckpt: the agent {said} and has the arenas"
