"""ckpt agent: a memory-only node in the foreground. What jobs have of it is tested in tests/agent/nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.agent.net.dialer import dial
from ckpt.agent.net.handshake import Dialler, Role, Session
from ckpt.agent.net.peer_network import secret_id_of
from ckpt.cli.exits import Exit
from ckpt.cli.out import parse_size
from ckpt.errors import UsageError
from ckpt.ipc.addresses import Address, resolve
from ckpt.ipc.secret import make_secret
from tests.agent.net.loop import TurnedLoop
from tests.cli.stores import refused, run_ckpt

HERE = ["--listen", "127.0.0.1:0", "--memory", "1MiB"]


@pytest.fixture
def secret(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPT_SECRET_FILE", str(secret_file))
    return secret_file


def greets(address: str, known: bytes) -> bool:
    """Whether the agent there lets in who knows that secret."""
    loop = TurnedLoop()
    said: list[bool] = []

    def done(sock: socket.socket, session: Session) -> None:
        sock.close()
        said.append(True)

    try:
        handshake = Dialler(known, secret_id_of(known), Role.CONTROL, "test")
        dial(loop, resolve(Address.parse(address))[0], handshake, done, lambda error: said.append(False))
        loop.until(lambda: said)
    finally:
        loop.close()
    return said[0]


@contextlib.contextmanager
def running(
    url: Path | str, *words: str, given: str = "", hang_up: signal.Handlers = signal.SIG_DFL
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the line that it says. `given`: what stands in its standard input, which stays open."""
    command = [sys.executable, "-m", "ckpt.cli.main", "agent", str(url), *HERE, *words]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": ""}  # as a user has it
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hang_up),  # whoever started the tests may ignore it
    ) as process:
        try:
            process.stdin.write(given)
            process.stdin.flush()
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_cannot_say_where_it_listens_ends_leaving_nothing(
    unbuffered: str, more: list[str], tmp_path: Path, runtime_dir: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [sys.executable, "-m", "ckpt", "agent", str(tmp_path / "run"), *HERE, *more]
    with open("/dev/full", "w") as full:
        said = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert said.returncode == Exit.STORAGE
    assert said.stderr == "error: standard output cannot be written: [Errno 28] No space left on device\n"
    assert not list(runtime_dir.iterdir())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_says_where_it_listens_and_ends_when_it_is_told_to_leaving_nothing(
    how: signal.Signals, tmp_path: Path, runtime_dir: Path, secret: Path
) -> None:
    with running(tmp_path / "run") as (process, line):
        assert line.startswith(f"lending up to 1.0 MiB to {tmp_path / 'run'} at 127.0.0.1:"), line
        process.send_signal(how)
        assert process.wait(60) == 0
    assert not list(runtime_dir.iterdir())


def test_under_nohup_it_outlives_its_terminal(tmp_path: Path, secret: Path) -> None:
    with running(tmp_path / "run", hang_up=signal.SIG_IGN) as (process, _):
        process.send_signal(signal.SIGHUP)
        assert "lends 1.0 MiB" in run_ckpt("watch", tmp_path / "run", "--once").out
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_where_it_cannot_read_the_store_that_is_said_before_it_is_needed(secret: Path) -> None:
    with running("nosuch://bucket/run") as (process, line):
        assert line.startswith("lending up to")
        said = process.stderr.readline()
    assert "what is kept here could not be committed" in said
    assert "Protocol not known: nosuch" in said


def test_without_a_secret_it_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_SECRET_FILE", raising=False)
    said = refused(Exit.USAGE, "agent", tmp_path, *HERE)
    assert "CKPT_SECRET_FILE" in said
    assert "openssl rand -hex 32" in said


def test_the_secret_may_come_by_standard_input_and_whoever_knows_it_is_let_in(
    tmp_path: Path, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in no file of that machine then."""
    monkeypatch.delenv("CKPT_SECRET_FILE", raising=False)
    told = secret_file.read_text().strip()
    with running(tmp_path / "run", "--json", "--secret-file", "-", given=f"{told}\n") as (_, line):
        said = json.loads(line)
        assert (said["url"], said["memory_bytes"]) == (str(tmp_path / "run"), 1 << 20)
        (address,) = said["listen"]
        assert greets(address, bytes.fromhex(told))
        assert not greets(address, make_secret())


def test_a_file_that_the_command_line_names_counts_before_that_of_the_environment(tmp_path: Path, secret: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(make_secret().hex())
    with running(tmp_path / "run", "--json", "--secret-file", str(other)) as (_, line):
        (address,) = json.loads(line)["listen"]
        assert greets(address, bytes.fromhex(other.read_text()))
        assert not greets(address, bytes.fromhex(secret.read_text().strip()))


def test_what_comes_by_standard_input_and_is_no_secret_is_refused_and_not_shown(tmp_path: Path) -> None:
    with running(tmp_path / "run", "--secret-file", "-", given="hunter2\n") as (process, _):
        assert process.wait(60) == Exit.USAGE
        said = process.stderr.read()
    assert "standard input does not hold a secret" in said
    assert "hunter2" not in said


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, secret: Path) -> None:
    secret.chmod(0o644)
    assert f"chmod 600 {secret}" in refused(Exit.USAGE, "agent", tmp_path, *HERE)


@pytest.mark.parametrize(("memory", "way_out"), [("1000TiB", "lend less"), ("64", "64GiB")])
def test_more_memory_than_the_machine_has_and_less_than_a_snapshot_needs_are_refused(
    memory: str, way_out: str, tmp_path: Path, secret: Path
) -> None:
    assert way_out in refused(Exit.USAGE, "agent", tmp_path, "--listen", "127.0.0.1:0", "--memory", memory)


@pytest.mark.parametrize("where", ["nowhere", "127.0.0.1", "127.0.0.1:99999"])
def test_what_is_no_address_is_refused(where: str, tmp_path: Path, secret: Path) -> None:
    assert "HOST:PORT" in refused(Exit.USAGE, "agent", tmp_path, "--listen", where, "--memory", "1MiB")


def test_a_second_one_on_one_machine_says_that_there_is_one(tmp_path: Path, secret: Path) -> None:
    with running(tmp_path / "run"):
        said = run_ckpt("agent", tmp_path / "run", *HERE)
    assert said.code == Exit.AGENT
    assert "CKPT_RUNTIME_DIR" in said.err


def test_sizes_are_powers_of_1024_and_nothing_else_is_one() -> None:
    assert [parse_size("--memory", text) for text in ("5", "1KiB", "2k", "1.5 GiB", "64GB", "64Gi", "1T")] == [
        *(5, 1024, 2048, 3 << 29),
        *(64 << 30, 64 << 30, 1 << 40),
    ]
    for text in ("", "0", "-1", "GiB", "1PiB", "1e3", "64 GiB of it", "99999999TiB"):
        with pytest.raises(UsageError, match="64GiB"):
            parse_size("--memory", text)
