"""A Checkpointer on what dcp.save wrote. Arguments: the URL of DCP's checkpoints, and another one."""

import sys

import torch

import ckpt

model = torch.nn.Linear(3, 2)
try:
    with ckpt.Checkpointer(sys.argv[1], state={"model": model}):
        pass
except ckpt.StateMismatch as exc:
    print(exc)
with ckpt.Checkpointer(sys.argv[2], state={"model": model}, init=sys.argv[1]) as ck:
    for _ in ck.steps(1):
        with torch.no_grad():
            model.weight += 1
