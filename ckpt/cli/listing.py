"""ckpt ls, ckpt show: what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli import out, target
from ckpt.cli.exits import Exit
from ckpt.errors import DamagedData, NoCheckpoint, NotFound
from ckpt.storage.names import shown
from ckpt.types import Tick

if TYPE_CHECKING:
    from ckpt.format.manifest import Record
    from ckpt.store.lineage import CommitRef
    from ckpt.store.run import Run

_SHOWN = {"saved": out.when, **dict.fromkeys(("bytes", "stored", "referred"), out.size)}


def ls(
    url: out.Url,
    every: Annotated[bool, typer.Option("--all", "-a", help="Branches too, which no start goes on from.")] = False,
    long: Annotated[bool, typer.Option("--long", "-l", help="Read each record: sizes and metrics.")] = False,
    json: out.Json = False,
) -> None:
    """List the checkpoints of a run, oldest first.

    The last one is where the next start goes on. The exit status is 1 if a record that is read is damaged."""
    from ckpt.store.run import Run

    with target.store(url) as store:
        run = target.view(store)
        refs = [(ref, "line") for ref in run.line]
        if every:
            refs = sorted([*refs, *((ref, "branch") for ref in run.branches)], key=lambda each: each[0].identity.tick)
        if not refs:
            raise target.none_yet(url, run)
        rows = [_row(ref, where) for ref, where in refs]
        if long:
            read = [_read(Run(store), run.records[ref.identity]) for ref, _ in refs]
            rows = [row | facts for row, facts in zip(rows, read, strict=True) if facts is not None]
    if json:
        out.as_json({"url": store.url, "checkpoints": rows, "branches": len(run.branches)})
    else:
        _say(rows, long, every)
        if run.branches and not every:
            out.say(f"{len(run.branches)} more on branches: ckpt ls --all {shown(url)}")
    if any(row.get("error") for row in rows):
        raise typer.Exit(Exit.DIFFERENT)


def _say(rows: list[dict[str, Any]], long: bool, every: bool) -> None:
    columns = ["step", "saved", "age", "epoch"] + (["bytes", "stored", "metrics"] if long else []) + ["where"] * every
    out.table(columns, [_cells(row, long, every) for row in rows], right=("step", "bytes", "stored"))
    for row in rows:
        if row.get("error"):
            out.say(f"step {Tick(row['step'], row['sub']).label}: {row['error']['message']}")


def _row(ref: CommitRef, where: str) -> dict[str, Any]:
    tick = ref.identity.tick
    return {
        "step": tick.step,
        "sub": tick.sub,
        "identity": str(ref.identity),
        "epoch": ref.identity.epoch.number,
        "saved": ref.saved_s,
        "where": where,
    }


def _cells(row: dict[str, Any], long: bool, every: bool) -> list[str]:
    step = Tick(row["step"], row["sub"]).label
    saved = row["saved"]
    cells = [step, out.when(saved) if saved else "?", out.ago(saved) if saved else "", str(row["epoch"])]
    if long and row["error"]:
        cells += [row["error"]["kind"], "", ""]
    elif long:
        metrics = ", ".join(f"{name}={value:g}" for name, value in row["metrics"].items())
        cells += [out.size(row["bytes"]), out.size(row["stored"]), metrics]
    return cells + [row["where"]] * every


def _read(run: Run, records: list[CommitRef]) -> dict[str, Any] | None:
    """What `--long` says of a checkpoint; None where it was retired meanwhile. `error`: what is wrong with its record,
    or None."""
    from ckpt.store.reader import any_readable

    try:
        return {**any_readable(run, records, _sizes), "error": None}
    except NoCheckpoint:
        return None
    except (DamagedData, NotFound) as exc:
        unknown = dict.fromkeys(("bytes", "stored", "referred", "metrics"))
        return {**unknown, "error": {"kind": exc.kind, "message": str(exc)}}


def _sizes(record: Record) -> dict[str, Any]:
    """`bytes`: of the state; `stored`: of the packs that this checkpoint wrote itself; `referred`: of frames that it
    shares with earlier ones."""
    own = {n for n, (key, _) in enumerate(record.packs) if key.startswith(f"data/{record.identity}/")}
    lengths, packs = record.places["length"], record.places["pack"]
    mine = sum(int(lengths[packs == n].sum()) for n in own)
    return {
        "bytes": int(record.manifest.frames["length"].sum(dtype="u8")),
        "stored": mine,
        "referred": int(lengths.sum(dtype="u8")) - mine,
        "metrics": dict(record.metrics),
        # Of a run that was copied the store only knows when that was.
        **({"saved": record.taken_s} if record.taken_s is not None else {}),
    }


def show(
    url: out.Url,
    which: out.Which = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="List the tensors whose name matches.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", "-t", help="List every tensor.")] = False,
    json: out.Json = False,
) -> None:
    """Show one checkpoint and what it consists of."""
    from ckpt.store.reader import any_readable
    from ckpt.store.run import Run

    with target.store(url) as store:
        view = target.view(store)
        records = view.records[target.choose(url, view, which).identity]
        with target.or_another():
            record = any_readable(Run(store), records, lambda found: found)
    body = _facts(record)
    listed = _tensors(record, only or []) if tensors or only or json else []
    if json:
        out.as_json({"url": store.url, **body, "tensors": listed})
        return
    del body["sub"]
    for name, value in {**body, "step": record.identity.tick.label}.items():
        if isinstance(value, dict):
            # What is no word or number is for programs, which have --json.
            short = {k: each for k, each in value.items() if not isinstance(each, dict | list) and k != "time_s"}
            value = ", ".join(f"{key} {each}" for key, each in short.items()) or "none"
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        out.say(f"{name:<12} {_SHOWN.get(name, str)(value)}")
    if listed:
        out.say()
        rows = [(t["name"], t["owner"], t["dtype"], t["shape"], t["parts"], out.size(t["bytes"])) for t in listed]
        out.table(("name", "owner", "dtype", "shape", "parts", "bytes"), rows, right=("parts", "bytes"))


def _facts(record: Record) -> dict[str, Any]:
    from ckpt.format.manifest import Codec

    identity = record.identity
    codes = {Codec.RAW: "raw", Codec.ZSTD: "zstd", Codec.PLANES: "planes"}
    counts = {name: int((record.places["codec"] == code).sum()) for code, name in codes.items()}
    return {
        "identity": str(identity),
        "step": identity.tick.step,
        "sub": identity.tick.sub,
        "epoch": identity.epoch.number,
        "ranks": list(record.manifest.coordinates),
        "tensor_count": sum(not spec.values for spec in record.manifest.tensors),
        **_sizes(record),
        "frames": {name: count for name, count in counts.items() if count},
        "packs": len(record.packs),
        "about": dict(record.about),
    }


def _tensors(record: Record, only: list[str]) -> list[dict[str, Any]]:
    import math

    from ckpt.store.slabs import check_globs, chosen, exported_name
    from ckpt.types import ITEMSIZE

    specs = chosen(record.manifest, only)
    check_globs(only, [exported_name(spec) for spec in specs], f"step {record.identity.tick.label}")
    listed = {(spec.name, spec.owner) for spec in specs}
    parts = [0] * len(record.manifest.tensors)
    for index, _ in record.manifest.boxes:
        parts[index] += 1
    return [
        {
            "name": spec.name,
            "owner": spec.owner,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "parts": parts[index],
            "bytes": math.prod(spec.shape) * ITEMSIZE[spec.dtype],
        }
        for index, spec in enumerate(record.manifest.tensors)
        if not spec.values and (spec.name, spec.owner) in listed
    ]
