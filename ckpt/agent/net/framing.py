"""The framing of control messages between agents: a message becomes payloads of records, and payloads a message. Pure.

A payload of kind MESSAGE holds a msgpack map of at most MESSAGE_BYTES_MAX bytes. Its blobs, if `_blobs` lists any,
follow as payloads of kind PART, one blob after the other, with nothing in between. So at most one part of a blob is
held before its MAC is checked. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from ckpt.agent.net.handshake import PAYLOAD_BYTES_MAX
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message, unpack

MESSAGE_BYTES_MAX = 64 << 10
BLOB_BYTES_MAX = 64 << 20  # all blobs of one message; a list of 2^18 frames with their hashes takes 8 MiB
BLOBS_MAX = 8
DEPTH_MAX = 16

ALIVE, MESSAGE, PART = range(3)  # kinds of records

Payload = tuple[int, bytes | memoryview]


def make_payloads(fields: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> list[Payload]:
    """The payloads of a message. They are views of the blobs, not copies. Errors: AgentError if the message is too
    large, which is a bug in ckpt."""
    sizes = [memoryview(blob).nbytes for blob in blobs]
    if len(sizes) > BLOBS_MAX or sum(sizes) > BLOB_BYTES_MAX:
        raise AgentError(f"message {fields.get('t')!r} has {len(sizes)} blobs of {sum(sizes)} bytes in all: too much")
    data = msgpack.packb({**fields, "_blobs": sizes} if sizes else fields)
    if len(data) > MESSAGE_BYTES_MAX:
        raise AgentError(f"message {fields.get('t')!r} is {len(data)} bytes; at most {MESSAGE_BYTES_MAX}")
    return [(MESSAGE, data), *(part for blob in blobs for part in _parts(memoryview(blob).cast("B")))]


def _parts(view: memoryview) -> Iterator[Payload]:
    for at in range(0, len(view), PAYLOAD_BYTES_MAX):
        yield PART, view[at : at + PAYLOAD_BYTES_MAX]


class Assembler:
    """Assembles messages from payloads. Holds only received bytes, at most BLOB_BYTES_MAX of blobs."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] | None = None
        self._sizes: list[int] = []
        self._blobs: list[bytes] = []
        self._partial_blob = bytearray()

    def add(self, kind: int, payload: bytes) -> Message | None:
        """The message that this payload completes; None if it is not complete yet. Errors: AgentError for a payload
        that is not allowed here; the caller then closes the connection."""
        if kind == MESSAGE and self._fields is None:
            self._fields = _fields(payload)
            self._sizes = _sizes(self._fields.pop("_blobs", []))
        elif kind == PART and self._fields is not None:
            if not payload or len(self._partial_blob) + len(payload) > self._sizes[len(self._blobs)]:
                raise AgentError("a peer sent more of a blob than its message says, or an empty part")
            self._partial_blob += payload
        elif kind == ALIVE and self._fields is None and not payload:
            return None
        else:
            raise AgentError(f"a peer sent a record of kind {kind} where none is due")
        return self._take_message()

    def _take_message(self) -> Message | None:
        while len(self._blobs) < len(self._sizes) and len(self._partial_blob) == self._sizes[len(self._blobs)]:
            self._blobs.append(bytes(self._partial_blob))
            self._partial_blob = bytearray()
        if self._fields is None or len(self._blobs) < len(self._sizes):
            return None
        message = Message(self._fields, [], self._blobs)
        self._fields, self._sizes, self._blobs = None, [], []
        return message


def _fields(data: bytes) -> dict[str, Any]:
    if len(data) > MESSAGE_BYTES_MAX:
        raise AgentError(f"a peer's message of {len(data)} bytes; at most {MESSAGE_BYTES_MAX}")
    fields = unpack(data, "a peer's message")
    if _is_deeper(fields, DEPTH_MAX):
        raise AgentError(f"a peer's message is nested deeper than {DEPTH_MAX}")
    return fields


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than `levels`. Handlers walk messages recursively, so the depth is limited."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def _sizes(given: Any) -> list[int]:
    if (
        not isinstance(given, list)
        or len(given) > BLOBS_MAX
        or not all(type(size) is int and 0 <= size <= BLOB_BYTES_MAX for size in given)
        or sum(given) > BLOB_BYTES_MAX
    ):
        raise AgentError("a peer's message names blobs that are malformed or too large")
    return given
