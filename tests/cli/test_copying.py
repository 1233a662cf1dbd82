"""ckpt cp."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.cli.exits import Exit
from tests.cli.stores import a_run, begin, flip_a_bit, listed_steps, opened, refused, run_ckpt, save


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_of_all_is_the_same_run_byte_for_byte(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    said = run_ckpt("cp", tmp_path / "a", tmp_path / "b", "--all")
    assert said.code == 0, said.err
    assert "4 checkpoints copied to" in said.out
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_by_default_the_line_is_copied_and_restores(tmp_path: Path) -> None:
    saved = a_run(tmp_path / "a")
    body = run_ckpt("cp", tmp_path / "a", tmp_path / "b", "--json").json
    assert body["copied"] == [str(saved[n]) for n in (0, 1, 3)]
    assert body["bytes"] > 0
    assert run_ckpt("verify", tmp_path / "b").code == 0
    assert listed_steps(tmp_path / "b", "--all") == [10, 20, 40]
    assert run_ckpt("diff", tmp_path / "a", "40", "40", "--other", tmp_path / "b").code == 0


def test_one_checkpoint_is_copied_with_all_that_it_refers_to(tmp_path: Path) -> None:
    saved = a_run(tmp_path / "a")
    said = run_ckpt("cp", tmp_path / "a", tmp_path / "b", "--step", saved[2])  # on a branch
    assert said.code == 0, said.err
    assert listed_steps(tmp_path / "b") == [30]
    assert run_ckpt("verify", tmp_path / "b").code == 0
    assert "1 checkpoint there already: 30" in run_ckpt("cp", tmp_path / "a", tmp_path / "b", "--step", saved[2]).out
    assert run_ckpt("cp", tmp_path / "a", tmp_path / "b", "--all").code == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("broken", ["record", "pack", "wrong pack"])
def test_a_copy_that_was_broken_off_goes_on(broken: str, tmp_path: Path) -> None:
    saved = a_run(tmp_path / "a")
    words = ["cp", tmp_path / "a", tmp_path / "b", "--all"]
    assert run_ckpt(*words).code == 0
    (record,) = (tmp_path / "b" / "commits").glob(f"{saved[3]}-*")
    record.unlink()
    (pack,) = (tmp_path / "b" / "data" / str(saved[3])).rglob("*.pack")
    if broken == "pack":
        pack.unlink()
    elif broken == "wrong pack":
        pack.write_bytes(bytes(pack.stat().st_size))
    body = run_ckpt(*words, "--json").json
    assert (body["copied"], len(body["there"])) == ([str(saved[3])], 3)
    assert (body["bytes"] == 0) == (broken == "record")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_what_is_damaged_is_not_copied_and_what_is_older_is(tmp_path: Path) -> None:
    saved = a_run(tmp_path / "a")
    pack = flip_a_bit(tmp_path / "a" / "data" / str(saved[3]))
    assert pack.name in refused(Exit.DIFFERENT, "cp", tmp_path / "a", tmp_path / "b")
    assert listed_steps(tmp_path / "b") == [10, 20]
    assert not list((tmp_path / "b" / "data").glob(f"{saved[3]}/**/*.pack"))


def test_a_url_with_another_run_is_refused_and_so_is_the_same_url(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    save(tmp_path / "other", begin(tmp_path / "other"), 1)
    before = files(tmp_path / "other")
    said = run_ckpt("cp", tmp_path / "a", tmp_path / "other")
    assert (said.code, "holds another run" in said.err) == (Exit.USAGE, True)
    assert files(tmp_path / "other") == before
    assert run_ckpt("cp", tmp_path / "a", f"{tmp_path}/x/../a").code == Exit.USAGE


def test_what_was_let_go_at_the_copy_stays_so(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    run_ckpt("cp", tmp_path / "a", tmp_path / "b")
    assert run_ckpt("prune", tmp_path / "b", "--last", "1", "--yes", "--now").code == 0
    said = run_ckpt("cp", tmp_path / "a", tmp_path / "b")
    assert "2 checkpoints retired there, so not copied again: 10, 20" in said.out
    with opened(tmp_path / "b") as store:
        assert len([*store.list("commits/")]) == 1
