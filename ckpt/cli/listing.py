"""The commands `ckpt ls` and `ckpt show`: list a run's checkpoints, and describe one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt import reader
from ckpt.cli import out
from ckpt.cli.exits import Exit
from ckpt.errors import CkptError, NoCheckpoint
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.checkpoint import Checkpoint

_FORMATS = {"saved": out.format_time, **dict.fromkeys(("bytes", "stored", "shared"), out.format_size)}


def ls(
    url: out.UrlArgument,
    every: Annotated[bool, typer.Option("--all", "-a", help="Branches too, which no start goes on from.")] = False,
    long: Annotated[bool, typer.Option("--long", "-l", help="Also the size of the state, and what is shared.")] = False,
    quick: Annotated[bool, typer.Option("--quick", "-q", help="Read no records: neither sizes nor metrics.")] = False,
    json: out.JsonOption = False,
) -> None:
    """List the checkpoints of a run, oldest first.

    The last one is where the next start goes on. The exit status is 1 if a record that is read is damaged. Of a folder
    or bucket that is no run the runs below it are listed."""
    try:
        run = reader.open(url)
    except NoCheckpoint:
        below = reader.runs_below(url)
        if not below:
            raise
        _print_runs(url, below, json)
        return
    with run:
        listed: Sequence[Checkpoint] = run.checkpoints
        if every:
            listed = sorted([*listed, *run.branches], key=lambda each: (each.step, each.sub))
        if not listed:
            raise run.none_yet
        if not quick:
            run.read_records(listed)
            listed = [each for each in listed if not isinstance(each.error, NoCheckpoint)]  # retired meanwhile
        rows = [_row(each, quick) for each in listed]
    if json:
        out.print_json({"url": run.url, "checkpoints": rows, "branches": len(run.branches)})
    else:
        _print_checkpoints(rows, listed, every, long, quick)
        if run.branches and not every:
            out.print_text(f"{len(run.branches)} more on branches: ckpt ls --all {redact_url(url)}")
    if any(row.get("error") for row in rows):
        raise typer.Exit(Exit.DIFFERENT)


def _print_runs(url: str, below: Sequence[str], json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for each in below:
        with reader.open(each) as run:
            last = run.checkpoints[-1] if run.checkpoints else None
            facts = (last.step, last.sub, last.label, last.listed_s) if last is not None else (None, None, "none", None)
            names = dict(zip(("step", "sub", "label", "saved"), facts, strict=True))
            rows.append({"url": run.url, "checkpoints": len(run.checkpoints), **names})
    if json:
        out.print_json({"url": url, "runs": [{k: v for k, v in row.items() if k != "label"} for row in rows]})
        return
    cells = [
        [redact_url(row["url"]), row["checkpoints"], row["label"], out.format_age(row["saved"]) if row["saved"] else ""]
        for row in rows
    ]
    out.print_table(("run", "checkpoints", "newest", "saved"), cells, right=("checkpoints", "newest"))


def _print_checkpoints(
    rows: Sequence[dict[str, Any]], listed: Sequence[Checkpoint], every: bool, long: bool, quick: bool
) -> None:
    columns = ["step", "saved", "age", "start"]
    columns += [] if quick else ["stored", *["bytes", "shared"] * long]
    columns += ["metrics"] * any(row.get("metrics") for row in rows)
    columns += ["where"] * every
    cells = [_cells({**row, "label": each.label}, columns) for row, each in zip(rows, listed, strict=True)]
    out.print_table(columns, cells, right=("step", "start", "stored", "bytes", "shared"))
    for row, each in zip(rows, listed, strict=True):
        if row.get("error"):
            out.print_text(f"step {each.label}: {row['error']['message']}")
    within = next((each for each in listed if each.sub), None)
    if within is not None:
        out.print_text(
            f"{within.label}: saved after step {within.step} had ended, by ck.save(), ck.poll() or at the exit"
        )


def _row(each: Checkpoint, quick: bool) -> dict[str, Any]:
    row = {
        "step": each.step,
        "sub": each.sub,
        "identity": each.identity,
        "start": each.start,
        "saved": each.listed_s,
        "where": "line" if each.is_on_line else "branch",
    }
    if quick:
        return row
    if each.error is not None:
        unknown = dict.fromkeys(("bytes", "stored", "shared", "metrics"))
        kind = each.error.kind if isinstance(each.error, CkptError) else "error"
        return {**row, **unknown, "error": {"kind": kind, "message": str(each.error)}}
    return {**row, **_sizes(each), "saved": each.time_s, "error": None}


def _cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    saved, metrics = row["saved"], row.get("metrics") or {}
    texts = {
        "step": row["label"],
        "saved": out.format_time(saved) if saved else "?",
        "age": out.format_age(saved) if saved else "",
        "start": str(row["start"]),
        "metrics": ", ".join(f"{name}={value:g}" for name, value in metrics.items()),
        "where": row["where"],
    }
    if row.get("error"):
        texts["stored"] = row["error"]["kind"]
    else:
        texts |= {name: out.format_size(row[name]) for name in ("bytes", "stored", "shared") if name in row}
    return [texts.get(name, "") for name in columns]


def _sizes(each: Checkpoint) -> dict[str, Any]:
    return {
        "bytes": each.bytes,
        "stored": each.stored_bytes,
        "shared": each.shared_bytes,
        "metrics": dict(each.metrics),
    }


def show(
    url: out.UrlArgument,
    which: out.StepOption = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="List the tensors whose name matches.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", "-t", help="List every tensor.")] = False,
    json: out.JsonOption = False,
) -> None:
    """Show one checkpoint and what it consists of."""
    with reader.open(url) as run:
        chosen = run.newest if which is None else run.find(which)
        body = _checkpoint_facts(chosen)
        listed = _tensors(chosen, only or []) if tensors or only or json else []
    if json:
        out.print_json({"url": run.url, **body, "tensors": listed})
        return
    del body["sub"]
    for name, value in {**body, "step": chosen.label}.items():
        if isinstance(value, dict):
            # Nested values are only for programs, which use --json.
            short = {k: each for k, each in value.items() if not isinstance(each, dict | list) and k != "time_s"}
            value = ", ".join(f"{key} {each}" for key, each in short.items()) or "none"
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        out.print_text(f"{name:<12} {_FORMATS.get(name, str)(value)}")
    if listed:
        out.print_text()
        rows = [
            (t["name"], t["owner"], t["dtype"], t["shape"], t["parts"], out.format_size(t["bytes"])) for t in listed
        ]
        out.print_table(("name", "owner", "dtype", "shape", "parts", "bytes"), rows, right=("parts", "bytes"))


def _checkpoint_facts(chosen: Checkpoint) -> dict[str, Any]:
    from ckpt.format.manifest import Codec

    record = chosen.record
    codes = {Codec.RAW: "raw", Codec.ZSTD: "zstd", Codec.PLANES: "planes"}
    counts = {name: int((record.places["codec"] == code).sum()) for code, name in codes.items()}
    return {
        "identity": chosen.identity,
        "step": chosen.step,
        "sub": chosen.sub,
        "start": chosen.start,
        "ranks": list(chosen.ranks),
        "tensor_count": sum(not spec.values for spec in record.manifest.tensors),
        **_sizes(chosen),
        **({"saved": record.taken_s} if record.taken_s is not None else {}),
        "frames": {name: count for name, count in counts.items() if count},
        "packs": len(record.packs),
        "about": dict(record.about),
    }


def _tensors(chosen: Checkpoint, only: list[str]) -> list[dict[str, Any]]:
    from ckpt.store.tensor_stream import check_globs, match_names

    names = match_names(chosen.stored_tensors, only)
    check_globs(only, names, f"step {chosen.label}")
    listed = [chosen.stored_tensors[name] for name in names]
    return [
        {
            "name": info.name,
            "owner": info.coordinate,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "parts": info.parts,
            "bytes": info.bytes,
        }
        for info in listed
    ]
