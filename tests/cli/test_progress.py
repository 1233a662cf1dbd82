"""Long commands show a bar where standard error is a terminal, and only there; standard output stays clean."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.stores import a_run

ROOT = Path(__file__).parents[2]
LONG = {
    "verify": ["{url}"],
    "diff": ["{url}", "10", "20"],
    "restore": ["{url}", "--to", "{to}"],
    "prune": ["{to}", "--last", "1", "--yes"],
}


def on_terminal(*words: str) -> tuple[str, str]:
    """Standard output, which is a pipe, and what came to the terminal that standard error is."""
    terminal, side = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "ckpt.cli.main", *words], stdout=subprocess.PIPE, stderr=side, env=env
        ) as process:
            os.close(side)
            out = process.stdout.read().decode()
            process.wait(60)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the other side any more
            while data := os.read(terminal, 65536):
                shown += data
    finally:
        os.close(terminal)
    assert process.returncode in (0, 1), shown
    return out, shown.decode()


@pytest.mark.parametrize("command", LONG)
def test_a_long_command_shows_a_bar_on_a_terminal_and_none_with_json(tmp_path: Path, command: str) -> None:
    for name in ("run", *(("one", "two") if command == "prune" else ())):
        a_run(tmp_path / name)

    def words(to: str) -> list[str]:
        return [word.format(url=tmp_path / "run", to=tmp_path / to) for word in LONG[command]]

    out, shown = on_terminal(command, *words("one"))
    assert "━" in shown
    assert "MiB" in shown or "KiB" in shown
    assert "━" not in out
    assert "\x1b" not in out
    out, shown = on_terminal(command, *words("two"), "--json")
    assert shown == ""
    assert isinstance(json.loads(out), dict)
