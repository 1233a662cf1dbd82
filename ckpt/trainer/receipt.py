"""What a run (or a restore) came to: one line for people, one JSON object for programs."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Receipt:
    """`stalls_s`: how long training stood still for each snapshot. `bytes_by_level`: what reached each level, and on
    a restore what came from each. `proven`: what was trusted because this run showed it (lazy copies, replicas).
    `fell_back`: what was not, and why. `steps_lost`: between the last step of the former run that is known of and the
    one restored."""

    start_step: int = 0
    end_step: int = 0
    restored_from: str = "nothing"
    steps_lost: int | None = None
    snapshots: int = 0
    missed: int = 0
    stalls_s: list[float] = field(default_factory=list)
    bytes_by_level: dict[str, int] = field(default_factory=dict)
    committed_step: int | None = None
    proven: list[str] = field(default_factory=list)
    fell_back: list[str] = field(default_factory=list)
    agent_restarts: int = 0

    def to_dict(self) -> dict[str, Any]:
        stalls = sorted(self.stalls_s)
        return {
            "start_step": self.start_step,
            "end_step": self.end_step,
            "restored_from": self.restored_from,
            "steps_lost": self.steps_lost,
            "snapshots": self.snapshots,
            "missed": self.missed,
            "stall_ms_median": round(1e3 * statistics.median(stalls), 3) if stalls else None,
            "stall_ms_max": round(1e3 * stalls[-1], 3) if stalls else None,
            "stall_s_total": round(sum(stalls), 6),
            "bytes": dict(self.bytes_by_level),
            "committed_step": self.committed_step,
            "proven": list(self.proven),
            "fell_back": list(self.fell_back),
            "agent_restarts": self.agent_restarts,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def restored_line(self) -> str:
        """One line at the start of a run that goes on."""
        lost = "" if self.steps_lost is None else f", {self.steps_lost} steps of the former run to do again"
        read = ", ".join(f"{count / 2**20:.1f} MiB {level}" for level, count in sorted(self.bytes_by_level.items()))
        return f"ckpt: restored {self.restored_from}{lost}; {read or 'no bytes read'}"

    def line(self) -> str:
        """One line, without a line break."""
        body = self.to_dict()
        lost = "" if self.steps_lost is None else f", {self.steps_lost} steps lost"
        stall = (
            ""
            if body["stall_ms_median"] is None
            else f", stall {body['stall_ms_median']:.1f} ms (at most {body['stall_ms_max']:.1f})"
        )
        committed = "nothing committed" if self.committed_step is None else f"step {self.committed_step} committed"
        proven = f"; proven: {', '.join(self.proven)}" if self.proven else ""
        fell = f"; fell back: {'; '.join(self.fell_back)}" if self.fell_back else ""
        return (
            f"ckpt: steps {self.start_step + 1}..{self.end_step} from {self.restored_from}{lost}; "
            f"{self.snapshots} snapshots, {self.missed} missed{stall}; {committed}{proven}{fell}"
        )
