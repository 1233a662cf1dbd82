"""Trains 8 steps on 2 ranks and saves each step with dcp.save. The first life is killed in the middle of the save of
step 5: rank 1 has written half of its tensors. Arguments: "ckpt" or "own" (torch's FileSystemWriter), a folder."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ckpt.integrations.dcp import Reader, Writer
from tests.integrations.runs import record

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS, KILLED = 8, 5


class KilledPlanner(dcp.DefaultSavePlanner):
    """Kills this process after a few tensors, once."""

    def resolve_data(self, write_item):
        self.left = getattr(self, "left", 4) - 1
        if self.left == 0:
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def folders():
    return sorted(each for each in FOLDER.glob("step-*"))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    step = 0

    there = (FOLDER / "run" / "commits").exists() if HOW == "ckpt" else bool(folders())
    if there:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": 0}
        if HOW == "ckpt":
            dcp.load(state, storage_reader=Reader(FOLDER / "run"))
        else:
            dcp.load(state, checkpoint_id=folders()[-1])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < STEPS:
        samples = order[step * 8 + rank * 4 : step * 8 + rank * 4 + 4]
        loss = model(data[samples]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        record(step, loss.item(), samples)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": step}
        is_killed = step == KILLED and rank == 1 and not (FOLDER / "killed").exists()
        planner = KilledPlanner() if is_killed else dcp.DefaultSavePlanner()
        if HOW == "ckpt":
            dcp.save(state, storage_writer=Writer(FOLDER / "run", step=step), planner=planner)
        else:
            dcp.save(state, checkpoint_id=FOLDER / f"step-{step}", planner=planner)
    dist.destroy_process_group()


main()
