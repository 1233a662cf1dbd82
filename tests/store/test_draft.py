"""A draft: a checkpoint that processes write straight to the store."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.store import draft as module
from ckpt.store.run import Run
from tests.cli.stores import begin, opened, save

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def rows(first: int, stop: int, name: str = "w") -> ckpt.DraftBox:
    return ckpt.DraftBox(name, "float32", (4, 3), (first, 0), (stop - first, 3))


def put(draft: ckpt.Draft, rank: int, *boxes: ckpt.DraftBox, plus: float = 0) -> ckpt.DraftPart:
    return draft.write(rank, boxes, lambda i: ROWS[boxes[i].offset[0] :][: boxes[i].size[0]] + np.float32(plus))


def test_parts_of_several_processes_make_one_checkpoint(tmp_path: Path) -> None:
    draft = ckpt.Draft.begin(str(tmp_path), step=7)
    with ckpt.open(tmp_path) as run:
        assert not run.checkpoints
    sent: ckpt.Draft = pickle.loads(pickle.dumps(draft))
    parts = [put(sent, 1, rows(3, 4), rows(0, 2)), put(sent, 0, rows(2, 3), rows(0, 4, "v"))]
    identity = draft.commit(pickle.loads(pickle.dumps(parts)), values={"a": [1]}, metrics={"m": 2.0}, about={"x": "y"})
    with ckpt.open(tmp_path) as run:
        found = run.newest
        assert (found.identity, found.step, found.ranks) == (identity, 7, ("rank=0", "rank=1"))
        assert np.array_equal(found.tensor("w"), ROWS)
        assert np.array_equal(found.tensor("v"), ROWS)
        assert (found.values(), found.metrics, found.about["x"]) == ({"a": [1]}, {"m": 2.0}, "y")
        assert run.verify()[0].is_good
        assert not run.unrecorded()


def test_a_box_that_several_processes_write_is_stored_once_and_must_be_the_same(tmp_path: Path) -> None:
    draft = ckpt.Draft.begin(str(tmp_path))
    draft.commit([put(draft, 0, rows(0, 4)), put(draft, 1, rows(0, 4))])
    with ckpt.open(tmp_path) as run:
        assert set(run.newest.stored_tensors) == {"w"}
    for other, plus in ((rows(0, 4), 1.0), (rows(0, 3), 0.0)):
        draft = ckpt.Draft.begin(str(tmp_path))
        parts = [put(draft, 0, rows(0, 4)), put(draft, 1, other, plus=plus)]
        with pytest.raises(ckpt.SaveFailed, match="the parts differ in w, or their boxes overlap"):
            draft.commit(parts)


def test_large_boxes_are_put_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 5 << 20)
    arrays = [np.random.default_rng(n).standard_normal((3 << 20) // 8 * (n + 1)) for n in range(4)]
    boxes = [ckpt.DraftBox(f"t{n}", "float64", a.shape, (0,), a.shape) for n, a in enumerate(arrays)]
    draft = ckpt.Draft.begin(str(tmp_path), codec="raw")
    draft.commit([draft.write(0, boxes, arrays.__getitem__)])
    with ckpt.open(tmp_path) as run:
        assert all(np.array_equal(run.newest.tensor(f"t{n}"), a) for n, a in enumerate(arrays))
        parts = [(f"t{n}", slice(n, n + 2)) for n in range(4)]
        got: list[tuple[int, object]] = []
        run.newest.read_parts(parts, lambda n, tensor: got.append((n, tensor.tolist())))
        assert got == [(n, a[n : n + 2].tolist()) for n, a in enumerate(arrays)]
    assert len(list(tmp_path.glob("data/*/rank-0/*.pack"))) > 4


@pytest.mark.parametrize("boxes", [[rows(1, 3)], []])
def test_a_tensor_with_a_hole_is_no_checkpoint(boxes: list[ckpt.DraftBox], tmp_path: Path) -> None:
    draft = ckpt.Draft.begin(str(tmp_path))
    parts = [put(draft, 0, *boxes), put(draft, 1, rows(0, 1))]
    with pytest.raises(ckpt.SaveFailed, match="not all bytes of these tensors are staged: w"):
        draft.commit(parts)
    with ckpt.open(tmp_path) as run:
        assert not run.checkpoints


def test_wrong_boxes_and_bytes_are_refused(tmp_path: Path) -> None:
    draft = ckpt.Draft.begin(str(tmp_path))
    with pytest.raises(ckpt.UsageError, match="w: its boxes overlap"):
        put(draft, 0, rows(0, 2), rows(1, 3))
    with pytest.raises(ckpt.UsageError, match=r"w: a box of .* does not lie in"):
        rows(3, 5)
    with pytest.raises(ckpt.UsageError, match="w: the dtype qint8 cannot be stored"):
        ckpt.DraftBox("w", "qint8", (1,), (0,), (1,))
    with pytest.raises(ckpt.UsageError, match="w: its boxes differ"):
        put(draft, 0, rows(0, 2), ckpt.DraftBox("w", "float32", (5, 3), (2, 0), (1, 3)))
    with pytest.raises(ckpt.UsageError, match=r"w: a box of \[4, 3\] has 48 contiguous bytes, but 4 were given"):
        draft.write(0, [rows(0, 4)], lambda i: b"1234")
    for step in (-1, True, 1.5):
        with pytest.raises(ckpt.UsageError, match="step="):
            ckpt.Draft.begin(str(tmp_path), step=step)


def test_a_part_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    one, other = ckpt.Draft.begin(str(tmp_path)), ckpt.Draft.begin(str(tmp_path))
    with pytest.raises(ckpt.SaveFailed, match=f"belongs to another checkpoint, {one.identity}"):
        other.commit([put(one, 0, rows(0, 4))])


def test_of_two_drafts_the_newer_one_commits(tmp_path: Path) -> None:
    one, other = ckpt.Draft.begin(str(tmp_path)), ckpt.Draft.begin(str(tmp_path))
    parts = [put(one, 0, rows(0, 4))]
    with pytest.raises(ckpt.Superseded):
        one.commit(parts)
    other.commit([put(other, 0, rows(0, 4))])


def test_a_living_job_is_not_superseded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, epoch := begin(tmp_path, closed=False), 10)
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "0.2")

    with opened(tmp_path) as store:
        run, beats = Run(store), iter(range(1, 100))

        class Beating(Run):
            """Another node's agent, which beats between two looks."""

            def _read_heartbeat(self, epoch):
                run.put_heartbeat(epoch, next(beats), 0.2)
                return super()._read_heartbeat(epoch)

        monkeypatch.setattr(module, "Run", Beating)
        with pytest.raises(ckpt.RunInUse):
            ckpt.Draft.begin(str(tmp_path))
        assert Run(store).view().newest_epoch == epoch
        assert ckpt.Draft.begin(str(tmp_path), take_over=True).identity.epoch > epoch
