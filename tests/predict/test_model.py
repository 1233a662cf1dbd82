"""The file of a trained predictor: what was written is read, and nothing else; and its answers."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpt.errors import DamagedData, UsageError
from ckpt.predict.model import FILE_BYTES_MAX, PredictorReader, load, save, shapes
from tests.predict.models import made


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path, wrote = tmp_path / "model", made()
    save(wrote, path)
    read = load(path)
    assert replace(read, arrays={}) == replace(wrote, arrays={})
    assert list(read.arrays) == list(shapes(2, 4))
    for name, each in read.arrays.items():
        assert np.array_equal(each, wrote.arrays[name])
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_every_byte_that_changed_and_every_end_that_is_cut_off_is_noticed(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "model"
    save(made(), path)
    whole, rng = path.read_bytes(), random.Random(seed)
    for _ in range(200):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(DamagedData):
            load(path)
        path.write_bytes(whole[:at])
        with pytest.raises(DamagedData):
            load(path)


def hashed(header: object, data: bytes, version: int = 1, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<8sII", b"ckptpred", version, len(text) if length is None else length) + text + data
    return body + hashlib.sha256(body).digest()


def test_what_is_hashed_well_and_made_ill_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(made(), path)
    whole = path.read_bytes()
    length = struct.unpack_from("<8sII", whole)[2]
    header, data = json.loads(whole[16 : 16 + length]), whole[16 + length : -32]
    path.write_bytes(hashed(header, data))
    load(path)
    nan = struct.pack("<f", float("nan"))
    wrong = [
        hashed(header, data, version=2),
        hashed(header, data, length=2**32 - 1),
        hashed([], data),
        hashed(b"[" * 60_000, data),
        hashed(b"{", data),
        hashed(header, data + b"\0"),
        hashed(header, data[:-4]),
        hashed(header, nan + data[4:]),
        hashed(header, data[:8] + struct.pack("<f", 0.0) + data[12:]),  # a deviation
        b"x" * (FILE_BYTES_MAX + 1),
        b"",
    ]
    for change in (
        {"signals": []},
        {"signals": ["a"] * 2},
        {"signals": ["a", 1]},
        {"signals": ["x"] * 1000},
        {"window": 0},
        {"window": 10**9},
        {"window": True},
        {"hidden": 10**9},
        {"hidden": "4"},
        {"alarm_above": 0},
        {"alarm_above": 2},
        {"period_s": -1},
        {"slope": None},
        {"slope": 10**400},
        {"report": [1]},
        {"report": {"x": "y"}},
    ):
        wrong.append(hashed({**header, **change}, data))
    for each in wrong:
        path.write_bytes(each)
        with pytest.raises(DamagedData, match="not a predictor that ckpt can read"):
            load(path)


def test_one_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save(replace(made(), hidden=5), tmp_path / "model")
    for change in ({"report": {"x" * 70_000: 1.0}}, {"signals": ("", "b")}, {"slope": math.nan}):
        with pytest.raises(UsageError, match="could not be read back"):
            save(replace(made(), **change), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_it_answers_once_its_window_is_full_and_one_window_as_many() -> None:
    trained = made()
    reader, rng = PredictorReader(trained), random.Random(1)
    readings = [{"memory.used": rng.random(), "io.some": rng.random(), "other": 1.0} for _ in range(12)]
    found = [reader.add_reading(each) for each in readings]
    assert found[:7] == [None] * 7
    rows = trained.rows(readings)
    windows = np.stack([rows[i : i + 8] for i in range(5)])
    assert found[7:] == pytest.approx(trained.probabilities(windows).tolist(), abs=1e-6)


def test_a_signal_that_is_missing_or_wild_counts_as_usual_or_as_much_as_can_be() -> None:
    trained = made()
    nothing, wild = trained.rows([{}, {"memory.used": 1e300, "io.some": float("-inf")}])
    assert nothing.tolist() == [0.0, 0.0]
    assert wild.tolist() == [8.0, -8.0]
    assert np.isfinite(trained.probabilities(np.stack([[wild] * 8])))
