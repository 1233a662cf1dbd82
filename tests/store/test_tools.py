"""verify, diff, export and branch: what the command line does with a store."""

from __future__ import annotations

import json
import math
import os
import resource
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from ckpt.errors import AccessDenied, NoCheckpoint, UsageError
from ckpt.format import values
from ckpt.store import keys
from ckpt.store.branch import branch
from ckpt.store.commit import Committed
from ckpt.store.diff import ChangedValue, diff, differences
from ckpt.store.dtypes import FLOATS, TARGET_DTYPES, bits_dtype, convert_floats, to_float64
from ckpt.store.export import INDEX, export
from ckpt.store.reader import FrameReader
from ckpt.store.run import Run
from ckpt.store.tensor_stream import choose_tensors
from ckpt.store.verify import verify
from ckpt.types import ITEMSIZE
from tests.storage.faulty import Fault, FaultyBackend, Rule
from tests.store.build import Snapshot, Tensor, begun, commit, epoch, floats, identity, rows, snapshot
from tests.store.sim import Sim


def save(store: Any, step: int, snap: Snapshot, base: Committed | None = None) -> Committed:
    return commit(store, step, snap, f"w{step}", "auto", base=base.record if base else None)


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify_reads_everything_once_and_finds_it_good() -> None:
    store = Sim()
    run = begun(store)
    frozen = floats(40, 40)
    first = save(store, 10, snapshot({"w": floats(30, seed=1), "f": frozen}, shared={"a": 1}))
    second = save(store, 20, snapshot({"w": floats(30, seed=2), "f": frozen}, shared={"a": 1}), first)
    seen: list[tuple[int, int]] = []
    reports = verify(run, run.view().history, lambda done, total: seen.append((done, total)))
    assert [report.is_good for report in reports] == [True, True]
    assert reports[1].checked_bytes == second.raw_bytes - second.referred_bytes
    assert reports[0].checked_bytes == first.raw_bytes
    assert seen[-1] == (first.raw_bytes + second.raw_bytes, first.raw_bytes + second.raw_bytes)
    assert seen == sorted(seen)


def test_verify_does_not_call_it_damage_when_the_store_cannot_be_read() -> None:
    store = Sim()
    save(store, 10, snapshot({"w": floats(30)}))
    begun(store)
    run = Run(FaultyBackend(store, [Rule("get_range", Fault.BEFORE, error=AccessDenied)]))
    with pytest.raises(AccessDenied):
        verify(run, run.view().history)


# --- diff ------------------------------------------------------------------------------------------------------------


def compared(ours: Snapshot, theirs: Snapshot, **options: Any) -> tuple[Any, Sim]:
    store = Sim()
    first = save(store, 10, ours)
    second = save(store, 20, theirs)
    store.reads.clear()
    return diff(FrameReader(store, first.record), FrameReader(store, second.record), **options), store


def test_equal_checkpoints_are_equal_without_reading_a_tensor() -> None:
    snap = snapshot({"w": floats(64, 64), "x": floats()})
    found, store = compared(snap, snap)
    assert found.is_equal
    assert found.equal == ("w", "x")
    assert store.reads == []


MOST = np.finfo(np.float64).max


