"""One rank of a gloo group that walks one model under many layouts, saves each, and restores each into each.

    dist_layouts.py RANK WORLD FOLDER      (started by test_walk_dist.py)

The first launch (world 4) leaves its checkpoints, and the full tensors they must give, in FOLDER; later launches of
another size restore those. Everything is asserted here; the exit status says whether it held.
"""

from __future__ import annotations

import pickle
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

# By world size. Sizes 6 and 10 are uneven over 4 ranks: the last rank holds less, or nothing.
SIZES = {"even": 8, "uneven": 6}
LAYOUTS = {
    ("even", 4): ("plain", "ddp", "fsdp", "tp", "hsdp", "fsdp_tp"),
    ("uneven", 4): ("ddp", "fsdp", "fsdp_tp"),
    ("even", 3): ("ddp", "fsdp"),
    ("uneven", 3): ("fsdp",),
}


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


def meshes(layout: str, world: int) -> DeviceMesh | None:
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    if layout == "fsdp_tp":
        return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    if layout in ("fsdp", "tp"):
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp" if layout == "fsdp" else "tp",))
    return None


def build(layout: str, size: int, world: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = Model(size)
    mesh = meshes(layout, world)
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


def walker_of(state: dict[str, Any], rank: int, world: int) -> StateWalker:
    return StateWalker(state, find_coordinate(state, rank, world), generators=False)


def save(layout: str, kind: str, rank: int, world: int) -> tuple[rt.Checkpoint, dict[str, torch.Tensor]]:
    size = SIZES[kind]
    state = build(layout, size, world, seed=1)
    walker = walker_of(state, rank, world)
    walk = walker.walk()
    train(state, size, 3)
    evaluate(state, size)
    assert walker.has_changed(walk), "the optimizer's state has appeared"
    mine = rt.save_rank(walker, rank, world)
    walk = walker.walk()
    replica = dict(zip((e.name for e in mine.declaration.layout.entries), walk.may_have_replicas, strict=True))
    assert replica["model.blocks.0.up.weight"] == (layout in ("plain", "ddp", "hsdp"))
    assert replica["optim.state.blocks.0.up.weight.step"]
    evaluate(state, size)
    assert walker_of(state, rank, world).walk().layout == mine.declaration.layout, "evaluation gathers parameters"
    train(state, size, 1)
    evaluate(state, size)
    assert not walker.has_changed(walk), "a step, and an evaluation that gathers parameters, change no structure"
    assert [entry.name for entry in mine.declaration.layout.entries] == names_of_one_process(size)
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, mine)
    checkpoint = rt.assemble_ranks(ranks)
    assert not checkpoint.disagreed, checkpoint.disagreed
    again = build(layout, size, world, seed=1)
    train(again, size, 3)
    return checkpoint, full(walker_of(again, rank, world))


def names_of_one_process(size: int) -> list[str]:
    state = {"model": Model(size)}
    state["optim"] = torch.optim.AdamW(state["model"].parameters())
    for parameter in state["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    state["optim"].step()
    return [entry.name for entry in rt.walker_of(state).walk().layout.entries]


def restore(
    saved: tuple[rt.Checkpoint, dict[str, torch.Tensor]], layout: str, size: int, rank: int, world: int, used: bool
) -> None:
    """Into a fresh process's state, or into one that has trained already."""
    checkpoint, reference = saved
    state = build(layout, size, world, seed=2)
    if used:
        train(state, size, 1)
    walker = walker_of(state, rank, world)
    targets = rt.plan(walker, checkpoint)
    assert not targets.mismatch, str(targets.mismatch)
    assert not targets.extra_names, targets.extra_names
    rt.fill(targets, checkpoint)
    targets.install()
    for parameter, held in state["optim"].state.items():
        assert getattr(held["exp_avg"], "placements", None) == getattr(parameter, "placements", None)
    found = full(walker_of(state, rank, world))
    assert found.keys() == reference.keys()
    wrong = [name for name in reference if not torch.equal(found[name], reference[name])]
    assert not wrong, wrong
    assert state["sched"].last_epoch == 3
    assert state["optim"].param_groups[0]["lr"] == 0.005
    train(state, size, 1)  # optimizer state has the placements that a step needs
    evaluate(state, size)


class Holder:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def special(rank: int, world: int) -> None:
    """Tensors that no module makes: several boxes a rank, partial sums, parts of other sizes than torch would cut."""
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(8.0 * world).reshape(world, 8)

    def table(fill: bool) -> dict[str, Any]:
        parts = [whole[rank : rank + 1, :3], whole[rank : rank + 1, 3:]]
        parts = [part.clone() if fill else torch.zeros_like(part) for part in parts]
        local = LocalShardsWrapper(parts, [(rank, 0), (rank, 3)])
        meta = TensorMeta(whole.shape, (8, 1), whole.dtype)  # from_local takes no wrapper of two before torch 2.7
        return {"table": DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)}

    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, rt.save_rank(walker_of(table(True), rank, world), rank, world))
    checkpoint = rt.assemble_ranks(ranks)
    assert len(checkpoint.manifest.boxes) == 2 * world + 1 + world  # two a rank; the shared values and each rank's
    one = {"table": torch.zeros_like(whole)}
    rt.restore(one, checkpoint)
    assert torch.equal(one["table"], whole)
    again = table(False)
    targets = rt.plan(walker_of(again, rank, world), checkpoint)
    rt.fill(targets, checkpoint)
    assert torch.equal(torch.cat(again["table"]._local_tensor.local_shards(), 1), whole[rank : rank + 1])

    for fill in (True, False):  # an object's own sharded tensor comes back as one
        held = Holder(distribute_tensor(whole if fill else torch.zeros_like(whole), mesh, [Shard(0)]))
        if fill:
            dist.all_gather_object(ranks, rt.save_rank(walker_of({"x": held}, rank, world), rank, world))
    checkpoint = rt.assemble_ranks(ranks)
    targets = rt.plan(walker_of({"x": held}, rank, world), checkpoint)
    rt.fill(targets, checkpoint)
    targets.install()
    assert torch.equal(held.tensor._local_tensor, whole[rank : rank + 1])

    column_major(mesh, rank, world)

    sums = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    crooked = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False, shape=(40,), stride=(1,))
    for tensor, message in ((sums, "x: a DTensor with a Partial placement"), (crooked, "declare such a part with")):
        with pytest.raises(UsageError, match=message):
            walker_of({"x": tensor}, rank, world).walk()


