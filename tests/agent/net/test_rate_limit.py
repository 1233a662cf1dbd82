"""A bandwidth limit holds over any stretch of time, however many share it; by a clock that the test moves."""

from __future__ import annotations

import random

import pytest

from ckpt.agent.net.rate_limit import BURST_S, PIECE_BYTES_MIN, SLICE_S, Bucket
from ckpt.agent.net.tcp_sender import SERVED_MAX, STALL_S
from ckpt.clock import ManualClock
from ckpt.ipc.addresses import PIECE_BYTES
from ckpt.policy.save_options import PEER_BANDWIDTH_MIN

RATE = 1_000_000.0


def test_bytes_go_at_the_rate_and_never_faster_over_any_stretch(seed: int) -> None:
    clock, random_ = ManualClock(), random.Random(seed)
    bucket = Bucket(RATE, clock)
    moved: list[tuple[float, int]] = []
    for _ in range(300):
        size = random_.randrange(1, 40_000)
        bucket.wait(size, lambda: False)
        moved.append((clock.now_s(), size))
        if random_.random() < 0.1:
            clock.sleep_s(random_.random())  # something else took that long
    for first in range(0, len(moved), 7):
        total = 0
        for at_s, size in moved[first:]:
            assert total <= RATE * (at_s - moved[first][0] + BURST_S) + 40_000
            total += size


def test_a_busy_flow_gets_all_of_the_rate() -> None:
    clock = ManualClock()
    bucket = Bucket(RATE, clock)
    for _ in range(1000):
        bucket.wait(10_000, lambda: False)
    assert clock.now_s() == pytest.approx(10.0, abs=2 * BURST_S)


def test_no_limit_never_waits_and_a_limit_can_be_set_later() -> None:
    clock = ManualClock()
    bucket = Bucket(None, clock)
    bucket.wait(1 << 40, lambda: False)
    assert clock.now_s() == 0
    assert bucket.piece_bytes == PIECE_BYTES
    bucket.set_rate(RATE)
    assert bucket.piece_bytes == 20_000
    bucket.reserve_bytes(int(RATE))
    assert bucket.reserve_bytes(1) > 0.9
    bucket.set_rate(None)
    assert bucket.reserve_bytes(1) == 0
    bucket.set_rate(1.0)
    assert bucket.piece_bytes == PIECE_BYTES_MIN


def test_who_waits_hears_that_it_is_to_stop() -> None:
    clock = ManualClock()
    bucket = Bucket(1.0, clock)
    bucket.reserve_bytes(1000)
    bucket.wait(1000, lambda: clock.now_s() > 0)
    assert clock.now_s() <= 2 * SLICE_S


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Bucket(rate)


def test_where_all_connections_share_the_least_bandwidth_that_is_taken_each_moves_before_it_counts_as_stuck() -> None:
    assert SERVED_MAX * PIECE_BYTES_MIN / PEER_BANDWIDTH_MIN < 0.6 * STALL_S
