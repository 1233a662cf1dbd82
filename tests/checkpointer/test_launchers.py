"""Who starts a job again that left by a notice: the table of docs/guides/notices.md, row by row, with real processes.

What stands in for the launchers: torchrun is itself. Slurm is its environment variables, its signals, and a second
start under the same job id. Kubernetes is a pid namespace: SIGTERM goes to its first process, and when that ends
everything in it is killed, the agent too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from torch.distributed.launcher.api import LaunchConfig

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
from tests.checkpointer.runs import URL, agent_status
from tests.checkpointer.scripts import ALWAYS, ROOT, Line, Script, torchrun, train
from tests.servers import Server

HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
USR1_HANDLED = {"PET_SIGNALS_TO_HANDLE": HANDLED, "TORCHELASTIC_SIGNALS_TO_HANDLE": HANDLED}
passes_usr1_on = pytest.mark.skipif(
    "signals_to_handle" not in LaunchConfig.__dataclass_fields__,
    reason="torchrun passes SIGUSR1 on since torch 2.9",
)
Test = TypeVar("Test", bound=Callable[..., None])
# By name. These are the first test of test_notices.py, tests/examples/test_slurm.py and test_manifests.py.
ROWS = {"`python train.py`", "Slurm, preemption or `scontrol requeue`", "Kubernetes, torchrun is PID 1"}


def row(name: str) -> Callable[[Test], Test]:
    """The test is that of this row of the table."""
    ROWS.add(name)
    return lambda test: test


def test_each_row_of_the_table_has_its_test() -> None:
    page = (ROOT / "docs/guides/notices.md").read_text()
    table = page.partition("## Who starts it again")[2].partition("|---")[2].partition("\n\n")[0]
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert len(names) > 10
    assert sorted(names) == sorted(ROWS)


def ranks_of(script: Script) -> dict[int, int]:
    """The process of each rank, of its newest attempt."""
    return {line["rank"]: line["pid"] for line in script.lines() if "pid" in line}


def restored(lines: list[Line]) -> list[tuple[int, int]]:
    """(attempt, step), of each rank that came in."""
    return sorted((line["attempt"], line["restored"]) for line in lines if "restored" in line)


def two_ranks(tmp_path: Path, *options: str, restarts: int = 0, name: str = "log", url: str = "", **env: str) -> Script:
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or gloo of a later attempt may meet addresses of the former
    words = (url or str(tmp_path / "run"), str(ENDLESS), *SELDOM, *options)
    return torchrun(tmp_path / name, 2, MODULE, *words, restarts=restarts, **env)


# -- by itself, and under torchrun


@pytest.mark.torchrun
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=passes_usr1_on)])
@row("torchrun, signalled itself")
@row("torchrun, SIGUSR1 that it is told to handle")
def test_a_torchrun_that_is_signalled_ends_though_it_has_restarts_left(tmp_path: Path, number: signal.Signals) -> None:
    script = two_ranks(tmp_path, restarts=1, **(USR1_HANDLED if number == signal.SIGUSR1 else {}))
    at_step(script)
    os.kill(script.process.pid, number)
    assert code_of(script) not in (0, -signal.SIGKILL)
    found = left_in_the_store(tmp_path)
    assert last_steps(script) == [found["step"]] * 2
    assert found["notices"] == [f"signal {number.name}"]
    assert {attempt for attempt, _ in restored(script.lines())} == {0}
    goes_on_from(tmp_path, found["step"])


@pytest.mark.torchrun
@row("torchrun, one worker signalled, no restart left")
def test_one_signalled_worker_makes_all_leave_and_the_job_ends(tmp_path: Path) -> None:
    script = two_ranks(tmp_path)
    at_step(script)
    os.kill(ranks_of(script)[1], signal.SIGTERM)
    assert code_of(script) == 1
    assert last_steps(script) == [left_in_the_store(tmp_path)["step"]] * 2
    goes_on_from(tmp_path, outcome(tmp_path)["step"])


@pytest.mark.torchrun
@row("torchrun, one worker signalled, a restart left")
def test_one_signalled_worker_makes_all_leave_and_they_go_on_on_this_machine(tmp_path: Path) -> None:
    script = two_ranks(tmp_path, restarts=1)
    at_step(script)
    os.kill(ranks_of(script)[1], signal.SIGTERM)
    script.wait_for(lambda line: line.get("event") == "notice.outcome")
    step = left_in_the_store(tmp_path)["step"]
    script.wait_for(lambda line: line.get("step", 0) >= step + 5)
    assert restored(script.lines())[2:] == [(1, step)] * 2
    script.process.terminate()
    assert code_of(script) not in (0, -signal.SIGKILL)
    assert left_in_the_store(tmp_path)["step"] > step, "that of the former attempt is not in the way"


@pytest.mark.torchrun
@row("torchrun, a notice of the machine, a restart left")
def test_what_is_started_again_on_a_machine_that_goes_trains_on_until_it_has_gone(tmp_path: Path) -> None:
    word, lead_s = tmp_path / "notice", 60  # of which a busy machine takes half for the second start
    script = two_ranks(tmp_path, restarts=2, CKPT_NOTICE_FILE=str(word), CKPT_LINGER_S="60")
    at_step(script)
    word.write_text(f"+{lead_s}")
    script.wait_for(lambda line: line.get("event") == "notice.outcome")
    first = left_in_the_store(tmp_path)["step"]
    script.wait_for(lambda line: line.get("event") == "notice" and "does not leave again" in line["message"])
    script.wait_for(lambda line: line.get("event") == "commit.done" and f"step {first} " not in line["message"])
    assert restored(script.lines())[2:] == [(1, first)] * 2, "and nobody has left again"
    assert time.time() < word.stat().st_mtime + lead_s, "one more checkpoint before the machine goes"
    reached = last_steps(script)[0]
    script.wait_for(lambda line: line.get("step", 0) >= reached + 5)
    word.unlink()  # until then, or the end of the time, the agent stays to tell it to another start
    script.wait_for(lambda line: line.get("event") == "notice.withdrawn")
    script.process.terminate()
    assert code_of(script) not in (0, -signal.SIGKILL)
    assert left_in_the_store(tmp_path)["step"] > reached


@pytest.mark.torchrun
@row("torchrun restarts after a failure")
def test_after_a_failure_the_ranks_that_live_are_gone_at_once_and_go_on_from_memory(
    tmp_path: Path, store: Proxy
) -> None:
    """One is killed, the other sits where nothing wakes it, and what is saved does not get into the store. torchrun
    sends it SIGTERM, as before each restart, and half a minute later would kill it before it had a word."""
    store.fail(HELD, "PUT", "*.pack")
    words, env = ("--save-at", "20", "--die-at", "25", "--stuck-at", "25"), {"CKPT_SIGTERM_S": str(HOUR_S)}
    script = two_ranks(tmp_path, *words, restarts=1, url=URL, CKPT_LINGER_S="60", **env)
    script.wait_for(lambda line: line.get("attempt") == 1)
    script.wait_for(lambda line: line.get("step") == 26)
    assert restored(script.lines())[2:] == [(1, 20)] * 2
    (why,) = why_it_ended(script)
    assert why.startswith("rank 1 is gone"), "a restart would become slower"
    store.heal()
    script.process.terminate()
    assert code_of(script) not in (0, -signal.SIGKILL)
    left_in_the_store(tmp_path)


@pytest.mark.torchrun
@row("torchrun, SIGUSR1 to itself")
def test_a_usr1_that_torchrun_does_not_handle_ends_it_and_not_its_workers(tmp_path: Path) -> None:
    script = two_ranks(tmp_path)
    at_step(script)
    os.kill(script.process.pid, signal.SIGUSR1)
    assert script.process.wait(60) == -signal.SIGUSR1
    seen = max(last_steps(script))
    deadline_s = time.monotonic() + 60
    while min(last_steps(script)) <= seen:
        assert time.monotonic() < deadline_s, "they train on, and nobody looks after them"
        time.sleep(0.02)
    workers = [psutil.Process(pid) for pid in ranks_of(script).values()]
    os.kill(workers[1].pid, signal.SIGUSR1)
    psutil.wait_procs(workers, 60)
    assert last_steps(script) == [left_in_the_store(tmp_path)["step"]] * 2


# -- Slurm


@pytest.mark.torchrun
def test_workers_of_loaders_get_the_signal_too_and_all_ranks_leave_at_one_step(tmp_path: Path) -> None:
    """From Slurm, and from a torchrun that passes it on to the process groups of its ranks."""
    script = two_ranks(tmp_path, "--workers", "2", SLURM_JOB_ID="7")
    at_step(script)
    step_of_slurm = psutil.Process(script.process.pid)
    everybody = [step_of_slurm, *step_of_slurm.children(recursive=True)]
    assert len(everybody) >= 1 + 2 + 4
    for process in everybody:
        process.terminate()
    assert code_of(script) not in (0, -signal.SIGKILL)
    step = left_in_the_store(tmp_path)["step"]
    assert last_steps(script) == [step] * 2
    again = two_ranks(tmp_path, "--workers", "2", name="again", SLURM_JOB_ID="7")
    at_step(again, step + 5)  # with the batches that follow
    again.process.terminate()
    assert code_of(again) not in (0, -signal.SIGKILL)
    left_in_the_store(tmp_path)


@row("Slurm, the node fails")
def test_a_requeued_slurm_job_waits_for_nobody_though_the_former_ended_without_a_word(tmp_path: Path) -> None:
    """Another job's heartbeats would be waited for twice as long as they are apart: longer than this test may take."""
    env = {"SLURM_JOB_ID": "7", "CKPT_HEARTBEAT_S": "600"}
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "10", **env)
    script.wait_for(lambda line: line.get("event") == "commit.done")
    agent = psutil.Process(agent_status(tmp_path / "run")["pid"])
    script.process.send_signal(signal.SIGSTOP)  # or it starts another agent
    agent.kill()
    agent.wait(30)
    script.kill()
    again = train(tmp_path / "again", tmp_path / "run", ENDLESS, "--every", "10", **env)
    begun = again.wait_for(lambda line: "restored" in line)
    assert (begun["level"], begun["restored"] >= 10) == ("store", True)
    again.process.terminate()
    assert code_of(again) == CODE


