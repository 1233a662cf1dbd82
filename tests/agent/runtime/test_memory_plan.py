"""The memory that the agent takes: computed beforehand, bounded, degrading in the stated order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.agent.runtime import memory_plan
from ckpt.agent.state import memory_pressure

GIB = 1 << 30
MIB = 1 << 20
MEMINFO = "MemTotal:       65536000 kB\nMemFree:  1000 kB\nMemAvailable:   33554432 kB\n"


@pytest.mark.parametrize(
    ("total_gib", "slot_gib", "slots", "wanted"),
    [
        *((None, 1, 3, 3), (None, 7, 3, 3), (None, 10, 2, 3), (None, 20, 1, 3), (None, 31, 0, 3)),
        # A slot above a tenth of the machine's memory.
        *((64, 1, 3, 3), (64, 6, 3, 3), (64, 7, 2, 2), (64, 20, 1, 2), (64, 31, 0, 2)),
    ],
)
def test_slots_go_one_by_one_as_the_state_grows(total_gib: int | None, slot_gib: int, slots: int, wanted: int) -> None:
    total = total_gib * GIB if total_gib is not None else None
    plan = memory_plan.make_plan(slot_gib * GIB, 0, 0, None, 32 * GIB, total_bytes=total)
    assert (plan.slots, plan.wanted) == (slots, wanted)
    assert plan.total_bytes <= plan.allowed_bytes or not plan.slots


def test_the_users_limit_counts_and_is_named() -> None:
    plan = memory_plan.make_plan(GIB, 0, 0, 2 * GIB, 32 * GIB)
    assert plan.slots == 1
    assert "Limits" in str(plan)
    assert plan.table()["total_bytes"] == plan.total_bytes <= 2 * GIB


def test_what_a_machine_keeps_free_for_others_is_left_by_copies_and_taken_by_slots_if_it_has_to_be() -> None:
    def left(free_gib: float, limit_gib: int | None = None, held_gib: int = 0) -> float:
        """Beside two slots, of a machine that is to keep 4 GiB."""
        limit = limit_gib * GIB if limit_gib is not None else None
        plan = memory_plan.make_plan(GIB, 0, held_gib * GIB, limit, int(free_gib * GIB), 2, 4 * GIB)
        assert plan.slots == 2
        return plan.replica_bytes_max(2) / GIB

    assert left(16) == pytest.approx(16 - 4 - 2 - 0.25)
    assert left(16 - 7, held_gib=7) == left(16)
    assert left(64 + 16) == pytest.approx(75 - 2 - 0.25), "a plan leaves more than that"
    assert left(16, 15) == left(16)
    assert left(16, 10) == pytest.approx(10 - 2 - 0.25)
    assert left(5) == 0


def test_what_is_kept_for_a_restart_counts_as_ours() -> None:
    assert memory_plan.make_plan(GIB, 2 * GIB, 0, 5 * GIB, 32 * GIB).slots == 2
    assert memory_plan.make_plan(GIB, 0, 3 * GIB, None, GIB).slots == 3  # three are there already


@pytest.mark.parametrize(("most", "high"), [("max", 3 * GIB), (8 * GIB, 3 * GIB), (3 * GIB, 8 * GIB), (3 * GIB, "max")])
def test_the_soft_limit_counts_like_the_hard_one_and_the_lower_of_both(
    tmp_path: Path, most: object, high: object
) -> None:
    for name, value in (("max", most), ("high", high), ("current", GIB)):
        (tmp_path / f"memory.{name}").write_text(f"{value}\n")
    assert memory_plan.free_bytes(MEMINFO, tmp_path) == 2 * GIB
    assert memory_plan.total_bytes(MEMINFO, tmp_path) == 3 * GIB


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
    assert memory_plan.free_bytes(MEMINFO, tmp_path, own) == 2 * GIB
    assert memory_plan.total_bytes(MEMINFO, tmp_path, own) == 3 * GIB
    assert memory_plan.free_bytes(MEMINFO, tmp_path, "0::/elsewhere\n") == (2 if not limited else 32) * GIB


V2 = {
    "limit": "memory.max",
    "used": "memory.current",
    "shared": "shmem",
    "cache": "file",
    "inactive": "inactive_file",
    "active": "active_file",
    "dirty": "file_dirty",
    "writeback": "file_writeback",
}
V1 = {
    "limit": "memory/memory.limit_in_bytes",
    "used": "memory/memory.usage_in_bytes",
    **{name: f"total_{name}" for name in ("cache", "dirty", "writeback")},
    "shared": "total_shmem",
    "inactive": "total_inactive_file",
    "active": "total_active_file",
}


def group(at: Path, names: dict[str, str], limit_gib: float, used_gib: float, **stat_gib: float) -> None:
    """Makes it: a limit, what is charged to it, and what of that is said in its statistics."""
    (at / names["limit"]).parent.mkdir(parents=True, exist_ok=True)
    (at / names["limit"]).write_text(f"{int(limit_gib * GIB)}\n")
    (at / names["used"]).write_text(f"{int(used_gib * GIB)}\n")
    rows = "".join(f"{names[name]} {int(gib * GIB)}\n" for name, gib in stat_gib.items())
    (at / names["limit"]).with_name("memory.stat").write_text(f"anon 5\n{rows}slab 7\n")


@pytest.mark.parametrize("names", [V2, V1])
@pytest.mark.parametrize("active_gib", [0, 5, 55])
def test_a_container_that_streams_files_has_what_their_cache_takes(
    tmp_path: Path, names: dict[str, str], active_gib: int
) -> None:
    """Or all saves would be refused, and memory be given back for ever, beside 55 GiB that the kernel holds ready."""
    group(tmp_path, names, 64, 63.9, cache=55, inactive=55 - active_gib, active=active_gib)
    meminfo = f"MemTotal: {512 << 20} kB\nMemAvailable: {400 << 20} kB\n"
    free = memory_plan.free_bytes(meminfo, tmp_path, "")
    assert free == pytest.approx(55.1 * GIB)
    assert memory_plan.make_plan(4 * GIB, 0, 0, None, free).slots == memory_plan.SLOTS
    assert not memory_pressure.missing_bytes(free, memory_plan.total_bytes(meminfo, tmp_path, ""))


@pytest.mark.parametrize("names", [V2, V1])
def test_shared_memory_and_what_is_to_be_written_first_are_in_use(tmp_path: Path, names: dict[str, str]) -> None:
    group(tmp_path, names, 20, 19, cache=18, shared=10, inactive=5, active=3, dirty=2, writeback=1)
    assert memory_plan.free_bytes(MEMINFO, tmp_path, "") == 6 * GIB
    group(tmp_path, names, 20, 19, cache=10, shared=10, dirty=2)
    assert memory_plan.free_bytes(MEMINFO, tmp_path, "") == GIB
    group(tmp_path, names, 20, 3, cache=5, inactive=5)  # the numbers are not of one moment
    assert memory_plan.free_bytes(MEMINFO, tmp_path, "") == 20 * GIB


def test_a_group_without_statistics_has_what_is_charged_to_it_in_use(tmp_path: Path) -> None:
    group(tmp_path, V2, 20, 19, inactive=5)
    for text in (None, "", "inactive_file", "inactive_file x", "active_file 1\ninactive_file \n"):
        (tmp_path / "memory.stat").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "memory.stat").write_text(text)
        assert memory_plan.free_bytes(MEMINFO, tmp_path, "") == pytest.approx(GIB, abs=1)


def test_each_group_that_we_are_in_gives_back_what_is_charged_to_it(tmp_path: Path) -> None:
    """The outer one has files of others', too, and less left all the same."""
    group(tmp_path / "batch/job7", V2, 8, 8, inactive=6)
    group(tmp_path / "batch", V2, 30, 30, inactive=9)
    assert memory_plan.free_bytes(MEMINFO, tmp_path, "0::/batch/job7\n") == 6 * GIB
    group(tmp_path / "batch", V2, 30, 30, inactive=4)
    assert memory_plan.free_bytes(MEMINFO, tmp_path, "0::/batch/job7\n") == 4 * GIB
    group(tmp_path / "batch", V2, 30, 30, inactive=9, shared=20)
    assert memory_plan.free_bytes(MEMINFO, tmp_path, "0::/batch/job7\n") == 6 * GIB


