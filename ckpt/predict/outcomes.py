"""The record of alarms and their outcomes: which alarms stand, which came true, and which sources are proven.

Pure; the coordinator of a job keeps it, since it sees all nodes fail. An alarm stands for WINDOW_S. An alarm that the
end of a job cuts short is neither true nor false.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.predict.scoring import WINDOW_S, Score, merge_scores
from ckpt.predict.watching import SOURCES

STANDING_SHOWN = 100


class Outcomes:
    """`scores`: by source. The caller names the nodes. Times are on a clock that never goes back."""

    def __init__(self) -> None:
        self.scores: dict[str, Score] = {}
        self._standing_since_s: dict[tuple[str, str], float] = {}  # by node and source: since when
        # By node: the watching sources, and the time up to which their watching is counted.
        self._watches_by_node: dict[str, tuple[frozenset[str], float]] = {}

    def inherit(self, scores: Mapping[str, Score]) -> None:
        """Merges the scores of earlier runs."""
        self.scores = merge_scores(self.scores, {name: each for name, each in scores.items() if name in SOURCES})

    def set_sources(self, node: str, sources: Iterable[str], now_s: float) -> None:
        """From now on these sources watch that node."""
        self._count_watch_time(node, now_s)
        self._watches_by_node[node] = frozenset(sources) & frozenset(SOURCES), now_s

    def record_alarm(self, node: str, source: str, now_s: float) -> bool:
        """Records an alarm. True if it is new: from a source that watches the node, and not standing already."""
        self.advance_time(now_s)
        known = source in self._watches_by_node.get(node, (frozenset(), 0.0))[0]
        if not known or (node, source) in self._standing_since_s:
            return False
        self._standing_since_s[node, source] = now_s
        return True

    def record_failure(self, node: str, now_s: float, needed_s: float) -> None:
        """Records that the node failed. `needed_s`: the time from an alarm until the state is replicated."""
        self.advance_time(now_s)
        self._count_watch_time(node, now_s)
        for source in self._watches_by_node.get(node, (frozenset[str](), 0.0))[0]:
            score, since_s = self.scores.get(source, Score()), self._standing_since_s.pop((node, source), None)
            if since_s is None:
                self.scores[source] = score.with_missed_failure()
            else:
                self.scores[source] = score.with_true_alarm(now_s - since_s, now_s - since_s >= needed_s)

    def advance_time(self, now_s: float) -> None:
        """Advances the time: alarms whose window has passed were false."""
        for node in self._watches_by_node:
            self._count_watch_time(node, now_s)
        for (node, source), since_s in list(self._standing_since_s.items()):
            if now_s >= since_s + WINDOW_S:  # exactly as in `next_expiry_s`
                del self._standing_since_s[node, source]
                self.scores[source] = self.scores.get(source, Score()).with_false_alarm()

    def stop_watching(self, now_s: float) -> None:
        """Ends all watching and withdraws all alarms."""
        self.advance_time(now_s)
        self._watches_by_node.clear()
        self._standing_since_s.clear()

    # -- what follows from the outcomes

    def standing_alarms(self) -> dict[tuple[str, str], float]:
        """The standing alarms, by node and source: since when."""
        return dict(self._standing_since_s)

    def next_expiry_s(self) -> float:
        """When the window of the oldest standing alarm passes; inf if none stands."""
        return min(self._standing_since_s.values(), default=math.inf) + WINDOW_S

    def proven_scores(self) -> dict[str, Score]:
        """The scores of the proven sources."""
        return {name: score for name, score in self.scores.items() if score.is_proven}

    def table(self, now_s: float) -> dict[str, Any]:
        """The sources and the standing alarms, for people and programs."""
        self.advance_time(now_s)
        return {
            "sources": {name: score_facts(self.scores.get(name, Score())) for name in self._shown_sources()},
            "standing": [
                {"node": node, "source": source, "for_s": now_s - since_s}
                for (node, source), since_s in sorted(self._standing_since_s.items())[:STANDING_SHOWN]
            ],
        }

    def numbers(self) -> dict[str, dict[str, float]]:
        """The numbers to keep, of each source with an outcome."""
        return {name: score.numbers() for name, score in self.scores.items() if score.seen}

    def _shown_sources(self) -> list[str]:
        watching = {source for sources, _ in self._watches_by_node.values() for source in sources}
        return [name for name in SOURCES if name in watching or name in self.scores]

    def _count_watch_time(self, node: str, now_s: float) -> None:
        """Counts the time during which the node's sources watched."""
        if node not in self._watches_by_node:
            return
        sources, until_s = self._watches_by_node[node]
        for source in sources:
            self.scores[source] = self.scores.get(source, Score()).with_watch_time(now_s - until_s)
        self._watches_by_node[node] = sources, max(until_s, now_s)


def score_facts(score: Score) -> dict[str, Any]:
    """The numbers of a source for `ckpt watch` and its JSON: the bounds, and the counts behind them."""
    return {
        "proven": score.is_proven,
        "precision": score.precision,
        "recall": score.recall,
        "lead_s": score.lead_s,
        "outcomes": score.seen,
        "true": score.true,
        "late": score.late,
        "false": score.false,
        "missed": score.missed,
        "chance": score.chance_precision,
    }
