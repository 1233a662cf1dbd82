"""The end of a Slurm allocation, against a program that stands in for squeue."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ckpt.errors import UsageError
from ckpt.preemption.notice import Notice, Withdrawn
from ckpt.preemption.poll import Fault
from ckpt.preemption.slurm import SlurmListener, time_left_s
from tests.preemption.fakes import BRIEF_S, NOW_S, PATIENT_S, Clock, Turns, heard, is_within, listening, same, stopped_s


class Squeue:
    """Fault model: a status, nothing, garbage, output without end, output in pieces, no end, not there at all."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "squeue")
        self._asked = folder / "asked"

    def runs(self, script: str) -> None:
        beside = Path(self.path + ".new")
        beside.write_text(f'#!/bin/sh\necho "$@" >> {self._asked}\n{script}\n')
        beside.chmod(0o755)
        beside.rename(self.path)

    def says(self, text: str) -> None:
        self.runs(f"echo '{text}'")

    def asked(self) -> list[str]:
        return self._asked.read_text().splitlines()

    def listener(self, clock: Clock, timeout_s: float = PATIENT_S) -> SlurmListener:
        return SlurmListener("4711", squeue=self.path, timeout_s=timeout_s, now_s=clock.now_s)


@pytest.fixture
def squeue(tmp_path: Path) -> Squeue:
    return Squeue(tmp_path)


def test_the_end_that_the_job_knows_is_told_at_once_and_nothing_is_run(squeue: Squeue) -> None:
    ours = SlurmListener("4711", NOW_S + 3600, squeue=squeue.path)
    word = Notice(NOW_S + 3600, "slurm", True, "4711", "the allocation of Slurm job 4711 ends")
    assert is_within(1.0, lambda: stopped_s(ours, lambda has_told: has_told.wait(60), word))


def test_near_the_end_it_is_asked_once_whether_that_was_moved(squeue: Squeue) -> None:
    clock = Clock()
    ours = SlurmListener("4711", NOW_S + 3600, squeue=squeue.path, now_s=clock.now_s)
    stop, told = Turns(clock, lambda: squeue.says("2:15:00"), lambda: squeue.says("15:00"), same), list[object]()
    ours.listen(stop, told.append)
    assert stop.pauses == [2700.0, 7200.0]
    assert [each.deadline_s for each in told if isinstance(each, Notice)] == [NOW_S + 3600, NOW_S + 10800]
    assert len(told) == len(squeue.asked()) == 2


@pytest.mark.parametrize("fault", ["a status", "nothing", "garbage"])
def test_where_squeue_gives_no_answer_then_the_end_stays_as_the_job_knows_it(squeue: Squeue, fault: str) -> None:
    clock = Clock()
    ours = SlurmListener("4711", NOW_S + 600, squeue=squeue.path, now_s=clock.now_s)
    squeue.runs(FAULTS[fault])
    assert len(heard(ours, clock, same)) == 1


@pytest.mark.parametrize("past_s", [3600, 10, -600])
def test_an_end_that_is_near_or_past_when_listening_begins_is_told_only_when_squeue_knows_no_other(
    squeue: Squeue, past_s: float
) -> None:
    """`scontrol update TimeLimit` changes no process's variables, and an agent may begin hours later."""
    clock = Clock()
    ours = SlurmListener("4711", NOW_S - past_s, squeue=squeue.path, now_s=clock.now_s)
    squeue.says("5:00:00")
    (notice,) = heard(ours, clock)
    assert notice.deadline_s == NOW_S + 5 * 3600
    squeue.runs("exit 1")
    (notice,) = heard(ours, clock)
    assert notice.deadline_s == NOW_S - past_s


def test_who_begins_near_the_end_does_not_wait_for_squeue_until_it_has_come(squeue: Squeue) -> None:
    ours = SlurmListener("4711", time.time() + 12, squeue=squeue.path, timeout_s=60)
    squeue.runs("exec sleep 60")
    with listening(ours) as (_, told, has_told):
        assert has_told.wait(60)
        assert [each.deadline_s > time.time() for each in told if isinstance(each, Notice)] == [True]


