"""Deferred copies: which tensors may be deferred, and the checks that run while deferred copies are relied on.

A tensor may be deferred (during the next forward and backward pass) only if it does not change between the boundary
and the next optimizer step. `DeferredTrust` holds what was proven and disproven of that. `TensorWatch` checks whether
the tensors of one snapshot changed.

An equal version counter proves nothing: fused optimizers and `.data` do not move it. So bytes are compared, too. Equal
live bytes do not prove that the copy read them: weights are swapped for an evaluation and back. So bytes in the arena
are compared as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ckpt.events import Events
from ckpt.trainer.snapshot.cpu_copier import UNIT_BYTES, Copier, check_storage
from ckpt.trainer.state.pieces import CopyPiece, group_pieces, keep_for_stream, result_waiter, split_piece
from ckpt.trainer.state.shard import live_parts, storage_address
from ckpt.types import format_count

# Snapshots in which a tensor is copied eagerly and compared, before it may be deferred.
PROOFS_NEEDED = 2
# Smaller boxes are always copied at the boundary; so are tensors below SMALL_BYTES (state_walk.py).
DEFERRED_BYTES_MIN = 64 << 10
CANARY_BYTES = 64
WORD_BYTES = 8
# A device's copy engine reads this much in the time in which a thread reads UNIT_BYTES.
DEVICE_UNIT_BYTES = 32 << 20
# Each snapshot compares a part of one late tensor in full, in turns. The part is 1/SPOT_SHARE of the late bytes, so
# that the stall hardly grows; but at least DEFERRED_BYTES_MIN and at most SPOT_BYTES_MAX.
SPOT_BYTES_MAX = 1 << 20
SPOT_SHARE = 1024

# A tensor as trust knows it: (name, owner, index of the box, address). A tensor that moved is a new one.
Key = tuple[str, str, int, int]


class DeferredTrust:
    """Which tensors may be deferred. Thread-safe. `version` changes with every answer that may have changed. Proofs
    belong to a tensor at its address. Distrust belongs to its name, and lasts for the run."""

    def __init__(self, events: Events, enabled: bool) -> None:
        self.version = 0
        self._events = events
        self._is_enabled = enabled
        self._off_reason = ""
        self._proof_counts: dict[Key, int] = {}
        self._distrusted: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def is_candidate(self, key: Key) -> bool:
        """Whether the tensor may be deferred, now or once that is proven safe."""
        return self._is_enabled and key[:2] not in self._distrusted

    def is_proven(self, key: Key) -> bool:
        return self.is_candidate(key) and self._proof_counts.get(key, 0) >= PROOFS_NEEDED

    def forget_all_but(self, keys: Collection[Key]) -> None:
        """Drops the proofs of tensors that are gone. One that comes back at the same address later is a new tensor."""
        with self._lock:
            self._proof_counts = {key: n for key, n in self._proof_counts.items() if key in keys}

    def add_proofs(self, keys: Collection[Key]) -> None:
        """Counts one more proof for each tensor."""
        with self._lock:
            for key in keys:
                self._proof_counts[key] = self._proof_counts.get(key, 0) + 1
                self.version += self._proof_counts[key] == PROOFS_NEEDED

    def distrust(self, keys: Collection[Key]) -> None:
        """These tensors changed before the optimizer stepped. They are copied at the boundary from now on."""
        with self._lock:
            names = sorted({key[:2] for key in keys} - self._distrusted)
            self._distrusted.update(names)
            self.version += 1
        for name, owner in names:
            self._events.emit(
                "deferred_copy.changed",
                f"{name} changed before the optimizer stepped; it is copied at the boundary from now on",
                loud=True,
                tensor=name,
                owner=owner,
            )

    def turn_off(self, why: str) -> None:
        """Everything is copied at the boundary from now on. `why`: for the warning."""
        with self._lock:
            was, self._is_enabled = self._is_enabled, False
            self.version += 1
        if was:
            self._off_reason = why
            self._events.emit("deferred_copy.off", f"deferred copies are off in this run: {why}", loud=True, reason=why)

    def proven(self) -> list[str]:
        """How many tensors are proven safe to copy late, in words."""
        count = sum(self.is_proven(key) for key in list(self._proof_counts))
        return [f"lazy copies of {format_count(count, 'tensor')}"] if count else []

    def fallbacks(self) -> list[str]:
        """What is copied at the boundary because it was not safe to copy late, in words."""
        off = [f"lazy copies off: {self._off_reason}"] if self._off_reason else []
        return [*off, *(f"{name} is copied at the boundary: it changed" for name, _ in sorted(self._distrusted))]


class TensorWatch:
    """Remembers tensors at the boundary, and tells later which have changed. It compares version counters, addresses
    and canaries, and one part in full (Spot). A canary is a few bytes at three places of every UNIT_BYTES (on a device,
    of every DEVICE_UNIT_BYTES), which a copy reads in one go. It works on the current streams; its views are made once.
    `pieces`: those of each tensor. `live`: the tensors in the same order. `late`: the deferred pieces."""

    def __init__(
        self, copier: Copier, pieces: dict[Key, list[CopyPiece]], live: Sequence[Tensor], late: Sequence[CopyPiece]
    ) -> None:
        self._copier = copier
        self._keys = [*pieces]
        self._keys_by_box = {(of_one[0].entry, of_one[0].box): key for key, of_one in pieces.items()}
        self._live_tensors = live
        self._spot = Spot(late) if late else None
        self._spot_pairs: list[CopyPiece] = []  # what `Spot.keep_part` gave
        self._boundary_versions: list[tuple[int, int]] = []
        by_device: dict[torch.device, list[_Sample]] = {}
        for n, of_one in enumerate(pieces.values()):
            for sample in _samples(n, of_one):
                by_device.setdefault(sample.live.device, []).append(sample)
        self._canary_groups = [_Canaries(device, samples) for device, samples in by_device.items()]

    def remember(self, turn: int) -> None:
        """`turn`: picks the part that is compared in full."""
        self._boundary_versions = [(tensor._version, tensor.data_ptr()) for tensor in self._live_tensors]
        for group in self._canary_groups:
            group.remember()
        self._spot_pairs = [*self._spot.keep_part(turn)] if self._spot is not None else []

    def start_comparison(self) -> Callable[[], set[Key]]:
        """Compares the tensors as they are now with the remembered ones. The returned function waits for the
        outcome."""
        moved = {
            n for n, t in enumerate(self._live_tensors) if (t._version, t.data_ptr()) != self._boundary_versions[n]
        }
        verdicts = [group.start_comparison(moved) for group in self._canary_groups]
        spot = self.compare_pieces(self._spot_pairs[:1])
        return lambda: spot().union(self._keys[n] for n in moved.union(*(verdict() for verdict in verdicts)))

    def find_torn(self) -> set[Key]:
        """The tensors whose bytes in the arena differ from the remembered ones. They had changed while they were
        copied, whatever they hold now. Any thread, once the copies have landed and the outcome of `start_comparison` is
        there, and before anything else may write into the arena."""
        canaries = {self._keys[n] for group in self._canary_groups for n in group.find_torn()}
        return canaries | self.compare_pieces(self._spot_pairs[1:])()

    def compare_pieces(self, pieces: Sequence[CopyPiece]) -> Callable[[], set[Key]]:
        """As `start_comparison`, for the sources and targets of these pieces."""
        if not pieces:
            return set
        differing = self._copier.start_comparison(pieces)
        return lambda: {self._keys_by_box[pieces[n].entry, pieces[n].box] for n in differing()}


class _Sample(NamedTuple):
    """The same few elements, live and in the arena. `of`: the index of the tensor."""

    tensor_index: int
    live: Tensor
    staged: Tensor


class _Canaries:
    """The samples on one device. They are gathered into one buffer at the boundary, and later into another, and from
    the arena."""

    def __init__(self, device: torch.device, samples: Sequence[_Sample]) -> None:
        samples = sorted(samples, key=_is_odd)
        self._tensor_indices = [sample.tensor_index for sample in samples]
        self._sources = [sample.live for sample in samples]
        plain = len(samples) - sum(map(_is_odd, samples))
        self._plain_sources = [_words(source) for source in self._sources[:plain]]
        self._odd_sources = self._sources[plain:]
        self._boundary_bytes, self._later_bytes = torch.zeros(
            (2, len(samples), CANARY_BYTES), dtype=torch.uint8, device=device
        )
        self._boundary_words, self._later_words = (
            _words(rows[:plain]).view(-1) for rows in (self._boundary_bytes, self._later_bytes)
        )
        self._boundary_rows, self._later_rows = (
            [row[: s.nbytes].view(s.dtype) for row, s in zip(rows, self._sources, strict=True)]
            for rows in (self._boundary_bytes, self._later_bytes)
        )
        arena = torch.empty(0, dtype=torch.uint8, device="cpu").set_(samples[0].staged.untyped_storage())
        # One arena holds all staged samples. So one gather reads them, as rows that may begin at any byte. A sample is
        # not compared if the arena's end would cut off its row.
        self._arena = arena.as_strided((len(arena) - CANARY_BYTES + 1, CANARY_BYTES), (1, 1))
        starts, sizes = (
            torch.tensor(column, device="cpu")
            for column in zip(*((s.storage_offset() * s.itemsize, s.nbytes) for _, _, s in samples), strict=True)
        )
        self._arena_offsets = starts.clamp(max=len(self._arena) - 1)
        is_filled = torch.arange(CANARY_BYTES, device="cpu") < sizes[:, None]
        is_there = (self._arena_offsets == starts)[:, None]
        self._mask = _words((is_filled & is_there).to(torch.uint8) * 0xFF)

    def remember(self) -> None:
        self._gather(self._boundary_words, self._boundary_rows)

    def start_comparison(self, moved: set[int]) -> Callable[[], set[int]]:
        """`moved`: tensors that may be freed by now; they are not read."""
        if moved.isdisjoint(self._tensor_indices):
            self._gather(self._later_words, self._later_rows)
        else:
            self._later_bytes.copy_(self._boundary_bytes)
            there = [row for row, of in enumerate(self._tensor_indices) if of not in moved]
            if there:
                torch._foreach_copy_([self._later_rows[row] for row in there], [self._sources[row] for row in there])
        differ = result_waiter((_words(self._boundary_bytes) != _words(self._later_bytes)).any(1))
        return lambda: self._tensors_of_rows(differ())

    def find_torn(self) -> set[int]:
        landed = self._arena.index_select(0, self._arena_offsets)
        return self._tensors_of_rows(((_words(self._boundary_bytes.cpu()) ^ _words(landed)) & self._mask).any(1))

    def _gather(self, plain: Tensor, rows: list[Tensor]) -> None:
        keep_for_stream(plain)
        if self._plain_sources:
            # Concatenating words costs half of concatenating bytes, and an eighth of copying each sample.
            torch.cat(self._plain_sources, out=plain)
        if self._odd_sources:
            torch._foreach_copy_(rows[len(self._plain_sources) :], self._odd_sources)

    def _tensors_of_rows(self, differ: Tensor) -> set[int]:
        return {self._tensor_indices[row] for row in differ.nonzero()[:, 0].tolist()}


def _is_odd(sample: _Sample) -> bool:
    """Whether the sample is anything but a whole row of plain bytes, aligned to words."""
    live = sample.live
    is_row = live.dtype is torch.uint8 and live.shape[0] == CANARY_BYTES and live.is_contiguous()
    return not is_row or any(place % WORD_BYTES for place in (int(live.storage_offset()), live.data_ptr()))


def _words(row: Tensor) -> Tensor:
    """A row as words of WORD_BYTES, to which it must be aligned."""
    return row.view(torch.int64)


def _samples(of: int, pieces: Sequence[CopyPiece]) -> Iterator[_Sample]:
    """Samples of one tensor: up to CANARY_BYTES each from the start, middle and end of every unit that is staged."""
    for unit in _units(pieces):
        for piece, part in ((unit[0], 0.0), (unit[len(unit) // 2], 0.5), (unit[-1], 1.0)):
            live, staged = piece.source, piece.target
            while live.dim() > 1:
                row = int(part * (live.shape[0] - 1))
                live, staged = live[row], staged[row]
            count = min(CANARY_BYTES // live.element_size(), live.shape[0])
            at = int(part * (live.shape[0] - count))
            # Aligned to words, except at the end: there the last bytes are read.
            if part < 1.0:
                at -= at % WORD_BYTES
            yield _Sample(of, live[at : at + count], staged[at : at + count])


def _units(pieces: Sequence[CopyPiece]) -> Iterator[list[CopyPiece]]:
    """The pieces of one tensor as a copy reads them: large ones in parts, small ones together."""
    unit_max = UNIT_BYTES if pieces[0].source.device.type == "cpu" else DEVICE_UNIT_BYTES
    parts = (part for piece in pieces for part in split_piece(piece, unit_max))
    return group_pieces(parts, lambda unit, nbytes, part: nbytes + part.nbytes <= unit_max)


class Spot:
    """A part of one late tensor, another one each time: kept in full at the boundary, and compared in full later."""

    def __init__(self, pieces: Sequence[CopyPiece]) -> None:
        self._pieces = pieces
        share = sum(piece.nbytes for piece in pieces) // SPOT_SHARE
        self._bytes_max = min(SPOT_BYTES_MAX, max(DEFERRED_BYTES_MIN, share))
        # Buffers are reused: fresh pages cost ten times as much as warm ones.
        self._buffers: dict[torch.device, Tensor] = {}

    def keep_part(self, turn: int) -> tuple[CopyPiece, CopyPiece]:
        """Keeps a copy of the part that `turn` picks, until the next call. Returns two pairs to compare: (live tensor,
        kept copy) and (kept copy, arena). Neither pair may differ once all has been copied."""
        piece = self._pieces[turn % len(self._pieces)]
        source, staged = piece.source, piece.target
        count = self._bytes_max // source.element_size()
        if source.dim() == 1 and source.shape[0] > count:
            places = -(-source.shape[0] // count)
            at = min(turn // len(self._pieces) % places * count, source.shape[0] - count)
            source, staged = source[at : at + count], staged[at : at + count]
        buffer = self._buffers.get(source.device)
        if buffer is None or buffer.nbytes < source.nbytes:
            buffer = torch.empty(max(self._bytes_max, source.nbytes), dtype=torch.uint8, device=source.device)
            self._buffers[source.device] = buffer
        kept = buffer[: source.nbytes].view(source.dtype).view(source.shape)
        live = CopyPiece(piece.entry, piece.box, source, kept)
        check_storage(source)
        keep_for_stream(kept)
        kept.copy_(source)
        return live, CopyPiece(piece.entry, piece.box, kept, staged)


def owns_any_storage(optimizer: Optimizer, addresses: frozenset[int]) -> bool:
    """Whether a parameter or state tensor of the optimizer (the local part of a DTensor) lies in a storage at one of
    `addresses`. Usually the first one does. Any optimizer of the process may be given, with any kinds of tensors."""
    tensors = chain(params_of(optimizer), state_of(optimizer))
    return any(storage_address(part) in addresses for tensor in tensors for part in live_parts(tensor))


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"] if isinstance(each, Tensor))


def state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors that the optimizer keeps for its parameters."""
    kept = (value for of_one in optimizer.state.values() if isinstance(of_one, dict) for value in of_one.values())
    return (each for each in kept if isinstance(each, Tensor))
