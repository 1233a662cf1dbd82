"""Trains with Lightning's Trainer. Argument: a JSON object of options (see OPTIONS)."""

import copy
import json
import logging
import sys
import time
import warnings

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.integrations.lightning import Checkpoint
from tests.integrations.runs import record

OPTIONS = {
    "how": "ckpt",  # or "own": Lightning's ModelCheckpoint and fit(ckpt_path="last")
    "url": "",
    "every": 1,
    "workers": 0,
    "persistent": False,
    "accumulate": 1,
    "epochs": 2,
    "val": 1.0,
    "ema": False,
    "plateau": False,
    "early": False,
    "estimate": False,
    "world": 1,
    "pause": 0.05,
    "path": None,
    "save": False,
    "swa": False,
    "fsdp": False,
    "iterable": "",  # "plain" or "stateful"
    "batch": 4,
    "unsized": False,  # a batch sampler without __len__
    "again": False,  # tests, and fits two epochs more
}
SAMPLES = 32


class Data(Dataset):
    """Each item has its number, and noise that is drawn when the item is read without a worker."""

    def __init__(self, size):
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        noise = 0 if OPTIONS["workers"] or OPTIONS["iterable"] else torch.rand(())
        return n, self.x[n] + 0.1 * noise


class Unsized(BatchSampler):
    """Batches without a known number of them."""

    __len__ = None


class Stream(IterableDataset):
    """Samples without a known number of them. It has a state."""

    def __init__(self):
        self.items, self.next = Data(SAMPLES), 0

    def __iter__(self):
        begin, self.next = self.next, 0
        for n in range(begin, SAMPLES):
            self.next = n + 1
            yield self.items[n]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        self.register_buffer("mean", torch.zeros(()))
        self.count = 0

    def configure_model(self):
        if OPTIONS["fsdp"]:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        time.sleep(OPTIONS["pause"])
        samples, x = batch
        loss = (self.net(x) - x.norm(dim=1, keepdim=True)).square().mean() + 0 * self.mean
        self.last = loss.item() + self.mean.item() + self.count, samples.tolist()
        return loss

    def on_train_batch_end(self, *args):
        self.count += 1
        # After all callbacks: a restart from a snapshot that was taken by a callback would lose it.
        self.mean.lerp_(torch.tensor(self.last[0]), 0.1)
        record(self.trainer.fit_loop.total_batch_idx + 1, *self.last)

    def test_step(self, batch, batch_idx):
        self.net(batch[1])

    def predict_step(self, batch, batch_idx):
        return self.net(batch[1])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.count
        assert "mean" in checkpoint["state_dict"]

    def on_load_checkpoint(self, checkpoint):
        self.count = checkpoint["count"]

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[1]).square().mean() + torch.rand(()))

    def configure_optimizers(self):
        if OPTIONS["estimate"]:
            assert self.trainer.estimated_stepping_batches > 0
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if OPTIONS["plateau"]:
            sched = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": sched, "monitor": "val"}}
        sched = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class Printer(Callback):
    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            print(
                "validated after",
                trainer.fit_loop.total_batch_idx + 1,
                trainer.callback_metrics["val"].item(),
                flush=True,
            )

    def on_train_end(self, trainer, module):
        weights = torch.cat(
            [(each.full_tensor() if OPTIONS["fsdp"] else each).flatten() for each in module.parameters()]
        )
        print("final", weights.double().sum().item().hex(), trainer.optimizers[0].param_groups[0]["lr"], flush=True)


def main(options):
    OPTIONS.update(options)
    warnings.simplefilter("ignore")
    logging.getLogger("ckpt").setLevel(logging.INFO)
    logging.basicConfig(level=logging.WARNING)
    seed_everything(1)
    callbacks = []
    if OPTIONS["ema"]:
        callbacks.append(EMAWeightAveraging(decay=0.9))
    if OPTIONS["swa"]:
        callbacks.append(StochasticWeightAveraging(0.005, swa_epoch_start=2, annealing_epochs=2))
    if OPTIONS["early"]:
        callbacks.append(EarlyStopping("val", patience=1))
    if OPTIONS["how"] == "ckpt":
        callbacks.insert(0, Checkpoint(OPTIONS["url"], policy=ckpt.Every(steps=OPTIONS["every"])))
    if OPTIONS["how"] == "own" or OPTIONS["save"]:
        callbacks.append(
            ModelCheckpoint(OPTIONS["url"] + "-own", every_n_train_steps=OPTIONS["every"], save_last=True, save_top_k=0)
        )
    strategy = "ddp" if OPTIONS["world"] > 1 else "auto"
    if OPTIONS["fsdp"]:
        strategy = ModelParallelStrategy(data_parallel_size=OPTIONS["world"], tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=OPTIONS["world"],
        strategy=strategy,
        max_epochs=OPTIONS["epochs"],
        accumulate_grad_batches=OPTIONS["accumulate"],
        val_check_interval=OPTIONS["val"],
        num_sanity_val_steps=1,
        logger=False,
        default_root_dir=OPTIONS["url"] + "-root",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Printer()],
    )
    workers = {"num_workers": OPTIONS["workers"], "persistent_workers": OPTIONS["persistent"]}
    train = DataLoader(Data(SAMPLES), OPTIONS["batch"], shuffle=True, **workers)
    if OPTIONS["unsized"]:
        items = Data(SAMPLES)
        train = DataLoader(items, batch_sampler=Unsized(RandomSampler(items), OPTIONS["batch"], False), **workers)
    if OPTIONS["iterable"]:
        train = {"plain": DataLoader, "stateful": StatefulDataLoader}[OPTIONS["iterable"]](Stream(), OPTIONS["batch"])
    path = "last" if OPTIONS["how"] == "own" else OPTIONS["path"]
    model, others = Model(), DataLoader(Data(8), 4)
    trainer.fit(model, train, others, ckpt_path=path)
    if OPTIONS["again"]:
        weights = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model.net[0].bias.fill_(7)
        for stage in (trainer.validate, trainer.test):
            stage(model, others, verbose=False)
            print(stage.__name__, model.net[0].bias.tolist() == [7] * 16, flush=True)
        trainer.predict(model, others)
        model.load_state_dict(weights)
        trainer.fit_loop.max_epochs += 2
        trainer.fit(model, train, others)
    print("steps", trainer.global_step, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
