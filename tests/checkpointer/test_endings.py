"""How a process ends that has not much time, or none: what it had saved is there, and nothing waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ckpt
from ckpt.ipc import client
from ckpt.settings import read_settings
from ckpt.storage import canonical
from tests.checkpointer.endings import PAD_BYTES
from tests.checkpointer.loops import make, wait_agent_gone
from tests.checkpointer.runs import agent_status, kill_agent
from tests.checkpointer.scripts import Script, torchrun
from tests.threads import running


def start(tmp_path: Path, what: str) -> Script:
    command = [sys.executable, "-m", "tests.checkpointer.endings", what, str(tmp_path / "run")]
    return Script(command, tmp_path / "log", {"CKPT_LINGER_S": "0"})


def come_back(url: Path, exit_s: float = 600.0) -> ckpt.Checkpointer:
    state = {**make(seed=3).state, "pad": torch.zeros(PAD_BYTES, dtype=torch.uint8)}
    ck = ckpt.Checkpointer(url, state, limits=ckpt.Limits(exit_s=exit_s))
    with contextlib.suppress(ckpt.CommitFailed), ck:
        pass
    return ck


def test_a_job_whose_forked_worker_outlives_it_is_seen_to_be_dead_and_its_save_committed(tmp_path: Path) -> None:
    script, worker = start(tmp_path, "forked"), 0
    try:
        worker = int(script.wait_for(lambda line: "worker" in line)["worker"])
        assert script.process.wait(30) == -signal.SIGKILL
        wait_agent_gone(tmp_path / "run", 60)
        os.kill(worker, 0)
    finally:
        if worker:
            os.kill(worker, signal.SIGKILL)
    restored = come_back(tmp_path / "run").restored
    assert (restored.step, restored.level) == (2, "store")


def test_who_presses_control_c_while_the_last_save_is_on_its_way_is_let_go_and_it_is_not_lost(tmp_path: Path) -> None:
    script = start(tmp_path, "waiting")
    script.wait_for(lambda line: "ended" in line)
    pressed = 0
    while script.process.poll() is None and pressed < 10:
        script.process.send_signal(signal.SIGINT)
        pressed += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            script.process.wait(2)
    assert script.process.wait(30) != 0
    text = script.log.read_text()
    assert "KeyboardInterrupt" in text
    restored = come_back(tmp_path / "run", exit_s=1.0).restored  # what it finds in memory only is saved at its end, too
    assert (restored.step, restored.level) == (2, "local")
    kill_agent(tmp_path / "run")


def is_all_gone(url: Path) -> bool:
    wait_agent_gone(url)
    return not running() and not _global_optimizer_pre_hooks


def test_an_interrupt_at_the_end_of_entering_leaves_nothing_behind(tmp_path: Path) -> None:
    told: list[str] = []

    def stop(event: ckpt.Event) -> None:
        told.append(event.name)
        if event.name == "restored":
            raise KeyboardInterrupt

    with ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}) as ck:
        ck.step()
    assert is_all_gone(tmp_path)
    with pytest.raises(KeyboardInterrupt), ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}, sinks=(stop,)):
        pass
    assert "restored" in told
    assert is_all_gone(tmp_path)
    with ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}) as ck:
        assert ck.restored.step == 1


@pytest.mark.parametrize("fails", [False, True])
def test_an_agent_does_not_wait_for_who_was_interrupted_at_the_end_of_the_block(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}) as ck:  # noqa: PT012
        ck.step()
        ck.save().wait("store", timeout_s=60)
        ck.step()
        saver = ck._parts.saver

        def interrupted(timeout_s: float | None = None) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(saver, "wait_for_copies", interrupted)
        if fails:
            raise ZeroDivisionError
    assert is_all_gone(tmp_path)


@pytest.mark.parametrize("where", ["wait_for_copies", "fill_report", "_tasks.submit"])
def test_an_interrupt_while_the_block_is_closed_does_not_keep_it_open(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}) as ck:  # noqa: PT012
        ck.step()
        ck.save().wait("store", timeout_s=60)
        leave, saver = ck._parts.shutdown.leave, ck._parts.saver
        owner: Any = saver.snapshotter._tasks if where == "_tasks.submit" else saver

        def interrupted(*args: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        def leave_and_break(outcome: str, until_s: float) -> ckpt.CkptError | None:
            monkeypatch.setattr(owner, where.rpartition(".")[2], interrupted)
            return leave(outcome, until_s)

        monkeypatch.setattr(ck._parts.shutdown, "leave", leave_and_break)
    assert is_all_gone(tmp_path)
    assert not saver.snapshotter.bindings._bindings_by_slot, "views of arenas that are gone"
    with ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}) as ck:
        assert ck.restored.step == 1


def interrupt_at(name: str) -> Callable[[FrameType, str, object], None]:
    """For sys.setprofile: Ctrl-C where a function of that name begins, where Python looks for signals, once."""

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_qualname == name and "/ckpt/" in frame.f_code.co_filename:
            sys.setprofile(None)
            raise KeyboardInterrupt

    return look


def held() -> list[str]:
    """Memory that is shared with an agent."""
    return [where for each in Path("/proc/self/fd").iterdir() if "ckpt-" in (where := os.path.realpath(each))]


LEAVING = [
    "run_cleanups",
    "Checkpointer._mark_exited",
    "Shutdown.end_threads",
    "StepTracking.close",
    "StepHook.remove",
    "Saver.close",
]
LEAVING += ["Saver.wait_for_copies", "Snapshotter.close", "Link.close", "Link._drop_connection"]
LEAVING += ["Arena.close", "ControlPage.close", "Tasks.close", "Levels.fail_all", "Shutdown.close"]


@pytest.mark.parametrize("name", LEAVING)
def test_an_interrupt_before_the_first_line_of_what_closes_the_block_leaves_nothing_open(
    name: str, tmp_path: Path
) -> None:
    ck = ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)})
    ck.__enter__()
    ck.step()
    ck.save().wait("store", timeout_s=60)
    sys.setprofile(interrupt_at(name))
    try:
        with pytest.raises(KeyboardInterrupt):
            ck.__exit__(None, None, None)
    finally:
        sys.setprofile(None)
    assert is_all_gone(tmp_path)
    assert not held()
    assert ck._entered_parts is None


ENTERING = ["Snapshotter.__init__", "Saver.__init__", "Saver.begin", "Tasks.start", "Link.connect", "Link.join"]
ENTERING += [
    "StepTracking.install_hooks",
    "StepTracking.read_scaler_states",
    "Shutdown.start_listening",
    "Signals.__enter__",
    "is_caught",
    "Levels.begin",
]


@pytest.mark.parametrize("name", ENTERING)
def test_an_interrupt_while_the_block_is_entered_leaves_nothing_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    sys.setprofile(interrupt_at(name))
    try:
        with pytest.raises(KeyboardInterrupt):
            ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}).__enter__()
    finally:
        sys.setprofile(None)
    assert is_all_gone(tmp_path)
    assert not held()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)] == handlers


def test_an_agent_is_not_bound_to_the_processor_that_its_trainer_is_bound_to(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one processor")
    os.sched_setaffinity(0, {min(before)})
    try:
        with ckpt.Checkpointer(tmp_path / "run", {"x": torch.zeros(2)}):
            assert os.sched_getaffinity(int(agent_status(tmp_path / "run")["pid"])) >= before
    finally:
        os.sched_setaffinity(0, before)


def test_a_folder_for_sockets_with_too_long_a_path_is_an_error_that_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(ckpt.AgentError, match="longer than 107 bytes; set CKPT_RUNTIME_DIR"):
        ckpt.Checkpointer(tmp_path / "run", {"x": torch.zeros(2)}).__enter__()


def test_a_folder_for_sockets_in_which_nothing_can_be_made_is_an_error_that_says_what_to_set(
    tmp_path: Path, runtime_dir: Path
) -> None:
    client.make_agent_paths(
        canonical(str(tmp_path / "run")), read_settings()
    ).start_lock.mkdir()  # for root no folder is read-only
    with pytest.raises(ckpt.AgentError, match=r"folder for ckpt's sockets: .*; set CKPT_RUNTIME_DIR"):
        ckpt.Checkpointer(tmp_path / "run", {"x": torch.zeros(2)}).__enter__()


@pytest.mark.torchrun
@pytest.mark.parametrize("where", [[], ["apart"]], ids=["one node", "two nodes"])
def test_a_rank_whose_agent_dies_with_the_word_that_its_last_step_is_stored_finds_that_out_by_itself(
    where: list[str], tmp_path: Path, runtime_dir: Path
) -> None:
    script = torchrun(tmp_path / "log", 2, "tests.checkpointer.unheard", str(runtime_dir), *where)
    last = script.end()[-1]
    assert (last["rank"], last["committed"]) == (1, 2)
    assert last["found_by"] == ["ckpt-trainer-reconnect"], "it has looked, and waited for no other's word"
