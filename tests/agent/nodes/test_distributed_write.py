"""Parts of a commit that other nodes write: who fails or is late is followed by who has a copy, and who is first
counts."""

from __future__ import annotations

import heapq
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from ckpt.agent.commit.distributed_write import SLOWDOWN_MAX, DistributedWrite, _group_by_node, overdue_s
from ckpt.agent.commit.job_options import JobOptions
from ckpt.agent.net.channel import BEAT_S
from ckpt.agent.runtime.coroutines import Promise
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import WriteRequest
from ckpt.clock import ManualClock
from ckpt.format.manifest import FRAME
from ckpt.ipc.addresses import SILENCE_S_MAX
from ckpt.storage import open as open_store
from ckpt.store.packs import Written
from ckpt.store.reader import open_record
from ckpt.store.run import Run
from tests.agent.nodes.cluster import Cluster, line
from tests.agent.nodes.staged import identity

MARGIN_S = 10.0


def test_a_part_is_late_by_comparison_with_those_that_are_written() -> None:
    assert overdue_s([(2.0, 100)], 100, 5.0) == SLOWDOWN_MAX * 2 + 5
    assert overdue_s([(2.0, 100), (4.0, 100)], 100, 5.0) == SLOWDOWN_MAX * 4 + 5, "the slowest counts"
    assert overdue_s([(2.0, 100)], 300, 5.0) == SLOWDOWN_MAX * 6 + 5, "what has more bytes may take longer"
    assert overdue_s([(2.0, 300)], 100, 5.0) == SLOWDOWN_MAX * 2 + 5


def test_each_node_writes_the_frames_of_its_ranks_and_nobody_those_of_no_other_node(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(50):
        world = int(rng.integers(1, 40))
        homes = rng.integers(0, 6, world)  # 0: the coordinator's
        ranks = {f"n{node}": frozenset(np.flatnonzero(homes == node).tolist()) for node in range(1, 6)}
        ranks = {name: each for name, each in ranks.items() if each}
        of_frames = rng.integers(0, world, int(rng.integers(0, 200)))
        todo = np.flatnonzero(rng.random(len(of_frames)) < 0.7)
        found = _group_by_node(ranks, of_frames, todo)
        for name, each in ranks.items():
            wanted = [int(frame) for frame in todo if int(of_frames[frame]) in each]
            assert found.get(name, np.zeros(0)).tolist() == wanted
        assert found.keys() <= ranks.keys()
        assert all(len(each) for each in found.values())


class Writers:
    """Nodes that write when the test says so, and the main thread. Rank r is on node "nr", of which "kr" has a copy;
    rank 0 on the one that commits."""

    def __init__(self, world: int, copies: int = 1, clock: ManualClock | None = None) -> None:
        self.clock, self.copies = clock or ManualClock(), copies
        self.asked: list[tuple[str, Promise[Written]]] = []
        self.cancels: dict[int, threading.Event] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        frames = np.zeros(world, FRAME)
        frames["length"] = 100
        made = SimpleNamespace(
            identity=identity(5),
            manifest=SimpleNamespace(frames=frames),
            ranks=np.arange(world),
            offsets=np.zeros(world, np.int64),
        )
        self.parts = DistributedWrite(
            cast(MemoryCheckpoint, made),
            JobOptions(),
            {node(rank): frozenset([rank]) for rank in range(world)},
            self.holders,
            self.ask,
            lambda what: what(),
            self.later,
            MARGIN_S,
            self.clock,
        )
        self.futures = [future for _, future in self.parts(np.arange(world))]

    def holders(self, name: str) -> list[str]:
        return [f"{keeper}{name.lstrip('n') or 0}" for keeper in "kl"][: self.copies]

    def ask(self, name: str, wanted: WriteRequest, cancel: threading.Event) -> Promise[Written]:
        answer = Promise[Written]()
        self.asked.append((name, answer))
        (rank,) = wanted.ranks.tolist()
        self.cancels[rank] = cancel
        return answer

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.clock.now_s() + delay_s, len(self._timers), what))

    def move(self, seconds: float) -> None:
        self.clock.sleep_s(seconds)
        while self._timers and self._timers[0][0] <= self.clock.now_s():
            heapq.heappop(self._timers)[2]()

    def names(self) -> list[str]:
        return [name for name, _ in self.asked]

    def writes(self, name: str, error: str = "") -> Written | None:
        """The one that was asked last under that name answers."""
        answer = [answer for each, answer in self.asked if each == name][-1]
        made = None if error else Written(((name, 100),), np.zeros(1))
        answer.set_outcome(made, error)
        return made

    def outcome(self, rank: int) -> str:
        """Who has written that rank's part, or why nobody has; "": it is not known yet."""
        future = self.futures[rank]
        if not future.done():
            return ""
        error = future.exception(0)
        return str(error) if error else future.result(0).packs[0][0] or "this node"


