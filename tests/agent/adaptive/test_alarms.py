"""A real agent that foresees failures: what is proven is acted on, what is not changes nothing."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.adaptive import alarms
from ckpt.agent.adaptive.alarms import Alarms
from ckpt.agent.state.cost_model import ABOUT, CostModel
from ckpt.format import record
from ckpt.ipc import client
from ckpt.ipc.notice_sources import Sources
from ckpt.policy.adaptive import Adaptive
from ckpt.predict.model import save
from ckpt.predict.scoring import OUTCOMES_MIN, WINDOW_S, Score
from ckpt.predict.signal_reader import SignalReader
from ckpt.settings import read_settings
from ckpt.storage import canonical
from ckpt.threads import Tasks
from ckpt.types import Version
from tests.agent.fake import OPTIONS, FakeRank
from tests.agent.node.test_agent import (
    checkpoint,
    finish,
    start,
    start_processes,
    train,
    train_processes,
    wait_for,
    wait_gone,
)
from tests.agent.preemption.test_preemption import Warned
from tests.predict.models import certain

ADAPTIVE = {
    **OPTIONS,
    "policy": {"kind": "adaptive", "overhead": 0.05, "store_mb_s": None, "at_risk_s": None},
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return canonical(str(tmp_path / "store"))


@pytest.fixture
def begin(url: str) -> Iterator[Callable[..., FakeRank]]:
    made: list[FakeRank] = []

    def one(options: dict[str, Any] = ADAPTIVE) -> FakeRank:
        rank = FakeRank(url, 0, 1)
        made.append(rank)
        rank.options = options
        rank.connect()
        start([rank])
        return rank

    yield one
    for rank in made:
        rank.close()


@pytest.fixture
def foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are read often, and a model raises an alarm at the first reading."""
    save(certain(0.9), tmp_path / "model")
    monkeypatch.setenv("CKPT_SIGNALS", "on")
    monkeypatch.setenv("CKPT_SIGNALS_S", "0.02")
    monkeypatch.setenv("CKPT_PREDICTOR", str(tmp_path / "model"))
    monkeypatch.setenv("CKPT_SIGNALS_LOG", str(tmp_path / "signals.jsonl"))


def status(url: str) -> dict[str, Any]:
    with Tasks("status") as tasks:
        sock = client.connect(url, read_settings())
        connection = client.Connection(sock, tasks, lambda message: message.close(), lambda why: None, "tool")
        try:
            return connection.status()
        finally:
            connection.close()


def model_of(url: str) -> dict[str, Any]:
    found: dict[str, Any] = status(url)["predictions"]["sources"]["model"]
    return found


def events(rank: FakeRank, name: str) -> list[dict[str, Any]]:
    return [event["data"] for event in rank.events if event["name"] == name]


def predictions(rank: FakeRank) -> list[dict[str, Any]]:
    """By the model: this machine may be busy enough for other alarms, too."""
    return [each for each in events(rank, "prediction") if each["source"] == "model"]


def noticed(url: str) -> list[tuple[str, bool]]:
    """The notices that stand: their keys, and whether they are certain."""
    return [(each["key"], each["certain"]) for each in status(url)["job"]["notices"]["standing"]]


def model_stands(url: str) -> bool:
    return "model" in [each["source"] for each in status(url)["predictions"]["standing"]]


def teach(url: str, scores: dict[str, Score]) -> None:
    """The newest record of the run says that so much was seen of these sources."""
    path = max(Path(url, "commits").iterdir())
    known = record.decode(path.read_bytes(), path.name)
    numbers = {f"source.{name}.{field}": n for name, score in scores.items() for field, n in score.numbers().items()}
    learnt = {**known.about[ABOUT], **numbers, "version": 2}
    path.write_bytes(record.encode(replace(known, about={**known.about, ABOUT: learnt})))


def good() -> Score:
    score = Score().with_watch_time(1e7)
    for _ in range(2 * OUTCOMES_MIN):
        score = score.with_true_alarm(120.0, True)
    return score


