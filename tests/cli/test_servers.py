"""The commands that are about the store itself, against real S3 servers."""

from __future__ import annotations

import pytest

from ckpt import Checkpointer
from ckpt.store.keys import pack_key
from ckpt.types import Epoch, Identity, Version
from tests import servers
from tests.checkpointer.loops import make, wait_agent_gone
from tests.cli.stores import a_run, listed_steps, opened, run_ckpt
from tests.servers import Server, start_upload

URL = "s3://bucket/runs/one"
PACK = pack_key(Identity(Epoch(1, "0" * 16), Version(5)), "node", "0123456789ab", 0)


def reach(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def unfinished(url: str) -> int:
    """How many unfinished uploads there are below `url`; they are gone then."""
    with opened(url) as backend:
        return backend.abort_uploads(older_than_s=-60)


def test_doctor_finds_out_what_a_server_gets_wrong_and_leaves_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """rclone overwrites where it was asked not to, and answers a range with the whole object: no problem for ckpt."""
    with servers.rclone() as server:
        reach(server, monkeypatch)
        said = run_ckpt("doctor", URL, "--json")
        assert said.code == 0, said.out
        assert said.json["problems"] == []
        store = said.json["store"]
        assert store["put if absent"] is False
        assert store["ranged get"] is True, "what the backend makes of it is right"
        assert store["read after overwrite"] is True
        assert "GB/s" in store["put, one object"]
        with opened(URL) as backend:
            assert list(backend.list("")) == []
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another one")
        said = run_ckpt("doctor", URL)
        assert said.code == 4
        assert "problem: " in said.out
        assert "another one" not in said.out + said.err


def test_prune_ends_uploads_that_nobody_will_finish_and_only_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.moto() as server:  # it says of every upload that it began in 2010
        reach(server, monkeypatch)
        a_run(URL)
        start_upload(server, f"runs/one/{PACK}")
        start_upload(server, f"runs/other/{PACK}")
        assert run_ckpt("prune", URL).code == 0
        assert unfinished(URL) == 1, "without --yes it stays"
        start_upload(server, f"runs/one/{PACK}")
        assert run_ckpt("prune", URL, "--yes").code == 0
        assert unfinished(URL) == 0
        assert unfinished("s3://bucket/runs/other") == 1
        assert listed_steps(URL) == [10, 20, 40]


def test_prune_of_a_run_that_has_the_whole_bucket_leaves_what_others_upload_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with servers.moto() as server:  # it says of every upload that it began in 2010
        reach(server, monkeypatch)
        a_run("s3://bucket")
        foreign = ("logs/today", "data/images.tar", f"nested/run/{PACK}", "commits/first")
        for key in (*foreign, PACK):
            start_upload(server, key)
        assert run_ckpt("prune", "s3://bucket", "--yes").code == 0
        assert unfinished("s3://bucket") == len(foreign)


def test_prune_asked_of_a_running_agent_ends_uploads_too_where_nothing_is_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with servers.moto() as server:  # it says of every upload that it began in 2010
        reach(server, monkeypatch)
        job = make()
        with Checkpointer(URL, job.state) as ck:
            for step in ck.steps(2):
                job.train(step)
                ck.step()
                ck.save().wait("store", timeout_s=60)
            start_upload(server, f"runs/one/{PACK}")
            looked = run_ckpt("prune", URL)
            assert looked.code == 0
            assert "--yes also ends uploads" in looked.out
            said = run_ckpt("prune", URL, "--yes", "--json")
            assert said.code == 0
            assert said.json["uploads_aborted"] == 1
            assert said.json["retire"] == []
            assert "nothing to do" in run_ckpt("prune", URL, "--yes").out
        wait_agent_gone(URL)
        assert unfinished(URL) == 0
