"""The handshake of two agents and the authentication of every later message: pure functions of bytes.

The handshake has four messages. Each begins with magic, kind, protocol version and the length of its body:

    dialler  -> listener   HELLO      nonce, role, run (names the secret)
    listener -> dialler    CHALLENGE  nonce
    dialler  -> listener   PROOF      MAC, name of the dialler, subject of the connection
    listener -> dialler    ACCEPT     MAC, name of the listener

The keys are HKDF-SHA256 (RFC 5869) of the run's secret. The salt is both nonces. The info is a label and the hash of
HELLO and CHALLENGE. So versions, role and run are part of every key. There are four keys: one per proof, and one per
direction for the records. A peer without a valid proof learns a nonce and a version number, but no name. The keys do
not depend on an epoch, because a connection outlives starts. A message about an epoch names the epoch.

After the handshake each message is a *record*: length, kind, sequence number, payload, MAC. The MAC is HMAC-SHA256 cut
to 16 bytes (as in RFC 4868), under the key of its direction. A record that is changed, repeated, left out, reordered,
reflected or taken from another connection does not open. A cut connection is not detected here: its end proves nothing.

Nothing is encrypted. No version is negotiated: both sides speak the same version, or there is no connection.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.errors import AgentError

VERSION = 1
NONCE_BYTES = 32
NAME_BYTES_MAX = 200

HEADER_BYTES = 9
_HEADER = struct.Struct(">4sBHH")  # magic, kind, version, bytes of the body
_MAGIC = b"CKPT"
_BODY_MAX = 512
_HELLO, _CHALLENGE, _PROOF, _ACCEPT = range(1, 5)

RECORD_HEADER_BYTES = 13
PAYLOAD_BYTES_MAX = 256 << 10
_RECORD = struct.Struct(">IBQ")  # bytes of the payload, kind, sequence number
_MAC_BYTES = 16
_PROOF_BYTES = 32


class NotAuthentic(AgentError):
    """The peer did not prove that it knows the run's secret, or a message is not authentic. `answer`: the bytes to send
    before the connection is closed: our version; our name, if we dialled ourselves; or nothing."""

    kind = "not-authentic"

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


class Role(enum.IntEnum):
    """The purpose of a connection: control messages, or the frames of one transfer."""

    CONTROL = 1
    DATA = 2


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """A key of `length` bytes (at most 8160) by HKDF with SHA-256 (RFC 5869)."""
    extracted = hmac.digest(salt, secret, "sha256")
    block = result = b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(extracted, block + info + bytes([counter]), "sha256")
        result += block
    return result[:length]


class Sealer:
    """Makes the records of one direction of one connection, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def seal(self, kind: int, payload: bytes | memoryview) -> bytes:
        """The next record. `kind`: 0..255. `payload`: at most PAYLOAD_BYTES_MAX bytes, else ValueError."""
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"a payload of {len(payload)} bytes; at most {PAYLOAD_BYTES_MAX}")
        record = _RECORD.pack(len(payload), kind, self._sequence) + payload
        self._sequence += 1
        return record + hmac.digest(self._key, record, "sha256")[:_MAC_BYTES]


class Opener:
    """Verifies the records of one direction, in order. After an error it opens nothing more."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0
        self._broken = False

    def rest_bytes(self, header: bytes | bytearray) -> int:
        """The number of bytes that follow this record header of RECORD_HEADER_BYTES.

        Errors: NotAuthentic if they are more than allowed. The length is used before the MAC is checked, so the limit
        bounds the memory that a hostile peer can take."""
        length: int = _RECORD.unpack(header)[0]
        if length > PAYLOAD_BYTES_MAX:
            raise self._fail(f"says that it has {length} bytes; at most {PAYLOAD_BYTES_MAX}")
        return length + _MAC_BYTES

    def open(self, record: bytes | bytearray) -> tuple[int, bytes]:
        """Kind and payload of a whole record. Errors: NotAuthentic if it is not the peer's next record."""
        if self._broken:
            raise NotAuthentic("a message came after one that was not authentic")
        if len(record) < RECORD_HEADER_BYTES + _MAC_BYTES:
            raise self._fail("is cut short")
        view = memoryview(record)
        if not hmac.compare_digest(
            hmac.digest(self._key, view[:-_MAC_BYTES], "sha256")[:_MAC_BYTES], view[-_MAC_BYTES:]
        ):
            raise self._fail("was not sent by the peer on this connection, or was changed on the way")
        length, kind, sequence = _RECORD.unpack_from(record)
        if length != len(record) - RECORD_HEADER_BYTES - _MAC_BYTES:
            raise self._fail("is not as long as it says")
        if sequence != self._sequence:
            how = "again" if sequence < self._sequence else "out of order"
            raise self._fail(f"came {how}: number {sequence} where {self._sequence} was due")
        self._sequence += 1
        return kind, bytes(view[RECORD_HEADER_BYTES:-_MAC_BYTES])

    def _fail(self, what: str) -> NotAuthentic:
        self._broken = True
        return NotAuthentic(f"a message {what}")


