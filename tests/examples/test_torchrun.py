"""examples/launchers/torchrun.sh on nodes of their own (tests/nodes): one is killed, another one comes."""

from __future__ import annotations

import time
from pathlib import Path

from tests.integrations.runs import REPOSITORY
from tests.nodes.conftest import hub as hub  # fixtures
from tests.nodes.conftest import lan as lan
from tests.nodes.jobs import ELASTIC, Elastic, check_losses, check_memory
from tests.nodes.lan import Lan
from tests.nodes.train import losses

SCRIPT = REPOSITORY / "examples" / "launchers" / "torchrun.sh"

pytestmark = ELASTIC


def test_nodes_that_are_left_go_on_from_memory_and_a_new_one_joins(lan: Lan, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = Elastic(lan, tmp_path, 100_000, "--every", "10", "--end", str(end), nodes=(2, 3), launcher=SCRIPT)
    job.start(3)
    job.safe_after(0.0, world=3)
    safe = job.safe_step()
    killed = job.kill(job.node_of(0))
    check_memory(job.restored(2, killed), at_least=safe)
    job.safe_after(killed, world=2)
    safe, grown = job.safe_step(), time.time()
    job.start(1)
    check_memory(job.restored(3, grown), at_least=safe)
    job.safe_after(grown, world=3)
    end.touch()
    check_losses(job.end(), losses(job.last_step()))
