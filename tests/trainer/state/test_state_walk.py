from __future__ import annotations

import gc
import itertools
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.placement_types import Replicate, _StridedShard
from torch.distributed.tensor.placement_types import Shard as Sharded

import tests.trainer.roundtrip as rt
from ckpt.errors import UsageError
from ckpt.format import values
from ckpt.format.frames import frame_hash
from ckpt.trainer.state import generators, tensor_hashes
from ckpt.trainer.state.mesh_coordinate import Axis, Coordinate, find_coordinate
from ckpt.trainer.state.names import is_custom
from ckpt.trainer.state.shard import Shard, _boxes, _views
from ckpt.trainer.state.state_walk import StateWalker
from ckpt.trainer.state.tensor_hashes import hash_replicas
from ckpt.types import SMALL_BYTES, Box
from tests.conftest import SEED
from tests.trainer.kinds import WITHOUT_STORAGE, Holder, Wrapping


def names(state: dict[str, Any]) -> list[str]:
    return [entry.name for entry in rt.walker_of(state).walk().layout.entries]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def trained(state: dict[str, Any], steps: int = 1) -> None:
    for _ in range(steps):
        state["model"](torch.randn(3, 4)).square().sum().backward()
        state["optim"].step()


def job() -> dict[str, Any]:
    model = net()
    return {"model": model, "optim": torch.optim.Adam(model.parameters())}


def test_names_are_paths_through_the_state_and_the_module() -> None:
    state = job()
    trained(state)
    state["model"].register_buffer("scratch", torch.ones(1), persistent=False)
    state["deep"] = {"list": [torch.ones(1), {"t": torch.ones(2)}], "net": nn.Linear(1, 1, bias=False)}
    assert names(state) == [
        "deep.list.0",
        "deep.list.1.t",
        "deep.net.weight",
        *(f"model.0.{n}" for n in ("bias", "weight")),
        *(f"model.1.{n}" for n in ("bias", "num_batches_tracked", "running_mean", "running_var", "weight")),
        *(
            f"optim.state.model.{p}.{s}"  # of several modules: the optimizer names which
            for p in ("0.bias", "0.weight", "1.bias", "1.weight")
            for s in ("exp_avg", "exp_avg_sq", "step")
        ),
    ]


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = names({"model": net()})
    assert names({"model": torch.compile(net(), backend="eager")}) == plain
    inner = net()
    inner[0] = checkpoint_wrapper(inner[0])
    assert names({"model": torch.compile(inner, backend="eager")}) == plain
    assert names({"model": torch.compile(checkpoint_wrapper(net()), backend="eager")}) == plain
    assert not is_custom(inner)
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1, bias=False))
    assert names({"ema": averaged}) == ["ema.module.weight", "ema.n_averaged"]  # the user's own "module" stays


def test_what_a_wrapper_has_of_its_own_is_saved_too() -> None:
    class Gated(nn.DataParallel):
        def __init__(self, add: Any) -> None:
            super().__init__(nn.Linear(2, 2))
            add(self)

    class Said(Gated):
        said = 0

        def get_extra_state(self) -> int:
            return self.said

        def set_extra_state(self, state: int) -> None:
            self.said = state

    for add in (
        lambda model: model.register_parameter("gate", nn.Parameter(torch.rand(2))),
        lambda model: model.register_buffer("gate", torch.rand(2)),
        lambda model: model.add_module("gate", nn.Linear(2, 2)),
    ):
        model, other = Gated(add), Gated(add)
        found = [*model.named_parameters(), *model.named_buffers()]
        assert {f"model.{name}" for name, _ in found} == set(names({"model": model}))
        rt.restore({"model": other}, rt.save({"model": model}))
        rt.assert_same_state({"model": model}, {"model": other})
    said, again = (Said(lambda model: None) for _ in range(2))
    said.said = 7
    rt.restore({"model": again}, rt.save({"model": said}))
    assert again.said == 7
    idle = Gated(lambda model: model.register_buffer("scratch", torch.zeros(2), persistent=False))
    assert names({"model": idle}) == ["model.bias", "model.weight"]  # nothing of its own that is saved


