"""What optimizers get of a checkpoint: by the names of their parameters, and what does not fit by its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import ConstantLR

import tests.trainer.roundtrip as rt
from ckpt.errors import UsageError
from tests.trainer.restore.test_restore_plan import OPTIMIZERS, Delegating, Renaming, adam, job, train


def test_an_optimizer_saved_without_state_is_restored_without_state() -> None:
    checkpoint = rt.save(job(OPTIMIZERS["adamw"], 1))
    other = job(OPTIMIZERS["adamw"], 2)
    train(other["model"], other["optim"], 2)
    rt.restore(other, checkpoint)
    assert not other["optim"].state


def test_optimizer_state_that_is_tied_here_and_not_in_the_checkpoint_is_parted() -> None:
    def made(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        shared = torch.zeros(())
        for n, parameter in enumerate(model.parameters()):
            optim.state[parameter] = {"seen": shared if count == 1 else torch.tensor(float(n + 1))}
        return model, optim

    (model, optim), (other, fresh) = made(2), made(1)
    rt.restore({"model": other, "optim": fresh}, rt.save({"model": model, "optim": optim}))
    assert [float(fresh.state[parameter]["seen"]) for parameter in other.parameters()] == [1.0, 2.0]


def test_an_optimizer_uses_the_names_under_which_a_module_saves_its_parameters() -> None:
    plain = nn.Linear(3, 3)
    for kind in (Delegating, Renaming):
        custom = kind()
        saved = {spec.name.replace("in_", "") for spec in rt.save(adam(custom, 1)).manifest.tensors}
        assert saved == {spec.name for spec in rt.save(adam(plain, 1)).manifest.tensors}


def test_hyperparameters_come_from_the_checkpoint_and_keep_their_tensors() -> None:
    def make(lr: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "weight_decay": 0.5}]
        return {"model": model, "optim": torch.optim.Adam(groups, lr=0.3, foreach=False)}

    saved = make(0.125)
    tensor = make(torch.tensor(0.125))
    with torch.inference_mode():
        inferred = [(torch.tensor(9.0), each) for each in (saved, tensor)]
    cases = [(torch.tensor(9.0), saved), (torch.tensor(9.0), tensor), (9.0, saved), *inferred]
    for live, stored in cases:
        other = make(live)
        rt.restore(other, rt.save(stored))
        group = other["optim"].param_groups[0]
        assert float(group["lr"]) == 0.125
        assert group["lr"] is live or not isinstance(live, torch.Tensor)
        assert other["optim"].param_groups[1]["weight_decay"] == 0.5
    other = make(1.0)
    rt.restore(other, rt.save(make(torch.tensor(0.25))))
    assert other["optim"].param_groups[0]["lr"] == 0.25
    assert type(other["optim"].param_groups[0]["lr"]) is float


def test_a_hyperparameter_that_has_become_several_numbers_comes_back_as_these() -> None:
    def make(weights: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        groups = [{"params": [*model.parameters()], "weights": weights}]
        return {"model": model, "optim": torch.optim.SGD(groups, lr=0.1)}

    other = make(1.0)
    rt.restore(other, rt.save(make(torch.tensor([0.25, 0.5]))))
    assert other["optim"].param_groups[0]["weights"].tolist() == [0.25, 0.5]


# ------------------------------------------------------------------------- optimizers with a state_dict() of their own


class Warm(torch.optim.SGD):
    """Keeps a counter and slow weights of its own."""

    count = 0
    slow: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.slow = torch.full((3,), float(self.count))
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "more": {"slow": self.slow}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.count, self.slow = state.pop("count"), state.pop("more")["slow"]
        super().load_state_dict(state)


class Around(torch.optim.Optimizer):
    """Wraps another, as accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.loaded = 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded += 1
        self.inner.load_state_dict(state)


class Sam(Around):
    def state_dict(self) -> dict[str, Any]:
        return {"base": self.inner.state_dict()}


class Apart(Around):
    """Has no state itself, and gives that of what it wraps."""

    state = None  # type: ignore[assignment]

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.state = {}


