"""What the agent does where it makes a mistake itself: it is told, it ends one job at most, and the agent goes on."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ckpt.agent.job.job import Job
from ckpt.agent.job.job_context import RankConnection, Services
from ckpt.agent.restore.sources import open_session
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.memory_plan import MemoryUse
from ckpt.agent.state.accounting import Accounting
from ckpt.agent.state.rank_presence import Presence
from ckpt.errors import UsageError
from ckpt.format.manifest import FRAME, Manifest
from ckpt.ipc import messages
from ckpt.ipc.arena import Arena
from ckpt.policy.save_options import Keep
from ckpt.store.lineage import Claim
from ckpt.threads import Tasks
from ckpt.types import Epoch, Identity, Version
from tests.agent.nodes.staged import close_arenas

EPOCH = Epoch(50, "0123456789abcdef")
STORE = SimpleNamespace(is_claimed=lambda epoch: True, heartbeat=lambda epoch, count: None)


class Idle:
    """A handler with nothing to do until it is told to finish."""

    def __init__(self) -> None:
        self.done = False
        self.broken = 0  # how many more times it fails to settle

    def message(self, peer: Peer, message: messages.Message) -> None:
        raise AssertionError("nobody is there")

    def peer_disconnected(self, peer: Peer) -> None: ...

    def peer_died(self, peer: Peer) -> None: ...

    def settle(self) -> float | None:
        if self.broken:
            self.broken -= 1
            raise ZeroDivisionError("in settle")
        return time.monotonic() + 1e9

    def can_exit(self) -> bool:
        return self.done


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EventLoop]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    made = EventLoop(tmp_path / "s")
    yield made
    made.close()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_callback_that_raises_does_not_end_the_loop(server: EventLoop, caplog: pytest.LogCaptureFixture) -> None:
    handler, ran = Idle(), []

    def fail() -> None:
        ran.append("failed")
        raise ZeroDivisionError

    def end() -> None:
        handler.done = True

    server.post(fail)
    server.call_later(0.0, fail)
    server.call_later(0.01, lambda: setattr(handler, "broken", 1))
    server.call_later(0.02, end)
    with caplog.at_level(logging.ERROR, "ckpt"):
        server.run(handler)
    assert ran == ["failed", "failed"]
    assert len([record for record in caplog.records if record.exc_info]) == 3


def test_a_timer_that_sets_itself_anew_at_once_leaves_the_others_their_turn(server: EventLoop) -> None:
    handler, turns = Idle(), [0]

    def again() -> None:
        turns[0] += 1
        assert turns[0] < 10_000, "nothing else has a turn"
        server.call_later(0.0, again)

    def end() -> None:
        handler.done = True

    again()
    server.call_later(0.0, lambda: server.post(end))
    server.run(handler)
    assert turns[0] < 100


def test_what_the_loop_was_at_work_for_is_not_taken_for_standing_still(
    server: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving back 64 GiB takes longer than any other round: nobody has stopped the agent, nor was the machine busy."""
    told: list[float] = []
    now, worked = [1000.0], [7.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "thread_time", lambda: worked[0])

    class Told(Idle):
        def process_suspended(self, for_s: float) -> None:
            told.append(for_s)

    handler = Told()

    def work() -> None:
        now[0] += 60.0
        worked[0] += 55.0
        server.call_later(0.0, stand)

    def stand() -> None:
        now[0] += 40.0
        worked[0] += 1.0
        server.call_later(0.0, lambda: setattr(handler, "done", True))

    server.call_later(0.0, work)
    server.run(handler)
    assert told == [39.0]


def test_a_wait_longer_than_the_kernel_counts_is_none_for_the_loop(server: EventLoop) -> None:
    """What a linger time of months comes to: the loop waits, and wakes when something happens."""
    handler = Idle()

    def end() -> None:
        handler.done = True

    waker = threading.Timer(0.05, lambda: server.post(end))
    waker.start()
    server.run(handler)
    waker.join()