@pytest.mark.parametrize(("kind", "attribute"), [("DataParallel", "module"), ("OptimizedModule", "_orig_mod")])
def test_a_class_that_only_has_the_name_of_a_wrapper_is_a_module_as_any(kind: str, attribute: str) -> None:
    model = type(kind, (nn.Module,), {})()
    model.add_module(attribute, nn.Linear(2, 2))
    model.head = nn.Linear(2, 2, bias=False)
    assert names({"model": model}) == sorted(f"model.{n}" for n, _ in model.named_parameters())


def test_bytes_of_a_walk_are_those_of_the_live_memory() -> None:
    state = {"t": torch.arange(12.0).reshape(3, 4).t(), "u": torch.randn(5, requires_grad=True)}
    walked = rt.walker_of(state).walk()
    with torch.no_grad():
        state["t"][0, 0] = 77
    assert not any(t.requires_grad for line in walked.tensors for t in line)
    assert [rt.raw(line[0]) for line in walked.tensors] == [rt.raw(state["t"]), rt.raw(state["u"])]
    assert walked.tensors[0][0].data_ptr() == state["t"].data_ptr()


def test_only_what_is_trained_and_not_small_may_be_copied_late() -> None:
    big = SMALL_BYTES // 4
    model = nn.ParameterDict(
        {"big": torch.randn(big), "small": torch.randn(big - 1), "frozen": nn.Parameter(torch.ones(big), False)}
    )
    model.other = nn.Parameter(torch.randn(big))
    model.register_buffer("buffer", torch.zeros(big))
    optim = torch.optim.Adam([model["big"], model["small"], model["frozen"]])
    (model["big"].sum() + model["small"].sum()).backward()
    optim.step()
    walked = rt.walker_of({"model": model, "optim": optim, "t": torch.zeros(big)}).walk()
    late = {e.name for e, is_late in zip(walked.layout.entries, walked.deferrable, strict=True) if is_late}
    assert late == {"model.big", "optim.state.big.exp_avg", "optim.state.big.exp_avg_sq"}


# ---------------------------------------------------------------------------------------------------------- refusals


class OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


def _looped() -> dict[str, Any]:
    inner: list[Any] = []
    inner.append(inner)
    return {"loop": inner}


REFUSED: dict[str, tuple[Any, str]] = {
    "sparse": (lambda: {"x": torch.eye(3).to_sparse()}, r"x: a torch.sparse_coo tensor"),
    "meta": (lambda: {"m": nn.Linear(1, 1, device="meta")}, r"m.weight, m.bias: on the meta device.*to_empty"),
    "conjugate": (lambda: {"x": torch.ones(2, dtype=torch.complex64).conj()}, r"x: a lazily conj.*resolve_conj"),
    "subclass": (lambda: {"x": Wrapping(torch.ones(2))}, r"x: a Wrapping, a tensor subclass"),
    "lazy": (lambda: {"m": nn.LazyLinear(3)}, r"m.weight, m.bias: not initialised yet.*forward"),
    "quantised": (
        lambda: {"x": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)},
        r"x: dtype torch.quint8 cannot be stored",
    ),
    "loader": (
        lambda: {"loader": torch.utils.data.DataLoader([1, 2])},
        r"'loader'\] is a torch DataLoader, which has no position.*StatefulDataLoader",
    ),
    "unregistered": (
        lambda: {"optim": torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2, 3))]}], lr=1)},
        r"'optim'\]: parameter 0 of group 0, a tensor of shape \(2, 3\), belongs to no module.*register",
    ),
    "no loading": (lambda: {"x": OnlySaves()}, r"OnlySaves, has no load_state_dict"),
    "dots": (
        lambda: {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
        r"the name 'a.b'; rename one",
    ),
    "same path": (lambda: {"a.b": 1, "a": {"b": nn.Linear(1, 1)}}, r"same name: a.b"),
    "number and text": (
        lambda: {"a": {1: torch.ones(1), "1": torch.ones(1)}},
        r"the name 'a.1'; rename one",
    ),
    "loop": (_looped, r"'loop'\] is nested more than 100 deep, or contains itself"),
    "mixed tuple": (lambda: {"x": (nn.Linear(1, 1), 5)}, r"'x'\] is a tuple of objects and values.*list"),
    "no name": (lambda: {"": 1}, r"a dict with names as keys"),
    "long name": (lambda: {"x" * 2000: torch.ones(1)}, r"cannot name a tensor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        rt.walker_of(make()).walk()


@pytest.mark.filterwarnings("ignore")
def test_all_tensors_that_cannot_be_saved_are_named_in_one_message() -> None:
    model = nn.ParameterDict({f"{n}": torch.eye(2).to_sparse() for n in range(7)})
    quantised = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
    with pytest.raises(UsageError) as refused:
        rt.walker_of({"m": model, "fine": torch.ones(1), "x": [quantised, torch.eye(3).to_sparse()]}).walk()
    said = str(refused.value)
    assert "m.0, m.1, m.2, m.3, m.4 and 3 more: a torch.sparse_coo tensor; store its indices" in said
    assert "; x.0: dtype torch.quint8 cannot be stored; convert it" in said
    assert "fine" not in said


PLACES: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "value": lambda tensor: {"x": tensor},
    "parameter": lambda tensor: {"m": nn.ParameterList([tensor])},
    "unregistered": lambda tensor: {"optim": torch.optim.SGD(nn.ParameterList([tensor]))},
    "state of none": lambda tensor: _with_state({tensor: {"y": 1}}),
    "state": lambda tensor: _with_state({}, {"y": tensor}),
}


def _with_state(more: dict[torch.Tensor, Any], held: Any = None) -> dict[str, Any]:
    state = job()
    state["optim"].state.update({state["model"][0].weight: held} if held else more)
    return state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", WITHOUT_STORAGE)
def test_tensors_without_storage_are_refused_by_name_wherever_they_are(kind: str, place: str) -> None:
    with pytest.raises(UsageError, match=r"^(x|m\.0|state\['optim'\]|optim\.state\.0\.weight\.y)"):
        rt.walker_of(PLACES[place](WITHOUT_STORAGE[kind]())).walk()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WITHOUT_STORAGE)
