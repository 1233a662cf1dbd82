"""The view of `ckpt watch` for people: turns an agent's status, or the store's facts, into lines. It asks no process,
and reads the clock only for ages of the store's times."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ckpt.cli import out
from ckpt.cli.view_rows import Facts, Row, cost_rows, memory_node_rows, memory_rows, notice_rows, prediction_rows
from ckpt.policy.adaptive import format_duration
from ckpt.types import format_count

EVENTS = 5
# What is hidden first on a small terminal: rows if it is too low, columns if it is too narrow.
ROWS_HIDDEN_FIRST = (
    "memory",
    "restored",
    "failures",
    "snapshots",
    "older events",
    "agent",
    "foreseen",
    "why",
    "commits",
    "losses",
    "goodput",
    "events",
    "run",
)
COLUMNS_HIDDEN_FIRST = ("by", "saved", "under way", "interval", "age")
COLUMN_GAP = 3
LEVELS = ("local", "peer", "store")
STATES = {
    "appointed": "step {step} is being taken (by {staged} of {ranks} so far), for {for_}",
    "hashed": "step {step} is being hashed, for {for_}",
    "copied": "step {step} is being copied to other nodes' memory",
    "committed": "step {step} is being written, for {for_}",
    "failed": "step {step} could not be written",
}


def text(status: Facts, width: int | None) -> str:
    """The rendered status as text of `width` columns; None: the terminal's width."""
    stream = io.StringIO()
    out.console(stream, width).print(render(status))
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())


def render(status: Facts, hidden: Collection[str] = ()) -> RenderableType:
    """The whole status, without the rows of the `hidden` labels."""
    if status.get("pid") is None:
        return _rows(_store_rows(status))
    job, account = status.get("job"), status.get("account")
    # The coordinator has the account. What this agent has is of a time when it was the coordinator.
    if status.get("followed_jobs") and (job is None or job["superseded_by"]):
        job = account = None
    parts: list[RenderableType] = [_rows(_head(status, job, account), hidden)]
    if account is not None and job is not None:
        parts += [Text(), _Levels(*_levels(job, account)), Text()]
    events = 1 if "older events" in hidden else EVENTS
    parts.append(_rows(_body(status, job, account, events), hidden))
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The most important rows of a status that fit the terminal's height. The last row names the hidden ones."""

    status: Facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def height(shown: RenderableType) -> int:
            return len(console.render_lines(shown, options, pad=False))

        shown, room = render(self.status), console.size.height
        for count in range(1, len(ROWS_HIDDEN_FIRST) + 1):
            if height(shown) <= room:
                break
            hidden = ROWS_HIDDEN_FIRST[:count]
            missing = Text(f"a higher window also shows {', '.join(hidden)}", "dim", no_wrap=True, overflow="ellipsis")
            shown = Group(render(self.status, hidden), missing)
        yield shown


