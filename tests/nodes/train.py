"""What the nodes train: python -m tests.nodes.train URL STEPS [--every N] [--pace S] ... under torchrun.

One DDP and one FSDP2 model, and a sharded table of integers, of which each step makes the next. The losses are the same
whatever the number of ranks: all of them compute the same step, and of one alone, in turns, the gradients are not zero,
so that what is summed is exact. `losses` has them for one process without torch.distributed.

Prints one JSON object a line: where it came from, each loss, the events.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.trainer.loop import entry
from ckpt.trainer.restore import restore
from ckpt.trainer.restore.fill import Filler
from tests.checkpointer.scripts import say_line

COLUMNS = 256


class Models:
    """`copied` and `split`: equal on all ranks, and in parts. Plain until they are distributed."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.copied: nn.Module = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 7))
        self.split: nn.Module = nn.Sequential(nn.Linear(32, 41), nn.ReLU(), nn.Linear(41, 7))
        self.optims: list[torch.optim.Optimizer] = []

    def optimize(self) -> None:
        self.optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (self.copied, self.split)]

    def train(self, step: int, counts: bool = True) -> float:
        """`counts`: whether this rank's gradients are the ones."""
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        loss = (self.copied(x) + self.split(x)).square().mean()
        for optim in self.optims:
            optim.zero_grad()
        (loss * float(counts)).backward()
        for optim in self.optims:
            optim.step()
        return loss.item()


def losses(steps: int) -> list[float]:
    """Of an uninterrupted run."""
    torch.set_num_threads(1)
    models = Models(seed=0)
    models.optimize()
    return [models.train(step) for step in range(1, steps + 1)]


def distribute(models: Models, mesh: DeviceMesh) -> None:
    models.copied = DistributedDataParallel(models.copied)
    models.copied.register_comm_hook(None, _total)
    split = fully_shard(models.split, mesh=mesh)
    split.set_gradient_divide_factor(1.0)
    split.set_force_sum_reduction_for_comms(True)
    models.optimize()


def _total(state, bucket):  # torch takes no annotations that are strings
    """A sum, instead of a mean: see above."""
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


class Table:
    """rows x COLUMNS integers, sharded along as many dimensions as the mesh has. Of step s: what each is + s."""

    def __init__(self, rows: int, mesh: DeviceMesh, seed: int) -> None:
        placements = [Shard(0), Shard(1)][: mesh.ndim]
        shape, offset = compute_local_shape_and_global_offset((rows, COLUMNS), mesh, placements)
        rows_here = torch.arange(offset[0], offset[0] + shape[0], dtype=torch.int32)
        columns_here = torch.arange(offset[1], offset[1] + shape[1], dtype=torch.int32)
        self._first = (rows_here[:, None] * COLUMNS + columns_here[None]).contiguous()
        self.local = self._first.clone() if seed == 0 else torch.zeros_like(self._first)
        size, stride = torch.Size((rows, COLUMNS)), (COLUMNS, 1)
        self.tensor = DTensor.from_local(self.local, mesh, placements, run_check=False, shape=size, stride=stride)

    def train(self) -> None:
        self.local += 1

    def is_of(self, step: int) -> bool:
        return torch.equal(self.local - step, self._first)


def mesh_of(world: int, file: Path | None) -> DeviceMesh:
    """Of the shape that the file names now, where that many ranks are there."""
    shape: tuple[int, ...] = (world,)
    if file is not None and file.exists():
        wanted = tuple(json.loads(file.read_text()))
        if torch.Size(wanted).numel() == world:
            shape = wanted
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


