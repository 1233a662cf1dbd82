"""SIGTERM and SIGUSR1 as notices. What ends a process is tried on a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ckpt.errors import CkptError, UsageError
from ckpt.preemption.signals import Signals
from ckpt.threads import Tasks
from tests.preemption.fakes import listening

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Each test leaves handlers and wake-up descriptor as they were."""
    handlers = {number: signal.getsignal(number) for number in (TERM, USR1)}
    yield
    found = {number: signal.getsignal(number) for number in (TERM, USR1)}
    woken = signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert (found, woken) == (handlers, -1)


@contextlib.contextmanager
def handler_of(number: signal.Signals, handler: object) -> Iterator[None]:
    before = signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def consuming(*numbers: signal.Signals, **given: Any) -> Iterator[Signals]:
    """These signals come within, and are consumed, so that they are not delivered again."""
    with Signals(**given) as signals:
        yield signals
        for number in numbers:
            signals.consume(number)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def run(body: str) -> tuple[int, str]:
    """The return code and output of a process that runs `body` with the module at hand."""
    code = f"import os, signal, sys, threading, time\nfrom ckpt.preemption.signals import Signals\n{body}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_signal_becomes_one_certain_notice_with_its_lead(number: signal.Signals) -> None:
    leads_s = {TERM: 30.0, USR1: 90.0}
    with consuming(number, leads_s=leads_s) as signals, listening(signals) as (_, told, has_told):
        before_s = time.time()
        send(number)
        assert has_told.wait(60)
        after_s = time.time()
    (notice,) = told
    assert (notice.source, notice.certain, notice.key) == ("signal", True, number.name)
    lead_s = leads_s[number]
    assert before_s + lead_s <= notice.deadline_s <= after_s + lead_s


def test_the_same_signal_again_is_no_second_notice_and_the_other_is() -> None:
    with consuming(TERM, USR1) as signals, listening(signals) as (_, told, has_told):
        for _ in range(3):
            send(TERM)
        assert has_told.wait(60)
        has_told.clear()
        send(USR1)
        assert has_told.wait(60)
    assert [word.key for word in told] == ["SIGTERM", "SIGUSR1"]


def test_a_clock_that_is_set_makes_no_two_requests_of_one_that_came_twice() -> None:
    """The second would end the process at once, with nothing saved."""
    unix_s, stop, has_told, again = [1e9], threading.Event(), threading.Event(), list[signal.Signals]()
    with consuming(TERM, USR1, now_s=lambda: unix_s[0]) as signals, Tasks("listener") as tasks:
        tasks.start("listen", lambda: signals.listen(stop, lambda word: has_told.set(), again.append))
        send(TERM)
        assert has_told.wait(60)
        has_told.clear()
        unix_s[0] += 3600.0
        send(TERM)
        send(USR1)
        assert has_told.wait(60)
        stop.set()
    assert again == []


def test_a_handler_that_runs_late_makes_no_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A main thread in a long call of C runs the handler seconds after the signal was told."""
    monkeypatch.setattr("ckpt.preemption.signals.REPEAT_S", 0.0)
    stop, has_told, insisted = threading.Event(), threading.Event(), threading.Event()
    again = list[signal.Signals]()

    def came_again(number: signal.Signals) -> None:
        again.append(number)
        insisted.set()

    with consuming(TERM, USR1) as signals, Tasks("listener") as tasks:
        tasks.start("listen", lambda: signals.listen(stop, lambda word: has_told.set(), came_again))
        for number in (TERM, USR1):  # the second is told after all that the first has written
            send(number)
            assert has_told.wait(60)
            has_told.clear()
        once = again.copy()
        send(TERM)
        has_insisted = insisted.wait(60)
        stop.set()
    assert (once, has_insisted, again) == ([], True, [TERM])


def test_a_signal_that_came_before_anybody_listened_is_told() -> None:
    with consuming(TERM) as signals:
        send(TERM)
        with listening(signals) as (_, told, has_told):
            assert has_told.wait(60)
    assert [word.key for word in told] == ["SIGTERM"]


def test_it_is_told_while_the_main_thread_runs_no_bytecode() -> None:
    """The main thread waits for a C mutex, which no signal interrupts, until the notice was told."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    is_locked, was_told = threading.Event(), list[bool]()
    with Signals() as signals, listening(signals) as (_, _told, has_told), Tasks("holder") as tasks:

        def hold() -> None:
            libc.pthread_mutex_lock(mutex)
            is_locked.set()
            while _state_of_main() != "S":
                time.sleep(0.001)
            send(USR1)
            was_told.append(has_told.wait(60))
            libc.pthread_mutex_unlock(mutex)

        tasks.start("hold", hold)
        while not is_locked.is_set():
            pass  # not a wait that could be mistaken for the one below
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_unlock(mutex)
        signals.consume(USR1)
    assert was_told == [True]


