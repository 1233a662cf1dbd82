"""A job that ends in an odd way, after two steps: python -m tests.checkpointer.endings forked|waiting URL.

forked: killed, while a process that it forked past Python lives on, with all that it had open. waiting: at the end of
its block, where the last save is on its way for longer than anybody waits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import torch

import ckpt
from tests.checkpointer.loops import make
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out

PAD_BYTES = 1 << 20
LIVES_S = 300


def main() -> None:
    what, url = sys.argv[1:]
    job = make()
    pad = torch.randint(0, 256, (PAD_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    limits = ckpt.Limits(bandwidth=PAD_BYTES / LIVES_S if what == "waiting" else None)
    libc = ctypes.PyDLL(None)
    with ckpt.Checkpointer(
        url,
        {**job.state, "pad": pad},
        policy=ckpt.Every(steps=10**6),
        limits=limits,
        sinks=(lambda event: say_line({"event": event.name}),),
    ) as ck:
        for step in ck.steps(2):
            job.train(step)
        ck.save().wait("local", timeout_s=60)
        if what == "forked":
            worker = libc.fork()  # what the interpreter does after os.fork(), to let go of it, does not happen
            if worker == 0:
                libc.sleep(LIVES_S)
                libc._exit(0)
            say_line({"worker": worker})
            os.kill(os.getpid(), signal.SIGKILL)
        say_line({"ended": True})


if __name__ == "__main__":
    leave_compiler_out()
    main()
