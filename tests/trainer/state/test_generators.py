from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

import tests.trainer.roundtrip as rt
from ckpt.errors import DamagedData
from ckpt.format import values
from ckpt.format.manifest import RANK_VALUES, VALUES
from ckpt.trainer.restore.restore_plan import plan_targets
from ckpt.trainer.state import generators
from ckpt.trainer.state.mesh_coordinate import Coordinate
from ckpt.trainer.state.saved_values import RankValues

KINDS: dict[str, Any] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "numpy": lambda: np.random.default_rng(3),
    "numpy mt": lambda: np.random.Generator(np.random.MT19937(3)),
    "numpy philox": lambda: np.random.Generator(np.random.Philox(3)),
    "numpy legacy": lambda: np.random.RandomState(3),
    "python": lambda: random.Random(3),
}


def draw(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(4, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    return generator.normal(size=3).tolist()


def draw_global() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.normal(size=3).tolist(), *torch.randn(3).tolist()]


@pytest.fixture(autouse=True)
def own_generators() -> Any:
    """The process's generators are as they were after each test."""
    before = generators.read_states(generators.find_streams({}))
    yield
    for name, stream in generators.find_streams({}).items():
        stream.write(before[name]["state"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_in_the_state_draws_on_as_if_nothing_had_happened(kind: str) -> None:
    saved, other = KINDS[kind](), KINDS[kind]()
    draw(saved)
    checkpoint = rt.save({"g": saved})
    rt.restore({"g": other}, checkpoint)
    assert draw(saved) == draw(other)


def test_the_process_generators_draw_on_as_if_nothing_had_happened() -> None:
    draw_global()
    checkpoint = rt.save({"x": 1}, generators=True)
    expected = draw_global()
    draw_global()
    rt.restore({"x": 1}, checkpoint, generators=True)
    assert draw_global() == expected
    assert draw_global() != expected


def every(mesh: dict[str, int]) -> list[Coordinate]:
    return [rt.on(mesh, index) for index in range(math.prod(mesh.values()))]


def owns(mesh: dict[str, int], seed: Any) -> list[RankValues]:
    """What every rank of a mesh saved of a generator seeded with seed(indices by axis)."""
    found = []
    for here in every(mesh):
        generator = torch.Generator().manual_seed(seed({a.name: a.index for a in here.axes}))
        read = generators.read_states(generators.find_streams({"g": generator}, False))
        tree = {"coordinate": here.text, "mesh": here.mesh, "data": here.data, "generators": read, "loaders": {}}
        tree |= {"data_rank": here.data_rank, "data_world": here.data_world}
        found.append(RankValues.parse(values.decode(values.encode(tree))))
    return found


def restored(old: list[RankValues], mesh: dict[str, int], step: int = 7) -> dict[tuple[int, ...], Any]:
    found = {}
    for here in every(mesh):
        generator = torch.Generator()
        generators.restore_streams(generators.find_streams({"g": generator}, False), None, old, here, step)
        found[tuple(a.index for a in here.axes)] = tuple(draw(generator))
    return found


@pytest.mark.parametrize(
    ("old", "seed", "mesh", "kind"),
    [
        ({"dp": 3, "tp": 2}, lambda at: at["dp"], {"dp": 2, "tp": 4}, lambda dp, tp: dp),
        ({"dp": 3, "tp": 2}, lambda at: at["dp"] * 2 + at["tp"], {"dp": 2, "tp": 3}, lambda dp, tp: (dp, tp)),
        ({"rank": 3}, lambda at: 5, {"dp": 2, "tp": 2}, lambda dp, tp: 0),
        ({"rank": 4}, lambda at: at["rank"], {"dp": 2, "tp": 2}, lambda dp, tp: dp),  # the ranks of tp share data
    ],
)
def test_on_another_mesh_generators_are_equal_along_axes_where_they_were_or_that_share_data(
    old: dict[str, int], seed: Any, mesh: dict[str, int], kind: Any
) -> None:
    new = restored(owns(old, seed), mesh)
    for one, other in itertools.combinations(new, 2):
        assert (new[one] == new[other]) == (kind(*one) == kind(*other))


def test_a_derived_generator_depends_on_seed_and_step_and_is_the_same_each_time() -> None:
    old = owns({"rank": 2}, lambda at: at["rank"])
    one = restored(old, {"rank": 3})
    assert one == restored(old, {"rank": 3})
    assert not set(one.values()) & set(restored(old, {"rank": 3}, step=8).values())
    assert not set(one.values()) & set(restored(owns({"rank": 2}, lambda at: at["rank"] + 50), {"rank": 3}).values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_seeded_anew(kind: str) -> None:
    drawn = set()
    for seed in (0, 1, (1 << 64) - 1):
        generator = KINDS[kind]()
        generators.stream_of(generator).reseed(seed)
        drawn.add(tuple(draw(generator)))
    assert len(drawn) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [None, b"", b"abc", 5, {"a": 1}, (1, 2, 3), "x"])
def test_a_stored_state_that_is_none_is_refused(kind: str, bad: Any) -> None:
    old = owns({"rank": 1}, lambda at: 1)[0]
    old.generators["state:g"]["state"] = bad  # type: ignore[index]
    with pytest.raises(DamagedData, match="state:g"):
        generators.restore_streams(
            generators.find_streams({"g": KINDS[kind]()}, False), old, [], rt.on({"rank": 1}, 0), 1
        )


@pytest.mark.parametrize("before", [{"g": 3}, {"g": torch.ones(2)}, {"x": 1}])
def test_a_generator_of_which_the_checkpoint_has_nothing_is_named(before: dict[str, Any]) -> None:
    made = torch.Generator().manual_seed(1)
    targets = rt.restore({"x": 1, "g": made}, rt.save({"x": 1, **before}), strict=False)
    assert rt.named(targets, "missing") == ("g",)
    assert made.initial_seed() == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_a_generator_of_another_kind_is_named_and_stays_as_it_was(kind: str, other: str) -> None:
    saved, mine = KINDS[other](), KINDS[kind]()
    draw(saved)
    targets = rt.restore({"g": mine}, rt.save({"g": saved}), strict=False)
    assert rt.named(targets, "retyped") == (() if kind == other else ("g",))
    assert draw(mine) == draw(saved if kind == other else KINDS[kind]())


def test_a_generator_of_the_process_that_was_saved_and_is_not_here_is_named() -> None:
    checkpoint = rt.save({"x": 1}, generators=True)
    dropped = []
    for wanted in (True, False):
        walker = rt.walker_of({"x": 1}, generators=wanted)
        own = checkpoint.blobs(RANK_VALUES)[walker.coordinate.text]
        own["generators"]["cuda:99"] = own["generators"]["torch"]
        shared = checkpoint.blobs(VALUES)[""]
        dropped.append(plan_targets(walker, checkpoint.manifest, shared, own, [], True, 1).dropped_generators)
    assert dropped == [("cuda:99",), ()]


def test_a_python_generator_is_encoded_as_an_array() -> None:
    state = generators.stream_of(random.Random(5)).read()["state"]
    assert len(values.encode(state)) < 2600
