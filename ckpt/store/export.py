"""Export of a checkpoint for other tools: .safetensors, .pt, and the folders that Hugging Face and PEFT read.

Tensors are streamed in parts of some MiB. So memory stays bounded for a checkpoint of any size: about 75 MiB (95 with
conversion; see `tensor_stream`). A file has a temporary name until it is whole and on the disk. Ranks' copies of one
tensor become one tensor by the rule in store/tensors.py; other copies are named `<name>@<coordinate>`. Values are not
exported.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import iglob
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ckpt.errors import StorageError, UsageError
from ckpt.format.manifest import TensorSpec
from ckpt.format.safetensors import SafetensorsReader, TensorHead, encode_header, file_order
from ckpt.policy.export_rule import compile_names
from ckpt.store.dtypes import FLOATS, TARGET_DTYPES, convert_floats
from ckpt.store.reader import FrameReader
from ckpt.store.tensor_stream import check_globs, exported_name, match_names, slabs_of, stream
from ckpt.store.tensors import TensorIndex, index_tensors
from ckpt.types import Identity, split_by_bytes

Format = Literal["safetensors", "sharded", "adapter", "torch"]

SHARD_BYTES = 5 << 30
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export. `files`: the files written. `bytes`: of the tensors, after conversion. `firsts`: names
    of buffers that differ between ranks; the first rank's was written."""

    files: tuple[Path, ...]
    tensors: int
    bytes: int
    firsts: tuple[str, ...] = ()


