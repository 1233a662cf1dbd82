"""Storage for torch.distributed.checkpoint (DCP): what dcp.save writes is a checkpoint of ckpt, and dcp.load reads it.

    dcp.save(state, storage_writer=ckpt.integrations.dcp.Writer("s3://bucket/run"))
    dcp.load(state, storage_reader=ckpt.integrations.dcp.Reader("s3://bucket/run"))

`ckpt ls`, `ckpt verify`, `ckpt restore` and ckpt.open() work on such a checkpoint. No agent takes part: dcp.save
returns when the checkpoint is in the store. Each rank puts its own packs, and rank 0 puts the one record that makes the
checkpoint exist.

DCP turns each value that is not a tensor into bytes by torch.save. ckpt keeps these bytes as they are and never opens
them. At a load DCP's planner unpickles them, which is DCP's choice.
"""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

import ckpt

Id = str | os.PathLike[str]
# The key of DCP's part in a checkpoint's values and in its `about`.
KEY = "dcp"
TESTED = "2.13"

if ".".join(torch.__version__.split(".")[:2]) != TESTED:
    warnings.warn(
        f"ckpt.integrations.dcp was tested with torch {TESTED}; this is {torch.__version__}, which may differ",
        stacklevel=2,
    )


class Writer(StorageWriter):
    """A StorageWriter that saves to the run at `url`. One writer may serve many saves, one after the other.

    `step`: the checkpoint's step in `ckpt ls`. Default: the newest step in the store + 1. Give it to each save's own
    writer, or assign `writer.step`. Checkpoints of the same and of later steps become a branch.
    `codec`: "auto", "raw", "zstd" or "planes".

    dcp.save's `checkpoint_id` may be any text. It is kept with the checkpoint, and a Reader finds it by that text.
    Errors of a save: UsageError, RunInUse, SaveFailed, StorageError, within DCP's CheckpointException."""

    def __init__(
        self, url: Id, *, step: int | None = None, codec: Literal["auto", "raw", "zstd", "planes"] = "auto"
    ) -> None:
        self.url, self.step, self.codec = os.fspath(url), step, codec
        self.checkpoint_id: Id | None = None
        self._draft: ckpt.Draft | None = None

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self.checkpoint_id, self._draft = checkpoint_id, None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ckpt.UsageError(
                "dcp.save(use_collectives=False) gives each rank a checkpoint of its own; ckpt saves one checkpoint of "
                "all ranks: leave use_collectives out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Older versions of torch cache no plans.
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise ckpt.UsageError(
                "the planner has enable_plan_caching=True, so ranks reuse the plan of an earlier save, which names the "
                "earlier checkpoint. Use DefaultSavePlanner(enable_plan_caching=False)"
            )
        boxes = [_box(item) for plan in plans for item in plan.items if item.type != WriteItemType.BYTE_IO]
        total = sum(box.bytes for box in boxes)
        self._draft = ckpt.Draft.begin(self.url, step=self.step, total_bytes=total, codec=self.codec)
        return [dataclasses.replace(plan, storage_data=_Order(self._draft, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        order: _Order = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        boxes = [_box(item) for item in tensors]
        part = order.draft.write(order.rank, boxes, lambda i: _bytes_of(planner.resolve_data(tensors[i]), boxes[i]))
        values = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                values[item.index.fqn] = cast(io.BytesIO, planner.resolve_data(item)).getvalue()
        sizes = {item.index: box.bytes for item, box in zip(tensors, boxes, strict=True)}
        results = [
            # The first result carries all that rank 0 needs of this rank.
            WriteResult(item.index, sizes.get(item.index) or len(values.get(item.index.fqn, b"")), None)
            for item in plan.items
        ]
        if results:
            results[0] = dataclasses.replace(results[0], storage_data=_Written(part, values))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        draft = self._draft
        assert draft is not None  # prepare_global_plan ran in this process
        written: list[_Written] = [each[0].storage_data for each in results if each]
        values = {name: data for each in written for name, data in each.values.items()}
        mappings = metadata.planner_data or {}
        if not isinstance(mappings, dict):
            raise ckpt.UsageError(
                f"the planner's own data is a {type(mappings).__name__}, which ckpt cannot keep; it keeps a dict of "
                "plain values, as of DefaultSavePlanner"
            )
        about = {KEY: {"checkpoint_id": _text(self.checkpoint_id), "torch": torch.__version__}}
        draft.commit(
            [each.part for each in written] or [draft.write(0, [], bytes)],
            values={KEY: {"bytes": values, "mappings": mappings}},
            about=about,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return True


class Reader(StorageReader):
    """A StorageReader that loads from the run at `url`. It reads only the parts that the ranks ask for, from a
    checkpoint that any number of ranks saved.

    `step`: a step, label or identity, as `ckpt ls` shows them. dcp.load's `checkpoint_id`: the text that dcp.save was
    given. Default: the newest checkpoint. Checkpoints of a ckpt.Checkpointer can be read too, their tensors only.

    Errors of a load: NoCheckpoint, UsageError, DamagedData, StorageError, within DCP's CheckpointException."""

    def __init__(self, url: Id, *, step: int | str | None = None) -> None:
        self.url, self.step = os.fspath(url), step
        self.checkpoint_id: Id | None = None
        self._checkpoint: ckpt.Checkpoint | None = None
        self._run: ckpt.Reader | None = None

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self.checkpoint_id = checkpoint_id
        self._close()

    # Not named kwargs: DCP then does not ask again for a metadata file of each rank.
    def read_metadata(self, *args: Any, **unused: Any) -> Metadata:
        self._close()
        self._run = ckpt.open(self.url)
        self._checkpoint = found = self._find(self._run)
        state: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, info.dtype)),
                torch.Size(info.shape),
                # Any part of a tensor can be read, however it was sharded.
                [ChunkStorageMetadata(torch.Size([0] * len(info.shape)), torch.Size(info.shape))],
            )
            for name, info in found.tensors.items()
        }
        saved = _saved(found)
        state |= {name: BytesStorageMetadata() for name in saved.get("bytes", {})}
        mappings = {name: (name,) for name in state} | saved.get("mappings", {})
        return Metadata(state, planner_data=mappings)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._chosen.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len(chosen := {plan.storage_data for plan in plans}) > 1:
            raise ckpt.NoCheckpoint(
                f"{self.url}: a checkpoint was saved while the ranks looked for the newest one, and they chose "
                f"{' and '.join(sorted(map(str, chosen)))}. Load again, or give Reader(step=)"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        values = _saved(self._chosen).get("bytes", {})
        tensors = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(values[item.storage_index.fqn]))
            else:
                tensors.append(item)
        tensors.sort(key=lambda item: (item.storage_index.fqn, item.storage_offsets))
        parts = [(item.storage_index.fqn, tuple(map(_slice, item.storage_offsets, item.lengths))) for item in tensors]

        def deliver(number: int, tensor: Any) -> None:
            target = planner.resolve_tensor(tensors[number]).detach()
            target.copy_(tensor)
            planner.commit_tensor(tensors[number], target)

        try:
            self._chosen.read_parts(parts, deliver)
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return True

    @property
    def _chosen(self) -> ckpt.Checkpoint:
        assert self._checkpoint is not None  # read_metadata came first
        return self._checkpoint

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = self._checkpoint = None

    def _find(self, run: ckpt.Reader) -> ckpt.Checkpoint:
        if self.step is not None:
            return run.find(self.step)
        if self.checkpoint_id is None:
            return run.newest
        wanted = _text(self.checkpoint_id)
        for each in reversed([*run.branches, *run.checkpoints]):
            if each.error is None and each.about.get(KEY, {}).get("checkpoint_id") == wanted:
                return each
        raise ckpt.NoCheckpoint(
            f"{run.url}: no dcp.save with checkpoint_id={wanted!r:.200} is there; `ckpt ls` lists the checkpoints"
        )


@dataclasses.dataclass(frozen=True)
class _Order:
    """What rank 0 tells a rank in its plan: the draft to write to, and the rank's number."""

    draft: ckpt.Draft
    rank: int


@dataclasses.dataclass(frozen=True)
class _Written:
    """What a rank tells rank 0: the tensors that it put, and its values as bytes."""

    part: ckpt.DraftPart
    values: Mapping[str, bytes]


def _text(checkpoint_id: Id | None) -> str | None:
    return None if checkpoint_id is None else os.fspath(checkpoint_id)


def _saved(checkpoint: ckpt.Checkpoint) -> dict[str, Any]:
    """What DCP saved besides tensors: `bytes` and `mappings`; empty for a checkpoint of a Checkpointer."""
    values = checkpoint.values()
    found = values.get(KEY) if isinstance(values, dict) else None
    return found if isinstance(found, dict) and found.keys() == {"bytes", "mappings"} else {}


def _box(item: WriteItem) -> ckpt.DraftBox:
    data = item.tensor_data
    assert data is not None  # only a BYTE_IO item has none
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return ckpt.DraftBox(item.index.fqn, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _slice(offset: int, length: int) -> slice:
    return slice(offset, offset + length)


def _bytes_of(tensor: Any, box: ckpt.DraftBox) -> Any:
    """The tensor's bytes in row-major order; no copy if it lies in the CPU's memory like that."""
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        kind = tensor.layout if tensor.layout != torch.strided else type(tensor).__name__
        raise ckpt.UsageError(f"{box.name}: a tensor of the kind {kind} cannot be stored; save its parts as tensors")
    if str(tensor.dtype).removeprefix("torch.") != box.dtype or tuple(tensor.shape) != box.size:
        raise ckpt.UsageError(
            f"{box.name}: the plan says {box.dtype}{list(box.size)}, the tensor is {tensor.dtype}{list(tensor.shape)}"
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()
