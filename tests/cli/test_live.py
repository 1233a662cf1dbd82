"""ckpt preempt and prune while a job runs: they ask its agent and decide nothing themselves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ckpt.errors import CkptError, RunInUse
from ckpt.ipc import messages
from ckpt.ipc.client import VERSION, make_agent_paths
from ckpt.settings import read_settings
from ckpt.threads import Tasks
from tests.cli.stores import a_run, begin, run_ckpt, save

LONG = ("status", "prune")  # requests whose answer may be longer than a message


@contextlib.contextmanager
def an_agent(url: Path, answers: dict[str, dict[str, Any] | CkptError]) -> Iterator[list[dict[str, Any]]]:
    """Stands in for the agent of `url`: gives each request its answer, and collects what it was asked."""
    asked: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listening.bind(str(make_agent_paths(str(url), read_settings()).socket))
        listening.listen()
        tasks = stack.enter_context(Tasks("fake-agent"))

        def serve() -> None:
            while True:
                connection, _ = listening.accept()
                with connection:
                    if not _serve_one(connection):
                        return

        def _serve_one(connection: socket.socket) -> bool:
            while (message := messages.receive(connection)) is not None:
                if message.kind == "end-process":
                    return False
                asked.append(message.fields)
                hello = {"version": VERSION, "incarnation": "x", "pid": 1, "secret": None}
                answer = hello if message.kind == "hello" else answers[message.kind]
                if isinstance(answer, CkptError):
                    body = {"t": "error", "kind": answer.kind, "message": str(answer)}
                else:
                    body = {"t": "reply", **({} if message.kind in LONG else answer)}
                blobs = [msgpack.packb(answer)] if message.kind in LONG and isinstance(answer, dict) else []
                messages.send(connection, {**body, "id": message.fields["id"]}, blobs=blobs)
            return True

        tasks.start("serve", serve)
        try:
            yield asked
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ending:
                ending.connect(listening.getsockname())
                messages.send(ending, {"t": "end-process"})


def test_preempt_passes_the_deadline_on(tmp_path: Path) -> None:
    with an_agent(tmp_path, {"preempt": {}}) as asked:
        said = run_ckpt("preempt", tmp_path, "--deadline-s", "12")
    assert said.code == 0
    assert asked[1]["deadline_s"] == 12
    assert asked[1]["source"]
    assert not asked[1]["cancel"]


def test_preempt_can_be_taken_back(tmp_path: Path) -> None:
    with an_agent(tmp_path, {"preempt": {}}) as asked:
        said = run_ckpt("preempt", tmp_path, "--cancel")
    assert said.code == 0
    assert asked[1]["cancel"]


def test_prune_of_a_running_job_is_left_to_its_agent(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    plan = {"retire": ["x"], "packs": [f"data/{n:04}" for n in range(5000)], "deleted_bytes": 5, "freed_later_bytes": 6}
    with an_agent(tmp_path, {"prune": plan}) as asked:
        said = run_ckpt("prune", tmp_path, "--last", "1", "--best", "loss:min", "--also", "10", "--yes", "--json")
    assert said.json == {"url": str(tmp_path), "done": True, **plan}
    keep = {"last": 1, "every": None, "best": ["loss", "min"]}
    assert {k: asked[1][k] for k in ("yes", "keep", "also")} == {"yes": True, "keep": keep, "also": [str(saved[0])]}
    assert not (tmp_path / "retired").exists()


def test_an_agent_that_refuses_is_not_worked_around(tmp_path: Path) -> None:
    a_run(tmp_path)
    with an_agent(tmp_path, {"prune": RunInUse("not now")}):
        said = run_ckpt("prune", tmp_path, "--last", "1", "--yes")
    assert said.code == 5
    assert "not now" in said.err
    assert not (tmp_path / "retired").exists()


def test_a_run_that_another_host_keeps_alive_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.store.run import Run
    from tests.cli.stores import opened

    epoch = begin(tmp_path, closed=False)
    save(tmp_path, epoch, 10)
    save(tmp_path, epoch, 20)
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "5")  # it is seen to live at the first look, and watched for longer
    with Tasks("heart") as tasks, opened(tmp_path) as store:

        def beat() -> None:
            count = 0
            while not tasks.stopping.wait(0.001):
                count += 1
                Run(store).put_heartbeat(epoch, count, 0.05)

        tasks.start("beat", beat)
        for words in (["prune", tmp_path, "--last", "1", "--yes"], ["branch", tmp_path, "--at", "10"]):
            said = run_ckpt(*words)
            assert said.code == 5
            assert "in use" in said.err
            assert ("on the job's host, where its agent does it" in said.err) == (words[0] == "prune")
        assert run_ckpt("prune", tmp_path, "--last", "1").code == 0  # only looking disturbs nobody
        assert run_ckpt("branch", tmp_path, "--at", "10", "--take-over").code == 0
