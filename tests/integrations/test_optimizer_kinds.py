"""Jobs with optimizers of other packages: killed and started again, they take the very same steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.forked import Forked, server

SCRIPT = Path(__file__).parent / "scripts" / "optimizer_kinds.py"
LAST, KILLED = 12, 5
KINDS = [
    "torchao.optim:AdamW8bit",
    "bitsandbytes.optim:AdamW8bit",
    "pytorch_optimizer:MADGRAD",
    "schedulefree:SGDScheduleFree",
]


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with server(*(kind.partition(":")[0] for kind in KINDS)):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_takes_the_same_steps_as_an_undisturbed_one(tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind.partition(":")[0])
    env = {"CKPT_LINGER_S": "1"}
    whole = Forked(SCRIPT, tmp_path / "whole", (str(tmp_path / "whole-run"), kind, str(LAST)), env=env)
    killed = Forked(SCRIPT, tmp_path / "killed", (str(tmp_path / "run"), kind, str(LAST)), env=env)
    whole.run()
    killed.run_killed(KILLED)
    killed.run()
    assert len({step.pid for step in killed.steps()}) == 2
    assert killed.trajectory() == whole.trajectory()
    # The second life went on, and did not begin anew.
    assert min(step.step for step in killed.steps() if step.pid == killed.steps()[-1].pid) >= KILLED