@row("Slurm, the end of the allocation")
def test_the_end_of_a_slurm_allocation_is_left_by_before_it_comes(tmp_path: Path) -> None:
    ends_s = str(int(time.time()) + 90)
    script = train(*(tmp_path / "log", tmp_path / "run", ENDLESS, *SELDOM), SLURM_JOB_ID="7", SLURM_JOB_END_TIME=ends_s)
    assert code_of(script) == CODE
    assert left_in_the_store(tmp_path)["notices"] == ["slurm 7"]
    goes_on_from(tmp_path, outcome(tmp_path)["step"])


@row("Slurm, `--signal=USR1@90`")
def test_the_usr1_that_slurm_was_asked_for_has_the_time_that_it_was_asked_for(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 7200), "CKPT_SIGUSR1_S": "90"}
    script = train(tmp_path / "log", tmp_path / "run", ENDLESS, *SELDOM, **env)
    script.wait_for(lambda line: line.get("event") == "notice")  # of the end of the allocation
    agent = int(agent_status(tmp_path / "run")["pid"])
    for pid in (agent, script.process.pid):
        os.kill(pid, signal.SIGUSR1)
    assert code_of(script) == CODE
    found = left_in_the_store(tmp_path)
    assert [each for each in found["notices"] if each != "agent SIGUSR1"] == ["signal SIGUSR1", "slurm 7"]
    assert found["left_s"] > 30, "it is not the 30 s of other signals"


