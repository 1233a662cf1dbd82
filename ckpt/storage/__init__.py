"""Stores: the contract of a backend, the opening of a URL, and the retries around every backend.

Imports only the base modules; backends are loaded by name. Start with `contract`, then `url` (which builds the stack)
and `retry`. The rest of ckpt reaches a store only through `open(url)`.
"""

from ckpt.storage.contract import Backend, Buffer, ObjectInfo, PutMode
from ckpt.storage.url import canonical, open

__all__ = ["Backend", "Buffer", "ObjectInfo", "PutMode", "canonical", "open"]
