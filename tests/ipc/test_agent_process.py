"""An agent that is of no use to a trainer is replaced, and nothing is lost that need not be."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import AgentError
from ckpt.events import Event, Events
from ckpt.ipc import agent_process, client, messages
from ckpt.settings import read_settings
from ckpt.threads import Tasks
from tests.agent.fake import OPTIONS, FakeRank
from tests.agent.node import test_agent
from tests.agent.node.test_agent import checkpoint, committed_steps, one_step, start, together, wait_for, wait_gone

url, ranks = test_agent.url, test_agent.ranks  # the fixtures
Ranks = Callable[..., list[FakeRank]]
REPOSITORY = Path(__file__).parents[2]
SOON_S = 2.0  # an agent that does not run at all for so long hangs


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def meet(url: str, told: list[Event]) -> Iterator[Callable[..., client.Connection]]:
    """What a trainer does first."""
    with Tasks("meet") as tasks:
        made: list[client.Connection] = []

        def meet(hello_s: float = SOON_S, busy_s: float = 60.0) -> client.Connection:
            say = lambda message: message.close(), lambda why: None
            events = Events(told.append)
            made.append(
                agent_process.connect_or_replace(
                    url, read_settings(), tasks, events, *say, hello_s=hello_s, busy_s=busy_s
                )
            )
            return made[-1]

        yield meet
        for each in made:
            each.close()


@pytest.fixture
def stub(url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []

    def begin(mode: str, *words: str) -> subprocess.Popen[str]:
        place = client.make_agent_paths(url, read_settings())
        command = [sys.executable, "-m", "tests.agent.stub", mode, str(place.socket), str(place.run_lock), *words]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY))
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline() == "ready\n"
        return made[-1]

    yield begin
    for each in made:
        each.kill()
        each.wait(30)
        each.stdout.close()  # type: ignore[union-attr]


def test_an_agent_that_was_stopped_goes_on_and_what_its_memory_has_is_still_there(
    ranks: Ranks, meet: Callable[..., client.Connection], told: list[Event]
) -> None:
    job = ranks(1)
    start(job)
    step = checkpoint(job)
    agent = job[0].connection.agent_pid
    os.kill(agent, signal.SIGSTOP)
    try:
        assert meet().agent_pid == agent
    finally:
        os.kill(agent, signal.SIGCONT)
    assert [event.name for event in told] == ["agent.hung"]
    new = ranks(1)
    decision = start(new)
    assert (decision.fields["candidate"]["step"], decision.fields["candidate"]["level"]) == (step, "local")
    together(new, lambda rank: rank.leave("normal"))


def test_an_agent_that_hangs_is_ended_and_another_one_serves(
    stub: Callable[..., subprocess.Popen[str]], meet: Callable[..., client.Connection], told: list[Event]
) -> None:
    hung = stub("hangs", "ckpt.agent.node.main")
    assert meet().agent_pid != hung.pid
    assert hung.wait(30) == -signal.SIGKILL
    assert [(event.name, event.loud) for event in told] == [("agent.hung", True)]


def test_one_that_is_only_slow_is_not_ended(
    stub: Callable[..., subprocess.Popen[str]], meet: Callable[..., client.Connection], told: list[Event]
) -> None:
    slow = stub("is-busy", "ckpt.agent.node.main")
    with pytest.raises(AgentError, match="did not answer 'hello'"):
        meet(hello_s=2.0, busy_s=3.0)
    assert slow.poll() is None
    assert told == []


@pytest.fixture
def crowd(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As many wait for the agent as it lets. They stay in its queue though they have given up; who comes then does so
    soon."""
    monkeypatch.setattr(client, "ACCEPT_S", 0.2)
    path = os.fspath(client.make_agent_paths(url, read_settings()).socket)

    def come() -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(BlockingIOError):
            while True:
                waits = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
                waits.connect(path)

    return come


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["hangs", "is-busy"])
def test_of_one_that_takes_no_more_connections_it_is_seen_whether_it_hangs(
    mode: str,
    crowd: Callable[[], None],
    stub: Callable[..., subprocess.Popen[str]],
    meet: Callable[..., client.Connection],
    told: list[Event],
) -> None:
    """As many wait for it as it lets, such as looks of `ckpt watch` through a night: to connect would take for ever."""
    it = stub(mode, "ckpt.agent.node.main")
    crowd()
    if mode == "is-busy":
        with pytest.raises(AgentError, match="accepted no connection"):
            meet(hello_s=2.0, busy_s=3.0)
        assert it.poll() is None
        assert told == []
        return
    assert meet().agent_pid != it.pid
    assert it.wait(30) == -signal.SIGKILL
    assert [event.name for event in told] == ["agent.hung"]


