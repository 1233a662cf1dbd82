"""A state saved under any layout comes back under any other world size and layout, from the store and from memory."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.checkpointer.scripts import Script, torchrun

MODULE = "tests.checkpointer.layouts"
PAIRS = 4 * 4 + 2  # four layouts of one model restored as four; two others as themselves
CROSS = 4 + 2  # each restored once


def launch(log: Path, ranks: int, *args: str, **env: str) -> Script:
    if ranks == 1:
        return Script([sys.executable, "-m", MODULE, *args], log, env)
    return torchrun(log, ranks, MODULE, *args, **env)


def restored(script: Script) -> int:
    """How many checkpoints a script restored; it has ended well."""
    return len([line for line in script.end(280) if "target" in line])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved, which began with what one had."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("one", "four"):
        (folder / name).mkdir()
    launch(folder / "1.log", 1, "save", str(folder / "one"), "store").end(240)
    args = ("cross", str(folder / "one"), "store", "save", str(folder / "four"), "store")
    script = launch(folder / "4.log", 4, *args)
    assert restored(script) == CROSS
    assert script.lines()[-1] == {"rank": 0, "done": True}
    return folder / "four"


def copied(folder: Path, to: Path) -> str:
    return str(shutil.copytree(folder, to))


@pytest.mark.torchrun
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_worlds_restore_every_layout_from_the_store(four: Path, tmp_path: Path, ranks: int) -> None:
    args = "load", copied(four, tmp_path / "copy"), "store"
    assert restored(launch(tmp_path / "log", ranks, *args)) == PAIRS


@pytest.mark.torchrun
def test_two_ranks_restore_what_four_saved_and_what_eight_did_that_had_restored_it(four: Path, tmp_path: Path) -> None:
    eight = tmp_path / "eight"
    eight.mkdir()
    args = ["load", copied(four, tmp_path / "8"), "store", "save", str(eight), "store"]
    assert restored(launch(tmp_path / "8.log", 8, *args)) == PAIRS
    args = ["load", copied(four, tmp_path / "2"), "store", "cross", str(eight), "store"]
    assert restored(launch(tmp_path / "2.log", 2, *args)) == PAIRS + CROSS


@pytest.mark.torchrun
def test_fewer_and_more_ranks_restore_every_layout_from_memory(tmp_path: Path) -> None:
    """Four save, two restore and save, four restore; each time only memory is left of those that saved."""
    env = {"CKPT_LINGER_S": "120"}
    four, two = tmp_path / "four", tmp_path / "two"
    four.mkdir()
    two.mkdir()
    launch(tmp_path / "1.log", 4, "save", str(four), "memory", **env).end(240)
    script = launch(tmp_path / "2.log", 2, "load", str(four), "memory", "save", str(two), "memory", **env)
    assert restored(script) == PAIRS
    assert restored(launch(tmp_path / "3.log", 4, "cross", str(two), "memory", **env)) == CROSS


@pytest.mark.torchrun
def test_five_six_and_seven_ranks_restore_from_memory_what_seven_five_and_six_saved(tmp_path: Path) -> None:
    """Each as the other layout. No tensor parallelism, in which torch does not run this model on seven ranks."""
    env = {"CKPT_LINGER_S": "120", "LAYOUTS": "ddp fsdp"}
    seven, five, six = (tmp_path / name for name in ("seven", "five", "six"))
    for folder in (seven, five, six):
        folder.mkdir()
    launch(tmp_path / "7.log", 7, "save", str(seven), "memory", **env).end(240)
    for ranks, former, folder in ((5, seven, five), (6, five, six)):
        args = ("cross", str(former), "memory", "save", str(folder), "memory")
        assert restored(launch(tmp_path / f"{ranks}.log", ranks, *args, **env)) == 2
    assert restored(launch(tmp_path / "again.log", 7, "cross", str(six), "memory", **env)) == 2


@pytest.mark.torchrun
def test_one_three_and_eight_ranks_restore_from_memory_what_eight_one_and_three_saved(tmp_path: Path) -> None:
    env = {"CKPT_LINGER_S": "120", "LAYOUTS": "ddp fsdp hand"}
    eight, one, three = (tmp_path / name for name in ("eight", "one", "three"))
    for folder in (eight, one, three):
        folder.mkdir()
    launch(tmp_path / "8.log", 8, "save", str(eight), "memory", **env).end(240)
    for ranks, former, folder in ((1, eight, one), (3, one, three)):
        args = ("cross", str(former), "memory", "save", str(folder), "memory")
        assert restored(launch(tmp_path / f"{ranks}.log", ranks, *args, **env)) == 3
    assert restored(launch(tmp_path / "again.log", 8, "cross", str(three), "memory", **env)) == 3
