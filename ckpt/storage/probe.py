"""A probe of a store's behaviour, by trying it. Nothing relies on the answers: `ckpt doctor` shows them."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from ckpt.errors import AlreadyExists, DamagedData, NotFound
from ckpt.storage.contract import Backend, PutMode

_BODY = bytes(range(256)) * 8


@dataclass(frozen=True, slots=True)
class Probe:
    """The behaviour of a store.

    `put_if_absent`: a taken key is refused and keeps its content; if not, ckpt is still correct, since each key has one
    writer. `ranged_get`: a range returns exactly its bytes, and a range beyond the end is an error. The other flags:
    whether the next operation sees the effect of the one before. `clock_skew_s`: the store's clock minus this
    machine's, exact to about a second. `put_s`, `get_s`: the time for one small object."""

    put_if_absent: bool
    ranged_get: bool
    read_after_write: bool
    read_after_overwrite: bool
    list_after_write: bool
    delete: bool
    list_after_delete: bool
    clock_skew_s: float
    put_s: float
    get_s: float


def probe(backend: Backend) -> Probe:
    """Puts, reads, lists and deletes a few small objects under probe/. Errors: those of the backend."""
    folder = f"probe/{secrets.token_hex(8)}/"
    key = folder + "object"
    try:
        began_s = time.monotonic()
        backend.put(key, [_BODY])
        put_s = time.monotonic() - began_s
        began_s = time.monotonic()
        is_read = _content(backend, key) == _BODY
        get_s = time.monotonic() - began_s
        is_listed = _is_listed(backend, folder, key)
        is_ranged = _ranges_are_right(backend, key)
        is_refused = _is_refused(backend, key)
        backend.put(key, [_BODY[::-1]])
        is_reread = _content(backend, key) == _BODY[::-1]
    finally:
        backend.delete([key])
    return Probe(
        put_if_absent=is_refused,
        ranged_get=is_ranged,
        read_after_write=is_read,
        read_after_overwrite=is_reread,
        list_after_write=is_listed,
        delete=_content(backend, key) is None,
        list_after_delete=not _is_listed(backend, folder, key),
        clock_skew_s=round(backend.now_s() - time.time(), 1),
        put_s=round(put_s, 4),
        get_s=round(get_s, 4),
    )


def _content(backend: Backend, key: str) -> bytes | None:
    try:
        return backend.get(key, len(_BODY))
    except NotFound:
        return None


def _is_listed(backend: Backend, folder: str, key: str) -> bool:
    return any(info.key == key for info in backend.list(folder))


def _ranges_are_right(backend: Backend, key: str) -> bool:
    if bytes(backend.get_range(key, 300, 100)) != _BODY[300:400]:
        return False
    try:
        backend.get_range(key, len(_BODY) - 10, 20)
    except DamagedData:
        return True
    return False


def _is_refused(backend: Backend, key: str) -> bool:
    try:
        backend.put(key, [b"another"], PutMode.IF_ABSENT)
    except AlreadyExists:
        return _content(backend, key) == _BODY
    return False