def test_a_tensor_that_has_lost_its_storage_is_noticed(kind: str) -> None:
    state = {"x": torch.ones(3)}
    walker, walk = rt.walked(state)
    state["x"] = WITHOUT_STORAGE[kind]()
    assert walker.has_changed(walk)


def test_sharding_by_whole_parameters_is_refused_by_name() -> None:
    model = net()
    wrapped = type("FullyShardedDataParallel", (nn.Sequential,), {})(model)
    with pytest.raises(UsageError, match=r"FSDP1.*fully_shard"):
        rt.walker_of({"model": wrapped}).walk()
    zero = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    for kind in (zero, type("Mine", (zero,), {})):
        with pytest.raises(UsageError, match=r"ZeroRedundancyOptimizer.*fully_shard"):
            rt.walker_of({"model": model, "optim": kind(model.parameters(), lr=1)}).walk()


# ------------------------------------------------------------------------------------------------------ fingerprints


# What changes the structure of `watched()`, or the memory of a tensor in it.
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a buffer": lambda s: setattr(s["model"][1], "running_mean", torch.zeros(4)),
    "the data of a parameter": lambda s: setattr(s["model"][0].weight, "data", s["model"][0].weight.data.clone()),
    "its strides": lambda s: setattr(s["model"][0].weight, "data", s["model"][0].weight.data.t()),
    "a loaded optimizer": lambda s: s["optim"].load_state_dict(s["optim"].state_dict()),
    "a group more": lambda s: s["optim"].add_param_group({"params": [s["model"].extra]}),
    "a module more": lambda s: s["model"].append(nn.Linear(4, 4)),
    "another module": lambda s: setattr(s["model"], "spare", nn.Linear(4, 4)),
    "another parameter": lambda s: setattr(s["model"], "extra", nn.Parameter(torch.zeros(3))),
    "another name": lambda s: s["model"].spare._parameters.update(b=s["model"].spare._parameters.pop("bias")),
    "a key more": lambda s: s.update(more=1),
    "another object": lambda s: s.update(object=Holder(tensor=torch.ones(2), count=0)),
    "a tensor more in data": lambda s: s["data"]["list"].append(torch.ones(1)),
    "a tensor for a value": lambda s: s["data"].update(n=torch.ones(1)),
    "an object for a value": lambda s: s["data"].update(n=nn.Linear(1, 1)),
    "another tensor of an object": lambda s: setattr(s["object"], "tensor", torch.ones(3)),
    "a tensor for a number of an object": lambda s: setattr(s["object"], "count", torch.ones(1)),
    "a tensor as rate": lambda s: s["optim"].param_groups[0].update(lr=torch.tensor(0.1)),
    "tensors as betas": lambda s: s["optim"].param_groups[0].update(betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "betas the other way": lambda s: (g := s["lagging"].param_groups[0]).update(betas=g["betas"][::-1]),
    "a tensor in extra state": lambda s: setattr(s["scaled"][0], "scale", torch.ones(1)),
    "no tensor in extra state": lambda s: setattr(s["scaled"][1], "scale", None),
    "a value in a hook": lambda s: setattr(s["hooked"], "scale", 2.0),
    "no state": lambda s: s["optim"].state.clear(),
    "more state": lambda s: next(iter(s["optim"].state.values())).update(more=torch.ones(1)),
    "the first state": lambda s: s["lagging"].state[s["model"][0].bias].update(exp_avg=torch.ones(4)),
}


