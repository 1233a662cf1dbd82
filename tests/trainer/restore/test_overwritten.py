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

    def gather(self, data: bytes) -> list[bytes]:
        self.said[self.rank] = data
        self.all_said.wait(30)
        return list(self.said)


def refused(
    walkers: list[StateWalker], saved: rt.Checkpoint, strict: bool = True, left: list[Overwritten] | None = None
) -> str:
    """The error that all ranks of these walkers get for a checkpoint. `left`: by rank."""
    world = len(walkers)
    said, barrier = [b""] * world, threading.Barrier(world)
    options = make_options(Every(steps=1), Keep(), Limits(), "auto", Replicas(1))
    asked = UserOptions("/run", {}, options, None, None, None, True, strict, True, False)

    def enter(rank: int) -> str:
        targets = rt.plan(walkers[rank], saved, strict=False)
        overwritten = Overwritten(walkers[rank]) if left is None else left[rank]
        with pytest.raises(StateMismatch) as found:
            check_match(Threads(rank, said, barrier), targets, asked, Events(), OLDER, overwritten)  # type: ignore[arg-type]
        return str(found.value)

    with ThreadPoolExecutor(world) as ranks:
        first, *others = ranks.map(enter, range(world))
    assert all(other == first for other in others)
    return first


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


@pytest.mark.parametrize("strict", [True, False])
def test_what_was_overwritten_on_one_rank_is_an_error_on_all(strict: bool) -> None:
    newer, older = rt.save(state("az", 3.0)), rt.save(state("z", 2.0))
    lives = [state("az", 0.0) for _ in range(WORLD)]
    left = [after_failing(lives[0], newer, frames=0), after_failing(lives[1], newer)]
    said = refused([rt.walker_of(live) for live in lives], older, strict, left)
    assert "A newer checkpoint was tried before and is damaged: a now" in said
    assert "Nothing was changed" not in said


@pytest.mark.parametrize("lost", [0, 1])
def test_what_one_rank_saved_as_its_own_and_has_no_place_for_is_named_whatever_the_others_hold(lost: int) -> None:
    mesh = {"rank": WORLD}
    saved = rt.save_on(mesh, [{"m": nn.ParameterDict({"t": torch.full((3,), float(rank))})} for rank in range(WORLD)])
    held = [nn.ParameterDict({} if rank == lost else {"t": torch.zeros(3)}) for rank in range(WORLD)]
    walkers = [StateWalker({"m": each}, rt.on(mesh, rank), False) for rank, each in enumerate(held)]
    assert f"only in the checkpoint: m.t of rank {lost}. " in refused(walkers, saved)


def test_what_several_candidates_have_left_adds_up() -> None:
    newest, newer, older = rt.save(state("az", 3.0)), rt.save(state("bz", 2.0)), rt.save(state("z", 1.0))
    live = state("abz", 0.0)
    left = after_failing(live, newest, newer)
    assert left.find_unfilled(rt.plan(rt.walker_of(live), older, strict=False)) == ["a", "b"]
    assert left.find_unfilled(rt.plan(rt.walker_of(live), rt.save(state("abz", 2.0)), strict=False)) == []


def test_state_of_an_optimizer_counts_unless_it_was_made_for_the_candidate() -> None:
    """Nobody else holds the state that an optimizer gets before it has stepped."""
    model = torch.nn.Linear(60, 60)
    stepped = {"model": model, "optim": torch.optim.Adam(model.parameters())}
    model(torch.ones(1, 60)).sum().backward()
    stepped["optim"].step()
    newer, model = rt.save(stepped), torch.nn.Linear(60, 60)
    fresh = {"model": model, "optim": torch.optim.Adam(model.parameters())}
    assert after_failing(fresh, newer).names == ["model.bias", "model.weight"]
    assert "optim.state.weight.exp_avg" in after_failing(stepped, newer).names
