"""A real export and two mounts of it on this machine, as two hosts have them: what one puts, the other one finds,
though each keeps names and attributes in a cache for 30 s."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ckpt.errors import NotFound
from ckpt.storage import open as open_store
from ckpt.storage.contract import Backend

OPTIONS = "vers=4.2,actimeo=30,nosharecache,soft,timeo=50"


def nfs_is_there() -> bool:
    """Whether the kernel serves NFS, and this user may have it."""
    known = Path("/proc/filesystems").read_text().split()
    tools = all(shutil.which(name) for name in ("exportfs", "rpc.nfsd", "rpc.mountd", "mount.nfs"))
    return os.geteuid() == 0 and tools and {"nfs4", "nfsd"} <= set(known)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Backend, Backend]]:
    """The store below two mounts."""
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
        stores = []
        for name in ("a", "b"):
            at = tmp_path / name
            at.mkdir()
            run("mount", "-t", "nfs4", "-o", OPTIONS, "127.0.0.1:/", str(at))
            stack.callback(run, "umount", "-l", str(at))
            stores.append(open_store(str(at / "run")))
            stack.callback(stores[-1].close)
        yield stores[0], stores[1]


def test_what_one_host_puts_the_other_lists_and_reads_at_once(hosts: tuple[Backend, Backend]) -> None:
    """Also where that host has looked before, and keeps in its cache that nothing is there."""
    ours, theirs = hosts
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
