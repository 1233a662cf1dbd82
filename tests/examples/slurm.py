"""A Slurm cluster of one node on the loopback: munged, slurmctld and slurmd, which end with the `with` block.

It differs from a site's in two settings that save time: a requeued job starts after some seconds instead of two minutes
(cred_expire), and there is no accounting.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.servers import free_port

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian puts daemons
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
START_S = 60.0

CONF = """\
ClusterName=ckpt
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={at}/munge.sock,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=main Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there can be no such cluster here; "": there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return (
        f"needs Slurm: {', '.join(missing)} not installed (slurmctld, slurmd, slurm-client, munge)" if missing else ""
    )


class Cluster:
    def __init__(self, at: Path) -> None:
        self.at = at
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(at / "slurm.conf")}

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        """The output of one of Slurm's commands, which must succeed."""
        done = subprocess.run(command, env=self.env | (env or {}), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.log()}"
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.at.glob("*.log"))


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    at = Path(tempfile.mkdtemp(prefix="ckpt-slurm-", dir="/tmp"))
    at.chmod(0o755)  # munge's socket lies in it
    made = Cluster(at)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, at, ignore_errors=True)
        key = at / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(64))
        names = {"control": free_port(), "node": free_port(), "at": at, "user": getpass.getuser()}
        (at / "slurm.conf").write_text(CONF.format(host=socket.gethostname().partition(".")[0], **names))
        (at / "state").mkdir()
        (at / "spool").mkdir()
        munge = [f"--{name}={at}/munge.{end}" for name, end in (("socket", "sock"), ("pid-file", "pid"))]
        munge += [f"--key-file={key}", f"--seed-file={at}/munge.seed", f"--log-file={at}/munge.log"]
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D", "-N", "localhost"],
        ):
            stack.enter_context(_daemon(made, command))
        deadline = time.monotonic() + START_S
        while "idle" not in _states(made):
            assert time.monotonic() < deadline, f"no idle node: {_states(made)}\n{made.log()}"
            time.sleep(0.2)
        yield made


def _states(made: Cluster) -> str:
    done = subprocess.run(["sinfo", "--noheader", "--format=%T"], env=made.env, capture_output=True, text=True)
    return done.stdout + done.stderr


@contextlib.contextmanager
def _daemon(made: Cluster, command: list[str]) -> Iterator[None]:
    with (made.at / f"{command[0]}.out.log").open("wb") as out:
        process = subprocess.Popen(command, env=made.env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