def warm(dtype: torch.dtype = torch.float32, steps: int = 0) -> dict[str, Any]:
    model = nn.Linear(2, 2).to(dtype)
    optim = Warm(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(steps):
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optim.step()
    return {"model": model, "optim": optim}


def test_what_a_state_dict_of_its_own_adds_comes_back_by_its_load_state_dict() -> None:
    saved, other = warm(steps=3), warm()
    rt.restore(other, rt.save(saved))
    assert other["optim"].count == 3
    assert other["optim"].slow.tolist() == [3.0] * 3
    rt.assert_same_state(saved, other)


def test_what_load_state_dict_makes_of_the_state_is_put_right() -> None:
    saved, other = warm(torch.bfloat16, 3), warm(torch.bfloat16, 1)
    for state in (saved, other):
        for held in state["optim"].state.values():
            held["momentum_buffer"] = held["momentum_buffer"].float() + 1e-6
    before = [held["momentum_buffer"] for held in other["optim"].state.values()]
    rt.restore(other, rt.save(saved))
    rt.assert_same_state(saved, other)
    after = [held["momentum_buffer"] for held in other["optim"].state.values()]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_what_it_adds_is_read_afresh_for_each_save_and_noticed_where_it_is_elsewhere() -> None:
    state = warm(steps=1)
    walker, walk = rt.walked(state)
    assert not walker.has_changed(walk)
    state["optim"].count = 7
    assert not walker.has_changed(walk)
    shared = walker.values(walk)[0]
    assert shared["objects"]["optim"]["rest"]["value"]["count"] == 7
    state["optim"].slow = None
    assert walker.has_changed(walk)


def test_what_only_one_side_adds_is_named() -> None:
    saved, plain = warm(steps=1), warm()
    plain["optim"] = torch.optim.SGD(plain["model"].parameters(), lr=0.5, momentum=0.9)
    targets = rt.plan(rt.walker_of(plain), rt.save(saved))
    assert targets.extra_names == ("optim.count", "optim.more", "optim.more.slow")
    targets = rt.plan(rt.walker_of(saved), rt.save(plain))
    assert {"optim.count", "optim.more"} <= set(rt.named(targets, "missing"))
    rt.restore(saved, rt.save(plain), strict=False)
    assert saved["optim"].count == 1


def test_ranks_that_add_different_values_get_their_own_and_another_mesh_those_of_the_first() -> None:
    states = [warm(steps=1), warm(steps=2)]
    checkpoint = rt.save_on({"dp": 2}, states)
    for rank, count in enumerate((1, 2)):
        assert rt.restored(warm(), checkpoint, {"dp": 2}, rank)["optim"].count == count
    targets = rt.plan(rt.walker_of(warm()), checkpoint, strict=False)
    assert "optim" in targets.first_rank_paths


def wrapped(kind: Any, steps: int = 0) -> dict[str, Any]:
    state = warm()
    state["optim"] = kind(torch.optim.Adam(state["model"].parameters(), lr=0.5))
    for _ in range(steps):
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optim"].step()
    return state


def test_a_wrapper_that_adds_nothing_is_filled_in_place() -> None:
    saved, other = wrapped(Around, 2), wrapped(Around)
    rt.restore(other, rt.save(saved))
    rt.assert_same_state(saved, other)
    assert other["optim"].loaded == 0


def test_what_hooks_add_comes_back() -> None:
    def hooked(count: int) -> tuple[dict[str, Any], list[int]]:
        state, held = wrapped(lambda inner: inner), [count]
        state["optim"].register_state_dict_post_hook(lambda _, said: said | {"count": held[0]})
        state["optim"].register_load_state_dict_pre_hook(lambda _, said: held.append(said["count"]))
        return state, held

    (saved, _), (other, held) = hooked(5), hooked(0)
    rt.restore(other, rt.save(saved))
    assert held == [0, 5]


@pytest.mark.parametrize("kind", [Sam, Apart])
def test_a_wrapper_that_gives_state_which_is_not_its_own_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(
        UsageError, match=rf"state\['optim'\], a {kind.__name__}, .*register the optimizer that it wraps"
    ):
        rt.save(wrapped(kind, 1))


# ------------------------------------------------------------------------------------------------------- mismatches


@pytest.mark.parametrize("first", ["model", "optim"])
@pytest.mark.parametrize("change", [lambda: nn.Linear(3, 5), lambda: nn.Linear(3, 4).bfloat16()])
def test_moments_of_a_parameter_that_does_not_fit_are_left_out_in_any_order(first: str, change: Any) -> None:
    checkpoint = rt.save(adam(nn.Linear(3, 4), 2))
    model = change()
    optim = torch.optim.Adam(model.parameters())
    state = {"model": model, "optim": optim}
    if first == "optim":
        state = {"optim": optim, "model": model}
    targets = rt.restore(state, checkpoint, strict=False)
    assert (*rt.named(targets, "reshaped"), *rt.named(targets, "retyped")) == ("model.bias", "model.weight")
    assert not targets.extra_names
    assert not optim.state
    model(torch.ones(2, 3, dtype=model.weight.dtype)).sum().backward()
    optim.step()


def test_a_module_that_came_to_the_state_gets_no_moments_of_a_part_of_another_of_its_name() -> None:
    """`head`, which was alone, is a part of `model`, and now also a module beside it."""

    def made(steps: int, beside: bool) -> dict[str, Any]:
        model = nn.ModuleDict({"head": nn.Linear(3, 3)})
        head = nn.Linear(3, 3)
        parameters = [*model.parameters(), *(head.parameters() if beside else ())]
        optim = torch.optim.Adam(parameters)
        for _ in range(steps):
            sum(p.square().sum() for p in parameters).backward()  # type: ignore[union-attr]
            optim.step()
        return {"model": model, "optim": optim, **({"head": head} if beside else {})}

    saved, other = made(2, False), made(0, True)
    targets = rt.restore(other, rt.save(saved), strict=False)
    assert rt.named(targets, "missing") == (
        *("head.bias", "head.weight"),
        *("optim.state.head.bias", "optim.state.head.weight"),
    )
    assert set(map(id, other["optim"].state)) == set(map(id, other["model"].parameters()))


@pytest.mark.parametrize("none", [True, False])
def test_a_rank_that_has_another_module_than_before_gets_none_of_the_former_ones_moments(none: bool) -> None:
    """Each rank has one module, and other names for it: what its optimizer calls `weight` is not the same."""

    def made(stage: int, steps: int) -> dict[str, Any]:
        model = nn.Linear(3, 3)
        nets = {"0": None, "1": None} if none else {}
        return {"nets": {**nets, str(stage): model}, "optim": adam(model, steps)["optim"]}

    checkpoint = rt.save_on({"rank": 2}, [made(stage, 2) for stage in range(2)])
    for rank in range(2):
        for stage in range(2):
            state = made(stage, 0)
            targets = rt.planned(state, checkpoint, {"rank": 2}, rank, strict=False)
            assert bool(rt.named(targets, "missing")) == (stage != rank)
            rt.finish(targets, checkpoint, strict=False)
            assert bool(state["optim"].state) == (stage == rank)


def test_learning_rates_that_differ_part_a_tensor_that_groups_share() -> None:
    def made(rates: Any) -> torch.optim.Optimizer:
        groups = [{"params": list(layer.parameters())} for layer in model]
        shared = {} if isinstance(rates, torch.Tensor) else {"lr": rates[0]}
        optim = torch.optim.Adam(groups, lr=rates if isinstance(rates, torch.Tensor) else 1.0)
        for group, rate in zip(optim.param_groups, rates if shared else (), strict=False):
            group["lr"] = rate
        return optim

    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    for rates in ([0.5, 0.25, 0.5], [torch.tensor(0.5), torch.tensor(0.25), torch.tensor(0.5)]):
        checkpoint = rt.save({"model": model, "optim": made(rates)})
        optim = made(torch.tensor(0.1))
        assert optim.param_groups[0]["lr"] is optim.param_groups[1]["lr"]
        held = optim.param_groups[0]["lr"]
        rt.restore({"model": model, "optim": optim}, checkpoint)
        assert [float(group["lr"]) for group in optim.param_groups] == [0.5, 0.25, 0.5]
        assert optim.param_groups[0]["lr"] is held
        assert all(isinstance(group["lr"], torch.Tensor) for group in optim.param_groups)
        grown = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        optim = torch.optim.Adam([{"params": list(layer.parameters())} for layer in grown], lr=torch.tensor(0.1))
        rt.restore({"model": grown, "optim": optim}, checkpoint, strict=False)
        assert [round(float(group["lr"]), 3) for group in optim.param_groups] == [0.5, 0.25, 0.5, 0.1]


@pytest.mark.parametrize("rates", [True, False])
def test_groups_in_another_order_are_named_where_a_scheduler_goes_by_their_numbers(rates: bool) -> None:
    """It would give each group the rate of another."""

    def made(order: tuple[int, int]) -> dict[str, Any]:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        groups = [{"params": list(model[n].parameters()), "lr": 1.0 + n} for n in order]
        optim = torch.optim.SGD(groups, lr=0.5)
        return {"model": model, "optim": optim, **({"sched": ConstantLR(optim)} if rates else {})}

    targets = rt.restore(made((1, 0)), rt.save(made((0, 1))), strict=False)
    assert rt.named(targets, "reshaped") == (("optim.param_groups.0", "optim.param_groups.1") if rates else ())
    assert not rates or "optim.param_groups.0 is the group 1 of the checkpoint, and sched" in str(
        targets.difference_lines
    )
    rt.restore(made((1, 0)), rt.save(made((1, 0))))


class Renamed(torch.optim.Adam):
    pass


ADAMS = "in the checkpoint of the class Adam, .*; of its parameters it has exp_avg, exp_avg_sq, step$"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD, .*without .*momentum.* and with .*betas"),
        (torch.optim.RMSprop, "RMSprop, .*without alpha"),
        (torch.optim.Adamax, "Adamax, .*with amsgrad"),
        (Renamed, ""),
        (lambda p: Renamed(p, foreach=True), ""),
        (lambda p: Around(torch.optim.Adam(p)), ""),
        (lambda p: Around(torch.optim.Adam(p, fused=True)), ""),
        (lambda p: Around(Around(torch.optim.RMSprop(p))), "RMSprop, .*without alpha"),
    ],
)
def test_an_optimizer_of_another_class_is_named_with_what_only_one_of_both_has(make: Any, said: str) -> None:
    saved = adam(nn.Linear(3, 4), 2)
    checkpoint = rt.save(saved)
    model = nn.Linear(3, 4)
    state = {"model": model, "optim": make(model.parameters())}
    targets = rt.restore(state, checkpoint, strict=False)
    if not said:
        assert not targets.difference_lines
        rt.assert_same_state({"model": model}, {"model": saved["model"]})
        assert len(state["optim"].state) == 2
        return
    (line,) = targets.difference_lines
    assert re.search(f"^optim is of the class {said}", line)
    assert re.search(ADAMS, line)
    assert not targets.extra_names
    assert not state["optim"].state
    assert torch.equal(model.weight, saved["model"].weight)
    assert "betas" not in state["optim"].param_groups[0] or isinstance(state["optim"], torch.optim.Adamax)
    model(torch.ones(2, 3)).sum().backward()
    state["optim"].step()


