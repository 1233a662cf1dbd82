"""The context manager in one process: what it saves comes back bit for bit, and misuse is named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.settings import read_settings
from tests.checkpointer.loops import losses, make, wait_agent_gone
from tests.checkpointer.runs import Seen, agent_status, goes_on, kill_agent, restore, run, saving


def test_what_lies_in_a_folder_is_for_whom_the_users_umask_says(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        run(tmp_path / "run", 2)
    finally:
        os.umask(former)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (tmp_path / "run").rglob("*")}
    assert modes == {(True, 0o750), (False, 0o640)}


def test_a_run_that_ended_goes_on_where_it_ended_and_says_where_nothing_is_left_to_train(tmp_path: Path) -> None:
    first = run(tmp_path, 5, make())
    assert (first.from_step, first.ck.restored.source) == (0, "nothing")
    second = goes_on(tmp_path, first.losses, 7)
    assert second.ck.restored.level == "store"
    before = sorted(p.name for p in (tmp_path / "commits").iterdir())
    complete = run(tmp_path, 12)
    (told,) = complete.seen.named("run.finished")
    assert told.loud
    assert "step 12" in told.message
    assert (complete.from_step, complete.losses) == (12, [])
    assert sorted(p.name for p in (tmp_path / "commits").iterdir()) == before
    seen = Seen()
    with ckpt.Checkpointer(tmp_path, make().state, sinks=(seen,)) as ck:
        for _ in ck.steps(15):
            break  # left in its first step, which is no finished run
    assert ck.restored.step == 12
    assert first.seen.named("run.finished") == second.seen.named("run.finished") == seen.named("run.finished") == []


@pytest.mark.parametrize(("linger", "level"), [("0", "store"), ("60", "local")])
def test_an_exception_saves_no_half_step_and_the_next_start_goes_on(
    linger: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory, where what starts it again is not far: as of a lost connection to another rank."""
    monkeypatch.setenv("CKPT_LINGER_S", linger)
    job, found = make(), []
    with pytest.raises(ZeroDivisionError), ckpt.Checkpointer(tmp_path, job.state) as ck:  # noqa: PT012
        for step in ck.steps(10):
            if step == 7:
                raise ZeroDivisionError
            found.append(job.train(step))
            saving(5)(ck, step)
    if linger == "0":
        wait_agent_gone(tmp_path)
    monkeypatch.setenv("CKPT_LINGER_S", "0")
    assert goes_on(tmp_path, found[:5], 7).ck.restored.level == level


def test_two_checkpointers_in_one_process(tmp_path: Path) -> None:
    one, two = make(0), make(1)
    with (
        ckpt.Checkpointer(tmp_path / "a", one.state, generators=False) as a,
        ckpt.Checkpointer(tmp_path / "b", two.state, generators=False) as b,
    ):
        for step in a.steps(3):
            one.train(step)
            two.train(step)
            b.step()
    for name, job in (("a", one), ("b", two)):
        fresh = make(7)
        with ckpt.Checkpointer(tmp_path / name, fresh.state, generators=False) as ck:
            assert ck.restored.step == 3
            assert all(map(torch.equal, fresh.model.parameters(), job.model.parameters()))


def test_an_agent_that_is_killed_is_started_again_and_training_goes_on(tmp_path: Path) -> None:
    job, found = make(), []
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=5)) as ck:
        for step in ck.steps(10_000):
            found.append(job.train(step))
            time.sleep(0.01)
            if step == 40:
                os.kill(agent_status(tmp_path)["pid"], signal.SIGKILL)
                before = ck.receipt["snapshots"]
            if step > 40 and ck.receipt["snapshots"] > before + 1:
                break
    assert ck.receipt["agent_restarts"] == 1
    assert found == losses(step)
    wait_agent_gone(tmp_path)
    assert run(tmp_path, step).from_step == step


