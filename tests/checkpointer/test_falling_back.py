"""A candidate that fails has been copied into live tensors before: what comes after it, never a mixture of the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.format import codecs, record, values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import VALUES, Codec
from ckpt.types import Box
from tests.checkpointer.loops import make, wait_agent_gone
from tests.checkpointer.runs import Ended, run, saving
from tests.cli.stores import ckpt as run_command

ELEMENTS = 2_000_000  # of a tensor: two frames of it, or more
Tensors = dict[str, torch.Tensor]


def filled(**values: float) -> Tensors:
    return {name: torch.full((ELEMENTS,), value) for name, value in values.items()}


def train_to(url: Path, state: Tensors, step: int) -> None:
    """Every step is a checkpoint, whose elements are all different."""

    def at(ck: ckpt.Checkpointer, _: int) -> None:
        for number, tensor in enumerate(state.values()):
            tensor.copy_(torch.arange(ELEMENTS) + step + number)

    run(url, step, dict(state), at, policy=ckpt.Every(steps=1), strict=False, codec="raw")


def spoil(url: Path, step: int, at: float) -> None:
    """Flips a bit of the newest pack of that step, after so much of it."""
    pack = max(p for p in (url / "data").rglob("*.pack") if f"-{step:012d}." in str(p.relative_to(url)))
    data = bytearray(pack.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    pack.write_bytes(data)


def start(url: Path, state: Tensors, **options: Any) -> Ended:
    """It trains nothing."""
    return run(url, 0, dict(state), **options)


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
    with pytest.raises(
        ckpt.StateMismatch, match=r"A newer checkpoint was tried before and is damaged: a.*ckpt branch"
    ) as found:
        start(grown, filled(a=-1.0, z=0.0), strict=strict)
    assert not strict or "a is missing in the checkpoint" in str(found.value)
    assert "Nothing was changed" not in str(found.value)


def test_the_way_out_that_is_named_is_one(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ckpt.StateMismatch) as found:
        start(grown, filled(a=-1.0, z=0.0), strict=False)
    wait_agent_gone(grown)
    command = str(found.value).partition("`ckpt ")[2].partition("`")[0]
    assert run_command(monkeypatch, *command.split()).code == 0
    state = filled(a=-1.0, z=0.0)
    again = start(grown, state, strict=False)
    assert again.from_step == 2
    assert not again.seen.named("restore.skipped")
    assert torch.equal(state["a"], filled(a=-1.0)["a"])
    assert torch.equal(state["z"], torch.arange(ELEMENTS) + 2.0)


def test_a_candidate_that_fills_all_that_the_damaged_one_has_filled_is_restored_whole(grown: Path) -> None:
    state = filled(z=0.0)
    again = start(grown, state, strict=False)
    assert again.from_step == 2
    assert again.seen.named("restore.skipped")
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
    assert start(url, state, strict=False).from_step == 2
    assert torch.equal(state["a"], filled(a=-1.0)["a"])


def forge(url: Path, change: Callable[[bytes], bytes]) -> None:
    """The newest checkpoint has other shared values, of which all hashes are right."""
    path = max((url / "commits").iterdir())
    key = f"commits/{path.name}"
    was = record.decode(path.read_bytes(), key)
    made = was.manifest
    tensor = next(n for n, spec in enumerate(made.tensors) if (spec.name, spec.values) == (VALUES, True))
    box = next(n for n, (of, _) in enumerate(made.boxes) if of == tensor)
    frame = int(made.extents["frame"][made.extents["box"] == box][0])
    pack, offset, length, codec = was.places[frame].tolist()
    stored = (url / was.packs[pack][0]).read_bytes()[offset : offset + length]
    raw = bytearray(int(made.frames["length"][frame]))
    codecs.decode(codec, int(made.frames["dtype"][frame]), stored, memoryview(raw), codecs.CodecScratch())
    blob = change(bytes(raw))
    added = f"data/{was.identity}/forged/w-0.pack"
    (url / added).parent.mkdir()
    (url / added).write_bytes(blob)
    frames, extents, places = made.frames.copy(), made.extents.copy(), was.places.copy()
    frames["length"][frame], (frames["hash_hi"][frame], frames["hash_lo"][frame]) = len(blob), frame_hash(blob)
    extents["length"][extents["box"] == box] = len(blob)
    places[frame] = (len(was.packs), 0, len(blob), Codec.RAW)
    tensors, boxes = list(made.tensors), list(made.boxes)
    tensors[tensor], boxes[box] = replace(tensors[tensor], shape=(len(blob),)), (tensor, Box((0,), (len(blob),)))
    manifest = replace(made, tensors=tuple(tensors), boxes=tuple(boxes), frames=frames, extents=extents)
    packs = (*was.packs, (added, len(blob)))
    path.write_bytes(record.encode(replace(was, manifest=manifest, places=places, packs=packs)))


def with_optimizer(**changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        tree = values.decode(data)
        tree["objects"]["optim"] |= changes
        return values.encode(tree)

    return change


# tests/trainer/restore/test_hostile_values.py has more of them.
FORGED: dict[str, Callable[[bytes], bytes]] = {
    "no values": lambda data: b"\xc1",
    "an array for the state": lambda data: values.encode(np.zeros(3)),
    "parameters that are lists": with_optimizer(groups=[{"params": ([0],), "value": {}, "tensors": ()}], state=(-1,)),
}


@pytest.mark.parametrize("how", FORGED)
def test_forged_values_are_passed_over_and_no_command_fails_on_them(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "run"
    run(url, 3, make(), saving(2))
    forge(url, FORGED[how])
    assert run_command(monkeypatch, "verify", str(url)).code in (0, 1)
    assert run_command(monkeypatch, "diff", str(url), "2", "3").code in (0, 1)
    again = run(url, 2)
    assert again.from_step == 2
    assert [event.loud for event in again.seen.named("restore.skipped")] == [True]
