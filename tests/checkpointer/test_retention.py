"""What stays in the store, and what is written there: unchanged frames once, and only the checkpoints that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.types import Identity
from tests.checkpointer.loops import losses, make
from tests.checkpointer.runs import Seen, goes_on, kill_agent, run, saving
from tests.checkpointer.scripts import losses_of, train
from tests.cli.stores import ckpt as command

FROZEN_BYTES = 4 << 20


def referred(seen: Seen) -> dict[int, int]:
    """By step: how many bytes its commit referred to instead of writing them."""
    commits = seen.named("commit.done")
    return {Identity.parse(each.data["identity"]).version.step: each.data["referred_bytes"] for each in commits}


def stored_bytes(url: Path) -> int:
    return sum(pack.stat().st_size for pack in url.rglob("*.pack"))


def test_what_does_not_change_is_written_once_by_all_starts_of_a_run(tmp_path: Path) -> None:
    frozen, other, last = (torch.linspace(fill, fill + 1, FROZEN_BYTES // 4) for fill in (0.0, 7.0, 9.0))
    first = run(tmp_path, 3, make(), saving(1, 2, 3), {"frozen": frozen}, codec="raw")
    again = goes_on(tmp_path, first.losses, at=saving(4, 5), more={"frozen": other}, codec="raw")
    assert again.ck.restored.level == "store"
    found = referred(first.seen) | referred(again.seen)
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert found[1] == 0
    for step in (2, 3, 4, 5):
        assert found[step] >= FROZEN_BYTES, found
    assert FROZEN_BYTES <= stored_bytes(tmp_path) < 2 * FROZEN_BYTES
    assert run(tmp_path, 5, more={"frozen": last}).from_step == 5
    assert torch.equal(other, frozen)
    assert torch.equal(last, frozen)


def listed(url: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return [row["step"] for row in command(monkeypatch, "ls", url, "--json").json["checkpoints"]]


def test_a_running_job_keeps_what_its_rule_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent decides after each commit; what goes is listed and restored no more, and is told."""
    keep, of_step = ckpt.Keep(last=1, every=2, best=ckpt.Best("loss", "max")), (0.9, 0.1, 0.5, 0.4)

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        if step < 5:  # leaving saves that
            ck.step()
            ck.save(metrics={"loss": of_step[step - 1]}).wait("store", timeout_s=60)

    seen = run(tmp_path, 5, make(), at, keep=keep).seen
    assert listed(tmp_path, monkeypatch) == [1, 2, 4, 5]
    assert seen.named("prune.failed") == []
    assert any("retired 1 checkpoint " in event.message for event in seen.named("prune.done"))
    assert run(tmp_path, 5).from_step == 5


def test_a_run_that_is_pruned_all_the_time_and_killed_again_and_again_goes_on_from_its_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever carries it out: the agent of the living job, that of a job that was killed, or the command, where both
    were killed in the midst of a commit."""
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "0.5")  # who was killed without a word is watched for two of them
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    url, found, newest, retired = tmp_path / "run", dict[int, float](), 0, 0

    def prune() -> None:
        nonlocal newest, retired
        said = command(monkeypatch, "prune", url, "--last", "1", "--yes", "--json")
        assert said.code == 0, said
        retired += len(said.json["retire"])
        last = max(listed(url, monkeypatch))
        assert last >= newest
        newest = last

    for start in range(3):
        job = train(tmp_path / f"{start}.log", url, 100_000, "--every", "2", "--mib", "4", "--seed", str(start and 1))
        assert job.wait_for(lambda line: "restored" in line)["restored"] >= newest
        job.wait_for(lambda line: line.get("event") == "commit.done")
        for _ in range(4):
            prune()
        job.kill()
        if start == 1:
            kill_agent(url)
        for _ in range(2):
            prune()
        found |= losses_of(job.lines())
    steps = max(found) + 5
    lines = train(tmp_path / "last.log", url, steps, "--mib", "4", "--seed", "1").end()
    assert next(line["restored"] for line in lines if "restored" in line) >= newest
    found |= losses_of(lines)
    assert [found[step] for step in range(1, steps + 1)] == losses(steps)
    assert retired > 2
    assert command(monkeypatch, "verify", url).code == 0
