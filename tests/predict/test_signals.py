"""A node's signals, read from made-up /proc and /sys, and a made-up NVML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.predict.gpus import Gpus
from ckpt.predict.signals import Sampler


def put(root: Path, path: str, text: str | int) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def machine(root: Path, seconds: int = 0) -> Sampler:
    """After so many seconds of trouble."""
    kib = {"MemTotal": 1000, "MemFree": 10, "MemAvailable": 400}
    put(root, "proc/meminfo", "\n".join(f"{name}:  {n} kB" for name, n in kib.items()))
    for name in ("memory", "io", "cpu"):
        lines = [f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={seconds * us}" for kind, us in PRESSURE.items()]
        put(root, f"proc/pressure/{name}", "\n".join(lines))
    put(root, "proc/self/cgroup", "0::/")
    for mc in (0, 1):
        put(root, f"sys/devices/system/edac/mc/mc{mc}/ce_count", 7 + seconds)
        put(root, f"sys/devices/system/edac/mc/mc{mc}/ue_count", 0)
    put(root, "sys/block/sda/stat", f"{100 * seconds} 0 8 {1000 * seconds} {300 * seconds} 0 8 {3000 * seconds} 0 0 0")
    put(root, "sys/block/sda/device/ioerr_cnt", hex(16 * seconds))
    put(root, "sys/block/loop0/stat", "1 1 1 1 1 1 1 1 1 1 1")
    for link, count in (("eth0", 2 * seconds), ("eth1", seconds), ("lo", 1000 * seconds)):
        for way in ("rx", "tx"):
            put(root, f"sys/class/net/{link}/statistics/{way}_errors", count)
            put(root, f"sys/class/net/{link}/statistics/{way}_dropped", 10 * count)
    return Sampler(root)


PRESSURE = {"some": 500_000, "full": 250_000}  # microseconds a second


def test_numbers_that_cannot_be_are_no_signals(tmp_path: Path) -> None:
    sampler = machine(tmp_path)
    sampler.read(100.0)
    put(tmp_path, "proc/meminfo", "MemTotal:  0 kB\nMemFree:  0 kB\nMemAvailable:  0 kB")
    huge = "9" * 4000
    put(tmp_path, "proc/pressure/io", f"some total={huge}")
    put(tmp_path, "sys/devices/system/edac/mc/mc0/ce_count", huge)
    put(tmp_path, "sys/block/sda/stat", f"1 0 8 {huge} 1 0 8 1 0 0 0")
    put(tmp_path, "sys/block/sda/device/ioerr_cnt", "0x" + "f" * 4000)
    found = sampler.read(110.0)
    assert not {"memory.used", "io.some", "disk.errors", "disk.wait_s"} & set(found)


def test_gauges_are_there_at_once_and_rates_from_the_second_reading_on(tmp_path: Path) -> None:
    sampler = machine(tmp_path)
    assert sampler.read(100.0) == {"memory.used": pytest.approx(0.6)}
    machine(tmp_path, 10)
    assert sampler.read(110.0) == pytest.approx(
        {
            "memory.used": 0.6,
            **{f"{name}.some": 0.5 for name in ("memory", "io", "cpu")},
            **{f"{name}.full": 0.25 for name in ("memory", "io")},
            "ecc.corrected": 2.0,
            "ecc.uncorrected": 0.0,
            "disk.errors": 16.0,
            "disk.wait_s": 0.01,
            "net.errors": 6.0,
            "net.drops": 60.0,
        }
    )


def test_counters_that_begin_anew_are_no_errors(tmp_path: Path) -> None:
    machine(tmp_path, 100)
    sampler = machine(tmp_path, 100)
    sampler.read(0.0)
    machine(tmp_path, 1)
    found = sampler.read(5.0)
    assert {found[name] for name in ("ecc.corrected", "net.errors", "io.full", "disk.errors", "disk.wait_s")} == {0.0}


@pytest.mark.parametrize(
    ("group", "names", "cache"),
    [
        ("0::/a/b", ("a/memory.max", "a/memory.current", "a/memory.stat"), "inactive_file"),
        (
            "4:memory:/a/b",
            ("memory/a/memory.limit_in_bytes", "memory/a/memory.usage_in_bytes", "memory/a/memory.stat"),
            "total_inactive_file",
        ),
    ],
)
def test_memory_is_counted_against_the_control_groups_limit(
    tmp_path: Path, group: str, names: tuple[str, str, str], cache: str
) -> None:
    """The group of this process has none; the one around it has."""
    machine(tmp_path)
    put(tmp_path, "proc/self/cgroup", f"9:cpuset:/x\n{group}")
    active = cache.replace("inactive", "active")
    values = ("1000", "950", f"cache 5\nfile 3\n{cache} 30\n{active} 20\nslab 1")
    for name, value in zip(names, values, strict=True):
        put(tmp_path, f"sys/fs/cgroup/{name}", value)
    inner = "/".join(names[0].split("/")[:-1]) + "/b/" + names[0].split("/")[-1]
    put(tmp_path, f"sys/fs/cgroup/{inner}", "max")
    put(tmp_path, f"sys/fs/cgroup/{inner}".replace(names[0].split("/")[-1], names[1].split("/")[-1]), "10")
    sampler = Sampler(tmp_path)
    assert sampler.read(0.0)["memory.used"] == pytest.approx(0.9)
    put(tmp_path, f"sys/fs/cgroup/{names[0]}", "9223372036854771712" if "limit" in names[0] else "max")
    assert sampler.read(1.0)["memory.used"] == pytest.approx(0.6), "without one, the machine's"


def test_what_is_absent_or_nonsense_is_no_signal(tmp_path: Path) -> None:
    assert Sampler(tmp_path).read(0.0) == {}
    sampler = machine(tmp_path)
    sampler.read(0.0)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for text in ("", "some", "\0\0", "x" * 100_000, "a b c d e f g h i j k"):
        for path in files:
            path.write_text(text)
        sampler.read(1.0)
    for path in files:
        path.unlink()
    assert sampler.read(2.0) == {}


def test_this_machine_can_be_read() -> None:
    sampler = Sampler()
    first, second = sampler.read(0.0), sampler.read(5.0)
    assert 0 < first["memory.used"] <= 1
    assert all(value >= 0 for value in second.values())


class FakeNvml:
    """Two devices of which the second has no memory errors to count. Xid errors come as events."""

    nvmlEventTypeXidCriticalError = 8
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    NVML_VOLATILE_ECC = 0

    def __init__(self) -> None:
        self.xids = 0
        self.rows = 0
        self.reasons = [1, 1]
        self.ended = False

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.ended = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlEventSetCreate(self) -> list[Any]:
        return []

    def nvmlDeviceRegisterEvents(self, device: int, kinds: int, events: list[Any]) -> None:
        events.append((device, kinds))

    def nvmlEventSetWait_v2(self, events: list[Any], timeout_ms: int) -> None:
        if not self.xids:
            raise TimeoutError
        self.xids -= 1

    def nvmlEventSetFree(self, events: list[Any]) -> None: ...

    def nvmlDeviceGetTotalEccErrors(self, device: int, kind: int, counter: int) -> int:
        if device:
            raise RuntimeError("Not Supported")
        return 5 + kind

    def nvmlDeviceGetRemappedRows(self, device: int) -> tuple[int, int, int, int]:
        return (0, self.rows, 0, 0)

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        return 60 + device

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: int) -> int:
        return self.reasons[device]


def test_gpus_are_read_as_far_as_each_answers(tmp_path: Path) -> None:
    nvml = FakeNvml()
    gpus = Gpus(nvml)
    sampler = Sampler(tmp_path, gpus)
    assert sampler.read(0.0) == {"gpu.temperature": 61.0, "gpu.throttled": 0.0}
    nvml.xids, nvml.rows, nvml.reasons = 3, 4, [64, 1]
    assert sampler.read(10.0) == pytest.approx(
        {
            "gpu.temperature": 61.0,
            "gpu.throttled": 0.5,
            "gpu.xid": 0.3,
            "gpu.retired": 0.8,
            "gpu.ecc_corrected": 0.0,
            "gpu.ecc_uncorrected": 0.0,
        }
    )
    gpus.close()
    assert nvml.ended
