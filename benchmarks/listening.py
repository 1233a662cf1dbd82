"""What do listening for notices and reading a node's signals cost, per step in the trainer, of a core in the agent?

CPU time both: of the training thread over many steps with nothing due, and of the agent while all it has to do is to
listen; against the same with CKPT_NOTICES=off. One after the other: signals, a file and Slurm, and with them each
cloud, of which a machine is in one only. Fakes on the loopback answer at once that there is nothing to say. The row
with the learnt policy listens to signals only; that of the node's signals reads them every 5 s, with a trained
predictor of the usual size. The last rows are of all of it at once, in the cloud that costs most. What a decision of
the policy costs beside that is in benchmarks/policy.py.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import ckpt
from benchmarks.report import Row, environment, parser, report
from tests.checkpointer.runs import agent_status
from tests.preemption.fakes import FakeService, serving
from tests.preemption.test_aws import Ec2
from tests.preemption.test_azure import Azure
from tests.preemption.test_gcp import Engine

STEP_US, CORE_PERCENT = 2.0, 0.1


def main() -> int:
    args = parser(__doc__).parse_args()
    idle_s, steps = (1.0, 20_000) if args.small else (30.0, 500_000)
    bare_us, bare = measure({"CKPT_NOTICES": "off"}, ckpt.Every(steps=10**9), steps, idle_s)
    rows = [
        Row("ck.step(), no notices", bare_us, "us", "printed", None),
        Row("agent, no notices", bare, "% of a core", "printed", None),
    ]
    with listened_to() as sources:
        for name, (policy, env) in sources.items():
            step_us, percent = measure({"CKPT_NOTICES": "given", **env}, policy, steps, idle_s)
            more = percent - bare
            rows.append(Row(f"ck.step(), {name}", step_us, "us", f"at most {STEP_US:g} us", step_us <= STEP_US))
            rows.append(
                Row(f"agent, {name}, more", more, "% of a core", f"at most {CORE_PERCENT} %", more <= CORE_PERCENT)
            )
    return report("listening", rows, args)


def measure(env: dict[str, str], policy: ckpt.Every | ckpt.Adaptive, steps: int, idle_s: float) -> tuple[float, float]:
    """Microseconds a step, and the agent's share of a core."""
    model = torch.nn.Linear(4, 4)
    state = {"model": model, "optim": torch.optim.Adam(model.parameters())}
    with tempfile.TemporaryDirectory() as folder, environment({**env, "CKPT_RUNTIME_DIR": f"{folder}/agent"}):
        run = f"{folder}/run"
        with ckpt.Checkpointer(run, state, policy=policy) as ck:
            for _ in range(1000):
                ck.step()
            pid = agent_status(run)["pid"]
            time.sleep(min(idle_s, 5.0))  # it has found out what to listen to
            before_s, began_s = cpu_s(pid), time.monotonic()
            time.sleep(idle_s)
            used_s, passed_s = cpu_s(pid) - before_s, time.monotonic() - began_s
            costs_us = []
            for _ in range(10):
                started_s = time.thread_time()
                for _ in range(steps // 10):
                    ck.step()
                costs_us.append(1e6 * (time.thread_time() - started_s) / (steps // 10))
    return statistics.median(costs_us), 100 * used_s / passed_s


def cpu_s(pid: int) -> float:
    """Of all its threads, to the nanosecond: /proc/PID/stat counts hundredths of a second."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def predictor(folder: Path) -> str:
    """Of sixteen signals, as large as those that are trained."""
    from ckpt.predict.model import save
    from ckpt.predict.training import HIDDEN, WINDOW
    from tests.predict.models import made

    names = tuple(f"memory.{number}" for number in range(16))
    save(made(names, HIDDEN, WINDOW), folder / "predictor")
    return str(folder / "predictor")


class Machine(FakeService):
    """One on Compute Engine, which is neither preempted nor maintained."""

    def __init__(self) -> None:
        super().__init__()
        engines = {"preempted": Engine("FALSE"), "maintenance-event": Engine("NONE")}
        for engine in engines.values():
            engine.now_s, engine.closing = time.time, self.closing
        self.answer = lambda asked: engines[asked.path.partition("?")[0].rpartition("/")[2]].reply(asked)
        self.now_s = time.time


@contextlib.contextmanager
def listened_to() -> Iterator[dict[str, tuple[ckpt.Every | ckpt.Adaptive, dict[str, str]]]]:
    """What to listen to, by name: with which policy, and the variables that say so."""
    with (
        serving(Ec2()) as ec2,
        serving(Machine()) as machine,
        serving(Azure()) as azure,
        tempfile.TemporaryDirectory() as folder,
    ):
        ec2.says, ec2.tokens, ec2.answer, ec2.now_s = {}, 0, ec2.reply, time.time
        azure.events, azure.started, azure.acknowledges = [], [], 200
        azure.answer, azure.now_s = azure.reply, time.time
        squeue = Path(folder, "squeue")
        squeue.write_text("#!/bin/sh\necho 2-00:00:00\n")
        squeue.chmod(0o700)
        slurm = {"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}
        always = {**slurm, "CKPT_NOTICE_FILE": f"{folder}/word"}
        on_azure = {**always, "CKPT_AZURE_METADATA_ENDPOINT": azure.endpoint}
        signals = {"CKPT_SIGNALS": "on", "CKPT_PREDICTOR": predictor(Path(folder))}
        never = ckpt.Every(steps=10**9)
        yield {
            "signals, a file, Slurm": (never, always),
            "... and AWS": (never, {**always, "AWS_EC2_METADATA_SERVICE_ENDPOINT": ec2.endpoint}),
            "... and Compute Engine": (never, {**always, "GCE_METADATA_HOST": f"127.0.0.1:{machine.port}"}),
            "... and Azure": (never, on_azure),
            "the learnt policy": (ckpt.Adaptive(), {}),
            "the node's signals": (never, signals),
            "all at once, on Azure": (ckpt.Adaptive(), {**on_azure, **signals}),
        }


if __name__ == "__main__":
    sys.exit(main())
