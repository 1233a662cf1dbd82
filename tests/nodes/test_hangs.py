"""Processes of a node stand still (SIGSTOP), and wake up later: training goes on where it can, and nothing wrong is
restored."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.nodes.jobs import ELASTIC, Elastic, check_memory
from tests.nodes.lan import Lan, Place

pytestmark = ELASTIC

STEPS = 40  # that training has to make beside an agent that hangs: more than a checkpoint is apart from the next


def agents(place: Place) -> list[int]:
    return [pid for pid in place.pids() if b"ckpt.agent.node.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def test_training_goes_on_beside_an_agent_that_hangs_and_its_node_saves_again_once_it_wakes_up(
    lan: Lan, tmp_path: Path
) -> None:
    job = Elastic(lan, tmp_path, 100_000, "--every", "10", nodes=(2, 3))
    job.start(3)
    job.safe_after(0.0, world=3)
    hung = agents(job.places[job.node_of(1)])
    assert len(hung) == 1
    signal_all(hung, signal.SIGSTOP)
    stopped, at = time.time(), job.last_step()
    job.wait_for(lambda line: line.get("step", 0) >= at + STEPS, stopped)
    signal_all(hung, signal.SIGCONT)
    woken = time.time()
    safe = job.safe_after(woken, world=3)
    assert not [line for line in job.lines() if "begins" in line and line["at"] > stopped], "no rank was started again"

    killed = job.kill(job.node_of(2))
    check_memory(job.restored(2, killed), at_least=safe)
    job.safe_after(killed, world=2)
    job.finish()


def test_a_node_that_hangs_as_a_whole_and_wakes_up_later_brings_nothing_old_back(lan: Lan, tmp_path: Path) -> None:
    """Its trainers hang the collectives of all. A new node makes torchrun start all others again without it."""
    job = Elastic(lan, tmp_path, 100_000, "--every", "10", nodes=(2, 3))
    job.start(3)
    safe = job.safe_after(0.0, world=3)
    name = job.node_of(1)
    hung = job.places.pop(name)
    pids = hung.pids()
    signal_all(pids, signal.SIGSTOP)
    stopped = time.time()
    (new,) = job.start()
    came = job.restored(3, stopped)
    assert new in {line["node"] for line in came}
    assert name not in {line["node"] for line in came}
    check_memory(came, at_least=safe)
    first = job.safe_after(stopped, world=3)

    signal_all([pid for pid in pids if pid in hung.pids()], signal.SIGCONT)
    woken = time.time()
    safe = max(first, job.safe_after(woken, world=3))
    hung.kill()
    killed = job.kill(job.node_of(0))
    check_memory(job.restored(2, killed), at_least=safe)
    job.safe_after(killed, world=2)
    job.finish()
