"""What is read of each tensor at a snapshot, so that ranks that cease to hold the same are seen to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.format.declaration import SAMPLE
from ckpt.layout.division import find_agreed
from ckpt.layout.layout import Entry, Layout
from ckpt.trainer.link.slots import StateOffer, encode_hashes, mark_differing_hashes
from ckpt.trainer.snapshot import samples
from ckpt.trainer.snapshot.samples import BOXES_MAX, LINE_ELEMENTS, Samples
from ckpt.trainer.state.shard import DTYPES
from ckpt.trainer.state.state_walk import Walk
from ckpt.trainer.state.tensor_hashes import hash_replicas
from ckpt.types import Box, Version


def walk_of(tensors: dict[str, torch.Tensor], **owners: str) -> Walk:
    """As one rank that holds these has them."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries = [
        Entry(name, names[t.dtype], tuple(t.shape), (Box.whole(tuple(t.shape)),), owners.get(name, ""))
        for name, t in tensors.items()
    ]
    count = len(entries)
    layout = Layout(tuple(entries))
    return Walk(layout, tuple((t,) for t in tensors.values()), (False,) * count, (True,) * count, *[None] * 5)


def of(tensors: dict[str, torch.Tensor], **owners: str) -> Samples:
    walk = walk_of(tensors, **owners)
    return Samples(walk, walk.layout)


def hashes(made: Samples, turn: int = 0) -> dict[int, int]:
    taken = made.take(turn)
    assert taken is not None
    return {int(box): int(value) for box, value in np.frombuffer(taken.fields()["samples"], SAMPLE)}


def make(kind: Callable[..., Any] = torch.ones) -> dict[str, torch.Tensor]:
    channels_last = kind(30, 70, 5, 5).to(memory_format=torch.channels_last)
    return {
        "small": kind(3, 5),
        "one": kind(()),
        "large": kind(2000, 3),
        "turned": kind(40, 90).T,
        "conv": channels_last,
    }


def test_what_is_copied_when_it_is_read_is_not_copied_before() -> None:
    turned = torch.ones(3, 5).T
    now, read = samples.sample_elements(turned)
    assert now.data_ptr() == turned.data_ptr()
    assert read().is_contiguous()


def test_a_single_element_that_keeps_the_stride_it_was_cut_with_is_read() -> None:
    taken = of({"w": torch.arange(8.0)[3::8]}).take(0)
    assert taken is not None
    assert taken.long_sample[2] == np.float32(3.0).tobytes()


def test_every_tensor_that_differs_everywhere_is_seen_at_once_and_no_other() -> None:
    first, second = make(), make()
    one, other = of(first), of(second)
    assert hashes(one) == hashes(other)
    assert len(hashes(one)) == len(first)
    for place, tensor in enumerate(second.values()):
        before = hashes(other)
        tensor += 1
        assert {box for box, value in hashes(other).items() if value != before[box]} == {place}


def test_equal_tensors_are_sampled_alike_however_they_lie_in_memory() -> None:
    torch.manual_seed(0)
    tensors = make(torch.randn)
    made, contiguous = of(tensors), of({name: tensor.contiguous() for name, tensor in tensors.items()})
    assert hashes(made) == hashes(contiguous)
    for turn in range(3 * len(tensors)):
        one, other = made.take(turn), contiguous.take(turn)
        assert one is not None
        assert other is not None
        assert one.long_sample == other.long_sample
        assert 0 < len(one.long_sample[2]) <= samples.LONG_SAMPLE_BYTES


def test_of_a_small_tensor_no_element_is_left_out() -> None:
    tensor = torch.zeros(samples.WHOLE_BYTES // 4)
    made = of({"a": tensor})
    before = hashes(made)
    for at in (0, 511, len(tensor) - 1):
        tensor[at] += 1
        assert hashes(made) != before
        before = hashes(made)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_can_be_sampled(name: str) -> None:
    small, large = torch.zeros(5, dtype=DTYPES[name]), torch.zeros(40, 400, dtype=DTYPES[name])
    assert len(hashes(of({"small": small, "large": large}))) == 2


def test_many_tensors_take_turns_the_same_ones_on_ranks_that_hold_different_numbers_of_them() -> None:
    many = {f"t{n}": torch.zeros(1) for n in range(3 * BOXES_MAX)}
    all_of_them, few = of(many), of(dict(list(many.items())[:5]))
    turns = [hashes(all_of_them, turn) for turn in range(4)]
    assert all(0 < len(each) < 1.2 * BOXES_MAX for each in turns)
    assert set().union(*turns) == set(range(3 * BOXES_MAX))
    assert len(hashes(few)) == 5
    assert all(len(hashes(all_of_them, turn + 4)) == len(turns[turn]) for turn in range(4))


def test_what_is_the_ranks_own_is_not_sampled() -> None:
    assert hashes(of({"a": torch.zeros(2), "b": torch.zeros(2)}, a="rank=0")).keys() == {1}
    assert of({"a": torch.zeros(2)}, a="rank=0").take(0) is None


def test_little_is_read_of_a_large_tensor() -> None:
    taken = of({"a": torch.zeros(500, 500)}).take(0)
    assert taken is not None
    assert taken.ends == (LINE_ELEMENTS * 4,)


def test_hashes_that_are_told_to_another_agent_say_what_differs_by_now() -> None:
    walk = walk_of({"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(3)})
    offer = StateOffer(walk.layout, encode_hashes(hash_replicas(walk.tensors, walk.may_have_replicas)), Version(1), 0)
    before = np.frombuffer(offer.hashes, "<u8").reshape(-1, 2)
    after = [np.frombuffer(mark_differing_hashes(offer, {"b"}, rank), "<u8").reshape(-1, 2) for rank in (0, 1)]
    assert [before[n].tolist() == each[n].tolist() for each in after for n in range(3)] == [True, False, True] * 2
    agreed, differing = find_agreed([walk.layout] * 2, after)
    assert {name for name, _, _ in agreed} == {"a", "c"}
    assert differing == {("b", "")}
    assert mark_differing_hashes(offer, (), 0) == offer.hashes
