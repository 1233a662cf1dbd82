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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import iglob
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ckpt.errors import StorageError, UsageError
from ckpt.format.manifest import TensorSpec
from ckpt.format.safetensors import SafetensorsReader, SafetensorsWriter, TensorHead, check_heads
from ckpt.layout.reshard import Want
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
    short, specs = _rename(list(chosen), strip, names), list(chosen.values())
    new_names = {exported_name(spec): short[name] for name, spec in chosen.items()}
    heads = [TensorHead(new_names[exported_name(s)], _target_dtype(s.dtype, dtype), s.shape) for s in specs]
    metadata = {"format": "pt", "ckpt": str(reader.record.identity)}
    with temporary_path(path) as temporary:
        if format == "torch":
            sink: _Sink = _TorchFile(temporary, heads)
        elif format == "sharded":
            sink = _Folder(temporary, heads, shard_bytes, metadata)
        elif format == "adapter":
            temporary.mkdir()
            sink = SafetensorsWriter(temporary / ADAPTER, heads, metadata)
        else:
            sink = SafetensorsWriter(temporary, heads, metadata)
        with sink:
            _copy_tensors(reader, [want for spec in specs for want in slabs_of(spec)], new_names, dtype, sink, progress)
        copy_companions(companions, temporary)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if is_folder else [path]
    firsts = tuple(name for name in tensors.first_rank_names if name in chosen)
    return Exported(tuple(files), len(heads), sum(head.bytes for head in heads), firsts)


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


class _Sink(Protocol):
    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


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


def _copy_tensors(
    reader: FrameReader,
    wants: Sequence[Want],
    names: Mapping[str, str],
    dtype: str | None,
    sink: _Sink,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(want.box.size for want in wants)
    done = 0
    at: dict[str, int] = {}
    for i, bits in stream(reader, wants):
        want = wants[i]
        target = _target_dtype(want.dtype, dtype)
        if target != want.dtype:
            bits = convert_floats(bits, want.dtype, target)
        name = names[exported_name(want)]
        sink.write(name, bits.reshape(-1).view(np.uint8).data, at.get(name, 0))
        at[name] = at.get(name, 0) + bits.nbytes
        done += want.box.size
        if progress is not None:
            progress(done, total)


class _Folder:
    """A folder of several .safetensors files, and the index that maps each tensor to its file. Tensors must come in the
    order of `heads`. So only one file is open at a time: there may be more files than a process may open."""

    def __init__(self, folder: Path, heads: Sequence[TensorHead], shard_bytes: int, metadata: dict[str, str]) -> None:
        # A tensor larger than a shard gets a file of its own.
        self._shards = [heads[batch] for batch in split_by_bytes((head.bytes for head in heads), shard_bytes)]
        for shard in self._shards:
            # Checked before anything is read.
            check_heads(shard, metadata)
        folder.mkdir()
        self._folder = folder
        self._metadata = metadata
        self._shard_by_tensor: dict[str, int] = {head.name: i for i, shard in enumerate(self._shards) for head in shard}
        self._file_names = [
            f"model-{i + 1:05d}-of-{len(self._shards):05d}.safetensors" for i in range(len(self._shards))
        ]
        self._bytes = sum(head.bytes for head in heads)
        self._shards_begun = 0
        # The last file that was begun.
        self._file: SafetensorsWriter | None = None

    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        self._open_shard(self._shard_by_tensor[name]).write(name, data, offset)

    def _open_shard(self, number: int) -> SafetensorsWriter:
        """The file of that number. All files before it are finished."""
        while self._file is None or self._shards_begun <= number:
            self._close_file()
            path, shard = self._folder / self._file_names[self._shards_begun], self._shards[self._shards_begun]
            self._file = SafetensorsWriter(path, shard, self._metadata)
            self._shards_begun += 1
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            if self._file is not None:
                self._file.abandon()
            return
        self._open_shard(len(self._shards) - 1)
        self._close_file()
        weight_map = {name: self._file_names[i] for name, i in sorted(self._shard_by_tensor.items())}
        index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
        with open(self._folder / INDEX, "w") as out:
            json.dump(index, out, indent=2)
            out.flush()
            os.fsync(out.fileno())
        _sync(self._folder)


class _TorchFile:
    """A file in torch's own format, which only torch can write. The tensors are collected in a mapped file beside it,
    so torch.save reads them from there and not from memory."""

    def __init__(self, path: Path, heads: Sequence[TensorHead]) -> None:
        self._path = path
        self._scratch_path = path.with_name(path.name + ".tensors")
        self._heads = heads
        self._offsets: dict[str, int] = {}
        end = 0
        for head in heads:
            self._offsets[head.name] = end
            end += -(-head.bytes // 64) * 64
        self._size = max(end, 1)
        self._scratch_fd = os.open(self._scratch_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        left, at = memoryview(data).cast("B"), self._offsets[name] + offset
        while len(left):
            written = os.pwrite(self._scratch_fd, left, at)
            left, at = left[written:], at + written

    def __enter__(self) -> _TorchFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._save()
        finally:
            os.close(self._scratch_fd)
            self._scratch_path.unlink()

    def _save(self) -> None:
        import torch

        os.ftruncate(self._scratch_fd, self._size)
        mapped = mmap.mmap(self._scratch_fd, self._size, access=mmap.ACCESS_COPY)

        def tensor(head: TensorHead) -> Any:
            dtype = getattr(torch, head.dtype)
            if head.bytes == 0:
                return torch.empty(head.shape, dtype=dtype)
            count = math.prod(head.shape)
            return torch.frombuffer(mapped, dtype=dtype, count=count, offset=self._offsets[head.name]).reshape(
                head.shape
            )

        with open(self._path, "wb") as file:
            try:
                torch.save({head.name: tensor(head) for head in self._heads}, file)
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
