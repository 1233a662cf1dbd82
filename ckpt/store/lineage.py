"""Which commits belong to the run: epochs, their fork points, and the line through them. Pure; no I/O.

A start claims an epoch; the claim names the fork point, which is the checkpoint that the start went on from,
committed or not, and the chain of ancestors that were never claimed (they ran while the store was down). The line is

    the newest epoch's commits, then its parent's up to and including the fork tick, then its parent's, and so on.

What else is committed is a branch: listed, never restored by itself. So a writer of an older epoch can land whatever
it likes however late: beyond the fork tick it is on no line, and up to it, it is what the newer epoch went on from.

An epoch's parent always has a smaller number, so that no chain of claims runs in a circle. A claim ends with its own
hash: a bit that flips in its fork point would lead the run along another line, in silence.
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
AGENTS_MAX = 400  # that a claim names, with so many addresses each: it is one small object
AGENT_ADDRESSES_MAX = 2
AGENT_TEXT_MAX = 100
TEXT_MAX = 256
NUMBER_MAX = 99_999_999  # eight digits
_VERSION = 1
_CHECK = re.compile(rb', "check": "([0-9a-f]{32})"\}\Z')  # what a claim ends with; those of earlier releases do not


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An epoch and the checkpoint that it went on from (None: it began from nothing)."""

    epoch: Epoch
    parent: Identity | None


@dataclass(frozen=True, slots=True)
class Claim:
    """What one (re)start says of itself before its first commit.

    `parent`: the fork point, at whatever level it was found; None: it began from nothing. `ancestors`: what is known
    of parent.epoch and the epochs behind it that may never have been claimed, newest first. `launch`, `host`, `time_s`
    (Unix seconds): for people, and to tell a restart from another job. `agents`: those of its nodes, by name with
    HOST:PORT each, which may hold its checkpoints in memory; `run`: what their secret is called. Errors: UsageError."""

    epoch: Epoch
    parent: Identity | None
    ancestors: tuple[Ancestor, ...] = ()
    launch: str = ""
    host: str = ""
    time_s: float = 0.0
    run: str = ""
    agents: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        texts = [self.run, *(text for name, at in self.agents for text in (name, *at))]
        most = max((len(at) for _, at in self.agents), default=0)
        if len(self.agents) > AGENTS_MAX or most > AGENT_ADDRESSES_MAX or max(map(len, texts)) > AGENT_TEXT_MAX:
            raise UsageError(f"the claim of {self.epoch} says too much of its agents")
        if len(self.launch) > TEXT_MAX or len(self.host) > TEXT_MAX:
            raise UsageError(f"the claim of {self.epoch}: launch and host are at most {TEXT_MAX} characters")
        if len(self.ancestors) > ANCESTORS_MAX:
            raise UsageError(f"the claim of {self.epoch} names more than {ANCESTORS_MAX} unclaimed ancestors")
        for each in (Ancestor(self.epoch, self.parent), *self.ancestors):
            if each.parent is not None and each.parent.epoch.number >= each.epoch.number:
                raise UsageError(f"the claim of {self.epoch}: {each.epoch} cannot go on from {each.parent}")


@dataclass(frozen=True, order=True, slots=True)
class CommitRef:
    """One record in the store: whose it is, who put it, its size in bytes, when the store says that it came (seconds
    since the epoch of time); None of what is in memory."""

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
    told = {"run": claim.run, "agents": [[name, list(at)] for name, at in claim.agents]} if claim.agents else {}
    whole = _checked(body | told)
    return whole if len(whole) <= CLAIM_BYTES_MAX else _checked(body)  # agents are a help, and no more


