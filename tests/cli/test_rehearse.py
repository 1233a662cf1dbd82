"""ckpt rehearse: an exact script is found exact, and what an inexact one loses is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ckpt.cli.exits import Exit
from ckpt.cli.rehearse import Rehearsal, compare
from tests import servers
from tests.cli.stores import Said, begin, opened, refused, run_ckpt, save

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def _rehearse(url: Path, how: str, *options: str, url_in_command: str | None = None, steps: int = 4) -> Said:
    script = [sys.executable, "-m", "tests.cli.fake_train", url_in_command or str(url), str(steps), how]
    at = [] if "--at" in options else ["--at", "2"]
    return run_ckpt("rehearse", url, *at, *options, "--", *script)


def test_a_tensor_that_is_lost_is_named(tmp_path: Path) -> None:
    said = _rehearse(tmp_path / "run", "loses a tensor")
    assert said.code == 1
    assert "tensor model.bias: 1 of 10 elements differ" in said.out


def test_a_loader_that_skips_data_is_named(tmp_path: Path) -> None:
    said = _rehearse(tmp_path / "run", "skips data", "--json")
    assert said.code == 1
    assert said.json["differences"] == ["value rank=0['loader']['position']"]


def test_the_url_may_be_a_placeholder_and_both_runs_may_be_kept(tmp_path: Path) -> None:
    said = _rehearse(tmp_path / "run", "exact", "--keep", "--lose-memory", "--json", url_in_command="{url}")
    assert said.code == 0, said.err
    kept = Path(said.json["kept"])
    assert sorted(path.name for path in kept.iterdir()) == ["killed", "undisturbed"]
    assert run_ckpt("diff", kept / "killed", "4", "--other", kept / "undisturbed").code == 0


@pytest.mark.parametrize(
    ("how", "options", "code", "says"),
    [
        ("fails", [], 7, "exit status 9"),
        ("ends early", ["--at", "5"], 7, "before it could be killed"),
        ("exact", ["--timeout-s", "0"], 7, "--timeout-s"),
    ],
)
def test_a_script_that_cannot_be_rehearsed_says_why(
    how: str, options: list[str], code: int, says: str, tmp_path: Path
) -> None:
    said = _rehearse(tmp_path / "run", how, *options)
    assert said.code == code
    assert says in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_saves_elsewhere_is_told_how_to_name_the_url(tmp_path: Path) -> None:
    said = _rehearse(tmp_path / "run", "exact", url_in_command=str(tmp_path / "elsewhere"))
    assert said.code == 2
    assert "{url}" in said.err


def test_a_program_that_is_not_there_is_a_wrong_request(tmp_path: Path) -> None:
    assert "no-such-program-here" in refused(2, "rehearse", tmp_path / "run", "--", "no-such-program-here")
    script = tmp_path / "train.py"
    script.touch(mode=0o600)
    assert "put python before it" in refused(2, "rehearse", tmp_path / "run", "--", str(script))


def test_only_the_url_itself_is_replaced_in_the_command() -> None:
    words = ["runs/a", "--url=runs/a", "runs/ab", "/x/runs/a", "runs/a/sub", "runs/a.txt", "{url}", "x runs/a y"]
    replaced = ["/s", "--url=/s", "runs/ab", "/x/runs/a", "/s/sub", "runs/a.txt", "/s", "x /s y"]
    assert Rehearsal("runs/a", "/s", words).command == replaced


def test_a_generator_that_nobody_seeded_or_used_is_not_held_against_the_script(tmp_path: Path) -> None:
    said = _rehearse(tmp_path / "run", "unseeded and unused", "--json")
    assert said.code == 0, said.err
    assert said.json["unused"] == ["rank=0['generators']['python']"]
    assert "not compared" in _rehearse(tmp_path / "run", "unseeded and unused").out


def test_a_script_that_is_not_the_same_twice_is_told_apart_from_a_bad_restart(tmp_path: Path) -> None:
    said = _rehearse(tmp_path / "run", "unseeded")
    assert said.code == 1
    assert "already before the kill" in said.out
    assert "tensor model.bias" in said.out


def test_a_restart_that_ran_no_step_proves_nothing(tmp_path: Path) -> None:
    """Step 2 was seen before the kill, and yet the restart came back at the end: all that is equal was never undone."""
    said = _rehearse(tmp_path / "run", "had ended in memory")
    assert said.code == 7
    assert "came back at step 4, its last" in said.err
    assert said.out == ""


def test_a_script_that_is_run_again_but_enters_no_checkpointer_proves_nothing(tmp_path: Path) -> None:
    said = _rehearse(tmp_path / "run", "is not started again")
    assert said.code == 7
    assert "did not enter" in said.err


def compared(folder: Path, undisturbed: Any, killed: Any, tensors: dict[str, np.ndarray]) -> list[str]:
    """What differs where only these values, shared by the ranks, do, and changed in both runs."""
    for name, end in (("undisturbed", undisturbed), ("killed", killed)):
        epoch = begin(folder / name)
        save(folder / name, epoch, 1, tensors, shared={"x": "at first"})
        save(folder / name, epoch, 2, tensors, shared={"x": end})
    return compare(str(folder / "undisturbed"), str(folder / "killed"), 1).differences


@pytest.mark.parametrize(
    ("undisturbed", "killed", "differences"),
    [
        (deque([np.zeros(3), float("nan")], 8), deque([np.zeros(3), float("nan")], 8), []),
        (deque([1], 8), deque([1], 9), ["value shared['x'].maxlen"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ["value shared['x'] (order of keys)"]),
        ({"a": 1}, OrderedDict(a=1), ["value shared['x'] (order of keys)"]),
        ({"a": None}, {}, ["value shared['x']['a']", "value shared['x'] (order of keys)"]),
    ],
)
def test_values_are_compared_by_what_would_be_restored_of_them(
    undisturbed: Any, killed: Any, differences: list[str], tmp_path: Path
) -> None:
    assert compared(tmp_path, undisturbed, killed, {"w": np.ones(3)}) == differences


def test_a_run_that_has_a_bucket_for_itself_is_rehearsed_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.moto() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        script = [sys.executable, "-m", "tests.cli.fake_train", "{url}", "4", "exact"]
        said = run_ckpt("rehearse", "s3://bucket", "--at", "2", "--lose-memory", "--", *script)
        assert said.code == 0, said.err
        assert "s3://bucket/rehearsal-" in said.err
        with opened("s3://bucket") as store:
            assert list(store.list("")) == []


# Saves something, starts what is in a session of its own, as an agent is, says so, and does not end.
ENDLESS = """
import os, signal, subprocess, sys
os.makedirs(sys.argv[1])
other = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("begun", other.pid, os.getpid(), os.environ["CKPT_RUNTIME_DIR"], flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("hang_up", "sent", "code"),
    [
        (signal.SIG_DFL, [signal.SIGTERM], Exit.TERMINATED),
        (signal.SIG_DFL, [signal.SIGHUP], Exit.HUNG_UP),
        (signal.SIG_IGN, [signal.SIGHUP, signal.SIGTERM], Exit.TERMINATED),  # as under nohup
    ],
)
def test_a_rehearsal_that_is_told_to_end_takes_its_script_along(
    hang_up: signal.Handlers, sent: list[signal.Signals], code: Exit, tmp_path: Path
) -> None:
    words = ["rehearse", tmp_path / "run", "--", sys.executable, "-c", ENDLESS, "{url}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt.cli.main", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hang_up),  # whoever started the tests may ignore it
    )
    with process:
        begun = next(line for line in process.stderr if line.startswith("begun"))
        *pids, runtime = begun.split()[1:]
        script = [psutil.Process(int(pid)) for pid in pids]
        for number in sent:
            process.send_signal(number)
        assert process.wait(60) == code
        assert "Traceback" not in process.stderr.read()
    assert psutil.wait_procs(script, timeout=60)[1] == []
    assert list(tmp_path.iterdir()) == []
    assert not Path(runtime).exists()
