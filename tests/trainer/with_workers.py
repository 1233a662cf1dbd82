"""A loader whose workers get a signal that is not their parent's: python -m tests.trainer.with_workers CONTEXT SIGNAL.

A process of its own, since those by which workers are spawned stay until it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import psutil
from torch.utils.data import get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt.events import Events
from ckpt.trainer.loop.worker_signals import shield_loaders
from ckpt.trainer.state.state_nodes import find_nodes

FIRST: list[int] = []


def note(worker_id: int) -> None:
    FIRST.append(worker_id)


class Samples:
    """Each is the process of a worker, and what that worker's own `worker_init_fn` has left there."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[int, list[int]]:
        assert get_worker_info() is not None
        return os.getpid(), list(FIRST)


def main() -> None:
    context, name = sys.argv[1:]
    batches = StatefulDataLoader(
        Samples(), batch_size=None, num_workers=2, worker_init_fn=note, multiprocessing_context=context
    )
    with shield_loaders(find_nodes({"loader": batches}), Events()):
        drawn = iter(batches)
        workers = [next(drawn) for _ in range(2)]
        assert [first for _, first in workers] == [[0], [1]], "a `worker_init_fn` of the user's own runs first"
        pids = {pid for pid, _ in workers}
        subprocess.run(["kill", "-s", name, *map(str, pids)], check=True)
        assert {next(drawn)[0] for _ in range(50)} == pids
    assert batches.worker_init_fn is note
    children = [each for each in multiprocessing.active_children() if each.pid in pids]
    assert len(children) == 2
    for child in children:
        child.terminate()
        child.join(60)
        assert child.exitcode == 0, f"not as ever: {child.exitcode}"
    assert not any(map(psutil.pid_exists, pids))


if __name__ == "__main__":
    main()
