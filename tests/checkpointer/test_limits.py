"""ckpt.Limits, seen from the training loop: what is bounded, what is said when it binds, and what goes on."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.events import Event
from ckpt.settings import read_settings
from ckpt.types import Identity
from tests.checkpointer.loops import losses, make, wait_agent_gone
from tests.checkpointer.proxy import HELD, Proxy, answer
from tests.checkpointer.runs import RUN, URL, Seen, agent_status, kill_agent, run
from tests.cli.stores import begin

MIB = 1 << 20
BRIEF = ckpt.Limits(exit_s=3.0)  # a busy machine's agent answers in that time


def plan_of(seen: Seen) -> dict[str, Any]:
    """The last memory plan that was told."""
    return seen.named("memory.plan")[-1].data


def waited_s(text: str) -> float:
    """How long it says that something was waited for in vain."""
    (seconds,) = re.findall(r" within ([0-9.e-]+) s$", text)
    return float(seconds)


def committed_steps(seen: Seen) -> set[int]:
    return {Identity.parse(each.data["identity"]).version.step for each in seen.named("commit.done")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": -1},
        {"bandwidth": 0.0},
        {"bandwidth": -5.0},
        {"peer_bandwidth": 0.0},
        {"peer_bandwidth": 900.0},
        {"exit_s": -1.0},
        {"unsaved_s": 0.0},
    ],
    ids=str,
)
def test_a_limit_that_means_nothing_is_refused_where_it_is_written(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ckpt.UsageError, match=name):
        ckpt.Limits(**wrong)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_memory_that_is_short_gives_fewer_slots_and_every_save_lands(tmp_path: Path, slots: int) -> None:
    """One slot less makes a snapshot wait for the upload before it, one that is alone for its own: no save is lost."""
    free = run(tmp_path / "free", 2, make())
    table = plan_of(free.seen)
    memory = slots * table["slot_bytes"] + table["commit_bytes"]
    job, found, seen = make(), [], Seen()
    with ckpt.Checkpointer(tmp_path / "run", job.state, limits=ckpt.Limits(memory=memory), sinks=(seen,)) as ck:
        for step in ck.steps(6):
            found.append(job.train(step))
            ck.step()
            handle = ck.save()
            held = agent_status(tmp_path / "run")["job"]["slots"]
            assert len(held) <= slots
            assert sum(slot["bytes"] for slot in held) <= memory
        handle.wait("store", timeout_s=60)
    wait_agent_gone(tmp_path / "run")
    assert found == losses(6)
    plan = plan_of(seen)
    assert plan["slots"] == slots
    assert plan["total_bytes"] <= memory
    told = seen.named("memory.plan")[-1]
    assert told.loud == (slots < 3)
    assert "Limits(memory=)" in told.message
    assert seen.named("commit.failed") == seen.named("save.abandoned") == []
    assert committed_steps(seen) == {1, 2, 3, 4, 5, 6}
    said = {path: path.read_text() for path in read_settings().runtime_dir.glob("*.log")}
    assert said == {}, "what it had to say was told"
    assert run(tmp_path / "run", 6).from_step == 6


def arena_bytes_of(pid: int | str) -> int:
    """That a process has mapped."""
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
    """Neither in the agent nor in the trainer: it counts as free."""
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
    wait_agent_gone(tmp_path)
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


def save_tables(url: Path, saves: int, mib: int, bandwidth: float) -> list[Event]:
    """Commits so many checkpoints of so many MiB that no codec shrinks; the events of the commits."""
    table, seen = torch.empty(mib * MIB, dtype=torch.uint8), Seen()
    limits = ckpt.Limits(bandwidth=bandwidth)
    with ckpt.Checkpointer(url, {"table": table}, generators=False, codec="raw", limits=limits, sinks=(seen,)) as ck:
        for step in ck.steps(saves):
            table.random_(generator=torch.Generator().manual_seed(step))
            if step < saves:
                ck.step()
                ck.save().wait("store", timeout_s=120)
    wait_agent_gone(url)
    return seen.named("commit.done")


def test_a_commit_of_several_packs_keeps_to_the_bandwidth(tmp_path: Path) -> None:
    """The first pack has 64 MiB, and the second may not begin before they are paid for."""
    (done,) = save_tables(tmp_path / "run", 1, 96, 64 * MIB)
    assert " in 2 packs" in done.message
    assert done.data["seconds"] >= 0.5


def test_small_commits_keep_to_the_bandwidth_together(tmp_path: Path) -> None:
    """Six times 1 MiB at 1 MiB/s: only the first may go at once."""
    done = save_tables(tmp_path / "run", 6, 1, MIB)
    assert len(done) == 6
    assert sum(event.data["seconds"] for event in done) >= 2.5


# --- exit_s ----------------------------------------------------------------------------------------------------------


def test_more_seconds_than_a_lock_can_wait_are_as_good_as_no_limit(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "run", {"x": torch.ones(1)}, limits=ckpt.Limits(exit_s=1e18)) as ck:
        for _ in ck.steps(2):
            ck.step()
            ck.save().wait("store", timeout_s=math.inf)
    assert ck.receipt["committed_step"] == 2
    wait_agent_gone(tmp_path / "run")


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
    again = run(URL, 5)
    assert again.from_step == 3
    assert found + again.losses == losses(5)


def test_an_exception_passes_the_exit_unchanged_and_in_time(store: Proxy) -> None:
    job = make()
    with pytest.raises(ZeroDivisionError) as raised, ckpt.Checkpointer(URL, job.state, limits=BRIEF) as ck:  # noqa: PT012
        store.fail(HELD, "PUT", f"{RUN}/data/*")
        for step in ck.steps(3):
            job.train(step)
            if step == 2:
                ck.step()
                ck.save()
        raise ZeroDivisionError
    (note,) = raised.value.__notes__
    assert waited_s(note) <= BRIEF.exit_s
    store.heal()
    wait_agent_gone(URL)
    assert run(URL, 3).from_step == 2


def test_an_exception_carries_a_note_of_what_could_not_be_committed(store: Proxy) -> None:
    job = make()
    with pytest.raises(ZeroDivisionError) as raised, ckpt.Checkpointer(URL, job.state) as ck:  # noqa: PT012
        store.fail(answer(403, "AccessDenied"))
        for step in ck.steps(1):
            job.train(step)
            ck.step()
            with pytest.raises(ckpt.SaveFailed):
                ck.save().wait("store", timeout_s=60)
        raise ZeroDivisionError
    store.heal()
    wait_agent_gone(URL)
    assert any("ckpt" in note and "credentials" in note for note in getattr(raised.value, "__notes__", []))


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
    again = run(URL, newest + 3)
    assert again.from_step == newest
    assert found[:newest] + again.losses == losses(newest + 3)


def test_the_time_that_entering_takes_is_not_unsaved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long restore must not end a job in its first step; here another job is watched for two heartbeats."""
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "3")
    begin(tmp_path, closed=False)
    job, began_s = make(), time.monotonic()
    with ckpt.Checkpointer(tmp_path, job.state, limits=ckpt.Limits(unsaved_s=5.5)) as ck:
        assert time.monotonic() - began_s > 5.5
        for step in ck.steps(1):
            job.train(step)
    wait_agent_gone(tmp_path)