def test_what_a_wrapper_holds_is_of_the_class_that_counts() -> None:
    """In one that is the same around each."""
    sgd = warm()
    sgd["optim"] = Around(torch.optim.SGD(sgd["model"].parameters(), lr=0.5, momentum=0.9))
    targets = rt.restore(sgd, rt.save(wrapped(Around, 2)), strict=False)
    assert "optim is of the class SGD, in the checkpoint of the class Adam" in str(targets.difference_lines)
    assert not sgd["optim"].state


def test_weight_decay_of_another_kind_is_named() -> None:
    """Adam and AdamW have the same moments, and the same hyper-parameters, of which one says yes in one of them."""
    if "decoupled_weight_decay" not in torch.optim.AdamW([torch.zeros(1)]).param_groups[0]:
        pytest.skip("this torch tells them apart by class alone")
    model = nn.Linear(3, 4)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    (line,) = rt.plan(rt.walker_of(state), rt.save(adam(model, 1))).difference_lines
    assert "without decoupled_weight_decay=True and with decoupled_weight_decay=False" in line


def regrouped(parts: list[list[int]], lr: float = 0.5) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    groups = [{"params": [p for n in part for p in model[n].parameters()]} for part in parts]
    return {"model": model, "optim": torch.optim.SGD(groups, lr=lr, momentum=0.9)}


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ([[0, 1], [2]], [[0], [1], [2]], ("optim.param_groups.0", "optim.param_groups.1")),
        ([[0], [1], [2]], [[0, 1], [2]], ("optim.param_groups.0",)),
        ([[0, 1], [2]], [[0], [1, 2]], ("optim.param_groups.0", "optim.param_groups.1")),
        ([[0, 1], [2]], [[0, 1], [2]], ()),
        ([[0], [1, 2]], [[1, 2], [0]], ()),
    ],
)
def test_groups_that_were_split_or_merged_are_named_with_a_way_out(before: Any, now: Any, named: Any) -> None:
    saved = regrouped(before)
    for param in saved["model"].parameters():
        param.grad = torch.ones_like(param)
    saved["optim"].step()
    checkpoint, other = rt.save(saved), regrouped(now, lr=0.25)
    found = rt.plan(rt.walker_of(other), checkpoint)
    assert rt.named(found, "reshaped") == named
    assert not named or "strict=False" in str(found.difference_lines)
    rt.restore(other, checkpoint, strict=False)
    for number, group in enumerate(other["optim"].param_groups):
        assert group["lr"] == (0.25 if f"optim.param_groups.{number}" in named else 0.5)
        assert all("momentum_buffer" in other["optim"].state[param] for param in group["params"])


