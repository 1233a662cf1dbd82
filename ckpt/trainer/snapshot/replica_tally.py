"""The replica tally of one rank: which tensors other ranks stage for it, as equal replicas, and which tensors it stages
itself because the replicas differ. It follows the divisions. It serves the run report, and decides nothing.
"""

from __future__ import annotations

import threading

import numpy as np

from ckpt.layout.layout import Declaration
from ckpt.trainer.state.names import shorten_names
from ckpt.types import ITEMSIZE, format_count


class ReplicaTally:
    """The tally. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_division = ""
        self._trusted_tensors = 0
        self._trusted_bytes = 0
        self._differing_tensors: set[str] = set()

    def note_declaration(self, declaration: Declaration) -> None:
        """Notes that a snapshot was staged by this declaration. A tensor that differed once is remembered for the run.
        The trusted replicas are those of the newest division."""
        if declaration.division == self._last_division:
            return
        entries, segments = declaration.layout.entries, declaration.staging.segments
        sizes = np.array([sum(b.size for b in e.boxes) * ITEMSIZE[e.dtype] for e in entries], np.int64)
        lengths = segments["length"].astype(np.float64)  # exact up to 2^53 bytes
        staged = np.bincount(segments["entry"], weights=lengths, minlength=len(entries)).astype(np.int64)
        left = sizes - staged
        with self._lock:
            self._last_division = declaration.division
            self._trusted_tensors, self._trusted_bytes = int((left > 0).sum()), int(left.sum())
            self._differing_tensors.update(entry.name for entry in entries if entry.owner)

    def proven(self) -> list[str]:
        """What was relied on because all ranks' hashes agreed, in words."""
        with self._lock:
            if not self._trusted_tensors:
                return []
            tensors, staged_mib = format_count(self._trusted_tensors, "tensor"), self._trusted_bytes / 2**20
            return [f"replicas of {tensors} ({staged_mib:.1f} MiB that other ranks stage)"]

    def fallbacks(self) -> list[str]:
        """The tensors that are saved per rank because their replicas differ, in words."""
        with self._lock:
            differing = sorted(self._differing_tensors)
        if not differing:
            return []
        return [f"{shorten_names(differing)} saved per rank: not the same on all ranks that hold it"]
