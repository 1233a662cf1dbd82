"""ckpt watch: a live job, a job that is down, no agent, no run; on a terminal, in a pipe, as JSON; and its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.cli import view
from ckpt.cli import watch as watching
from ckpt.cli.exits import Exit
from ckpt.errors import AgentError
from ckpt.ipc.client import make_agent_paths
from ckpt.policy.adaptive import format_duration
from ckpt.settings import read_settings
from tests.agent.fake import FakeRank
from tests.agent.node import test_agent
from tests.agent.node.test_agent import checkpoint, finish, start, start_processes, train, train_processes, wait_for
from tests.cli.stores import Said, a_run, begin, run_ckpt, save
from tests.cli.test_live import an_agent

url, ranks = test_agent.url, test_agent.ranks  # the fixtures
ROOT = Path(__file__).parents[2]
Ranks = Callable[..., list[FakeRank]]
Monkey = pytest.MonkeyPatch


@pytest.fixture
def stopped(tmp_path: Path, runtime_dir: Path, monkeypatch: Monkey) -> Iterator[int]:
    """The process of an agent that is connected to, and never answers."""
    monkeypatch.setattr(watching, "ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(make_agent_paths(str(tmp_path), read_settings()).socket))
        listener.listen()
        yield os.getpid()


def rows(said: Said) -> dict[str, str]:
    """What stands beside each word at the beginning of a line."""
    assert said.code == 0, said.err
    found = {}
    for line in said.out.splitlines():
        label, _, rest = line.partition("  ")
        if label:
            found.setdefault(label, rest.strip())
    return found


def test_a_live_job_is_shown_with_its_levels_and_what_it_costs(url: str, ranks: Ranks) -> None:
    job = ranks(2)
    decision = start(job)
    step = checkpoint(job, "store")
    train(job, step + 2)
    found = rows(run_ckpt("watch", url, "--once"))
    assert found["run"] == url
    assert str(job[0].connection.agent_pid) in found["agent"]
    assert found["job"] == f"launch test, epoch {decision.fields['epoch']}, 2 ranks"
    assert found["now"].startswith("training")
    assert found["local"].split()[0] == str(step)
    assert "every 5 steps" in found["local"]
    assert found["store"].split()[0] == str(step)
    assert found["goodput"].split()[0].endswith("%")
    assert found["snapshots"].startswith("1 complete")
    assert found["commits"].startswith("1 done")
    assert "3 slots" in found["memory"]
    assert found["notices"] == "none"
    as_json = run_ckpt("watch", url, "--once", "--json").json
    assert as_json["account"]["safe"]["store"]["step"] == step
    assert as_json["job"]["intervals"]["store"]["interval_steps"] == 5
    finish(job)


def test_an_adaptive_job_says_its_intervals_and_why(url: str, ranks: Ranks) -> None:
    policy = {"kind": "adaptive", "overhead": 0.05, "store_mb_s": None, "at_risk_s": None}
    job = ranks(1, options={**test_agent.OPTIONS, "policy": policy})
    start(job)
    said = run_ckpt("watch", url, "--once")
    assert "no measurement yet" in rows(said)["why"]
    assert "every 60 s" in rows(said)["local"]
    assert "process every" in rows(said)["failures"]
    run_ckpt("preempt", url, "--deadline-s", "500")
    assert "goes away" in rows(run_ckpt("watch", url, "--once"))["notices"]
    run_ckpt("preempt", url, "--cancel")
    job[0].leave("exception")


def test_a_job_that_died_is_shown_as_down(url: str, monkeypatch: Monkey) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    (job,), _ = start_processes(url, 1)
    last = train_processes([job])
    job.tell(do="die")
    job.end()
    wait_for(lambda: rows(run_ckpt("watch", url, "--once"))["now"].startswith("down"))
    found = rows(run_ckpt("watch", "--once"))  # the only one on this host
    assert "1 dead" in found["job"]
    assert found["losses"].startswith("1: ")
    assert found["local"].split()[0] == str(last)
    agent = run_ckpt("watch", url, "--once", "--json").json["pid"]
    os.kill(agent, signal.SIGTERM)
    test_agent.wait_gone(agent)


def test_a_job_is_found_by_its_launch_id(tmp_path: Path, runtime_dir: Path, monkeypatch: Monkey) -> None:
    job = {"launch": "1234", "epoch": "e"}
    with (
        an_agent(tmp_path / "a", {"status": {"url": "a", "pid": 1, "job": job}}),
        an_agent(tmp_path / "b", {"status": {"url": "b", "pid": 2, "job": None, "former": [{"launch": "5678"}]}}),
        an_agent(tmp_path / "c", {"status": {"url": "c", "pid": 3, "job": None, "followed_jobs": [{"launch": "7"}]}}),
    ):
        said = run_ckpt("watch", "--once")
        assert (said.code, "a (launch 1234); b (launch 5678); c (launch 7)" in said.err) == (2, True)
        monkeypatch.chdir(tmp_path)
        assert run_ckpt("watch", "--once", "--json", "--job", "1234").json["pid"] == 1
        assert run_ckpt("watch", "--once", "--json", "--job", "5678").json["pid"] == 2
        assert run_ckpt("watch", "--once", "--json", "--job", "7").json["pid"] == 3
        said = run_ckpt("watch", "--once", "--job", "9")
        assert (said.code, "launch id '9'" in said.err) == (6, True)
        assert run_ckpt("watch", "a", "--once", "--job", "9").code == 2
    said = run_ckpt("watch", "--once")
    assert (said.code, "no agent of yours runs on this host" in said.err) == (6, True)


def test_where_no_agent_runs_it_says_what_the_store_has(tmp_path: Path) -> None:
    a_run(tmp_path)
    found = rows(run_ckpt("watch", tmp_path, "--once"))
    assert found["agent"] == "none runs for you on this host"
    assert found["store"].startswith("step 40, saved")
    assert "has ended" in found["epoch"]
    as_json = run_ckpt("watch", tmp_path, "--once", "--json").json
    assert (as_json["pid"], as_json["store"]["step"], as_json["store"]["branches"]) == (None, 40, 1)
    epoch = begin(tmp_path / "lost", closed=False)
    save(tmp_path / "lost", epoch, 3)
    assert "died with its host" in rows(run_ckpt("watch", tmp_path / "lost", "--once"))["epoch"]


@pytest.mark.parametrize("bad", ["nan", "inf", "0.01", "-1", "1e10"])
def test_a_pause_that_is_none_is_refused(bad: str, tmp_path: Path) -> None:
    said = run_ckpt("watch", tmp_path, "--once", "--every-s", bad)
    assert (said.code, "--every-s" in said.err) == (2, True)


def test_what_json_has_no_number_for_is_null(tmp_path: Path) -> None:
    job = {"overhead": math.inf, "rates": {"node": {"per_s": math.nan}}}
    with an_agent(tmp_path, {"status": {"pid": 1, "job": job}}):
        said = run_ckpt("watch", tmp_path, "--once", "--json")
    assert said.json["job"] == {"overhead": None, "rates": {"node": {"per_s": None}}}


def test_an_agent_that_refuses_is_an_error_when_asked_once(tmp_path: Path) -> None:
    with an_agent(tmp_path, {"status": AgentError("not now")}):
        said = run_ckpt("watch", tmp_path, "--once")
    assert (said.code, "not now" in said.err) == (6, True)


# -- as a process that goes on


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "ckpt.cli.main", "watch", *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}


def test_each_look_is_one_line_of_json_and_what_it_looks_at_may_come_and_go(tmp_path: Path) -> None:
    words = command(tmp_path / "run", "--json", "--every-s", "0.1")
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as seen:

        def until(right: Callable[[dict[str, Any]], bool]) -> None:
            deadline = time.monotonic() + 60
            while not right(json.loads(seen.stdout.readline())):
                assert time.monotonic() < deadline

        try:
            until(lambda found: found["error"] == "nothing is saved there yet")
            job = {"launch": "1", "epoch": "e"}
            with an_agent(tmp_path / "run", {"status": {"url": "x", "pid": 7, "job": job}}):
                until(lambda found: found["pid"] == 7)
                seen.send_signal(signal.SIGINT)
                assert seen.wait(60) == 130
        finally:
            seen.kill()
        assert "Traceback" not in seen.stderr.read()


def on_a_terminal(run: Path, looks: int, term: str) -> bytes:
    """What it writes to one until so many looks are there and Ctrl-C has ended it."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        command(run, "--every-s", "0.2"), env={**environment(), "TERM": term}, stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    said = b""
    try:
        deadline = time.monotonic() + 60
        while said.count(b"none runs for you") < looks:
            assert time.monotonic() < deadline, said
            if select.select([ours], [], [], 1)[0]:
                said += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            said += part
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"Traceback" not in said
    return said


