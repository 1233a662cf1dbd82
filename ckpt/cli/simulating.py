"""The commands `ckpt simulate`: fit a trace, make one up, and run jobs through one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli import out, reports
from ckpt.errors import UsageError
from ckpt.types import format_count

if TYPE_CHECKING:
    from ckpt.simulate.advise import RunFacts
    from ckpt.simulate.fit import Estimate, Fit

SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="The same seed chooses the same.")]

ScenarioArgument = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="A TOML file that describes a job (docs/guides/simulate.md).")
]

simulate = typer.Typer(
    help="Run a job through a trace of spot nodes; fit or make up a trace.", no_args_is_help=True, rich_markup_mode=None
)


class TraceLaw(StrEnum):
    """By what law nodes are lost: the names of simulate.generators.GENERATORS."""

    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    BATHTUB = "bathtub"
    BULK = "bulk"
    DIURNAL = "diurnal"


def _of_law(option: str, text: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(option, help=text, show_default=False)
    return found


@simulate.command("fit")
def fit_trace(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A file of any known format.")],
    window_s: Annotated[
        float,
        typer.Option(
            "--window-s", help="Losses within so many seconds are one bulk loss.", min=0, callback=out.check_seconds
        ),
    ] = 0.0,
    seed: SeedOption = 0,
    json: out.JsonOption = False,
) -> None:
    """Say how often the nodes of a trace are lost, how many together, and how soon they are back."""
    from dataclasses import asdict

    from ckpt.simulate.fit import fit
    from ckpt.simulate.trace_files import load

    found = fit(load(trace, seed), window_s)
    if json:
        out.print_json(asdict(found))
    else:
        out.print_table([found.name, "value", "95 % interval"], _rows(found), right=["value"])


@simulate.command("generate")
def generate_trace(
    law: Annotated[TraceLaw, typer.Argument(metavar="LAW", help=f"One of {', '.join(TraceLaw)}.")],
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="The number of nodes to hold.")],
    hours: Annotated[float, typer.Option("--hours", metavar="H", help="The length of the trace.")],
    to: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The CSV to write.")],
    seed: SeedOption = 0,
    provision_s: Annotated[
        float, typer.Option("--provision-s", metavar="S", help="Mean seconds until a lost node is replaced.")
    ] = 120.0,
    crashes: Annotated[float, typer.Option("--crashes", metavar="RATE", help="Trainer crashes per node-hour.")] = 0.0,
    mtbf_h: Annotated[float | None, _of_law("--mtbf-h", "All but bathtub: mean hours that a node is up.")] = None,
    shape: Annotated[float | None, _of_law("--shape", "weibull: below 1 if most nodes are lost young.")] = None,
    early: Annotated[float | None, _of_law("--early", "bathtub: A, the part lost in the first hours.")] = None,
    tau1_h: Annotated[float | None, _of_law("--tau1-h", "bathtub: hours in which these are lost.")] = None,
    tau2_h: Annotated[float | None, _of_law("--tau2-h", "bathtub: hours before the limit of the last losses.")] = None,
    limit_h: Annotated[float | None, _of_law("--limit-h", "bathtub: hours after which no node is up.")] = None,
    pools: Annotated[int | None, _of_law("--pools", "bulk: the number of pools.")] = None,
    bulk_mtbf_h: Annotated[float | None, _of_law("--bulk-mtbf-h", "bulk: mean hours between those of a pool.")] = None,
    share: Annotated[float | None, _of_law("--share", "bulk: the part of a pool's nodes that is lost.")] = None,
    amplitude: Annotated[float | None, _of_law("--amplitude", "diurnal: 0 (a constant rate) to 1.")] = None,
    peak_h: Annotated[float | None, _of_law("--peak-h", "diurnal: the hour of the highest rate.")] = None,
    json: out.JsonOption = False,
) -> None:
    """Write a made-up trace: nodes that are lost by a law, and replaced."""
    from ckpt.simulate.generators import GENERATORS, Fleet
    from ckpt.simulate.trace import EventKind
    from ckpt.simulate.trace_files import save

    given = {
        "mtbf_h": mtbf_h,
        "shape": shape,
        "early": early,
        "tau1_h": tau1_h,
        "tau2_h": tau2_h,
        "limit_h": limit_h,
        "pools": pools,
        "bulk_mtbf_h": bulk_mtbf_h,
        "share": share,
        "amplitude": amplitude,
        "peak_h": peak_h,
    }
    generator = GENERATORS[law]
    given = {name: value for name, value in given.items() if value is not None}
    known = [name for name in inspect.signature(generator).parameters if name != "fleet"]
    for name in given:
        if name not in known:
            options = ", ".join(_option(each) for each in known)
            raise UsageError(f"{_option(name)} is no option of {law}; its own are {options}")
    made = generator(Fleet(nodes, hours, seed, provision_s, crashes), **given)
    save(made, to)
    losses = sum(event.kind is EventKind.REMOVE for event in made.events)
    if json:
        out.print_json({"trace": str(to), "law": law, "events": len(made.events), "losses": losses})
    else:
        out.print_text(f"wrote {to}: {format_count(nodes, 'node')} over {hours:g} h, {losses} lost")


@simulate.command("run")
def run_scenario(
    scenario: ScenarioArgument,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A file of any known format.")],
    seed: SeedOption = 0,
    json: out.JsonOption = False,
) -> None:
    """Say what becomes of a job under a trace: time lost, recoveries, traffic and cost."""
    from ckpt.report.document import format_cell
    from ckpt.simulate.engine import simulate as run
    from ckpt.simulate.render import outcome_json, outcome_rows
    from ckpt.simulate.scenario_file import read_scenario
    from ckpt.simulate.trace_files import load

    file = read_scenario(scenario)
    if file.keys:
        raise UsageError(f"{scenario} has a table [sweep]: use ckpt simulate sweep, or leave the table out")
    job, read = file.scenario({}), load(trace, seed)
    outcome = run(job, read, seed)
    if not outcome.useful_s and not json:
        least = format_count(job.nodes_least, "node")
        out.print_text(f"the job made no step: it waits for {least}; set nodes_min, or take another trace", sys.stderr)
    if json:
        out.print_json(outcome_json(outcome))
    else:
        rows = [(name, format_cell(value), unit) for name, value, unit in outcome_rows(outcome)]
        out.print_table([scenario.name, "value", "unit"], rows, right=["value"])


@simulate.command("sweep")
def sweep_scenarios(
    scenario: ScenarioArgument,
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Files of any known format.")],
    to: reports.OutOption = None,
    seed: SeedOption = 0,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes; by default one for each core.")] = None,
    json: out.JsonOption = False,
) -> None:
    """Run every combination of the scenario's [sweep], and show which none other beats."""
    from ckpt.report.document import format_cell
    from ckpt.simulate.render import outcome_json, sweep_columns, sweep_document, sweep_rows
    from ckpt.simulate.scenario_file import read_scenario
    from ckpt.simulate.sweep import run_sweep
    from ckpt.simulate.trace_files import load

    reports.check_files(to or [])
    file, read = read_scenario(scenario), [load(each, seed) for each in traces]
    with out.progress("simulating", json=json, of="rounds") as report:
        runs = run_sweep(file, read, seed, jobs, report)
    body = {"runs": [{"trace": run.trace, "choice": run.choice, **outcome_json(run.outcome)} for run in runs]}
    reports.write_files(to or [], lambda: sweep_document(runs, scenario.name, seed), body)
    if json:
        out.print_json(body)
        return
    columns = sweep_columns(runs)
    rows = [[format_cell(cell) for cell in row] for row in sweep_rows(runs)]
    out.print_table(columns, rows, right=[name for name in columns if name not in ("trace", "best", *runs[0].choice)])


