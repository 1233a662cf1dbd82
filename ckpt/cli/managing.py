"""ckpt branch, ckpt prune: what changes a store. Neither deletes anything without --yes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt import reader
from ckpt.cli import live, out
from ckpt.errors import DamagedData, RunInUse, UsageError
from ckpt.storage.names import naming, shown
from ckpt.types import Identity, counted

if TYPE_CHECKING:
    from ckpt.agent.client import Connection
    from ckpt.policy.every import Keep
    from ckpt.store.prune import PrunePlan
    from ckpt.store.run import Run, RunView

LAUNCH = "ckpt command line"  # the launch that this is, for whoever watches the store
SILENT_S = 2.0  # how long an agent is waited for without a word


def branch(
    url: out.Url,
    at: Annotated[str, typer.Option("--at", metavar="STEP", help="The step, or identity, to go on from.")],
    take_over: Annotated[bool, typer.Option("--take-over", help="Even though a living job writes there.")] = False,
    json: out.Json = False,
) -> None:
    """Let the next starts go on from an older checkpoint.

    What came after it stays, as a branch: `ckpt ls --all`."""
    from ckpt.settings import read
    from ckpt.store.branch import branch as begin_branch

    with reader.open(url) as run:
        chosen = run.find(at)
        run.run.watch_other(run.view, LAUNCH, read().heartbeat_s, take_over=take_over)
        claim = begin_branch(run.run, chosen.ref.identity)
    if json:
        out.as_json({"url": run.url, "epoch": str(claim.epoch), "parent": chosen.identity})
    else:
        out.say(f"the next start of {shown(url)} goes on from step {chosen.label} ({chosen.identity})")


def prune(
    url: out.Url,
    last: Annotated[int | None, typer.Option("--last", help="Keep so many of the newest.")] = None,
    every: Annotated[int | None, typer.Option("--every", help="Keep steps that are a multiple of this.")] = None,
    best: Annotated[str | None, typer.Option("--best", metavar="METRIC:min|max", help="Keep the best one.")] = None,
    also: Annotated[list[str] | None, typer.Option("--also", metavar="STEP", help="Let this one go, too.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without, it is only said what would be done.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="With --yes: read and hash the newest first: others may be needed."),
    ] = True,
    json: out.Json = False,
) -> None:
    """Let old checkpoints and leftovers go. Without --yes nothing is changed.

    What goes is retired first; its data is deleted by a later prune, once nobody can still need it. Of a run that no
    job is at work on the newest checkpoint is read and hashed before, as `ckpt verify --newest` does."""
    from ckpt.storage import canonical

    keep = _keep(last, every, best)
    sock = live.find_agent(url)
    if sock is None:
        body = _prune_closed(url, keep, also or [], yes, check, json)
    else:
        with live.talk(sock) as agent:  # a running job has one decider, and that is its agent
            options = {"last": keep.last, "every": keep.every, "best": keep.best and [keep.best.metric, keep.best.mode]}
            body = _ask_agent(agent, {"yes": yes, "keep": options, "also": _identities(url, also or [])})
    if json:
        out.as_json({"url": shown(canonical(url)), "done": yes, **body})
    else:
        _say_plan(body, yes)


def _ask_agent(agent: Connection, request: dict[str, Any]) -> dict[str, Any]:
    """Waits as long as the agent lives: a commit under way ends first, and may take hours. Errors: what the agent
    answers; AgentError where it is gone."""
    from ckpt.agent.client import body_of

    pending = agent.ask("prune", request)
    try:
        return body_of(pending.answer(SILENT_S))
    except TimeoutError:
        first = ", which ends the commit under way first" if request["yes"] else ""
        print(f"waiting for the job's agent{first}", file=sys.stderr, flush=True)
        return body_of(pending.answer(None))


def _identities(url: str, which: list[str]) -> list[str]:
    if not which:
        return []
    with reader.open(url) as run:
        return [run.find(each).identity for each in which]


def _prune_closed(url: str, keep: Keep, also: list[str], yes: bool, check: bool, json: bool) -> dict[str, Any]:
    from ckpt.settings import read
    from ckpt.store.prune import Pruner

    with reader.open(url) as opened:
        run, view = opened.run, opened.view
        if yes:  # then nobody else may be deciding: a job on another host, perhaps
            try:
                run.watch_other(view, LAUNCH, read().heartbeat_s)
            except RunInUse as exc:
                text = f"{exc}. It need not stop for a prune: run that on its host, where its agent does it"
                raise RunInUse(text) from exc
            view = run.view()
        pruner = Pruner(run, None)
        plan = pruner.plan(view, keep, [opened.find(each).ref.identity for each in also])
        pruner.check_metric(view, keep)
        if yes and check and plan.retire:
            _check_newest(run, view, url, json)
        aborted = pruner.execute(plan) if yes else 0
    return _plan_facts(plan, aborted)


def _check_newest(run: Run, view: RunView, url: str, json: bool) -> None:
    """It never goes, so it is what is left where it is the only one; it need not be good for that. Errors: DamagedData;
    StorageError."""
    from ckpt.store.verify import verify

    with out.progress("verifying the newest", json=json) as report:
        (found,) = verify(run, view.records[view.line[-1].identity], report)
    if not found.is_good:
        why = naming(found.problems[0].key, found.problems[0].what)
        raise DamagedData(
            f"step {found.ref.identity.tick.label}, the newest of {shown(url)}, is damaged ({why})"
            ": nothing was let go, since what is older may be what the run has left. Let the damaged one go first "
            "(ckpt branch to an older step, then ckpt prune --also), or give --no-check"
        )


def _plan_facts(plan: PrunePlan, aborted: int) -> dict[str, Any]:
    facts = asdict(plan) | {"uploads_aborted": aborted}
    for name in ("retire", "abandoned", "waiting", "damaged"):
        facts[name] = [str(identity) for identity in getattr(plan, name)]
    return facts


def _keep(last: int | None, every: int | None, best: str | None) -> Keep:
    from ckpt.policy.every import Best, Keep

    if best is None:
        return Keep(last, every)
    metric, _, mode = best.rpartition(":")
    if not metric or mode not in ("min", "max"):
        raise UsageError(f"--best {best!r}: give a metric and its better end, such as val_loss:min")
    return Keep(last, every, Best(metric, "min" if mode == "min" else "max"))


def _named(identity: str) -> str:
    """By its step, as `ckpt ls` calls it, and by what finds it on a branch, too."""
    return f"step {Identity.parse(identity).tick.label}, {identity}"


def _say_plan(body: dict[str, Any], yes: bool) -> None:
    from ckpt.store.prune import GRACE_S

    done = "" if yes else "would be "
    for name, text in (
        ("retire", "retired: restored no more, deleted after the grace"),
        ("abandoned", "retired, as commits that never happened"),
        ("waiting", "waiting for their grace to end"),
    ):
        for identity in body.get(name, ()):
            out.say(f"{'' if name == 'waiting' else done}{text}: {_named(identity)}")
    deleted = [*body.get("records", ()), *body.get("packs", ()), *body.get("leases", ())]
    for key in deleted:
        out.say(f"{done}deleted: {key}")
    for identity in body.get("damaged", ()):
        out.say(f"not counted as kept, not being whole: {_named(identity)} (see ckpt verify)")
    if body.get("blocked"):
        out.say(f"no data can be deleted: {body['blocked']}")
    if aborted := body.get("uploads_aborted"):
        out.say(f"ended: {counted(aborted, 'upload')} that nobody would have finished")
    if not deleted and not any(body.get(name) for name in ("retire", "abandoned", "waiting")):
        if not aborted:
            out.say("nothing to do" if yes else "nothing to do; --yes also ends uploads that nobody will finish")
        return
    out.say(f"{done}deleted now: {out.size(body.get('deleted_bytes', 0))}")
    later = out.size(body.get("freed_later_bytes", 0))
    out.say(f"deleted by a prune {GRACE_S / 60:.0f} minutes after it was retired, or later: {later}")
    if not yes:
        out.say("nothing was changed; --yes does it")
