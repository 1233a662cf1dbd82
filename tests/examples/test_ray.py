"""examples/launchers/ray_train.py under Ray: a worker is killed, or its node is announced to go and goes. The ends are
compared with an undisturbed run's.

Ray listens on all interfaces, so it gets a network namespace that has nothing but the loopback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

import ckpt
from tests.integrations.runs import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "launchers" / "ray_train.py"
CLUSTER = Path(__file__).with_name("ray_cluster.py")
STEPS, REPORT_EVERY = 400, 20
LEFT_S = 20  # from the announcement until the node is gone
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, which is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs network namespaces: only root makes them"),
    pytest.mark.timeout(900),
]


@dataclass
class Job:
    """The example on a cluster of Ray. `folder` holds the run, Ray's books and the log."""

    process: subprocess.Popen[bytes]
    folder: Path

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def wait_for_commits(self, count: int) -> None:
        deadline_s = time.monotonic() + 200
        while len(list(self.folder.glob("run/commits/*"))) < count:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.02)

    def wait(self) -> None:
        assert self.process.wait(300) == 0, self.log()

    def workers(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in found if "".join(each.cmdline()).startswith("ray::RayTrainWorker")]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Job]:
    """The example, and Ray, which ends with it."""
    folder.mkdir()
    env = {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
        "CKPT_NOTICES": "given",  # the file only
        "CKPT_EVENTS": str(folder / "events"),
        "HOME": str(folder),
    }
    with tempfile.TemporaryDirectory(prefix="ckpt-ray", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        command = [*ALONE, sys.executable, CLUSTER, folder / "drain"]
        command += [EXAMPLE, folder / "run", folder / "ray", f"--steps={STEPS}"]
        env["RAY_TMPDIR"] = ray_folder
        with (folder / "log").open("wb") as out:
            process = subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield Job(process, folder)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    with running(folder) as job:
        job.wait()
    return folder


def reports(folder: Path) -> dict[int, set[float]]:
    """The losses that Ray's books have of each step."""
    found: dict[int, set[float]] = {}
    for file in folder.glob("ray/books/step-*/.metadata.json"):
        entry = json.loads(file.read_text())
        assert entry["url"] == str(folder / "run")
        found.setdefault(entry["step"], set()).add(entry["loss"])
    return found


def is_the_end_of(found_in: Path, wanted_in: Path) -> None:
    """The ends of two runs are the same, and so is each reported loss."""
    with ckpt.open(found_in / "run") as found, ckpt.open(wanted_in / "run") as wanted:
        assert (found.newest.step, found.newest.start) == (STEPS, 2)
        assert found.newest.values() == wanted.newest.values()
        assert found.newest.tensors.keys() == wanted.newest.tensors.keys()
        for name in wanted.newest.tensors:
            assert np.array_equal(found.newest.tensor(name), wanted.newest.tensor(name)), name
        for rank in wanted.newest.ranks:
            assert found.newest.rank_values(rank)["loaders"] == wanted.newest.rank_values(rank)["loaders"]
    assert reports(found_in) == reports(wanted_in)


def test_what_ray_has_in_its_books_names_checkpoints_in_the_store(undisturbed: Path) -> None:
    with ckpt.open(undisturbed / "run") as run:
        assert set(reports(undisturbed)) == {each.step for each in run.checkpoints}
        assert set(reports(undisturbed)) == set(range(REPORT_EVERY, STEPS + 1, REPORT_EVERY))
    said = f"Ray's newest checkpoint is step {STEPS} of {undisturbed / 'run'}\n"
    assert said in (undisturbed / "log").read_text()


def test_ray_starts_the_workers_again_and_the_end_is_the_same(tmp_path: Path, undisturbed: Path) -> None:
    with running(tmp_path / "job") as job:
        job.wait_for_commits(3)
        os.kill(job.workers()[1].pid, signal.SIGKILL)
        job.wait()
    is_the_end_of(job.folder, undisturbed)


def test_all_workers_leave_at_one_step_before_an_announced_node_is_gone(tmp_path: Path, undisturbed: Path) -> None:
    with running(tmp_path / "job") as job:
        job.wait_for_commits(2)
        (job.folder / "part").write_text(str(LEFT_S))
        (job.folder / "part").rename(job.folder / "drain")
        job.wait()
    log = job.log()
    assert len(re.findall(r"Rank [01] received preemption signal .*preempted_ranks=\[0, 1\]", log)) == 2
    events = [json.loads(line) for line in (job.folder / "events").read_text().splitlines()]
    (left,) = [each for each in events if each["event"] == "notice.outcome"]
    assert (left["how"], left["level"]) == ("left", "store")
    assert [name.split()[0] for name in left["notices"]] == ["file"]
    assert left["left_s"] > 0.0
    assert set(re.findall(r"ckpt: resumed at step (\d+) from", log)) == {str(left["step"])}
    is_the_end_of(job.folder, undisturbed)
    assert len(list(job.folder.glob("ray/books/step-*"))) == STEPS // REPORT_EVERY, "no step is trained twice"
