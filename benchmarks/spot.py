"""A spot controller and its cloud on this machine: nodes that are network namespaces come and go as a trace says, and
the job is launched again and again on those that are there.

The cloud: ADD makes a namespace, REMOVE kills all that runs in one, CRASH kills the trainer in one. A notice is a file
with the time of the removal. Agents have links of limited speed to each other and to an S3 server in the hub.

The controller: one torchrun a node, without restarts and with a fixed rank. After a failure it waits until all are
down, GRACE_S at most, and kills what is left of them, but no agent. Then it launches the job on the nodes that are
there and have no notice, the oldest first, once they are enough. Nodes that come later wait for the next launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ckpt.ipc.secret import make_secret
from ckpt.simulate.notices import SimulatedNotice
from ckpt.simulate.outcome import RestoredFrom
from ckpt.simulate.trace import EventKind, Trace, TraceEvent
from tests.checkpointer.scripts import Line, lines_of
from tests.nodes.lan import Lan, Place
from tests.servers import KEY_ID, SECRET, START_S, Server, program

GRACE_S = 3.0
POLL_S = 0.01
STORE_PORT = 9000
MASTER_PORT = 29500  # of the first launch; each has its own
STEPS = 10_000_000  # more than any run makes
ALIKE = 0.05  # of the state: more than what all ranks hold alike


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained. `start_s`: before a launch begins to train, however soon its processes are there: it makes a
    start take as long on any number of nodes. `mbit`: of each agent's link, each way."""

    nodes: int
    nodes_min: int
    mib: int
    step_s: float
    every: int
    start_s: float
    mbit: int


@dataclass(slots=True)
class Launch:
    """One launch of the job on `nodes`. Times are Unix times. `failed_at`: of what ended it; `cause`: crash, loss, or
    notice, where it left in order. `down_at`: when all its processes were gone."""

    at: float
    nodes: tuple[str, ...]
    logs: tuple[Path, ...]
    failed_at: float | None = None
    cause: str = ""
    down_at: float | None = None
    _lines: list[Line] = field(default_factory=list)

    def lines(self) -> list[Line]:
        """What its ranks said, in the order of time; of a launch that is over."""
        if not self._lines:
            self._lines = sorted((each for log in self.logs for each in lines_of(log)), key=lambda each: each["at"])
        return self._lines

    @property
    def ready_at(self) -> float | None:
        """When the last rank had the process group."""
        return self._of_all("ready")

    @property
    def trained_at(self) -> float | None:
        """When the last rank had restored."""
        return self._of_all("restored")

    def _of_all(self, key: str) -> float | None:
        found = [line["at"] for line in self.lines() if key in line]
        return found[-1] if len(found) == len(self.nodes) else None

    @property
    def restored_step(self) -> int:
        return max(int(line["restored"]) for line in self.lines() if "restored" in line)

    @property
    def level(self) -> RestoredFrom:
        """Where the state came from: the store, if any rank read from there; peers, if some node read a share of it
        from others; else local memory. "nothing" for a fresh start. What all ranks hold alike is small here, and lies
        on some of the nodes: to read that from another one does not count."""
        said = [line for line in self.lines() if "restored" in line]
        read = Counter[str]()
        for line in said:
            for name, count in line["bytes"].items():
                read[name.rpartition(" ")[2]] += count
        if not read:
            return "nothing"
        if read["store"]:
            return "store"
        return "peer" if read["peer"] > ALIKE * sum(read.values()) else "local"

    @property
    def last_step(self) -> int:
        return max((int(line["step"]) for line in self.lines() if "step" in line), default=self.restored_step)

    @property
    def stopped_at(self) -> float:
        """When its last step ended, or when it had restored if it made none."""
        return max(float(line["at"]) for line in self.lines() if "step" in line or "restored" in line)

    def events(self, name: str) -> list[Line]:
        return [line for line in self.lines() if line.get("event") == name]


