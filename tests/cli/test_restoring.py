"""ckpt restore."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckpt.cli.exits import Exit
from tests.cli.stores import a_run, arrays, begin, refused, run_ckpt, save


def test_a_safetensors_file_holds_the_same_bits(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    said = run_ckpt("restore", tmp_path / "run", "--to", tmp_path / "x.safetensors", "--step", "20")
    assert said.code == 0
    assert "3 tensors" in said.out
    found = load_file(tmp_path / "x.safetensors")
    assert {name: (a.dtype, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.tobytes()) for name, a in arrays(20).items()
    }
    assert not list((tmp_path / "run" / "leases").glob("*"))  # the lease is given back


def test_only_and_dtype_choose_what_is_written(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    to = tmp_path / "x.safetensors"
    words = ["restore", tmp_path / "run", "--to", to, "--only", "*.bias", "--only", "*.table", "--dtype", "float64"]
    said = run_ckpt(*words, "--json")
    assert said.json["tensors"] == 2
    assert said.json["files"] == [str(to)]
    found = load_file(to)
    assert found["model.bias"].dtype == np.float64
    assert found["model.table"].dtype == np.int32


def test_another_name_gives_a_folder_with_an_index(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    run_ckpt("restore", tmp_path / "run", "--to", tmp_path / "model", "--shard-bytes", "100KB")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(arrays(40))
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / "model" / file)[name], arrays(40)[name])


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    to = tmp_path / "out" / "x.safetensors"
    to.parent.mkdir()
    to.write_text("mine")
    assert run_ckpt("restore", tmp_path / "run", "--to", to).code == 2
    assert to.read_text() == "mine"
    assert run_ckpt("restore", tmp_path / "run", "--to", to.parent).code == 2, "it is not empty"
    to.unlink()
    pack = sorted((tmp_path / "run").rglob("*.pack"))[-1]
    pack.write_bytes(pack.read_bytes()[:100])
    assert pack.name in refused(1, "restore", tmp_path / "run", "--to", to)
    assert list(to.parent.iterdir()) == []


def test_a_dtype_that_a_safetensors_file_has_not_leads_to_what_there_is(tmp_path: Path) -> None:
    url, to = tmp_path / "run", tmp_path / "x.safetensors"
    save(url, begin(url), 1, {"w": np.ones(3, np.complex128), "b": np.ones(3, np.float32)})
    for more in ([], ["--dtype", "float64"]):
        said = refused(Exit.USAGE, "restore", url, "--to", to, *more)
        assert ".pt" in said
        assert "--only" in said
        assert "dtype" not in said
    assert run_ckpt("restore", url, "--to", to, "--only", "b").code == 0
    assert run_ckpt("restore", url, "--to", tmp_path / "x.pt").code == 0


@pytest.mark.parametrize("name", ["x.bin", "x.ckpt", "x.h5", "x.pt.tmp"])
def test_an_ending_of_which_nothing_is_known_leads_to_those_there_are(name: str, tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    said = refused(Exit.USAGE, "restore", tmp_path / "run", "--to", tmp_path / name)
    assert ".safetensors, .pt or .pth, or a folder" in said
    assert not (tmp_path / name).exists()
    assert run_ckpt("restore", tmp_path / "run", "--to", tmp_path / name, "--format", "torch").code == 0
    assert run_ckpt("restore", tmp_path / "run", "--to", f"{tmp_path}/v1.5/").code == 0
    assert (tmp_path / "v1.5" / "model.safetensors.index.json").exists()


def test_what_ddp_and_batch_norm_saved_on_two_ranks_loads_into_the_module(tmp_path: Path) -> None:
    import torch

    script, to = Path(__file__).with_name("ddp_norm.py"), tmp_path / "model.safetensors"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*torchrun, script, tmp_path / "run"], check=True, timeout=120, capture_output=True)
    said = run_ckpt("restore", tmp_path / "run", "--to", to, "--only", "model.*", "--strip", "model.")
    assert said.code == 0
    assert "different copies of model.1.running_mean, model.1.running_var: the first rank's were written" in said.out
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model.load_state_dict({name: torch.from_numpy(array) for name, array in load_file(to).items()})
    with torch.no_grad():
        assert model[1].running_mean.tolist() == pytest.approx(torch.load(tmp_path / "run.0.pt").tolist())


def test_a_glob_that_matches_nothing_is_named_beside_one_that_does(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    globs = ("--only", "model.*", "--only", "modle.*")
    for words in (("restore", "--to", tmp_path / "x.safetensors"), ("show",), ("diff", "10", "20")):
        said = run_ckpt(words[0], tmp_path / "run", *words[1:], *globs)
        assert said.code == 2, words
        assert "matches modle.*" in said.err
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x", "in/deep/x.safetensors"])
def test_a_file_where_a_folder_should_be_is_named(name: str, tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    file = tmp_path / "file"
    file.write_text("in the way")
    said = refused(4, "restore", tmp_path / "run", "--to", file / name)
    assert f"cannot write {file / name}: {file} is a file, not a folder" in said
    assert "give another name" in said
    assert file.read_text() == "in the way"


def test_strip_takes_a_prefix_off_the_names(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    for to in ("x.safetensors", "folder"):
        said = run_ckpt("restore", tmp_path / "run", "--to", tmp_path / to, "--strip", "model.")
        assert said.code == 0, said.err
    found = load_file(tmp_path / "x.safetensors")
    assert {f"model.{name}": a.tobytes() for name, a in found.items()} == {
        n: a.tobytes() for n, a in arrays(40).items()
    }
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["bias", "table", "weight"]


def test_a_prefix_that_no_name_has_or_that_tells_two_apart_is_refused(tmp_path: Path) -> None:
    one = np.zeros(2, np.float32)
    save(tmp_path / "run", begin(tmp_path / "run"), 1, {"ema.w": one, "w": one})
    for prefix, says in (
        ("model.", "begins with 'model.'"),
        ("ema.", "ema.w and w"),
        ("ema.w", "nothing would be left"),
    ):
        assert says in refused(2, "restore", tmp_path / "run", "--to", tmp_path / "x.safetensors", "--strip", prefix)
    assert not (tmp_path / "x.safetensors").exists()


# The store is on a file system that sends SIGTERM when data is read for the second time.
ENDED_MEANWHILE = """
import os, signal, sys
import fsspec
from fsspec.implementations.local import LocalFileSystem
from ckpt.cli.main import main

