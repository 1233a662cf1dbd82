"""Frames into tensors: in one run where they lie so, in parts otherwise, and never unchecked."""

from __future__ import annotations

import pytest
import torch

import tests.trainer.roundtrip as rt
from ckpt.format.frames import frame_hash
from ckpt.layout.reshard import Want
from ckpt.trainer.restore import fill
from ckpt.trainer.restore.fill import Filler, copy_run
from ckpt.types import Box

ROWS, COLUMNS = 40, 101  # 16,160 bytes: four frames of at most 4,096, which begin in the middle of rows


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def checkpoint(table: torch.Tensor) -> rt.Checkpoint:
    return rt.save({"table": table, "few": torch.arange(5.0)})


def filled(checkpoint: rt.Checkpoint, box: Box, tensor: torch.Tensor) -> int:
    """Fills it; how many frames went there in one run."""
    filler = Filler(checkpoint.manifest, [Want("table", "", "float32", (ROWS, COLUMNS), box)], [tensor])
    assert all(filler(frame, memoryview(bytearray(checkpoint.frame(frame)))) for frame in filler.frames)
    return len(filler.whole_frames)


@pytest.mark.parametrize("inference", [False, True])
def test_frames_of_one_run_are_copied_at_once_and_other_layouts_get_equal_bytes(
    checkpoint: rt.Checkpoint, table: torch.Tensor, inference: bool
) -> None:
    with torch.inference_mode(inference):
        target, across = torch.zeros(ROWS, COLUMNS), torch.zeros(COLUMNS, ROWS).t()
        part, narrow = torch.zeros(28, COLUMNS), torch.zeros(ROWS, 10)
    assert filled(checkpoint, Box.whole((ROWS, COLUMNS)), target) == 4
    assert torch.equal(target, table)
    assert filled(checkpoint, Box.whole((ROWS, COLUMNS)), across) == 0
    assert torch.equal(across, table)
    assert filled(checkpoint, Box((12, 0), (28, COLUMNS)), part) == 2
    assert torch.equal(part, table[12:])
    assert filled(checkpoint, Box((0, 7), (ROWS, 10)), narrow) == 0
    assert torch.equal(narrow, table[:, 7:17])


def test_wrong_bytes_are_noticed_on_every_path(checkpoint: rt.Checkpoint) -> None:
    for target in (torch.zeros(ROWS, COLUMNS), torch.zeros(COLUMNS, ROWS).t()):
        want = Want("table", "", "float32", (ROWS, COLUMNS), Box.whole((ROWS, COLUMNS)))
        filler = Filler(checkpoint.manifest, [want], [target])
        for frame in filler.frames:
            wrong = bytearray(checkpoint.frame(frame))
            wrong[-1] ^= 1
            assert not filler(frame, memoryview(wrong))


def test_a_single_element_that_keeps_the_stride_it_was_cut_with_is_filled() -> None:
    saved = rt.save({"w": torch.arange(8.0)[3::8]})
    target = torch.zeros(8)
    filler = Filler(saved.manifest, [Want("w", "", "float32", (1,), Box.whole((1,)))], [target[5::8]])
    assert all(filler(frame, memoryview(bytearray(saved.frame(frame)))) for frame in filler.frames)
    assert target.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0]


def test_what_landed_is_hashed_not_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "BLOCK_BYTES", 7)
    raw = bytes(range(50))
    target = torch.zeros(50, dtype=torch.uint8).numpy()
    assert copy_run(memoryview(raw), target) == frame_hash(raw)
    assert bytes(target.data) == raw


def test_frames_for_devices_go_by_way_of_a_few_rooms_and_damaged_ones_go_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fill, "BUFFERS_MAX", 2)
    lift, found, rooms = fill.Lift(()), list[bytes](), set[int]()

    def take(data: torch.Tensor) -> None:
        found.append(data.numpy().tobytes())
        rooms.add(data.data_ptr())

    frames = [bytes(n for _ in range(size)) for n, size in enumerate((40, 64, 8, 64, 0, 17))]
    for frame in frames:
        assert lift(memoryview(frame), frame_hash(frame), take)
        assert not lift(memoryview(frame), frame_hash(frame + b"\0"), take)
    assert found == frames
    assert len(rooms - {0}) <= 3  # two, one of which has grown


class Huge(bytes):
    """There is no memory for it."""

    def __len__(self) -> int:
        return 1 << 60


def test_a_room_is_free_again_and_read_to_the_end_where_filling_from_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "BUFFERS_MAX", 1)
    waited: list[object] = []

    class Marking(fill.Lift):
        def _record_events(self) -> list[object]:  # type: ignore[override]
            return ["what was enqueued"]

        def _wait_for_events(self, marks: list[object]) -> None:  # type: ignore[override]
            waited.extend(marks)

    def fail(data: torch.Tensor) -> None:
        raise ValueError("no")

    lift = Marking(())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            lift(Huge(), (0, 0), lambda data: None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no"):
            lift(memoryview(b"abc"), frame_hash(b"abc"), fail)
    assert lift(memoryview(b"abc"), frame_hash(b"abc"), lambda data: None)
    assert waited == ["what was enqueued"] * 2
