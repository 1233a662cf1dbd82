"""What a checkpoint of one mesh gives to the ranks of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tests.trainer.roundtrip as rt
from ckpt.errors import UsageError
from ckpt.trainer.state.shard import Shard
from ckpt.trainer.state.state_walk import StateWalker
from tests.trainer.kinds import Holder


def experts(world: int, numel: int = 2000) -> list[dict[str, Any]]:
    return [{"expert": torch.full((numel,), float(rank)), "same": torch.ones(3)} for rank in range(world)]


@pytest.mark.parametrize("numel", [3, 400_000])
@pytest.mark.parametrize(("world", "now"), [(4, 2), (4, 1), (2, 4)])
def test_tensors_that_each_rank_has_of_its_own_are_named_on_another_number_of_ranks(
    world: int, now: int, numel: int
) -> None:
    checkpoint = rt.save_on({"rank": world}, experts(world, numel))
    for rank in range(now):
        for strict in (True, False):
            state = {"expert": torch.zeros(numel), "same": torch.zeros(3)}
            targets = rt.planned(state, checkpoint, {"rank": now}, rank, strict)
            assert rt.named(targets, "missing") == ("expert",)
            assert "ranks of another mesh each have their own" in str(targets.difference_lines)
            assert "rank=0, rank=1" in str(targets.difference_lines)
            rt.fill(targets, checkpoint)
            assert (state["expert"].unique().tolist(), state["same"].tolist()) == ([0.0], [1.0] * 3)
        without = rt.planned({"same": torch.zeros(3)}, checkpoint, {"rank": now}, rank)
        assert without.extra_names == ("expert",)


def test_buffers_of_a_module_that_differ_are_those_of_the_first_rank_and_that_is_said() -> None:
    """The statistics of a BatchNorm under DDP, which keeps rank 0's; those of a module with hooks, too. Parameters are
    not taken from one rank."""

    def made(value: float, bias: float, hooked: bool) -> nn.Module:
        module = nn.Linear(3, 3)
        module = nn.utils.parametrizations.weight_norm(module) if hooked else module
        model = nn.Sequential(module, nn.BatchNorm1d(3))
        for tensor in (*model.parameters(), model[1].running_mean):
            nn.init.constant_(tensor, {id(model[1].running_mean): value, id(module.bias): bias}.get(id(tensor), 1.0))
        return model

    for hooked in (False, True):
        checkpoint = rt.save_on({"rank": 4}, [{"m": made(rank + 1.0, 1.0, hooked)} for rank in range(4)])
        for rank in range(2):
            state = {"m": made(0.0, 0.0, hooked)}
            assert rt.planned(state, checkpoint, {"rank": 2}, rank).first_rank_paths == ("m.1.running_mean",)
            assert rt.restored(state, checkpoint, {"rank": 2}, rank)["m"][1].running_mean.tolist() == [1.0] * 3
        biases = (1.0, 1.0, 1.0, 2.0)  # one of many that differs is enough
        checkpoint = rt.save_on({"rank": 4}, [{"m": made(0.0, bias, hooked)} for bias in biases])
        found = rt.planned({"m": made(0.0, 0.0, hooked)}, checkpoint, {"rank": 2})
        assert rt.named(found, "missing") == ("m.0.bias",)


def stage(layers: Sequence[int], lr: float = 0.1, steps: int = 0) -> dict[str, Any]:
    """A part of a model of three layers, and its optimizer."""
    torch.manual_seed(layers[0])
    model = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in layers})
    optim = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optim.step()
    return {"model": model, "optim": optim}


@pytest.mark.parametrize("now", [([0, 1, 2], [0, 1, 2]), ([0], [1, 2]), ([2], [0, 1]), ([0, 1], [2])])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_pipeline_goes_on_under_another_split_or_as_a_whole_on_as_many_ranks(
    now: tuple[list[int], list[int]], steps: int
) -> None:
    saved = [stage([0, 1], 0.5, steps), stage([2], 0.5, steps)]
    checkpoint = rt.save_on({"rank": 2}, saved)
    wanted = {
        name: (parameter, each["optim"].state[parameter])
        for each in saved
        for name, parameter in each["model"].named_parameters()
    }
    for rank, layers in enumerate(now):
        state = rt.restored(stage(layers), checkpoint, {"rank": 2}, rank)
        assert state["optim"].param_groups[0]["lr"] == 0.5
        for name, parameter in state["model"].named_parameters():
            theirs, moments = wanted[name]
            assert torch.equal(parameter, theirs)
            mine = state["optim"].state[parameter]
            assert mine.keys() == moments.keys()
            assert all(torch.equal(mine[key], moments[key]) for key in moments)


def test_what_a_rank_saved_itself_comes_before_what_others_saved() -> None:
    states = [{**stage([rank], 0.5, 1), "seen": 100 + rank} for rank in range(3)]
    checkpoint = rt.save_on({"rank": 3}, states)
    for rank in range(3):
        for layers in ([rank], [0, 1, 2]):
            state = {**stage(layers), "seen": 0}
            assert rt.planned(state, checkpoint, {"rank": 3}, rank).first_rank_paths == ()
            assert rt.restored(state, checkpoint, {"rank": 3}, rank)["seen"] == 100 + rank


def test_hyperparameters_that_differ_by_stage_stay_with_their_parameters_or_are_named() -> None:
    checkpoint = rt.save_on({"rank": 2}, [stage([0, 1], 0.5, 1), stage([2], 0.05, 1)])
    for rank, layers in enumerate(([0], [1], [2], [2])):
        state = rt.restored(stage(layers), checkpoint, {"rank": 4}, rank)
        assert state["optim"].param_groups[0]["lr"] == (0.05 if layers == [2] else 0.5)
    for world in (1, 2, 4):
        (line,) = rt.planned(stage([0, 1, 2]), checkpoint, {"rank": world}).difference_lines
        assert line.startswith("optim.param_groups.0 holds")
        assert "in the groups [0, 0], and with other hyper-parameters on other ranks" in line
    layers, other = stage([0, 1]), stage([2])
    groups = [each["optim"].param_groups[0]["params"] for each in (layers, other)]
    both = nn.ModuleDict({**layers["model"], **other["model"]})
    optim = torch.optim.Adam([{"params": group} for group in (*groups, [])], lr=0.1)
    rt.restored({"model": both, "optim": optim}, checkpoint, {"rank": 1})
    assert [group["lr"] for group in optim.param_groups] == [0.5, 0.05, 0.1]


def test_groups_of_several_stages_are_joined_where_number_and_hyperparameters_are_the_same() -> None:
    def stages(rates: Sequence[tuple[float, float]], filled: bool) -> list[dict[str, Any]]:
        made = []
        for layer, (one, two) in enumerate(rates):
            model = nn.ModuleDict({str(layer): nn.Linear(2, 2)})
            weight, bias = model[str(layer)].weight, model[str(layer)].bias
            groups = [{"params": [weight], "lr": one}, {"params": [bias] if filled or layer else [], "lr": two}]
            made.append({"model": model, "optim": torch.optim.SGD(groups)})
        return made

    def whole() -> dict[str, Any]:
        model = nn.ModuleDict({str(layer): nn.Linear(2, 2) for layer in range(3)})
        groups = [[model[str(layer)].weight for layer in range(3)], [model[str(layer)].bias for layer in range(3)]]
        return {"model": model, "optim": torch.optim.SGD([{"params": group} for group in groups], lr=1.0)}

    state = rt.restored(whole(), rt.save_on({"rank": 3}, stages([(0.5, 0.25)] * 3, True)), {"rank": 1})
    assert [group["lr"] for group in state["optim"].param_groups] == [0.5, 0.25]
    found = rt.planned(
        whole(), rt.save_on({"rank": 3}, stages([(0.5, 9.0), (0.5, 0.25), (0.5, 0.25)], True)), {"rank": 1}
    )
    assert rt.named(found, "reshaped") == ("optim.param_groups.1",)
    state, checkpoint = whole(), rt.save_on({"rank": 3}, stages([(0.5, 9.0), (0.5, 0.25), (0.5, 0.25)], False))
    state["optim"].param_groups[1]["params"].pop(0)  # nobody had that one
    state = rt.restored(state, checkpoint, {"rank": 1})
    assert [group["lr"] for group in state["optim"].param_groups] == [0.5, 0.25]


@pytest.mark.parametrize("steps", [0, 1])
def test_of_hyperparameters_that_differ_on_one_parameter_the_first_ranks_are_taken(steps: int) -> None:
    states = [stage([0], rate, steps) for rate in (0.5, 0.25, 0.125)]
    for each in states[1:]:
        each["model"].load_state_dict(states[0]["model"].state_dict())
    state = stage([0], 9.0)
    checkpoint = rt.save_on({"rank": 3}, states)
    assert rt.planned(state, checkpoint, {"rank": 1}).first_rank_paths == ("optim.param_groups.0",)
    assert rt.restored(state, checkpoint, {"rank": 1})["optim"].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("held", [("", "01"), ("0", "1"), ("1", "01"), ("01", "1")])
def test_optimizer_state_that_only_some_ranks_have_goes_onto_another_mesh(held: tuple[str, str]) -> None:
    """Experts that got no tokens on one rank."""

    def made(layers: str) -> dict[str, Any]:
        model = nn.ParameterDict({n: nn.Parameter(torch.ones(3)) for n in "01"})
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for n in layers:
            optim.state[model[n]]["momentum_buffer"] = torch.full((3,), 1.0 + int(n))
        return {"model": model, "optim": optim}

    checkpoint = rt.save_on({"rank": 2}, [made(layers) for layers in held])
    state = rt.restored(made(""), checkpoint, {"rank": 1})
    for n in "01":
        moments = state["optim"].state.get(state["model"][n])
        if n in held[0] + held[1]:
            assert moments["momentum_buffer"].unique().tolist() == [1.0 + int(n)]
        else:
            assert not moments


def stepped(state: dict[str, nn.Module], steps: int) -> dict[str, Any]:
    """With one Adam over all of it, each parameter with a gradient of its own."""
    params = list(dict.fromkeys(p for module in state.values() for p in module.parameters()))
    optim = torch.optim.Adam(params, lr=0.1)
    for _ in range(steps):
        for parameter in params:
            parameter.grad = parameter.detach().clone()
        optim.step()
    return {**state, "optim": optim}


def moments(state: dict[str, Any], parameter: nn.Parameter) -> list[list[float]]:
    return [value.reshape(-1).tolist() for value in state["optim"].state[parameter].values()]


def test_stages_that_are_modules_of_their_own_go_onto_one_process_and_back() -> None:
    def made(held: str, steps: int) -> dict[str, Any]:
        return stepped({key: nn.Linear(2, 2) if key in held else nn.Identity() for key in "ab"}, steps)

    stages = [made("a", 1), made("b", 1)]
    whole = rt.restored(made("ab", 0), rt.save_on({"rank": 2}, stages), {"rank": 1})
    checkpoint = rt.save_on({"rank": 1}, [whole])
    for rank, key in enumerate("ab"):
        theirs = moments(stages[rank], stages[rank][key].weight)
        again = rt.restored(made(key, 0), checkpoint, {"rank": 2}, rank)
        assert moments(whole, whole[key].weight) == moments(again, again[key].weight) == theirs


def test_a_module_more_or_less_in_the_state_leaves_optimizer_state_where_it_belongs() -> None:
    def made(more: str, steps: int) -> dict[str, Any]:
        state = stepped({"model": nn.Linear(2, 2)}, steps)
        return {**({"ema": nn.Linear(2, 2)} if more else {}), **state}

    for before, now in (("", "ema"), ("ema", "")):
        saved, state = made(before, 1), made(now, 0)
        targets = rt.planned(state, rt.save(saved), {"rank": 1}, strict=False)
        assert {*rt.named(targets, "missing"), *targets.extra_names} <= {"ema", "ema.weight", "ema.bias"}
        rt.finish(targets, rt.save(saved), strict=False)
        assert moments(state, state["model"].weight) == moments(saved, saved["model"].weight)


def test_a_parameter_that_is_declared_with_a_shard_before_its_module_has_the_name_of_its_module() -> None:
    saved = stepped({"model": nn.Linear(2, 2)}, 1)
    shards = {"w": Shard(saved["model"].weight, (2, 2), (0, 0))}
    found = {spec.name for spec in rt.save({"shards": shards, **saved}).manifest.tensors}
    assert "optim.state.weight.exp_avg" in found
    assert {name for name in found if name.startswith("optim")} == {
        spec.name for spec in rt.save(saved).manifest.tensors if spec.name.startswith("optim")
    }
    more = torch.zeros(2, requires_grad=True)
    saved["optim"].add_param_group({"params": [more]})
    with pytest.raises(UsageError, match=r"state\['optim'\] has two parameters of the name 'weight'"):
        rt.save({**saved, "weight": more})
    rt.restored({**saved, "more": more}, rt.save({**saved, "more": more}), {"rank": 1})


class Tied(nn.Module):
    """A part of a model whose head is its embedding, with one weight where it has both."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        for part in parts:
            self.add_module(part, nn.Linear(2, 2, bias=False))
        if len(parts) == 2:
            self.head.weight = self.embed.weight


