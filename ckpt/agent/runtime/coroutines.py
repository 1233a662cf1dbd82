"""Coroutines on the agent's main thread.

A coroutine waits for a `Promise`: an answer, a worker's result, a timer, or another coroutine's end. It goes on within
the call that settles the promise. So it needs no turn of the loop, and any loop drives it that has `post` and
`call_later`: the agent's, a test's, the simulation's (docs/decisions/0046).

- `gather` and `race` own the coroutines that they run: when they return or raise, all of these have ended.
- An error goes to whoever awaits the task. The error of a task of `spawn` goes to its guard, and leaves the call that
  made the task go on, as the error of a callback does.
- A cancelled coroutine gets `Cancelled` where it waits, and runs its `finally` blocks, which must not wait.
- A guard runs each step of a task, and of those that the task runs by `gather` or `race`. A guard that does not run a
  step, since nobody wants the result any more, cancels the task.

Main thread only.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from typing import Any, Generic, NoReturn, TypeVar

from ckpt.agent.runtime.workers import Lane, Workers, error_text
from ckpt.errors import AgentError, CkptError

T = TypeVar("T")

Coro = Coroutine["Promise[Any]", None, T]
CallLater = Callable[[float, Callable[[], None]], object]
Guard = Callable[[Callable[[], None]], object]

EXPECTED = (CkptError, OSError, MemoryError)  # errors that a caller is prepared for


class Cancelled(BaseException):
    """Raised where a cancelled coroutine waits."""


class Promise(Generic[T]):
    """A result, or an error, that is there later. Only the first one counts."""

    def __init__(self) -> None:
        self.is_settled = False
        self.error: BaseException | None = None
        self._result: T
        self._listeners: list[Callable[[], object]] = []

    def set_result(self, result: T) -> None:
        if not self.is_settled:
            self._result = result
            self._settle()

    def set_error(self, error: BaseException) -> None:
        if not self.is_settled:
            self.error = error
            self._settle()

    def set_outcome(self, result: T | None, error: str) -> None:
        """Settles the promise with what a callback heard: a result, or an error that is not ""."""
        if error:
            self.set_error(AgentError(error))
        else:
            self.set_result(result)  # type: ignore[arg-type]

    def set_from(self, done: Future[T]) -> None:
        """Settles the promise as that future, which is done."""
        error = done.exception()
        if error is not None:
            self.set_error(error)
        else:
            self.set_result(done.result())

    def result(self) -> T:
        """The result of a settled promise. Errors: its error."""
        if self.error is not None:
            raise self.error
        return self._result

    def when_settled(self, what: Callable[[], object]) -> None:
        """Calls `what` once the promise is settled; within this call if it is."""
        if self.is_settled:
            what()
        else:
            self._listeners.append(what)

    def drop_listeners(self) -> None:
        """Whoever waited goes on by itself: it was cancelled, or is not used any more."""
        self._listeners.clear()

    def __await__(self) -> Generator[Promise[Any], None, T]:
        # An error comes as a step of its own, after which its traceback is dropped.
        if not self.is_settled or self.error is not None:
            yield self
        return self.result()

    def _settle(self) -> None:
        self.is_settled = True
        listeners, self._listeners = self._listeners, []
        mistake: Exception | None = None
        for each in listeners:
            try:
                each()
            except Exception as exc:  # The other listeners wait for the same.
                mistake = mistake or exc
        if mistake is not None:
            raise mistake


class Task(Promise[T]):
    """A coroutine under way, and the promise of its result. Its first step runs within the constructor."""

    def __init__(self, coroutine: Coro[T], guard: Guard | None = None) -> None:
        super().__init__()
        self._coroutine = coroutine
        self._guard: Guard = guard or _no_guard
        self._awaited: Promise[Any] | None = None
        self._is_cancelled = False
        self._go_on()

    def cancel(self) -> None:
        """Ends the coroutine where it waits; no effect after its end. One that runs just now ends at its next wait."""
        self._is_cancelled = True
        if self._awaited is not None:
            self._awaited = None
            self._step()

    # -- inside

    def _go_on(self, awaited: Promise[Any] | None = None) -> None:
        """Runs the next step, if the guard permits it. `awaited`: is settled."""
        self._awaited = None
        has_run = False

        def step() -> None:
            nonlocal has_run
            has_run = True
            self._step()

        self._guard(step)
        if not has_run:
            self._is_cancelled = True
            self._step()
        if awaited is not None:
            _drop_traceback(awaited.error)

    def _step(self) -> None:
        """Runs the coroutine to its next wait, or to its end."""
        global _running
        former, _running = _running, self
        try:
            awaited = self._coroutine.send(None) if not self._is_cancelled else self._throw()
            if self._is_cancelled:  # meanwhile, by itself
                awaited = self._throw()
        except StopIteration as exc:
            settle: Callable[[], None] = functools.partial(self.set_result, exc.value)
        except (Exception, Cancelled) as exc:
            _drop_traceback(exc)
            settle = functools.partial(self.set_error, exc)
        else:
            settle = functools.partial(self._wait_for, awaited)
        finally:
            _running = former
        settle()

    def _throw(self) -> Promise[Any]:
        return self._coroutine.throw(Cancelled())

    def _wait_for(self, awaited: Promise[Any]) -> None:
        self._awaited = awaited
        awaited.when_settled(lambda: self._go_on(awaited) if self._awaited is awaited else None)


def _drop_traceback(error: BaseException | None) -> None:
    """A promise would keep the frames of its error alive, and the memory that they use. The traceback of a mistake is
    kept for the log."""
    if isinstance(error, (*EXPECTED, Cancelled)):
        error.__traceback__ = None


def _no_guard(what: Callable[[], None]) -> None:
    what()


_running: Task[Any] | None = None


def _child(coroutine: Coro[T]) -> Task[T]:
    """A task of the task that runs."""
    return Task(coroutine, _running._guard if _running is not None else None)


def spawn(coroutine: Coro[T], guard: Guard | None = None) -> Task[T]:
    """Starts a task that nobody awaits."""
    task = Task(coroutine, guard)

    def end() -> None:
        if not isinstance(task.error, Cancelled):
            task.result()

    # The first step is over already: the guard hears its error, too.
    (guard or _no_guard)(lambda: task.when_settled(end))
    return task


def start(awaited: Awaitable[T], then: Callable[[T | None, str], object], guard: Guard | None = None) -> Task[None]:
    """Awaits something for a caller that takes a callback. `then` hears the result and "", or None and the error. It
    hears nothing if the task is cancelled. An error that nobody expects is raised, too, as by `spawn`."""

    async def run() -> None:
        try:
            found = await awaited
        except Exception as exc:
            then(None, error_text(exc))
            if not isinstance(exc, EXPECTED):
                raise
        else:
            then(found, "")

    return spawn(run(), guard)


async def gather(coroutines: Iterable[Coro[T]]) -> list[T]:
    """Runs coroutines at the same time. Returns their results, in order. The first error cancels the others."""
    tasks = [_child(each) for each in coroutines]
    left, ended = len(tasks), Promise[None]()

    def end(task: Task[T]) -> None:
        nonlocal left
        left -= 1
        if task.error is not None:
            ended.set_error(task.error)
        elif not left:
            ended.set_result(None)

    for task in tasks:
        task.when_settled(functools.partial(end, task))
    try:
        if tasks:
            await ended
    finally:
        ended.drop_listeners()
        for task in tasks:
            task.cancel()
    return [task.result() for task in tasks]


async def race(coroutine: Coro[T], limit: Coro[NoReturn]) -> T:
    """Runs a coroutine until `limit` raises. Then the coroutine is cancelled, and that error is raised."""
    task, watch, first = _child(coroutine), _child(limit), Promise[None]()
    task.when_settled(lambda: first.set_result(None))
    watch.when_settled(lambda: first.set_result(None))
    try:
        await first
        return task.result() if task.is_settled else watch.result()
    finally:
        first.drop_listeners()
        task.cancel()
        watch.cancel()


class Semaphore:
    """Lets at most `count` coroutines at a time into its `async with` block, in the order in which they come."""

    def __init__(self, count: int) -> None:
        self._free_count = count
        self._turns: collections.deque[Promise[None]] = collections.deque()

    async def __aenter__(self) -> None:
        if self._free_count:
            self._free_count -= 1
            return
        turn = Promise[None]()
        self._turns.append(turn)
        try:
            await turn
        except BaseException:
            if turn.is_settled:
                await self.__aexit__()
            else:
                self._turns.remove(turn)
            raise

    async def __aexit__(self, *_: object) -> None:
        if self._turns:
            self._turns.popleft().set_result(None)
        else:
            self._free_count += 1


async def sleep(call_later: CallLater, delay_s: float) -> None:
    woken = Promise[None]()
    call_later(delay_s, lambda: woken.set_result(None))
    await woken


async def time_out(call_later: CallLater, delay_s: float) -> NoReturn:
    """The limit of a `race`. Errors: TimeoutError, after `delay_s`."""
    await sleep(call_later, delay_s)
    raise TimeoutError


def promise_of(future: Future[T], post: Callable[[Callable[[], None]], None]) -> Promise[T]:
    """A promise of that future, which another thread settles. `post`: runs a function on the main thread."""
    promise = Promise[T]()
    future.add_done_callback(lambda done: post(lambda: promise.set_from(done)))
    return promise


def work_on(workers: Workers, lane: Lane, work: Callable[[], T]) -> Promise[T]:
    """Runs `work` in that lane. Errors: those of `work`."""
    done = Promise[T]()
    workers.run(lane, work, done.set_from)
    return done


async def run_on(workers: Workers, lane: Lane, work: Callable[[], T]) -> T:
    """Runs `work` in that lane. Errors: CkptError, also for any other error of `work`, which may be given what another
    agent says."""
    try:
        return await work_on(workers, lane, work)
    except CkptError:
        raise
    except Exception as exc:
        raise AgentError(error_text(exc)) from exc
