"""State of every kind that optimizers keep: saved, restored into fresh objects, and trained on bit for bit."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tests.trainer.roundtrip as rt
from ckpt.errors import StateMismatch, UsageError
from tests.trainer.kinds import Holder

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def job(make: Make, seed: int) -> dict[str, Any]:
    model = net(seed)
    return {"model": model, "optim": make(model)}


def train(state: dict[str, Any], steps: int, seed: int) -> list[float]:
    made, losses = torch.Generator().manual_seed(seed), []
    torch.manual_seed(seed)
    np.random.seed(seed)  # kron draws from it
    model, optim = state["model"], state["optim"]
    for _ in range(steps):
        batch = torch.randn(8, 16, generator=made)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optim.zero_grad()
            loss: torch.Tensor = model(batch).square().mean()
            loss.backward(create_graph=False)
            return loss

        losses.append(closure().item())
        optim.step()
    return losses


def check_goes_on(make: Make) -> None:
    """Saves after three steps, restores into fresh objects, and compares the next three steps bit for bit."""
    saved, fresh = job(make, 1), job(make, 2)
    train(saved, 3, seed=5)
    walker, walk = rt.walked(saved)
    assert not walker.has_changed(walk)
    checkpoint = rt.save(saved)
    rt.restore(fresh, checkpoint)
    rt.assert_same_state(saved, fresh)
    assert train(saved, 3, seed=9) == train(fresh, 3, seed=9)
    rt.assert_same_state(saved, fresh)
    # A used optimizer goes back, too.
    rt.restore(fresh, checkpoint)
    again = job(make, 3)
    rt.restore(again, checkpoint)
    assert train(again, 3, seed=9) == train(fresh, 3, seed=9)


# ------------------------------------------------------------------------------------- what needs no other package


class Mode(enum.Enum):
    WARM = "warm"
    COLD = "cold"


class Counting(torch.optim.SGD):
    """Keeps a counter and a tensor under texts, as MADGRAD and SPAM do."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", 0) + 1
        self.state.setdefault("scale", torch.ones(2)).mul_(1.5)
        for group in self.param_groups:
            group["lr"] = 0.01 * float(self.state["scale"][0]) / self.state["k"]
        return super().step(closure)


class Moody(torch.optim.SGD):
    """Keeps members of an enum, as Scion does in its groups and Conda in its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, momentum=0.9)
        for group in self.param_groups:
            group["mode"] = Mode.COLD

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert isinstance(group["mode"], Mode)
            group["lr"] = 0.02 if group["mode"] is Mode.WARM else 0.01
            group["mode"] = Mode.WARM
            for param in group["params"]:
                held = self.state[param].setdefault("mood", Mode.COLD)
                assert isinstance(held, Mode)
                self.state[param]["mood"] = Mode.WARM
        return super().step(closure)


class Clock(Holder):
    def __init__(self) -> None:
        super().__init__(ticks=0, sums=torch.zeros(2))


class Clocked(torch.optim.SGD):
    """Has an object with a state of its own in its groups, and one for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        for group in self.param_groups:
            group["clock"] = Clock()
            for param in group["params"]:
                self.state[param]["clock"] = Clock()

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for clock in (group["clock"], *(self.state[param]["clock"] for param in group["params"])):
                clock.ticks += 1
                clock.sums += 0.5
            group["lr"] = 0.01 / group["clock"].ticks
        return super().step(closure)


OWN: dict[str, Make] = {
    "text keys": lambda model: Counting(model.parameters(), lr=0.01, momentum=0.9),
    "enums": lambda model: Moody(model.parameters()),
    "objects": lambda model: Clocked(model.parameters()),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01),
}


@pytest.mark.parametrize("kind", OWN)
def test_each_kind_of_optimizer_state_comes_back_bit_for_bit(kind: str) -> None:
    check_goes_on(OWN[kind])


def test_a_value_may_be_a_member_of_an_enum_and_comes_back_as_one() -> None:
    saved, fresh = {"phase": {"now": Mode.WARM, "all": [Mode.COLD, 5]}}, {"phase": {"now": Mode.COLD}}
    rt.restore(fresh, rt.save(saved))
    assert fresh == saved


def test_classes_that_a_checkpoint_names_are_only_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = rt.save({"phase": Mode.WARM})
    monkeypatch.delitem(globals(), "Mode")
    with pytest.raises(StateMismatch, match=r"phase is a Mode in the checkpoint.*no such class: import tests\."):
        rt.plan(rt.walker_of({"phase": None}), checkpoint)


def test_a_member_that_an_enum_has_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = rt.save({"phase": Mode.WARM})
    monkeypatch.setitem(globals(), "Mode", enum.Enum("Mode", {"COLD": "cold"}, module=__name__))
    with pytest.raises(StateMismatch, match="phase is 'warm' in the checkpoint, which Mode has not"):
        rt.plan(rt.walker_of({"phase": None}), checkpoint)


@pytest.mark.parametrize("key", ["__tensor__", "__enum__", "__object__"])
def test_a_key_that_marks_composites_is_refused_by_its_place(key: str) -> None:
    with pytest.raises(UsageError, match=r"mine.deep has a key that ckpt writes itself"):
        rt.save({"mine": {"deep": {key: 5}}})


