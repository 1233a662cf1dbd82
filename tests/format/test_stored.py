"""Store folders of every format version stay readable: by ckpt's own decoders and by tools/read_ckpt.py."""

from __future__ import annotations

import contextlib
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given

from ckpt import storage
from ckpt.format import codecs, record, values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import RANK_VALUES, Codec, Record
from ckpt.store import keys, lineage
from ckpt.store.commit import Committer
from ckpt.store.run import Run
from ckpt.types import ITEMSIZE, CodecOption, Identity, Version
from tests.format import build, make_stored
from tests.format.test_values import same, trees

STORED = Path(__file__).parent / "stored"
READER = Path(__file__).parents[2] / "tools" / "read_ckpt.py"
READ = runpy.run_path(str(READER))
VERSIONS = sorted(folder.name for folder in STORED.iterdir() if folder.is_dir())


@pytest.fixture(params=[*VERSIONS, "fresh"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of each kept folder, and one that was just written."""
    folder = tmp_path / "store"
    if request.param == "fresh":
        make_stored.write(folder)
    else:
        shutil.copytree(STORED / request.param, folder)
    return folder


def reader(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, READER, *map(str, arguments)], capture_output=True, text=True)


def read_frames(folder: Path, done: Record) -> list[bytes]:
    scratch = codecs.CodecScratch()
    frames = []
    for spec, (pack, offset, length, codec) in zip(done.manifest.frames, done.places.tolist(), strict=True):
        data = (folder / done.packs[pack][0]).read_bytes()[offset : offset + length]
        raw = bytearray(int(spec["length"]))
        codecs.decode(codec, int(spec["dtype"]), data, memoryview(raw), scratch)
        assert frame_hash(raw) == (int(spec["hash_hi"]), int(spec["hash_lo"]))
        frames.append(bytes(raw))
    return frames


def read_tensors(folder: Path, done: Record) -> dict[tuple[str, str], bytes | Any]:
    """The bytes of every tensor, and the tree of every blob of values, by (name, owner)."""
    frames = read_frames(folder, done)
    found = {}
    for index, spec in enumerate(done.manifest.tensors):
        item = ITEMSIZE[spec.dtype]
        whole = np.zeros((*spec.shape, item), np.uint8)
        for number, (of, box) in enumerate(done.manifest.boxes):
            if of != index:
                continue
            rows = done.manifest.extents[done.manifest.extents["box"] == number]
            data = b"".join(frames[f][o : o + n] for _, _, n, f, o in rows.tolist())
            at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            whole[at] = np.frombuffer(data, np.uint8).reshape(*box.shape, item)
        found[spec.name, spec.owner] = values.decode(whole.tobytes()) if spec.values else whole.tobytes()
    return found


def expected(step: int) -> dict[tuple[str, str], Any]:
    tree: dict[tuple[str, str], Any] = {
        (tensor.name, tensor.owner): tensor.bits.tobytes() for tensor in make_stored.tensors(step)
    }
    tree["values", ""] = make_stored.shared_values(step)
    for rank, coordinate in enumerate(make_stored.COORDINATES):
        tree[RANK_VALUES, coordinate] = make_stored.own_values(step, rank)
    return tree


@pytest.mark.parametrize("identity", [*make_stored.LINE, make_stored.BRANCH], ids=str)
def test_every_stored_checkpoint_is_read_bit_for_bit(store: Path, identity: Any) -> None:
    key = f"commits/{identity}-w0"
    done = record.decode((store / key).read_bytes(), key)
    found, wanted = read_tensors(store, done), expected(identity.version.step)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert same(found[name], value), name
    assert set(done.places["codec"].tolist()) == {Codec.RAW, Codec.ZSTD, Codec.PLANES}


def test_the_line_of_every_stored_run_is_found(store: Path) -> None:
    claims = [lineage.decode_claim(path.read_bytes(), f"epochs/{path.name}") for path in (store / "epochs").iterdir()]
    refs = []
    for path in (store / "commits").iterdir():
        parsed = keys.parse_record(f"commits/{path.name}")
        assert parsed is not None
        refs.append(lineage.CommitRef(*parsed, path.stat().st_size))
    retired = [keys.parse_retired(f"retired/{path.name}") for path in (store / "retired").iterdir()]
    known = lineage.Lineage(claims)
    assert [ref.identity for ref in known.history(refs, retired)] == make_stored.LINE
    assert [ref.identity for ref in known.branches(refs, retired)] == [make_stored.BRANCH]


def test_the_stand_alone_reader_lists_the_line_and_the_branches(store: Path) -> None:
    out = reader(store, "--list")
    assert out.returncode == 0, out.stderr
    (a, b), c = make_stored.LINE, make_stored.BRANCH
    assert out.stdout.splitlines() == [
        f"step 2: commits/{a}-w0",
        f"step 3: commits/{b}-w0",
        f"step 4: commits/{c}-w0 (on a branch)",
    ]


@pytest.mark.parametrize(
    "damage",
    [
        None,
        b"{",
        b"[]",
        lambda claim: {**claim, "version": 2},
        lambda claim: {**claim, "epoch": claim["parent"][:25]},
        lambda claim: {**claim, "parent": "../../etc/passwd"},
        lambda claim: {**claim, "parent": claim["parent"].replace("00000001-", "00000002-")},
        lambda claim: {**claim, "ancestors": [[claim["epoch"]]]},
        lambda claim: {**claim, "ancestors": 7},
        lambda claim: {**claim, "filler": " " * (64 << 10)},
        lambda claim: {**claim, "check": "0" * 32},  # another hash than its own
    ],
)
def test_the_stand_alone_reader_follows_ckpts_line_where_a_claim_is_missing_or_says_nothing(
    tmp_path: Path, damage: Any
) -> None:
    make_stored.write(tmp_path)
    path = max((tmp_path / "epochs").iterdir())
    claim = json.loads(path.read_bytes())
    del claim["check"]
    path.unlink()
    if damage is not None:
        path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(damage(claim)).encode())
    with contextlib.closing(storage.open(str(tmp_path))) as backend:
        line = [ref.identity.version.step for ref in Run(backend).view().history]
    out = reader(tmp_path, "--list")
    assert (out.returncode, line) == (0, [3]), out.stderr
    assert [text[:7] for text in out.stdout.splitlines() if "branch" not in text] == ["step 3:"]


@pytest.mark.parametrize("step", [2, 3])
def test_the_stand_alone_reader_reads_every_tensor(store: Path, tmp_path: Path, step: int) -> None:
    out = reader(store, "--step", step, "--out", tmp_path / "x.npz")
    assert out.returncode == 0, out.stderr
    assert out.stderr == ""  # xxhash is here, so that hashes were checked
    with np.load(tmp_path / "x.npz") as found:
        tensors = {f"{t.name}@{t.owner}" if t.owner else t.name: t for t in make_stored.tensors(step)}
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype == "bfloat16":
                assert found[name].dtype == np.float32
                assert (found[name].view(np.uint32) >> 16 == tensor.bits).all()
            else:
                assert found[name].tobytes() == tensor.bits.tobytes()
                assert found[name].shape == tensor.bits.shape
    assert "'milestones': Counter({80: 2, 30: 1})" in out.stdout
    assert f"'position': {step * 10 + 1}, 'done': True" in out.stdout


@pytest.mark.parametrize("codec", ["auto", "raw", "zstd", "planes"])
def test_the_stand_alone_reader_reads_what_a_run_commits(tmp_path: Path, codec: CodecOption) -> None:
    backend = storage.open(str(tmp_path / "run"))
    epoch = make_stored.FIRST
    backend.put(keys.epoch_key(epoch), [lineage.encode_claim(lineage.Claim(epoch, None))])
    base = None
    for step in (2, 3):
        values_of = (make_stored.shared_values(step), [make_stored.own_values(step, rank) for rank in (0, 1)])
        made, frames = build.manifest(make_stored.tensors(step), make_stored.COORDINATES, values_of)
        raw = [memoryview(frame) for frame in frames]
        committer = Committer(backend, "w0", codec)
        done = committer.commit(
            Identity(epoch, Version(step)),
            made,
            raw.__getitem__,
            check=lambda: None,
            base=base,
            metrics={"loss": step / 2},
        )
        base = done.record
    backend.close()
    out = reader(tmp_path / "run", "--out", tmp_path / "x.npz")
    assert out.returncode == 0, out.stderr
    assert "step 3, metrics {'loss': 1.5}" in out.stdout
    with np.load(tmp_path / "x.npz") as found:
        for tensor in make_stored.tensors(3):
            if tensor.dtype != "bfloat16":
                assert (
                    found[f"{tensor.name}@{tensor.owner}" if tensor.owner else tensor.name].tobytes()
                    == tensor.bits.tobytes()
                )


@given(trees)
def test_the_stand_alone_reader_reads_any_values(tree: Any) -> None:
    assume("defaultdict" not in repr(tree))  # to this reader a dict as any
    assert same(READ["read_values"](values.encode(tree)), tree)


def run_without(hidden: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the reader where these packages cannot be imported."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); sys.argv = ['x', {str(folder)!r}]"
    code = f"{hide}; exec({READER.read_text()!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_stand_alone_reader_needs_no_ckpt_and_says_what_it_cannot_check(store: Path) -> None:
    out = run_without(("xxhash", "ckpt", "torch", "msgpack"), store)
    assert out.returncode == 0, out.stderr
    assert "hashes were not checked" in out.stderr
    # A type of the first section that was flipped is found all the same: it was |u1.
    record = sorted((store / "commits").iterdir())[-1]
    data = bytearray(record.read_bytes())
    data[16 + 32] ^= 1
    record.write_bytes(data)
    out = run_without(("xxhash",), store)
    assert out.returncode == 2, out.stderr
    assert "damaged: " in out.stderr


def test_the_stand_alone_reader_finds_damage(store: Path) -> None:
    key = make_stored.LINE[1]
    for path in ((store / f"data/{key}/node0/w0-0.pack"), store / f"commits/{key}-w0"):
        good = path.read_bytes()
        for broken in (good[: len(good) // 2], good[:900] + bytes([good[900] ^ 4]) + good[901:], b""):
            path.write_bytes(broken)
            out = reader(store)
            assert out.returncode == 2, (path, out.stdout)
            assert out.stderr.startswith("damaged: ")
        path.write_bytes(good)
    assert reader(store).returncode == 0
    assert reader(store, "--step", 77).returncode == 1
