"""Epochs in groups of batches: where the last group is short, the data ends before the step that trains on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

import ckpt
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own

GROUP, EPOCHS = 2, 3


class Killed(Exception):
    pass


def loader(batches: int, distributed: bool) -> StatefulDataLoader:
    samples = list(range(2 * batches))
    own = torch.Generator().manual_seed(3)
    sampler = StatefulDistributedSampler(samples, 1, 0) if distributed else RandomSampler(samples, generator=own)
    return StatefulDataLoader(samples, batch_size=2, sampler=sampler, generator=torch.Generator())


def one_epoch(batches: StatefulDataLoader, state: dict[str, Any]) -> Iterator[Any]:
    """As in the guide."""
    yield from batches
    state["epoch"] += 1


def start(path: Path, batches: StatefulDataLoader, late: bool, kill_at: int) -> tuple[list[list[int]], Seen]:
    """The samples of each group; and what was said. `late`: the epoch is counted behind the loop over the groups."""
    trained, seen = [], Seen()
    state = {"loader": batches, "epoch": 0}
    try:
        with ckpt.Checkpointer(path, state, sinks=(seen,)) as ck:
            while ck.state["epoch"] < EPOCHS:
                if isinstance(batches.sampler, StatefulDistributedSampler):
                    batches.sampler.set_epoch(ck.state["epoch"])
                drawn = iter(batches) if late else one_epoch(batches, ck.state)
                while group := [batch.tolist() for batch in islice(drawn, GROUP)]:
                    trained.append(group)
                    ck.step()
                    if ck.restored.step + len(trained) == kill_at:
                        ck.save().wait("store")
                        raise Killed
                ck.state["epoch"] += late
    except Killed:
        pass
    wait_agent_gone(path)
    return trained, seen


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("batches", [4, 5])
@pytest.mark.parametrize("distributed", [False, True])
def test_an_epoch_with_a_short_last_group_is_counted_where_its_data_ends(
    distributed: bool, batches: int, late: bool, tmp_path: Path
) -> None:
    """Or it is made twice by a restart behind that group, and named."""
    groups = -(-batches // GROUP)
    undisturbed, seen = start(tmp_path / "undisturbed", loader(batches, distributed), late, 0)
    assert len(undisturbed) == EPOCHS * groups
    is_repeated = late and batches % GROUP != 0
    assert [event.data for event in seen.named("epoch.repeated")] == [{"counter": "epoch"}] * is_repeated
    before, _ = start(tmp_path / "killed", loader(batches, distributed), late, groups)
    after, _ = start(tmp_path / "killed", loader(batches, distributed), late, 0)
    if is_repeated:
        assert len(before + after) == len(undisturbed) + groups
    else:
        assert before + after == undisturbed
