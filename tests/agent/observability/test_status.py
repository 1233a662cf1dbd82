"""What a real agent shows of a real job: over HTTP, in its answer to `ckpt watch`, and in the file of events."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckpt.agent.state.accounting import PARTS
from ckpt.ipc.client import Connection, connect_nowait, make_agent_paths
from ckpt.settings import read_settings
from ckpt.threads import Tasks
from tests.agent.fake import FakeRank
from tests.agent.node import test_agent
from tests.agent.node.test_agent import (
    checkpoint,
    end_agent,
    finish,
    start,
    start_processes,
    train,
    train_processes,
    wait_for,
    wait_gone,
)
from tests.agent.observability.test_prometheus import parse

url, ranks = test_agent.url, test_agent.ranks  # the fixtures
Ranks = Callable[..., list[FakeRank]]


def status_of(url: str) -> dict[str, Any]:
    sock = connect_nowait(make_agent_paths(url, read_settings()))
    assert sock is not None
    with Tasks("tool") as tasks:
        agent = Connection(sock, tasks, lambda message: message.close(), lambda why: None, role="tool")
        try:
            return agent.status()
        finally:
            agent.close()


def scraped(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return parse(answer.read().decode())


def events_in(path: Path) -> list[dict[str, Any]]:
    whole = path.read_text().rpartition("\n")[0]  # the last line may be only begun
    return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the events go; metrics are on."""
    monkeypatch.setenv("CKPT_METRICS", ":0")
    monkeypatch.setenv("CKPT_EVENTS", str(tmp_path / "events.jsonl"))
    return tmp_path / "events.jsonl"


def test_a_job_that_saves_is_seen_by_a_scraper_and_in_its_events(
    url: str,
    ranks: Ranks,
    measured: Path,
) -> None:
    job = ranks(2)
    decision = start(job)
    step = checkpoint(job, "store")
    train(job, step + 1)
    told = status_of(url)
    assert told["metrics"].startswith("127.0.0.1:")
    found = scraped(told["metrics"])
    assert found["ckpt_phase"][("phase", "training"),] == 1
    assert found["ckpt_safe_step"] == {(("level", "local"),): step, (("level", "store"),): step}
    assert found["ckpt_step"][()] >= step - 1
    assert found["ckpt_snapshots_total"][()] == found["ckpt_commits_total"][()] == 1
    assert found["ckpt_saved_bytes_total"][("level", "store"),] > 512 * 300 * 4
    assert found["ckpt_ranks"] == {(("state", "here"),): 2, (("state", "left"),): 0, (("state", "dead"),): 0}
    assert sum(found["ckpt_time_seconds"].values()) == pytest.approx(found["ckpt_elapsed_seconds_total"][()])
    assert 0 < found["ckpt_goodput_ratio"][()] <= 1
    assert found["ckpt_failures_total"][()] == 0
    assert told["job"]["intervals"]["local"] == {"interval_s": None, "interval_steps": 5, "by": "every"}
    train(job, job[0].step + 2)
    pages = [found]

    def moved_on() -> bool:
        pages.append(scraped(told["metrics"]))
        return bool(pages[-1]["ckpt_elapsed_seconds_total"] != found["ckpt_elapsed_seconds_total"])

    wait_for(moved_on)
    began = {page["process_start_time_seconds"][()] for page in pages}
    assert len(began) == 1, "an alarm for restarts looks for a change"
    finish(job)
    agent = end_agent(job)
    events = events_in(measured)
    assert {each["by"] for each in events} == {"agent"}
    assert {each["pid"] for each in events} == {agent}
    done = [each for each in events if each["event"] == "commit.done"]
    assert {each["epoch"] for each in done} == {decision.fields["epoch"]}
    assert done[0]["stored_bytes"] > 0
    assert "snapshot.done" in {each["event"] for each in events}
    last = [each for each in events if each["event"] == "job.account"][-1]
    assert (last["phase"], last["failures"], last["commits"]["number"]) == ("idle", 0, len(done))
    assert sum(last[f"{part}_s"] for part in PARTS) == pytest.approx(last["elapsed_s"])
    assert last["safe"]["store"]["step"] == job[0].step


