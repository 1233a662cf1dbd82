"""Real jobs under torchrun: killed, started again with other numbers of ranks, and compared with undisturbed ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.integrations.runs import Script

SCRIPTS = Path(__file__).parent / "scripts"
SIZE = 50


def script(tmp_path: Path, name: str, steps: int, how: str = "ckpt", world: int = 0, run: str = "") -> Script:
    args = (str(tmp_path / (run or name) / "run"), str(steps), how)
    return Script(SCRIPTS / "train.py", tmp_path / name, args, world, {"CKPT_LINGER_S": "20"})


def test_two_kills_in_one_epoch_change_no_loss_and_no_sample(tmp_path: Path) -> None:
    """With persistent workers, random augmentation in them, dropout, and 2 ranks. An epoch has 9 steps."""
    whole = script(tmp_path, "whole", 20, world=2)
    whole.run()
    killed = script(tmp_path, "killed", 20, world=2)
    killed.run_killed(12)
    killed.run_killed(15)
    killed.run()
    for rank in (0, 1):
        assert killed.trajectory(rank) == whole.trajectory(rank)
        assert len(whole.trajectory(rank)) == 20


def test_kills_and_other_numbers_of_ranks_draw_each_sample_once_an_epoch(tmp_path: Path) -> None:
    """2 ranks, then 1, 3 and 2. All samples of the steps that count are each there as often as epochs have passed."""
    drawn: dict[int, tuple[int, ...]] = {}
    for number, (world, steps, kill) in enumerate([(2, 99, 5), (1, 99, 14), (3, 99, 20), (2, 30, 0)]):
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
