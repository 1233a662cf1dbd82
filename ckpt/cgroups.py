"""Control groups: how much memory a process and those around it may have, and how much of it is in use. cgroups(7).

Page cache is charged to the group that read the file, and stays until somebody needs the memory: a container that
streams a data set from disk is always at its limit. What the kernel takes back before it refuses anything is not in
use. That is what lies on its lists of file pages, as in MemAvailable of the whole machine. The active list counts, too,
though tools that watch how much is needed for good speed (the kubelet) leave out the inactive one only: a data set that
is read again for each epoch comes to lie on the active one. What has to be written to disk first is in use. So is
shared memory, memfds and tmpfs among it: a group counts it as cache, and it is on no list of file pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_BYTES_MAX = 1 << 16
CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Names:
    """What one version calls them. `limits`: the lowest counts: above a soft one (memory.high) nothing is refused, but
    whoever takes memory is slowed down until some is given back, and ours cannot be. `file_pages`, `unwritten`: in
    memory.stat, of a group and all in it."""

    limits: tuple[str, ...]
    used: str
    file_pages: tuple[str, ...]
    unwritten: tuple[str, ...]


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
    """One of them, which need not be there."""

    folder: Path
    names: Names

    def limit_bytes(self) -> int:
        """Errors: ValueError where there is none."""
        found: list[int] = []
        for name in self.names.limits:
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                found.append(int(text(self.folder / name)))
        return min(found)

    def used_bytes(self) -> int:
        """By the group and all in it, but for what is given back at once, where that is told. Errors: OSError,
        ValueError."""
        return max(0, int(text(self.folder / self.names.used)) - self._given_back_bytes())

    def _given_back_bytes(self) -> int:
        stat: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            for line in text(self.folder / "memory.stat").splitlines():
                name, _, count = line.partition(" ")
                if name in self.names.file_pages or name in self.names.unwritten:
                    stat[name] = int(count)
        unwritten = sum(stat.get(name, 0) for name in self.names.unwritten)
        return max(0, sum(stat.get(name, 0) for name in self.names.file_pages) - unwritten)


def groups(at: Path = CGROUPS, own: str | None = None) -> list[ControlGroup]:
    """Our own (a service's, or a batch job's) and all that it is in, of both versions, the innermost first. In a
    container ours is at the root. `at`: where they are mounted; `own`: /proc/self/cgroup."""
    if own is None:
        own = ""
        with contextlib.suppress(OSError):
            own = text(_OWN)
    return list(dict.fromkeys(_named(at, own)))


def _named(at: Path, own: str) -> Iterator[ControlGroup]:
    for line in own.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if path and (not controllers or "memory" in controllers.split(",")):
            root, names = (at / "memory", V1) if controllers else (at, V2)
            for inner in (Path(path), *Path(path).parents):
                yield ControlGroup(root / str(inner).lstrip("/"), names)
    yield ControlGroup(at, V2)
    yield ControlGroup(at / "memory", V1)


def text(path: Path) -> str:
    """Of one of the kernel's files, as far as one is ever long. Errors: OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.read(FILE_BYTES_MAX).decode("ascii", "replace")
