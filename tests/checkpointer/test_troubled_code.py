"""What users' own code does at a bad moment, or on another thread or process: said clearly, and nothing is lost."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ckpt
from ckpt.ipc import messages
from ckpt.ipc.arena import Arena
from ckpt.trainer.link.link import Link
from tests.checkpointer.loops import losses, make
from tests.checkpointer.runs import Seen, kill_agent, run, saving

EVERY = ckpt.Every(steps=1)


class Trouble:
    """An object of the user's; `at_save` runs whenever its state is read."""

    def __init__(self) -> None:
        self.at_save: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, int]:
        self.at_save()
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


# ------------------------------------------------------------------------------------------------- troubled code


def test_an_object_that_fails_when_it_is_read_does_not_fail_training(tmp_path: Path) -> None:
    trouble = Trouble()

    def fail() -> None:
        raise RuntimeError("not now")

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        ck.step()
        trouble.at_save = fail if step in (3, 4) else lambda: None
        handle = ck.save()
        if step in (3, 4):
            with pytest.raises(ckpt.SaveFailed, match="not now"):
                handle.wait(timeout_s=60)

    ended = run(tmp_path, 6, make(), at, {"mine": trouble}, policy=EVERY)
    assert ended.losses == losses(6)
    assert any("not now" in event.message for event in ended.seen.events)
    assert ended.ck.receipt["committed_step"] == 6


def test_a_sink_that_fails_is_not_called_again_and_harms_nothing(tmp_path: Path) -> None:
    called: list[int] = []

    def sink(event: ckpt.Event) -> None:
        called.append(threading.get_ident())
        raise RuntimeError("sink")

    ended = run(tmp_path, 3, make(), sinks=(sink,), policy=EVERY)
    # Two threads may have an event for it at the same moment.
    assert 0 < len(called) == len(set(called))
    assert ended.ck.receipt["committed_step"] == 3


