"""A job of ranks with an agent each, as on several machines (tests/checkpointer/hosts.py), and a job after it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.agent.nodes.cluster import await_end
from tests.checkpointer.hosts import COLUMNS, LATER, ROWS, whole
from tests.checkpointer.runs import Seen, agent_status
from tests.checkpointer.scripts import Line, Script, torchrun
from tests.cli.stores import ckpt as command

pytestmark = pytest.mark.torchrun


@dataclass
class Hosts:
    """The launch, and where its agents are. `monkeypatch` chooses which one is asked."""

    folder: Path
    world: int
    script: Script
    monkeypatch: pytest.MonkeyPatch
    pids: dict[int, int] = field(default_factory=dict)  # of the agents that live, by rank

    @property
    def url(self) -> Path:
        return self.folder / "run"

    def go_to(self, name: str) -> None:
        self.monkeypatch.setenv("CKPT_RUNTIME_DIR", str(self.folder / name))

    def status(self, rank: int) -> dict[str, Any]:
        self.go_to(f"n{rank}")
        return agent_status(self.url)

    def await_peer(self) -> list[Line]:
        """Until all ranks say that their step is in another's memory."""
        ranks = range(self.world)
        said = [self.script.wait_for(lambda line, rank=rank: line.get("rank") == rank) for rank in ranks]
        self.pids = {rank: int(self.status(rank)["pid"]) for rank in ranks}
        return said

    def fail(self) -> None:
        """All ranks raise; the agents stay."""
        (self.folder / "end").touch()
        self.script.process.wait(60)

    def kill_agent(self, rank: int) -> None:
        pid = self.pids.pop(rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await_end(pid)


@contextlib.contextmanager
def launched(world: int, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """The store takes claims and no data: memory is all there is."""
    monkeypatch.setenv("CKPT_LAUNCH", "hosts")
    (runtime_dir / "run").mkdir()
    (runtime_dir / "run" / "data").touch()
    script = torchrun(tmp_path / "log", world, "tests.checkpointer.hosts", str(runtime_dir), CKPT_LINGER_S="60")
    made = Hosts(runtime_dir, world, script, monkeypatch)
    try:
        yield made
    finally:
        for rank in list(made.pids):
            made.kill_agent(rank)
        if script.process.poll() is None:
            script.process.terminate()  # torchrun ends its workers
            script.process.wait(60)


@pytest.fixture
def hosts(tmp_path: Path, secret_file: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Two; they know the secret of a file."""
    monkeypatch.setenv("CKPT_SECRET_FILE", str(secret_file))
    with launched(2, tmp_path, runtime_dir, monkeypatch) as made:
        yield made


@pytest.fixture
def hosts_without_file(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Three: each has a part and a copy of another."""
    with launched(3, tmp_path, runtime_dir, monkeypatch) as made:
        yield made


def test_a_step_in_the_others_memory_is_waited_for_and_shown_and_comes_back_on_one_new_host(hosts: Hosts) -> None:
    assert [(each["level"], each["step"]) for each in hosts.await_peer()] == [("peer", 1)] * 2
    hosts.go_to("n0")
    said = command(hosts.monkeypatch, "watch", str(hosts.url), "--once")
    assert next(line.split() for line in said.out.splitlines() if line.startswith("peer"))[1] == "1", said.out
    as_json = command(hosts.monkeypatch, "watch", str(hosts.url), "--once", "--json").json
    assert as_json["account"]["safe"]["peer"]["step"] == 1

    hosts.fail()
    hosts.kill_agent(0)
    (hosts.url / "data").unlink()
    hosts.go_to("n2")
    table = torch.zeros(ROWS, COLUMNS)
    seen = Seen()
    with ckpt.Checkpointer(hosts.url, {"table": table}, policy=LATER, sinks=(seen,)) as ck:
        assert (ck.restored.step, ck.restored.level) == (1, "peer")
        assert torch.equal(table, whole())
        assert {name for name in ck.receipt["bytes"] if name.startswith("restored")} == {"restored from peer"}
        assert not seen.wait("replication.placed").loud, "nobody could keep anything"


def test_without_a_file_a_job_on_one_of_the_hosts_still_finds_what_lies_on_the_others(
    hosts_without_file: Hosts,
) -> None:
    """As where a node that is left is late for the next start: an agent of this one knows the secret of the last."""
    hosts = hosts_without_file
    hosts.await_peer()
    hosts.fail()
    (hosts.url / "data").unlink()
    hosts.go_to("n0")
    table = torch.zeros(ROWS, COLUMNS)
    with ckpt.Checkpointer(hosts.url, {"table": table}, policy=LATER) as ck:
        assert (ck.restored.step, ck.restored.level) == (1, "peer")
        assert torch.equal(table, whole())
        read = ck.receipt["bytes"]
    assert {name for name in read if name.startswith("restored")} == {"restored from local", "restored from peer"}
