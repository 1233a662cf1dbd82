"""Trains a tiny Llama, plain, with LoRA or under FSDP2, and exports it. At the end, writes the logits of the model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import ckpt

PROBE = torch.arange(8)[None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=("plain", "tied", "lora", "fsdp"), default="plain")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--dtype")
    args = parser.parse_args()
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=args.model == "tied", **size))
    if args.model == "lora":
        from peft import LoraConfig, get_peft_model

        model.save_pretrained(args.folder / "base")
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    if args.model == "fsdp":
        dist.init_process_group("gloo")
        fully_shard(model)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=a_tokenizer(), eos_token="b")
    export = ckpt.Export(args.folder / "out", every=args.every, dtype=args.dtype, beside=[tokenizer])
    state = {"model": model, "optim": optimizer}
    with ckpt.Checkpointer(args.folder / "run", state, policy=ckpt.Every(steps=1), export=export) as ck:
        for step in ck.steps(args.steps):
            while (step - 1) % args.every == 0 < step - 1 and not (args.folder / f"out/step-{step - 1}").exists():
                time.sleep(0.01)  # so that none is left out
            data = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(input_ids=data, labels=data).loss.backward()
            optimizer.step()
    with torch.no_grad():
        logits = model.eval()(input_ids=PROBE).logits
    if rank() == 0:
        torch.save(logits, args.folder / "logits.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def a_tokenizer() -> object:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


if __name__ == "__main__":
    main()