@pytest.mark.parametrize(
    ("limit_gib", "free_gib", "room_gib"), [(None, 32, 16), (8, 32, 4.75), (8, 4, 2), (3, 32, 0.75)]
)
def test_what_a_start_takes_for_a_while_is_left_by_the_machine_and_by_the_users_limit(
    limit_gib: int | None, free_gib: int, room_gib: float
) -> None:
    """Beside as many slots as there is room for, and the window."""
    limit = limit_gib * GIB if limit_gib is not None else None
    plan = memory_plan.make_plan(GIB, 0, 0, limit, 32 * GIB)
    assert memory_plan.restore_budget_bytes(plan, limit, free_gib * GIB) == int(room_gib * GIB)


def test_the_table_has_all_that_a_node_takes_and_sums_it_up() -> None:
    plans = {
        "a": memory_plan.make_plan(GIB, 2 * GIB, 0, 16 * GIB, 99 * GIB),
        "b": memory_plan.make_plan(2 * GIB, 0, 0, None, 32 * GIB),
    }
    loads = [{"node": "b", "keeps_bytes": 4 * GIB, "sends_bytes": 5, "receives_bytes": 6}]
    found = memory_plan.make_table(plans, 2, {"nodes": loads, "scratch_bytes": 96 * MIB})
    first, second = found["nodes"]
    assert (first["node"], first["slots_bytes"], first["kept_bytes"], first["copies_bytes"]) == (
        *("a", 2 * GIB, 2 * GIB, 0),
    )
    assert first["buffers_bytes"] == memory_plan.COMMIT_BYTES
    assert first["total_bytes"] == 4 * GIB + memory_plan.COMMIT_BYTES
    assert (first["allowed_bytes"], first["bound"]) == (16 * GIB, "ckpt.Limits(memory=)")
    assert (second["slots_bytes"], second["copies_bytes"]) == (4 * GIB, 4 * GIB)
    assert second["buffers_bytes"] == memory_plan.COMMIT_BYTES + 96 * MIB
    assert (second["sends_bytes"], second["receives_bytes"], found["nodes_left_out"]) == (5, 6, 0)


def test_on_one_node_there_is_one_row() -> None:
    (row,) = memory_plan.make_table({"": memory_plan.make_plan(MIB, 0, 0, None, GIB)}, 3, None)["nodes"]
    assert (row["slots_bytes"], row["total_bytes"]) == (3 * MIB, 5 * MIB)


def test_of_many_nodes_the_coordinators_and_the_fullest_are_shown() -> None:
    plans = {f"n{number}": memory_plan.make_plan(MIB, 0, 0, None, (100 + number % 50) * MIB) for number in range(1000)}
    found = memory_plan.make_table(plans, 3, None)
    assert (len(found["nodes"]), found["nodes_left_out"]) == (
        memory_plan.NODES_SHOWN,
        1000 - memory_plan.NODES_SHOWN,
    )
    assert found["nodes"][0]["node"] == "n0"
    left = [row["allowed_bytes"] - row["total_bytes"] for row in found["nodes"][1:]]
    assert left == sorted(left)
