"""What the tests of several packages of the agent share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ckpt.ipc.arena import Arena
from tests.agent.nodes.staged import Turned, staged


@pytest.fixture
def make_staged() -> Iterator[Callable[..., dict[int, Arena]]]:
    """As `staged`; the arenas are closed after the test."""
    made: list[Arena] = []

    def make(*given: object, **more: object) -> dict[int, Arena]:
        arenas = staged(*given, **more)  # type: ignore[arg-type]
        made.extend(arenas.values())
        return arenas

    yield make
    for arena in made:
        arena.close()


@pytest.fixture
def turned() -> Iterator[Turned]:
    """An agent's main thread, without the agent."""
    made = Turned()
    yield made
    made.close()