def column_major(mesh: DeviceMesh, rank: int, world: int) -> None:
    """State of an optimizer in memory column by column: sharded as its parameter is, and replicated."""
    whole = torch.arange(8.0 * world).reshape(4, 2 * world).t()

    def job(fill: bool) -> dict[str, Any]:
        model = nn.Module()
        model.table = nn.Parameter(distribute_tensor(torch.zeros(2 * world, 4), mesh, [Shard(0)]))
        optim = torch.optim.SGD(model.parameters())
        if fill:
            local = whole[2 * rank : 2 * rank + 2].t().contiguous().t()
            basis = DTensor.from_local(whole[:3, :3].t().contiguous().t(), mesh, [Replicate()])
            optim.state[model.table] = {"q": DTensor.from_local(local, mesh, [Shard(0)]), "basis": basis}
        return {"model": model, "optim": optim}

    saved, fresh = job(True), job(False)
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, rt.save_rank(walker_of(saved, rank, world), rank, world))
    checkpoint = rt.assemble_ranks(ranks)
    targets = rt.plan(walker_of(fresh, rank, world), checkpoint)
    rt.fill(targets, checkpoint)
    targets.install()
    ((_, before),), ((_, now),) = saved["optim"].state.items(), fresh["optim"].state.items()
    for key, tensor in before.items():
        assert now[key].placements == tensor.placements
        assert now[key].stride() == tensor.stride()
        assert now[key]._local_tensor.stride() == tensor._local_tensor.stride() == (1, 2 if key == "q" else 3)
        assert torch.equal(now[key]._local_tensor, tensor._local_tensor)


COORDINATES = dict.fromkeys(("plain", "ddp", "fsdp"), "rank={}")
COORDINATES |= {"tp": "tp={}", "hsdp": "dp_replicate={},dp_shard={}", "fsdp_tp": "dp={},tp={}"}


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    try:
        if world == 4:
            special(rank, world)
        for kind, size in SIZES.items():
            saved = {}
            if world == 4:
                for layout in LAYOUTS[kind, 4]:
                    saved[layout] = save(layout, kind, rank, world)
                    at = divmod(rank, 2) if layout in ("hsdp", "fsdp_tp") else (rank,)
                    assert saved[layout][0].manifest.coordinates[rank] == COORDINATES[layout].format(*at)
                if rank == 0:
                    (folder / f"{kind}.pickle").write_bytes(pickle.dumps(saved))
            else:
                saved = pickle.loads((folder / f"{kind}.pickle").read_bytes())
            for i, source in enumerate(saved):
                for j, layout in enumerate(LAYOUTS[kind, world]):
                    if source != layout and (i + j) % 2 and world == 4:
                        continue  # half of the pairs: each layout still goes into several, and several into each
                    try:
                        restore(saved[source], layout, size, rank, world, used=layout == source)
                    except Exception as exc:
                        raise AssertionError(f"{kind}: {source} of 4 ranks into {layout} of {world}") from exc
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
