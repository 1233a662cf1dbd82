"""One rank of a gloo group of four that walks one model under many layouts, saves each, and restores each.

    dist_layouts.py RANK FOLDER      (started by test_state_walk_dist.py)

Everything is asserted here; the exit status says whether it held. Other numbers of ranks, and every layout into every
other: tests/checkpointer/test_layouts.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tests.trainer.roundtrip as rt
from ckpt.errors import UsageError
from ckpt.trainer.state.mesh_coordinate import find_coordinate
from ckpt.trainer.state.state_walk import StateWalker
from tests.trainer.kinds import Holder

WORLD = 4
# By size of the model. Sizes 6 and 10 are uneven over 4 ranks: the last rank holds less, or nothing.
LAYOUTS = {8: ("plain", "ddp", "fsdp", "tp", "hsdp", "fsdp_tp"), 6: ("ddp", "fsdp", "fsdp_tp")}


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, size + 4)
        self.down = nn.Linear(size + 4, size)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(size), Block(size)])
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def meshes(layout: str) -> DeviceMesh | None:
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    if layout == "fsdp_tp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if layout in ("fsdp", "tp"):
        return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp" if layout == "fsdp" else "tp",))
    return None


def build(layout: str, size: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = Model(size)
    mesh = meshes(layout)
    if layout == "ddp":
        model = DistributedDataParallel(model)
    if layout in ("tp", "fsdp_tp") and mesh is not None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
    if layout in ("fsdp", "hsdp", "fsdp_tp") and mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"] if layout == "fsdp_tp" else mesh)
        fully_shard(model, mesh=mesh["dp"] if layout == "fsdp_tp" else mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optim": optim, "sched": torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)}


def train(state: dict[str, Any], size: int, steps: int) -> None:
    data = torch.Generator().manual_seed(0)
    for _ in range(steps):
        state["optim"].zero_grad()
        state["model"](torch.randn(3, size, generator=data)).square().sum().backward()
        state["optim"].step()
        state["sched"].step()


def evaluate(state: dict[str, Any], size: int) -> None:
    """Leaves FSDP2's root module with gathered parameters."""
    with torch.no_grad():
        state["model"](torch.randn(3, size))


def full(walker: StateWalker) -> dict[str, torch.Tensor]:
    """Every tensor of the state, whole."""
    found = {}
    for name, (named, _) in sorted(walker.scan().tensors.items()):
        tensor: Any = named.tensor
        found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return found


def walker_of(state: dict[str, Any], rank: int) -> StateWalker:
    return StateWalker(state, find_coordinate(state, rank, WORLD), generators=False)


def save_together(walker: StateWalker, rank: int) -> rt.Checkpoint:
    ranks: list[Any] = [None] * WORLD
    dist.all_gather_object(ranks, rt.save_rank(walker, rank, WORLD))
    return rt.assemble_ranks(ranks)


def restore_into(state: dict[str, Any], checkpoint: rt.Checkpoint, rank: int) -> None:
    rt.finish(rt.plan(walker_of(state, rank), checkpoint), checkpoint)


def save(layout: str, size: int, rank: int) -> tuple[rt.Checkpoint, dict[str, torch.Tensor]]:
    state = build(layout, size, seed=1)
    walker = walker_of(state, rank)
    walk = walker.walk()
    train(state, size, 3)
    evaluate(state, size)
    assert walker.has_changed(walk), "the optimizer's state has appeared"
    checkpoint = save_together(walker, rank)
    assert not checkpoint.disagreed, checkpoint.disagreed
    walk, mine = walker.walk(), checkpoint.ranks[rank].declaration.layout
    replica = dict(zip((e.name for e in mine.entries), walk.may_have_replicas, strict=True))
    assert replica["model.blocks.0.up.weight"] == (layout in ("plain", "ddp", "hsdp"))
    assert replica["optim.state.blocks.0.up.weight.step"]
    evaluate(state, size)
    assert walker_of(state, rank).walk().layout == mine, "evaluation gathers parameters"
    train(state, size, 1)
    evaluate(state, size)
    assert not walker.has_changed(walk), "a step, and an evaluation that gathers parameters, change no structure"
    assert [entry.name for entry in mine.entries] == names_of_one_process(size)
    again = build(layout, size, seed=1)
    train(again, size, 3)
    return checkpoint, full(walker_of(again, rank))