class SpotRun:
    """One job under one trace, from beginning to end. `launches`: what came of it."""

    def __init__(self, net: Lan, folder: Path, job: Job, name: str) -> None:
        self.net, self.folder, self.job, self.name = net, folder, job, name
        self.url = f"s3://bucket/{name}"
        self.launches: list[Launch] = []
        self.began_at = 0.0
        self._served = folder / "served"
        self._present: dict[str, Place] = {}  # in the order of arrival
        self._warned: set[str] = set()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._secret = folder / "secret"

    def run(self, trace: Trace, notices: list[SimulatedNotice]) -> None:
        """From the trace's beginning to its end; then everything is killed."""
        self._serve()
        events = [each for each in trace.events if each.time_s < trace.span_s]
        ahead: list[TraceEvent | SimulatedNotice] = sorted([*events, *notices], key=lambda each: each.time_s)
        self.began_at = time.time()
        end_at = self.began_at + trace.span_s
        while (now := time.time()) < end_at:
            while ahead and self.began_at + ahead[0].time_s <= now:
                self._happen(ahead.pop(0))
            self._look()
            time.sleep(POLL_S)
        # All at once, so that nothing is saved after the end.
        for place in self._present.values():
            place.kill()
        self._present.clear()

    def stored_bytes(self) -> int:
        """All that the job ever wrote to the store: nothing is pruned."""
        return sum(each.stat().st_size for each in self._served.rglob("*") if each.is_file())

    def committed_bytes(self) -> int:
        """Of that: what the agents say is in whole checkpoints."""
        found = {}
        for file in self.folder.glob("*.events.jsonl"):
            for line in map(json.loads, file.read_text().splitlines()):
                if line["event"] == "commit.done":
                    found[line["identity"]] = line["stored_bytes"]
        return sum(found.values())

    def in_hub(self, *command: str) -> str:
        """What a command says that runs beside the store."""
        words = ["ip", "netns", "exec", self.net.hub.name, *command]
        env = {**os.environ, **self._store_variables()}
        done = subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=120)
        return done.stdout

    # -- the cloud

    def _serve(self) -> None:
        (self._served / "bucket").mkdir(parents=True)
        self._secret.touch(mode=0o600)
        self._secret.write_text(make_secret().hex())
        log = self.folder / "store.log"
        words = ["serve", "s3", str(self._served), "--addr", self._store_at, "--auth-key", f"{KEY_ID},{SECRET}"]
        server = self.net.hub.start([program("rclone"), "--config", os.devnull, *words], log)
        deadline_s = time.monotonic() + START_S
        while "Starting s3 server" not in log.read_text(errors="replace"):
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the store did not start: {log.read_text(errors='replace')}")
            time.sleep(0.05)

    @property
    def _store_at(self) -> str:
        return f"{self.net.hub.at['own']}:{STORE_PORT}"

    def _store_variables(self) -> Mapping[str, str]:
        return Server("rclone", f"http://{self._store_at}", "bucket").environment()

    def end_store(self) -> None:
        """Ends this run's server, so that the next run has one of its own."""
        server = self.net.hub.started.pop()
        server.kill()
        server.wait(60)

    def _happen(self, event: TraceEvent | SimulatedNotice) -> None:
        if isinstance(event, SimulatedNotice):
            if event.node in self._present:
                self._warned.add(event.node)
                notice = self._notice_file(event.node)
                written = notice.with_suffix(".new")
                written.write_text(str(self.began_at + event.deadline_s))
                written.rename(notice)
        elif event.kind is EventKind.ADD:
            self._present[event.node] = place = self.net.node()
            self.net.slow(place, self.job.mbit)
        elif event.kind is EventKind.REMOVE:
            at = self._present.pop(event.node).kill()
            if event.node in self._running:
                self._fail(at, "loss")
        else:
            if event.node in self._running:
                self._fail(time.time(), "crash")
                _kill_children(self._running[event.node])

    def _notice_file(self, node: str) -> Path:
        return self._present[node].folder / "notice"

    # -- the controller

    def _fail(self, at: float, cause: str) -> None:
        launch = self.launches[-1]
        if launch.failed_at is None:
            launch.failed_at, launch.cause = at, cause
        elif cause == "loss":
            launch.cause = cause

    def _look(self) -> None:
        """Launches the job where none runs and nodes are enough; looks whether the one that runs has failed."""
        if self._running:
            ended = [each for each in self._running.values() if each.poll() is not None]
            launch = self.launches[-1]
            if ended and launch.failed_at is None:
                self._fail(time.time(), "notice" if self._warned & self._running.keys() else "itself")
            if launch.failed_at is None:
                return
            # Who leaves by a notice waits for the last commit.
            if len(ended) < len(self._running) and launch.cause != "notice":
                if time.time() < launch.failed_at + GRACE_S:
                    return
                self._kill_job()
            elif len(ended) < len(self._running):
                return
            launch.down_at = time.time()
            self._running.clear()
        usable = [node for node in self._present if node not in self._warned]
        if len(usable) >= self.job.nodes_min:
            self._launch(usable[: self.job.nodes])

    def _kill_job(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                _kill_children(process)
                process.kill()
                process.wait(60)

    def _launch(self, nodes: list[str]) -> None:
        number, at = len(self.launches), time.time()
        job = self.job
        logs = []
        for rank, node in enumerate(nodes):
            place = self._present[node]
            log = self.folder / f"{number:02}-{rank}-{node.replace('/', '_')}.log"
            logs.append(log)
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--node-rank", str(rank)),
                *("--nproc-per-node", "1", "--max-restarts", "0", "--monitor-interval", "0.1"),
                *("--master-addr", self._present[nodes[0]].at["lan"], "--master-port", str(MASTER_PORT + number)),
                *("--local-addr", place.at["lan"], "-m", "tests.nodes.train", self.url, str(STEPS)),
                *("--every", str(job.every), "--mib", str(job.mib), "--pace", "0", "--period", str(job.step_s)),
                *("--begin-at", str(at + job.start_s)),
            ]
            env = {
                **self._store_variables(),
                "NODE": node,
                "CKPT_LAUNCH": "replay",
                "CKPT_RUNTIME_DIR": str(place.folder),
                "CKPT_AGENT_LOG": str(self.folder / f"{node.replace('/', '_')}.agent.log"),
                "CKPT_EVENTS": str(self.folder / f"{node.replace('/', '_')}.events.jsonl"),
                "CKPT_SECRET_FILE": str(self._secret),
                "CKPT_NOTICES": "given",
                "CKPT_NOTICE_FILE": str(self._notice_file(node)),
                "CKPT_LISTEN": f"{place.at['own']}:0",
                "GLOO_SOCKET_IFNAME": "lan",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            self._running[node] = place.start(command, log, env)
        self.launches.append(Launch(at, tuple(nodes), tuple(logs)))


def _kill_children(torchrun: subprocess.Popen[bytes]) -> None:
    """The trainers. The agent is no child of torchrun."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(torchrun.pid).children():
            each.kill()
