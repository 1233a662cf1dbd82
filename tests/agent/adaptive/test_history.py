"""What a start takes over of what the one before it had learnt."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.adaptive.history import LearntHistory
from ckpt.agent.preemption.notice_relay import StandingNotice
from ckpt.agent.state.cost_model import CostModel
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.failures import Failure
from ckpt.types import Epoch
from tests.agent.preemption.test_preemption import DAY_S, Warned


@pytest.mark.parametrize(
    ("lead_s", "failure"), [(60.0, Failure.PREEMPTION), (2 * DAY_S, Failure.NODE), (None, Failure.NODE)]
)
def test_a_node_that_is_lost_was_preempted_where_a_notice_was_about_to_come_true(
    lead_s: float | None, failure: Failure
) -> None:
    group, now_s = Warned().group, time.monotonic()
    if lead_s is not None:
        group.preemption.add_notice(StandingNotice("slurm", "7", now_s + lead_s, now_s))
    learnt = CostModel(Adaptive(), nodes=2)
    learnt.has_replicas = True
    nodes = [SimpleNamespace(name=name) for name in ("a", "b")]
    epoch = Epoch.new(1)
    former = SimpleNamespace(
        epoch=epoch,
        cost_model=learnt,
        trainers_gone_s=now_s,
        context=SimpleNamespace(ended_cleanly=False),
        nodes=nodes,
        scheduler=group,
    )
    relearning = LearntHistory(cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None))
    learning = CostModel(Adaptive(), nodes=1)
    relearning.newest_job = cast(Any, former)
    relearning.fill_cost_model(learning, epoch, None, None, cast(Any, nodes[:1]))
    seen = {kind for kind in Failure if learning.measurements.rate_of(kind).failure_count}
    assert seen == {failure}
