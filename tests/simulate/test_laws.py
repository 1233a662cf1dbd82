"""What holds for any scenario and trace: no second is lost or counted twice, jumps change nothing, a seed decides."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.placement.placement import Parity, Replicas
from ckpt.policy import Adaptive, Every
from ckpt.simulate.outcome import RunOutcome
from ckpt.simulate.scenario import LocalLevel, NoticeModel, PeerLevel, Rejoin, Scenario, StoreLevel
from ckpt.simulate.trace import Trace, TraceEvent
from tests.simulate.made import ADD, CRASH, REMOVE, STATE, run

SPAN_S = 8_000.0


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to six nodes of two pools that come, go and crash; some at one instant, some not at all."""
    events: list[TraceEvent] = []
    for i in range(draw(st.integers(0, 6))):
        times = st.sampled_from([0.0, 100.0, 3000.0]) | st.floats(0, SPAN_S * 1.1)
        began_s = draw(st.just(0.0) | times)
        node, pool = f"n{i}", f"pool {i % 2}"
        events.append(TraceEvent(began_s, ADD, node, pool))
        gone_s = began_s + draw(st.floats(1, SPAN_S)) if draw(st.booleans()) else math.inf
        if gone_s < math.inf:
            events.append(TraceEvent(gone_s, REMOVE, node, pool))
        crashes = draw(st.lists(st.floats(began_s, SPAN_S * 1.1), max_size=3))
        events += [TraceEvent(at_s, CRASH, node, pool) for at_s in crashes if began_s < at_s < gone_s]
    order = {ADD: 0, CRASH: 1, REMOVE: 2}
    return Trace("drawn", SPAN_S, tuple(sorted(events, key=lambda each: (each.time_s, order[each.kind]))), 2.5)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    nodes = draw(st.integers(1, 4))
    seconds = st.sampled_from([0.0, 0.5, 7.0, 90.0])
    local = draw(
        st.builds(
            LocalLevel,
            stall_s=seconds,
            deferred=st.booleans(),
            restore_bytes_s=st.just(STATE / 9),
            survives_crash=st.booleans(),
        )
        | st.none()
    )
    peers = st.builds(PeerLevel, st.sampled_from([Replicas(1), Replicas(2), Parity(2, 1)]), st.floats(1e6, 1e9))
    store = st.builds(
        StoreLevel,
        write_bytes_s=st.floats(1e6, 1e9),
        slowdown=st.sampled_from([0.0, 0.03, 0.5]),
        stall_s=seconds,
        synchronous=st.just(True) if local is None else st.booleans(),
        kept=st.integers(1, 3),
    )
    chosen = draw(store | st.none())
    every = st.builds(Every, steps=st.integers(10, 300)) | st.builds(Every, seconds=st.floats(20, 3000))
    is_adaptive = local is not None and not (chosen and chosen.synchronous) and draw(st.booleans())
    return Scenario(
        nodes=nodes,
        nodes_min=draw(st.integers(1, nodes)),
        step_s=draw(st.sampled_from([0.3, 1.0, 17.3])),
        scaling=draw(st.sampled_from([0.0, 0.5, 1.0])),
        state_bytes=STATE,
        work_steps=draw(st.none() | st.integers(1, 20_000)),
        detect_s=draw(seconds),
        gang_start_s=draw(seconds),
        rejoin=draw(st.sampled_from(Rejoin)),
        local=local,
        peers=draw(peers | st.none()) if local is not None else None,
        store=chosen,
        policy=Adaptive() if is_adaptive else draw(every),
        commit_every=1 if is_adaptive else draw(st.integers(1, 4)),
        notices=draw(
            st.builds(
                NoticeModel,
                recall=st.sampled_from([0.0, 0.5, 1.0]),
                exponential=st.booleans(),
                false_node_hour=st.sampled_from([0.0, 1.0]),
                act_above_s=seconds,
                certain=st.booleans(),
            )
        ),
    )


def check(outcome: RunOutcome, made: Scenario, on: Trace) -> None:
    parts = (outcome.useful_s, outcome.lost_s, outcome.stalled_s, outcome.recovering_s, outcome.waiting_s)
    assert math.fsum(parts) == pytest.approx(outcome.wall_s, rel=1e-9, abs=1e-6)
    assert all(each >= -1e-6 for each in parts)
    assert outcome.wall_s == on.span_s or (made.work_steps is not None and outcome.wall_s < on.span_s)
    assert outcome.finished == (made.work_steps in (None, outcome.useful_steps))
    # Whole steps took that long, at full speed at least; the one under way is not counted.
    assert outcome.useful_steps * made.step_s <= outcome.useful_s + 1e-6
    assert sum(outcome.lost_steps_by_level.values()) * made.step_s <= outcome.lost_s + 1e-6
    assert sum(outcome.recoveries_by_level.values()) == len(outcome.recoveries)
    times = [each.time_s for each in outcome.recoveries]
    assert times == sorted(times)
    assert all(0 <= each.waited_s <= each.seconds + 1e-9 and each.lost_steps >= 0 for each in outcome.recoveries)
    assert outcome.node_hours * 3600 <= made.nodes * outcome.wall_s + 1e-6


@settings(max_examples=200, deadline=None)
@given(scenarios(), traces())
def test_every_second_is_counted_once(made, on):
    check(run(made, on), made, on)


@settings(max_examples=200, deadline=None)
@given(scenarios(), traces(), st.integers(0, 3))
def test_skipping_whole_cycles_changes_nothing(made, on, seed):
    fast, slow = run(made, on, seed), run(made, on, seed, jumps=False)
    for each in fields(RunOutcome):
        one, other = getattr(fast, each.name), getattr(slow, each.name)
        if each.name == "recoveries":
            assert [(e.level, e.cause, e.lost_steps) for e in one] == [(e.level, e.cause, e.lost_steps) for e in other]
        else:
            assert one == pytest.approx(other, rel=1e-9, abs=1e-5), each.name