def export(
    reader: FrameReader,
    to: str | os.PathLike[str],
    *,
    format: Format | None = None,
    only: Sequence[str] = (),
    dtype: str | None = None,
    strip: str = "",
    names: Sequence[tuple[str, str]] = (),
    beside: Sequence[str | os.PathLike[str]] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Writes the tensors whose name matches one of the globs `only` (all if there is none).

    `format`: by default derived from the name: .safetensors, .pt or .pth, or a folder without an ending. "adapter" is a
    folder as PEFT reads it. The .pt format needs torch. `dtype`: the dtype that floating-point tensors are converted
    to. `strip`: a prefix to remove from names. `names`: regular expressions with their replacements (re.sub), applied
    one after the other behind `strip`. `beside`: see `find_companions`.
    `shard_bytes`: the size of a file in a folder. `progress(done, total)`: bytes of the checkpoint.

    Errors: UsageError (`to` exists; a glob, the prefix or an expression matches no tensor; two names become one; the
    format lacks a dtype); DamagedData; StorageError; OSError."""
    path = Path(to)
    format = format or _format_of(to)
    is_folder = format in ("sharded", "adapter")
    if path.exists() and not (is_folder and path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} exists already; remove it, or give another name")
    if beside and not is_folder:
        raise UsageError(f"{path} is one file, so no other files can be beside it; give a folder")
    companions = find_companions(beside)
    if dtype is not None and dtype not in TARGET_DTYPES:
        raise UsageError(f"dtype={dtype!r} is not supported; give one of {', '.join(TARGET_DTYPES)}")
    tensors = index_tensors(reader)
    chosen = choose_exported(tensors, only)
    check_globs(only, [*chosen, *tensors.rank_copies], str(reader.record.identity))
    if not chosen:
        raise UsageError(f"{reader.record.identity} has no tensors")
    short = _rename(list(chosen), strip, names)
    pairs = [(TensorHead(short[name], _target_dtype(s.dtype, dtype), s.shape), s) for name, s in chosen.items()]
    total = sum(head.bytes for head, _ in pairs)
    # A tensor larger than a shard gets a file of its own.
    batches = split_by_bytes((head.bytes for head, _ in pairs), shard_bytes if format == "sharded" else total)
    shards = [pairs[batch] for batch in batches]
    if format != "torch":
        for shard in shards:
            shard.sort(key=lambda pair: file_order(pair[0]))
    slabs = _slabs(reader, [spec for shard in shards for _, spec in shard], dtype, progress)
    heads = [[head for head, _ in shard] for shard in shards]
    metadata = {"format": "pt", "ckpt": str(reader.record.identity)}
    with temporary_path(path) as temporary:
        if format == "torch":
            _write_torch(temporary, heads[0], slabs)
        elif format == "sharded":
            _write_folder(temporary, heads, metadata, slabs)
        elif format == "adapter":
            temporary.mkdir()
            _write_file(temporary / ADAPTER, encode_header(heads[0], metadata), heads[0], slabs)
        else:
            _write_file(temporary, encode_header(heads[0], metadata), heads[0], slabs)
        copy_companions(companions, temporary)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if is_folder else [path]
    firsts = tuple(name for name in tensors.first_rank_names if name in chosen)
    return Exported(tuple(files), len(pairs), total, firsts)


def choose_exported(tensors: TensorIndex, only: Sequence[str]) -> dict[str, TensorSpec]:
    """The chosen tensors by name. A glob that matches no name selects among the ranks' copies, without those already
    chosen."""
    found = {name: tensors.specs[name] for name in match_names(tensors.specs, only)}
    for glob in only:
        if not match_names(tensors.specs, [glob]):
            found.update((name, tensors.rank_copies[name]) for name in match_names(tensors.rank_copies, [glob]))
    taken = {exported_name(spec): name for name, spec in sorted(found.items(), reverse=True)}
    return {name: spec for name, spec in sorted(found.items()) if taken[exported_name(spec)] == name}


def is_export_of(identity: Identity, folder: Path) -> bool:
    """Whether the folder is an export of this checkpoint, or of an earlier save of the same step in the same epoch.
    Errors: DamagedData; OSError."""
    for file in folder.glob("*.safetensors"):
        with SafetensorsReader(file) as reader:
            found = reader.metadata.get("ckpt", "")
        return found.rpartition(".")[0] == str(identity).rpartition(".")[0]
    return False


def _format_of(to: str | os.PathLike[str]) -> Format:
    """The format for a file name. A folder has no ending, exists already, or is written with a / at its end. Errors:
    UsageError for another ending."""
    path = Path(to)
    if path.suffix == ".safetensors":
        return "safetensors"
    if path.suffix in (".pt", ".pth"):
        return "torch"
    if path.suffix and not path.is_dir() and not os.fspath(to).endswith("/"):
        raise UsageError(
            f"{path}: the ending {path.suffix} is not known. Give a file that ends in .safetensors, .pt or .pth, or "
            "a folder (a name without an ending, or with a / at its end), or name the format"
        )
    return "sharded"


def _target_dtype(dtype: str, wanted: str | None) -> str:
    return wanted if wanted is not None and dtype in FLOATS else dtype


def _rename(names: Sequence[str], prefix: str, patterns: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Each name with its name in the file. Errors: UsageError."""
    if prefix and not any(name.startswith(prefix) for name in names):
        raise UsageError(f"no tensor's name begins with {prefix!r}; the names begin with {', '.join(names[:8])}")
    found = {name: name.removeprefix(prefix) for name in names}
    for pattern, replacement in compile_names(patterns):
        if not any(map(pattern.search, found.values())):
            raise UsageError(
                f"no tensor's name matches {pattern.pattern!r}; the names begin with {', '.join([*found.values()][:8])}"
            )
        found = {name: pattern.sub(replacement, short) for name, short in found.items()}
    taken: dict[str, str] = {}
    for name, short in found.items():
        if not short or short in taken:
            other = (
                f"{taken[short]} and {name} would both be {short!r}" if short else f"nothing would be left of {name}"
            )
            raise UsageError(f"with these new names {other}; choose fewer tensors by name (--only)")
        taken[short] = name
    return found


def find_companions(beside: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """The files that `beside` names, by their names beside the weights: each file, and those in each folder and its
    subfolders, but for hidden ones. Errors: UsageError."""
    found: dict[str, Path] = {}
    for given in map(Path, beside):
        if not given.exists():
            raise UsageError(f"{given} does not exist, so it cannot be copied beside the weights")
        names = sorted(iglob("**", root_dir=given, recursive=True)) if given.is_dir() else [given.name]
        for name, file in ((name, given / name if given.is_dir() else given) for name in names):
            if file.is_dir():
                continue
            if name in found or file.suffix == ".safetensors" or name == INDEX:
                other = found.get(name, "the weights")
                raise UsageError(f"{file} cannot be copied beside the weights: its name is that of {other}")
            found[name] = file
    return found


def copy_companions(files: Mapping[str, Path], folder: Path) -> None:
    for name, file in files.items():
        copied = folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)
        _sync(copied)
    for parent in {(folder / name).parent for name in files}:
        _sync(parent)


def _slabs(
    reader: FrameReader,
    specs: Sequence[TensorSpec],
    dtype: str | None,
    progress: Callable[[int, int], None] | None,
) -> Iterator[memoryview]:
    """The bytes of the tensors, one after the other, in slabs; none for an empty tensor."""
    wants = [want for spec in specs for want in slabs_of(spec)]
    total, done = sum(want.box.size for want in wants), 0
    for i, bits in stream(reader, wants):
        own = wants[i].dtype
        target = _target_dtype(own, dtype)
        converted = bits if target == own else convert_floats(bits, own, target)
        done += wants[i].box.size
        if progress is not None:
            progress(done, total)
        yield converted.reshape(-1).view(np.uint8).data


def _slabs_of_next(head: TensorHead, slabs: Iterator[memoryview]) -> Iterator[memoryview]:
    """The slabs of the next tensor."""
    at = 0
    while at < head.bytes:
        slab = next(slabs)
        yield slab
        at += len(slab)


def _write_file(path: Path, header: bytes, heads: Sequence[TensorHead], slabs: Iterator[memoryview]) -> None:
    with open(path, "xb") as out:
        out.write(header)
        for head in heads:
            out.writelines(_slabs_of_next(head, slabs))
        out.flush()
        os.fsync(out.fileno())


def _write_folder(
    folder: Path, shards: Sequence[Sequence[TensorHead]], metadata: Mapping[str, str], slabs: Iterator[memoryview]
) -> None:
    """Writes several .safetensors files, one after the other, and the index that maps each tensor to its file."""
    # Made before anything is read, since a dtype may be refused.
    headers = [encode_header(heads, metadata) for heads in shards]
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for number, (header, heads) in enumerate(zip(headers, shards, strict=True), 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, header, heads, slabs)
        weight_map.update((head.name, name) for head in heads)
    total = sum(head.bytes for heads in shards for head in heads)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with open(folder / INDEX, "w") as out:
        json.dump(index, out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    _sync(folder)


def _write_torch(path: Path, heads: Sequence[TensorHead], slabs: Iterator[memoryview]) -> None:
    """Writes a file in torch's own format, which only torch can write. The tensors are collected in a mapped file
    without a name, so torch.save reads them from there and not from memory."""
    import torch

    with open(path, "xb") as file, tempfile.TemporaryFile(dir=path.parent) as scratch:
        offsets = []
        for head in heads:
            offsets.append(scratch.seek(-(-scratch.tell() // 64) * 64))
            scratch.writelines(_slabs_of_next(head, slabs))
        scratch.truncate(max(scratch.tell(), 1))
        mapped = mmap.mmap(scratch.fileno(), 0, access=mmap.ACCESS_COPY)

        def tensor(head: TensorHead, offset: int) -> Any:
            dtype, count = getattr(torch, head.dtype), math.prod(head.shape)
            if not count:
                return torch.empty(head.shape, dtype=dtype)
            return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).reshape(head.shape)

        try:
            torch.save({head.name: tensor(head, at) for head, at in zip(heads, offsets, strict=True)}, file)
        except RuntimeError as exc:
            # Then the RuntimeError is about the end of a file on a full disk: the OSError says so.
            if isinstance(exc.__context__, OSError):
                raise exc.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """A temporary path, renamed to `path` if the block succeeds and removed otherwise. An empty folder that exists is
    kept, since it may be a link, a mount or somebody's working directory. The files then move into it in order of name,
    the index last."""
    is_there = path.is_dir()
    parent = path if is_there else path.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as exc:
        file = next(each for each in (parent, *parent.parents) if os.path.lexists(each))
        raise StorageError(f"cannot write {path}: {file} is a file, not a folder; give another name") from exc
    temporary = parent / f".{path.name[:200]}.{secrets.token_hex(4)}.part"
    try:
        yield temporary
        if is_there:
            for file in sorted(temporary.iterdir()):
                os.replace(file, path / file.name)
            temporary.rmdir()
        else:
            os.replace(temporary, path)
        _sync(parent)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path, names: str) -> None:
    """Removes what killed exports to this folder have left, under temporary names of `names`, a glob. None may be
    running."""
    for left in folder.glob(f".{names}.????????.part"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
