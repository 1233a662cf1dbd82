"""Trace files: reads the public formats of spot traces and ckpt's own CSV, and writes that CSV.

The format is recognised from the content:

| begins with | format | of |
|---|---|---|
| `time_s,event,node` | a header, then node events: ckpt's own | `save` |
| `{` | JSON: node counts, one each `gap_seconds`; maybe prices | SkyPilot, SpotHedge |
| `[` | a JSON array a line: time_ms, operation, nodes | Parcae |
| `0,add,node1` | time_ms, add or remove, node | Bamboo |
| `2021-12-11, 11:11:30, 55` | local date, time, node count | Bamboo's Google Cloud counts |
| `0,32` | time_ms, node count | Parcae |

Counts say how many nodes there are, not which. So a drop by n removes n nodes at one instant, chosen at random among
those that were there before it: the same nodes for the same seed. A rise adds nodes with new names.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from ckpt.errors import UsageError
from ckpt.simulate.trace import EventKind, Trace, TraceEvent

FILE_BYTES_MAX = 64 << 20
EVENTS_MAX = 1_000_000
NODES_MAX = 100_000  # at one time
NAME_CHARS_MAX = 200
TIME_S_MAX = 100 * 365.25 * 86_400  # 100 years

HEADER = "time_s,event,node,pool"
END = "end"  # in the column of events of the last row: the trace ends at that time
OPERATIONS = ("add", "remove", "no-op", "migration")  # of Parcae


@dataclass(frozen=True, slots=True)
class _Row:
    """One node event as it stands in a file. `where`: file and line, for errors."""

    where: str
    time_s: float
    kind: EventKind
    node: str
    pool: str = ""


@dataclass(frozen=True, slots=True)
class _Count:
    time_s: float
    nodes: int


def load(path: str | os.PathLike[str], seed: int = 0) -> Trace:
    """Reads a trace in any of the formats above. `seed`: chooses the nodes that a drop of a count removes.

    A node that comes back after its removal is a new node: "a" comes back as "a#2". Times begin at 0 with the first
    row, in files of dates; rows of dates are sorted, since such clocks go back at times. In all other formats a time
    that goes back is an error. A trace ends with its last row, a list of counts `gap_seconds` after its last count, and
    Parcae's operations when the last one has lasted its `duration`. Errors: UsageError names the file, the line (of a
    list: the index) and what is expected there; also for files over 64 MiB and more than a million node events.
    """
    file = Path(path)
    text = _read(file)
    lines = [(f"{file}: line {n}", line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{file}: empty; a trace is expected")
    price = None
    where, first = lines[0]
    fields = _fields(first)
    if first.startswith("{"):
        counts, span_s, price = _json_counts(file, text)
        events = _events_of_counts(file, counts, seed)
    elif first.startswith("["):
        operations = [_operation(*each) for each in lines]
        span_s = _in_order(lines, [begin_s for _, begin_s, _ in operations])
        span_s = max(span_s, *(end_s for _, _, end_s in operations))
        events = _events_of_rows(file, (row for rows, _, _ in operations for row in rows))
    elif fields[0] == "time_s":
        rows, span_s = _own_rows(lines)
        events = _events_of_rows(file, rows)
    elif len(fields) == 3 and re.match(r"\d{4}-\d", first):
        counts = _dated_counts(lines)
        span_s = counts[-1].time_s
        events = _events_of_counts(file, counts, seed)
    elif len(fields) == 3:
        rows = [_bamboo_row(*each) for each in lines]
        span_s = _in_order(lines, [row.time_s for row in rows])
        events = _events_of_rows(file, rows)
    elif len(fields) == 2:
        counts = [_parcae_count(*each) for each in lines]
        span_s = _in_order(lines, [count.time_s for count in counts])
        events = _events_of_counts(file, counts, seed)
    else:
        _refuse(where, first, f'a trace; its first line could be "{HEADER}"')
    return Trace(file.stem, span_s, tuple(events), price)


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes ckpt's own CSV, which `load` reads back; it has no price. Errors: UsageError."""
    rows = [f"{event.time_s!r},{event.kind},{event.node},{event.pool}\n" for event in trace.events]
    text = "".join((f"{HEADER}\n", *rows, f"{trace.span_s!r},{END},,\n"))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror or exc}") from exc


