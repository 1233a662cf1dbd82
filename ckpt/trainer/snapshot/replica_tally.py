"""What one rank leaves to others since they hold the same bytes, and what it saves itself since they do not: as its
divisions say. For the receipt; decides nothing."""

from __future__ import annotations

import threading

import numpy as np

from ckpt.layout.layout import Declaration
from ckpt.trainer.state.names import some
from ckpt.types import ITEMSIZE, counted


class ReplicaTally:
    """One per rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = ""
        self._tensors = 0
        self._bytes = 0
        self._differing: set[str] = set()

    def note(self, declaration: Declaration) -> None:
        """A snapshot was staged by that division. What differed once is remembered; what is trusted is what the newest
        one says."""
        if declaration.division == self._known:
            return
        entries, segments = declaration.layout.entries, declaration.staging.segments
        sizes = np.array([sum(b.size for b in e.boxes) * ITEMSIZE[e.dtype] for e in entries], np.int64)
        lengths = segments["length"].astype(np.float64)  # exact up to 2^53 bytes
        staged = np.bincount(segments["entry"], weights=lengths, minlength=len(entries)).astype(np.int64)
        left = sizes - staged
        with self._lock:
            self._known = declaration.division
            self._tensors, self._bytes = int((left > 0).sum()), int(left.sum())
            self._differing.update(entry.name for entry in entries if entry.owner)

    def proven(self) -> list[str]:
        """What was relied on because all ranks' hashes agreed, in words."""
        with self._lock:
            if not self._tensors:
                return []
            tensors, staged_mib = counted(self._tensors, "tensor"), self._bytes / 2**20
            return [f"replicas of {tensors} ({staged_mib:.1f} MiB that other ranks stage)"]

    def fell_back(self) -> list[str]:
        with self._lock:
            differing = sorted(self._differing)
        if not differing:
            return []
        return [f"{some(differing)} saved per rank: not the same on all ranks that hold it"]
