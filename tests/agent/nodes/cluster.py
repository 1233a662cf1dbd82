"""A job of several nodes on this machine: an agent for each, with a folder of its own for its socket, and ranks that
are threads of the test. A node is lost by killing its agent and cutting off its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt.errors import AgentError, CkptError
from ckpt.ipc import client, messages, secret
from ckpt.settings import Settings, read_settings
from ckpt.storage import open as open_store
from ckpt.store.run import Run
from ckpt.store.verify import verify
from ckpt.threads import Tasks
from ckpt.types import Identity, Version
from tests.agent.fake import OPTIONS, FakeRank
from tests.agent.node.test_agent import together, wait_gone

COPIED = {**OPTIONS, "policy": {"steps": None, "seconds": 0.001}, "peers": {"replicas": 1}}
ADAPTIVE = {"kind": "adaptive", "overhead": 0.05, "store_mb_s": None, "at_risk_s": None}
LEVELS = ("local", "peer", "store")
BOUND_S = 60.0

# What of a node's address the others are told: where they find it.
Route = Callable[[int, str], str]


class Cluster:
    """`nodes` are numbered from 0. An agent starts with the first rank that comes to its node."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.secret = secret.make_secret()
        self.job: list[FakeRank] = []  # the newest
        self.pids: dict[int, int] = {}  # of the agents, by node; of those that were not killed
        self.route: Route = lambda node, address: address
        self.options: dict[str, Any] = COPIED
        self.peers: list[str] = []  # where the memory-only nodes listen that jobs name
        self.lending: list[subprocess.Popen[str]] = []
        self.at: dict[int, int] = {}  # the node of each rank of the newest job
        self._made: list[FakeRank] = []
        self._agents: set[int] = set()

    def settings(self, node: int) -> Settings:
        return replace(read_settings(), runtime_dir=self.folder / f"n{node}", listen="127.0.0.1:0")

    # -- a job's life

    def connect(self, *spread: int, launch: str = "test") -> list[FakeRank]:
        """Ranks, one for each number: that of its node. Their agents listen, and each rank knows where all are."""
        world = len(spread)
        for rank in self.job:  # what the agents hold is not given back by this
            rank.close()
        self.job = [FakeRank(self.url, rank, world, launch, self.settings(node)) for rank, node in enumerate(spread)]
        self._made += self.job
        self.at = dict(enumerate(spread))
        for rank in self.job:
            rank.options, rank.peers = self.options, self.peers
        together(self.job, lambda rank: rank.connect())
        for rank, node in self.at.items():
            self.pids[node] = pid_of(self.job[rank])
            self._agents.add(self.pids[node])
        self.name_nodes()
        return self.job

    def name_nodes(self) -> None:
        told = together(self.job, lambda rank: rank.listen(self.secret))
        nodes: dict[str, dict[str, Any]] = {}
        for rank, each in enumerate(told):
            node = self.at[rank]
            addresses = [self.route(node, text) for text in each["addresses"]]
            known = nodes.setdefault(each["name"], {**each, "addresses": addresses, "ranks": []})
            known["ranks"].append(rank)
        for each_rank in self.job:
            each_rank.nodes = list(nodes.values())

    def enter(self) -> messages.Message:
        """From begin to restored. Returns the decision, with which all have restored."""
        decision = self.job[0].begin()
        together(self.job, lambda rank: rank.join(decision.fields["epoch"]))
        restored = together(self.job, lambda rank: rank.restore(decision))
        assert len(set(restored)) == 1
        identity = str(restored[0]) if restored[0] is not None else None
        self.job[0].request("restored", {"epoch": self.job[0].epoch, "identity": identity})
        candidate = decision.fields["candidate"]
        for rank in self.job:
            assert rank.step == (candidate["step"] if candidate is not None else 0)
            rank.check(rank.step)  # all of it is of that step, and of the branch that it says it is of
            rank.branch = int(self.job[0].epoch.split("-")[0])
        together(self.job, lambda rank: rank.wait_warm())
        return decision

    def start(self, *spread: int, launch: str = "test") -> messages.Message:
        self.connect(*spread, launch=launch)
        return self.enter()

    def restart(self, *spread: int, launch: str = "test") -> dict[str, Any]:
        """As `start`, of a job that goes on from a checkpoint. Returns the candidate that all ranks have restored."""
        candidate = self.start(*spread, launch=launch).fields["candidate"]
        assert candidate is not None, "it began afresh"
        return dict(candidate)

    def checkpoint(self, *levels: str) -> int:
        """Trains in lock-step to the next appointed step, until it is complete at these levels. Returns it."""
        step = self.appointed()
        train(self.job, step)
        for level in levels or ("local",):
            assert self.job[0].wait_level(Version(step), level), self.job[0].levels
        return step

    def appointed(self) -> int:
        """The step that all ranks know to be appointed. What is said on one node is known on another a little later."""
        while True:
            steps = set(together(self.job, lambda rank: rank.await_next()))
            if len(steps) == 1:
                break
        (step,) = steps
        for level in LEVELS:
            self.job[0].levels.pop((str(Version(step)), level), None)  # of an appointment that was given up before
        return step

    def save(self, *levels: str) -> Version:
        """An explicit save of the step that has just ended, until it is complete at these levels."""
        version = Version(self.job[0].step, 1)
        together(self.job, lambda rank: rank.save(version))
        for level in levels:
            assert self.job[0].wait_level(version, level), self.job[0].levels
        return version

    def await_event(self, name: str, count: int = 1) -> dict[str, Any]:
        """What the newest job is told with it, for the `count`th time."""
        rank = self.job[0]
        with rank.changed:
            found: list[dict[str, Any]] = []

            def told() -> bool:
                found[:] = [each["data"] for each in rank.events if each["name"] == name]
                return len(found) >= count

            assert rank.changed.wait_for(told, BOUND_S), [each["name"] for each in rank.events]
            return found[count - 1]

    def finish(self) -> None:
        """The last step is saved, all leave, and the agents end by themselves."""
        step = self.job[0].step
        together(self.job, lambda rank: rank.save(Version(step, 1), "exit"))
        left = together(self.job, lambda rank: rank.leave())
        assert {answer["committed"] for answer in left} == {str(Version(step, 1))}, left
        self.hang_up()
        for pid in self.pids.values():
            wait_gone(pid)

    def committed_steps(self) -> list[int]:
        """Of the checkpoints that a restart would go on from, oldest first; each of them verified."""
        return [identity.version.step for identity in line(self.url)]

    def fetched(self) -> Counter[str]:
        """Bytes by level that the ranks of the newest job have been given, of the levels that gave any."""
        return sum((Counter(rank.fetched) for rank in self.job), Counter[str]())

    def keepers(self) -> dict[int, list[int]]:
        """By node of the job under way: which nodes keep copies of its ranks' snapshots."""
        number = {node["name"]: self.at[node["ranks"][0]] for node in self.job[0].nodes}
        table = self.status(self.at[0])["job"]["peers"]["nodes"]
        return {number[row["node"]]: [number[name] for name in row["kept_by"]] for row in table}

    # -- memory-only nodes

    def lend(
        self, memory: str = "1GiB", *options: str, secret: bytes | None = None, at: str = "127.0.0.1:0"
    ) -> dict[str, Any]:
        """Starts one more; what it says once it lends. Jobs are told of it by `peers`."""
        number = len(self.lending)
        file = self.folder / f"secret-{number}"
        file.touch(mode=0o600)
        file.write_text((secret or self.secret).hex())
        command = [sys.executable, "-m", "ckpt.cli.main", "agent", self.url, "--json"]
        command += ["--listen", at, "--memory", memory]
        folders = {"CKPT_RUNTIME_DIR": str(self.folder / f"m{number}"), "CKPT_SECRET_FILE": str(file)}
        made = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env={**os.environ, **folders})
        self.lending.append(made)
        assert made.stdout is not None
        return dict(json.loads(made.stdout.readline()))

    def lending_status(self, number: int = 0) -> dict[str, Any]:
        """What that memory-only node says of what it lends."""
        return dict(self._status(replace(read_settings(), runtime_dir=self.folder / f"m{number}"))["lending"])

    def await_lending(self, what: Callable[[dict[str, Any]], bool], number: int = 0) -> dict[str, Any]:
        """Until it says that."""
        deadline = time.monotonic() + BOUND_S
        while not what(status := self.lending_status(number)):
            assert time.monotonic() < deadline, status
            threading.Event().wait(0.02)
        return status

    def end_lending(self, number: int = 0, with_: signal.Signals = signal.SIGTERM) -> int:
        """Its exit status."""
        process = self.lending[number]
        process.send_signal(with_)
        status = process.wait(BOUND_S)
        assert process.stdout is not None
        process.stdout.close()
        return status

    def come_back(self, *nodes: int) -> None:
        """The ranks of these nodes (of all), whose agents have died, start others, each of the same name at the same
        address."""
        away = [rank for rank in self.job if not nodes or self.at[rank.rank] in nodes]
        for rank in away:
            known = next(each for each in rank.nodes if rank.rank in each["ranks"])
            rank.known = {"secret": self.secret, "address": known["addresses"][0], "name": known["name"]}
        together(away, come_back)
        for rank in away:
            self.pids[self.at[rank.rank]] = pid_of(rank)
            self._agents.add(pid_of(rank))

    # -- what goes wrong

    def forbid_commits(self) -> None:
        """The store takes claims and no data: memory is all there is."""
        folder = Path(self.url)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data").write_bytes(b"")

    def allow_commits(self) -> None:
        Path(self.url, "data").unlink()

    def kill_agent(self, node: int) -> None:
        pid = self.pids.pop(node)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_gone(pid)

    def kill(self, *nodes: int) -> None:
        """These nodes are lost: agent and ranks."""
        for node in nodes:
            self.kill_agent(node)
        self.hang_up(*nodes)

    def lose(self, *nodes: int) -> None:
        """These nodes are lost, and the job ends: the ranks of the other nodes are gone, too. Their agents stay."""
        self.kill(*nodes)
        self.hang_up()

    def damage(self, rank: int) -> None:
        """What that rank has staged is not what it was any more."""
        for arena in self.job[rank].slots.values():
            arena.data(0, 1000)[:] = bytes(range(250)) * 4

    def hang_up(self, *nodes: int) -> None:
        """The ranks of these nodes are gone for good (of all, where none is named). As threads they cannot die: they
        say so instead."""
        for rank in self.job:
            if (not nodes or self.at[rank.rank] in nodes) and rank.connection is not None:
                with contextlib.suppress(CkptError):
                    rank.leave_at_once()
                rank.connection.close()

    def status(self, node: int) -> dict[str, Any]:
        """What that node's agent says of itself."""
        return self._status(self.settings(node))

    def await_status(self, node: int, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Until that node's agent says that of itself."""
        deadline = time.monotonic() + BOUND_S
        while not what(status := self.status(node)):
            assert time.monotonic() < deadline, status
            threading.Event().wait(0.02)
        return status

    def _status(self, settings: Settings) -> dict[str, Any]:
        with self.tool(settings) as tool:
            return tool.status()

    @contextlib.contextmanager
    def tool(self, settings: Settings) -> Iterator[client.Connection]:
        """A command's connection to the agent of the node that has these settings."""
        with Tasks("tool") as tasks:
            sock = client.connect(self.url, settings)
            made = client.Connection(sock, tasks, messages.Message.close, lambda why: None, "tool")
            with contextlib.closing(made):
                yield made

    def close(self) -> None:
        for rank in self._made:
            rank.close()
        for number, process in enumerate(self.lending):
            if process.returncode is None:
                self.end_lending(number, signal.SIGKILL)
        for pid in self._agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
            wait_gone(pid)


def pid_of(rank: FakeRank) -> int:
    assert rank.connection is not None
    return rank.connection.agent_pid


def train(ranks: Sequence[FakeRank], until: int) -> None:
    """In lock-step."""
    while ranks[0].step < until:
        for rank in ranks:
            rank.enter(rank.step + 1)
            rank.train(rank.step + 1)
        for rank in ranks:
            rank.boundary()
        if ranks[0].is_due:
            together(ranks, lambda rank: rank.save_due())


def come_back(rank: FakeRank, tries: int = 1200) -> None:
    """As trainers do: who is refused tries again."""
    for _ in range(tries):
        try:
            if rank.connection is not None:
                rank.connection.close()
            rank.warm.clear()
            rank.connect()
            if rank.known is not None:
                rank.request("listen", rank.known)
            rank.join(rank.epoch, resume=True)
        except AgentError:
            threading.Event().wait(0.05)
        else:
            return
    raise AssertionError(f"no agent took rank {rank.rank}")


def line(url: str) -> list[Identity]:
    """The committed checkpoints that a restart would go on from, oldest first; each of them verified."""
    with contextlib.closing(open_store(url)) as store:
        run = Run(store)
        refs = run.view().history
        for each in verify(run, refs):
            assert each.is_good, each.problems
        return [ref.identity for ref in refs]
