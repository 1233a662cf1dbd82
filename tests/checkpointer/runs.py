"""Small runs in this process, and waiting for what they say."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import obstore

import ckpt
from ckpt.events import Event
from ckpt.ipc import client
from ckpt.settings import read_settings
from ckpt.storage import canonical
from ckpt.threads import Tasks
from ckpt.types import Identity
from tests.checkpointer.loops import losses, make, wait_agent_gone
from tests.servers import Server

LATER = ckpt.Every(steps=10**6)  # nothing is appointed
RUN = "runs/one"  # its place in the bucket of a server
URL = f"s3://bucket/{RUN}"


class Stateful:
    """An object of the user's. `read` returns its state; a restore changes nothing in it."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.state_dict = read

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Seen:
    """A sink that keeps every event, and can be waited on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def named(self, name: str) -> list[Event]:
        with self._changed:
            return [event for event in self.events if event.name == name]

    @property
    def committed(self) -> list[int]:
        """The steps that were committed, in that order; once for each version."""
        return [Identity.parse(each.data["identity"]).version.step for each in self.named("commit.done")]

    def wait_for(self, name: str, count: int, timeout_s: float = 60.0) -> None:
        """Until there were so many of them."""
        with self._changed:
            found = self._changed.wait_for(lambda: sum(e.name == name for e in self.events) >= count, timeout_s)
        assert found, f"fewer than {count} {name}; seen: {[(event.name, event.message) for event in self.events]}"

    def wait(self, name: str, that: Callable[[Event], bool] = lambda event: True, timeout_s: float = 60.0) -> Event:
        """The first such event, now or before."""

        def first() -> Event | None:
            return next((event for event in self.events if event.name == name and that(event)), None)

        with self._changed:
            found = self._changed.wait_for(first, timeout_s)
        assert found is not None, f"no {name}; seen: {[(event.name, event.message) for event in self.events]}"
        return found


@dataclass(frozen=True)
class Ended:
    """A run that has ended, agent and all."""

    losses: list[float]
    ck: ckpt.Checkpointer
    seen: Seen

    @property
    def from_step(self) -> int:
        return self.ck.restored.step


def run(
    url: str | os.PathLike[str],
    steps: int,
    job: Any = None,
    at: Callable[[ckpt.Checkpointer, int], None] = lambda ck, step: None,
    more: dict[str, Any] | None = None,
    sinks: Iterable[Callable[[Event], None]] = (),
    **options: Any,
) -> Ended:
    """Trains up to `steps`: a job, by default one of another seed, so that what it gets right is restored; or nothing,
    where it is the state alone. `at`: is called in each step behind its update. `more`: of the state."""
    job = job or make(seed=9)
    state, losses, seen = job if isinstance(job, dict) else job.state, list[float](), Seen()
    with ckpt.Checkpointer(url, state | more if more else state, sinks=(seen, *sinks), **options) as ck:
        for step in ck.steps(steps):
            if not isinstance(job, dict):
                losses.append(job.train(step))
            at(ck, step)
    wait_agent_gone(url)
    return Ended(losses, ck, seen)


def goes_on(url: str | os.PathLike[str], before: list[float], steps: int = 2, **options: Any) -> Ended:
    """Starts again, and trains `steps` more. `before`: the losses so far. The start must restore the step of the last
    one, and all losses must be those of an uninterrupted run."""
    ended = run(url, len(before) + steps, **options)
    assert ended.from_step == len(before)
    assert before + ended.losses == losses(len(before) + steps)
    return ended


def restore(url: str | os.PathLike[str], state: dict[str, Any], **options: Any) -> ckpt.Checkpointer:
    """A start, once the agent of the one before has gone, that trains nothing and has ended, agent and all."""
    wait_agent_gone(url)
    with ckpt.Checkpointer(url, state, **options) as ck:
        pass
    wait_agent_gone(url)
    return ck


def saving(*steps: int) -> Callable[[ckpt.Checkpointer, int], None]:
    """For `run`: each of these steps is committed before the next one begins."""

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        if step in steps:
            ck.step()
            ck.save().wait("store", timeout_s=60)

    return at


def agent_status(url: str | os.PathLike[str]) -> dict[str, Any]:
    """What the agent of `url` says of itself; there must be one."""
    sock = client.connect_nowait(client.make_agent_paths(canonical(os.fspath(url)), read_settings()))
    assert sock is not None, f"no agent serves {url}"
    with Tasks("probe") as tasks:
        connection = client.Connection(sock, tasks, lambda message: message.close(), lambda why: None, role="tool")
        try:
            return connection.status(30.0)
        finally:
            connection.close()


def kill_agent(url: str | os.PathLike[str]) -> None:
    """SIGKILL; returns once it is gone."""
    pid = int(agent_status(url)["pid"])
    gone = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([gone], [], [], 30)[0], f"agent {pid} is still there"
    finally:
        os.close(gone)


def empty(server: Server) -> None:
    """Deletes all objects of its bucket, past every proxy."""
    bucket = server.objects(server.bucket)
    for chunk in obstore.list(bucket):
        obstore.delete(bucket, [meta["path"] for meta in chunk])
