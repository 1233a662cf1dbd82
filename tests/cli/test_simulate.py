"""ckpt simulate: what is made and said, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt.cli.exits import Exit
from ckpt.cli.simulating import TraceLaw
from ckpt.simulate.generators import GENERATORS, Fleet, weibull
from ckpt.simulate.trace_files import load
from tests.cli.stores import run_ckpt

Monkey = pytest.MonkeyPatch


def test_a_generated_trace_is_written_and_fitted(tmp_path: Path) -> None:
    to = tmp_path / "made.csv"
    words = ["weibull", "--nodes", 8, "--hours", 200, "--seed", 3, "--shape", 0.6, "--crashes", 0.01, "-o", to]
    said = run_ckpt("simulate", "generate", *words)
    assert said.code == 0, said.err
    made = weibull(Fleet(8, 200, 3, crashes=0.01), shape=0.6)
    assert load(to).events == made.events
    losses = sum(event.kind == "remove" for event in made.events)
    assert said.out == f"wrote {to}: 8 nodes over 200 h, {losses} lost\n"
    fitted = run_ckpt("simulate", "fit", to)
    assert fitted.code == 0, fitted.err
    assert max(map(len, fitted.out.splitlines())) <= 80
    row = next(line for line in fitted.out.splitlines() if line.startswith("nodes lost "))
    assert row.split() == f"nodes lost {losses} at {losses} moments".split()
    body = run_ckpt("simulate", "fit", to, "--json").json
    assert (body["losses"], body["nodes_max"], body["never_back"]) == (losses, 8, 0)
    assert body["uptime_shape"]["low"] < 0.6 < body["uptime_shape"]["high"]


@pytest.mark.parametrize("law", GENERATORS)
def test_every_law_can_be_had(law: str, tmp_path: Path) -> None:
    words = [law, "--nodes", "4", "--hours", "99", "-o", tmp_path / law, "--json"]
    body = run_ckpt("simulate", "generate", *words).json
    assert body == {"trace": str(tmp_path / law), "law": law, "events": body["events"], "losses": body["losses"]}
    assert len(load(tmp_path / law).events) == body["events"]
    assert set(TraceLaw) == GENERATORS.keys()


def test_the_widest_table_fits_on_a_screen(tmp_path: Path) -> None:
    """Large bulk losses, a number that is never back, a price."""
    data = [9_999, 1, 10_000, 7, 10_000, 3, 9_999] * 2
    body = {"metadata": {"gap_seconds": 12_345}, "data": data, "prices": [98_765.4321] * 14}
    (tmp_path / "zone").write_text(json.dumps(body))
    said = run_ckpt("simulate", "fit", tmp_path / "zone", "--seed", "5")
    assert said.code == 0, said.err
    assert max(map(len, said.out.splitlines())) <= 80
    assert "never after" in said.out
    assert "USD per node-hour" in said.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["fit", "{}/nowhere"], "No such file"),
        (["fit", "{}/bad"], "line 2: 'remove b'"),
        (["fit", "{}/few"], "few: too few losses to fit: 1"),
        (["generate", "bulk", "--nodes", "4", "--hours", "9", "--shape", "1", "-o", "{}/x"], "--shape is no option of"),
        (["generate", "bulk", "--nodes", "4", "--hours", "nan", "-o", "{}/x"], "hours=nan"),
        (["generate", "bulk", "--nodes", "4", "--hours", "9", "-o", "{}"], "Is a directory"),
        (["generate", "linear", "--nodes", "4", "--hours", "9", "-o", "{}/x"], "linear"),
        (["generate", "bulk", "--hours", "9", "-o", "{}/x"], "--nodes"),
    ],
)
def test_what_cannot_be_is_refused_in_words(words: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("0,add,a\n5,remove,b")
    (tmp_path / "few").write_text("0,add,a\n5,remove,a")
    said = run_ckpt("simulate", *(word.format(tmp_path) for word in words), "--json")
    assert said.code == Exit.USAGE
    assert text in said.json["error"]["message"]
    assert not (tmp_path / "x").exists()
