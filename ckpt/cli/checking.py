"""ckpt verify, ckpt diff: is it whole, and what has changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli import out, target
from ckpt.cli.exits import Exit
from ckpt.errors import UsageError

if TYPE_CHECKING:
    from ckpt.store.diff import Diff
    from ckpt.store.reader import FrameReader
    from ckpt.store.verify import Verified


def verify(
    url: out.Url,
    which: out.Which = None,
    newest: Annotated[bool, typer.Option("--newest", help="Only the newest of the line.")] = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="Branches too.")] = False,
    json: out.Json = False,
) -> None:
    """Read and hash everything, and name what is damaged.

    Without an option: every checkpoint of the line. The exit status is 1 if anything is damaged."""
    from ckpt.store.run import Run
    from ckpt.store.verify import verify as verify_all

    if newest and which is not None:
        raise UsageError("--newest and --step each name one checkpoint; give one of them")
    with target.store(url) as store:
        run = Run(store)
        view = target.view(store)
        if which is not None or newest:
            refs = [target.choose(url, view, which)]
        else:
            refs = sorted([*view.line, *(view.branches if every else [])])
        if not refs and not view.damaged:
            raise target.none_yet(url, view)
        with out.progress("verifying", json=json) as report:
            results = verify_all(run, refs, report)
        damaged_claims = [{"key": key, "what": what, "tensors": []} for key, what in view.damaged]
    good = not damaged_claims and all(result.is_good for result in results)
    if json:
        out.as_json({"url": store.url, "good": good, "checkpoints": [*map(_facts, results)], "claims": damaged_claims})
    else:
        _say(results)
        for claim in damaged_claims:
            out.say(f"DAMAGED {claim['key']}: {claim['what']}")
    if not good:
        raise typer.Exit(Exit.DIFFERENT)


def _facts(result: Verified) -> dict[str, Any]:
    return {
        "identity": str(result.ref.identity),
        "step": result.ref.identity.tick.step,
        "sub": result.ref.identity.tick.sub,
        "good": result.is_good,
        "frames": result.frames,
        "checked_bytes": result.checked_bytes,
        "problems": [asdict(problem) for problem in result.problems],
    }


def _say(results: list[Verified]) -> None:
    names = Counter(target.name_of(result.ref) for result in results)
    for result in results:
        step = target.name_of(result.ref)
        if names[step] > 1:  # one of them is on a branch
            step += f" of epoch {result.ref.identity.epoch}"
        if result.is_good:
            out.say(f"step {step}: good, {result.frames} frames, {out.size(result.checked_bytes)} read and hashed")
        for problem in result.problems:
            out.say(f"step {step}: DAMAGED {problem.key}: {problem.what}")
            if problem.tensors:
                out.say(f"    lost: {', '.join(problem.tensors)}")
    bad = sum(not result.is_good for result in results)
    out.say(f"{bad} of {len(results)} checkpoints are damaged" if bad else f"{len(results)} checkpoints, all good")


def diff(
    url: out.Url,
    first: Annotated[str, typer.Argument(metavar="STEP", help="A step of the line, or an identity.")],
    second: Annotated[str | None, typer.Argument(metavar="[STEP]", help="The other one; default: the newest.")] = None,
    other: Annotated[str | None, typer.Option("--other", metavar="URL", help="Look for the second one there.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help="Only tensors of that name.")] = None,
    json: out.Json = False,
) -> None:
    """Say which tensors and values differ, and how far.

    The exit status is 1 if anything differs."""
    from ckpt.store.diff import diff as compare

    with target.store(url) as store, target.store(other or url) as other_store:
        readers = (_reader(store, url, first), _reader(other_store, other or url, second))
        with out.progress("comparing", json=json) as report:
            found = compare(*readers, only or (), report)
    if json:
        out.as_json({"differ": not found.is_equal, **asdict(found)})
    else:
        _say_diff(found, readers)
    if not found.is_equal:
        raise typer.Exit(Exit.DIFFERENT)


def _reader(store: Any, url: str, which: str | None) -> FrameReader:
    from ckpt.store.reader import FrameReader, open_record

    return FrameReader(store, open_record(store, target.choose(url, target.view(store), which)))


def _say_diff(found: Diff, readers: tuple[FrameReader, FrameReader]) -> None:
    steps = [reader.record.identity.tick.label for reader in readers]
    if found.changed:
        rows = [
            (
                each.name,
                f"{each.elements} of {each.size}",
                "" if each.max_abs is None else f"{each.max_abs:.3g}",
                "" if each.rms is None else f"{each.rms:.3g}",
                f"{each.nans[0]}, {each.nans[1]}" if any(each.nans) else "",
            )
            for each in found.changed
        ]
        out.table(("changed", "elements", "max abs", "rms", "NaNs"), rows, right=("elements", "max abs", "rms"))
    for name in found.added:
        out.say(f"only in step {steps[1]}: {name}")
    for name in found.removed:
        out.say(f"only in step {steps[0]}: {name}")
    for name, before, after in found.retyped:
        out.say(f"{name}: {before} in step {steps[0]}, {after} in step {steps[1]}")
    for path in found.values:
        out.say(f"value: {path}")
    differ = len(found.changed) + len(found.added) + len(found.removed) + len(found.retyped)
    out.say(
        f"step {steps[0]} and step {steps[1]}: {len(found.equal)} tensors equal, {differ} differ, "
        f"{len(found.values)} values differ"
    )
