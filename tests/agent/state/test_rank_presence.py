"""What is asked of all ranks at once is what they are now, and is not gone through again until one of them changes."""

from __future__ import annotations

import random

from ckpt.agent.state.rank_presence import Presence, RankState, RankStates


def check(members: RankStates) -> None:
    seen, each = members.summary, list(members)
    away = [m for m in each if m.presence is not Presence.HERE]
    assert list(seen.disconnected) == [m for m in each if m.disconnected_s is not None]
    assert list(seen.waiting_to_leave) == [m for m in each if m.leave_request is not None]
    assert seen.all_joined == all(m.has_joined for m in each)
    assert seen.any_gone == bool(away)
    assert seen.any_left == any(m.presence is Presence.LEFT and not m.is_away for m in each)
    assert seen.any_dead == any(m.presence is Presence.DEAD for m in each)
    assert seen.first_failed is next((m for m in each if m.presence is Presence.DEAD or m.has_failed), None)
    assert seen.all_gone == (bool(away) and all(m in away for m in each if m.has_joined))


def change(member: RankState, rng: random.Random) -> None:
    match rng.randrange(5):
        case 0:
            member.has_joined = True
        case 1:
            member.disconnected_s = rng.choice((None, 1.5))
        case 2:
            member.leave_request = rng.choice((None, "a request"))
        case 3:
            member.presence = rng.choice(list(Presence))
        case _:
            member.has_failed = rng.random() < 0.5


def test_what_is_seen_of_all_is_what_each_is_after_any_change(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        members = RankStates(rng.randrange(1, 6))
        check(members)
        for _ in range(20):
            change(members[rng.randrange(len(members))], rng)
            check(members)