def _values(state: dict[str, Any]) -> None:
    state["data"]["n"] = 7
    state["data"] = {**state["data"], "n": 8}
    state["optim"].param_groups[0]["lr"] = 0.5
    state["sched"].step()
    state["object"].count += 1
    state["data"]["list"][0].add_(1)


class Scaled(nn.Linear):
    def __init__(self, scale: torch.Tensor | None) -> None:
        super().__init__(1, 1)
        self.scale = scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def _with_scale(module: Any, state: dict[str, Any], *_: object) -> None:
    state.update({} if module.scale is None else {"scale": module.scale})


def watched() -> dict[str, Any]:
    state = job()
    state["model"].extra = nn.Parameter(torch.ones(3))
    state["model"].spare = nn.Linear(4, 4)
    state["data"] = {"list": [torch.ones(2)], "n": 1}
    state["object"] = Holder(tensor=torch.ones(2), count=0)
    state["model"](torch.randn(3, 4)).sum().backward()
    state["optim"] = torch.optim.Adam(state["model"][:2].parameters())
    state["optim"].step()
    state["sched"] = torch.optim.lr_scheduler.StepLR(state["optim"], 1)
    state["lagging"] = torch.optim.Adam([state["model"][0].bias])
    state["lagging"].param_groups[0]["betas"] = (torch.tensor(0.9), 0.99)
    state["lagging"].state[state["model"][0].bias].get("exp_avg")  # which leaves an empty dict there
    state["scaled"] = nn.Sequential(Scaled(None), Scaled(torch.ones(1)))
    state["hooked"] = nn.Linear(1, 1)
    state["hooked"].scale = None
    state["hooked"].register_state_dict_post_hook(_with_scale)
    return state


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_structure_or_storage_is_noticed(change: str) -> None:
    state = watched()
    walker, walk = rt.walked(state)
    assert not walker.has_changed(walk)
    CHANGES[change](state)
    assert walker.has_changed(walk)
    assert not walker.has_changed(walker.walk())
    assert walker.has_changed(walk), "a later walk makes nothing of an earlier one"


@pytest.mark.parametrize(
    "change", ["a tensor in extra state", "a tensor for a number of an object", "a tensor more in data"]
)
def test_values_refer_to_no_tensor_that_an_object_gives_only_when_it_is_asked_again(change: str) -> None:
    state = watched()
    walker, walk = rt.walked(state)
    assert not walker.has_changed(walk)
    before = values.encode(walker.values(walk)[0])
    assert not walker.has_changed(walk)
    CHANGES[change](state)
    assert values.encode(walker.values(walk)[0]) == before
    assert walker.has_changed(walk)


def test_other_strides_of_what_was_not_contiguous_are_noticed() -> None:
    memory = torch.arange(16.0)
    model = nn.Module()
    model.part = nn.Parameter(memory.as_strided((2, 2), (4, 1)))
    walker, walk = rt.walked({"model": model})
    assert not walker.has_changed(walk)
    model.part.data = memory.as_strided((2, 2), (5, 1))
    assert walker.has_changed(walk)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("change", [lambda state: trained(state, 2), _values], ids=["training", "values"])
