"""Real jobs under torchrun: killed, started again with other numbers of ranks, and compared with undisturbed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.forked import Forked, server

SCRIPTS = Path(__file__).parent / "scripts"
SIZE = 50


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with server("ckpt.data", "datasets", "torchdata.stateful_dataloader"):
        yield


def script(tmp_path: Path, name: str, steps: int, how: str = "ckpt", world: int = 0, run: str = "") -> Forked:
    args = (str(tmp_path / (run or name) / "run"), str(steps), how)
    return Forked(SCRIPTS / "train.py", tmp_path / name, args, world, {"CKPT_LINGER_S": "20"})


@pytest.mark.parametrize("how", ["ckpt", "stream"])
def test_two_kills_in_one_epoch_change_no_loss_and_no_sample(tmp_path: Path, how: str) -> None:
    """With workers, random augmentation in them, and dropout. An epoch has about 17 steps."""
    whole, killed = script(tmp_path, "whole", 30, how), script(tmp_path, "killed", 30, how)
    whole.run()
    killed.run_killed(20)
    killed.run_killed(24)
    killed.run()
    assert killed.trajectory() == whole.trajectory()
    assert len(whole.trajectory()) == 30
    assert len(killed.steps()) < 60  # the kills went back to no beginning


def test_torchdata_goes_on_with_the_samples_but_augments_them_anew(tmp_path: Path) -> None:
    """The same script and kill, with torchdata's own loader and sampler: the losses are others."""
    whole, killed = script(tmp_path, "whole", 25, "torchdata"), script(tmp_path, "killed", 25, "torchdata")
    whole.run()
    killed.run_killed(20)
    killed.run()
    undisturbed, after = whole.trajectory(), killed.trajectory()
    assert [each[1] for each in after.values()] == [each[1] for each in undisturbed.values()]
    assert [after[step][0] == undisturbed[step][0] for step in (1, 25)] == [True, False]


def test_an_iterator_drawn_from_before_the_block_fails_in_the_first_step(tmp_path: Path) -> None:
    """At a fresh start already, and not only at the restart that it would harm."""
    early = script(tmp_path, "early", 5, "early")
    life = early.start()
    assert life.wait() == 1
    assert "Make the iterator in the block" in life.output()
    assert early.steps() == []


def test_batches_that_are_drawn_ahead_of_their_steps_are_warned_of(tmp_path: Path) -> None:
    output = script(tmp_path, "ahead", 6, "ahead").run()
    assert "loader: 1 more batches were drawn than the steps take (1 each)" in output
    assert "more batches were drawn" not in script(tmp_path, "right", 6).run()


def test_kills_and_other_numbers_of_ranks_draw_each_sample_once_an_epoch(tmp_path: Path) -> None:
    """2 ranks, then 3 and 1. All samples of the steps that count are each there as often as epochs have passed."""
    drawn: dict[int, tuple[int, ...]] = {}
    for number, (world, steps, kill) in enumerate([(2, 99, 5), (3, 99, 10), (1, 30, 0)]):
        life = script(tmp_path, f"life{number}", steps, world=world, run="one")
        if kill:
            life.run_killed(kill)
        else:
            life.run()
        # A step that the kill interrupted counts as its last life made it.
        steps_of = [life.trajectory(rank) for rank in range(world)]
        first = min(steps_of[0])
        drawn = {step: samples for step, samples in drawn.items() if step < first}
        for step in set.intersection(*map(set, steps_of)):
            drawn[step] = sum((each[step][1] for each in steps_of), ())
    assert sorted(drawn) == list(range(1, 31))
    counts = Counter(sample for samples in drawn.values() for sample in samples)
    passed = sum(map(len, drawn.values())) // SIZE
    assert passed >= 2
    assert {counts[sample] for sample in range(SIZE)} <= {passed, passed + 1}
    order = [sample for step in sorted(drawn) for sample in drawn[step]]
    for epoch in range(passed):
        assert sorted(order[epoch * SIZE : (epoch + 1) * SIZE]) == list(range(SIZE))