def node(rank: int) -> str:
    return f"n{rank}" if rank else ""


def test_whoever_is_slow_is_followed_by_who_has_a_copy_and_the_first_counts() -> None:
    """The node that commits like the others, whose own link may be slow."""
    nodes = Writers(3)
    nodes.move(1000)
    assert nodes.names() == ["", "n1", "n2"], "the store may be slow for all"
    for slow, keeper in ((1, "k1"), (0, "k0")):
        nodes = Writers(3)
        nodes.move(2.0)
        for rank in {0, 1, 2} - {slow}:
            nodes.writes(node(rank))
        nodes.move(SLOWDOWN_MAX * 2.0 + MARGIN_S - 2.1)
        assert nodes.names() == ["", "n1", "n2"], "not yet"
        nodes.move(0.2)
        assert nodes.names() == ["", "n1", "n2", keeper]
        nodes.move(1000)
        assert nodes.names() == ["", "n1", "n2", keeper], "one is enough"
        assert not nodes.cancels[slow].is_set(), "it may be first after all"
        nodes.writes(keeper)
        assert nodes.cancels[slow].is_set(), "nobody waits for it any more"
        nodes.writes(node(slow))
        assert nodes.outcome(slow) == keeper


def test_once_a_commit_is_over_nobody_is_asked_to_write_for_it() -> None:
    """As where the coordinator's own part has failed."""
    nodes = Writers(3)
    nodes.move(2.0)
    nodes.writes("n2")
    nodes.parts.end_commit()
    assert nodes.cancels[0].is_set()
    nodes.move(1000)
    nodes.writes("n1", "it has no store")
    nodes.writes("")
    nodes.move(1000)
    assert nodes.names() == ["", "n1", "n2"]


@pytest.mark.parametrize("order", [("n1", "k1"), ("k1", "n1", "k1")])
def test_a_part_fails_once_everybody_has_failed_who_had_it_since_the_node_itself_has_and_not_before(
    order: tuple[str, ...],
) -> None:
    nodes = Writers(2)
    nodes.writes("")
    nodes.move(MARGIN_S + 1)
    for name in order:
        assert nodes.outcome(1) == ""
        nodes.writes(name, f"{name} cannot")
    assert "n1 cannot" in nodes.outcome(1)
    nodes.move(1000)
    assert sorted(nodes.names()) == sorted(["", *order])


@pytest.mark.parametrize(("rank", "keepers"), [(1, ["k1", "l1"]), (0, ["k0", "l0"])])
def test_whoever_fails_is_followed_at_once_by_one_after_the_other(rank: int, keepers: list[str]) -> None:
    nodes = Writers(2, copies=2)
    nodes.writes(node(rank), "full")
    nodes.writes(keepers[0], "full")
    assert nodes.names() == ["", "n1", *keepers]
    nodes.writes(keepers[1])
    assert nodes.outcome(rank) == keepers[1]


@pytest.mark.parametrize(("rank", "said"), [(1, "node n1"), (0, "this node")])
def test_a_part_of_which_nobody_has_a_copy_fails_with_its_node(rank: int, said: str) -> None:
    nodes = Writers(3, copies=0)
    nodes.writes(node(rank), "gone")
    assert nodes.outcome(rank) == f"{said} has not written its part: gone"
    assert nodes.names() == ["", "n1", "n2"]


@pytest.mark.parametrize("copies", [1, 0])
def test_who_had_no_copy_yet_of_a_slow_nodes_part_is_asked_again_once_that_node_has_failed(copies: int) -> None:
    """`copies`: how many are known of while the node is only slow."""
    nodes = Writers(2, copies)
    nodes.writes("")
    nodes.move(MARGIN_S + 1)
    if copies:
        nodes.writes("k1", "it has no copies of them")
    nodes.move(1000)
    assert nodes.outcome(1) == "", "it is only slow"
    nodes.copies = 1
    nodes.writes("n1", "gone")
    assert nodes.names() == ["", "n1", *["k1"] * copies, "k1"]
    nodes.writes("k1")
    assert nodes.outcome(1) == "k1"