def test_training_and_values_change_no_structure(change: Any) -> None:
    state = watched()
    walker, walk = rt.walked(state)
    change(state)
    assert not walker.has_changed(walk)


def stepped(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    def closure() -> Any:
        optim.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    optim.step(closure)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.LBFGS])
@pytest.mark.parametrize("touched", [False, True])
def test_state_that_appears_after_the_first_step_is_noticed(kind: Any, touched: bool) -> None:
    model = net()
    optim = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters() if touched else ():
        optim.state[parameter].get("exp_avg")  # reading leaves an empty dict, which the first step fills
    walker, walk = rt.walked({"model": model, "optim": optim})
    stepped(model, optim)
    assert walker.has_changed(walk)


def test_a_new_walk_lets_go_of_the_old_state() -> None:
    state = job()
    walker = rt.walker_of(state)
    walker.walk()
    gone = weakref.ref(state["model"])
    state.update(job())
    walker.walk()
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_values_are_read_afresh_at_each_save() -> None:
    state = watched()
    walker, walk = rt.walked(state)
    _values(state)
    assert not walker.has_changed(walk)
    shared, _ = walker.values(walk)
    objects = shared["objects"]
    assert objects["data"]["value"]["n"] == 8
    assert objects["optim"]["groups"][0]["value"]["lr"] == state["optim"].param_groups[0]["lr"]
    assert objects["sched"]["value"]["last_epoch"] == 1
    assert objects["object"]["value"]["count"] == 1


def test_values_among_the_state_of_an_optimizer_are_read_afresh_and_change_no_structure() -> None:
    model = net()
    optim = torch.optim.LBFGS(model.parameters(), max_iter=1, history_size=1)
    stepped(model, optim)
    walker, walk = rt.walked({"model": model, "optim": optim})
    stepped(model, optim)
    walker.has_changed(walk)
    payload = walker.values(walk)[0]["objects"]["optim"]
    assert payload["skeletons"][0]["value"]["n_iter"] == next(iter(optim.state.values()))["n_iter"] == 2


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_the_parts_that_a_save_repeats_are_encoded_as_if_anew(kind: Any) -> None:
    model = net()
    model.register_parameter("tied", model[0].weight)
    optim = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
    walker = rt.walker_of({"model": model, "optim": optim, "scheduler": scheduler, "n": [0]})
    stepped(model, optim)
    walk = walker.walk()
    told = set()
    for n in range(3):
        stepped(model, optim)
        scheduler.step()
        walker.state["n"][0] = n
        walker.has_changed(walk)
        shared = walker.values(walk)[0]
        told.add(values.encode(shared, constants=walk.scan.constants))
        assert values.encode(shared) in told
    assert len(told) == 3


def test_a_loader_belongs_to_the_rank_and_is_asked_only_for_a_save() -> None:
    class Loader:
        asked = 0

        def __iter__(self) -> Any:
            return iter(())

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {"at": 5, "perm": torch.arange(2)}

        def load_state_dict(self, state: Any) -> None: ...

    loader = Loader()
    walker, walk = rt.walked({"loader": loader})
    assert not walker.has_changed(walk)
    assert walker.values(walk, positions=False)[1]["loaders"] == {}
    assert loader.asked == 0
    shared, own = walker.values(walk)
    assert shared["objects"] == {}
    assert own["loaders"]["loader"]["value"] == {"at": 5, "perm": None}


# -------------------------------------------------------------------------------------------------- boxes and hashes


def test_hashes_are_those_of_the_row_major_bytes_whatever_the_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_hashes, "HASH_BLOCK_BYTES", 256)
    state = {
        "a": torch.randn(1000),
        "b": torch.randn(30, 40).t(),
        "c": torch.randn(3, 4, 500)[:, 1:, ::2],
        "d": torch.tensor(1.5),
        "e": torch.zeros(0, 4),
        "f": torch.randn(7, 3).bool(),
        "g": torch.randn(1, 5000).expand(3, 5000),
    }
    walked = rt.walker_of(state).walk()
    assert all(block.nbytes <= 256 for line in walked.tensors for t in line for block in tensor_hashes._blocks(t))
    hashes = hash_replicas(walked.tensors, walked.may_have_replicas)
    assert [tuple(row) for row in hashes.tolist()] == [frame_hash(rt.raw(t)) for t in state.values()]