@dataclass(frozen=True, slots=True)
class Session:
    """The result of a successful handshake. `peer`: the authenticated name of the other agent. `about`: the subject
    that the dialler named, which is the transfer on data connections, and "" on control connections."""

    role: Role
    secret_id: str
    peer: str
    subject: str
    sealer: Sealer
    opener: Opener


def body_bytes(header: bytes | bytearray) -> int:
    """The length of the body that follows this handshake header of HEADER_BYTES. Errors: NotAuthentic if the header is
    not ours, has another version, or the body is too long."""
    magic, kind, version, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise NotAuthentic("the other end of the connection is no ckpt agent")
    if version != VERSION:
        # Only a HELLO is answered. Else two sides could answer each other's answers without end.
        answer = _HEADER.pack(_MAGIC, _CHALLENGE, VERSION, 0) if kind == _HELLO else b""
        what = f"the other agent speaks version {version} of the protocol, this one {VERSION}"
        raise NotAuthentic(f"{what}: install the same ckpt on all nodes", answer)
    if length > _BODY_MAX:
        raise NotAuthentic(f"a message of the handshake has {length} bytes; at most {_BODY_MAX}")
    return int(length)


class Dialler:
    """The connecting side of a handshake. Send `hello`, then pass each answer to `step` until `session` is set.

    `me`: this agent's name. `expect`: the listener's name, if known. Errors: ValueError if a name has more than
    NAME_BYTES_MAX bytes."""

    def __init__(
        self, secret: bytes, run: str, role: Role, me: str, about: str = "", expect: str | None = None
    ) -> None:
        self.session: Session | None = None
        self._secret, self._secret_id, self._role, self._agent_name, self._subject = secret, run, role, me, about
        self._expected_name = expect
        self._claims = _encode_name(me) + _encode_name(about)
        self._keys: _Keys | None = None
        self.hello = _message(_HELLO, secrets.token_bytes(NONCE_BYTES) + bytes([role]) + _encode_name(run))

    def step(self, message: bytes) -> bytes:
        """The answer to a whole message, header included. Errors: NotAuthentic; the caller then closes the
        connection."""
        if self.session is not None:
            raise NotAuthentic("the handshake is over")
        if self._keys is None:
            nonce = _body(message, _CHALLENGE)
            if len(nonce) != NONCE_BYTES:
                raise NotAuthentic("the other agent's challenge is malformed")
            self._keys = _Keys(self._secret, self.hello, message)
            return self._keys.sign_message(_PROOF, self._claims)
        (name,) = self._keys.verify_message(_ACCEPT, message, 1)
        if name == self._agent_name:
            raise NotAuthentic("the connection leads back to this agent itself")
        if self._expected_name is not None and name != self._expected_name:
            raise NotAuthentic(f"the agent at that address is {name}, not {self._expected_name}")
        sealer, opener = Sealer(self._keys.from_dialler), Opener(self._keys.from_listener)
        self.session = Session(self._role, self._secret_id, name, self._subject, sealer, opener)
        return b""


