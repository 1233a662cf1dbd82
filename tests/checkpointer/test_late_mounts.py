"""Two mounts of one folder, as two machines have them. Each keeps the names of a folder in a cache for some seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import ckpt
from tests.checkpointer.loops import make, wait_agent_gone
from tests.checkpointer.runs import Seen, run
from tests.servers import program


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Of two programs of rclone, each of which keeps the names for a while."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None:
        pytest.skip("needs FUSE")
    (tmp_path / "folder").mkdir()
    with ExitStack() as stack:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            words = [program("rclone"), "--config", os.devnull, "mount", tmp_path / "folder", tmp_path / name]
            words += ["--dir-cache-time", "15s", "--vfs-cache-mode", "writes"]
            words += ["--cache-dir", tmp_path / f"cache-{name}"]
            process = stack.enter_context(subprocess.Popen(words, stderr=subprocess.DEVNULL))
            stack.callback(process.terminate)
            deadline = time.monotonic() + 30
            while not os.path.ismount(tmp_path / name):
                assert process.poll() is None, "it ended"
                assert time.monotonic() < deadline, "it does not mount"
                time.sleep(0.05)
        yield tmp_path / "a", tmp_path / "b"


def test_a_start_on_a_late_mount_says_so_and_then_what_it_has_missed(
    mounts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = mounts
    monkeypatch.setenv("CKPT_LAUNCH", "job")
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "1")
    assert list(second.iterdir()) == [], "from now on its cache says that nothing is there"

    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "host-1"))
    assert len(run(first / "run", 4).seen.named("store.late")) == 1

    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "host-2"))
    job, seen = make(seed=1), Seen()
    with ckpt.Checkpointer(second / "run", job.state, sinks=(seen,)) as ck:
        assert ck.restored.step == 0
        told = seen.wait("store.late")
        assert told.loud
        assert "fuse.rclone" in told.message
        deadline = time.monotonic() + 90
        for step in ck.steps(10**6):
            job.train(step)
            if seen.named("restore.overlooked"):
                break
            assert time.monotonic() < deadline, "nobody is told of step 4"
            time.sleep(0.05)
    wait_agent_gone(second / "run")
    assert "step 4 of epoch 1" in seen.named("restore.overlooked")[0].message
