"""The order of dimensions in memory: a tensor that a restart makes anew has the strides that torch.save would give."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.trainer.roundtrip as rt
from ckpt.errors import DamagedData
from ckpt.format import values
from ckpt.trainer.state.shard import Shard

LAST = torch.channels_last

DENSE: dict[str, Callable[[], Tensor]] = {
    "row-major": lambda: torch.randn(4, 6),
    "column-major": lambda: torch.randn(6, 4).t(),
    "made by qr": lambda: torch.linalg.qr(torch.randn(5, 5))[0],
    "a permuted one": lambda: torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
    "a batch of transposed ones": lambda: torch.randn(3, 4, 5).mT,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=LAST),
    "channels last in 3-d": lambda: torch.randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
    "channels last of one channel": lambda: torch.empty_strided((2, 1, 4, 5), (20, 1, 5, 1)).normal_(),
    "channels last of one pixel": lambda: torch.randn(2, 3, 1, 1).to(memory_format=LAST),
    "channels last of one image": lambda: torch.randn(1, 3, 4, 5).to(memory_format=LAST),
    "one row": lambda: torch.randn(1, 4),
    "one column": lambda: torch.randn(1, 4).t(),
    "one element": lambda: torch.randn(1, 1, 1),
    "a number": lambda: torch.randn(()),
    "column-major in half precision": lambda: torch.randn(6, 4, dtype=torch.bfloat16).t(),
}
NOT_DENSE: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.randn(4, 1).expand(4, 3),
    "expanded and transposed": lambda: torch.randn(4, 1).expand(4, 3).t(),
    "every other column": lambda: torch.randn(4, 6)[:, ::2],
    "a part of a column-major one": lambda: torch.randn(6, 4).t()[:2],
    "overlapping": lambda: torch.randn(8).as_strided((4, 3), (1, 2)),
    "nothing": lambda: torch.empty(0, 4).t(),
}


def loaded(tensor: Tensor) -> Tensor:
    """What torch.save keeps of it."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    made: Tensor = torch.load(file)
    return made


@pytest.mark.parametrize("kind", [*DENSE, *NOT_DENSE])
def test_a_tensor_that_is_made_anew_has_the_strides_that_torch_save_gives_or_is_contiguous(kind: str) -> None:
    tensor = {**DENSE, **NOT_DENSE}[kind]()
    fresh: dict[str, Any] = {"extra": {}}
    rt.restore(fresh, rt.save({"extra": {"q": tensor}}))
    expected = loaded(tensor) if kind in DENSE else tensor.contiguous()
    assert fresh["extra"]["q"].stride() == expected.stride()
    assert rt.raw(fresh["extra"]["q"]) == rt.raw(tensor)


class Net(nn.Module):
    """Parameters in two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=LAST)
        self.body = nn.Parameter(torch.randn(6, 4).t())


def job(fill: bool) -> dict[str, Any]:
    """An optimizer whose state has other orders than its parameters; with `fill`, the state of one step."""
    torch.manual_seed(int(fill))
    model = Net()
    optim = torch.optim.Adam(model.parameters())
    if fill:
        for parameter in model.parameters():
            made = {"like": torch.randn_like(parameter), "rows": torch.randn(parameter.shape)}
            made["reversed"] = torch.empty_permuted(parameter.shape, tuple(reversed(range(parameter.ndim)))).normal_()
            made["basis"] = torch.linalg.qr(torch.randn(3, 3))[0]
            optim.state[parameter] = made
    return {"model": model, "optim": optim}


def strides(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    held = {name: state["optim"].state[parameter] for name, parameter in state["model"].named_parameters()}
    return {f"{name}.{key}": tensor.stride() for name, each in held.items() for key, tensor in each.items()}


def test_state_of_an_optimizer_has_its_own_order_and_not_that_of_its_parameter() -> None:
    saved, fresh = job(True), job(False)
    rt.restore(fresh, rt.save(saved))
    rt.assert_same_state(saved, fresh)
    assert strides(fresh) == strides(saved)


# --------------------------------------------------------------------------------------------- several ranks' values


def part(rank: int, tensor: Tensor) -> dict[str, Any]:
    """Rank's two rows of a table, and state of an optimizer for it, as `tensor` is."""
    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(2, 3))
    optim = torch.optim.SGD(model.parameters(), momentum=0.9)
    if tensor.numel():
        optim.state[model.table] = {"momentum_buffer": tensor}
    return {"model": model, "shard": Shard(model.table, (4, 3), (2 * rank, 0)), "optim": optim}


