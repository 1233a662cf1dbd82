"""Every command takes --json: one JSON object on standard output and nothing else. Failures: see test_errors.py."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from ckpt.cli.main import make_app
from tests.cli.stores import a_run, run_ckpt
from tests.cli.test_live import an_agent

SUCCESS: dict[str, list[str]] = {  # {url} is a run, {to} a file that is not there yet
    "ls": ["{url}", "--all", "--long"],
    "show": ["{url}"],
    "verify": ["{url}"],
    "diff": ["{url}", "40", "40"],
    "restore": ["{url}", "--to", "{to}"],
    "branch": ["{url}", "--at", "20"],
    "prune": ["{url}", "--last", "1"],
    "cp": ["{url}", "{to}"],
    "import": ["{dcp}", "{to}"],
    "rehearse": ["{to}", "--at", "2", "--", sys.executable, "-m", "tests.cli.fake_train", "{to}", "4", "exact"],
    "watch": ["{url}", "--once"],
    "preempt": ["{url}"],
    "doctor": ["{url}"],
    "bench": ["{url}-bench", "--only", "codecs", "--size", "1MiB"],
}


# What pickle writes of a Metadata of torch's DCP with two empty dicts.
EMPTY_DCP = (
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}"
    b"(X\x13\x00\x00\x00state_dict_metadata}X\x0c\x00\x00\x00storage_data}ub."
)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    a_run(tmp_path / "run")
    folder = tmp_path / "dcp"  # of torch's distributed checkpoint, without tensors and values
    folder.mkdir()
    (folder / ".metadata").write_bytes(EMPTY_DCP)
    return {"dcp": str(folder), "url": str(tmp_path / "run"), "to": str(tmp_path / "new")}


def test_every_command_is_tried_here() -> None:
    commands = {command.name for command in make_app([]).registered_commands}
    assert commands - {"agent"} == set(SUCCESS)  # it serves until it is told to end: see test_agent.py


@pytest.mark.parametrize("command", SUCCESS)
def test_what_went_well_is_one_json_object(command: str, places: dict[str, str]) -> None:
    with contextlib.ExitStack() as stack:
        if command in ("watch", "preempt"):
            stack.enter_context(an_agent(Path(places["url"]), {"status": {"job": None}, "preempt": {}}))
        said = run_ckpt(command, "--json", *(word.format(**places) for word in SUCCESS[command]))
    assert said.code == 0, said.err
    assert isinstance(said.json, dict)
    assert "error" not in said.json