def test_an_alarm_of_a_proven_source_brings_one_checkpoint_more_into_the_store(
    url: str, begin: Callable[..., FakeRank], request: pytest.FixtureRequest
) -> None:
    first = begin()
    train([first], 3)
    finish([first])
    wait_gone(first.connection.agent_pid)  # the next one listens to signals
    teach(url, {"model": good()})
    request.getfixturevalue("foreseen")
    second = begin({**OPTIONS, "policy": {"steps": 10**9, "seconds": None}})
    step = second.await_word()  # nothing else is due
    train([second], step)
    assert second.taken == [step]
    (told,) = predictions(second)
    assert told["source"] == "model"
    assert told["proven"] is True
    assert told["probability"] == pytest.approx(0.9)
    assert told["lead_s"] == 120
    assert ("model", False) in noticed(url)
    assert second.wait_level(Version(step), "store")
    assert model_of(url)["proven"] is True
    finish([second])
    path = max(Path(url, "commits").iterdir())
    kept = record.decode(path.read_bytes(), path.name).about[ABOUT]
    assert kept["source.model.seen"] == 2 * OUTCOMES_MIN, "and so it goes on to the next run"


def test_an_alarm_of_an_unproven_source_changes_nothing(
    url: str, begin: Callable[[], FakeRank], foreseen: None
) -> None:
    rank = begin()
    first = checkpoint([rank])  # which is due at once
    wait_for(lambda: bool(predictions(rank)))
    (told,) = predictions(rank)
    assert (told["proven"], told["recall"]) == (False, 0.0)
    assert not any(event["loud"] for event in rank.events if event["name"] == "prediction")
    train([rank], first + 5)
    assert rank.page is not None
    assert not rank.page.appointments()
    said = status(url)
    assert "model" in [each["source"] for each in said["predictions"]["standing"]]
    assert not noticed(url)
    assert rank.taken == [first]
    finish([rank])


def test_without_signals_nothing_is_read(url: str, begin: Callable[[], FakeRank]) -> None:
    rank = begin()
    assert status(url)["predictions"] == {"reading": False, "sources": {}, "standing": []}
    finish([rank])


def test_a_killed_trainer_makes_its_alarm_come_true_and_the_others_have_missed_it(
    url: str, foreseen: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    job, _ = start_processes(url, 2)
    train_processes(job)
    wait_for(lambda: model_stands(url))
    job[1].tell(do="die")
    job[1].process.wait(60)
    wait_for(lambda: model_of(url)["outcomes"] == 1)
    job[0].process.send_signal(signal.SIGKILL)  # it dies of the first, and is no failure of its own
    for process in job:
        process.end()
    wait_for(lambda: status(url)["predictions"]["reading"] is False)
    sources = status(url)["predictions"]["sources"]
    assert sources["model"]["true"] + sources["model"]["late"] == 1, "a failure, so long after the alarm"
    # A busy machine may have raised alarms of its own, though never of every kind.
    assert any(each["missed"] == 1 for name, each in sources.items() if name != "model")
    assert {each["outcomes"] for each in sources.values()} == {1}
    monkeypatch.setenv("CKPT_LINGER_S", "0")
    again = FakeRank(url, 0, 1)
    again.connect()
    try:
        start([again])
        assert model_of(url)["outcomes"] == 1
        finish([again])
    finally:
        again.close()
    wait_for(lambda: '"signals.failure"' in (tmp_path / "signals.jsonl").read_text())


@pytest.mark.parametrize(
    ("warned", "first", "then", "counted"),
    [
        ("", "exception", "exception", 1),
        ("", "normal", "normal", 0),
        ("", "normal", "exception", 0),
        ("soon", "exception", "exception", 0),
        ("in days", "exception", "exception", 1),
    ],
)
def test_what_raises_has_failed_unless_the_job_was_at_its_end_or_told_to_leave(
    warned: str, first: str, then: str, counted: int, url: str, foreseen: None, tmp_path: Path
) -> None:
    """What was counted is in the file when the agent has ended."""
    job = [FakeRank(url, rank, 2) for rank in range(2)]
    if warned == "in days":
        job[0].notices = Sources("given", slurm_job="7", slurm_end_s=time.time() + 2 * 86400).fields()
    try:
        for rank in job:
            rank.connect()
        start(job)
        wait_for(lambda: bool(predictions(job[0])))
        if warned == "soon":
            job[0].request("notice", {"key": "SIGTERM", "left_s": 3600.0})
        elif warned:
            wait_for(lambda: bool(status(url)["job"]["notices"]["standing"]))
        job[1].notify("leave", {"id": 10**6, "outcome": first})
        wait_for(lambda: status(url)["job"]["ranks"][1] == "left")
        job[0].notify("leave", {"id": 10**6, "outcome": then})
        assert job[0].connection is not None
        wait_gone(job[0].connection.agent_pid)
    finally:
        for rank in job:
            rank.close()
    assert (tmp_path / "signals.jsonl").read_text().count('"signals.failure"') == counted


def test_the_signals_are_recorded_as_lines_that_training_reads(
    url: str, begin: Callable[[], FakeRank], foreseen: None, tmp_path: Path
) -> None:
    rank = begin()
    path = tmp_path / "signals.jsonl"
    wait_for(lambda: path.exists() and path.read_text().count("\n") > 5)
    finish([rank])
    rank.close()
    wait_for(lambda: '"signals.end"' in path.read_text())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines][:2] == ["signals.begin", "signals"]
    assert lines[-1]["event"] == "signals.end"
    assert all(line["url"] == url and line["node"] for line in lines)
    assert 0 < lines[1]["values"]["memory.used"] <= 1
    assert "io.some" in lines[3]["values"]


