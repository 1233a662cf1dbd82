"""Start-up is part of the interface: nothing heavy is imported before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import stores

PROBE = """
import sys
sys.argv = ["ckpt", *sys.argv[1:]]
from ckpt.cli.main import main
try:
    main()
except SystemExit as exc:
    assert not exc.code, exc.code
heavy = {"torch", "numpy", "fsspec", "obstore", "s3fs", "rich", "pydantic", "ckpt.cli.rehearse", "ckpt.cli.checking"}
print("HEAVY", *sorted(heavy & set(sys.modules)))
"""


def _heavy(*words: object) -> set[str]:
    command = [sys.executable, "-c", PROBE, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_imports_the_commands_and_nothing_heavy(words: list[str]) -> None:
    assert _heavy(*words) == {"ckpt.cli.rehearse", "ckpt.cli.checking"}


@pytest.mark.parametrize("command", ["ls", "doctor", "restore", "simulate"])
def test_the_help_of_one_command_imports_no_other_command(command: str) -> None:
    assert _heavy(command, "--help") == set()


@pytest.mark.parametrize("words", [[], ["ls"], ["predict", "train"], ["rehearse"]], ids=" ".join)
def test_h_is_help_everywhere(words: list[str]) -> None:
    said = stores.run_ckpt(*words, "-h")
    assert (said.code, "-h, --help" in said.out) == (0, True)


@pytest.mark.parametrize(("typed", "found"), [("ckpt re", {"restore", "rehearse"}), ("ckpt prune --n", {"--now"})])
def test_the_shell_completes_commands_and_options(typed: str, found: set[str]) -> None:
    asked = {"_CKPT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-c", "import sys; sys.argv = ['ckpt']; from ckpt.cli.main import main; main()"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) >= found
    assert not [word for word in done.stdout.split() if not word.startswith(typed.split()[-1])]


def test_listing_a_local_run_imports_neither_torch_nor_a_storage_library(tmp_path: Path) -> None:
    stores.a_run(tmp_path)
    assert _heavy("ls", tmp_path, "--quick", "--json") == set()
    assert _heavy("ls", tmp_path, "--json") == {"numpy"}  # it reads records
    assert _heavy("ls", tmp_path) == {"numpy", "rich"}


@pytest.mark.parametrize(
    "words",
    [
        ["show", "{run}"],
        ["verify", "{run}"],
        ["diff", "{run}", "10", "10"],
        ["restore", "{run}", "--to", "{to}.safetensors", "--dtype", "bfloat16"],
        ["restore", "{run}", "--to", "{to}"],
        ["branch", "{run}", "--at", "10"],
        ["prune", "{run}", "--last", "1", "--yes"],
        ["doctor", "{run}"],
        ["watch", "{run}", "--once"],
    ],
    ids=" ".join,
)
def test_no_command_imports_torch_but_to_write_its_files(words: list[str], tmp_path: Path) -> None:
    stores.a_run(tmp_path / "run")
    assert "torch" not in _heavy(*(word.format(run=tmp_path / "run", to=tmp_path / "to") for word in words))