def _rows(rows: Iterator[Row], hidden: Collection[str] = ()) -> Table:
    """The rows as a grid."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    of = ""
    for label, text, style in rows:
        of = label or of
        if of not in hidden:
            grid.add_row(Text(label, "bold"), Text(out.printable(text), style))
    return grid


def _store_rows(status: Facts) -> Iterator[Row]:
    yield "run", str(status["url"]), ""
    if (silent := status.get("silent")) is not None:
        yield "agent", f"process {out.process_id(silent)} does not answer", "red"
    else:
        yield "agent", "none runs for you on this host", "yellow"
    if status.get("error"):
        yield "", str(status["error"]), "red"
    found = status.get("store")
    if not found:
        return
    if found["step"] is None:
        yield "store", "no checkpoint yet", ""
    else:
        when = out.format_age(found["saved"]) if found["saved"] else "at an unknown time"
        count = format_count(found["checkpoints"], "checkpoint")
        yield "store", f"step {found['step']}, saved {when}: the next start goes on from it; {count} in all", ""
    how = "has ended" if found["closed"] else "has not ended: it runs on another host, or died with its host"
    yield "epoch", f"{found['epoch']} {how}", ""


def _head(status: Facts, job: Facts | None, account: Facts | None) -> Iterator[Row]:
    yield "run", str(status.get("url")), ""
    agent = f"process {status['pid']}"
    if "host" in status:
        agent += (
            f" on {status['host']}, up {format_duration(status['up_s'])}, {out.format_size(status['resident_bytes'])}"
        )
    if status.get("metrics"):
        agent += f", metrics at {status['metrics']}"
    yield "agent", agent + (f"; {status['name']}" if status.get("name") else ""), ""
    if status.get("lending"):
        yield from _lending(status["lending"])
        return
    if job is None:
        yield "job", "none" if not status.get("followed_jobs") else "coordinated by the agent of another node", "yellow"
        for each in status.get("followed_jobs") or []:
            ranks = ", ".join(map(str, each["ranks"][:16]))
            text = f"{ranks} of epoch {each['epoch']}; watch it at its coordinator, {each['coordinator']}"
            if each["connected"]:
                yield "ranks", text, ""
            else:
                yield "ranks", f"{text}, from which this node is cut off: no snapshot is taken meanwhile", "red"
        return
    yield "job", f"launch {job['launch']}, epoch {job['epoch']}, {_ranks(job['ranks'])}", ""
    if account is not None:
        pace = f"; step {account['ended_step']} ended" if account["ended_step"] else ""
        pace += f", {format_duration(job['step_s'])} a step" if pace and account["phase"] == "training" else ""
        style = "red" if account["phase"] == "down" else ""
        yield "now", f"{account['phase']} for {format_duration(account['phase_s'])}{pace}", style
    for number, each in enumerate(job.get("cut_off") or []):
        where = f"node {each['node']}" if each["node"] else f"{format_count(len(each['ranks']), 'rank')} of this node"
        text = f"{where}, for {format_duration(each['for_s'])}: no snapshot is taken until it is connected again"
        yield "cut off" * (not number), text, "red"
    if job["superseded_by"]:
        yield "", f"superseded by {job['superseded_by']}", "red"
    if job["error"]:
        yield "error", str(job["error"]), "red"
    # Standing notices come first: they matter most.
    yield from notice_rows(job["notices"])


def _lending(lent: Facts) -> Iterator[Row]:
    whose = f"; launch {lent['launch']}" if lent["launch"] else ""
    how = "" if not lent["launch"] else ", whose coordinator is connected" if lent["connected"] else ", which is gone"
    size, used = out.format_size(lent["memory_bytes"]), out.format_size(lent["used_bytes"])
    yield "memory", f"lends {size} at {', '.join(lent['at'])}, {used} used{whose}{how}", ""
    whole = lent["whole"][-1] if lent["whole"] else None
    yield (
        "keeps",
        f"{format_count(len(lent['keeps']), 'checkpoint')}; the newest that is whole here: {whole or 'none'}",
        "",
    )
    if lent["committing"]:
        yield "now", f"commits {lent['committing']}", ""
    if lent["error"]:
        yield "error", str(lent["error"]), "red"


def _ranks(ranks: list[str]) -> str:
    counts = {state: ranks.count(state) for state in ("here", "left", "dead")}
    words = {"left": "have left", "dead": "dead"}
    rest = ", ".join(f"{counts[state]} {word}" for state, word in words.items() if counts[state])
    return format_count(len(ranks), "rank") + (f" ({rest})" if rest else "")


def _levels(job: Facts, account: Facts) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the rows of the levels' table."""
    rows = []
    known = {*account["safe"], *job["intervals"], *account["saved_bytes"]}
    for level in (each for each in LEVELS if each in known):
        safe, interval = account["safe"].get(level), job["intervals"].get(level)
        cells = [
            level,
            str(safe["step"]) if safe else "none",
            format_duration(safe["age_s"]) if safe and safe["age_s"] is not None else "",
            out.format_size(account["saved_bytes"].get(level, 0)),
            _interval_text(interval) if interval else "",
            str(interval["by"]) if interval else "",
            "; ".join(_under_way_text(each) for each in job["under_way"] if each["level"] == level),
        ]
        rows.append([out.printable(cell) for cell in cells])
    return ["level", "safe step", "age", "saved", "interval", "by", "under way"], rows


@dataclass(frozen=True, slots=True)
class _Levels:
    """A table with the columns that fit. Only "under way" may take several lines."""

    columns: list[str]
    rows: list[list[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = {}
        for name, *cells in zip(self.columns, *self.rows, strict=True):
            words = [word for cell in cells for word in cell.split()] if name == "under way" else cells
            widths[name] = max(map(cell_len, [name, *words]))
        for name in COLUMNS_HIDDEN_FIRST:
            if sum(widths.values()) + COLUMN_GAP * (len(widths) - 1) > options.max_width:
                del widths[name]
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in widths:
            justify: Any = "right" if name in ("safe step", "age", "saved") else "left"
            table.add_column(name, justify=justify, no_wrap=name != "under way")
        for row in self.rows:
            cells = [cell for name, cell in zip(self.columns, row, strict=True) if name in widths]
            table.add_row(*map(Text, cells))
        yield table


def _interval_text(interval: Facts) -> str:
    if interval["interval_s"] is not None:
        return f"every {format_duration(interval['interval_s'])}"
    return f"every {format_count(interval['interval_steps'], 'step')}" if interval["interval_steps"] else ""


def _under_way_text(each: Facts) -> str:
    for_s, ranks = each.get("for_s"), format_count(each.get("of", 0), "rank")
    asked = "" if each["asked"] == "appointed" else f" ({each['asked']})"
    return (
        STATES[each["state"]].format(**each, ranks=ranks, for_="?" if for_s is None else format_duration(for_s)) + asked
    )


def _body(status: Facts, job: Facts | None, account: Facts | None, events: int) -> Iterator[Row]:
    if job is not None:
        for number, line in enumerate(job["policy"] or []):
            yield "why" * (not number), line, ""
        if job.get("rates"):
            rates = (f"{name} {_rate(found)}" for name, found in job["rates"].items())
            yield "failures", f"expected: {', '.join(rates)}", ""
    if account is not None and (job is not None or account["goodput"] is not None or account["commits"]["number"]):
        yield from cost_rows(account)  # else another node's agent has the account
    if job is not None:
        yield from memory_rows(job["memory"])
        yield from memory_node_rows(status.get("lenders") or [])
        if not job["notices"]["standing"]:
            yield "notices", "none", ""
    yield from prediction_rows(status.get("predictions"))
    for number, event in enumerate((status.get("events") or [])[-events:]):
        style = "yellow" if event["loud"] else ""
        yield "events" * (not number), f"{format_duration(event['age_s'])} ago: {event['message']}", style


def _rate(found: Facts) -> str:
    every = f"every {format_duration(1 / found['per_s'])}" if found["per_s"] else "never"
    return f"{every} ({found['seen']} seen)"
