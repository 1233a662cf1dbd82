"""Saves that the policy names by step: `ckpt.Every(steps=N)`. All ranks know N and count the same steps, so that each
asks for the save by itself at the same boundary, as it does in `ck.save()`. Nobody announces it.
"""

from __future__ import annotations

from ckpt.policy.adaptive import Adaptive
from ckpt.policy.every import Every


class DueSaves:
    """One rank's. `is_due`: a step has ended that the policy names, and its save was not asked for yet. It stays set
    until `take`: a boundary at which nothing may be saved leaves the save to the next one."""

    def __init__(self, policy: Every | Adaptive) -> None:
        self._every = policy.steps if isinstance(policy, Every) else None
        self.is_due = False

    def end(self, step: int) -> bool:
        """That step has ended, counted from the run's first one. Whether a save is due at this boundary."""
        if self._every is not None and step % self._every == 0:
            self.is_due = True
        return self.is_due

    def take(self) -> None:
        """The save is asked for now: whatever comes of it, the next one is that of a later step."""
        self.is_due = False
