"""A checkpoint in memory, put together of what each rank staged."""

from __future__ import annotations

from dataclasses import replace

from ckpt.agent.snapshots.memory_checkpoint import StagedReader, assemble_checkpoint
from tests.agent.nodes.staged import identity, staged


def test_of_metrics_that_ranks_give_differently_those_of_the_lowest_rank_count() -> None:
    which = identity(5)
    arenas = staged(which, 2)
    try:
        parts = StagedReader().read_sealed(which, 2, arenas)
        given = [{"loss": 0.5, "first": 1.0}, {"loss": 0.25, "second": 2.0}]
        parts = [replace(part, metrics=metrics) for part, metrics in zip(parts, given, strict=True)]
        for order in (parts, parts[::-1]):
            made = assemble_checkpoint(which, order, arenas)
            assert made.metrics == {"loss": 0.5, "first": 1.0, "second": 2.0}
            del made
    finally:
        for arena in arenas.values():
            arena.close()
