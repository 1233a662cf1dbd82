"""Events in a file: whole lines, from several processes, bounded, and never at the cost of who emits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt import events
from ckpt.events import Event, Events, JsonLines
from ckpt.trainer.loop.run_report import RunReport


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_event_is_one_json_line_with_what_is_known_of_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLines(path, {"by": "trainer", "pid": 7})
    told = Events(sink)
    told.emit("commit.done", "step 3\nis there", step=3, seconds=0.5)
    told.emit("odd", "a name \udcff that is no text", loud=True, numbers=[float("nan"), float("inf"), 1.0])
    told.emit_event(Event("agent.says", "the agent has written this one itself", by_agent=True))
    sink.close()
    first, second = lines_of(path)
    assert first.pop("time") > 0
    about = {"by": "trainer", "pid": 7}
    said = {"event": "commit.done", "message": "step 3\nis there", "loud": False, "step": 3, "seconds": 0.5}
    assert first == {**said, **about}
    assert (second["loud"], second["numbers"]) == (True, [None, None, 1.0])


def test_what_is_logged_says_once_who_speaks(caplog: pytest.LogCaptureFixture) -> None:
    told = Events()
    told.emit("layout.differs", "2 tensors differ", loud=True)
    told.emit("save.failed", "ckpt: step 3 was not saved", loud=True)
    assert caplog.messages == ["ckpt: 2 tensors differ", "ckpt: step 3 was not saved"]


def test_what_each_snapshot_says_again_is_loud_once_and_counted() -> None:
    receipt, seen = RunReport(), list[Event]()
    told = Events(receipt.told, seen.append)
    for step in range(3, 8):
        told.emit("snapshot.failed", f"ckpt: step {step} was not staged: of no known type", loud=True)
    told.emit("snapshot.failed", "ckpt: step 8 was not staged: of another kind", loud=True)
    told.emit("restore.skipped", "ckpt: step 8", loud=True)
    told.emit("restore.skipped", "ckpt: step 7", loud=True)
    assert [event.loud for event in seen] == [True, False, False, False, False, True, True, True]
    assert receipt.to_dict()["repeated"] == {"snapshot.failed": 4}
    assert "repeated: snapshot.failed 4 times" in receipt.line()


def test_a_full_file_is_renamed_and_one_older_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "FILE_BYTES_MAX", 2000)
    path = tmp_path / "events.jsonl"
    sink = JsonLines(path, {})
    for number in range(100):
        sink(Event("e", "x" * 100, data={"number": number}))
    sink.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert all(each.stat().st_size <= 2000 for each in tmp_path.iterdir())
    found = [line["number"] for each in (path.with_name("events.jsonl.1"), path) for line in lines_of(each)]
    assert found == list(range(100 - len(found), 100))


WRITER = """
import sys
from pathlib import Path
from ckpt import events
events.FILE_BYTES_MAX = 20_000
sink = events.JsonLines(Path(sys.argv[1]), {"by": sys.argv[2]})
for number in range(300):
    sink(events.Event("e", "x" * 50, data={"number": number}))
sink.close()
"""


def test_several_processes_write_whole_lines_to_one_file_also_while_it_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, str(each)]) for each in range(3)]
    assert [each.wait(60) for each in writers] == [0, 0, 0]
    found = [line for each in tmp_path.iterdir() for line in lines_of(each)]
    assert len(found) > 100
    assert all(line["message"] == "x" * 50 for line in found)
    assert all(each.stat().st_size <= 21_000 for each in tmp_path.iterdir())  # the others may be just writing


def test_events_that_could_not_be_written_are_counted_where_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    sink = JsonLines(folder / "events.jsonl", {})
    failed = threading.Event()

    class Heard(events.logging.Handler):
        def emit(self, record: Any) -> None:
            failed.set()

    heard = Heard()
    events.log.addHandler(heard)
    try:
        sink(Event("lost", "nobody reads this"))
        assert failed.wait(30)
    finally:
        events.log.removeHandler(heard)
    folder.mkdir()
    sink(Event("found", "but this"))
    sink.close()
    first, second = lines_of(folder / "events.jsonl")
    assert (first["event"], first["lost"], second["event"]) == ("events.lost", 1, "found")


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "QUEUED_LINES_MAX", 10)
    monkeypatch.setattr(events, "FLUSH_S", 0.05)
    hanging, goes_on = threading.Event(), threading.Event()

    class Disk(JsonLines):
        def _append(self, line: bytes) -> None:
            hanging.set()
            assert goes_on.wait(60)
            super()._append(line)

    sink = Disk(tmp_path / "events.jsonl", {})
    sink(Event("first", ""))
    assert hanging.wait(30)
    for _ in range(100):
        sink(Event("more", ""))  # comes back though nothing is written
    sink.close()
    goes_on.set()


def test_a_path_that_nobody_reads_from_is_no_reason_to_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    sink = JsonLines(tmp_path / "pipe", {})
    sink(Event("e", ""))
    sink.close()
    assert "cannot be written" in caplog.text
