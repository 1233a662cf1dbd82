"""Runs the training script of a framework's user, kills or signals it, runs it again, and reads what it recorded.

A script records each optimizer step with `record`: the step, the loss to the last bit, and which samples it saw.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_S = 240.0
POLL_S = 0.02


def record(step: int, loss: float, samples: Iterable[int] = ()) -> None:
    """Called by the script, in the process of a rank: appends one step to the file of this rank and life."""
    line = {"step": step, "loss": float(loss).hex(), "samples": sorted(samples), "pid": os.getpid()}
    file = Path(os.environ["RECORDS"]) / f"rank-{os.environ.get('RANK', '0')}.jsonl"
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def shard_on_cpu() -> None:
    """Accelerate leaves FSDP out without a word on CPUs: it has to take them for GPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded step: the loss as hexadecimal text, the samples in order of their number, and the process."""

    step: int
    loss: str
    samples: tuple[int, ...]
    pid: int


@dataclass
class Script:
    """A script, how it is started, and the folder where its ranks record their steps.

    world: 0 runs `python script`, any other number runs torchrun with as many ranks."""

    path: Path
    records: Path
    args: tuple[str, ...] = ()
    world: int = 0
    env: dict[str, str] = field(default_factory=dict)

    def start(self) -> Life:
        self.records.mkdir(parents=True, exist_ok=True)
        command = [sys.executable]
        if self.world:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.world}"]
        env = os.environ | {"RECORDS": str(self.records), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | self.env
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), env.get("PYTHONPATH"))))
        recorded = {rank: len(self.steps(rank)) for rank in range(max(1, self.world))}
        log = self.records / f"log-{len(list(self.records.glob('log-*')))}.txt"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, str(self.path), *self.args],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Life(self, process, log, recorded)

    def run(self) -> str:
        """Runs the script to its end, which must be a normal one. Returns its output."""
        life = self.start()
        code = life.wait()
        assert code == 0, f"exit code {code}:\n{life.output()}"
        return life.output()

    def run_killed(self, step: int) -> str:
        """Runs the script until rank 0 has recorded `step`, then kills all its processes with SIGKILL."""
        life = self.start()
        life.wait_for(step)
        life.kill()
        return life.output()

    def run_signalled(self, step: int, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Runs the script until rank 0 has recorded `step`, and signals it (torchrun hands the signal on)."""
        life = self.start()
        life.wait_for(step)
        life.process.send_signal(number)
        return life.wait(), life.output()

    def steps(self, rank: int = 0) -> list[Step]:
        """All steps that a rank has recorded, over all lives, in order."""
        file = self.records / f"rank-{rank}.jsonl"
        if not file.exists():
            return []
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        return [Step(each["step"], each["loss"], tuple(each["samples"]), each["pid"]) for each in lines]

    def trajectory(self, rank: int = 0) -> dict[int, tuple[str, tuple[int, ...]]]:
        """Loss and samples of each step, as the newest life that made the step recorded them."""
        return {each.step: (each.loss, each.samples) for each in self.steps(rank)}


def undisturbed(program: Path, folder: Path, steps: int) -> Script:
    """Of two ranks, with a run of its own."""
    script = Script(program, folder / "undisturbed", (str(folder / "other"), f"--steps={steps}"), world=2)
    script.run()
    return script


@dataclass
class Life:
    """One run of a script, from its start to its end or kill."""

    script: Script
    process: subprocess.Popen[bytes]
    log: Path
    recorded: dict[int, int]  # by rank: how many steps earlier lives had recorded

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, step: int, rank: int = 0) -> None:
        """Waits until a process of this life has recorded `step` or a later one."""
        began = time.monotonic()
        while not any(each.step >= step for each in self.script.steps(rank)[self.recorded.get(rank, 0) :]):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()}"
            assert time.monotonic() - began < WAIT_S, f"no step {step} after {WAIT_S:g} s:\n{self.output()}"
            time.sleep(POLL_S)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output()}") from None

    def kill(self) -> None:
        """Kills launcher, ranks and workers of loaders, whichever sessions they are in. The agent lives on."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for each in [*parent.children(recursive=True), parent]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "ckpt.agent.node.main" not in each.cmdline():
                        each.kill()
        self.process.wait()
