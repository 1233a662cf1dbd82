"""The messages on the Unix socket between a trainer (or a tool) and its agent.

One `SOCK_SEQPACKET` packet is one message: a msgpack map of at most MESSAGE_BYTES_MAX bytes, with at most FDS_MAX
descriptors. Larger data travels as a *blob*, which is a sealed memfd. The seal stops a hostile sender from changing the
bytes while they are read. A blob has at most BLOB_BYTES_MAX bytes, which bounds the receiver's memory. Nothing is
unpickled. The last descriptors of a packet are its blobs; the map's `_blobs` is their number.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ckpt.errors import AgentError, CkptError, from_kind

MESSAGE_BYTES_MAX = 64 << 10
BLOB_BYTES_MAX = 256 << 20
FDS_MAX = 8

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(slots=True)
class Message:
    """A received message.

    `fields`: the map. `fds`: descriptors, owned by the receiver, which closes those that it does not keep. Child
    programs do not inherit them. `blobs`: the bytes of each blob, whose descriptor is already closed."""

    fields: dict[str, Any]
    fds: list[int] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.fields.get("t", ""))

    def close(self) -> None:
        """Closes the descriptors that are still in `fds`."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


@dataclass(slots=True)
class Packet:
    """A message ready to be sent. `blob_fds`: the descriptors of its blobs; the sender calls `close` after sending or
    dropping it."""

    data: bytes
    fds: list[int]
    blob_fds: list[int]

    def send(self, sock: socket.socket) -> None:
        """Sends the whole packet. Errors: BlockingIOError if a non-blocking socket is full (nothing was sent);
        OSError."""
        socket.send_fds(sock, [self.data], self.fds)

    def close(self) -> None:
        for fd in self.blob_fds:
            os.close(fd)
        self.blob_fds.clear()


def pack(fields: dict[str, Any], fds: Sequence[int] = (), blobs: Sequence[bytes] = ()) -> Packet:
    """The packet of a message. Errors: AgentError if it is too large, which is a bug in ckpt, not a user's mistake."""
    if len(fds) + len(blobs) > FDS_MAX:
        raise AgentError(
            f"message {fields.get('t')!r} has {len(fds) + len(blobs)} descriptors; at most {FDS_MAX} are allowed"
        )
    data = msgpack.packb({**fields, "_blobs": len(blobs)} if blobs else fields)
    if len(data) > MESSAGE_BYTES_MAX:
        raise AgentError(f"message {fields.get('t')!r} has {len(data)} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
    packet = Packet(data, list(fds), [])
    try:
        for blob in blobs:
            packet.blob_fds.append(_seal_blob(blob))
    except BaseException:
        packet.close()
        raise
    packet.fds.extend(packet.blob_fds)
    return packet


def send(sock: socket.socket, fields: dict[str, Any], fds: Sequence[int] = (), blobs: Sequence[bytes] = ()) -> None:
    packet = pack(fields, fds, blobs)
    try:
        packet.send(sock)
    finally:
        packet.close()


def receive(sock: socket.socket) -> Message | None:
    """The next message; None at the end of the connection. Errors: BlockingIOError if a non-blocking socket has no
    message; AgentError if the message does not parse. The caller then drops that connection only."""
    data, fds, flags = _receive_packet(sock)
    message = Message({}, fds)
    try:
        if not data:
            message.close()
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > MESSAGE_BYTES_MAX:
            raise AgentError("a message on the agent's socket is larger than allowed")
        message.fields = unpack(data)
        count = message.fields.pop("_blobs", 0)
        if not isinstance(count, int) or not 0 <= count <= len(message.fds):
            raise AgentError("a message on the agent's socket names blobs that it does not carry")
        first = len(message.fds) - count
        message.blobs = [_read_blob(fd) for fd in message.fds[first:]]
        for fd in message.fds[first:]:
            os.close(fd)
        del message.fds[first:]
    except BaseException:
        message.close()
        raise
    return message


def error_fields(request_id: int, error: BaseException) -> dict[str, Any]:
    kind = error.kind if isinstance(error, CkptError) else "error"
    text = str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
    return {"t": "error", "id": request_id, "kind": kind, "message": text[:8000]}


def raise_error(message: Message) -> None:
    """Raises the error that an error answer carries; does nothing for a reply."""
    if message.kind == "error":
        message.close()
        raise from_kind(str(message.fields.get("kind", "")), str(message.fields.get("message", "")))


def _receive_packet(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """(data, descriptors, flags) of the next packet. Child programs do not inherit the descriptors. `socket.recv_fds`
    cannot do that, since it ignores its flags argument."""
    room = socket.CMSG_LEN(FDS_MAX * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(MESSAGE_BYTES_MAX + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, rights in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    return data, fds.tolist(), flags


def unpack(data: bytes, what: str = "a message on the agent's socket") -> dict[str, Any]:
    """The fields of a message: a map with a type, with bounded lengths. Errors: AgentError that begins with `what`."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=True, max_array_len=1 << 15, max_map_len=1 << 12, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as exc:
        raise AgentError(f"{what} cannot be decoded") from exc
    if not isinstance(fields, dict) or not isinstance(fields.get("t"), str):
        raise AgentError(f"{what} has no type")
    return fields


def _seal_blob(blob: bytes) -> int:
    if len(blob) > BLOB_BYTES_MAX:
        raise AgentError(f"a blob has {len(blob)} bytes; at most {BLOB_BYTES_MAX} are allowed")
    fd = os.memfd_create("ckpt-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(blob)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_blob(fd: int) -> bytes:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise AgentError("a blob on the agent's socket is not a memfd") from exc
    size = os.fstat(fd).st_size
    if seals & _SEALS != _SEALS or size > BLOB_BYTES_MAX:
        raise AgentError(
            f"a blob of {size} bytes on the agent's socket is not sealed, or larger than {BLOB_BYTES_MAX} bytes"
        )
    parts = []
    at = 0
    while at < size:
        part = os.pread(fd, size - at, at)
        if not part:
            raise AgentError("a blob on the agent's socket ended early")
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
