"""A new agent finds complete snapshots in the arenas of the one before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.job.job import Job
from ckpt.types import Version
from tests.agent.nodes.staged import EPOCH, close_arenas, identity, staged


@pytest.mark.parametrize(("replicated", "order"), [(None, [5, 4, 3]), (5, [5, 4, 3]), (4, [4, 5, 3]), (3, [3, 5, 4])])
def test_the_slot_of_the_replicated_one_is_needed_last_and_that_of_the_oldest_first(
    replicated: int | None, order: list[int]
) -> None:
    """If it went first, peers would keep a checkpoint without its primary copies."""
    said: list[dict[int, Version]] = []
    arenas = {slot: staged(identity(step), 2) for slot, step in enumerate((4, 5, 3))}
    for by_rank in arenas.values():
        for arena in by_rank.values():
            if arena.header().identity.version.step == replicated:
                arena.mark_replicated()
    scheduler = SimpleNamespace(
        slots=SimpleNamespace(is_taking_over=True),
        arenas=SimpleNamespace(record_arenas=lambda slot, sizes: None),
        end_takeover=lambda now_s, inherited: said.append(inherited),
    )
    job = SimpleNamespace(
        scheduler=scheduler,
        context=SimpleNamespace(world=2),
        epoch=EPOCH,
        nodes=("a", "b"),
        local_share=SimpleNamespace(arenas=arenas),
        replication=SimpleNamespace(needs_rereplication=False),
    )
    Job.end_takeover(cast(Any, job))
    assert [version.step for version in said[0].values()] == order
    for by_rank in arenas.values():
        close_arenas(by_rank.values())