def test_a_tied_weight_goes_onto_stages_with_its_optimizer_state() -> None:
    whole = stepped({"model": Tied("embed", "head")}, 1)
    for rank, part in enumerate(("embed", "head")):
        state = rt.restored(stepped({"model": Tied(part)}, 0), rt.save_on({"rank": 1}, [whole]), {"rank": 2}, rank)
        (weight,) = state["model"].parameters()
        assert torch.equal(weight, whole["model"].embed.weight)
        assert moments(state, weight) == moments(whole, whole["model"].embed.weight)


@pytest.mark.parametrize("numel", [3, 400_000])
def test_replicas_that_differed_once_and_are_equal_again_go_on_as_one(numel: int) -> None:
    """The agent goes on saving them per rank; small ones lie in frames with others, that differ."""
    states = [
        {"ones": torch.ones(numel), "other": torch.full((5,), float(rank)), "more": torch.arange(1000.0)}
        for rank in range(4)
    ]
    ranks = [rt.save_rank(StateWalker(s, rt.on({"rank": 4}, r), False), r, 4) for r, s in enumerate(states)]
    checkpoint = rt.assemble_ranks(ranks, {"ones", "more"})
    owners = {spec.owner for spec in checkpoint.manifest.tensors if spec.name == "ones"}
    assert owners == {f"rank={rank}" for rank in range(4)}
    for mesh in ({"rank": 2}, {"rank": 1}, {"x": 3}):
        state = {"ones": torch.zeros(numel), "other": torch.zeros(5), "more": torch.zeros(1000)}
        targets = rt.planned(state, checkpoint, mesh)
        assert rt.named(targets, "missing") == ("other",)
        rt.fill(targets, checkpoint)
        assert state["ones"].unique().tolist() == [1.0]
        assert torch.equal(state["more"], torch.arange(1000.0))


