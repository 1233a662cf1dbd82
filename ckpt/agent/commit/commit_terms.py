"""The commit terms of an epoch: what the coordinator tells other nodes, so that they can commit its checkpoints if it
is lost. The job's nodes and its memory-only nodes receive them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from ckpt.agent.commit.job_options import options_from
from ckpt.agent.snapshots.inventory import ancestor_fields, parse_claim
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.types import CodecOption, Epoch

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim


@dataclass(frozen=True, slots=True)
class CommitTerms:
    """The claim of an epoch, as it is or will be in the store, and how its checkpoints are committed."""

    claim: Claim
    codec: CodecOption = "auto"
    bandwidth: float | None = None

    def fields(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "epoch": str(claim.epoch),
            "parent": str(claim.parent) if claim.parent is not None else None,
            "ancestors": ancestor_fields(claim),
            "launch": claim.launch,
            "host": claim.host,
            "time_s": claim.time_s,
            "run": claim.secret_name,
            "agents": [[name, list(at)] for name, at in claim.agents],
            "codec": self.codec,
            "bandwidth": self.bandwidth,
        }

    def encode(self) -> bytes:
        """The terms as a blob: a claim names too many agents and ancestors for a message's fields."""
        packed: bytes = msgpack.packb(self.fields())
        return packed

    @staticmethod
    def decode(blob: bytes) -> CommitTerms:
        """The terms in a blob. Errors: as `parse`; AgentError if the blob is malformed."""
        fields = unpack_bounded(blob, "the terms of a loan")
        if not isinstance(fields, dict):
            raise TypeError("the terms of a loan are no map")
        return CommitTerms.parse(fields)

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> CommitTerms:
        """The terms in a message's fields. Errors: UsageError, ValueError, TypeError, LookupError."""
        from ckpt.store.lineage import Claim

        told = parse_claim(Epoch.parse(str(fields["epoch"])), fields)
        host, time_s = str(fields["host"])[:200], float(fields["time_s"])
        if not math.isfinite(time_s):
            raise ValueError(f"a claim at {time_s}")
        agents = tuple((str(name), tuple(str(each) for each in at)) for name, at in fields["agents"])
        run = str(fields["run"])
        claim = Claim(told.epoch, told.parent, told.ancestors, told.launch, host, time_s, run, agents)
        options = options_from({"keep": {}, "limits": {"bandwidth": fields["bandwidth"]}, "codec": fields["codec"]})
        return CommitTerms(claim, options.codec, options.limits.bandwidth)
