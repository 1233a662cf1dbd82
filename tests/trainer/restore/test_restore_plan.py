from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tests.trainer.roundtrip as rt
from ckpt.errors import DamagedData, StateMismatch, UsageError
from ckpt.layout.reshard import Cut
from ckpt.trainer.restore.fill import copy_cut
from ckpt.trainer.state.saved_values import SharedValues, merge_shared
from ckpt.trainer.state.shard import Shard
from tests.trainer.restore.test_overwritten import refused


class Net(nn.Module):
    """Buffers, a tied weight, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam capturable-like lr tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=3),
}


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    made = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(0, 11, (5,), generator=made)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optim.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optim.step(closure)


def job(make: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optim = make([p for p in model.parameters() if p.requires_grad])
    return {"model": model, "optim": optim, "sched": torch.optim.lr_scheduler.MultiStepLR(optim, [1, 1, 7])}


def assert_same_job(one: dict[str, Any], two: dict[str, Any]) -> None:
    last = one["sched"].get_last_lr()[0]
    if torch.is_tensor(last) and last is one["optim"].param_groups[0]["lr"]:
        # In torch 2.6 the scheduler's rates are tensors of the optimizer until it loads a state, and then equal ones.
        assert one["sched"].state_dict() == two["sched"].state_dict()
        one, two = ({name: job[name] for name in ("model", "optim")} for job in (one, two))
    rt.assert_same_state(one, two)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_training_goes_on_bit_for_bit_in_a_fresh_process_and_in_a_used_one(kind: str, steps_before: int) -> None:
    saved = job(OPTIMIZERS[kind], 1)
    train(saved["model"], saved["optim"], 3)
    saved["sched"].step()
    checkpoint = rt.save(saved)
    other = job(OPTIMIZERS[kind], 2)
    train(other["model"], other["optim"], steps_before, seed=5)
    rt.restore(other, checkpoint)
    assert_same_job(saved, other)
    for state in (saved, other):
        train(state["model"], state["optim"], 2, seed=9)
        state["sched"].step()
    assert_same_job(saved, other)


def test_tensors_that_exist_are_filled_in_place_and_stay_the_same_objects() -> None:
    saved, other = job(OPTIMIZERS["adamw"], 1), job(OPTIMIZERS["adamw"], 2)
    for state in (saved, other):
        train(state["model"], state["optim"], 1)
        state["mine"] = {"t": torch.randn(3), "deep": [torch.randn(2)], "n": 1}

    def held() -> tuple[list[Any], list[tuple[int, bool]]]:
        model, optim, mine = other["model"], other["optim"], other["mine"]
        tensors = [*model.parameters(), *model.buffers(), mine["t"], mine["deep"][0]]
        tensors += [t for s in optim.state.values() for t in s.values()]
        objects = [*tensors, mine, mine["deep"], *optim.state.values(), *optim.param_groups]
        return objects, [(t.data_ptr(), t.requires_grad) for t in tensors]

    before, memory = held()
    rt.restore(other, rt.save(saved))
    now, memory_now = held()
    assert list(map(id, now)) == list(map(id, before))
    assert memory_now == memory
    rt.assert_same_state(saved, other)


def test_nothing_but_contents_of_tensors_changes_before_finish() -> None:
    saved, other = job(OPTIMIZERS["adamw"], 1), job(OPTIMIZERS["adamw"], 2)
    train(saved["model"], saved["optim"], 2)
    saved["sched"].step()
    saved["best"], other["best"] = 0.5, None
    checkpoint = rt.save(saved)
    targets = rt.plan(rt.walker_of(other), checkpoint)
    rt.fill(targets, checkpoint)
    assert not other["optim"].state
    assert other["best"] is None
    assert other["sched"].last_epoch == 0
    targets.install()
    assert other["best"] == 0.5
    assert other["sched"].last_epoch == 1


STRIDED: dict[str, Any] = {
    "transposed": lambda: torch.zeros(7, 5).t(),
    "channels_last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "stepped": lambda: torch.zeros(10, 6)[::2, 1::2],
    "expanded": lambda: torch.zeros(4, 1).expand(4, 3),
    "offset": lambda: torch.zeros(20)[3:9],
    "grad": lambda: torch.zeros(3, requires_grad=True),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", STRIDED)
def test_a_destination_of_any_strides_is_filled_where_it_lies(kind: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        target = STRIDED[kind]()
    assert target.is_inference() == inference
    narrow = (*target.shape[:-1], 1) if kind == "expanded" else target.shape
    source = torch.randn(narrow).expand(target.shape)
    stride, pointer = target.stride(), target.data_ptr()
    rt.restore({"t": target}, rt.save({"t": source.clone()}))
    assert torch.equal(target, source)
    assert (target.stride(), target.data_ptr()) == (stride, pointer)


def test_plain_values_are_live_in_the_state_and_keep_their_types() -> None:
    saved = {
        "best": 0.25,
        "history": {1: [1.5, float("inf")], "tuple": (1, (2, 3)), "counter": Counter("aab"), "order": OrderedDict(z=1)},
        "late": torch.arange(5),
        "grown": [torch.ones(2), torch.ones(3)],
        "lists": defaultdict(list, a=[torch.ones(1)]),
        "pool": deque([torch.ones(2), (torch.arange(3), 0.5), {"inner": deque([torch.zeros(1)])}], maxlen=4),
    }
    history: dict[Any, Any] = {}
    pool: deque[Any] = deque(maxlen=4)
    other: dict[str, Any] = dict.fromkeys(saved) | {"history": history, "grown": [], "pool": pool}
    rt.restore(other, rt.save(saved))
    assert other["pool"] is pool
    assert (pool.maxlen, pool[0].tolist(), pool[1][0].tolist(), pool[1][1]) == (4, [1.0, 1.0], [0, 1, 2], 0.5)
    assert type(pool[2]["inner"]) is deque
    assert torch.equal(pool[2]["inner"][0], torch.zeros(1))
    assert other["best"] == 0.25
    assert other["history"] is history
    assert history == saved["history"]
    assert type(history["counter"]) is Counter
    assert torch.equal(other["late"], torch.arange(5))
    assert [t.shape for t in other["grown"]] == [(2,), (3,)]
    assert other["lists"]["new"] == []
    assert torch.equal(other["lists"]["a"][0], torch.ones(1))


def test_who_holds_what_can_be_changed_in_the_state_sees_what_was_restored() -> None:
    """A loop goes on with the names that it made before: what it changes through them later is saved again. What cannot
    hold the saved value is replaced."""
    saved = {
        "array": np.arange(6.0).reshape(2, 3),
        "window": deque([1.5, 2.5], maxlen=3),
        "seen": {1, 2},
        "pair": ([1], {"a": 2}),
        "grown": np.ones(3),
        "int": np.full(3, 0.5),
        "frozen": np.ones(3),
        "short": deque([1, 2], maxlen=2),
    }
    array, window, seen, inner = np.zeros((3, 2)).T, deque([9.0], maxlen=3), {7}, list[int]()
    held = {"array": array, "window": window, "seen": seen}
    state: dict[str, Any] = {**held, "pair": (inner, {})}
    state |= {"grown": np.zeros(2), "int": np.zeros(3, int), "frozen": np.zeros(3), "short": deque([7], maxlen=1)}
    state["frozen"].flags.writeable = False
    rt.restore(state, rt.save(saved))
    assert all(state[key] is value for key, value in held.items())
    assert state["pair"][0] is inner
    assert (window, seen, state["pair"]) == (saved["window"], {1, 2}, ([1], {"a": 2}))
    for key in ("array", "grown", "int", "frozen"):
        assert np.array_equal(state[key], saved[key])
    assert (state["short"].maxlen, state["int"].dtype) == (2, np.float64)


def test_tied_parameters_are_saved_once_and_restored_to_all() -> None:
    tied, untied = Net(), Net()
    untied.head.weight = nn.Parameter(torch.zeros(11, 6))
    checkpoint = rt.save({"model": tied})
    names = [spec.name for spec in checkpoint.manifest.tensors]
    assert "model.embed.weight" in names
    assert "model.head.weight" not in names
    rt.restore({"model": untied}, checkpoint)
    assert torch.equal(untied.head.weight, tied.embed.weight)
    assert torch.equal(untied.embed.weight, tied.embed.weight)


def test_what_is_parted_is_of_the_same_kind_as_before_and_tied_as_in_the_checkpoint() -> None:
    two = nn.Parameter(torch.full((3000,), 2.0))
    checkpoint = rt.save({"a": nn.Parameter(torch.ones(3000)), "b": two, "more": [two]})
    tied = nn.Parameter(torch.zeros(3000))
    state: dict[str, Any] = {"a": tied, "b": tied, "more": [tied]}
    rt.restore(state, checkpoint)
    assert state["a"] is tied
    assert isinstance(state["b"], nn.Parameter)
    assert state["b"].requires_grad
    assert state["b"] is state["more"][0]
    assert (tied[0].item(), state["b"][0].item()) == (1.0, 2.0)
    model = nn.Linear(60, 60, bias=False)
    state = {"a": model, "b": {"weight": model.weight}}
    rt.restore(state, rt.save({"a": nn.Linear(60, 60, bias=False), "b": {"weight": torch.full((60, 60), 2.0)}}))
    assert state["b"]["weight"].unique().tolist() == [2.0]
    assert model.weight.unique().numel() > 1


def _sharing() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Two tensors of 6,000 elements that share memory."""
    flat = torch.zeros(6000)
    yield "the same", flat, flat[:]
    flat = torch.zeros(7000)
    yield "a part", flat[:6000], flat[1000:]
    flat = torch.zeros(6000)
    yield "across", flat.view(60, 100), flat.view(60, 100).t()
    one, two = nn.Parameter(torch.zeros(6000)), nn.Parameter(torch.zeros(6000))
    one.data = two.data
    yield "data", one, two


