"""A trained predictor: its file, and its answers in NumPy. `ckpt predict train` writes the file and an agent reads it.

The file, all numbers little-endian: 8 bytes "ckptpred", u32 version (1), u32 length of the header, the header (JSON, at
most 64 KiB), the arrays (float32, row-major, without gaps, in the order of `shapes`), SHA-256 of all before it. At most
4 MiB. Nothing in the file is executed.

The network is one bidirectional LSTM over the newest `window` readings (after Tran et al. 2022; Hochreiter and
Schmidhuber 1997). One linear layer turns its two last states into a logit, calibrated as in `calibration`. A reading is
standardised by the training nodes' mean and deviation, and cut off at Z_MAX. A missing signal counts as the mean.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import DamagedData, UsageError
from ckpt.predict.calibration import sigmoid

Floats = npt.NDArray[np.float32]

MAGIC = b"ckptpred"
VERSION = 1
FILE_BYTES_MAX = 4 << 20
HEADER_BYTES_MAX = 1 << 16
SIGNALS_MAX = 64
HIDDEN_MAX = 64
WINDOW_MAX = 512
Z_MAX = 8.0
_HEAD = struct.Struct("<8sII")
_NUMBERS = ("period_s", "alarm_above", "slope", "shift")


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained predictor. `signals`: their names, in column order. `window`: its number of readings, `period_s` apart.
    `hidden`: the size of each direction's state. `alarm_above`: the probability that is an alarm. `arrays`: see
    `shapes`. `report`: its quality as measured by the training, for people."""

    signals: tuple[str, ...]
    window: int
    hidden: int
    period_s: float
    alarm_above: float
    slope: float
    shift: float
    arrays: Mapping[str, Floats]
    report: Mapping[str, float]

    def rows(self, readings: Sequence[Mapping[str, float]]) -> Floats:
        """Readings as standardised input rows of the network."""
        mean, deviation = self.arrays["mean"], self.arrays["deviation"]
        raw = np.array([[each.get(name, math.nan) for name in self.signals] for each in readings], dtype=np.float64)
        z = (raw.reshape(len(readings), len(self.signals)) - mean) / deviation
        return np.clip(np.nan_to_num(z, nan=0.0, posinf=Z_MAX, neginf=-Z_MAX), -Z_MAX, Z_MAX).astype(np.float32)

    def logits(self, windows: Floats) -> npt.NDArray[np.float64]:
        """The uncalibrated logits of windows of shape (n, window, signals)."""
        a = self.arrays
        ahead = _last_state(windows, a["input_ahead"], a["state_ahead"], a["bias_ahead"])
        back = _last_state(windows[:, ::-1], a["input_back"], a["state_back"], a["bias_back"])
        found = np.concatenate([ahead, back], axis=1) @ a["out"] + a["out_bias"][0]
        return np.asarray(found, dtype=np.float64)

    def probabilities(self, windows: Floats) -> npt.NDArray[np.float64]:
        return sigmoid(self.slope * self.logits(windows) + self.shift)


def shapes(signals: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays, in the order of the file. The gates of the LSTM follow each other: input, forget, cell,
    output."""
    found: dict[str, tuple[int, ...]] = {"mean": (signals,), "deviation": (signals,)}
    for way in ("ahead", "back"):
        found |= {
            f"input_{way}": (4 * hidden, signals),
            f"state_{way}": (4 * hidden, hidden),
            f"bias_{way}": (4 * hidden,),
        }
    return found | {"out": (2 * hidden,), "out_bias": (1,)}


def _last_state(windows: Floats, inputs: Floats, states: Floats, bias: Floats) -> Floats:
    """The LSTM's state after the last reading of each window."""
    count, length, _ = windows.shape
    size = states.shape[1]
    fed = windows @ inputs.T + bias
    h = np.zeros((count, size), dtype=np.float32)
    c = np.zeros((count, size), dtype=np.float32)
    for t in range(length):
        gates = fed[:, t] + h @ states.T
        i, f, g, o = (gates[:, k * size : (k + 1) * size] for k in range(4))
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
        h = _sigmoid(o) * np.tanh(c)
    return h


def _sigmoid(x: Floats) -> Floats:
    # By tanh, which never overflows.
    found: Floats = np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1))
    return found


class PredictorReader:
    """A trained predictor in use, fed one reading at a time. `alarm_above`: the probability that is an alarm."""

    def __init__(self, trained: Trained) -> None:
        self.alarm_above = trained.alarm_above
        self._predictor = trained
        self._rows: collections.deque[Floats] = collections.deque(maxlen=trained.window)

    def add_reading(self, values: dict[str, float]) -> float | None:
        """The probability after one more reading; None while there are too few readings."""
        self._rows.append(self._predictor.rows([values])[0])
        if len(self._rows) < self._predictor.window:
            return None
        return float(self._predictor.probabilities(np.stack(self._rows)[None])[0])


