"""The training of a predictor on recorded signals: a small bidirectional LSTM, on the CPU, from a seed.

Whole nodes are held out, never single readings: the readings of a node resemble each other, and a network that
recognises the node has learnt nothing. The report is about the held-out nodes: once by reading (the area under the ROC
curve), and once by alarm, with the outcomes that an agent would count. This is the only module here that needs torch.
It imports torch when it is called.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError
from ckpt.predict.calibration import Array, auc, platt, sigmoid
from ckpt.predict.model import SIGNALS_MAX, Floats, Trained, shapes
from ckpt.predict.recorded import Recorded, RecordedRun
from ckpt.predict.scoring import WINDOW_S, Score
from ckpt.types import format_count

WINDOW = 24  # readings: two minutes of 5 s
HIDDEN = 16
EPOCHS = 40
PATIENCE = 6  # epochs without a gain
BATCH = 256
RATE = 3e-3
FAILURES_MIN = 8
NODES_MIN = 4  # with failures: two to learn from, two held out
HELD_OUT = 0.3
WINDOWS_MAX = 20_000  # to learn from; quiet windows are sampled
NEEDED_S = 30.0  # an alarm with a shorter lead comes too late
SEEN_MIN = 0.05  # part of the readings: a rarer signal is left out
GAP_S = 60.0  # a longer silence separates two windows

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Ends:
    """The readings of one run that end a window without a silence or failure in it. `at`: their indices; `at_s`: their
    times; `y`: whether a failure followed within WINDOW_S."""

    run: RecordedRun
    indices: npt.NDArray[np.int64]
    times_s: Array
    outcomes: Array


@dataclass(frozen=True, slots=True)
class PredictorScore:
    """A predictor's quality on some nodes. `score`: of its alarms."""

    auc: float
    score: Score
    failures: int
    nodes: int

    def report(self) -> dict[str, float]:
        """The quality as numbers; unknown ones are left out."""
        named = {
            "auc": self.auc,
            "precision": self.score.precision,
            "recall": self.score.recall_bound,
            "lead_s": math.nan if self.score.lead_s is None else self.score.lead_s,
            "true": self.score.true,
            "late": self.score.late,
            "false": self.score.false,
            "missed": self.score.missed,
            "failures": float(self.failures),
            "nodes": float(self.nodes),
            "proven": float(self.score.is_proven),
        }
        return {name: value for name, value in named.items() if math.isfinite(value)}


def train(
    recorded: Recorded, seed: int = 0, limit_s: float = 300.0, progress: Progress | None = None
) -> tuple[Trained, PredictorScore]:
    """Trains a predictor. Returns it, and its quality on the held-out nodes.

    It ends after about `limit_s` seconds at the latest, with the best network so far. With enough time the same seed
    gives the same result. Errors: UsageError if there is too little to learn from, or torch is missing.
    """
    torch = _torch()
    learn, held = _split(recorded, seed)
    base = _untrained_predictor(recorded.runs_of(learn))
    rng = np.random.default_rng(seed)
    failing = sorted({run.node for run in recorded.runs_of(learn) if run.failures_s})
    inner = failing[:: max(2, round(1 / HELD_OUT))]  # to stop by, and to calibrate on
    stop = [_window_ends(run, base.window) for run in recorded.runs_of(inner)]
    fit = [_window_ends(run, base.window) for run in recorded.runs_of(set(learn) - set(inner))]
    if not any(each.outcomes.any() for each in fit) or not any(each.outcomes.any() for each in stop):
        raise UsageError(_too_few_message(recorded))
    net = _fit(torch, _sample_windows(base, fit, rng), _sample_windows(base, stop, rng), seed, limit_s, progress)
    trained = replace(base, arrays={**base.arrays, **_arrays(net)})
    slope, shift = platt(
        np.concatenate([_logits(trained, each) for each in stop]), np.concatenate([e.outcomes for e in stop])
    )
    trained = replace(trained, slope=slope, shift=shift)
    trained = replace(trained, alarm_above=_threshold(trained, [*fit, *stop]))
    found = evaluate(trained, recorded.runs_of(held))
    return replace(trained, report={name: round(value, 6) for name, value in found.report().items()}), found


def evaluate(trained: Trained, runs: Sequence[RecordedRun]) -> PredictorScore:
    """A predictor's quality on these runs. An alarm with a lead below NEEDED_S is late."""
    ends = [_window_ends(run, trained.window) for run in runs]
    p = [_probabilities(trained, each) for each in ends]
    failures = sum(len(run.failures_s) for run in runs)
    area = auc(np.concatenate([np.zeros(0), *p]), np.concatenate([np.zeros(0), *(each.outcomes for each in ends)]))
    return PredictorScore(area, _score_alarms(p, ends, trained.alarm_above), failures, len({run.node for run in runs}))


# -- the training data


