"""Virtual time, and threads that take turns: a whole job in one process, in an order that follows from a seed.

Only one thread runs at any moment: the loop here, or one that the loop has let go on until it waits. What waits (for a
lock's condition, a future, an event, a queue, a sleep) is let go on when it is told to, or when its time is up, on a
clock that moves from one event to the next. So a minute takes milliseconds, and a seed that fails fails again.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import os
import queue
import random
import secrets
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import pytest

import ckpt.agent.commit.claims
import ckpt.store.packs
import ckpt.threads
from ckpt.ipc.arena import Arena
from ckpt.ipc.control_page import ControlPage

EPOCH_S = 1_800_000_000.0  # Unix time when a world begins
BEGIN_S = 1000.0  # its monotonic clock then
STILL_MAX = 10_000  # events at one moment
WAKE_S = 0.0002  # at most, from being told to going on


class Over(BaseException):
    """The world has ended, and whoever still waits in it goes."""


class Stuck(AssertionError):
    """Nothing more can happen, or it takes too long."""


class Closes(Protocol):
    def close(self) -> None: ...


class Turn:
    """A thread. `owner`: whose it is; it never goes on once that is dead."""

    def __init__(self, world: World, name: str, target: Callable[[], None], owner: Any) -> None:
        self.name, self.owner = name, owner
        self.done = self.told = False
        self.waits = 0  # how often it has waited
        self.waiting = False
        self.ended = threading.Condition()
        self._world, self._target = world, target
        self.go = threading.Lock()
        self.go.acquire()
        self.thread_id = _thread.start_new_thread(self._run, ())  # threading.Thread would wait for its start

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self._world.over:
                self._target()
        except Over:
            pass
        except BaseException:
            self._world.mistakes.append(f"{self.name}: {traceback.format_exc()}")
        finally:
            self.done = True
            with self.ended:
                self.ended.notify_all()
            threading._active.pop(threading.get_ident(), None)  # where it asked who it is
            self._world.back.release()

    # -- as a thread

    def is_alive(self) -> bool:
        return not self.done

    def join(self, timeout: float | None = None) -> None:
        with self.ended:
            self.ended.wait_for(lambda: self.done, timeout)


class World:
    """Owns the clock and the threads. `owner`: for whom what runs now does so. `mistakes`: what should not have been
    raised, whoever raised it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = BEGIN_S
        self.happened = 0  # so many events
        self.over = False
        self.owner: Any = None
        self.dead: set[Any] = set()
        self.mistakes: list[str] = []
        self.back = threading.Lock()
        self.back.acquire()
        self.turns: list[Turn] = []
        self._memory: list[tuple[Any, Closes]] = []  # by whose it is
        self._events: list[tuple[float, int, Any, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: dict[int, list[tuple[Turn, int]]] = {}  # by condition
        self._by_thread: dict[int, Turn] = {}

    # -- what happens

    @contextlib.contextmanager
    def owned_by(self, owner: Any) -> Iterator[None]:
        """What is done within is done for that one."""
        before, self.owner = self.owner, owner
        try:
            yield
        finally:
            self.owner = before

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        """Runs it then, on the loop; in order where the times are the same. Not at all once its owner is dead."""
        heapq.heappush(self._events, (self.now_s + max(0.0, delay_s), next(self._numbers), self.owner, what))

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Until that holds. Errors: Stuck where it never will, or not within so many seconds of the world's;
        AssertionError for a mistake."""
        end_s, stood = self.now_s + limit_s, 0
        while not until():
            stood = stood + 1 if self._events and self._events[0][0] <= self.now_s else 0
            if stood > STILL_MAX:
                raise Stuck(f"time does not go on after {self.now_s - BEGIN_S:.3f} s: {self._who_waits()}")
            if not self._events or self._events[0][0] > end_s:
                raise Stuck(f"after {self.now_s - BEGIN_S:.3f} s: {self._who_waits()}")
            self.now_s, _, owner, what = heapq.heappop(self._events)
            self.happened += 1
            if owner in self.dead:
                continue
            with self.owned_by(owner):
                what()
            if self.mistakes:
                raise AssertionError("\n".join(self.mistakes))

    def spawn(self, name: str, target: Callable[[], None]) -> Turn:
        turn = Turn(self, name, target, self.owner)
        self.turns.append(turn)
        self._by_thread[turn.thread_id] = turn
        self.at(0.0, lambda: self._go_on(turn))
        return turn

    def remember(self, memory: Closes) -> None:
        """It goes with whose it is."""
        self._memory.append((self.owner, memory))

    def kill(self, owner: Any) -> None:
        """A process: none of its threads goes on, and its memory goes, as it does on a machine."""
        self.dead.add(owner)
        self._close_memory([each for each in self._memory if each[0] is owner])

    def close(self) -> None:
        """What is left of processes goes, too."""
        self.over = True
        for turn in self.turns:
            while not turn.done:
                self._let_go(turn)
        self._close_memory(self._memory)

    def _close_memory(self, which: Iterable[tuple[Any, Closes]]) -> None:
        for _, each in which:
            with contextlib.suppress(BufferError):
                each.close()

    # -- threads that wait

    @property
    def current(self) -> Turn | None:
        return self._by_thread.get(threading.get_ident())

    def wait(self, condition: object, timeout_s: float | None) -> bool:
        """Whether it was told to go on, on a thread whose turn it is."""
        turn = self.current
        assert turn is not None, "the loop would wait, for ever"
        if self.over:
            raise Over
        turn.waits += 1
        turn.told, turn.waiting, number = False, True, turn.waits
        if condition is not None:
            self._waiting.setdefault(id(condition), []).append((turn, number))
        if timeout_s is not None:
            self.at(timeout_s, lambda: self._wake(turn, number))
        self.back.release()
        turn.go.acquire()
        turn.waiting = False
        if self.over:
            raise Over
        return turn.told

    def notify(self, condition: object, count: int) -> None:
        waiting = self._waiting.get(id(condition), [])
        while waiting and count > 0:
            turn, number = waiting.pop(0)
            if turn.waits == number and turn.waiting and not turn.told:
                turn.told = True
                count -= 1
                with self.owned_by(turn.owner):
                    self.at(self.rng.uniform(0.0, WAKE_S), lambda turn=turn, number=number: self._wake(turn, number))
        if not waiting:
            self._waiting.pop(id(condition), None)

    def _wake(self, turn: Turn, number: int) -> None:
        if turn.waits == number and turn.waiting:
            self._go_on(turn)

    def _go_on(self, turn: Turn) -> None:
        if not turn.done and turn.owner not in self.dead:
            self._let_go(turn)

    def _let_go(self, turn: Turn) -> None:
        with self.owned_by(turn.owner):
            turn.go.release()
            self.back.acquire()

    def _who_waits(self) -> str:
        frames, said = sys._current_frames(), list(self.mistakes)
        for turn in self.turns:
            if not turn.done and turn.owner not in self.dead:
                stack = traceback.format_stack(frames[turn.thread_id])
                said.append(f"{turn.name} waits:\n{''.join(stack[:-2][-9:])}")
        return "\n".join(said)


def each_life(live: Callable[[int], object], count: int, part: int) -> None:
    """That tenth of so many lives, from the seed CKPT_TEST_SEED on. The seed of one that fails is printed."""
    first = int(os.environ.get("CKPT_TEST_SEED", "0")) + part * count // 10
    for seed in range(first, first + count // 10):
        try:
            live(seed)
        except BaseException:
            print(f"seed {seed}")
            raise


@contextlib.contextmanager
def living(seed: int) -> Iterator[World]:
    """A world, in which what waits does so by its clock. Whatever came of it, nothing of it is left afterwards.
    Errors: AssertionError where anything of it made a mistake."""
    world = World(seed)
    with pytest.MonkeyPatch.context() as patch:
        _take_over(world, patch)
        try:
            yield world
            if world.mistakes:
                raise AssertionError("\n".join(world.mistakes))
        finally:
            world.close()


def _take_over(world: World, patch: pytest.MonkeyPatch) -> None:
    wait, notify = threading.Condition.wait, threading.Condition.notify

    def wait_here(condition: Any, timeout: float | None = None) -> bool:
        if world.current is None:
            assert world.owner is None, "an agent's loop would wait"
            return wait(condition, timeout)
        saved = condition._release_save()
        try:
            return world.wait(condition, timeout)
        finally:
            condition._acquire_restore(saved)

    def notify_here(condition: Any, n: int = 1) -> None:
        world.notify(condition, n)
        notify(condition, n)

    def notify_all_here(condition: Any) -> None:
        notify_here(condition, max(len(world.turns), len(condition._waiters)))

    def sleep(seconds: float) -> None:
        world.wait(None, seconds)

    def thread(target: Callable[[], None], name: str, daemon: bool) -> Any:
        return _Started(world, name, target)

    def remember(made: type[Arena] | type[ControlPage]) -> None:
        begin = made.__init__

        def begin_here(self: Any, *given: Any, **named: Any) -> None:
            begin(self, *given, **named)
            world.remember(self)

        patch.setattr(made, "__init__", begin_here)

    remember(Arena)
    remember(ControlPage)
    now: Callable[[], float] = lambda: world.now_s  # noqa: E731
    draw = world.rng
    for condition in (threading.Condition, ckpt.threads.Condition):
        patch.setattr(condition, "wait", wait_here)
    patch.setattr(threading.Condition, "notify", notify_here)
    patch.setattr(threading.Condition, "notify_all", notify_all_here)
    patch.setattr(threading, "_time", now)
    patch.setattr(queue, "time", now)
    patch.setattr(time, "monotonic", now)
    patch.setattr(time, "monotonic_ns", lambda: round(world.now_s * 1e9))
    patch.setattr(time, "perf_counter", now)
    patch.setattr(time, "time", lambda: EPOCH_S + world.now_s - BEGIN_S)
    patch.setattr(time, "sleep", sleep)
    patch.setattr(secrets, "token_hex", lambda count=32: draw.randbytes(count).hex())
    patch.setattr(secrets, "token_bytes", lambda count=32: draw.randbytes(count))
    patch.setattr(secrets, "randbits", draw.getrandbits)
    patch.setattr(random, "randrange", draw.randrange)
    patch.setattr(random, "uniform", draw.uniform)
    patch.setattr(random, "sample", draw.sample)
    given = {name: getattr(threading, name) for name in ("Event", "Lock", "current_thread")}
    patch.setattr(ckpt.threads, "threading", types.SimpleNamespace(Thread=thread, **given))
    patch.setattr(ckpt.agent.commit.claims, "threading", types.SimpleNamespace(Lock=lambda: _Lock(world)))
    patch.setattr(ckpt.store.packs, "queue", types.SimpleNamespace(SimpleQueue=queue.Queue, Empty=queue.Empty))


class _Lock:
    """A lock that is held while a thread waits in the world, and waited for there."""

    def __init__(self, world: World) -> None:
        self._world, self._is_held = world, False

    def __enter__(self) -> None:
        while self._is_held:
            self._world.wait(self, None)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._world.notify(self, 1)


class _Started:
    """What `ckpt.threads` takes for a thread."""

    def __init__(self, world: World, name: str, target: Callable[[], None]) -> None:
        self.name, self._world, self._target = name, world, target
        self._turn: Turn | None = None

    def start(self) -> None:
        self._turn = self._world.spawn(self.name, self._target)

    def is_alive(self) -> bool:
        return self._turn is not None and self._turn.is_alive()

    def join(self, timeout: float | None = None) -> None:
        if self._turn is not None:
            self._turn.join(timeout)