def test_a_user_is_told_that_an_interval_is_longer_than_he_wants_to_be_without_a_commit(tmp_path: Path) -> None:
    job, seen = make(), Seen()
    given: dict[str, Any] = {"limits": ckpt.Limits(unsaved_s=600), "policy": ckpt.Every(seconds=600)}
    with ckpt.Checkpointer(tmp_path, job.state, sinks=(seen,), **given) as ck:
        for step in ck.steps(1):
            job.train(step)
    assert [event.loud for event in seen.named("policy.seldom")] == [True]
    wait_agent_gone(tmp_path)


@pytest.mark.parametrize("policy", [ckpt.Every(steps=5), ckpt.Adaptive(), ckpt.Adaptive(at_risk_s=600)], ids=str)
def test_a_job_whose_commits_land_is_not_unsaved(tmp_path: Path, policy: ckpt.Every | ckpt.Adaptive) -> None:
    """Longer than the limit, but never so long without a commit: also where the policy is to say how often."""
    job, limits = make(), ckpt.Limits(unsaved_s=12.0)
    began_s = time.monotonic()
    with ckpt.Checkpointer(tmp_path, job.state, policy=policy, limits=limits) as ck:
        for step in ck.steps(1_000_000):
            job.train(step)
            time.sleep(0.01)
            if time.monotonic() - began_s > 12.5:
                break
    wait_agent_gone(tmp_path)
    assert ck.receipt["committed_step"] == step
