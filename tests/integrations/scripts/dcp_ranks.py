"""Saves, or loads and compares, what DCP can hold over several ranks. Arguments: "save" or "load", the URL."""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from ckpt.integrations.dcp import Reader, Writer

URL = sys.argv[2]
WHOLE = torch.arange(10 * 20, dtype=torch.float32).reshape(10, 20)


class FailingPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        raise OSError("no more")


class Counter:
    """A Stateful of DCP."""

    def __init__(self, count):
        self.count, self.table = count, torch.full((3,), float(count))

    def state_dict(self):
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state):
        self.count, self.table = state["count"], state["table"]


def placements(world):
    """(mesh, placements) of DTensors: dimensions that do not divide, replicas, two dimensions in both orders."""
    line = init_device_mesh("cpu", (world,))
    found = [(line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()])]
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for one in (Shard(0), Shard(1), Replicate()):
            found += [(square, [one, other]) for other in (Shard(0), Shard(1), Replicate())]
    return found


def specs(world):
    """Shardings of ShardedTensor: several shards of one rank, shards of different sizes."""
    by_rank = [f"rank:{n % world}/cpu" for n in range(4)]
    starts, sizes = (0, 2, 3, 6), (2, 1, 3, 4)
    rows = [ShardMetadata([at, 0], [size, 20], where) for at, size, where in zip(starts, sizes, by_rank, strict=True)]
    return [ChunkShardingSpec(dim=0, placements=by_rank), ChunkShardingSpec(1, by_rank), EnumerableShardingSpec(rows)]


def filled(spec):
    tensor = sharded_tensor.zeros(spec, 10, 20)
    for shard in tensor.local_shards():
        place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        shard.tensor.copy_(WHOLE[tuple(slice(at, at + size) for at, size in place)])
    return tensor


def save(rank, world):
    state = {f"dtensor{n}": distribute_tensor(WHOLE, *where) for n, where in enumerate(placements(world))}
    state |= {f"sharded{n}": filled(spec) for n, spec in enumerate(specs(world))}
    state |= {"same": WHOLE.clone(), "nested": {"list": [1, {"x": WHOLE[0]}], "text": "a" * 1000}, f"only{rank}": rank}
    state |= {"tiny": distribute_tensor(torch.ones(1), *placements(world)[0])}  # most ranks have nothing of it
    state |= {"counter": Counter(7)}
    dcp.save(state, storage_writer=Writer(URL), checkpoint_id="sync")
    planner = FailingPlanner() if rank == 1 else None
    with pytest.raises(CheckpointException) as failed:  # one rank fails, and all ranks are told
        dcp.save({**state, "same": WHOLE + 1}, storage_writer=Writer(URL), checkpoint_id="sync", planner=planner)
    assert list(failed.value.failures) == [1]
    for name, kind in (("thread", AsyncCheckpointerType.THREAD), ("process", AsyncCheckpointerType.PROCESS)):
        # torch's own stager cannot copy a ShardedTensor.
        copy = {key: each for key, each in state.items() if not key.startswith(("sharded", "counter"))}
        copy["same"] = WHOLE + len(name)
        future = dcp.async_save(copy, storage_writer=Writer(URL), checkpoint_id=name, async_checkpointer_type=kind)
        copy["same"].zero_()  # training goes on
        future.result()


def load(rank, world):
    kinds = [*placements(world), *specs(world)]
    for name in ("dtensor0", "dtensor1", "dtensor2", "dtensor4", "dtensor7", "sharded0", "sharded2"):
        for kind in kinds:
            target = zeros([10, 20], device_mesh=kind[0], placements=kind[1]) if isinstance(kind, tuple) else None
            state = {name: sharded_tensor.zeros(kind, 10, 20) if target is None else target}
            dcp.load(state, storage_reader=Reader(URL), checkpoint_id="sync")
            if target is not None:
                assert torch.equal(state[name].full_tensor(), WHOLE), (name, kind)
                continue
            for got, want in zip(state[name].local_shards(), filled(kind).local_shards(), strict=True):
                assert torch.equal(got.tensor, want.tensor), (name, kind)
    counter = Counter(0)
    state = {"same": sharded_tensor.zeros(specs(world)[0], 10, 20), "sharded2": torch.zeros(10, 20)}
    dcp.load(state, storage_reader=Reader(URL), checkpoint_id="sync")
    assert torch.equal(state["sharded2"], WHOLE)
    for got, want in zip(state["same"].local_shards(), filled(specs(world)[0]).local_shards(), strict=True):
        assert torch.equal(got.tensor, want.tensor)
    state = {"nested": {"list": [0, {"x": torch.zeros(20)}], "text": ""}, "counter": counter, "only3": None}
    dcp.load(state, storage_reader=Reader(URL), checkpoint_id="sync")
    assert state["nested"]["text"] == "a" * 1000
    assert state["nested"]["list"][0] == 1
    assert torch.equal(state["nested"]["list"][1]["x"], WHOLE[0])
    assert state["only3"] == 3
    assert (counter.count, counter.table.tolist()) == (7, [7.0] * 3)
    tiny = {"tiny": zeros([1], device_mesh=placements(world)[0][0], placements=[Shard(0)])}
    dcp.load(tiny, storage_reader=Reader(URL))
    assert tiny["tiny"].full_tensor().tolist() == [1]
    for name in ("thread", "process"):
        state = {"same": torch.zeros(10, 20)}
        dcp.load(state, storage_reader=Reader(URL), checkpoint_id=name)
        assert torch.equal(state["same"], WHOLE + len(name))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    (save if sys.argv[1] == "save" else load)(dist.get_rank(), dist.get_world_size())
    print("done", flush=True)
    dist.destroy_process_group()
