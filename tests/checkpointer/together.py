"""Checks of what four ranks have to do together: tests/checkpointer/ranks.py runs them, test_ranks_together.py says
what they should see."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.ipc import client
from ckpt.settings import read_settings
from ckpt.storage import canonical
from tests.checkpointer.ranks import Job
from tests.checkpointer.runs import LATER, Seen, kill_agent
from tests.checkpointer.watched import WAITS, calls_watched

SAMPLES = 40


def groups_of_their_own(job: Job) -> dict[str, Any]:
    """Two jobs in one launch, by process_group=."""
    mine = job.rank // 2

    def run(steps: int, seed: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed + mine)
        model = nn.Linear(50, 50)
        optim = torch.optim.Adam(model.parameters())
        own = torch.full((3,), float(job.rank if seed == 0 else -1))
        state = {"model": model, "optim": optim, "own": own}
        group = job.pairs[mine]
        with ckpt.Checkpointer(job.folder / f"g{mine}", state, process_group=group, policy=LATER) as ck:
            came = ck.restored.step
            for step in ck.steps(steps):
                optim.zero_grad()
                model(torch.ones(2, 50) * step).square().mean().backward()
                optim.step()
        return came, model.weight.detach().clone(), own.clone()

    first, second = run(5, 0), run(5, 100)
    job.ended(job.folder / "g0", job.folder / "g1")
    same = torch.equal(first[1], second[1])
    return {"came": [first[0], second[0]], "same": same, "own": second[2].tolist(), "sum": first[1].sum().item()}


def weights_without_a_head(job: Job) -> dict[str, Any]:
    """init= under FSDP2, from files that do not have all of the model: refused first, and then with strict=False."""
    torch.manual_seed(5)
    wanted = {f"body.{name}": value for name, value in nn.Linear(6, 7).state_dict().items()}
    folder, url = job.folder / "weights", job.folder / "head"
    if job.rank == 0:
        folder.mkdir()
        for name, value in wanted.items():
            save_file({name: value}, folder / f"{name}.safetensors")
    dist.barrier()

    def start(strict: bool) -> dict[str, Any]:
        whole = nn.Sequential(OrderedDict(body=nn.Linear(6, 7), head=nn.Linear(7, 3)))
        model = fully_shard(whole, mesh=init_device_mesh("cpu", (4,)))
        before, seen, error = weights_of(model), Seen(), None
        try:
            with ckpt.Checkpointer(url, {"model": model}, init=folder, strict=strict, policy=LATER, sinks=(seen,)):
                pass
        except ckpt.CkptError as exc:
            error = [type(exc).__name__, str(exc)]
        now = weights_of(model)
        job.ended(url)
        return {
            "error": error,
            "changed": [name for name in now if not torch.equal(now[name], before[name])],
            "wrong": [name for name in wanted if not torch.equal(now[name], wanted[name])],
            "said": [event.message for event in seen.named("init.partial")],
        }

    def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}

    return {"strict": start(True), "partly": start(False)}


def damage(job: Job) -> dict[str, Any]:
    """Data of one rank alone is damaged, then the state of one rank alone does not match, then nothing is good."""
    url, r = job.folder / "damage", job.rank

    def start(more: bool = False) -> tuple[Any, list[bool]]:
        """(where it came back, its own weights) or the error, and the loud words of it that this rank heard."""
        model = nn.ModuleDict({f"stage{r}": nn.Linear(300, 300)})
        if more:
            model["new"] = nn.Linear(2, 2)
        seen = Seen()
        try:
            with ckpt.Checkpointer(url, {"model": model}, codec="raw", policy=LATER, sinks=(seen,)) as ck:
                for step in ck.steps(0 if ck.restored.step else 3):
                    with torch.no_grad():
                        model[f"stage{r}"].weight.fill_(100.0 * step + r)
                    if step < 3:
                        ck.step()
                        ck.save().wait("store", timeout_s=60)
                found = [ck.restored.step, model[f"stage{r}"].weight.unique().tolist()]
        except ckpt.CkptError as exc:
            found = [type(exc).__name__, str(exc)]
        job.ended(url)
        return found, [event.loud for event in seen.named("restore.skipped")]

    def flip(step: int, rank: int) -> None:
        """A bit in the weights of that rank."""
        if r == 0:
            pattern = np.full(1000, 100.0 * step + rank, np.float32).tobytes()
            for pack in url.rglob("*.pack"):
                data = bytearray(pack.read_bytes())
                if (at := data.find(pattern)) >= 0:
                    data[at + 1001] ^= 4
                    pack.write_bytes(data)
                    break
            else:
                raise AssertionError(f"no pack holds step {step} of rank {rank}")
        dist.barrier()

    start()
    flip(3, 3)
    older = start()
    other = start(more=r == 1)
    flip(2, 1)
    flip(1, 2)
    return {"older": older, "other": other, "none": start()}


def change_on_one_rank(job: Job) -> dict[str, Any]:
    """A layer is unfrozen on rank 1 alone, in mid-run; that very step is saved, and the next one."""
    url, r = job.folder / "change", job.rank

    def build() -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(r)
        model = nn.ModuleDict({f"a{r}": nn.Linear(200, 200), f"b{r}": nn.Linear(200, 200)})
        model[f"b{r}"].requires_grad_(False)
        return model, torch.optim.Adam(model.parameters())

    def facts(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters())
        moments = {f"{name}.{key}": v for name, p in named.items() for key, v in optim.state.get(p, {}).items()}
        return {name: value.detach().clone() for name, value in {**named, **moments}.items()}

    model, optim = build()
    handles = []
    with ckpt.Checkpointer(url, {"model": model, "optim": optim}, policy=ckpt.Every(steps=2)) as ck:
        for step in ck.steps(12):
            if step == 6 and r == 1:
                model["b1"].requires_grad_(True)
            optim.zero_grad()
            model[f"b{r}"](model[f"a{r}"](torch.ones(2, 200))).square().mean().backward()
            optim.step()
            if step in (6, 7):
                ck.step()
                handles.append(ck.save())
        for handle in handles:
            handle.wait("store", timeout_s=60)
    expected = facts(model, optim)
    job.ended(url)
    model, optim = build()
    with ckpt.Checkpointer(url, {"model": model, "optim": optim}, policy=LATER) as ck:
        found = facts(model, optim)
    job.ended(url)
    same = found.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in found.items())
    return {
        "saved": [handle.step for handle in handles],
        "came": ck.restored.step,
        "same": same,
        "moments": "b1.weight.exp_avg" in found,
    }


class Fixed:
    """Gives a data-parallel rank its share of the samples 0..SAMPLES-1, in order."""

    def __init__(self, rank: int, world: int) -> None:
        self.left = list(range(SAMPLES))[rank::world]

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop(0)

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


class Elastic(Fixed):
    """Divides what is left among any number of ranks."""

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        self.left = sorted(chain.from_iterable(state["left"] for state in states))[rank::world]


def another_world(job: Job) -> dict[str, Any]:
    """Generators and loaders, saved by four ranks: again on four, and then on two."""
    url, r = job.folder / "world", job.rank

    def start(group: Any, kind: type[Fixed] = Elastic, **options: Any) -> dict[str, Any]:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        torch.manual_seed(100 + r)
        random.seed(5)
        np.random.seed(200 + r)
        model, loader = nn.Linear(5, 5), kind(rank, world)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        apart, same = torch.Generator().manual_seed(r), torch.Generator().manual_seed(7)
        state = {"model": model, "apart": apart, "same": same, "loader": loader}
        taken, seen = [], Seen()

        def draw() -> list[float]:
            torch_own = [torch.rand(1, generator=g).item() for g in (None, apart, same)]
            return [*torch_own, random.random(), float(np.random.rand())]

        try:
            with ckpt.Checkpointer(url, state, process_group=group, policy=LATER, sinks=(seen,), **options) as ck:
                for _, sample in zip(ck.steps(0 if ck.restored.step else 2), loader, strict=False):
                    taken.append(sample)
                    draw()
        except ckpt.CkptError as exc:
            return {"error": [type(exc).__name__, str(exc)]}
        said = [event.message for event in seen.named("restore.mismatch")]
        return {"came": ck.restored.step, "drew": draw(), "taken": taken, "left": loader.left, "said": said}

    found = {}
    for name, group, kind, options in (
        ("first", dist.group.WORLD, Elastic, {}),
        ("again", dist.group.WORLD, Elastic, {}),
        ("two", job.pairs[0], Elastic, {}),
        ("two again", job.pairs[0], Elastic, {}),
        ("fixed", job.pairs[0], Fixed, {}),
        ("anew", job.pairs[0], Fixed, {"strict": False}),
    ):
        if group is dist.group.WORLD or r < 2:
            found[name] = start(group, kind, **options)
        job.ended(url)
    return found


def agent_that_dies(job: Job) -> dict[str, Any]:
    """As long as no other agent can be started, training goes on without one; then what is saved lands. `waits`: what
    its steps have waited in; `saving`: the same of saving, which does wait."""
    url, r = job.folder / "agent", job.rank
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(300, 300))
    optim, own, seen = torch.optim.Adam(model.parameters()), torch.full((5000,), float(r)), Seen()
    start_lock = client.make_agent_paths(canonical(os.fspath(url)), read_settings()).start_lock
    state = {"model": model, "optim": optim, "own": own}
    with ckpt.Checkpointer(url, state, policy=ckpt.Every(seconds=0.01), sinks=(seen,)) as ck:

        def train(steps: int) -> tuple[float, set[str]]:
            slowest_s, waits = 0.0, set[str]()
            for _ in range(steps):
                optim.zero_grad()
                model(torch.ones(2, 300)).square().mean().backward()
                optim.step()
                began_s = time.perf_counter()
                with calls_watched() as calls:
                    ck.step()
                slowest_s = max(slowest_s, time.perf_counter() - began_s)
                waits |= WAITS & set(calls)
            return slowest_s, waits

        train(6)
        with calls_watched() as saving:
            ck.save().wait("store", timeout_s=60)
        dist.barrier()
        with open(start_lock, "ab") as lock:
            if r == 0:
                fcntl.flock(lock, fcntl.LOCK_EX)  # whoever would start an agent waits for this
                kill_agent(url)
            dist.barrier()
            seen.wait("agent.lost")
            slowest_s, waits = train(20)
            early = bool(seen.named("agent.restarted"))
            dist.barrier()
        seen.wait("agent.restarted")
        dist.barrier()
        train(3)
        ck.save().wait("store", timeout_s=60)
        train(1)
    job.ended(url)
    receipt, weight = ck.receipt, model.module.weight.detach().clone()
    own = torch.zeros(5000)
    with ckpt.Checkpointer(url, {"model": model, "optim": optim, "own": own}, policy=LATER) as ck:
        same = torch.equal(weight, model.module.weight)
    job.ended(url)
    return {
        "slowest_s": slowest_s,
        "waits": sorted(waits),
        "saving": sorted(WAITS & set(saving)),
        "early": early,
        "restarts": receipt["agent_restarts"],
        "committed": receipt["committed_step"],
        "came": ck.restored.step,
        "same": same,
        "own": own.unique().tolist(),
    }


def stages_of_which_one_is_sharded(job: Job) -> dict[str, Any]:
    """Half of the ranks find a mesh in their part of the state, the others find none; then they start again."""
    url, r = job.folder / "stages", job.rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    seen, drawn = Seen(), []
    for attempt in range(2):
        stage = nn.Sequential()
        stage.add_module(f"layer{r // 2}", nn.Linear(8, 8))
        if r < 2:
            fully_shard(stage, mesh=mesh["dp"])
        torch.manual_seed(100 * attempt + r)
        own = torch.full((4,), float(r) if attempt == 0 else -1.0)
        with ckpt.Checkpointer(url, {"stage": stage, "own": own}, policy=LATER, sinks=(seen,)) as ck:
            if attempt == 0:
                ck.step()
            else:
                drawn.append(torch.rand(3).tolist())
        if attempt == 0:
            drawn.append(torch.rand(3).tolist())
    job.ended(url)
    error = ""
    try:
        with ckpt.Checkpointer(job.folder / "unnamed", {"stage": stage}, mesh=mesh if r < 2 else None):
            pass
    except ckpt.UsageError as exc:
        error = str(exc)
    return {
        "step": ck.restored.step,
        "own": own.tolist(),
        "as_before": drawn[0] == drawn[1],
        "told": len(seen.named("mesh.differs")),
        "error": error,
    }


def refused_before_the_agent_died(job: Job) -> dict[str, Any]:
    """Two ranks are refused a save, and go on; the agent dies; the others come to it."""
    url, r, seen = job.folder / "refused", job.rank, Seen()
    limits = ckpt.Limits(exit_s=100.0)
    said = ""
    with ckpt.Checkpointer(url, {"own": torch.ones(9)}, policy=LATER, limits=limits, sinks=(seen,)) as ck:
        ck.step()
        if r == 1:
            ck.poll()  # so that it asks for another version
        if r < 2:
            said = _refused(ck)
        dist.barrier()
        if r == 0:
            kill_agent(url)
        seen.wait("agent.restarted")
        dist.barrier()
        if r >= 2:
            said = _refused(ck)
        dist.barrier()
        ck.step()
    job.ended(url)
    return {"said": said, "committed": ck.receipt["committed_step"]}


def receipts(job: Job) -> dict[str, Any]:
    """What they say at the exit, and on a restore."""
    url = job.folder / "receipts"
    torch.manual_seed(0)
    model, found = nn.Sequential(*(nn.Linear(200, 200) for _ in range(4))), {}
    state = {"model": model, "own": torch.full((5000,), float(job.rank))}
    for start, steps in (("first", 3), ("again", 4)):
        seen = Seen()
        with ckpt.Checkpointer(url, state, policy=LATER, codec="raw", sinks=(seen,)) as ck:
            for _ in ck.steps(steps):
                with torch.no_grad():
                    model[0].weight += 1
                ck.step()
                ck.save().wait("store", timeout_s=60)
        found[start] = {"receipt": ck.receipt, "restored": len(seen.named("restored"))}
        job.ended(url)
    return found


def _refused(ck: ckpt.Checkpointer) -> str:
    try:
        ck.save().wait("local", timeout_s=60)
    except ckpt.CkptError as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


CHECKS = (
    groups_of_their_own,
    weights_without_a_head,
    damage,
    change_on_one_rank,
    another_world,
    agent_that_dies,
    stages_of_which_one_is_sharded,
    refused_before_the_agent_died,
    receipts,
)