class Parts:
    """How long the parts of entering take, seconds: until it is known what is restored and where it lies (plan), until
    all of it has arrived (fetch), and of that the time in which this rank copied and hashed (copy). "asked": of the
    plan, what the agents needed for their answer, on rank 0."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._fill_s = self._copy_s = self._filling_s = self._ask_s = 0.0
        self._lock, self._copying = threading.Lock(), 0
        fill, call, ask = restore.fill, Filler.__call__, entry._request_decision

        def timed_ask(*args: Any) -> entry.StartDecision:
            began_s = time.monotonic()
            try:
                return ask(*args)
            finally:
                self._ask_s += time.monotonic() - began_s

        def timed_fill(*args: Any) -> dict[str, int]:
            self._filling_s = time.monotonic()
            try:
                return fill(*args)
            finally:
                self._fill_s += time.monotonic() - self._filling_s

        def timed_call(filler: Filler, frame: int, raw: memoryview) -> bool:
            with self._lock:
                self._copying += 1
                if self._copying == 1:
                    self._since_s = time.monotonic()
            try:
                return call(filler, frame, raw)
            finally:
                with self._lock:
                    self._copying -= 1
                    if not self._copying:
                        self._copy_s += time.monotonic() - self._since_s

        restore.fill, Filler.__call__, entry._request_decision = timed_fill, timed_call, timed_ask  # type: ignore[method-assign]

    def end(self) -> dict[str, float]:
        plan_s = (self._filling_s or time.monotonic()) - self._began_s
        rest_s = time.monotonic() - self._began_s - plan_s - self._fill_s
        return {
            "plan": plan_s,
            "fetch": self._fill_s - self._copy_s,
            "copy": self._copy_s,
            "agree": rest_s,
            "asked": self._ask_s,
        }


def _all_see(file: Path, step: int) -> bool:
    if step % 10:
        return False
    seen = torch.tensor(float(file.exists()))
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    return bool(seen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--period", type=float, default=0.0, help="seconds that a step takes at least, pace included")
    parser.add_argument("--begin-at", type=float, default=0.0, help="Unix time before which it does not begin")
    parser.add_argument("--mib", type=float, default=1.0, help="the table's size, of all ranks together")
    parser.add_argument("--mesh", type=Path, help="a file that names the shape of the mesh")
    parser.add_argument("--end", type=Path, help="a file: once it is there, all ranks stop at the same step")
    parser.add_argument("--bandwidth", type=float, help="to the store, bytes/s")
    parser.add_argument("--parity", type=int, nargs=2, help="data and parity, instead of one copy")
    parser.add_argument("--parts", action="store_true", help="say how long the parts of entering took")
    parser.add_argument("--timeout", type=float, default=60.0, help="of collectives, seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, node = int(os.environ["RANK"]), os.environ["NODE"]
    world = int(os.environ["WORLD_SIZE"])

    def say(**fields: Any) -> None:
        say_line({"node": node, "rank": rank, "world": world, "at": time.time(), **fields})

    say(begins=os.getpid())
    time.sleep(max(0.0, args.begin_at - time.time()))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    mesh = mesh_of(world, args.mesh)
    seed = 0 if int(os.environ.get("FRESH", "1")) else 1 + rank
    models = Models(seed)
    distribute(models, mesh)
    table = Table(int(args.mib * 2**20) // (4 * COLUMNS), mesh, seed)
    state = {
        "copied": models.copied,
        "split": models.split,
        "optims": {"copied": models.optims[0], "split": models.optims[1]},
        "table": table.tensor,
        "steps": 0,
    }
    say(ready=list(mesh.shape))

    def hear(event: ckpt.Event) -> None:
        say(event=event.name, message=event.message, data=event.data)

    parts = Parts() if args.parts else None
    limits = ckpt.Limits(bandwidth=args.bandwidth)
    policy, peers = ckpt.Every(steps=args.every), ckpt.Parity(*args.parity) if args.parity else ckpt.Replicas(1)
    with ckpt.Checkpointer(args.url, state, policy=policy, peers=peers, limits=limits, sinks=(hear,)) as ck:
        came, read = ck.restored, ck.receipt["bytes"]
        if parts is not None:
            say(parts=parts.end())
        say(restored=came.step, level=came.level, identity=came.identity, bytes=read, lost=ck.receipt["steps_lost"])
        assert ck.state["steps"] == came.step, (ck.state["steps"], came)
        assert table.is_of(came.step), f"the table is not that of step {came.step}"
        for step in ck.steps(args.steps):
            began_s = time.monotonic()
            try:
                loss = models.train(step, counts=step % world == rank)
            except RuntimeError as exc:
                say(broke=str(exc)[:500])
                raise
            table.train()
            ck.state["steps"] = step
            say(step=step, loss=loss)
            time.sleep(max(args.pace, began_s + args.period - time.monotonic()))
            if args.end is not None and _all_see(args.end, step):
                break
    say(done=ck.receipt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