class Ending(LocalFileSystem):
    reads = 0

    def cat_file(self, path, **options):
        Ending.reads += ".pack" in path
        if Ending.reads == 2:
            assert os.listdir(os.path.dirname(sys.argv[-1])), "it writes already"
            os.kill(os.getpid(), signal.SIGTERM)
        return super().cat_file(path, **options)

fsspec.register_implementation("file", Ending, clobber=True)
main()
"""


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "folder"])
def test_a_restore_that_is_told_to_end_leaves_nothing(name: str, tmp_path: Path) -> None:
    url, to = tmp_path / "run", tmp_path / "out"
    to.mkdir()
    large = {n: np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8) for n in ("a", "b", "c")}
    save(url, begin(url), 1, large)
    words = ["restore", f"fsspec+file://{url}", "--to", to / name]
    said = subprocess.run([sys.executable, "-c", ENDED_MEANWHILE, *map(str, words)], capture_output=True, text=True)
    assert said.returncode == Exit.TERMINATED, said.stderr
    assert said.stderr == ""
    assert list(to.iterdir()) == []
    assert list((url / "leases").iterdir()) == []


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "folder"])
def test_a_file_that_the_disk_has_no_room_for_is_named(name: str, tmp_path: Path) -> None:
    """A limit on the size of a file stands in for the disk: the tensors fit, not what a file has around them."""
    url, to, room = tmp_path / "run", tmp_path / "out", 70_000
    save(url, begin(url), 1, {f"layer.{n:04}": np.zeros(16, np.float32) for n in range(1000)})
    said = subprocess.run(
        [sys.executable, "-m", "ckpt.cli.main", "restore", url, "--to", to / name],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
    )
    assert said.returncode == Exit.STORAGE, said.stderr
    assert said.stderr.startswith(f"error: cannot write {to / name}: [Errno ")
    assert "Traceback" not in said.stderr
    assert list(to.iterdir()) == []


@pytest.mark.parametrize("to", [".", "link", "folder"])
def test_an_empty_folder_is_filled_and_stays_the_one_it_was(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path / "run")
    for name in ("folder", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.chdir(tmp_path if to != "." else tmp_path / "here")
    before = os.stat(to)
    said = run_ckpt("restore", tmp_path / "run", "--to", to, "--json")
    assert said.code == 0, said.err
    assert os.path.samestat(os.stat(to), before)
    assert sorted(os.listdir(to)) == sorted(os.path.basename(file) for file in said.json["files"])
    assert "model.safetensors.index.json" in os.listdir(to)
    assert sorted(os.listdir(tmp_path)) == ["folder", "here", "link", "run"]


def test_names_are_changed_and_files_are_copied_beside(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "config.json").write_text("{}")
    words = ["restore", tmp_path / "run", "--only", "model.*", "--strip", "model.", "--rename", "^(.)=>x.\\1"]
    assert run_ckpt(*words, "--beside", tmp_path / "beside", "--to", tmp_path / "out").code == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(f"x.{name.removeprefix('model.')}" for name in arrays(40))
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert run_ckpt(*words, "--format", "adapter", "--to", tmp_path / "a").code == 0
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rename", "weight"], "REGEX=>NEW"),
        (["--rename", "absent=>x"], "no tensor's name matches 'absent'"),
        (["--rename", "^.*=>x"], "would both be 'x'"),
        (["--rename", "(=>x"], "unterminated"),
        (["--beside", "absent"], "does not exist"),
        (["--beside", ".", "--format", "torch"], "is one file"),
    ],
)
def test_new_names_and_files_that_do_not_fit_are_refused(tmp_path: Path, words: list[str], says: str) -> None:
    a_run(tmp_path / "run")
    said = run_ckpt("restore", tmp_path / "run", "--to", tmp_path / "out", *words)
    assert (said.code, list(tmp_path.glob("*out*"))) == (2, [])
    assert says in said.err
