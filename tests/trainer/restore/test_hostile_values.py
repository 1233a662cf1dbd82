"""Value trees that somebody forged: entry ends in DamagedData, or in a mismatch that is named, and nothing else."""

from __future__ import annotations

import copy
import enum
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tests.trainer.roundtrip as rt
from ckpt.errors import DamagedData, StateMismatch, UsageError
from ckpt.format import values

ROUNDS = 700
ODD: list[Any] = [None, True, 0, -1, 1.5, 1 << 70, "", "x", b"", b"\1", [], {}, (), [0], {"x": 1}, ("weight",), [[]]]
ODD += [range(1 << 60), deque([1]), {1, 2}, np.zeros((2, 2)), np.float32(1), float("nan"), {0: [None]}, [("a", "b")]]


class Mode(enum.Enum):
    FAST = "fast"


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.held = torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"held": self.held, "n": 1}

    def set_extra_state(self, state: Any) -> None:
        self.held = state["held"] if isinstance(state, dict) and "held" in state else self.held


def job(seed: int, rank: int, world: int) -> dict[str, Any]:
    """What is restored without code of a user's own, but for that which takes anything."""
    torch.manual_seed(seed)
    model = Extra()
    groups = [{"params": [model.lin.weight], "lr": torch.tensor(0.1)}, {"params": [model.lin.bias], "lr": 0.2}]
    optim = torch.optim.Adam(groups, foreach=False)
    optim.param_groups[0]["mode"] = Mode.FAST
    if seed == 0:
        optim.state["k"] = [torch.ones(2), Mode.FAST]  # type: ignore[index, assignment]
        model.lin(torch.ones(1, 3)).sum().backward()
        optim.step()
    data = {"q": torch.ones(2, 3).t(), "n": [1, (2, torch.ones(1))], "number": torch.tensor(1.0)}
    return {"model": model, "optim": optim, "data": data, "dice": random.Random(seed), "bits": torch.Generator()}


def saved(world: int) -> rt.Checkpoint:
    walkers = [rt.walker_of(job(0, rank, world), generators=True, rank=rank, world=world) for rank in range(world)]
    return rt.assemble_ranks([rt.save_rank(walker, rank, world) for rank, walker in enumerate(walkers)])


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(tree, (dict, list)):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield (*path, key)
            yield from places(tree[key], (*path, key))


def unlocked(tree: Any) -> Any:
    """With lists for tuples, which the readers take as well: so that any part can be changed."""
    if isinstance(tree, dict):
        return {key: unlocked(value) for key, value in tree.items()}
    return [unlocked(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def forged(rng: random.Random, data: bytes) -> bytes:
    """One or two parts of a tree are something else, are gone, have another key, or are another part."""
    tree = unlocked(values.decode(data))
    for _ in range(rng.randrange(1, 3)):
        every = [path for path in places(tree) if path]
        if not every:
            break
        *way, key = rng.choice(every)
        held = tree
        for step in way:
            held = held[step]
        how = rng.randrange(5)
        if how == 0:
            del held[key]
        elif how == 1 and isinstance(held, dict):
            held[rng.choice((None, 7, "x", b"k", ("a", 1), 1 << 70))] = held.pop(key)
        elif how == 2:
            other = tree
            for step in rng.choice(every):
                other = other[step] if isinstance(other, (dict, list)) and step in places_of(other) else other
            held[key] = copy.deepcopy(other)
        else:
            held[key] = copy.deepcopy(rng.choice(ODD))
    return values.encode(tree)


def places_of(tree: Any) -> Any:
    return tree if isinstance(tree, dict) else range(len(tree))


def attempt(checkpoint: rt.Checkpoint, strict: bool) -> str:
    state = job(1, 0, 1)
    walker = rt.walker_of(state, generators=True)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        targets = rt.plan(walker, checkpoint, strict)
        if (targets.difference_lines or targets.extra_names) and strict:
            return "mismatch"
        rt.fill(targets, checkpoint)
        targets.install()
    except (DamagedData, StateMismatch, UsageError) as exc:
        return type(exc).__name__
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
    return "restored"


@pytest.mark.parametrize(("world", "strict"), [(1, True), (1, False), (2, True)])
def test_forged_values_end_a_restore_in_damaged_data_or_a_named_mismatch(world: int, strict: bool, seed: int) -> None:
    rng = random.Random(seed)
    pristine = saved(world)
    found: Counter[str] = Counter()
    for number in range(ROUNDS):
        ranks = list(pristine.ranks)
        which = rng.randrange(world)
        part = rng.choice(("shared", "shared", "own"))
        data = forged(rng, getattr(ranks[which], part))
        ranks[which] = replace(ranks[which], **{part: data})
        try:
            found[attempt(rt.assemble_ranks(ranks), strict)] += 1
        except Exception as exc:
            raise AssertionError(f"round {number} of seed {seed}: {values.decode(data)!r:.3000}") from exc
    assert min(found["DamagedData"], found["restored"]) > ROUNDS // 20, found