def test_on_a_terminal_it_is_drawn_in_place_and_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    a_run(tmp_path)
    said = on_a_terminal(tmp_path, 3, "xterm")
    assert b"\x1b[?25l" in said  # the cursor was hidden ...
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")  # ... and is back
    assert b"\x1b[1A" in said  # drawn over what was there


def test_a_terminal_that_cannot_be_drawn_over_gets_one_look_after_the_other(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert b"\x1b" not in on_a_terminal(tmp_path, 2, "dumb")


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    a_run(tmp_path)
    words = command(tmp_path, "--json", "--every-s", "0.1")
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as seen:
        assert json.loads(seen.stdout.readline())["store"]["step"] == 40
        seen.stdout.close()
        assert seen.wait(60) == Exit.BROKEN_PIPE
        assert seen.stderr.read() == ""


# -- how it looks


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0004, "0.4 ms"), (0.41, "410 ms"), (12, "12 s"), (99.4, "99.4 s"), (100, "1 min 40 s"),
        (3600, "60 min"), (7500, "2 h 5 min"), (90_000, "25 h"), (400_000, "4 d 15 h"), (86_400 * 60, "60 d"),
        (1715, "29 min"), (35_999, "10 h"), (86_400 * 16.9, "17 d"),
    ],
)  # fmt: skip
def test_how_long_is_said_in_at_most_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