class Answering(Idle):
    """Says something to the trainer that speaks first, which leaves at that moment. Keeps what it hears."""

    def __init__(self, trainer: socket.socket, closes_first: bool) -> None:
        super().__init__()
        self.trainer, self.closes_first = trainer, closes_first
        self.heard: list[str] = []
        self._end_s = time.monotonic() + 60.0

    def message(self, peer: Peer, message: messages.Message) -> None:
        self.heard.append(message.kind)
        if message.kind != "first":
            return
        if not self.closes_first:
            peer.send({"t": "staging-plan"})
        messages.send(self.trainer, {"t": "leave"})
        self.trainer.close()
        if self.closes_first:
            peer.send({"t": "staging-plan"})
            peer.send({"t": "staging-plan"})

    def peer_disconnected(self, peer: Peer) -> None:
        self.done = True

    def settle(self) -> float | None:
        assert time.monotonic() < self._end_s, self.heard
        return time.monotonic() + 0.5


@pytest.mark.parametrize("closes_first", [True, False])
def test_a_rank_that_leaves_and_closes_at_once_is_heard_to_leave(closes_first: bool, server: EventLoop) -> None:
    """It is told something after it has closed, or has not read what it was told before."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trainer:
        trainer.connect(str(server.path))
        messages.send(trainer, {"t": "first"})
        handler = Answering(trainer, closes_first)
        server.run(handler)
    assert handler.heard == ["first", "leave"]
    assert not server.peers


def test_what_waits_for_room_arrives_in_order_with_its_descriptors(server: EventLoop) -> None:
    """Whoever has sent them closes them at once."""
    full, count = threading.Event(), 60

    class Flooding(Idle):
        def message(self, peer: Peer, message: messages.Message) -> None:
            for number in range(count):
                fd = os.memfd_create("some")
                os.write(fd, bytes([number]))
                peer.send({"t": "x", "number": number, "filling": bytes(50_000)}, [fd], [b"blob"])
                os.close(fd)
            assert peer.outbox
            full.set()

        def peer_disconnected(self, peer: Peer) -> None:
            self.done = True

    def listen() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(server.path))
            messages.send(sock, {"t": "first"})
            assert full.wait(60)
            for number in range(count):
                message = messages.receive(sock)
                assert message is not None
                assert (message.fields["number"], message.blobs) == (number, [b"blob"])
                assert os.pread(message.fds[0], 1, 0) == bytes([number])
                message.close()

    with Tasks("trainer", pool_size=1) as tasks:
        listening = tasks.submit(listen)
        server.run(Flooding())
        listening.result(60)


class Lanes:
    """A bulk and a server whose work is done when the test says so."""

    close_arenas = staticmethod(close_arenas)

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.timers: list[Callable[[], None]] = []

    def run(self, lane: Any, work: Callable[[], Any], then: Callable[[Future[Any]], None]) -> None:
        done: Future[Any] = Future()
        done.set_result(None)
        self.work.append(lambda: then(done))

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.timers.append(what)


class Listener:
    """A rank's connection that is always open. What cannot be a message raises as on a real one."""

    is_open = True
    lost = False

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send(self, fields: dict[str, Any]) -> None:
        messages.pack(fields)
        self.heard.append(fields)

    def disconnect(self) -> None:
        self.lost = True


@pytest.fixture
def job() -> Iterator[tuple[Job, Lanes, Listener]]:
    lanes, listener = Lanes(), Listener()
    nothing, notices = cast(Any, SimpleNamespace()), SimpleNamespace(list_notices=tuple)
    work = cast(Any, lanes), cast(Any, lanes), cast(Any, STORE), 0.01, lambda epoch: MemoryUse()
    shown = Accounting(), lambda event: None, dict, nothing
    services = Services(*work, cast(Any, notices), None, nothing, lambda: None, *shown)
    made = Job(services, EPOCH, 1, "x", cast(Any, listener))
    made.context.connections.connect(0, RankConnection(cast(Any, listener), cast(Any, None)))
    yield made, lanes, listener
    made.ranks.drop()


@pytest.mark.parametrize("stall_s", [float("inf"), float("nan"), -1.0, 1e200])
def test_a_stall_that_no_snapshot_can_have_had_is_refused_and_fails_no_job(
    stall_s: float, job: tuple[Job, Lanes, Listener]
) -> None:
    """What is learnt of it would refuse it, once all ranks have staged: then there is nobody to blame."""
    made, _, listener = job
    staged = {"t": "snapshot-staged", "attempt": 1, "version": str(Version(5)), "slot": 0, "division": "x"}
    with pytest.raises(UsageError, match="stall_s"):
        made.message(0, cast(Any, listener), messages.Message({**staged, "stall_s": stall_s}))
    made.message(0, cast(Any, listener), messages.Message({**staged, "stall_s": 0.5}))