@pytest.mark.parametrize(
    ("a", "b", "elements", "max_abs", "rms", "nans"),
    [
        (np.array([0.0, 1.0, 2.0]), np.array([-0.0, 1.0, 2.0]), 1, 0.0, 0.0, (0, 0)),  # other bits
        (np.array([0.0, 1.0, 2.0, 3.0]), np.array([2.0, 0.0, 2.0, np.nan]), 3, 2.0, math.sqrt(5 / 4), (0, 1)),
        (np.array([2**62, 1]), np.array([2**62 + 1, 1]), 1, 1.0, math.sqrt(0.5), (0, 0)),
        (np.array([-(2**63)]), np.array([2**63 - 1]), 1, 2.0**64, 2.0**64, (0, 0)),
        (np.array([0], np.uint64), np.array([2**64 - 1], np.uint64), 1, 2.0**64, 2.0**64, (0, 0)),
        (np.array([-128], np.int8), np.array([127], np.int8), 1, 255.0, 255.0, (0, 0)),
        (np.array([1e200, np.inf]), np.array([-1e200, 1.0]), 2, 2e200, 2e200 / math.sqrt(2), (0, 0)),
        (np.array([3e-200]), np.array([7e-200]), 1, 4e-200, 4e-200, (0, 0)),
        (np.array([1.7e308]), np.array([-1.7e308]), 1, MOST, MOST, (0, 0)),
        (np.array([3 + 4j, 1e200]), np.array([0, -1e200j]), 2, math.sqrt(2) * 1e200, 1e200, (0, 0)),
    ],
)
def test_a_changed_tensor_is_named_with_how_far_it_is(
    a: np.ndarray, b: np.ndarray, elements: int, max_abs: float, rms: float, nans: tuple[int, int]
) -> None:
    """Also of very large and very small numbers, and in other bits of equal ones."""
    ours, theirs = (snapshot({"w": Tensor(str(a.dtype), bits), "same": floats(9)}) for bits in (a, b))
    found, _ = compared(ours, theirs)
    (change,) = found.changed
    assert (change.name, change.elements, change.size, change.nans, found.equal) == (
        "w",
        elements,
        a.size,
        nans,
        ("same",),
    )
    assert (change.max_abs, change.rms) == pytest.approx((max_abs, rms), rel=1e-12)


def test_tensors_are_compared_across_shardings() -> None:
    bits = floats(40, 30).bits
    other = bits.copy()
    other[39, 29] = 7.0
    ours = snapshot({"w": Tensor("float32", bits, rows((40, 30), 3)), "v": Tensor("float32", bits, rows((40, 30), 2))})
    theirs = snapshot(
        {"w": Tensor("float32", bits, rows((40, 30), 4, 1)), "v": Tensor("float32", other, rows((40, 30), 5, 1))}
    )
    found, _ = compared(ours, theirs)
    assert found.equal == ("w",)
    assert [(c.name, c.elements) for c in found.changed] == [("v", 1)]


def test_added_removed_and_retyped_tensors_and_changed_values_are_named() -> None:
    ours = snapshot(
        [
            ("gone", floats(3)),
            ("shape", floats(4, 2)),
            ("dtype", floats(4)),
            ("own", Tensor("int64", np.arange(3), owner="rank=0")),
        ],
        shared={"epoch": 1, "nan": float("nan"), "list": [1, 2]},
        own={"rank=0": {"loader": {"at": 5}}},
    )
    theirs = snapshot(
        [
            ("new", floats(3)),
            ("shape", floats(2, 4)),
            ("dtype", Tensor("int32", np.arange(4, dtype=np.int32))),
            ("own", Tensor("int64", np.arange(3), owner="rank=0")),
        ],
        shared={"epoch": 2, "nan": float("nan"), "list": [1, 2, 3]},
        own={"rank=0": {"loader": {"at": 6}}},
    )
    found, _ = compared(ours, theirs)
    assert (found.added, found.removed, found.equal) == (("new",), ("gone",), ("own@rank=0",))
    assert found.retyped == (("dtype", "float32[4]", "int32[4]"), ("shape", "float32[4, 2]", "float32[2, 4]"))
    assert found.values == (
        ChangedValue("epoch", "1", "2"),
        ChangedValue("list[2]", None, "3"),
        ChangedValue("rank=0 loader.at", "5", "6"),
    )
    only, _ = compared(ours, theirs, only=["own*"])
    assert only.is_equal


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_every_dtype_can_be_compared(dtype: str) -> None:
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 2 if dtype == "bool" else 100, (50, ITEMSIZE[dtype])).astype(np.uint8)
    bits = raw.view(bits_dtype(dtype)).reshape(50)
    other = bits.copy()
    other[7] = bits[8] if bits[7] != bits[8] else bits[9]
    found, _ = compared(snapshot({"w": Tensor(dtype, bits)}), snapshot({"w": Tensor(dtype, other)}))
    changed = sum(a.tobytes() != b.tobytes() for a, b in zip(bits, other, strict=True))
    assert sum(c.elements for c in found.changed) == changed


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "paths"),
    [
        (deque([np.zeros(3)]), deque([np.zeros(3)]), []),
        (deque([1.0, NAN]), deque([1.0, NAN]), []),
        (complex(NAN, 0.0), complex(NAN, 0.0), []),
        ({NAN}, {NAN}, []),
        ({NAN: 1}, {NAN: 1}, []),
        ({NAN: [1, 2]}, {NAN: [1, 3]}, ["v[nan][1]"]),
        (deque([0.0, [1]]), deque([-0.0, [2], 3]), ["v[0]", "v[1][0]", "v[2]"]),
        (deque([1], 5), deque([1], 9), ["v.maxlen"]),
        (complex(0.0, 0.0), complex(-0.0, 0.0), ["v"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ["v (order of keys)"]),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), ["v (order of keys)"]),
        ({1: 0}, {True: 0}, ["v[1]", "v[True]"]),
        ({1: 0}, {1.0: 0}, ["v[1]", "v[1.0]"]),
        ({None: 0}, {None: 1}, ["v[None]"]),
        (range(0), range(1, 1), ["v"]),
        (slice(0), slice(0, None, 1), ["v"]),
        (defaultdict(int, a=1), defaultdict(list, a=1), ["v.default_factory"]),
        (Counter(a=1), Counter(a=2), ["v['a']"]),
        ([1, [2]], [1], ["v[1]"]),
        (1, True, ["v"]),
        (np.float32(0.0), np.float32(-0.0), ["v"]),
        (np.zeros(2, "<i4"), np.zeros(2, ">i4"), ["v"]),
        (deque(), [], ["v"]),
    ],
)
def test_values_differ_where_they_would_be_restored_otherwise(a: Any, b: Any, paths: list[str]) -> None:
    a, b = (values.decode(values.encode(each)) for each in (a, b))
    assert list(differences(a, b, "v")) == paths
    assert list(differences({"k": (a,)}, {"k": (b,)}, "")) == [f"['k'][0]{path[1:]}" for path in paths]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(name for name in FLOATS if ITEMSIZE[name] <= 2))
