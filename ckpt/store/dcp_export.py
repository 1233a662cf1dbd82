"""A checkpoint becomes a folder of torch.distributed.checkpoint (DCP), which dcp.load reads without ckpt.

torch's own FileSystemWriter writes the folder, so it always has the form that the installed torch reads. The tensors
are streamed: the writer asks for one slab after the other. Values that DCP had saved come back as they were. Values of
a ckpt.Checkpointer are not exported, since DCP has no counterpart for them.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.errors import UsageError
from ckpt.store.dcp_import import KEY, SLAB_BYTES
from ckpt.store.export import SHARD_BYTES, Exported, choose_exported, temporary_path
from ckpt.store.reader import FrameReader, load_values
from ckpt.store.tensor_stream import check_globs, match_names, slabs_of, stream
from ckpt.store.tensors import as_torch, index_tensors
from ckpt.types import ITEMSIZE, split_by_bytes


def export_dcp(
    reader: FrameReader,
    to: str | os.PathLike[str],
    *,
    only: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Writes a DCP folder. Needs torch. `only`: globs on names. `shard_bytes`: the size of a .distcp file, about.
    `progress(done, total)`: elements. Errors: UsageError if `to` exists, or a glob matches nothing; DamagedData;
    StorageError; OSError."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

    path = Path(to)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} exists already; remove it, or give another name")
    tensors, (values, mappings) = index_tensors(reader), saved_values(reader)
    chosen = choose_exported(tensors, only)
    names = match_names(values, only)
    check_globs(only, [*chosen, *tensors.rank_copies, *values], str(reader.record.identity))

    wants = [want for spec in chosen.values() for want in slabs_of(spec, SLAB_BYTES)]
    name_of = {(spec.name, spec.owner): name for name, spec in chosen.items()}

    def item(name: str, dtype: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> WriteItem:
        return WriteItem(
            dcp.MetadataIndex(name, offset),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(size)),
                dcp.TensorProperties(dtype=getattr(torch, dtype)),
                torch.Size(shape),
            ),
        )

    filled = [
        item(name_of[want.name, want.owner], want.dtype, want.shape, want.box.offset, want.box.shape) for want in wants
    ]
    empty = [
        item(name, spec.dtype, spec.shape, [0] * len(spec.shape), spec.shape)
        for name, spec in chosen.items()
        if not math.prod(spec.shape)
    ]
    total, done = sum(want.box.size for want in wants), 0
    found = iter(stream(reader, wants))
    last: torch.Tensor = torch.empty(0)

    class Planner(SavePlanner):
        """Gives the writer each item's data, in the order of the plans."""

        def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...
        def create_local_plan(self) -> SavePlan:
            raise NotImplementedError

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
            raise NotImplementedError

        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return new_plan

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            nonlocal done, last
            # The writer keeps the tensors that it has written until the file ends. Their memory is let go here.
            last.untyped_storage().resize_(0)
            data = write_item.tensor_data
            if data is None:
                return io.BytesIO(values[write_item.index.fqn])
            if not math.prod(data.size):
                return torch.empty(data.size, dtype=data.properties.dtype)
            number, bits = next(found)
            assert tuple(data.chunk.offsets) == wants[number].box.offset  # the writer keeps the order
            done += wants[number].box.size
            if progress is not None:
                progress(done, total)
            # A copy, since the storage of a NumPy array cannot be let go.
            last = as_torch(bits, wants[number].dtype).clone()
            return last

    first = [WriteItem(dcp.MetadataIndex(name), WriteItemType.BYTE_IO) for name in names] + empty
    sizes = [want.box.size * ITEMSIZE[want.dtype] for want in wants]
    groups = [first, *(filled[batch] for batch in split_by_bytes(sizes, shard_bytes))]
    plans, metadata = create_default_global_save_plan([SavePlan(items) for items in groups if items])
    kept = {*chosen, *names}
    metadata.planner_data = {name: mappings.get(name, (name,)) for name in kept}
    with temporary_path(path) as temporary:
        writer, planner = FileSystemWriter(temporary, per_thread_copy_ahead=0), Planner()
        writer.set_up_storage_writer(True)
        for plan in plans:
            writer.prepare_local_plan(plan)
        results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
        writer.finish(metadata, results)
    size = sum(math.prod(spec.shape) * ITEMSIZE[spec.dtype] for spec in chosen.values())
    firsts = tuple(name for name in tensors.first_rank_names if name in chosen)
    return Exported(tuple(sorted(path.iterdir())), len(chosen), size, firsts)


def saved_values(reader: FrameReader) -> tuple[Mapping[str, bytes], Mapping[str, tuple[str | int, ...]]]:
    """(bytes, mappings) of the items that DCP had saved besides tensors; empty for a checkpoint of a Checkpointer."""
    shared = load_values(reader).shared
    saved = shared.get(KEY) if isinstance(shared, dict) else None
    if not isinstance(saved, dict) or saved.keys() != {"bytes", "mappings"}:
        return {}, {}
    return saved["bytes"], saved["mappings"]
