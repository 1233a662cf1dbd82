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
from ckpt.errors import UsageError


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


def test_one_process_waits_until_its_step_is_in_the_memory_of_another_machine(peer: str, tmp_path: Path) -> None:
    told: list[ckpt.Event] = []
    with ckpt.Checkpointer(tmp_path / "run", {"w": torch.arange(1000.0)}, sinks=(told.append,)) as ck:
        for _ in ck.steps(3):
            saved = ck.save()
            ck.wait(level="peer", timeout_s=60)
            assert saved.level in ("peer", "store")
    assert [event.message for event in told if event.name == "memory_node.joined"] == [
        f"the memory-only node at {peer} lends 64 MiB"
    ]


def test_the_receipt_of_a_start_says_that_all_of_it_came_from_there(
    peer: str, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job raises, so that its copies stay; and its agent is not asked: the next has another folder. It does so once
    a copy was there before the commit: what is in the store already is not copied any more."""
    last = -1
    with contextlib.suppress(Fails), ckpt.Checkpointer(tmp_path / "run", {"w": torch.arange(1000.0)}) as ck:
        for step in ck.steps(1000):
            saved = ck.save()  # of the step before, which has ended
            saved.wait(level="peer", timeout_s=60)
            if saved.level == "peer":
                last = step - 1
                raise Fails
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(runtime_dir / "elsewhere"))
    weight = torch.zeros(1000)
    with ckpt.Checkpointer(tmp_path / "run", {"w": weight}) as ck:
        assert (ck.restored.step, ck.restored.level) == (last, "peer")
        assert torch.equal(weight, torch.arange(1000.0))
        assert {name for name in ck.receipt["bytes"] if name.startswith("restored")} == {"restored from peer"}


def test_without_the_secret_it_says_what_is_missing(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_SECRET_FILE")
    with (
        pytest.raises(UsageError, match="CKPT_SECRET_FILE"),
        ckpt.Checkpointer(tmp_path / "run", {"w": torch.arange(10.0)}),
    ):
        pass


@pytest.mark.parametrize("variable", ["CKPT_PEERS", "CKPT_LISTEN"])
def test_what_is_no_address_is_named(variable: str, peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "nowhere")
    with pytest.raises(UsageError, match=variable), ckpt.Checkpointer(tmp_path / "run", {"w": torch.arange(10.0)}):
        pass


def test_on_the_machine_that_lends_it_says_what_to_do(
    peer: str, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(runtime_dir / "stable"))
    with (
        pytest.raises(ckpt.CkptError, match="another CKPT_RUNTIME_DIR"),
        ckpt.Checkpointer(tmp_path / "run", {"w": torch.arange(10.0)}),
    ):
        pass
