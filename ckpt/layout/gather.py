"""The gather step of readers without torch: fills NumPy arrays from frames, by the cuts of `reshard.cuts`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import DamagedData
from ckpt.layout.reshard import Cut, split_dimensions


def apply_cuts(cuts: Iterable[Cut], frame: int, data: npt.NDArray[np.uint8], outs: Sequence[npt.NDArray[Any]]) -> None:
    """Copies the cuts of frame number `frame` into `outs`. Cuts of other frames are skipped.

    `data`: the raw bytes of the frame, one dimension, contiguous. `outs`: an array for each want, of its box's shape.
    Its dtype may be any of the checkpoint's element size, such as uint16 for bfloat16. Errors: DamagedData if a cut
    reaches out of the frame.
    """
    for cut in cuts:
        if cut.frame == frame:
            for part in split_dimensions(cut, outs[cut.want].shape, outs[cut.want].itemsize):
                _apply(part, frame, data, outs[cut.want])


def _apply(cut: Cut, frame: int, data: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> None:
    strides = tuple(s * out.itemsize for s in cut.strides)
    end = cut.offset + sum((n - 1) * s for n, s in zip(cut.shape, strides, strict=True)) + out.itemsize
    if cut.offset < 0 or end > data.nbytes:
        raise DamagedData(f"frame {frame} has {data.nbytes} bytes; the checkpoint uses {end} bytes of it")
    view = np.ndarray(cut.shape, out.dtype, data.data, cut.offset, strides)
    out[tuple(slice(a, a + n) for a, n in zip(cut.box_offset, cut.shape, strict=True))] = view
