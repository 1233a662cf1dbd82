"""The signals of this node's GPUs, read by NVML if nvidia-ml-py (the module pynvml) is installed and finds a GPU.

| signal | what | unit |
|---|---|---|
| gpu.xid | critical Xid errors that the driver reported | per second |
| gpu.ecc_corrected, gpu.ecc_uncorrected | memory errors since the driver was loaded | per second |
| gpu.retired | rows remapped for uncorrected errors, or pages retired, as the device does it | per second |
| gpu.replays | transfers over PCIe that had to be repeated | per second |
| gpu.temperature | of the hottest | degrees Celsius |
| gpu.throttled | those slowed down by heat or by their power supply | part of the devices |

Calls may take milliseconds, or hang with a broken driver: make them on a thread of their own. A device that does not
support a call is left out of its sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

DEVICES_MAX = 32
EVENTS_MAX = 100  # taken from the queue at once

Read = tuple[dict[str, float], dict[str, float]]


class Gpus:
    """The GPUs of this node. `nvml`: the module pynvml, or a replacement. Errors: those of NVML if it is unusable."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        count = min(nvml.nvmlDeviceGetCount(), DEVICES_MAX)
        self._devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        self._xids = 0
        self._events: Any = None
        try:
            self._events = nvml.nvmlEventSetCreate()
            for device in self._devices:
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, self._events)
        except Exception:  # no events in this driver, or no right to them
            self._events = None
        self._slowdown_mask = sum(
            getattr(nvml, f"nvmlClocksThrottleReason{each}", 0)
            for each in ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
        )

    @property
    def count(self) -> int:
        return len(self._devices)

    def read(self) -> Read:
        """The gauges, and the counters since the driver was loaded or this object was made."""
        nvml, counters, gauges = self._nvml, dict[str, float](), dict[str, float]()
        if self._events is not None:
            counters["gpu.xid"] = self._xid_count()
        volatile = getattr(nvml, "NVML_VOLATILE_ECC", 0)
        counted = {
            "gpu.ecc_corrected": self._ask_devices(lambda each: nvml.nvmlDeviceGetTotalEccErrors(each, 0, volatile)),
            "gpu.ecc_uncorrected": self._ask_devices(lambda each: nvml.nvmlDeviceGetTotalEccErrors(each, 1, volatile)),
            "gpu.retired": self._ask_devices(lambda each: nvml.nvmlDeviceGetRemappedRows(each)[1])
            or self._ask_devices(lambda each: len(nvml.nvmlDeviceGetRetiredPages(each, 1))),
            "gpu.replays": self._ask_devices(lambda each: nvml.nvmlDeviceGetPcieReplayCounter(each)),
        }
        counters |= {name: sum(each) for name, each in counted.items() if each}
        if hot := self._ask_devices(lambda each: nvml.nvmlDeviceGetTemperature(each, 0)):
            gauges["gpu.temperature"] = max(hot)
        if reasons := self._ask_devices(lambda each: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(each)):
            gauges["gpu.throttled"] = sum(bool(int(each) & self._slowdown_mask) for each in reasons) / len(reasons)
        return gauges, counters

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the process ends, or the driver is gone
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    def _xid_count(self) -> int:
        for _ in range(EVENTS_MAX):
            try:
                self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except Exception:  # a time-out: no event is left
                break
            self._xids += 1
        return self._xids

    def _ask_devices(self, ask: Callable[[Any], Any]) -> list[float]:
        """The answers of those devices that support the call."""
        found = []
        for device in self._devices:
            try:
                found.append(float(ask(device)))
            except Exception:  # unsupported by this device, driver or release of the module
                continue
        return found


def find_gpus() -> Gpus | None:
    """The GPUs of this machine; None if there are none, or NVML is unusable."""
    try:
        import pynvml

        found = Gpus(pynvml)
    except Exception:  # not installed, no driver, or another version
        return None
    if not found.count:
        found.close()
        return None
    return found
