"""`ckpt.open`: a run read without a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.store.commit import Committer
from ckpt.types import Identity, Version
from tests.cli.stores import a_run, arrays, begin, opened, save
from tests.store.build import Tensor, floats, rows, snapshot

DDP = {
    "objects": {
        "model": {"kind": "module", "extra": {}},
        "optim": {"kind": "optimizer", "groups": [{"params": ("0.weight",), "value": {"lr": 0.1}, "tensors": []}]},
    },
    "aliases": {},
}


def commit(url: Path, tensors: Any, step: int = 1, **trees: Any) -> Identity:
    snap, what = snapshot(tensors, **trees), Identity(begin(url), Version(step))
    with opened(url) as store:
        Committer(store, "a").commit(what, snap.manifest, snap.frame, check=lambda: None)
    return what


def test_the_line_the_branches_and_the_facts_of_each_checkpoint(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    with ckpt.open(tmp_path) as run:
        assert [each.step for each in run.checkpoints] == [10, 20, 40]
        assert [each.step for each in run.branches] == [30]
        assert run.newest.identity == str(saved[-1])
        assert (run.newest.start, run.newest.label, run.newest.is_on_line) == (2, "40", True)
        first = run.find(10)
        assert first.metrics == {"val_loss": 0.1}
        assert first.bytes >= sum(array.nbytes for array in arrays(10).values())
        assert 0 < first.stored_bytes <= first.bytes
        assert (first.shared_bytes, first.ranks) == (0, ("rank=0",))
        assert first.time_s == first.listed_s
        assert run.find(str(saved[2])).step == 30, "an identity finds what is on a branch"
        with pytest.raises(ckpt.NoCheckpoint, match="10, 20, 40"):
            run.find(30)


def test_the_best_is_by_metric_and_a_metric_that_none_has_is_named(tmp_path: Path) -> None:
    epoch = begin(tmp_path)
    for step, loss in ((1, 0.5), (2, 0.1), (3, float("nan")), (4, 0.3)):
        save(tmp_path, epoch, step, metrics={"val_loss": loss})
    with ckpt.open(tmp_path) as run:
        assert (run.best("val_loss").step, run.best("val_loss", "max").step) == (2, 1)
        with pytest.raises(ckpt.UsageError, match="'loss'; give one of val_loss"):
            run.best("loss")
        (record,) = (tmp_path / "commits").glob("*000000000002.*")
        record.write_bytes(record.read_bytes()[:50])
        run.refresh()
        assert run.best("val_loss").step == 4, "one that cannot be read is passed over"
        for pack in tmp_path.glob("data/*000000000004.*/**/*.pack"):
            pack.write_bytes(pack.read_bytes()[:10])
        assert run.best("val_loss").step == 1, "and so is one of which a pack is cut short"


@pytest.mark.parametrize(
    "index",
    [(), 3, -1, slice(2, 7), (slice(None), 4), (..., slice(1, 6, 2)), (slice(None, None, -3), slice(5)), slice(4, 2)],
    ids=str,
)
def test_a_part_of_a_tensor_is_what_numpy_gives_for_that_index(index: Any, tmp_path: Path) -> None:
    whole = floats(9, 8)
    commit(tmp_path, {"w": Tensor("float32", whole.bits, rows((9, 8), 4, dim=1)), "z": floats(3)})
    with ckpt.open(tmp_path) as run:
        np.testing.assert_array_equal(run.newest.tensor("w", index), whole.bits[index])
        assert run.newest.torch_tensor("w", index).tolist() == whole.bits[index].tolist()


def test_a_part_reads_only_the_frames_that_hold_it(tmp_path: Path) -> None:
    table = Tensor("int64", np.arange(4096).reshape(64, 64))  # 32 frames
    commit(tmp_path, {"table": table}, shared={})
    (pack,) = tmp_path.rglob("*.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    pack.write_bytes(data)
    with ckpt.open(tmp_path) as run:
        assert run.newest.tensor("table", (slice(3), 1)).tolist() == [1, 65, 129]
        with pytest.raises(ckpt.DamagedData, match=pack.name):
            run.newest.tensor("table")


@pytest.mark.parametrize("index", [9, -10, "x", 1.0, (0, 0, 0), (..., ...), None], ids=repr)
def test_an_index_that_does_not_fit_is_refused(index: Any, tmp_path: Path) -> None:
    commit(tmp_path, {"w": floats(9, 8)})
    with ckpt.open(tmp_path) as run, pytest.raises(ckpt.UsageError, match="w, which has the shape"):
        run.newest.tensor("w", index)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("dtype", "as_numpy"),
    [
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float32"),
        ("complex32", "complex64"),
        ("float16", "float16"),
        ("bool", "bool"),
        ("uint16", "uint16"),
        ("complex128", "complex128"),
    ],
)
def test_numpy_gets_the_same_numbers_and_torch_the_same_bits(dtype: str, as_numpy: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    wide = torch.tensor([[0, 1, 0], [1, 1, 0]], dtype=torch.bool) if kind is torch.bool else torch.rand(2, 3) * 3
    saved = wide.to(kind)
    with ckpt.Checkpointer(tmp_path, state={"t": saved, "other": torch.ones(2)}) as ck:
        ck.save()
    with ckpt.open(tmp_path) as run:
        found, exact = run.newest.tensor("t"), run.newest.torch_tensor("t")
    assert (found.dtype, exact.dtype) == (as_numpy, kind)
    assert exact.view(torch.uint8).tolist() == saved.view(torch.uint8).tolist()
    wider = torch.complex64 if kind is torch.complex32 else torch.float32 if as_numpy == "float32" else kind
    np.testing.assert_array_equal(found, saved.to(wider).numpy())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_tensor_without_dimensions_stays_one(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = torch.ones((), dtype=dtype)
    with ckpt.Checkpointer(tmp_path, state={"t": saved, "row": torch.ones(3, dtype=dtype)}) as ck:
        ck.save()
    with ckpt.open(tmp_path) as run:
        for found in (run.newest.tensor("t"), run.newest.tensor("row", 1)):
            assert isinstance(found, np.ndarray)
            assert (found.shape, found.item()) == ((), 1)
        for exact in (run.newest.torch_tensor("t"), run.newest.torch_tensor("row", 1)):
            assert (exact.shape, exact.dtype, exact.item()) == ((), dtype, 1)


def test_the_values_are_those_of_the_state_by_its_keys(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    sched = torch.optim.lr_scheduler.StepLR(optim, 3)
    with ckpt.Checkpointer(tmp_path, state={"m": model, "o": optim, "s": sched, "n": {"seen": 7}}) as ck:
        ck.save()
    with ckpt.open(tmp_path) as run:
        found = run.newest.values()
        assert found["n"] == {"seen": 7}
        assert found["s"]["step_size"] == 3
        assert found["o"]["param_groups"][0]["lr"] == 0.5
        assert found["o"]["param_groups"][0]["params"] == ["weight", "bias"]
        assert "torch" in run.newest.rank_values("rank=0")["generators"]
        with pytest.raises(ckpt.UsageError, match="no rank 'rank=1'; there are rank=0"):
            run.newest.values("rank=1")


def test_copies_of_a_tensor_go_by_one_name_as_for_another_number_of_ranks(tmp_path: Path) -> None:
    """Equal ones, and a module's buffers; parameters that differ keep a name for each rank."""
    tensors = [
        (name, Tensor("float32", np.full(3, value, np.float32), owner=f"rank={rank}"))
        for rank in range(2)
        for name, value in (("model.0.weight", rank), ("model.1.running_mean", rank), ("model.2.same", 5), ("e", rank))
    ]
    own = {"rank=0": {}, "rank=1": {}}
    commit(tmp_path, [*tensors, ("model.0.bias", floats(3))], shared=DDP, own=own)
    with ckpt.open(tmp_path) as run:
        newest = run.newest
        assert list(newest.tensors) == [
            *("e@rank=0", "e@rank=1", "model.0.bias", "model.0.weight@rank=0", "model.0.weight@rank=1"),
            *("model.1.running_mean", "model.2.same"),
        ]
        assert newest.tensor("model.1.running_mean").tolist() == [0.0] * 3, "of the first rank"
        assert newest.tensor("model.1.running_mean@rank=1").tolist() == [1.0] * 3
        assert len(newest.stored_tensors) == 9
        made = newest.export(tmp_path / "x.safetensors", only=["model.*"])
        assert made.firsts == ("model.1.running_mean",)
        with pytest.raises(ckpt.UsageError, match="no tensor 'model'; there are"):
            newest.tensor("model")


