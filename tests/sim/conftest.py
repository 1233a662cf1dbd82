"""After each decision in a simulation the scheduler's invariants hold, whichever agent decides."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.agent.scheduler.scheduler import Scheduler


@pytest.fixture(autouse=True)
def invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Scheduler.decide

    def checked(scheduler: Scheduler, *given: Any) -> Any:
        actions = decide(scheduler, *given)
        scheduler.check()
        return actions

    monkeypatch.setattr(Scheduler, "decide", checked)
