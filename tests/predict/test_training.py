"""Training: a sign that precedes failures is found on nodes that were not seen; where there is none, nothing is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpt.errors import UsageError
from ckpt.predict import training
from ckpt.predict.model import Trained, load, save
from ckpt.predict.recorded import read_signals
from tests.predict.made_up import write


@pytest.fixture(scope="module")
def with_sign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("signals") / "sign.jsonl", 1, nodes=10, hours=2.5, failures=3, sign=0.3)


def test_a_planted_sign_is_found_on_nodes_that_were_not_seen(with_sign: Path, tmp_path: Path) -> None:
    recorded = read_signals([with_sign])
    trained, found = training.train(recorded, seed=3, limit_s=60)
    assert found.auc > 0.7
    assert (found.failures, found.nodes) == (9, 3), "of the nodes that were held out"
    assert found.score.true >= 8
    assert found.score.precision > 0.4
    assert found.score.recall_bound > 0.4
    assert 100 < (found.score.lead_s or 0) <= 600
    save(trained, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.report["auc"] == pytest.approx(found.auc, abs=1e-5)
    held = training._split(recorded, 3)[1]
    assert training.evaluate(again, recorded.runs_of(held)).score == found.score


def test_the_file_says_the_same_as_torch(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(1)
    net = training._network(torch, 3, 16)
    arrays = {**training._arrays(net), "mean": np.zeros(3, np.float32), "deviation": np.ones(3, np.float32)}
    trained = Trained(("a", "b", "c"), training.WINDOW, 16, 5.0, 0.5, 1.0, 0.0, arrays, {})
    save(trained, tmp_path / "model")
    windows = np.random.default_rng(2).normal(scale=4, size=(500, training.WINDOW, 3)).astype(np.float32)
    with torch.no_grad():
        theirs = net(torch.from_numpy(windows)).numpy()
    assert np.abs(load(tmp_path / "model").logits(windows) - theirs).max() < 1e-5


def test_the_same_seed_gives_the_same_and_the_training_ends_in_time(with_sign: Path) -> None:
    recorded = read_signals([with_sign])
    one, two = (training.train(recorded, seed=5, limit_s=0.0)[0] for _ in range(2))
    rounds: list[int] = []
    other = training.train(recorded, seed=6, limit_s=0.0, progress=lambda done, total: rounds.append(done))[0]
    assert rounds == [1]
    assert all(np.array_equal(one.arrays[name], two.arrays[name]) for name in one.arrays)
    assert replace(one, arrays={}) == replace(two, arrays={})
    assert not np.array_equal(one.arrays["out"], other.arrays["out"])


def test_where_there_is_no_sign_nothing_is_proven(tmp_path: Path) -> None:
    recorded = read_signals([write(tmp_path / "x", 2, nodes=10, hours=2.5, failures=3, sign=0.0)])
    _, found = training.train(recorded, seed=1, limit_s=15)
    assert found.auc < 0.65
    assert not found.score.is_proven
    assert found.score.recall == 0


def test_nodes_are_held_out_and_not_readings(with_sign: Path) -> None:
    recorded = read_signals([with_sign])
    learn, held = training._split(recorded, 0)
    assert not set(learn) & set(held)
    assert set(learn) | set(held) == set(recorded.nodes)
    assert len(held) == 3


def test_too_few_failures_are_refused_in_words(tmp_path: Path) -> None:
    few = read_signals([write(tmp_path / "a", 1, nodes=12, hours=0.5, failures=0, sign=0.0)])
    with pytest.raises(UsageError, match=r"record 0 failures on 0 nodes \(12 nodes in all\)"):
        training.train(few)
    on_few_nodes = read_signals([write(tmp_path / "b", 1, nodes=2, hours=5, failures=5, sign=0.3)])
    with pytest.raises(UsageError, match="10 failures on 2 nodes"):
        training.train(on_few_nodes)


# -- what was recorded


def lines(path: Path, *said: tuple[str, float, int]) -> Path:
    with open(path, "w") as file:
        for event, at_s, pid in said:
            values = {"values": {"memory.used": 0.5}} if event == "signals" else {}
            file.write(json.dumps({"event": event, "time": at_s, "node": "n", "url": "u", "pid": pid, **values}) + "\n")
    return path


@pytest.mark.parametrize(
    ("said", "failures_s"),
    [
        ([("signals.begin", 0, 1), ("signals", 5, 1), ("signals.begin", 50, 2), ("signals", 55, 2)], [[5.0], []]),
        ([("signals", 5, 1), ("signals.begin", 50, 2), ("signals", 55, 2)], [[5.0], []]),
        ([("signals.begin", 0, 7), ("signals", 5, 7), ("signals.begin", 50, 7), ("signals", 55, 7)], [[5.0], []]),
        ([("signals.begin", 0, 1), ("signals", 5, 1), ("signals.end", 6, 1), ("signals", 55, 2)], [[], []]),
    ],
    ids=["came back", "its beginning is gone", "the next agent has the same number", "it had ended"],
)
def test_a_node_that_never_ended_and_came_back_was_lost(
    said: list[tuple[str, float, int]], failures_s: list[list[float]], tmp_path: Path
) -> None:
    """The run that came back may still go on: it has not failed."""
    assert [run.failures_s for run in read_signals([lines(tmp_path / "x", *said)]).runs] == failures_s


def test_a_file_that_was_renamed_as_it_was_full_may_be_given_after_the_one_that_follows_it(tmp_path: Path) -> None:
    """As names are expanded: x.jsonl, x.jsonl.1. Nobody was lost."""
    older = lines(tmp_path / "x.1", ("signals.begin", 0, 1), ("signals", 5, 1))
    newer = lines(
        tmp_path / "x", ("signals", 10, 1), ("signals.end", 11, 1), ("signals.begin", 50, 2), ("signals", 55, 2)
    )
    assert read_signals([newer, older]).runs == read_signals([older, newer]).runs
    assert read_signals([newer, older]).failures == 0


def test_what_is_given_twice_counts_once(with_sign: Path) -> None:
    """As by `signals.jsonl* signals.jsonl`, or a copy that was left beside it."""
    assert read_signals([with_sign, with_sign]).runs == read_signals([with_sign]).runs


def test_lines_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = lines(tmp_path / "x", ("signals", 1, 1), ("commit.done", 2, 1))
    right = {"event": "signals", "time": 3, "node": "n", "url": "u", "pid": 1, "values": {"a": 1, "b": "x", "c": True}}
    wrong = [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10_000, b"x" * 200_000]
    changes = ({"time": 10**400}, {"time": "now"}, {"pid": "1"}, {"values": 3}, {"node": None})
    wrong += [json.dumps({**right, **each}).encode() for each in changes]
    with open(path, "ab") as file:
        file.write(b"\n".join(wrong) + b"\n" + json.dumps(right).encode() + b"\n" + b'{"event": "sig')
    recorded = read_signals([path])
    assert [run.values for run in recorded.runs] == [[{"memory.used": 0.5}, {"a": 1.0}]]
    assert recorded.skipped >= len(wrong)


@pytest.mark.parametrize(("name", "value"), [("", 1.0), ("large", 1e60), ("larger", 10**400)])
def test_a_value_that_no_predictor_could_hold_is_left_out(
    with_sign: Path, tmp_path: Path, name: str, value: float
) -> None:
    rows = [json.loads(line) for line in with_sign.read_text().splitlines()]
    for row in rows:
        if row["event"] == "signals":
            row["values"][name] = value
    path = tmp_path / "x"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_signals([path]).runs == read_signals([with_sign]).runs
