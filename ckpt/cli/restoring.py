"""ckpt restore: a checkpoint as a file that other tools read."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli import out, target
from ckpt.errors import StorageError, UsageError
from ckpt.types import counted

if TYPE_CHECKING:
    from ckpt.format.manifest import Record
    from ckpt.store.export import Exported


class Form(enum.StrEnum):
    """What is written. Their names are store.export's."""

    SAFETENSORS = "safetensors"
    SHARDED = "sharded"
    TORCH = "torch"


def restore(
    url: out.Url,
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="x.safetensors, x.pt, or a folder.")],
    which: out.Which = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help="Only tensors of that name.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Convert floats: bfloat16, ...")] = None,
    strip: Annotated[str, typer.Option("--strip", metavar="PREFIX", help="Take it off the names: model.")] = "",
    form: Annotated[Form | None, typer.Option("--format", help="Default: by the name of FILE.")] = None,
    shard_bytes: Annotated[
        str, typer.Option("--shard-bytes", metavar="SIZE", help="Of a file in a folder, at most.")
    ] = "5GiB",
    json: out.Json = False,
) -> None:
    """Write the tensors of a checkpoint to a file or a folder.

    A name that ends in .safetensors or .pt gives one file; any other a folder of .safetensors files with the index
    that Hugging Face reads. It takes some 100 MiB of memory beside the libraries, however large the checkpoint is."""
    from ckpt.store.export import export
    from ckpt.store.reader import FrameReader, any_readable
    from ckpt.store.run import Run

    if not to or "://" in to:
        raise UsageError(f"--to {to!r}: give a file or folder of this machine; from there it can be copied anywhere")
    path, shard_size = Path(to), out.parse_size("--shard-bytes", shard_bytes)
    with target.store(url) as store:
        view = target.view(store)
        ref = target.choose(url, view, which)
        records = view.records[ref.identity]
        with target.or_another(), target.held(store, records), out.progress("restoring", json=json) as report:

            def made_of(record: Record) -> Exported:
                return export(
                    FrameReader(store, record),
                    path,
                    format=form.value if form else None,
                    only=only or (),
                    dtype=dtype,
                    strip=strip,
                    shard_bytes=shard_size,
                    progress=report,
                )

            try:
                made = any_readable(Run(store), records, made_of)
            except OSError as exc:
                raise StorageError(f"cannot write {path}: {exc}") from exc
            except ImportError as exc:
                raise UsageError(f"{path}: this format is written by torch, which cannot be imported: {exc}") from exc
    if json:
        files = [str(file) for file in made.files]
        out.as_json({"identity": str(ref.identity), "files": files, "tensors": made.tensors, "bytes": made.bytes})
    else:
        out.say(f"step {target.name_of(ref)}: {counted(made.tensors, 'tensor')}, {out.size(made.bytes)}, in {path}")
