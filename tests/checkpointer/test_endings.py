"""How a process ends that has not much time, or none: what it had saved is there, and nothing waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ckpt
from ckpt.ipc import client
from ckpt.settings import read_settings
from ckpt.storage import canonical
from tests.checkpointer.loops import make, wait_agent_gone
from tests.checkpointer.notices import SELDOM, at_step
from tests.checkpointer.runs import agent_status, kill_agent, run
from tests.checkpointer.scripts import torchrun, train
from tests.threads import running


def test_a_job_whose_forked_worker_outlives_it_is_seen_to_be_dead_and_its_save_committed(tmp_path: Path) -> None:
    script = train(tmp_path / "log", tmp_path / "run", 9, *SELDOM, "--save-at", "2", "--fork-at", "2")
    worker = int(script.wait_for(lambda line: "worker" in line)["worker"])
    try:
        assert script.process.wait(30) == -signal.SIGKILL
        wait_agent_gone(tmp_path / "run", 60)
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)
    again = run(tmp_path / "run", 2)
    assert (again.from_step, again.ck.restored.level) == (2, "store")


def test_who_presses_control_c_while_the_last_save_is_on_its_way_is_let_go_and_it_is_not_lost(tmp_path: Path) -> None:
    """A MiB that no codec shrinks takes five minutes."""
    script = train(tmp_path / "log", tmp_path / "run", 2, *SELDOM, "--mib", "1", "--bandwidth", str((1 << 20) / 300))
    at_step(script, 2)
    while agent_status(tmp_path / "run")["account"]["safe"].get("local", {"step": 0})["step"] < 2:
        time.sleep(0.05)  # then nothing is left of its block but the wait
    pressed = 0
    while script.process.poll() is None and pressed < 10:
        script.process.send_signal(signal.SIGINT)
        pressed += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            script.process.wait(2)
    assert script.process.wait(30) != 0
    assert "KeyboardInterrupt" in script.log.read_text()
    state = {**make(seed=3).state, "more": torch.zeros(1 << 18, dtype=torch.int32)}
    ck = ckpt.Checkpointer(tmp_path / "run", state, limits=ckpt.Limits(exit_s=1.0))
    with contextlib.suppress(ckpt.CommitFailed), ck:  # what it finds in memory only is saved at its end, too
        pass
    assert (ck.restored.step, ck.restored.level) == (2, "local")
    kill_agent(tmp_path / "run")


def is_all_gone(url: Path) -> bool:
    wait_agent_gone(url)
    return not running() and not _global_optimizer_pre_hooks


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


ENTERING = (
    *("Snapshotter.__init__", "Saver.__init__", "Saver.begin", "Tasks.start", "AgentConnection.connect", "Link.join"),
    *("StepTracking.install_hooks", "StepTracking.read_scaler_states", "Shutdown.start_listening"),
    *("Signals.__enter__", "is_caught", "Levels.begin"),
)
LEAVING = (
    *("run_cleanups", "Checkpointer._mark_exited", "Shutdown.end_threads", "StepTracking.close"),
    *("Saver.close", "Saver.wait_for_copies", "Snapshotter.close", "Link.close", "AgentConnection.drop"),
    *("Arena.close", "ControlPage.close", "Tasks.close", "Levels.fail_all", "Shutdown.close"),
)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize("name", [*ENTERING, *LEAVING])
def test_an_interrupt_before_the_first_line_of_what_enters_or_leaves_the_block_leaves_nothing_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    handlers = [signal.getsignal(each) for each in SIGNALS]
    ck = ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)})
    if name in LEAVING:
        ck.__enter__()
        ck.step()
        ck.save().wait("store", timeout_s=60)
    sys.setprofile(interrupt_at(name))
    try:
        with pytest.raises(KeyboardInterrupt):
            ck.__exit__(None, None, None) if name in LEAVING else ck.__enter__()
    finally:
        sys.setprofile(None)
    assert is_all_gone(tmp_path)
    assert not held()
    assert ck._entered_block is None
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


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


@pytest.mark.parametrize("wrong", ["too long", "in the way"])
def test_a_folder_for_sockets_that_is_of_no_use_is_an_error_that_says_what_to_set(
    wrong: str, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong == "too long":
        monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    else:  # for root no folder is read-only
        client.make_agent_paths(canonical(str(tmp_path / "run")), read_settings()).start_lock.mkdir()
    with pytest.raises(ckpt.AgentError, match=r"longer than 107 bytes|folder for ckpt's sockets: ") as raised:
        ckpt.Checkpointer(tmp_path / "run", {"x": torch.zeros(2)}).__enter__()
    assert "; set CKPT_RUNTIME_DIR" in str(raised.value)


@pytest.mark.torchrun
@pytest.mark.parametrize("where", [[], ["apart"]], ids=["one node", "two nodes"])
def test_a_rank_whose_agent_dies_with_the_word_that_its_last_step_is_stored_finds_that_out_by_itself(
    where: list[str], tmp_path: Path, runtime_dir: Path
) -> None:
    script = torchrun(tmp_path / "log", 2, "tests.checkpointer.unheard", str(runtime_dir), *where)
    last = script.end()[-1]
    assert (last["rank"], last["committed"]) == (1, 2)
    assert last["found_by"] == ["ckpt-trainer-reconnect"], "it has looked, and waited for no other's word"