def _read(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise UsageError(f"{file}: {exc.strerror or exc}") from exc
    if len(raw) > FILE_BYTES_MAX:
        raise UsageError(f"{file}: more than {FILE_BYTES_MAX >> 20} MiB; a trace of that size is not read")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{file}: byte {exc.start} is no UTF-8 text; a trace is expected") from exc


def _refuse(where: str, found: object, expected: str) -> NoReturn:
    raise UsageError(f"{where}: {found!r:.80}; expected {expected}")


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split(",")]


def _number(where: str, text: object, unit: str, per_second: int = 1) -> float:
    """Seconds, of a number in a unit that is so many per second."""
    try:
        found = math.nan if isinstance(text, bool) else float(text) / per_second  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0 <= found <= TIME_S_MAX:
        _refuse(where, text, f"a number of {unit}, from 0 to 100 years")
    return found


def _whole(where: str, found: object) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= NODES_MAX:
        _refuse(where, found, f"a whole number of nodes, from 0 to {NODES_MAX}")
    return found


def _count(where: str, text: str) -> int:
    return _whole(where, int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text)


def _name(where: str, found: object) -> str:
    if not isinstance(found, str) or not 0 < len(found) <= NAME_CHARS_MAX or not found.isprintable() or "," in found:
        _refuse(where, found, f"the name of a node: 1 to {NAME_CHARS_MAX} printable characters without a comma")
    return found


def _in_order(lines: list[tuple[str, str]], times_s: list[float]) -> float:
    """The last time, if no time is before the one above it."""
    for i, (before, after) in enumerate(pairwise(times_s), 1):
        if after < before:
            _refuse(*lines[i], f"a time that is not before that of the row above ({before} s)")
    return times_s[-1]


def _json_counts(file: Path, text: str) -> tuple[list[_Count], float, float | None]:
    """The counts, the span in seconds and the mean price per hour."""
    try:
        body: Any = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{file}: no JSON ({exc}); expected one object with metadata and data") from exc
    metadata, data, prices = body.get("metadata"), body.get("data"), body.get("prices")
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    gap_s = _number(f"{file}: metadata.gap_seconds", gap, "seconds")
    if not gap_s:
        _refuse(f"{file}: metadata.gap_seconds", gap, "more than 0")
    if not isinstance(data, list) or not data:
        _refuse(f"{file}: data", data, "a list of node counts")
    counts = [_Count(i * gap_s, _whole(f"{file}: data[{i}]", count)) for i, count in enumerate(data)]
    if prices is None:
        return counts, len(data) * gap_s, None
    if not isinstance(prices, list) or len(prices) != len(data):
        _refuse(f"{file}: prices", prices, f"a list of {len(data)} prices, one for each count")
    for i, price in enumerate(prices):
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < 1e6:
            _refuse(f"{file}: prices[{i}]", price, "USD per hour, from 0 to a million")
    return counts, len(data) * gap_s, math.fsum(prices) / len(prices)


def _dated_counts(lines: list[tuple[str, str]]) -> list[_Count]:
    found = []
    for where, line in lines:
        fields = _fields(line)
        try:
            date, clock, count = fields
            at = datetime.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            _refuse(where, line, "YYYY-MM-DD, HH:MM:SS, node count")
        found.append((at, _count(where, count)))
    found.sort(key=lambda each: each[0])
    return [_Count((at - found[0][0]).total_seconds(), count) for at, count in found]


def _parcae_count(where: str, line: str) -> _Count:
    fields = _fields(line)
    if len(fields) != 2:
        _refuse(where, line, "time_ms,node count")
    return _Count(_number(where, fields[0], "milliseconds", 1000), _count(where, fields[1]))


def _bamboo_row(where: str, line: str) -> _Row:
    fields = _fields(line)
    if len(fields) != 3 or fields[1] not in ("add", "remove"):
        _refuse(where, line, "time_ms,add|remove,node")
    time_s = _number(where, fields[0], "milliseconds", 1000)
    return _Row(where, time_s, EventKind(fields[1]), _name(where, fields[2]))


