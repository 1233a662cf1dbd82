"""Signals that reach the workers of a loader, too: they go on until their parent ends them."""

from __future__ import annotations

import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.events import Events
from ckpt.trainer.loop.worker_signals import Shielded, shield_loaders
from ckpt.trainer.state.state_nodes import find_nodes
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen
from tests.checkpointer.scripts import Script
from tests.trainer.with_workers import note

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own


def loader(**options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(range(100), batch_size=None, num_workers=2, **options)


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_that_is_not_the_parents_ends_no_worker_and_the_parents_does(
    context: str, name: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.trainer.with_workers", context, name]
    # A thread that a library has started in a spawned worker would get the signal.
    Script(command, tmp_path / "log", {"OMP_NUM_THREADS": "1"}).end()


def test_what_wraps_a_worker_init_fn_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Shielded(note))) == Shielded(note)


def test_it_may_be_called_where_there_is_no_worker() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGUSR1)
    ckpt.shield_worker(0)
    assert (signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGUSR1)) == before


def test_inside_the_block_loaders_are_shielded_and_after_it_they_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    first, second, alone = loader(worker_init_fn=note), loader(), StatefulDataLoader(range(100))
    state = {"data": {"first": first, "second": second}, "alone": alone}
    with ckpt.Checkpointer(tmp_path / "run", state):
        assert (first.worker_init_fn, second.worker_init_fn) == (Shielded(note), Shielded(None))
        assert alone.worker_init_fn is None
    assert (first.worker_init_fn, second.worker_init_fn) == (note, None)
    wait_agent_gone(tmp_path / "run")
    with ckpt.Checkpointer(tmp_path / "other", state, notices="off"):
        assert first.worker_init_fn is note
    wait_agent_gone(tmp_path / "other")


def test_workers_that_were_there_before_the_block_are_named_loudly() -> None:
    seen, batches, safe = Seen(), loader(), loader(worker_init_fn=ckpt.shield_worker)
    drawn = [iter(batches), iter(safe)]
    with shield_loaders(find_nodes({"data": {"train": batches, "safe": safe, "test": loader()}}), Events(seen)):
        pass
    (event,) = seen.named("loader.unshielded")
    assert (event.loud, event.data) == (True, {"loader": "data.train"})
    del drawn, batches, safe
