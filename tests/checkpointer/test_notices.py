"""Notices, with real processes: signals, an operator, a file, metadata services on the loopback; under torchrun.

Nothing here asks a real metadata service: CKPT_NOTICES=given means that the firmware is not looked at.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import Future
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckpt.preemption.signals import REPEAT_S
from ckpt.threads import Tasks
from tests.checkpointer.proxy import HELD, Proxy
from tests.checkpointer.runs import URL, Ended, agent_status, kill_agent, run
from tests.checkpointer.scripts import Line, Script, torchrun, train
from tests.cli.stores import ckpt
from tests.preemption.fakes import serving
from tests.preemption.test_aws import SPOT, Ec2
from tests.preemption.test_azure import Azure, event
from tests.preemption.test_gcp import Engine

CODE = 143
MODULE = "tests.checkpointer.train_script"
ENDLESS = 1_000_000
HOUR_S = 3600.0  # until a deadline that nothing here lives to see: whoever waits for it is found waiting


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_left_behind: None) -> None:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    monkeypatch.setenv("CKPT_OUTCOME_FILE", str(tmp_path / "outcome.json"))


def outcome(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "outcome.json").read_text())
    return found


def at_step(script: Script, step: int = 12) -> Line:
    return script.wait_for(lambda line: line.get("step", 0) >= step)


def said(script: Script, event: str) -> list[str]:
    return [line["message"] for line in script.lines() if line.get("event") == event]


def why_it_ended(script: Script) -> list[str]:
    """The reasons of those that ended where they were, whatever their training thread did."""
    return re.findall(r"^ckpt: leaving at once: (.*)$", script.log.read_text(), re.MULTILINE)


def code_of(script: Script, timeout_s: float = 60.0) -> int:
    return script.process.wait(timeout_s)


def goes_on_from(tmp_path: Path, step: int) -> None:
    """The next start restores that step, and trains on."""
    assert run(tmp_path / "run", step + 2).from_step == step
    assert not (tmp_path / "outcome.json").exists(), "that of an earlier start was left"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_saves_the_step_leaves_with_143_and_says_what_was_saved(
    tmp_path: Path, number: signal.Signals
) -> None:
    leads = dict.fromkeys(("CKPT_SIGTERM_S", "CKPT_SIGUSR1_S"), str(HOUR_S))
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000", "--handler", **leads)
    at_step(script)
    os.kill(script.process.pid, number)
    assert code_of(script) == CODE
    found = outcome(tmp_path)
    assert (found["how"], found["level"], found["notices"]) == ("left", "store", [f"signal {number.name}"])
    assert HOUR_S / 2 < found["left_s"] < HOUR_S, "it is a request to go now, however much time it leaves"
    assert found["step"] == max(line["step"] for line in script.lines() if "step" in line)
    assert len(said(script, "notice.outcome")) == 1
    handled = [line["handled"] for line in script.lines() if "handled" in line]
    assert handled == ([signal.SIGTERM] if number == signal.SIGTERM else []), "the handler that was there is called"
    goes_on_from(tmp_path, found["step"])


def test_a_file_that_appears_is_a_notice(tmp_path: Path) -> None:
    word = tmp_path / "word"
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, CKPT_NOTICE_FILE=str(word))
    at_step(script)
    (tmp_path / "part").write_text("+8")
    os.rename(tmp_path / "part", word)
    assert code_of(script) == CODE
    found = outcome(tmp_path)
    assert (found["how"], found["level"]) == ("left", "store")
    assert found["notices"] == [f"file {word}"]


def test_a_job_that_is_started_again_where_it_has_left_comes_to_its_end_and_so_does_the_agent(tmp_path: Path) -> None:
    word, env = tmp_path / "word", {"CKPT_NOTICE_FILE": str(tmp_path / "word"), "CKPT_LINGER_S": "60"}
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000", **env)
    at_step(script)
    word.write_text("+90")  # no commit was measured: it leaves at once
    assert code_of(script) == CODE
    step = outcome(tmp_path)["step"]
    again = train(tmp_path / "again", tmp_path / "run", step + 20, **env)
    assert code_of(again) == 0
    assert next(line["restored"] for line in again.lines() if "restored" in line) == step
    assert not (tmp_path / "outcome.json").exists(), "that of an earlier start was left"


def test_an_operator_asks_and_may_take_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000")
    at_step(script)
    assert ckpt(monkeypatch, "preempt", tmp_path / "run", "--deadline-s", "60").code == 0
    assert code_of(script) == CODE
    assert outcome(tmp_path)["notices"] == ["operator preempt"]
    assert outcome(tmp_path)["level"] == "store"


def test_what_an_operator_takes_back_is_not_left_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000")
    at_step(script)
    script.process.send_signal(signal.SIGSTOP)  # or it would have left before it can be taken back
    assert ckpt(monkeypatch, "preempt", tmp_path / "run", "--deadline-s", "60").code == 0
    assert ckpt(monkeypatch, "preempt", tmp_path / "run", "--cancel").code == 0
    script.process.send_signal(signal.SIGCONT)
    at_step(script, max(line["step"] for line in script.lines() if "step" in line) + 10)
    assert said(script, "notice.withdrawn")
    script.process.terminate()
    assert code_of(script) == CODE
    assert outcome(tmp_path)["notices"] == ["signal SIGTERM"]


def test_a_signal_to_the_agent_is_a_notice_and_it_ends_with_its_job(tmp_path: Path) -> None:
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000")
    at_step(script)
    agent = psutil.Process(agent_status(tmp_path / "run")["pid"])
    agent.terminate()
    assert code_of(script) == CODE
    assert outcome(tmp_path)["level"] == "store"
    agent.wait(30)


def test_with_notices_off_only_an_operator_is_heard_and_no_signal_to_the_agent_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm sends them to every process of a step, of a script that has handlers of its own."""
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000", CKPT_NOTICES="off")
    at_step(script)
    agent = psutil.Process(agent_status(tmp_path / "run")["pid"])
    agent.send_signal(signal.SIGUSR1)
    agent.terminate()
    at_step(script, max(line["step"] for line in script.lines() if "step" in line) + 50)
    assert not said(script, "notice")
    assert ckpt(monkeypatch, "preempt", tmp_path / "run", "--deadline-s", "60").code == 0
    assert code_of(script) == CODE
    assert (outcome(tmp_path)["notices"], outcome(tmp_path)["level"]) == (["operator preempt"], "store")
    agent.wait(30)


