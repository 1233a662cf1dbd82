"""Does the simulator tell the truth? A real job under a spot trace, and what `ckpt simulate` says of it.

    python -m benchmarks.replay [TRACE] [--begin-h H] [--window-h H] [--compress X] [--lead-s S] [--small] [--json FILE]

The trace (any format that `ckpt simulate` reads) is cut to a window and played X times as fast on up to --nodes nodes
of this machine (benchmarks/spot.py). A job of that size holds as many seats: a node of the trace takes a free seat when
it comes, and leaves it when it goes. Without TRACE one is made up: nodes lost singly, and trainer crashes. With
--lead-s each removal is announced so many real seconds before.

First a calibration measures what a scenario needs: steps, stalls, commits, replicas, starts, and one or two failures of
each kind for the detection and for the restores from each level. Then the trace is played. Then the simulator plays the
same trace 200 times, each with a start, a detection and restores drawn from what the calibration measured, and with
other nodes next to each other. Bars: the store's bytes within 5 %; the overhead in the simulator's 90 % band, and
within 25 % of its mean.

As root only: it makes network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ckpt
from benchmarks.report import Row, parser, report
from benchmarks.spot import Job, SpotRun
from ckpt.simulate.engine import simulate
from ckpt.simulate.generators import Fleet, exponential
from ckpt.simulate.notices import draw_notices
from ckpt.simulate.outcome import LEVELS, Cause, Recovery, RunOutcome
from ckpt.simulate.scenario import LocalLevel, NoticeModel, PeerLevel, Scenario, StoreLevel
from ckpt.simulate.trace import EventKind, Trace, TraceEvent
from ckpt.simulate.trace_files import load
from tests.nodes.jobs import step_of
from tests.nodes.lan import Lan, lan, why_not

HOUR_S = 3600.0
VARIATIONS = 200
BAND = 0.9
STORE_BAR, OVERHEAD_BAR = 0.05, 0.25
LEAST_S = 0.01  # of a restore
# What the newest checkpoint's record holds of the run's own measurements.
COSTS = """
import json
from ckpt import reader
from ckpt.simulate.advise import facts_of
with reader.open({url!r}) as run:
    newest = run.newest
    print(json.dumps(dict(facts_of(newest.about, newest.bytes, newest.stored_bytes).costs)))
