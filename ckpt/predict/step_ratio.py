"""The step ratio: a node's step time over the median of its peers, to find a slow node.

If all nodes wait for each other at each step (a collective, as in nearly every job), each takes as long as the slowest.
The ratio is then 1 and hides the slow node, since a computing node and a waiting one enter their steps together. In
that case there is no ratio at all, instead of noise around 1. Only nodes that drift apart count (local steps with rare
synchronisation, parameter servers).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

PEERS_MIN = 2  # with fewer peers the median says nothing
STALE_S = 2.0  # the greatest age of other nodes' steps
# How far nodes that keep step are apart at most, beside staleness.
APART_STEPS = 2


class StepRatios:
    """The step ratios of one job's nodes."""

    def __init__(self) -> None:
        self._step_starts: dict[str, tuple[float, int]] = {}  # by node: when its current step was first seen

    def add_steps(self, now_s: float, steps: Mapping[str, int]) -> dict[str, float]:
        """The ratio of each node that advanced since the previous call, if enough others did. `steps`: by node, the
        current step of its slowest rank."""
        taken_s: dict[str, float] = {}
        for node, step in steps.items():
            since_s, since = self._step_starts.get(node, (now_s, step))
            if step > since and now_s > since_s:
                taken_s[node] = (now_s - since_s) / (step - since)
            if step != since or node not in self._step_starts:
                self._step_starts[node] = now_s, step
        found: dict[str, float] = {}
        quickest_s = min(taken_s.values(), default=math.inf)
        if max(steps.values(), default=0) - min(steps.values(), default=0) <= APART_STEPS + STALE_S / quickest_s:
            return found
        for node, own_s in taken_s.items():
            peers = [each for name, each in taken_s.items() if name != node]
            if len(peers) >= PEERS_MIN:
                found[node] = own_s / statistics.median(peers)
        return found
