"""The record of alarms and their outcomes: which alarms stand, which came true, and which sources are proven.

Pure; the coordinator of a job keeps it, since it sees all nodes fail. An alarm stands for WINDOW_S. An alarm that the
end of a job cuts short is neither true nor false.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.predict.scoring import WINDOW_S, Score, merged
from ckpt.predict.watching import SOURCES

STANDING_SHOWN = 100


class Outcomes:
    """`scores`: by source. The caller names the nodes. Times are on a clock that never goes back."""

    def __init__(self) -> None:
        self.scores: dict[str, Score] = {}
        self._standing: dict[tuple[str, str], float] = {}  # by node and source: since when
        # By node: the watching sources, and the time up to which their watching is counted.
        self._watching: dict[str, tuple[frozenset[str], float]] = {}

    def inherit(self, scores: Mapping[str, Score]) -> None:
        """Merges the scores of earlier runs."""
        self.scores = merged(self.scores, {name: each for name, each in scores.items() if name in SOURCES})

    def watches(self, node: str, sources: Iterable[str], now_s: float) -> None:
        """From now on these sources watch that node."""
        self._watch(node, now_s)
        self._watching[node] = frozenset(sources) & frozenset(SOURCES), now_s

    def alarmed(self, node: str, source: str, now_s: float) -> bool:
        """Records an alarm. True if it is new: from a source that watches the node, and not standing already."""
        self.passed(now_s)
        known = source in self._watching.get(node, (frozenset(), 0.0))[0]
        if not known or (node, source) in self._standing:
            return False
        self._standing[node, source] = now_s
        return True

    def failed(self, node: str, now_s: float, needed_s: float) -> None:
        """Records that the node failed. `needed_s`: the time from an alarm until the state is replicated."""
        self.passed(now_s)
        self._watch(node, now_s)
        for source in self._watching.get(node, (frozenset[str](), 0.0))[0]:
            score, since_s = self.scores.get(source, Score()), self._standing.pop((node, source), None)
            if since_s is None:
                self.scores[source] = score.was_silent()
            else:
                self.scores[source] = score.came(now_s - since_s, now_s - since_s >= needed_s)

    def passed(self, now_s: float) -> None:
        """Advances the time: alarms whose window has passed were false."""
        for node in self._watching:
            self._watch(node, now_s)
        for (node, source), since_s in list(self._standing.items()):
            if now_s >= since_s + WINDOW_S:  # exactly as in `next_s`
                del self._standing[node, source]
                self.scores[source] = self.scores.get(source, Score()).came_to_nothing()

    def stopped(self, now_s: float) -> None:
        """Ends all watching and withdraws all alarms."""
        self.passed(now_s)
        self._watching.clear()
        self._standing.clear()

    # -- what follows from the outcomes

    def standing(self) -> dict[tuple[str, str], float]:
        """The standing alarms, by node and source: since when."""
        return dict(self._standing)

    def next_s(self) -> float:
        """When the window of the oldest standing alarm passes; inf if none stands."""
        return min(self._standing.values(), default=math.inf) + WINDOW_S

    def proven(self) -> dict[str, Score]:
        """The scores of the proven sources."""
        return {name: score for name, score in self.scores.items() if score.proven}

    def risks(self, nodes: Iterable[str]) -> dict[str, float]:
        """The probability that each of these nodes fails soon, by proven sources; {} if none of them has an alarm for
        these nodes."""
        proven = self.proven()
        found = {
            node: max(
                (score.precision for source, score in proven.items() if (node, source) in self._standing), default=None
            )
            for node in nodes
        }
        usual = min((score.chance for score in proven.values()), default=0.0)
        if all(each is None for each in found.values()):
            return {}
        return {node: usual if each is None else each for node, each in found.items()}

    def table(self, now_s: float) -> dict[str, Any]:
        """The sources and the standing alarms, for people and programs."""
        self.passed(now_s)
        return {
            "sources": {name: facts(self.scores.get(name, Score())) for name in self._named()},
            "standing": [
                {"node": node, "source": source, "for_s": now_s - since_s}
                for (node, source), since_s in sorted(self._standing.items())[:STANDING_SHOWN]
            ],
        }

    def numbers(self) -> dict[str, dict[str, float]]:
        """The numbers to keep, of each source with an outcome."""
        return {name: score.numbers() for name, score in self.scores.items() if score.seen}

    def _named(self) -> list[str]:
        watching = {source for sources, _ in self._watching.values() for source in sources}
        return [name for name in SOURCES if name in watching or name in self.scores]

    def _watch(self, node: str, now_s: float) -> None:
        """Counts the time during which the node's sources watched."""
        if node not in self._watching:
            return
        sources, until_s = self._watching[node]
        for source in sources:
            self.scores[source] = self.scores.get(source, Score()).watched(now_s - until_s)
        self._watching[node] = sources, max(until_s, now_s)


def facts(score: Score) -> dict[str, Any]:
    """The numbers of a source for `ckpt watch` and its JSON: the bounds, and the counts behind them."""
    return {
        "proven": score.proven,
        "precision": score.precision,
        "recall": score.recall,
        "lead_s": score.lead_s,
        "outcomes": score.seen,
        "true": score.true,
        "late": score.late,
        "false": score.false,
        "missed": score.missed,
        "chance": score.chance,
    }
