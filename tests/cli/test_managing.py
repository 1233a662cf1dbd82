"""ckpt branch and ckpt prune."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

import ckpt as ckpt_package
from ckpt.cli.exits import Exit
from tests.cli.stores import a_run, begin, flip_a_bit, listed_steps, refused, run_ckpt, save


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_prune_without_yes_changes_nothing(tmp_path: Path) -> None:
    a_run(tmp_path)
    before = _files(tmp_path)
    said = run_ckpt("prune", tmp_path, "--last", "1")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "would be retired:"
    assert [line.split(",")[0] for line in lines[1:3]] == ["  step 10", "  step 20"]
    assert max(map(len, lines)) <= 80
    assert "deleted by a prune 10 s after it was retired, or later: " in said.out
    assert "nothing was changed" in said.out
    assert _files(tmp_path) == before


def test_prune_with_yes_retires_what_the_rules_let_go(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    body = run_ckpt("prune", tmp_path, "--last", "1", "--every", "20", "--yes", "--json").json
    assert body["retire"] == [str(saved[0])]
    assert body["done"] is True
    assert listed_steps(tmp_path) == [20, 40]
    assert run_ckpt("verify", tmp_path).code == 0


def test_prune_now_deletes_at_once_but_for_what_a_reader_holds(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    words = ["prune", tmp_path, "--last", "1", "--now"]
    dry = run_ckpt(*words).out
    assert "nothing was changed" in dry
    assert "minutes" not in dry
    with ckpt_package.open(tmp_path) as run, run.held([run.find(20)]):
        said = run_ckpt(*words, "--yes")
        assert said.code == 0, said.err
        assert max(map(len, said.out.splitlines())) <= 80
        assert f"  step 10, {saved[0]}: 1 record, " in said.out
        assert f"waiting for the end of their grace period, or for their readers:\n  step 20, {saved[1]}" in said.out
        assert not (tmp_path / "data" / str(saved[0])).exists() or not list(
            (tmp_path / "data" / str(saved[0])).iterdir()
        )
        assert run.find(20).tensor("model.bias").shape == (10,)
    assert run_ckpt(*words, "--yes").code == 0
    assert run_ckpt("verify", tmp_path).code == 0
    assert not any(path.startswith(f"commits/{saved[1]}") for path in _files(tmp_path))


def test_prune_now_makes_room_on_a_disk_that_has_none(small_disk: Path) -> None:
    """Records go before tombstones come: these have no room otherwise."""
    a_run(small_disk / "run")
    with contextlib.suppress(OSError), open(small_disk / "rest", "wb", buffering=0) as rest:
        while True:
            rest.write(bytes(4096))
    words = ["prune", small_disk / "run", "--last", "1", "--yes"]
    said = run_ckpt(*words)
    assert (said.code, "add --now" in said.err) == (Exit.STORAGE, True)
    assert run_ckpt(*words, "--now").code == 0
    assert listed_steps(small_disk / "run") == [40]
    assert run_ckpt("verify", small_disk / "run").code == 0
    assert os.statvfs(small_disk).f_bavail > 0


def test_prune_lets_nothing_go_where_the_newest_is_damaged(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    flip_a_bit(tmp_path / "data" / str(saved[-1]))
    before = _files(tmp_path)
    said = refused(Exit.DIFFERENT, "prune", tmp_path, "--last", "1", "--yes")
    assert "step 40" in said
    assert "Nothing was retired" in said
    assert _files(tmp_path) == before
    assert run_ckpt("prune", tmp_path, "--last", "1", "--yes", "--no-check").code == 0
    assert listed_steps(tmp_path) == [40]


def test_prune_leaves_what_lies_beside_the_run_and_does_not_stumble_over_it(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "latest").symlink_to("data")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "to-all").symlink_to("/")
    assert run_ckpt("prune", tmp_path, "--last", "1", "--yes").code == 0
    assert (tmp_path / "latest").is_symlink()


def test_a_metric_that_no_checkpoint_has_lets_nothing_go(tmp_path: Path) -> None:
    a_run(tmp_path)
    for more in ([], ["--yes", "--last", "1"]):
        said = run_ckpt("prune", tmp_path, "--best", "val_los:min", *more, "--json")
        assert said.code == Exit.USAGE
        assert "val_loss" in said.json["error"]["message"]
    assert not (tmp_path / "retired").exists()


def test_where_a_record_that_cannot_be_read_is_in_the_way_prune_says_the_way_out(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    (record,) = (tmp_path / "commits").glob(f"{saved[0]}-*")
    record.write_bytes(record.read_bytes()[:-7])
    said = run_ckpt("prune", tmp_path, "--last", "1", "--yes").out
    assert "no data can be deleted" in said
    way_out = said.partition("ckpt prune ")[2].partition("`")[0].split()
    assert way_out == ["--also", str(saved[0])]
    said = run_ckpt("prune", tmp_path, *way_out, "--yes").out
    assert f"retired:\n  step {saved[0].version.label}, {saved[0]}\n" in said
    assert "--also" not in said
    assert "--also" not in run_ckpt("prune", tmp_path, "--last", "1").out


def test_a_branch_moves_the_line_and_deletes_nothing(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    before = _files(tmp_path)
    said = run_ckpt("branch", tmp_path, "--at", "20", "--json")
    assert said.code == 0
    assert said.json["parent"] == str(saved[1])
    assert listed_steps(tmp_path) == [10, 20]
    assert _files(tmp_path) >= before
    found = run_ckpt("ls", tmp_path, "--all", "--json").json["checkpoints"]
    assert [(row["step"], row["where"]) for row in found] == [
        (10, "line"),
        (20, "line"),
        (30, "branch"),
        (40, "branch"),
    ]
    assert "step 30" in run_ckpt("branch", tmp_path, "--at", saved[2]).out  # from a branch, by its identity
    assert listed_steps(tmp_path) == [10, 20, 30]


@pytest.mark.parametrize("words", [["branch", "--at", "10"], ["prune", "--last", "1", "--yes"]])
def test_an_unclosed_run_that_is_dead_is_waited_for_and_then_changed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "0.05")
    epoch = begin(tmp_path, closed=False)
    save(tmp_path, epoch, 10)
    save(tmp_path, epoch, 20)
    assert run_ckpt(words[0], tmp_path, *words[1:]).code == 0
