"""Small stores for the tests of the command line: real claims, packs and records, without torch or an agent."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckpt import storage
from ckpt.cli.main import main
from ckpt.format import values
from ckpt.format.frames import hash_frames
from ckpt.layout.assemble import Blob, Staged, assemble
from ckpt.layout.division import division_id, whole_share
from ckpt.layout.layout import Declaration, Entry, Layout
from ckpt.layout.staging import stage
from ckpt.store.commit import Committer
from ckpt.store.keys import new_writer
from ckpt.store.lineage import Claim
from ckpt.store.run import Run
from ckpt.types import FRAME_BYTES, Box, Epoch, Identity, Version

Arrays = Mapping[str, np.ndarray]


def arrays(step: int, elements: int = 1000) -> dict[str, np.ndarray]:
    """Weights that change with the step, and a frozen table that does not."""
    rng = np.random.default_rng(step)
    return {
        "model.weight": rng.normal(size=(10, elements // 10)).astype(np.float32),
        "model.bias": rng.normal(size=10).astype(np.float32),
        "model.table": np.arange(400_000, dtype=np.int32),
    }


def save(
    url: Path | str,
    epoch: Epoch,
    step: int | Version,
    tensors: Arrays | None = None,
    *,
    shared: Any = None,
    own: Any = None,
    metrics: Mapping[str, float] | None = None,
    writer: str | None = None,
) -> Identity:
    """One committed checkpoint of one rank."""
    version = step if isinstance(step, Version) else Version(step)
    step = version.step
    tensors = dict(sorted((arrays(step) if tensors is None else tensors).items()))
    entries = [Entry(name, str(a.dtype), a.shape, (Box.whole(a.shape),)) for name, a in tensors.items()]
    layout = Layout(tuple(entries))
    share = whole_share(layout)
    staging = stage(layout, share, FRAME_BYTES)
    region = bytearray(staging.data_bytes)
    contents = [a.tobytes() for a in tensors.values()]
    for entry, _, start, length, offset, _ in staging.segments.tolist():
        region[offset : offset + length] = contents[entry][start : start + length]
    hashes = hash_frames(memoryview(region), staging.frames)
    trees = [values.encode(tree) for tree in (shared or {"step": step}, own or {"loader": {"position": step}})]
    blobs = [Blob(xxhash.xxh3_128_digest(data), len(data)) for data in trees]
    declaration = Declaration(0, 1, "rank=0", division_id([layout], [share]), layout, staging)
    assembled = assemble([Staged(declaration, hashes, *blobs)])

    def frame(number: int) -> memoryview:
        _, which, at = assembled.sources[number].tolist()
        if which:
            return memoryview(trees[which - 1])
        offset, length, _ = staging.frames[at].tolist()
        return memoryview(region)[offset : offset + length]

    identity = Identity(epoch, version)
    with opened(url) as store:
        Committer(store, writer or new_writer()).commit(
            identity, assembled.manifest, frame, check=lambda: None, metrics=metrics or {}, about={"host": "here"}
        )
    return identity


@contextlib.contextmanager
def opened(url: Path | str):
    store = storage.open(os.fspath(url))
    try:
        yield store
    finally:
        store.close()


def begin(url: Path | str, parent: Identity | None = None, *, closed: bool = True) -> Epoch:
    with opened(url) as store:
        run = Run(store)
        epoch = run.view().new_epoch()
        run.put_claim(Claim(epoch, parent, launch="test", host="here"))
        if closed:
            run.close_epoch(epoch, "test")
    return epoch


def a_run(url: Path | str) -> list[Identity]:
    """Epoch 1 saves steps 10, 20, 30; epoch 2 goes on from 20 and saves 40: so 30 is on a branch."""
    first = begin(url)
    saved = [save(url, first, step, metrics={"val_loss": 1 / step}) for step in (10, 20, 30)]
    second = begin(url, saved[1])
    return [*saved, save(url, second, 40)]


def flip_a_bit(folder: Path) -> Path:
    """The last pack of that folder, in which one bit is another one now."""
    pack = sorted(folder.rglob("*.pack"))[-1]
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    return pack


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_ckpt(*words: object) -> Said:
    """Runs the command in this process."""
    out, err, former = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["ckpt", *map(str, words)]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as exc:
        code = exc.code or 0
    finally:
        sys.argv = former
    return Said(int(code), out.getvalue(), err.getvalue())


def refused(code: int, *words: object) -> str:
    """What is said of a command that ends with that code."""
    said = run_ckpt(*words)
    assert said.code == code, said
    return said.err


def listed_steps(url: Path | str, *words: object) -> list[int]:
    return [row["step"] for row in run_ckpt("ls", url, *words, "--json").json["checkpoints"]]


def ckpt(_: pytest.MonkeyPatch, *words: object) -> Said:
    """As `run_ckpt`."""
    return run_ckpt(*words)
