"""Is the last step of a job in the store before torchrun, which was told to end it, kills it half a minute later?

    python -m benchmarks.preempt [--small] [--soak] [--rounds N] [--mib N] [--link-mbit-s N] [--seed N] [--json FILE]

Two ranks train and commit one checkpoint after the other through a link of limited rate, to a real server; torchrun is
signalled at a random moment of such a commit. So the last one begins when that ends, and takes as long once more. A
round counts when the outcome says that the step at which all ranks left was committed, and the store lists it.

The rate and the size are those of 1 GiB over 1 Gbit/s, by a sixteenth, and three rounds; --soak: whole, and fifty.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.report import Row, parser, report
from tests import servers
from tests.checkpointer import proxy as proxies
from tests.checkpointer.proxy import Proxy
from tests.checkpointer.runs import URL, empty
from tests.checkpointer.scripts import ROOT, Script, torchrun

MODULE = "tests.checkpointer.train_script"
EVERY = 20  # steps: far less than a commit takes, so that one follows on the other
LEAD_S = 30.0


@dataclass(frozen=True)
class Size:
    rounds: int
    mib: int
    link_mbit_s: float


SIXTEENTH, SOAK, SMALL = Size(3, 64, 62.5), Size(50, 1024, 1000.0), Size(1, 4, 20.0)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--soak", action="store_true", help="fifty rounds of 1 GiB over 1 Gbit/s: about an hour")
    made.add_argument("--rounds", type=int)
    made.add_argument("--mib", type=int, help="of state")
    made.add_argument("--link-mbit-s", type=float)
    made.add_argument("--seed", type=int, default=0, help="of the moments")
    args = made.parse_args()
    usual = SMALL if args.small else SOAK if args.soak else SIXTEENTH
    size = Size(args.rounds or usual.rounds, args.mib or usual.mib, args.link_mbit_s or usual.link_mbit_s)
    moments = random.Random(args.seed)
    left_s: list[float] = []
    with servers.rclone() as server, proxies.proxy(server) as link:
        for number in range(size.rounds):
            at = moments.random()
            link.limit(float("inf"))
            empty(server)
            found = once(link, size, at)
            print(f"round {number + 1}: signalled at {at:.0%} of a commit; {found}", file=sys.stderr, flush=True)
            if found.in_time:
                left_s.append(found.left_s)
    bar = f"all of {size.rounds}"
    rows = [
        Row("committed before the end", len(left_s), "jobs", bar, len(left_s) == size.rounds),
        Row("time left then, the least", min(left_s, default=0.0), "s", "printed", None),
        Row("time left then, median", statistics.median(left_s) if left_s else 0.0, "s", "printed", None),
    ]
    return report("preempt", rows, args)


@dataclass(frozen=True)
class Found:
    """`why`: why it was not in time; "" where it was."""

    why: str
    step: int | None
    left_s: float

    @property
    def in_time(self) -> bool:
        return not self.why


def once(link: Proxy, size: Size, at: float) -> Found:
    """`at`: how much of a commit is done when torchrun is signalled, from 0 to 1."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CKPT_RUNTIME_DIR"] = f"{folder}/agent"
        outcome = Path(folder, "outcome.json")
        env = {**link.at.environment(), "CKPT_NOTICES": "given", "CKPT_OUTCOME_FILE": str(outcome)}
        env |= {"CKPT_LINGER_S": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env |= {"CKPT_AGENT_LOG": f"{folder}/agent.log", "CKPT_EVENTS": f"{folder}/events.jsonl"}
        link.limit(size.link_mbit_s * 1e6 / 8)
        carried = link.carried
        words = ("--mib", str(size.mib), "--every", str(EVERY))
        script = torchrun(Path(folder, "log"), 2, MODULE, URL, str(1 << 30), *words, **env)
        try:
            # The second commit, so that one has been measured.
            link.wait_carried(carried + int((1 + at) * size.mib * 2**20), 600.0)
            script.process.terminate()
            code = script.process.wait(LEAD_S + 60)
            found = what_came(outcome, code, env)
        finally:
            end(script)
            end_agent(folder)
        if not found.in_time:
            kept = tempfile.mkdtemp(prefix="ckpt-preempt-")
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            found = replace(found, why=f"{found.why} (its logs are in {kept})")
        return found


def what_came(outcome: Path, code: int, env: dict[str, str]) -> Found:
    """`code`: torchrun's."""
    if not outcome.exists():
        return Found(f"no outcome was written; torchrun ended with {code}", None, 0.0)
    said, listed = json.loads(outcome.read_text()), in_store(env)
    step = said["step"]
    if (said["how"], said["level"]) != ("left", "store"):
        return Found(f"{said['how']}: {said['level']} {said['why']} {said['error']}", step, said["left_s"])
    if listed != step or code == -signal.SIGKILL:
        return Found(f"the store has step {listed}", step, said["left_s"])
    return Found("", step, said["left_s"])


def in_store(env: dict[str, str]) -> int | None:
    """The newest step there."""
    command = [sys.executable, "-m", "ckpt.cli.main", "ls", URL, "--json"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    return max((row["step"] for row in json.loads(done.stdout)["checkpoints"]), default=None) if done.stdout else None


def end(script: Script) -> None:
    """What is left of it: nothing, if all went well."""
    if script.process.poll() is None:
        launcher = psutil.Process(script.process.pid)
        for each in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        script.process.wait(10)


def end_agent(folder: str) -> None:
    """It ends by itself once it has nothing to save: nothing of it may reach the store in the next round."""
    for each in psutil.process_iter(["cmdline"]):
        if any(word.startswith(f"{folder}/agent") for word in each.info["cmdline"] or ()):
            try:
                each.wait(60)
            except psutil.TimeoutExpired:
                each.kill()


if __name__ == "__main__":
    sys.exit(main())
