"""A server that forks the ranks of a module's scripts: it has imported the packages that the module names, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.forked import server


@pytest.fixture(scope="module", autouse=True)
def forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """`PRELOADED`: what a module has it import."""
    if not (modules := getattr(request.module, "PRELOADED", ())):
        yield
        return
    with server(*modules):
        yield
