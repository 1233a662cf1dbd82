"""ckpt doctor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.cli.doctor import store_problems
from ckpt.cli.exits import Exit
from ckpt.storage.probe import Probe
from tests.checkpointer.proxy import answer, proxy
from tests.cli.stores import run_ckpt
from tests.servers import rclone


def test_doctor_tries_the_store_and_leaves_nothing_there(tmp_path: Path) -> None:
    said = run_ckpt("doctor", tmp_path / "run", "--json")
    assert said.code == 0, said.out
    assert said.json["problems"] == []
    assert said.json["store"]["put if absent"] is True
    assert "GB/s" in said.json["store"]["put, one object"]
    assert "GB/s" in said.json["machine"]["memcpy, one thread"]
    assert said.json["environment"]["multilevel-ckpt"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    assert run_ckpt("doctor", tmp_path / "there" / "new" / "run").code == 0
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_doctor_never_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    said = run_ckpt("doctor")
    assert "AWS_SECRET_ACCESS_KEY" in said.out
    assert "hush" not in said.out + said.err


@pytest.mark.parametrize("is_listed", [True, False])
def test_of_a_store_that_takes_no_object_it_is_said_whether_it_can_be_read_and_what_was_not_tried(
    is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rclone() as server, proxy(server) as store:
        for name, value in store.at.environment().items():
            monkeypatch.setenv(name, value)
        for method in ("PUT", "POST", "DELETE", *(() if is_listed else ("GET",))):
            store.fail(answer(403, "AccessDenied"), method)
        said = run_ckpt("doctor", f"s3://{server.bucket}/run", "--json")
    assert said.code == Exit.STORAGE
    (problem,) = said.json["problems"]
    assert "put" in problem
    assert "AccessDenied" in problem
    for part in ("can be listed", "every save would fail", "Not tried", "put if absent", "list after delete"):
        assert (part in problem) == is_listed
    assert said.json["store"].get("can be listed", False) == is_listed


@pytest.mark.parametrize("url", ["s3:/bucket/run", "file"])
def test_what_is_no_url_of_a_store_is_a_wrong_call(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.chdir(tmp_path)
    said = run_ckpt("doctor", url, "--json")
    assert said.code == Exit.USAGE
    assert said.json["error"]["kind"] == "usage"


def test_what_ckpt_needs_of_a_store_and_does_not_get_is_a_problem() -> None:
    good = Probe(True, True, True, True, True, True, True, clock_skew_s=-1.0, put_s=0.1, get_s=0.1)
    assert store_problems(good) == []
    assert store_problems(replace(good, put_if_absent=False, ranged_get=False)) == []  # ckpt is right all the same
    for name in ("read_after_write", "read_after_overwrite", "list_after_write", "delete", "list_after_delete"):
        (problem,) = store_problems(replace(good, **{name: False}))
        assert "another store" in problem, name
    (problem,) = store_problems(replace(good, clock_skew_s=-4000.0))
    assert "4000 s" in problem


def test_a_socket_folder_that_others_may_read_is_a_problem(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o755)
    said = run_ckpt("doctor")
    assert said.code == Exit.FAILED
    assert f"problem: {runtime_dir}" in said.out
