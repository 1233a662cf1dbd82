"""A job of several nodes under torchrun's elasticity, and what its ranks say."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.checkpointer.scripts import ROOT, Line, lines_of
from tests.nodes.lan import HUB_AT, STORE_PORT, Lan, Place
from tests.nodes.train import losses

LAUNCHER = ROOT / "examples" / "launchers" / "torchrun.sh"
# A node that is dead is noticed after keep_alive_interval x keep_alive_max_attempt; whoever comes within last_call is
# of the same round.
(RENDEZVOUS,) = re.findall(r"--rdzv-conf (\S+)", LAUNCHER.read_text())


# torch's rendezvous store leaves a torchrun without an answer for a minute now and then, which ends by that (one in
# some fifty nodes that came or went, with torch 2.13). So it is where the torchrun of rank 0 stands still for as long
# as it takes to be noticed as dead, just when all have come: it waits for the next round then, and the others for where
# it listens. Who ends by that closes the rendezvous, if it still can, and by that all others end as soon as they are to
# meet again. Such a run has shown nothing: it is done once more.
NO_ANSWER = "torch's rendezvous store gave no answer"
ELASTIC = [
    pytest.mark.torchrun,
    pytest.mark.timeout(600),
    pytest.mark.flaky(reruns=1, only_rerun=[NO_ANSWER]),
]

_NO_ANSWER = "RendezvousConnectionError|DistStoreError"  # in the log of a torchrun
_CLOSED = "RendezvousClosedError"

LINGER_S = 300  # of an agent whose ranks are gone: as by default
AGENTS_S = 60.0  # in which the agents of a job that came to its end are gone: they do not linger


class Ended(AssertionError):
    """What was waited for did not come, and the torchrun of these nodes has ended by itself."""

    def __init__(self, text: str, names: list[str]) -> None:
        super().__init__(text)
        self.names = names


class Elastic:
    """One examples/launchers/torchrun.sh a node, of the same job. `folder`: for the store and the logs."""

    def __init__(
        self,
        lan: Lan,
        folder: Path,
        steps: int,
        *options: str,
        nodes: tuple[int, int] = (2, 4),
        apart: bool = False,
    ) -> None:
        """`nodes`: how few and how many. `apart`: the agents use the net of their own."""
        self.lan, self.folder, self.steps = lan, folder, steps
        self.url = str(folder / "run")
        self.env: dict[str, str] = {}
        self._id = secrets.token_hex(4)
        self._end = folder / "end"
        self._options, self._count, self._apart = ("--end", str(self._end), *options), nodes, apart
        self._logs: dict[str, Path] = {}
        self.places: dict[str, Place] = {}

    def start(self, count: int = 1) -> list[str]:
        """On so many new nodes; their names."""
        return [self._start(self.lan.node()) for _ in range(count)]

    def _start(self, node: Place) -> str:
        name = node.name.rpartition("-")[2]
        self.places[name] = node
        log = self._logs[name] = self.folder / f"{name}.log"
        nodes, rendezvous = f"{self._count[0]}:{self._count[1]}", f"{HUB_AT}:{STORE_PORT}"
        command = ["bash", str(LAUNCHER), nodes, rendezvous, self._id]
        command += ["-m", "tests.nodes.train", self.url, str(self.steps), *self._options]
        env = {
            "NODE": name,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PET_NPROC_PER_NODE": "1",
            "PET_MONITOR_INTERVAL": "0.1",
            "PET_LOCAL_ADDR": node.at["lan"],
            "CKPT_RUNTIME_DIR": str(node.folder),
            "CKPT_AGENT_LOG": str(self.folder / f"{name}.agent.log"),
            "CKPT_LINGER_S": str(LINGER_S),
            "CKPT_NOTICES": "given",  # signals are, the firmware's cloud is not
            "GLOO_SOCKET_IFNAME": "lan",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else ranks find the addresses of those before (torch 2.13)
            **({"CKPT_LISTEN": f"{node.at['own']}:0"} if self._apart else {}),
            **self.env,
        }
        node.start(command, log, env)
        return name

    def kill(self, name: str) -> float:
        """The whole node. When that was, Unix time."""
        return self.places.pop(name).kill()

    def lost_its_store(self, name: str) -> bool:
        """Whether torchrun ended there because torch's own rendezvous store did not answer it, or another one, which
        has closed the rendezvous."""
        return self._said(_NO_ANSWER, name) or (self._said(_CLOSED, name) and self._said(_NO_ANSWER, *self._logs))

    def is_closed(self) -> bool:
        """Whether nobody can come to the rendezvous any more."""
        return self._said(_CLOSED, *self._logs)

    def _said(self, what: str, *names: str) -> bool:
        return any(re.search(what, self._logs[name].read_text(errors="replace")) for name in names)

    def lines(self) -> list[Line]:
        """Of all nodes, in the order of time."""
        return sorted((line for log in self._logs.values() for line in lines_of(log)), key=lambda line: line["at"])

    def wait_for(self, what: Callable[[Line], bool], since: float = 0.0, timeout_s: float = 150.0) -> Line:
        """The first such line that was said after `since`."""
        return self.wait_for_all([what], since, timeout_s)[0]

    def wait_for_all(
        self, what: Iterable[Callable[[Line], bool]], since: float = 0.0, timeout_s: float = 150.0
    ) -> list[Line]:
        wanted = list(what)
        deadline = time.monotonic() + timeout_s
        while True:
            lines = [line for line in self.lines() if line["at"] > since]
            found = [next((line for line in lines if each(line)), None) for each in wanted]
            if None not in found:
                return [line for line in found if line is not None]
            ended = [name for name, node in self.places.items() if node.started[-1].poll() is not None]
            if ended:
                why = f" ({NO_ANSWER})" if all(map(self.lost_its_store, ended)) else ""
                raise Ended(f"not seen; ended{why}: {ended}:\n{self.tail()}", ended)
            assert time.monotonic() < deadline, f"not seen:\n{self.tail()}"
            time.sleep(0.02)

    def restored(self, world: int, since: float, timeout_s: float = 150.0) -> list[Line]:
        """What each rank of the next start with so many says of where it came from."""
        wanted = [
            lambda line, rank=rank: "restored" in line and line["world"] == world and line["rank"] == rank
            for rank in range(world)
        ]
        return self.wait_for_all(wanted, since, timeout_s)

    def restored_by_any(self, since: float, timeout_s: float = 150.0) -> list[Line]:
        """The same of the next start, with however many."""
        first = self.wait_for(lambda line: "restored" in line, since, timeout_s)
        return self.restored(first["world"], since, timeout_s)

    def safe_step(self) -> int:
        """The newest of which a rank was told that it is in other nodes' memory."""
        done = [line["data"]["identity"] for line in self.lines() if line.get("event") == "replication.done"]
        return max((step_of(identity) for identity in done), default=0)

    def safe_after(self, since: float, world: int, timeout_s: float = 150.0) -> int:
        """Waits until a checkpoint of so many ranks, begun after that, is in other nodes' memory; its step."""
        line = self.wait_for(
            lambda line: line.get("event") == "replication.done" and line["world"] == world, since, timeout_s
        )
        return step_of(line["data"]["identity"])

    def last_step(self) -> int:
        return max(line["step"] for line in self.lines() if "step" in line)

    def node_of(self, rank: int) -> str:
        """Where that rank trained last."""
        return next(line["node"] for line in reversed(self.lines()) if line["rank"] == rank and "step" in line)

    def finish(self, *before: Line) -> list[Line]:
        """All ranks stop at one step. Each loss is that of an uninterrupted run. `before`: what another job of this run
        said, whose steps come first."""
        self._end.touch()
        lines = [*before, *self.end()]
        check_losses(lines, losses(max(line["step"] for line in lines if "step" in line)))
        return lines

    def end(self, timeout_s: float = 180.0) -> list[Line]:
        """Waits for a clean end, of the agents too."""
        deadline = time.monotonic() + timeout_s
        for name, node in self.places.items():
            code = node.started[-1].wait(max(1.0, deadline - time.monotonic()))
            why = f" ({NO_ANSWER})" if self.lost_its_store(name) else ""
            assert code == 0, f"{name}: exit code {code}{why}\n{self.tail()}"
        deadline = time.monotonic() + AGENTS_S
        while left := [pid for node in self.places.values() for pid in node.pids()]:
            assert time.monotonic() < deadline, f"processes {left} are still there\n{self.tail()}"
            time.sleep(0.05)
        return self.lines()

    def tail(self) -> str:
        """The end of what everything said, for people."""
        logs = [*self._logs.values(), *self.folder.glob("*.agent.log")]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())


def step_of(identity: str) -> int:
    from ckpt.types import Identity

    return Identity.parse(identity).version.step


def check_memory(came: list[Line], at_least: int) -> None:
    """All ranks went on from one checkpoint, no older than that, and nothing of it was read from the store."""
    assert len({line["identity"] for line in came}) == 1, came
    for line in came:
        assert line["restored"] >= at_least > 0, (at_least, line)
        assert line["level"] in ("local", "peer"), line
        assert line["bytes"].keys() <= {"restored from local", "restored from peer"}, line
        assert sum(line["bytes"].values()), line


def check_losses(lines: list[Line], wanted: list[float]) -> None:
    """Each rank's, in each attempt, at each step: bit for bit; and no step is missing."""
    said = [(line["step"], line["loss"], line["node"]) for line in lines if "loss" in line]
    wrong = [each for each in said if each[1] != wanted[each[0] - 1]]
    assert not wrong, f"{len(wrong)} losses differ from those of an uninterrupted run, the first: {wrong[0]}"
    assert {step for step, _, _ in said} == set(range(1, len(wanted) + 1))