def test_a_sink_that_exits_on_a_thread_of_ours_costs_itself_alone(tmp_path: Path) -> None:
    """On such a thread sys.exit() ends only that thread: the one that hears the agent, or that finishes snapshots."""
    called: list[str] = []

    def sink(event: ckpt.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            called.append(event.name)
            sys.exit(f"{event.name} was not to happen")

    ended = run(tmp_path, 3, make(), saving(1, 2, 3), sinks=(sink,), policy=EVERY)
    assert len(called) == 1
    assert not ended.seen.named("agent.lost")
    assert ended.ck.receipt["committed_step"] == 3


@pytest.mark.parametrize("granted", [False, True])
def test_an_interrupt_between_what_is_asked_of_the_agent_and_the_snapshot_makes_nobody_wait(
    granted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, seen = Link.request, Seen()

    def interrupted(link: Link, kind: str, fields: dict[str, Any], *rest: Any) -> None:
        monkeypatch.undo()
        request(link, kind, fields, *rest) if granted else link.connection.start_request(kind, fields)
        raise KeyboardInterrupt

    with ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}, policy=ckpt.Every(steps=10**6), sinks=(seen,)) as ck:
        ck.step()
        ck.save().wait()
        ck.step()
        monkeypatch.setattr(Link, "request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ck.save()
        ck.step()
        ck.save().wait()
    assert ck.receipt["committed_step"] == 3
    given_up = [event.message for event in seen.named("save.abandoned")]
    assert all("rank 0 missed it (interrupted)" in message for message in given_up), "the agent was not told"


class Alarm(Exception):
    """What a watchdog's handler raises."""


def test_what_a_signals_handler_raises_in_the_midst_of_a_save_is_what_the_loop_gets(tmp_path: Path) -> None:
    job, trouble, seen = make(), Trouble(), Seen()

    def sink(event: ckpt.Event) -> None:
        seen(event)
        if event.name == "save.failed":
            signal.raise_signal(signal.SIGALRM)

    def ring(number: int, frame: object) -> None:
        raise Alarm

    def fail() -> None:
        raise ValueError("of the object's own")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with ckpt.Checkpointer(
            tmp_path, {**job.state, "mine": trouble}, policy=ckpt.Every(steps=10**6), sinks=(sink,)
        ) as ck:
            for step in ck.steps(6):
                job.train(step)
                trouble.at_save = lambda: signal.raise_signal(signal.SIGALRM)
                if step == 3:
                    with pytest.raises(Alarm):  # noqa: PT012
                        ck.step()
                        ck.save()
                trouble.at_save = fail
                if step == 5:
                    ck.step()
                    with pytest.raises(Alarm):  # in the sink
                        ck.save()
                trouble.at_save = lambda: None
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ck.receipt["committed_step"] == 6
    assert seen.named("receipt"), "the sink stays"


def test_an_agent_that_dies_while_the_state_is_read_costs_that_snapshot_and_no_more(tmp_path: Path) -> None:
    job, trouble, seen, found = make(), Trouble(), Seen(), []

    def kill() -> None:
        trouble.at_save = lambda: None
        kill_agent(tmp_path)
        seen.wait("agent.lost")

    with ckpt.Checkpointer(tmp_path, {**job.state, "mine": trouble}, policy=EVERY, sinks=(seen,)) as ck:
        for step in ck.steps(4):
            found.append(job.train(step))
            ck.step()
        ck.wait("local")
        trouble.at_save = kill
        for step in ck.steps(12):
            found.append(job.train(step))
            ck.step()
            time.sleep(0.05)
        trouble.at_save = kill
        handle = ck.save()
        with pytest.raises(ckpt.SaveFailed):
            handle.wait("store")  # without a time-out: it has to be told
    assert found == losses(12)
    assert ck.receipt["committed_step"] == 12
    assert ck.receipt["agent_restarts"] >= 1


# ------------------------------------------------------------------------------------------------- other processes


def arenas() -> list[str]:
    """What this process has open or mapped of them."""
    open_now = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [each for each in (*map(os.path.realpath, open_now), *mapped) if "ckpt-arena" in each]


def test_a_forked_child_cannot_touch_what_its_parent_saves(tmp_path: Path) -> None:
    """The child keeps no arena of the parent in memory: a loader's worker lives as long as training, and arenas that
    became too small go before that. An arena that another thread has just received, or is about to close, is not kept
    either."""
    job, (read, write) = make(), os.pipe()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def be_child() -> None:
        said = [arenas(), [each for each in map(str, _global_optimizer_pre_hooks.values()) if "Snapshotter" in each]]
        made.view[:8] = b"nobody's"
        for use in (ck.__enter__, ck.step):
            try:
                use()
            except ckpt.UsageError as exc:
                said.append([str(exc)])
        ck.__exit__(None, None, None)
        os.write(write, json.dumps(said).encode())

    with ckpt.Checkpointer(tmp_path, job.state, policy=EVERY) as ck, here, there:
        for step in ck.steps(6):
            job.train(step)
            if step == 3:
                ck.step()
                ck.save().wait("store", timeout_s=60)
                assert arenas()
                made = Arena.create(1 << 20)
                messages.send(here, {"t": "grant-arena"}, [made.fd])
                received = messages.receive(there)
                assert received is not None
                pid = os.fork()
                if pid == 0:
                    try:
                        be_child()
                    finally:
                        os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
                assert bytes(made.view[:8]) == bytes(8)
                received.close()
                made.close()
    held, hooks, entered, stepped = json.loads(os.read(read, 1 << 16))
    os.close(read)
    os.close(write)
    assert held == []
    assert hooks == [], "no optimizer of the child waits for a copy of the parent"
    assert entered
    assert "leave saving to the parent" in stepped[0]
    assert ck.receipt["committed_step"] == 6


def test_a_checkpointer_that_is_sent_to_another_process_is_named(tmp_path: Path) -> None:
    for send in (pickle.dumps, copy.deepcopy):
        with pytest.raises(ckpt.UsageError, match="do not keep it in a loader"):
            send(ckpt.Checkpointer(tmp_path, {"x": 1}))


UNGUARDED = """
import multiprocessing, sys
import ckpt

with ckpt.Checkpointer(sys.argv[1], {"n": 0}, policy=ckpt.Every(steps=10**6)) as ck:
    for step in ck.steps(1):
        helper = multiprocessing.get_context("spawn").Process(target=print)
        helper.start()
        helper.join()
"""


def test_a_script_that_a_spawned_helper_imports_does_not_take_the_place_of_its_own_job(tmp_path: Path) -> None:
    """Such a helper imports the script before it does its work: without a guard it would train, too."""
    (tmp_path / "train.py").write_text(UNGUARDED)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": os.fspath(Path(ckpt.__file__).parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr


def test_whatever_counts_is_a_number_of_steps_and_a_truth_value_is_none(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck:
        for wrong in (True, 2.0, np.bool_(True), "1", torch.tensor([1, 1])):
            with pytest.raises(ckpt.UsageError, match=r"ck\.steps\(.*: a whole number of steps"):
                next(ck.steps(wrong))  # type: ignore[arg-type]
            with pytest.raises(ckpt.UsageError, match=r"ck\.step\("):
                ck.step(wrong)  # type: ignore[arg-type]
        assert list(ck.steps(np.int64(3))) == [1, 2, 3]
        ck.step(np.int32(4))
        ck.step(torch.tensor(5))
        with pytest.raises(ckpt.UsageError, match="the next is 6"):
            ck.step(9)


def test_a_handle_says_what_was_last_known_of_it_after_the_block(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck:
        ck.step()
        handle = ck.save()
        handle.wait("store", timeout_s=60)
        last = ck.save()
    handle.wait()
    last.wait("store")
    assert (handle.level, handle.step, handle.version.sub) == ("store", 1, 1)
    assert repr(handle) == "<ckpt.Handle step 1 level store>"


def test_a_time_to_wait_is_a_number_be_it_endless(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck:
        ck.step()
        handle = ck.save()
        handle.wait(timeout_s=float("inf"))
        for wait in (handle.wait, ck.wait):
            with pytest.raises(ckpt.UsageError, match=r"timeout_s='1': a number of seconds, or None"):
                wait(timeout_s="1")
            wait(timeout_s=np.float32(60))


def test_who_waits_on_another_thread_for_what_is_not_known_at_the_end_of_the_block_is_told(tmp_path: Path) -> None:
    pad = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    limits = ckpt.Limits(bandwidth=1000, exit_s=1)
    with ThreadPoolExecutor() as other:
        with pytest.raises(ZeroDivisionError), ckpt.Checkpointer(tmp_path, {"x": pad}, limits=limits) as ck:  # noqa: PT012
            ck.step()
            handle = ck.save()
            waiting = other.submit(handle.wait)
            raise ZeroDivisionError
        with pytest.raises(ckpt.SaveFailed, match="the block was left before that was known"):
            waiting.result(20)
    kill_agent(tmp_path)
    with pytest.raises(ckpt.SaveFailed, match="the block was left"):
        handle.wait()


def test_another_thread_cannot_end_a_step(tmp_path: Path) -> None:
    refused = pytest.raises(ckpt.UsageError, match="the thread that entered it")
    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck, ThreadPoolExecutor() as other, refused:
        other.submit(ck.step).result()
