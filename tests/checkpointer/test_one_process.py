"""The context manager in one process: what it saves comes back bit for bit, and misuse is named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.ipc import client
from ckpt.settings import read_settings
from ckpt.trainer.loop.saver import Saver
from ckpt.trainer.snapshot.snapshot import Snapshotter
from tests.checkpointer.loops import Job, losses, make, wait_agent_gone
from tests.checkpointer.runs import Seen


def agent_pid(url: str) -> int | None:
    sock = client.connect_nowait(client.make_agent_paths(ckpt.storage.canonical(url), read_settings()))
    if sock is None:
        return None
    from ckpt.threads import Tasks

    with Tasks("probe") as tasks:
        connection = client.Connection(sock, tasks, lambda message: message.close(), lambda why: None, role="tool")
        pid = connection.agent_pid
        connection.close()
    return pid


def wait_gone(pid: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z":
        assert time.monotonic() < deadline, f"agent {pid} is still there"
        time.sleep(0.02)


def run(url: Path, steps: int, job: Job | None = None, **options: Any) -> tuple[list[float], ckpt.Checkpointer]:
    job = job or make()
    found = []
    with ckpt.Checkpointer(url, job.state, **options) as ck:
        for step in ck.steps(steps):
            found.append(job.train(step))
    wait_agent_gone(url)
    return found, ck


def test_what_lies_in_a_folder_is_for_whom_the_users_umask_says(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        run(tmp_path / "run", 2)
    finally:
        os.umask(former)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (tmp_path / "run").rglob("*")}
    assert modes == {(True, 0o750), (False, 0o640)}


def test_a_run_that_ended_goes_on_where_it_ended(tmp_path: Path) -> None:
    first, ck = run(tmp_path, 5)
    assert ck.restored.step == 0
    assert ck.restored.source == "nothing"
    second, ck = run(tmp_path, 12, make(seed=1))
    assert ck.restored.step == 5
    assert ck.restored.level == "store"
    assert first + second == losses(12)


def test_a_run_that_is_complete_trains_nothing_saves_nothing_and_says_so(tmp_path: Path) -> None:
    seen = Seen()
    run(tmp_path, 3, sinks=(seen,))
    assert seen.named("run.finished") == []
    before = sorted(p.name for p in (tmp_path / "commits").iterdir())
    found, ck = run(tmp_path, 3, make(seed=1), sinks=(seen,))
    (told,) = seen.named("run.finished")
    assert told.loud
    assert "step 3" in told.message
    assert found == []
    assert ck.restored.step == 3
    assert sorted(p.name for p in (tmp_path / "commits").iterdir()) == before


def test_a_loop_that_is_left_in_its_first_step_is_no_finished_run(tmp_path: Path) -> None:
    run(tmp_path, 3)
    seen, job = Seen(), make()
    with ckpt.Checkpointer(tmp_path, job.state, sinks=(seen,)) as ck:
        for _ in ck.steps(5):
            break
    assert ck.restored.step == 3
    assert seen.named("run.finished") == []


def test_appointed_snapshots_are_taken_at_the_multiples(tmp_path: Path) -> None:
    job, commits = make(), tmp_path / "commits"
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=10)) as ck:
        for step in ck.steps(10_000):
            job.train(step)
            time.sleep(0.005)
            if step % 10 == 0 and commits.exists() and len(list(commits.iterdir())) >= 3:
                break
    steps = {int(p.name.split("-")[2].split(".")[0]) for p in commits.iterdir()}
    assert step in steps
    assert len(steps) >= 3
    assert all(each % 10 == 0 for each in steps)
    assert ck.receipt["snapshots"] >= 3


def test_seconds_appoint_too(tmp_path: Path) -> None:
    job = make()
    commits = tmp_path / "commits"
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(seconds=0.1)) as ck:
        for step in ck.steps(10_000):
            job.train(step)
            time.sleep(0.005)
            if commits.exists() and len(list(commits.iterdir())) >= 3:
                break
    assert step < 10_000
    assert ck.receipt["committed_step"] == step


def test_an_exception_saves_no_half_step_and_the_next_start_goes_on(tmp_path: Path) -> None:
    job = make()
    found = []
    with pytest.raises(ZeroDivisionError), ckpt.Checkpointer(tmp_path, job.state) as ck:  # noqa: PT012
        for step in ck.steps(10):
            if step == 7:
                raise ZeroDivisionError
            found.append(job.train(step))
            if step == 5:
                ck.step()
                ck.save()
    second, ck = run(tmp_path, 12, make(seed=1))
    assert ck.restored.step == 5
    assert found[:5] + second == losses(12)


def test_after_an_exception_everywhere_the_next_start_goes_on_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a lost connection to another rank: no rank dies of it, and what starts them again is not far."""
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    job = make()
    with pytest.raises(ZeroDivisionError), ckpt.Checkpointer(tmp_path, job.state) as ck:  # noqa: PT012
        for step in ck.steps(10):
            job.train(step)
            if step == 5:
                ck.step()
                ck.save().wait("store")
                raise ZeroDivisionError
    monkeypatch.setenv("CKPT_LINGER_S", "0")
    _, ck = run(tmp_path, 12, make(seed=1))
    assert (ck.restored.step, ck.restored.level) == (5, "local")