def test_a_spot_notice_of_aws_is_left_by(tmp_path: Path) -> None:
    with serving(Ec2()) as ec2:
        ec2.says, ec2.tokens = {}, 0
        ec2.answer, ec2.now_s = ec2.reply, time.time
        script = train(
            *(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000"),
            AWS_EC2_METADATA_SERVICE_ENDPOINT=ec2.endpoint,
        )
        at_step(script)
        ends = datetime.fromtimestamp(time.time() + 60, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ec2.says[SPOT] = json.dumps({"action": "terminate", "time": ends})
        script.wait_for(lambda line: line.get("event") == "notice")
        code = code_of(script)
    assert code == CODE
    found = outcome(tmp_path)
    assert (found["how"], found["level"]) == ("left", "store")
    assert found["notices"][0].startswith("aws-spot terminate")
    assert found["left_s"] > 0


def test_a_preemption_of_gcp_is_left_by(tmp_path: Path) -> None:
    with serving(Engine("FALSE")) as engine:
        engine.now_s = time.time
        host = f"127.0.0.1:{engine.port}"
        script = train(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000", GCE_METADATA_HOST=host)
        at_step(script)
        engine.set("TRUE")
        code = code_of(script)
    assert code == CODE
    found = outcome(tmp_path)
    assert (found["how"], found["level"]) == ("left", "store")
    assert any("gcp-preempted" in each for each in found["notices"])


def test_a_notice_of_azure_that_is_taken_back_ends_nothing(tmp_path: Path) -> None:
    with serving(Azure()) as azure:
        azure.events, azure.started, azure.acknowledges = [], [], 200
        azure.answer, azure.now_s = azure.reply, time.time
        env = {"CKPT_AZURE_METADATA_ENDPOINT": azure.endpoint}
        script = train(tmp_path / "log", tmp_path / "run", 1500, "--every", "1000000", **env)
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


def test_where_no_boundary_comes_what_is_staged_is_committed_and_that_is_reported(tmp_path: Path) -> None:
    script = train(
        *(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000", "--save-at", "20", "--stuck-at", "25"),
        CKPT_SIGTERM_S="15",
    )
    script.wait_for(lambda line: "stuck" in line)
    os.kill(script.process.pid, signal.SIGTERM)
    assert code_of(script) == CODE
    assert why_it_ended(script) == ["no boundary came in time"]
    found = outcome(tmp_path)
    assert (found["how"], found["level"], found["step"]) == ("ended", "store", 20)
    assert found["why"] == "no boundary came in time"
    goes_on_from(tmp_path, 20)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    words = ("--stuck-at", "12")
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, *words, CKPT_SIGTERM_S=str(HOUR_S))
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
    script = train(tmp_path / "log", URL, ENDLESS, "--every", "1000000")
    at_step(script)
    store.fail(HELD, "PUT", "*.pack")
    script.process.terminate()
    store.wait_met("*.pack")
    kill_agent(URL)
    script.wait_for(lambda line: line.get("event") == "agent.lost")
    store.heal()
    assert code_of(script) == CODE
    found = outcome(tmp_path)
    assert (found["how"], found["level"], found["error"]) == ("left", "store", "")
    assert found["step"] == found["committed_step"] == max(line["step"] for line in script.lines() if "step" in line)
    assert found["notices"] == ["signal SIGTERM"]
    assert 0 < found["left_s"] < 30
    again = train(tmp_path / "again", URL, found["step"] + 2)
    assert next(line["restored"] for line in again.end() if "restored" in line) == found["step"]


def test_where_no_agent_can_be_started_again_the_trainer_says_what_is_in_the_store(
    tmp_path: Path, store: Proxy, runtime_dir: Path
) -> None:
    script = train(tmp_path / "log", URL, ENDLESS, "--every", "10", CKPT_SIGTERM_S="20")
    script.wait_for(lambda line: line.get("event") == "commit.done")
    store.fail(HELD, "PUT", "*.pack")
    store.wait_met("*.pack")
    script.process.terminate()
    script.wait_for(lambda line: line.get("event") == "exit.waiting")
    pid = int(agent_status(URL)["pid"])
    runtime_dir.chmod(0o755)  # no agent starts in a folder that others may look into
    agent = psutil.Process(pid)
    agent.kill()
    agent.wait(30)
    assert code_of(script) == CODE
    runtime_dir.chmod(0o700)
    store.heal()
    found = outcome(tmp_path)
    assert (found["how"], found["level"]) == ("left", "store")
    assert (
        10 <= found["step"] == found["committed_step"] < max(line["step"] for line in script.lines() if "step" in line)
    )
    assert "none could be started again" in found["error"]
    assert said(script, "notice.outcome")


@pytest.mark.torchrun
def test_a_torchrun_that_is_signalled_leaves_one_step_of_all_ranks_in_the_store(tmp_path: Path) -> None:
    script = torchrun(tmp_path / "log", 2, MODULE, str(tmp_path / "run"), str(ENDLESS), "--every", "1000000")
    at_step(script)
    script.process.terminate()
    assert code_of(script) != 0
    found = outcome(tmp_path)
    assert (found["how"], found["level"]) == ("left", "store")
    last = [max(line["step"] for line in script.lines() if line.get("step") and line["rank"] == r) for r in (0, 1)]
    assert last == [found["step"]] * 2
    again = torchrun(tmp_path / "again", 2, MODULE, str(tmp_path / "run"), str(found["step"] + 2))
    assert [line["restored"] for line in again.end() if "restored" in line] == [found["step"]] * 2


@pytest.mark.torchrun
def test_a_rank_that_holds_the_gil_is_waited_for_and_all_leave_at_its_boundary(tmp_path: Path) -> None:
    words = ("--every", "1000000", "--busy-at", "20")
    script = torchrun(tmp_path / "log", 2, MODULE, str(tmp_path / "run"), str(ENDLESS), *words)
    script.wait_for(lambda line: "busy" in line)
    script.process.terminate()
    assert code_of(script) != 0
    found = outcome(tmp_path)
    assert (found["how"], found["level"]) == ("left", "store")
    last = [max(line["step"] for line in script.lines() if line.get("step") and line["rank"] == r) for r in (0, 1)]
    assert last == [found["step"]] * 2


@pytest.mark.torchrun
def test_a_rank_that_torchrun_ends_for_anothers_death_is_gone_at_once(tmp_path: Path, store: Proxy) -> None:
    """One rank is killed, the other sits where nothing wakes it, and what is saved does not get into the store.
    torchrun sends it SIGTERM, as before each restart, and half a minute later would kill it before it had a word."""
    store.fail(HELD, "PUT", "*.pack")
    script = torchrun(
        *(tmp_path / "log", 2, MODULE, URL, "60"),
        *("--every", "1000000", "--save-at", "20", "--die-at", "25", "--stuck-at", "25"),
        CKPT_SIGTERM_S=str(HOUR_S),
    )
    script.wait_for(lambda line: "dies" in line)
    store.wait_met("*.pack")
    assert code_of(script, 90.0) != 0
    (why,) = why_it_ended(script)
    assert why.startswith("rank 1 is gone"), "a restart would become slower"
    store.heal()


def test_signals_are_heard_on_the_main_thread_only_and_that_is_said(tmp_path: Path) -> None:
    with Tasks("other") as tasks:
        ended: Future[Ended] = Future()
        tasks.start("train", lambda: ended.set_result(run(tmp_path / "run", 3)))
        seen = ended.result(60).seen
    assert seen.named("signals.unheard")
    assert not run(tmp_path / "other", 3, notices="off").seen.named("signals.unheard")