def test_what_a_start_would_restore_passes_over_what_is_damaged(tmp_path: Path) -> None:
    saved = a_run(tmp_path)
    with ckpt.open(tmp_path) as run:
        assert str(run.restorable().identity) == str(saved[3])  # type: ignore[union-attr]
        (pack,) = (tmp_path / "data" / str(saved[3])).rglob("*.pack")
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
        assert run.restorable().step == 40, "as far as records and packs say"  # type: ignore[union-attr]
        assert run.restorable(check=True).step == 20  # type: ignore[union-attr]
        pack.unlink()
        assert run.restorable().step == 20  # type: ignore[union-attr]
        for each in tmp_path.rglob("*.pack"):
            each.unlink()
        with pytest.raises(ckpt.DamagedData, match="none of its newest checkpoints"):
            run.restorable()


def test_a_run_without_checkpoints_and_a_place_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ckpt.NoCheckpoint, match="no run has saved there"):
        ckpt.open(tmp_path)
    begin(tmp_path)
    with ckpt.open(tmp_path) as run:
        assert (run.checkpoints, run.restorable()) == ((), None)
        with pytest.raises(ckpt.NoCheckpoint, match="no checkpoint yet"):
            _ = run.newest
        for ask in (lambda: run.find(4), lambda: run.best("val_loss")):
            with pytest.raises(ckpt.NoCheckpoint, match="no checkpoint yet"):
                ask()


def test_a_lease_is_held_and_given_back(tmp_path: Path) -> None:
    a_run(tmp_path)
    with ckpt.open(tmp_path) as run:
        with run.held([run.newest]):
            (lease,) = (tmp_path / "leases").iterdir()
            assert run.newest.identity in lease.read_text()
        assert not (tmp_path / "leases").exists() or not list((tmp_path / "leases").iterdir())


def test_reading_arrays_imports_no_torch(tmp_path: Path) -> None:
    a_run(tmp_path)
    code = (
        "import sys, ckpt\nwith ckpt.open(sys.argv[1]) as run:\n run.best('val_loss'); run.newest.values()\n"
        " print(run.newest.tensor('model.bias').shape, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "(10,) False\n"
