"""The workers of loaders, while a signal goes round that is meant for the job.

Slurm and systemd signal every process, and torchrun the process group of each rank: workers, too. torch has a worker
die by a SIGTERM that is not its parent's, and the training thread fail by that death, in the middle of the step at
whose end all were to leave. So a worker heeds SIGTERM from its parent only, which ends by it what does not end itself,
and what is a warning to the job (SIGUSR1, SIGUSR2) from nobody.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ckpt import settings
from ckpt.events import Events
from ckpt.preemption.signals import is_caught
from ckpt.threads import Tasks
from ckpt.trainer.state.state_nodes import LoaderNode, StateNode, held_loader

LOOK_S = 1.0  # until a worker is gone whose trainer has died: nobody else's signal ends it any more


def shield_worker(worker_id: int) -> None:
    """For `worker_init_fn` of a DataLoader that is not in the state: a signal that reaches every process ends none of
    its workers. Call it in a `worker_init_fn` of your own; whoever starts a process in a worker finds SIGTERM blocked
    there."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # this is no worker
    for number in settings.read().warnings:
        if signal.getsignal(number) == signal.SIG_DFL and not is_caught(number):
            signal.signal(number, signal.SIG_IGN)

    above = os.getppid()  # the server's, where workers come from a forkserver

    def heed() -> None:
        came: signal.struct_siginfo | None = None
        while os.getppid() == above and (came is None or came.si_pid != parent.pid):
            came = signal.sigtimedwait({signal.SIGTERM}, LOOK_S)
        os._exit(0)  # as torch's own handler does

    # Blocked first: the thread inherits that, and only so it is told who has sent it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    Tasks("worker").start("signals", heed)


@dataclass(frozen=True, slots=True)
class Shielded:
    """A `worker_init_fn`: `first`, if there is one, then `shield_worker`. To be pickled, where workers are spawned."""

    first: Callable[[int], object] | None

    def __call__(self, worker_id: int) -> None:
        if self.first is not None:
            self.first(worker_id)
        shield_worker(worker_id)


@contextlib.contextmanager
def shielded(found: Sequence[StateNode], events: Events) -> Iterator[None]:
    """Inside the block the loaders among the nodes of a state shield their new workers; after it they are as they were.
    One loud event for each that has workers already."""
    before = _unshielded(found, events)  # whatever had a name here would live as long as the block
    for loader, first in before:
        loader.worker_init_fn = Shielded(first)
    try:
        yield
    finally:
        for loader, first in reversed(before):
            if isinstance(loader.worker_init_fn, Shielded):
                loader.worker_init_fn = first


def _unshielded(found: Sequence[StateNode], events: Events) -> list[tuple[DataLoader[Any], Any]]:
    """Each with its own `worker_init_fn`."""
    before: list[tuple[DataLoader[Any], Any]] = []
    for node in found:
        loader = held_loader(node.value)
        if not (isinstance(node, LoaderNode) and isinstance(loader, DataLoader) and loader.num_workers):
            continue
        if loader.worker_init_fn is shield_worker:
            continue
        if getattr(loader, "_iterator", None) is not None:
            text = f"ckpt: {node.path}: its workers were started before the block: a signal that reaches them as well "
            text += "(torchrun and Slurm send such) ends them, and the job before it has saved. Make the iterator "
            text += "inside the block, or give the loader worker_init_fn=ckpt.shield_worker"
            events.emit("loader.unshielded", text, loud=True, loader=node.path)
        before.append((loader, loader.worker_init_fn))
    return before
