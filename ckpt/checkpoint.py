"""One checkpoint in a store, as `ckpt.open` returns it: what it is, its tensors and its values."""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckpt.errors import DamagedData, NewerFormat, NoCheckpoint, NotFound, UsageError
from ckpt.policy.export_rule import hub_repository
from ckpt.types import ITEMSIZE

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckpt.format.manifest import Record, TensorSpec
    from ckpt.store.diff import Diff
    from ckpt.store.export import Exported, Format
    from ckpt.store.lineage import CommitRef
    from ckpt.store.reader import FrameReader, Values
    from ckpt.store.run import Run
    from ckpt.store.tensors import Index, TensorIndex

T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes done, bytes in all; from any thread


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without reading it. `dtype`: torch's name of the dtype. `bytes`: the size before
    compression. `coordinate`: the rank whose copy this is; "" for a tensor of the whole job. `parts`: the number of
    stored boxes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    coordinate: str = ""
    parts: int = 1


class Checkpoint:
    """One checkpoint of a run. `step`: the last ended step. `label`: "300", or "300.1" for the first save, poll or exit
    after step 300. `start`: the number of the start that saved it: 1, and one more with each restart. `is_on_line`:
    whether it is in the branch history, so that a start may restore it by itself.

    The members below read the record when they are first used. Errors: NoCheckpoint if the checkpoint was retired
    meanwhile; DamagedData, which names the object; NewerFormat; StorageError."""

    def __init__(self, run: Run, records: Sequence[CommitRef], is_on_line: bool) -> None:
        """Use `ckpt.open`. `records`: the checkpoint's records, each complete; the first one that can be read is
        used."""
        self._run, self.records, self.is_on_line = run, records, is_on_line
        self.ref = records[0]
        self._record: Record | None = None

    def __repr__(self) -> str:
        return f"<ckpt.Checkpoint of step {self.label}, {self.identity}>"

    @property
    def identity(self) -> str:
        return str(self.ref.identity)

    @property
    def step(self) -> int:
        return self.ref.identity.version.step

    @property
    def sub(self) -> int:
        """0 at the end of the step; else the number of the save, poll or exit after the step."""
        return self.ref.identity.version.sub

    @property
    def label(self) -> str:
        return self.ref.identity.version.label

    @property
    def start(self) -> int:
        return self.ref.identity.epoch.number

    @property
    def listed_s(self) -> float | None:
        """When the record reached the store, by the store's clock, in Unix seconds; None if the store tells no
        times."""
        return self.ref.saved_s

    # --- from the record ----------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        return self._record or self.use(lambda reader: reader.record)

    @cached_property
    def error(self) -> Exception | None:
        """Why the record cannot be read, or that the checkpoint was retired meanwhile; None if the record can be
        read."""
        try:
            self.use(lambda reader: None)
        except (DamagedData, NotFound, NoCheckpoint) as exc:
            return exc
        return None

    @property
    def time_s(self) -> float | None:
        """When the checkpoint was taken, in Unix seconds, as the record says; `listed_s` if the record does not say.
        The two differ in a copied run."""
        return self.listed_s if self.record.taken_s is None else self.record.taken_s

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers that were given to `ck.save(metrics=)`."""
        return self.record.metrics

    @property
    def about(self) -> Mapping[str, Any]:
        """Small facts: host, world size, versions, launch id."""
        return self.record.about

    @property
    def ranks(self) -> tuple[str, ...]:
        """The mesh coordinates of the ranks that saved the checkpoint."""
        return self.record.manifest.coordinates

    @property
    def bytes(self) -> int:
        """The size of the state, before compression."""
        return int(self.record.manifest.frames["length"].sum(dtype="u8"))

    @property
    def stored_bytes(self) -> int:
        """The bytes that were written for this checkpoint, after compression."""
        return self._own_and_shared_bytes[0]

    @property
    def shared_bytes(self) -> int:
        """The stored size of the unchanged frames, which lie in packs of earlier checkpoints."""
        return self._own_and_shared_bytes[1]

    @cached_property
    def _own_and_shared_bytes(self) -> tuple[int, int]:
        record = self.record
        lengths, packs = record.places["length"], record.places["pack"]
        own = [n for n, (key, _) in enumerate(record.packs) if key.startswith(f"data/{record.identity}/")]
        mine = sum(int(lengths[packs == n].sum(dtype="u8")) for n in own)
        return mine, int(lengths.sum(dtype="u8")) - mine

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name: "model.0.weight", "optim.state.0.weight.exp_avg", ... Equal copies of several ranks are
        one tensor. Of a module's buffers the first rank's is taken, as by a start on another number of ranks. All other
        copies are called `name@coordinate`."""
        return _make_infos(self._tensor_index.specs, self.record)

    @cached_property
    def stored_tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors as stored: also each rank's own copy of a tensor, as `name@coordinate`."""
        from ckpt.store.tensor_stream import choose_tensors, exported_name

        return _make_infos({exported_name(spec): spec for spec in choose_tensors(self.record.manifest)}, self.record)

    def tensor(self, name: str, index: Index = ()) -> npt.NDArray[Any]:
        """A tensor of `tensors` or `stored_tensors`, or a part of one, as a new NumPy array. The first ten rows:
        `tensor("model.0.weight", slice(10))`, or `tensor("model.0.weight", np.s_[:10, :])`.

        `index`: integers, slices and `...`, as for an array. Only the frames that hold that part are read. NumPy lacks
        some dtypes: bfloat16 and float8 come as float32, with exact values; complex32 comes as complex64;
        float4_e2m1fn_x2 comes as the bytes of its pairs. `torch_tensor` returns the dtype that was saved.

        Errors: UsageError for a name or an index that does not exist."""
        from ckpt.store.tensors import as_numpy, read_part

        spec = self._find_spec(name)
        return as_numpy(self.use(lambda reader: read_part(reader, spec, index)), spec.dtype)

    def torch_tensor(self, name: str, index: Index = ()) -> Any:
        """The same as a new torch.Tensor on the CPU, bit for bit, in the dtype that was saved. Needs torch."""
        from ckpt.store.tensors import as_torch, read_part

        spec = self._find_spec(name)
        return as_torch(self.use(lambda reader: read_part(reader, spec, index)), spec.dtype)

    def read_parts(self, parts: Sequence[tuple[str, Index]], deliver: Callable[[int, Any], None]) -> None:
        """Reads many parts of tensors, and calls `deliver(i, tensor)` for parts[i], in order. A part is (name, index),
        and the tensor is new, both as of `torch_tensor`. Parts of one frame share its read, so this is far faster than
        `torch_tensor` for many small tensors. Memory: the current part, and some 300 MiB.

        If a record of the checkpoint turns out to be damaged, another one is read from the first part on.
        Errors: UsageError; DamagedData; StorageError; those of `deliver`."""
        from ckpt.layout.reshard import Want
        from ckpt.store.tensor_stream import stream
        from ckpt.store.tensors import as_torch, locate_part

        specs = [self._find_spec(name) for name, _ in parts]
        places = [locate_part(spec, index) for spec, (_, index) in zip(specs, parts, strict=True)]
        wants = [
            Want(spec.name, spec.owner, spec.dtype, spec.shape, box)
            for spec, (box, _) in zip(specs, places, strict=True)
        ]

        def work(reader: FrameReader) -> None:
            for number, bits in stream(reader, wants):
                deliver(number, as_torch(bits[(*places[number][1], ...)], specs[number].dtype))

        self.use(work)

    def values(self, rank: str | None = None) -> Any:
        """The saved values that are not tensors, by their key in the state: counters, schedulers, and the
        `param_groups` of optimizers, with the names of their `params`. None stands in place of each tensor.

        `rank`: one of `ranks`, if ranks had different values. By default: the common values if there are any, else the
        first rank's."""
        from ckpt.store.trees import state_values

        found = self._value_trees
        if rank is None and found.shared is None and found.shared_by_coordinate:
            rank = next(
                each for each in (*self.ranks, *found.shared_by_coordinate) if each in found.shared_by_coordinate
            )
        return state_values(
            found.shared if rank is None else found.shared_by_coordinate.get(self._check_rank(rank), found.shared)
        )

    def rank_values(self, rank: str) -> Any:
        """The values that belong to one rank alone: `loaders`, by their key in the state, and `generators`."""
        from ckpt.store.trees import rank_values

        return rank_values(self._value_trees.own_by_coordinate.get(self._check_rank(rank)))

    def export(
        self,
        to: str | os.PathLike[str],
        *,
        format: Format | Literal["dcp"] | None = None,
        only: Sequence[str] = (),
        dtype: str | None = None,
        strip: str = "",
        names: Mapping[str, str] | None = None,
        beside: Sequence[str | os.PathLike[str]] = (),
        shard_bytes: int = 5 << 30,
        progress: Progress | None = None,
    ) -> Exported:
        """Writes tensors to a .safetensors or .pt file, or to a folder, as `ckpt restore` does. format="adapter" writes
        the folder that PEFT reads. format="dcp" writes a folder for torch's dcp.load, with the values that DCP had
        saved; it takes only `only` and `shard_bytes`.

        `only`: globs on names. `dtype`: the dtype to which floating-point tensors are converted. `strip`: a prefix that
        is removed from names. `names`: regular expressions with their replacements, applied behind `strip`. `beside`:
        files, and folders of files, to copy into the folder. `shard_bytes`: the size of a file in a folder. `to` may
        be hf://USER/NAME, a repository of the Hugging Face Hub.
        Errors: UsageError if `to` exists or an option does not fit; OSError; StorageError; see export.export."""
        from ckpt.store import hub
        from ckpt.store.export import export

        options: Any = {"format": format, "only": only, "dtype": dtype, "strip": strip, "beside": beside}
        options |= {"shard_bytes": shard_bytes, "progress": progress}
        if repository := hub_repository(to):
            if format not in (None, "sharded", "adapter"):
                raise UsageError(f"{to}: a repository gets a folder, not format={format!r}; give sharded or adapter")
            hub.check_repository(repository)
            with tempfile.TemporaryDirectory(prefix="ckpt-export-") as folder:
                made = self.export(Path(folder) / "export", **options, names=names)
                hub.upload(Path(folder) / "export", repository, f"step {self.label}")
            return replace(made, files=tuple(Path(each.name) for each in made.files))

        if format == "dcp":
            from ckpt.store.dcp_export import export_dcp

            if dtype is not None or strip or names or beside:
                raise UsageError('format="dcp" takes neither dtype=, strip=, names= nor beside=')
            return self.use(
                lambda reader: export_dcp(reader, to, only=only, shard_bytes=shard_bytes, progress=progress)
            )
        return self.use(lambda reader: export(reader, to, **options, names=[*(names or {}).items()]))

    def diff(self, other: Checkpoint, only: Sequence[str] = (), progress: Progress | None = None) -> Diff:
        """The differences between this checkpoint and another one, of any run. `only`: globs on names of tensors."""
        from ckpt.store.diff import diff

        return self.use(lambda ours: other.use(lambda theirs: diff(ours, theirs, only, progress)))

    def use(self, work: Callable[[FrameReader], T]) -> T:
        """Calls `work` with a reader of frames, and returns its result. If one record of the checkpoint is damaged the
        next one is used, and an event says so."""
        from ckpt.store.reader import FrameReader, use_readable_record

        def of(record: Record) -> T:
            found = work(FrameReader(self._run.backend, record, self._run.patience))
            self._record = record
            return found

        try:
            if (known := self._record) is not None:
                try:
                    return of(known)
                except (DamagedData, NotFound):
                    # The call below reports the damage, and tries the other records.
                    self._record = None
            return use_readable_record(self._run, self.records, of)
        except NewerFormat:
            raise
        except DamagedData as exc:
            raise DamagedData(f"{exc}; take another step: ckpt verify says which are good") from exc

    @cached_property
    def _tensor_index(self) -> TensorIndex:
        from ckpt.store.tensors import index_tensors

        return self.use(index_tensors)

    @cached_property
    def _value_trees(self) -> Values:
        from ckpt.store.reader import load_values

        return self.use(load_values)

    def _find_spec(self, name: str) -> TensorSpec:
        found = self._tensor_index.specs.get(name) or self._tensor_index.rank_copies.get(name)
        if found is None:
            there = ", ".join(list(self._tensor_index.specs)[:8]) or "no tensors"
            raise UsageError(f"step {self.label} has no tensor {name!r:.200}; there are {there}, ...: see `tensors`")
        return found

    def _check_rank(self, rank: str) -> str:
        if rank not in self.ranks:
            raise UsageError(f"step {self.label} has no rank {rank!r:.80}; there are {', '.join(self.ranks[:8])}")
        return rank


def _make_infos(specs: Mapping[str, TensorSpec], record: Record) -> Mapping[str, TensorInfo]:
    manifest = record.manifest
    parts = Counter((manifest.tensors[index].name, manifest.tensors[index].owner) for index in manifest.tensor_by_box)
    return {
        name: TensorInfo(
            spec.name,
            spec.dtype,
            spec.shape,
            math.prod(spec.shape) * ITEMSIZE[spec.dtype],
            spec.owner,
            parts[spec.name, spec.owner],
        )
        for name, spec in specs.items()
    }