def test_boxes_that_no_other_rank_holds_are_not_hashed() -> None:
    walked = rt.walker_of({"a": torch.ones(3), "b": torch.ones(3)}).walk()
    assert hash_replicas(walked.tensors, (True, False)).any(axis=1).tolist() == [True, False]


def test_a_hand_made_shard_declares_its_box_for_the_parameter_and_its_optimizer_state() -> None:
    model = nn.Linear(4, 2, bias=False)
    optim = torch.optim.Adam(model.parameters())
    model.weight.sum().backward()
    optim.step()
    state = {"model": model, "optim": optim, "shards": [Shard(model.weight, (6, 4), (2, 0))]}
    entries = {e.name: e for e in rt.walker_of(state).walk().layout.entries}
    assert list(entries) == ["model.weight", *(f"optim.state.weight.{n}" for n in ("exp_avg", "exp_avg_sq", "step"))]
    for name in ("model.weight", "optim.state.weight.exp_avg"):
        assert entries[name].shape == (6, 4)
        assert entries[name].boxes == (Box((2, 0), (2, 4)),)
    assert entries["optim.state.weight.step"].shape == ()


@pytest.mark.parametrize(
    ("shape", "offset"), [((6,), (0,)), ((1, 4), (0, 0)), ((6, 4), (5, 0)), ((6, 4), (-1, 0)), ((6, 4), (0,)), (6, 0)]
)
def test_a_shard_that_does_not_lie_inside_its_whole_is_refused(shape: Any, offset: Any) -> None:
    with pytest.raises(UsageError, match=r"ckpt.Shard"):
        Shard(torch.zeros(2, 4), shape, offset)


def test_an_empty_shard_declares_no_box() -> None:
    (entry,) = rt.walker_of({"t": Shard(torch.zeros(0, 4), (6, 4), (6, 0))}).walk().layout.entries
    assert (entry.shape, entry.boxes) == ((6, 4), ())


def test_boxes_are_where_torch_puts_the_elements_strided_and_uneven_ones_too() -> None:
    rng = random.Random(SEED)
    several = 0
    for _ in range(2000):
        shape = tuple(rng.randrange(1, 13) for _ in range(rng.randrange(1, 4)))
        sizes = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(1, 4)))
        placements = [_placement(rng, len(shape)) for _ in sizes]
        at = tuple(rng.randrange(n) for n in sizes)
        whole = torch.arange(math.prod(shape)).reshape(shape)
        local = whole
        try:
            for size, index, placement in _as_cut(list(zip(sizes, at, placements, strict=True)), len(shape)):
                if not isinstance(placement, Replicate):
                    local = placement._split_tensor(local, size, with_padding=False)[0][index]
        except AssertionError as exc:
            if "only allows even sharding" not in str(exc):
                raise
            continue  # torch 2.6 cuts nothing strided unevenly
        boxes, runs = _boxes(shape, sizes, at, placements, "t")
        found = [whole[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True))] for b in boxes]
        assert sum(box.size for box in boxes) == local.numel()
        parts = _views(local, runs) if boxes else []
        assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))
        assert not any(start + n == after for run in runs for (start, n), (after, _) in itertools.pairwise(run))
        several += len(boxes) > 1
    assert several > 20


def _as_cut(cuts: list[tuple[int, int, Any]], ndim: int) -> list[tuple[int, int, Any]]:
    """What fully_shard has cut last comes last, as a plain shard of what the others left."""
    for dim in range(ndim):
        line = [cut for cut in cuts if getattr(cut[2], "dim", None) == dim]
        strided = [cut for cut in line if getattr(cut[2], "split_factor", 1) > 1]  # else it is a plain one
        if len(strided) == 1 and strided == line[:1] and line[1:]:
            (cut,) = strided
            if cut[2].split_factor == math.prod(size for size, *_ in line[1:]):
                cuts = [each for each in cuts if each is not cut] + [(cut[0], cut[1], Sharded(dim))]
    return cuts


