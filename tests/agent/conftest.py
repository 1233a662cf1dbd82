"""What the tests of several packages of the agent share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agent.nodes.staged import Turned


@pytest.fixture
def turned() -> Iterator[Turned]:
    """An agent's main thread, without the agent."""
    made = Turned()
    yield made
    made.close()