def test_values_that_differed_by_rank_are_named_where_the_first_ranks_are_taken() -> None:
    states = [{"seen": 100 + rank, "note": ("x", 1), "deep": {"a": [rank], "b": 2}} for rank in range(4)]
    checkpoint = rt.save_on({"rank": 4}, states)
    for rank in range(2):
        state: dict[str, Any] = {"seen": 0, "note": None, "deep": {"a": None, "b": None}}
        found = rt.planned(state, checkpoint, {"rank": 2}, rank)
        assert found.first_rank_paths == ("deep", "seen")
        assert rt.restored(state, checkpoint, {"rank": 2}, rank)["seen"] == 100
    assert rt.planned({"note": None}, checkpoint, {"rank": 2}).first_rank_paths == ()  # what is not taken is not named
    for rank in range(4):
        found = rt.planned({"seen": 0, "note": None, "deep": {}}, checkpoint, {"rank": 4}, rank)
        assert found.first_rank_paths == ()
        assert rt.restored({"seen": 0, "note": None, "deep": {}}, checkpoint, {"rank": 4}, rank)["seen"] == 100 + rank


def test_what_got_another_name_on_each_rank_goes_wherever_that_name_is() -> None:
    checkpoint = rt.save_on({"rank": 2}, [{"experts": {f"e{rank}": torch.full((4,), rank + 1.0)}} for rank in range(2)])
    for mesh, rank, names in (
        ({"rank": 1}, 0, "01"),
        ({"rank": 3}, 1, "1"),
        ({"rank": 2}, 0, "1"),
        ({"rank": 2}, 1, "0"),
    ):
        held = {f"e{name}": torch.zeros(4) for name in names}
        state = rt.restored({"experts": held}, checkpoint, mesh, rank)
        for name in names:
            assert state["experts"][f"e{name}"] is held[f"e{name}"]
            assert held[f"e{name}"].tolist() == [int(name) + 1.0] * 4


