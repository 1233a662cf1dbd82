"""examples/launchers/ray_train.py under Ray: a worker is killed, and the end is compared with an undisturbed run's.

Ray listens on all interfaces, so it gets a network namespace that has nothing but the loopback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import ckpt
from tests.integrations.runs import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "launchers" / "ray_train.py"
STEPS = 240
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
LOCAL = (
    "import ray, runpy, sys; ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv.pop(1)); "
    "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, which is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs network namespaces: only root makes them"),
    pytest.mark.timeout(600),
]


@contextlib.contextmanager
def running(url: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The example, and Ray, which ends with it."""
    env = {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HOME": str(log.parent),
    }
    with tempfile.TemporaryDirectory(prefix="ckpt-ray", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        command = [*ALONE, sys.executable, "-c", LOCAL, ray_folder, str(EXAMPLE), str(url), f"--steps={STEPS}"]
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.kill()
            process.wait()


def workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [each for each in found if "".join(each.cmdline()).startswith("ray::RayTrainWorker")]


def test_ray_starts_the_workers_again_and_the_end_is_the_same(tmp_path: Path) -> None:
    disturbed, other = tmp_path / "run", tmp_path / "other"
    log = tmp_path / "log"
    with running(disturbed, log) as process:
        deadline = time.monotonic() + 200
        while len(list(disturbed.glob("commits/*"))) < 3:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        os.kill(workers(process)[1].pid, signal.SIGKILL)
        assert process.wait(240) == 0, log.read_text()
    with running(other, tmp_path / "other.log") as process:
        assert process.wait(240) == 0, (tmp_path / "other.log").read_text()
    with ckpt.open(str(disturbed)) as found, ckpt.open(str(other)) as wanted:
        assert found.newest is not None
        assert wanted.newest is not None
        assert (found.newest.step, found.newest.start) == (STEPS, 2)
        assert found.newest.values() == wanted.newest.values()
        assert found.newest.tensors.keys() == wanted.newest.tensors.keys()
        for name in wanted.newest.tensors:
            assert np.array_equal(found.newest.tensor(name), wanted.newest.tensor(name)), name
        for rank in wanted.newest.ranks:
            assert found.newest.rank_values(rank)["loaders"] == wanted.newest.rank_values(rank)["loaders"]
