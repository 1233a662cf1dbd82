"""Every kind of tensor, copied late while training runs into the copy: what is staged is of one step, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from ckpt.trainer.snapshot.deferred_copy import DEFERRED_BYTES_MIN, PROOFS_NEEDED
from tests.trainer.roundtrip import raw
from tests.trainer.snapshot.test_snapshot import odd_state
from tests.trainer.snapshots import TearingCopier, rig

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


class Stamper(torch.optim.Optimizer):
    """Stamps every byte with the number of its step: two steps that follow each other have no byte in common. By
    storages, so that any dtype and any view is stamped, and no version counter moves."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__(list({id(tensor): tensor for tensor in state.values()}.values()), {"lr": 1.0})
        storages = {t.untyped_storage().data_ptr(): t for t in state.values() if t.numel()}
        self.bytes = {n: torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage()) for n, t in storages.items()}  # type: ignore[call-overload]
        self.is_bool = {n for n, t in storages.items() if t.dtype is torch.bool}
        self.count = 0

    def step(self, closure: object = None) -> None:
        self.count += 1
        mask = 2 * (self.count * 37 % 128) + 1  # odd: the lowest bit, all that a bool has, always turns
        for n, each in self.bytes.items():
            each.bitwise_xor_(1 if n in self.is_bool else mask)


def test_every_kind_of_tensor_is_of_one_step_when_it_is_copied_late(seed: int) -> None:
    state = odd_state(seed)
    copier = TearingCopier()
    optimizer = Stamper(state)
    with rig(lambda: (state, set(state)), copier=copier) as it:
        for turn in range(PROOFS_NEEDED + 3):
            expected = {name: raw(tensor) for name, tensor in state.items()}
            snapshot = it.take()
            copier.copy_some(7 * turn)  # where training may run into it; the rest when the optimizer steps
            assert snapshot.is_deferred == (turn >= PROOFS_NEEDED)
            assert not (snapshot.is_deferred and snapshot.done.done())
            optimizer.step()
            it.snapshotter.note_boundary()
            assert snapshot.done.done()
            assert snapshot.abandon_reason is None
            staged = it.staged(snapshot.slot)
            assert [name for name in state if raw(staged[name]) != expected[name]] == []
        assert not it.events
        assert it.snapshotter.trust.fallbacks() == []
        assert copier.copied_late > 0
        large = [name for name, tensor in state.items() if tensor.nbytes >= DEFERRED_BYTES_MIN]
        assert it.snapshotter.trust.proven() == [f"lazy copies of {len(large)} tensors"]
