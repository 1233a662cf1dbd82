"""From what is known to how often to save, within the user's limits.

Each level has an interval that costs least (`levels.best`, here in real numbers), and the limits move it. What holds:

- A limit that can be kept is kept, by the estimates of this moment. Intervals that a limit decides leave a tenth of it
  in hand. A limit that is broken is kept again at once, if that puts none at risk that ranks higher.
- Where no intervals surely keep all limits, what was measured says now that one is broken, now another. The one that
  ranks higher is kept first, and what is in force stays until one is broken by more than its error.
- Intervals that break no limit change only where the expected gain is more than the noise of the estimates
  (`rates.reconsider`), and by more than a seventh: about what it takes to gain 1 %. The way back takes up to twice the
  noise, four times where a limit decides. They come nearer to a limit only where they would keep it, too, if all costs
  were three standard deviations more than they were in the long run.
- What three steps, a replication or a commit take in the long run bounds an interval. One in force is left for such a
  bound only where it is off by more than three standard deviations of the difference; what the newest measurements say
  counts only where they differ from the long run by four, since they are looked at after each.
- A commit's interval is a whole number of the snapshots', and both are the best for that number.
- What costs more does not shorten the interval of its level, and more failures do not lengthen it (where limits decide:
  but for less than one snapshot more or less to a commit).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ckpt.policy.adaptive import Adaptive, Chosen, Decision, LocalBy, StoreBy
from ckpt.policy.failures import Failure
from ckpt.policy.interval import ROUNDING
from ckpt.policy.known import Measurements
from ckpt.policy.levels import overhead_of
from ckpt.policy.predicted import with_predictions
from ckpt.policy.rates import reconsider
from ckpt.policy.robust_mean import LONG, RobustMean
from ckpt.policy.save_options import STEPS_APART, Limits

START_S = 60.0  # until the first snapshot is measured: soon enough to learn from, rare enough to cost nothing
LEAST_S = 1.0  # to lose a second less is nothing beside any recovery
IN_HAND = 1.1
CHANGE_MIN = 1 / 7
BOUND_DEVIATIONS = 3.0  # of the mean of what bounds an interval: what is nearer to it may well be it
LOOKED_AT = 4.0  # deviations, of what is looked at without end: three come by chance after a hundred looks
DEVIATIONS = 0.75  # what counts as noise; 1 would keep any interval, however wrong, while one failure is all one knows
DOUBT = 1.5  # of what is taken of a limit that another contradicts: by less than that none is broken
BACK = 2.0  # times as many for the way back: then three of a rate's, where its best interval is
MB = 1e6

Limit = Literal["store_mb_s", "unsaved_s", "at_risk_s", "overhead"]
Bound = Limit | Literal["step", "replication", "least", "commit"]
LIMITS: tuple[Limit, ...] = ("store_mb_s", "unsaved_s", "at_risk_s", "overhead")  # the first is kept first


def decide(
    known: Measurements,
    limits: Adaptive,
    nodes: int = 1,
    peers: bool = False,
    current: Chosen | None = None,
    slots: int = 3,
    unsaved_s: float | None = None,
) -> Decision:
    """The intervals for a job on so many nodes. `peers`: whether other hosts' memory survives the loss of a node.
    `current`: what was decided before and is in force; None: nothing was. `slots`: for how many snapshots there is
    memory; with one, each is committed before the next is taken. `unsaved_s`: ckpt.Limits(unsaved_s=): a job that has
    no commit for so long leaves, so one lands twice as often, or at least as often as that where a commit takes long.
    Errors: UsageError where nodes is below 1, or unsaved_s is none that ckpt.Limits takes.

    Pure: the same arguments, the same answer. It takes a fraction of a millisecond: ask after every observation that
    matters (a snapshot, a commit, a failure), and now and then while nothing happens, since that is news as well.
    """
    within = _Limits(limits.overhead, limits.store_mb_s, limits.at_risk_s, Limits(unsaved_s=unsaved_s).unsaved_s)
    needs = _Needs(known, within, nodes, peers, slots)
    wanted = needs.wanted()
    if current is None or _starts(current) != _starts(wanted) or not needs.can_be(current):
        return needs.decision(wanted)
    stay = current
    if stay.local_by == "predictions" and not needs.foreseen:
        stay = replace(stay, local_from_s=0.0)  # no source is proven any more: that is no noise
    needs.settle(stay)
    return needs.decision(_reconsidered(needs, stay))


def _starts(choice: Chosen) -> tuple[bool, bool]:
    return choice.local_by == "start", choice.store_by == "start"


def _reconsidered(needs: _Needs, stay: Chosen) -> Chosen:
    """The intervals in force, or these with one level's changed, or the wanted ones: what gains most beyond noise.
    Where those in force break a limit: what gains most, or loses least, of what keeps it."""
    wanted = needs.wanted()
    moves = bool(_alternatives(stay, wanted, CHANGE_MIN))
    if not moves and not needs.broken(stay, needs.allowed(wanted)):
        return stay
    surely = needs.surely(stay)
    doubt = DOUBT if surely.contradict() else 0.0
    allowed = needs.allowed(wanted, doubt)
    broken = needs.broken(stay, allowed, doubt)
    if not moves and not broken:
        return stay
    found = _alternatives(stay, surely.wanted(), 0.0 if broken else CHANGE_MIN)
    kept = LIMITS
    if broken:  # for a limit's sake one that ranks higher is not put at risk
        found += _alternatives(stay, wanted)
        kept = LIMITS[: min(LIMITS.index(each) if each in LIMITS else 0 for each in broken)]
    found = [each for each in found if needs.can_be(each)]
    can = [each for each in found if not needs.broken(each, allowed) and surely.keeps(each, stay, kept)]
    best = max(can, key=lambda each: (surely.keeps(each, stay, LIMITS), needs.gain(stay, each)), default=stay)
    if not broken and needs.gain(stay, best) <= 0:
        return stay
    # Whoever had to go for what is surely so comes back for that alone.
    had_to = needs.broken(stay, allowed, BOUND_DEVIATIONS)
    local_from_s, store_from_s = (0.0, 0.0) if had_to else (stay.local_s, stay.store_s)
    return replace(
        best,
        local_from_s=stay.local_from_s if best.local_s == stay.local_s else local_from_s,
        store_from_s=stay.store_from_s if best.store_s == stay.store_s else store_from_s,
    )


def _alternatives(stay: Chosen, wanted: Chosen, least: float = 0.0) -> list[Chosen]:
    """The wanted intervals, and either level's with the other's in force; only of levels that move by more than the
    part `least`."""
    local_moves = _moves(stay.local_s, wanted.local_s, least)
    store_moves = _moves(stay.store_s, wanted.store_s, least)
    found = [wanted] if local_moves or store_moves else []
    if wanted.store_by == "start":
        return found  # there is one level yet
    if local_moves:
        found += _divided(stay.store_s, wanted.local_s, wanted.local_by, stay.store_by)
    if store_moves:
        times = wanted.store_s / stay.local_s
        found += [Chosen(stay.local_s, k, stay.local_by, wanted.store_by) for k in _whole(times)]
    return found


def _moves(was_s: float, is_s: float, least: float) -> bool:
    return abs(is_s / was_s - 1) > least


def _gain(
    was_s: float,
    is_s: float,
    from_s: float,
    by: LocalBy | StoreBy,
    cost: float,
    rate: float,
    cost_error: float,
    rate_error: float,
) -> tuple[float, float]:
    """Of one level: the overhead that a change saves, and the noise in that. What would be gained by a move of no more
    than CHANGE_MIN does not count: it is made only since the other level moves.

    A change that a limit stops halfway gains up to twice as much for its noise as the whole would, so it takes twice
    the noise. One that goes back to where the interval came from takes BACK times the noise, twice that where a limit
    decides: what brought it here may have been noise, or else this is. Of a rate that is known badly as much would be
    more than any gain: there it takes sqrt(n) times the noise, n as in `reconsider`."""
    times = 2 if by in LIMITS else 1
    deviations = DEVIATIONS * times
    if from_s and (is_s - was_s) * (from_s - was_s) > 0:
        deviations *= max(1.0, min(BACK * times, rate / rate_error))
    change = reconsider(was_s, is_s, cost, rate, cost_error, rate_error, deviations)
    return change.gain if _moves(was_s, is_s, CHANGE_MIN) else min(0.0, change.gain), change.noise


def _divided(store_s: float, local_s: float, local_by: LocalBy, store_by: StoreBy) -> list[Chosen]:
    """The two ways to divide a commit's interval evenly into snapshots' intervals next to the wanted one."""
    return [Chosen(store_s / k, k, local_by, store_by) for k in _whole(store_s / local_s)]


def _whole(times: float) -> list[int]:
    """The whole numbers next to `times`, at least 1."""
    return sorted({max(1, math.floor(times * (1 + ROUNDING))), max(1, math.ceil(times * (1 - ROUNDING)))})


def _settled(measured: RobustMean) -> RobustMean:
    """In the long run, unless the newest measurements are clearly others."""
    long_run = replace(measured, window=LONG)
    off = abs((measured.mean or 0.0) - (long_run.mean or 0.0))
    return long_run if off <= LOOKED_AT * math.hypot(measured.error, long_run.error) else measured


def _left(bound_s: float, measured: RobustMean) -> bool:
    """Whether what bounds an interval has left the one in force, which is from measurements that were as wrong."""
    settled = _settled(measured)
    return abs(bound_s - (settled.mean or 0.0)) > BOUND_DEVIATIONS * math.hypot(measured.error, settled.error)


@dataclass(frozen=True, slots=True)
class _Limits(Adaptive):
    """All that are kept."""

    unsaved_s: float | None = None

    def __post_init__(self) -> None:
        """The user's were checked; those that `surely` makes of them may be tighter than any that a user may give."""


