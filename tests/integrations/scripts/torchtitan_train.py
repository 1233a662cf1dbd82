"""Trains torchtitan's debug model on CPUs. Arguments: "ckpt", "own" (torchtitan's own manager) or "none"; a folder; and
then torchtitan's own, such as --training.steps 4."""

import importlib.machinery
import os
import sys
import zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if __name__ == "__main__":
    # torchao takes a third of a start's time, and torchtitan imports it where it finds it.
    find = importlib.machinery.PathFinder.find_spec
    importlib.machinery.PathFinder.find_spec = staticmethod(
        lambda name, *more: None if name == "torchao" else find(name, *more)
    )
    # torchtitan takes any accelerator, or else CUDA.
    torch._utils._get_available_device_type = lambda: "cpu"

from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry, parallelize_llama
from torchtitan.train import main
from torchtitan.trainer import Trainer

import ckpt.integrations.torchtitan
from tests.integrations.runs import record

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
BATCHES: list[int] = []


class Memory:
    """Stands for the monitor of an accelerator's memory."""

    device_name = "cpu"

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


def log(self, step, global_avg_loss, *more, **kwargs):
    record(step, global_avg_loss, BATCHES)
    BATCHES.clear()
    self.data_loading_times.clear()


def post_dataloading_process(self, inputs, labels, process=Trainer.post_dataloading_process):
    BATCHES.extend(zlib.crc32(row.numpy().tobytes()) for row in inputs["input"])
    return process(self, inputs, labels)


def text(number):
    generator = torch.Generator().manual_seed(number)
    return " ".join(map(str, torch.randint(0, 9999, (10 + number * 7 % 23,), generator=generator).tolist()))


def write_tokenizer(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: number for number, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / f"{os.getpid()}.tmp"))
    os.replace(folder / f"{os.getpid()}.tmp", folder / "tokenizer.json")


def parallelize(*args, **more):
    model = parallelize_llama(*args, **more)
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def ckpt_debugmodel():
    data = Dataset.from_list([{"text": text(number)} for number in range(12)])
    text_datasets.DATASETS["texts"] = DatasetConfig("texts", lambda path: data, lambda sample: sample["text"])
    write_tokenizer(FOLDER / "assets")
    config = config_registry.llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = str(FOLDER / "assets"), str(FOLDER)
    config.dataloader.dataset = "texts"
    config.optimizer.implementation = "for-loop"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, 8
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.model_spec.parallelize_fn = parallelize
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        # The others cannot run backwards on a CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.debug.enable_structured_logging = False
    config.debug.seed = 1
    config.validator.enable = False
    if HOW == "ckpt":
        config.checkpoint = ckpt.integrations.torchtitan.CheckpointManager.Config(folder="run")
    else:
        config.checkpoint = CheckpointManager.Config(enable=HOW == "own", folder="run", last_save_model_only=False)
    return config


if __name__ == "__main__":
    metrics.build_device_memory_monitor = Memory
    dist_utils.set_pg_timeouts = lambda **unused: None  # takes a device's number
    metrics.MetricsProcessor.log = log
    Trainer.post_dataloading_process = post_dataloading_process
    config_registry.ckpt_debugmodel = ckpt_debugmodel
    sys.argv[1:] = ["--module", "llama3", "--config", "ckpt_debugmodel", *sys.argv[3:]]
    main()
