"""Trains with Lightning Fabric. Argument: a JSON object: url, pause, and world (ranks)."""

import json
import sys
import time
import warnings

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import ckpt
from ckpt.integrations.lightning_fabric import checkpointer
from tests.integrations.runs import record
from tests.integrations.scripts.lightning_train import OPTIONS, Data


def main(options):
    warnings.simplefilter("ignore")
    OPTIONS.update(options)
    fabric = Fabric(accelerator="cpu", devices=OPTIONS["world"], strategy="ddp" if OPTIONS["world"] > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(1)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    own = torch.Generator().manual_seed(5)
    loader = DataLoader(Data(32), OPTIONS["batch"], shuffle=True, num_workers=OPTIONS["workers"], generator=own)
    loader = fabric.setup_dataloaders(loader)

    state = {"model": model, "optim": optimizer, "loader": loader, "epoch": 0}
    with checkpointer(OPTIONS["url"], state, policy=ckpt.Every(steps=OPTIONS["every"])) as ck:
        step = ck.restored.step
        while ck.state["epoch"] < OPTIONS["epochs"]:
            for samples, x in loader:
                time.sleep(OPTIONS["pause"])
                loss = (model(x) - x.norm(dim=1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                step += 1
                record(step, loss.item(), samples.tolist())
                ck.step()
            ck.state["epoch"] += 1
    print("final", step, module[0].weight.double().sum().item().hex(), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
