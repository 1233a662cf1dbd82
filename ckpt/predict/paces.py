"""Is one node slower than its peers? Its step time over the median of theirs, from which steps they are in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

PEERS_MIN = 2  # of fewer the median says nothing


class Paces:
    """Of one job's nodes. In a job in which all wait for each other at each step the ratio is 1 for all of them."""

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
        found = {}
        for node, own_s in taken_s.items():
            peers = [each for name, each in taken_s.items() if name != node]
            if len(peers) >= PEERS_MIN:
                found[node] = own_s / statistics.median(peers)
        return found
