"""Is one node slower than its peers? Its step time over the median of theirs, from which steps they are in.

Where all wait for each other at each step (a collective, as in nearly every job) each takes as long as the slowest, so
the ratio is 1 and proves nothing: who is slow is seen by nobody, since a node that computes and one that waits for it
enter their steps together. Then nothing is said at all, instead of noise around 1: only nodes that drift apart count
(local steps with rare synchronisation, parameter servers).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

PEERS_MIN = 2  # of fewer the median says nothing
STALE_S = 2.0  # what is known of other nodes' steps is older by up to this
APART_STEPS = 2  # nodes that keep step are so far apart at most, beside that


class StepRatios:
    """Of one job's nodes."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, int]] = {}  # by node: when it was first seen in that step

    def observed(self, now_s: float, steps: Mapping[str, int]) -> dict[str, float]:
        """By node, where it has come further since the look before, as enough others have. `steps`: that each is in,
        its hindmost rank's."""
        taken_s: dict[str, float] = {}
        for node, step in steps.items():
            since_s, since = self._since.get(node, (now_s, step))
            if step > since and now_s > since_s:
                taken_s[node] = (now_s - since_s) / (step - since)
            if step != since or node not in self._since:
                self._since[node] = now_s, step
        found: dict[str, float] = {}
        quickest_s = min(taken_s.values(), default=math.inf)
        if max(steps.values(), default=0) - min(steps.values(), default=0) <= APART_STEPS + STALE_S / quickest_s:
            return found
        for node, own_s in taken_s.items():
            peers = [each for name, each in taken_s.items() if name != node]
            if len(peers) >= PEERS_MIN:
                found[node] = own_s / statistics.median(peers)
        return found
