"""The solver of the adaptive policy: it computes the intervals from the measurements, within the user's limits.

Each level has an interval of least cost (Young 1974, for its own cost and failures). The limits move it. Guarantees:

- A limit that can be kept is kept, by the current estimates. An interval that a limit decides leaves a tenth of the
  limit in hand. A broken limit is kept again at once, unless that risks a limit of higher rank.
- If no intervals surely keep all limits, the measurements show now one limit as broken, now another. The limit of
  higher rank is kept first. The current intervals stay until a limit is broken by more than its error.
- Intervals that break no limit change only if the expected gain exceeds the noise of the estimates
  (`rates.reconsider`), and by more than a seventh: about what gains 1 %. The way back takes up to twice the noise, four
  times if a limit decides. An interval moves closer to a limit only if it would keep that limit even with costs three
  standard deviations above their long-run values.
- The long-run time of three steps, a replication or a commit bounds an interval. A current interval leaves such a bound
  only if it is off by more than three standard deviations of the difference. The newest measurements count only if they
  differ from the long run by four, since they are checked after each observation.
- A commit's interval is a whole number of snapshot intervals, and both are the best for that number.
- A higher cost does not shorten the interval of its level, and more failures do not lengthen it. Where limits decide,
  this holds up to one snapshot more or less per commit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from ckpt.policy.adaptive import Adaptive, Chosen, Decision, LocalBy, StoreBy
from ckpt.policy.failures import Failure
from ckpt.policy.interval import ROUNDING
from ckpt.policy.interval_moves import CHANGE_MIN, LIMITS, Limit, alternatives, level_gain, nearest_counts, start_levels
from ckpt.policy.known import Measurements
from ckpt.policy.levels import overhead_of
from ckpt.policy.predicted import with_predictions
from ckpt.policy.robust_mean import RobustMean, stable_mean
from ckpt.policy.save_options import STEPS_APART, Limits

# The interval until the first snapshot is measured: soon enough to learn from, rare enough to cost nothing.
START_S = 60.0
LEAST_S = 1.0  # one second less of lost work is nothing beside any recovery
LIMIT_MARGIN = 1.1  # the margin to a limit
# Standard deviations of the mean of a bound: an interval that is nearer may equal the bound.
BOUND_DEVIATIONS = 3.0
# Standard deviations by which a limit must be exceeded to count as broken while limits contradict each other.
CONFLICT_DEVIATIONS = 1.5
MB = 1e6

Bound = Limit | Literal["step", "replication", "least", "commit"]


def decide(
    known: Measurements,
    limits: Adaptive,
    nodes: int = 1,
    peers: bool = False,
    current: Chosen | None = None,
    slots: int = 3,
    unsaved_s: float | None = None,
) -> Decision:
    """The intervals for a job on `nodes` nodes.

    `peers`: whether other hosts' memory survives the loss of a node.
    `current`: the decision in force; None at first.
    `slots`: how many snapshots fit in memory. With one, each snapshot is committed before the next is taken.
    `unsaved_s`: ckpt.Limits(unsaved_s=): a job leaves if no commit lands for that long. So commits land twice as often,
    or at least once in that time if a commit takes long.
    Errors: UsageError if nodes is below 1, or ckpt.Limits refuses unsaved_s.

    Pure: the same arguments give the same answer, in a fraction of a millisecond. Call it after every snapshot, commit
    and failure, and now and then in between, since time without an event changes the estimates, too.
    """
    unsaved_s = Limits(unsaved_s=unsaved_s).unsaved_s
    given = {
        "overhead": limits.overhead,
        "store_mb_s": limits.store_mb_s,
        "at_risk_s": limits.at_risk_s,
        "unsaved_s": unsaved_s,
    }
    needs = _Needs(known, {each: value for each in LIMITS if (value := given[each]) is not None}, nodes, peers, slots)
    wanted = needs.best_choice()
    if current is None or start_levels(current) != start_levels(wanted) or not needs.is_possible(current):
        return needs.make_decision(wanted)
    stay = current
    if stay.local_by == "predictions" and not needs.has_predictions:
        # No source is proven any more: that is no noise.
        stay = replace(stay, local_from_s=0.0)
    needs.settle_bounds(stay)
    return needs.make_decision(_reconsider_intervals(needs, stay))


def _reconsider_intervals(needs: _Needs, stay: Chosen) -> Chosen:
    """The current intervals, the wanted ones, or the current ones with one level changed: what gains most beyond noise.
    If the current ones break a limit: what gains most, or loses least, among those that keep it."""
    wanted = needs.best_choice()
    moves = bool(alternatives(stay, wanted, CHANGE_MIN))
    if not moves and not needs.broken_limits(stay, needs.relaxed_limits(wanted)):
        return stay
    surely = needs.with_tight_limits(stay)
    doubt = CONFLICT_DEVIATIONS if surely.has_conflict() else 0.0
    allowed = needs.relaxed_limits(wanted, doubt)
    broken = needs.broken_limits(stay, allowed, doubt)
    if not moves and not broken:
        return stay
    found = alternatives(stay, surely.best_choice(), 0.0 if broken else CHANGE_MIN)
    kept = LIMITS
    # Mending a limit must not put one of higher rank at risk.
    if broken:
        found += alternatives(stay, wanted)
        kept = LIMITS[: min(LIMITS.index(each) if each in LIMITS else 0 for each in broken)]
    found = [each for each in found if needs.is_possible(each)]
    can = [each for each in found if not needs.broken_limits(each, allowed) and surely.keeps_limits(each, stay, kept)]
    best = max(can, key=lambda each: (surely.keeps_limits(each, stay, LIMITS), needs.gain(stay, each)), default=stay)
    if not broken and needs.gain(stay, best) <= 0:
        return stay
    # Intervals that changed because a limit was surely broken may come back for the same reason alone.
    had_to = needs.broken_limits(stay, allowed, BOUND_DEVIATIONS)
    local_from_s, store_from_s = (0.0, 0.0) if had_to else (stay.local_s, stay.store_s)
    return replace(
        best,
        local_from_s=stay.local_from_s if best.local_s == stay.local_s else local_from_s,
        store_from_s=stay.store_from_s if best.store_s == stay.store_s else store_from_s,
    )


def _has_left_bound(bound_s: float, measured: RobustMean) -> bool:
    """Whether a bound has moved away from the current interval, which rests on measurements with the same errors."""
    settled = stable_mean(measured)
    return abs(bound_s - (settled.mean or 0.0)) > BOUND_DEVIATIONS * math.hypot(measured.error, settled.error)


class _Needs:
    """The measurements as numbers, per level: the cost of one snapshot or commit, the rate of the failures of that
    level, and the errors of both."""

    def __init__(self, known: Measurements, limits: Mapping[Limit, float], nodes: int, peers: bool, slots: int) -> None:
        self.measurements, self.limits, self.nodes, self.peers, self.slots = known, limits, nodes, peers, slots
        self.level_costs = m = known.level_costs(nodes, peers)
        self.memory_failures, self.store_failures = known.failures_by_level(peers)
        self.local_cost_s, self.local_rate = m.snapshot_stall_s, m.memory_rate
        self.store_cost_s, self.store_rate = m.commit_cost_s, m.store_rate
        self.local_cost_error_s, self.local_rate_error = known.stall.error, known.deviation(self.memory_failures, nodes)
        self.has_predictions = known.recall > 0
        # Predictions count as rarer failures: at the rate whose best interval is the one with predictions.
        if self.has_predictions:
            found = with_predictions(
                self.local_cost_s, 1 / self.local_rate, 0.0, self.local_cost_s, known.recall, known.precision
            )
            rarer = 2 * self.local_cost_s / (found.interval_s**2 * self.local_rate)
            self.local_rate, self.local_rate_error = self.local_rate * rarer, self.local_rate_error * rarer
            self.has_predictions = rarer < 1 - ROUNDING
        self.store_cost_error_s = math.hypot(m.slowdown * known.commit.error, m.commit_s * known.slowdown_error)
        self.store_rate_error = known.deviation(self.store_failures, nodes)
        self.commit_high_s = known.commit.upper_value if known.commit.count else m.commit_s
        traffic = limits.get("store_mb_s", math.inf) * MB
        self.commit_bytes = known.commit_bytes.mean or 0.0
        self.traffic_s = self.commit_bytes / traffic
        self.step_s = known.step.mean or 0.0
        steps = replace(known.step, values=tuple(STEPS_APART * each for each in known.step.values))
        # With one slot the commit ends before the next snapshot is appointed.
        waits_s = STEPS_APART * self.step_s if slots == 1 else 0.0
        self.commit_spacing = replace(known.commit, values=tuple(each + waits_s for each in known.commit.values))
        self.bounds: dict[Literal["step", "replication"], RobustMean] = {
            "step": steps,
            "replication": known.replication,
        }
        self.least_s: dict[Literal["least", "step", "replication"], float] = {
            "least": LEAST_S,
            "step": stable_mean(steps).mean or 0.0,
            "replication": stable_mean(known.replication).mean or 0.0,
        }
        self.floors_s: dict[StoreBy, float] = {
            "snapshot": max(self.least_s.values()),
            "commit": stable_mean(self.commit_spacing).mean or m.commit_s,
            "store_mb_s": self.traffic_s * LIMIT_MARGIN,
        }
        at_risk_s, unsaved_s = limits.get("at_risk_s", math.inf), limits.get("unsaved_s", math.inf)
        self.ceilings_s: dict[StoreBy, float] = {
            "unsaved_s": unsaved_s / 2 - self.step_s,  # so one commit may fail
            "at_risk_s": (at_risk_s - self.commit_high_s - self.step_s) / LIMIT_MARGIN,
        }
        self.ceiling_s = min(self.ceilings_s.values())
        # Until a commit is measured each snapshot is committed, at an unknown cost.
        self.first_interval_max_s = min(at_risk_s / 2, unsaved_s / 4)

    def settle_bounds(self, stay: Chosen) -> None:
        """Keeps a current interval as its own bound while it differs from the time of a step, a replication or a commit
        by less than both errors. Only for an interval that such a time decided, which would otherwise follow the
        measurements up and down. Nothing is lost: a snapshot that is due before the former has ended is skipped
        anyway."""
        for name, measured in self.bounds.items():
            if stay.local_by == name and not _has_left_bound(stay.local_s, measured):
                self.least_s[name] = stay.local_s
        self.floors_s["snapshot"] = max(self.least_s.values())
        if stay.store_by == "commit" and not _has_left_bound(stay.store_s, self.commit_spacing):
            self.floors_s["commit"] = stay.store_s

    # -- the best intervals, whatever is in force

    def best_choice(self) -> Chosen:
        """The intervals of least cost within the limits. Each step only moves the result of the former one. The limits
        of higher rank come later."""
        if not self.measurements.stall.count:
            return Chosen(min(START_S, self.first_interval_max_s), 1, "start", "start")
        # Young 1974, for this level alone.
        local_s = math.sqrt(2 * self.local_cost_s / self.local_rate)
        bound = max(self.least_s, key=lambda each: self.least_s[each])
        best_by: LocalBy = "predictions" if self.has_predictions else "rates"
        local_by = best_by if local_s >= self.least_s[bound] else bound
        local_s = max(local_s, self.least_s[bound])
        budget = self.limits["overhead"] / LIMIT_MARGIN
        if not self.measurements.commit.count:
            least_s = self.local_cost_s / budget
            local_by, local_s = ("overhead", least_s) if least_s > local_s else (local_by, local_s)
            return Chosen(min(local_s, self.first_interval_max_s), 1, local_by, "start")

        if self.slots == 1:
            local_s = math.inf  # with one slot every snapshot is committed
        store_s, store_by = self._store_s(local_s, budget)
        rest = budget - self.store_cost_s / store_s
        least_s = self.local_cost_s / rest if rest > 0 else math.inf
        if least_s > local_s:
            local_by, local_s = "overhead", least_s
        if local_s >= store_s:
            both_by: LocalBy = bound if store_by == "snapshot" and store_s <= self.least_s[bound] else "store"
            return Chosen(self._local_s(1, budget), 1, both_by, store_by)
        choices = [Chosen(self._local_s(k, budget), k, local_by, store_by) for k in nearest_counts(store_s / local_s)]
        limits = {**self.limits, "overhead": budget}
        breaks = [len(self.broken_limits(each, limits)) for each in choices]
        return min(zip(breaks, choices, strict=True), key=lambda each: (each[0], self._cost(each[1])))[1]

    def _store_s(self, local_s: float, budget: float) -> tuple[float, StoreBy]:
        """The commit interval, and the term that decided it. `local_s`: the snapshot interval that the local level
        wants."""
        by: StoreBy = "rates"
        store_s = math.sqrt(2 * self.store_cost_s / self.store_rate)
        # Then both levels share one interval.
        if store_s < local_s:
            by = "snapshot"
            store_s = math.sqrt(2 * (self.local_cost_s + self.store_cost_s) / (self.local_rate + self.store_rate))
        # Scaling both intervals by one factor keeps the optimum under a budget: the Lagrange multiplier is the same.
        scale = (
            self.local_cost_s / max(min(local_s, store_s), *self.least_s.values()) + self.store_cost_s / store_s
        ) / budget
        if scale > 1:
            by, store_s = "overhead", scale * store_s
        if store_s > self.ceiling_s:
            by, store_s = min(self.ceilings_s, key=lambda each: self.ceilings_s[each]), self.ceiling_s
        for name, floor_s in self.floors_s.items():
            if store_s < floor_s:
                by, store_s = name, floor_s
        return store_s, by

    def _local_s(self, k: int, budget: float) -> float:
        """The best snapshot interval with exactly k snapshots per commit: whole numbers leave some of what either level
        wants. Limits of higher rank are applied later."""
        cost = self.local_cost_s + self.store_cost_s / k
        local_s = max(math.sqrt(2 * cost / (self.local_rate + k * self.store_rate)), cost / budget)
        floor_s = max(*self.least_s.values(), max(self.floors_s.values()) / k)
        return max(min(local_s, self.ceiling_s / k), floor_s)

    def _cost(self, choice: Chosen) -> float:
        """The overhead that depends on the intervals, to first order."""
        return self.saving_share(choice) + (self.local_rate * choice.local_s + self.store_rate * choice.store_s) / 2

    # -- comparing choices

    def is_possible(self, choice: Chosen) -> bool:
        """Whether memory suffices for the snapshots that are not committed."""
        return self.slots != 1 or choice.snapshots == 1

    def gain(self, now: Chosen, then: Chosen) -> float:
        """The overhead that a change saves, minus the noise. The estimates of both levels are independent."""
        by = then.store_by if then.local_by == "store" else then.local_by
        estimates = self.local_cost_s, self.local_rate, self.local_cost_error_s, self.local_rate_error
        gain, noise = level_gain(now.local_s, then.local_s, now.local_from_s, by, *estimates)
        if then.store_by == "start":
            return gain - noise
        estimates = self.store_cost_s, self.store_rate, self.store_cost_error_s, self.store_rate_error
        store_gain, store_noise = level_gain(now.store_s, then.store_s, now.store_from_s, then.store_by, *estimates)
        return gain + store_gain - math.hypot(noise, store_noise)

    def saving_share(self, choice: Chosen) -> float:
        """The part of the run's time that saving takes, as far as measured."""
        local = 0.0 if choice.local_by == "start" else self.local_cost_s / choice.local_s
        return local + (0.0 if choice.store_by == "start" else self.store_cost_s / choice.store_s)

    def commit_spacing_max_s(self, choice: Chosen) -> float:
        """The most time from one commit to the next. A snapshot comes up to a step late, unless steps decide when it is
        due."""
        late_s = 0.0 if choice.local_by == "step" else self.step_s
        return max(choice.store_s + late_s, self.level_costs.commit_s)

    def loss_max_s(self, choice: Chosen) -> float:
        """The most work that is lost if only the store is left."""
        return self.commit_spacing_max_s(choice) + self.commit_high_s

    def limit_use(self, choice: Chosen) -> dict[Limit, float]:
        """How much of each configured limit the intervals use, in that limit's unit."""
        found: dict[Limit, float] = {"overhead": self.saving_share(choice)}
        if choice.store_by != "start":
            found["store_mb_s"] = self.commit_bytes / choice.store_s / MB
            found["unsaved_s"] = self.commit_spacing_max_s(choice)
            found["at_risk_s"] = self.loss_max_s(choice)
        return {each: taken for each, taken in found.items() if each in self.limits}

    def limit_use_max(self, choice: Chosen) -> dict[Limit, float]:
        """The same, if all measurements are three standard deviations better than the truth."""
        errors = self._errors(choice)
        return {each: taken + BOUND_DEVIATIONS * errors[each] for each, taken in self.limit_use(choice).items()}

    def _errors(self, choice: Chosen) -> dict[Limit, float]:
        """The standard deviations of `takes`."""
        store_error = 0.0 if choice.store_by == "start" else self.store_cost_error_s / choice.store_s
        return {
            "overhead": math.hypot(self.local_cost_error_s / choice.local_s, store_error),
            "store_mb_s": self.measurements.commit_bytes.error / choice.store_s / MB,
            "unsaved_s": math.hypot(self.measurements.commit.error, self.measurements.step.error),
            "at_risk_s": math.hypot(self.measurements.commit.upper_error, self.measurements.step.error),
        }

    def with_tight_limits(self, stay: Chosen) -> _Needs:
        """The same needs with tighter limits. Each limit shrinks by how much more the current intervals may use in the
        long run than the newest measurements say."""
        takes = self.limit_use(stay)
        may_take = _Needs(
            self.measurements.with_long_window(), self.limits, self.nodes, self.peers, self.slots
        ).limit_use_max(stay)
        tighter = {
            each: self.limits[each] * taken / may_take[each]
            for each, taken in takes.items()
            if 0 < taken < may_take[each]
        }
        found = _Needs(self.measurements, {**self.limits, **tighter}, self.nodes, self.peers, self.slots)
        found.settle_bounds(stay)
        return found

    def keeps_limits(self, choice: Chosen, stay: Chosen, names: Collection[Limit]) -> bool:
        """Whether the intervals keep these limits, or use no more of them than the current ones do."""
        now = self.limit_use(stay)
        return all(
            taken <= max(self.limits[each] * (1 + ROUNDING), now.get(each, 0.0))
            for each, taken in self.limit_use(choice).items()
            if each in names
        )

    def broken_limits(self, choice: Chosen, limits: Mapping[Limit, float], deviations: float = 0.0) -> set[Bound]:
        """The limits and bounds that the intervals break. A limit, and the time of a commit, must be exceeded by
        `deviations` standard deviations, the other bounds by more than LIMIT_MARGIN."""
        off_s = deviations * self.measurements.commit.error
        found: set[Bound] = {each for each, s in self.least_s.items() if choice.local_s * LIMIT_MARGIN < s}
        if choice.store_by != "start" and choice.store_s * LIMIT_MARGIN < self.floors_s["commit"] - off_s:
            found.add("commit")
        errors = self._errors(choice)
        takes = {each: taken - deviations * errors[each] for each, taken in self.limit_use(choice).items()}
        return found | {each for each, taken in takes.items() if taken > limits[each] * (1 + ROUNDING)}

    def has_conflict(self) -> bool:
        """Whether no intervals keep all limits."""
        return not self.broken_limits(self.best_choice(), self.limits).isdisjoint(LIMITS)

    def relaxed_limits(self, wanted: Chosen, deviations: float = 0.0) -> dict[Limit, float]:
        """The limits, relaxed where the wanted intervals break one or come within `deviations` standard deviations of
        it. A relaxed limit allows what the wanted intervals use, with the same margin in hand."""
        errors, found = self._errors(wanted), dict[Limit, float]()
        for each, taken in self.limit_use(wanted).items():
            limit = self.limits[each]
            if taken + deviations * errors[each] > limit * (1 + ROUNDING):
                found[each] = min(max(limit, LIMIT_MARGIN * taken), 1.0 if each == "overhead" else math.inf)
        return {**self.limits, **found}

    def make_decision(self, choice: Chosen) -> Decision:
        m, broken = self.level_costs, self.broken_limits(choice, self.limits)
        # Never below a thousandth of an interval: costs may exceed the interval, and would leave no work.
        work_s = max(choice.local_s - self.local_cost_s - self.store_cost_s / choice.snapshots, choice.local_s / 1000)
        return Decision(
            local_s=choice.local_s,
            snapshots=choice.snapshots,
            local_by=choice.local_by,
            store_by=choice.store_by,
            level_costs=m,
            overhead=overhead_of(m, work_s, choice.snapshots),
            saving_share=self.saving_share(choice),
            store_mb_s=self.commit_bytes / choice.store_s / MB,
            at_risk_s=self.loss_max_s(choice),
            local_from_s=choice.local_from_s,
            store_from_s=choice.store_from_s,
            unmet_limits=tuple(each for each in LIMITS if each in broken),
            stalls=self.measurements.stall.count,
            commits=self.measurements.commit.count,
            memory_failures=self._failure_count(self.memory_failures),
            store_failures=self._failure_count(self.store_failures),
        )

    def _failure_count(self, failures: Iterable[Failure]) -> int:
        return sum(self.measurements.rate_of(each).failure_count for each in failures)