def test_every_pattern_of_a_narrow_float_means_what_torch_says(dtype: str) -> None:
    size = ITEMSIZE[dtype]
    bits = np.arange(256**size, dtype=f"u{size}")
    expected = torch.from_numpy(bits.copy()).view(getattr(torch, dtype)).to(torch.float64).numpy()
    found = to_float64(bits.view(bits_dtype(dtype)), dtype)
    assert found is not None
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", sorted(FLOATS))
@pytest.mark.parametrize("target", TARGET_DTYPES)
def test_conversion_rounds_as_torch_does(dtype: str, target: str, seed: int) -> None:
    size = ITEMSIZE[dtype]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (20_000, size)).astype(np.uint8).view(f"u{size}").reshape(-1)
    if size == 8:  # near the middle between two bfloat16, on both sides
        middle = (rng.integers(1 << 14, 0x7F80, 20_000).astype(np.uint32) << 16 | 0x8000).view(np.float32)
        tiny = rng.choice([0.0, 1e-12, -1e-12, 1e-9], 20_000)
        raw = np.concatenate([raw, (middle.astype(np.float64) * (1 + tiny)).view(np.uint64)])
    source = torch.from_numpy(raw.copy()).view(getattr(torch, dtype))
    found = convert_floats(raw.view(bits_dtype(dtype)), dtype, target)
    nan, kind = torch.isnan(source).numpy(), f"int{8 * ITEMSIZE[target]}"
    right = found.view(kind) == source.to(getattr(torch, target)).view(getattr(torch, kind)).numpy()
    if dtype == "float64" and ITEMSIZE[target] == 2:  # torch rounds twice; rounding once is right
        near = np.flatnonzero(~nan & (np.abs(source.numpy()) < 1e39))
        right[near] = is_nearest(source.numpy()[near], found[near].view(np.uint16), target)
    assert right[~nan].all()
    back = to_float64(found[nan], target)
    assert back is not None
    assert np.isnan(back).all()


