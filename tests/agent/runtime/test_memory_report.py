"""All that is taken of memory is in one table, before it is taken."""

from __future__ import annotations

from ckpt.agent.runtime import memory_plan, memory_report

GIB = 1 << 30
MIB = 1 << 20


def test_the_table_has_all_that_a_node_takes_and_sums_it_up() -> None:
    plans = {
        "a": memory_plan.make_plan(GIB, 2 * GIB, 0, 16 * GIB, 99 * GIB),
        "b": memory_plan.make_plan(2 * GIB, 0, 0, None, 32 * GIB),
    }
    loads = [{"node": "b", "keeps_bytes": 4 * GIB, "sends_bytes": 5, "receives_bytes": 6}]
    found = memory_report.make_table(plans, 2, {"nodes": loads, "scratch_bytes": 96 * MIB})
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
    (row,) = memory_report.make_table({"": memory_plan.make_plan(MIB, 0, 0, None, GIB)}, 3, None)["nodes"]
    assert (row["slots_bytes"], row["total_bytes"]) == (3 * MIB, 5 * MIB)


def test_of_many_nodes_the_coordinators_and_the_fullest_are_shown() -> None:
    plans = {f"n{number}": memory_plan.make_plan(MIB, 0, 0, None, (100 + number % 50) * MIB) for number in range(1000)}
    found = memory_report.make_table(plans, 3, None)
    assert (len(found["nodes"]), found["nodes_left_out"]) == (
        memory_report.NODES_SHOWN,
        1000 - memory_report.NODES_SHOWN,
    )
    assert found["nodes"][0]["node"] == "n0"
    left = [row["allowed_bytes"] - row["total_bytes"] for row in found["nodes"][1:]]
    assert left == sorted(left)
