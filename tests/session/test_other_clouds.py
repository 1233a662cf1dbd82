"""A whole run over Azure's and Google's object storage: saved, lost from memory, and restored bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ckpt
from tests import clouds
from tests.cli.stores import opened
from tests.session.loops import losses, make
from tests.session.runs import run

SERVERS = {"az": (clouds.why_no_azurite, clouds.azurite), "gs": (clouds.why_no_gcs, clouds.gcs)}


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    why_not, server = SERVERS[request.param]
    if why := why_not():
        pytest.skip(why)
    with server() as made:
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        yield f"{request.param}://{made.bucket}/runs/one"


def test_a_run_goes_on_bit_for_bit_from_that_cloud(url: str) -> None:
    first = run(url, 4, make(), policy=ckpt.Every(steps=2), keep=ckpt.Keep(last=1))
    again = run(url, 6)
    assert (again.from_step, again.ck.restored.level) == (4, "store")
    assert first.losses + again.losses == losses(6)
    with opened(url) as backend:
        assert len(list(backend.list("commits/"))) >= 1
