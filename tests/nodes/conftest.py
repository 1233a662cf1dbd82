"""The nodes' network: made once, empty for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes import lan as lans
from tests.nodes.lan import Lan


@pytest.fixture(scope="session")
def hub() -> Iterator[Lan]:
    if why := lans.why_not():
        pytest.skip(why)
    with lans.lan() as made:
        yield made


@pytest.fixture
def lan(hub: Lan) -> Iterator[Lan]:
    try:
        yield hub
    finally:
        hub.clear()
