"""The command `ckpt restore`: writes a checkpoint to a file that other tools read."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from ckpt import reader
from ckpt.cli import out
from ckpt.errors import StorageError, UsageError
from ckpt.policy.export_rule import hub_repository
from ckpt.types import format_count


class Form(enum.StrEnum):
    """The formats of the output, named as in store.export."""

    SAFETENSORS = "safetensors"
    SHARDED = "sharded"
    ADAPTER = "adapter"
    TORCH = "torch"


def restore(
    url: out.UrlArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FILE", help="x.safetensors, x.pt, a folder (no ending), dcp:FOLDER, or hf://USER/NAME."
        ),
    ],
    which: out.StepOption = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help="Only tensors of that name.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Convert floats: bfloat16, ...")] = None,
    strip: Annotated[str, typer.Option("--strip", metavar="PREFIX", help="Take it off the names: model.")] = "",
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="REGEX=>NEW", help="Change names by a regular expression, behind --strip."),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option("--beside", metavar="PATH", help="Copy a file, or a folder's files, into the folder."),
    ] = None,
    form: Annotated[Form | None, typer.Option("--format", help="Default: by the name of FILE.")] = None,
    shard_bytes: Annotated[
        str, typer.Option("--shard-bytes", metavar="SIZE", help="Of a file in a folder, at most.")
    ] = "5GiB",
    json: out.JsonOption = False,
) -> None:
    """Write the tensors of a checkpoint to a file or a folder.

    A name that ends in .safetensors or .pt gives one file. One without an ending gives a folder of .safetensors files
    with the index that Hugging Face reads; --beside adds its config and tokenizer. dcp:FOLDER gives a folder that
    torch's dcp.load reads. hf://USER/NAME gives a folder, too, and uploads it to that repository of the Hugging Face
    Hub. It takes some 100 MiB of memory, however large the checkpoint is; for dcp:FOLDER 300 MiB."""
    if not to or ("://" in to and not hub_repository(to)):
        raise UsageError(
            f"--to {to!r}: give hf://USER/NAME, or a file or folder of this machine, to be copied from there"
        )
    is_dcp = to.startswith("dcp:")
    if is_dcp and (to == "dcp:" or dtype or strip or form or rename or beside):
        raise UsageError(f"--to {to!r}: give dcp:FOLDER, without --dtype, --strip, --rename, --beside and --format")
    place, shard_size = to.removeprefix("dcp:"), out.parse_size("--shard-bytes", shard_bytes)
    with reader.open(url) as run:
        chosen = run.newest if which is None else run.find(which)
        with run.held([chosen]), out.progress("restoring", json=json) as report:
            try:
                made = chosen.export(
                    place,
                    format="dcp" if is_dcp else form.value if form else None,
                    only=only or (),
                    dtype=dtype,
                    strip=strip,
                    names=dict(map(_parse_rename, rename or ())),
                    beside=beside or (),
                    shard_bytes=shard_size,
                    progress=report,
                )
            except OSError as exc:
                raise StorageError(f"cannot write {place}: {exc}") from exc
            except ImportError as exc:
                raise UsageError(f"{place}: this format is written by torch, which cannot be imported: {exc}") from exc
    if json:
        files = [str(file) for file in made.files]
        facts = {"identity": chosen.identity, "files": files, "tensors": made.tensors, "bytes": made.bytes}
        out.print_json({**facts, "firsts": list(made.firsts)})
    else:
        out.print_text(
            f"step {chosen.label}: {format_count(made.tensors, 'tensor')}, {out.format_size(made.bytes)}, in {place}"
        )
        if made.firsts:
            more = f" and {len(made.firsts) - 3} more" if len(made.firsts) > 3 else ""
            out.print_text(
                f"the ranks had different copies of {', '.join(made.firsts[:3])}{more}: the first rank's were written, "
                "which a start on another number of ranks takes, too (--only 'NAME@*' writes all)"
            )


def _parse_rename(text: str) -> tuple[str, str]:
    pattern, arrow, new = text.partition("=>")
    if not arrow or not pattern:
        raise UsageError(f"--rename {text!r}: give REGEX=>NEW, such as '^layers=>model.layers'")
    return pattern, new
