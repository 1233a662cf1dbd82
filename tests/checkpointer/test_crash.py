"""Whatever is killed, the next start goes on from the newest complete checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ckpt.store.run import Run
from tests.checkpointer.loops import losses
from tests.checkpointer.proxy import HELD, Proxy
from tests.checkpointer.runs import URL, agent_status
from tests.checkpointer.scripts import Line, Script, losses_of, torchrun, train
from tests.cli.stores import opened

LINGER = {"CKPT_LINGER_S": "60"}
STEPS = 400


def test_a_killed_trainer_is_restored_from_this_hosts_memory_and_with_its_agent_from_the_store(tmp_path: Path) -> None:
    """Two trainers are killed: the first alone, the second together with its agent."""

    def start(number: int, steps: int, **env: str) -> tuple[Script, Line]:
        seed = ("--seed", str(min(number, 1)))
        script = train(tmp_path / f"{number}.log", tmp_path / "run", steps, *seed, **env)
        return script, script.wait_for(lambda line: "restored" in line)

    first, _ = start(0, 100_000, **LINGER)
    first.wait_for(lambda line: line.get("event") == "commit.done")
    first.kill()
    second, came = start(1, 100_000, **LINGER)
    assert came["level"] == "local"
    assert 5 <= came["restored"] <= max(losses_of(first.lines()))
    second.wait_for(lambda line: line.get("event") == "commit.done")
    agent = psutil.Process(agent_status(tmp_path / "run")["pid"])
    for each in (psutil.Process(second.process.pid), agent):
        each.suspend()  # neither sees the other one die
    second.kill()
    agent.kill()
    agent.wait(60)
    both = losses_of(first.lines()) | losses_of(second.lines())
    reached = max(both) + 20
    third, came = start(2, reached, CKPT_HEARTBEAT_S="0.5")
    assert (came["level"], came["restored"] >= 5) == ("store", True)
    every = both | losses_of(third.end())
    assert [every[step] for step in range(1, reached + 1)] == losses(reached)


@pytest.mark.torchrun
def test_a_torchrun_killed_alone_leaves_no_second_writer(tmp_path: Path) -> None:
    """SIGKILL to torchrun leaves its workers training, and a new start takes over the run. The store gets no checkpoint
    of the old workers that is later than the one that the new start restored."""
    slow = ("--pace", "0.25")  # so that there is something left to train when the second has started
    url = str(tmp_path / "run")
    first = torchrun(tmp_path / "1.log", 2, "tests.checkpointer.train_script", url, "2000", *slow, **LINGER)
    first.wait_for(lambda line: line.get("event") == "commit.done")
    first.kill()
    args = (url, str(STEPS), "--seed", "1", "--every", "50", "--pace", "0")
    lines = torchrun(tmp_path / "2.log", 2, "tests.checkpointer.train_script", *args, **LINGER).end()
    came = next(line for line in lines if "restored" in line)
    assert came["level"] == "local"
    assert came["restored"] >= 5
    text = (tmp_path / "1.log").read_text()
    assert "superseded" in text
    fork = came["restored"]
    for rank in (0, 1):
        old, new = losses_of(first.lines(), rank), losses_of(lines, rank)
        assert sorted(new) == list(range(fork + 1, STEPS + 1))
        assert new
        assert [(old | new)[step] for step in range(1, STEPS + 1)] == losses(STEPS)
    with opened(tmp_path / "run") as store:
        refs = Run(store).view().commits
    assert {ref.identity.epoch.number for ref in refs} == {1, 2}
    assert max(ref.identity.version.step for ref in refs if ref.identity.epoch.number == 1) <= fork


@pytest.mark.torchrun
def test_a_rank_that_raises_is_started_again_without_waiting_for_a_save(tmp_path: Path, store: Proxy) -> None:
    """torchrun restarts the job, so the ranks leave at once: the checkpoint comes back from memory, and the agent goes
    on with the upload."""
    saved, steps = 6, 15
    # Else the workers that torchrun starts again find the addresses of the former ones in its store (torch 2.13).
    env = {**LINGER, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    store.fail(HELD, "PUT", "*.pack")
    words = ("--every", "1000000", "--save-at", str(saved), "--raise-at", "9")
    args = ("tests.checkpointer.train_script", URL, str(steps), *words)
    script = torchrun(tmp_path / "log", 2, *args, restarts=1, **env)
    script.wait_for(lambda line: "raised" in line)
    store.wait_met("*.pack")  # it is on its way, and comes no further
    store.heal()
    lines = script.end()
    assert "restore.skipped" not in str(lines)
    for rank in (0, 1):
        came = [(line["restored"], line["level"]) for line in lines if "restored" in line and line["rank"] == rank]
        assert came == [(0, "none"), (saved, "local")]
    (raised,) = [at for at, line in enumerate(lines) if "raised" in line]
    assert "exit.waiting" not in {line.get("event") for line in lines[:raised]}
    for rank in (0, 1):
        found = losses_of(lines, rank)
        assert [found[step] for step in range(1, steps + 1)] == losses(steps)
        said = [line["step"] for line in lines if "loss" in line and line["rank"] == rank]
        assert said[-1] == steps
        assert said.count(saved) == 1
        assert said.count(saved + 1) == 2
