"""Backend for any other URL, through fsspec: "fsspec+PROTOCOL://..." or a protocol of fsspec ("sftp://host/path").

Whether a put is atomic depends on the file system:

- Object stores and fsspec's own memory put an object at once, by one `pipe_file`. An open file is never used: closing
  it after an exception would complete a truncated object.
- All others write a file under another name, and then move it. On a local disk, SFTP, SMB or HDFS the move is a rename.
  If fsspec can only copy and delete, the put is as atomic as that file system allows.

Put-if-absent is requested if fsspec can pass it on; else it is a look before the put. Durability is the file system's
own. Chunks are joined, since fsspec takes one buffer: prefer the backends that speak to the store directly.

Objects of a file system without readable times never count as old (contract.ObjectInfo), so none is deleted for its
age. A folder that cannot be listed is an error; fsspec's own find() would treat it as empty.

FTP and SFTP do not restore a lost connection. So after an error that is no plain answer (such as NotFound), a file
system that is not asynchronous is made anew by the next operation, usually the retry (storage.retry).
"""

from __future__ import annotations

import datetime
import errno
import math
import posixpath
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.dircache import DirCache

from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CkptError,
    DamagedData,
    NotFound,
    StorageError,
    TransientError,
    UsageError,
)
from ckpt.storage.contract import Buffer, ObjectInfo, PutMode, check_end, time_of_new_object_s
from ckpt.storage.failure import connection_error, full_store_hint
from ckpt.storage.names import PARTS_MAX, TEMPORARY_PREFIX, check_key, check_prefix, check_range, is_key, redact_url

