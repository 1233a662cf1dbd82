"""Backend for s3://, gs:// and az://, through obstore.

Credentials, region and endpoint come from the clouds' usual variables (AWS_ACCESS_KEY_ID, AWS_REGION,
AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_BASE_URL, AZURE_STORAGE_ACCOUNT_NAME,
AZURE_STORAGE_ENDPOINT, ...). If no variable gives credentials for S3, they come from AWS_PROFILE and ~/.aws, through
botocore.

- An object of up to SINGLE_BYTES_MAX is one put, whose buffers are not joined. A larger one is a multipart upload of
  parallel parts; obstore aborts it when a part fails. Put-if-absent is always one single put.
- obstore's own retries are off, with one exception: a part of a multipart upload is sent up to twice again. One lost
  part must not cost the other hundred.
- AWS_CA_BUNDLE names a file of PEM certificates that are trusted besides the system's, for a store whose certificate is
  signed by a private authority. (obstore does not know that variable.)
- Integrity does not depend on the transport: every reader checks its own hashes. So the payload is not signed over TLS
  or the loopback, where signing would only cost CPU.
- A server that answers a ranged get with 200 (rclone) is recognised by its first such answer; see signed_http.py.
- A foreign object with a name that obstore does not accept as a path (a//b, a/../b) hides nothing on s3: botocore lists
  then.
- Unfinished multipart uploads are aborted on s3 only. Azure drops them by itself in a week. Google keeps them until a
  lifecycle rule of the bucket ends them.
"""

from __future__ import annotations

import datetime
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from ckpt.backends.cloud_config import other_config, s3_config
from ckpt.backends.cloud_errors import CloudErrors, NoPath, NotPartial
from ckpt.backends.signed_http import SignedHttp
from ckpt.errors import DamagedData, NotFound, StorageError
from ckpt.storage.contract import Buffer, ObjectInfo, PutMode, check_end, time_of_new_object_s
from ckpt.storage.failure import check_not_cancelled, connection_error
from ckpt.storage.names import check_key, check_prefix, check_range, is_key
from ckpt.types import format_count

SINGLE_BYTES_MAX = 128 << 20
PART_BYTES = 32 << 20
PARTS_MAX = 9_000  # S3 allows 10,000
PARTS_AT_ONCE = 8
# A put of up to this size gets the time-out of a small request.
SMALL_BYTES_MAX = 4 << 20
SMALL_TIMEOUT_S = 30.0
BULK_TIMEOUT = datetime.timedelta(seconds=600)  # SINGLE_BYTES_MAX within it: 0.2 MB/s
LIST_CHUNK = 1000
CANCEL_S = 0.1  # between two looks at `cancel` in a large put
# How long a cancelled put waits until its buffers are no longer read.
RELEASE_S = 5.0

_STORES = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_GOOGLE = "https://storage.googleapis.com"
_RANGE_BEYOND_END = re.compile(r"status code: 416|Wanted range starting at")  # the latter: obstore's error for a 206


