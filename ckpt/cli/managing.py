"""The commands `ckpt branch` and `ckpt prune`, which change a store. Nothing is deleted without --yes."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt import reader
from ckpt.cli import live, out
from ckpt.errors import DamagedData, RunInUse, UsageError
from ckpt.policy.save_options import Best, Keep
from ckpt.storage.names import problem_text, redact_url
from ckpt.types import Identity, format_count

if TYPE_CHECKING:
    from ckpt.ipc.client import Connection
    from ckpt.store.prune import PrunePlan, Pruner
    from ckpt.store.run import Run, RunView

LAUNCH = "ckpt command line"  # this process's launch id, for observers of the store
NO_GRACE_S = -2.0  # below zero, since some stores give whole seconds only
SILENT_S = 2.0  # how long a prune waits for the agent before it says so


def branch(
    url: out.UrlArgument,
    at: Annotated[str, typer.Option("--at", metavar="STEP", help="The step, or identity, to go on from.")],
    take_over: Annotated[bool, typer.Option("--take-over", help="Even if a living job writes there.")] = False,
    json: out.JsonOption = False,
) -> None:
    """Let the next starts go on from an older checkpoint.

    What came after it stays, as a branch: `ckpt ls --all`."""
    from ckpt.settings import read_settings
    from ckpt.store.branch import branch as begin_branch

    with reader.open(url) as run:
        chosen = run.find(at)
        run.run.check_not_in_use(run.view, LAUNCH, read_settings().heartbeat_s, take_over=take_over)
        claim = begin_branch(run.run, chosen.ref.identity)
    if json:
        out.print_json({"url": run.url, "epoch": str(claim.epoch), "parent": chosen.identity})
    else:
        out.print_text(f"the next start of {redact_url(url)} goes on from step {chosen.label} ({chosen.identity})")


def prune(
    url: out.UrlArgument,
    last: Annotated[int | None, typer.Option("--last", help="Keep so many of the newest.")] = None,
    every: Annotated[int | None, typer.Option("--every", help="Keep steps that are a multiple of this.")] = None,
    best: Annotated[str | None, typer.Option("--best", metavar="METRIC:min|max", help="Keep the best one.")] = None,
    also: Annotated[list[str] | None, typer.Option("--also", metavar="STEP", help="Retire this one as well.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Else only print what would be done.")] = False,
    now: Annotated[bool, typer.Option("--now", help="For a full disk: delete without a grace period.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="With --yes: first verify the newest checkpoint."),
    ] = True,
    json: out.JsonOption = False,
) -> None:
    """Let old checkpoints and leftovers go. Without --yes nothing is changed.

    What goes is retired first; its data is deleted by a later prune, once nobody can still need it. Of a run that no
    job is at work on the newest checkpoint is read and hashed before, as `ckpt verify --newest` does. --now breaks
    who reads what goes, and holds no lease: a start that is restoring it, for instance."""
    from ckpt.storage import canonical

    keep = _keep(last, every, best)
    sock = live.find_agent(url)
    if sock is None:
        body = _prune_closed(url, keep, also or [], yes, now, check, json)
    elif now:
        sock.close()
        raise UsageError(
            f"--now: an agent serves {redact_url(url)} here. It may still use what would be deleted, even shortly "
            "after its "
            "job has ended. Prune without --now: if the disk is full, the agent deletes at once"
        )
    else:
        with live.connect_agent(sock) as agent:  # the agent is the one decider of a running job
            options = {"last": keep.last, "every": keep.every, "best": keep.best and [keep.best.metric, keep.best.mode]}
            body = _ask_agent(agent, {"yes": yes, "keep": options, "also": _identities(url, also or [])})
    if json:
        out.print_json({"url": redact_url(canonical(url)), "done": yes, **body})
    else:
        _print_plan(body, yes, now)


def _ask_agent(agent: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """The agent's answer. Waits as long as the agent lives: it finishes a commit under way first, which may take hours.
    Errors: those that the agent reports; AgentError if it ends."""
    from ckpt.ipc.client import decode_body

    pending = agent.start_request("prune", request)
    try:
        return decode_body(pending.wait_for_answer(SILENT_S))
    except TimeoutError:
        first = ", which ends the commit under way first" if request["yes"] else ""
        print(f"waiting for the job's agent{first}", file=sys.stderr, flush=True)
        return decode_body(pending.wait_for_answer(None))


def _identities(url: str, which: list[str]) -> list[str]:
    if not which:
        return []
    with reader.open(url) as run:
        return [run.find(each).identity for each in which]


def _prune_closed(
    url: str, keep: Keep, also: list[str], yes: bool, now: bool, check: bool, json: bool
) -> dict[str, Any]:
    from ckpt.settings import read_settings
    from ckpt.store.prune import GRACE_S, Pruner

    with reader.open(url) as opened:
        run, view = opened.run, opened.view
        # No other process may be deciding meanwhile, such as a job on another host.
        if yes:
            try:
                run.check_not_in_use(view, LAUNCH, read_settings().heartbeat_s)
            except RunInUse as exc:
                text = f"{exc}. The job need not stop for that: prune on the job's host, where its agent does it"
                raise RunInUse(text) from exc
            view = run.view()
        pruner = Pruner(run, None, grace_s=NO_GRACE_S if now else GRACE_S)
        plan = pruner.plan(view, keep, [opened.find(each).ref.identity for each in also])
        pruner.check_metric(view, keep)
        if yes and check and plan.retire:
            _check_newest(run, view, url, json)
        if yes and now:
            return _prune_now(pruner, view, plan)
        aborted = pruner.execute(plan) if yes else 0
    return _plan_facts(plan, aborted)


def _prune_now(pruner: Pruner, view: RunView, plan: PrunePlan) -> dict[str, Any]:
    """Retires and deletes at once. Records are deleted first, because a full disk may have no room for a tombstone.
    Without its record no reader finds a checkpoint, and then a tombstone has room."""
    from ckpt.store import keys

    going = set(plan.retire) - pruner.leased_identities()
    records = [keys.record_key(ref.identity, ref.writer) for ref in view.commits if ref.identity in going]
    first = replace(plan, records=(*plan.records, *records))
    aborted = pruner.execute(first)
    second = pruner.plan(pruner.run.view(), Keep())
    aborted += pruner.execute(second)
    sizes = {keys.record_key(ref.identity, ref.writer): ref.size for ref in view.commits}
    done = replace(
        first,
        waiting=tuple(sorted({*second.waiting, *(set(plan.retire) - going)})),
        packs=(*first.packs, *second.packs),
        deleted_bytes=first.deleted_bytes + second.deleted_bytes + sum(sizes[key] for key in records),
        freed_later_bytes=second.freed_later_bytes,
        blocked=second.blocked,
    )
    return _plan_facts(done, aborted)


def _check_newest(run: Run, view: RunView, url: str, json: bool) -> None:
    """Reads and hashes the newest checkpoint, which is never pruned and may be the only one left. Errors: DamagedData
    if it is damaged; StorageError."""
    from ckpt.store.verify import verify

    with out.progress("verifying the newest", json=json) as report:
        (found,) = verify(run, view.records_by_identity[view.history[-1].identity], report)
    if not found.is_good:
        why = problem_text(found.problems[0].key, found.problems[0].what)
        raise DamagedData(
            f"step {found.ref.identity.version.label}, the newest of {redact_url(url)}, is damaged ({why}). Nothing "
            "was "
            "retired: older checkpoints may be all that the run has left. First retire the damaged one (ckpt branch to "
            "an older step, then ckpt prune --also), or give --no-check"
        )


def _plan_facts(plan: PrunePlan, aborted: int) -> dict[str, Any]:
    facts = asdict(plan) | {"uploads_aborted": aborted}
    for name in ("retire", "abandoned", "waiting", "damaged"):
        facts[name] = [str(identity) for identity in getattr(plan, name)]
    return facts


def _keep(last: int | None, every: int | None, best: str | None) -> Keep:
    if best is None:
        return Keep(last, every)
    metric, _, mode = best.rpartition(":")
    if not metric or mode not in ("min", "max"):
        raise UsageError(f"--best {best!r}: give a metric and its better end, such as val_loss:min")
    return Keep(last, every, Best(metric, "min" if mode == "min" else "max"))


def _checkpoint_text(identity: str) -> str:
    """A checkpoint by its step, as `ckpt ls` shows it, and by its identity, which also names one on a branch."""
    return f"step {Identity.parse(identity).version.label}, {identity}"


def _print_plan(body: dict[str, Any], yes: bool, now: bool) -> None:
    """Prints the plan. No line is longer than 80 characters, except a record's error."""
    done = "" if yes else "would be "
    for name, text in (
        ("retire", f"{done}retired:"),
        ("abandoned", f"{done}retired, as abandoned commits:"),
        ("waiting", "waiting for the end of their grace period, or for their readers:"),
    ):
        _print_list(text, map(_checkpoint_text, body.get(name, ())))
    deleted = [*body.get("records", ()), *body.get("packs", ())]
    _print_list(f"{done}deleted:", _by_checkpoint(deleted, body.get("leases", ())))
    _print_list("damaged, so not counted as kept (see ckpt verify):", map(_checkpoint_text, body.get("damaged", ())))
    if body.get("blocked"):
        out.print_text(f"no data can be deleted: {body['blocked']}")
    if aborted := body.get("uploads_aborted"):
        out.print_text(f"ended: {format_count(aborted, 'upload')} that nobody would have finished")
    if not deleted and not any(body.get(name) for name in ("retire", "abandoned", "waiting", "leases")):
        if not aborted:
            out.print_text("nothing to do" if yes else "nothing to do; --yes also ends uploads that nobody will finish")
        return
    at_once, later = body.get("deleted_bytes", 0), body.get("freed_later_bytes", 0)
    out.print_text(f"{done}deleted now: {out.format_size(at_once + (later if now and not yes else 0))}")
    if not now:
        out.print_text(
            f"deleted by a prune {body['grace_s']:.0f} s after it was retired, or later: {out.format_size(later)}"
        )
    if body.get("retire"):
        out.print_text("a retired checkpoint is no longer listed or restored")
    if not yes:
        out.print_text("nothing was changed; --yes does it")


def _print_list(title: str, lines: Iterable[str]) -> None:
    for number, line in enumerate(lines):
        if not number:
            out.print_text(title)
        out.print_text(f"  {line}")


def _by_checkpoint(deleted: Iterable[str], leases: Collection[str]) -> Iterator[str]:
    """The number of objects per checkpoint, as lines. The keys are only for programs, which use --json."""
    from ckpt.store import keys

    found: dict[Identity, list[int]] = {}
    for key in deleted:
        record, pack = keys.parse_record(key), keys.parse_pack(key)
        identity = record[0] if record is not None else pack.identity if pack is not None else None
        if identity is not None:
            found.setdefault(identity, [0, 0])[record is None] += 1
    for identity, counts in sorted(found.items()):
        parts = (format_count(count, noun) for count, noun in zip(counts, ("record", "pack"), strict=True) if count)
        yield f"{_checkpoint_text(str(identity))}: {', '.join(parts)}"
    if leases:
        yield f"{format_count(len(leases), 'lease')} of readers that are gone"