def test_else_squeue_is_asked_for_the_time_left(squeue: Squeue) -> None:
    clock = Clock()
    squeue.says("1-02:03:04")
    (notice,) = heard(squeue.listener(clock), clock)
    assert notice.deadline_s == NOW_S + 93784
    assert squeue.asked() == ["--noheader --jobs 4711 --format %L"]


def test_it_is_asked_rarely_and_more_often_near_the_end(squeue: Squeue) -> None:
    clock = Clock()
    squeue.says("20:00")
    stop, told = Turns(clock, lambda: squeue.says("14:59"), same), list[object]()
    squeue.listener(clock).listen(stop, told.append)
    assert stop.pauses == [300.0, 60.0]


def test_a_limit_that_is_moved_is_told_again_and_one_that_is_lifted_withdraws(squeue: Squeue) -> None:
    clock = Clock()
    squeue.says("1:00:00")
    script = [
        lambda: squeue.says("55:00"),  # the same end, five minutes later
        lambda: squeue.says("2:00:00"),
        lambda: squeue.says("UNLIMITED"),
        same,
    ]
    first, moved, withdrawn = heard(squeue.listener(clock), clock, *script)
    assert (first.deadline_s, moved.deadline_s) == (NOW_S + 3600, NOW_S + 600 + 7200)
    assert withdrawn == Withdrawn("slurm", "4711")


FAULTS = {
    "a status": "echo 10:00; exit 1",
    "nothing": "",
    "garbage": "echo soon",
    "output without end": "yes",
    "no end": "sleep 60",
    "output closed and no end": "echo 10:00; exec >&-; exec sleep 60",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_any_fault_of_squeue_is_survived_and_nothing_of_it_stays(squeue: Squeue, fault: str) -> None:
    clock = Clock()
    squeue.runs(FAULTS[fault].replace("sleep", "exec sleep").replace("exec exec", "exec"))
    timeout_s = BRIEF_S if "no end" in fault else PATIENT_S
    told = heard(squeue.listener(clock, timeout_s), clock, lambda: squeue.says("10:00"), same, same)
    assert {type(word) for word in told} == {Notice}


def test_stop_ends_a_squeue_that_hangs_within_a_second(squeue: Squeue) -> None:
    runs = Path(squeue.path + ".runs")
    os.mkfifo(runs)
    squeue.runs(f"echo > {runs}; exec sleep 60")
    assert is_within(1.0, lambda: stopped_s(squeue.listener(Clock(), timeout_s=60), lambda _: runs.read_text()))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("0:00", 0), ("3:04", 184), ("59:59", 3599), ("2:03:04", 7384), ("1-00:00:00", 86400), (" 5:00\n", 300)],
        # Of several lines the least that is a time.
        *dict.fromkeys(
            ("10:00\n10:00\n", "1-00:00:00\n10:00\nUNLIMITED", "INVALID\n10:00", "soon\n10:00\n"), 600
        ).items(),
        *dict.fromkeys(("UNLIMITED", "NOT_SET", "UNLIMITED\nNOT_SET\n")).items(),
    ],
)
def test_the_time_left_is_read_as_squeue_writes_it(text: str, seconds: float | None) -> None:
    assert time_left_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "-1:00", "1:2:3:4", "1-2", "INVALID", "UNLIMITED\nINVALID", "9" * 10_000 + ":00"]
)
def test_what_is_no_time_is_a_fault(text: str) -> None:
    with pytest.raises(Fault):
        time_left_s(text)


@pytest.mark.parametrize("job", ["", "4711 --user", "-1", "4711;id", "../1"])
def test_a_job_id_that_is_none_is_refused(job: str) -> None:
    with pytest.raises(UsageError, match="is not a Slurm job id"):
        SlurmListener(job)


def test_a_limit_that_was_lifted_meanwhile_withdraws(squeue: Squeue) -> None:
    clock = Clock()
    ours = SlurmListener("4711", NOW_S + 3600, squeue=squeue.path, now_s=clock.now_s)
    squeue.says("UNLIMITED")
    assert heard(ours, clock, same)[1:] == [Withdrawn("slurm", "4711")]