def _checked(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b'%s, "check": "%s"}' % (data[:-1], xxhash.xxh3_128_hexdigest(data).encode())


def decode_claim(data: bytes, key: str) -> Claim:
    """Errors: DamagedData names `key`."""
    body = decode_json(data, key)
    end = _CHECK.search(data)
    if end is not None and xxhash.xxh3_128_hexdigest(data[: end.start()] + b"}").encode() != end[1]:
        raise DamagedData(f"{key} does not hash to what it says of itself")
    try:
        if body["version"] != _VERSION:
            raise DamagedData(f"{key} is a claim of version {body['version']!r}; this is for a newer ckpt")
        time_s = float(body["time"])
        claim = Claim(
            epoch=Epoch.parse(_str(body["epoch"])),
            parent=_identity(body["parent"]),
            ancestors=tuple(Ancestor(Epoch.parse(_str(e)), _identity(p)) for e, p in body["ancestors"]),
            launch=_str(body["launch"]),
            host=_str(body["host"]),
            time_s=time_s if math.isfinite(time_s) else 0.0,
            run=_str(body.get("run", "")),
            agents=tuple((_str(name), tuple(map(_str, at))) for name, at in body.get("agents", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise DamagedData(f"{key} is no claim of a run: {exc!s:.200}") from exc
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
    """All that is known of a run's epochs: `claims` that could be read, and `epochs`, which are claimed although
    their claims may not be readable."""

    def __init__(self, claims: Iterable[Claim], epochs: Collection[Epoch] = ()) -> None:
        self.claims: Mapping[Epoch, Claim] = {claim.epoch: claim for claim in claims}
        self.epochs = frozenset(epochs) | frozenset(self.claims)
        self._parents: dict[Epoch, Identity | None] = {}
        for claim in self.claims.values():
            self._parents.update((each.epoch, each.parent) for each in claim.ancestors)
        self._parents.update((epoch, claim.parent) for epoch, claim in self.claims.items())  # its own claim wins

    @property
    def newest(self) -> Epoch | None:
        return max(self.epochs, default=None)

    def chain(self, epoch: Epoch) -> list[tuple[Epoch, Identity | None]]:
        """`epoch` and its ancestors, newest first, each with the last of its checkpoints that belongs to the line
        (None: all of them). It ends where an epoch began from nothing or where nothing is known of its beginning."""
        found: list[tuple[Epoch, Identity | None]] = [(epoch, None)]
        while (parent := self._parents.get(found[-1][0])) is not None:
            found.append((parent.epoch, parent))
        return found

    def broken(self, epoch: Epoch) -> Epoch | None:
        """The epoch on the chain of `epoch` that nothing says the beginning of, if there is one."""
        last = self.chain(epoch)[-1][0]
        return None if last in self._parents else last

    def line(
        self, commits: Iterable[CommitRef], retired: Collection[Identity], epoch: Epoch | None = None
    ) -> list[CommitRef]:
        """The commits that belong to `epoch` (default: the newest), oldest first, one for each identity: of several
        records, each complete, that of the lowest writer."""
        epoch = self.newest if epoch is None else epoch
        if epoch is None:
            return []
        chain = self.chain(epoch)
        order = {each: len(chain) - i for i, (each, _) in enumerate(chain)}
        last = dict(chain)
        best: dict[Identity, CommitRef] = {}
        for ref in commits:
            at = ref.identity.epoch
            if at not in order or ref.identity in retired:
                continue
            fork = last[at]
            if fork is None or ref.identity.tick <= fork.tick:
                best[ref.identity] = min(ref, best.get(ref.identity, ref))
        return sorted(best.values(), key=lambda ref: (order[ref.identity.epoch], ref.identity.tick))

    def branches(self, commits: Collection[CommitRef], retired: Collection[Identity]) -> list[CommitRef]:
        """What is committed and not retired but not on the line, by identity; one for each identity."""
        on_line = {ref.identity for ref in self.line(commits, retired)}
        best: dict[Identity, CommitRef] = {}
        for ref in commits:
            if ref.identity not in on_line and ref.identity not in retired:
                best[ref.identity] = min(ref, best.get(ref.identity, ref))
        return sorted(best.values())

    def overlooked(
        self, epoch: Epoch, commits: Iterable[CommitRef], retired: Collection[Identity], seen: Collection[Identity]
    ) -> list[CommitRef]:
        """The commits that the start of `epoch` has passed over without knowing of them, by identity: another start
        made them meanwhile, or they were listed late. `seen`: the checkpoints that it has listed.

        What belongs to epochs up to the newest claimed ancestor is that ancestor's affair, but for the ancestor's own
        commits after the fork."""
        chain = dict(self.chain(epoch))
        ancestor = max((each for each in chain if each != epoch and each in self.epochs), default=None)
        fork = chain[ancestor] if ancestor is not None else None

        def is_overlooked(identity: Identity) -> bool:
            if identity in seen or identity in retired:
                return False
            if identity.epoch == ancestor and fork is not None:
                return identity.tick > fork.tick
            return identity.epoch not in chain and (ancestor is None or identity.epoch > ancestor)

        best: dict[Identity, CommitRef] = {}
        for ref in commits:
            if is_overlooked(ref.identity):
                best[ref.identity] = min(ref, best.get(ref.identity, ref))
        return sorted(best.values())

    def superseded_by(self, epoch: Epoch) -> Epoch | None:
        """The newest epoch, if it is newer than `epoch`. (An ancestor never is: its number is smaller.)"""
        newest = self.newest
        return newest if newest is not None and newest > epoch else None


def broken_line(epoch: Epoch) -> DamagedData:
    """The error that nothing says how an epoch began, so that nothing is left of its line."""
    return DamagedData(
        f"nothing says what epoch {epoch} went on from (its claim, epochs/{epoch}, is missing or damaged), so the "
        "run's line cannot be followed; begin a branch at a checkpoint that is known to be good (ckpt ls --all, ckpt "
        "branch)"
    )


def next_epoch(known: Iterable[Epoch]) -> Epoch:
    """A new epoch above all of `known`: those of the store and of whatever agents remember.

    Errors: UsageError where the numbers are used up, which only foreign objects can bring about."""
    number = 1 + max((epoch.number for epoch in known), default=0)
    if number > NUMBER_MAX:
        raise UsageError(
            f"the store claims an epoch number of {number - 1}; to go on, delete what is named so below epochs/, "
            "commits/, closed/, alive/ or retired/"
        )
    return Epoch.new(number)


def _text(identity: Identity | None) -> str | None:
    return None if identity is None else str(identity)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a text")
    return value


def _identity(value: object) -> Identity | None:
    return None if value is None else Identity.parse(_str(value))
