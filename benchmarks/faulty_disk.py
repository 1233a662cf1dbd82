"""A file system in memory that can lose what was not synced, and calls a function before any change: for `league`.

It speaks the kernel's FUSE protocol (include/uapi/linux/fuse.h, 7.31) on /dev/fuse, so it needs root. Nothing is
cached by write-back: each write, rename, truncation and fsync of a process is one request, answered in order by one
thread. Fault model of a power loss: a file keeps the bytes of its last fsync, a folder the names of its last fsync.
With `names=True` names and truncations always last, as where the file system journals them and orders nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import itertools
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = 1
REQUEST_BYTES = (1 << 20) + (64 << 10)
WRITE_BYTES = 1 << 20
HEADER, REPLY = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ATTR, ENTRY = struct.Struct("<6Q10I"), struct.Struct("<4Q2I")
(LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK) = (1, 2, 3, 4, 5, 6)
(MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE) = (*range(8, 19),)
(FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR) = (20, 25, 26, 27, 28, 29, 30)
(ACCESS, CREATE, INTERRUPT, DESTROY, BATCH_FORGET, FALLOCATE, RENAME2) = (34, 35, 36, 38, 42, 43, 45)
CHANGES = {SETATTR: "setattr", SYMLINK: "symlink", MKNOD: "mknod", MKDIR: "mkdir", UNLINK: "unlink", RMDIR: "rmdir"}
CHANGES |= {RENAME: "rename", RENAME2: "rename", LINK: "link", WRITE: "write", FSYNC: "fsync", FSYNCDIR: "fsync folder"}
CHANGES |= {CREATE: "create", FALLOCATE: "fallocate"}
SET_MODE, SET_SIZE = 1, 8
NO_REPLACE, EXCHANGE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Why it cannot be mounted here; None where it can."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        return "needs FUSE: root and /dev/fuse"
    return None


@dataclass
class Node:
    """A file, or a folder where `names` is a dict. `synced`, `synced_names`: as of the last fsync. `kept`: of the
    bytes of that, so many have not been truncated since."""

    number: int
    mode: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, Node] | None = None
    synced: bytes = b""
    kept: int = 0
    synced_names: dict[str, Node] = field(default_factory=dict)
    changed_ns: int = field(default_factory=time.time_ns)

    def sync(self) -> None:
        self.synced, self.synced_names, self.kept = bytes(self.data), dict(self.names or {}), len(self.data)


class Tree:
    """All files. `copy.deepcopy` makes a second disk with the same."""

    def __init__(self) -> None:
        self.root = Node(ROOT, stat.S_IFDIR | 0o755, names={})
        self._numbers = itertools.count(ROOT + 1)

    def node(self, mode: int) -> Node:
        return Node(next(self._numbers), mode, names={} if stat.S_ISDIR(mode) else None)

    def files(self) -> dict[str, Node]:
        return dict(_files(self.root, ""))

    def remove(self, path: str) -> None:
        *folders, name = path.split("/")
        at = self.root
        for folder in folders:
            assert at.names is not None
            at = at.names[folder]
        assert at.names is not None
        del at.names[name]

    def settle(self) -> None:
        """All that is written is durable, as the kernel sees to within a minute."""
        for node in _all(self.root):
            node.sync()

    def lose_power(self, names: bool) -> None:
        """Leaves what is durable; `names`: names and truncations are, synced or not."""
        _lose(self.root, names, set())


def _files(folder: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    for name, node in sorted((folder.names or {}).items()):
        if node.names is None:
            yield prefix + name, node
        else:
            yield from _files(node, f"{prefix}{name}/")


def _all(node: Node) -> Iterator[Node]:
    yield node
    for each in (node.names or {}).values():
        yield from _all(each)


def _lose(node: Node, names: bool, seen: set[int]) -> None:
    if node.number in seen:
        return
    seen.add(node.number)
    if node.names is None:
        node.data = bytearray(node.synced[: node.kept] if names else node.synced)
        return
    if not names:
        node.names = dict(node.synced_names)
    for each in node.names.values():
        _lose(each, names, seen)


class Refusal(Exception):
    def __init__(self, number: int) -> None:
        self.errno = number


class Disk:
    """`tree` mounted at `at` until the end of the block. `before_change(what, path)` is called before each change, in
    order; it may raise Refusal. `events`: all changes so far."""

    def __init__(self, tree: Tree, at: str) -> None:
        self.tree, self.at = tree, at
        self.events: list[tuple[str, str]] = []
        self.before_change: Callable[[str, str], None] = lambda what, path: None
        self._nodes: dict[int, Node] = {ROOT: tree.root}
        self._paths: dict[int, str] = {ROOT: ""}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="disk")

    def __enter__(self) -> Disk:
        os.makedirs(self.at, exist_ok=True)
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        if _libc.mount(b"league", self.at.encode(), b"fuse", 6, options.encode()):
            os.close(self._fd)
            raise OSError(ctypes.get_errno(), f"cannot mount at {self.at}")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        _libc.umount2(self.at.encode(), 1 | 2)  # MNT_FORCE, MNT_DETACH: killed processes may still hold files
        self._thread.join(20)
        os.close(self._fd)

    def settled(self) -> Tree:
        """Makes all that is written durable, and copies the tree between two requests."""
        with self._lock:
            self.tree.settle()
            return copy.deepcopy(self.tree)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, REQUEST_BYTES)
            except OSError as exc:
                if exc.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # unmounted
            _, code, unique, number, *_ = HEADER.unpack_from(request)
            if code in (FORGET, BATCH_FORGET, INTERRUPT, DESTROY):
                continue
            try:
                with self._lock:
                    failed, body = 0, self._answer(code, number, memoryview(request)[HEADER.size :])
            except Refusal as exc:
                failed, body = -exc.errno, b""
            except KeyError:
                failed, body = -errno.ENOENT, b""
            with contextlib.suppress(OSError):  # the process was killed meanwhile
                os.write(self._fd, REPLY.pack(REPLY.size + len(body), failed, unique) + body)

    def _answer(self, code: int, number: int, body: memoryview) -> bytes:
        node = self._nodes[number] if number else self.tree.root
        if code in CHANGES:
            self._change(code, number, body)
        if code == INIT:
            # Flags: atomic O_TRUNC (then open truncates, which is a change) is not asked for, nor write-back.
            big_writes = 1 << 5
            room = struct.pack("<HHIIHHI", 16, 12, WRITE_BYTES, 1, WRITE_BYTES // 4096, 0, 0)
            return struct.pack("<IIII", 7, 31, 1 << 20, big_writes | 1 << 22) + room + bytes(28)
        if code in (LOOKUP, MKDIR, MKNOD, SYMLINK, LINK, CREATE):
            return self._named(code, node, body)
        if code in (GETATTR, SETATTR):
            if code == SETATTR:
                self._set(node, body)
            return struct.pack("<QII", 0, 0, 0) + self._attr(node)
        if code in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if code == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return bytes(node.data[offset : offset + size])
        if code == WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            node.data.extend(bytes(max(0, offset - len(node.data))))
            node.data[offset : offset + size] = body[40 : 40 + size]
            node.changed_ns = time.time_ns()
            return struct.pack("<II", size, 0)
        if code == READDIR:
            return self._listing(node, body)
        if code == READLINK:
            return bytes(node.data)
        if code == STATFS:
            return struct.pack("<5Q10I", 1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 19, 4096, 255, 4096, *([0] * 7))
        if code in (FSYNC, FSYNCDIR):
            node.sync()
        elif code in (UNLINK, RMDIR):
            self._remove(node, _name(body), code == RMDIR)
        elif code in (RENAME, RENAME2):
            self._rename(node, body, code == RENAME2)
        elif code == FALLOCATE:
            _, offset, size, mode = struct.unpack_from("<QQQI", body)
            if mode == 0:
                node.data.extend(bytes(max(0, offset + size - len(node.data))))
            elif mode != 1:
                raise Refusal(errno.EOPNOTSUPP)
        elif code not in (FLUSH, RELEASE, RELEASEDIR, ACCESS):
            raise Refusal(errno.ENOSYS)
        return b""

    def _change(self, code: int, number: int, body: memoryview) -> None:
        if code == SETATTR and not struct.unpack_from("<I", body)[0] & SET_SIZE:
            return  # times and modes
        offsets = {MKDIR: 8, MKNOD: 16, CREATE: 16, RENAME: 8, RENAME2: 16, LINK: 8, UNLINK: 0, RMDIR: 0, SYMLINK: 0}
        path = self._paths.get(number, "?")
        if code in offsets:
            path = f"{path}/{_name(body[offsets[code] :])}"
        what = CHANGES[code]
        self.before_change(what, path)
        self.events.append((what, path))

    def _named(self, code: int, folder: Node, body: memoryview) -> bytes:
        """Looks a name up, or makes it."""
        assert folder.names is not None
        opened = b""
        if code == LOOKUP:
            name = _name(body)
            node = folder.names[name]
        elif code == LINK:
            name, node = _name(body[8:]), self._nodes[struct.unpack_from("<Q", body)[0]]
        elif code == SYMLINK:
            name, target = bytes(body).split(b"\0")[:2]
            node = self.tree.node(stat.S_IFLNK | 0o777)
            node.data, name = bytearray(target), os.fsdecode(name)
        elif code == MKDIR:
            name, node = _name(body[8:]), self.tree.node(stat.S_IFDIR | struct.unpack_from("<I", body)[0])
        elif code == MKNOD:
            name, node = _name(body[16:]), self.tree.node(struct.unpack_from("<I", body)[0])
        else:
            name = _name(body[16:])
            node = self.tree.node(stat.S_IFREG | struct.unpack_from("<II", body)[1] & 0o7777)
            opened = struct.pack("<QII", 0, 0, 0)
        if code != LOOKUP:
            if name in folder.names:
                raise Refusal(errno.EEXIST)
            folder.names[name] = node
        self._nodes[node.number] = node
        self._paths[node.number] = f"{self._paths.get(folder.number, '?')}/{name}"
        return ENTRY.pack(node.number, 0, 0, 0, 0, 0) + self._attr(node) + opened

    def _attr(self, node: Node) -> bytes:
        size, (seconds, nanos) = len(node.data), divmod(node.changed_ns, 10**9)
        times = (seconds, seconds, seconds, nanos, nanos, nanos)
        links = 2 if node.names is not None else 1
        blocks = -(-size // 512)
        return ATTR.pack(node.number, size, blocks, *times, node.mode, links, 0, 0, 0, 4096, 0)

    def _set(self, node: Node, body: memoryview) -> None:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & SET_SIZE:
            del node.data[size:]
            node.kept = min(node.kept, size)
            node.data.extend(bytes(size - len(node.data)))
            node.changed_ns = time.time_ns()
        if valid & SET_MODE:
            mode = struct.unpack_from("<I", body, 68)[0]
            node.mode = stat.S_IFMT(node.mode) | mode & 0o7777

    def _listing(self, node: Node, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        out = b""
        for at, (name, each) in enumerate(list((node.names or {}).items())[offset:], offset + 1):
            raw = os.fsencode(name)
            record = struct.pack("<QQII", each.number, at, len(raw), each.mode >> 12) + raw
            record += bytes(-len(record) % 8)
            if len(out) + len(record) > size:
                break
            out += record
        return out

    def _remove(self, folder: Node, name: str, is_folder: bool) -> None:
        assert folder.names is not None
        node = folder.names[name]
        if is_folder and node.names:
            raise Refusal(errno.ENOTEMPTY)
        del folder.names[name]

    def _rename(self, folder: Node, body: memoryview, flagged: bool) -> None:
        target = self._nodes[struct.unpack_from("<Q", body)[0]]
        flags = struct.unpack_from("<I", body, 8)[0] if flagged else 0
        old, new = (os.fsdecode(part) for part in bytes(body[16 if flagged else 8 :]).split(b"\0")[:2])
        assert folder.names is not None
        assert target.names is not None
        if flags & EXCHANGE:
            folder.names[old], target.names[new] = target.names[new], folder.names[old]
            return
        if flags & NO_REPLACE and new in target.names:
            raise Refusal(errno.EEXIST)
        if new in target.names and target.names[new].names:
            raise Refusal(errno.ENOTEMPTY)
        node = folder.names.pop(old)
        target.names[new] = node
        self._rename_paths(node, f"{self._paths.get(target.number, '?')}/{new}")

    def _rename_paths(self, node: Node, path: str) -> None:
        self._paths[node.number] = path
        for name, each in (node.names or {}).items():
            self._rename_paths(each, f"{path}/{name}")


def _name(body: memoryview) -> str:
    return os.fsdecode(bytes(body).split(b"\0", 1)[0])