# -- the file


def save(trained: Trained, path: str | os.PathLike[str]) -> None:
    """Writes the predictor. The file appears only when it is complete. Errors: UsageError if it could not be read back;
    OSError."""
    wanted = shapes(len(trained.signals), trained.hidden)
    if {name: each.shape for name, each in trained.arrays.items()} != wanted:
        raise UsageError("the arrays of the predictor do not have the shapes of its network")
    header = {
        "signals": list(trained.signals),
        "window": trained.window,
        "hidden": trained.hidden,
        **{name: getattr(trained, name) for name in _NUMBERS},
        "report": dict(trained.report),
    }
    text = json.dumps(header).encode()
    arrays = [np.ascontiguousarray(trained.arrays[name], dtype="<f4").tobytes() for name in wanted]
    body = b"".join([_HEAD.pack(MAGIC, VERSION, len(text)), text, *arrays])
    data = body + hashlib.sha256(body).digest()
    try:
        _decode_file(data)
    except _BadModel as wrong:
        raise UsageError(f"the predictor could not be read back: {wrong}") from None
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Trained:
    """Reads a predictor. Errors: DamagedData if the file is not a predictor, or is damaged; OSError."""
    with open(path, "rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    try:
        return _decode_file(data)
    except _BadModel as wrong:
        raise DamagedData(f"{os.fspath(path)} is not a predictor that ckpt can read: {wrong}") from None


class _BadModel(Exception):
    """The data are no valid predictor; the message says why."""


def _decode_file(data: bytes) -> Trained:
    if len(data) > FILE_BYTES_MAX:
        raise _BadModel(f"it has more than {FILE_BYTES_MAX} bytes")
    if len(data) < _HEAD.size + 32 or not data.startswith(MAGIC):
        raise _BadModel("it does not begin like a predictor")
    _, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise _BadModel(f"its version is {version}; this ckpt reads version {VERSION}")
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise _BadModel("its content does not match its hash")
    body = data[_HEAD.size : -32]
    if length > min(HEADER_BYTES_MAX, len(body)):
        raise _BadModel(f"its header of {length} bytes is too long")
    try:
        header = json.loads(body[:length])
    except (ValueError, RecursionError):
        raise _BadModel("its header is not JSON") from None
    return _parse_predictor(header, body[length:])


def _parse_predictor(header: Any, data: bytes) -> Trained:
    if not isinstance(header, dict):
        raise _BadModel("its header is not a JSON object")
    signals, report = header.get("signals"), header.get("report")
    if (
        not isinstance(signals, list)
        or not 0 < len(signals) <= SIGNALS_MAX
        or len(set(map(str, signals))) < len(signals)
    ):
        raise _BadModel(f"its signals are not a list of 1 to {SIGNALS_MAX} different names")
    if not all(isinstance(name, str) and 0 < len(name) <= 100 for name in signals):
        raise _BadModel("a signal has no name of 1 to 100 characters")
    window, hidden = _whole(header, "window", WINDOW_MAX), _whole(header, "hidden", HIDDEN_MAX)
    numbers = {name: _number(header.get(name), name) for name in _NUMBERS}
    if not 0 < numbers["alarm_above"] <= 1 or numbers["period_s"] <= 0:
        raise _BadModel("its alarm_above or its period_s is out of range")
    if not isinstance(report, dict) or len(report) > 100:
        raise _BadModel("its report is not an object of at most 100 numbers")
    told = {str(name)[:100]: _number(each, "report") for name, each in report.items()}
    arrays, at = dict[str, Floats](), 0
    for name, shape in shapes(len(signals), hidden).items():
        count = math.prod(shape)
        if len(data) < at + 4 * count:
            raise _BadModel("it is too short for its arrays")
        arrays[name] = np.frombuffer(data, dtype="<f4", count=count, offset=at).reshape(shape)
        at += 4 * count
        if not np.isfinite(arrays[name]).all():
            raise _BadModel(f"its array {name} holds a value that is not finite")
    if at != len(data) or not (arrays["deviation"] > 0).all():
        raise _BadModel("its arrays do not match its header")
    return Trained(tuple(signals), window, hidden, **numbers, arrays=arrays, report=told)


def _whole(header: Mapping[str, Any], name: str, most: int) -> int:
    found = header.get(name)
    if type(found) is not int or not 0 < found <= most:
        raise _BadModel(f"{name} is not a whole number from 1 to {most}")
    return found


def _number(found: Any, name: str) -> float:
    if not isinstance(found, int | float) or isinstance(found, bool) or not abs(found) <= sys.float_info.max:
        raise _BadModel(f"{name} is not a number")
    return float(found)
