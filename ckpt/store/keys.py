"""Keys of the objects in a store. All keys are built and parsed here.

    epochs/<epoch>                            the claim of one (re)start: a small JSON object, written once
    alive/<epoch>                             the epoch's heartbeat: the only object that is ever overwritten
    closed/<epoch>                            says that the epoch has ended
    data/<identity>/<owner>/<writer>-<n>.pack encoded frames; immutable
    commits/<identity>-<writer>               one record; it makes the checkpoint exist; immutable
    retired/<identity>                        tombstone: the checkpoint no longer exists, whatever lands later
    leases/<reader>                           a reader's lease: the checkpoints it names are not deleted

`writer` names one writing process, so that no two writers ever share a key. Parsing returns None for any other object
in the store: foreign objects are ignored, never an error.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from ckpt.errors import UsageError
from ckpt.types import PATH_NAME, Epoch, Identity

COMMITS = "commits/"
EPOCHS = "epochs/"
HEARTBEATS = "alive/"
CLOSED = "closed/"
DATA = "data/"
RETIRED = "retired/"
LEASES = "leases/"
PREFIXES = (COMMITS, EPOCHS, HEARTBEATS, CLOSED, DATA, RETIRED, LEASES)

# Short enough that `<identity>-<writer>` is one part of a key (64 characters) up to sub-step 99,999,999.
WRITER = re.compile(r"[0-9a-z]{1,16}")
_PACK = re.compile(r"([0-9a-z]{1,16})-([0-9]{1,9})\.pack")
_RECORD = re.compile(r"(.+)-([0-9a-z]{1,16})")


@dataclass(frozen=True, slots=True)
class PackKey:
    """The parts of a pack's key."""

    identity: Identity
    owner: str
    writer: str
    number: int


def new_writer() -> str:
    """A new writer name: 12 random hex digits."""
    return secrets.token_hex(6)


def record_key(identity: Identity, writer: str) -> str:
    """The key of a record. Errors: UsageError if `writer` does not match WRITER."""
    return f"{COMMITS}{identity}-{_checked(writer)}"


def pack_key(identity: Identity, owner: str, writer: str, number: int) -> str:
    """The key of a pack. `owner`: whose data it is (a node), one part of a path. Errors: UsageError."""
    if PATH_NAME.fullmatch(owner) is None:
        raise UsageError(f"{owner[:80]!r} cannot be part of a key; use at most 64 letters, digits and ._-")
    return f"{DATA}{identity}/{owner}/{_checked(writer)}-{number}.pack"


def epoch_key(epoch: Epoch) -> str:
    return f"{EPOCHS}{epoch}"


def heartbeat_key(epoch: Epoch) -> str:
    return f"{HEARTBEATS}{epoch}"


def closed_key(epoch: Epoch) -> str:
    return f"{CLOSED}{epoch}"


def retired_key(identity: Identity) -> str:
    return f"{RETIRED}{identity}"


def lease_key(reader: str) -> str:
    return f"{LEASES}{_checked(reader)}"


def parse_record(key: str) -> tuple[Identity, str] | None:
    match = _RECORD.fullmatch(key.removeprefix(COMMITS)) if key.startswith(COMMITS) else None
    identity = _identity(match[1]) if match else None
    return (identity, match[2]) if match and identity else None


def parse_pack(key: str) -> PackKey | None:
    parts = key.split("/")
    if len(parts) != 4 or parts[0] != DATA[:-1] or PATH_NAME.fullmatch(parts[2]) is None:
        return None
    identity = _identity(parts[1])
    match = _PACK.fullmatch(parts[3])
    if identity is None or match is None:
        return None
    pack = PackKey(identity, parts[2], match[1], int(match[2]))
    return pack if pack_key(pack.identity, pack.owner, pack.writer, pack.number) == key else None


def is_ours(key: str) -> bool:
    """Whether the key has the form of a run's object. A store may hold foreign objects, also below our prefixes."""
    if any(parse_epoch(key, prefix) is not None for prefix in (EPOCHS, HEARTBEATS, CLOSED)):
        return True
    lease = key.startswith(LEASES) and WRITER.fullmatch(key.removeprefix(LEASES)) is not None
    return lease or any(parse(key) is not None for parse in (parse_record, parse_pack, parse_retired))


def parse_epoch(key: str, prefix: str) -> Epoch | None:
    """The epoch that the key names, or None. `prefix`: EPOCHS, ALIVE or CLOSED."""
    try:
        epoch = Epoch.parse(key.removeprefix(prefix))
    except ValueError:
        return None
    return epoch if f"{prefix}{epoch}" == key else None


def parse_retired(key: str) -> Identity | None:
    return _identity(key.removeprefix(RETIRED)) if key.startswith(RETIRED) else None


def _identity(text: str) -> Identity | None:
    try:
        identity = Identity.parse(text)
    except ValueError:
        return None
    return identity if str(identity) == text else None


def _checked(writer: str) -> str:
    if WRITER.fullmatch(writer) is None:
        raise UsageError(f"{writer[:80]!r} cannot name a writer; use 1 to 16 characters of 0-9 and a-z")
    return writer
