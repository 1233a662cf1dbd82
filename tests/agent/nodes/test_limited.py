"""A node in a container: a control group of the kernel's, with a limit, and the node's agent in it. It takes no more
than that, gives up in the stated order what does not fit, and says so; nothing is ended for want of memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt.agent.state.memory_pressure import reserve_bytes
from ckpt.cgroups import CGROUPS, V1, V2
from ckpt.threads import Tasks
from tests.agent.nodes.cluster import Cluster

EXTRA = 8 << 20  # numbers that each rank holds beside the rest, of which it stages a half
SLOT_BYTES = 4 * EXTRA // 2 + (2 << 20)  # and what that takes, a little more
GONE_S = 20.0  # how long a group may take to be empty

_TAKES = """
import sys
from ckpt.agent.runtime.memory_plan import free_bytes
taken = []
while free_bytes() > int(sys.argv[1]):
    taken.append(bytearray(b"x" * (1 << 20)))
print("full", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Limited:
    """A memory control group."""

    folder: Path
    limit: str  # what its version calls that

    def set(self, slots: float) -> None:
        (self.folder / self.limit).write_text(str(int(slots * SLOT_BYTES)))

    def take_in(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def ended(self) -> int:
        """How many processes the kernel has ended in it."""
        name = "memory.oom_control" if self.limit in V1.limit_files else "memory.events"
        told = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(told["oom_kill"])

    def remove(self) -> None:
        deadline = time.monotonic() + GONE_S
        while True:
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (self.folder.parent / "cgroup.procs").write_text(pid)
            try:
                self.folder.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)


@pytest.fixture
def limited() -> Iterator[Limited]:
    name = f"ckpt-{os.getpid()}-{secrets.token_hex(3)}"
    for root, names in ((CGROUPS / "memory", V1), (CGROUPS, V2)):
        with contextlib.suppress(OSError):
            (root / name).mkdir()
            found = Limited(root / name, names.limit_files[0])
            if (found.folder / found.limit).exists():
                break
            found.folder.rmdir()
    else:
        pytest.skip("needs a control group for memory: none can be made here")
    try:
        yield found
    finally:
        found.remove()


def begin(cluster: Cluster, limited: Limited, slots: float) -> None:
    """Two nodes; the agent of node 1 has so much."""
    limited.set(slots)
    cluster.connect(0, 1)
    limited.take_in(cluster.pids[1])
    for rank in cluster.job:
        rank.extra = EXTRA


@pytest.mark.parametrize(
    ("room", "slots", "kept"),
    [
        (12.0, 3, {0: [1], 1: [0]}),  # three of its own, two generations of the other's, two for what is committed
        (9.0, 2, {0: [1], 1: [0]}),  # a slot is more than a tenth
        (6.7, 2, {0: [1], 1: [0]}),
        (5.0, 2, {0: [], 1: [0]}),
        (3.6, 1, {}),
    ],
)
def test_a_job_takes_no_more_than_the_control_group_allows_and_says_what_that_costs(
    limited: Limited, room: float, slots: int, kept: dict[int, list[int]], cluster: Cluster
) -> None:
    begin(cluster, limited, room)
    cluster.enter()
    assert cluster.await_event("memory.plan")["slots"] == slots
    is_safe = kept == {0: [1], 1: [0]}
    placed = cluster.await_event("replication.placed")
    assert len([row for row in placed["nodes"] if row["kept_by"]]) == sum(map(bool, kept.values()))
    loud = [each["loud"] for each in cluster.job[0].events if each["name"] == "replication.placed"]
    assert loud == [True], "told once, and a warning: they are on one machine, or not as safe as was asked for"
    for _ in range(3):
        cluster.checkpoint(*(["peer"] if is_safe else []), "store")
    assert cluster.keepers() == kept
    assert limited.ended() == 0


def test_a_job_that_has_no_room_for_a_single_slot_saves_once_there_is_room(limited: Limited, cluster: Cluster) -> None:
    begin(cluster, limited, 2.5)

    def give_more() -> None:
        assert cluster.await_event("memory.plan")["slots"] == 0
        limited.set(12.0)

    with Tasks("giving", pool_size=1) as tasks:
        given = tasks.submit(give_more)
        cluster.enter()
        given.result()
    assert cluster.await_event("memory.plan", 2)["slots"] == 3
    cluster.checkpoint("peer", "store")
    assert limited.ended() == 0


@contextlib.contextmanager
def filled(limited: Limited, left: int) -> Iterator[None]:
    """Another process has taken all of it but so many bytes."""
    code = f"open({str(limited.folder / 'cgroup.procs')!r}, 'w').write('0')\n{_TAKES}"
    command = [sys.executable, "-c", code, str(left)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        yield
        process.kill()


def test_a_container_that_another_process_fills_has_back_what_is_only_warm_and_what_is_safe_stays(
    limited: Limited, cluster: Cluster
) -> None:
    cluster.forbid_commits()
    begin(cluster, limited, 12.0)
    cluster.enter()
    cluster.checkpoint("peer")
    safe = cluster.checkpoint("peer")  # of the one before the copy is only warm by now
    left = reserve_bytes(int((limited.folder / limited.limit).read_text())) // 2
    with filled(limited, left):
        cluster.await_status(1, lambda status: "memory.released" in [each["event"] for each in status["events"]])
        assert limited.ended() == 0
        cluster.lose(0)
    candidate = cluster.start(1, 2).fields["candidate"]
    assert candidate["step"] == safe