@pytest.mark.timeout(120)
def test_an_agent_of_another_run_is_not_ended_for_one_that_takes_no_more_connections(
    url: str,
    crowd: Callable[[], None],
    stub: Callable[..., subprocess.Popen[str]],
    meet: Callable[..., client.Connection],
    told: list[Event],
) -> None:
    """In another container its socket may have the same path, and one that has nothing to do does not run at all."""
    path = os.fspath(client.make_agent_paths(url, read_settings()).socket)
    idle = [sys.executable, "-c", "import signal; signal.alarm(120); signal.pause()", "ckpt.agent.node.main", path]
    with subprocess.Popen(idle) as other:
        busy = stub("is-busy", "ckpt.agent.node.main")
        crowd()
        try:
            with pytest.raises(AgentError, match="accepted no connection"):
                meet(busy_s=3.0)
            assert (other.poll(), busy.poll(), told) == (None, None, [])
        finally:
            other.kill()


@pytest.mark.timeout(120)
def test_one_that_takes_connections_again_and_has_nothing_to_do_then_is_not_ended(
    crowd: Callable[[], None],
    stub: Callable[..., subprocess.Popen[str]],
    meet: Callable[..., client.Connection],
    told: list[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not run, but not since it hangs."""
    it, end = stub("wakes-up", "ckpt.agent.node.main"), agent_process._end_unresponsive
    crowd()

    def wake_before(*given: Any) -> None:
        it.send_signal(signal.SIGUSR1)
        assert it.stdout is not None
        assert it.stdout.readline() == "awake\n"
        end(*given)

    monkeypatch.setattr(agent_process, "_end_unresponsive", wake_before)
    assert meet().agent_pid != it.pid
    assert it.wait(30) == 0
    assert [event.name for event in told] == ["agent.replaced"]


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_signal_that_comes_while_one_waits_to_connect_changes_nothing(
    is_taken: bool, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as SIGCHLD of a loader's worker."""
    monkeypatch.setattr(client, "ACCEPT_S", 30.0 if is_taken else 0.5)
    place, main = client.make_agent_paths(url, read_settings()), threading.main_thread().ident
    path = os.fspath(place.socket)
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, lambda *_: None))
        listener, first = (stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2))
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        over = threading.Event()

        def disturb() -> None:
            assert main is not None
            for _ in range(3):
                over.wait(0.1)
                signal.pthread_kill(main, signal.SIGUSR2)
            if is_taken:
                listener.accept()[0].close()

        thread = threading.Thread(target=disturb)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        if is_taken:
            sock = client.connect_nowait(place)
            assert sock is not None
            with sock:
                assert sock.getpeername() == path
                assert sock.getblocking()
        else:
            with pytest.raises(AgentError, match="accepted no connection"):
                client.connect_nowait(place)


def test_nor_is_a_process_that_no_trainer_has_started(
    stub: Callable[..., subprocess.Popen[str]], meet: Callable[..., client.Connection]
) -> None:
    other = stub("hangs")
    with pytest.raises(AgentError, match=f"process {other.pid}.*It is not your user's agent"):
        meet()
    assert other.poll() is None


def test_an_agent_of_another_release_that_makes_way_is_waited_for(
    stub: Callable[..., subprocess.Popen[str]], meet: Callable[..., client.Connection], told: list[Event]
) -> None:
    old = stub("makes-way", "ckpt.agent.node.main")
    assert meet(hello_s=30.0).agent_pid != old.pid
    assert old.wait(30) == 0
    assert [event.name for event in told] == ["agent.replaced"]


def hello(url: str, version: int, role: str = "trainer") -> dict[str, Any]:
    """What the agent of `url` answers to one of that version."""
    sock = client.connect_nowait(client.make_agent_paths(url, read_settings()))
    assert sock is not None
    with sock:
        sock.settimeout(60)
        messages.send(sock, {"t": "hello", "id": 1, "version": version, "role": role})
        answer = messages.receive(sock)
        assert answer is not None
        return answer.fields


def test_an_agent_that_lingers_commits_what_it_has_and_makes_way_for_another_release(
    url: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "600")
    job = ranks(1, options={**OPTIONS, "limits": {"memory": None, "bandwidth": 300_000.0}})  # a commit takes seconds
    start(job)
    step = checkpoint(job)
    together(job, one_step)
    agent = job[0].connection.agent_pid
    assert hello(url, client.VERSION + 1)["kind"] == "agent", "it is needed"
    with pytest.raises(AgentError):
        job[0].leave_at_once()
    job[0].connection.close()
    assert hello(url, client.VERSION + 1, "tool")["kind"] == "agent", "nothing ends for a tool"
    wait_for(lambda: hello(url, client.VERSION + 1)["kind"] == "other-version")  # once it has seen the trainer go
    wait_gone(agent)
    assert committed_steps(url)[-1] == step
