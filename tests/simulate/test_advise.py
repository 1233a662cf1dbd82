"""Advice from a run's own measurements."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt as product
from ckpt.cli.exits import Exit
from ckpt.errors import UsageError
from ckpt.placement.placement import Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.history import remember
from ckpt.policy.known import PRIORS_ONLY, Measurements
from ckpt.policy.save_options import Every
from ckpt.simulate.advise import RunFacts, advise, facts_of, make_scenario, present_setting
from ckpt.types import Epoch
from tests.cli.stores import arrays, run_ckpt, save

HOUR_S = 3600.0
# Every 10 minutes, with a replica, on 16 nodes.
COSTS = {
    "nodes": 16,
    "stall_s": 0.05,
    "step_s": 1.0,
    "step_beside_commit_s": 1.02,
    "commit_s": 20.0,
    "commit_bytes": 10e9,
    "replication_s": 2.0,
    "local_recovery_s": 60.0,
    "every_s": 600.0,
    "replicas": 1,
}


def a_run(**changes: Any) -> RunFacts:
    costs = {name: value for name, value in {**COSTS, **changes}.items() if value is not None}
    return facts_of({"costs": costs, "learnt": remember(lost_often(PRIORS_ONLY))}, 20 * 10**9, 10 * 10**9)


def lost_often(known: Measurements) -> Measurements:
    """A node every two hours of the job, so every 32 of its own."""
    from ckpt.policy.failures import Failure

    for _ in range(12):
        known = known.with_uptime(2 * HOUR_S, 16).with_failure(Failure.NODE)
    return known


def test_a_job_that_saves_seldom_is_told_to_let_ckpt_choose() -> None:
    now, best, *others = advise(a_run(), hours=300)
    assert now.setting.change == ""
    assert now.saved_h == 0
    assert "ckpt.Adaptive()" in best.setting.change
    # Every 10 minutes loses 5 minutes every 2 hours: 4 % of 730 hours. What is chosen saves most of that.
    assert best.saved_h == pytest.approx(0.04 * 730, rel=0.25)
    assert best.overhead < now.overhead
    assert [each.saved_h for each in (best, *others)] == sorted(
        (each.saved_h for each in (best, *others)), reverse=True
    )


def test_a_job_without_replicas_is_told_what_they_save() -> None:
    now, *others = advise(a_run(replicas=None, every_s=30.0), hours=300)
    assert now.setting.peers is None
    saved = {each.setting.change: each.saved_h for each in others}
    assert saved["peers=ckpt.Replicas(1)"] > 1


def test_the_price_of_nodes_makes_hours_into_money() -> None:
    (now, best, *_), free = advise(a_run(), 3.0, hours=100), advise(a_run(), hours=100)
    assert free[1].saved_usd is None
    assert now.saved_usd == 0
    assert best.saved_usd == pytest.approx(best.saved_h * 16 * 3.0, rel=0.05)


def test_the_scenario_is_what_was_measured() -> None:
    facts = a_run()
    made = make_scenario(facts, present_setting(facts), 2.0)
    assert made.commit_s_on(16) == pytest.approx(20)
    assert made.replication_s_on(16) == pytest.approx(2)
    assert made.store.slowdown == pytest.approx(1 - 1 / 1.02)
    assert (made.policy, made.gang_start_s, made.node_usd_hour) == (Every(seconds=600), 60.0, 2.0)


@pytest.mark.parametrize(
    ("costs", "peers"),
    [
        ({"replicas": 2}, Replicas(2)),
        ({"replicas": None, "data": 4, "parity": 2}, Parity(4, 2)),
        ({"replicas": None}, None),
        ({"nodes": 1}, None),
    ],
)
def test_the_replicas_of_the_run(costs: dict[str, Any], peers: object) -> None:
    assert present_setting(a_run(**costs)).peers == peers


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({}, "older version"),
        ({"costs": 3}, "older version"),
        ({"costs": {**COSTS, "step_s": None}}, "step_s"),
        ({"costs": {**COSTS, "step_s": "fast"}}, "step_s"),
        ({"costs": {**COSTS, "step_s": float("nan"), "stall_s": -1.0}}, "step_s and stall_s"),
        ({"costs": {**COSTS, "nodes": 0.5}}, "its nodes"),
    ],
)
def test_a_record_without_measurements_gives_no_advice(about: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        facts_of(about, 1, 1)


def test_a_real_run_measures_what_the_command_reads(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with product.Checkpointer(tmp_path / "run", {"model": model, "optim": optim}, policy=product.Every(steps=45)) as ck:
        for _ in ck.steps(135):
            optim.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optim.step()
            # The pace is measured over a second and more between two commits.
            time.sleep(0.03)
    said = run_ckpt("simulate", "advise", tmp_path / "run", "--node-usd-hour", "2", "--json")
    assert said.code == 0, said.err
    costs = said.json["costs"]
    assert costs["every_steps"] == 45
    assert costs["nodes"] == 1
    assert 0 < costs["stall_s"] < 1
    assert 0 < costs["step_s"] < 10
    assert [each["change"] for each in said.json["settings"]] == ["", "policy=ckpt.Adaptive()"]
    text = run_ckpt("simulate", "advise", tmp_path / "run").out
    assert "as it runs" in text
    assert "failures to expect: a trainer dies every" in text


def test_a_run_of_an_older_version_says_so(tmp_path: Path) -> None:
    save(tmp_path, Epoch(1, "0" * 16), 10, arrays(10))
    said = run_ckpt("simulate", "advise", tmp_path)
    assert said.code == Exit.USAGE
    assert "older version" in said.err


def test_the_present_setting_is_not_advised_again() -> None:
    found = advise(a_run(every_s=None), hours=50)
    assert isinstance(found[0].setting.policy, Adaptive)
    assert not any("Adaptive" in each.setting.change for each in found)
    assert not any("Replicas(1)" in each.setting.change for each in found)