def is_nearest(numbers: np.ndarray[Any, Any], codes: np.ndarray[Any, Any], target: str) -> np.ndarray[Any, Any]:
    """Whether no neighbour is nearer, nor as near and even. Infinity stands for the number behind the largest one."""

    def distance(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values = to_float64(codes.view(bits_dtype(target)), target)
        assert values is not None
        behind = np.copysign(2.0**16 if target == "float16" else 2.0**128, values)
        with np.errstate(invalid="ignore"):  # a neighbour of infinity is a signalling NaN
            return np.abs(np.where(np.isinf(values), behind, values) - numbers)

    own, odd = distance(codes), codes % 2 == 1
    nears = [distance(codes + np.uint16(step)) for step in (1, 0xFFFF)]
    return ~np.logical_or.reduce([(near < own) | ((near == own) & odd) for near in nears])


def test_a_conversion_that_makes_no_sense_is_refused() -> None:
    for dtype, target in (("int64", "float32"), ("float32", "int8"), ("complex64", "float32")):
        with pytest.raises(UsageError, match="cannot convert"):
            convert_floats(np.zeros(1, bits_dtype(dtype)), dtype, target)


# --- export ----------------------------------------------------------------------------------------------------------


def exported() -> tuple[Sim, Snapshot, FrameReader]:
    shape = (50, 30)
    snap = snapshot(
        [
            ("model.w", Tensor("float32", floats(*shape).bits, rows(shape, 3, 1))),
            ("model.b", Tensor("bfloat16", np.arange(300, dtype=np.uint16))),
            ("model.n", Tensor("int64", np.arange(9).reshape(3, 3))),
            ("model.0d", Tensor("float64", np.array(3.25))),
            ("model.empty", floats(0, 5)),
            ("optim.m", Tensor("float16", np.arange(40, dtype=np.float16), owner="dp=0,tp=1")),
            ("flag", Tensor("bool", np.array([1, 0, 1], np.uint8))),
        ],
        shared={"not": "exported"},
    )
    store = Sim()
    return store, snap, FrameReader(store, save(store, 10, snap).record)


def expected(snap: Snapshot) -> dict[str, bytes]:
    """One rank alone has a copy of optim.m, which a start on another number of ranks takes for all."""
    return {name: bits.tobytes() for (name, _), bits in snap.tensors.items()}


@pytest.mark.parametrize("form", ["m.safetensors", "m.pt", "folder"])
def test_every_form_holds_every_tensor_bit_for_bit(form: str, tmp_path: Path) -> None:
    _, snap, source = exported()
    to, seen = tmp_path / form, list[tuple[int, int]]()
    done = export(source, to, shard_bytes=3000, progress=lambda a, b: seen.append((a, b)))
    if form == "m.pt":
        found = torch.load(to, weights_only=True)
    elif form == "m.safetensors":
        found = safetensors.torch.load_file(to)
    else:
        index = json.loads((to / INDEX).read_text())
        assert index["metadata"]["total_size"] == done.bytes
        files = index["weight_map"]
        found = {name: safetensors.torch.load_file(to / file)[name] for name, file in files.items()}
        assert sorted(os.listdir(to)) == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), INDEX]
    assert {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"" for n, t in found.items()} == (
        expected(snap)
    )
    assert (found["model.w"].shape, found["model.b"].dtype, found["model.0d"].shape) == ((50, 30), torch.bfloat16, ())
    assert (done.tensors, done.bytes) == (7, sum(map(len, expected(snap).values())))
    assert seen[-1][0] == seen[-1][1]
    assert os.listdir(tmp_path) == [form]


def test_a_folder_of_more_shards_than_a_process_may_open_files_is_written(tmp_path: Path) -> None:
    store = Sim()
    snap = snapshot({f"w{i:03}": floats(0 if i % 10 == 9 else 5, seed=i) for i in range(200)})
    done = save(store, 10, snap)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, limits[1]))
    try:
        export(FrameReader(store, done.record), tmp_path / "model", shard_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    index = json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"]
    found = {name: safetensors.torch.load_file(tmp_path / "model" / file)[name] for name, file in index.items()}
    assert {name: tensor.numpy().tobytes() for name, tensor in found.items()} == expected(snap)
    assert len(set(index.values())) > 100


def test_a_ranks_own_tensor_is_chosen_by_its_coordinate() -> None:
    _, _, source = exported()
    assert [spec.name for spec in choose_tensors(source.record.manifest, ["*@dp=0,tp=1"])] == ["optim.m"]


# --- branch ----------------------------------------------------------------------------------------------------------


def test_a_branch_begins_only_at_what_is_committed() -> None:
    store = Sim()
    run = begun(store)
    save(store, 10, snapshot({"w": floats(30)}))
    store.put(keys.retired_key(identity(1, 10)), [b""])
    for step in (10, 99):
        with pytest.raises(NoCheckpoint, match="holds no checkpoint"):
            branch(run, identity(1, step))
    assert run.view().newest_epoch == epoch(1)
