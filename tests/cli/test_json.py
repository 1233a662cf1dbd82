"""Every command takes --json: one JSON object on standard output and nothing else, whether it went well or failed."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

from ckpt.cli.exits import Exit
from ckpt.cli.main import make_app
from tests.cli.stores import Said, a_run, ckpt
from tests.cli.test_live import an_agent

NOWHERE = "/nowhere/run"
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
FAILURE: dict[str, tuple[list[str], Exit]] = {
    "ls": ([NOWHERE], Exit.NO_CHECKPOINT),
    "show": (["{url}", "--step", "11"], Exit.NO_CHECKPOINT),
    "verify": ([NOWHERE], Exit.NO_CHECKPOINT),
    "diff": (["{url}", "10", "11"], Exit.NO_CHECKPOINT),
    "restore": (["{url}", "--to", "{url}"], Exit.USAGE),
    "branch": (["{url}", "--at", "11"], Exit.NO_CHECKPOINT),
    "prune": (["{url}", "--best", "val_loss"], Exit.USAGE),
    "cp": ([NOWHERE, "{to}"], Exit.NO_CHECKPOINT),
    "import": ([NOWHERE, "{to}"], Exit.NO_CHECKPOINT),
    "rehearse": (["{to}", "--", "no-such-program-here"], Exit.USAGE),
    "watch": ([NOWHERE, "--once"], Exit.NO_CHECKPOINT),
    "preempt": (["{url}"], Exit.AGENT),
    "agent": (["{url}", "--listen", "127.0.0.1:0", "--memory", "1MiB"], Exit.USAGE),
    "doctor": (["{blocked}"], Exit.STORAGE),
    "bench": (["{blocked}"], Exit.STORAGE),
}


# What pickle writes of a Metadata of torch's DCP with two empty dicts.
EMPTY_DCP = (
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}"
    b"(X\x13\x00\x00\x00state_dict_metadata}X\x0c\x00\x00\x00storage_data}ub."
)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    a_run(tmp_path / "run")
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "dcp"  # of torch's distributed checkpoint, without tensors and values
    folder.mkdir()
    (folder / ".metadata").write_bytes(EMPTY_DCP)
    return {
        "dcp": str(folder),
        "url": str(tmp_path / "run"),
        "to": str(tmp_path / "new"),
        "blocked": str(tmp_path / "file" / "run"),
    }


def say(monkeypatch: pytest.MonkeyPatch, command: str, words: list[str], places: dict[str, str]) -> Said:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    given = [word.format(**places) if "{" in word else word for word in words]
    return ckpt(monkeypatch, command, "--json", *given)


def test_every_command_is_tried_here() -> None:
    commands = {command.name for command in make_app([]).registered_commands}
    assert commands == set(FAILURE)
    assert commands - {"agent"} == set(SUCCESS)  # it serves until it is told to end: see test_agent.py


@pytest.mark.parametrize("command", SUCCESS)
def test_what_went_well_is_one_json_object(
    command: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        if command in ("watch", "preempt"):
            stack.enter_context(an_agent(Path(places["url"]), {"status": {"job": None}, "preempt": {}}))
        said = say(monkeypatch, command, SUCCESS[command], places)
    assert said.code == 0, said.err
    body = json.loads(said.out)
    assert isinstance(body, dict)
    assert "error" not in body


@pytest.mark.parametrize("command", FAILURE)
def test_what_failed_is_one_json_object_that_says_why(
    command: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, code = FAILURE[command]
    said = say(monkeypatch, command, words, places)
    assert said.code == code, said.err
    body = json.loads(said.out)
    if command == "doctor":  # an error of the store is what it is asked for
        assert body["problems"] == [body["store"]["error"]]
        return
    assert set(body) == {"error"}
    assert set(body["error"]) == {"kind", "message"}
    assert said.err.splitlines()[-1] == f"error: {body['error']['message']}"