class _Needs:
    """What is known, as numbers; c, l: cost of one and rate of failures, of snapshots and commits."""

    def __init__(self, known: Measurements, limits: _Limits, nodes: int, peers: bool, slots: int) -> None:
        self.known, self.limits, self.nodes, self.peers, self.slots = known, limits, nodes, peers, slots
        self.measured = m = known.measured(nodes, peers)
        self.memory, self.store = known.failures_by_level(peers)
        self.local_c, self.local_l = m.snapshot_stall_s, m.memory_rate
        self.store_c, self.store_l = m.commit_cost_s, m.store_rate
        self.local_c_error, self.local_l_error = known.stall.error, known.deviation(self.memory, nodes)
        self.foreseen = known.recall > 0
        if self.foreseen:  # as if failures were rarer: at the rate whose best interval is the one with predictions
            found = with_predictions(self.local_c, 1 / self.local_l, 0.0, self.local_c, known.recall, known.precision)
            rarer = 2 * self.local_c / (found.interval_s**2 * self.local_l)
            self.local_l, self.local_l_error = self.local_l * rarer, self.local_l_error * rarer
            self.foreseen = rarer < 1 - ROUNDING
        self.store_c_error = math.hypot(m.slowdown * known.commit.error, m.commit_s * known.slowdown_error)
        self.store_l_error = known.deviation(self.store, nodes)
        self.commit_high_s = known.commit.high if known.commit.seen else m.commit_s
        traffic = math.inf if limits.store_mb_s is None else limits.store_mb_s * MB
        self.bytes = known.commit_bytes.mean or 0.0
        self.traffic_s = self.bytes / traffic
        self.step_s = known.step.mean or 0.0
        steps = replace(known.step, values=tuple(STEPS_APART * each for each in known.step.values))
        waits_s = STEPS_APART * self.step_s if slots == 1 else 0.0  # for a commit to end, before the next is appointed
        self.apart = replace(known.commit, values=tuple(each + waits_s for each in known.commit.values))
        self.bounds: dict[Literal["step", "replication"], RobustMean] = {
            "step": steps,
            "replication": known.replication,
        }
        self.least_s: dict[Literal["least", "step", "replication"], float] = {
            "least": LEAST_S,
            "step": _settled(steps).mean or 0.0,
            "replication": _settled(known.replication).mean or 0.0,
        }
        self.floors_s: dict[StoreBy, float] = {
            "snapshot": max(self.least_s.values()),
            "commit": _settled(self.apart).mean or m.commit_s,
            "store_mb_s": self.traffic_s * IN_HAND,
        }
        at_risk_s = math.inf if limits.at_risk_s is None else limits.at_risk_s
        unsaved_s = math.inf if limits.unsaved_s is None else limits.unsaved_s
        self.ceilings_s: dict[StoreBy, float] = {
            "unsaved_s": unsaved_s / 2 - self.step_s,  # one may fail
            "at_risk_s": (at_risk_s - self.commit_high_s - self.step_s) / IN_HAND,
        }
        self.ceiling_s = min(self.ceilings_s.values())
        self.soon_s = min(at_risk_s / 2, unsaved_s / 4)  # each is committed, and what that takes is not known

    def settle(self, stay: Chosen) -> None:
        """An interval in force that what a step, a replication or a commit takes has decided, and that cannot be told
        from that by the errors of both, is as good a bound as what is measured now: else it would follow that to and
        fro. Nothing is lost meanwhile: what comes before the one before has ended is left out anyway."""
        for name, measured in self.bounds.items():
            if stay.local_by == name and not _left(stay.local_s, measured):
                self.least_s[name] = stay.local_s
        self.floors_s["snapshot"] = max(self.least_s.values())
        if stay.store_by == "commit" and not _left(stay.store_s, self.apart):
            self.floors_s["commit"] = stay.store_s

    # -- what is best now, whatever was before

    def wanted(self) -> Chosen:
        """The intervals that cost least within the limits. Each step below only ever moves what the one before found;
        the limits that the user ranked higher come later."""
        if not self.known.stall.seen:
            return Chosen(min(START_S, self.soon_s), 1, "start", "start")
        local_s = math.sqrt(2 * self.local_c / self.local_l)  # Young 1974, of this level by itself
        bound = max(self.least_s, key=lambda each: self.least_s[each])
        best_by: LocalBy = "predictions" if self.foreseen else "rates"
        local_by = best_by if local_s >= self.least_s[bound] else bound
        local_s = max(local_s, self.least_s[bound])
        budget = self.limits.overhead / IN_HAND
        if not self.known.commit.seen:
            least_s = self.local_c / budget
            local_by, local_s = ("overhead", least_s) if least_s > local_s else (local_by, local_s)
            return Chosen(min(local_s, self.soon_s), 1, local_by, "start")

        if self.slots == 1:
            local_s = math.inf  # there is no snapshot by itself
        store_s, store_by = self._store_s(local_s, budget)
        rest = budget - self.store_c / store_s
        least_s = self.local_c / rest if rest > 0 else math.inf
        if least_s > local_s:
            local_by, local_s = "overhead", least_s
        if local_s >= store_s:
            both_by: LocalBy = bound if store_by == "snapshot" and store_s <= self.least_s[bound] else "store"
            return Chosen(self._local_s(1, budget), 1, both_by, store_by)
        choices = [Chosen(self._local_s(k, budget), k, local_by, store_by) for k in _whole(store_s / local_s)]
        limits = replace(self.limits, overhead=budget)
        breaks = [len(self.broken(each, limits)) for each in choices]
        return min(zip(breaks, choices, strict=True), key=lambda each: (each[0], self._cost(each[1])))[1]

    def _store_s(self, local_s: float, budget: float) -> tuple[float, StoreBy]:
        """The commits' interval, and what decided. `local_s`: the snapshots', as they would have it."""
        by: StoreBy = "rates"
        store_s = math.sqrt(2 * self.store_c / self.store_l)
        if store_s < local_s:  # then both are one
            by = "snapshot"
            store_s = math.sqrt(2 * (self.local_c + self.store_c) / (self.local_l + self.store_l))
        # Both intervals scaled by one factor keep the optimum under a budget: the multiplier of Lagrange is the same.
        scale = (self.local_c / max(min(local_s, store_s), *self.least_s.values()) + self.store_c / store_s) / budget
        if scale > 1:
            by, store_s = "overhead", scale * store_s
        if store_s > self.ceiling_s:
            by, store_s = min(self.ceilings_s, key=lambda each: self.ceilings_s[each]), self.ceiling_s
        for name, floor_s in self.floors_s.items():
            if store_s < floor_s:
                by, store_s = name, floor_s
        return store_s, by

    def _local_s(self, k: int, budget: float) -> float:
        """The snapshots' interval that is best with exactly k to a commit: whole numbers leave some of what either
        level would have. The limits in the order of their ranks, the last the highest."""
        cost = self.local_c + self.store_c / k
        local_s = max(math.sqrt(2 * cost / (self.local_l + k * self.store_l)), cost / budget)
        floor_s = max(*self.least_s.values(), max(self.floors_s.values()) / k)
        return max(min(local_s, self.ceiling_s / k), floor_s)

    def _cost(self, choice: Chosen) -> float:
        """The overhead that depends on the intervals, to first order."""
        return self.saving(choice) + (self.local_l * choice.local_s + self.store_l * choice.store_s) / 2

    # -- choices against each other

    def can_be(self, choice: Chosen) -> bool:
        """Whether there is memory for the snapshots that are not committed."""
        return self.slots != 1 or choice.snapshots == 1

    def gain(self, now: Chosen, then: Chosen) -> float:
        """The overhead that a change saves, less the noise in that; both levels' estimates are independent."""
        by = then.store_by if then.local_by == "store" else then.local_by
        estimates = self.local_c, self.local_l, self.local_c_error, self.local_l_error
        gain, noise = _gain(now.local_s, then.local_s, now.local_from_s, by, *estimates)
        if then.store_by == "start":
            return gain - noise
        estimates = self.store_c, self.store_l, self.store_c_error, self.store_l_error
        store_gain, store_noise = _gain(now.store_s, then.store_s, now.store_from_s, then.store_by, *estimates)
        return gain + store_gain - math.hypot(noise, store_noise)

    def saving(self, choice: Chosen) -> float:
        """The part of the run's time that it takes, as far as that is measured."""
        local = 0.0 if choice.local_by == "start" else self.local_c / choice.local_s
        return local + (0.0 if choice.store_by == "start" else self.store_c / choice.store_s)

    def apart_s(self, choice: Chosen) -> float:
        """The most time from one commit to the next. A snapshot comes up to a step later than is due, but where steps
        decide when one is."""
        late_s = 0.0 if choice.local_by == "step" else self.step_s
        return max(choice.store_s + late_s, self.measured.commit_s)

    def lost_s(self, choice: Chosen) -> float:
        """The most work that is lost where only the store is left."""
        return self.apart_s(choice) + self.commit_high_s

    def takes(self, choice: Chosen) -> dict[Limit, float]:
        """What it takes of each limit that there is, in that limit's unit."""
        found: dict[Limit, float] = {"overhead": self.saving(choice)}
        if choice.store_by != "start":
            found["store_mb_s"] = self.bytes / choice.store_s / MB
            found["unsaved_s"] = self.apart_s(choice)
            found["at_risk_s"] = self.lost_s(choice)
        return {each: taken for each, taken in found.items() if getattr(self.limits, each) is not None}

    def may_take(self, choice: Chosen) -> dict[Limit, float]:
        """The same, if all that was measured is three standard deviations better than the truth."""
        errors = self._errors(choice)
        return {each: taken + BOUND_DEVIATIONS * errors[each] for each, taken in self.takes(choice).items()}

    def _errors(self, choice: Chosen) -> dict[Limit, float]:
        """The standard deviations of what it takes."""
        store_error = 0.0 if choice.store_by == "start" else self.store_c_error / choice.store_s
        return {
            "overhead": math.hypot(self.local_c_error / choice.local_s, store_error),
            "store_mb_s": self.known.commit_bytes.error / choice.store_s / MB,
            "unsaved_s": math.hypot(self.known.commit.error, self.known.step.error),
            "at_risk_s": math.hypot(self.known.commit.high_error, self.known.step.error),
        }

    def surely(self, stay: Chosen) -> _Needs:
        """With limits as much tighter as, in the long run, the intervals in force may well take more of them than the
        newest measurements say."""
        takes = self.takes(stay)
        may_take = _Needs(self.known.long_run(), self.limits, self.nodes, self.peers, self.slots).may_take(stay)
        tighter = {
            each: getattr(self.limits, each) * taken / may_take[each]
            for each, taken in takes.items()
            if 0 < taken < may_take[each]
        }
        found = _Needs(self.known, replace(self.limits, **tighter), self.nodes, self.peers, self.slots)
        found.settle(stay)
        return found

    def keeps(self, choice: Chosen, stay: Chosen, names: Collection[Limit]) -> bool:
        """Whether it keeps these limits, or takes no more of them than the intervals in force do."""
        now = self.takes(stay)
        return all(
            taken <= max(getattr(self.limits, each) * (1 + ROUNDING), now.get(each, 0.0))
            for each, taken in self.takes(choice).items()
            if each in names
        )

    def broken(self, choice: Chosen, limits: _Limits, deviations: float = 0.0) -> set[Bound]:
        """The limits that it breaks by more than rounding and so many standard deviations of what was measured, what a
        commit takes by as many, and the other bounds by more than what measuring is wrong by."""
        off_s = deviations * self.known.commit.error
        found: set[Bound] = {each for each, s in self.least_s.items() if choice.local_s * IN_HAND < s}
        if choice.store_by != "start" and choice.store_s * IN_HAND < self.floors_s["commit"] - off_s:
            found.add("commit")
        errors = self._errors(choice)
        takes = {each: taken - deviations * errors[each] for each, taken in self.takes(choice).items()}
        return found | {each for each, taken in takes.items() if taken > getattr(limits, each) * (1 + ROUNDING)}

    def contradict(self) -> bool:
        """Whether no intervals keep all limits."""
        return not self.broken(self.wanted(), self.limits).isdisjoint(LIMITS)

    def allowed(self, wanted: Chosen, deviations: float = 0.0) -> _Limits:
        """Where the wanted intervals do not keep a limit, or are nearer to it than so many standard deviations of what
        was measured: at least as good as they are, with the same in hand."""
        errors, found = self._errors(wanted), dict[Limit, float]()
        for each, taken in self.takes(wanted).items():
            limit = getattr(self.limits, each)
            if taken + deviations * errors[each] > limit * (1 + ROUNDING):
                found[each] = min(max(limit, IN_HAND * taken), 1.0 if each == "overhead" else math.inf)
        return replace(self.limits, **found)

    def decision(self, choice: Chosen) -> Decision:
        m, broken = self.measured, self.broken(choice, self.limits)
        # Never below a thousandth of an interval, where costs that eat all of it would leave no work.
        work_s = max(choice.local_s - self.local_c - self.store_c / choice.snapshots, choice.local_s / 1000)
        return Decision(
            local_s=choice.local_s,
            snapshots=choice.snapshots,
            local_by=choice.local_by,
            store_by=choice.store_by,
            measured=m,
            overhead=overhead_of(m, work_s, choice.snapshots),
            saving=self.saving(choice),
            store_mb_s=self.bytes / choice.store_s / MB,
            at_risk_s=self.lost_s(choice),
            local_from_s=choice.local_from_s,
            store_from_s=choice.store_from_s,
            unmet=tuple(each for each in LIMITS if each in broken),
            stalls=self.known.stall.seen,
            commits=self.known.commit.seen,
            memory_failures=self._seen(self.memory),
            store_failures=self._seen(self.store),
        )

    def _seen(self, failures: Iterable[Failure]) -> int:
        return sum(self.known.rate_of(each).seen for each in failures)
