"""Who owns threads and is given none says so, at once, and does later what it can."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import _base as futures
from typing import Any

import pytest

from ckpt import tasks as module
from ckpt.errors import CkptError
from ckpt.tasks import Flag, Outcome, Tasks
from tests.threads import interrupted_anywhere, without_threads


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    with Tasks("some", pool_size=2) as made:
        yield made


@contextlib.contextmanager
def held(tasks: Tasks) -> Iterator[Callable[[], None]]:
    """One thread of the pool is there, and busy until that is called."""
    began, over = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        over.wait(60)

    tasks.submit(hold)
    assert began.wait(60)
    yield over.set


def test_a_thread_that_is_not_to_be_had_is_an_error_and_the_next_one_may_be(tasks: Tasks) -> None:
    ran = threading.Event()
    with without_threads(), pytest.raises(CkptError, match=r"no further thread .*pids\.max"):
        tasks.start("one", ran.set)
    assert not ran.is_set()
    tasks.start("one", ran.set)
    assert ran.wait(60)


def test_a_job_that_gets_no_thread_is_never_done_and_the_next_one_is(tasks: Tasks) -> None:
    done: list[str] = []
    with without_threads(), pytest.raises(CkptError, match="no further thread"):
        tasks.submit(done.append, "lost")
    tasks.submit(done.append, "next").result(60)
    assert done == ["next"]


def test_what_a_failed_job_worked_on_is_free_once_its_error_is_let_go(tasks: Tasks) -> None:
    class Memory: ...

    def fail(memory: Memory) -> None:
        held.append(weakref.ref(memory))
        raise ValueError

    held: list[weakref.ref[Memory]] = []
    gc.disable()
    try:
        future = tasks.submit(lambda: fail(Memory()))
        with pytest.raises(ValueError):
            future.result(10.0)
        del future
        tasks.close()
        assert held[0]() is None
    finally:
        gc.enable()


def test_what_gets_no_thread_of_its_own_is_done_by_those_there_are(tasks: Tasks) -> None:
    done: list[str] = []
    with held(tasks) as go_on:
        with without_threads():
            waits = tasks.submit(done.append, "late")
        assert not waits.done()
        go_on()
        waits.result(60)
    assert done == ["late"]


def test_what_has_got_no_thread_by_the_end_is_called_off() -> None:
    done: list[str] = []
    with Tasks("some", pool_size=2) as tasks, held(tasks) as go_on:
        with without_threads():
            waits = tasks.submit(done.append, "never")
        threading.Timer(0.1, go_on).start()
        tasks.close()
        assert waits.cancelled()
    assert done == []


def test_what_is_to_be_done_once_the_interpreter_ends_is_refused_and_not_waited_for_for_ever() -> None:
    """As a save where a block is left by atexit."""
    code = """
import atexit
from ckpt.errors import CkptError
from ckpt.tasks import Tasks
tasks = Tasks("some", pool_size=1)
tasks.submit(int).result()
def late():
    try:
        tasks.submit(int).result(10)
    except CkptError as exc:
        print("refused:", exc)
atexit.register(late)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.startswith("refused:"), said


def use_flag(flag: Flag) -> None:
    flag.set()
    assert flag.wait()
    flag.clear()
    assert not flag.wait(0.001)


def use_outcome(outcome: Outcome[None]) -> None:
    assert not outcome.done()
    with pytest.raises(TimeoutError):
        outcome.result(0.001)


@pytest.mark.parametrize(
    ("make", "use", "end"), [(Flag, use_flag, Flag.set), (Outcome, use_outcome, lambda it: it.set_result(None))]
)
def test_an_interrupt_anywhere_in_what_is_waited_for_leaves_nothing_locked(
    make: Callable[[], Any], use: Callable[[Any], None], end: Callable[[Any], None]
) -> None:
    for it in interrupted_anywhere({module.__file__, threading.__file__, futures.__file__}, make, use):
        thread = threading.Thread(target=end, args=(it,), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