# -- Kubernetes


@cache
def why_no_container() -> str:
    """Why there is no pid namespace to be had here; "" where there is."""
    if shutil.which("unshare") is None:
        return "needs a pid namespace: there is no unshare"
    done = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True)
    return f"needs a pid namespace: {done.stderr.strip()}" if done.returncode else ""


LAUNCH = {"CKPT_LAUNCH": "pod"}  # of all pods of a job
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
needs_container = pytest.mark.skipif(bool(why_no_container()), reason=why_no_container())


class Container:
    """A pod's: what runs in it dies with its first process."""

    def __init__(self, log: Path, *command: str, **env: str) -> None:
        self.script = Script([*CONTAINER, *command], log, {**LAUNCH, **env})

    def stop(self, grace_s: float) -> int:
        """As a kubelet does: SIGTERM to the first process, and SIGKILL to all after the grace period. The code of the
        first process."""
        (first,) = psutil.Process(self.script.process.pid).children()
        first.terminate()
        try:
            return self.script.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            first.kill()
            self.script.process.wait(30)
            return -signal.SIGKILL


def training(url: Path | str, *options: str) -> tuple[str, ...]:
    return sys.executable, "-m", MODULE, str(url), str(ENDLESS), *options


PASSES_ON = ("sh", "-c", 'trap \'kill -TERM "$child"\' TERM; "$@" & child=$!; wait "$child"; wait "$child"', "sh")


