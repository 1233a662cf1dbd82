"""The command `ckpt cp`: copies a run, or some of its checkpoints, to another URL."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from ckpt import reader
from ckpt.cli import out
from ckpt.errors import UsageError
from ckpt.storage.names import redact_url
from ckpt.types import Identity, format_count


def cp(
    url: out.UrlArgument,
    to: Annotated[str, typer.Argument(metavar="TO", help="The URL of the copy: nothing, or an earlier copy.")],
    which: Annotated[
        list[str] | None, typer.Option("--step", metavar="STEP", help="Only this one. May be given again.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Branches too.")] = False,
    json: out.JsonOption = False,
) -> None:
    """Copy the checkpoints of a run to another URL.

    Everything is hashed on the way. Run it again after a failure: what is there already is not copied again."""
    from ckpt.storage import canonical
    from ckpt.store.run import Run
    from ckpt.store.transfer import transfer

    if which and every:
        raise UsageError("--step and --all each say what is copied; give one of them")
    if canonical(url) == canonical(to):
        raise UsageError(f"{redact_url(url)} and {redact_url(to)} are one URL; give another one for the copy")
    if canonical(to).startswith("memory://"):
        raise UsageError(f"{redact_url(to)} is gone when this command ends; give a folder, or a URL of a store")
    with reader.open(url) as run, closing(reader.open_store(to)) as store:
        chosen = [run.find(each) for each in which] if which else [*run.checkpoints, *(run.branches if every else ())]
        if not chosen:
            raise run.none_yet
        lineage = run.view.lineage
        ends = {each.ref.identity.epoch for each in chosen} if which else {run.view.newest_epoch}
        epochs = {each for end in ends if end is not None for each, _ in lineage.ancestry(end)}
        epochs |= run.view.epochs if every else set()
        with run.held(chosen), out.progress("copying", json=json) as report:
            identities = [each.ref.identity for each in chosen]
            done = transfer(run.run, Run(store), run.view, identities, sorted(epochs), report)
    if json:
        facts = {"copied": done.copied, "there": done.existing, "retired": done.retired}
        names = {name: [*map(str, found)] for name, found in facts.items()}
        out.print_json({"url": run.url, "to": store.url, **names, "bytes": done.bytes})
        return
    for found, text in (
        (done.copied, f"copied to {redact_url(to)}, {out.format_size(done.bytes)} in packs"),
        (done.existing, "there already"),
        (done.retired, "retired there, so not copied again"),
    ):
        if found:
            out.print_text(f"{format_count(len(found), 'checkpoint')} {text}: {_steps(found)}")


def _steps(found: tuple[Identity, ...]) -> str:
    labels = [each.version.label for each in found]
    return ", ".join(labels if len(labels) < 9 else [*labels[:4], "...", *labels[-3:]])
