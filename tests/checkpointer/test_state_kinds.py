"""All kinds of tensors in one job: they come back bit for bit, and what does not match is named. (Of other objects
tests/checkpointer/test_stored.py has all kinds.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.checkpointer.kinds import bits_of, empty_tensors, shuffle_bits
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen, restore, run


@pytest.mark.parametrize(("codec", "level"), [("auto", "store"), ("planes", "store"), ("auto", "local")])
def test_every_kind_of_tensor_comes_back_bit_for_bit(
    codec: Any, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "60" if level == "local" else "0")
    saved, found, noise = empty_tensors(), empty_tensors(), torch.Generator().manual_seed(3)
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        ckpt.Checkpointer(tmp_path, {"tensors": saved}, codec=codec, policy=ckpt.Every(steps=10**6)) as ck,
    ):
        for _ in ck.steps(3):
            for tensor in saved.values():
                shuffle_bits(tensor, noise)
            ck.step()
            ck.save().wait(level, timeout_s=60)
        raise ZeroDivisionError
    if level == "store":
        wait_agent_gone(tmp_path)
    monkeypatch.setenv("CKPT_LINGER_S", "0")
    with ckpt.Checkpointer(tmp_path, {"tensors": found}) as ck:
        pass
    assert (ck.restored.step, ck.restored.level) == (3, level)
    assert [name for name in saved if bits_of(found[name]) != bits_of(saved[name])] == []


# --- what does not match ---------------------------------------------------------------------------------------------


class Part(nn.Module):
    """Parameters of these names, shapes and dtypes, all of one value."""

    def __init__(self, value: float, **made: tuple[tuple[int, ...], torch.dtype]) -> None:
        super().__init__()
        for name, (shape, dtype) in made.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, value, dtype=dtype)))


F32, F16 = torch.float32, torch.float16


def other() -> dict[str, Any]:
    model = Part(7.0, same=((3,), F32), added=((3,), F32), bent=((2, 4), F32), cast=((3,), F16))
    return {"model": model, "new": torch.full((2,), 7.0), "count": 0}


NAMED = {
    "missing": ["model.added", "new"],
    "extra": ["model.gone", "old"],
    "reshaped": ["model.bent", "(4, 2)", "(2, 4)"],
    "another dtype": ["model.cast", "float32", "float16"],
}


def test_every_difference_is_named_and_without_strict_what_fits_is_restored(tmp_path: Path) -> None:
    """In one message, and then nothing is changed."""
    model = Part(1.0, same=((3,), F32), gone=((3,), F32), bent=((4, 2), F32), cast=((3,), F32))
    run(tmp_path, 2, {"model": model, "old": torch.ones(2), "count": 5})
    state, seen = other(), Seen()
    with pytest.raises(ckpt.StateMismatch) as raised:
        ckpt.Checkpointer(tmp_path, state).__enter__()
    wait_agent_gone(tmp_path)
    assert "model.same" not in str(raised.value)
    assert "strict=False" in str(raised.value)
    assert all(torch.all(parameter == 7.0) for parameter in state["model"].parameters())
    assert state["count"] == 0
    with ckpt.Checkpointer(tmp_path, state, strict=False, sinks=(seen,)) as ck:
        assert (ck.restored.step, ck.state["count"]) == (2, 5)
        assert torch.all(state["model"].same == 1.0)
        for tensor in (*(getattr(state["model"], name) for name in ("added", "bent", "cast")), ck.state["new"]):
            assert torch.all(tensor == 7.0)
        for _ in ck.steps(3):
            pass
    wait_agent_gone(tmp_path)
    told = seen.wait("restore.mismatch")
    assert told.loud
    for said in (str(raised.value), told.message):
        assert [name for names in NAMED.values() for name in names if name not in said] == []
    again = other()
    with ckpt.Checkpointer(tmp_path, again) as ck:  # what was saved then has the new structure
        assert ck.restored.step == 3
    assert torch.all(again["model"].same == 1.0)


def test_the_dict_that_was_given_is_the_state(tmp_path: Path) -> None:
    """Who goes on with a name of their own, in the same run or after a restart, loses nothing by that."""
    state, again = ({"model": nn.Linear(2, 2), "best": 0} for _ in range(2))

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        assert ck.state is state
        state["best"] = step

    run(tmp_path, 2, state, at)
    restore(tmp_path, again)
    assert again["best"] == 2
