"""What all ranks of a job agree on, seen from each of them."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

from ckpt.ipc.client import START_TIMEOUT_S
from tests.checkpointer import together
from tests.checkpointer.conftest import Saw
from tests.checkpointer.together import SAMPLES

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]
RANKS, CHECKS = 4, (together,)
FINDS_ROOT = hasattr(DeviceMesh, "_get_root_mesh")  # since torch 2.7; else no rank finds a mesh over all ranks


def test_ranks_that_save_together_are_those_of_their_process_group(saw: Saw) -> None:
    found = saw(together.groups_of_their_own)
    assert [each["came"] for each in found] == [[0, 5]] * RANKS
    assert all(each["same"] for each in found)
    assert [each["own"] for each in found] == [[float(rank)] * 3 for rank in range(RANKS)]
    sums = [each["sum"] for each in found]
    assert sums[0] == sums[1] != sums[2] == sums[3]


def test_without_a_head_in_the_weights_no_rank_begins_and_without_strict_all_begin_with_the_rest(saw: Saw) -> None:
    body, head = (["body.weight", "body.bias"], ["head.weight", "head.bias"])
    for rank, each in enumerate(saw(together.weights_without_a_head)):
        kind, message = each["strict"]["error"]
        assert kind == "StateMismatch"
        assert all(f"model.{name} is not there" in message for name in head)
        assert (each["strict"]["changed"], each["strict"]["said"]) == ([], [])
        assert each["partly"]["error"] is None
        assert (each["partly"]["changed"], each["partly"]["wrong"]) == (body, [])
        assert len(each["partly"]["said"]) == (1 if rank == 0 else 0)
        assert all(f"model.{name} is not there" in said for said in each["partly"]["said"] for name in head)


def test_what_is_damaged_for_one_rank_is_passed_over_by_all_loudly(saw: Saw) -> None:
    for rank, each in enumerate(saw(together.damage)):
        assert each["older"] == [[2, [200.0 + rank]], [True]]


def test_a_state_that_does_not_match_on_one_rank_is_an_error_on_all(saw: Saw) -> None:
    for (kind, message), struck in (each["other"] for each in saw(together.damage)):
        assert kind == "StateMismatch"
        assert "model.new.*: 2 tensors" in message
        assert struck == []


def test_where_every_checkpoint_is_damaged_for_some_rank_no_rank_begins(saw: Saw) -> None:
    for (kind, message), struck in (each["none"] for each in saw(together.damage)):
        assert kind == "NoCheckpoint"
        assert "step 2: rank 1: " in message
        assert "step 1: rank 2: " in message
        assert struck == [True, True]


def test_a_structure_that_changes_on_one_rank_only_loses_nothing(saw: Saw) -> None:
    for rank, each in enumerate(saw(together.change_on_one_rank)):
        assert each == {"saved": [6, 7], "came": 12, "same": True, "moments": rank == 1}


def test_generators_on_the_same_ranks_go_on_as_if_nothing_had_happened(saw: Saw) -> None:
    for each in saw(together.another_world):
        assert each["again"]["came"] == 2
        assert each["again"]["drew"] == each["first"]["drew"]
        assert each["again"]["left"] == each["first"]["left"]


def test_generators_on_fewer_ranks_are_derived_anew_equal_where_they_were_equal(saw: Saw) -> None:
    """torch's own, one seeded by rank, one that is the same on all ranks, Python's (the same), NumPy's (by rank)."""
    found = saw(together.another_world)
    two = [each["two"]["drew"] for each in found[:2]]
    assert two == [each["two again"]["drew"] for each in found[:2]]
    before = [each["first"]["drew"] for each in found]
    for number, is_same in enumerate((False, False, True, True, False)):
        assert (len({drew[number] for drew in before}) == 1) == is_same
        assert (two[0][number] == two[1][number]) == is_same
        assert {drew[number] for drew in two}.isdisjoint(drew[number] for drew in before)


def test_on_fewer_ranks_no_sample_is_repeated_or_skipped(saw: Saw) -> None:
    found = saw(together.another_world)
    taken = [sample for each in found for sample in each["first"]["taken"]]
    left = [each["two"]["left"] for each in found[:2]]
    assert sorted([*taken, *left[0], *left[1]]) == list(range(SAMPLES))
    assert len(left[0]) == len(left[1])


def test_a_loader_that_cannot_be_divided_anew_is_an_error_that_says_the_choices(saw: Saw) -> None:
    for each in saw(together.another_world)[:2]:
        kind, message = each["fixed"]["error"]
        assert kind == "UsageError"
        for choice in ("4 data-parallel ranks", "reshard(states, rank, world)", "strict=False"):
            assert choice in message
        assert each["anew"]["came"] == 2
        assert len(each["anew"]["left"]) == SAMPLES // 2
    assert "loader" in saw(together.another_world)[0]["anew"]["said"][0]


def test_ranks_that_find_different_meshes_are_told_apart_by_number_at_each_start(saw: Saw) -> None:
    for rank, each in enumerate(saw(together.stages_of_which_one_is_sharded)):
        assert each["step"] == 1
        assert each["own"] == [float(rank)] * 4
        assert each["as_before"]
        assert each["told"] == (2 if rank == 0 and FINDS_ROOT else 0)
        assert "give mesh= to all ranks" in each["error"]


def test_no_step_of_any_rank_waits_for_an_agent_that_is_gone(saw: Saw) -> None:
    for rank, each in enumerate(saw(together.agent_that_dies)):
        assert each.pop("saving"), "what waits is seen to"
        assert each.pop("slowest_s") < START_TIMEOUT_S * 2 / 3, "it waited at a lock until that start was given up"
        assert each == {
            "waits": [],
            "early": False,
            "restarts": 1,
            "committed": 30,
            "came": 30,
            "same": True,
            "own": [float(rank)],
        }


def test_what_was_refused_to_some_ranks_is_refused_to_the_others_by_the_next_agent_too(saw: Saw) -> None:
    for rank, each in enumerate(saw(together.refused_before_the_agent_died)):
        assert each["said"], f"rank {rank} saved what others were refused"
        assert "did not answer" not in each["said"], "it waited for ranks that had gone on, as long as an exit may take"
        assert each["committed"] == 2


def test_each_rank_says_what_it_left_to_others_and_what_differs(saw: Saw) -> None:
    """In its receipt; and the lowest rank is told of the job's commits."""
    model_bytes, own_bytes, found = 4 * (200 * 200 + 200) * 4, 5000 * 4, saw(together.receipts)
    first = [each["first"]["receipt"] for each in found]
    for said in first:
        (replicas,) = [text for text in said["proven"] if text.startswith("replicas of ")]
        assert "MiB that other ranks stage" in replicas
        assert [text for text in said["fell_back"] if text.startswith("own saved per rank")]
    staged = sum(said["bytes"]["local"] for said in first)
    once = 3 * (model_bytes + RANKS * own_bytes)  # the exit finds the last step saved
    assert once <= staged < once + model_bytes, "the model was staged on several ranks"
    assert [said["commits"] for said in first] == [3, 0, 0, 0]
    for each in found:
        read = {what: count for what, count in each["again"]["receipt"]["bytes"].items() if "restored from" in what}
        assert sum(read.values()) > 0
        assert each["again"]["restored"] == 1
