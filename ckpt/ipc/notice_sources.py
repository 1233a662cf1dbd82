"""The notice sources of a job: where the agent looks for preemption notices, as the job's trainers tell it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ckpt.errors import UsageError
from ckpt.settings import NOTICES, Settings, read_variables

SIGNAL_SOURCE = "signal"  # the source of a notice that came as a signal to a rank
FORMER_NOTICE = "a notice to an agent that has died"
TEXT_MAX = 4096  # characters of a path or an address


@dataclass(frozen=True, slots=True)
class Sources:
    """The notice sources of one job, and how the agent answers a notice.

    `mode`: one of settings.NOTICES. `named`: (variable, value) pairs with the addresses of metadata services. `file`:
    a path that signals a notice once it exists; "": none. `outcome`: path of the outcome file; "": beside the socket.
    `acknowledge`: whether the agent may tell the cloud to start the planned event once the state is replicated."""

    mode: str = "off"
    named: tuple[tuple[str, str], ...] = ()
    slurm_job: str = ""
    slurm_end_s: float | None = None
    file: str = ""
    outcome: str = ""
    acknowledge: bool = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Sources:
        """The sources that the environment of this process names."""
        outcome = str(settings.outcome_file or "")
        if settings.notices == "off":
            return cls(outcome=outcome)
        from ckpt.preemption.detect import VARIABLES

        return cls(
            settings.notices,
            tuple(read_variables(VARIABLES).items()),
            settings.slurm_job,
            settings.slurm_end_s,
            str(settings.notice_file or ""),
            outcome,
            settings.acknowledge == "on",
        )

    def fields(self) -> dict[str, Any]:
        """The sources as fields of a message."""
        return {name: getattr(self, name) for name in self.__slots__} | {"named": dict(self.named)}

    @classmethod
    def parse(cls, fields: Any) -> Sources:
        """The sources that `fields` encoded; none for None. Errors: UsageError if they are malformed."""
        if fields is None:
            return cls()
        if not isinstance(fields, dict) or not isinstance(fields.get("named"), dict):
            raise UsageError("notices: the sources are not a map")
        end_s = fields.get("slurm_end_s")
        texts = {name: str(fields.get(name) or "") for name in ("mode", "slurm_job", "file", "outcome")}
        named = {str(name): str(value) for name, value in fields["named"].items()}
        if texts["mode"] not in NOTICES or len(named) > 100:
            raise UsageError(f"notices: {texts['mode'][:50]!r} is not one of {', '.join(NOTICES)}")
        if any(len(text) > TEXT_MAX or "\0" in text for text in (*texts.values(), *named.values())):
            raise UsageError(f"notices: a path or an address is longer than {TEXT_MAX} characters, or holds a NUL")
        if end_s is not None and not (isinstance(end_s, int | float) and math.isfinite(end_s)):
            raise UsageError(f"notices: slurm_end_s={end_s!r:.50} is not a time in seconds")
        allowed = fields.get("acknowledge") is True
        return cls(named=tuple(sorted(named.items())), slurm_end_s=end_s, acknowledge=allowed, **texts)