def test_no_second_heartbeat_is_put_while_one_is_under_way(job: tuple[Job, Lanes, Listener]) -> None:
    made, lanes, _ = job
    made.commits.begin_epoch(Claim(EPOCH, None))
    lanes.work.clear()  # the claim
    for _ in range(2):
        lanes.timers.pop()()
        assert (len(lanes.work), len(lanes.timers)) == (1, 0)
        lanes.work.pop()()


def test_an_epoch_is_not_closed_beside_its_claim_but_after_it(job: tuple[Job, Lanes, Listener]) -> None:
    made, lanes, _ = job
    made.begin_training(Claim(EPOCH, None), resumed=False)
    (claim,) = lanes.work
    made.commits.close_epoch("left")
    assert lanes.work == [claim], "a claim that lands after it would leave an epoch that nobody closes"
    claim()
    assert len(lanes.work) == 2


def test_a_job_that_has_ended_is_needed_until_its_rule_is_carried_out(job: tuple[Job, Lanes, Listener]) -> None:
    """Else its agent would end before the checkpoints are gone that the last commit lets go, and no other is there."""
    made, lanes, _ = job
    made.context.options = replace(made.context.options, keep=Keep(last=2))
    made.commits.prune()
    made.scheduler.rank_states[0].presence = Presence.LEFT
    made.scheduler.leave_requests.record_close()
    assert made.is_needed
    lanes.work.pop()()
    assert not made.is_needed


def test_a_timer_of_a_job_that_raises_fails_that_job_once(job: tuple[Job, Lanes, Listener]) -> None:
    made, lanes, listener = job
    made.context.call_later(0.0, lambda: 1 // 0)
    for _ in range(2):
        lanes.timers[0]()
    assert "ZeroDivisionError" in made.context.internal_error
    assert made.settle() is None
    assert [event["name"] for event in listener.heard] == ["job.failed"]
    assert listener.lost


def test_what_the_store_has_is_shown_though_it_is_found_before_the_account_hears_of_the_job(
    job: tuple[Job, Lanes, Listener],
) -> None:
    made, _, _ = job
    made.commits.report_newest_stored(Claim(EPOCH, None))
    account = made.context.services.account
    account.record_level("store", EPOCH, Version(5))
    assert account.facts(1.0)["safe"]["store"]["step"] == 5


def test_a_large_job_collects_what_it_hears_before_it_decides_again(
    job: tuple[Job, Lanes, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = job
    decided: list[float] = []
    monkeypatch.setattr(made, "_decide", decided.append)
    made.collect_s = 60.0
    made.settle()
    assert made.settle() == decided[0] + 60.0
    made.collect_s = 0.0
    made._decide_next_s = 0.0
    made.settle()
    made.settle()
    assert len(decided) == 3


UNSENDABLE: dict[str, Any] = {
    "large": {"names": ["x" * 2000] * 100},
    "number": {"bytes": 1 << 70},
    "surrogate": {"name": "\udc80"},
}


@pytest.mark.parametrize("data", UNSENDABLE.values(), ids=UNSENDABLE.keys())
def test_an_event_that_no_message_holds_is_told_without_its_data(data: Any, job: tuple[Job, Lanes, Listener]) -> None:
    made, _, listener = job
    made.context.emit("some.event", "what happened to \udc80", True, data)
    assert [(event["name"], event["data"]) for event in listener.heard] == [("some.event", {})]


def test_a_mistake_in_handing_out_frames_is_told_to_the_ranks_that_wait_for_them() -> None:
    lanes, heard = Lanes(), list[dict[str, Any]]()

    class Deaf:
        def send(self, fields: dict[str, Any], fds: Any = ()) -> None:
            if fields["t"] == "frame-region":
                raise OSError("no more descriptors")
            heard.append(fields)

    frames = np.zeros(1, FRAME)
    manifest = Manifest((), (), frames, np.zeros(0, FRAME), ("rank=0",))
    arena = Arena.create(4096)
    memory = SimpleNamespace(ranks=[0], offsets=[0], arenas={0: arena})
    services = cast(Any, lanes), cast(Any, lanes)
    restore = open_session(Identity(EPOCH, Version(5)), manifest, 2, cast(Any, memory), None, *services)
    with closing(arena), closing(restore):
        restore.request(cast(Any, Deaf()), [0])
        lanes.timers[0]()
        assert [(each["t"], each["ok"]) for each in heard] == [("fetch-ended", False)]
        assert "no more descriptors" in heard[0]["message"]
