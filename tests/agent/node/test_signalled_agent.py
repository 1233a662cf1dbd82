"""An agent that gets a signal itself, as every process of a Slurm step does: what it holds is not lost by that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt.ipc.client import make_agent_paths
from ckpt.settings import read_settings
from ckpt.storage import canonical
from tests.agent.adaptive.test_alarms import status
from tests.agent.node.test_agent import committed_steps, start_processes, train_processes, wait_for, wait_gone


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    return canonical(str(tmp_path / "store"))


def standing(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = status(url)["job"]["notices"]["standing"]
    return found


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_usr1_is_a_notice_with_the_time_that_it_was_asked_for_and_ends_no_agent(
    url: str, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("CKPT_SIGUSR1_S", "90")
    job, _ = start_processes(url, 1)
    agent = status(url)["pid"]
    os.kill(agent, number)
    wait_for(lambda: bool(standing(url)))
    (told,) = standing(url)
    assert (told["source"], told["key"], told["certain"]) == ("agent", number.name, True)
    assert 30 < told["left_s"] <= 90
    os.kill(agent, number)
    assert [each["key"] for each in standing(url)] == [number.name]
    job[0].tell(do="die")
    job[0].end()
    wait_gone(agent)


def test_one_that_is_asked_to_end_has_as_much_time_as_its_ranks_have_by_that_signal(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_SIGTERM_S", "300")
    job, _ = start_processes(url, 1)
    train_processes(job)
    agent = status(url)["pid"]
    os.kill(agent, signal.SIGTERM)
    wait_for(lambda: [each["source"] for each in standing(url)] == ["agent"])
    assert 200 < standing(url)[0]["left_s"] <= 300
    job[0].tell(do="die")
    job[0].end()
    wait_gone(agent)


def test_one_that_is_asked_to_end_goes_on_trying_to_commit_what_the_ranks_left(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the store has a bad moment just then."""
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    job, _ = start_processes(url, 1)
    data = Path(url, "data")
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("no folder")
    last = train_processes(job)
    job[0].tell(do="die")
    job[0].end()
    wait_for(lambda: bool(status(url)["job"]["error"]))
    agent = status(url)["pid"]
    os.kill(agent, signal.SIGTERM)
    wait_for(lambda: [each["source"] for each in standing(url)] == ["agent"])
    data.unlink()
    wait_gone(agent)
    assert committed_steps(url)[-1] == last


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_an_agent_that_is_ended_before_it_serves_leaves_nothing(
    how: signal.Signals, runtime_dir: Path, tmp_path: Path
) -> None:
    place = make_agent_paths(os.fspath(tmp_path), read_settings())
    words = ["--url", tmp_path, "--socket", place.socket, "--lock", place.run_lock, "--log", place.log]
    command = [sys.executable, "-m", "ckpt.agent.node.main", *map(str, words), "--ready-fd", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[3]) as agent:
        while not place.run_lock.exists():
            assert agent.poll() is None
        agent.send_signal(how)
        assert agent.wait(60) == 0
    assert list(runtime_dir.iterdir()) == []
