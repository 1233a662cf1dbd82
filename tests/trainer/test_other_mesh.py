"""What a checkpoint of one mesh gives to the ranks of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.trainer.roundtrip as rt
from ckpt.trainer.targets import Targets
from ckpt.trainer.walk import StateWalker
from tests.trainer.test_targets import on, save_on


def planned(
    state: dict[str, Any], checkpoint: rt.Checkpoint, mesh: dict[str, int], rank: int = 0, strict: bool = True
) -> Targets:
    return rt.plan(StateWalker(state, on(mesh, rank), False), checkpoint, strict)


def restored(state: dict[str, Any], checkpoint: rt.Checkpoint, mesh: dict[str, int], rank: int = 0) -> dict[str, Any]:
    targets = planned(state, checkpoint, mesh, rank)
    assert not targets.mismatch, str(targets.mismatch)
    rt.fill(targets, checkpoint)
    targets.finish()
    return state


def experts(world: int, numel: int = 2000) -> list[dict[str, Any]]:
    return [{"expert": torch.full((numel,), float(rank)), "same": torch.ones(3)} for rank in range(world)]


@pytest.mark.parametrize("numel", [3, 400_000])
@pytest.mark.parametrize(("world", "now"), [(4, 2), (4, 1), (2, 4)])
def test_tensors_that_each_rank_has_of_its_own_are_named_on_another_number_of_ranks(
    world: int, now: int, numel: int
) -> None:
    checkpoint = save_on({"rank": world}, experts(world, numel))
    for rank in range(now):
        for strict in (True, False):
            state = {"expert": torch.zeros(numel), "same": torch.zeros(3)}
            targets = planned(state, checkpoint, {"rank": now}, rank, strict)
            assert targets.mismatch.missing == ("expert",)
            assert "other ranks' own" in str(targets.mismatch)
            assert "rank=0, rank=1" in str(targets.mismatch)
            rt.fill(targets, checkpoint)
            assert (state["expert"].unique().tolist(), state["same"].tolist()) == ([0.0], [1.0] * 3)
        without = planned({"same": torch.zeros(3)}, checkpoint, {"rank": now}, rank)
        assert without.extra == ("expert",)


def test_one_expert_of_many_that_differs_on_one_rank_only_is_named() -> None:
    states = experts(1) * 3 + experts(2)[1:]
    found = planned(experts(1)[0], save_on({"rank": 4}, states), {"rank": 2})
    assert found.mismatch.missing == ("expert",)


@pytest.mark.parametrize("numel", [3, 400_000])
def test_replicas_that_differed_once_and_are_equal_again_go_on_as_one(numel: int) -> None:
    """The agent goes on saving them per rank; small ones lie in frames with others, that differ."""
    states = [
        {"ones": torch.ones(numel), "other": torch.full((5,), float(rank)), "more": torch.arange(1000.0)}
        for rank in range(4)
    ]
    ranks = [rt.save_rank(StateWalker(s, on({"rank": 4}, r), False), r, 4) for r, s in enumerate(states)]
    checkpoint = rt.assemble_ranks(ranks, {"ones", "more"})
    owners = {spec.owner for spec in checkpoint.manifest.tensors if spec.name == "ones"}
    assert owners == {f"rank={rank}" for rank in range(4)}
    for mesh in ({"rank": 2}, {"rank": 1}, {"x": 3}):
        state = {"ones": torch.zeros(numel), "other": torch.zeros(5), "more": torch.zeros(1000)}
        targets = planned(state, checkpoint, mesh)
        assert targets.mismatch.missing == ("other",)
        rt.fill(targets, checkpoint)
        assert state["ones"].unique().tolist() == [1.0]
        assert torch.equal(state["more"], torch.arange(1000.0))


def test_values_that_differed_by_rank_are_named_where_the_first_ranks_are_taken() -> None:
    states = [{"seen": 100 + rank, "note": ("x", 1), "deep": {"a": [rank], "b": 2}} for rank in range(4)]
    checkpoint = save_on({"rank": 4}, states)
    for rank in range(2):
        state: dict[str, Any] = {"seen": 0, "note": None, "deep": {"a": None, "b": None}}
        found = planned(state, checkpoint, {"rank": 2}, rank)
        assert found.firsts == ("deep", "seen")
        assert restored(state, checkpoint, {"rank": 2}, rank)["seen"] == 100
    assert planned({"note": None}, checkpoint, {"rank": 2}).firsts == ()  # what is not taken is not named
    for rank in range(4):
        found = planned({"seen": 0, "note": None, "deep": {}}, checkpoint, {"rank": 4}, rank)
        assert found.firsts == ()
        assert restored({"seen": 0, "note": None, "deep": {}}, checkpoint, {"rank": 4}, rank)["seen"] == 100 + rank
