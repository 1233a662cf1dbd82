"""How much time there is decides what is saved, over a link that is slow: real processes, a real server behind a proxy.
tests/agent/preemption has all cases on a clock of their own.

A commit takes some nine seconds, however fast the machine is, and longer where other tests keep that busy: a notice
that is to leave time for one goes by what the first one took. What is looked at is what the outcome says, and what the
store then holds when everything else is gone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.checkpointer.notices import CODE, ENDLESS, SELDOM, appear, said, wait_outcome
from tests.checkpointer.notices import given as given  # a fixture, for every test here
from tests.checkpointer.proxy import Proxy
from tests.checkpointer.runs import URL, agent_status
from tests.checkpointer.scripts import Script, train

MIB = 64
LINK = 1e9 / 8 / 16  # bytes per second
WORDS = (*SELDOM, "--mib", str(MIB), "--pace", "0.1")  # the training itself leaves the processors to other tests


@pytest.fixture
def link(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("CKPT_LAUNCH", "one")  # a start after the machine has gone waits for nobody
    store.limit(LINK)
    yield store
    store.limit(float("inf"))


def begun(script: Script) -> None:
    """It trains. From now on its agent is no nicer than training is: beside tests that keep the processors busy it gets
    a hundredth of one else, and its commits take minutes; how they are shared is not what is looked at here."""
    script.wait_for(lambda line: "restored" in line)
    with contextlib.suppress(FileNotFoundError):  # this kernel does not share the processor between sessions
        Path(f"/proc/{agent_status(URL)['pid']}/autogroup").write_text("0")


def committed(script: Script, step: int) -> float:
    """That step is in the store. Returns how many seconds its commit took."""
    ends = ("commit.done", "commit.failed")
    ended = script.wait_for(lambda line: line.get("event") in ends and f"step {step} " in line["message"])
    assert ended["event"] == "commit.done", ended["message"]
    (took_s,) = re.findall(r"in ([0-9.]+) s$", ended["message"])
    return float(took_s)


def goes(script: Script, agent: psutil.Process) -> None:
    """The machine, with all that is in its memory."""
    trainer = psutil.Process(script.process.pid) if script.process.poll() is None else None
    for each in (agent, trainer):
        if each is not None:
            each.suspend()  # neither sees the other one die
    for each in (agent, trainer):
        if each is not None:
            each.kill()
    script.process.wait(30)
    agent.wait(30)


def holds(store: Proxy, tmp_path: Path, step: int) -> None:
    """The next start, which finds nothing but the store, goes on from that step, with that step's content."""
    store.limit(float("inf"))
    again = train(tmp_path / "again", URL, step, *WORDS, CKPT_NOTICES="off")
    begun = again.wait_for(lambda line: "restored" in line)
    assert (begun["restored"], begun["level"]) == (step, "store")
    again.end()


def test_a_commit_under_way_is_broken_off_where_the_last_one_would_come_too_late_behind_it(
    tmp_path: Path, link: Proxy
) -> None:
    """A quarter of the second commit is done when a notice leaves time for one and a half."""
    script = noticing(tmp_path, 20, 40)
    took_s = committed(script, 20)
    agent = psutil.Process(agent_status(URL)["pid"])
    link.wait_carried(int(1.25 * MIB * 2**20))
    appear(tmp_path, 1.5 * took_s)
    found = wait_outcome(tmp_path, script)
    assert (found["how"], found["level"], found["error"]) == ("left", "store", "")
    assert found["step"] > 40
    assert found["left_s"] > 0
    (said_so,) = said(script, "commit.failed")
    assert "step 40 was not committed: it was given up for that of the last step" in said_so
    goes(script, agent)
    records = [key for method, key, _ in link.heard if method == "PUT" and "/commits/" in key]
    assert len(records) == 2, "and of step 40 there is none"
    holds(link, tmp_path, found["step"])


def test_a_deadline_that_comes_nearer_while_the_last_commit_is_under_way_is_heard_and_kept(
    tmp_path: Path, link: Proxy
) -> None:
    """All ranks have left, and wait for nothing but that."""
    script = noticing(tmp_path, 20)
    committed(script, 20)
    agent = psutil.Process(agent_status(URL)["pid"])
    appear(tmp_path, 25)
    link.wait_carried(int(1.1 * MIB * 2**20))
    appear(tmp_path, 4)
    found = wait_outcome(tmp_path, script)
    assert script.process.wait(10) == CODE
    goes(script, agent)
    assert (found["how"], found["level"], found["committed_step"]) == ("left", "local", 20)
    assert 0 <= found["left_s"] <= 4
    holds(link, tmp_path, 20)


def noticing(tmp_path: Path, *saves: int) -> Script:
    """It saves after these steps, and else when it is told that the machine goes away."""
    words = (*WORDS, "--save-at", *map(str, saves))
    script = train(tmp_path / "log", URL, ENDLESS, *words, CKPT_NOTICE_FILE=str(tmp_path / "word"))
    begun(script)
    return script
