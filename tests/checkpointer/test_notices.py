"""Notices, with real processes: signals, an operator, a metadata service on the loopback; under torchrun.

Nothing here asks a real metadata service: CKPT_NOTICES=given means that the firmware is not looked at.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import Future
from email.utils import formatdate
from pathlib import Path

import psutil
import pytest

from ckpt.preemption.signals import REPEAT_S
from ckpt.threads import Tasks
from tests.checkpointer.notices import (
    CODE,
    ENDLESS,
    HOUR_S,
    MODULE,
    SELDOM,
    at_step,
    code_of,
    goes_on_from,
    last_steps,
    left_in_the_store,
    outcome,
    said,
    why_it_ended,
)
from tests.checkpointer.notices import given as given  # a fixture, for every test here
from tests.checkpointer.proxy import HELD, Proxy
from tests.checkpointer.runs import URL, Ended, agent_status, kill_agent, run
from tests.checkpointer.scripts import Script, torchrun, train
from tests.cli.stores import ckpt
from tests.preemption.fakes import serving
from tests.preemption.test_azure import Azure, event


def seldom(tmp_path: Path, *words: str, **env: str) -> Script:
    return train(tmp_path / "log", tmp_path / "run", ENDLESS, *SELDOM, *words, **env)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_saves_the_step_leaves_with_143_and_says_what_was_saved(
    tmp_path: Path, number: signal.Signals
) -> None:
    leads = dict.fromkeys(("CKPT_SIGTERM_S", "CKPT_SIGUSR1_S"), str(HOUR_S))
    script = seldom(tmp_path, "--handler", **leads)
    at_step(script)
    os.kill(script.process.pid, number)
    assert code_of(script) == CODE
    found = left_in_the_store(tmp_path)
    assert found["notices"] == [f"signal {number.name}"]
    assert HOUR_S / 2 < found["left_s"] < HOUR_S, "it is a request to go now, however much time it leaves"
    assert found["step"] == last_steps(script, 1)[0]
    assert len(said(script, "notice.outcome")) == 1
    handled = [line["handled"] for line in script.lines() if "handled" in line]
    assert handled == ([signal.SIGTERM] if number == signal.SIGTERM else []), "the handler that was there is called"
    goes_on_from(tmp_path, found["step"])


def test_an_operator_asks_and_may_take_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = seldom(tmp_path)
    at_step(script)
    script.process.send_signal(signal.SIGSTOP)  # or it would have left before it can be taken back
    assert ckpt(monkeypatch, "preempt", tmp_path / "run", "--deadline-s", "60").code == 0
    assert ckpt(monkeypatch, "preempt", tmp_path / "run", "--cancel").code == 0
    script.process.send_signal(signal.SIGCONT)
    at_step(script, last_steps(script, 1)[0] + 10)
    assert said(script, "notice.withdrawn")
    assert ckpt(monkeypatch, "preempt", tmp_path / "run", "--deadline-s", "60").code == 0
    assert code_of(script) == CODE
    assert left_in_the_store(tmp_path)["notices"] == ["operator preempt"]


def test_with_notices_off_only_an_operator_is_heard_and_no_signal_to_the_agent_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm sends them to every process of a step, of a script that has handlers of its own."""
    script = seldom(tmp_path, CKPT_NOTICES="off")
    at_step(script)
    agent = psutil.Process(agent_status(tmp_path / "run")["pid"])
    agent.send_signal(signal.SIGUSR1)
    agent.terminate()
    at_step(script, last_steps(script, 1)[0] + 50)
    assert not said(script, "notice")
    assert ckpt(monkeypatch, "preempt", tmp_path / "run", "--deadline-s", "60").code == 0
    assert code_of(script) == CODE
    assert left_in_the_store(tmp_path)["notices"] == ["operator preempt"]
    agent.wait(30)


def test_a_notice_of_azure_that_is_taken_back_ends_nothing(tmp_path: Path) -> None:
    with serving(Azure()) as azure:
        azure.events, azure.started, azure.acknowledges = [], [], 200
        azure.answer, azure.now_s = azure.reply, time.time
        env = {"CKPT_AZURE_METADATA_ENDPOINT": azure.endpoint}
        script = train(tmp_path / "log", tmp_path / "run", 1500, *SELDOM, **env)
        at_step(script)
        azure.events = [event(at=formatdate(time.time() + 600, usegmt=True))]
        script.wait_for(lambda line: line.get("event") == "notice")
        standing = agent_status(tmp_path / "run")["job"]["notices"]
        assert [each["source"] for each in standing["standing"]] == ["azure"]
        assert standing["needs_s"] < 600, "ten minutes are left"
        azure.events = []
        script.wait_for(lambda line: line.get("event") == "notice.withdrawn")
        script.end()
    assert not azure.started, "nothing was acknowledged"
    assert script.lines()[-1]["receipt"]["committed_step"] == 1500
    assert not (tmp_path / "outcome.json").exists()


