"""A folder of torch's distributed checkpoint (DCP) becomes a checkpoint of ckpt, and a checkpoint becomes a folder."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import ckpt
from ckpt.cli.exits import Exit
from ckpt.store import dcp_import
from ckpt.store.dcp_import import import_dcp, open_folder
from ckpt.store.saved_tensor import Place
from tests.cli.stores import begin, save
from tests.cli.stores import ckpt as command
from tests.integrations.dcp_states import bits, flat, mixed_state, zeros

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:ComplexHalf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"w": torch.arange(10.0), "n": 7}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def test_a_folder_goes_in_and_out_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large parts are cut into slabs on the way in; the file on the way out."""
    state = mixed_state()
    del state["conjugate"]  # see below
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False))
    monkeypatch.setattr(dcp_import, "SLAB_BYTES", 100_000)
    said = command(monkeypatch, "import", tmp_path / "dcp", tmp_path / "run", "--step", "5")
    assert said.code == 0, said.err
    assert said.out.startswith(f"step 5: {len(flat(state)) - 4} tensors, ")
    assert command(monkeypatch, "verify", tmp_path / "run").code == 0
    for url, more in ((tmp_path / "run", ["--shard-bytes", "1MiB"]), (tmp_path / "dcp", [])):
        if more:
            said = command(monkeypatch, "restore", url, "--to", f"dcp:{tmp_path / 'back'}", *more)
            assert said.code == 0, said.err
        found = zeros(state)
        dcp.load(found, storage_reader=FileSystemReader(tmp_path / "back" if more else url))
        assert flat(found) == flat(state)
    assert len(list((tmp_path / "back").glob("*.distcp"))) == 4
    found = zeros(state)
    from ckpt.integrations.dcp import Reader

    dcp.load(found, storage_reader=Reader(tmp_path / "run"))
    assert flat(found) == flat(state)


def test_tensors_of_a_training_run_become_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"model.w": np.arange(6, dtype=np.float32).reshape(2, 3), "model.b": np.ones(3, np.float64)}
    save(tmp_path / "run", begin(tmp_path / "run"), 10, arrays)
    to = tmp_path / "folder"
    assert command(monkeypatch, "restore", tmp_path / "run", "--to", f"dcp:{to}", "--only", "*.w").code == 0
    dcp.load(found := {"model": {"w": torch.zeros(2, 3)}}, checkpoint_id=to)
    assert bits(found["model"]["w"]) == arrays["model.w"].tobytes()
    said = command(monkeypatch, "restore", tmp_path / "run", "--to", f"dcp:{to}")
    assert (said.code, "exists already" in said.err) == (Exit.USAGE, True)
    assert command(monkeypatch, "restore", tmp_path / "run", "--to", f"dcp:{to}2", "--only", "x").code == Exit.USAGE
    assert not list(tmp_path.glob(".*part"))


def test_a_file_that_is_cut_short_or_missing_is_named_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ckpt.DamagedData, match=rf"{file} is cut short: it has {len(data) - 1} bytes"):
        import_dcp(folder, str(tmp_path / "run"))
    file.unlink()
    with pytest.raises(ckpt.DamagedData, match=f"{file} cannot be read"):
        import_dcp(folder, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_every_flipped_byte_of_a_tensor_is_named_or_harmless(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    data, (box, place) = file.read_bytes(), open_folder(folder).chunks[0]
    raw = torch.arange(10.0).numpy().tobytes()
    named = 0
    for offset in range(place.offset, place.offset + place.length):
        file.write_bytes(data[:offset] + bytes([data[offset] ^ 255]) + data[offset + 1 :])
        errors: list[str] = []
        try:
            found = dcp_import._Slab(box, place, 0, box.bytes).read()
            assert bytes(found) == raw  # the flip is in padding, or in what a reader does not need
        except ckpt.DamagedData as exc:
            errors.append(str(exc))
        named += len(errors)
        assert all(str(file) in text for text in errors)
    assert named > 100


class Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch ran",)


def test_hostile_metadata_and_tensors_run_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = folder / ".metadata"
    good = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Runs()))
    said = command(monkeypatch, "import", folder, tmp_path / "run")
    assert (said.code, "posix.system" in said.err, str(metadata) in said.err) == (Exit.DIFFERENT, True, True)
    for bad in (b"", b"no pickle", pickle.dumps({"a": 1}), good[:-20]):
        metadata.write_bytes(bad)
        with pytest.raises(ckpt.DamagedData, match=str(metadata)):
            open_folder(folder)
    outside = pickle.loads(good)
    for info in outside.storage_data.values():
        info.relative_path = "../dcp/__0_0.distcp"
    metadata.write_bytes(pickle.dumps(outside))
    with pytest.raises(ckpt.DamagedData, match="is not the name of a file in the folder"):
        open_folder(folder)

    # A tensor whose description names a function, and one whose bytes are compressed: a bomb in a few bytes.
    metadata.write_bytes(good)
    box, place = open_folder(folder).chunks[0]
    data = place.file.read_bytes()[place.offset : place.offset + place.length]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (described,) = (name for name in records if name.endswith("data.pkl"))
    for change, kind, text in (
        ({described: pickle.dumps(Runs())}, zipfile.ZIP_STORED, "posix.system"),
        ({}, zipfile.ZIP_DEFLATED, "is compressed"),
    ):
        with zipfile.ZipFile(out := io.BytesIO(), "w", kind) as archive:
            for name, content in (records | change).items():
                archive.writestr(name, content)
        other = Place(tmp_path / "other", 0, len(out.getvalue()))
        other.file.write_bytes(out.getvalue())
        with pytest.raises(ckpt.DamagedData, match=text):
            dcp_import._Slab(box, other, 0, box.bytes).read()
    assert not (tmp_path / "ran").exists()


def test_folders_that_cannot_be_imported_say_why(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with pytest.raises(ckpt.NoCheckpoint, match=r"holds no \.metadata"):
        import_dcp(tmp_path, url)
    dcp.save({"a": 1}, storage_writer=FileSystemWriter(tmp_path / "alone"), use_collectives=False)
    with pytest.raises(ckpt.NoCheckpoint, match="use_collectives=False"):
        import_dcp(tmp_path / "alone", url)
    packed = FileSystemWriter(tmp_path / "packed", _extensions=[ZStandard()])
    dcp.save({"a": torch.ones(3)}, storage_writer=packed)
    with pytest.raises(ckpt.UsageError, match=r"extension of DCP .*load it with dcp\.load"):
        import_dcp(tmp_path / "packed", url)
    dcp.save({"a": torch.ones(3, dtype=torch.complex64).conj()}, checkpoint_id=tmp_path / "conjugate")
    with pytest.raises(ckpt.DamagedData, match="it is complex64 with extra state"):
        import_dcp(tmp_path / "conjugate", url)


def test_memory_does_not_grow_with_the_folder(tmp_path: Path) -> None:
    """One part of 384 MiB, and many small ones, which torch's writer would keep until the file ends."""
    draw = torch.Generator().manual_seed(0)
    state = {f"small{n}": torch.randn(4 << 20, generator=draw) for n in range(16)}
    state["large"] = torch.randn(96 << 10, 1024, generator=draw)
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "dcp", sync_files=False))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    url = str(tmp_path / "run")
    for words in (["import", str(tmp_path / "dcp"), url], ["restore", url, "--to", f"dcp:{tmp_path / 'back'}"]):
        command = [sys.executable, "-m", "tests.cli.peak", *words]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.splitlines()[-1]) <= 400 << 20, words
