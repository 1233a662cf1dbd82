"""A file that appears."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from ckpt.preemption.files import LEAD_S, FileListener
from ckpt.preemption.notice import Notice, Withdrawn
from tests.preemption.fakes import NOW_S, Clock, Turns, heard, same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leave"


def write(path: Path, text: str, written_s: float = NOW_S) -> None:
    path.write_text(text)
    os.utime(path, (written_s, written_s))


def listener(path: Path, clock: Clock) -> FileListener:
    return FileListener(path, now_s=clock.now_s)


def test_an_empty_file_gives_the_usual_lead_from_when_it_was_seen(path: Path) -> None:
    clock = Clock()
    stop, told = Turns(clock, same, path.touch, same, same), list[object]()
    listener(path, clock).listen(stop, told.append)
    message = f"the file {path} has appeared"
    assert told == [Notice(NOW_S + 2 + LEAD_S, "file", True, str(path), message)]
    assert stop.pauses == [1.0] * 4


@pytest.mark.parametrize(
    ("text", "after_s"),
    [
        ("2030-03-17T17:48:40Z", 120),
        ("2030-03-17T18:48:40+01:00\n", 120),
        (f"{NOW_S + 90:.0f}", 90),
        (f"{NOW_S + 90.5}", 90.5),
        ("+45", 35),  # since it was written, ten seconds ago
        ("+0", -10),
        ("45", LEAD_S),  # neither a date nor a time from now
        ("20261125", LEAD_S),
        ("2026W48", LEAD_S),
        ("soon", LEAD_S),
        ("\x00\xff", LEAD_S),
        ("2030-03-17T17:48:40Z" + " " * 300 + "x", 120),  # only the beginning is read
        ("9" * 400, LEAD_S),
    ],
)
def test_what_it_holds_may_be_the_deadline(path: Path, text: str, after_s: float) -> None:
    clock = Clock()
    write(path, text, NOW_S - 10)
    (notice,) = heard(listener(path, clock), clock, same)
    assert notice.deadline_s - NOW_S == pytest.approx(after_s, abs=1e-3)


def test_a_file_that_was_written_in_the_future_counts_from_when_it_was_seen(path: Path) -> None:
    clock = Clock()
    write(path, "+45", NOW_S + 86400)
    (notice,) = heard(listener(path, clock), clock)
    assert notice.deadline_s == NOW_S + 45


def test_a_time_from_when_it_was_written_begins_anew_when_it_is_written_anew(path: Path) -> None:
    """A file that has not been written again keeps its time, wherever its clock is."""
    clock = Clock()
    write(path, "+100", NOW_S)
    script = [same] * 9 + [lambda: write(path, "+100", NOW_S + 10), same, lambda: write(path, "+100", NOW_S + 86400)]
    told = heard(listener(path, clock), clock, *script, *[same] * 9)
    deadlines = [round(each.deadline_s - NOW_S) for each in told if isinstance(each, Notice)]
    assert deadlines == [100, 110]


def test_a_file_that_was_written_while_nobody_listened_is_another_notice(path: Path) -> None:
    clock, first = Clock(), dict[str, dict[str, float]]()

    def told() -> list[Notice | Withdrawn]:
        return heard(FileListener(path, now_s=clock.now_s, first=first), clock, same)

    write(path, "", NOW_S - 10)
    (seen,) = told()
    assert told() == [seen], "the same file, and the same time"
    anew_s = clock.now
    write(path, "", anew_s)
    assert told() == [Withdrawn("file", str(path)), dataclasses.replace(seen, deadline_s=anew_s + LEAD_S)]


def test_a_file_that_may_not_be_read_is_the_same_one_when_somebody_else_listens(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each start on that machine would leave by it again."""

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError("not yours")

    clock, first = Clock(), dict[str, dict[str, float]]()
    write(path, "2040-01-01T00:00:00Z", NOW_S - 10)
    monkeypatch.setattr(os, "open", refuse)
    (seen,) = heard(FileListener(path, now_s=clock.now_s, first=first), clock, same)
    clock.now += 60
    assert heard(FileListener(path, now_s=clock.now_s, first=first), clock, same) == [seen]


def test_another_time_replaces_the_first_and_removal_withdraws(path: Path) -> None:
    clock = Clock()
    write(path, "")
    script = [lambda: write(path, "2030-03-17T17:48:40Z"), path.unlink, path.touch, same]
    first, moved, withdrawn, again = heard(listener(path, clock), clock, *script)
    assert (first.deadline_s, moved.deadline_s) == (NOW_S + LEAD_S, NOW_S + 120)
    assert withdrawn == Withdrawn("file", str(path))
    assert again.deadline_s == NOW_S + 3 + LEAD_S


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a folder", "a pipe that nobody writes"])
def test_whatever_stands_there_counts_and_is_not_waited_for(path: Path, make: object) -> None:
    clock = Clock()
    make(path)  # type: ignore[operator]
    (notice,) = heard(listener(path, clock), clock, same)
    assert notice.deadline_s == NOW_S + LEAD_S


def test_a_path_that_cannot_be_looked_at_is_a_fault_and_withdraws_nothing(path: Path) -> None:
    """A link to itself stands for every error but absence: it does so as root, too."""
    clock = Clock()
    write(path, "")

    def circle() -> None:
        path.unlink()
        path.symlink_to(path)

    told = heard(listener(path, clock), clock, same, circle, same, path.unlink, same)
    assert [type(word) for word in told] == [Notice, Withdrawn]


def test_a_folder_that_is_missing_or_no_folder_is_absence(path: Path) -> None:
    clock = Clock()
    path.touch()
    assert heard(listener(path / "leave", clock), clock, same) == []
    assert heard(listener(path.parent / "none" / "leave", clock), clock, same) == []