class Answerer:
    """The listening side of a handshake. `secret_of`: returns the secret of a run by its name; None if unknown."""

    def __init__(self, secret_of: Callable[[str], bytes | None], me: str) -> None:
        self.session: Session | None = None
        self._secret_of, self._agent_name, self._claims = secret_of, me, _encode_name(me)
        self._keys: _Keys | None = None
        self._role = Role.CONTROL
        self._secret_id = ""

    def step(self, message: bytes) -> bytes:
        """The answer to a whole message, header included. Errors: NotAuthentic; the caller then sends the error's
        `answer` and closes the connection."""
        if self.session is not None:
            raise NotAuthentic("the handshake is over")
        if self._keys is None:
            return self._challenge(message)
        peer, about = self._keys.verify_message(_PROOF, message, 2)
        if peer == self._agent_name:
            raise NotAuthentic("this agent was connected to itself", self._keys.sign_message(_ACCEPT, self._claims))
        sealer, opener = Sealer(self._keys.from_listener), Opener(self._keys.from_dialler)
        self.session = Session(self._role, self._secret_id, peer, about, sealer, opener)
        return self._keys.sign_message(_ACCEPT, self._claims)

    def _challenge(self, hello: bytes) -> bytes:
        body = _body(hello, _HELLO)
        (self._secret_id,) = _decode_names(body[NONCE_BYTES + 1 :], 1)
        try:
            self._role = Role(body[NONCE_BYTES])
        except ValueError:
            raise NotAuthentic(f"a connection for purpose {body[NONCE_BYTES]} is not known") from None
        secret = self._secret_of(self._secret_id)
        if secret is None:
            raise NotAuthentic(
                f"the run {self._secret_id!r} is not known here: its secret is another one, or a former one"
            )
        challenge = _message(_CHALLENGE, secrets.token_bytes(NONCE_BYTES))
        self._keys = _Keys(secret, hello, challenge)
        return challenge


class _Keys:
    """The four keys of one connection, derived from the secret and from HELLO and CHALLENGE as both sides saw them."""

    def __init__(self, secret: bytes, hello: bytes, challenge: bytes) -> None:
        nonces = hello[HEADER_BYTES : HEADER_BYTES + NONCE_BYTES] + challenge[HEADER_BYTES:]
        seen = hashlib.sha256(hello + challenge).digest()
        made = (hkdf(secret, nonces, f"ckpt peers {VERSION} {use}".encode() + b"\0" + seen, 32) for use in _KEY_LABELS)
        proof, accept, self.from_dialler, self.from_listener = made
        self._proofs = {_PROOF: proof, _ACCEPT: accept}

    def sign_message(self, kind: int, claims: bytes) -> bytes:
        return _message(kind, hmac.digest(self._proofs[kind], claims, "sha256") + claims)

    def verify_message(self, kind: int, message: bytes, count: int) -> list[str]:
        body = _body(message, kind)
        proof, claims = body[:_PROOF_BYTES], body[_PROOF_BYTES:]
        if not hmac.compare_digest(hmac.digest(self._proofs[kind], claims, "sha256"), proof):
            raise NotAuthentic("the other agent does not know this run's secret, or somebody changes what is sent")
        return _decode_names(claims, count)


_KEY_LABELS = ("proof of the dialler", "proof of the listener", "from the dialler", "from the listener")


def _message(kind: int, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, kind, VERSION, len(body)) + body


def _body(message: bytes, kind: int) -> bytes:
    if len(message) < HEADER_BYTES or len(message) != HEADER_BYTES + body_bytes(message[:HEADER_BYTES]):
        raise NotAuthentic("a message of the handshake is cut short")
    if message[4] != kind:
        raise NotAuthentic(f"message {message[4]} of the handshake came where {kind} was due")
    return message[HEADER_BYTES:]


def _encode_name(name: str) -> bytes:
    data = name.encode()
    if len(data) > NAME_BYTES_MAX:
        raise ValueError(f"a name of {len(data)} bytes; at most {NAME_BYTES_MAX}")
    return bytes([len(data)]) + data


def _decode_names(data: bytes, count: int) -> list[str]:
    """Exactly `count` names, each with its length before it. Errors: NotAuthentic if `data` is malformed."""
    names = []
    try:
        for _ in range(count):
            length = data[0]
            names.append(data[1 : 1 + length].decode())
            if len(data) < 1 + length or length > NAME_BYTES_MAX:
                raise ValueError
            data = data[1 + length :]
    except (IndexError, ValueError):
        raise NotAuthentic("a name in the handshake is malformed") from None
    if data:
        raise NotAuthentic("a message of the handshake has bytes left over")
    return names
