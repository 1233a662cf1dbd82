"""ckpt predict: what is trained and said, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt.cli.exits import Exit
from ckpt.predict.model import load
from tests.cli.stores import run_ckpt
from tests.predict.made_up import write

Monkey = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def signals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("signals") / "signals.jsonl", 1, nodes=8, hours=1.5, failures=2, sign=0.3)


def test_a_predictor_is_trained_written_and_tried(signals: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    said = run_ckpt("predict", "train", signals, "--out", model, "--limit-s", "1")
    assert said.code == 0, said.err
    assert "16 failures" in said.out
    assert f"CKPT_PREDICTOR={model}" in said.out
    assert load(model).signals == ("io.some", "memory.used", "net.drops")
    tried = run_ckpt("predict", "check", model, signals)
    assert tried.code == 0
    assert "tried on   8 nodes with 16 failures" in tried.out


def test_what_was_found_is_one_json_object(signals: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    trained = run_ckpt("predict", "train", signals, "--out", model, "--limit-s", "0", "--json")
    body = json.loads(trained.out)
    assert body["recorded_failures"] == 16
    assert body["proven"] in (True, False)
    assert {"auc", "precision", "recall", "true", "late", "false", "missed", "model", "signals"} <= body.keys()
    checked = json.loads(run_ckpt("predict", "check", model, signals, "--json").out)
    assert checked["nodes"] == 8


def test_what_cannot_be_is_refused_in_words(signals: Path, tmp_path: Path) -> None:
    few = write(tmp_path / "few", 1, nodes=3, hours=0.5, failures=1, sign=0.3)
    (tmp_path / "empty").touch()
    (tmp_path / "broken").write_bytes(b"ckptpred" * 100)
    to = ["--out", tmp_path / "model"]
    for words, code, text in (
        (["train", few, *to], Exit.USAGE, "Training needs 8 failures"),
        (["train", tmp_path / "nowhere", *to], Exit.USAGE, "cannot be read"),
        (["train", tmp_path / "empty", *to], Exit.USAGE, "CKPT_SIGNALS_LOG"),
        (["train", signals, "--out", tmp_path], Exit.USAGE, "is no file"),
        (["train", signals, "--out", tmp_path / "empty/model"], Exit.USAGE, f"{tmp_path / 'empty'} is no folder"),
        (["train", few, "--out", tmp_path / "no/model"], Exit.USAGE, f"{tmp_path / 'no'} is no folder"),
        (["check", tmp_path / "broken", signals], Exit.DIFFERENT, "not a predictor that ckpt can read"),
        (["check", tmp_path / "nowhere", signals], Exit.USAGE, "nowhere"),
    ):
        said = run_ckpt("predict", *words, "--json")
        assert said.code == code, said.err
        assert text in json.loads(said.out)["error"]["message"]
    assert not (tmp_path / "model").exists()
