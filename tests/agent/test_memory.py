"""The memory that the agent takes: computed beforehand, bounded, degrading in the stated order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.agent import memory

GIB = 1 << 30
MEMINFO = "MemTotal:       65536000 kB\nMemFree:  1000 kB\nMemAvailable:   33554432 kB\n"


@pytest.mark.parametrize(("slot_gib", "slots"), [(1, 3), (7, 3), (10, 2), (20, 1), (31, 0)])
def test_slots_go_one_by_one_as_the_state_grows(slot_gib: int, slots: int) -> None:
    plan = memory.plan(slot_gib * GIB, 0, 0, None, 32 * GIB)
    assert plan.slots == slots
    assert plan.total_bytes <= plan.allowed_bytes or not plan.slots


def test_the_users_limit_counts_and_is_named() -> None:
    plan = memory.plan(GIB, 0, 0, 2 * GIB, 32 * GIB)
    assert plan.slots == 1
    assert "Limits" in str(plan)
    assert plan.table()["total_bytes"] == plan.total_bytes <= 2 * GIB


def test_what_is_kept_for_a_restart_counts_as_ours() -> None:
    assert memory.plan(GIB, 2 * GIB, 0, 5 * GIB, 32 * GIB).slots == 2
    assert memory.plan(GIB, 0, 3 * GIB, None, GIB).slots == 3  # three are there already


def test_the_control_groups_limit_counts_in_both_versions(tmp_path: Path) -> None:
    assert memory.free_bytes(MEMINFO, tmp_path) == 32 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert memory.free_bytes(MEMINFO, tmp_path) == 32 * GIB
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert memory.free_bytes(MEMINFO, tmp_path) == 2 * GIB
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text(f"{GIB}")
    (old / "memory.usage_in_bytes").write_text(f"{2 * GIB}")
    assert memory.free_bytes(MEMINFO, tmp_path) == 0


@pytest.mark.parametrize("limited", ["", "batch", "batch/job7", "batch/job7/step0"])
@pytest.mark.parametrize(
    ("own", "at", "names"),
    [
        ("0::/batch/job7/step0\n", "", ("memory.max", "memory.current")),
        (
            "5:cpu:/other\n4:memory:/batch/job7/step0\n",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
)
def test_the_limit_of_any_control_group_that_we_are_in_counts(
    tmp_path: Path, limited: str, own: str, at: str, names: tuple[str, str]
) -> None:
    group = tmp_path / at / limited
    group.mkdir(parents=True, exist_ok=True)
    for name, count in zip(names, (3 * GIB, GIB), strict=True):
        (group / name).write_text(f"{count}\n")
    assert memory.free_bytes(MEMINFO, tmp_path, own) == 2 * GIB
    assert memory.total_bytes(MEMINFO, tmp_path, own) == 3 * GIB
    assert memory.free_bytes(MEMINFO, tmp_path, "0::/elsewhere\n") == (2 if not limited else 32) * GIB


@pytest.mark.parametrize(
    ("limit_gib", "free_gib", "room_gib"), [(None, 32, 16), (8, 32, 4.75), (8, 4, 2), (3, 32, 0.75)]
)
def test_what_a_start_takes_for_a_while_is_left_by_the_machine_and_by_the_users_limit(
    limit_gib: int | None, free_gib: int, room_gib: float
) -> None:
    """Beside as many slots as there is room for, and the window."""
    limit = limit_gib * GIB if limit_gib is not None else None
    plan = memory.plan(GIB, 0, 0, limit, 32 * GIB)
    assert memory.for_a_while_bytes(plan, limit, free_gib * GIB) == int(room_gib * GIB)