@simulate.command("advise")
def advise_run(
    url: out.UrlArgument,
    node_usd_hour: Annotated[
        float | None, typer.Option("--node-usd-hour", min=0, help="Price of a node, to say what is saved in USD.")
    ] = None,
    json: out.JsonOption = False,
) -> None:
    """Say what another policy or more replicas would save, from what the run has measured."""
    from dataclasses import asdict

    from ckpt import reader
    from ckpt.simulate.advise import advise, facts_of

    with reader.open(url) as run:
        newest = run.newest
        facts = facts_of(newest.about, newest.bytes, newest.stored_bytes)
    found = advise(facts, node_usd_hour)
    if json:
        rows = [{"change": each.setting.change, **asdict(each)} for each in found]
        out.print_json({"url": url, "step": newest.step, "costs": dict(facts.costs), "settings": rows})
        return
    for line in _measured_lines(facts, newest.label):
        out.print_text(line)
    out.print_text()
    columns = ["setting", "overhead", "saves a month", "store GB/h"]
    rows_shown = []
    for each in found:
        usd = "" if each.saved_usd is None else f", {each.saved_usd:,.0f} USD"
        saved = f"{each.saved_h:.1f} h{usd}" if each.setting.change else ""
        name = each.setting.change or "as it runs"
        rows_shown.append((name, f"{100 * each.overhead:.2f} %", saved, f"{each.store_gb_h:.3g}"))
    out.print_table(columns, rows_shown, right=columns[1:])
    best = found[1] if len(found) > 1 else None
    if best is None or best.saved_h < WORTH_H:
        out.print_text(f"\nno change saves more than {WORTH_H:g} h a month")


