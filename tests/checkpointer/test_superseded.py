"""A newer start takes the run while this one saves, or ends: it leaves with 75, wherever it is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import ckpt
from tests.agent.fake import FakeRank
from tests.checkpointer.loops import make
from tests.checkpointer.runs import LATER, run
from tests.checkpointer.scripts import train


def take_over(folder: Path, *options: str) -> None:
    """Another job, which has come to its end when this returns."""
    train(folder / "log", folder / "run", 3, "--take-over", "--pace", "0", *options, CKPT_LAUNCH="another").end()


def test_a_save_of_a_superseded_job_leaves_with_75(tmp_path: Path) -> None:
    with pytest.raises(ckpt.Leave) as left, ckpt.Checkpointer(tmp_path / "run", make().state, policy=LATER) as ck:  # noqa: PT012
        ck.step()
        take_over(tmp_path)
        ck.save()
        raise AssertionError("it was saved")
    assert left.value.code == 75


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_a_job_that_is_superseded_at_its_end_leaves_with_75(when: str, tmp_path: Path) -> None:
    more = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), dtype=torch.int32)
    more[0] = 2  # the step that the other one restores, as its script expects it
    other = threading.Thread(target=take_over, args=(tmp_path, "--mib", "1"))
    limits = ckpt.Limits(bandwidth=more.nbytes / 45)  # the last save takes longer than it takes to start another job

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        if step == 2:
            ck.step()
            other.start()
            if when == "before":
                other.join()

    try:
        with pytest.raises(ckpt.Leave) as left:
            run(tmp_path / "run", 2, make(), at, {"more": more}, policy=LATER, limits=limits)
    finally:
        other.join()
    assert left.value.code == 75


def test_a_superseded_launch_that_begins_again_leaves_with_75_and_is_told_how_it_may_stay(tmp_path: Path) -> None:
    """As where a launcher starts again whatever ends with a code."""
    url, said, job = tmp_path / "run", list[ckpt.Event](), make()
    other = FakeRank(str(url), 0, 1, "another")
    try:
        with pytest.raises(ckpt.Leave), ckpt.Checkpointer(url, job.state, policy=LATER) as ck:  # noqa: PT012
            for step in ck.steps(10**6):
                job.train(step)
                if step == 1:
                    other.connect()
                    other.begin()
        again = ckpt.Checkpointer(url, make().state, policy=LATER, sinks=(said.append,))
        with pytest.raises(ckpt.Leave) as left:
            again.__enter__()
    finally:
        other.close()
    assert left.value.code == 75
    assert said[-1].name == "superseded"
    assert "a newer start owns" in said[-1].message
    assert "take_over=True" in said[-1].message
