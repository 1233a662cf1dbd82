"""How much memory beside the state does a restore need, through the whole of ckpt?

    python -m benchmarks.peak [--small] [--server ceph|rclone ...] [--json FILE]

A trainer in a process of its own has its state in memory, enters, and gets it back from a local folder and from S3;
the agent that served the save is gone, and with it what it kept. Measured by the kernel (VmHWM), from before the block
to when the last tensor is complete: in the trainer what the peak rises above what was resident, so above its state; in
the agent, which starts anew, all of it. Shared memory counts in each process that touched it: the window through which
frames go, and the arenas of the next snapshots as far as they are made by then (they are not the restore's; printed).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

import ckpt
from benchmarks.report import Row, forget_peak, parser, peak_bytes, report, resident_bytes, shared_bytes
from benchmarks.stall import job
from ckpt.trainer.restore import restore
from tests import ceph, servers
from tests.servers import Server

BAR_MIB = 256
SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {"ceph": ceph.ceph, "rclone": servers.rclone}


def save(url: str, total: int) -> None:
    """Leaves one checkpoint in the store."""
    model, optim = job(total)
    with ckpt.Checkpointer(url, {"model": model, "optim": optim}, policy=ckpt.Every(steps=10**8), codec="raw") as ck:
        ck.step()


def load(url: str, total: int, out: str) -> None:
    """Writes to the file `out`: bytes of the trainer's peak above its state, how much of that is shared memory, and
    the agent's peak, all as of when the last tensor is there."""
    model, optim = job(total)
    optim.zero_grad(set_to_none=True)
    inner = restore.fill

    def watched(*args: object) -> dict[str, int]:
        found = inner(*args)  # type: ignore[arg-type]
        link = args[0]
        body = {
            "above": peak_bytes() - before,
            "shared": shared_bytes(),
            "agent": peak_bytes(link.connection.agent_pid),  # type: ignore[attr-defined]
            "sources": found,
        }
        Path(out).write_text(json.dumps(body))
        return found

    restore.fill = watched  # type: ignore[assignment]
    forget_peak()
    before = resident_bytes()
    with ckpt.Checkpointer(url, {"model": model, "optim": optim}, policy=ckpt.Every(steps=10**8), codec="raw") as ck:
        assert ck.restored.level == "store", ck.restored


def measure(url: str, total: int, folder: str, label: str, environment: dict[str, str]) -> list[Row]:
    for number, call in enumerate((f"save({url!r}, {total})", f"load({url!r}, {total}, {folder + '/out'!r})")):
        # An agent of its own for each, so that nothing comes from memory; it ends soon after its trainer.
        env = {**os.environ, **environment, "CKPT_RUNTIME_DIR": f"{folder}/agent{number}", "CKPT_LINGER_S": "1"}
        code = f"from benchmarks.peak import load, save; {call}"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1], env=env)
    found = json.loads(Path(folder, "out").read_text())
    assert set(found["sources"]) == {"store"}, found
    above, shared, agent = (found[name] / 2**20 for name in ("above", "shared", "agent"))
    return [
        Row(f"{label}: trainer, above its state", above, "MiB", f"at most {BAR_MIB} MiB", above <= BAR_MIB),
        Row(f"{label}: ... shared memory in it at the end", shared, "MiB", "printed", None),
        Row(f"{label}: agent, all of it", agent, "MiB", "printed", None),
    ]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--server", action="append", choices=sorted(SERVERS), help="by default all that can be started")
    args = made.parse_args()
    torch.set_num_threads(1)
    total = (32 << 20) if args.small else (512 << 20)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        rows += measure(f"{folder}/run", total, folder, f"{total >> 20} MiB from a local folder", {})
    for name in args.server or [name for name in SERVERS if name != "ceph" or ceph.why_not() is None]:
        with SERVERS[name]() as server, tempfile.TemporaryDirectory() as folder:
            label = f"{total >> 20} MiB from {name}"
            rows += measure(f"s3://{server.bucket}/run", total, folder, label, server.environment())
    return report("peak", rows, args)


if __name__ == "__main__":
    sys.exit(main())
