"""A user's training script for `ckpt rehearse`, small and real: python -m tests.cli.real_train STEPS HOW

It has its URL in its own text, as scripts do (here: from REAL_TRAIN_URL), so that only the redirection leads elsewhere.
In the run that is to be killed, whose URL ends in /killed, it waits for that after step 6: nothing depends on timing.

HOW: "exact"; "forgets": it draws from a generator that is not in the state. Where it "hurries" it waits for no kill,
and is left to the policy, which saves at the exit only: it takes milliseconds.
"""

from __future__ import annotations

import os
import sys
import threading

import torch
from torch import nn

import ckpt

WAITS_AFTER = 6


def main(steps: int, how: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    noise = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optim": optim, "best": float("inf")}
    if not how.startswith("forgets"):
        state["noise"] = noise
    policy = ckpt.Every(seconds=600) if "hurries" in how else ckpt.Every(steps=2)
    with ckpt.Checkpointer(os.environ["REAL_TRAIN_URL"], state, policy=policy) as ck:
        is_fresh = ck.restored.step == 0
        for step in ck.steps(steps):
            loss = model(torch.randn(4, 8) + torch.randn(8, generator=noise)).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            ck.state["best"] = min(ck.state["best"], loss.item())
            if step == WAITS_AFTER and "hurries" not in how:
                ck.step()
                ck.save().wait("store", timeout_s=60)
                if is_fresh and ck.url.endswith("/killed"):
                    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
