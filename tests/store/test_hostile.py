"""A store that anyone may have written to: clear errors, bounded memory, and nothing outside it is touched."""

from __future__ import annotations

import os
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt import storage
from ckpt.errors import CkptError, DamagedData, NoCheckpoint, SaveFailed, StorageError
from ckpt.format import record as record_format
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import Record
from ckpt.policy.save_options import Keep
from ckpt.store import keys
from ckpt.store.commit import Committed
from ckpt.store.lineage import CLAIM_BYTES_MAX, Claim, encode_claim
from ckpt.store.prune import Pruner
from ckpt.store.reader import FrameReader, each_values, load_values, open_record, use_newest_readable
from ckpt.store.run import Run
from ckpt.store.verify import verify
from tests.memory import memory_below
from tests.store.build import begun, commit, epoch, floats, identity, read_all, snapshot
from tests.store.sim import Sim

SNAP = snapshot({"w": floats(64, 16), "v": floats(30)}, shared={"a": [1, 2]}, own={"rank=0": {"b": (3,)}})


def a_run(store: Any, codec: Any = "auto") -> tuple[Run, Committed]:
    return begun(store), commit(store, 10, SNAP, codec=codec, pack_bytes=2048)


def put_record(store: Sim, made: Record) -> None:
    store.put(keys.record_key(made.identity, made.writer), [record_format.encode(made)])


def read_everything(run: Run) -> None:
    def use(record: Record) -> None:
        read_all(run.backend, record)
        load_values(FrameReader(run.backend, record))

    use_newest_readable(run, use)


def test_a_record_or_pack_with_any_byte_changed_is_damaged_data_or_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    pristine = Sim()
    _, done = a_run(pristine)
    objects = [keys.record_key(identity(1, 10), "w"), *(key for key, _ in done.record.packs)]
    for _ in range(300):
        store = pristine.copy()
        key = rng.choice(objects)

        def change(data: bytes) -> bytes:
            at = rng.randrange(len(data))
            how = rng.randrange(4)
            if how == 0:
                return data[:at]
            if how == 1:
                return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
            if how == 2:
                return data[:at] + data[at + rng.randrange(1, 9) :]
            return data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :]

        store.spoil(key, change)
        run = Run(store)
        try:
            ref = run.view().history[0]
            found = open_record(store, ref)
            tensors = read_all(store, found)
            tree = load_values(FrameReader(store, found))
        except (DamagedData, StorageError):
            continue
        assert {k: v.tobytes() for k, v in tensors.items()} == {k: v.tobytes() for k, v in SNAP.tensors.items()}
        assert (tree.shared, tree.own_by_coordinate) == ({"a": [1, 2]}, {"rank=0": {"b": (3,)}})


def test_a_record_that_points_anywhere_but_into_its_packs_is_refused(seed: int) -> None:
    """Places are changed at random and the record is hashed anew, as somebody who means harm would do."""
    rng = np.random.default_rng(seed)
    store = Sim()
    run, done = a_run(store)
    for _ in range(200):
        places = done.record.places.copy()
        row, field = int(rng.integers(len(places))), rng.choice(["pack", "offset", "length", "codec"])
        top = {"pack": 2**32, "offset": 2**63, "length": 2**32, "codec": 256}[field]
        places[field][row] = int(rng.integers(top, dtype=np.uint64)) >> int(rng.integers(top.bit_length()))
        if np.array_equal(places, done.record.places):
            continue
        try:
            put_record(store, replace(done.record, places=places))
        except (CkptError, ValueError, OverflowError):
            continue  # the writer refuses it
        with pytest.raises(CkptError):
            read_everything(run)


@pytest.mark.parametrize(
    "key",
    ["../outside", "data/../../outside", "/etc/passwd", "epochs/x", "data/x/y/z.pack", "commits/x", ""],
)
def test_a_record_whose_pack_lies_elsewhere_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(bytes(4096))
    with closing(storage.open(str(tmp_path / "run"))) as backend:
        run, done = a_run(backend)
        data = record_format.encode(replace(done.record, packs=tuple((key, 4096) for _ in done.record.packs)))
        backend.put(keys.record_key(identity(1, 10), "w"), [data])
        with pytest.raises(DamagedData):
            read_everything(run)


