"""`ckpt bench` against real stores, small."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import suite
from ckpt.bench import training
from ckpt.bench.render import to_document
from ckpt.bench.suite import run_suite
from ckpt.cli.exits import Exit
from tests.cli.stores import run_ckpt
from tests.servers import moto, rclone

SMALL = 1 << 20


def test_a_folder_is_measured_and_nothing_stays_there(tmp_path: Path) -> None:
    result = run_suite(os.fspath(tmp_path / "new" / "run"), SMALL, ["store", "codecs"])
    assert result.failed == {}
    names = {(each.section, each.name): each for each in result.figures}
    assert names["store", "put of 256 KiB, 4 at once"].ceiling > 0  # type: ignore[operator]
    assert names["store", "head"].ceiling is None
    assert names["codecs", "weights, bfloat16: raw / stored bytes"].value > 1.3
    assert all(each.value > 0 for each in result.figures)
    assert result.behaviour["read_after_write"] is True
    assert result.behaviour["multipart_part_bytes_min"] is None
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("server", [rclone, moto])
def test_an_s3_server_is_measured_beside_obstore(server, monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as at:
        for name, value in at.environment().items():
            monkeypatch.setenv(name, value)
        url = f"s3://{at.bucket}/below"
        result = run_suite(url, SMALL, ["store"])
        assert result.failed == {}
        assert {each.name for each in result.figures if each.ceiling is None} <= {
            f"{name}{tail}"
            for name in ("put of 1 KiB", "get of 1 KiB", "head", "list of 20 objects", "delete")
            for tail in ("", ", 95th percentile")
        }
        assert result.behaviour["multipart_part_bytes_min"] in (1 << 20, 5 << 20)
        said = run_ckpt("ls", f"s3://{at.bucket}", "--json")
        assert "ckpt-bench" not in said.out


@pytest.mark.slow
def test_the_job_is_measured_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVES", 1)
    monkeypatch.setattr(training, "RESTORES", 1)
    said = run_ckpt(
        "bench", tmp_path / "run", "--size", "4MiB", "--only", "save", "--only", "restore",
        "--out", tmp_path / "r.json", "--out", tmp_path / "r.html", "--out", tmp_path / "r.md",
    )  # fmt: skip
    assert said.code == 0, said.err
    body = json.loads((tmp_path / "r.json").read_text())
    found = {each["name"]: each["value"] for each in body["figures"]}
    for codec in ("auto", "raw"):
        assert found[f"puts for a checkpoint, codec {codec}"] >= 2  # a pack and a record
        assert found[f"state / stored bytes, codec {codec}"] == pytest.approx(1.1, abs=0.2)
        assert found[f"bytes sent for a checkpoint, codec {codec}"] > 3
        assert found[f"a start from the store, codec {codec}"] > 0
    for text in ((tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text(), said.out):
        assert "training paused by a checkpoint, codec auto" in text
    assert not (tmp_path / "run").exists()
    compared = run_ckpt("bench", "--compare", tmp_path / "r.json", tmp_path / "r.json")
    assert compared.code == 0
    assert "equal" in compared.out


@pytest.mark.slow
def test_the_benchmark_writes_three_reports_of_each_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVES", 1)
    monkeypatch.setattr(training, "RESTORES", 1)
    monkeypatch.setattr(training, "CODECS", ("auto",))
    words = ["suite", "--small", "--server", "folder", "--out", os.fspath(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    assert suite.main() == 0
    assert {each.name for each in tmp_path.iterdir()} == {
        *(f"suite-folder.{ending}" for ending in ("json", "md", "html")),
        "suite-folder-plots",
    }


def test_what_cannot_be_measured_is_said_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "JOB_LIMIT_S", 0.01)
    result = run_suite(os.fspath(tmp_path / "run"), SMALL, ["save", "codecs"])
    assert "did not end within" in result.failed["save"]
    assert {each.section for each in result.figures} == {"codecs"}
    (section,) = (each for each in to_document(result).sections if each.title == "Saving")
    assert "Not measured" in str(section.parts[0])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give the URL"),
        (["memory://x"], "within one process"),
        (["{tmp}/run", "--only", "speed"], "no section is called 'speed'"),
        (["{tmp}/run", "--only", "restore"], "name both"),
        (["{tmp}/run", "--size", "big"], "--size"),
        (["{tmp}/run", "--out", "r.pdf"], "must end with .json, .md or .html"),
        (["{tmp}/run", "--out", "{tmp}/no/r.json"], "is no folder"),
        (["{tmp}/run", "--prices", "1,2"], "three numbers"),
        (["{tmp}/run", "--prices", "1,2,-1"], "none below 0"),
        (["{tmp}/run", "--compare", "a", "b"], "give no URL"),
        (["--compare", "{tmp}/a", "{tmp}/b"], "cannot be read"),
    ],
)
def test_a_wrong_order_is_refused_before_anything_is_measured(words: list[str], says: str, tmp_path: Path) -> None:
    said = run_ckpt("bench", *(each.format(tmp=tmp_path) for each in words))
    assert said.code == Exit.USAGE
    assert says in said.err
    assert [*tmp_path.iterdir()] == []


def test_a_store_that_takes_nothing_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = run_ckpt("bench", tmp_path / "file" / "run")
    assert said.code == Exit.STORAGE
    assert "file" in said.err
