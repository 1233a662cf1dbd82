"""Backend for a folder, as durable and atomic as the file system allows.

A put writes a temporary file in the same folder, fsyncs it, and renames it (IF_ABSENT: links it, which fails if the
name is taken). Then it fsyncs the folder, and the parents of new folders. After the return the object survives a power
cut. A reader sees the old object, the new one, or none. A killed writer leaves a temporary file, whose name is not a
key; `abort_uploads` removes it.

Symbolic links inside the folder are refused, so that no path leads out of it. The one exception is a link in place of a
whole top folder, such as `data` on another disk: the store's creator put it there. Objects are never mapped into
memory: truncating a mapped file would kill the process with SIGBUS.
"""

from __future__ import annotations

import errno
import functools
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from ckpt.backends.local_write import write_chunks
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    DamagedData,
    NotFound,
    StorageError,
    TransientError,
    UsageError,
)
from ckpt.storage.contract import Buffer, ObjectInfo, PutMode
from ckpt.storage.failure import check_not_cancelled, full_store_hint
from ckpt.storage.files import open_file, read_buffer, read_into
from ckpt.storage.names import PARTS_MAX, TEMPORARY_PREFIX, check_key, check_prefix, check_range, is_key

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_TRANSIENT_ERRNOS = {errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def open_local(url: str) -> LocalBackend:
    """The backend for that folder; the first put makes the folder. Errors: UsageError if the path is not a folder."""
    if os.path.lexists(url) and not os.path.isdir(url):
        raise UsageError(f"{url} is not a folder; give a folder, or a path that does not exist yet")
    return LocalBackend(url)


class LocalBackend:
    """A Backend (see ckpt.storage.contract) on one folder."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._durable_folders: set[str] = set()  # folders whose own name is known to be on the disk
        self._lock = threading.Lock()  # guards making folders and _durable

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        path = self._path(key)
        check = functools.partial(check_not_cancelled, cancel, self.url, key)

        with self._translate_errors("write", path):
            temporary, fd = self._create_temporary(os.path.dirname(path))
            try:
                try:
                    write_chunks(fd, chunks, check)
                    check()
                    os.fsync(fd)
                finally:
                    os.close(fd)
                self._publish(temporary, path, mode)
            except BaseException:
                _unlink(temporary)
                raise
            # Somebody has already deleted the object, and the folder with it.
            with suppress(FileNotFoundError):
                _sync_folder(os.path.dirname(path))

    def get(self, key: str, size_max: int) -> bytes:
        path = self._path(key)
        with self._translate_errors("read", path), self._open_file(path) as (fd, size):
            if size > size_max:
                raise DamagedData(f"{path} has {size} bytes; at most {size_max} are expected")
            out = bytearray(size)
            read_into(fd, 0, memoryview(out), path)
        return bytes(out)

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        check_range(start, length)
        path = self._path(key)
        with self._translate_errors("read", path), self._open_file(path) as (fd, size):
            if start + length > size:
                raise DamagedData(f"{path} has {size} bytes; bytes {start} to {start + length} were requested")
            out = read_buffer(length)
            read_into(fd, start, out, path)
        return out

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._translate_errors("look at", path):
            found = self._retry_refreshed(path, os.lstat)
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{path} is not a file")
        return _info(key, found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = os.path.join(self.url, check_prefix(prefix))
        self._refresh_cache(folder)
        for path, found in self._walk(folder):
            key = os.path.relpath(path, self.url)
            if is_key(key):
                yield _info(key, found)

    def folders(self, prefix: str) -> Sequence[str]:
        folder = os.path.join(self.url, check_prefix(prefix))
        with self._translate_errors("list", folder):
            try:
                with os.scandir(folder) as entries:
                    return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and is_key(e.name))
            except FileNotFoundError:
                return []

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        for key in keys:
            path = self._path(key)
            with self._translate_errors("delete", path):
                if _unlink(path):
                    folders.add(os.path.dirname(path))
        for folder in folders:
            with self._translate_errors("delete from", folder):
                self._remove_empty_folders(folder)

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        before_s = self.now_s() - older_than_s
        ended = 0
        folders = [os.path.join(self.url, check_prefix(prefix)) for prefix in prefixes]
        for path, found in (each for folder in folders for each in self._walk(folder)):
            if os.path.basename(path).startswith(TEMPORARY_PREFIX) and found.st_mtime < before_s:
                with self._translate_errors("delete", path):
                    ended += _unlink(path)
        return ended

    def now_s(self) -> float:
        """The file system's clock (a file server's may differ), from a new file's time; else this machine's clock."""
        path = os.path.join(self.url, TEMPORARY_PREFIX + secrets.token_hex(8))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # The folder is missing, read-only or full. Then nothing is written whose age would matter.
        except OSError:
            return time.time()
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            _unlink(path)

    def close(self) -> None:
        pass

    def _path(self, key: str) -> str:
        return os.path.join(self.url, check_key(key))

    def _retry_refreshed(self, path: str, look: Callable[[str], T]) -> T:
        """The result of `look`. Before a file counts as missing, the file system's cache is refreshed."""
        try:
            return look(path)
        except FileNotFoundError:
            self._refresh_cache(os.path.dirname(path))
            return look(path)

    def _open_file(self, path: str) -> AbstractContextManager[tuple[int, int]]:
        self._retry_refreshed(path, os.lstat)
        return open_file(path)

    def _refresh_cache(self, folder: str) -> None:
        """Opens the folders on the path to `folder`, from the parent of the store down. An NFS client caches for up to
        a minute that a name is missing. It asks its server again about a folder that is opened."""
        at = os.path.dirname(self.url)
        below = os.path.relpath(folder, at).split(os.sep)
        for part in ["", *below]:
            at = os.path.join(at, part)
            with suppress(OSError):
                os.close(os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def _create_temporary(self, folder: str) -> tuple[str, int]:
        """A new file in that folder, which is made if missing. Another process that deletes the folder's last object
        also removes the folder; then it is made again."""
        path = os.path.join(folder, TEMPORARY_PREFIX + secrets.token_hex(8))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(100):
            try:
                with self._lock:
                    self._make_folder(folder)
                return path, os.open(path, flags, 0o666)
            except FileNotFoundError as exc:
                error = exc
                with self._lock:
                    self._durable_folders.clear()
        raise StorageError(
            f"the folder {folder} cannot be made, or another process keeps removing it: {error.strerror}; give "
            "another path"
        ) from error

    def _make_folder(self, folder: str) -> None:
        """Makes the folder and its missing parents, each durable before its children. The caller holds the lock."""
        if folder in self._durable_folders:
            return
        if folder.startswith(self.url + "/") or not os.path.isdir(folder):
            above = os.path.dirname(folder)
            self._make_folder(above)
            _make_directory(folder)
            _sync_folder(above)
        self._durable_folders.add(folder)

    def _publish(self, temporary: str, path: str, mode: PutMode) -> None:
        if mode is PutMode.OVERWRITE:
            os.replace(temporary, path)
            return
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            raise AlreadyExists(f"{path} exists already") from None
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            # This file system has no links: best effort, as the contract allows.
            if os.path.lexists(path):
                raise AlreadyExists(f"{path} exists already") from exc
            os.replace(temporary, path)
            return
        _unlink(temporary)

    def _remove_empty_folders(self, folder: str) -> None:
        """Makes deletions durable, and removes folders that they have emptied."""
        while folder != self.url:
            try:
                _sync_folder(folder)
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # ENOTDIR: it is a link
                    raise
                return
            with self._lock:
                self._durable_folders.discard(folder)
            folder = os.path.dirname(folder)

    def _walk(self, folder: str, depth: int = 0) -> Iterator[tuple[str, os.stat_result]]:
        """All regular files below the folder, in key order. Files that vanish meanwhile are left out."""
        with self._translate_errors("list", folder):
            try:
                with os.scandir(folder) as entries:
                    found = sorted(entries, key=lambda e: e.name + "/" if e.is_dir(follow_symlinks=False) else e.name)
            except FileNotFoundError:
                return
        for entry in found:
            if entry.is_symlink():
                raise StorageError(
                    f"{entry.path} is a symbolic link inside a store, which ckpt does not follow: "
                    "remove the link, or put the whole store behind one link"
                )
            if entry.is_dir():
                if depth < PARTS_MAX:
                    yield from self._walk(entry.path, depth + 1)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield entry.path, status

    @contextmanager
    def _translate_errors(self, what: str, path: str) -> Iterator[None]:
        """Translates an OSError into ours."""
        try:
            yield
        except OSError as exc:
            raise self._error(what, path, exc) from exc

    def _error(self, what: str, path: str, exc: OSError) -> Exception:
        failed = f"could not {what} {path}: {exc.strerror or exc}"
        if exc.errno == errno.ENOENT:
            return NotFound(f"{path} does not exist")
        if exc.errno in _FULL:
            return StorageError(f"{failed}; {_free_mib(self.url)} MiB are free: {full_store_hint(self.url)}")
        if exc.errno in _DENIED:
            return AccessDenied(f"{failed}; give user {os.geteuid()} permission to read and write there")
        if exc.errno in _TRANSIENT_ERRNOS:
            return TransientError(failed)
        if exc.errno == errno.ENAMETOOLONG:
            return StorageError(f"{failed}; give a shorter path")
        if exc.errno == errno.ELOOP:
            return StorageError(
                f"{path} is a symbolic link inside a store, which ckpt does not follow; remove the link"
            )
        if exc.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
            return StorageError(
                f"{failed}: there is a file instead of a folder, or a folder instead of a file; give another path"
            )
        return StorageError(f"{failed}; the disk or its file system may be faulty: see the kernel's log")


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key, found.st_size, found.st_mtime_ns / 1e9, f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}"
    )


def _make_directory(folder: str) -> None:
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.islink(folder):
            is_folder = stat.S_ISDIR(os.lstat(folder).st_mode)  # FileNotFoundError: removed meanwhile
        else:
            is_folder = os.path.isdir(folder)
        if not is_folder:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unlink(path: str) -> bool:
    """Removes the file. Returns whether it existed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _free_mib(folder: str) -> int:
    """MiB free on the disk of that folder, or of the parent that will hold it."""
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free >> 20