"""
FULL = Job(nodes=4, nodes_min=2, mib=32, step_s=0.1, every=50, start_s=15.0, mbit=200)
SMALL = Job(nodes=2, nodes_min=1, mib=4, step_s=0.1, every=20, start_s=18.0, mbit=200)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("trace", type=Path, nargs="?", help="without it one is made up")
    made.add_argument("--nodes", type=int, default=FULL.nodes)
    made.add_argument("--start-s", type=float, default=FULL.start_s, help="of a launch, before it begins to train")
    made.add_argument("--begin-h", type=float, default=0.0, help="of the window, in hours of the trace")
    made.add_argument("--window-h", type=float, default=5.0)
    made.add_argument("--compress", type=float, default=60.0, help="seconds of the trace in one second")
    made.add_argument("--lead-s", type=float, default=0.0, help="each removal is announced so long before")
    made.add_argument("--mtbf-h", type=float, default=6.0, help="of a node, of a made-up trace")
    made.add_argument("--crashes", type=float, default=0.2, help="for each node and hour, of a made-up trace")
    made.add_argument("--calibration", type=Path, help="a file that keeps the calibration, for further traces")
    made.add_argument("--logs", type=Path, help="a folder that keeps all logs, and what was stored")
    made.add_argument("--seed", type=int, default=0)
    args = made.parse_args()
    if why := why_not():
        print(f"replay is skipped: {why}")
        return 0
    # Ends as after Ctrl-C: nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    job = SMALL if args.small else replace(FULL, nodes=args.nodes, start_s=args.start_s)
    trace = lose_one(job) if args.small else make_trace(args, job)
    notices = NoticeModel(recall=float(args.lead_s > 0), lead_s=args.lead_s)
    with lan() as net, tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or temporary
        if args.calibration is not None and args.calibration.exists():
            known = Measured(**json.loads(args.calibration.read_text()))
        else:
            with played(net, Path(folder, "calibration"), job, drills(job), NoticeModel()) as run:
                known = measure(run, job)
        if args.calibration is not None:
            args.calibration.write_text(json.dumps(asdict(known), indent=1) + "\n")
        print_measured(known)
        with played(net, Path(folder, "replay"), job, trace, notices) as run:
            real = what_came(run, trace.span_s)
    scenario = make_scenario(known, job, notices)
    usual = simulate(scenario, trace)
    dice = random.Random(args.seed)
    outcomes = [simulate(*vary(scenario, trace, known, job, dice), seed) for seed in range(VARIATIONS)]
    print_recoveries(real.recoveries, usual.recoveries)
    return report("replay", compare(real, outcomes, job), args)


# -- traces


def make_trace(args: argparse.Namespace, job: Job) -> Trace:
    if args.trace is not None:
        return take_seats(load(args.trace, args.seed), job.nodes, args.begin_h * HOUR_S, args.window_h, args.compress)
    fleet = Fleet(job.nodes, args.window_h, args.seed, provision_s=20 * args.compress, crashes=args.crashes)
    return take_seats(exponential(fleet, mtbf_h=args.mtbf_h), job.nodes, 0.0, args.window_h, args.compress)


def take_seats(trace: Trace, seats: int, begin_s: float, window_h: float, compress: float) -> Trace:
    """The window for a job that holds so many seats. Who has a seat at its beginning comes at 0."""
    seated: dict[str, str] = {}
    found: list[TraceEvent] = []
    end_s = min(trace.span_s, begin_s + window_h * HOUR_S)
    began = False
    for event in (*trace.events, TraceEvent(end_s, EventKind.ADD, "")):
        if not began and event.time_s >= begin_s:
            found += [TraceEvent(0.0, EventKind.ADD, node, pool) for node, pool in seated.items()]
            began = True
        if event.time_s >= end_s:
            break
        if event.kind is EventKind.ADD:
            if len(seated) == seats:
                continue
            seated[event.node] = event.pool
        elif event.node not in seated:
            continue
        elif event.kind is EventKind.REMOVE:
            del seated[event.node]
        if began:
            found.append(replace(event, time_s=(event.time_s - begin_s) / compress))
    return Trace(trace.name, (end_s - begin_s) / compress, tuple(found))


def drills(job: Job) -> Trace:
    """The calibration: undisturbed for a while; a crash; one node lost; a crash of fewer; all nodes lost and others
    there. Between two of them there is time for a start and for two checkpoints."""
    gap_s = 1.8 * job.start_s + 2.5 * job.every * job.step_s
    first = [f"first-{i}" for i in range(job.nodes)]
    events = [TraceEvent(0.0, EventKind.ADD, node) for node in first]
    at_s = gap_s + 10.0
    failures = [(EventKind.CRASH, first[1]), (EventKind.REMOVE, first[0]), (EventKind.CRASH, first[1])]
    # Of two nodes one would be left, which has no peer.
    for kind, node in failures if job.nodes > 2 else failures[:1]:
        events.append(TraceEvent(at_s, kind, node))
        at_s += gap_s
    here = first[1:] if job.nodes > 2 else first
    events += [TraceEvent(at_s, EventKind.REMOVE, node) for node in here]
    events += [TraceEvent(at_s, EventKind.ADD, f"second-{i}") for i in range(job.nodes)]
    return Trace("calibration", at_s + gap_s, tuple(events))


def lose_one(job: Job) -> Trace:
    """Of --small: one node is lost, and another comes."""
    at_s = 1.8 * job.start_s + 2.5 * job.every * job.step_s
    events = [TraceEvent(0.0, EventKind.ADD, f"node-{i}") for i in range(job.nodes)]
    events.append(TraceEvent(at_s, EventKind.REMOVE, "node-0"))
    events.append(TraceEvent(at_s, EventKind.ADD, f"node-{job.nodes}"))
    return Trace("one loss", 2 * at_s, tuple(events))


# -- the real run


@dataclass(frozen=True, slots=True)
class Real:
    """What came of it, as the simulator would say."""

    wall_s: float
    useful_steps: int
    recoveries: tuple[Recovery, ...]
    stored_bytes: float
    committed_bytes: float


@contextlib.contextmanager
def played(net: Lan, folder: Path, job: Job, trace: Trace, notices: NoticeModel) -> Iterator[SpotRun]:
    """The run once it is over; its store still answers."""
    folder.mkdir(parents=True)
    run = SpotRun(net, folder, job, folder.name)
    print(f"{folder.name}: {trace.name}, {trace.span_s:.0f} s, {len(trace.events)} events", flush=True)
    try:
        run.run(trace, draw_notices(notices, trace, seed=0))
        yield run
    finally:
        net.clear()
        run.end_store()


def what_came(run: SpotRun, wall_s: float) -> Real:
    """The failures, each up to the next launch that trained, and the steps that are kept at the end."""
    trained = [each for each in run.launches if each.trained_at is not None]
    found = []
    for before, after in pairwise(trained):
        assert before.failed_at is not None
        assert after.trained_at is not None
        lost = before.last_step - after.restored_step
        cause: Cause = "crash" if before.cause == "crash" else "loss"
        # Who leaves by a notice stops before its process ends.
        down_at = before.stopped_at if before.cause == "notice" else before.failed_at
        seconds = after.trained_at - down_at
        waited_s = after.at - max(each.down_at or 0.0 for each in run.launches if each.at < after.at)
        found.append(Recovery(down_at - run.began_at, cause, after.level, lost, seconds, max(0.0, waited_s)))
    last = trained[-1]
    if last.failed_at is None:
        steps = last.last_step
    else:
        done = [step_of(line["data"]["identity"]) for line in last.events("commit.done")]
        steps = max(done, default=last.restored_step)
    return Real(wall_s, steps, tuple(found), run.stored_bytes(), run.committed_bytes())


# -- calibration


@dataclass(frozen=True, slots=True)
class Measured:
    """What the calibration measured. Lists in seconds: one value for each time. `trained_s`: from the launch
    until training went on, with its level. `entry_s`: of that, after the process group was there, the mean by level."""

    detect_s: list[float]
    trained_s: list[list[Any]]
    entry_s: dict[str, float]
    commit_s: float
    replication_s: float
    stall_s: float
    step_s: float
    slowdown: float
    state_bytes: int
    stored_bytes: float

    @property
    def store_restore_s(self) -> float:
        """All nodes are new at a start from the store and at the first one: the difference is the restore."""
        return max(LEAST_S, self.entry_s["store"] - self.entry_s["nothing"])

    def starts_s(self, job: Job) -> list[float]:
        """Of each launch, without the restore. A restore from local memory is too short here to tell it apart; one from
        peers is at the speed of the replication."""
        restore_s = {"store": self.store_restore_s, "peer": self.replication_s * job.nodes / max(1, job.nodes - 1)}
        return [seconds - restore_s.get(level, 0.0) for level, seconds in self.trained_s]


def measure(run: SpotRun, job: Job) -> Measured:
    trained = [each for each in run.launches if each.trained_at is not None]
    entries: dict[str, list[float]] = {}
    for each in trained:
        assert each.trained_at is not None
        assert each.ready_at is not None
        entries.setdefault(each.level, []).append(each.trained_at - each.ready_at)
    if missing := {"nothing", "local", "store"} - entries.keys():
        raise RuntimeError(f"no start from {missing} was over before the next failure: give a larger --start-s")
    whole = [each for each in trained if len(each.nodes) == job.nodes]
    commits = [line["data"] for each in whole for line in each.events("commit.done")]
    copies = [line["data"]["seconds"] for each in whole for line in each.events("replication.done")]
    costs = json.loads(run.in_hub(sys.executable, "-c", COSTS.format(url=run.url)))
    beside_s = costs.get("step_beside_commit_s", costs["step_s"])
    return Measured(
        detect_s=[each.down_at - each.failed_at for each in trained if each.down_at and each.failed_at],
        trained_s=[[each.level, each.trained_at - each.at] for each in trained if each.trained_at],
        entry_s={level: statistics.mean(found) for level, found in entries.items()},
        commit_s=statistics.median(each["seconds"] for each in commits),
        replication_s=statistics.median(copies),
        stall_s=costs["stall_s"],
        step_s=costs["step_s"],
        slowdown=max(0.0, 1 - costs["step_s"] / beside_s),
        state_bytes=commits[-1]["raw_bytes"],
        stored_bytes=statistics.mean(each["stored_bytes"] for each in commits),
    )


def make_scenario(known: Measured, job: Job, notices: NoticeModel) -> Scenario:
    """The scenario as `ckpt simulate advise` makes one, with measured starts. The gang start takes what a start takes
    beyond its restore."""
    share, stored_share = known.state_bytes / job.nodes, known.stored_bytes / job.nodes
    return Scenario(
        nodes=job.nodes,
        nodes_min=job.nodes_min,
        step_s=known.step_s,
        scaling=0.0,
        state_bytes=known.state_bytes,
        detect_s=statistics.mean(known.detect_s),
        gang_start_s=statistics.mean(known.starts_s(job)),
        local=LocalLevel(known.stall_s, restore_bytes_s=share / LEAST_S),
        peers=PeerLevel(link_bytes_s=share / known.replication_s),
        store=StoreLevel(
            write_bytes_s=stored_share / known.commit_s,
            read_bytes_s=stored_share / known.store_restore_s,
            ratio=known.stored_bytes / known.state_bytes,
            slowdown=known.slowdown,
        ),
        policy=ckpt.Every(steps=job.every),
        notices=notices,
    )


def vary(scenario: Scenario, trace: Trace, known: Measured, job: Job, dice: random.Random) -> tuple[Scenario, Trace]:
    """The scenario with a start and a detection from the measured ranges; the trace with the nodes that come together
    in another order, so that others keep their replicas."""
    starts_s = known.starts_s(job)
    varied = replace(
        scenario,
        detect_s=dice.uniform(min(known.detect_s), max(known.detect_s)),
        gang_start_s=dice.uniform(min(starts_s), max(starts_s)),
    )
    events = list(trace.events)
    dice.shuffle(events)
    # Of one instant: first the nodes that go, as a trace has them.
    events.sort(key=lambda each: (each.time_s, each.kind is EventKind.ADD))
    return varied, replace(trace, events=tuple(events))


# -- what is printed


def print_measured(known: Measured) -> None:
    print("measured by the calibration:")
    print(
        f"  step {known.step_s * 1e3:.1f} ms, stall {known.stall_s * 1e3:.2f} ms, commit {known.commit_s:.2f} s,",
        end="",
    )
    print(f" replication {known.replication_s:.2f} s, slowdown by commits {known.slowdown:.3f}")
    print(f"  state {known.state_bytes / 2**20:.1f} MiB, {known.stored_bytes / 2**20:.1f} MiB of that stored")
    print(
        f"  detection {', '.join(f'{each:.1f}' for each in known.detect_s)} s; starts, each with its restore:", end=" "
    )
    print(", ".join(f"{seconds:.1f} s ({level})" for level, seconds in known.trained_s))
    print("  of that in ckpt:", ", ".join(f"{seconds:.1f} s ({level})" for level, seconds in known.entry_s.items()))
    sys.stdout.flush()


def print_recoveries(real: Sequence[Recovery], simulated: Sequence[Recovery]) -> None:
    print("at s      real: cause  level    lost   back s   simulated: cause  level    lost   back s")
    both = sorted([(each.time_s, "real", each) for each in real] + [(each.time_s, "sim", each) for each in simulated])
    for time_s, who, each in both:
        indent = "" if who == "real" else " " * 41
        text = f"{each.cause:5}  {each.level:8} {each.lost_steps:4} {each.seconds:8.1f}"
        print(f"{time_s:7.1f}         {indent}{text}{'' if each.finished else '  (not over)'}")


def compare(real: Real, outcomes: Sequence[RunOutcome], job: Job) -> list[Row]:
    def mean(values: Sequence[float]) -> float:
        return statistics.mean(values)

    def overhead(steps: int, wall_s: float) -> float:
        return wall_s / (steps * job.step_s) - 1

    rows = []
    counted = Counter(each.level for each in real.recoveries)
    for level in LEVELS:
        simulated = mean([each.recoveries_by_level[level] for each in outcomes])
        rows.append(Row(f"recoveries from {level}", counted[level], "", "printed", None, simulated))
    lost = sum(each.lost_steps for each in real.recoveries)
    simulated = mean([sum(each.lost_steps_by_level.values()) for each in outcomes])
    rows.append(Row("lost steps", lost, "", "printed", None, simulated))
    away_s = sum(each.seconds for each in real.recoveries)
    simulated = mean([sum(one.seconds for one in each.recoveries) for each in outcomes])
    rows.append(Row("time in recoveries", away_s, "s", "printed", None, simulated))
    simulated = mean([each.store_bytes_in for each in outcomes])
    ratio = real.stored_bytes / simulated
    close = abs(ratio - 1) <= STORE_BAR
    rows.append(Row("written to the store", real.stored_bytes / 1e6, "MB", "within 5 %", close, simulated / 1e6, ratio))
    rows.append(Row("... in whole checkpoints", real.committed_bytes / 1e6, "MB", "printed", None, simulated / 1e6))
    # A run that trains longer writes more: per step it shows whether each checkpoint is as large.
    made = real.useful_steps + lost
    simulated = mean(
        [each.store_bytes_in / (each.useful_steps + sum(each.lost_steps_by_level.values())) for each in outcomes]
    )
    each_kb = real.stored_bytes / made / 1e3
    rows.append(
        Row(
            "... for each step that was made",
            each_kb,
            "kB",
            "printed",
            None,
            simulated / 1e3,
            each_kb * 1e3 / simulated,
        )
    )
    found = sorted(overhead(each.useful_steps, each.wall_s) for each in outcomes)
    had = overhead(real.useful_steps, real.wall_s)
    edge = round((1 - BAND) / 2 * len(found))
    low, high = found[edge], found[-1 - edge]
    ratio = had / mean(found)
    rows.append(
        Row(
            "steps that are kept",
            real.useful_steps,
            "",
            "printed",
            None,
            mean([each.useful_steps for each in outcomes]),
        )
    )
    rows.append(Row("overhead", had, "", "within 25 %", abs(ratio - 1) <= OVERHEAD_BAR, mean(found), ratio))
    rows.append(Row("overhead", had, "", f"in the band, {low:.3f} to {high:.3f}", low <= had <= high))
    return rows


if __name__ == "__main__":
    sys.exit(main())