@pytest.mark.parametrize("holder", [0, 1])
def test_an_object_that_one_rank_alone_has_is_found_where_the_others_have_none(holder: int) -> None:
    checkpoint = rt.save_on({"pp": 2}, [{"sched": Holder(at=7) if rank == holder else None} for rank in range(2)])
    targets = rt.planned({"sched": Holder(at=0)}, checkpoint, {"rank": 1})
    assert targets.first_rank_paths == ()
    assert rt.restored({"sched": Holder(at=0)}, checkpoint, {"rank": 1})["sched"].at == 7
    for rank in range(2):
        there = rt.restored({"sched": Holder(at=0) if rank == holder else None}, checkpoint, {"pp": 2}, rank)["sched"]
        assert (there.at if there is not None else None) == (7 if rank == holder else None)
        moved = rt.restored({"sched": Holder(at=0) if rank != holder else None}, checkpoint, {"pp": 2}, rank)["sched"]
        assert (moved.at if moved is not None else None) == (7 if rank != holder else None)
    nowhere = rt.planned({"sched": None}, checkpoint, {"rank": 1})
    assert nowhere.extra_names == ("sched",), "it is not dropped without a word"


class Loader(Holder):
    def __iter__(self) -> Any:
        return iter(())

    def reshard(self, states: list[dict[str, int]], rank: int, world: int) -> None:
        self.at = sum(state["at"] for state in states)


def test_loaders_that_stood_elsewhere_on_ranks_that_count_as_one_are_a_difference() -> None:
    apart = rt.save_on({"dp": 2, "tp": 2}, [{"loader": Loader(at=rank)} for rank in range(4)])
    alike = rt.save_on({"dp": 2, "tp": 2}, [{"loader": Loader(at=rank // 2)} for rank in range(4)])
    (line,) = rt.planned({"loader": Loader(at=0)}, apart, {"rank": 2}).difference_lines
    assert "count as one data-parallel rank" in line
    assert rt.restored({"loader": Loader(at=9)}, alike, {"rank": 2}, 1)["loader"].at == 1


@pytest.mark.parametrize("axis", ["TP", "tensor_parallel", "Model_Parallel", "ulysses", "cp"])
def test_ranks_along_an_axis_of_a_usual_name_share_their_data(axis: str) -> None:
    assert [rt.on({"dp": 2, axis: 2}, rank).data_rank for rank in range(4)] == [0, 0, 1, 1]
