"""Trains with the Trainer of transformers. Argument: a JSON object of options (see OPTIONS). KILL in the environment:
"step.batch" ends the process with SIGKILL before that batch's backward; "step.0" in the evaluation after that step.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import ckpt
from ckpt.integrations import hf
from tests.integrations.runs import record, shard_on_cpu

OPTIONS = {
    "how": "ckpt",  # or "own": the Trainer's own resume; or "none"
    "folder": "",
    "args": {},  # of TrainingArguments
    "samples": 40,
    "every": 1,
    "noise": True,
    "pause_s": 0,
    "lora": False,
    "fsdp": False,
    "stream": False,
    "evaluate": False,
    "patience": 0,
    "resume": False,  # from the Trainer's own checkpoint
    "late": "",  # "added" or "attached" once the Trainer exists
    "version": "",
    "lacks": "",  # a method of Trainer
}
READ: set[int] = set()
OURS: list[hf.Callback] = []


class Data(torch.utils.data.Dataset):
    """Samples with noise from each of the CPU's generators, so that the order of all draws matters."""

    def __len__(self):
        return OPTIONS["samples"]

    def __getitem__(self, number):
        if number >= len(self):
            raise IndexError(number)
        READ.add(number)
        noise = random.random() + np.random.rand() + torch.rand(()).item() if OPTIONS["noise"] else 0.0
        fixed = torch.randn(8, generator=torch.Generator().manual_seed(number))
        return {"x": fixed + 0.1 * noise, "number": number, "input_ids": [0] * (number % 7 + 1)}


def collate(samples):
    return {name: torch.stack([torch.as_tensor(each[name]) for each in samples]) for name in ("x", "number")}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(OPTIONS["samples"]):
            yield {"x": torch.randn(8, generator=torch.Generator().manual_seed(number)), "number": number}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(8, 16)
        self.out = torch.nn.Linear(16, 1)
        self.drop = torch.nn.Dropout(0.3)
        self.step, self.loss, self.numbers = 0, 0.0, []

    def forward(self, x, number):
        loss = (self.out(self.drop(torch.tanh(self.q(x)))) - x.sum(1, keepdim=True)).square().mean()
        batch = len(self.numbers) // len(number) + 1
        if self.training:
            self.loss += loss.item()
            self.numbers += number.tolist()
        moment = f"{self.step + 1}.{batch}" if self.training else f"{self.step}.0"
        if moment == os.environ.get("KILL"):
            # The snapshot of the step before is complete: else the restart may rightly repeat that step.
            if OURS and OURS[0].checkpointer is not None:
                OURS[0].checkpointer.wait("local")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": loss, "logits": loss.detach().reshape(1, 1)}


class Recorder(TrainerCallback):
    def __init__(self, net):
        self.net = net

    def on_train_begin(self, args, state, control, **kwargs):
        self.net.step = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        net = self.net
        record(state.global_step, net.loss, net.numbers)
        net.step, net.loss, net.numbers = state.global_step, 0.0, []
        time.sleep(OPTIONS["pause_s"])


def main(options):
    OPTIONS.update(options)
    how, folder = OPTIONS["how"], Path(OPTIONS["folder"])
    hf.transformers.__version__ = OPTIONS["version"] or hf.transformers.__version__
    if OPTIONS["lacks"]:
        delattr(Trainer, OPTIONS["lacks"])
    torch.manual_seed(0)
    net = Net()
    model = net
    if OPTIONS["lora"]:
        model = get_peft_model(net, LoraConfig(r=2, target_modules=["q"], lora_dropout=0.2))
    given = {
        "output_dir": str(folder / "own"),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps" if how == "own" else "no",
        "save_steps": 1,
        "logging_steps": 3,
        "learning_rate": 0.01,
        "warmup_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "label_names": ["number"],
        "remove_unused_columns": False,
        **OPTIONS["args"],
    }
    callbacks = [Recorder(net)]
    if OPTIONS["patience"]:
        callbacks.append(EarlyStoppingCallback(OPTIONS["patience"]))
    if how == "ckpt":
        ours = hf.Callback(folder / "run", policy=ckpt.Every(steps=OPTIONS["every"]))
        OURS.append(ours)
        callbacks += [] if OPTIONS["late"] else [ours]
    if OPTIONS["fsdp"]:
        given |= {"fsdp": True, "fsdp_config": {"version": 2}}
    arguments = TrainingArguments(**given)
    if OPTIONS["fsdp"]:
        shard_on_cpu()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Stream() if OPTIONS["stream"] else Data(),
        eval_dataset=Data() if OPTIONS["evaluate"] else None,
        data_collator=collate,
        callbacks=callbacks,
    )
    if OPTIONS["late"] == "added":
        trainer.add_callback(ours)
    elif OPTIONS["late"]:
        ours.attach(trainer)
    last = get_last_checkpoint(folder / "own") if (folder / "own").exists() else None
    trainer.train(resume_from_checkpoint=last if how == "own" or OPTIONS["resume"] else None)
    assert all(isinstance(each, DTensor) for each in model.parameters()) == OPTIONS["fsdp"]
    weights = [each.full_tensor() if OPTIONS["fsdp"] else each for each in model.state_dict().values()]
    if trainer.is_world_process_zero():
        report = {
            "logs": [each for each in trainer.state.log_history if "train_runtime" not in each],
            "read": len(READ),
            "best": trainer.state.best_metric,
            "best_step": trainer.state.best_global_step,
            "weights": [each.double().sum().item().hex() for each in weights],
        }
        for each in report["logs"]:
            for name in [name for name in each if "runtime" in name or "per_second" in name]:
                del each[name]
        print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
