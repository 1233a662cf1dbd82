"""A folder as the store of a running job: full, cleaned up in part, used by two at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.store.run import Run
from tests.checkpointer.loops import losses, make
from tests.checkpointer.runs import run, saving
from tests.cli.stores import opened


def test_a_disk_with_room_for_one_checkpoint_more_than_is_kept_takes_every_save(small_disk: Path) -> None:
    """The saves follow each other at the speed of the disk. Retired checkpoints have no grace period, or the disk would
    be full."""
    table, url = torch.zeros(1 << 19), small_disk / "run"

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        table.fill_(step)
        saving(step)(ck, step)

    run(url, 30, make(), at, {"table": table}, codec="raw", keep=ckpt.Keep(last=2))
    with opened(url) as store:
        assert [ref.identity.version.step for ref in Run(store).view().history][-2:] == [29, 30]


def test_a_full_disk_fails_saves_until_there_is_room(small_disk: Path) -> None:
    table = torch.zeros(1 << 18)
    url, ballast = small_disk / "run", small_disk / "ballast"

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        table.fill_(step)
        saving(2)(ck, step)
        if step == 2:
            table.fill_(-1)
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free(small_disk))
            lost = ck.save()
            with pytest.raises(ckpt.SaveFailed, match="make room"):
                lost.wait("store", timeout_s=60)
            assert lost.level == "local"
            ballast.unlink()

    first = run(url, 4, make(), at, {"table": table}, codec="raw")
    assert first.losses == losses(4)
    assert first.seen.wait("commit.failed").loud
    other = torch.empty(1 << 18)
    assert run(url, 4, more={"table": other}).from_step == 4
    assert torch.equal(other, torch.full((1 << 18,), 4.0))
    assert not [path for path in url.rglob("*") if path.name.startswith(".")], "rubbish is left"


def free(disk: Path) -> int:
    facts = os.statvfs(disk)
    return facts.f_bavail * facts.f_frsize


@pytest.mark.parametrize("lost", ["00000001-*", "00000002-*", "*"])
def test_a_claim_that_is_lost_makes_no_run_fresh_or_older_in_silence(tmp_path: Path, lost: str) -> None:
    """The newest checkpoint is restored, or the start is an error that says what is wrong."""
    url = tmp_path / "run"
    run(url, 3, make())
    run(url, 6)
    for claim in (url / "epochs").glob(lost):
        claim.unlink()
    try:
        again = run(url, 8)
    except (ckpt.NoCheckpoint, ckpt.DamagedData) as exc:
        assert "epoch" in str(exc)  # noqa: PT017
    else:
        assert again.from_step == 6


def test_a_second_checkpointer_of_one_process_on_one_url_is_refused(tmp_path: Path) -> None:
    def at(ck: ckpt.Checkpointer, step: int) -> None:
        with pytest.raises(ckpt.UsageError, match="URL"), ckpt.Checkpointer(tmp_path, make(seed=9).state):
            pass

    assert run(tmp_path, 2, make(), at).ck.receipt["committed_step"] == 2
