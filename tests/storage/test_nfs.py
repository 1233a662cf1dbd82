"""A real export and two mounts of it on this machine, as two hosts have them: what one puts, the other one finds,
though each keeps names and attributes in a cache for 30 s. A kernel without an NFS server runs these tests in
user-mode Linux."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import NotFound
from ckpt.storage import open as open_store
from tests.checkpointer.loops import make, wait_agent_gone

OPTIONS = "vers=4.2,actimeo=30,nosharecache,soft,timeo=50"
ROOT = Path(__file__).parents[2]
# The first process of user-mode Linux. Its root is this machine's, so it writes to its own /mnt and /run alone.
INIT = """#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm
for place in /dev/shm /run /mnt /tmp /var/lib/nfs; do mount -t tmpfs tmpfs $place; done
mkdir -p /run/modules/lib /var/lib/nfs/sm /var/lib/nfs/v4recovery
ln -s /usr/lib/uml/modules /run/modules/lib/modules
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
ip link set lo up
modprobe --dirname /run/modules --all nfsd nfsv4
cd {root}
{python} -m pytest --color=no -p no:cacheprovider -k "not user_mode" --basetemp=/mnt/tests tests/storage/test_nfs.py
echo o > /proc/sysrq-trigger
sleep 60
"""


def nfs_is_there() -> bool:
    """Whether the kernel serves NFS, and this user may have it."""
    known = Path("/proc/filesystems").read_text().split()
    tools = all(shutil.which(name) for name in ("exportfs", "rpc.nfsd", "rpc.mountd", "mount.nfs"))
    return os.geteuid() == 0 and tools and {"nfs4", "nfsd"} <= set(known)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder below two mounts."""
    if not nfs_is_there():
        pytest.skip("needs an NFS server in the kernel")
    exported = tmp_path / "exported"
    exported.mkdir()

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    with ExitStack() as stack:
        if not Path("/proc/fs/nfsd/threads").exists():
            run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
        mountd = stack.enter_context(subprocess.Popen(["rpc.mountd", "-F", "-N", "3"], stderr=subprocess.DEVNULL))
        stack.callback(mountd.terminate)
        run("exportfs", "-o", "rw,no_root_squash,insecure,fsid=0", f"127.0.0.1:{exported}")
        stack.callback(run, "exportfs", "-u", f"127.0.0.1:{exported}")
        run("rpc.nfsd", "-N", "3", "2")
        stack.callback(run, "rpc.nfsd", "0")
        for name in ("a", "b"):
            at = tmp_path / name
            at.mkdir()
            run("mount", "-t", "nfs4", "-o", OPTIONS, "127.0.0.1:/", str(at))
            stack.callback(run, "umount", "-l", str(at))
        yield tmp_path / "a" / "run", tmp_path / "b" / "run"


def test_what_one_host_puts_the_other_lists_and_reads_at_once(hosts: tuple[Path, Path]) -> None:
    """Also where that host has looked before, and keeps in its cache that nothing is there."""
    with closing(open_store(str(hosts[0]))) as ours, closing(open_store(str(hosts[1]))) as theirs:
        for number in range(3):
            keys = [f"commits/{number}", f"data/{number}/pack"]
            for key in keys:
                with suppress(NotFound):
                    theirs.head(key)
            before = [info.key for info in theirs.list("")]
            for key in keys:
                ours.put(key, [b"record"])
            assert [info.key for info in theirs.list("")] == sorted([*before, *keys])
            assert {theirs.get(key, 100) for key in keys} == {b"record"}


def test_a_start_on_another_host_goes_on_from_what_this_one_has_committed(
    hosts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LAUNCH", "job")
    for number, last in enumerate((2, 4, 6)):
        monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / f"host-{number % 2}"))
        url, job = hosts[number % 2], make(seed=number)
        with ckpt.Checkpointer(url, job.state) as ck:
            assert ck.restored.step == last - 2
            for step in ck.steps(last):
                job.train(step)
        wait_agent_gone(url)


def test_in_user_mode_linux_all_of_this_holds(tmp_path: Path) -> None:
    if nfs_is_there():
        return
    if os.geteuid() != 0 or shutil.which("linux.uml") is None or shutil.which("rpc.nfsd") is None:
        pytest.skip("needs an NFS server in the kernel, or user-mode Linux")
    init = tmp_path / "init"
    init.write_text(INIT.format(root=ROOT, python=sys.executable))
    init.chmod(0o755)
    machine = ["linux.uml", "mem=2G", "rootfstype=hostfs", "rootflags=/", "rw", f"init={init}", "con=null"]
    with subprocess.Popen(
        [*machine, "con0=null,fd:1"], stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=300)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if "as init process" not in said:
        pytest.skip("needs an NFS server in the kernel, or to trace processes for user-mode Linux")
    if "ptrace set fp regs failed" in said:
        pytest.skip("needs an NFS server in the kernel: user-mode Linux does not know this processor's registers")
    assert "2 passed" in said, said[-8000:]
