"""How close does ckpt.Adaptive come to the best constant interval, which it would need an oracle to know?

Synthetic failures: exponential, Weibull of shape .6 (they cluster), and rates that change by 4 at once. Bars: the mean
overhead of 200 seeds within 5 % of the best constant interval's after 20 failures, before that (and in the 20 after a
change) within 30 %, for priors that are wrong by up to 4. It is that of all seeds together: what they lost, of all that
they ran.

    python -m benchmarks.policy [--small] [--seed N] [--json FILE]

A constant interval sees the same failures and the same costs, and is chosen with hindsight, for those failures of
those seeds. Recoveries take no time here: they would be the same for all and make the differences look smaller.
Stalls vary (lognormal, sigma .3), and one in fifty takes ten times as long. About ten minutes on one core.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.report import Row, parser, report, timed
from ckpt.policy.adaptive import Adaptive, Chosen
from ckpt.policy.failures import Failure, FailureRate
from ckpt.policy.interval_solver import decide
from ckpt.policy.known import Measurements

STALL_S = 10.0
OUTLIERS, OUTLIER = 0.02, 10.0
MTBF_S = 7200.0
LEARNT = 20  # failures
FACTORS = (0.25, 1.0, 4.0)
LIMITS = Adaptive(overhead=0.5)  # none that binds: a limit is to be kept, not to be compared with having none
ASK_EVERY = 10  # snapshots

Gaps = Callable[[random.Random], Iterator[float]]


@dataclass(frozen=True, slots=True)
class World:
    """What happens to a job: per class the gaps between failures; what a commit takes, 0: there are none. `spans`: the
    failures of the class that counts, from one to the other, over which each figure is taken; their MTBF then."""

    gaps: dict[Failure, Gaps]
    counts: Failure
    counts_s: float
    spans: tuple[tuple[int, int], ...]
    commit_s: float = 0.0
    slowdown: float = 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """The clock, the work that is left, and how often the interval has changed, at a failure."""

    wall_s: float
    work_s: float
    changes: int


def exponential(mtbf_s: float) -> Gaps:
    return lambda rng: iter(lambda: rng.expovariate(1 / mtbf_s), None)


def weibull(mtbf_s: float, shape: float = 0.6) -> Gaps:
    scale = mtbf_s / math.gamma(1 + 1 / shape)
    return lambda rng: iter(lambda: rng.weibullvariate(scale, shape), None)


def changing(before_s: float, after_s: float, at: int) -> Gaps:
    def gaps(rng: random.Random) -> Iterator[float]:
        for _ in range(at):
            yield rng.expovariate(1 / before_s)
        yield from exponential(after_s)(rng)

    return gaps


class Fixed:
    """A constant interval."""

    changes = 0

    def __init__(self, local_s: float, snapshots: int = 1) -> None:
        self.local_s, self.snapshots = local_s, snapshots

    def ran(self, seconds: float) -> None: ...
    def stalled(self, seconds: float) -> None: ...
    def committed(self, seconds: float, slowdown: float) -> None: ...
    def failed(self, failure: Failure) -> None: ...


class Learning:
    """ckpt.Adaptive, asked after failures, commits, and every tenth snapshot."""

    def __init__(self, known: Measurements) -> None:
        self.known = known
        self.chosen: Chosen = decide(known, LIMITS)
        self.changes = self.asked = 0

    @property
    def local_s(self) -> float:
        return self.chosen.local_s

    @property
    def snapshots(self) -> int:
        return self.chosen.snapshots

    def ask(self) -> None:
        before, self.chosen = self.chosen, decide(self.known, LIMITS, current=self.chosen)
        self.changes += (before.local_s, before.snapshots) != (self.chosen.local_s, self.chosen.snapshots)

    def ran(self, seconds: float) -> None:
        self.known = self.known.with_uptime(seconds)

    def stalled(self, seconds: float) -> None:
        self.known = self.known.with_stall(seconds)
        if self.asked % ASK_EVERY == 0:
            self.ask()
        self.asked += 1

    def committed(self, seconds: float, slowdown: float) -> None:
        self.known = self.known.with_commit(seconds, 1e9).with_steps(100, 100.0)
        self.known = self.known.with_steps_beside_commit(100, 100 / (1 - slowdown))
        self.ask()

    def failed(self, failure: Failure) -> None:
        self.known = self.known.with_failure(failure)
        self.ask()


def run(world: World, seed: int, policy: Fixed | Learning) -> list[Mark]:
    """One job until the last span ends. Snapshots, commits and failures happen one by one: no formula of the policy's
    is used. What memory survives goes back to the newest snapshot, what it does not to the newest commit."""
    rng = random.Random(f"costs {seed}")
    streams = {each: gaps(random.Random(f"{each.value} {seed}")) for each, gaps in world.gaps.items()}
    due_s = {each: next(stream) for each, stream in streams.items()}
    now_s = work_s = saved_s = committed_s = told_s = 0.0
    since_commit, commit_of_s, commit_ends_s = 1 << 30, 0.0, -1.0  # -1: none runs
    marks = [Mark(0.0, 0.0, 0)]
    last = world.spans[-1][1]
    while len(marks) <= last:
        struck = min(due_s, key=due_s.__getitem__)
        stall_s = STALL_S * math.exp(rng.gauss(0, 0.3) - 0.045) * (OUTLIER if rng.random() < OUTLIERS else 1.0)
        work_until_s = min(now_s + max(policy.local_s - stall_s, 0.05 * policy.local_s), due_s[struck])
        beside_s = max(0.0, min(commit_ends_s, work_until_s) - now_s)
        work_s += work_until_s - now_s - world.slowdown * beside_s
        if 0 <= commit_ends_s <= work_until_s:
            committed_s, commit_ends_s = commit_of_s, -1.0
            policy.committed(world.commit_s, world.slowdown)
        now_s = work_until_s + stall_s
        if now_s < due_s[struck]:
            saved_s, since_commit = work_s, since_commit + 1
            policy.ran(now_s - told_s)
            told_s = now_s
            policy.stalled(stall_s)
            if world.commit_s and commit_ends_s < 0 and since_commit >= policy.snapshots:
                since_commit, commit_of_s, commit_ends_s = 0, saved_s, now_s + world.commit_s
            continue
        now_s = due_s[struck]
        if 0 <= commit_ends_s <= now_s:  # it ended in the stall that was cut short
            committed_s, commit_ends_s = commit_of_s, -1.0
        policy.ran(now_s - told_s)
        told_s = now_s
        if struck is Failure.PROCESS:
            work_s = saved_s
        else:
            work_s = saved_s = committed_s
            commit_ends_s, since_commit = -1.0, 1 << 30
        due_s[struck] = now_s + next(streams[struck])
        policy.failed(struck)
        if struck is world.counts:
            marks.append(Mark(now_s, work_s, policy.changes))
    return marks


def overheads(world: World, seeds: range, policy: Callable[[], Fixed | Learning]) -> tuple[list[float], float]:
    """Per span the overhead of all seeds together, and how often the interval changed in the last span per seed."""
    runs = [run(world, seed, policy()) for seed in seeds]
    found = []
    for first, last in world.spans:
        wall_s = math.fsum(marks[last].wall_s - marks[first].wall_s for marks in runs)
        work_s = math.fsum(marks[last].work_s - marks[first].work_s for marks in runs)
        found.append(wall_s / work_s - 1 if work_s > 0 else math.inf)
    first, last = world.spans[-1]
    return found, sum(marks[last].changes - marks[first].changes for marks in runs) / len(runs)


def constants(world: World, seeds: range, around: tuple[float, int], steps: int) -> list[float]:
    """Per span the least overhead of all constant intervals, by factors of 2^(1/3) around the theory's."""
    local_s, snapshots = around
    found = [math.inf] * len(world.spans)
    times = sorted({max(1, round(snapshots * 2 ** (j / 3))) for j in range(-2, 3)}) if world.commit_s else [1]
    for i in range(-steps, steps + 1):
        for k in times:
            each, _ = overheads(world, seeds, lambda i=i, k=k: Fixed(local_s * 2 ** (i / 3), k))  # type: ignore[misc]
            found = [min(pair) for pair in zip(found, each, strict=True)]
    return found


