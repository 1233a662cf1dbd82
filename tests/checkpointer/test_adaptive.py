"""ckpt.Adaptive with a real agent: what is measured decides, and what is learnt of failures outlives the job."""

from __future__ import annotations

from pathlib import Path

from tests.checkpointer.loops import losses
from tests.checkpointer.scripts import losses_of, train


def test_intervals_are_learnt_and_a_killed_trainer_is_a_failure_that_is_remembered(tmp_path: Path) -> None:
    first = train(tmp_path / "1.log", tmp_path / "run", 10_000, "--at-risk", "2", CKPT_LINGER_S="60")
    learnt = first.wait_for(lambda line: line.get("event") == "policy.changed" and "a commit every" in line["message"])
    assert "limited by at_risk_s=" in learnt["message"]
    assert "(0 failures seen)" in learnt["message"]
    for _ in range(2):
        first.wait_for(lambda line: line.get("event") == "commit.done")
    first.kill()
    reached = max(losses_of(first.lines()))
    second = train(tmp_path / "2.log", tmp_path / "run", reached + 200, "--at-risk", "2", "--seed", "1")
    lines = second.end()
    came = next(line["restored"] for line in lines if "restored" in line)
    assert 0 < came <= reached
    told = [line["message"] for line in lines if line.get("event") == "policy.changed"]
    assert "expected: one restore from memory per" in told[0]
    assert "(1 failure seen)" in told[0]
    both = losses_of(first.lines()) | losses_of(lines)
    assert [both[step] for step in range(1, reached + 201)] == losses(reached + 200)
