"""A password in a URL is in nothing that a command prints."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import fsspec
import pytest

from tests.cli.stores import a_run, run_ckpt

PASSWORD = "hunter2"


@pytest.fixture
def url() -> Iterator[str]:
    """A run at a URL with a password, in the memory of this process."""
    place = secrets.token_hex(4)
    found = f"fsspec+memory://me:{PASSWORD}@{place}/run"
    a_run(found)
    yield found
    store = fsspec.filesystem("memory")
    for path in list(store.store):
        if place in path:
            del store.store[path]


@pytest.mark.parametrize(
    "words",
    [
        "ls",
        "ls --step 7",
        "ls --json",
        "show --step 7",
        "verify --json",
        "verify --step 99",
        "diff 10 99",
        "restore --to /nowhere/x --step 99",
        "prune --json",
        "prune --also 99",
        "branch --at 99",
        "branch --at 10",
        "branch --at 10 --json",
        "watch --once",
        "watch --once --json",
        "preempt",
    ],
)
def test_a_password_is_not_shown(words: str, url: str) -> None:
    command, *rest = words.split()
    said = run_ckpt(command, url, *rest)
    assert said.out + said.err
    assert PASSWORD not in said.out + said.err
