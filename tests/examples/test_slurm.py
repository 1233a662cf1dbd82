"""examples/launchers/slurm.sbatch on a real cluster of one node: slurmctld, slurmd and munged."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.examples import slurm
from tests.examples.slurm import Cluster
from tests.integrations.runs import REPOSITORY, Script, undisturbed

PROGRAM = REPOSITORY / "tests" / "examples" / "launched.py"
STEPS = 800
WAIT_S = 180.0

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    if why := slurm.why_not():
        pytest.skip(why)
    with slurm.cluster() as made:
        yield made


class Job:
    """examples/launchers/slurm.sbatch, submitted."""

    def __init__(self, site: Cluster, tmp_path: Path, *options: str, every: int = 1_000_000) -> None:
        self.site, self.log, self.records = site, tmp_path, tmp_path / "records"
        env = {
            "PATH": f"{Path(sys.executable).parent}:{slurm.PATH}",
            "PYTHONPATH": str(REPOSITORY),
            "RECORDS": str(self.records),
            "CKPT_NOTICES": "given",  # signals are, the firmware's cloud is not
        }
        sbatch = ["sbatch", "--parsable", f"--output={tmp_path}/log-%A_%a.txt", f"--chdir={REPOSITORY}", *options]
        program = ["examples/launchers/slurm.sbatch", str(PROGRAM), str(tmp_path / "run"), f"--steps={STEPS}"]
        self.id = site.run(*sbatch, *program, "--pace=0.1", f"--every={every}", env=env)

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in sorted(self.log.glob("log-*")))

    def steps(self, member: str = "", rank: int = 0) -> list[int]:
        return [each.step for each in Script(PROGRAM, self.records / member).steps(rank)]

    def state(self, member: str = "") -> dict[str, str]:
        """What `scontrol show job` says of it."""
        return self.site.job(f"{self.id}_{member}" if member else self.id)

    def wait(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what():
            failed = "JobState=FAILED" in self.site.run("scontrol", "show", "job", self.id)
            if failed or time.monotonic() > deadline:
                raise AssertionError(f"{self.site.run('squeue', '--array')}\n{self.said()}\n{self.site.log()}")
            time.sleep(0.2)


def test_each_member_of_an_array_leaves_before_its_limit_is_requeued_and_goes_on(site: Cluster, tmp_path: Path) -> None:
    job = Job(site, tmp_path, "--array=0-1")
    members = ("0", "1")
    job.wait(lambda: all(len(job.steps(member)) > 20 for member in members))
    site.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=3")  # of which 180 s are left to the script's signal
    began_s = time.time()
    job.wait(lambda: all(job.state(member)["Restarts"] == "1" for member in members))
    assert time.time() < began_s + 120, "and not because the limit had come"
    site.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    job.wait(lambda: all(job.state(member)["JobState"] == "COMPLETED" for member in members))
    wanted = undisturbed(PROGRAM, tmp_path, STEPS)
    for member in members:
        found = Script(PROGRAM, job.records / member)
        said = (tmp_path / f"log-{job.id}_{member}.txt").read_text()
        (left,) = {int(each) for each in re.findall(r"restored (\d+) from store", said)}
        assert 20 < left < STEPS
        assert "signal SIGUSR1" in said
        for rank in range(2):
            assert job.steps(member, rank) == list(range(1, STEPS + 1)), "each step once, over both starts"
            assert found.trajectory(rank) == wanted.trajectory(rank)
            assert len({each.pid for each in found.steps(rank)}) == 2


def test_a_preempted_job_leaves_in_order_and_goes_on(site: Cluster, tmp_path: Path) -> None:
    job = Job(site, tmp_path)
    job.wait(lambda: len(job.steps()) > 20)
    site.run("scontrol", "requeue", job.id)  # what PreemptMode=REQUEUE does
    job.wait(lambda: job.state()["JobState"] == "COMPLETED")
    assert job.steps() == job.steps(rank=1) == list(range(1, STEPS + 1))
    assert f"signal {signal.SIGTERM.name}" in job.said()


def test_a_job_that_lost_a_rank_is_requeued_and_goes_on_from_the_newest_commit(site: Cluster, tmp_path: Path) -> None:
    job = Job(site, tmp_path, every=50)
    job.wait(lambda: len(job.steps()) > 60)
    os.kill(Script(PROGRAM, job.records).steps(rank=1)[-1].pid, signal.SIGKILL)
    job.wait(lambda: job.state()["JobState"] == "COMPLETED")
    assert job.state()["Restarts"] == "1"
    (restored,) = {int(each) for each in re.findall(r"restored ([1-9]\d*) from", job.said())}
    assert restored >= 50
    wanted = undisturbed(PROGRAM, tmp_path, STEPS)
    for rank in range(2):
        assert Script(PROGRAM, job.records).trajectory(rank) == wanted.trajectory(rank)


def test_a_cancelled_job_leaves_in_order_and_is_not_requeued(site: Cluster, tmp_path: Path) -> None:
    job = Job(site, tmp_path)
    job.wait(lambda: len(job.steps()) > 20)
    site.run("scancel", job.id)
    job.wait(lambda: job.state()["JobState"] == "CANCELLED")
    job.wait(lambda: "notice.outcome" in job.said())
    assert job.state()["Restarts"] == "0"
    assert job.steps() == job.steps(rank=1), "both ranks left at one step"
