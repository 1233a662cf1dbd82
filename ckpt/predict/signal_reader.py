"""The signal reader: a thread that reads this node's health signals, raises alarms, and records the signals in a file.

Reading may take long or hang, as the driver of a broken GPU does. Hence it has a thread of its own: if that hangs, only
predictions are missing. It reads while a job trains here.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckpt.errors import CkptError
from ckpt.events import Event, Events, JsonLines
from ckpt.settings import Settings
from ckpt.threads import Tasks

if TYPE_CHECKING:
    from ckpt.predict.model import PredictorReader
    from ckpt.predict.signals import Sampler
    from ckpt.predict.watching import Alarm, SignalWatch

# Readings after which the watching sources are reported again: an earlier report may be lost.
REPORT_EVERY = 12
# How long `close` waits for a driver that hangs; its thread ends with the process.
CLOSE_S = 5.0

Heard = Callable[[tuple[str, ...], Sequence["Alarm"]], None]


class SignalReader:
    """Owns the thread and the file. `heard` is called on the main thread with the watching sources and the new alarms.
    `url`: without secrets, for the file."""

    def __init__(
        self, settings: Settings, url: str, post: Callable[[Callable[[], None]], None], heard: Heard, events: Events
    ) -> None:
        self._settings, self._post, self._on_signals, self._events = settings, post, heard, events
        self.is_reading = False
        # Keeps readings between the lines `signals.begin` and `signals.end`.
        self._log_lock = threading.Lock()
        self._readings_until_report = 0
        self._has_failed = threading.Event()  # since the newest reading
        self._signal_log: JsonLines | None = None
        self._tasks: Tasks | None = None
        self._log_header = {"by": "agent", "node": socket.gethostname(), "url": url, "pid": os.getpid()}

    def set_reading(self, on: bool) -> None:
        """Switches reading on or off: whether a job trains here. The first `on` starts the thread."""
        if on == self.is_reading or self._settings.signals == "off":
            return
        if self._signal_log is None and self._settings.signals_log is not None:
            self._signal_log = JsonLines(self._settings.signals_log, self._log_header)
        with self._log_lock:
            self.is_reading = on
            if self._signal_log is not None:
                self._signal_log(Event("signals.begin" if on else "signals.end", ""))
        if on and self._tasks is None:
            self._tasks = Tasks("signals")
            self._tasks.start("read", self._read_loop)

    def request_report(self) -> None:
        """Has the next reading report the watching sources again: another job listens now."""
        self._readings_until_report = 0

    def record_failure(self, at_s: float) -> None:
        """Records that this node failed at that monotonic time."""
        self._has_failed.set()
        if self._signal_log is not None:
            self._signal_log(Event("signals.failure", "", time_s=time.time() - (time.monotonic() - at_s)))

    def close(self) -> None:
        self.set_reading(False)
        if self._tasks is not None:
            self._tasks.stopping.set()
            try:
                self._tasks.close(CLOSE_S)
            except CkptError as exc:
                self._events.emit("signals.failed", f"the node's signals: {exc}")
        if self._signal_log is not None:
            self._signal_log.close()

    # -- on the thread

    def _read_loop(self) -> None:
        from ckpt.predict.gpus import find_gpus
        from ckpt.predict.signals import Sampler
        from ckpt.predict.watching import SignalWatch

        assert self._tasks is not None
        gpus = find_gpus()
        try:
            sampler, watch = Sampler(gpus=gpus), SignalWatch(self._load_predictor())
            while not self._tasks.stopping.is_set():
                if self.is_reading:
                    self._read(sampler, watch)
                self._tasks.stopping.wait(self._settings.signals_interval_s)
        except Exception as exc:
            text = f"this node's signals are not read any more: {type(exc).__name__}: {exc}"
            self._events.emit("signals.failed", text, loud=True)
        finally:
            if gpus is not None:
                gpus.close()

    def _read(self, sampler: Sampler, watch: SignalWatch) -> None:
        now_s = time.monotonic()
        if self._has_failed.is_set():
            self._has_failed.clear()
            watch.record_failure()
        before = watch.sources
        values = sampler.read(now_s)
        alarms = watch.add_reading(now_s, values)
        rounded = {name: float(f"{value:.6g}") for name, value in values.items()}
        with self._log_lock:
            if self.is_reading and self._signal_log is not None:
                self._signal_log(Event("signals", "", data={"values": rounded}))
        sources = watch.sources
        self._readings_until_report -= 1
        if alarms or sources != before or self._readings_until_report < 0:
            self._readings_until_report = REPORT_EVERY
            self._post(lambda: self._on_signals(sources, alarms))

    def _load_predictor(self) -> PredictorReader | None:
        """The predictor that CKPT_PREDICTOR names; None without one, or, with a warning, if it cannot be read."""
        path = self._settings.predictor
        if path is None:
            return None
        from ckpt.predict.model import PredictorReader, load

        try:
            return PredictorReader(load(path))
        except (OSError, CkptError) as exc:
            self._events.emit("predictor.refused", f"ckpt: CKPT_PREDICTOR={path} is not used: {exc}", loud=True)
            return None
