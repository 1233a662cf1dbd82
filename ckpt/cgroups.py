"""Control groups: the memory limit of this process and of the groups around it, and how much is in use. See cgroups(7).

The kernel charges page cache to the group that read the file, and keeps it until memory is needed. So a container that
streams a data set from disk is always at its limit. Memory that the kernel reclaims before it refuses anything does not
count as used here. It is the file pages of both lists, as in MemAvailable of the whole machine.
The active list counts as reclaimable too: a data set that is read again in each epoch comes to lie there. (Tools that
watch performance, such as the kubelet, leave out only the inactive list.) Pages that must first be written to disk
count as used. So does shared memory (memfds, tmpfs): a group counts it as cache, but it is on no list of file pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_BYTES_MAX = 1 << 16
CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Names:
    """The file names of one cgroup version. `limit_files`: files of limits, of which the lowest counts. Above a soft
    limit (memory.high) nothing is refused, but allocation is slowed down until memory is freed, and ckpt cannot free
    its own. `file_pages`, `unwritten`: entries of memory.stat, for a group and all groups in it."""

    limit_files: tuple[str, ...]
    usage_file: str
    file_pages: tuple[str, ...]
    dirty_pages: tuple[str, ...]


V2 = Names(
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    ("file_dirty", "file_writeback"),
)
V1 = Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("total_dirty", "total_writeback"),
)


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One control group, whose folder need not exist."""

    folder: Path
    names: Names

    def limit_bytes(self) -> int:
        """The memory limit in bytes. Errors: ValueError if there is none."""
        found: list[int] = []
        for name in self.names.limit_files:
            # The file may be missing, or say "max".
            with contextlib.suppress(OSError, ValueError):
                found.append(int(read_kernel_file(self.folder / name)))
        return min(found)

    def used_bytes(self) -> int:
        """The memory in use by the group and all groups in it, less what the kernel reclaims at once, if memory.stat
        tells. Errors: OSError, ValueError."""
        return max(0, int(read_kernel_file(self.folder / self.names.usage_file)) - self._reclaimable_bytes())

    def _reclaimable_bytes(self) -> int:
        stat: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            for line in read_kernel_file(self.folder / "memory.stat").splitlines():
                name, _, count = line.partition(" ")
                if name in self.names.file_pages or name in self.names.dirty_pages:
                    stat[name] = int(count)
        unwritten = sum(stat.get(name, 0) for name in self.names.dirty_pages)
        return max(0, sum(stat.get(name, 0) for name in self.names.file_pages) - unwritten)


def find_control_groups(at: Path = CGROUPS, own: str | None = None) -> list[ControlGroup]:
    """This process's group (a service's or a batch job's) and all groups around it, of both versions, the innermost
    first. In a container the own group is at the root. `at`: where cgroups are mounted. `own`: the content of
    /proc/self/cgroup."""
    if own is None:
        own = ""
        with contextlib.suppress(OSError):
            own = read_kernel_file(_OWN_CGROUP)
    return list(dict.fromkeys(_iter_groups(at, own)))


def _iter_groups(at: Path, own: str) -> Iterator[ControlGroup]:
    for line in own.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if path and (not controllers or "memory" in controllers.split(",")):
            root, names = (at / "memory", V1) if controllers else (at, V2)
            for inner in (Path(path), *Path(path).parents):
                yield ControlGroup(root / str(inner).lstrip("/"), names)
    yield ControlGroup(at, V2)
    yield ControlGroup(at / "memory", V1)


def read_kernel_file(path: Path) -> str:
    """The content of a small kernel file, at most FILE_BYTES_MAX bytes. Errors: OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.read(FILE_BYTES_MAX).decode("ascii", "replace")
