"""What a simulated job spends outside training: its restarts, and the account of the whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt.policy.failures import Failure
from ckpt.simulate.outcome import Cause, Recovery, RestoredFrom, RunOutcome
from ckpt.simulate.scenario import Scenario
from ckpt.simulate.training import Training

GB = 1e9
MONTH_S = 730 * 3600.0


@dataclass(slots=True)
class Interruption:
    """A restart under way. `nodes`: of the job before it. `level`: None until a checkpoint was chosen."""

    time_s: float
    cause: Cause
    nodes: frozenset[str]
    was_warned: bool
    lost_steps: int = 0
    level: RestoredFrom | None = None
    waited_s: float = 0.0

    def failure(self, job: frozenset[str], has_peers: bool) -> Failure | None:
        """What kind it was, as `agent.state.cost_model.classify_failure`, once the nodes of the next start, `job`, are
        known; None if nothing was lost, since the job left in order."""
        if self.cause == "rejoin" or (self.was_warned and not self.lost_steps):
            return None
        if not self.nodes - job:
            return Failure.PROCESS
        if has_peers and len(self.nodes) > 1 and self.level in ("store", "nothing"):
            return Failure.JOB
        return Failure.PREEMPTION if self.was_warned else Failure.NODE


@dataclass(slots=True)
class JobTimes:
    """Seconds outside training, and what restores took from the store."""

    lost_s: float = 0.0
    recovering_s: float = 0.0
    waiting_s: float = 0.0
    node_s: float = 0.0
    bytes_out: float = 0.0
    gets: int = 0
    acted: int = 0
    recoveries: list[Recovery] = field(default_factory=list)

    def record(self, was: Interruption, finished: bool, now_s: float) -> None:
        assert was.level is not None
        found = Recovery(was.time_s, was.cause, was.level, was.lost_steps, now_s - was.time_s, was.waited_s, finished)
        self.recoveries.append(found)


def outcome_of(scenario: Scenario, training: Training, times: JobTimes, price_node_hour: float | None) -> RunOutcome:
    """What the run came to. `price_node_hour`: where the scenario has none."""
    books, hours = training.books, times.node_s / 3600
    price = scenario.node_usd_hour if scenario.node_usd_hour is not None else price_node_hour
    store_usd = 0.0
    if scenario.store is not None:
        prices = scenario.store.prices
        gb_months = sum(training.now_s - at_s for at_s in training.kept_s) / MONTH_S * scenario.stored_bytes / GB
        requests_usd = prices.requests_usd(books.puts, times.gets)
        store_usd = gb_months * prices.gb_month + requests_usd + times.bytes_out / GB * prices.egress_gb
    return RunOutcome(
        wall_s=training.now_s,
        useful_s=books.useful_s,
        lost_s=times.lost_s,
        stalled_s=books.stalled_s,
        recovering_s=times.recovering_s,
        waiting_s=times.waiting_s,
        useful_steps=training.whole_steps,
        ideal_s=training.whole_steps * scenario.step_s,
        finished=scenario.work_steps is None or training.is_finished,
        snapshots=books.snapshots,
        commits=books.commits,
        replications=books.replications,
        notices_acted=times.acted,
        store_bytes_in=books.bytes_in,
        store_bytes_out=times.bytes_out,
        store_puts=books.puts,
        store_gets=times.gets,
        node_hours=hours,
        node_usd=None if price is None else price * hours,
        store_usd=store_usd,
        recoveries=tuple(times.recoveries),
    )
