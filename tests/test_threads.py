"""Who owns threads and is given none says so, at once, and does later what it can."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import _base as futures
from concurrent.futures import thread as pools
from typing import Any

import pytest

from ckpt import threads as module
from ckpt.errors import CkptError
from ckpt.threads import Flag, Outcome, Tasks
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


@pytest.mark.parametrize("late", [False, True])
def test_a_thread_that_ends_without_a_word_or_begins_too_late_is_one_that_is_not_to_be_had(
    late: bool, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is no memory for its first line: Python waits for ever for it to begin."""
    begin, begins, ran, ended = threading.Thread._bootstrap, threading.Event(), threading.Event(), threading.Event()

    def bootstrap(thread: threading.Thread) -> None:
        if late and begins.wait(60):
            begin(thread)
        ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "_bootstrap", bootstrap)
        patch.setattr(module, "THREAD_START_S", 0.2)
        with pytest.raises(CkptError, match=r"no further thread .*has not begun"):
            tasks.start("one", ran.set)
        begins.set()
        assert ended.wait(60)
    assert not ran.is_set()
    tasks.start("one", ran.set)
    assert ran.wait(60)


def test_a_thread_that_cannot_begin_since_another_one_holds_the_gil_is_waited_for(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where something large is unpickled, or a list sorted: it was said that no memory is left."""
    usleep, over, ran = ctypes.PyDLL(None).usleep, threading.Event(), list[int]()
    monkeypatch.setattr(module, "THREAD_START_S", 0.2)

    def hold() -> None:
        while not over.is_set():
            usleep(300_000)

    with contextlib.closing(Tasks("holds")) as holds:
        holds.start("gil", hold)
        try:
            for n in range(8):
                tasks.start("one", lambda n=n: ran.append(n))  # type: ignore[misc]
        finally:
            over.set()
    tasks.close()
    assert sorted(ran) == list(range(8))


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


def said_by(code: str) -> list[str]:
    """What a process that runs this writes, until it ends by itself."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not ran.stderr, ran
    return ran.stdout.splitlines()


def test_what_is_to_be_done_once_the_interpreter_ends_is_done_or_refused_and_not_waited_for_for_ever() -> None:
    """As a save where a block is left by atexit."""
    code = """
import atexit
def ask(when):
    try:
        print(when, tasks.submit(int).result(10))
    except CkptError as exc:
        print(when, "refused:", exc)
atexit.register(ask, "last")  # what was imported before us
from ckpt.errors import CkptError
from ckpt.threads import Tasks
tasks = Tasks("some", pool_size=1)
tasks.submit(int).result()
atexit.register(ask, "first")
"""
    assert said_by(code) == ["first 0", "last refused: some is closed, or has no pool"]


def test_what_has_begun_when_the_interpreter_ends_is_waited_for_and_what_has_not_is_dropped() -> None:
    """Torch aborts the process where a thread is stopped in the midst of it."""
    code = """
import time
from ckpt.threads import Tasks
def work():
    print("begun", flush=True)
    time.sleep(0.5)
    print("done", flush=True)
tasks = Tasks("some", pool_size=1)
first, second = tasks.submit(work), tasks.submit(work)
while not first.running():
    time.sleep(0.001)
"""
    assert said_by(code) == ["begun", "done"]


def test_a_forked_child_has_threads_of_its_own_and_ends_without_its_parents() -> None:
    code = """
import os, threading
from ckpt.threads import Tasks
go = threading.Event()
tasks = Tasks("some", pool_size=2)
tasks.submit(int).result(10)
tasks.start("loop", go.wait)
tasks.submit(go.wait)
child = os.fork()
if child == 0:
    print("done", tasks.submit(int).result(10))
    tasks.close()
else:
    print("ended", os.waitpid(child, 0)[1])
    go.set()
"""
    assert said_by(code) == ["done 0", "ended 0"]


def test_a_forked_child_closes_what_a_thread_of_its_parent_was_looking_at() -> None:
    code = """
import os, signal, threading
from ckpt.threads import Tasks
began, over = threading.Event(), threading.Event()
def look():
    with tasks.stopping._cond:  # as in a wait, or `set`
        began.set()
        over.wait()
tasks = Tasks("some", pool_size=1)
thread = threading.Thread(target=look)
thread.start()
began.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    tasks.close()
    os._exit(0)
print("ended", os.waitpid(child, 0)[1])
over.set()
"""
    assert said_by(code) == ["ended 0"]


def test_what_a_thread_fails_with_before_its_first_job_is_that_jobs_error() -> None:
    begun: list[str] = []

    def begin() -> None:
        begun.append("begun")
        if len(begun) == 1:
            raise ValueError("not now")

    with Tasks("some", pool_size=1, begin=begin) as tasks:
        with pytest.raises(ValueError, match="not now"):
            tasks.submit(int).result(60)
        for _ in range(2):
            assert tasks.submit(lambda: list(begun)).result(60) == ["begun", "begun"]


def beside(what: Callable[[], object]) -> None:
    """Does it on a thread of its own; fails where it does not end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            what()
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not failed


PYTHONS = {threading.__file__, futures.__file__, pools.__file__}


def test_an_interrupt_anywhere_in_handing_over_a_job_keeps_nobody_from_the_next() -> None:
    def use(tasks: Tasks) -> None:
        assert tasks.submit(int).result(60) == 0

    for tasks in interrupted_anywhere({module.__file__, *PYTHONS}, lambda: Tasks("some", pool_size=2), use):
        beside(lambda tasks=tasks: use(tasks))  # type: ignore[misc]
        beside(tasks.close)
        for thread in threading.enumerate():
            if thread.name.startswith("ckpt-some") and thread.is_alive():  # else it was never started
                thread.join(60)  # one whose start was interrupted ends by itself
                assert not thread.is_alive()


def test_a_job_is_known_before_it_begins_and_called_off_where_nobody_is_told_of_it(tasks: Tasks) -> None:
    class Slow(list[Outcome[None]]):
        def append(self, job: Outcome[None]) -> None:
            threading.Event().wait(0.05)
            super().append(job)

    known, seen = Slow(), list[int]()

    def look() -> None:
        seen.append(len(known))

    with without_threads(), pytest.raises(CkptError, match="no further thread"):
        tasks.submit(look, into=known)
    tasks.submit(look, into=known).result(60)
    for job in known:
        beside(job.wait_until_done)
    assert [job.cancelled() for job in known] == [True, False]
    assert seen == [2]


def interrupting_its_close() -> tuple[Tasks, list[str]]:
    """With a job at work that presses Ctrl-C while it is waited for, and says when it has come to its end."""
    ran: list[str] = []

    def work() -> None:
        while not tasks.stopping.wait(0.01):
            pass
        never.wait(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        never.wait(0.3)
        ran.append("to its end")

    never = threading.Event()
    tasks = Tasks("some", pool_size=1)
    job = tasks.submit(work)
    while not job.running():
        never.wait(0.001)
    return tasks, ran


@pytest.mark.parametrize("block", [False, True])
def test_a_close_that_ctrl_c_ended_is_over_when_nothing_is_at_work_any_more(block: bool) -> None:
    """Python's own join takes the thread for dead then. A close is called again, a block waits itself."""
    tasks, ran = interrupting_its_close()
    with pytest.raises(KeyboardInterrupt):
        tasks.__exit__(None, None, None) if block else tasks.close()
    if not block:
        tasks.close()
    assert ran == ["to its end"]


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


@pytest.mark.parametrize("timeout_s", [1e12, math.inf])
@pytest.mark.parametrize(
    ("make", "wait", "end"),
    [(Flag, Flag.wait, Flag.set), (Outcome, Outcome.result, lambda it: it.set_result(True))],
)
def test_what_is_waited_for_longer_than_a_lock_can_is_waited_for(
    make: Callable[[], Any], wait: Callable[[Any, float], Any], end: Callable[[Any], None], timeout_s: float
) -> None:
    it = make()
    timer = threading.Timer(0.05, end, [it])
    timer.start()
    assert wait(it, timeout_s) is True
    timer.join(60)