@pytest.mark.parametrize(("one", "two"), [(one, two) for _, one, two in _sharing()], ids=[n for n, *_ in _sharing()])
def test_tensors_that_share_memory_and_have_other_values_in_the_checkpoint_are_named(
    one: torch.Tensor, two: torch.Tensor
) -> None:
    saved = {"a": torch.full(one.shape, 1.0), "b": torch.full(two.shape, 2.0)}
    with pytest.raises(StateMismatch, match=r"^[ab](, b)? shared memory with other tensors"):
        rt.restore({"a": one, "b": two}, rt.save(saved))


def test_tensors_that_share_memory_come_back_where_their_values_agree() -> None:
    for _, one, two in _sharing():
        with torch.no_grad():
            one.copy_(torch.randn(one.shape))
        checkpoint, before = rt.save({"a": one, "b": two}), (one.clone(), two.clone())
        with torch.no_grad():
            one.zero_()
            two.zero_()
        rt.restore({"a": one, "b": two}, checkpoint)
        assert torch.equal(one, before[0])
        assert torch.equal(two, before[1])


def test_columns_of_one_matrix_share_no_memory() -> None:
    checkpoint = rt.save({"a": torch.full((3000,), 1.0), "b": torch.full((3000,), 2.0)})
    matrix = torch.zeros(3000, 2)
    rt.restore({"a": matrix[:, 0], "b": matrix[:, 1]}, checkpoint)
    assert matrix.unique(dim=0).tolist() == [[1.0, 2.0]]