def test_who_writes_a_slow_nodes_part_is_waited_for_where_that_node_fails() -> None:
    nodes = Writers(2, copies=2)
    nodes.writes("")
    nodes.move(MARGIN_S + 1)
    nodes.writes("n1", "gone")
    assert nodes.names() == ["", "n1", "k1"]
    nodes.writes("k1", "full")
    assert nodes.names() == ["", "n1", "k1", "l1"]


def test_an_own_part_of_which_nobody_has_a_copy_goes_on_however_slow() -> None:
    nodes = Writers(2, copies=0)
    nodes.writes("n1")
    nodes.move(1000)
    assert nodes.names() == ["", "n1"]
    assert not nodes.cancels[0].is_set()
    nodes.writes("")
    assert nodes.outcome(0) == "this node"


def test_a_commit_that_is_given_up_names_who_still_writes_and_asks_nobody_any_more() -> None:
    nodes = Writers(3)
    nodes.writes("n1")
    assert nodes.parts.give_up() == {"n2"}, "what this node writes is broken off by its cancel"
    assert all(cancel.is_set() for cancel in nodes.cancels.values())
    assert [nodes.outcome(rank) for rank in range(3)] == ["it was given up", "n1", "it was given up"]
    nodes.writes("n2", "it was told to end it")
    nodes.move(1000)
    late = nodes.parts(np.arange(3))
    assert all("given up" in str(future.exception(0)) for _, future in late), "nor for what is begun after that"
    assert nodes.names() == ["", "n1", "n2"]


def test_what_a_node_that_hangs_was_to_upload_is_written_by_who_has_a_copy_under_its_own_keys(
    cluster: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads are slowed down, so that the agent hangs in the middle of its own. All of it has to come to its end while
    an agent that says nothing is not yet taken to be gone: on a machine that is far too busy that is left to chance."""
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "1")
    cluster.options = {**cluster.options, "limits": {"memory": None, "bandwidth": 1_000_000.0}}
    cluster.start(0, 1)
    version = cluster.save("peer")
    os.kill(cluster.pids[1], signal.SIGSTOP)
    stopped_s = time.monotonic()
    assert cluster.job[0].wait_level(version, "store"), cluster.job[0].levels
    took_s = time.monotonic() - stopped_s
    assert [each.version for each in line(url)] == [version]
    first = files_of(url)
    os.kill(cluster.pids[1], signal.SIGCONT)
    if not MARGIN_S / 2 < took_s < SILENCE_S_MAX - BEAT_S and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        assert len(writers_named(url)) == 2
        pytest.skip("this machine has so much else to do that its part was written before, or it is taken to be gone")
    cluster.finish()
    last, named = files_of(url), writers_named(url)
    assert len(named) == 2, "the record says who wrote which part"
    assert all(last.pop(path) == written for path, written in first.items()), "nothing is written twice to one key"
    assert named.isdisjoint(path.name.partition("-")[0] for path in last), "nor by two that have one name"
    (told,) = [path.read_text() for path in (cluster.folder / "n0").rglob("*.log")]
    assert "takes longer" in told
    assert "has not written" not in told, "it was there all the time"


def files_of(url: str) -> dict[Path, tuple[bytes, int]]:
    """All packs and records: what each holds, and which file that is."""
    found = [path for folder in ("data", "commits") for path in Path(url, folder).rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_ino) for path in found}


def writers_named(url: str) -> set[str]:
    """By the only record, of its packs."""
    with closing(open_store(url)) as store:
        (ref,) = Run(store).view().commits
        return {key.rpartition("/")[2].partition("-")[0] for key, _ in open_record(store, ref).packs}


class CountedClock(ManualClock):
    reads = 0

    def now_s(self) -> float:
        self.reads += 1
        return super().now_s()


def test_a_part_that_is_written_makes_nobody_look_at_all_other_parts_again() -> None:
    """A job may have a thousand nodes, whose parts end one after the other."""
    clock = CountedClock()
    nodes = Writers(200, clock=clock)
    for rank in range(200):
        nodes.move(0.001)
        nodes.writes(node(rank))
    assert all(future.done() for future in nodes.futures)
    assert clock.reads < 20 * 200