def test_where_no_boundary_comes_what_is_staged_is_committed_and_that_is_reported(tmp_path: Path, store: Proxy) -> None:
    """A thread ends the process then, and with that the agent: after the commit."""
    words = ("--save-at", "20", "--stuck-at", "23", "--mib", "8")
    store.limit(2e6)  # 4 s for the commit; within less it is told that there is no boundary to be had
    script = train(tmp_path / "log", URL, ENDLESS, *SELDOM, *words, CKPT_SIGTERM_S="15")
    script.wait_for(lambda line: "stuck" in line)
    os.kill(script.process.pid, signal.SIGTERM)
    assert code_of(script) == CODE
    assert why_it_ended(script) == ["no boundary came in time"]
    found = outcome(tmp_path)
    assert (found["how"], found["why"]) == ("ended", "no boundary came in time")
    assert (found["level"], found["step"], found["committed_step"]) == ("store", 20, 20)
    store.limit(float("inf"))
    again = train(tmp_path / "again", URL, 22, "--mib", "8")
    assert [line["restored"] for line in again.end() if "restored" in line] == [20]


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    script = seldom(tmp_path, "--stuck-at", "12", CKPT_SIGTERM_S=str(HOUR_S))
    at_step(script)
    os.kill(script.process.pid, signal.SIGTERM)
    script.wait_for(lambda line: line.get("event") == "notice")  # from then on it counts
    with pytest.raises(subprocess.TimeoutExpired):
        script.process.wait(REPEAT_S + 0.2)
    os.kill(script.process.pid, signal.SIGTERM)
    assert code_of(script) == CODE, "the first one alone leaves an hour"
    assert why_it_ended(script) == ["SIGTERM came again"]


def test_an_agent_that_dies_before_the_last_commit_is_started_again_saves_it_and_says_so(
    tmp_path: Path, store: Proxy
) -> None:
    script = train(tmp_path / "log", URL, ENDLESS, *SELDOM)
    at_step(script)
    store.fail(HELD, "PUT", "*.pack")
    script.process.terminate()
    store.wait_met("*.pack")
    kill_agent(URL)
    script.wait_for(lambda line: line.get("event") == "agent.lost")
    store.heal()
    assert code_of(script) == CODE
    found = left_in_the_store(tmp_path)
    assert found["step"] == last_steps(script, 1)[0]
    assert found["notices"] == ["signal SIGTERM"]
    assert 0 < found["left_s"] < 30
    assert run(URL, found["step"] + 2).from_step == found["step"]


def test_where_no_agent_can_be_started_again_the_rank_leaves_by_the_deadline(
    tmp_path: Path, store: Proxy, runtime_dir: Path
) -> None:
    script = train(tmp_path / "log", URL, ENDLESS, "--every", "10", CKPT_SIGTERM_S="20")
    script.wait_for(lambda line: line.get("event") == "commit.done")
    store.fail(HELD, "PUT", "*.pack")
    store.wait_met("*.pack")
    script.process.terminate()
    script.wait_for(lambda line: line.get("event") == "exit.waiting")
    agent = psutil.Process(agent_status(URL)["pid"])
    runtime_dir.chmod(0o755)  # no agent starts in a folder that others may look into
    agent.kill()
    agent.wait(30)
    assert code_of(script) == CODE
    runtime_dir.chmod(0o700)
    store.heal()
    assert said(script, "agent.restart_failed")
    assert not (tmp_path / "outcome.json").exists()


@pytest.mark.torchrun
def test_a_rank_that_holds_the_gil_is_waited_for_and_all_leave_at_its_boundary(tmp_path: Path) -> None:
    script = torchrun(tmp_path / "log", 2, MODULE, str(tmp_path / "run"), str(ENDLESS), *SELDOM, "--busy-at", "20")
    script.wait_for(lambda line: "busy" in line)
    script.process.terminate()
    assert code_of(script) != 0
    assert last_steps(script) == [left_in_the_store(tmp_path)["step"]] * 2


def test_signals_are_heard_on_the_main_thread_only_and_that_is_said(tmp_path: Path) -> None:
    with Tasks("other") as tasks:
        ended: Future[Ended] = Future()
        tasks.start("train", lambda: ended.set_result(run(tmp_path / "run", 3)))
        seen = ended.result(60).seen
    assert seen.named("signals.unheard")
    assert not run(tmp_path / "other", 3, notices="off").seen.named("signals.unheard")
