"""How long training waits for a save of `ckpt.Every(steps=N)`.

All ranks know N and count the same steps. So each rank asks for the save by itself at the same boundary, as in
`ck.save()`, and nobody announces it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ckpt.errors import AgentError, NotStaged
from ckpt.ipc.client import Pending

SILENCE_S = 10.0  # how long a due save waits for an agent that is silent


class SavePatience:
    """How long training waits for the answer to a due save. It waits while the agent reports, each second, that the
    save waits for a slot or a rank. After SILENCE_S without such a report training goes on; it waits for no further
    save until that answer has come."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._unanswered_request: Pending | None = None

    def request_save(self, ask: Callable[[], Pending], until_s: float) -> dict[str, Any]:
        """The answer to the request that `ask` sends. `until_s`: on the monotonic clock. Errors: CkptError."""
        if self._unanswered_request is not None and not self._unanswered_request.future.done():
            raise AgentError("the agent has not answered an earlier save yet")
        self._unanswered_request = pending = ask()
        while True:
            left_s = max(1.0, until_s - time.monotonic())
            answer = pending.wait_while_progressing(min(self._silence_s, left_s))
            if answer is not None:
                return answer.fields
            if time.monotonic() >= until_s:
                raise NotStaged("no slot was free in time")
