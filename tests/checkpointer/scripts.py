"""Starting, watching and killing the training script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Line = dict[str, Any]

# Unbuffered, a print is a write per word, and the ranks share the log.
ALWAYS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


class Script:
    """One running script in a session of its own; its lines are read as they come."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **ALWAYS, **(env or {})},
                start_new_session=True,
            )

    def lines(self) -> list[Line]:
        return lines_of(self.log)

    def _said(self) -> str:
        """The end of it, but for its steps where there are many: what went wrong may be long ago."""
        said = self.log.read_text(errors="replace").splitlines()
        told = [line for line in said[:-20] if '"loss"' not in line]
        return "\n".join([*told[-60:], *said[-20:]])[-12000:]

    def wait_for(self, what: Callable[[Line], bool], timeout_s: float = 90.0) -> Line:
        """The first such line, now or before. Each is looked at once: a long run says thousands, and the proxies of a
        test share the interpreter with it."""
        deadline = time.monotonic() + timeout_s
        with self.log.open("rb") as log:
            rest = b""
            while True:
                over = self.process.poll() is not None or time.monotonic() > deadline
                *texts, rest = (rest + log.read()).split(b"\n")
                for line in _parsed(texts):
                    if what(line):
                        return line
                if over:
                    raise AssertionError(f"not seen; the script said:\n{self._said()}")
                time.sleep(0.02)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def end(self, timeout_s: float = 120.0) -> list[Line]:
        """Waits for a clean end."""
        code = self.process.wait(timeout_s)
        text = self.log.read_text(errors="replace")
        assert code == 0, f"exit code {code}; it said:\n{text[-6000:]}"
        return self.lines()


def train(log: Path, url: Path | str, steps: int, *options: str, **env: str) -> Script:
    command = [sys.executable, "-m", "tests.checkpointer.train_script", str(url), str(steps), *options]
    return Script(command, log, env)


def torchrun(log: Path, ranks: int, module: str, *args: str, restarts: int = 0, **env: str) -> Script:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", str(restarts), "-m", module, *args),
    ]
    return Script(command, log, env)


def lines_of(log: Path) -> list[Line]:
    """What a script said so far, by `say_line`."""
    return list(_parsed(log.read_bytes().split(b"\n")))


def _parsed(texts: Iterable[bytes]) -> Iterator[Line]:
    for text in texts:
        if text.startswith(b"{"):
            try:
                yield json.loads(text.decode(errors="replace"))
            except json.JSONDecodeError:
                continue  # half a line: it is being written, or was when its writer was killed


def losses_of(lines: list[Line], rank: int = 0) -> dict[int, float]:
    """By step; the last one said, where a step was run again."""
    return {line["step"]: line["loss"] for line in lines if "loss" in line and line["rank"] == rank}


def say_line(line: Line) -> None:
    """Prints it in one write, whatever is buffered: the ranks share the log."""
    os.write(1, json.dumps(line).encode() + b"\n")