def _own_rows(lines: list[tuple[str, str]]) -> tuple[list[_Row], float]:
    """The rows, and the end of the trace in seconds."""
    where, header = lines[0]
    columns = _fields(header)
    if columns not in (HEADER.split(","), HEADER.split(",")[:3]):
        _refuse(where, header, f'"{HEADER}", or that without the pool')
    expected = "{},add|remove|crash,{}".format(*columns[::2]) + ",pool" * (len(columns) > 3)
    rows, times_s = [], []
    for n, (where, line) in enumerate(lines[1:], 1):
        fields = _fields(line)
        is_end = n == len(lines) - 1 and fields[1:2] == [END] and not any(fields[2:])
        if not is_end and (len(fields) != len(columns) or fields[1] not in list(EventKind)):
            _refuse(where, line, f"{expected}, or in the last row time_s,{END}")
        times_s.append(_number(where, fields[0], "seconds"))
        if not is_end:
            pool = "".join(fields[3:])
            if not pool.isprintable() or len(pool) > NAME_CHARS_MAX:
                _refuse(where, pool, f"a pool: up to {NAME_CHARS_MAX} printable characters")
            rows.append(_Row(where, times_s[-1], EventKind(fields[1]), _name(where, fields[2]), pool))
    if not times_s:
        raise UsageError(f"{where}: no row follows the header; expected {expected}")
    return rows, _in_order(lines[1:], times_s)


def _operation(where: str, line: str) -> tuple[list[_Row], float, float]:
    """The rows of one operation of Parcae; its begin and end in seconds."""
    try:
        time_ms, operation, body = json.loads(line)
        nodes, duration_ms = body["nodes"], body.get("duration", 0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        operation, nodes = None, None
    if operation not in OPERATIONS or not isinstance(nodes, list):
        _refuse(where, line, f'[time_ms, operation, {{"nodes": [...]}}], operation one of {", ".join(OPERATIONS)}')
    time_s = _number(where, time_ms, "milliseconds", 1000)
    end_s = time_s + _number(f"{where}: duration", duration_ms, "milliseconds", 1000)
    if operation not in ("add", "remove"):
        return [], time_s, end_s
    return [_Row(where, time_s, EventKind(operation), _name(where, node)) for node in nodes], time_s, end_s


def _events_of_rows(file: Path, rows: Iterable[_Row]) -> list[TraceEvent]:
    up: dict[str, TraceEvent] = {}  # by the name in the file: the addition of the life under way
    used: set[str] = set()
    events: list[TraceEvent] = []
    for row in rows:
        _bound(file, len(events) + 1, len(up))
        if row.kind is EventKind.ADD:
            if row.node in up:
                _refuse(row.where, f"add {row.node}", "a node that is not there yet")
            name = _unused(row.node, used)
            used.add(name)
            event = up[row.node] = TraceEvent(row.time_s, row.kind, name, row.pool)
        else:
            if row.node not in up:
                _refuse(row.where, f"{row.kind} {row.node}", "a node that is there: it was added and not removed")
            added = up.pop(row.node) if row.kind is EventKind.REMOVE else up[row.node]
            event = TraceEvent(row.time_s, row.kind, added.node, added.pool)
        events.append(event)
    return events


def _unused(node: str, used: set[str]) -> str:
    life, name = 1, node
    while name in used:
        life += 1
        name = f"{node}#{life}"
    return name


def _events_of_counts(file: Path, counts: Iterable[_Count], seed: int) -> list[TraceEvent]:
    rng = Random(seed)
    up: list[str] = []
    events: list[TraceEvent] = []
    added = 0
    for time_s, drop, rise in _steps(counts):
        _bound(file, len(events) + drop + rise, len(up) - drop + rise)
        for _ in range(drop):
            # The last one takes the place of the one that goes, so that a removal takes the same time for any count.
            chosen = rng.randrange(len(up))
            up[chosen], up[-1] = up[-1], up[chosen]
            events.append(TraceEvent(time_s, EventKind.REMOVE, up.pop()))
        for _ in range(rise):
            added += 1
            up.append(f"node-{added}")
            events.append(TraceEvent(time_s, EventKind.ADD, up[-1]))
    return events


def _steps(counts: Iterable[_Count]) -> Iterator[tuple[float, int, int]]:
    """(time, drop, rise) of each instant at which the count changes. An instant may have several rows that drop and
    rise; its drops take only nodes that were there before it."""
    before = 0
    for time_s, rows in groupby(counts, key=lambda row: row.time_s):
        after = before
        drop = 0
        for row in rows:
            drop += max(0, after - row.nodes)
            after = row.nodes
        drop = min(drop, before)
        if drop or after != before:
            yield time_s, drop, after - before + drop
        before = after


def _bound(file: Path, events: int, nodes: int) -> None:
    if events > EVENTS_MAX or nodes > NODES_MAX:
        raise UsageError(
            f"{file}: more than {EVENTS_MAX} node events, or {NODES_MAX} nodes at a time; give a part of it"
        )
