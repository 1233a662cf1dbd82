"""Nodes, agents and ranks are killed at many moments of saves. What is started on the nodes that are left goes on from
the newest checkpoint that was safe with others or in the store, or a newer one, whole and of one branch.

CKPT_NODE_KILLS: how many (a few by default). The seed is printed, and CKPT_TEST_SEED replays the choices, if not the
moments that they fall on."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from ckpt.errors import CkptError
from ckpt.threads import Tasks
from ckpt.types import Version
from tests.agent.nodes.cluster import Cluster, line, train

KILLS = int(os.environ.get("CKPT_NODE_KILLS", "6"))
NODES = 3


class Busy:
    """Trains and saves, in a thread, until the job is broken. `safe`: steps that rank 0 knows to be safe."""

    def __init__(self, cluster: Cluster, rng: random.Random, tasks: Tasks) -> None:
        self.cluster, self.job, self.seed = cluster, cluster.job, rng.getrandbits(32)
        self.stop = threading.Event()
        self.over: Future[None] = tasks.submit(self._run)

    def _run(self) -> None:
        rng = random.Random(self.seed)
        with contextlib.suppress(CkptError, AssertionError, TimeoutError, OSError):
            while not self.stop.is_set():
                train(self.job, self.job[0].step + 1)
                self.stop.wait(rng.choice((0.0, 0.01, 0.05)))

    def safe(self, *at: str) -> int:
        """The newest that is at one of these levels."""
        with self.job[0].changed:
            levels = dict(self.job[0].levels)
        wanted = at or ("peer", "store")
        known = [Version.parse(version).step for (version, level), (ok, _) in levels.items() if ok and level in wanted]
        return max(known, default=0)


@contextlib.contextmanager
def busy(cluster: Cluster, rng: random.Random) -> Iterator[Busy]:
    with Tasks("busy", pool_size=1) as tasks:
        made = Busy(cluster, rng, tasks)
        try:
            yield made
        finally:
            made.stop.set()
            made.over.result(60)


def await_level(made: Busy, step: int) -> None:
    rank = made.job[0]
    with rank.changed:
        assert rank.changed.wait_for(lambda: made.safe() >= step or made.over.done(), 60)
    assert made.safe() >= step, rank.levels


@pytest.mark.timeout(300 + 30 * KILLS)
@pytest.mark.parametrize(
    ("peers", "lends"), [({"replicas": 1}, False), ({"data": 2, "parity": 1}, False), ({"replicas": 2}, True)]
)
def test_whatever_is_killed_at_whatever_moment_the_newest_safe_checkpoint_comes_back(
    peers: dict[str, int], lends: bool, cluster: Cluster, url: str, seed: int
) -> None:
    """`lends`: a memory-only node keeps copies, too."""
    rng = random.Random(seed)
    commits = rng.random() < 0.5
    if not commits:
        cluster.forbid_commits()
    if lends:
        cluster.peers = cluster.lend()["listen"]
    cluster.options = {**cluster.options, "peers": peers, "policy": {"steps": 2, "seconds": None}}
    known = copied = 0
    nodes = list(range(NODES))
    for kill in range(KILLS):
        spread = [nodes[0], *(rng.choice(nodes) for _ in range(rng.randint(0, 2))), *nodes[1:]]
        decision = cluster.start(*spread)
        found = decision.fields["candidate"]
        step = found["step"] if found is not None else 0
        assert step >= known, f"kill {kill}: step {known} was safe, and step {step} came back"
        if step <= copied or found is None or found["level"] != "store":  # else it reached the store before its copies
            assert set(cluster.fetched()) <= {"local", "peer"}, found
        with busy(cluster, rng) as job:
            await_level(job, step + 2)
            threading.Event().wait(rng.choice((0.0, 0.01, 0.03, 0.1, 0.3)))
            victim = rng.choice(nodes)
            what = rng.choice(("node", "node", "ranks", "agent"))
            if what == "ranks":
                cluster.hang_up(victim)
            elif what == "agent":
                cluster.kill_agent(victim)
            else:
                cluster.kill(victim)
            known, copied = job.safe(), job.safe("peer")
        cluster.hang_up()
        rng.shuffle(nodes)
        print(f"kill {kill}: {what} {victim} of {spread}: step {known} was safe")
    assert cluster.restart(*nodes)["step"] >= known
    if commits:
        line(url)  # what is in the store is good
