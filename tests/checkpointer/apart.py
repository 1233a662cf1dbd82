"""Ranks that do not do alike, under torchrun with two of them: python -m tests.checkpointer.apart FOLDER. Every rank
prints what it saw of each check; tests/checkpointer/test_ranks_apart.py says what that should be."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.checkpointer.runs import Seen, kill_agent
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out

LATER = ckpt.Every(steps=10**6)  # nothing is appointed


class Trouble:
    """An object of the user's, whose state cannot be read while `is_bad`."""

    is_bad = False

    def state_dict(self) -> dict[str, int]:
        if self.is_bad:
            raise ValueError("no state today")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["n"] != 1:
            raise ValueError("another one's state")


class Broken(Trouble):
    """Whose state cannot be read once it was restored."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.is_bad = True


def a_state_that_cannot_be_read(folder: Path, rank: int) -> dict[str, Any]:
    """On rank 1 alone, for one save, and then at the end. The ranks meet in every step."""
    trouble, model = Trouble(), nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"said": []}
    state = {"model": model, "optim": optim, "trouble": trouble}
    try:
        with ckpt.Checkpointer(folder / "bad", state, policy=LATER) as ck:
            for step in ck.steps(6):
                model(torch.ones(2, 3)).sum().backward()
                dist.all_reduce(model.weight.grad)
                optim.step()
                trouble.is_bad = rank == 1 and step in (3, 6)
                if step in (2, 3, 4):
                    ck.step()
                    handle = ck.save()
                    try:
                        handle.wait("store", timeout_s=60)
                        found["said"].append("saved")
                    except ckpt.SaveFailed as exc:
                        found["said"].append(str(exc))
                found["step"] = step
    except ckpt.CommitFailed as exc:
        found["end"] = str(exc)
    return found


def an_agent_that_dies_in_a_save(folder: Path, rank: int) -> dict[str, Any]:
    """Rank 1 has come to it and goes on without it, rank 0 comes when there is another agent. They meet in steps."""
    model, over, seen = nn.Linear(3, 3), folder / "over", Seen()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    with ckpt.Checkpointer(folder / "dies", {"model": model, "optim": optim}, policy=LATER, sinks=(seen,)) as ck:
        for step in ck.steps(4):
            model(torch.ones(2, 3)).sum().backward()
            dist.all_reduce(model.weight.grad)
            optim.step()
            if step == 2:
                ck.step()
                if rank == 0:
                    seen.wait("save.awaited")  # rank 1 waits for this one
                    kill_agent(folder / "dies")
                    until(
                        lambda: over.exists() and ck._block.saver.link.agent.restarts > 0
                    )  # it may see the death late
                handle = ck.save()
                over.touch()
                try:
                    handle.wait("local", timeout_s=60)
                except ckpt.SaveFailed as exc:
                    found["said"] = str(exc)
            found["step"] = step
    return found


def until(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not what():
        if time.monotonic() > end_s:
            raise TimeoutError
        time.sleep(0.01)


def an_early_break(folder: Path, rank: int) -> dict[str, Any]:
    """Rank 1 leaves the loop after step 3, rank 0 after step 8."""
    model = nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    try:
        with ckpt.Checkpointer(folder / "early", {"model": model, "optim": optim}, policy=LATER) as ck:
            for step in ck.steps(8):
                model(torch.ones(2, 3)).sum().backward()
                optim.step()
                if rank == 1 and step == 3:
                    break
            found["ended"] = step
    except ckpt.CommitFailed as exc:
        found["end"] = str(exc)
    return found


def a_failure_after_the_restore(folder: Path, rank: int) -> dict[str, Any]:
    """What was restored cannot be read again, on rank 1 alone: no rank goes on alone."""
    for is_bad in (False, True):
        trouble, model = Trouble(), nn.Linear(3, 3)
        optim = torch.optim.Adam(model.parameters())
        if is_bad and rank == 1:
            trouble = Broken()
        try:
            state = {"model": model, "optim": optim, "trouble": trouble}
            with ckpt.Checkpointer(folder / "after", state, policy=LATER) as ck:
                for _ in ck.steps(2):
                    model(torch.ones(2, 3)).sum().backward()
                    dist.all_reduce(model.weight.grad)
                    optim.step()
        except ckpt.CkptError as exc:
            return {"error": [type(exc).__name__, str(exc)]}
        dist.barrier()
    return {}


CHECKS = (a_state_that_cannot_be_read, an_agent_that_dies_in_a_save, an_early_break, a_failure_after_the_restore)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for check in CHECKS:
        saw = check(Path(sys.argv[1]), dist.get_rank())
        say_line({"check": check.__name__, "rank": dist.get_rank(), "saw": saw})
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_compiler_out()
    main()