def test_a_break_after_the_update_counts_the_step(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, job.state) as ck:
        for step in ck.steps(10):
            job.train(step)
            if step == 4:
                break
    _, ck = run(tmp_path, 4, make(seed=1))
    assert ck.restored.step == 4


def test_a_break_before_the_update_does_not(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, job.state) as ck:
        for step in ck.steps(10):
            if step == 4:
                break
            job.train(step)
    _, ck = run(tmp_path, 3, make(seed=1))
    assert ck.restored.step == 3


def test_a_loop_that_counts_itself(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, job.state) as ck:
        for step in range(ck.restored.step + 1, 6):
            job.train(step)
            ck.step(step)
        with pytest.raises(ckpt.UsageError, match="the next is 6"):
            ck.step(9)
    _, ck = run(tmp_path, 5, make(seed=1))
    assert ck.restored.step == 5


def test_saving_in_the_middle_of_a_step_is_refused_and_names_step(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, job.state) as ck:
        for step in ck.steps(3):
            job.train(step)
            with pytest.raises(ckpt.UsageError, match=r"ck\.step\(\)"):
                ck.save()


def test_a_handle_follows_its_checkpoint_to_the_store(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, job.state) as ck:
        for step in ck.steps(2):
            job.train(step)
            ck.step()
            handle = ck.save(metrics={"loss": 0.5})
            handle.wait("store", timeout_s=30)
            assert handle.level == "store"
            assert handle.step == step
            assert handle.version.sub == 1


def test_values_in_state_are_live(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, {**job.state, "best": 9.0, "seen": (1, {2: "x"})}) as ck:
        for step in ck.steps(2):
            job.train(step)
            ck.state["best"] = 9.0 / (step + 1)
    job = make(seed=1)
    with ckpt.Checkpointer(tmp_path, {**job.state, "best": 0.0, "seen": None}) as ck:
        assert ck.state["best"] == 3.0
        assert ck.state["seen"] == (1, {2: "x"})


def test_a_state_that_does_not_match_is_named_in_one_message(tmp_path: Path) -> None:
    run(tmp_path, 2)
    job = make(seed=1)
    model = nn.Sequential(nn.Linear(16, 33), nn.BatchNorm1d(33), nn.Linear(33, 2))
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "extra": 1}
    with pytest.raises(ckpt.StateMismatch) as raised, ckpt.Checkpointer(tmp_path, state):
        pass
    text = str(raised.value)
    for name in (
        "model.0.weight has the shape",
        "only in the checkpoint: model.4.*, 2 tensors",
        "model.2.*: 2 tensors, not in the checkpoint",
        "extra",
        "sched",
    ):
        assert name in text
    assert torch.equal(job.model[0].weight, make(seed=1).model[0].weight)  # type: ignore[index]


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
            for mine, theirs in zip(fresh.model.parameters(), job.model.parameters(), strict=True):
                assert torch.equal(mine, theirs)


def test_an_agent_that_is_killed_is_started_again_and_training_goes_on(tmp_path: Path) -> None:
    job = make()
    found = []
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=5)) as ck:
        for step in ck.steps(10_000):
            found.append(job.train(step))
            time.sleep(0.01)
            if step == 40:
                pid = agent_pid(str(tmp_path))
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                before = ck.receipt["snapshots"]
            if step > 40 and ck.receipt["snapshots"] > before + 1:
                break
    assert ck.receipt["agent_restarts"] == 1
    assert found == losses(step)
    _, again = run(tmp_path, step, make(seed=1))
    assert again.restored.step == step


def test_an_agent_that_is_started_again_sees_the_step_of_a_rank_that_waits_in_it(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=5)) as ck:
        for step in ck.steps(3):
            job.train(step)
        ck.poll()
        link = ck._parts.saver.link
        before, pid = link._control_page, agent_pid(str(tmp_path))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (page := link._control_page) in (None, before) or not page.entered_step(0):
            assert time.monotonic() < deadline, "the new agent does not know which step it is"
            time.sleep(0.01)
        assert (page.entered_step(0), page.poll_count(0)) == (4, 1)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path / "run", job.state) as ck:
        for step in ck.steps(2):
            job.train(step)
        pid = agent_pid(str(tmp_path / "run"))
    assert pid is not None
    wait_gone(pid)
    assert list(read_settings().runtime_dir.iterdir()) == []
    assert ck.receipt["committed_step"] == 2