def _split(recorded: Recorded, seed: int) -> tuple[list[str], list[str]]:
    """The nodes to learn from and the held-out nodes, drawn separately among nodes with and without failures. Errors:
    UsageError."""
    failing = sorted({run.node for run in recorded.runs if run.failures_s})
    if recorded.failures < FAILURES_MIN or len(failing) < NODES_MIN:
        raise UsageError(_too_few_message(recorded))
    rng = np.random.default_rng(seed)
    held: list[str] = []
    for nodes, least in ((failing, 2), (sorted(set(recorded.nodes) - set(failing)), 0)):
        order = [nodes[i] for i in rng.permutation(len(nodes))]
        held += order[: max(least, round(HELD_OUT * len(order)))]
    return sorted(set(recorded.nodes) - set(held)), sorted(held)


def _too_few_message(recorded: Recorded) -> str:
    failing = {run.node for run in recorded.runs if run.failures_s}
    failures = f"{format_count(recorded.failures, 'failure')} on {format_count(len(failing), 'node')}"
    return (
        f"the files record {failures} ({format_count(len(recorded.nodes), 'node')} in all). Training needs "
        f"{FAILURES_MIN} failures on {NODES_MIN} nodes, since it holds some nodes out to measure the predictor. Record "
        "more with CKPT_SIGNALS_LOG, and give the files of all nodes"
    )


def _untrained_predictor(runs: Sequence[RecordedRun]) -> Trained:
    """A predictor without weights: the frequent signals, and their mean and deviation while no failure is near. Errors:
    UsageError."""
    quiet = [
        values
        for run in runs
        for left_s, values in zip(_until_failure_s(run).tolist(), run.values, strict=True)
        if left_s > 2 * WINDOW_S
    ]
    names: dict[str, list[float]] = {}
    for values in quiet:
        for name, value in values.items():
            names.setdefault(name, []).append(value)
    chosen = sorted(name for name, each in names.items() if len(each) >= SEEN_MIN * len(quiet))[:SIGNALS_MAX]
    if not chosen:
        raise UsageError(
            "the files hold no frequent signal from times without failures. Record more with CKPT_SIGNALS_LOG"
        )
    mean = np.array([np.mean(names[name]) for name in chosen], dtype=np.float32)
    spread = np.array([np.std(names[name]) for name in chosen], dtype=np.float32)
    least = np.maximum(np.float32(1e-3), np.float32(0.01) * np.abs(mean))
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes(len(chosen), HIDDEN).items()}
    arrays |= {"mean": mean, "deviation": np.maximum(spread, least)}
    return Trained(tuple(chosen), WINDOW, HIDDEN, _period_s(runs), 1.0, 1.0, 0.0, arrays, {})


def _period_s(runs: Sequence[RecordedRun]) -> float:
    gaps = [b - a for run in runs for a, b in zip(run.times_s, run.times_s[1:], strict=False)]
    return max(1e-3, float(np.median(gaps))) if gaps else 5.0


def _window_ends(run: RecordedRun, window: int) -> Ends:
    times_s, left_s = np.array(run.times_s), _until_failure_s(run)
    # A window starts anew after a silence, and after a failure between two readings.
    gaps_s = np.diff(times_s)
    parts = np.concatenate([[True], (gaps_s > GAP_S) | (left_s[:-1] < gaps_s)])
    numbers = np.arange(len(times_s))
    since = np.maximum.accumulate(np.where(parts, numbers, 0))
    at = np.flatnonzero(numbers - since + 1 >= window)
    return Ends(run, at, times_s[at], (left_s[at] <= WINDOW_S).astype(np.float64))


def _until_failure_s(run: RecordedRun) -> Array:
    """Per reading: the seconds until the run's next failure."""
    times_s, failures_s = np.array(run.times_s), np.array([*run.failures_s, math.inf])
    found: Array = failures_s[np.searchsorted(failures_s, times_s, side="left")] - times_s
    return found


def _windows(trained: Trained, ends: Ends, which: npt.NDArray[np.int64]) -> Floats:
    """The windows that end with these readings: (n, window, signals)."""
    rows = trained.rows(ends.run.values)
    if len(rows) < trained.window:
        return np.zeros((0, trained.window, len(trained.signals)), np.float32)
    seen = np.lib.stride_tricks.sliding_window_view(rows, trained.window, axis=0)
    found: Floats = np.ascontiguousarray(seen[which - trained.window + 1].transpose(0, 2, 1))
    return found


