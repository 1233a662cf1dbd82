"""A candidate that fails has been copied into live tensors before: what comes after it, never a mixture of the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.events import Event
from tests.cli.stores import ckpt as run_command
from tests.session.loops import wait_agent_gone

ELEMENTS = 2_000_000  # of a tensor: two frames of it, or more
Tensors = dict[str, torch.Tensor]


def filled(**values: float) -> Tensors:
    return {name: torch.full((ELEMENTS,), value) for name, value in values.items()}


def train_to(url: Path, state: Tensors, step: int) -> None:
    """Every step is a checkpoint, whose elements are all different."""
    policy = ckpt.Every(steps=1)
    with ckpt.Checkpointer(url, dict(state), policy=policy, strict=False, codec="raw") as ck:
        for _ in ck.steps(step):
            for number, tensor in enumerate(state.values()):
                tensor.copy_(torch.arange(ELEMENTS) + step + number)
    wait_agent_gone(url)


def spoil(url: Path, step: int, at: float) -> None:
    """Flips a bit of the newest pack of that step, after so much of it."""
    pack = max(p for p in (url / "data").rglob("*.pack") if f"-{step:012d}." in str(p.relative_to(url)))
    data = bytearray(pack.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    pack.write_bytes(data)


def start(url: Path, state: Tensors, **options: Any) -> tuple[int, list[Event]]:
    events = list[Event]()
    with ckpt.Checkpointer(url, dict(state), sinks=(events.append,), **options) as ck:
        return ck.restored.step, events


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """The state of step 3 has a tensor more than that of step 2; the end of step 3 is damaged."""
    train_to(tmp_path / "run", filled(z=10.0), 2)
    train_to(tmp_path / "run", filled(a=33.0, z=20.0), 3)
    spoil(tmp_path / "run", 3, 0.95)
    return tmp_path / "run"


@pytest.mark.parametrize("strict", [True, False])
def test_what_the_next_candidate_does_not_fill_is_never_left_as_the_damaged_one_had_it(
    grown: Path, strict: bool
) -> None:
    with pytest.raises(ckpt.StateMismatch, match=r"A newer one was tried before and is damaged: a.*ckpt branch"):
        start(grown, filled(a=-1.0, z=0.0), strict=strict)


def test_a_mismatch_after_a_damaged_one_does_not_say_that_nothing_was_changed(grown: Path) -> None:
    with pytest.raises(ckpt.StateMismatch) as found:
        start(grown, filled(a=-1.0, z=0.0))
    assert "a is missing in the checkpoint" in str(found.value)
    assert "Nothing was changed" not in str(found.value)


def test_the_way_out_that_is_named_is_one(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ckpt.StateMismatch) as found:
        start(grown, filled(a=-1.0, z=0.0), strict=False)
    wait_agent_gone(grown)
    command = str(found.value).partition("`ckpt ")[2].partition("`")[0]
    assert run_command(monkeypatch, *command.split()).code == 0
    state = filled(a=-1.0, z=0.0)
    step, events = start(grown, state, strict=False)
    assert step == 2
    assert not any(event.name == "restore.struck" for event in events)
    assert torch.equal(state["a"], filled(a=-1.0)["a"])
    assert torch.equal(state["z"], torch.arange(ELEMENTS) + 2.0)


def test_a_candidate_that_fills_all_that_the_damaged_one_has_filled_is_restored_whole(grown: Path) -> None:
    state = filled(z=0.0)
    step, events = start(grown, state, strict=False)
    assert step == 2
    assert any(event.name == "restore.struck" for event in events)
    assert torch.equal(state["z"], torch.arange(ELEMENTS) + 2.0)


def test_a_damaged_one_of_which_nothing_could_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    url = tmp_path / "run"
    train_to(url, filled(z=10.0), 2)
    train_to(url, filled(a=33.0, z=20.0), 3)
    for pack in (p for p in (url / "data").rglob("*.pack") if "-000000000003." in str(p.relative_to(url))):
        pack.unlink()
    with pytest.raises(ckpt.StateMismatch, match=r"a is missing in the checkpoint\. Nothing was .* another URL"):
        start(url, filled(a=-1.0, z=0.0))
    wait_agent_gone(url)
    state = filled(a=-1.0, z=0.0)
    assert start(url, state, strict=False)[0] == 2
    assert torch.equal(state["a"], filled(a=-1.0)["a"])
