"""The commands `ckpt verify` and `ckpt diff`: whether checkpoints are whole, and what differs between two."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt import reader
from ckpt.cli import out
from ckpt.cli.exits import Exit
from ckpt.errors import UsageError
from ckpt.storage.names import problem_text, redact_url
from ckpt.types import format_count

if TYPE_CHECKING:
    from ckpt.store.diff import ChangedValue, Diff
    from ckpt.store.run import RunView
    from ckpt.store.verify import Unrecorded, Verified


def verify(
    url: out.UrlArgument,
    which: out.StepOption = None,
    newest: Annotated[bool, typer.Option("--newest", help="Only the newest checkpoint.")] = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="Branches too.")] = False,
    json: out.JsonOption = False,
) -> None:
    """Read and hash everything, and name what is damaged.

    Without an option: every checkpoint of the line. The exit status is 1 if anything is damaged."""
    if newest and which is not None:
        raise UsageError("--newest and --step each name one checkpoint; give one of them")
    with reader.open(url) as run:
        if which is not None or newest:
            chosen = [run.newest if which is None else run.find(which)]
        else:
            chosen = [*run.checkpoints, *(run.branches if every else ())]
            chosen.sort(key=lambda each: each.ref)
        unrecorded = run.unrecorded() if which is None else []
        if not chosen and not run.view.damaged_claims:
            for found in unrecorded:
                out.print_text(_unrecorded_text(found), sys.stderr)
            raise run.none_yet
        with run.held(chosen), out.progress("verifying", json=json) as report:
            results = run.verify(chosen, report)
        damaged_claims: list[dict[str, Any]] = [
            {"key": key, "what": what, "tensors": []} for key, what in _bad_claims(run.view)
        ]
    good = not damaged_claims and not any(each.is_lost for each in unrecorded)
    good = good and all(result.is_good or result.is_retired for result in results)
    if json:
        gone = [asdict(each) | {"identity": str(each.identity)} for each in unrecorded]
        facts = {"url": run.url, "good": good, "checkpoints": [*map(_result_facts, results)]}
        out.print_json({**facts, "claims": damaged_claims, "unrecorded": gone})
    else:
        _print_results(results)
        for claim in damaged_claims:
            out.print_text(f"DAMAGED {problem_text(claim['key'], claim['what'])}")
        for found in unrecorded:
            out.print_text(_unrecorded_text(found))
    if not good:
        raise typer.Exit(Exit.DIFFERENT)


def _unrecorded_text(each: Unrecorded) -> str:
    what = f"{format_count(each.packs, 'pack')} ({out.format_size(each.bytes)}) without a record"
    name = f"step {each.identity.version.label}, {each.identity}"
    if each.is_lost:
        return f"DAMAGED {name}: {what}, though other checkpoints refer to it: its record was removed"
    return f"{name}: {what}: a commit that never ended, or its record was removed; `ckpt prune` deletes it"


def _bad_claims(view: RunView) -> list[tuple[str, str]]:
    """The keys of damaged and missing claims, each with what is wrong."""
    from ckpt.store import keys

    newest = view.newest_epoch
    broken = view.lineage.broken_epoch(newest) if newest is not None else None
    wrong = dict(view.damaged_claims)
    if broken is not None:
        wrong.setdefault(keys.epoch_key(broken), "it is missing: history begins there, and what is older is a branch")
    return sorted(wrong.items())


def _result_facts(result: Verified) -> dict[str, Any]:
    return {
        "identity": str(result.ref.identity),
        "step": result.ref.identity.version.step,
        "sub": result.ref.identity.version.sub,
        "good": result.is_good,
        "retired": result.is_retired,
        "frames": result.frames,
        "checked_bytes": result.checked_bytes,
        "problems": [asdict(problem) for problem in result.problems],
    }


def _print_results(results: list[Verified]) -> None:
    names = Counter(result.ref.identity.version.label for result in results)
    for result in results:
        step = result.ref.identity.version.label
        # One of the checkpoints with this step is on a branch.
        if names[step] > 1:
            step += f" of start {result.ref.identity.epoch}"
        if result.is_good:
            frames = format_count(result.frames, "frame")
            out.print_text(f"step {step}: good, {frames}, {out.format_size(result.checked_bytes)} read and hashed")
        elif result.is_retired:
            out.print_text(f"step {step}: retired meanwhile, and deleted")
            continue
        for problem in result.problems:
            wrong = "missing" if problem.is_missing else "damaged"
            what = f"another record of it is {wrong}:" if result.is_good else wrong.upper()
            out.print_text(f"step {step}: {what} {problem_text(problem.key, problem.what)}")
            if problem.tensors and not result.is_good:
                more = f" and {problem.tensors_more} more" if problem.tensors_more else ""
                out.print_text(f"    lost: {', '.join(problem.tensors)}{more}")
    left = [result for result in results if not result.is_retired]
    bad = sum(not result.is_good for result in left)
    checkpoints = format_count(len(left), "checkpoint")
    out.print_text(f"{bad} of {checkpoints} damaged" if bad else f"{checkpoints}, all good")


def diff(
    url: out.UrlArgument,
    first: Annotated[str, typer.Argument(metavar="STEP", help="A step, or an identity.")],
    second: Annotated[str | None, typer.Argument(metavar="[STEP]", help="The other one; default: the newest.")] = None,
    other: Annotated[str | None, typer.Option("--other", metavar="URL", help="The second one is there.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="GLOB", help="Only tensors of that name.")] = None,
    json: out.JsonOption = False,
) -> None:
    """Say which tensors and values differ, and how far.

    The exit status is 1 if anything differs."""
    with reader.open(url) as run, reader.open(other or url) as other_run, ExitStack() as stack:
        one = run.find(first)
        two = other_run.newest if second is None else other_run.find(second)
        stack.enter_context(run.held([one] if other else [one, two]))
        if other:
            stack.enter_context(other_run.held([two]))
        report = stack.enter_context(out.progress("comparing", json=json))
        found = one.diff(two, only or (), report)
    if json:
        out.print_json({"differ": not found.is_equal, **asdict(found)})
    else:
        places = (f" of {redact_url(url)}", f" of {redact_url(other)}") if other else ("", "")
        names = [f"{each.label}{place}" for each, place in zip((one, two), places, strict=True)]
        # One of them is on a branch.
        if names[0] == names[1] and one.identity != two.identity:
            names = [each.identity for each in (one, two)]
        _print_diff(found, *names, with_values=not only)
    if not found.is_equal:
        raise typer.Exit(Exit.DIFFERENT)


def _print_diff(found: Diff, *steps: str, with_values: bool) -> None:
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
        out.print_table(("changed", "elements", "max abs", "rms", "NaNs"), rows, right=("elements", "max abs", "rms"))
    for name in found.added:
        out.print_text(f"only in step {steps[1]}: {name}")
    for name in found.removed:
        out.print_text(f"only in step {steps[0]}: {name}")
    for name, before, after in found.retyped:
        out.print_text(f"{name}: {before} in step {steps[0]}, {after} in step {steps[1]}")
    for value in found.values:
        out.print_text(f"{value.path}: {_change_text(value, *steps)}")
    differ = len(found.changed) + len(found.added) + len(found.removed) + len(found.retyped)
    out.print_text(
        f"step {steps[0]} and step {steps[1]}: {format_count(len(found.equal), 'tensor')} equal, {differ} differing; "
        + (f"{format_count(len(found.values), 'value')} differing" if with_values else "values not compared (--only)")
    )


def _change_text(value: ChangedValue, *steps: str) -> str:
    if value.before is None or value.after is None:
        return f"{value.before or value.after}, only in step {steps[value.before is None]}"
    # The difference lies beyond the end of these shortened texts.
    if value.before == value.after:
        return f"differs ({value.before})"
    return f"{value.before} -> {value.after}"