def test_a_record_that_is_too_large_is_refused_before_it_is_read() -> None:
    store = Sim()
    run, _ = a_run(store)
    store.spoil(keys.record_key(identity(1, 10), "w"), lambda data: bytes(record_format.RECORD_BYTES_MAX + 1))
    with memory_below(4 << 20), pytest.raises(DamagedData):
        read_everything(run)


def test_a_claim_that_is_too_large_is_told_and_not_read() -> None:
    store = Sim()
    run, _ = a_run(store)
    store.put(keys.epoch_key(epoch(2)), [encode_claim(Claim(epoch(2), None)) + b" " * CLAIM_BYTES_MAX])
    assert [key for key, _ in run.view().damaged_claims] == [keys.epoch_key(epoch(2))]


def test_a_record_of_another_version_says_which_and_a_newer_one_is_not_deleted_from() -> None:
    store = Sim()
    run, done = a_run(store)
    key = keys.record_key(identity(1, 10), "w")
    version_at = 8  # behind the magic
    store.spoil(key, lambda data: data[:version_at] + b"\x63\x00" + data[version_at + 2 :])
    with pytest.raises(DamagedData, match="format version 99"):
        open_record(store, done.ref)
    (report,) = verify(run, run.view().history)
    assert "version 99" in report.problems[0].what
    store.advance(1e6)
    pruner = Pruner(run, epoch(1))
    assert "version 99" in pruner.plan(run.view(), Keep(last=1)).blocked


def test_a_url_with_foreign_content_holds_no_run_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("1,2")
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "README").write_text("git log")
    (tmp_path / "retired").mkdir()
    (tmp_path / "retired" / "old.txt").write_text("x")
    (tmp_path / "leases" / "2024").mkdir(parents=True)
    for name in ("README.txt", "2024/flat.txt"):
        (tmp_path / "leases" / name).write_text("rooms to let")
        os.utime(tmp_path / "leases" / name, (1, 1))
    before = sorted(path for path in tmp_path.rglob("*"))
    with closing(storage.open(str(tmp_path))) as backend:
        run = Run(backend)
        with pytest.raises(NoCheckpoint):
            read_everything(run)
        pruner = Pruner(run, None, grace_s=0.0)
        plan = pruner.plan(run.view(), Keep(last=1))
        assert not plan
        pruner.execute(plan)
        assert sorted(path for path in tmp_path.rglob("*")) == before


def test_a_file_where_the_store_needs_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1,2")
    with closing(storage.open(str(tmp_path))) as backend:
        run = begun(backend)
        with pytest.raises(SaveFailed, match=str(tmp_path / "data")):
            commit(backend, 1, SNAP)
        assert (tmp_path / "data").read_text() == "1,2"
        assert run.view().history == []


def test_of_many_blobs_of_values_a_few_are_held_at_a_time() -> None:
    blob = 1 << 20
    store = Sim()
    own = {f"rank={rank}": bytes(blob) for rank in range(16)}
    snap = snapshot({"w": floats(4)}, own=own)
    done = commit(store, 10, snap, codec="zstd")
    found = set()
    with memory_below(8 * blob):
        for (name, owner), tree in each_values(FrameReader(store, done.record), held_bytes=2 * blob):
            assert (name, len(tree)) == ("rank-values", blob)
            found.add(owner)
    assert found == set(own)


def test_values_that_are_no_values_are_damaged_data() -> None:
    """The blob's hash is right: whoever wrote it meant it."""
    store = Sim()
    spoilt = snapshot({"w": floats(4)}, shared={"a": 1})
    start, length = spoilt.at[-1]
    spoilt.memory[start : start + length] = b"\xc1" * length
    hi, lo = frame_hash(spoilt.frame(len(spoilt.at) - 1))
    spoilt.manifest.frames["hash_hi"][-1], spoilt.manifest.frames["hash_lo"][-1] = hi, lo
    done = commit(store, 10, spoilt)
    with pytest.raises(DamagedData):
        load_values(FrameReader(store, done.record))
    run = begun(store)
    (report,) = verify(run, run.view().history)
    assert "its values cannot be decoded" in report.problems[0].what
