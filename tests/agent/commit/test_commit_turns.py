"""When the nodes that are left of a job begin to commit what is in their memory."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ckpt.agent.commit.commit_turns import DOUBLINGS_MAX, TURN_PAUSE_S, TURNS, CommitTurns


def test_each_node_has_a_turn_while_the_memory_is_kept() -> None:
    for linger_s in (1.0, 300.0, 1e6):
        dues = [CommitTurns(linger_s).due_s(turn, 100.0) for turn in range(10)]
        turns = [due for due in dues if due is not None]
        assert turns == sorted(dues, key=lambda due: due or 0.0)
        assert len(set(turns)) == TURNS
        assert 100.0 <= turns[0] <= 100.0 + TURN_PAUSE_S
        assert turns[-1] < 100.0 + linger_s


def test_where_no_memory_is_kept_nothing_is_begun() -> None:
    assert CommitTurns(0.0).due_s(0, 100.0) is None


@pytest.mark.parametrize("takes_s", [0.1, 5.0, 120.0, 1e4])
def test_an_attempt_that_always_fails_is_made_again_ever_later_and_not_once_the_memory_goes(takes_s: float) -> None:
    turns, now_s, begun = CommitTurns(300.0), 100.0, list[float]()
    while (due_s := turns.due_s(0, now_s)) is not None:
        begun.append(due_s)
        now_s = due_s + takes_s
        turns.record_attempt(now_s)
    assert 1 <= len(begun) <= 5
    assert begun[-1] < 400.0
    pauses = [after - before - takes_s for before, after in itertools.pairwise(begun)]
    assert pauses == sorted(pauses)
    assert all(pause >= TURN_PAUSE_S - 1e-6 for pause in pauses)  # so the next node has its turn


@pytest.mark.parametrize("seed", range(20))
def test_two_that_never_succeed_do_not_keep_each_other(seed: int) -> None:
    """Each waits for the other's outcome, and its memory stays meanwhile."""
    chance = random.Random(seed)
    both, now_s = [CommitTurns(300.0), CommitTurns(300.0)], 0.0
    while due := [(at, turn) for turn, each in enumerate(both) if (at := each.due_s(turn, now_s)) is not None]:
        at_s, turn = min(due)
        now_s = max(now_s, at_s) + chance.uniform(0.0, 200.0)
        both[turn].record_attempt(now_s)
        assert now_s < 300.0 + 200.0


def test_what_is_settled_is_left_alone_until_somebody_was_there_again() -> None:
    turns = CommitTurns(300.0)
    assert turns.due_s(0, 0.0) == TURN_PAUSE_S
    turns.is_settled = True
    assert turns.due_s(0, TURN_PAUSE_S) is None
    turns.restart_turns()
    assert turns.due_s(0, 1000.0) == 1000.0 + TURN_PAUSE_S


def test_what_nobody_came_for_counts_from_when_the_last_one_went() -> None:
    turns = CommitTurns(300.0)
    assert turns.due_s(1, 0.0) == 2 * TURN_PAUSE_S
    turns.record_attempt(200.0)
    turns.restart_turns()
    assert turns.due_s(1, 250.0) == 250.0 + 2 * TURN_PAUSE_S


def test_a_memory_only_node_begins_when_it_was_told_to_and_tries_ever_more_rarely_and_for_ever() -> None:
    turns, now_s, pauses = CommitTurns(math.inf, 10.0), 110.0, list[float]()
    assert turns.due_s(0, 100.0) == now_s
    for _ in range(40):
        turns.record_attempt(now_s)
        due_s = turns.due_s(0, now_s)
        assert due_s is not None
        pauses.append(due_s - now_s)
        now_s = due_s
    assert pauses[:3] == [TURN_PAUSE_S, 2 * TURN_PAUSE_S, 4 * TURN_PAUSE_S]
    assert pauses[-1] == TURN_PAUSE_S * 2**DOUBLINGS_MAX