def worlds() -> dict[str, World]:
    """Of one level: only trainers fail, and memory is all that counts."""
    early = ((0, LEARNT), (LEARNT, 3 * LEARNT))
    late = ((60, 60 + LEARNT), (60 + LEARNT, 60 + 3 * LEARNT))
    one = World({}, Failure.PROCESS, MTBF_S, early)
    return {
        "exponential": replace(one, gaps={Failure.PROCESS: exponential(MTBF_S)}),
        "Weibull .6": replace(one, gaps={Failure.PROCESS: weibull(MTBF_S)}),
        "4 x as many": World({Failure.PROCESS: changing(MTBF_S, MTBF_S / 4, 60)}, Failure.PROCESS, MTBF_S / 4, late),
        "4 x as few": World({Failure.PROCESS: changing(MTBF_S, 4 * MTBF_S, 60)}, Failure.PROCESS, 4 * MTBF_S, late),
    }


def one_level(seeds: range) -> list[Row]:
    mean_s = STALL_S * (1 - OUTLIERS + OUTLIERS * OUTLIER)
    rows = []
    for name, world in worlds().items():
        best = constants(world, seeds, (math.sqrt(2 * mean_s * world.counts_s), 1), 3)
        for factor in FACTORS if world.spans[0][0] == 0 else (1.0,):
            known = Measurements(process=FailureRate.prior(factor * MTBF_S))
            found, changes = overheads(world, seeds, lambda known=known: Learning(known))  # type: ignore[misc]
            label = f"{name}, prior {factor:g} x" if world.spans[0][0] == 0 else name
            rows += judged(label, found, best)
            rows.append(Row(f"{label}: changes in 40 failures after that", changes, "", "shown", None))
    return rows


