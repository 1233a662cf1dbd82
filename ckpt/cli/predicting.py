"""The commands `ckpt predict train` and `ckpt predict check`: train a predictor of failures, and measure one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli import out
from ckpt.errors import UsageError
from ckpt.types import format_count

if TYPE_CHECKING:
    from ckpt.predict.recorded import Recorded
    from ckpt.predict.training import PredictorScore

Files = Annotated[
    list[Path], typer.Argument(metavar="SIGNALS...", help="Files that agents wrote (CKPT_SIGNALS_LOG), of all nodes.")
]

predict = typer.Typer(
    help="Train a predictor of failures on recorded signals, or try one.", no_args_is_help=True, rich_markup_mode=None
)


@predict.command("train")
def train_predictor(
    signals: Files,
    to: Annotated[Path, typer.Option("--out", metavar="MODEL", help="The file to write.")],
    seed: Annotated[int, typer.Option("--seed", help="The same seed trains the same.")] = 0,
    limit_s: Annotated[
        float, typer.Option("--limit-s", help="Train for so many seconds at most.", min=0, callback=out.check_seconds)
    ] = 300.0,
    json: out.JsonOption = False,
) -> None:
    """Train a small network on recorded signals; say what it is worth on nodes that it has not seen."""
    from ckpt.predict.model import save
    from ckpt.predict.training import train

    if to.exists() and not to.is_file():
        raise UsageError(f"--out {to} is no file")
    if not to.parent.is_dir():  # checked now, before the training
        raise UsageError(f"--out {to}: {to.parent} is no folder; make one, or give another name")
    recorded = _read(signals)
    with out.progress("training", json=json, of="rounds") as report:
        trained, found = train(recorded, seed, limit_s, report)
    try:
        save(trained, to)
    except OSError as exc:
        raise UsageError(f"--out {to}: {exc}") from exc
    body = {**_score_facts(recorded, found), "model": os.fspath(to), "signals": list(trained.signals)}
    if json:
        out.print_json(body)
    else:
        _print_score(recorded, found)
        out.print_text(
            f"wrote      {to} ({out.format_size(to.stat().st_size)}): CKPT_PREDICTOR={to.absolute()} has agents use it"
        )


@predict.command("check")
def check_predictor(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="What `ckpt predict train` wrote.")],
    signals: Files,
    json: out.JsonOption = False,
) -> None:
    """Say what a predictor is worth on recorded signals, best on such as it was not trained on."""
    from ckpt.predict.model import load
    from ckpt.predict.training import evaluate

    try:
        trained = load(model)
    except OSError as exc:
        raise UsageError(f"{model}: {exc}") from exc
    recorded = _read(signals)
    found = evaluate(trained, recorded.runs)
    if json:
        out.print_json({**_score_facts(recorded, found), "model": os.fspath(model), "signals": list(trained.signals)})
    else:
        _print_score(recorded, found)


def _read(signals: Sequence[Path]) -> Recorded:
    from ckpt.predict.recorded import read_signals

    try:
        recorded = read_signals(signals)
    except OSError as exc:
        raise UsageError(f"the recorded signals cannot be read: {exc}") from exc
    if not recorded.runs:
        raise UsageError(f"no signals in {', '.join(map(str, signals))}: agents write them where CKPT_SIGNALS_LOG says")
    return recorded


def _score_facts(recorded: Recorded, found: PredictorScore) -> dict[str, Any]:
    return {
        "recorded_nodes": len(recorded.nodes),
        "recorded_failures": recorded.failures,
        "recorded_readings": sum(len(run.times_s) for run in recorded.runs),
        "skipped_lines": recorded.skipped,
        "proven": found.score.is_proven,
        **{name: value for name, value in found.report().items() if name != "proven"},
    }


def _print_score(recorded: Recorded, found: PredictorScore) -> None:
    from ckpt.policy.adaptive import format_duration

    score = found.score
    readings = sum(len(run.times_s) for run in recorded.runs)
    nodes = format_count(len(recorded.nodes), "node")
    out.print_text(
        f"recorded   {format_count(readings, 'reading')} of {nodes}, {format_count(recorded.failures, 'failure')}"
    )
    out.print_text(f"tried on   {format_count(found.nodes, 'node')} with {format_count(found.failures, 'failure')}")
    out.print_text(f"auc        {found.auc:.3f}")
    counts = {name: round(getattr(score, name)) for name in ("true", "late", "false", "missed")}
    missed = format_count(counts.pop("missed"), "failure")
    out.print_text(
        "alarms     {true} true, {late} too late, {false} false; ".format(**counts) + f"{missed} without one"
    )
    out.print_text(f"precision  at least {score.precision:.0%}, recall at least {score.recall_bound:.0%}")
    if score.lead_s is not None:
        out.print_text(f"lead       {format_duration(score.lead_s)} before the failure, usually")
    proven = "yes" if score.is_proven else f"no, by {format_count(score.seen, 'outcome')}"
    out.print_text(f"proven     {proven}; a job acts on it only once it has proven itself there")
