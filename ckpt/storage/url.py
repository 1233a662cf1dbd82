"""From a URL to a store. `open` builds the whole stack; nothing else does.

    a path, file:///...      a folder                       memory://name   a store within this process
    s3:// gs:// az://        object storage (obstore)       any other URL   fsspec ("fsspec+s3://": s3fs, for instance)

The entry points of the group "ckpt.backends" map a scheme to its backend. Our own are also in the table below: opening
a plain path then needs no look-up (20 ms), and a checkout that is not installed works. A package's backend for another
scheme is found by its entry point before fsspec is asked.
"""

from __future__ import annotations

import functools
import importlib
import os.path
import re
import urllib.parse
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import cast

from ckpt.errors import UsageError
from ckpt.events import Events
from ckpt.settings import Settings, read_settings
from ckpt.storage.contract import Backend
from ckpt.storage.names import redact_url
from ckpt.storage.retry import Retrying
from ckpt.storage.usage import StoreUsage

OUR_BACKENDS = {
    "file": "ckpt.backends.local:open_local",
    "memory": "ckpt.backends.memory:open_memory",
    "s3": "ckpt.backends.cloud:open_cloud",
    "gs": "ckpt.backends.cloud:open_cloud",
    "az": "ckpt.backends.cloud:open_cloud",
    "fsspec": "ckpt.backends.any_fsspec:open_fsspec",
}
ACCEPTED_URLS = (
    "a path, file:///path, s3://bucket/path, gs://bucket/path, az://container/path, memory://name, "
    "or fsspec+protocol://... for any file system that fsspec knows"
)
DCP_METADATA = ".metadata"  # in a folder of torch.distributed.checkpoint (DCP)
_SCHEME = re.compile(r"[a-z][a-z0-9.-]*(\+[a-z0-9.-]+)?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_FOLDER = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.=@+,-]{1,255}")  # one part of the path within a bucket


def open(
    url: str,
    *,
    settings: Settings | None = None,
    events: Events | None = None,
    contact_s: float | None = None,
    usage: StoreUsage | None = None,
) -> Backend:
    """The store at that URL, with retries around it (`contact_s`, `usage`: see Retrying). Creates and asks nothing
    before the first operation. Thread-safe. The caller closes the store. Errors: UsageError, which names the accepted
    URLs."""
    settings = settings or read_settings()
    url = canonical(url)
    make = functools.partial(_factory(scheme_of(url)), url)
    return Retrying(make(), settings.retry_s, events, reopen=make, contact_s=contact_s, usage=usage)


def canonical(url: str) -> str:
    """The canonical form of the URL: equal for equal stores. A folder's is its absolute path, with links resolved. Uses
    no network and imports no backend. Errors: UsageError names the URLs that are accepted."""
    if not url or any(ord(c) < 32 for c in url):
        raise UsageError(f"{redact_url(url)[:200]!r} is not the URL of a store; give {ACCEPTED_URLS}")
    head, mark, rest = url.partition("://")
    scheme = head.lower()
    if not mark:
        if found := re.match(r"(file|memory|s3|gs|az|https?)(:|//)", url, re.IGNORECASE):
            lacks = "two slashes are" if found[2] == ":" else "a colon is"
            raise UsageError(
                f"{url!r} is not the URL of a store: {lacks} missing; give {ACCEPTED_URLS} (a path may begin with ./)"
            )
        return os.path.realpath(os.path.expanduser(url))
    if not _SCHEME.fullmatch(scheme) or not rest:
        raise UsageError(f"{redact_url(url)[:200]!r} is not the URL of a store; give {ACCEPTED_URLS}")
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if not slash or host.lower() not in ("", "localhost"):  # RFC 8089
            raise UsageError(f"{redact_url(url)!r} names a host; give file:///path or a plain path for a local folder")
        path = urllib.parse.unquote(slash + path, errors="surrogateescape")
        if "\0" in path:
            raise UsageError(f"{url[:200]!r} holds a %00, which no path can have; give {ACCEPTED_URLS}")
        return os.path.realpath(path)
    if scheme in ("memory", "s3", "gs", "az"):
        return f"{scheme}://{_bucket_and_path(url, rest)}"
    return f"{scheme}://{rest.rstrip('/') or rest}"


def scheme_of(url: str) -> str:
    """The scheme of a canonical URL; "file" for a path."""
    head, mark, _ = url.partition("://")
    return head if mark else "file"


def missing_folders(url: str) -> list[Path]:
    """The folders that using a store in a folder would make, innermost first; none for other stores. Errors:
    UsageError."""
    path = Path(canonical(url))
    return [*takewhile(lambda each: not each.exists(), [path, *path.parents])] if path.is_absolute() else []


def check_not_dcp(url: str) -> None:
    """Checks that the URL is no folder of torch.distributed.checkpoint (DCP) without a run in it. Errors: UsageError
    names the command that makes a checkpoint of that folder."""
    path = Path(canonical(url))
    if path.is_absolute() and (path / DCP_METADATA).is_file() and not (path / "epochs").is_dir():
        raise UsageError(
            f"{path} is a checkpoint of torch.distributed.checkpoint (DCP), not the URL of a run. Give another URL; "
            f"`ckpt import {path} URL` makes a checkpoint of a run of it"
        )


def _bucket_and_path(url: str, rest: str) -> str:
    bucket, _, path = rest.partition("/")
    parts = [part for part in path.split("/") if part]
    if not _BUCKET.fullmatch(bucket) or not all(_FOLDER.fullmatch(part) for part in parts):
        raise UsageError(
            f"{redact_url(url)[:200]!r} is not the URL of a store. Name the bucket and its folders with A-Z a-z 0-9 "
            ". _ - (folders also with = @ + ,). Give endpoint, region and credentials in the environment "
            "(AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, ...)"
        )
    return "/".join([bucket, *parts])


def _factory(scheme: str) -> Callable[[str], Backend]:
    where = OUR_BACKENDS.get(scheme) or _entry_points().get(scheme) or OUR_BACKENDS["fsspec"]
    module, _, name = where.partition(":")
    return cast(Callable[[str], Backend], getattr(importlib.import_module(module), name))


def _entry_points() -> dict[str, str]:
    """Scheme to "module:function", of every installed package."""
    import importlib.metadata

    return {point.name: point.value for point in importlib.metadata.entry_points(group="ckpt.backends")}