def test_an_agent_that_is_started_again_sees_the_step_of_a_rank_that_waits_in_it(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=5)) as ck:
        for step in ck.steps(3):
            job.train(step)
        ck.poll()
        link = ck._block.saver.link
        before = link.view.page
        kill_agent(tmp_path)
        deadline = time.monotonic() + 60
        while (page := link.view.page) in (None, before) or not page.entered_step(0):
            assert time.monotonic() < deadline, "the new agent does not know which step it is"
            time.sleep(0.01)
        assert (page.entered_step(0), page.poll_count(0)) == (4, 1)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Neither a file; nor a thread, a process or a descriptor, which tests/conftest.py looks for behind each test."""
    assert run(tmp_path / "run", 2).ck.receipt["committed_step"] == 2
    assert list(read_settings().runtime_dir.iterdir()) == []


def test_use_outside_the_block_is_named(tmp_path: Path) -> None:
    ck = ckpt.Checkpointer(tmp_path, make().state)
    for use in (ck.step, lambda: next(ck.steps(3))):
        with pytest.raises(ckpt.UsageError, match="outside"):
            use()


def test_a_snapshot_that_is_due_in_a_long_evaluation_is_taken_at_a_poll(tmp_path: Path) -> None:
    job, seen = make(), Seen()

    def committed() -> str:
        done = [str(event.data["identity"]) for event in seen.named("commit.done")]
        return next((version for version in done if not version.endswith(".0000")), "")

    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(seconds=0.2), sinks=(seen,)) as ck:
        for step in ck.steps(2):
            job.train(step)
        polls = 0
        while not committed():
            assert polls < 100_000
            time.sleep(0.001)
            torch.rand(1)
            ck.poll()
            polls += 1
        expected = [p.detach().clone() for p in job.model.parameters()]
    again = make(seed=5)
    ck = restore(tmp_path, again.state)
    assert ck.restored.step == 2
    assert all(map(torch.equal, again.model.parameters(), expected))
    assert committed().split("-")[-1].startswith("000000000002.")


def test_no_poll_takes_a_state_between_an_update_and_its_boundary(tmp_path: Path) -> None:
    job, seen = make(), Seen()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(seconds=0.05), sinks=(seen,)) as ck:
        job.train(1)
        until = time.monotonic() + 1.0
        while time.monotonic() < until or not ck.receipt["missed"]:
            ck.poll()
            time.sleep(0.001)
        assert not seen.named("commit.done")
        assert ck.receipt["snapshots"] == 0
        ck.step()


def test_a_step_that_came_from_memory_and_is_not_in_the_store_is_saved_on_leaving_though_nothing_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_RETRY_S", "0.1")
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    url, job = tmp_path / "run", make()
    url.mkdir()
    (url / "data").write_text("a file where a folder should be")
    with pytest.raises(ZeroDivisionError), ckpt.Checkpointer(url, job.state) as ck:  # noqa: PT012
        for step in ck.steps(10):
            job.train(step)
            if step == 3:
                ck.step()
                ck.save().wait("local")
                raise ZeroDivisionError
    (url / "data").unlink()
    again = run(url, 3)
    assert (again.from_step, again.ck.restored.level, again.losses) == (3, "local", [])
    assert again.ck.receipt["committed_step"] == 3
    assert [int(p.name.split("-")[2].split(".")[0]) for p in (url / "commits").iterdir()] == [3]


def test_what_is_restored_under_inference_mode_can_be_trained(tmp_path: Path) -> None:
    wanted = losses(6)
    run(tmp_path, 3, make(), more={"seen": torch.zeros(2)})
    job = make(seed=1)
    ck = ckpt.Checkpointer(tmp_path, {**job.state, "seen": None}, strict=False)
    with torch.inference_mode(), ck, torch.inference_mode(False):
        assert [job.train(step) for step in ck.steps(6)] == wanted[3:]
        ck.state["seen"] += 1
