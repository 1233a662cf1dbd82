"""A shield for the workers of loaders against signals that are meant for the job.

Slurm and systemd signal every process, and torchrun the process group of each rank, and so workers too. In torch a
worker dies by a SIGTERM that is not its parent's, and its death is an error in the training thread. That would happen
in the middle of the step at whose end all ranks were to leave. So a worker obeys SIGTERM only from its parent, which so
ends workers that do not end by themselves. It ignores the warnings to the job (SIGUSR1, SIGUSR2) from anybody.
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

CHECK_INTERVAL_S = 1.0  # how often a worker looks whether its trainer has died: no other signal ends the worker


def shield_worker(worker_id: int) -> None:
    """Shields a loader's workers: a signal that reaches every process ends none of them. It is a `worker_init_fn` for a
    DataLoader that is not in the state; call it in a `worker_init_fn` of your own. A process that is started in a
    worker begins with SIGTERM blocked."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # this process is no worker
    for number in settings.read_settings().warning_signals:
        if signal.getsignal(number) == signal.SIG_DFL and not is_caught(number):
            signal.signal(number, signal.SIG_IGN)

    # With a forkserver this is the server's process.
    above = os.getppid()

    def heed() -> None:
        came: signal.struct_siginfo | None = None
        while os.getppid() == above and (came is None or came.si_pid != parent.pid):
            came = signal.sigtimedwait({signal.SIGTERM}, CHECK_INTERVAL_S)
        os._exit(0)  # as torch's own handler does

    # Blocked before the thread starts, so that the thread inherits that: only then sigtimedwait names the sender.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    Tasks("worker").start("signals", heed)


@dataclass(frozen=True, slots=True)
class Shielded:
    """A `worker_init_fn` that calls `first`, if there is one, and then `shield_worker`. Spawned workers need it
    pickled."""

    inner_init_fn: Callable[[int], object] | None

    def __call__(self, worker_id: int) -> None:
        if self.inner_init_fn is not None:
            self.inner_init_fn(worker_id)
        shield_worker(worker_id)


@contextlib.contextmanager
def shield_loaders(found: Sequence[StateNode], events: Events) -> Iterator[None]:
    """In the block, loaders among the nodes of a state shield their new workers; after it they are as before. For each
    loader that has workers already, an event warns."""
    # A call, since local names here would keep objects alive as long as the block.
    before = _find_unshielded(found, events)
    for loader, first in before:
        loader.worker_init_fn = Shielded(first)
    try:
        yield
    finally:
        for loader, first in reversed(before):
            if isinstance(loader.worker_init_fn, Shielded):
                loader.worker_init_fn = first


def _find_unshielded(found: Sequence[StateNode], events: Events) -> list[tuple[DataLoader[Any], Any]]:
    """The loaders to shield, each with its own `worker_init_fn`."""
    before: list[tuple[DataLoader[Any], Any]] = []
    for node in found:
        loader = held_loader(node.value)
        if not (isinstance(node, LoaderNode) and isinstance(loader, DataLoader) and loader.num_workers):
            continue
        if loader.worker_init_fn is shield_worker:
            continue
        if getattr(loader, "_iterator", None) is not None:
            text = f"ckpt: {node.path}: its workers were started before the block. A signal that also reaches them "
            text += "(torchrun and Slurm send such signals) ends them, and then the job, before it has saved. Make "
            text += "the iterator inside the block, or give the loader worker_init_fn=ckpt.shield_worker"
            events.emit("loader.unshielded", text, loud=True, loader=node.path)
        before.append((loader, loader.worker_init_fn))
    return before
