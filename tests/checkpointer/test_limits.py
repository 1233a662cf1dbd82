"""ckpt.Limits, seen from the training loop: what is bounded, what is said when it binds, and what goes on."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.settings import read_settings
from tests.checkpointer.loops import losses, make, wait_agent_gone
from tests.checkpointer.proxy import HELD, Fault, Proxy, answer
from tests.checkpointer.runs import RUN, URL, Seen, agent_status, goes_on, kill_agent, run, saving
from tests.cli.stores import begin

MIB = 1 << 20
BRIEF = ckpt.Limits(exit_s=3.0)  # a busy machine's agent answers in that time


def plan_of(seen: Seen) -> dict[str, Any]:
    """The last memory plan that was told."""
    return seen.named("memory.plan")[-1].data


def waited_s(text: str) -> float:
    """How many seconds an error says that it waited."""
    (seconds,) = re.findall(r" within ([0-9.e-]+) s$", text)
    return float(seconds)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_memory_that_is_short_gives_fewer_slots_and_every_save_lands(tmp_path: Path, slots: int) -> None:
    """With two slots a snapshot waits for the upload before it; with one slot it waits for its own. No save is lost."""
    free = run(tmp_path / "free", 2, make())
    table = plan_of(free.seen)
    memory = slots * table["slot_bytes"] + table["commit_bytes"]
    handles: list[ckpt.Handle] = []

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        ck.step()
        handles.append(ck.save())
        held = agent_status(tmp_path / "run")["job"]["slots"]
        assert len(held) <= slots
        assert sum(slot["bytes"] for slot in held) <= memory
        if step == 6:
            handles[-1].wait("store", timeout_s=60)

    ended = run(tmp_path / "run", 6, make(), at, limits=ckpt.Limits(memory=memory))
    seen = ended.seen
    assert ended.losses == losses(6)
    plan = plan_of(seen)
    assert plan["slots"] == slots
    assert plan["total_bytes"] <= memory
    told = seen.named("memory.plan")[-1]
    assert told.loud
    assert "Limits(memory=)" in told.message
    assert seen.named("commit.failed") == seen.named("save.abandoned") == []
    assert set(seen.committed) == {1, 2, 3, 4, 5, 6}
    said = {path: path.read_text() for path in read_settings().runtime_dir.glob("*.log")}
    assert said == {}, "what it had to say was told"
    assert run(tmp_path / "run", 6).from_step == 6


def arena_bytes_of(pid: int | str) -> int:
    """How many bytes of arenas a process has mapped."""
    mapped = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:ckpt-arena" in line]
    spans = [[int(end, 16) for end in fields[0].split("-")] for fields in mapped]
    return sum(end - start for start, end in spans)


def wait_mapped(count: int, *pids: int | str) -> None:
    """Until each of these processes has arenas of so many bytes mapped."""
    deadline = time.monotonic() + 60
    while (found := [arena_bytes_of(pid) for pid in pids]) != [count] * len(pids):
        assert time.monotonic() < deadline, (count, found)
        time.sleep(0.01)


def test_a_state_that_grows_with_the_first_step_leaves_no_memory_in_a_slot_that_it_has_no_more(tmp_path: Path) -> None:
    """The agent and the trainer unmap that slot: its memory counts as free."""
    model, seen = torch.nn.Linear(1024, 1024), Seen()
    optim = torch.optim.AdamW(model.parameters())
    limits = ckpt.Limits(memory=58 * MIB)  # for three slots of some 5 MiB, or for two of some 13
    with ckpt.Checkpointer(tmp_path, {"model": model, "optim": optim}, limits=limits, sinks=(seen,)) as ck:
        for step in ck.steps(3):
            if step == 1:
                before = seen.wait("memory.plan").data
                assert before["slots"] == 3
                wait_mapped(3 * before["slot_bytes"], "self")
            model(torch.ones(1024)).sum().backward()
            optim.step()
            ck.step()
            ck.save().wait("store", timeout_s=60)
        plan = plan_of(seen)
        assert plan["slots"] == 2
        wait_mapped(2 * plan["slot_bytes"], "self", agent_status(tmp_path)["pid"])
    assert seen.named("memory.short") == seen.named("arena.failed") == []


def test_memory_that_holds_no_snapshot_fails_saves_and_not_the_training(tmp_path: Path) -> None:
    job, found, seen = make(), [], Seen()
    limits = ckpt.Limits(memory=1000)
    with (  # noqa: PT012
        pytest.raises(ckpt.CommitFailed, match=r"Limits\(memory=\)"),
        ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=1), limits=limits, sinks=(seen,)) as ck,
    ):
        for step in ck.steps(4):
            found.append(job.train(step))
            if step == 2:
                ck.step()
                with pytest.raises(ckpt.SaveFailed, match=r"Limits\(memory=\)"):
                    ck.save().wait("local", timeout_s=60)
    wait_agent_gone(tmp_path)
    assert found == losses(4)
    assert seen.wait("save.failed").loud
    told = seen.named("memory.plan")[0]  # while the training is young
    assert told.loud
    assert "nothing is saved" in told.message
    assert plan_of(seen)["slots"] == 0
    assert run(tmp_path, 4).from_step == 0


# --- bandwidth -------------------------------------------------------------------------------------------------------


def test_small_commits_keep_to_the_bandwidth_together(tmp_path: Path) -> None:
    """Six times 1 MiB, which no codec shrinks, at 1 MiB/s: only the first may go at once."""
    table = torch.empty(MIB, dtype=torch.uint8)

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        table.random_(generator=torch.Generator().manual_seed(step))
        saving(1, 2, 3, 4, 5)(ck, step)

    options: dict[str, Any] = {"generators": False, "codec": "raw", "limits": ckpt.Limits(bandwidth=MIB)}
    done = run(tmp_path / "run", 6, {"table": table}, at, **options).seen.named("commit.done")
    assert len(done) == 6
    assert sum(event.data["seconds"] for event in done) >= 2.5


# --- exit_s ----------------------------------------------------------------------------------------------------------


def test_the_exit_waits_no_longer_than_it_may_and_the_agent_commits_all_the_same(store: Proxy) -> None:
    job, found = make(), []
    with (  # noqa: PT012
        pytest.raises(ckpt.CommitFailed, match="step 3") as raised,
        ckpt.Checkpointer(URL, job.state, limits=BRIEF) as ck,
    ):
        store.fail(HELD, "PUT", f"{RUN}/data/*")
        for step in ck.steps(3):
            found.append(job.train(step))
    assert waited_s(str(raised.value)) <= BRIEF.exit_s
    store.heal()
    wait_agent_gone(URL)
    goes_on(URL, found)


@pytest.mark.parametrize(("fault", "says"), [(HELD, " within "), (answer(403, "AccessDenied"), "credentials")])
def test_an_exception_passes_the_exit_in_time_and_carries_a_note_of_what_could_not_be_committed(
    store: Proxy, fault: Fault, says: str
) -> None:
    job, limits = make(), BRIEF if fault == HELD else None
    with pytest.raises(ZeroDivisionError) as raised, ckpt.Checkpointer(URL, job.state, limits=limits) as ck:  # noqa: PT012
        store.fail(fault, "PUT", f"{RUN}/data/*")
        for step in ck.steps(3):
            job.train(step)
            if step == 2:
                ck.step()
                lost = ck.save()
        if fault != HELD:
            with pytest.raises(ckpt.SaveFailed):
                lost.wait("store", timeout_s=60)
        raise ZeroDivisionError
    (note,) = raised.value.__notes__
    assert says in note
    store.heal()
    wait_agent_gone(URL)
    if fault == HELD:
        assert waited_s(note) <= BRIEF.exit_s
        assert run(URL, 3).from_step == 2


# --- unsaved_s -------------------------------------------------------------------------------------------------------


def test_a_job_that_is_unsaved_for_too_long_leaves_and_is_restored_from_what_there_is(store: Proxy) -> None:
    limits = ckpt.Limits(unsaved_s=6.0, exit_s=2.0)
    job, found = make(), []
    with (  # noqa: PT012
        pytest.raises(ckpt.SaveFailed, match=r"Limits\(unsaved_s=\)") as raised,
        ckpt.Checkpointer(URL, job.state, policy=ckpt.Every(steps=5), limits=limits) as ck,
    ):
        for step in ck.steps(1_000_000):
            found.append(job.train(step))
            if step == 2:
                ck.step()
                ck.save().wait("store", timeout_s=60)
                store.fail(HELD, "PUT", f"{RUN}/data/*")
    assert not isinstance(raised.value, ckpt.CommitFailed)
    newest = ck.receipt["committed_step"]
    assert 2 <= newest < step
    kill_agent(URL)
    store.heal()
    goes_on(URL, found[:newest])


def test_the_time_that_entering_takes_is_not_unsaved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long restore must not end a job in its first step; here another job is watched for two heartbeats."""
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "3")
    begin(tmp_path, closed=False)
    began_s, entered_s = time.monotonic(), list[float]()
    at = lambda ck, step: entered_s.append(time.monotonic())  # noqa: E731
    run(tmp_path, 1, None, at, limits=ckpt.Limits(unsaved_s=5.5))
    assert entered_s[0] - began_s > 5.5


def test_a_user_is_told_that_an_interval_is_longer_than_he_wants_to_be_without_a_commit(tmp_path: Path) -> None:
    seen = run(tmp_path, 1, limits=ckpt.Limits(unsaved_s=600), policy=ckpt.Every(seconds=600)).seen
    assert [event.loud for event in seen.named("policy.seldom")] == [True]


def test_a_job_whose_commits_land_is_not_unsaved(tmp_path: Path) -> None:
    """Longer than the limit, but never so long without a commit: the policy is to say how often, within a limit."""
    job, limits, began_s = make(), ckpt.Limits(unsaved_s=12.0), time.monotonic()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Adaptive(at_risk_s=600), limits=limits) as ck:
        for step in ck.steps(1_000_000):
            job.train(step)
            time.sleep(0.01)
            if time.monotonic() - began_s > 12.5:
                break
    assert ck.receipt["committed_step"] == step