def scheduled(**given: Any) -> dict[str, Any]:
    values = {"lr": 0.5, "weight_decay": 0.0, "T_max": 100, "factor": 0.5, "milestone": 3} | given
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters(), lr=values["lr"], weight_decay=values["weight_decay"])
    parts = [lrs.ConstantLR(optim, factor=values["factor"]), lrs.CosineAnnealingLR(optim, T_max=values["T_max"])]
    return {"model": model, "optim": optim, "sched": lrs.SequentialLR(optim, parts, [values["milestone"]])}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, []),
        ({"T_max": 200}, ["sched.1.T_max: 200 given, 100 restored"]),
        ({"factor": 0.25}, ["sched.0.factor: 0.25 given, 0.5 restored"]),
        ({"milestone": 4}, ["sched.milestones: [4] given, [3] restored"]),
        ({"weight_decay": 0.5}, ["optim.param_groups[0].weight_decay: 0.5 given, 0 restored"]),
        ({"lr": 1.0}, ["optim.param_groups[0].initial_lr: 1 given, 0.5 restored"]),
    ],
    ids=lambda value: str(next(iter(value), "")) if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_script_gave_and_the_checkpoint_overrules_is_said(given: dict[str, Any], said: list[str]) -> None:
    saved = scheduled()
    for _ in range(5):
        saved["optim"].step()
        saved["sched"].step()
    targets = rt.restore(scheduled(**given), rt.save(saved))
    assert [line for line in targets.overruled_lines if ".lr" not in line] == said
    assert not any("lr:" in line and "initial" not in line for line in targets.overruled_lines)


def test_a_rate_that_a_scheduler_has_lowered_is_none_that_the_script_gives() -> None:
    """Of this one nobody knows with which rate it began."""

    def made() -> dict[str, Any]:
        state = regrouped([[0, 1, 2]])
        return state | {"sched": lrs.ReduceLROnPlateau(state["optim"], patience=0)}

    saved = made()
    for _ in range(5):
        saved["sched"].step(1.0)
    assert saved["optim"].param_groups[0]["lr"] < 0.5
    assert rt.restore(made(), rt.save(saved)).overruled_lines == []