def names_of_one_process(size: int) -> list[str]:
    state = {"model": Model(size)}
    state["optim"] = torch.optim.AdamW(state["model"].parameters())
    for parameter in state["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    state["optim"].step()
    return [entry.name for entry in rt.walker_of(state).walk().layout.entries]


def assert_same(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert found.keys() == reference.keys()
    wrong = [name for name in reference if not torch.equal(found[name], reference[name])]
    assert not wrong, wrong


def restore(
    checkpoint: rt.Checkpoint, reference: dict[str, torch.Tensor], layout: str, size: int, rank: int, used: bool
) -> None:
    """Into a fresh process's state, or into one that has trained already."""
    state = build(layout, size, seed=2)
    if used:
        train(state, size, 1)
    restore_into(state, checkpoint, rank)
    for parameter, held in state["optim"].state.items():
        assert getattr(held["exp_avg"], "placements", None) == getattr(parameter, "placements", None)
    assert_same(full(walker_of(state, rank)), reference)
    assert state["sched"].last_epoch == 3
    assert state["optim"].param_groups[0]["lr"] == 0.005
    train(state, size, 1)  # optimizer state has the placements that a step needs
    evaluate(state, size)


def special(rank: int) -> None:
    """Tensors that no module makes: several boxes a rank, partial sums, parts of other sizes than torch would cut."""
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.arange(8.0 * WORLD).reshape(WORLD, 8)

    def table(fill: bool) -> dict[str, Any]:
        parts = [whole[rank : rank + 1, :3], whole[rank : rank + 1, 3:]]
        parts = [part.clone() if fill else torch.zeros_like(part) for part in parts]
        local = LocalShardsWrapper(parts, [(rank, 0), (rank, 3)])
        meta = TensorMeta(whole.shape, (8, 1), whole.dtype)  # from_local takes no wrapper of two before torch 2.7
        return {"table": DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)}

    checkpoint = save_together(walker_of(table(True), rank), rank)
    assert len(checkpoint.manifest.boxes) == 2 * WORLD + 1 + WORLD  # two a rank; the shared values and each rank's
    one = {"table": torch.zeros_like(whole)}
    rt.restore(one, checkpoint)
    assert torch.equal(one["table"], whole)
    again = table(False)
    restore_into(again, checkpoint, rank)
    assert torch.equal(torch.cat(again["table"]._local_tensor.local_shards(), 1), whole[rank : rank + 1])

    # An object's own sharded tensor comes back as one.
    saved, fresh = (
        Holder(tensor=distribute_tensor(each, mesh, [Shard(0)])) for each in (whole, torch.zeros_like(whole))
    )
    restore_into({"x": fresh}, save_together(walker_of({"x": saved}, rank), rank), rank)
    assert torch.equal(fresh.state_dict()["tensor"]._local_tensor, whole[rank : rank + 1])

    column_major(mesh, rank)

    sums = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    crooked = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False, shape=(40,), stride=(1,))
    for tensor, message in ((sums, "x: a DTensor with a Partial placement"), (crooked, "declare such a part with")):
        with pytest.raises(UsageError, match=message):
            walker_of({"x": tensor}, rank).walk()


def column_major(mesh: DeviceMesh, rank: int) -> None:
    """State of an optimizer in memory column by column: sharded as its parameter is, and replicated."""
    whole = torch.arange(8.0 * WORLD).reshape(4, 2 * WORLD).t()

    def job(fill: bool) -> dict[str, Any]:
        model = nn.Module()
        model.table = nn.Parameter(distribute_tensor(torch.zeros(2 * WORLD, 4), mesh, [Shard(0)]))
        optim = torch.optim.SGD(model.parameters())
        if fill:
            local = whole[2 * rank : 2 * rank + 2].t().contiguous().t()
            basis = DTensor.from_local(whole[:3, :3].t().contiguous().t(), mesh, [Replicate()])
            optim.state[model.table] = {"q": DTensor.from_local(local, mesh, [Shard(0)]), "basis": basis}
        return {"model": model, "optim": optim}

    saved, fresh = job(True), job(False)
    restore_into(fresh, save_together(walker_of(saved, rank), rank), rank)
    ((_, before),), ((_, now),) = saved["optim"].state.items(), fresh["optim"].state.items()
    for key, tensor in before.items():
        assert now[key].placements == tensor.placements
        assert now[key].stride() == tensor.stride()
        assert now[key]._local_tensor.stride() == tensor._local_tensor.stride() == (1, 2 if key == "q" else 3)
        assert torch.equal(now[key]._local_tensor, tensor._local_tensor)


COORDINATES = dict.fromkeys(("plain", "ddp", "fsdp"), "rank={}")
COORDINATES |= {"tp": "tp={}", "hsdp": "dp_replicate={},dp_shard={}", "fsdp_tp": "dp={},tp={}"}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        special(rank)
        for size, layout in [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts]:
            checkpoint, reference = save(layout, size, rank)
            at = divmod(rank, 2) if layout in ("hsdp", "fsdp_tp") else (rank,)
            assert checkpoint.manifest.coordinates[rank] == COORDINATES[layout].format(*at)
            for target in (layout, "fsdp_tp"):
                try:
                    restore(checkpoint, reference, target, size, rank, used=layout == target)
                except Exception as exc:
                    raise AssertionError(f"{layout} of size {size} into {target}") from exc
            alone = build("plain", size, seed=4)  # one process without any wrapper
            rt.restore(alone, checkpoint)
            assert_same(full(rt.walker_of(alone)), reference)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