PUT_IS_ATOMIC = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs", "cos", "r2", "tos", "memory"}
_TRANSIENT_ERRNOS = {
    *(errno.EAGAIN, errno.EBUSY, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EPIPE, errno.EHOSTUNREACH),
    errno.EREMOTEIO,  # s3fs raises it for a 500
    *(errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
}
_TRANSIENT_NAMES = {
    *("EndpointConnectionError", "ConnectionClosedError", "ConnectTimeoutError", "ReadTimeoutError", "HTTPClientError"),
    *("ClientConnectionError", "ServerDisconnectedError", "ServerTimeoutError", "ClientPayloadError", "FSTimeoutError"),
    *("IncompleteRead", "ResponseParserError"),
    # ftplib: "try later", and replies that do not fit the request.
    *("error_temp", "error_reply", "error_proto"),
    *("SSHException", "ChannelException", "NoValidConnectionsError"),  # paramiko
}
# The answers of an HTTP server that has no PUT.
_READ_ONLY = {405, 501}
_DENIED_NAMES = {"NoCredentialsError", "ClientAuthenticationError", "AuthenticationException"}
_TIME_FIELDS = (
    *("mtime", "LastModified", "last_modified", "modified", "modify", "modificationTime"),
    *("updated", "created", "timeModified"),
)
_MILLISECONDS = {"modificationTime"}  # WebHDFS
_DIGITS = re.compile(r"(\d{14})(?:\.\d+)?")  # YYYYMMDDHHMMSS, always UTC: MLSD of FTP (RFC 3659)


def open_fsspec(url: str) -> FsspecBackend:
    """The backend for that URL. Some file systems connect at once. Errors: UsageError if fsspec does not know the
    protocol, or lacks its package; StorageError of a file system that connects at once."""
    plain = url.removeprefix("fsspec+")
    protocol = plain.partition("://")[0]
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as exc:
        raise _unknown_url_error(url, exc) from exc
    made = FsspecBackend(url, protocol, kind)
    with suppress(TransientError):  # the first operation tries again
        made.connect()
    return made


class FsspecBackend:
    """A Backend (see ckpt.storage.contract) on one fsspec file system, which is made anew after an error."""

    def __init__(self, url: str, protocol: str, kind: type[Any]) -> None:
        self.url = redact_url(url)  # without the password, for messages
        self._url_with_password = url
        # None until connected, and after an error that may have left the file system unusable.
        self._fs: Any = None
        self._root = kind._strip_protocol(url.removeprefix("fsspec+")).rstrip("/")
        self._is_put_atomic = protocol in PUT_IS_ATOMIC
        self._is_s3 = protocol in ("s3", "s3a")
        # A file system that is not asynchronous may have one connection. Threads would take each other's replies on it.
        self._has_one_connection = not kind.async_impl
        self._connection_lock: Any = threading.RLock() if self._has_one_connection else nullcontext()

    def connect(self) -> None:
        """Makes the file system, which may connect at once. Errors: UsageError; StorageError."""
        try:
            filesystem, _ = url_to_fs(self._url_with_password.removeprefix("fsspec+"), skip_instance_cache=True)
        except (ImportError, ValueError, TypeError) as exc:
            raise _unknown_url_error(self.url, exc) from exc
        except Exception as exc:
            raise _error(self.url, "connect", exc) from exc
        if isinstance(getattr(filesystem, "dircache", None), DirCache):  # SFTP's has no such option
            filesystem.dircache.use_listings_cache = False
        # Retries are ours: a deadline could pass during those of s3fs.
        if self._is_s3:
            filesystem.retries = 1
            filesystem.config_kwargs = {**filesystem.config_kwargs, "retries": {"total_max_attempts": 1}}
        self._fs = filesystem

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        path = self._path(key)
        data = b"".join(chunks)
        with self._translate_errors(f"put {key}"):
            if self._is_put_atomic:
                self._fs.pipe_file(path, data, mode="create" if mode is PutMode.IF_ABSENT else "overwrite")
                return
            if mode is PutMode.IF_ABSENT and self._fs.exists(path):
                raise AlreadyExists(f"{self.url}: {key} exists already")
            folder = posixpath.dirname(path)
            self._fs.makedirs(folder, exist_ok=True)
            temporary = posixpath.join(folder, TEMPORARY_PREFIX + secrets.token_hex(8))
            try:
                self._fs.pipe_file(temporary, data)
                self._fs.mv(temporary, path)
            except BaseException:
                # Report the first error. abort_uploads finds the file that is left.
                with suppress(Exception):
                    self._fs.rm_file(temporary)
                raise

    def get(self, key: str, size_max: int) -> bytes:
        size = self.head(key).size
        if size > size_max:
            raise DamagedData(f"{self.url}: {key} has {size} bytes; at most {size_max} are expected")
        return self._range(key, 0, size)

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        check_range(start, length)
        if length == 0:
            check_end(self, key, start + length)
        return self._range(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._translate_errors(f"head {key}"):
            self._fs.invalidate_cache(self._fs._parent(path))
            found = self._fs.info(path)
        if found["type"] != "file":
            raise NotFound(f"{self.url}: {key} is not an object")
        return self._info(key, found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = [(path, each) for path, each in self._find(check_prefix(prefix)) if is_key(path)]
        return iter(sorted((self._info(key, each) for key, each in found), key=lambda info: info.key))

    def folders(self, prefix: str) -> Sequence[str]:
        path = f"{self._root}/{check_prefix(prefix)}".rstrip("/")
        with self._translate_errors(f"look below {prefix}"):
            try:
                found = self._fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = (posixpath.basename(each["name"].rstrip("/")) for each in found if each["type"] == "directory")
        return sorted(name for name in names if is_key(name))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._translate_errors(f"delete {key}"), suppress(FileNotFoundError):
                self._fs.rm_file(path)

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        """Removes the temporary files of puts that did not finish. In an object store its own rules remove unfinished
        uploads."""
        if self._is_put_atomic:
            return 0
        before_s = self.now_s() - older_than_s
        ended = 0
        for path, found in (each for prefix in prefixes for each in self._find(check_prefix(prefix))):
            if posixpath.basename(path).startswith(TEMPORARY_PREFIX) and self._info(path, found).modified_s < before_s:
                with self._translate_errors(f"delete {path}"), suppress(FileNotFoundError):
                    self._fs.rm_file(f"{self._root}/{path}")
                    ended += 1
        return ended

    def now_s(self) -> float:
        """The modification time of a new object; this machine's clock if the file system gives no times."""
        modified_s = time_of_new_object_s(self)
        return modified_s if math.isfinite(modified_s) else time.time()

    def close(self) -> None:
        """Drops the file system, and with it its connection and SFTP's thread."""
        # Otherwise an operation still uses the file system.
        if self._has_one_connection and self._connection_lock.acquire(blocking=False):
            self._fs = None
            self._connection_lock.release()

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        try:
            with self._translate_errors(f"get {key}"):
                data = bytes(self._fs.cat_file(self._path(key), start=start, end=start + length))
        except (NotFound, AccessDenied, TransientError):
            raise
        except StorageError:
            # A range beyond the end raises a different error in each file system.
            check_end(self, key, start + length)
            raise
        if len(data) > length and len(data) == self.head(key).size:
            # The server does not support ranges, and sent the whole object.
            data = data[start : start + length]
        if len(data) != length:
            check_end(self, key, start + length)
            raise connection_error(self.url, f"get {key}", f"{len(data)} of {length} bytes arrived")
        return data

    def _find(self, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The files below the prefix, by their path below the root."""
        with self._translate_errors(f"list {prefix}"):
            folder = self._fs._strip_protocol(f"{self._root}/{prefix}".rstrip("/"))
            head = self._fs._strip_protocol(self._root) + "/"
            self._fs.invalidate_cache()
            found = self._fs.find(folder, detail=True) if self._is_put_atomic else dict(self._walk(folder))
        return ((path.removeprefix(head), each) for path, each in found.items() if path.startswith(head))

    def _walk(self, folder: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The files below the folder, by their path. A missing folder has none. Errors: OSError."""
        around = sys.exception()
        try:
            found = self._fs.ls(folder, detail=True)
        except OSError as exc:
            if isinstance(_root_cause(exc, around), FileNotFoundError) or exc.errno == errno.ENOENT:
                return
            raise
        for each in found:
            if each["type"] != "directory":
                yield each["name"], each
            elif depth < PARTS_MAX and each["name"].rstrip("/") != folder:
                yield from self._walk(each["name"].rstrip("/"), depth + 1)

    def _info(self, key: str, found: Mapping[str, Any]) -> ObjectInfo:
        modified_s = _modified_s(found)
        version = str(found.get("ETag") or found.get("etag") or f"{modified_s}-{found['size']}-{found.get('ino', '')}")
        return ObjectInfo(key, int(found["size"] or 0), modified_s, version.strip('"'))

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Translates every exception of a file system into ours: fsspec promises no particular classes."""
        around = sys.exception()
        with self._connection_lock:
            if self._fs is None:
                self.connect()
            try:
                yield
            except CkptError:
                raise
            except Exception as exc:
                error = _error(self.url, what, _root_cause(exc, around))
                if self._has_one_connection and not isinstance(error, (NotFound, AlreadyExists, AccessDenied)):
                    self._fs = None
                raise error from exc


def _unknown_url_error(url: str, why: Exception) -> UsageError:
    told = f"{redact_url(url)}: fsspec cannot open it: {why}"
    return UsageError(f"{told}; give a URL that fsspec knows, or install the package for it")


def _root_cause(exc: BaseException, around: BaseException | None) -> BaseException:
    """The real cause of an exception. FTP's listing reports any reply of the server as a missing file, even a 421,
    which closes the connection; the real reply is in the context. `around`: the exception handled before, which is no
    part of the cause."""
    each: BaseException | None = exc
    while each is not None and each is not around:
        if _is_transient(each):
            return each
        each = each.__cause__ or each.__context__
    return exc


def _is_transient(exc: BaseException) -> bool:
    """Whether a retry may succeed."""
    if isinstance(exc, TimeoutError | ConnectionError | EOFError) or type(exc).__name__ in _TRANSIENT_NAMES:
        return True
    # paramiko's error has no errno.
    return isinstance(exc, OSError) and (exc.errno in _TRANSIENT_ERRNOS or str(exc) == "Socket is closed")


def _error(url: str, what: str, exc: BaseException) -> CkptError:
    told = f"{url}: {what}: {type(exc).__name__}: {exc}"
    if "bucket does not exist" in str(exc) or "NoSuchBucket" in str(exc):
        return StorageError(f"{told}; create the bucket, or check the URL and the endpoint")
    if isinstance(exc, FileNotFoundError):
        return NotFound(told)
    if isinstance(exc, FileExistsError):
        return AlreadyExists(told)
    if isinstance(exc, PermissionError) or type(exc).__name__ in _DENIED_NAMES or str(exc).startswith("530 "):  # FTP
        return AccessDenied(f"{told}; check the credentials, and their permissions")
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
        return StorageError(f"{told}; {full_store_hint(url)}")
    writes = what.startswith(("put ", "delete "))
    if isinstance(exc, NotImplementedError) or (writes and getattr(exc, "status", None) in _READ_ONLY):
        return StorageError(f"{told}; this URL is read-only: give one that can be written")
    return TransientError(told) if _is_transient(exc) else StorageError(told)


def _modified_s(found: Mapping[str, Any]) -> float:
    """The modification time, Unix seconds. Infinity if there is no valid time: such an object never counts as old."""
    told = ((name, _seconds(found[name])) for name in _TIME_FIELDS if found.get(name) is not None)
    return next((each / 1000 if name in _MILLISECONDS else each for name, each in told if each > 0), math.inf)


def _seconds(value: Any) -> float:
    """Unix seconds of a time in any form that file systems use; 0 if it is not a time."""
    if isinstance(value, str):
        digits = _DIGITS.fullmatch(value)
        try:
            value = datetime.datetime.strptime(digits[1], "%Y%m%d%H%M%S") if digits else value
            value = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            return 0.0
    if isinstance(value, datetime.datetime):
        return (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)).timestamp()
    return float(value) if isinstance(value, int | float) else 0.0