def test_tensors_that_are_tied_in_the_checkpoint_and_not_in_the_state_are_filled_both() -> None:
    tied = torch.full((3000,), 3.0)
    checkpoint = rt.save({"a": tied, "b": [tied]})
    for state in ({"a": torch.zeros(3000), "b": [torch.zeros(3000)]}, {"a": (t := torch.zeros(3000)), "b": [t]}):
        a, (b,) = state["a"], state["b"]
        rt.restore(state, checkpoint)
        assert state["a"] is a
        assert state["b"][0] is b
        assert (a.unique().tolist(), b.unique().tolist()) == ([3.0], [3.0])


def test_a_tied_checkpoint_fits_a_state_that_names_the_tie_otherwise() -> None:
    first, second = nn.Module(), nn.Module()
    for module, order in ((first, "ab"), (second, "ba")):
        weight = nn.Parameter(torch.randn(3))
        for name in order:
            module.register_parameter(name, weight)
    rt.restore({"model": second}, rt.save({"model": first}))
    assert torch.equal(first.a, second.a)


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra", [{"amax": torch.arange(4.0), "n": 3}, torch.arange(3, dtype=torch.uint8), (1, [torch.ones(2)]), "text"]
)
def test_extra_state_comes_back_with_its_tensors(extra: Any) -> None:
    saved, other = nn.Sequential(Extra(), nn.Linear(2, 2)), nn.Sequential(Extra(), nn.Linear(2, 2))
    saved[0].extra = extra
    rt.restore({"model": other}, rt.save({"model": saved}))
    rt.assert_same_state({"model": saved}, {"model": other})
    assert repr(other[0].extra) == repr(extra)


class Scaled(nn.Linear):
    """Says itself how it is saved: its weight divided by its scale, under another name."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.scale = 2.0
        self._register_state_dict_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        state[prefix + "unit"] = state.pop(prefix + "weight").detach() / module.scale

    @staticmethod
    def _load(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "unit") * module.scale


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Delegating(Holding):
    """Its state_dict() is that of what it holds."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return self.inner.state_dict(*args, **named)

    def load_state_dict(self, state: Any, *args: Any, **named: Any) -> Any:
        return self.inner.load_state_dict(state, *args, **named)


