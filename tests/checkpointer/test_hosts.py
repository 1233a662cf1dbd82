"""A job of ranks with an agent each, as on several machines (tests/checkpointer/hosts.py), and a job after it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import ckpt
from tests.checkpointer.hosts import COLUMNS, ROWS, whole
from tests.checkpointer.runs import LATER, kill_agent
from tests.checkpointer.scripts import torchrun

WORLD = 3


@pytest.mark.torchrun
def test_without_a_file_a_job_on_one_of_the_hosts_still_finds_what_lies_on_the_others(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a node that is left is late for the next start: an agent of this one knows the secret of the last. Of
    three, each has a part and a copy of another. The store takes claims and no data until all ranks have raised."""
    monkeypatch.setenv("CKPT_LAUNCH", "hosts")
    url, table = runtime_dir / "run", torch.zeros(ROWS, COLUMNS)
    url.mkdir()
    (url / "data").touch()
    script = torchrun(tmp_path / "log", WORLD, "tests.checkpointer.hosts", str(runtime_dir), CKPT_LINGER_S="60")
    try:
        for rank in range(WORLD):
            said = script.wait_for(lambda line, rank=rank: line.get("rank") == rank)
            assert (said["level"], said["step"]) == ("peer", 1)
        (runtime_dir / "end").touch()
        script.process.wait(60)
        (url / "data").unlink()
        monkeypatch.setenv("CKPT_RUNTIME_DIR", str(runtime_dir / "n0"))
        with ckpt.Checkpointer(url, {"table": table}, policy=LATER) as ck:
            assert (ck.restored.step, ck.restored.level) == (1, "peer")
            assert torch.equal(table, whole())
            read = {name for name in ck.receipt["bytes"] if name.startswith("restored")}
        assert read == {"restored from local", "restored from peer"}
    finally:
        for rank in range(WORLD):
            monkeypatch.setenv("CKPT_RUNTIME_DIR", str(runtime_dir / f"n{rank}"))
            with contextlib.suppress(AssertionError, OSError, ckpt.CkptError):  # it is gone
                kill_agent(url)
        if script.process.poll() is None:
            script.process.terminate()  # torchrun ends its workers
            script.process.wait(60)
