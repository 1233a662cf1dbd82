"""A node is killed at any moment: the job goes on, with another in its place or without, from memory, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

from tests.nodes.jobs import ELASTIC, Elastic, check_memory
from tests.nodes.lan import Lan

pytestmark = ELASTIC

EVERY = 20
STORE_BYTES_S = 200e3  # so slow that a commit takes many steps, and the newest checkpoints are in memory only
OPTIONS = ("--every", str(EVERY), "--mib", "3", "--bandwidth", str(STORE_BYTES_S))


def test_a_node_that_is_killed_at_any_moment_of_a_save_is_replaced_and_nothing_is_read_from_the_store(
    lan: Lan, tmp_path: Path
) -> None:
    """A node that is left may be late for the next start, for torchrun's own reasons: it is asked nevertheless."""
    job = Elastic(lan, tmp_path, 100_000, *OPTIONS, nodes=(2, 3), apart=True)
    job.start(3)
    since = 0.0
    for moment, rank in ((after_a_save, 0), (in_the_copy, 1), (at_the_snapshot, 2)):
        job.safe_after(since, world=3)
        victim = job.node_of(rank)
        moment(job, lan, victim)
        safe = job.safe_step()
        killed = job.kill(victim)
        job.start()
        came = job.restored_by_any(killed)
        check_memory(came, at_least=safe)
        since = job.restored(3, killed)[0]["at"]
    job.safe_after(since, world=3)
    job.finish()


def test_with_two_parities_any_two_of_four_nodes_are_killed_and_the_others_go_on_from_memory(
    lan: Lan, tmp_path: Path, secret_file: Path
) -> None:
    """Twice: rank 0's node is among the first two; two new ones take their place, and of these one goes with an old."""
    job = Elastic(lan, tmp_path, 100_000, *OPTIONS, "--parity", "2", "2", nodes=(2, 4), apart=True)
    job.env["CKPT_SECRET_FILE"] = str(secret_file)
    job.start(4)
    job.safe_after(0.0, world=4)
    victims = [job.node_of(rank) for rank in (0, 2)]
    safe = job.safe_step()
    killed = min(job.kill(victim) for victim in victims)
    check_memory(job.restored(2, killed), at_least=safe)
    new = job.start(2)
    came = job.restored(4, killed)
    since = came[0]["at"]
    job.safe_after(since, world=4)
    safe = job.safe_step()
    old = next(name for name in job.places if name not in new)
    killed = min(job.kill(victim) for victim in (new[0], old))
    check_memory(job.restored(2, killed), at_least=safe)
    job.finish()


def after_a_save(job: Elastic, lan: Lan, victim: str) -> None:
    job.safe_after(time.time(), world=3)


def in_the_copy(job: Elastic, lan: Lan, victim: str) -> None:
    """Its link is so slow that a copy takes over a second."""
    lan.slow(job.places[victim], mbit=4)
    began = job.wait_for(lambda line: line.get("step", 1) % EVERY == 0, time.time())
    job.wait_for(lambda line: line.get("step") == began["step"] + 5, began["at"] - 1)


def at_the_snapshot(job: Elastic, lan: Lan, victim: str) -> None:
    job.wait_for(lambda line: line.get("step", 1) % EVERY == 0, time.time())