def test_use_outside_the_block_is_named(tmp_path: Path) -> None:
    ck = ckpt.Checkpointer(tmp_path, make().state)
    with pytest.raises(ckpt.UsageError, match="outside"):
        ck.step()
    with pytest.raises(ckpt.UsageError, match="outside"):
        next(ck.steps(3))
    with pytest.raises(ckpt.UsageError, match="codec"):
        ckpt.Checkpointer(tmp_path, {}, codec="zip")


def test_a_snapshot_that_is_due_in_a_long_evaluation_is_taken_at_a_poll(tmp_path: Path) -> None:
    job = make()
    done: list[str] = []

    def committed() -> str:
        return next((version for version in done if not version.endswith(".0000")), "")

    def note(event: ckpt.Event) -> None:
        if event.name == "commit.done":
            done.append(event.data["identity"])

    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(seconds=0.2), sinks=(note,)) as ck:
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
    wait_agent_gone(tmp_path)
    again = make(seed=5)
    with ckpt.Checkpointer(tmp_path, again.state) as ck:
        assert ck.restored.step == 2
        assert all(torch.equal(p, q) for p, q in zip(again.model.parameters(), expected, strict=True))
    assert committed().split("-")[-1].startswith("000000000002.")


def test_no_poll_takes_a_state_between_an_update_and_its_boundary(tmp_path: Path) -> None:
    job = make()
    names: list[str] = []
    with ckpt.Checkpointer(
        tmp_path, job.state, policy=ckpt.Every(seconds=0.05), sinks=(lambda e: names.append(e.name),)
    ) as ck:
        job.train(1)
        until = time.monotonic() + 1.0
        while time.monotonic() < until or not ck.receipt["missed"]:
            ck.poll()
            time.sleep(0.001)
        assert "commit.done" not in names
        assert ck.receipt["snapshots"] == 0
        ck.step()


def test_arenas_that_are_being_warmed_wait_while_a_snapshot_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    taken, made = Snapshotter.take, Saver._take_into_slot

    def take(self: Snapshotter, slot: int) -> Any:
        calm, page = current[0].link.slots.training_running.is_set(), current[0].link._control_page
        assert page is not None
        assert page.has_copying_rank, "the agent sees it too"
        if fails:
            raise RuntimeError("no copy")
        found = taken(self, slot)
        seen.append((calm, current[0].link.slots.training_running.is_set()))
        return found

    def _take(self: Saver, *args: Any) -> str:
        current[:] = [self]
        try:
            return made(self, *args)
        finally:
            assert self.link.slots.training_running.is_set()
            assert self.link._control_page is not None
            assert not self.link._control_page.has_copying_rank

    current: list[Saver] = []
    fails: list[bool] = []
    monkeypatch.setattr(Snapshotter, "take", take)
    monkeypatch.setattr(Saver, "_take_into_slot", _take)
    with ckpt.Checkpointer(tmp_path, make().state, policy=ckpt.Every(steps=10**6)) as ck:
        ck.step()
        ck.save().wait("local")
        assert seen == [(False, False)]
        fails.append(True)
        with pytest.raises(ckpt.SaveFailed):
            ck.save().wait("local")
        fails.clear()
    wait_agent_gone(tmp_path)


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
    again = make(seed=1)
    with ckpt.Checkpointer(url, again.state) as ck:
        assert (ck.restored.step, ck.restored.level) == (3, "local")
        assert list(ck.steps(3)) == []
    assert ck.receipt["committed_step"] == 3
    assert [int(p.name.split("-")[2].split(".")[0]) for p in (url / "commits").iterdir()] == [3]
    wait_agent_gone(url)


def test_what_is_restored_under_inference_mode_can_be_trained(tmp_path: Path) -> None:
    wanted = losses(6)
    first = make()
    with ckpt.Checkpointer(tmp_path, {**first.state, "seen": torch.zeros(2)}) as ck:
        for step in ck.steps(3):
            first.train(step)
    wait_agent_gone(tmp_path)
    job = make(seed=1)
    ck = ckpt.Checkpointer(tmp_path, {**job.state, "seen": None}, strict=False)
    with torch.inference_mode(), ck, torch.inference_mode(False):
        assert [job.train(step) for step in ck.steps(6)] == wanted[3:]
        ck.state["seen"] += 1
