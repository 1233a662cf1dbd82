"""One checkpoint in a store, as `ckpt.open` gives it: what it is, its tensors and its values."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.errors import DamagedData, NewerFormat, NoCheckpoint, NotFound, UsageError
from ckpt.types import ITEMSIZE

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckpt.format.manifest import Record, TensorSpec
    from ckpt.store.diff import Diff
    from ckpt.store.export import Exported, Format
    from ckpt.store.lineage import CommitRef
    from ckpt.store.reader import FrameReader
    from ckpt.store.run import Run
    from ckpt.store.tensors import Index, TensorIndex

T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes done, bytes in all; from any thread


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`dtype`: torch's name of it. `coordinate`: of the rank whose copy it is; "" for a tensor of the job. `parts`: in
    how many boxes it is stored. `bytes`: before it is compressed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    coordinate: str = ""
    parts: int = 1


class Checkpoint:
    """One checkpoint of a run. `step`: the last step that had ended. `label`: "300", or "300.1" for the first save,
    poll or exit after step 300. `start`: the number of the start that saved it: 1, and one more with each restart.
    `is_on_line`: whether a start may go on from it by itself.

    What is below reads the record when it is first asked for. Errors: NoCheckpoint where the checkpoint was retired
    meanwhile; DamagedData names the object; NewerFormat; StorageError."""

    def __init__(self, run: Run, records: Sequence[CommitRef], is_on_line: bool) -> None:
        """Use `ckpt.open`. `records`: its records, each complete, of which the first that can be read counts."""
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
        return self.ref.identity.tick.step

    @property
    def sub(self) -> int:
        """0 at the end of the step; else the number of the save, poll or exit after it."""
        return self.ref.identity.tick.sub

    @property
    def label(self) -> str:
        return self.ref.identity.tick.label

    @property
    def start(self) -> int:
        return self.ref.identity.epoch.number

    @property
    def listed_s(self) -> float | None:
        """When the store got the record, by its clock, in Unix seconds; None where it tells no times."""
        return self.ref.saved_s

    # --- from the record ----------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        return self._record or self.use(lambda reader: reader.record)

    @cached_property
    def error(self) -> Exception | None:
        """What is wrong with the record, or that the checkpoint was retired meanwhile; None where it can be read."""
        try:
            self.use(lambda reader: None)
        except (DamagedData, NotFound, NoCheckpoint) as exc:
            return exc
        return None

    @property
    def time_s(self) -> float | None:
        """When it was taken, in Unix seconds, as the record says; else as `listed_s`. Those differ in a copied run."""
        return self.listed_s if self.record.taken_s is None else self.record.taken_s

    @property
    def metrics(self) -> Mapping[str, float]:
        """What `ck.save(metrics=)` was given."""
        return self.record.metrics

    @property
    def about(self) -> Mapping[str, Any]:
        """Small facts: host, world size, versions, launch."""
        return self.record.about

    @property
    def ranks(self) -> tuple[str, ...]:
        """The coordinates of the ranks that saved it."""
        return self.record.manifest.coordinates

    @property
    def bytes(self) -> int:
        """The size of the state."""
        return int(self.record.manifest.frames["length"].sum(dtype="u8"))

    @property
    def stored_bytes(self) -> int:
        """What was written for it, compressed."""
        return self._placed_bytes[0]

    @property
    def shared_bytes(self) -> int:
        """The stored size of frames that did not change, and lie in packs of earlier checkpoints."""
        return self._placed_bytes[1]

    @cached_property
    def _placed_bytes(self) -> tuple[int, int]:
        record = self.record
        lengths, packs = record.places["length"], record.places["pack"]
        own = [n for n, (key, _) in enumerate(record.packs) if key.startswith(f"data/{record.identity}/")]
        mine = sum(int(lengths[packs == n].sum(dtype="u8")) for n in own)
        return mine, int(lengths.sum(dtype="u8")) - mine

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name: "model.0.weight", "optim.state.0.weight.exp_avg", ... Of copies that ranks had of one tensor, those
        that are equal are one tensor, and of a module's buffers the first rank's counts, as for a start on another
        number of ranks. Other copies are called `name@coordinate`."""
        return _infos(self._named.specs, self.record)

    @cached_property
    def stored_tensors(self) -> Mapping[str, TensorInfo]:
        """Everything that is stored: also each rank's copy of a tensor, by `name@coordinate`."""
        from ckpt.store.tensor_stream import chosen, exported_name

        return _infos({exported_name(spec): spec for spec in chosen(self.record.manifest)}, self.record)

    def tensor(self, name: str, index: Index = ()) -> npt.NDArray[Any]:
        """A tensor of `tensors` or `stored_tensors`, or a part of it, as a new NumPy array. The first ten rows:
        `tensor("model.0.weight", slice(10))`, or `tensor("model.0.weight", np.s_[:10, :])`.

        `index`: integers, slices and `...`, as for an array; only the frames that hold that part are read. NumPy has no
        bfloat16 and no float8: these come as float32, each value exactly; complex32 comes as complex64, and
        float4_e2m1fn_x2 as the bytes of its pairs. `torch_tensor` gives the dtype that was saved.

        Errors: UsageError for a name or an index that is not there."""
        from ckpt.store.tensors import as_numpy, read

        spec = self._spec(name)
        return as_numpy(self.use(lambda reader: read(reader, spec, index)), spec.dtype)

    def torch_tensor(self, name: str, index: Index = ()) -> Any:
        """The same as a new torch.Tensor on the CPU, bit for bit, in the dtype that was saved. Needs torch."""
        from ckpt.store.tensors import as_torch, read

        spec = self._spec(name)
        return as_torch(self.use(lambda reader: read(reader, spec, index)), spec.dtype)

    def values(self, rank: str | None = None) -> Any:
        """What was saved besides tensors, by its key in the state: counters, schedulers, and of optimizers the
        `param_groups` with the names of their `params`. None stands where a tensor stood. `rank`: a coordinate out of
        `ranks`, where ranks had different values; by default what all had in common, else the first rank's."""
        from ckpt.store.trees import of_state

        found = self._values
        if rank is None and found.shared is None and found.own_shared:
            rank = next(each for each in (*self.ranks, *found.own_shared) if each in found.own_shared)
        return of_state(found.shared if rank is None else found.own_shared.get(self._known(rank), found.shared))

    def rank_values(self, rank: str) -> Any:
        """What one rank has of its own: `loaders`, by their key in the state, and `generators`."""
        from ckpt.store.trees import of_rank

        return of_rank(self._values.own.get(self._known(rank)))

    def export(
        self,
        to: str | os.PathLike[str],
        *,
        format: Format | None = None,
        only: Sequence[str] = (),
        dtype: str | None = None,
        strip: str = "",
        shard_bytes: int = 5 << 30,
        progress: Progress | None = None,
    ) -> Exported:
        """Writes tensors to a .safetensors or .pt file, or to a folder: what `ckpt restore` does.

        `only`: globs on names. `dtype`: what floating-point tensors become. `strip`: a prefix that is taken off names.
        Errors: UsageError where `to` is there or an option does not fit; OSError; see export.export."""
        from ckpt.store.export import export

        how: Any = {"format": format, "only": only, "dtype": dtype, "strip": strip, "shard_bytes": shard_bytes}
        return self.use(lambda reader: export(reader, to, **how, progress=progress))

    def diff(self, other: Checkpoint, only: Sequence[str] = (), progress: Progress | None = None) -> Diff:
        """What differs between this checkpoint and another one, of any run. `only`: globs on names of tensors."""
        from ckpt.store.diff import diff

        return self.use(lambda ours: other.use(lambda theirs: diff(ours, theirs, only, progress)))

    def use(self, work: Callable[[FrameReader], T]) -> T:
        """The result of `work`, which reads frames. Where one record of the checkpoint is damaged the next one is
        taken, and an event says that."""
        from ckpt.store.reader import FrameReader, any_readable

        def of(record: Record) -> T:
            found = work(FrameReader(self._run.backend, record, self._run.patience))
            self._record = record
            return found

        try:
            if (known := self._record) is not None:
                try:
                    return of(known)
                except (DamagedData, NotFound):
                    self._record = None  # below it is said what is wrong, and another record may do
            return any_readable(self._run, self.records, of)
        except NewerFormat:
            raise
        except DamagedData as exc:
            raise DamagedData(f"{exc}; take another step: ckpt verify says which are good") from exc

    @cached_property
    def _named(self) -> TensorIndex:
        from ckpt.store.tensors import named

        return self.use(named)

    @cached_property
    def _values(self) -> Any:
        from ckpt.store.reader import load_values

        return self.use(load_values)

    def _spec(self, name: str) -> TensorSpec:
        found = self._named.specs.get(name) or self._named.copies.get(name)
        if found is None:
            there = ", ".join(list(self._named.specs)[:8]) or "no tensors"
            raise UsageError(f"step {self.label} has no tensor {name!r:.200}; there are {there}, ...: see `tensors`")
        return found

    def _known(self, rank: str) -> str:
        if rank not in self.ranks:
            raise UsageError(f"step {self.label} has no rank {rank!r:.80}; there are {', '.join(self.ranks[:8])}")
        return rank


def _infos(specs: Mapping[str, TensorSpec], record: Record) -> Mapping[str, TensorInfo]:
    manifest = record.manifest
    parts = Counter((manifest.tensors[index].name, manifest.tensors[index].owner) for index, _ in manifest.boxes)
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