@pytest.mark.parametrize("column_major", [(True, True), (False, True)])
def test_a_hand_made_shard_has_its_order_on_its_own_rank_and_on_others(column_major: tuple[bool, bool]) -> None:
    whole = torch.randn(4, 3)
    parts = [whole[:2].clone(), whole[2:].clone()]
    parts = [p.t().contiguous().t() if column else p for p, column in zip(parts, column_major, strict=True)]
    saved = [part(rank, each) for rank, each in enumerate(parts)]
    checkpoint = rt.save_on({"rank": 2}, saved)
    for rank, each in enumerate(parts):
        fresh = rt.restored(part(rank, torch.empty(0)), checkpoint, {"rank": 2}, rank)
        (held,) = fresh["optim"].state.values()
        assert held["momentum_buffer"].stride() == each.stride()
        assert torch.equal(held["momentum_buffer"], each)
    alone = part(0, torch.empty(0))
    alone["model"].table = nn.Parameter(torch.zeros(4, 3))
    alone["optim"] = torch.optim.SGD(alone["model"].parameters(), momentum=0.9)
    alone["shard"] = alone["model"].table
    rt.restore(alone, checkpoint)
    (held,) = alone["optim"].state.values()
    assert held["momentum_buffer"].stride() == (1, 4)
    assert torch.equal(held["momentum_buffer"], whole)


# ----------------------------------------------------------------------------------- what other writers have written


def with_orders(checkpoint: rt.Checkpoint, orders: Any) -> rt.Checkpoint:
    """The checkpoint as one whose values have these orders; None: as one written before orders were."""
    (rank,) = checkpoint.ranks
    tree = values.decode(rank.shared)
    del tree["orders"]
    if orders is not None:
        tree["orders"] = orders
    return rt.assemble_ranks([replace(rank, shared=values.encode(tree))])


def test_without_orders_state_is_as_its_parameter_and_the_rest_row_major() -> None:
    saved = job(True)
    saved["extra"] = {"q": torch.randn(6, 4).t()}
    fresh = job(False)
    fresh["extra"] = {}
    rt.restore(fresh, with_orders(rt.save(saved), None))
    assert strides(fresh)["body.like"] == strides(saved)["body.like"]
    assert strides(fresh)["body.basis"] == (3, 1)
    assert fresh["extra"]["q"].stride() == (6, 1)
    assert torch.equal(fresh["extra"]["q"], saved["extra"]["q"])


@pytest.mark.parametrize(
    "orders",
    [
        7,
        [],
        {"extra.q": 5},
        {"extra.q": "01"},
        {"extra.q": [0]},
        {"extra.q": [0, 0]},
        {"extra.q": [0, 2]},
        {"extra.q": [-1, 0]},
        {"extra.q": [1.0, 0.0]},
        {"extra.q": [True, False]},
        {"extra.q": [0, 1, 2]},
        {"extra.q": [None, "x"]},
        {"extra.q": [1 << 80, 0]},
    ],
)
def test_an_order_that_is_none_is_damaged_data(orders: Any) -> None:
    checkpoint = with_orders(rt.save({"extra": {"q": torch.randn(6, 4).t()}}), orders)
    with pytest.raises(DamagedData, match=r"order|'orders'"):
        rt.plan(rt.walker_of({"extra": {}}), checkpoint)
