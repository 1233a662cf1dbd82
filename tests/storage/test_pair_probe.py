"""Two machines that measure how late each one's objects show to the other."""

from __future__ import annotations

import re
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import StorageError
from ckpt.storage import open as open_store
from ckpt.storage.pair_probe import FOLDER, LATE_S, PAUSE_S, ROUNDS, PairProbe, probe_pair


class LateStore:
    """Names with the time when they were put. A machine lists its own at once, and the other's `late_s` later."""

    def __init__(self) -> None:
        self.put: dict[str, tuple[str, float]] = {}

    def names(self, me: str, late_s: float, now_s: float) -> set[str]:
        return {name for name, (by, at_s) in self.put.items() if by == me or at_s + late_s <= now_s}


@given(st.floats(0, 60), st.floats(0, 60), st.floats(0, 20), st.booleans())
def test_both_machines_measure_both_directions_and_end(a_s: float, b_s: float, gap_s: float, has_rubbish: bool) -> None:
    store, late_s = LateStore(), {"a": a_s, "b": b_s}
    if has_rubbish:
        store.put = dict.fromkeys(("old.1", "old.done", "old.1.older"), ("old", -1e3))
    begins_s, machines, now_s = {"a": 0.0, "b": gap_s}, {}, 0.0
    while len(machines) < 2 or not all(each.is_finished for each in machines.values()):
        assert now_s < 4 * (ROUNDS + 2) * (a_s + b_s + 1) + gap_s, "they do not end"
        for me, since_s in begins_s.items():
            if now_s < since_s:
                continue
            names = store.names(me, late_s[me], now_s)
            machine = machines.setdefault(me, PairProbe(me, names))
            if not machine.is_finished:
                store.put.update(dict.fromkeys(machine.turn(names, now_s), (me, now_s)))
        now_s += PAUSE_S
    for (me, machine), other in zip(machines.items(), "ba", strict=True):
        pings = [name for name in store.put if re.fullmatch(rf"{me}\.\d+", name)]
        answered_s = [store.put[f"{ping}.{other}"][1] for ping in pings]
        assert max(answered_s) <= store.put[f"{me}.done"][1], "an answer may come after the pings are deleted"
        assert all(a_s + b_s <= each <= a_s + b_s + 3 * PAUSE_S for each in machine.round_trips_s), me
        assert machine.round_trips_s[-1] > LATE_S or len(machine.round_trips_s) == ROUNDS


def test_two_machines_at_one_folder_leave_nothing_but_a_last_word(tmp_path: Path) -> None:
    results: list[list[float]] = []

    def measure() -> None:
        with closing(open_store(str(tmp_path))) as store:
            results.append(probe_pair(store, 30.0))

    threads = [threading.Thread(target=measure) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert all(len(each) == ROUNDS and max(each) < LATE_S for each in results)
    assert [path for path in (tmp_path / FOLDER).rglob("*") if not path.name.endswith(".done")] == []


def test_a_machine_that_nobody_answers_says_so(tmp_path: Path) -> None:
    with closing(open_store(str(tmp_path))) as store, pytest.raises(StorageError, match="no other machine answered"):
        probe_pair(store, 0.6)
    assert list((tmp_path / FOLDER).rglob("*")) == []