SOURCE = {
    "proven": False,
    "precision": 0.0,
    "recall": 0.0,
    "lead_s": None,
    "chance": 0.1,
    "outcomes": 0,
    **dict.fromkeys(("true", "late", "false", "missed"), 0.0),
}


def test_what_is_foreseen_and_by_which_sources_is_shown(tmp_path: Path) -> None:
    counts = {"outcomes": 41, "true": 31.6, "false": 4.0, "missed": 2.0}
    seen = {**counts, "precision": 0.78, "recall": 0.81, "lead_s": 95.0}
    predictions = {
        "reading": True,
        "sources": {
            "memory": {**SOURCE, **seen, "proven": True},
            "io": SOURCE,
            "disk": {**SOURCE, "outcomes": 1, "missed": 1.0},
            "net": {**SOURCE, **seen, "proven": True},
        },
        "standing": [
            {"node": "", "source": "memory", "for_s": 3.0},
            {"node": "b\x1b[31m", "source": "net", "for_s": 3.0},
            {"node": "", "source": "disk", "for_s": 3.0},
        ],
    }
    with an_agent(tmp_path, {"status": {"job": None, "pid": 1, "predictions": predictions}}):
        found = run_ckpt("watch", tmp_path, "--once").out.splitlines()
    at = next(number for number, line in enumerate(found) if line.startswith("foreseen"))
    said = [line.removeprefix("foreseen").strip() for line in found[at:]]
    assert [line.startswith("foreseen") for line in found].count(True) == 1
    assert said == [
        "this machine may fail, says memory",
        "node b?[31m may fail, says net",
        *(
            f"{name}: proven, 41 outcomes (32 true, 0 late, 4 false alarms, 2 failures missed); precision at least "
            "78%, recall 81%, lead 95 s"
            for name in ("memory", "net")
        ),
        "2 other sources of predictions, not proven yet (--json)",
    ]


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 source of predictions, not"), (6, "6 sources of predictions, none")]
)
def test_sources_of_which_none_is_proven_take_one_line(count: int, said: str, tmp_path: Path) -> None:
    sources = {f"s{number}": {**SOURCE, "outcomes": 1, "missed": 1.0} for number in range(count)}
    predictions = {"reading": True, "sources": sources, "standing": [{"node": "", "source": "s0", "for_s": 3.0}]}
    with an_agent(tmp_path, {"status": {"job": None, "pid": 1, "predictions": predictions}}):
        found = run_ckpt("watch", tmp_path, "--once").out.splitlines()
    assert found[-1].removeprefix("foreseen").strip() == f"{said} proven yet (--json)"
    assert found[-1].startswith("foreseen")


@pytest.mark.parametrize("named", [True, False])
def test_an_agent_that_was_stopped_is_not_waited_for_longer_than_one_at_work_takes(
    named: bool, tmp_path: Path, stopped: int
) -> None:
    began_s = time.monotonic()
    said = run_ckpt("watch", *([tmp_path] if named else []), "--once")
    assert time.monotonic() < began_s + 30
    assert said.code == 6
    assert ("did not answer 'hello' within 0.2 s" in said.err) == named
    assert (f"`kill -KILL {stopped}`" in said.err) == named
    assert (f"no agent of yours on this host answers; silent: process {stopped}" in said.err) == (not named)


def test_who_watches_on_reads_that_an_agent_does_not_answer_and_not_that_none_runs(
    tmp_path: Path, stopped: int
) -> None:
    with contextlib.closing(watching.Looker(str(tmp_path))) as looker:
        status = looker.read_status(patient=True)
    assert (status["pid"], status["silent"]) == (None, stopped)
    found = view.text(status, 300).splitlines()
    assert found[1].split(maxsplit=1) == ["agent", f"process {stopped} does not answer"]
    assert f"`kill -KILL {stopped}`" in found[2]
    assert "none runs" not in str(found)


def test_beside_an_agent_that_does_not_answer_another_ones_job_is_not_shown_as_the_only_one(
    tmp_path: Path, stopped: int, monkeypatch: Monkey
) -> None:
    job = {"launch": "1234", "epoch": "e"}
    with an_agent(tmp_path / "a", {"status": {"url": "a", "pid": 1, "job": job}}):
        said = run_ckpt("watch", "--once")
        assert (said.code, f"a (launch 1234); silent: process {stopped}" in said.err) == (2, True)
        monkeypatch.chdir(tmp_path)
        assert run_ckpt("watch", "--once", "--json", "--job", "1234").json["pid"] == 1
