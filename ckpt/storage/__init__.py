"""Stores: the contract of a backend, the opening of a URL, and what is wrapped around every backend."""

from ckpt.storage.contract import Backend, Buffer, ObjectInfo, PutMode
from ckpt.storage.url import canonical, open

__all__ = ["Backend", "Buffer", "ObjectInfo", "PutMode", "canonical", "open"]