def _state_of_main() -> str:
    with open(f"/proc/self/task/{os.getpid()}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def test_the_handler_that_was_there_is_called_with_its_arguments_and_put_back() -> None:
    seen: list[tuple[int, bool]] = []

    def before(number: int, frame: object) -> None:
        seen.append((number, frame is not None))

    with handler_of(TERM, before):
        with Signals():
            send(TERM)
            assert seen == [(TERM, True)]
        assert signal.getsignal(TERM) is before
    assert seen == [(TERM, True)], "delivered a second time"


def test_an_ignored_signal_stays_ignored() -> None:
    with handler_of(USR1, signal.SIG_IGN), consuming(TERM) as signals, listening(signals) as (_, told, has_told):
        assert signal.getsignal(USR1) is signal.SIG_IGN
        send(USR1)
        send(TERM)
        assert has_told.wait(60)
    assert [word.key for word in told] == ["SIGTERM"]


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_handler_that_is_not_pythons_is_left_alone_and_that_is_said(number: signal.Signals) -> None:
    """A dump of the stacks is no notice, and the next one does not end the process."""
    code, output = run(f"""
import faulthandler, logging, tempfile
from ckpt.events import Events
logging.getLogger("ckpt").setLevel(logging.ERROR)
file, told = tempfile.TemporaryFile("w+"), []
faulthandler.register({number.value}, file=file)
for _ in range(2):
    with Signals(events=Events(told.append)) as signals:
        os.kill(os.getpid(), {number.value})
    os.kill(os.getpid(), {number.value})
file.seek(0)
print(file.read().count("most recent call first"), [each.name for each in told], all(each.loud for each in told))
told.clear()
signal.signal({number.value}, signal.SIG_DFL)
with Signals(events=Events(told.append)) as signals:
    os.kill(os.getpid(), {number.value})
    signals.consume({number.value})
print(told)
""")
    assert (code, output) == (0, "4 ['signals.unheard', 'signals.unheard'] True\n[]\n")


def test_a_handler_that_was_installed_inside_the_block_stays() -> None:
    def theirs(number: int, frame: object) -> None: ...

    with Signals():
        signal.signal(TERM, theirs)
    assert signal.getsignal(TERM) is theirs
    signal.signal(TERM, signal.SIG_DFL)


def test_a_handler_put_back_after_the_block_steps_aside() -> None:
    """As a library does that restores what it had found: without this the signal would be lost for good."""
    body = """
with Signals() as signals:
    found = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, found)
os.kill(os.getpid(), signal.SIGTERM)
print("went on")
"""
    assert run(body) == (-TERM, "")


def test_who_was_to_be_woken_before_is_woken_as_well_and_again_after() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    signal.set_wakeup_fd(write)
    try:
        with consuming(TERM) as signals, listening(signals) as (_, _told, has_told):
            send(TERM)
            assert has_told.wait(60)
        assert set(os.read(read, 100)) == {TERM}
        assert signal.set_wakeup_fd(write) == write
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


UNCONSUMED = """
with Signals() as signals:
    os.kill(os.getpid(), signal.{name})
    print("in the block", flush=True)
print("behind it", flush=True)
"""


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_signal_that_nobody_consumed_is_delivered_again_on_exit(number: signal.Signals) -> None:
    assert run(UNCONSUMED.format(name=number.name)) == (-number, "in the block\n")


def test_two_blocks_both_hear_it_in_whatever_order_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.preemption.signals.SLICE_S", 0.05)
    for order in ((0, 1), (1, 0)):
        with contextlib.ExitStack() as stack:
            both = [Signals(), Signals()]
            for each in both:
                each.__enter__()
            told = []
            for each in both:
                told.append(stack.enter_context(listening(each)))
            send(TERM)
            assert all(has_told.wait(60) for _, _, has_told in told)
            stack.close()
            for each in both:
                each.consume(TERM)
            both[order[0]].__exit__(None, None, None)
            left = both[order[1]]
            with listening(left) as (_, words, has_told):
                send(USR1)
                assert has_told.wait(60), "the other one's end made it deaf"
            assert [word.key for word in words] == ["SIGUSR1"]
            left.consume(USR1)
            others = os.pipe()  # with the numbers of the pipe that is gone: nobody is to be woken by it
            os.set_blocking(others[1], False)
            left.__exit__(None, None, None)
            assert signal.set_wakeup_fd(-1) == -1
            for descriptor in others:
                os.close(descriptor)
        assert signal.getsignal(TERM) is signal.SIG_DFL
        assert signal.getsignal(USR1) is signal.SIG_DFL


def test_a_forked_childs_signal_ends_the_child_and_is_no_notice_to_its_parent() -> None:
    """As a loader's worker is ended, perhaps before it runs a line. It is forked on another thread, too."""
    body = """
def child():
    pid = os.fork()
    if pid == 0:
        time.sleep(50)
        os._exit(7)
    os.kill(pid, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
told, stop = [], threading.Event()
with Signals() as signals:
    listening = threading.Thread(target=signals.listen, args=(stop, told.append))
    listening.start()
    child()
    thread = threading.Thread(target=child)
    thread.start()
    thread.join()
    stop.set()
    listening.join()
print(told)
"""
    assert run(body) == (0, f"{-TERM}\n{-TERM}\n[]\n")


def test_a_forked_child_that_leaves_the_block_closes_nothing_of_its_own() -> None:
    body = """
with Signals() as signals:
    pid = os.fork()
    if pid == 0:
        mine = os.pipe()  # takes the numbers that were closed at the fork
print(os.fstat(mine[0]).st_mode > 0 if pid == 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(body) == (0, "True\n0\n")


def test_it_is_entered_on_the_main_thread_only() -> None:
    errors: list[Exception] = []

    def enter() -> None:
        try:
            Signals().__enter__()
        except UsageError as exc:
            errors.append(exc)

    with Tasks("other") as tasks:
        tasks.start("enter", enter)
    (error,) = errors
    assert "only from the main thread" in str(error)


def test_it_is_entered_once_at_a_time_and_listened_to_inside() -> None:
    signals = Signals()
    with pytest.raises(UsageError, match="inside the with block"):
        signals.listen(threading.Event(), lambda word: None)
    with signals, pytest.raises(UsageError, match="this Signals is in use"):
        signals.__enter__()
    with signals:  # but again after it
        pass


def test_leaving_the_block_ends_the_listening_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.preemption.signals.SLICE_S", 120.0)
    listens, ended = threading.Event(), threading.Event()
    with Tasks("listening") as tasks:
        with Signals() as signals:

            def listen() -> None:
                signals.listen(threading.Event(), lambda word: listens.set())
                ended.set()

            tasks.start("listen", listen)
            send(USR1)
            assert listens.wait(60)
            signals.consume(USR1)
        assert ended.wait(50)


def test_an_owner_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.preemption.signals.CLOSE_S", 0.05)
    is_telling, release = threading.Event(), threading.Event()

    def tell(word: object) -> None:
        is_telling.set()
        release.wait(60)

    signals = Signals()
    signals.__enter__()
    with Tasks("listening") as tasks:
        tasks.start("listen", lambda: signals.listen(threading.Event(), tell))
        send(TERM)
        signals.consume(TERM)
        assert is_telling.wait(60)
        with pytest.raises(CkptError, match="did not end"):
            signals.__exit__(None, None, None)
        release.set()
    os.close(signals._read_fd)
    os.close(signals._write_fd)
