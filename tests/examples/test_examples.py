"""The example loops, as users run them: `ckpt rehearse` kills each in mid-run, starts it again and compares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.stores import ckpt

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("script", "steps", "options"),
    [
        pytest.param(["one_device.py"], "1500", ["--at", "20"], id="one device, from memory"),
        pytest.param(["own_loop.py"], "2500", ["--at", "500", "--lose-memory"], id="own loop, from the store"),
        pytest.param([*TORCHRUN, "fsdp2.py"], "100", ["--at", "40"], id="FSDP2", marks=pytest.mark.torchrun),
    ],
)
def test_an_example_restarts_bit_for_bit(
    script: list[str], steps: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "60")  # the agent keeps the memory until the next start
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = [sys.executable, "-W", "ignore", *script[:-1], ROOT / "examples" / script[-1]]
    said = ckpt(
        monkeypatch, "rehearse", tmp_path / "run", "--json", *options, "--", *program, "{url}", "--steps", steps
    )
    assert said.code == 0, said.out + said.err
    body = said.json
    assert body["step"] == int(steps)
    assert body["killed_after"] < int(steps)
    assert all("['python']" in part or "['numpy']" in part for part in body["unused"])


def test_a_running_job_can_be_watched_pruned_and_asked_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "one_device.py"), str(tmp_path / "run")]
    job = subprocess.Popen([*program, "--steps", "1000000"], stdout=subprocess.PIPE, text=True)
    with job:
        assert job.stdout is not None
        try:
            while len(ckpt(monkeypatch, "ls", tmp_path / "run", "--json").json.get("checkpoints", ())) < 3:
                assert job.stdout.readline(), "the job ended by itself"
            seen = ckpt(monkeypatch, "watch", tmp_path / "run", "--once", "--json").json
            assert seen["job"]["world"] == 1
            pruned = ckpt(monkeypatch, "prune", tmp_path / "run", "--last", "1", "--yes", "--json").json
            assert len(pruned["retire"]) >= 2
            asked = ckpt(monkeypatch, "preempt", tmp_path / "run", "--deadline-s", "60")
            assert asked.code == 0, asked.err
            job.stdout.read()
            assert job.wait(60) == 143
        finally:
            job.kill()
    left = ckpt(monkeypatch, "ls", tmp_path / "run", "--json").json["checkpoints"]
    assert ckpt(monkeypatch, "verify", tmp_path / "run").code == 0
    assert left[-1]["step"] > 20
    said = ckpt(monkeypatch, "watch", tmp_path / "run", "--once")
    assert (said.code, "none runs" in said.out) == (0, True)
