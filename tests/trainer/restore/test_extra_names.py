"""What only the checkpoint has is named in few lines: one for each subtree that no rank's state has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tests.trainer.roundtrip as rt
from ckpt.trainer.state.state_walk import StateWalker
from tests.trainer.restore.test_overwritten import refused


def mismatch(walkers: list[StateWalker], saved: rt.Checkpoint) -> str:
    """The differences that all ranks of these walkers name for a checkpoint."""
    return refused(walkers, saved).partition(": ")[2].partition(". Nothing")[0]


def test_an_object_and_its_tensors_take_one_line_and_a_lone_tensor_is_named_in_full() -> None:
    saved = rt.save({"a": torch.zeros(2), "ema": nn.Linear(2, 2)})
    assert mismatch([rt.walker_of({"a": torch.zeros(2)})], saved) == "only in the checkpoint: ema.*, 2 tensors"
    saved = rt.save({"m": nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})})
    live = {"m": nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)})}
    assert mismatch([rt.walker_of(live)], saved) == "only in the checkpoint: m.b.weight"


def test_a_subtree_that_another_rank_has_a_part_of_is_not_taken_for_lacking() -> None:
    """Each rank holds another stage, and the checkpoint has one layer more of each."""
    mesh = {"pp": 2}

    def stage(rank: int, layers: int) -> dict[str, Any]:
        layer = lambda: nn.Linear(2, 2)  # noqa: E731
        return {"m": nn.ModuleDict({f"stage{rank}": nn.ModuleDict({f"l{n}": layer() for n in range(layers)})})}

    saved = rt.save_on(mesh, [stage(rank, 2) for rank in range(2)])
    walkers = [StateWalker(stage(rank, 1), rt.on(mesh, rank), False) for rank in range(2)]
    assert mismatch(walkers, saved) == (
        "only in the checkpoint: m.stage0.l1.*, 2 tensors; only in the checkpoint: m.stage1.l1.*, 2 tensors"
    )


def test_the_tensors_that_only_one_rank_could_restore_take_one_line() -> None:
    mesh = {"rank": 2}

    def experts(rank: int, *names: str) -> dict[str, Any]:
        return {
            "m": nn.ModuleDict(
                {name: nn.ParameterDict({p: torch.full((3,), rank + 1.0) for p in "tu"}) for name in names}
            )
        }

    saved = rt.save_on(mesh, [experts(rank, "own", "more") for rank in range(2)])
    walkers = [StateWalker(experts(rank, *("own", "more")[: 2 - rank]), rt.on(mesh, rank), False) for rank in range(2)]
    assert mismatch(walkers, saved) == "only in the checkpoint: m.more.*, 2 tensors of rank 1"
