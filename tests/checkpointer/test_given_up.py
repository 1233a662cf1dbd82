"""An agent that dies again and again before it gets anything done: it is given up, and training is not."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt
from ckpt.trainer.link.agent_connection import FAILED_RESTARTS_MAX
from tests.checkpointer.loops import losses, make
from tests.checkpointer.runs import LATER, Seen, kill_agent
from tests.checkpointer.watched import calls_watched


def test_a_job_whose_agent_is_given_up_trains_to_its_end_and_waits_for_nothing_there(tmp_path: Path) -> None:
    job, seen, found = make(), Seen(), []
    limits = ckpt.Limits(exit_s=60.0)  # so that it tries so long at most
    ck = ckpt.Checkpointer(tmp_path / "run", job.state, policy=LATER, limits=limits, sinks=(seen,))
    ck.__enter__()
    for step in ck.steps(4):
        found.append(job.train(step))
        if step == 2:
            for number in range(1, FAILED_RESTARTS_MAX + 2):
                kill_agent(tmp_path / "run")
                name = "agent.restarted" if number <= FAILED_RESTARTS_MAX else "agent.given_up"
                seen.wait_for(name, number if number <= FAILED_RESTARTS_MAX else 1)
            ck.step()
            with pytest.raises(ckpt.SaveFailed, match="could not be started again"):
                ck.save().wait(timeout_s=30)
    with calls_watched() as calls, pytest.raises(ckpt.CommitFailed, match="could not be started again"):
        ck.__exit__(None, None, None)
    assert calls.count("Block._save_now") == 1, "it tries again as long as one is being started"
    assert found == losses(4)
    assert seen.named("agent.given_up")[0].loud
