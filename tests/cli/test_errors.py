"""Every error of ckpt is one line and a documented exit code, never a traceback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpt import errors
from ckpt.cli.exits import MEANING, Exit, exit_code_of
from tests.cli.stores import a_run, begin, run_ckpt, save

COMMANDS = Path(__file__).parents[2] / "docs/commands.md"


def _tree(cls: type[errors.CkptError]) -> list[type[errors.CkptError]]:
    return [cls, *(each for sub in cls.__subclasses__() for each in _tree(sub))]


def test_every_error_has_an_exit_code() -> None:
    codes = {cls.kind: exit_code_of(cls("x")) for cls in _tree(errors.CkptError)}
    assert codes["not-found"] == codes["access-denied"] == codes["transient"] == Exit.STORAGE
    assert codes["no-checkpoint"] == Exit.NO_CHECKPOINT
    assert codes["usage"] == Exit.USAGE
    assert codes["damaged"] == codes["state-mismatch"] == Exit.DIFFERENT
    assert codes["in-use"] == codes["superseded"] == Exit.IN_USE
    assert codes["agent"] == Exit.AGENT
    assert Exit.OK not in codes.values()


def test_the_documented_exit_codes_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", COMMANDS.read_text(), re.MULTILINE)
    assert rows == [(str(code.value), text) for code, text in MEANING.items()]


def test_every_command_is_documented_with_its_options() -> None:
    text = COMMANDS.read_text()
    listed = subprocess.run([sys.executable, "-m", "ckpt.cli.main", "--help"], capture_output=True, text=True)
    commands = re.findall(r"^  ([a-z]+)  ", listed.stdout.split("Commands:")[1], re.MULTILINE)
    assert len(commands) == 17
    for command in [*commands, "predict train", "predict check", "simulate fit", "simulate generate"]:
        command, *inner = command.split()
        assert f"## ckpt {command}" in text
        said = subprocess.run(
            [sys.executable, "-m", "ckpt.cli.main", command, *inner, "--help"], capture_output=True, text=True
        )
        section = text.split(f"## ckpt {command}")[1].split("\n## ")[0]
        for option in set(re.findall(r"^  (?:[*] )?(?:-[a-z], )?(--[a-z-]+)", said.stdout, re.MULTILINE)) - {
            "--help",
            "--json",
        }:
            assert option in section, f"ckpt {command} {option} is not in docs/commands.md"


def test_a_run_without_checkpoints_is_no_checkpoint_at_all(tmp_path: Path) -> None:
    begin(tmp_path)
    for words in (["ls"], ["ls", "--all"], ["verify"], ["show"], ["diff", "1"]):
        assert run_ckpt(words[0], tmp_path, *words[1:]).code == Exit.NO_CHECKPOINT, words


def test_a_store_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.reader.CONTACT_S", 0.5)
    with socket.socket() as taken:  # bound, never listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{taken.getsockname()[1]}", "AWS_REGION": "us-east-1"}
        for name, value in {**where, "AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}.items():
            monkeypatch.setenv(name, value)
        said = run_ckpt("ls", "s3://bucket/run")
    assert said.code == Exit.STORAGE
    assert "CKPT_RETRY_S" in said.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["ls", "/nowhere/run"], Exit.NO_CHECKPOINT),
        (["ls", "s3:/bucket"], Exit.USAGE),
        (["show", "memory://empty"], Exit.NO_CHECKPOINT),
        (["verify", "/nowhere/run"], Exit.NO_CHECKPOINT),
        (["watch", "/nowhere/run", "--once"], Exit.NO_CHECKPOINT),
        (["preempt", "/nowhere/run"], Exit.AGENT),
        (["ls"], Exit.USAGE),
        (["verify", "x", "--newest", "--step", "1"], Exit.USAGE),
        (["ls", "--no-such-option", "x"], Exit.USAGE),
        (["prune", "/nowhere/run", "--best", "val_loss"], Exit.USAGE),
        (["prune", "/nowhere/run", "--last", "0"], Exit.USAGE),
        (["import", "/nowhere/dcp", "/nowhere/run"], Exit.NO_CHECKPOINT),
        (["import", "/nowhere/dcp", "memory://run"], Exit.USAGE),
        (["restore", "/nowhere/run", "--to", "dcp:"], Exit.USAGE),
        (["restore", "/nowhere/run", "--to", "dcp:x", "--dtype", "bfloat16"], Exit.USAGE),
        (["restore", "/nowhere/run", "--to", "s3://bucket/x.safetensors"], Exit.USAGE),
        (["restore", "/nowhere/run", "--to", ""], Exit.USAGE),
        (["diff", "/nowhere/run", "1"], Exit.NO_CHECKPOINT),
        (["branch", "/nowhere/run", "--at", "1"], Exit.NO_CHECKPOINT),
        (["cp", "/nowhere/run", "/nowhere/copy"], Exit.NO_CHECKPOINT),
        (["rehearse", "/nowhere/run", "--", "no-such-program-here"], Exit.USAGE),
        (["agent", "/nowhere/run", "--listen", "127.0.0.1:0", "--memory", "1MiB"], Exit.USAGE),
        (["bench"], Exit.USAGE),
        (["doctor", "--pair"], Exit.USAGE),
    ],
)
def test_a_wrong_request_ends_with_its_code(words: list[str], code: Exit) -> None:
    said = run_ckpt(*words)
    assert said.code == code
    assert "Traceback" not in said.err
    assert said.out == ""
    assert "rror" in said.err or "Usage" in said.err
    error = run_ckpt(words[0], "--json", *words[1:]).json["error"]
    assert set(error) == {"kind", "message"}


# What lets root read everything is given up before the command begins.
UNPRIVILEGED = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-m", "ckpt.cli.main", *sys.argv[1:]])
"""


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["prune", "--last", "1", "--yes"]], ids=" ".join)
def test_no_permission_is_an_error_of_the_store(command: list[str], tmp_path: Path) -> None:
    a_run(tmp_path)
    hidden = tmp_path / "commits"
    hidden.chmod(0)
    try:
        words = [command[0], str(tmp_path), *command[1:]]
        said = subprocess.run([sys.executable, "-c", UNPRIVILEGED, *words], capture_output=True, text=True)
    finally:
        hidden.chmod(0o755)
    assert said.returncode == Exit.STORAGE, said.stderr
    assert f"{hidden}" in said.stderr
    assert "permission to read and write there" in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("command", ["ls", "show -t", "ls --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_who_has_seen_enough_of_what_is_printed_gets_no_traceback(
    unbuffered: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all of it would have fitted into the buffer, and is written as the program ends."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    save(tmp_path, begin(tmp_path), 10, {f"layer.{n:04}.weight": np.zeros(1, np.float32) for n in range(500)})
    reader, writer = os.pipe()
    os.close(reader)
    try:
        words = [sys.executable, "-m", "ckpt.cli.main", *command.split(), str(tmp_path)]
        said = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert said.stderr == ""
    assert said.returncode == Exit.BROKEN_PIPE


@pytest.mark.parametrize("command", ["ls", "ls --json", "show -t", "ls --help", "--version"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_no_room_for_what_is_printed_is_an_error_of_the_disk(
    unbuffered: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    save(tmp_path, begin(tmp_path), 10, {f"layer.{n:04}.weight": np.zeros(1, np.float32) for n in range(500)})
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "ckpt", *command.split(), str(tmp_path)]
        said = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert said.returncode == Exit.STORAGE
    assert said.stderr == "error: standard output cannot be written: [Errno 28] No space left on device\n"


def test_who_closes_the_standard_output_has_the_exit_status(tmp_path: Path) -> None:
    a_run(tmp_path)
    for more, code in (("", 0), ("--step 11", Exit.NO_CHECKPOINT)):
        words = f"{sys.executable} -m ckpt show {tmp_path} {more} >&- 2>&-"
        assert subprocess.run(words, shell=True).returncode == code


def test_what_the_locale_has_no_letters_for_is_printed_all_the_same(tmp_path: Path) -> None:
    url = os.fsencode(tmp_path) + b"/\xff"
    a_run(os.fsdecode(url))
    ascii_only = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (b"ls", url), (b"branch", url, b"--at", b"10"):
        said = subprocess.run([sys.executable, "-m", "ckpt", *words], env=ascii_only, capture_output=True)
        assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("words", [["prune"], ["watch", "--once"], ["preempt"]])
def test_what_asks_the_agent_of_a_folder_whose_name_is_no_utf8_says_so(words: list[str], tmp_path: Path) -> None:
    said = run_ckpt(words[0], os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), *words[1:], "--json")
    assert said.code == Exit.USAGE
    assert "rename that folder" in said.json["error"]["message"]


@pytest.mark.parametrize(
    ("raised", "code", "kind"),
    [
        (ZeroDivisionError("a slip"), Exit.UNEXPECTED, "unforeseen"),
        (PermissionError(13, "Permission denied", "/some/file"), Exit.STORAGE, "storage"),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "interrupted"),
    ],
)
def test_what_no_command_foresaw_has_a_code_and_json_too(
    raised: BaseException, code: Exit, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(json: bool = False) -> None:
        raise raised

    monkeypatch.setattr("ckpt.cli.listing.ls", broken)
    said = run_ckpt("ls", "--json")
    assert said.code == code
    assert said.json["error"]["kind"] == kind
    assert ("Traceback" in said.err) == (code == Exit.UNEXPECTED)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "-1"])
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["rehearse"], "--timeout-s"),
        (["preempt"], "--deadline-s"),
        (["agent"], "--commit-after-s"),
        (["predict", "train"], "--limit-s"),
        (["simulate", "fit"], "--window-s"),
    ],
)
def test_a_number_of_seconds_that_is_none_is_refused(words: list[str], option: str, bad: str, tmp_path: Path) -> None:
    said = run_ckpt(*words, option, bad, tmp_path)
    assert (said.code, option in said.err) == (2, True)
