"""From readings to alarms: what is unusual raises one, until the node fails."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ckpt.predict.scoring import WINDOW_S
from ckpt.predict.watching import DEVIATION_MIN, FAMILIES, PERIOD_S, SignalWatch, _min_deviation


@dataclass
class Node:
    """Signals of a node that is well, on a clock of its own."""

    seed: int
    watch: SignalWatch
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, readings: int, **more: float) -> list[tuple[str, float]]:
        """(source, when) of the alarms; signals named with __ for the dot are that much higher."""
        found = []
        for _ in range(readings):
            self.now_s += PERIOD_S
            values = {
                "memory.used": 0.5 + self.random.gauss(0, 0.02),
                "io.some": abs(self.random.gauss(0, 0.02)),
                "net.drops": 0.0,
                "ecc.uncorrected": 0.0,
            }
            for name, by in more.items():
                values[name.replace("__", ".")] += by
            found += [(alarm.source, alarm.at_s) for alarm in self.watch.add_reading(self.now_s, values)]
        return found


def test_a_node_that_is_well_raises_no_alarm_for_a_day(seed: int) -> None:
    assert Node(seed, SignalWatch()).run(17_280) == []


def test_what_is_unusual_raises_one_alarm_of_its_family_and_a_further_one_when_the_window_has_passed(seed: int) -> None:
    node = Node(seed, SignalWatch())
    node.run(500)
    first = node.run(30, memory__used=0.1)
    assert [source for source, _ in first] == ["memory"]
    again = node.run(int(WINDOW_S / PERIOD_S), memory__used=0.1)
    assert [source for source, _ in again] == ["memory"]
    assert again[0][1] - first[0][1] >= WINDOW_S


def test_a_single_grave_event_is_an_alarm_and_a_single_other_one_is_not(seed: int) -> None:
    node = Node(seed, SignalWatch())
    node.run(500)
    assert [source for source, _ in node.run(1, ecc__uncorrected=0.2)] == ["ecc"]
    assert node.run(1, net__drops=50.0) == []


def test_the_sources_are_those_of_which_there_is_a_signal(seed: int) -> None:
    node = Node(seed, SignalWatch())
    assert node.watch.sources == ()
    node.run(1)
    assert node.watch.sources == ("memory", "io", "ecc", "net")
    node.watch.add_reading(1e6, {"unknown.thing": 1.0, "disk.errors": 1.0})
    assert node.watch.sources == ("memory", "io", "ecc", "disk", "net")
    assert {name.partition(".")[0] for name in DEVIATION_MIN} == set(FAMILIES)
    assert all(_min_deviation(f"{family}.x") > 0 for family in FAMILIES)


def test_after_a_failure_the_detectors_start_anew(seed: int) -> None:
    node = Node(seed, SignalWatch())
    node.run(500)
    assert node.run(30, memory__used=0.1)
    node.watch.record_failure()
    assert node.run(30) == []
    assert [source for source, _ in node.run(30, memory__used=0.1)] == ["memory"], "without the rest of a window"


def test_hostile_readings_are_survived() -> None:
    watch = SignalWatch()
    for value in (float("nan"), float("inf"), -1e300, 1e300):
        for n in range(100):
            watch.add_reading(n, {f"memory.{i}": value for i in range(100)})
    assert len(watch._detectors) <= 64