def test_an_object_that_the_fresh_optimizer_does_not_have_is_named() -> None:
    saved, fresh = job(OWN["objects"], 1), job(OWN["objects"], 2)
    fresh["optim"].state.clear()
    with pytest.raises(
        StateMismatch, match=r"optim\.state\.0\.weight\.clock is a Clock in the checkpoint.*constructor"
    ):
        rt.plan(rt.walker_of(fresh), rt.save(saved))


# ---------------------------------------------------------------------------------------------------- other packages


def of_package(package: str, name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        module = pytest.importorskip(package)
        kind = getattr(module, name) if hasattr(module, name) else module.load_optimizer(name)
        made: torch.optim.Optimizer = kind(model.parameters(), **options)
        return made

    return make


PACKAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "torchao.optim": ("AdamW8bit AdamW4bit AdamWFp8", {"lr": 0.01, "block_size": 64}),
    "bitsandbytes.optim": ("Adam8bit AdamW PagedAdamW32bit Lion8bit RMSprop8bit AdEMAMix8bit LAMB", {"lr": 0.01}),
    "pytorch_optimizer": ("madgrad spam emonavi scion soap shampoo prodigy galore adafactor kron", {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, (names, _) in PACKAGES.items() for name in names.split()]
)
def test_optimizers_of_other_packages_come_back_bit_for_bit(package: str, name: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        check_goes_on(of_package(package, name, **PACKAGES[package][1]))


@pytest.mark.filterwarnings("ignore")
def test_tables_that_parameters_share_are_saved_once_and_shared_again() -> None:
    make = of_package("bitsandbytes.optim", "AdamW8bit", lr=0.01)
    saved, fresh = job(make, 1), job(make, 2)
    train(saved, 2, seed=5)
    tables = [name for name in names_of(saved) if name.endswith("qmap1")]
    assert tables == ["optim.state.2.weight.qmap1"]  # the only parameter of 4,096 elements
    saved, fresh = job(wide(make), 1), job(wide(make), 2)
    train(saved, 2, seed=5)
    assert sum(name.endswith("qmap1") for name in names_of(saved)) == 1
    rt.restore(fresh, rt.save(saved))
    assert len({id(held["qmap1"]) for held in fresh["optim"].state.values()}) == 1
    assert train(saved, 2, seed=9) == train(fresh, 2, seed=9)


def wide(make: Make) -> Make:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        optim: Any = make(model)
        optim.args.min_8bit_size = 1
        return optim  # type: ignore[no-any-return]

    return made


def names_of(state: dict[str, Any]) -> list[str]:
    return [entry.name for entry in rt.walker_of(state).walk().layout.entries]


# ----------------------------------------------------------------------------------------------------------- modules


def observed(seed: int) -> dict[str, Any]:
    model: Any = net(seed).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(model, inplace=True)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.01)}


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_resizes_its_buffers_in_training_comes_back() -> None:
    saved, fresh = observed(1), observed(2)
    train(saved, 3, seed=5)
    rt.restore(fresh, rt.save(saved))
    rt.assert_same_state(saved, fresh)
    assert train(saved, 3, seed=9) == train(fresh, 3, seed=9)


def quantised(seed: int, config: str = "Int8WeightOnlyConfig") -> dict[str, Any]:
    quantization = pytest.importorskip("torchao.quantization")
    model = net(seed)
    quantization.quantize_(model, getattr(quantization, config)())
    return {"model": model}


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_come_back_in_place_bit_for_bit() -> None:
    saved, fresh = quantised(1), quantised(2)
    weight = fresh["model"][0].weight
    walker, walk = rt.walked(fresh)
    assert any(name.startswith("model.0.weight.") for name in names_of(saved))
    rt.restore(fresh, rt.save(saved))
    rt.assert_same_state(saved, fresh)
    assert fresh["model"][0].weight is weight
    assert not walker.has_changed(walk)
    x = torch.randn(4, 16)
    assert torch.equal(saved["model"](x), fresh["model"](x))


@pytest.mark.filterwarnings("ignore")
def test_weights_that_were_quantised_in_another_way_are_named() -> None:
    saved, other = quantised(1), quantised(2, "Int8DynamicActivationInt8WeightConfig")
    targets = rt.plan(rt.walker_of(other), rt.save(saved))
    assert "model.0.weight" in rt.named(targets, "retyped")
    assert "act_quant_kwargs" in str(targets.difference_lines)


# --------------------------------------------------------------------------------------------- modes and sparse state


def free(seed: int) -> dict[str, Any]:
    model = net(seed)
    optim = pytest.importorskip("schedulefree").AdamWScheduleFree(model.parameters(), lr=0.01)
    optim.train()
    return {"model": model, "optim": optim}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_mode_of_a_schedule_free_optimizer_travels_with_the_weights(mode: str) -> None:
    saved, fresh = free(1), free(2)
    train(saved, 3, seed=5)
    getattr(saved["optim"], mode)()
    checkpoint = rt.save(saved)
    targets = rt.restore(fresh, checkpoint)
    assert fresh["optim"].param_groups[0]["train_mode"] == (mode == "train")
    assert targets.overruled_lines == []  # what the optimizer itself counts, the script does not give
    rt.assert_same_state(saved, fresh)
    for state in (saved, fresh):
        state["optim"].train()
    assert train(saved, 3, seed=9) == train(fresh, 3, seed=9)
    for state in (saved, fresh):
        state["optim"].eval()
    rt.assert_same_state(saved, fresh)