def open_cloud(url: str, timeout_s: float = SMALL_TIMEOUT_S) -> CloudBackend:
    """The backend for that URL. Uses no network. `timeout_s`: the limit of a small request, and of a pause within a
    large read. A large write has BULK_TIMEOUT_S in total. Errors: UsageError if the environment is invalid."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    config = s3_config(os.environ) if scheme == "s3" else other_config(scheme, os.environ)
    return CloudBackend(url, scheme, bucket, prefix, config, timeout_s)


def open_obstore(url: str) -> Any:
    """obstore's own store for that URL, with the same configuration and nothing of ckpt around its calls: the ceiling
    of a benchmark. Errors: as `open_cloud`."""
    return open_cloud(url)._upload_store


class CloudBackend:
    """A Backend (see ckpt.storage.contract) on one bucket or container."""

    def __init__(
        self, url: str, scheme: str, bucket: str, prefix: str, config: dict[str, Any], timeout_s: float
    ) -> None:
        self.url = url
        self._scheme = scheme
        self._bucket = bucket
        self._prefix = prefix
        self._config = config
        self._errors = CloudErrors(url, scheme, bucket)
        self.single_bytes_max = SINGLE_BYTES_MAX
        self.part_bytes = PART_BYTES
        self._options = options = {**config.pop("client_options", {}), "connect_timeout": "10s"}
        small = datetime.timedelta(seconds=timeout_s)
        # A read time-out also runs while a request is being sent, so only the store object for downloads has one.
        self._small_store = self._make_store({"timeout": small}, 0)
        self._download_store = self._make_store({"timeout": BULK_TIMEOUT, "read_timeout": small}, 0)
        self._signed_http = SignedHttp(self._sign, self._errors.of_reply, timeout_s, options.get("root_certificate"))
        self._has_ranged_gets = True  # until the store answers a ranged get with 200

    # Each store object reads the system's certificates, which takes some 20 ms: a restore does without these two.

    @cached_property
    def _upload_store(self) -> Any:
        return self._make_store({"timeout": BULK_TIMEOUT}, 0)

    @cached_property
    def _multipart_store(self) -> Any:
        return self._make_store({"timeout": BULK_TIMEOUT}, 2)

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        check_key(key)
        views = [view for chunk in chunks if (view := memoryview(chunk).cast("B"))]
        size = sum(len(view) for view in views)
        with self._errors.translate(f"put {key}"):
            if mode is PutMode.IF_ABSENT:
                obstore.put(self._upload_store, key, views or b"", mode="create", use_multipart=False)
            elif size <= SMALL_BYTES_MAX:
                obstore.put(self._small_store, key, views or b"", use_multipart=False)
            elif size <= self.single_bytes_max:
                self._put_large(self._upload_store, key, views, cancel, use_multipart=False)
            else:
                part = max(self.part_bytes, -(-size // PARTS_MAX))
                how = {"use_multipart": True, "chunk_size": part, "max_concurrency": PARTS_AT_ONCE}
                self._put_large(self._multipart_store, key, views, cancel, **how)

    def get(self, key: str, size_max: int) -> bytes:
        check_key(key)
        with self._errors.translate(f"get {key}"):
            reply = obstore.get(self._download_store, key)
            size = reply.meta["size"]
            if size > size_max:
                raise DamagedData(f"{self.url}: {key} has {size} bytes; at most {size_max} are expected")
            data = reply.bytes().to_bytes()
        if len(data) != size:
            raise connection_error(self.url, f"get {key}", f"{len(data)} of {size} bytes arrived")
        return data

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        check_key(key)
        check_range(start, length)
        if length == 0:
            check_end(self, key, start)
            return b""
        if self._has_ranged_gets:
            try:
                with self._errors.translate(f"get {key}"):
                    data = memoryview(obstore.get_range(self._download_store, key, start=start, length=length))
            except NotPartial:
                self._has_ranged_gets = False
            except StorageError as exc:
                if isinstance(exc.__cause__, BaseError) and _RANGE_BEYOND_END.search(str(exc.__cause__)):
                    check_end(self, key, start + length)
                raise
            else:
                if len(data) != length:
                    check_end(self, key, start + length)
                    raise connection_error(self.url, f"get {key}", f"{len(data)} of {length} bytes arrived")
                return data
        return self._signed_http.get_range(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        try:
            with self._errors.translate(f"head {key}"):
                return self._info(obstore.head(self._small_store, key))
        except NotFound:
            # A reply to HEAD has no body, so a missing bucket looks like a missing object. A GET tells them apart.
            with self._errors.translate(f"get {key}"):
                return self._info(obstore.get(self._small_store, key).meta)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        found = [info for info in self._list_objects(prefix) if is_key(info.key)]
        found.sort(key=lambda info: info.key)  # not every store lists in order
        return iter(found)

    def folders(self, prefix: str) -> Sequence[str]:
        check_prefix(prefix)
        with self._errors.translate(f"look below {prefix}"):
            found = obstore.list_with_delimiter(self._small_store, prefix.rstrip("/") or None)["common_prefixes"]
        names = (each.rstrip("/").rpartition("/")[2] for each in found)
        return sorted(name for name in names if is_key(name))

    def delete(self, keys: Iterable[str]) -> None:
        each = [check_key(key) for key in keys]
        if not each:
            return
        try:
            with self._errors.translate(f"delete {format_count(len(each), 'object')}"):
                obstore.delete(self._small_store, each)
        except NotFound:  # gs and az delete one by one, and stop at the first missing one
            for key in each:
                with suppress(NotFound), self._errors.translate(f"delete {key}"):
                    obstore.delete(self._small_store, key)

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        if self._scheme != "s3":
            return 0
        from ckpt.backends.aws_listing import abort_uploads

        return abort_uploads(*self._location, self.now_s() - older_than_s, prefixes, is_ours)

    def now_s(self) -> float:
        """The Date header of a reply; if there is none, the modification time of a new object."""
        date_s = self._signed_http.date_s(self._clock_url)
        return date_s if date_s is not None else time_of_new_object_s(self)

    def close(self) -> None:
        self._signed_http.close()

    def _put_large(
        self, store: Any, key: str, views: Sequence[memoryview], cancel: threading.Event | None, **how: Any
    ) -> None:
        if cancel is None:
            obstore.put(store, key, views, **how)
            return
        import asyncio

        async def put() -> BaseException | None:
            task = asyncio.ensure_future(obstore.put_async(store, key, views, **how))
            try:
                while not (await asyncio.wait({task}, timeout=CANCEL_S))[0]:
                    check_not_cancelled(cancel, self.url, key)
            except StorageError as exc:
                task.cancel()  # this closes the connection
                await asyncio.wait({task})
                return exc
            return task.exception()

        # Raised inside the coroutine, the error would be part of a reference cycle that keeps the views.
        failed = asyncio.run(put())
        if failed is None:
            return
        _await_release(views)
        try:
            raise failed
        finally:
            del failed

    def _make_store(self, timeouts: dict[str, Any], retries: int) -> Any:
        with self._errors.translate("open", asks=False):
            return _STORES[self._scheme](
                self._bucket,
                prefix=self._prefix or None,
                client_options=self._options | timeouts,
                retry_config={"max_retries": retries, "retry_timeout": BULK_TIMEOUT},
                **self._config,
            )

    def _list_objects(self, prefix: str) -> Sequence[ObjectInfo]:
        """All objects below a prefix, also those that are not keys."""
        try:
            with self._errors.translate(f"list {prefix}"):
                chunks = obstore.list(self._small_store, prefix.rstrip("/") or None, chunk_size=LIST_CHUNK)
                return [self._info(meta) for chunk in chunks for meta in chunk]
        except NoPath:
            if self._scheme != "s3":
                raise
        from ckpt.backends.aws_listing import list_objects

        return list_objects(*self._location, prefix)

    @property
    def _location(self) -> tuple[str, str, str, dict[str, Any]]:
        return self.url, self._bucket, self._prefix, self._config

    def _sign(self, method: str, key: str) -> str:
        with self._errors.translate(f"sign a request for {key}", asks=False):
            return str(obstore.sign(self._small_store, method, key, datetime.timedelta(minutes=15)))  # type: ignore[call-overload]

    def _clock_url(self) -> str:
        """A URL for a request whose reply has the time; any reply has. For gs it is not signed: without a key at hand,
        signing is a request to Google that most service accounts may not make."""
        if self._scheme == "gs":
            return f"{self._config.get('base_url', _GOOGLE)}/{self._bucket}"
        return self._sign("HEAD", "clock")

    def _info(self, meta: Mapping[str, Any]) -> ObjectInfo:
        modified_s = meta["last_modified"].timestamp()
        version = (meta["e_tag"] or meta["version"] or f"{modified_s}-{meta['size']}").strip('"')
        return ObjectInfo(meta["path"], meta["size"], modified_s, version)


def _await_release(views: Sequence[memoryview]) -> None:
    """Waits until other threads have released the views, which they do soon; at most RELEASE_S."""
    ends_s = time.monotonic() + RELEASE_S
    for view in views:
        while time.monotonic() < ends_s:
            try:
                view.release()
            except BufferError:
                time.sleep(0.01)
            else:
                break