def test_a_reading_that_the_end_of_the_job_overtakes_is_not_recorded(foreseen: None, tmp_path: Path) -> None:
    made = SignalReader(read_settings(), "memory://", lambda _: None, lambda *_: None, cast(Any, None))

    def ends_meanwhile(*given: object) -> dict[str, float]:
        made.set_reading(False)
        return {"memory.used": 0.5}

    made.set_reading(True)
    watch = SimpleNamespace(sources=(), add_reading=lambda *_: [])
    made._read(cast(Any, SimpleNamespace(read=ends_meanwhile)), cast(Any, watch))
    made.close()
    lines = [json.loads(line)["event"] for line in (tmp_path / "signals.jsonl").read_text().splitlines()]
    assert (lines[0], lines[-1]) == ("signals.begin", "signals.end")


def test_a_predictor_that_cannot_be_read_is_told_of_and_done_without(
    url: str, begin: Callable[[], FakeRank], foreseen: None, tmp_path: Path
) -> None:
    (tmp_path / "model").write_bytes(b"ckptpred" * 100)
    rank = begin()
    wait_for(lambda: any(event["name"] == "predictor.refused" for event in rank.events))
    wait_for(lambda: "memory" in status(url)["predictions"]["sources"])
    assert "model" not in status(url)["predictions"]["sources"]
    finish([rank])


def test_a_mistake_in_foreseeing_is_told_and_stops_nothing_else(tmp_path: Path) -> None:
    told: list[str] = []
    events = SimpleNamespace(emit=lambda name, text, loud: told.append(f"{name}: {text}"))
    made = Alarms(read_settings(), "memory://", cast(Any, SimpleNamespace(post=None)), cast(Any, events))

    def mistaken(*given: object) -> None:
        raise ZeroDivisionError("here")

    made._track_jobs = mistaken  # type: ignore[method-assign]
    for _ in range(2):
        again_s = made.update(None, [])
        assert again_s is not None
        assert again_s > time.monotonic()
    assert len(told) == 1
    assert "here" in told[0]


@pytest.mark.parametrize("proven", [True, False])
def test_an_alarm_that_comes_to_nothing_passes_though_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, proven: bool
) -> None:
    """By the agent's own clock: what followed from it is taken back then, and it counts, where nothing followed too."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(alarms, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    events: Any = SimpleNamespace(emit=lambda name, text, loud: pytest.fail(text))
    made = Alarms(replace(read_settings(), signals="off"), "memory://", cast(Any, SimpleNamespace(post=None)), events)
    group = Warned().group
    context = SimpleNamespace(internal_error="", emit=lambda *given: None)
    job: Any = SimpleNamespace(claim=object(), context=context, scheduler=group, ranks=None, epoch=None)
    job.cost_model, job.policy = CostModel(Adaptive()), SimpleNamespace(apply=lambda: None)
    before = good() if proven else Score()
    made.inherit_scores({"memory": before.numbers()})
    made.update(job, [])
    made._record_alarms(job, "", ["memory"], [("memory", None)])
    made.update(job, [])
    assert bool(group.preemption.notices) is proven
    for _ in range(1000):
        again_s = made.update(job, [])
        if not made.outcomes.standing_alarms():
            break
        assert again_s is not None
        clock.now_s = max(again_s, clock.now_s)
    assert clock.now_s == 1000.0 + WINDOW_S
    assert made.outcomes.scores["memory"].false == before.false + 1
    assert not group.preemption.notices
    assert made.update(job, []) is None, "there is nothing to look for"