def two_levels(seeds: range) -> list[Row]:
    """Trainers fail four times as often as all memory is lost; commits take two minutes and 10 % of the speed."""
    gaps = {Failure.PROCESS: exponential(MTBF_S), Failure.JOB: exponential(4 * MTBF_S)}
    world = World(gaps, Failure.JOB, 4 * MTBF_S, ((0, LEARNT), (LEARNT, 2 * LEARNT)), 120.0, 0.1)
    best = constants(world, seeds, (math.sqrt(2 * STALL_S * MTBF_S), 2), 2)
    rows = []
    for factor in FACTORS:
        known = Measurements(process=FailureRate.prior(factor * MTBF_S), job=FailureRate.prior(factor * 4 * MTBF_S))
        found, _ = overheads(world, seeds, lambda known=known: Learning(known))  # type: ignore[misc]
        rows += judged(f"memory and store, priors {factor:g} x", found, best)
    return rows


def far_off(seeds: range) -> list[Row]:
    """What ships, on machines that are taken away every two hours instead of every 60 days, and then on good ones."""
    world = World(
        {Failure.PREEMPTION: exponential(MTBF_S)}, Failure.PREEMPTION, MTBF_S, ((0, LEARNT), (LEARNT, 40)), 60.0, 0.1
    )
    best = constants(world, seeds, (300.0, 1), 3)
    found, _ = overheads(world, seeds, lambda: Learning(Measurements()))
    return [replace(row, bar="shown", met=None) for row in judged("preempted, prior 720 x too good", found, best)]


def judged(label: str, found: list[float], best: list[float]) -> list[Row]:
    early, late = (each / least for each, least in zip(found, best, strict=True))
    return [
        Row(f"{label}: first 20 failures", found[0], "", "at most 1.3 x", early <= 1.3, best[0], early),
        Row(f"{label}: after 20 failures", found[1], "", "at most 1.05 x", late <= 1.05, best[1], late),
    ]


def asking() -> Row:
    """After a snapshot whose stall is taken in, as it is asked; costs vary by a quarter."""
    rng = random.Random(0)

    def about(value: float) -> float:
        return value * math.exp(rng.gauss(0, 0.25))

    known = Measurements().with_uptime(1e4)
    for _ in range(64):
        known = known.with_commit(about(40), 1e9).with_steps(100, about(60)).with_steps_beside_commit(50, about(31))
    stalls = [about(0.2) for _ in range(1000)]

    def ask() -> None:
        learnt, chosen = known, decide(known, LIMITS)
        for stall_s in stalls:
            learnt = learnt.with_stall(stall_s)
            chosen = decide(learnt, LIMITS, current=chosen)

    each_s = timed(ask) / len(stalls)
    return Row(
        "asking for a decision", 1e6 * each_s, "us", "at most 1000 us: .1 % of a core, once a second", each_s <= 1e-3
    )


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=1000, help="the first of the seeds")
    args = made.parse_args(argv)
    seeds = range(args.seed, args.seed + (1 if args.small else 200))
    return report("policy", [*one_level(seeds), *two_levels(seeds), *far_off(seeds), asking()], args)


if __name__ == "__main__":
    sys.exit(main())