def _measured_lines(facts: RunFacts, label: str) -> Iterator[str]:
    """What was measured, in two lines."""
    from ckpt.policy.adaptive import format_duration
    from ckpt.policy.failures import Failure

    costs = facts.costs
    parts = [f"a step {format_duration(facts.step_s)}", f"a snapshot stalls {format_duration(costs['stall_s'])}"]
    for name, text in (("commit_s", "a commit takes"), ("replication_s", "replicas take")):
        if name in costs:
            parts.append(f"{text} {format_duration(costs[name])}")
    yield f"measured up to step {label} on {format_count(facts.nodes, 'node')}: {', '.join(parts)}"
    rates = []
    for failure, text in _FAILURES.items():
        kind = Failure(failure)
        learnt = facts.learnt.rate_of(kind)
        every = format_duration(1 / learnt.current_rate.mean / (facts.nodes if kind.is_per_node else 1))
        rates.append(f"{text} every {every} ({learnt.failure_count} seen)")
    seen = sum(facts.learnt.rate_of(failure).failure_count for failure in Failure)
    yield f"failures to expect: {', '.join(rates)}{'' if seen else '; none was seen yet, so these are the defaults'}"


_FAILURES = {
    "process": "a trainer dies",
    "node": "a node is lost",
    "preemption": "a node is preempted",
    "job": "all memory is lost",
}
WORTH_H = 0.05  # a month; less is shown as 0.0 or 0.1


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _rows(found: Fit) -> list[tuple[str, str, str]]:
    never = f"never after {found.never_back} of them" if found.never_back else ""
    price = found.price_node_hour
    return [
        ("length of the trace", f"{found.span_h:.4g} h", ""),
        ("nodes, on average", f"{found.node_hours / found.span_h:.3g}", f"at most {found.nodes_max}"),
        ("nodes lost", str(found.losses), f"at {format_count(found.moments, 'moment')}"),
        ("losses per node-hour", *_cells(found.loss_rate)),
        ("hours between moments of loss", *_cells(found.job_mtbf_h)),
        ("moments that took 2 nodes or more", *_cells(found.bulk_share)),
        ("nodes that such a moment took", "none" if found.bulk_nodes is None else f"{found.bulk_nodes:.3g}", ""),
        ("Weibull shape of up-times", *_cells(found.uptime_shape)),
        ("time until the number is back", _duration(found.back_s), never),
        ("time until a node is replaced", _duration(found.replaced_s), ""),
        ("trainer crashes per node-hour", *_cells(found.crash_rate)),
        *([("USD per node-hour", f"{price:.4g}", "")] if price is not None else []),
    ]


def _cells(found: Estimate | None) -> tuple[str, str]:
    return (f"{found.value:.3g}", f"{found.low:.3g} to {found.high:.3g}") if found else ("unknown", "")


def _duration(seconds: float | None) -> str:
    from ckpt.policy.adaptive import format_duration

    return "unknown" if seconds is None else format_duration(seconds)
