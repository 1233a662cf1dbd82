"""A checkpoint in memory, put together of what each rank staged."""

from __future__ import annotations

from dataclasses import replace

from ckpt.agent.snapshots.memory_checkpoint import StagedReader, assemble_checkpoint
from tests.agent.nodes.staged import MakeStaged, identity


def test_of_metrics_that_ranks_give_differently_those_of_the_lowest_rank_count(make_staged: MakeStaged) -> None:
    arenas = make_staged(identity(5), 2)
    parts = StagedReader().read_sealed(identity(5), 2, arenas)
    given = [{"loss": 0.5, "first": 1.0}, {"loss": 0.25, "second": 2.0}]
    parts = [replace(part, metrics=metrics) for part, metrics in zip(parts, given, strict=True)]
    for order in (parts, parts[::-1]):
        made = assemble_checkpoint(identity(5), order, arenas)
        assert made.metrics == {"loss": 0.5, "first": 1.0, "second": 2.0}
