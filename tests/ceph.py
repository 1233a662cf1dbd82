"""A whole Ceph object gateway on this machine, for tests and benchmarks: one monitor, one OSD in memory, one RGW.

    python -m tests.ceph        # starts one, prints its address and credentials, ends with Ctrl-C

Needs Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common. All addresses are on 127.0.0.1, everything is
written into a temporary folder, and the three processes are ended by their process ids. It is up in 10 to 20 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import obstore

from tests.servers import KEY_ID, SECRET, Server, free_port

START_S = 90.0
# The OSD in memory counts a little more as freed than it had counted as used. Below zero it would call itself full, and
# every write would hang. So this much is never deleted; it is enough for some 100 GB that are.
BALLAST_BYTES = 128 << 20
PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "ceph", "monmaptool", "radosgw-admin")

CONFIG = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}/0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
ms client mode = crc
ms service mode = crc
ms cluster mode = crc
admin socket = {at}/$name.asok
log file = {at}/$name.log
pid file =
run dir = {at}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data = {at}/mon
mon data avail warn = 1
mon data avail crit = 1
mon max pg per osd = 1000
osd data = {at}/osd
osd objectstore = memstore
memstore device bytes = {bytes_max}
mgr initial modules =
rgw data = {at}/rgw
rgw frontends = beast endpoint=127.0.0.1:{rgw} tcp_nodelay=1
rgw thread pool size = 32
rgw enable usage log = false
rgw enable ops log = false
rgw gc obj min wait = 1
rgw gc processor period = 1
rgw gc processor max time = 1
rgw dynamic resharding = false
rgw run sync thread = false
"""


def why_not() -> str | None:
    """Why it cannot be started here; None where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)} not found: install radosgw ceph-mon ceph-osd ceph-common" if missing else None


@contextlib.contextmanager
def ceph(bytes_max: int = 6 << 30) -> Iterator[Server]:
    """A running gateway with one bucket. `bytes_max`: what the OSD holds in memory at most."""
    at = Path(tempfile.mkdtemp(prefix="ckpt-ceph-"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield _start(at, bytes_max, started)
    finally:
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)  # nothing of it is kept
            process.wait(10)
        shutil.rmtree(at, ignore_errors=True)


def _start(at: Path, bytes_max: int, started: list[subprocess.Popen[bytes]]) -> Server:
    fsid, mon, rgw = str(uuid.uuid4()), free_port(), free_port()
    config = at / "ceph.conf"
    config.write_text(CONFIG.format(fsid=fsid, mon=mon, rgw=rgw, at=at, bytes_max=bytes_max))
    deadline_s = time.monotonic() + START_S

    def call(*words: str) -> str:
        left_s = deadline_s - time.monotonic()
        done = subprocess.run(words, capture_output=True, timeout=max(1.0, left_s), cwd=at, env=_environment(config))
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed: {done.stderr.decode()[-2000:]}")
        return done.stdout.decode()

    def run(*words: str) -> None:
        with open(at / f"{words[0]}.out", "wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, cwd=at, env=_environment(config))
        started.append(process)

    (at / "osd").mkdir()
    (at / "rgw").mkdir()
    call("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{mon}]", "--fsid", fsid, str(at / "monmap"))
    call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(at / "monmap"))
    run("ceph-mon", "-f", "-i", "a")
    osd_id = str(uuid.uuid4())
    call("ceph", "osd", "new", osd_id)
    call("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd_id)
    run("ceph-osd", "-f", "-i", "0")
    call("ceph", "osd", "require-osd-release", "pacific", "--yes-i-really-mean-it")
    while json.loads(call("ceph", "osd", "stat", "-f", "json"))["num_up_osds"] < 1:
        time.sleep(0.2)
    words = ["--uid", "test", "--display-name", "test", "--access-key", KEY_ID, "--secret", SECRET]
    call("radosgw-admin", "user", "create", *words)
    run("radosgw", "-f", "-n", "client.rgw")
    while time.monotonic() < deadline_s:
        if any(process.poll() is not None for process in started):
            raise RuntimeError(f"a Ceph process ended early; see {at}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", rgw), 1):
            server = Server("ceph", f"http://127.0.0.1:{rgw}", "bucket")
            server.make_bucket(server.bucket)
            server.make_bucket("ballast")
            obstore.put(server.objects("ballast"), "ballast", bytes(BALLAST_BYTES))
            return server
        time.sleep(0.2)
    raise RuntimeError(f"Ceph did not start within {START_S:g} s")


def _environment(config: Path) -> dict[str, str]:
    return {**os.environ, "CEPH_CONF": str(config), "CEPH_ARGS": ""}


if __name__ == "__main__":
    with ceph() as server:
        for name, value in server.environment().items():
            print(f"export {name}={value}", flush=True)
        print(f"# s3://{server.bucket}/... ; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
