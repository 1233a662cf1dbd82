"""Under torchrun, two ranks: python -m tests.checkpointer.unheard FOLDER [apart].

Once the last step is in the store rank 0 leaves. Then its agent is killed, before rank 1 has heard of it. apart: each
rank has an agent, as on two machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt
from ckpt.trainer.link.levels import Level, Levels
from ckpt.types import Version
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out

EXIT_S = 60.0


def lose_the_word(trainer: int, agent: int, found_by: list[str]) -> None:
    """The first one of the store, with the agent that says it, once that trainer has ended. `found_by`: the threads
    that know it later."""
    put = Levels.record
    killed: list[int] = []

    def heard(levels: Levels, version: Version, level: Level, ok: bool, message: str = "") -> None:
        if level == "store" and not killed:
            with contextlib.suppress(ProcessLookupError):
                while True:
                    os.kill(trainer, 0)
                    time.sleep(0.02)
            killed.append(agent)
            os.kill(agent, signal.SIGKILL)
        else:
            if level == "store" and ok:
                found_by.append(threading.current_thread().name)
            put(levels, version, level, ok, message)

    Levels.record = heard  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    if sys.argv[2:] == ["apart"]:
        os.environ["CKPT_RUNTIME_DIR"] = str(folder / f"n{rank}")
    state = {"weights": torch.full((1000,), 1.0)}
    limits, policy = ckpt.Limits(exit_s=EXIT_S), ckpt.Every(steps=10**6)
    found_by = list[str]()
    with ckpt.Checkpointer(folder / "run", state, policy=policy, limits=limits) as ck:
        pids = [(0, 0)] * 2
        dist.all_gather_object(pids, (os.getpid(), ck._block.saver.link.connection.agent_pid))
        if rank == 1:
            lose_the_word(*pids[0], found_by)
        for _ in ck.steps(2):
            pass
    said = {"rank": rank, "committed": ck.receipt["committed_step"], "found_by": found_by}
    say_line({**said, "restarts": ck.receipt["agent_restarts"]})


if __name__ == "__main__":
    leave_compiler_out()
    main()
