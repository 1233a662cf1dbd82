"""docs/events.md names every event that the code can emit, and no other, and what each holds is given to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALLS = {"emit", "_emit", "Event", "Emit"}
LINES = {"signals", "signals.begin", "signals.end", "signals.failure"}  # of another file, named in the text below
MADE_ELSEWHERE = {"memory.plan"}  # what it holds, as a whole


def emitted() -> Iterator[tuple[str, str, set[str]]]:
    """Literal names: the first argument of what emits, or both branches of it; where; and the texts and the names of
    arguments of which what it gives to the event beside a text is made."""
    for path in sorted((ROOT / "ckpt").rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
        around = {inner: each for each in functions for inner in ast.walk(each)}  # the innermost one, which comes last
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in CALLS:
                    for each in ast.walk(node.args[0]):
                        if isinstance(each, ast.Constant) and isinstance(each.value, str):
                            where = f"{path.relative_to(ROOT)}:{node.lineno}"
                            yield each.value, where, _given(node, around.get(node, tree))


def _given(call: ast.Call, within: ast.AST) -> set[str]:
    """`within`: the function around it, where a name that is given has its value."""
    found = [*call.args[2:], *call.keywords]
    names = {each.id for given in found for each in ast.walk(given) if isinstance(each, ast.Name)}
    for each in ast.walk(within):
        if isinstance(each, ast.Assign | ast.AugAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if any(isinstance(to, ast.Name) and to.id in names for target in targets for to in ast.walk(target)):
                found.append(each.value)
    inner = [each for given in found for each in ast.walk(given)]
    texts = {each.value for each in inner if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return texts | {each.arg for each in inner if isinstance(each, ast.keyword) and each.arg is not None}


def rows() -> Iterator[tuple[list[str], str]]:
    """Of the tables: the names, and what these hold."""
    for line in (ROOT / "docs/events.md").read_text().splitlines():
        if line.startswith("| `"):
            cells = line.strip().strip("|").split("|")
            yield re.findall(r"`([^`]+)`", cells[0]), cells[-1].strip()


def test_each_event_is_in_the_table_and_nothing_else_is() -> None:
    named = {name for names, _ in rows() for name in names}
    assert named == {name for name, _, _ in emitted()} - LINES
    assert len(named) > 60


def test_whoever_emits_an_event_gives_it_what_the_table_says_that_it_holds() -> None:
    """One list is of all events of the row, several are of one each."""
    promised: dict[str, set[str]] = {}
    for names, holds in rows():
        lists = holds.split(";") if ";" in holds else [holds] * len(names)
        assert len(lists) == len(names), f"{names} hold {lists}"
        promised |= {name: set(re.findall(r"`([a-z_]+)`", each)) for name, each in zip(names, lists, strict=True)}
    missing = [
        f"{where}: {name} has no {', '.join(sorted(promised[name] - words))}"
        for name, where, words in emitted()
        if name not in LINES | MADE_ELSEWHERE and promised[name] - words
    ]
    assert missing == []
    assert sum(map(bool, promised.values())) > 30
