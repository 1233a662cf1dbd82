"""Ranks that do not do alike: nobody waits for one that does not come (tests/checkpointer/apart.py, two in one
launch)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkpointer.scripts import Script, torchrun
from tests.servers import free_port

pytestmark = pytest.mark.torchrun

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

SECOND_IS_LATE = """
import sys, time
from pathlib import Path
import torch.distributed as dist
import ckpt
from ckpt.trainer.link import collective
collective.MISSING_RANKS_S = 0.5
url, told, said = Path(sys.argv[1]), Path(sys.argv[2]), []
dist.init_process_group("gloo")
def hear(event):
    if event.name == "enter.waiting":
        said.append((event.loud, event.data["ranks"], event.message))
        told.touch()
while dist.get_rank() == 1 and not told.exists():
    time.sleep(0.01)
for name in "ab":  # the ranks count alike, whoever waited
    with ckpt.Checkpointer(url / name, {"x": 1}, sinks=(hear,)) as ck:
        ck.step()
    collective.MISSING_RANKS_S = 600
print("said:", said, flush=True)
dist.destroy_process_group()
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

SETTINGS_DIFFER = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
import ckpt
folder, told = Path(sys.argv[1]), []
dist.init_process_group("gloo")
rank, at = dist.get_rank(), "127.0.0.1:9"  # where nobody listens
(folder / "secret").touch(mode=0o600)
(folder / "secret").write_text("ab" * 32)
CASES = {
    "alike": [f"{at},127.0.0.1:19", f"127.0.0.1:19,{at}", "secret", "secret"],
    "peers": [at, "", "secret", "secret"],
    "files": ["", at, "", "secret"],
    "secrets": ["", "", "secret", "missing"],
}
for name, (*peers, first, second) in CASES.items():
    dist.barrier()
    os.environ["CKPT_RUNTIME_DIR"] = str(folder / f"{name}{rank}")
    for variable, value in (("CKPT_PEERS", peers[rank]), ("CKPT_SECRET_FILE", (first, second)[rank])):
        os.environ.pop(variable, None)
        if value:
            os.environ[variable] = str(folder / value) if variable == "CKPT_SECRET_FILE" else value
    with ckpt.Checkpointer(folder / f"run-{name}", {"x": 1}, sinks=(told.append,)) as ck:
        ck.step()
    found = [(each.loud, each.data["variable"], each.data["rank"]) for each in told if each.name == "nodes.differ"]
    print("said:", name, found, flush=True)
    told.clear()
dist.destroy_process_group()
"""


def test_ranks_that_do_not_do_alike_are_named_and_nobody_waits_for_them(tmp_path: Path) -> None:
    lines = torchrun(tmp_path / "log", 2, "tests.checkpointer.apart", str(tmp_path)).end(300)
    saw = {(line["check"], line["rank"]): line["saw"] for line in lines if "check" in line}
    for rank in (0, 1):
        bad = saw["a_state_that_cannot_be_read", rank]
        assert [text == "saved" for text in bad["said"]] == [True, False, True]
        assert "no state today" in bad["said"][1]
        assert "no state today" in bad["end"]
        assert bad["step"] == 6
        dies = saw["an_agent_that_dies_in_a_save", rank]
        assert dies["step"] == 4
        early = saw["an_early_break", rank]
        assert early["ended"] == (3 if rank else 8)
        kind, text = saw["a_failure_after_the_restore", rank]["error"]
        assert kind == "SaveFailed"
        assert "no state today" in text
    assert "rank 1 cannot save" in saw["a_state_that_cannot_be_read", 0]["said"][1]
    assert "rank 1 cannot save" in saw["an_agent_that_dies_in_a_save", 0]["said"]
    ends = saw["an_early_break", 0]["end"], saw["an_early_break", 1]["end"]
    if "rank 1 left" in ends[0]:
        assert "rank 1 ended the block after step 3, and rank 0 went past that" in ends[1]
    else:  # rank 0 came to its end before anybody had looked
        assert all("the block has to be ended by all ranks at the same step" in end for end in ends)


def pair(folder: Path, code: str, *args: Path) -> list[str]:
    """What two ranks without a launcher said."""
    command = [sys.executable, "-c", code, *map(str, args or (folder / "store", folder / "there"))]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    scripts = [Script(command, folder / f"log{rank}", {**env, "RANK": str(rank)}) for rank in (0, 1)]
    for script in scripts:
        script.end(240)
    return [script.log.read_text() for script in scripts]


def test_a_rank_that_is_gone_before_the_ranks_could_speak_is_told_of(tmp_path: Path) -> None:
    """As by its own error before the block. It holds the store in which they find each other."""
    _, text = pair(tmp_path, FIRST_LEAVES)
    assert "said: the 2 ranks could not agree while entering ckpt.Checkpointer" in text
    assert "A rank died or never entered" in text


def test_ranks_that_do_not_come_are_named_while_they_are_waited_for(tmp_path: Path) -> None:
    first, second = pair(tmp_path, SECOND_IS_LATE)
    assert "said: [(True, [1], 'ckpt: 0.5 s after this rank, 1 of the 2 ranks have not entered" in first
    assert "All ranks have to enter the block" in first
    assert "said: []" in second


def test_ranks_that_are_in_other_process_groups_too_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """They enter, and again where they have before; or are told of it, where torch would have them wait in vain."""
    (tmp_path / "script.py").write_text(GROUPS_OF_SOME)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(free_port())]
    started = Script([sys.executable, *command, str(tmp_path / "script.py"), str(tmp_path / "run")], tmp_path / "log")
    lines = started.end(120)
    assert not any(line["alike"] for line in lines if "alike" in line)
    said = [line["said"] for line in lines if "said" in line]
    assert ["different numbers of torch process groups" in text for text in sorted(said)] == [False, True, True]


def test_what_names_memory_only_nodes_and_is_not_alike_on_all_nodes_is_told(tmp_path: Path, runtime_dir: Path) -> None:
    """It is rank 0's that counts, and a launcher may have rank 0 on another node at the next start."""
    first, second = pair(tmp_path, SETTINGS_DIFFER, runtime_dir)
    assert [line for line in first.splitlines() if line.startswith("said:")] == [
        "said: alike []",
        "said: peers [(True, 'CKPT_PEERS', 1)]",
        "said: files [(True, 'CKPT_PEERS', 1), (True, 'CKPT_SECRET_FILE', 1)]",
        "said: secrets [(True, 'CKPT_SECRET_FILE', 1)]",
    ]
    assert "nodes.differ" not in second