@needs_container
@pytest.mark.parametrize("shell", [(), PASSES_ON], ids=["trainer", "shell"])
@row("Kubernetes, the trainer is PID 1")
@row("Kubernetes, PID 1 passes the signal on and waits")
def test_a_pid_1_that_waits_for_its_trainer_ends_behind_the_commit_of_an_agent_that_dies_with_it(
    tmp_path: Path, shell: tuple[str, ...]
) -> None:
    pod = Container(tmp_path / "log", *shell, *training(tmp_path / "run", *SELDOM), CKPT_SIGTERM_S="60")
    at_step(pod.script)
    assert pod.stop(60) == CODE
    assert left_in_the_store(tmp_path)["step"] == last_steps(pod.script, 1)[0]
    goes_on_from(tmp_path, outcome(tmp_path)["step"])


@needs_container
@row("Kubernetes, the grace period is too short for the store")
def test_a_grace_period_that_does_not_suffice_is_not_waited_out_and_that_is_written(
    tmp_path: Path, rclone: Server, store: Proxy
) -> None:
    pod = Container(tmp_path / "log", *training(URL, "--every", "10"), CKPT_SIGTERM_S="12")
    pod.script.wait_for(lambda line: line.get("event") == "commit.done")
    store.fail(HELD, "PUT", "*.pack")
    store.wait_met("*.pack")
    assert pod.stop(60) == CODE, "it went before SIGKILL came"
    found = outcome(tmp_path)
    assert (found["how"], found["level"]) == ("left", "local")
    assert found["step"] > found["committed_step"] >= 10
    store.heal()  # a put that lands late makes no checkpoint
    again = train(tmp_path / "again", URL, ENDLESS, **LAUNCH)
    assert again.wait_for(lambda line: "restored" in line)["restored"] == found["committed_step"]
    again.process.terminate()
    assert code_of(again) == CODE


@needs_container
@row("Kubernetes, PID 1 does not pass it on")
def test_where_pid_1_keeps_the_signal_to_itself_nothing_newer_than_the_last_commit_is_there(tmp_path: Path) -> None:
    pod = Container(tmp_path / "log", "sh", "-c", '"$@"; exit 7', "sh", *training(tmp_path / "run", "--every", "10"))
    pod.script.wait_for(lambda line: line.get("event") == "commit.done")
    assert pod.stop(1) == -signal.SIGKILL
    assert not said(pod.script, "notice")
    assert not (tmp_path / "outcome.json").exists()
    committed = [re.search(r"step (\d+) is committed", text) for text in said(pod.script, "commit.done")]
    again = train(tmp_path / "again", tmp_path / "run", ENDLESS, **LAUNCH)
    assert again.wait_for(lambda line: "restored" in line)["restored"] >= max(int(m[1]) for m in committed if m)
    again.process.terminate()
    assert code_of(again) == CODE


def test_a_job_without_standard_streams_starts_its_agent(tmp_path: Path) -> None:
    """As daemons are started that close all three: whatever is opened then has their numbers."""
    code = "import sys, ckpt, torch\nwith ckpt.Checkpointer(sys.argv[1], {'x': torch.ones(2)}) as ck: list(ck.steps(1))"
    command = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-P", "-c", code, str(tmp_path / "run")]
    assert subprocess.run(command, env={**os.environ, **ALWAYS}, check=False, timeout=60).returncode == 0
    assert list((tmp_path / "run" / "commits").iterdir())
