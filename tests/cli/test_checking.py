"""ckpt verify and ckpt diff."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpt.types import Tick
from tests.cli.stores import a_run, arrays, begin, ckpt, save


def _flip_a_bit(folder: Path) -> Path:
    pack = sorted(folder.rglob("*.pack"))[-1]
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    return pack


def test_verify_finds_a_good_run_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path)
    said = ckpt(monkeypatch, "verify", tmp_path)
    assert said.code == 0
    assert "3 checkpoints, all good" in said.out
    assert len(ckpt(monkeypatch, "verify", tmp_path, "--all", "--json").json["checkpoints"]) == 4
    assert [c["step"] for c in ckpt(monkeypatch, "verify", tmp_path, "--newest", "--json").json["checkpoints"]] == [40]


def test_verify_names_a_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path)
    pack = _flip_a_bit(tmp_path)
    said = ckpt(monkeypatch, "verify", tmp_path, "--json")
    assert said.code == 1
    assert said.json["good"] is False
    bad = [each for each in said.json["checkpoints"] if not each["good"]]
    assert [each["step"] for each in bad] == [40]
    assert bad[0]["problems"][0]["key"] == pack.relative_to(tmp_path).as_posix()
    assert bad[0]["problems"][0]["tensors"]
    text = ckpt(monkeypatch, "verify", tmp_path)
    assert text.code == 1
    assert "step 40: DAMAGED" in text.out
    assert ckpt(monkeypatch, "verify", tmp_path, "--step", "10").code == 0


def test_verify_names_a_missing_pack_and_a_damaged_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path)
    sorted(tmp_path.rglob("*.pack"))[-1].unlink()
    record = sorted((tmp_path / "commits").iterdir())[0]
    record.write_bytes(record.read_bytes()[:-7])
    said = ckpt(monkeypatch, "verify", tmp_path, "--json")
    assert said.code == 1
    assert [each["step"] for each in said.json["checkpoints"] if not each["good"]] == [10, 40]


def test_two_checkpoints_of_one_step_are_told_apart_as_ls_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = begin(tmp_path)
    saved = [save(tmp_path, epoch, tick) for tick in (Tick(3), Tick(3, 1), Tick(3, 2))]
    sorted((tmp_path / "data" / str(saved[1])).rglob("*.pack"))[0].unlink()
    said = ckpt(monkeypatch, "verify", tmp_path).out
    assert "step 3: good" in said
    assert "step 3.1: DAMAGED" in said
    assert "step 3.2: good" in said
    found = ckpt(monkeypatch, "verify", tmp_path, "--json").json["checkpoints"]
    assert [(each["step"], each["sub"]) for each in found] == [(3, 0), (3, 1), (3, 2)]
    assert "step 3 and step 3.2: " in ckpt(monkeypatch, "diff", tmp_path, "3.0", "3.2").out
    assert "step 3.2" in ckpt(monkeypatch, "branch", tmp_path, "--at", "3.2").out


def test_of_one_step_on_the_line_and_on_a_branch_the_epoch_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin(tmp_path)
    saved = [save(tmp_path, first, step) for step in (1, 2)]
    second = begin(tmp_path, saved[0])
    save(tmp_path, second, 2)
    said = ckpt(monkeypatch, "verify", tmp_path, "--all").out
    assert "step 1: good" in said
    assert f"step 2 of epoch {first}: good" in said
    assert f"step 2 of epoch {second}: good" in said


def test_diff_says_which_tensors_differ_and_how_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = begin(tmp_path)
    before = arrays(1)
    after = dict(before) | {"model.bias": before["model.bias"].copy(), "new": np.zeros(3, np.float32)}
    after["model.bias"][4] += 0.5
    save(tmp_path, epoch, 1, before)
    save(tmp_path, epoch, 2, after, shared={"step": 1}, own={"loader": {"position": 9}})
    said = ckpt(monkeypatch, "diff", tmp_path, "1", "--json")
    assert said.code == 1
    body = said.json
    assert [(each["name"], each["elements"], each["size"]) for each in body["changed"]] == [("model.bias", 1, 10)]
    assert body["changed"][0]["max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert body["added"] == ["new"]
    assert body["differ"] is True
    assert any("position" in path for path in body["values"])
    text = ckpt(monkeypatch, "diff", tmp_path, "1", "2")
    assert text.code == 1
    assert "model.bias" in text.out
    assert "only in step 2: new" in text.out


def test_diff_of_equal_checkpoints_ends_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, begin(tmp_path / name), 5)
    assert ckpt(monkeypatch, "diff", tmp_path / "a", "5", "--other", tmp_path / "b").code == 0
    a_run(tmp_path / "c")
    assert ckpt(monkeypatch, "diff", tmp_path / "c", "10", "20", "--only", "*.table").code == 0
    assert ckpt(monkeypatch, "diff", tmp_path / "c", "10", "20").code == 1
    mistyped = ckpt(monkeypatch, "diff", tmp_path / "c", "10", "20", "--only", "*.tabel")
    assert mistyped.code == 2
    assert "matches *.tabel" in mistyped.err