def _sample_windows(trained: Trained, ends: Sequence[Ends], rng: np.random.Generator) -> tuple[Floats, Array]:
    """Windows and outcomes: up to WINDOWS_MAX / 2 that precede a failure, and others up to WINDOWS_MAX."""
    y = np.concatenate([each.outcomes for each in ends])
    kept = np.zeros(len(y), dtype=bool)
    positive, negative = np.flatnonzero(y > 0), np.flatnonzero(y == 0)
    positive = rng.permutation(positive)[: WINDOWS_MAX // 2]
    kept[positive] = kept[rng.permutation(negative)[: WINDOWS_MAX - len(positive)]] = True
    x, at = [], 0
    for each in ends:
        x.append(_windows(trained, each, each.indices[kept[at : at + len(each.indices)]]))
        at += len(each.indices)
    return np.concatenate(x), y[kept]


def _logits(trained: Trained, ends: Ends) -> Array:
    found = [
        trained.logits(_windows(trained, ends, part))
        for part in np.array_split(ends.indices, len(ends.indices) // 4096 + 1)
    ]
    return np.concatenate([np.zeros(0), *found])


def _probabilities(trained: Trained, ends: Ends) -> Array:
    return sigmoid(trained.slope * _logits(trained, ends) + trained.shift)


# -- alarms


def _score_alarms(p: Sequence[Array], ends: Sequence[Ends], above: float) -> Score:
    """The score of the alarms, as a coordinator counts it: an alarm stands for WINDOW_S, or until the failure."""
    score = Score()
    for probabilities, each in zip(p, ends, strict=True):
        run, standing = each.run, None
        score = score.with_watch_time(run.times_s[-1] - run.times_s[0])
        events = [(at_s, True) for at_s in run.failures_s]
        events += [(at_s, False) for at_s in each.times_s[probabilities >= above].tolist()]
        for at_s, is_failure in sorted(events):
            if standing is not None and at_s - standing > WINDOW_S:
                score, standing = score.with_false_alarm(), None
            if not is_failure:
                standing = at_s if standing is None else standing
            elif standing is None:
                score = score.with_missed_failure()
            else:
                score, standing = score.with_true_alarm(at_s - standing, at_s - standing >= NEEDED_S), None
        if standing is not None and run.times_s[-1] - standing > WINDOW_S:
            score = score.with_false_alarm()
    return score


def _threshold(trained: Trained, ends: Sequence[Ends]) -> float:
    """The threshold whose alarms have the best F1, among the given probabilities, on nodes that were learnt from."""
    p = [_probabilities(trained, each) for each in ends]
    best, most = 0.5, -1.0
    for above in np.unique(np.quantile(np.concatenate(p), np.linspace(0.5, 1.0, 41))):
        score = _score_alarms(p, ends, float(above))
        f1 = 2 * score.true / max(2 * score.true + score.late + score.false + score.missed, 1e-9)
        if f1 > most:
            best, most = float(above), f1
    return min(1.0, max(1e-6, best))


# -- the network


def _torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise UsageError(f"training a predictor needs torch, and importing torch failed: {exc}") from exc
    return torch


def _network(torch: Any, signals: int, hidden: int) -> Any:
    class Network(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(signals, hidden, batch_first=True, bidirectional=True)
            self.out = torch.nn.Linear(2 * hidden, 1)

        def forward(self, x: Any) -> Any:
            _, (h, _) = self.lstm(x)
            return self.out(torch.cat([h[0], h[1]], dim=1))[:, 0]

    return Network()


def _fit(
    torch: Any,
    learn: tuple[Floats, Array],
    stop: tuple[Floats, Array],
    seed: int,
    limit_s: float,
    progress: Progress | None,
) -> Any:
    """Trains by Adam on the log loss, with both kinds weighted equally, until the loss of the stopping nodes no longer
    falls."""
    until_s = time.monotonic() + limit_s
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _network(torch, learn[0].shape[2], HIDDEN)
        x, y = torch.from_numpy(learn[0]), torch.from_numpy(learn[1]).float()
        stop_x, stop_y = torch.from_numpy(stop[0]), torch.from_numpy(stop[1]).float()
        loss_of: Any = torch.nn.BCEWithLogitsLoss(pos_weight=(len(y) - y.sum()) / y.sum())
        stop_loss_of: Any = torch.nn.BCEWithLogitsLoss(pos_weight=(len(stop_y) - stop_y.sum()) / stop_y.sum())
        optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
        best, least, since = {k: v.clone() for k, v in net.state_dict().items()}, math.inf, 0
        for epoch in range(EPOCHS):
            net.train()
            for rows in torch.randperm(len(y)).split(BATCH):
                optimizer.zero_grad()
                loss_of(net(x[rows]), y[rows]).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                if time.monotonic() > until_s:
                    break
            with torch.no_grad():
                net.eval()
                stop_loss = float(stop_loss_of(net(stop_x), stop_y))
            if progress is not None:
                progress(epoch + 1, EPOCHS)
            if stop_loss < least - 1e-4:
                best, least, since = {k: v.clone() for k, v in net.state_dict().items()}, stop_loss, 0
            else:
                since += 1
            if since >= PATIENCE or time.monotonic() > until_s:
                break
        net.load_state_dict(best)
    return net


def _arrays(net: Any) -> Mapping[str, Floats]:
    """The arrays of the file. torch's LSTM has two biases, of which only the sum matters."""
    state = {name: each.detach().numpy().astype(np.float32) for name, each in net.state_dict().items()}
    found: dict[str, Floats] = {"out": state["out.weight"][0], "out_bias": state["out.bias"]}
    for way, suffix in (("ahead", ""), ("back", "_reverse")):
        found[f"input_{way}"] = state[f"lstm.weight_ih_l0{suffix}"]
        found[f"state_{way}"] = state[f"lstm.weight_hh_l0{suffix}"]
        found[f"bias_{way}"] = state[f"lstm.bias_ih_l0{suffix}"] + state[f"lstm.bias_hh_l0{suffix}"]
    return found