@pytest.mark.parametrize(("rows", "dp", "tp"), [(50257, 8, 2), (7, 3, 2), (14, 4, 3), (32001, 8, 2), (3, 4, 4)])
def test_uneven_shards_of_tensor_parallel_parts_are_where_fully_shard_puts_them(rows: int, dp: int, tp: int) -> None:
    placements = [_StridedShard(0, split_factor=tp), Sharded(0)]
    whole = list(range(rows))
    for i, j in itertools.product(range(dp), range(tp)):
        boxes, _ = _boxes((rows,), (dp, tp), (i, j), placements, "t")
        found = [row for box in boxes for row in range(box.offset[0], box.offset[0] + box.shape[0])]
        assert found == _chunk(_chunk(whole, tp, j), dp, i)


def _chunk(rows: list[int], parts: int, index: int) -> list[int]:
    size = -(-len(rows) // parts)
    return rows[size * index : size * (index + 1)]


def _placement(rng: random.Random, ndim: int) -> Any:
    kind, dim = rng.randrange(4), rng.randrange(ndim)
    if kind == 0:
        return Replicate()
    return Sharded(dim) if kind < 3 else _StridedShard(dim, split_factor=rng.randrange(1, 5))


# ------------------------------------------------------------------------------------------------------- coordinates


class Mesh:
    """What is asked of a DeviceMesh."""

    def __init__(self, names: tuple[str, ...] | None, shape: tuple[int, ...], at: tuple[int, ...] | None) -> None:
        self.mesh_dim_names, self.shape, self.at = names, shape, at
        self.ndim = len(shape)

    def size(self) -> int:
        return math.prod(self.shape)

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.at


@pytest.mark.parametrize(
    ("names", "shape", "at", "text", "data", "data_rank", "data_world"),
    [
        (("dp", "tp"), (2, 4), (1, 3), "dp=1,tp=3", "dp=1", 1, 2),
        (("pp", "dp_replicate", "dp_shard"), (2, 2, 2), (1, 1, 0), "pp=1,dp_replicate=1,dp_shard=0", None, 2, 4),
        (("dp",), (8,), (5,), "rank=5", "rank=5", 5, 8),
        (None, (8,), (5,), "rank=5", "rank=5", 5, 8),
        (("dp", "tp"), (8, 1), (5, 0), "rank=5", "rank=5", 5, 8),
        (("tp",), (8,), (5,), "tp=5", "all", 0, 1),
        (None, (4, 2), (1, 1), "dim0=1,dim1=1", "dim0=1,dim1=1", 3, 8),
    ],
)
def test_coordinates_name_the_rank_and_its_data(
    names: Any, shape: Any, at: Any, text: str, data: str | None, data_rank: int, data_world: int
) -> None:
    found = find_coordinate({}, 5, 8, Mesh(names, shape, at))
    assert found.text == text
    assert found.data == (data or "dp_replicate=1,dp_shard=0")
    assert (found.data_rank, found.data_world) == (data_rank, data_world)


def test_without_a_mesh_the_rank_is_the_coordinate() -> None:
    assert find_coordinate({"model": net()}, 2, 3).text == "rank=2"
    with pytest.raises(UsageError, match="covers 4 of 8 ranks"):
        find_coordinate({}, 0, 8, Mesh(("dp",), (4,), (0,)))


def test_the_same_mesh_is_one_with_the_same_coordinates() -> None:
    here = Coordinate((Axis("dp", 0, 2), Axis("tp", 1, 2)))
    assert here.is_in_mesh_of(["dp=0,tp=0", "dp=0,tp=1", "dp=1,tp=0", "dp=1,tp=1"])
    assert not here.is_in_mesh_of(["dp=0,tp=0", "dp=0,tp=1"])
    assert not here.is_in_mesh_of([f"rank={i}" for i in range(4)])


def test_the_walker_reads_generators_only_if_they_belong_to_the_state() -> None:
    state = {"mine": torch.Generator()}
    walkers = [StateWalker(state, find_coordinate(state, 0, 1), generators=every) for every in (True, False)]
    with_all, only_mine = (walker.values(walker.walk())[1]["generators"] for walker in walkers)
    assert {"python", "numpy", "torch", "state:mine"} <= set(with_all)
    assert set(only_mine) == {"state:mine"}
    assert generators.is_generator(state["mine"])
