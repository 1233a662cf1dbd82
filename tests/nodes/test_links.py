"""The agents' links are slow, or cut: training goes on, and nothing wrong is restored."""

from __future__ import annotations

import time
from pathlib import Path

from ckpt.ipc.addresses import SILENCE_S_MAX
from tests.nodes.jobs import ELASTIC, Elastic, check_memory
from tests.nodes.lan import Lan

pytestmark = ELASTIC

EVERY = 20
CUT_S = SILENCE_S_MAX + 10.0  # the agents take each other for lost


def test_training_goes_on_while_an_agents_link_is_slow_and_while_it_is_cut_in_the_middle_of_a_save(
    lan: Lan, tmp_path: Path
) -> None:
    """That of the coordinator's."""
    job = Elastic(lan, tmp_path, 100_000, "--every", str(EVERY), "--mib", "6", nodes=(2, 3), apart=True)
    job.start(3)
    job.safe_after(0.0, world=3)
    far = job.places[job.node_of(0)]

    lan.slow(far, mbit=10)
    slowed = time.time()
    copied = job.wait_for(lambda line: line.get("event") == "replication.done" and line["data"]["seconds"] > 1, slowed)
    assert steps_between(job, slowed, copied["at"]) > 3, "training stood still behind a slow link"

    job.wait_for(lambda line: line.get("step", 1) % EVERY == 0, time.time())
    lan.plug(far, connected=False)
    cut = time.time()
    time.sleep(CUT_S)  # it is the silence that is the matter
    assert steps_between(job, cut, time.time()) > 10, "training stood still behind a cut link"
    given_up = [line for line in job.lines() if line.get("event") == "replication.failed" and line["at"] > cut]
    assert given_up, "nothing was on its way when the link was cut"
    lan.plug(far, connected=True)
    lan.slow(far, mbit=0)
    mended = time.time()
    safe = job.safe_after(mended, world=3)
    assert not [line for line in job.lines() if "begins" in line and line["at"] > slowed], "no rank was started again"

    killed = job.kill(job.node_of(0))
    came = job.restored(2, killed)
    check_memory(came, at_least=safe)
    job.safe_after(killed, world=2)
    job.finish()


def steps_between(job: Elastic, first: float, last: float) -> int:
    """That rank 0 ended."""
    return sum("step" in line and line["rank"] == 0 and first < line["at"] < last for line in job.lines())