class Short(Delegating):
    """Without the arguments that torch's own methods take."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return self.inner.load_state_dict(state)


class Renaming(Holding):
    """By hooks, of which the first overrides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(lambda _, d, *rest: {k.replace("inner.", "in_"): v for k, v in d.items()})
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _load(module: Any, state: dict[str, Any], *rest: Any) -> None:
        for key in list(state):
            state[key.replace("in_", "inner.")] = state.pop(key)


class Widening(Holding):
    """What it gives has another dtype than what it holds, under the same names."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(lambda _, d, *rest: {key: value.double() for key, value in d.items()})


class Parallel(Renaming):
    """With a wrapper inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.DataParallel(self.inner)


def adam(model: nn.Module, steps: int) -> dict[str, Any]:
    optim = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optim.step()
    return {"model": model, "optim": optim}


@pytest.mark.parametrize("kind", [Delegating, Short, Renaming, Widening, Parallel, lambda: nn.Sequential(Scaled())])
def test_a_module_that_names_its_tensors_itself_is_restored_with_its_optimizer(kind: Any) -> None:
    saved = adam(kind(), 2)
    checkpoint = rt.save(saved)
    for steps in (0, 1):
        other = adam(kind(), steps)
        rt.restore(other, checkpoint)
        rt.assert_same_state(saved, other)
        assert all(torch.equal(a, b) for a, b in zip(*(s["model"].parameters() for s in (saved, other)), strict=True))


def test_a_wrapper_inside_of_a_module_that_says_itself_how_it_is_saved_leaves_no_trace() -> None:
    def made(wrap: Any) -> nn.Module:
        model = nn.ModuleDict(
            {"module": wrap(nn.Sequential(nn.Linear(3, 3))), "net": nn.ModuleDict({"module": Scaled()})}
        )
        model["net"].forward = lambda x: x
        return model

    saved, other = made(nn.DataParallel), made(lambda module: module)
    checkpoint = rt.save({"model": saved})
    found = sorted(s.name for s in checkpoint.manifest.tensors if not s.values)
    assert found == ["model.module.0.bias", "model.module.0.weight", "model.net.module.unit"]
    rt.restore({"model": other}, checkpoint)
    assert torch.equal(saved["module"].module[0].weight, other["module"][0].weight)


class Adapted(nn.Module):
    """It keeps its adapter only."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(3, 3).requires_grad_(not frozen), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {key: value for key, value in super().state_dict(*args, **named).items() if "adapter" in key}


def test_a_trained_parameter_that_its_module_leaves_out_is_refused() -> None:
    saved = adam(Adapted(True), 1)
    other = adam(Adapted(True), 0)
    rt.restore(other, rt.save(saved))
    rt.assert_same_state(saved, other)
    left_out = adam(Adapted(False), 0)
    with pytest.raises(UsageError, match=r"state\['model'\].* leaves out base.weight, which state\['optim'\] trains"):
        rt.save(left_out)
    elsewhere = {**left_out, "base": left_out["model"].base}
    assert "base.weight" in {spec.name for spec in rt.save(elsewhere).manifest.tensors}


class Versioned(nn.Module):
    """It was turned by version 2, and turns what older ones saved; 1 is not read any more."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        version = metadata.get("version")
        assert version != 1
        if version is None:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *rest)


WRAPS: dict[str, Any] = {
    "bare": lambda module: module,
    "checkpointed": checkpoint_wrapper,
    "compiled": lambda module: torch.compile(module, backend="eager"),
}


