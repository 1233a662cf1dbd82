"""What a candidate that failed on some rank has left in live tensors is agreed on by all ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import tests.trainer.roundtrip as rt
from ckpt.errors import StateMismatch
from ckpt.events import Events
from ckpt.placement.placement import Replicas
from ckpt.policy.save_options import Every, Keep, Limits
from ckpt.trainer.link.options import UserOptions, make_options
from ckpt.trainer.restore.fill import Filler
from ckpt.trainer.restore.restore import Overwritten, check_match
from ckpt.trainer.state.state_walk import StateWalker
from ckpt.types import Epoch, Identity, Version

WORLD = 2
OLDER = Identity(Epoch(1, "0" * 16), Version(2))


@dataclass
class Threads:
    """Ranks that are threads of this process."""

    rank: int
    said: list[bytes]
    all_said: threading.Barrier
    world: int = WORLD

    def gather(self, data: bytes) -> list[bytes]:
        self.said[self.rank] = data
        self.all_said.wait(30)
        return list(self.said)


def state(names: str, value: float) -> dict[str, Any]:
    """Of several frames each."""
    return {name: torch.full((3000,), value) for name in names}


def after_failing(live: dict[str, Any], *tried: rt.Checkpoint, frames: int = 1) -> Overwritten:
    """As it is after so many frames of each one that was tried had come, and the rest could not be had."""
    walker = rt.walker_of(live)
    overwritten = Overwritten(walker)
    for each in tried:
        targets = rt.plan(walker, each, strict=False)
        filler = Filler(each.manifest, targets.wants, targets.tensors)
        overwritten.begin(targets, filler)
        for frame in sorted(filler.frames)[:frames]:
            filler(frame, memoryview(bytearray(each.frame(frame))))
        overwritten.add_failed()
    return overwritten


def asked(strict: bool) -> UserOptions:
    options = make_options(Every(steps=1), Keep(), Limits(), "auto", Replicas(1))
    return UserOptions("/run", {}, options, None, None, None, True, strict, True, False)


@pytest.mark.parametrize("strict", [True, False])
def test_what_was_overwritten_on_one_rank_is_an_error_on_all(strict: bool) -> None:
    newer, older = rt.save(state("az", 3.0)), rt.save(state("z", 2.0))
    lives = [state("az", 0.0) for _ in range(WORLD)]
    left = [after_failing(lives[0], newer, frames=0), after_failing(lives[1], newer)]
    said, barrier = [b""] * WORLD, threading.Barrier(WORLD)

    def enter(rank: int) -> str:
        targets = rt.plan(rt.walker_of(lives[rank]), older, strict=False)
        with pytest.raises(StateMismatch) as found:
            check_match(Threads(rank, said, barrier), targets, asked(strict), Events(), OLDER, left[rank])
        return str(found.value)

    with ThreadPoolExecutor(WORLD) as ranks:
        first, second = ranks.map(enter, range(WORLD))
    assert first == second
    assert "A newer checkpoint was tried before and is damaged: a now" in first
    assert "Nothing was changed" not in first


@pytest.mark.parametrize("lost", [0, 1])
def test_what_one_rank_saved_as_its_own_and_has_no_place_for_is_named_whatever_the_others_hold(lost: int) -> None:
    mesh = {"rank": WORLD}
    saved = rt.save_on(mesh, [{"m": nn.ParameterDict({"t": torch.full((3,), float(rank))})} for rank in range(WORLD)])
    said, barrier = [b""] * WORLD, threading.Barrier(WORLD)

    def enter(rank: int) -> str:
        held = nn.ParameterDict({} if rank == lost else {"t": torch.zeros(3)})
        walker = StateWalker({"m": held}, rt.on(mesh, rank), False)
        group, targets = Threads(rank, said, barrier), rt.plan(walker, saved)
        with pytest.raises(StateMismatch) as found:
            check_match(group, targets, asked(True), Events(), OLDER, Overwritten(walker))
        return str(found.value)

    with ThreadPoolExecutor(WORLD) as ranks:
        first, second = ranks.map(enter, range(WORLD))
    assert first == second
    assert f"only in the checkpoint: m.t of rank {lost}. " in first


def test_what_several_candidates_have_left_adds_up() -> None:
    newest, newer, older = rt.save(state("az", 3.0)), rt.save(state("bz", 2.0)), rt.save(state("z", 1.0))
    live = state("abz", 0.0)
    left = after_failing(live, newest, newer)
    assert left.find_unfilled(rt.plan(rt.walker_of(live), older, strict=False)) == ["a", "b"]
    assert left.find_unfilled(rt.plan(rt.walker_of(live), rt.save(state("abz", 2.0)), strict=False)) == []


def test_tensors_that_were_made_for_a_candidate_do_not_count() -> None:
    """The state of an optimizer that has not stepped yet: nobody else holds it."""
    model = torch.nn.Linear(60, 60)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 60)).sum().backward()
    optim.step()
    newer = rt.save({"model": model, "optim": optim})
    fresh = torch.nn.Linear(60, 60)
    live = {"model": fresh, "optim": torch.optim.Adam(fresh.parameters())}
    left = after_failing(live, newer)
    assert left.names == ["model.bias", "model.weight"]


def test_state_of_an_optimizer_that_has_stepped_counts() -> None:
    model = torch.nn.Linear(60, 60)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 60)).sum().backward()
    optim.step()
    live = {"model": model, "optim": optim}
    newer = rt.save(live)
    left = after_failing(live, newer)
    assert "optim.state.weight.exp_avg" in left.names
