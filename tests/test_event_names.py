"""docs/events.md names every event that the code can emit, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALLS = {"emit", "_emit", "Event", "Emit"}


def emitted() -> Iterator[str]:
    """Literal names: the first argument of what emits, or both branches of it."""
    for path in sorted((ROOT / "ckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in CALLS:
                    for each in ast.walk(node.args[0]):
                        if isinstance(each, ast.Constant) and isinstance(each.value, str):
                            yield each.value


def test_each_event_is_in_the_table_and_nothing_else_is() -> None:
    rows = [line for line in (ROOT / "docs/events.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    lines = {"signals", "signals.begin", "signals.end", "signals.failure"}  # of another file, named in the text below
    assert named == set(emitted()) - lines
    assert len(named) > 60
