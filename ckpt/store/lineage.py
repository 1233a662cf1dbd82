"""Lineage of a run: its epochs, their fork points, and the commits on the branch history. Pure; no I/O.

A start claims an epoch. The claim names the fork point: the checkpoint that the start went on from, committed or not.
It also names the ancestors that were never claimed, since they ran while the store was down. The branch history is

    the newest epoch's commits, then its parent's up to and including the fork version, then its parent's, and so on.

Every other commit is a branch: it is listed, and never restored by default. So a late writer of an older epoch does no
harm. What it commits beyond the fork version is not on the branch history. What it commits up to there, the newer epoch
went on from.

An epoch's parent always has a smaller number, so a chain of claims cannot form a circle. A claim ends with its own
hash: a flipped bit in its fork point would silently give the run another history.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ckpt.errors import DamagedData, UsageError
from ckpt.types import Epoch, Identity

CLAIM_BYTES_MAX = 64 << 10
ANCESTORS_MAX = 512
AGENTS_MAX = 400  # named by one claim, which is one small object
AGENT_ADDRESSES_MAX = 2
AGENT_TEXT_MAX = 100
TEXT_MAX = 256
NUMBER_MAX = 99_999_999  # eight digits
_VERSION = 1
# The end of a claim. Claims of earlier releases do not have it.
_CHECK = re.compile(rb', "check": "([0-9a-f]{32})"\}\Z')


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An epoch and the checkpoint that it went on from (None: it began from nothing)."""

    epoch: Epoch
    parent: Identity | None


@dataclass(frozen=True, slots=True)
class Claim:
    """What one (re)start states about itself before its first commit.

    `parent`: the fork point, at whatever level it was found; None: the start began from nothing. `ancestors`: what is
    known of the epochs from parent.epoch back that may never have been claimed, newest first. `launch`, `host`,
    `time_s` (Unix seconds): for people, and to tell a restart from another job. `agents`: name and HOST:PORT addresses
    of the agents that may hold the epoch's checkpoints in memory. `secret_name`: the name of the agents' secret.

    Errors: UsageError if a field exceeds its limit, or a parent is not older than its epoch."""

    epoch: Epoch
    parent: Identity | None
    ancestors: tuple[Ancestor, ...] = ()
    launch: str = ""
    host: str = ""
    time_s: float = 0.0
    secret_name: str = ""
    agents: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        texts = [self.secret_name, *(text for name, at in self.agents for text in (name, *at))]
        most = max((len(at) for _, at in self.agents), default=0)
        if len(self.agents) > AGENTS_MAX or most > AGENT_ADDRESSES_MAX or max(map(len, texts)) > AGENT_TEXT_MAX:
            raise UsageError(f"the claim of {self.epoch} names too many agents or addresses, or one is too long")
        if len(self.launch) > TEXT_MAX or len(self.host) > TEXT_MAX:
            raise UsageError(f"the claim of {self.epoch}: launch and host have at most {TEXT_MAX} characters")
        if len(self.ancestors) > ANCESTORS_MAX:
            raise UsageError(f"the claim of {self.epoch} names more than {ANCESTORS_MAX} unclaimed ancestors")
        for each in (Ancestor(self.epoch, self.parent), *self.ancestors):
            if each.parent is not None and each.parent.epoch.number >= each.epoch.number:
                raise UsageError(
                    f"the claim of {self.epoch}: {each.epoch} cannot continue from {each.parent}, which is not older"
                )


@dataclass(frozen=True, order=True, slots=True)
class CommitRef:
    """One record in the store: identity, writer, size in bytes, and the store's time of its writing. `saved_s`: Unix
    seconds; None if the checkpoint is in memory, or the store gives no times."""

    identity: Identity
    writer: str
    size: int
    saved_s: float | None = field(default=None, compare=False)


