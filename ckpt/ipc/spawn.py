"""Starts the process of an agent, and waits until it serves."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from ckpt.errors import AgentError


def spawn_agent(url: str, socket: Path, run_lock: Path, log: Path, deadline: float) -> bool:
    """Starts an agent. True once it serves; False if another agent holds the run lock (the new one says "busy")."""
    import ckpt

    package_dir = os.fspath(Path(ckpt.__file__).parent.parent)
    path = os.pathsep.join(p for p in (package_dir, os.environ.get("PYTHONPATH", "")) if p)
    command = [
        # The shell ends at once, so the agent is no child of the trainer.
        *("/bin/sh", "-c", '"$@" &', "sh"),
        *(sys.executable, "-P", "-m", "ckpt.agent.node.main", "--url", url, "--socket", os.fspath(socket)),
        *("--lock", os.fspath(run_lock), "--log", os.fspath(log), "--ready-fd"),
    ]
    ready_read, low = os.pipe()
    # A trainer without standard streams could get one of their numbers here. The agent needs those for its own streams.
    ready_write = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(low)
    try:
        try:
            with open(log, "ab") as said_there:
                subprocess.run(
                    [*command, str(ready_write)],
                    check=True,
                    stdin=subprocess.DEVNULL,
                    stdout=said_there,
                    stderr=said_there,
                    cwd="/",
                    env={**os.environ, "PYTHONPATH": path},
                    pass_fds=[ready_write],
                    start_new_session=True,
                )
        except (OSError, subprocess.CalledProcessError) as exc:
            raise AgentError(f"cannot start the agent ({sys.executable}): {exc}") from exc
        finally:
            os.close(ready_write)
        said = _read_ready(ready_read, deadline)
    finally:
        os.close(ready_read)
    if said in ("ok", "busy"):
        return said == "ok"
    tail = log.read_bytes()[-2000:].decode(errors="replace").strip() if log.exists() else ""
    logged = f"its log {log} ends with:\n{tail}" if tail else f"its log {log} is empty"
    raise AgentError(f"the agent did not start: {said or 'it ended at once'}; {logged}")


def _read_ready(fd: int, deadline: float) -> str:
    said = b""
    while not said.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return "it did not answer in time (if this machine is overloaded, start again later)"
        chunk = os.read(fd, 4096)
        if not chunk:
            break
        said += chunk
    return said.decode(errors="replace").strip()
