"""A store that shows late what another machine has put: a folder on NFS with its attribute cache, a gateway with one.

`LateFileSystem` is such a store. Its listings lack what is `unlisted`, and it denies what is `denied` so many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from ckpt.agent.commit.job_options import JobOptions
from ckpt.agent.restore.sources import open_session
from ckpt.checkpoint import Checkpoint
from ckpt.clock import Clock
from ckpt.errors import DamagedData, MissingData, NoCheckpoint, NotFound, Superseded
from ckpt.events import Event
from ckpt.storage import open as open_store
from ckpt.storage.contract import Backend
from ckpt.store import keys
from ckpt.store.branch import branch
from ckpt.store.lineage import Claim
from ckpt.store.reader import FrameReader, open_record, use_readable_record
from ckpt.store.run import LATE_S, Run
from ckpt.store.verify import verify
from ckpt.types import Epoch, Identity, Version
from tests.agent.commit.test_store_client import Side, complete
from tests.agent.restore.test_restore_session import Loop, loop, reading
from tests.store.sim import Sim
from tests.store.test_run import Beating

__all__ = ["loop"]

FIRST, SECOND = Epoch(1, "a" * 16), Epoch(2, "b" * 16)


@dataclass
class Cache:
    """Of the other machine. `denied`: by a part of the path, how often it is said that nothing is there."""

    unlisted: tuple[str, ...] = ()
    denied: dict[str, int] = field(default_factory=dict)


class LateFileSystem(LocalFileSystem):
    protocol = "late"
    cachable = False
    cache: ClassVar[Cache] = Cache()

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        found = super().ls(path, detail=True, **options)
        found = [each for each in found if not any(part in each["name"] for part in self.cache.unlisted)]
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **options: Any) -> Any:
        for part, left in self.cache.denied.items():
            if part in str(path) and left:
                self.cache.denied[part] -= 1
                raise FileNotFoundError(path)
        return super().info(path, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        self.info(path)
        return super().cat_file(path, start, end, **options)


@pytest.fixture
def cache() -> Cache:
    fsspec.register_implementation("late", LateFileSystem, clobber=True)
    LateFileSystem.cache = Cache()
    return LateFileSystem.cache


@pytest.fixture
def late(cache: Cache, tmp_path: Path) -> Iterator[Backend]:
    """The store as a machine with a cache sees it."""
    store = open_store(f"late://{tmp_path}/run")
    yield store
    store.close()


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Callable[[int], Identity]]:
    """Commits a step of the first epoch, by a machine without a cache."""
    store = open_store(str(tmp_path / "run"))
    side, claim = LateSide(store), Claim(FIRST, None, launch="job")

    def commit(step: int) -> Identity:
        return side.commit(claim, complete(FIRST, step), JobOptions(codec="raw"), {}).record.identity

    yield commit
    store.close()


class LateSide(Side):
    """That of an agent on a machine with a cache."""

    def __init__(self, store: Backend, clock: Clock | None = None) -> None:
        sim = Sim()
        sim.url = store.url
        super().__init__(sim, clock)
        self.opened = Run(store, clock, self.events)

    def begin(self, launch: str) -> Claim:
        """A start that goes on from the newest that is listed."""
        view = self.opened.view()
        parent = view.history[-1].identity if view.history else None
        self.claims.record_start(SECOND, view, insists=False)
        return Claim(SECOND, parent, launch=launch)

    def overlooked(self) -> list[Event]:
        return [event for event in self.told if event.name == "restore.overlooked"]


@pytest.mark.parametrize("shown", ["before the claim", "after it"])
def test_a_start_that_went_on_from_an_older_step_says_so_once_the_newer_one_shows(
    shown: str, late: Backend, cache: Cache, save: Callable[[int], Identity]
) -> None:
    """And the command that the message names goes back to it."""
    save(20)
    newest = save(40)
    cache.unlisted = ("0000000040",)
    side = LateSide(late)
    claim = side.begin("job")
    assert claim.parent is not None
    assert claim.parent.version == Version(20)
    if shown == "after it":
        side.claim(claim)
    assert side.overlooked() == []
    cache.unlisted = ()
    side.claim(claim)
    for count in range(1, 5):
        side.heartbeat(SECOND, count)
    (told,) = side.overlooked()
    assert told.loud
    assert "The newest is step 40 of epoch 1" in told.message
    assert f"ckpt branch {late.url} --at {newest}" in told.message
    side.opened.close_epoch(SECOND, "it was stopped")
    branch(side.opened, newest)
    assert side.opened.view().history[-1].identity == newest


def test_a_start_from_nothing_is_refused_once_another_launch_shows_checkpoints(
    late: Backend, cache: Cache, save: Callable[[int], Identity]
) -> None:
    save(40)
    cache.unlisted = (keys.EPOCHS, keys.COMMITS)
    side = LateSide(late)
    claim = side.begin("another")
    assert claim.parent is None
    cache.unlisted = ()
    with pytest.raises(Superseded, match=r"'job' .* has saved step 40"):
        side.claim(claim)
    assert [ref.identity.version.step for ref in side.opened.view().history] == [40]


def test_a_restart_from_nothing_says_what_its_launch_had_saved(
    late: Backend, cache: Cache, save: Callable[[int], Identity]
) -> None:
    save(40)
    cache.unlisted = (keys.EPOCHS, keys.COMMITS)
    side = LateSide(late)
    claim = side.begin("job")
    cache.unlisted = ()
    side.claim(claim)
    (told,) = side.overlooked()
    assert "began from nothing instead" in told.message


@pytest.mark.parametrize("prefix", [keys.EPOCHS, keys.COMMITS, keys.DATA])
def test_what_a_listing_has_shown_and_a_read_denies_is_asked_for_again(
    prefix: str, late: Backend, cache: Cache, save: Callable[[int], Identity]
) -> None:
    save(40)
    cache.denied[prefix] = 3
    view = Run(late).view()
    assert view.damaged_claims == ()
    (ref,) = view.history
    reader = FrameReader(late, open_record(late, ref))
    assert reader.read_bytes([0])
    assert cache.denied[prefix] == 0


@pytest.mark.parametrize(("denied", "kind"), [(3, None), (1000, "missing")])
def test_a_pack_that_a_rank_does_not_see_in_a_folder_is_waited_for(
    denied: int, kind: str | None, loop: Loop, late: Backend, cache: Cache, save: Callable[[int], Identity]
) -> None:
    """The rank asks its agent, which asks the store again."""
    identity = save(40)
    (ref,) = Run(late).view().history
    record = open_record(late, ref)
    cache.denied[keys.DATA] = denied
    loop.restore = open_session(
        *(
            identity,
            record.manifest,
            1,
            None,
            lambda: FrameReader(late, record),
            loop.workers,
            cast(Any, loop),
            1 << 20,
        ),
        folder="/elsewhere",
    )
    rank = reading(loop, wrong=[0])
    loop.restore.request(rank, [0])
    loop.ended(rank)
    assert rank.listed
    assert rank.outcome.get("kind") == kind


def test_what_stays_away_is_missing_and_what_is_spoilt_is_damaged(
    late: Backend, cache: Cache, save: Callable[[int], Identity]
) -> None:
    save(40)
    run = Run(late, Beating(lambda: None))
    (ref,) = run.view().history
    record = open_record(late, ref)
    cache.denied[keys.DATA] = 1000
    with pytest.raises(MissingData, match="is missing") as missing:
        FrameReader(late, record).read_bytes([0])
    cache.denied = {keys.DATA: 0, keys.COMMITS: 1000}
    with pytest.raises(NotFound):
        use_readable_record(run, [ref], lambda record: record)
    cache.denied.clear()
    late.put(record.packs[0][0], [bytes(record.packs[0][1])])
    with pytest.raises(DamagedData, match="does not match its recorded hash") as damaged:
        FrameReader(late, record).read_bytes([0])
    assert (missing.value.kind, damaged.value.kind) == ("missing", "damaged")


@pytest.mark.parametrize("gone", [keys.DATA, keys.COMMITS])
def test_of_many_checkpoints_that_are_gone_only_the_first_is_waited_for(
    gone: str, late: Backend, cache: Cache, save: Callable[[int], Identity]
) -> None:
    for step in (10, 20, 30):
        save(step)
    clock = Beating(lambda: None)
    run = Run(late, clock)
    refs = run.view().history
    cache.denied[gone] = 1000
    assert [report.is_good for report in verify(run, refs)] == [False] * 3
    for ref in refs:
        with pytest.raises((DamagedData, NoCheckpoint, NotFound)):
            Checkpoint(run, [ref], True).tensor("w")
    assert clock.slept_s == pytest.approx(LATE_S)
