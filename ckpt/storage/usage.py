"""What is asked of a store, counted: requests by operation, and bytes. Stores charge by both."""

from __future__ import annotations

import threading
from collections import Counter

LIST_PAGE = 1000  # objects that one request for a listing returns, on S3 and its like


class StoreUsage:
    """Requests to a store, each attempt among them, and the bytes sent and received. Thread-safe.

    A put counts once: packs and records are below the size from which a backend splits a put. A listing counts once for
    every LIST_PAGE objects. A delete of many objects counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def count(self, operation: str) -> None:
        """One more request: "put", "get", "head", "list" or "delete"."""
        with self._lock:
            self._requests[operation] += 1

    def add_bytes(self, direction: str, nbytes: int) -> None:
        """`nbytes` of bodies were sent ("put") or received ("get")."""
        with self._lock:
            self._bytes[direction] += nbytes

    def requests(self) -> dict[str, int]:
        """By operation; none that was not asked for."""
        with self._lock:
            return dict(self._requests)

    def bytes_moved(self) -> dict[str, int]:
        """By direction: "put" and "get"."""
        with self._lock:
            return {name: self._bytes[name] for name in ("put", "get")}
