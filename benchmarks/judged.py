"""A training script for an independent judge of crash consistency: ckpt-chaos (PyPI), which kills at each file event.

    ckpt-chaos run --step-regex "resumed from step (\\d+)" --result-file "{out}/final" --max-points 100 -- \\
        python -c "from benchmarks.judged import main; main()" {out} trainer

The judge arms the first Python process of a tree only: it says CKPT_CHAOS_ARMED to the ones below. ckpt's files are
written by its agent, so that way it sees none of them. The agent inherits the trainer's environment, sitecustomize on
PYTHONPATH among it. So with CKPT_CHAOS_ARMED=1 set around the judge and `agent` or `node` as the last word, this script
takes the variable away while the first agent starts, and that agent is armed instead.

- trainer: the trainer is killed.
- agent: the agent is killed; the trainer goes on with the next one.
- node: the agent is killed, and the trainer kills itself as soon as it is.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

import ckpt
from benchmarks.contenders import Job

ARMED = "CKPT_CHAOS_ARMED"
STEPS, EVERY = 6, 2


def main() -> None:
    out, armed = sys.argv[1:3]
    os.environ |= {"CKPT_HEARTBEAT_S": "0.5", "CKPT_LINGER_S": "0", "CKPT_NOTICES": "off"}
    os.environ["CKPT_RUNTIME_DIR"] = f"{out}-runtime"
    job = Job(1 << 20, layers=2)
    if armed != "trainer":
        os.environ.pop(ARMED, None)
    state = {"model": job.model, "optim": job.optim}
    with ckpt.Checkpointer(f"{out}/run", state, policy=ckpt.Every(steps=EVERY), peers=None) as ck:
        os.environ[ARMED] = "1"  # the next agent, and what else is started, is left alone
        print(f"resumed from step {ck.restored.step}", flush=True)
        if armed == "node":
            threading.Thread(target=_die_with, args=(_agent(out),), daemon=True).start()
        for _ in ck.steps(STEPS):
            job.optim.step()
    Path(out).mkdir(exist_ok=True)
    Path(out, "final").write_text(job.digest())


def _agent(out: str) -> int:
    """The process that was started with this run's folder in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ckpt.agent.node.main" in words and f"{out}/run".encode() in words:
            return int(path.parent.name)
    raise RuntimeError("no agent is there")


def _die_with(pid: int) -> None:
    fd = os.pidfd_open(pid)
    select.select([fd], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
