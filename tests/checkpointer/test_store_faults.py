"""A store that fails under a running job: training goes on, the save says so, and nothing is lost once it is well.

A real Checkpointer, a real agent, and a real S3 server, where it has to misbehave behind a proxy that plans it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import ckpt
from ckpt.agent.runtime.memory_plan import SLOTS_CLOSE
from tests.checkpointer.loops import losses, make, wait_agent_gone
from tests.checkpointer.proxy import HELD, LOST_REPLY, Fault, Proxy, answer
from tests.checkpointer.runs import RUN, URL, Seen, agent_status, empty, goes_on, kill_agent, restore, run, saving
from tests.servers import Server

SLOW_DOWN = answer(503, "SlowDown")


def test_the_end_waits_out_an_outage_and_believes_the_commit(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RETRY_S", "0.5")
    job, seen = make(), Seen()

    def heals(event: ckpt.Event) -> None:
        if len(seen.named("commit.failed")) == 3:  # the first try, and two more at the end
            store.heal()

    with ckpt.Checkpointer(URL, job.state, limits=ckpt.Limits(exit_s=120), sinks=(seen, heals)) as ck:
        for step in ck.steps(3):
            job.train(step)
        store.fail(SLOW_DOWN, "PUT", "*.pack")
    assert ck.receipt["committed_step"] == 3
    assert len(seen.named("commit.failed")) >= 3


def test_an_end_that_gives_up_says_that_memory_keeps_the_step(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RETRY_S", "0.5")
    monkeypatch.setenv("CKPT_LINGER_S", "5")
    job, limits = make(), ckpt.Limits(exit_s=3)
    gives_up = pytest.raises(ckpt.CommitFailed, match=r"memory keeps step 3: the agent goes on trying for 1 min")
    with gives_up, ckpt.Checkpointer(URL, job.state, limits=limits) as ck:
        for step in ck.steps(3):
            job.train(step)
        store.fail(SLOW_DOWN, "PUT", "*.pack")
    store.heal()
    ck = restore(URL, make().state)  # once the agent, which goes on trying, has ended
    assert (ck.restored.step, ck.restored.level) == (3, "store")


def test_a_bucket_that_comes_back_takes_the_next_save(store: Proxy, rclone: Server) -> None:
    """The bucket comes back empty. A checkpoint that is committed afterwards needs no earlier one."""
    frozen, other = torch.arange(1 << 20), torch.zeros(1 << 20, dtype=torch.int64)

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        saving(2)(ck, step)
        if step == 2:
            store.fail(answer(404, "NoSuchBucket"))
            lost = ck.save()
            with pytest.raises(ckpt.SaveFailed, match="no bucket"):
                lost.wait("store", timeout_s=60)
            assert lost.level == "local"
            empty(rclone)
            store.heal()

    first = run(URL, 4, make(), at, {"frozen": frozen})
    assert first.ck.receipt["committed_step"] == 4
    assert all(event.loud for event in first.seen.named("commit.failed"))
    goes_on(URL, first.losses, more={"frozen": other})
    assert torch.equal(other, frozen)


def test_a_right_that_is_lost_in_mid_run_fails_that_save_at_once_and_not_the_next(store: Proxy) -> None:
    """The store is asked once more, with the present credentials, and then no more. Rights that come back are used."""

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        saving(2)(ck, step)
        if step == 3:
            store.fail(answer(403, "ExpiredToken"))
            ck.step()
            lost = ck.save()
            with pytest.raises(ckpt.SaveFailed, match="credentials"):
                lost.wait("store", timeout_s=60)
            asked = [line for line in store.met if "/alive/" not in line]
            assert len(set(asked)) == 1
            assert len(asked) <= 2
            store.heal()
            ck.save().wait("store", timeout_s=60)

    first = run(URL, 5, make(), at)
    assert first.seen.wait("commit.failed").loud
    goes_on(URL, first.losses)


def test_credentials_that_may_only_read_are_told_in_the_first_steps_and_again_at_the_end(store: Proxy) -> None:
    store.fail(answer(403, "AccessDenied"), "PUT")
    job, found, seen = make(), [], Seen()
    with pytest.raises(ckpt.CommitFailed, match="credentials"), ckpt.Checkpointer(URL, job.state, sinks=(seen,)) as ck:  # noqa: PT012
        for step in ck.steps(3):
            found.append(job.train(step))
            if step == 1:
                told = seen.wait("claim.postponed")
    assert told.loud
    assert "credentials" in told.message
    assert found == losses(3)


@pytest.mark.parametrize("fault", [SLOW_DOWN, LOST_REPLY], ids=lambda f: f.name)
def test_faults_that_pass_are_waited_out_and_the_commit_lands(
    store: Proxy, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_RETRY_S", "60")

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        if step == 2:
            for key in ("epochs/*", "data/*", "commits/*"):
                store.fail(fault, "PUT", f"{RUN}/{key}", count=2)
        saving(2)(ck, step)

    first = run(URL, 4, make(), at)
    assert {line.split("/")[2] for line in store.met} >= {"data", "commits"}
    assert first.seen.named("commit.failed") == []
    assert first.seen.wait("store.retry")
    goes_on(URL, first.losses)


def test_a_server_that_is_slow_holds_up_the_commit_and_never_the_training(store: Proxy) -> None:
    """While one commit waits for the store, newer snapshots are taken, in as much memory as before."""
    job, seen = make(), Seen()
    with ckpt.Checkpointer(URL, job.state, sinks=(seen,), policy=ckpt.Every(seconds=0.01)) as ck:
        for step in ck.steps(100_000):
            job.train(step)
            if step == 1:
                store.fail(HELD, "PUT", f"{RUN}/data/*")
            if step > 1 and store.met and ck.receipt["snapshots"] >= 40:
                break
        slots = agent_status(URL)["job"]["slots"]
        held = len([line for line in store.met if "/data/" in line])
        newest = ck.receipt["committed_step"]
        store.heal()
    wait_agent_gone(URL)
    assert len(slots) <= SLOTS_CLOSE
    assert held == 1
    assert newest is None or newest < step - 30
    assert ck.receipt["committed_step"] == step
    assert seen.named("commit.failed") == []
    assert run(URL, step).from_step == step


def test_a_prune_beside_a_commit_under_way_looks_at_once_and_deletes_once_that_has_ended(store: Proxy) -> None:
    job = make()
    with ckpt.Checkpointer(URL, job.state) as ck:
        for step in ck.steps(2):
            job.train(step)
            ck.step()
            if step == 1:
                ck.save().wait("store", timeout_s=60)
        store.fail(HELD, "PUT", f"{RUN}/data/*")
        handle = ck.save()
        store.wait_met(f"{RUN}/data/*")
        prune = [sys.executable, "-m", "ckpt.cli.main", "prune", URL, "--last", "1"]
        assert "nothing to do" in subprocess.run(prune, capture_output=True, text=True, check=True, timeout=60).stdout
        with subprocess.Popen([*prune, "--yes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr is not None
            assert "ends the commit under way first" in waiting.stderr.readline()
            assert handle.level != "store"
            store.heal()
            said, wrong = waiting.communicate(timeout=60)
        assert (waiting.returncode, said.count("\nretired:\n  step ") + said.startswith("retired:\n  step ")) == (
            0,
            1,
        ), wrong
        handle.wait("store", timeout_s=60)


def test_an_agent_that_dies_while_it_puts_a_record_fails_that_save_and_is_followed_by_one_that_saves_the_last_step(
    store: Proxy,
) -> None:
    """The put of the dead agent may still land, later."""

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        if step == 2:
            store.fail(HELD, "PUT", f"{RUN}/commits/*")
            ck.step()
            handle = ck.save()
            store.wait_met(f"{RUN}/commits/*")
            kill_agent(URL)
            with pytest.raises(ckpt.SaveFailed, match="the agent was lost"):
                handle.wait("store", timeout_s=60)
            store.heal()

    first = run(URL, 4, make(), at)
    assert (first.ck.receipt["agent_restarts"], first.ck.receipt["committed_step"]) == (1, 4)
    goes_on(URL, first.losses)
