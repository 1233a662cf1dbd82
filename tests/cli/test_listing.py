"""ckpt ls and ckpt show."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

from ckpt.cli import out
from ckpt.cli.exits import Exit
from ckpt.store.commit import Committer
from ckpt.types import Identity, Version
from tests.cli.stores import a_run, arrays, begin, opened, refused, run_ckpt, save
from tests.store.build import Tensor, snapshot


def test_ls_lists_the_line_and_says_that_there_are_branches(tmp_path: Path) -> None:
    a_run(tmp_path)
    said = run_ckpt("ls", tmp_path)
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines() if line.split()[0].isdecimal()] == ["10", "20", "40", "1"]
    assert "1 more on branches" in said.out


def test_ls_says_what_was_stored_and_measured(tmp_path: Path) -> None:
    epoch = begin(tmp_path)
    save(tmp_path, epoch, 1, metrics={"val_loss": 0.5})
    row = run_ckpt("ls", tmp_path, "--json").json["checkpoints"][0]
    assert row["metrics"] == {"val_loss": 0.5}
    assert row["bytes"] >= sum(array.nbytes for array in arrays(1).values())
    assert 0 < row["stored"] <= row["bytes"]
    assert (row["shared"], row["start"]) == (0, 1)
    text = run_ckpt("ls", tmp_path).out
    assert text.split()[:6] == ["step", "saved", "age", "start", "stored", "metrics"]
    assert "val_loss=0.5" in text
    assert "MiB   val_loss" in text
    assert "bytes" in run_ckpt("ls", tmp_path, "--long").out


def test_ls_of_a_folder_that_is_no_run_lists_the_runs_below_it(tmp_path: Path) -> None:
    a_run(tmp_path / "one")
    save(tmp_path / "team" / "two", begin(tmp_path / "team" / "two"), Version(7, 1))
    begin(tmp_path / "team" / "began")
    (tmp_path / "notes").mkdir()
    (tmp_path / "latest").symlink_to("one")
    found = run_ckpt("ls", tmp_path, "--json").json["runs"]
    assert [(Path(each["url"]).relative_to(tmp_path).as_posix(), each["checkpoints"]) for each in found] == [
        *(("one", 3), ("team/began", 0), ("team/two", 1))
    ]
    lines = run_ckpt("ls", tmp_path).out.splitlines()
    assert [line.split()[1:3] for line in lines[2:]] == [["3", "40"], ["0", "none"], ["1", "7.1"]]
    said = run_ckpt("ls", tmp_path / "notes")
    assert (said.code, "no run has saved there" in said.err) == (Exit.NO_CHECKPOINT, True)


def test_ls_quick_reads_no_record(tmp_path: Path) -> None:
    save(tmp_path, begin(tmp_path), 1)
    for record in (tmp_path / "commits").iterdir():
        record.write_bytes(b"")
    assert run_ckpt("ls", tmp_path).code == Exit.DIFFERENT
    said = run_ckpt("ls", tmp_path, "--quick")
    assert (said.code, said.out.splitlines()[0].split()) == (0, ["step", "saved", "age", "start"])


def test_a_damaged_record_costs_its_own_row_only(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    (record,) = (tmp_path / "commits").glob(f"{saved[1]}-*")
    record.write_bytes(record.read_bytes()[:100])
    said = run_ckpt("ls", tmp_path, "--long")
    assert said.code == 1
    rows = {line.split()[0]: line.split() for line in said.out.splitlines()}
    assert "damaged" in rows["20"]
    assert "MiB" in rows["10"]
    assert "MiB" in rows["40"]
    assert record.name in said.out
    found = run_ckpt("ls", tmp_path, "--long", "--json")
    assert found.code == 1
    assert [row["error"] and row["error"]["kind"] for row in found.json["checkpoints"]] == [None, "damaged", None]


def test_only_matches_the_name_by_which_a_tensor_is_restored(tmp_path: Path) -> None:
    epoch, own = begin(tmp_path), Tensor("int64", np.arange(3), owner="rank=1")
    snap = snapshot([("own", own), ("w", Tensor("int64", np.arange(3)))], shared={})
    with opened(tmp_path) as store:
        Committer(store, "a").commit(Identity(epoch, Version(1)), snap.manifest, snap.frame, check=lambda: None)
    body = run_ckpt("show", tmp_path, "--only", "*@rank=1", "--json").json
    assert [(each["name"], each["owner"]) for each in body["tensors"]] == [("own", "rank=1")]


def test_the_time_that_a_record_says_is_shown_where_it_is_read(tmp_path: Path) -> None:
    """A run that was copied has another one in its files."""
    epoch, snap = begin(tmp_path), snapshot([("w", Tensor("int64", np.arange(3)))], shared={})
    for step, time_s in ((1, 1e9), (2, 1e300), (3, "then")):
        about = {"time_s": time_s, "host": "there"}
        with opened(tmp_path) as store:
            committer, what = Committer(store, f"w{step}"), (Identity(epoch, Version(step)), snap.manifest, snap.frame)
            committer.commit(*what, about=about, check=lambda: None)
    known, *unknown = (row["saved"] for row in run_ckpt("ls", tmp_path, "-l", "--json").json["checkpoints"])
    assert known == 1e9
    assert min(unknown) > 1.7e9, "of the files"
    assert run_ckpt("show", tmp_path, "--step", "1", "--json").json["saved"] == 1e9
    text = run_ckpt("show", tmp_path, "--step", "1").out
    assert out.format_time(1e9) in text
    assert "host there" in text
    assert "saved" not in run_ckpt("show", tmp_path, "--step", "2").out


def test_show_names_the_tensors(tmp_path: Path) -> None:
    a_run(tmp_path)
    body = run_ckpt("show", tmp_path, "--step", "20", "--only", "*.weight", "--json").json
    assert body["step"] == 20
    assert body["ranks"] == ["rank=0"]
    weight = {"name": "model.weight", "owner": "", "dtype": "float32", "shape": [10, 100], "parts": 1, "bytes": 4000}
    assert body["tensors"] == [weight]
    assert "model.weight" in run_ckpt("show", tmp_path, "-t").out


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    a_run(tmp_path)
    said = run_ckpt("show", tmp_path, "--step", "11", "--json")
    assert said.code == 3
    assert said.err.startswith("error: ")
    assert "10, 20, 40" in said.err
    assert said.json["error"]["kind"] == "no-checkpoint"


@pytest.mark.parametrize("step", ["9" * 5000, "²", "-10", "", "10.", "1_0"])
def test_what_is_no_step_is_not_there(step: str, tmp_path: Path) -> None:
    a_run(tmp_path)
    said = run_ckpt("show", tmp_path, f"--step={step}")
    assert said.code == Exit.NO_CHECKPOINT
    assert len(said.err) < 500


def test_a_checkpoint_within_a_step_is_found_by_the_name_that_ls_gives_it(tmp_path: Path) -> None:
    epoch = begin(tmp_path)
    saved = [save(tmp_path, epoch, Version(300, sub)) for sub in (0, 1, 2)]
    *lines, explained = run_ckpt("ls", tmp_path).out.splitlines()[2:]
    listed = [line.split()[0] for line in lines]
    assert listed == ["300", "300.1", "300.2"]
    assert explained == "300.1: saved after step 300 had ended, by ck.save(), ck.poll() or at the exit"
    for name, identity in {"300.0": saved[0], "300.1": saved[1], "300.2": saved[2], "300": saved[2]}.items():
        assert run_ckpt("show", tmp_path, "--step", name, "--json").json["identity"] == str(identity)
    for name, identity in zip(listed, saved, strict=True):
        shown = run_ckpt("show", tmp_path, "--step", str(identity)).out.splitlines()
        assert ["step", name] in [line.split() for line in shown]
    assert "300, 300.1, 300.2" in refused(3, "show", tmp_path, "--step", "300.3")


def test_what_a_store_has_neither_colours_the_terminal_nor_moves_its_cursor(tmp_path: Path) -> None:
    epoch = begin(tmp_path)
    save(tmp_path, epoch, 1, {"a\x1b]0;name\x07b": np.ones(3), "c\nd\x9b": np.ones(3)}, metrics={"\x1b[31m": 1.0})
    save(tmp_path, epoch, 2, {"e": np.ones(3)})
    for words in (["show", "--step", "1", "-t"], ["show", "--step", "1"], ["diff", "1"], ["ls", "-l"]):
        said = run_ckpt(words[0], tmp_path, *words[1:])
        assert said.out.replace("\n", "").isprintable(), words
    to = ["--to", tmp_path / "x", "--step", "1", "--strip", "z"]
    said = run_ckpt("restore", tmp_path, *to)
    assert said.err.replace("\n", "").isprintable()
    assert "a?]0;name?b" in said.err
    assert "a?]0;name?b " in run_ckpt("show", tmp_path, "--step", "1", "-t").out
    assert "c?d? " in run_ckpt("show", tmp_path, "--step", "1", "-t").out
    tensors = run_ckpt("show", tmp_path, "--step", "1", "--json").json["tensors"]
    assert tensors[0]["name"] == "a\x1b]0;name\x07b", "programs get what it is called"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_narrow_terminal_names_go_on_in_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model.transformer.layers.{n}.self_attention.in_projection.weight" for n in (0, 1, 10)]
    monkeypatch.setenv("COLUMNS", "60")
    with contextlib.redirect_stdout(Terminal()) as said:
        out.print_table(("name", "dtype", "bytes"), [(name, "float32", "12.0 MiB") for name in names], right=("bytes",))
    lines = said.getvalue().splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert "…" not in said.getvalue()
    assert "".join(line.split()[0] for line in lines[2:]) == "".join(names)
    assert [line.split()[1:] for line in lines if "MiB" in line] == [["float32", "12.0", "MiB"]] * 3
