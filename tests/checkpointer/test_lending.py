"""A Checkpointer of one process beside a memory-only node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from tests.checkpointer.runs import Seen


class Fails(Exception):
    pass


@pytest.fixture
def peer(tmp_path: Path, secret_file: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where it listens. CKPT_PEERS and CKPT_SECRET_FILE are set."""
    monkeypatch.setenv("CKPT_SECRET_FILE", str(secret_file))
    command = [sys.executable, "-m", "ckpt.cli.main", "agent", str(tmp_path / "run")]
    command += ["--listen", "127.0.0.1:0", "--memory", "64MiB"]
    env = {**os.environ, "CKPT_RUNTIME_DIR": str(runtime_dir / "stable")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        at = process.stdout.readline().split()[-1]
        monkeypatch.setenv("CKPT_PEERS", at)
        yield at
        process.terminate()


def test_one_process_waits_until_its_step_is_in_the_memory_of_another_machine_and_goes_on_from_there(
    peer: str, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job raises, so that its copies stay; and its agent is not asked: the next has another folder. It does so once
    a copy was there before the commit: what is in the store already is not copied any more."""
    last, seen, state = -1, Seen(), {"w": torch.arange(1000.0)}
    with contextlib.suppress(Fails), ckpt.Checkpointer(tmp_path / "run", state, sinks=(seen,)) as ck:
        for step in ck.steps(1000):
            saved = ck.save()  # of the step before, which has ended
            ck.wait(level="peer", timeout_s=60)
            assert saved.level in ("peer", "store")
            if saved.level == "peer":
                last = step - 1
                raise Fails
    joined = [event.message for event in seen.named("memory_node.joined")]
    assert joined == [f"the memory-only node at {peer} lends 64 MiB"]
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(runtime_dir / "elsewhere"))
    weight = torch.zeros(1000)
    with ckpt.Checkpointer(tmp_path / "run", {"w": weight}) as ck:
        assert (ck.restored.step, ck.restored.level) == (last, "peer")
        assert torch.equal(weight, torch.arange(1000.0))
        assert {name for name in ck.receipt["bytes"] if name.startswith("restored")} == {"restored from peer"}


@pytest.mark.parametrize("variable", ["CKPT_SECRET_FILE", "CKPT_PEERS", "CKPT_LISTEN", "CKPT_RUNTIME_DIR"])
def test_a_setting_that_is_missing_or_no_address_is_named(
    variable: str, peer: str, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime folder has to be another one than that of the agent that lends, on its machine."""
    monkeypatch.setenv(variable, str(runtime_dir / "stable") if variable == "CKPT_RUNTIME_DIR" else "nowhere")
    if variable == "CKPT_SECRET_FILE":
        monkeypatch.delenv(variable)
    with pytest.raises(ckpt.CkptError, match=variable):
        ckpt.Checkpointer(tmp_path / "run", {"w": torch.arange(10.0)}).__enter__()
