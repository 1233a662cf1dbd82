"""A state saved under any layout comes back under any other world size and layout, from the store and from memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpointer.scripts import Line, lines_of
from tests.integrations.forked import Forked, server
from tests.integrations.runs import Life

SCRIPT = Path(__file__).parent / "layouts.py"
PAIRS = 4 * 4 + 2  # four layouts of one model restored as four; two others as themselves
CROSS = 4 + 2  # each restored once


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with server("torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        yield


def launch(records: Path, ranks: int, *args: str, **env: str) -> Life:
    return Forked(SCRIPT, records, args, ranks if ranks > 1 else 0, env).start()


def end(life: Life) -> list[Line]:
    """What a script said that has ended well."""
    assert life.wait(280) == 0, life.output()
    return lines_of(life.log)


def restored(life: Life) -> int:
    """How many checkpoints a script restored; it has ended well."""
    return len([line for line in end(life) if "target" in line])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved, which began with what one had."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("one", "four"):
        (folder / name).mkdir()
    end(launch(folder / "records-1", 1, "save", str(folder / "one"), "store"))
    args = ("cross", str(folder / "one"), "store", "save", str(folder / "four"), "store")
    lines = end(launch(folder / "records-4", 4, *args))
    assert len([line for line in lines if "target" in line]) == CROSS
    assert lines[-1] == {"rank": 0, "done": True}
    return folder / "four"


def copied(folder: Path, to: Path) -> str:
    return str(shutil.copytree(folder, to))


def test_two_ranks_restore_what_four_saved_and_what_eight_did_that_had_restored_it(four: Path, tmp_path: Path) -> None:
    eight = tmp_path / "eight"
    eight.mkdir()
    args = ["load", copied(four, tmp_path / "8"), "store", "save", str(eight), "store"]
    assert restored(launch(tmp_path / "records-8", 8, *args)) == PAIRS
    args = ["load", copied(four, tmp_path / "2"), "store", "cross", str(eight), "store"]
    assert restored(launch(tmp_path / "records-2", 2, *args)) == PAIRS + CROSS


def test_fewer_and_more_ranks_restore_every_layout_from_memory(tmp_path: Path) -> None:
    """Four save, two restore and save, four restore; each time only memory is left of those that saved."""
    env = {"CKPT_LINGER_S": "120"}
    four, two = tmp_path / "four", tmp_path / "two"
    four.mkdir()
    two.mkdir()
    end(launch(tmp_path / "records-1", 4, "save", str(four), "memory", **env))
    script = launch(tmp_path / "records-2", 2, "load", str(four), "memory", "save", str(two), "memory", **env)
    assert restored(script) == PAIRS
    assert restored(launch(tmp_path / "records-3", 4, "cross", str(two), "memory", **env)) == CROSS


def test_other_numbers_of_ranks_restore_from_memory_what_seven_one_and_five_saved(tmp_path: Path) -> None:
    """Each as the other layout, in turn. No tensor parallelism, in which torch does not run this model on seven."""
    env = {"CKPT_LINGER_S": "120", "LAYOUTS": "ddp fsdp hand"}
    folders = {world: tmp_path / str(world) for world in (7, 1, 5)}
    for folder in folders.values():
        folder.mkdir()
    end(launch(tmp_path / "records", 7, "save", str(folders[7]), "memory", **env))
    for former, world in ((7, 1), (1, 5)):
        args = ("cross", str(folders[former]), "memory", "save", str(folders[world]), "memory")
        assert restored(launch(tmp_path / f"records-{world}", world, *args, **env)) == 3
    assert restored(launch(tmp_path / "records-again", 7, "cross", str(folders[5]), "memory", **env)) == 3