@pytest.mark.parametrize("before", WRAPS)
@pytest.mark.parametrize("now", WRAPS)
def test_a_module_is_told_its_version_whatever_wraps_it_within_another(
    before: str, now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, other = (nn.Sequential(WRAPS[how](Versioned())) for how in (before, now))
    rt.restore({"model": other}, rt.save({"model": saved}))
    assert torch.equal(*saved.parameters(), *other.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(Versioned, "_version", 1)
        older = rt.save({"model": saved})
    with pytest.raises(AssertionError):
        rt.restore({"model": other}, older)


class Exporting(Holding):
    """A hook renames what it gives, and nothing what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(lambda _, d, *rest: {k.replace("inner.", ""): v for k, v in d.items()})


class Prefixing(Holding):
    """So does a method."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {f"exported.{key}": value for key, value in super().state_dict(*args, **named).items()}


@pytest.mark.parametrize("kind", [Exporting, Prefixing])
def test_what_a_module_gives_and_does_not_take_back_is_named(kind: Any) -> None:
    checkpoint = rt.save({"nets": [adam(kind(), 2)["model"]]})
    with pytest.raises(
        UsageError, match=r"state\['nets.0'\]: its load_state_dict\(\) .* has no place for .*bias, .*weight"
    ):
        rt.restore({"nets": [kind()]}, checkpoint)


def test_what_a_module_makes_of_its_tensors_for_others_needs_no_place() -> None:
    """A hook that adds what follows from the rest: it is as it was once the rest is."""
    saved, other = nn.Linear(3, 3), nn.Linear(3, 3)
    for module in (saved, other):
        module._register_state_dict_hook(lambda m, d, *rest: d.update(merged=m.weight.detach() @ m.weight.detach()))
    checkpoint = rt.save({"model": saved})
    assert "model.merged" in {spec.name for spec in checkpoint.manifest.tensors}
    rt.restore({"model": other}, checkpoint)
    assert torch.equal(saved.weight, other.weight)


class Ema:
    """An object of the user's own, with tensors inside."""

    def __init__(self, size: int) -> None:
        self.shadow = [torch.full((size,), 1.0)]
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": [t.clone() for t in self.shadow], "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.count = state["shadow"], state["count"]


class Pair(NamedTuple):
    one: torch.Tensor
    other: int


class Named(OrderedDict[str, Any]):
    pass


def test_containers_of_any_type_that_objects_give_come_back_as_plain_ones() -> None:
    """What an object's state_dict() gives, its load_state_dict() understands; so it is with extra state."""

    class Held:
        def __init__(self, value: float) -> None:
            self.value = torch.full((3,), value)

        def state_dict(self) -> dict[str, Any]:
            return Named(pair=Pair(self.value, 1), more=Named(x=self.value + 1))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value, _ = state["pair"]
            self.more = state["more"]["x"]

    module, held = Extra(), Held(4.0)
    module.extra = Pair(torch.ones(2), 5)
    other, empty = Extra(), Held(0.0)
    other.extra = Pair(torch.zeros(2), 0)
    rt.restore({"held": empty, "model": other}, rt.save({"held": held, "model": module}))
    assert empty.value.tolist() == [4.0] * 3
    assert empty.more.tolist() == [5.0] * 3
    assert (other.extra[0].tolist(), other.extra[1]) == ([1.0, 1.0], 5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_saved_and_loaded_by_its_own_state_dict() -> None:
    def made() -> nn.Module:
        module: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        return module

    saved, other = made(), made()
    saved(torch.randn(8, 4))
    walker = rt.walker_of({"model": saved})
    walker.walk()
    rt.restore({"model": other}, rt.save({"model": saved}))
    for name, value in saved.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


# ------------------------------------------------------------------------------------------------------- mismatches


def test_every_difference_is_named_in_one_message() -> None:
    saved = {
        "model": nn.ModuleDict({"same": nn.Linear(2, 2), "gone": nn.Linear(2, 2), "wide": nn.Linear(2, 3)}),
        "v": 1,
    }
    saved["model"]["short"] = nn.Linear(2, 2).half()
    other = {"model": nn.ModuleDict({"same": nn.Linear(2, 2), "new": nn.Linear(2, 2), "wide": nn.Linear(2, 4)}), "w": 1}
    other["model"]["short"] = nn.Linear(2, 2)
    checkpoint = rt.save(saved)
    found = rt.plan(rt.walker_of(other), checkpoint)
    assert rt.named(found, "missing") == ("model.new.bias", "model.new.weight", "w")
    assert found.extra_names == ("model.gone.bias", "model.gone.weight", "v")
    assert refused([rt.walker_of(other)], checkpoint).partition(": ")[2].partition(". Nothing")[0].split("; ") == [
        "model.new.*: 2 tensors, not in the checkpoint",
        "model.short.bias is float32, in the checkpoint float16",
        "model.short.weight is float32, in the checkpoint float16",
        "model.wide.bias has the shape (4,), in the checkpoint (3,)",
        "model.wide.weight has the shape (4, 2), in the checkpoint (3, 2)",
        "w is missing in the checkpoint",
        "only in the checkpoint: model.gone.*, 2 tensors",
        "only in the checkpoint: v",
    ]


def test_not_strict_goes_on_with_what_fits() -> None:
    def make(width: int, decay: float) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width))
        optim = torch.optim.Adam(model.parameters(), weight_decay=decay)
        model(torch.randn(1, 2)).sum().backward()
        optim.step()
        return {"model": model, "optim": optim, "x": {"a": torch.zeros(width), "b": decay}}

    saved, other = make(3, 0.1), make(4, 0.2)
    kept = other["model"][1].weight.clone()
    other["x"]["c"] = torch.ones(2)
    targets = rt.restore(other, rt.save(saved), strict=False)
    assert "model.1.weight" in rt.named(targets, "reshaped")
    assert torch.equal(other["model"][0].weight, saved["model"][0].weight)
    assert torch.equal(other["model"][1].weight, kept)
    assert other["optim"].param_groups[0]["weight_decay"] == 0.1
    assert other["optim"].state[other["model"][1].weight]["exp_avg"].shape == (4, 2)
    assert other["x"]["b"] == 0.1
    assert other["x"]["a"].shape == (4,)


def test_a_scheduler_of_another_class_is_named_and_left_as_it_is() -> None:
    def made(kind: Any) -> dict[str, Any]:
        state = adam(nn.Linear(3, 4), 1)
        return {**state, "sched": kind(state["optim"])}

    checkpoint = rt.save(made(lambda optim: torch.optim.lr_scheduler.CosineAnnealingLR(optim, 9)))
    other = made(lambda optim: torch.optim.lr_scheduler.StepLR(optim, 2))
    targets = rt.restore(other, checkpoint, strict=False)
    assert rt.named(targets, "retyped") == ("sched",)
    (line,) = targets.difference_lines
    assert "StepLR, in the checkpoint of the class CosineAnnealingLR, without gamma, step_size and with T_max" in line
    assert not hasattr(other["sched"], "T_max")


class Average(Ema):
    """A former Ema, which takes over what that had."""

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["average"] if "average" in state else state["shadow"]


def test_an_object_of_the_users_that_was_renamed_gets_what_its_former_class_had() -> None:
    saved, other = Ema(3), Average(2)
    saved.shadow[0].fill_(5.0)
    rt.restore({"deep": {"ema": [other]}}, rt.save({"deep": {"ema": [saved]}}))
    assert other.shadow[0].tolist() == [5.0] * 3


@pytest.mark.parametrize(
    ("live", "held", "said"),
    [
        (torch.zeros(3), 5, "x.0 is a tensor (float32, of the shape (3,)), in the checkpoint 5"),
        (torch.zeros(()), None, "x.0 is a tensor (float32, of the shape ()), in the checkpoint None"),
        (torch.zeros((), dtype=torch.int64), 0.5, "x.0 is a tensor (int64, of the shape ()), in the checkpoint 0.5"),
        (torch.zeros((), dtype=torch.int8), 300, "x.0 is a tensor (int8, of the shape ()), in the checkpoint 300"),
        *(
            (torch.zeros((), dtype=torch.int64), n, f"x.0 is a tensor (int64, of the shape ()), in the checkpoint {n}")
            for n in (1 << 70, math.nan, math.inf)
        ),
        (torch.zeros(()), {"a": torch.ones(2)}, "x.0 is a tensor (float32, of the shape ()), in the checkpoint a dict"),
    ],
)
def test_a_tensor_that_is_none_in_the_checkpoint_is_named(live: torch.Tensor, held: Any, said: str) -> None:
    state = {"x": [live, 1]}
    targets = rt.restore(state, rt.save({"x": [held, 2]}), strict=False)
    assert rt.named(targets, "retyped") == ("x.0",)
    assert said in targets.difference_lines
    assert state["x"][0] is live
    assert not live.any()
    assert state["x"][1] == 2


def test_a_module_that_the_checkpoint_lacks_takes_one_line() -> None:
    def state(*more: str) -> dict[str, Any]:
        model = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for name in ("body", *more)})
        optim = torch.optim.AdamW(model.parameters())
        sum(param.sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
        optim.step()
        return {"model": model, "optim": optim}

    targets = rt.plan(rt.walker_of(state("head")), rt.save(state()))
    assert targets.difference_lines == [
        "model.head.*: 4 tensors, not in the checkpoint",
        "optim.state.head.*: 4 optimizer states, not in the checkpoint",
    ]
    assert len(rt.named(targets, "missing")) == 8
    lone = {"model": nn.ModuleDict({"body": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})}
    held = rt.save({"model": nn.ModuleDict({"body": nn.Linear(2, 2, bias=False)})})
    assert rt.plan(rt.walker_of(lone), held).difference_lines == ["model.head.weight is missing in the checkpoint"]


@pytest.mark.parametrize(
    ("live", "held"),
    [
        (torch.zeros(()), 5),
        (torch.zeros((), dtype=torch.int64), 2**40),
        (torch.zeros(()), math.nan),
        (torch.zeros(()), 1 << 70),
        (torch.zeros((), dtype=torch.uint64), 2**63 + 1),
    ],
)
def test_a_number_of_the_checkpoint_goes_into_a_0_d_tensor_that_can_hold_it(live: torch.Tensor, held: float) -> None:
    """The loop has assigned it to the tensor's key; or a counter has become a tensor since."""
    state = {"x": live}
    rt.restore(state, rt.save({"x": held}))
    assert state["x"] is live
    assert live.item() == held or math.isnan(live.item()) == math.isnan(held)


def test_a_number_does_not_go_into_a_tensor_that_has_another_name() -> None:
    held = torch.zeros(())
    state = {"a": held, "b": held}
    targets = rt.restore(state, rt.save({"a": torch.tensor(5.0), "b": 3}), strict=False)
    assert targets.difference_lines == ["b is a tensor (float32, of the shape ()), in the checkpoint 3"]
    assert held.item() == 5.0


def test_an_object_of_another_kind_is_named() -> None:
    (line,) = rt.plan(rt.walker_of({"x": Ema(1)}), rt.save({"x": 5})).difference_lines
    assert line == "x is of the kind object, in the checkpoint of the kind value"


# ------------------------------------------------------------------------------------------------ per rank, per mesh


def test_an_object_gets_a_hand_made_shard_as_it_gave_it() -> None:
    class Table:
        def __init__(self, rank: int, world: int) -> None:
            self.part = Shard(torch.full((4 // world, 2), float(rank)), (4, 2), (rank * 4 // world, 0))

        def state_dict(self) -> dict[str, Any]:
            return {"part": self.part}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.part = state["part"]

    checkpoint = rt.save_on({"rank": 2}, [{"table": Table(rank, 2)} for rank in range(2)])
    for rank in range(4):
        table = Table(rank, 4)
        before = table.part
        rt.restored({"table": table}, checkpoint, {"rank": 4}, rank)
        assert (table.part.global_shape, table.part.offset) == ((4, 2), (rank, 0))
        assert table.part.tensor.tolist() == [[float(rank // 2)] * 2]
        assert table.part.tensor is not before.tensor


def test_equal_names_with_different_values_come_back_to_their_own_ranks() -> None:
    mesh = {"dp": 2, "ep": 2}
    checkpoint = rt.save_on(mesh, [{"t": torch.full((2000,), float(rank)), "same": torch.ones(3)} for rank in range(4)])
    for rank in range(4):
        state = {"t": torch.zeros(2000), "same": torch.zeros(3)}
        rt.restored(state, checkpoint, mesh, rank)
        assert torch.equal(state["t"], torch.full((2000,), float(rank)))

    held = [nn.ParameterDict({"t": torch.full((3,), float(rank))} if rank else {}) for rank in range(4)]
    there = rt.planned({"m": held[0]}, rt.save_on(mesh, [{"m": each} for each in held]), mesh)
    assert there.extra_names == ()  # what other ranks own is not missed here


def test_parts_of_a_sharded_tensor_that_ranks_hold_with_different_values_come_back() -> None:
    """Two replicas of a sharded tensor that have drifted apart: each rank's part is its own."""
    mesh = {"dp": 2, "tp": 2}

    def states(fill: bool) -> list[dict[str, Any]]:
        return [
            {"t": Shard(torch.full((2, 3), float(rank) if fill else -1.0), (4, 3), (2 * (rank % 2), 0))}
            for rank in range(4)
        ]

    checkpoint = rt.save_on(mesh, states(True))
    for rank, state in enumerate(states(False)):
        rt.restored(state, checkpoint, mesh, rank)
        assert torch.equal(state["t"].tensor, torch.full((2, 3), float(rank)))


class Loader:
    """Iterated over, with state."""

    def __init__(self, position: Any = 0) -> None:
        self.position = position

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "perm": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["perm"], torch.arange(3))
        self.position = state["position"]


class Elastic(Loader):
    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        self.position = [s["position"] for s in states], rank, world


def positions(kind: type[Loader], old: dict[str, int], new: dict[str, int], strict: bool = True) -> list[Any]:
    checkpoint = rt.save_on(old, [{"loader": kind(f"at {i}")} for i in range(math.prod(old.values()))])
    found = []
    for rank in range(math.prod(new.values())):
        state = {"loader": kind("start")}
        targets = rt.planned(state, checkpoint, new, rank, strict=strict)
        targets.install()
        found.append(state["loader"].position)
    return found


def test_loader_positions_follow_the_data_parallel_coordinate() -> None:
    assert positions(Loader, {"dp": 2, "cp": 2}, {"dp": 2, "cp": 2}) == ["at 0", "at 1", "at 2", "at 3"]
    assert len(set(positions(Loader, {"dp": 2, "tp": 2}, {"rank": 2}))) == 2
    assert positions(Loader, {"rank": 2}, {"dp": 2, "tp": 2}) == ["at 0", "at 0", "at 1", "at 1"]


def test_ranks_that_have_no_loader_or_generator_now_miss_none() -> None:
    """The loader of the first stage; None elsewhere."""
    saved = {"loader": Loader("at 7"), "dice": torch.Generator().manual_seed(3)}
    checkpoint = rt.save_on({"rank": 1}, [saved])
    extra = []
    for rank in range(2):
        state = {"loader": Loader(), "dice": torch.Generator()} if rank == 0 else {"loader": None, "dice": None}
        targets = rt.planned(state, checkpoint, {"pp": 2}, rank)
        assert not targets.difference_lines, targets.difference_lines
        targets.install()
        assert rank or state["loader"].position == "at 7"
        extra.append(set(targets.extra_names))
    assert extra == [set(), {"loader", "dice"}]
    again = rt.save_on({"pp": 2}, [saved, {"loader": None, "dice": None}])
    nothing = {"loader": None, "dice": None}
    for rank, state in enumerate((nothing, {"loader": Loader(), "dice": torch.Generator()})):
        targets = rt.planned(state, again, {"pp": 2}, rank)
        assert rt.named(targets, "missing") == ((), ("dice", "loader"))[rank]
        assert set(targets.extra_names) == ({"loader", "dice"}, set())[rank]
    assert rt.restore(dict(nothing), rt.save(saved), strict=False).extra_names == ("dice", "loader")


def test_on_another_data_parallel_size_a_loader_is_resharded_or_the_choices_are_named() -> None:
    assert positions(Elastic, {"rank": 3}, {"rank": 2}) == [(["at 0", "at 1", "at 2"], r, 2) for r in range(2)]
    with pytest.raises(UsageError, match=r"3 data-parallel ranks and there are 2 now.*strict=False.*repeats"):
        positions(Loader, {"rank": 3}, {"rank": 2})
    assert positions(Loader, {"rank": 3}, {"rank": 2}, strict=False) == ["start", "start"]


# ---------------------------------------------------------------------------------------------------------- filling


@pytest.mark.parametrize(
    "cut",
    [
        Cut(0, 0, (5,), (1,), 0, (0,)),  # beyond the frame
        Cut(0, 0, (4,), (1,), 0, (1,)),  # beyond the tensor
        Cut(0, -8, (2,), (1,), 0, (0,)),
        Cut(0, 0, (2,), (-1,), 0, (0,)),
        Cut(0, 8, (4,), (1,), 0, (0,)),
        Cut(0, 0, (2, 2), (2, 1), 0, (0, 0)),
        Cut(0, 0, (2,), (1 << 62,), 0, (0,)),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(cut: Cut) -> None:
    with pytest.raises(DamagedData):
        copy_cut(cut, torch.zeros(32, dtype=torch.uint8), torch.zeros(4, dtype=torch.float64))


def optimizer_tree(names: tuple[str, ...], keys: list[str], state: list[int]) -> dict[str, Any]:
    groups = [{"params": names, "value": {"lr": 1}, "tensors": []}]
    skeletons = [{"value": dict.fromkeys(keys), "tensors": [(key,) for key in keys]}]
    body = {"kind": "optimizer", "groups": groups, "skeletons": skeletons, "state": state}
    return {"objects": {"optim": body}, "aliases": {}}


def test_shared_values_of_several_ranks_are_joined() -> None:
    first = optimizer_tree(("a", "both"), ["x"], [0, -1])
    second = optimizer_tree(("both", "b", "c"), ["y", "z"], [0, 0, -1])
    joined = SharedValues.parse(merge_shared([first, second])).optimizers["optim"]
    assert joined.groups[0].params == ("a", "both", "b", "c")
    paths = {name: skeleton and skeleton.tensors for name, skeleton in joined.state.items()}
    assert paths == {"a": (("x",),), "both": (("y",), ("z",)), "b": (("y",), ("z",)), "c": None}
    none = optimizer_tree(("a", "both"), [], [-1, -1])
    none["objects"]["optim"]["skeletons"] = []
    joined = SharedValues.parse(merge_shared([none, second, first])).optimizers["optim"]
    assert joined.groups[0].params == ("a", "both", "b", "c")
    assert [name for name, skeleton in joined.state.items() if skeleton is None] == ["c"]


@pytest.mark.parametrize(
    "tree",
    [
        *(optimizer_tree(("a", "b"), ["x"], state) for state in ([0], [0, 0, 0], [0, 1], [0, -2], [0, None], 5)),
        *(
            {"objects": {"m": {"kind": "module", "extra": {}, "versions": versions}}, "aliases": {}}
            for versions in (5, {1: 1}, {"": "x"}, {"": None})
        ),
    ],
)
def test_state_that_fits_no_parameters_and_versions_that_are_no_numbers_are_damage(tree: Any) -> None:
    with pytest.raises(DamagedData):
        SharedValues.parse(tree)
