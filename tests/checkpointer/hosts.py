"""Under torchrun, ranks with an agent each, as on several machines: python -m tests.checkpointer.hosts FOLDER.

One step is saved and waited for in another's memory; once FOLDER/end is there all ranks fail.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt
from tests.checkpointer.runs import LATER
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out

ROWS, COLUMNS = 1000, 16
PATIENCE_S = 120.0


def whole() -> torch.Tensor:
    """What all ranks hold together."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world, folder = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
    os.environ["CKPT_RUNTIME_DIR"] = str(folder / f"n{rank}")
    first, end = rank * ROWS // world, (rank + 1) * ROWS // world
    state = {"table": ckpt.Shard(whole()[first:end].clone(), (ROWS, COLUMNS), (first, 0))}
    with ckpt.Checkpointer(folder / "run", state, policy=LATER) as ck:
        for _ in ck.steps(1):
            pass
        saved = ck.save()
        saved.wait("peer", timeout_s=60)
        say_line({"rank": rank, "level": saved.level, "step": saved.step})
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "end").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        raise RuntimeError("as told")


if __name__ == "__main__":
    leave_compiler_out()
    main()
