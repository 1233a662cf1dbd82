"""All kinds of state in one job: it comes back bit for bit, and what does not match is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.checkpointer.kinds import Job, facts
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen
from tests.checkpointer.scripts import Script

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own
STEPS, MORE = 7, 5


def undisturbed() -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """The losses of all steps, and the state after STEPS and at the end."""
    job = Job(0)
    losses = [job.train(step, job.state) for step in range(1, STEPS + 1)]
    middle = facts(job, job.state)
    losses += [job.train(step, job.state) for step in range(STEPS + 1, STEPS + MORE + 1)]
    return losses, middle, facts(job, job.state)


def check_restored(url: Path, losses: list[float], level: str) -> None:
    """Goes on from STEPS with a job of another seed, which must be like one that was never interrupted."""
    expected, middle, end = undisturbed()
    job = Job(9)
    assert differences(facts(job, job.state), middle)  # it has everything to learn
    with ckpt.Checkpointer(url, job.state) as ck:
        assert (ck.restored.step, ck.restored.level) == (STEPS, level)
        assert differences(facts(job, ck.state), middle) == []
        for step in ck.steps(STEPS + MORE):
            losses.append(job.train(step, ck.state))
    wait_agent_gone(url)
    assert differences(facts(job, ck.state), end) == []
    assert losses == expected


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    return [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]


@pytest.mark.parametrize("codec", ["auto", "planes"])
def test_every_kind_of_state_comes_back_from_the_store_bit_for_bit(tmp_path: Path, codec: str) -> None:
    job, losses = Job(0), []
    with ckpt.Checkpointer(tmp_path, job.state, codec=codec) as ck:
        for step in ck.steps(STEPS):
            losses.append(job.train(step, ck.state))
    wait_agent_gone(tmp_path)
    check_restored(tmp_path, losses, "store")


def test_every_kind_of_state_comes_back_from_the_memory_of_a_killed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    script = Script(
        [sys.executable, "-m", "tests.checkpointer.kinds", str(tmp_path / "run"), str(STEPS)], tmp_path / "log"
    )
    try:
        script.wait_for(lambda line: line.get("saved") == STEPS)
    finally:
        script.kill()
    losses = [line["loss"] for line in script.lines() if "loss" in line]
    check_restored(tmp_path / "run", losses, "local")


# --- what does not match ---------------------------------------------------------------------------------------------


class Part(nn.Module):
    """Parameters of these names, shapes and dtypes, all of one value."""

    def __init__(self, value: float, **made: tuple[tuple[int, ...], torch.dtype]) -> None:
        super().__init__()
        for name, (shape, dtype) in made.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, value, dtype=dtype)))


F32, F16 = torch.float32, torch.float16


def other() -> dict[str, Any]:
    model = Part(7.0, same=((3,), F32), added=((3,), F32), bent=((2, 4), F32), cast=((3,), F16))
    return {"model": model, "new": torch.full((2,), 7.0), "count": 0}


NAMED = {
    "missing": ["model.added", "new"],
    "extra": ["model.gone", "old"],
    "reshaped": ["model.bent", "(4, 2)", "(2, 4)"],
    "another dtype": ["model.cast", "float32", "float16"],
}


def test_every_difference_is_named_and_without_strict_what_fits_is_restored(tmp_path: Path) -> None:
    """In one message, and then nothing is changed."""
    model = Part(1.0, same=((3,), F32), gone=((3,), F32), bent=((4, 2), F32), cast=((3,), F32))
    with ckpt.Checkpointer(tmp_path, {"model": model, "old": torch.ones(2), "count": 5}) as ck:
        for _ in ck.steps(2):
            pass
    wait_agent_gone(tmp_path)
    state, seen = other(), Seen()
    with pytest.raises(ckpt.StateMismatch) as raised:
        ckpt.Checkpointer(tmp_path, state).__enter__()
    wait_agent_gone(tmp_path)
    assert "model.same" not in str(raised.value)
    assert "strict=False" in str(raised.value)
    assert all(torch.all(parameter == 7.0) for parameter in state["model"].parameters())
    assert state["count"] == 0
    with ckpt.Checkpointer(tmp_path, state, strict=False, sinks=(seen,)) as ck:
        assert (ck.restored.step, ck.state["count"]) == (2, 5)
        assert torch.all(state["model"].same == 1.0)
        for tensor in (*(getattr(state["model"], name) for name in ("added", "bent", "cast")), ck.state["new"]):
            assert torch.all(tensor == 7.0)
        for _ in ck.steps(3):
            pass
    wait_agent_gone(tmp_path)
    told = seen.wait("restore.mismatch")
    assert told.loud
    for said in (str(raised.value), told.message):
        assert [name for names in NAMED.values() for name in names if name not in said] == []
    again = other()
    with ckpt.Checkpointer(tmp_path, again) as ck:  # what was saved then has the new structure
        assert ck.restored.step == 3
    wait_agent_gone(tmp_path)
    assert torch.all(again["model"].same == 1.0)


def test_the_dict_that_was_given_is_the_state(tmp_path: Path) -> None:
    """Who goes on with a name of their own, in the same run or after a restart, loses nothing by that."""
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "best": 0}
    with ckpt.Checkpointer(tmp_path / "run", state) as ck:
        assert ck.state is state
        for step in ck.steps(2):
            state["best"] = step
    wait_agent_gone(tmp_path / "run")
    again: dict[str, Any] = {"model": nn.Linear(2, 2), "best": 0}
    with ckpt.Checkpointer(tmp_path / "run", again):
        assert again["best"] == 2
