"""Frames that a rank reads by itself: equal to those that its agent brings, and never unchecked."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.trainer.roundtrip as rt
from ckpt import storage
from ckpt.format.manifest import Record
from ckpt.ipc.file_list import ROW, FileList
from ckpt.store.commit import Committer
from ckpt.threads import Flag
from ckpt.trainer.restore import file_reads
from ckpt.trainer.restore.fill import Filler
from ckpt.types import Epoch, Identity, Version
from tests.checkpointer.kinds import empty_tensors


def state(seed: int) -> dict[str, Any]:
    """Every dtype and shape, strided ones and empty ones; a large tensor; many that are packed together."""
    bits = torch.Generator().manual_seed(seed)
    tensors = empty_tensors()
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.is_contiguous():
            size = (tensor.numel() * tensor.element_size(),)
            high = 2 if "bool" in name else 256
            tensor.view(-1).view(torch.uint8).copy_(torch.randint(high, size, generator=bits, dtype=torch.uint8))
        elif tensor.numel():
            tensor.copy_(torch.randn(tensor.shape, generator=bits))
    small = [torch.randn(number % 7, generator=bits) for number in range(300)]
    return {"tensors": tensors, "large": torch.randn(500, 99, generator=bits), "small": small}


class Folder:
    """A checkpoint in a folder, and one rank that reads it."""

    def __init__(self, path: Path, codec: Any) -> None:
        self.checkpoint = rt.save(state(1))
        self.target = state(2)
        identity = Identity(Epoch(1, "0" * 16), Version(5))
        with_retries = storage.open(str(path))
        frame = lambda number: memoryview(self.checkpoint.frame(number))  # noqa: E731
        committer = Committer(with_retries, "w0", codec)
        self.record: Record = committer.commit(identity, self.checkpoint.manifest, frame, check=lambda: None).record
        with_retries.close()
        walker = rt.walker_of(self.target)
        self.targets = rt.plan(walker, self.checkpoint)
        self.filler = Filler(self.checkpoint.manifest, self.targets.wants, self.targets.tensors)
        self.good: list[int] = []
        self.bad: list[int] = []
        rows = np.zeros(len(self.filler.frames), ROW)
        rows["frame"] = sorted(self.filler.frames)
        places, frames = self.record.places[rows["frame"]], self.checkpoint.manifest.frames[rows["frame"]]
        rows["file"], rows["offset"], rows["stored"] = places["pack"], places["offset"], places["length"]
        rows["codec"], rows["length"], rows["dtype"] = places["codec"], frames["length"], frames["dtype"]
        self.listed = FileList(str(path), [name for name, _ in self.record.packs], rows)

    def pack(self, number: int = 0) -> Path:
        return Path(self.listed.folder, self.listed.names[number])

    def read(self) -> None:
        lock = threading.Lock()

        def got(good: list[int], bad: list[int]) -> None:
            with lock:
                self.good += good
                self.bad += bad

        file_reads.read_frames(self.listed, self.filler, self.filler, got, Flag())
        assert sorted([*self.good, *self.bad]) == sorted(self.filler.frames)


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes", "auto"])
def test_what_a_rank_reads_by_itself_is_what_its_agent_would_bring(tmp_path: Path, codec: str) -> None:
    folder, other = Folder(tmp_path, codec), state(3)
    folder.read()
    assert folder.bad == []
    folder.targets.install()
    rt.restore(other, folder.checkpoint)
    rt.assert_same_state(folder.target, other)
    rt.assert_same_state(folder.target, state(1))


@pytest.mark.parametrize("codec", ["raw", "auto"])
@pytest.mark.parametrize("fault", ["bit", "short", "gone", "link", "folder", "fifo"])
def test_what_cannot_be_read_or_is_wrong_is_reported_and_the_agents_bytes_mend_it(
    tmp_path: Path, codec: str, fault: str
) -> None:
    folder = Folder(tmp_path, codec)
    pack = folder.pack()
    data = bytearray(pack.read_bytes())
    if fault in ("bit", "short"):
        data[len(data) // 2] ^= 16
        pack.write_bytes(data if fault == "bit" else data[: len(data) // 2])
    else:
        pack.rename(tmp_path / "elsewhere")
    if fault == "link":
        pack.symlink_to(tmp_path / "elsewhere")
    elif fault == "folder":
        pack.mkdir()
    elif fault == "fifo":
        os.mkfifo(pack)
    folder.read()
    assert folder.bad
    for frame in folder.bad:
        assert folder.filler(frame, memoryview(bytearray(folder.checkpoint.frame(frame))))
    folder.targets.install()
    rt.assert_same_state(folder.target, state(1))


def test_nothing_more_is_read_once_nobody_wants_it(tmp_path: Path) -> None:
    folder, ended, said = Folder(tmp_path, "raw"), Flag(), list[Any]()
    ended.set()
    file_reads.read_frames(
        folder.listed, folder.filler, folder.filler, lambda good, bad: said.append((good, bad)), ended
    )
    assert said == []
    rt.assert_same_state(folder.target, state(2))