def test_what_a_killed_trainer_cost_is_seen_by_a_scraper(
    url: str,
    measured: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    job, _ = start_processes(url, 2)
    last = train_processes(job)
    for _ in range(3):
        for process in job:
            process.ask(do="step")
    address = status_of(url)["metrics"]
    job[0].tell(do="die")
    job[0].process.wait(60)
    wait_for(lambda: scraped(address)["ckpt_phase"][("phase", "down"),] == 1)
    job[1].process.send_signal(signal.SIGKILL)
    for process in job:
        process.end()
    down = scraped(address)
    assert down["ckpt_failures_total"][()] == 1
    assert down["ckpt_safe_step"][("level", "local"),] == last
    again = FakeRank(url, 0, 1)
    again.connect()
    try:
        decision = start([again])
        wait_for(lambda: scraped(address)["ckpt_phase"][("phase", "training"),] == 1)  # a page is kept for a moment
        up = scraped(address)
        assert up["ckpt_lost_steps_total"][()] == 2  # and the third was under way, as far as the ranks had said
        assert up["ckpt_lost_seconds_total"][()] == up["ckpt_time_seconds"][("part", "lost"),] > 0
        assert up["ckpt_time_seconds"][("part", "recovery"),] > 0
        assert up["ckpt_recoveries_total"][()] == 1
        assert up["ckpt_restores_total"] == {(("level", "local"),): 1, (("level", "none"),): 1}
        assert up["ckpt_restored_bytes_total"][("level", "local"),] > 512 * 300 * 4
        assert up["ckpt_safe_step"][("level", "local"),] == last
        recovered = [each for each in again.events if each["name"] == "job.recovered"]
        assert recovered[0]["data"]["lost_steps"] == decision.fields["steps_lost"] == 2
        finish([again])
        agent = again.connection.agent_pid
    finally:
        again.close()
    wait_gone(agent)
    account = [each for each in events_in(measured) if each["event"] == "job.account"][-1]
    assert (account["phase"], account["starts"], account["failures"], account["lost_steps"]) == ("idle", 2, 1, 2)


def test_a_start_that_fails_leaves_the_account_as_it_was(url: str, ranks: Ranks, measured: Path) -> None:
    first, second = ranks(1)[0], ranks(1)[0]
    first.begin()
    assert status_of(url)["account"]["phase"] == "starting"
    first.connection.close()
    wait_for(lambda: status_of(url)["account"]["phase"] == "idle")
    start([second])
    assert status_of(url)["account"]["phase"] == "training"
    second.leave("exception")
    wait_for(lambda: events_in(measured)[-1].get("phase") == "down")


def test_an_agent_whose_port_is_taken_says_so_and_saves_all_the_same(
    url: str,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("CKPT_METRICS", f"localhost:{taken.getsockname()[1]}")
        job = ranks(1)
        start(job)
        checkpoint(job)
        assert [each["loud"] for each in job[0].events if each["name"] == "metrics.failed"] == [True]
        assert status_of(url)["metrics"] is None
        finish(job)


def test_no_port_is_open_unless_it_is_asked_for(url: str, ranks: Ranks) -> None:
    job = ranks(1)
    start(job)
    agent = psutil.Process(job[0].connection.agent_pid)
    assert agent.net_connections("inet") == []
    assert status_of(url)["metrics"] is None
    finish(job)


def test_a_stranger_at_the_port_does_not_keep_the_agent_from_ending(
    url: str,
    ranks: Ranks,
    measured: Path,
) -> None:
    job = ranks(1)
    start(job)
    host, port = status_of(url)["metrics"].split(":")
    with socket.create_connection((host, int(port)), 30) as stranger:
        stranger.sendall(b"GET /metr")
        finish(job)
        agent = job[0].connection.agent_pid
        job[0].connection.close()
        wait_gone(agent)
