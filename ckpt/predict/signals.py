"""The signals of one node: what its kernel and its accelerators report of trouble, as numbers that grow with it.

Names are FAMILY.WHAT. A gauge is the current value. A rate is per second since the previous reading, so the first
reading has only gauges. A signal that is absent, or cannot be read now, is left out. No content of a file makes this
raise.

| signal | from | unit |
|---|---|---|
| memory.used | /proc/meminfo and the control group's limit, the scarcer of the two | part in use, caches aside |
| memory.some, memory.full, io.some, io.full, cpu.some | /proc/pressure | part of the time in which tasks stood still |
| ecc.corrected, ecc.uncorrected | /sys/devices/system/edac/mc | errors per second |
| disk.errors | /sys/block/*/device/ioerr_cnt | errors per second |
| disk.wait_s | /sys/block/*/stat | seconds that a request took, on the slowest disk |
| net.errors, net.drops | /sys/class/net/*/statistics | packets per second, both ways |
| gpu.* | NVML, see `gpus` | |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from ckpt.cgroups import find_control_groups, read_kernel_file
from ckpt.predict.gpus import Gpus

DEVICES_MAX = 32  # disks, interfaces, memory controllers: the first ones by name
# Their requests reach a disk that is counted.
VIRTUAL = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")


class Sampler:
    """Reads the signals, from the kernel's files below `root`. One thread at a time. It looks for devices once: a disk
    that is added later is not read."""

    def __init__(self, root: Path = Path("/"), gpus: Gpus | None = None) -> None:
        proc, sys = root / "proc", root / "sys"
        self._gpus = gpus
        self._meminfo = proc / "meminfo"
        self._groups = [
            group for group in find_control_groups(sys / "fs/cgroup", _own_cgroup(proc)) if group.folder.is_dir()
        ]
        self._pressure = {name: proc / "pressure" / name for name in ("memory", "io", "cpu")}
        self._ecc = {
            f"ecc.{what}": _find_paths(sys / "devices/system/edac/mc", f"mc*/{file}")
            for what, file in (("corrected", "ce_count"), ("uncorrected", "ue_count"))
        }
        disks = [path for path in _find_paths(sys / "block", "*") if not path.name.startswith(VIRTUAL)]
        self._disks = [path / "stat" for path in disks if (path / "stat").exists()]
        self._disk_errors = [path / "device/ioerr_cnt" for path in disks if (path / "device/ioerr_cnt").exists()]
        links = [path / "statistics" for path in _find_paths(sys / "class/net", "*") if path.name != "lo"]
        links = [path for path in links if path.is_dir()]
        self._net = {
            f"net.{what}": [link / f"{way}_{file}" for link in links for way in ("rx", "tx")]
            for what, file in (("errors", "errors"), ("drops", "dropped"))
        }
        self._previous_counters: dict[str, float] = {}
        self._previous_s: float | None = None

    def read(self, now_s: float) -> dict[str, float]:
        """The signals that can be read now. `now_s`: on a clock that never goes back."""
        found: dict[str, float] = {}
        counters: dict[str, float] = {}
        self._add_memory_use(found)
        self._add_pressure(counters)
        for name, paths in self._ecc.items():
            _add_counter(counters, name, paths, int)
        _add_counter(counters, "disk.errors", self._disk_errors, lambda told: int(told, 16))
        for name, paths in self._net.items():
            _add_counter(counters, name, paths, int)
        if self._gpus is not None:
            gauges, more = self._gpus.read()
            found.update(gauges)
            counters.update(more)
        requests = self._disk_requests()
        passed_s = 0.0 if self._previous_s is None else now_s - self._previous_s
        if passed_s > 0:
            for name, count in counters.items():
                if name in self._previous_counters:
                    # A counter that went down was reset.
                    found[name] = max(0.0, count - self._previous_counters[name]) / passed_s
            self._add_disk_waits(found, requests)
        self._previous_counters, self._previous_s = {**counters, **requests}, now_s
        return found

    def _add_memory_use(self, found: dict[str, float]) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError, ArithmeticError):
            info = {line.split()[0]: int(line.split()[1]) for line in read_kernel_file(self._meminfo).splitlines()[:3]}
            found["memory.used"] = 1 - info["MemAvailable:"] / info["MemTotal:"]
        for group in self._groups:
            with contextlib.suppress(OSError, ValueError, ArithmeticError):
                # Almost 0 if a control group of version 1 has no limit.
                part = group.used_bytes() / group.limit_bytes()
                found["memory.used"] = max(found.get("memory.used", 0.0), part)

    def _add_pressure(self, counters: dict[str, float]) -> None:
        for name, path in self._pressure.items():
            with contextlib.suppress(OSError, ValueError, IndexError, ArithmeticError):
                for line in read_kernel_file(path).splitlines():
                    kind, total = line.split()[0], line.rpartition("total=")[2]
                    # A whole machine never waits for its cpu.
                    if kind == "some" or (kind == "full" and name != "cpu"):
                        counters[f"{name}.{kind}"] = int(total) / 1e6

    def _disk_requests(self) -> dict[str, float]:
        """By disk: how many requests ended so far, and how long they took together."""
        found: dict[str, float] = {}
        for path in self._disks:
            with contextlib.suppress(OSError, ValueError, IndexError, ArithmeticError):
                fields = [int(each) for each in read_kernel_file(path).split()]
                found[f"{path}:ended"] = fields[0] + fields[4]
                found[f"{path}:took"] = (fields[3] + fields[7]) / 1e3
        return found

    def _add_disk_waits(self, found: dict[str, float], requests: Mapping[str, float]) -> None:
        for path in self._disks:
            ended, took = f"{path}:ended", f"{path}:took"
            if took in requests and took in self._previous_counters:
                count = requests[ended] - self._previous_counters[ended]
                seconds = requests[took] - self._previous_counters[took]
                each_s = seconds / count if count > 0 and seconds > 0 else 0.0
                found["disk.wait_s"] = max(found.get("disk.wait_s", 0.0), each_s)


def _own_cgroup(proc: Path) -> str:
    with contextlib.suppress(OSError):
        return read_kernel_file(proc / "self/cgroup")
    return ""


def _find_paths(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))[:DEVICES_MAX]
    except OSError:
        return []


def _add_counter(counters: dict[str, float], name: str, paths: list[Path], number: Callable[[str], int]) -> None:
    """Adds the sum over those of the files that can be read."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError, ArithmeticError):
            counters[name] = counters.get(name, 0.0) + number(read_kernel_file(path))
