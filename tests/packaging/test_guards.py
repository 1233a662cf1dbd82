"""What tests/conftest.py watches over: leaks fail the test that leaked, and in CI a skip fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def _pytest(folder: Path, body: str, settle_s: float = 0.2, **env: str) -> str:
    source = CONFTEST.read_text().replace("SETTLE_S = 60.0", f"SETTLE_S = {settle_s}")
    assert f"SETTLE_S = {settle_s}" in source
    (folder / "conftest.py").write_text(source)
    (folder / "test_it.py").write_text("import os, socket, subprocess, sys, threading, time, pytest\n" + body)
    clean = {k: v for k, v in os.environ.items() if k != "CI"} | env
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", str(folder)]
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=240)
    return done.stdout


LEAKS = """
KEEP = []

def test_a_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def test_a_file(tmp_path):
    os.open(tmp_path / "f", os.O_CREAT)

def test_a_memfd():
    os.memfd_create("arena")

def test_a_pidfd():
    os.pidfd_open(os.getpid())

def test_a_pipe():
    os.pipe()

def test_a_child():
    KEEP.append(subprocess.Popen(["sleep", "60"]))

def test_an_agent():
    subprocess.run("setsid sleep 60 >/dev/null 2>&1 & sleep 0.5", shell=True)
"""


def test_each_leak_fails_the_test_that_leaked(tmp_path: Path) -> None:
    said = _pytest(tmp_path, LEAKS)
    for name in re.findall(r"def (test_\w+)", LEAKS):
        assert re.search(rf"ERROR test_it.py::{name} .*the test left behind", said), name


def test_a_test_that_cleans_up_passes(tmp_path: Path) -> None:
    body = """
def test_x(tmp_path, seed):
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()
    subprocess.run(["true"])
    os.close(os.memfd_create("arena"))
    with open(tmp_path / "f", "w") as file:
        file.write(os.environ["CKPT_RUNTIME_DIR"])
    assert os.environ["CKPT_LINGER_S"] == "0"
"""
    said = _pytest(tmp_path, body, settle_s=30.0)
    assert "1 passed" in said.splitlines()[-1]  # the closing line stays the last one
    assert "seed of this test:" in said


SKIPS = """
def test_allowed():
    pytest.skip("needs a CUDA device")

@pytest.mark.skipif(True, reason="rclone is not there")
def test_silent():
    pass

@pytest.mark.xfail(strict=True)
def test_known():
    assert False
"""


def test_a_skip_fails_in_ci_unless_its_reason_is_allowed(tmp_path: Path) -> None:
    said = _pytest(tmp_path, SKIPS, CI="true")
    assert "1 skipped, 1 xfailed, 1 error" in said.splitlines()[-1]
    assert "rclone is not there" in said
    assert "2 skipped, 1 xfailed" in _pytest(tmp_path, SKIPS).splitlines()[-1]


def test_a_skipped_module_fails_in_ci(tmp_path: Path) -> None:
    body = "pytest.importorskip('no_such_module')\n"
    assert "1 error" in _pytest(tmp_path, body, CI="true").splitlines()[-1]


def test_a_seed_is_replayed(tmp_path: Path) -> None:
    body = "def test_x(seed):\n    assert False\n"
    first, second = (_pytest(tmp_path, body, CKPT_TEST_SEED="7") for _ in range(2))
    line = next(line for line in first.splitlines() if line.startswith("seed of this test:"))
    assert line in second
    assert "seed: 7 (CKPT_TEST_SEED=7 replays it)" in first
