"""A store that fails, or still takes what an older job sent, while a job starts: it begins from the right checkpoint.

A real Checkpointer, a real agent, and a real S3 server behind a proxy that plans its failures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt
from ckpt.store.keys import parse_record, record_key
from ckpt.store.run import Run
from tests.checkpointer import proxy as proxies
from tests.checkpointer.loops import make, wait_agent_gone
from tests.checkpointer.proxy import HELD, Proxy, answer
from tests.checkpointer.runs import RUN, URL, Seen, agent_status, goes_on, kill_agent, run, saving
from tests.checkpointer.scripts import losses_of, train
from tests.cli.stores import opened
from tests.servers import Server

SLOW_DOWN = answer(503, "SlowDown")


def test_a_job_that_is_started_again_with_new_credentials_saves_with_them(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old credentials expired, so the last commit failed. Memory keeps the checkpoint, and the new start commits
    it."""
    monkeypatch.setenv("CKPT_LINGER_S", "2")  # an agent that cannot commit stays twelve times as long
    with proxies.proxy(moto) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.at.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
        job, found = make(), []
        with pytest.raises(ckpt.CommitFailed, match="credentials"), ckpt.Checkpointer(URL, job.state) as ck:  # noqa: PT012
            for step in ck.steps(3):
                found.append(job.train(step))
                if step == 1:
                    ck.step()
                    ck.save().wait("store", timeout_s=60)
                    store.fail(answer(403, "InvalidAccessKeyId"), who="old")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
        again = goes_on(URL, found).ck
        assert (again.restored.level, again.receipt["committed_step"]) == ("local", 5)


def test_a_job_and_its_restart_take_credentials_from_a_rewritten_file(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses the first key in mid-run, and the second at the restart. One agent serves both."""
    file = tmp_path / "credentials"

    def rotate(former: str, key_id: str) -> None:
        if former:
            store.fail(answer(403, "InvalidAccessKeyId"), who=former)
        file.with_suffix(".new").write_text(f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = any\n")
        file.with_suffix(".new").rename(file)

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    with proxies.proxy(moto) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.at.endpoint)
        rotate("", "first")
        job, found = make(), []
        with pytest.raises(KeyError), ckpt.Checkpointer(URL, job.state) as ck:  # noqa: PT012
            for step in ck.steps(5):
                found.append(job.train(step))
                ck.step()
                ck.save().wait("store", timeout_s=60)
                if step == 1:
                    rotate("first", "second")
                if step == 2:
                    raise KeyError("the job ends, and its agent does not")
        pid = agent_status(URL)["pid"]
        rotate("second", "third")
        pids = list[int]()
        again = goes_on(URL, found, at=lambda ck, step: pids.append(agent_status(URL)["pid"]))
        assert set(pids) == {pid}
        assert again.ck.receipt["committed_step"] == 4


@pytest.mark.parametrize("key", ["*", f"{RUN}/data/*-000000000004.*"], ids=["all", "data"])
def test_data_that_cannot_be_read_now_is_not_taken_for_damaged(store: Proxy, key: str) -> None:
    """If nothing can be read, the start is an error, and never fresh."""
    run(URL, 4, make(), saving(2))
    store.fail(SLOW_DOWN, "GET", key)
    with pytest.raises(ckpt.errors.StorageError, match="503"):
        run(URL, 6)
    store.heal()
    assert run(URL, 6).from_step == 4


def test_a_record_that_lands_after_its_job_was_followed_is_a_branch(
    store: Proxy, rclone: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host is lost while its last put is on the way. The next job runs the same step, and then that put arrives."""
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "0.2")
    step, before = killed_while_held(store, tmp_path / "log")
    kill_agent(URL)
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    followed = run(URL, step + 2)
    assert 0 < followed.from_step < step
    store.heal()
    with opened(URL) as backend:
        assert held_record(store) in [record_key(ref.identity, ref.writer) for ref in Run(backend).view().branches]
    again = goes_on(URL, before[: followed.from_step] + followed.losses)
    assert str(again.ck.restored.identity).startswith("00000002-")


def test_a_job_that_restarts_while_its_old_writer_uploads_goes_on_from_memory(
    store: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both writers' commits land, each where it belongs on the line."""
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    step, before = killed_while_held(store, tmp_path / "log")
    job, after = make(seed=9), []
    with ckpt.Checkpointer(URL, job.state) as ck:
        assert ck.restored.level == "local"
        assert ck.restored.step >= step
        went_on = ck.restored.step
        for each in ck.steps(went_on + 3):
            after.append(job.train(each))
        store.heal()
    wait_agent_gone(URL)
    assert ck.receipt["committed_step"] == went_on + 3
    with opened(URL) as backend:
        line = [ref.identity.version.step for ref in Run(backend).view().history]
    assert step in line
    assert line == sorted(line)
    goes_on(URL, before[:went_on] + after)


def test_a_restart_from_memory_needs_no_store(store: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims of the new start and of the restored one are put late, before the first commit."""
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    store.fail(SLOW_DOWN, "PUT")
    old = train(tmp_path / "log", URL, 100_000, "--every", "1")
    try:
        old.wait_for(lambda line: line.get("event") == "commit.failed")
    finally:
        store.fail(SLOW_DOWN)
        old.kill()
    before = [*losses_of(old.lines()).values()]
    job, after, seen = make(seed=9), [], Seen()
    with ckpt.Checkpointer(URL, job.state, sinks=(seen,)) as ck:
        went_on = ck.restored.step
        assert (ck.restored.level, went_on > 0) == ("local", True)
        for step in ck.steps(went_on + 3):
            after.append(job.train(step))
        seen.wait("claim.postponed")
        store.heal()
    wait_agent_gone(URL)
    assert goes_on(URL, before[:went_on] + after).ck.restored.level == "store"


def killed_while_held(store: Proxy, log: Path) -> tuple[int, list[float]]:
    """Kills a training script while the put of one of its records is held. Returns the step of that record, and the
    losses so far."""
    old = train(log, URL, 100_000, "--every", "1")
    try:
        old.wait_for(lambda line: line.get("event") == "commit.done")
        store.fail(HELD, "PUT", f"{RUN}/commits/*")
        store.wait_met(f"{RUN}/commits/*")
    finally:
        old.kill()
    record = parse_record(held_record(store))
    assert record is not None
    return record[0].version.step, [*losses_of(old.lines()).values()]


def held_record(store: Proxy) -> str:
    return next(line for line in store.met if "/commits/" in line).removeprefix(f"PUT {RUN}/")
