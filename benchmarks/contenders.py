"""The tools that `peers`, `paper` and `league` compare, each used as its own documents show.

A contender keeps one job: the weights and Adam moments of a plain model. Its calls come in this order: `save` after a
step returns as soon as training may go on; `guard` surrounds each optimizer step; `wait` returns once the last save
is stored, as far as that tool says so, and may be called by another thread. `restore` is what a user's script does at
its start: it loads the newest checkpoint into the job, and its errors are the tool's own.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

import ckpt

LAYERS = 56  # of one weight and one bias, with two moments and a step each: 448 tensors
DCP_STEP = "step-"


class Job:
    """A model and its optimizer with about `total_bytes` of state. Each step changes all tensors in the same way in
    every process, so that the digest of a step tells it from all others."""

    def __init__(self, total_bytes: int, seed: int = 0, layers: int = LAYERS) -> None:
        torch.manual_seed(seed)
        side = max(8, int((total_bytes / 3 / 4 / layers) ** 0.5))
        self.model = nn.Sequential(*(nn.Linear(side, side) for _ in range(layers)))
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        for p in self.model.parameters():
            p.grad = torch.randn_like(p) * 1e-2
        self.optim.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors, by name."""
        named = {f"model.{name}": p.data for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            named |= {f"optim.{name}.{key}": value for key, value in self.optim.state[p].items()}
        return named

    def take(self, loaded: dict[str, torch.Tensor]) -> None:
        """Copies them into the live tensors. Errors: KeyError if one is missing; RuntimeError if a shape differs."""
        for name, tensor in self.tensors().items():
            tensor.copy_(loaded[name])

    def digest(self) -> str:
        """Of all bytes of all tensors."""
        state = xxhash.xxh3_128()
        for name, tensor in self.tensors().items():
            state.update(name.encode())
            state.update(tensor.contiguous().numpy().reshape(-1).view("uint8"))
        return state.hexdigest()


class Tool(Protocol):
    """One way to keep a job at one place: a folder, or s3://bucket/prefix."""

    def save(self, step: int) -> None: ...

    def guard(self) -> AbstractContextManager[object]:
        """Surrounds each optimizer step: waits until the last save has its copy."""
        ...

    def step_ended(self) -> None: ...

    def wait(self) -> None: ...

    def restore(self) -> None:
        """Into the job; leaves the job alone if there is no checkpoint."""
        ...

    def close(self) -> None: ...


class Blocking:
    """A tool whose saves have ended when they return."""

    def __init__(self, job: Job, place: str) -> None:
        self.job, self.place = job, place

    def guard(self) -> AbstractContextManager[object]:
        return nullcontext()

    def step_ended(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass

    def folder(self) -> Path:
        Path(self.place).mkdir(parents=True, exist_ok=True)
        return Path(self.place)

    def newest(self, marker: str) -> str | None:
        """The folder with the highest number that has `marker` in it."""
        found = [path for path in self.folder().glob(f"{DCP_STEP}*") if (path / marker).exists()]
        return str(max(found, key=lambda path: int(path.name.removeprefix(DCP_STEP)))) if found else None

    def path(self, step: int) -> str:
        return f"{self.place}/{DCP_STEP}{step}"


class TorchSave(Blocking):
    """torch.save over the last file."""

    def save(self, step: int) -> None:
        torch.save(self.job.tensors(), self.folder() / "last.pt")

    def restore(self) -> None:
        if (path := self.folder() / "last.pt").exists():
            self.job.take(torch.load(path, map_location="cpu", weights_only=True))


class TorchSaveRename(TorchSave):
    """torch.save beside the last file, then os.replace."""

    def save(self, step: int) -> None:
        torch.save(self.job.tensors(), self.folder() / "last.pt.tmp")
        os.replace(self.folder() / "last.pt.tmp", self.folder() / "last.pt")


class TorchSaveS3(Blocking):
    """torch.save into memory, then boto3's upload over the last object."""

    def __init__(self, job: Job, place: str) -> None:
        import boto3

        super().__init__(job, place)
        self._bucket, _, self._prefix = place.removeprefix("s3://").partition("/")
        self._client = boto3.client("s3")

    def save(self, step: int) -> None:
        buffer = io.BytesIO()
        torch.save(self.job.tensors(), buffer)
        buffer.seek(0)
        self._client.upload_fileobj(buffer, self._bucket, f"{self._prefix}/last.pt")

    def restore(self) -> None:
        listed = self._client.list_objects_v2(Bucket=self._bucket, Prefix=f"{self._prefix}/last.pt")
        if listed.get("KeyCount"):
            buffer = io.BytesIO()
            self._client.download_fileobj(self._bucket, f"{self._prefix}/last.pt", buffer)
            buffer.seek(0)
            self.job.take(torch.load(buffer, map_location="cpu", weights_only=True))


class Safetensors(Blocking):
    """safetensors.torch.save_file over the last file."""

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        save_file(self.job.tensors(), self.folder() / "last.safetensors")

    def restore(self) -> None:
        from safetensors.torch import load_file

        if (path := self.folder() / "last.safetensors").exists():
            self.job.take(load_file(path))


class Dcp(Blocking):
    """torch.distributed.checkpoint.save into a new folder. A folder counts once .metadata is in it."""

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.job.tensors(), checkpoint_id=str(self.folder() / f"{DCP_STEP}{step}"))

    def restore(self) -> None:
        import torch.distributed.checkpoint as dcp

        if path := self.newest(".metadata"):
            dcp.load(self.job.tensors(), checkpoint_id=path)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save by a thread; the next save waits for the last one."""

    _pending: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.wait()
        self._pending = dcp.async_save(self.job.tensors(), checkpoint_id=str(self.folder() / f"{DCP_STEP}{step}"))

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()


class DcpProcess(DcpAsync):
    """The same by a process of its own."""

    def __init__(self, job: Job, place: str) -> None:
        super().__init__(job, place)
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.wait()
        path = str(self.folder() / f"{DCP_STEP}{step}")
        kind = AsyncCheckpointerType.PROCESS
        self._pending = dcp.async_save(self.job.tensors(), checkpoint_id=path, async_checkpointer_type=kind)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class DcpS3fs(Blocking):
    """DCP's async_save through fsspec and s3fs."""

    _pending: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.wait()
        self._pending = dcp.async_save(self.job.tensors(), storage_writer=self._writer(self.path(step)))
        self._last = self.path(step)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def restore(self) -> None:
        import fsspec
        import torch.distributed.checkpoint as dcp

        files, root = fsspec.core.url_to_fs(self.place)
        found = [path.split("/")[-2] for path in files.glob(f"{root}/{DCP_STEP}*/.metadata")]
        if found:
            newest = max(found, key=lambda name: int(name.removeprefix(DCP_STEP)))
            dcp.load(self.job.tensors(), storage_reader=self._reader(f"{self.place}/{newest}"))

    def _writer(self, path: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(path)

    def _reader(self, path: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(path)


class S3TorchConnector(DcpS3fs):
    """DCP's async_save through s3torchconnector's writer and reader."""

    def _writer(self, path: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        return self._at_endpoint(S3StorageWriter("us-east-1", path))

    def _reader(self, path: str) -> Any:
        from s3torchconnector.dcp import S3StorageReader

        return self._at_endpoint(S3StorageReader("us-east-1", path))

    def _at_endpoint(self, made: Any) -> Any:
        from s3torchconnector._s3client import S3Client
        from s3torchconnector._s3client.s3client_config import S3ClientConfig

        config = S3ClientConfig(force_path_style=True)
        made.fs._client = S3Client("us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
        return made


class TorchSnapshot(Blocking):
    """torchsnapshot's async_take into a new folder. A folder counts once .snapshot_metadata is in it."""

    _pending: Any = None

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        self.wait()
        self._pending = Snapshot.async_take(self.path(step), {"job": StateDict(**self.job.tensors())})

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def restore(self) -> None:
        if path := self.newest(".snapshot_metadata"):
            self._read(path)

    def _read(self, path: str) -> None:
        from torchsnapshot import Snapshot, StateDict

        state = StateDict(**self.job.tensors())
        Snapshot(path).restore({"job": state})
        self.job.take(dict(state))


class TorchSnapshotS3(TorchSnapshot):
    def newest(self, marker: str) -> str | None:
        import fsspec

        files, root = fsspec.core.url_to_fs(self.place)
        found = [path.split("/")[-2] for path in files.glob(f"{root}/{DCP_STEP}*/{marker}")]
        return f"{self.place}/{max(found, key=lambda name: int(name.removeprefix(DCP_STEP)))}" if found else None


class TorchCheckpointing(Blocking):
    """torch_checkpointing's CheckpointManager, staged without page-locked memory as its page for CPUs says, and without
    direct I/O: its buffers are not aligned, and the disks here refuse them."""

    _pending: Any = None

    def __init__(self, job: Job, place: str) -> None:
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(job, place)
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        ).build()

    def save(self, step: int) -> None:
        self.folder()
        self._pending = self._manager.save(self.path(step), {"job": self.job.tensors()})

    def guard(self) -> AbstractContextManager[object]:
        return self._manager.lock()

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def restore(self) -> None:
        # Its writer renames a finished folder into place, so each folder counts.
        found = [path for path in self.folder().glob(f"{DCP_STEP}*") if path.name.removeprefix(DCP_STEP).isdigit()]
        if found:
            newest = max(found, key=lambda path: int(path.name.removeprefix(DCP_STEP)))
            self.job.take(self._manager.load(str(newest), into={"job": self.job.tensors()})["job"])

    def close(self) -> None:
        self._manager.close()


class LmResiliency(Blocking):
    """LMResiliency's in-memory checkpoint, flushed to the folder after each save, with its CRC-32."""

    def __init__(self, job: Job, place: str) -> None:
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.checkpointing import InMemoryCheckpointManager

        super().__init__(job, place)
        options = {"interval": 1, "disk_flush_interval": 1, "disk_folder": place, "run_id": "run"}
        self._manager = InMemoryCheckpointManager(
            InMemoryCkptConfig(**options, pin_memory=False, verify_integrity=True)  # type: ignore[arg-type]
        )
        self._names = list(job.tensors())
        self._step = 0

    def save(self, step: int) -> None:
        self._manager.save_tensors(list(self.job.tensors().values()), step)
        self._step = step

    def guard(self) -> AbstractContextManager[object]:
        self._manager.maybe_wait()
        return nullcontext()

    def wait(self) -> None:
        self._manager.maybe_wait()
        if self._manager._disk.latest_flushed_step < self._step:
            self._manager.flush_to_disk(self._step)
        self._manager._disk.wait()

    def restore(self) -> None:
        if (loaded := self._manager.load_tensors()) is not None:
            self.job.take(dict(zip(self._names, loaded[0], strict=True)))

    def close(self) -> None:
        self._manager.close()


class DlRover(Blocking):
    """DLRover's flash checkpoint with StorageType.DISK, and the saver process that it starts without its launcher."""

    def __init__(self, job: Job, place: str) -> None:
        # Its sockets and shared memory are named by this; a start after the host was lost finds neither.
        os.environ["TORCHELASTIC_RUN_ID"] = f"peers-{os.getpid()}"
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        super().__init__(job, place)
        self._checkpointer, self._disk = DdpCheckpointer(str(self.folder())), StorageType.DISK
        self._step = 0

    def save(self, step: int) -> None:
        # A save is passed over, without a word to the caller, while the last one is still being written.
        while self._checkpointer._engine.latest_step != step:
            self._checkpointer.save_checkpoint(step, self.job.tensors(), storage_type=self._disk)
        self._step = step

    def wait(self) -> None:
        from dlrover.python.common.constants import CheckpointConstant

        tracker = Path(self.place, CheckpointConstant.TRACER_FILE_NAME)
        while self._step and not (tracker.exists() and tracker.read_text().strip() == str(self._step)):
            time.sleep(0.01)  # its own wait_latest_checkpoint looks every 3 s

    def restore(self) -> None:
        if loaded := self._checkpointer.load_checkpoint():
            self.job.take(loaded.get("model_states", loaded))

    def close(self) -> None:
        self._checkpointer._engine.close()
        self._checkpointer._engine.saver_proc.kill()


class Ckpt(Blocking):
    """ckpt: a start enters the block. `stalls_s`: what each snapshot took of the loop, late copies and all."""

    def __init__(self, job: Job, place: str, codec: str = "auto", lazy: bool = True) -> None:
        super().__init__(job, place)
        state = {"model": job.model, "optim": job.optim}
        policy = ckpt.Every(steps=10**8)
        self._ck = ckpt.Checkpointer(place, state, policy=policy, codec=codec, lazy=lazy, peers=None)
        self._entered = False
        self._handle: ckpt.Handle | None = None

    def save(self, step: int) -> None:
        self._enter()
        self._handle = self._ck.save()

    def step_ended(self) -> None:
        self._enter()
        self._ck.step()

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait("store")

    def restore(self) -> None:
        self._enter()

    def stalls_s(self) -> list[float]:
        return list(self._ck._receipt.stalls_s)

    def close(self) -> None:
        """Leaves the block as at the end of a run, but saves no last step."""
        if self._entered:
            with suppress(EndOfRun):
                end = EndOfRun()
                self._ck.__exit__(EndOfRun, end, None)

    def _enter(self) -> None:
        if not self._entered:
            self._ck.__enter__()
            self._entered = True


class EndOfRun(Exception):
    """Ends a block of ckpt without a last save."""


@dataclass(frozen=True)
class Contender:
    """`needs`: the modules that have to be installed. `folder`, `s3`: the tool at such a place; None: it has none."""

    name: str
    needs: tuple[str, ...] = ()
    folder: Callable[[Job, str], Tool] | None = None
    s3: Callable[[Job, str], Tool] | None = None

    def at(self, kind: str) -> Callable[[Job, str], Tool] | None:
        return self.folder if kind == "folder" else self.s3

    def why_not(self) -> str | None:
        """Why it cannot run here; None where it can."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if missing:
            return f"{', '.join(missing)} not installed (pip install multilevel-ckpt[bench-peers])"
        return None

    def make(self, job: Job, place: str) -> Tool:
        made = self.at("s3" if "://" in place else "folder")
        assert made is not None, f"{self.name} at {place}"
        return made(job, place)


def _ckpt(codec: str, lazy: bool) -> Callable[[Job, str], Tool]:
    return lambda job, place: Ckpt(job, place, codec, lazy)


CONTENDERS = [
    Contender("torch.save", (), TorchSave),
    Contender("torch.save, renamed", (), TorchSaveRename),
    Contender("torch.save, boto3", ("boto3",), None, TorchSaveS3),
    Contender("safetensors", ("safetensors",), Safetensors),
    Contender("DCP save", (), Dcp),
    Contender("DCP async, thread", (), DcpAsync),
    Contender("DCP async, process", (), DcpProcess),
    Contender("DCP async, s3fs", ("s3fs",), None, DcpS3fs),
    Contender("DCP async, s3torchconnector", ("s3torchconnector", "tenacity", "s3fs"), None, S3TorchConnector),
    Contender("torchsnapshot", ("torchsnapshot", "s3fs"), TorchSnapshot, TorchSnapshotS3),
    Contender("torch_checkpointing", ("torch_checkpointing",), TorchCheckpointing),
    Contender("LMResiliency", ("lm_resiliency",), LmResiliency),
    Contender("DLRover", ("dlrover", "grpc", "kubernetes"), DlRover),
    *(
        Contender(f"ckpt, {codec}, {'deferred' if lazy else 'eager'}", (), _ckpt(codec, lazy), _ckpt(codec, lazy))
        for codec in ("auto", "raw")
        for lazy in (True, False)
    ),
]
BY_NAME = {each.name: each for each in CONTENDERS}


def quiet() -> None:
    """What the tools say on the way is not part of a result."""
    warnings.simplefilter("ignore")
    if sys.warnoptions == []:
        os.environ["PYTHONWARNINGS"] = "ignore"
