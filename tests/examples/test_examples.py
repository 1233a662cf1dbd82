"""The example loops, as users run them: `ckpt rehearse` kills each in mid-run, starts it again and compares."""

from __future__ import annotations

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
