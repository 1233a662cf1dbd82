"""The command `ckpt import`: makes a checkpoint of a folder that torch.distributed.checkpoint (DCP) saved."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt.cli import out
from ckpt.errors import UsageError
from ckpt.storage.names import redact_url
from ckpt.types import format_count


def import_(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The folder: it holds .metadata and .distcp files.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="The run that gets the checkpoint; it may be new.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Its step. Default: the newest one + 1.")
    ] = None,
    json: out.JsonOption = False,
) -> None:
    """Make a checkpoint of a folder that torch's distributed checkpoint (DCP) saved.

    The data is streamed: it takes some 300 MiB of memory, however large the folder is. Nothing of it is unpickled.
    `ckpt restore --to dcp:PATH` is the way back."""
    from ckpt.storage import canonical
    from ckpt.store.dcp_import import import_dcp

    if canonical(url).startswith("memory://"):
        raise UsageError(f"{redact_url(url)} is gone when this command ends; give a folder, or a URL of a store")
    with out.progress("importing", json=json) as report:
        made = import_dcp(path, url, step=step, progress=report)
    if json:
        facts = {"tensors": made.tensors, "values": made.values, "bytes": made.bytes}
        out.print_json({"path": path, "url": redact_url(url), "identity": made.identity, **facts})
        return
    size, values = out.format_size(made.bytes), format_count(made.values, "other value")
    out.print_text(
        f"step {made.label}: {format_count(made.tensors, 'tensor')}, {size}, and {values}, from {path} in "
        f"{redact_url(url)}"
    )
