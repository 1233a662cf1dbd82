"""Ranks that do not do alike, two of them in one launch: nobody waits for one that does not come."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkpointer import apart
from tests.checkpointer.conftest import Saw
from tests.checkpointer.scripts import Script
from tests.servers import free_port

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]

RANKS, CHECKS = 2, (apart,)

FIRST_LEAVES = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
import ckpt
url, there = Path(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    while not there.exists():
        time.sleep(0.01)
    os._exit(0)
there.touch()
try:
    ckpt.Checkpointer(url, {"x": 1}).__enter__()
except ckpt.CkptError as exc:
    print("said:", exc, flush=True)
os._exit(0)
"""

GROUPS_OF_SOME = """
import sys
from pathlib import Path
import torch.distributed as dist
import ckpt
from tests.checkpointer.scripts import say_line
url = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, said = dist.get_rank(), []

def enter(name, group, ranks):
    if rank in ranks:
        try:
            with ckpt.Checkpointer(url / name, {"x": 1}, process_group=group) as ck:
                ck.step()
        except ckpt.UsageError as exc:
            said.append(str(exc))
    dist.barrier()

pair = dist.new_group([0, 1])
enter("first", pair, (0, 1))
dist.new_group([0])
enter("again", pair, (0, 1))
for name in "ab":
    enter(name, None, (0, 1, 2))
say_line({"alike": said})
enter("other", dist.new_group([1, 2]), (1, 2))
say_line({"said": " ".join(said)})
dist.destroy_process_group()
"""


def test_a_state_that_one_rank_cannot_read_fails_that_save_on_all_and_the_next_one_lands(saw: Saw) -> None:
    found = saw(apart.a_state_that_cannot_be_read)
    for each in found:
        assert [text == "saved" for text in each["said"]] == [True, False, True]
        assert "no state today" in each["said"][1]
        assert "no state today" in each["end"]
        assert each["step"] == 6
    assert "rank 1 cannot save" in found[0]["said"][1]


def test_a_rank_that_comes_to_a_save_whose_agent_has_died_is_told_who_has_gone_on(saw: Saw) -> None:
    found = saw(apart.an_agent_that_dies_in_a_save)
    assert [each["step"] for each in found] == [4, 4]
    assert "rank 1 cannot save" in found[0]["said"]


def test_ranks_that_do_not_do_alike_are_named_and_nobody_waits_for_them(saw: Saw) -> None:
    """One leaves the loop early."""
    first, second = saw(apart.an_early_break)
    assert (first["ended"], second["ended"]) == (8, 3)
    if "rank 1 left" in first["end"]:
        assert "rank 1 ended the block after step 3, and rank 0 went past that" in second["end"]
    else:  # rank 0 came to its end before anybody had looked
        for each in (first, second):
            assert "the block has to be ended by all ranks at the same step" in each["end"]


def test_what_one_rank_cannot_read_after_the_restore_ends_the_start_of_all(saw: Saw) -> None:
    for each in saw(apart.a_failure_after_the_restore):
        kind, text = each["error"]
        assert kind == "SaveFailed"
        assert "no state today" in text


def test_a_rank_that_is_gone_before_the_ranks_could_speak_is_told_of(tmp_path: Path) -> None:
    """As by its own error before the block. It holds the store in which they find each other."""
    command = [sys.executable, "-c", FIRST_LEAVES, str(tmp_path / "store"), str(tmp_path / "there")]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    scripts = [Script(command, tmp_path / f"log{rank}", {**env, "RANK": str(rank)}) for rank in (0, 1)]
    for script in scripts:
        script.end(240)
    text = scripts[1].log.read_text()
    assert "said: the 2 ranks could not agree while entering ckpt.Checkpointer" in text
    assert "A rank died or never entered" in text


def test_ranks_that_do_not_come_are_named_while_they_are_waited_for(saw: Saw) -> None:
    first, second = saw(apart.a_late_start)
    ((loud, ranks, message),) = first["said"]
    assert (loud, ranks) == (True, [1])
    assert message.startswith("ckpt: 0.5 s after this rank, 1 of the 2 ranks have not entered")
    assert "All ranks have to enter the block" in message
    assert second["said"] == []


def test_ranks_that_are_in_other_process_groups_too_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """They enter, and again where they have before; or are told of it, where torch would have them wait in vain."""
    (tmp_path / "script.py").write_text(GROUPS_OF_SOME)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(free_port())]
    started = Script([sys.executable, *command, str(tmp_path / "script.py"), str(tmp_path / "run")], tmp_path / "log")
    lines = started.end(120)
    assert not any(line["alike"] for line in lines if "alike" in line)
    said = [line["said"] for line in lines if "said" in line]
    assert ["different numbers of torch process groups" in text for text in sorted(said)] == [False, True, True]


def test_what_names_memory_only_nodes_and_is_not_alike_on_all_nodes_is_told(saw: Saw) -> None:
    """It is rank 0's that counts, and a launcher may have rank 0 on another node at the next start."""
    first, second = saw(apart.settings_of_two_nodes)
    assert first == {
        "alike": [],
        "peers": [[True, "CKPT_PEERS", 1]],
        "files": [[True, "CKPT_PEERS", 1], [True, "CKPT_SECRET_FILE", 1]],
        "secrets": [[True, "CKPT_SECRET_FILE", 1]],
    }
    assert not any(second.values())


def test_what_begins_the_same_on_all_ranks_and_does_not_stay_so_is_restored_per_rank(saw: Saw) -> None:
    found = saw(apart.what_does_not_stay_the_same)
    for rank, starts in enumerate(found):
        own = [0.0, rank + 1.0]
        came = [each["came"] for each in starts]
        assert came == [[0, [0.0], [0.0]], [2, own, [0.0]], [2, own, [0.0]], [20, own, [rank + 1.0]]]
        assert "late differs between the ranks" in starts[2]["said"]
    assert any(each["differs"] for starts in found for each in starts)


def test_a_state_that_is_new_at_each_read_is_appointed_and_left_with_on_all_ranks(saw: Saw) -> None:
    for each in saw(apart.a_state_that_is_made_anew_whenever_it_is_asked_for):
        first, second, (step, committed), third = each["found"]
        assert (first, second, third) == ([0, True], [60, True], [step, True])
        assert step == committed >= 72


def test_all_ranks_leave_at_one_poll_of_an_evaluation(saw: Saw) -> None:
    assert saw(apart.an_evaluation_that_polls) == [[3, 3]] * RANKS