def encode_claim(claim: Claim) -> bytes:
    body = {
        "version": _VERSION,
        "epoch": str(claim.epoch),
        "parent": _text(claim.parent),
        "ancestors": [[str(each.epoch), _text(each.parent)] for each in claim.ancestors],
        "launch": claim.launch,
        "host": claim.host,
        "time": claim.time_s,
    }
    told = {"run": claim.secret_name, "agents": [[name, list(at)] for name, at in claim.agents]} if claim.agents else {}
    whole = _add_check_hash(body | told)
    # The agents' names are only a help: a claim that is too long goes without them.
    return whole if len(whole) <= CLAIM_BYTES_MAX else _add_check_hash(body)


def _add_check_hash(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b'%s, "check": "%s"}' % (data[:-1], xxhash.xxh3_128_hexdigest(data).encode())


def decode_claim(data: bytes, key: str) -> Claim:
    """The claim, checked. Errors: DamagedData names `key`."""
    body = decode_json(data, key)
    end = _CHECK.search(data)
    if end is not None and xxhash.xxh3_128_hexdigest(data[: end.start()] + b"}").encode() != end[1]:
        raise DamagedData(f"{key} does not match the hash that it holds")
    try:
        if body["version"] != _VERSION:
            raise DamagedData(
                f"{key} is a claim of version {body['version']!r}, which this ckpt cannot read; install a newer ckpt"
            )
        time_s = float(body["time"])
        claim = Claim(
            epoch=Epoch.parse(_str(body["epoch"])),
            parent=_identity(body["parent"]),
            ancestors=tuple(Ancestor(Epoch.parse(_str(e)), _identity(p)) for e, p in body["ancestors"]),
            launch=_str(body["launch"]),
            host=_str(body["host"]),
            time_s=time_s if math.isfinite(time_s) else 0.0,
            secret_name=_str(body.get("run", "")),
            agents=tuple((_str(name), tuple(map(_str, at))) for name, at in body.get("agents", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise DamagedData(f"{key} is not a valid claim: {exc!s:.200}") from exc
    if not key.endswith(str(claim.epoch)):
        raise DamagedData(f"{key} holds the claim of another epoch, {claim.epoch}")
    return claim


def decode_json(data: bytes, key: str) -> dict[str, Any]:
    """A JSON object of known small size. Errors: DamagedData names `key`."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise DamagedData(f"{key} is not JSON: {exc!s:.200}") from exc
    if not isinstance(body, dict):
        raise DamagedData(f"{key} is not a JSON object")
    return body


class Lineage:
    """All that is known of a run's epochs. `claims`: those that could be read. `epochs`: all claimed epochs, also those
    whose claim could not be read."""

    def __init__(self, claims: Iterable[Claim], epochs: Collection[Epoch] = ()) -> None:
        self.claims: Mapping[Epoch, Claim] = {claim.epoch: claim for claim in claims}
        self.epochs = frozenset(epochs) | frozenset(self.claims)
        self._parents: dict[Epoch, Identity | None] = {}
        for claim in self.claims.values():
            self._parents.update((each.epoch, each.parent) for each in claim.ancestors)
        # An epoch's own claim wins over what its descendants say of it.
        self._parents.update((epoch, claim.parent) for epoch, claim in self.claims.items())

    @property
    def newest_epoch(self) -> Epoch | None:
        return max(self.epochs, default=None)

    def ancestry(self, epoch: Epoch) -> list[tuple[Epoch, Identity | None]]:
        """`epoch` and its ancestors, newest first, each with its last checkpoint on the branch history (None: all of
        them). The chain ends at an epoch that began from nothing, or whose beginning is unknown."""
        found: list[tuple[Epoch, Identity | None]] = [(epoch, None)]
        while (parent := self._parents.get(found[-1][0])) is not None:
            found.append((parent.epoch, parent))
        return found

    def broken_epoch(self, epoch: Epoch) -> Epoch | None:
        """The epoch on the chain of `epoch` whose beginning is unknown; None if there is none."""
        last = self.ancestry(epoch)[-1][0]
        return None if last in self._parents else last

    def history(
        self, commits: Iterable[CommitRef], retired: Collection[Identity], epoch: Epoch | None = None
    ) -> list[CommitRef]:
        """The branch history of `epoch` (default: the newest), oldest first, with one commit per identity. If an
        identity has several records, each of them is complete; the one of the lowest writer is taken."""
        epoch = self.newest_epoch if epoch is None else epoch
        if epoch is None:
            return []
        chain = self.ancestry(epoch)
        order = {each: len(chain) - i for i, (each, _) in enumerate(chain)}
        last = dict(chain)

        def is_on(identity: Identity) -> bool:
            if identity.epoch not in last or identity in retired:
                return False
            fork = last[identity.epoch]
            return fork is None or identity.version <= fork.version

        found = _one_per_checkpoint(ref for ref in commits if is_on(ref.identity))
        return sorted(found, key=lambda ref: (order[ref.identity.epoch], ref.identity.version))

    def branches(self, commits: Collection[CommitRef], retired: Collection[Identity]) -> list[CommitRef]:
        """The commits that are neither retired nor on the branch history, by identity; one per identity."""
        on_line = {ref.identity for ref in self.history(commits, retired)}
        hidden = on_line.union(retired)
        return _one_per_checkpoint(ref for ref in commits if ref.identity not in hidden)

    def overlooked_commits(
        self, epoch: Epoch, commits: Iterable[CommitRef], retired: Collection[Identity], seen: Collection[Identity]
    ) -> list[CommitRef]:
        """The commits that the start of `epoch` has passed over unknowingly, by identity: another start made them
        meanwhile, or they were listed late. `seen`: the checkpoints that this start has listed.

        Commits of epochs up to the newest claimed ancestor are not counted, since that ancestor answered for them. The
        ancestor's own commits after the fork are counted."""
        chain = dict(self.ancestry(epoch))
        ancestor = max((each for each in chain if each != epoch and each in self.epochs), default=None)
        fork = chain[ancestor] if ancestor is not None else None

        def is_overlooked(identity: Identity) -> bool:
            if identity in seen or identity in retired:
                return False
            if identity.epoch == ancestor and fork is not None:
                return identity.version > fork.version
            return identity.epoch not in chain and (ancestor is None or identity.epoch > ancestor)

        return _one_per_checkpoint(ref for ref in commits if is_overlooked(ref.identity))


def _one_per_checkpoint(refs: Iterable[CommitRef]) -> list[CommitRef]:
    """By identity, the record of the lowest writer of each checkpoint."""
    return sorted({ref.identity: ref for ref in sorted(refs, reverse=True)}.values())


def broken_history(epoch: Epoch) -> DamagedData:
    """The error for an epoch whose beginning is unknown, so that nothing is left of its branch history."""
    return DamagedData(
        f"the run's history cannot be followed: the claim epochs/{epoch}, which names the start of epoch {epoch}, is "
        "missing or damaged. Begin a branch at a good checkpoint (`ckpt ls --all`, `ckpt branch`)"
    )


def next_epoch(known: Iterable[Epoch]) -> Epoch:
    """A new epoch above all of `known`: the epochs of the store and those that agents remember. Errors: UsageError if
    the numbers are used up, which only foreign objects can cause."""
    number = 1 + max((epoch.number for epoch in known), default=0)
    if number > NUMBER_MAX:
        raise UsageError(
            f"the store names the epoch number {number - 1}, and no larger one is possible. Delete the objects with "
            "that number below epochs/, commits/, closed/, alive/ and retired/"
        )
    return Epoch.new(number)


def _text(identity: Identity | None) -> str | None:
    return None if identity is None else str(identity)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a string")
    return value


def _identity(value: object) -> Identity | None:
    return None if value is None else Identity.parse(_str(value))
