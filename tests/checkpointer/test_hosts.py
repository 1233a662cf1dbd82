"""A job of ranks with an agent each, as on several machines (tests/checkpointer/hosts.py), and a job after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ckpt
from tests.checkpointer.hosts import COLUMNS, LATER, ROWS, whole
from tests.checkpointer.runs import Seen, kill_agent
from tests.checkpointer.scripts import Script, torchrun
from tests.cli.stores import ckpt as command

pytestmark = pytest.mark.torchrun


@dataclass
class Hosts:
    """The launch, and where its agents are. `monkeypatch` chooses which one is asked."""

    folder: Path
    script: Script
    monkeypatch: pytest.MonkeyPatch

    @property
    def url(self) -> Path:
        return self.folder / "run"

    def go_to(self, name: str) -> None:
        self.monkeypatch.setenv("CKPT_RUNTIME_DIR", str(self.folder / name))

    def fail(self) -> None:
        """All ranks raise; the agents stay. From now on the store takes data."""
        (self.folder / "end").touch()
        self.script.process.wait(60)
        (self.url / "data").unlink()

    def kill_agent(self, rank: int) -> None:
        self.go_to(f"n{rank}")
        kill_agent(self.url)


Launch = Callable[[int], AbstractContextManager[Hosts]]


@pytest.fixture
def launched(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """So many, until all ranks say that their step is in another's memory. The store takes claims and no data: memory
    is all there is."""

    @contextlib.contextmanager
    def launch(world: int) -> Iterator[Hosts]:
        monkeypatch.setenv("CKPT_LAUNCH", "hosts")
        (runtime_dir / "run").mkdir()
        (runtime_dir / "run" / "data").touch()
        script = torchrun(tmp_path / "log", world, "tests.checkpointer.hosts", str(runtime_dir), CKPT_LINGER_S="60")
        made = Hosts(runtime_dir, script, monkeypatch)
        try:
            for rank in range(world):
                said = script.wait_for(lambda line, rank=rank: line.get("rank") == rank)
                assert (said["level"], said["step"]) == ("peer", 1)
            yield made
        finally:
            for rank in range(world):
                with contextlib.suppress(AssertionError, OSError, ckpt.CkptError):  # it is gone
                    made.kill_agent(rank)
            if script.process.poll() is None:
                script.process.terminate()  # torchrun ends its workers
                script.process.wait(60)

    return launch


def test_a_step_in_the_others_memory_is_waited_for_and_shown_and_comes_back_on_one_new_host(
    launched: Launch, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know the secret of a file."""
    monkeypatch.setenv("CKPT_SECRET_FILE", str(secret_file))
    with launched(2) as hosts:
        hosts.go_to("n0")
        said = command(monkeypatch, "watch", str(hosts.url), "--once")
        assert next(line.split() for line in said.out.splitlines() if line.startswith("peer"))[1] == "1", said.out
        as_json = command(monkeypatch, "watch", str(hosts.url), "--once", "--json").json
        assert as_json["account"]["safe"]["peer"]["step"] == 1
        hosts.fail()
        hosts.kill_agent(0)
        hosts.go_to("n2")
        table, seen = torch.zeros(ROWS, COLUMNS), Seen()
        with ckpt.Checkpointer(hosts.url, {"table": table}, policy=LATER, sinks=(seen,)) as ck:
            assert (ck.restored.step, ck.restored.level) == (1, "peer")
            assert torch.equal(table, whole())
            assert {name for name in ck.receipt["bytes"] if name.startswith("restored")} == {"restored from peer"}
            assert not seen.wait("replication.placed").loud, "nobody could keep anything"


def test_without_a_file_a_job_on_one_of_the_hosts_still_finds_what_lies_on_the_others(launched: Launch) -> None:
    """As where a node that is left is late for the next start: an agent of this one knows the secret of the last. Of
    three, each has a part and a copy of another."""
    with launched(3) as hosts:
        hosts.fail()
        hosts.go_to("n0")
        table = torch.zeros(ROWS, COLUMNS)
        with ckpt.Checkpointer(hosts.url, {"table": table}, policy=LATER) as ck:
            assert (ck.restored.step, ck.restored.level) == (1, "peer")
            assert torch.equal(table, whole())
            read = {name for name in ck.receipt["bytes"] if name.startswith("restored")}
        assert read == {"restored from local", "restored from peer"}
