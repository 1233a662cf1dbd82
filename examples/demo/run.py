"""The demo: train, kill everything in the middle of a save, twice, and see that nothing was lost.

1. A run of train.py (two ranks under torchrun) that nobody disturbs.
2. The same run, but torchrun and its workers get SIGKILL while a save is on its way to the store. Started again, it
   goes on from this host's memory, which the agent kept.
3. Again, and this time the agent is killed as well, as when a machine dies: the next start goes on from the store.
4. Every loss of every rank is compared bit for bit with the undisturbed run.

    python examples/demo/run.py [--store s3://bucket/demo]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ckpt import storage
from ckpt.store import keys
from ckpt.types import format_count

HERE = Path(__file__).parent
RANKS = 2
BANDWIDTH = 30e6  # bytes per second to the store, so that a save takes long enough to be hit on a machine that is idle
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Kill:
    """What was killed, when, and what the next start made of it."""

    what: str
    last_step: int
    saving: int
    committed: tuple[int, ...]


class Job:
    """One training run, started as often as it takes."""

    def __init__(
        self, name: str, url: str, folder: Path, runtime: str, steps: int, every: int, bandwidth: float
    ) -> None:
        self.steps, self.every, self.bandwidth = steps, every, bandwidth
        self.name, self.url, self.log = name, url, folder / name
        self.log.mkdir(parents=True)
        self.runtime = runtime
        self.starts = 0
        self.torchrun: subprocess.Popen[bytes] | None = None  # of the newest start

    def start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        script = [str(HERE / "train.py"), self.url, "--folder", str(self.log), "--steps", str(self.steps)]
        script += ["--every", str(self.every), "--bandwidth", str(self.bandwidth), "--launch", str(self.starts)]
        # The launch id says that these starts are one job; a scheduler's job id would do as well.
        ours = {
            "CKPT_LAUNCH": f"demo-{self.name}",
            "CKPT_RUNTIME_DIR": self.runtime,
            "OMP_NUM_THREADS": "1",
        }
        print(f"$ torchrun --nproc-per-node={RANKS} train.py {self.url}", flush=True)
        self.torchrun = subprocess.Popen([*torchrun, *script], env=os.environ | ours)
        return self.torchrun

    def end(self) -> None:
        """Where the demo itself ends early, nothing trains on."""
        if self.torchrun is not None and self.torchrun.poll() is None:
            workers = psutil.Process(self.torchrun.pid).children()
            self.torchrun.terminate()
            self.torchrun.wait()
            for worker in workers:  # torchrun forgets those that it is just starting
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.terminate()

    def losses(self) -> dict[tuple[int, int], str]:
        """(rank, step) -> the loss as written. Errors: SystemExit where one step was run twice with other losses."""
        found: dict[tuple[int, int], str] = {}
        for rank in range(RANKS):
            for line in (self.log / f"losses-{rank}.txt").read_text().splitlines():
                step, loss = line.split()
                if found.setdefault((rank, int(step)), loss) != loss:
                    raise SystemExit(f"{self.name}: step {step} of rank {rank} was repeated with another loss")
        return found

    def trained(self, rank: int = 0) -> list[int]:
        """The steps that it has ended, in all starts so far."""
        path = self.log / f"losses-{rank}.txt"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def read(self, what: str, start: int) -> dict[str, Any]:
        return json.loads((self.log / f"{what}-{start}.json").read_text())

    def committed(self) -> tuple[int, ...]:
        backend = storage.open(self.url)
        try:
            records = [keys.parse_record(info.key) for info in backend.list(keys.COMMITS)]
        finally:
            backend.close()
        return tuple(sorted({found[0].version.step for found in records if found}))


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        raise SystemExit(f"training failed with exit status {process.returncode}")


def kill_during_save(job: Job, step: int, *, agent_too: bool) -> Kill:
    """Starts the job and kills it right after `step`, whose checkpoint is then on its way to the store."""
    before = len(job.trained())
    torchrun = job.start()
    deadline = time.monotonic() + START_TIMEOUT_S

    def wait_until(done: Callable[[list[int]], bool]) -> None:
        while not done(job.trained()):
            if (status := torchrun.poll()) is not None:
                raise SystemExit(f"training ended before step {step}, with exit status {status}")
            if time.monotonic() > deadline:
                raise SystemExit(f"training did not get to step {step} in {START_TIMEOUT_S:g} s: too slow a machine?")
            time.sleep(0.003)

    wait_until(lambda steps: len(steps) > before)
    # Found now, since looking through all processes may take longer than a save.
    victims = [psutil.Process(torchrun.pid), *psutil.Process(torchrun.pid).children(recursive=True)]
    agents = [p for p in psutil.process_iter(["cmdline"]) if is_agent(p, job.runtime)]
    victims = [p for p in victims if p not in agents] + (agents if agent_too else [])
    wait_until(lambda steps: steps[-1] > step)
    for process in victims:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    committed = job.committed()
    torchrun.wait()
    psutil.wait_procs(victims, timeout=10)
    what = f"torchrun, {RANKS} workers" + (", agent" if agent_too else "")
    last_step = min(job.trained(rank)[-1] for rank in range(RANKS))
    print(f"\n*** SIGKILL to {what} after step {last_step}\n", flush=True)
    return Kill(what, last_step, step, committed)


def is_agent(process: psutil.Process, runtime: str) -> bool:
    try:
        return "ckpt.agent" in " ".join(process.info["cmdline"] or ()) and (
            process.environ().get("CKPT_RUNTIME_DIR") == runtime
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def report(kills: list[Kill], job: Job, straight: Job) -> None:
    print()
    row = "{:<28} {:<13} {:<13} {:<13} {:<8} {}"
    print(row.format("killed", "while saving", "in the store", "came back at", "from", "steps to redo"))
    for number, kill in enumerate(kills, 2):
        came = job.read("restored", number)
        level = {"local": "memory", "store": "store", "none": "nothing"}[came["level"]]
        stored = f"step {max(kill.committed)}" if kill.committed else "nothing"
        lost = kill.last_step - came["step"]
        print(row.format(kill.what, f"step {kill.saving}", stored, f"step {came['step']}", level, lost))
    for run in (straight, job):
        receipt = run.read("receipt", run.starts)
        taken = format_count(receipt["snapshots"], "checkpoint")
        paused = f"{receipt['stall_ms_median']:.1f} ms each, at most {receipt['stall_ms_max']:.1f} ms"
        print(f"{run.name}: the last start took {taken}; training paused {paused}")


def compare(straight: Job, killed: Job) -> None:
    expected, found = straight.losses(), killed.losses()
    if expected.keys() != found.keys():
        raise SystemExit(f"other steps were run: {sorted(expected.keys() ^ found.keys())[:10]}")
    differ = sorted(step for step, loss in expected.items() if found[step] != loss)
    if differ:
        raise SystemExit(f"losses differ, first at (rank, step) {differ[0]}")
    print(
        f"\n{len(expected)} losses ({RANKS} ranks x {killed.steps} steps): equal bit for bit to the undisturbed run\n"
    )


def command(*words: str) -> None:
    print(f"$ ckpt {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-c", "from ckpt.cli.main import main; main()", *words], check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="save below this URL instead of a local folder, such as s3://bucket/demo")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="local files; emptied first")
    parser.add_argument("--steps", type=int, default=160, help="of each run; more than 5 times --every")
    parser.add_argument("--every", type=int, default=20, help="save every so many steps")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes per second to the store")
    args = parser.parse_args()
    if args.steps <= 5 * args.every:
        parser.error("--steps must be more than 5 times --every: the second kill comes right after that")
    shutil.rmtree(args.folder, ignore_errors=True)
    store = f"{args.store.rstrip('/')}/{uuid.uuid4().hex[:8]}" if args.store else f"{args.folder}/store"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-", dir="/tmp") as runtime:
        about = args.folder / "logs", runtime, args.steps, args.every, args.bandwidth
        straight = Job("undisturbed", f"{store}/undisturbed", *about)
        killed = Job("killed", f"{store}/killed", *about)
        try:
            finish(straight.start())
            kills = [
                kill_during_save(killed, 3 * args.every, agent_too=False),
                kill_during_save(killed, 5 * args.every, agent_too=True),
            ]
            finish(killed.start())
        finally:
            straight.end()
            killed.end()
    report(kills, killed, straight)
    compare(straight, killed)
    command("ls", killed.url)
    command("verify", killed.url)
    print(f"\nThe demo took {time.monotonic() - began:.0f} s. What it made is in {store}.")


def terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)  # so that what main() has begun ends with it
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
