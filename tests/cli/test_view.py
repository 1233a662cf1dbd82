"""The live view of `ckpt watch` where there is little room for it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ckpt.cli import view, view_rows

COUNT = {"number": 3, "seconds": 1.2, "last_s": 0.4}
SAFE = {"step": 60, "version": "60.0", "age_s": 8.0}
ACCOUNT: dict[str, Any] = {
    "phase": "training",
    "phase_s": 123.0,
    "elapsed_s": 200.0,
    "stall_s": 5.0,
    "lost_s": 10.0,
    "recovery_s": 10.0,
    "starting_s": 25.0,
    "ending_s": 0.0,
    "goodput": 0.75,
    "failures": 1,
    "lost_steps": 3,
    "ended_step": 99,
    "snapshots": COUNT,
    "given_up": 1,
    "commits": COUNT,
    "commits_failed": 1,
    "recoveries": {"number": 1, "seconds": 3.0, "last_s": 3.0},
    "raw_bytes": 10**9,
    "saved_bytes": {"local": 10**9, "store": 10**8},
    "restored_bytes": {"local": 5},
    "safe": {"local": SAFE, "store": SAFE},
}
JOB: dict[str, Any] = {
    "launch": "demo",
    "epoch": "00000002-421ce3c4f78d077b",
    "ranks": ["here"] * 8,
    "step_s": 0.05,
    "superseded_by": None,
    "error": None,
    "intervals": {
        name: {"interval_s": 42.4, "interval_steps": None, "by": "rates"} for name in ("local", "peer", "store")
    },
    "under_way": [{"level": "store", "state": "committed", "step": 60, "for_s": 3.0, "asked": "appointed"}],
    "policy": ["a snapshot every 42.4 s: the least expected loss; it stalls 10.1 ms, and so on and so on"] * 2,
    "rates": {name: {"per_s": 1e-6, "seen": 0} for name in ("process", "node", "preemption", "job")},
    "memory": {
        "slots": 3,
        "slot_bytes": 10**7,
        "kept_bytes": 0,
        "commit_bytes": 10**7,
        "total_bytes": 4 * 10**7,
        "allowed_bytes": 10**10,
        "bound": "the machine",
    },
    "notices": {
        "standing": [{"left_s": 25.0, "certain": True, "source": "aws", "key": "spot", "nodes": [""]}],
        "needs_s": 12.0,
    },
}
STATUS: dict[str, Any] = {
    "url": "s3://bucket/run",
    "pid": 24638,
    "host": "node3",
    "up_s": 13.6,
    "resident_bytes": 8e7,
    "metrics": "127.0.0.1:9400",
    "job": JOB,
    "account": ACCOUNT,
    "events": [
        {"event": "commit.failed", "message": f"step {step} was not committed: no answer", "loud": True, "age_s": 3.0}
        for step in range(60, 65)
    ],
    "predictions": {"sources": {}, "standing": []},
}


def drawn(width: int, height: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, height=height, highlight=False, markup=False).print(view.Fitted(STATUS))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 20), (60, 18), (44, 22)])
def test_a_small_terminal_shows_what_one_has_to_know_and_says_what_else_there_is(width: int, height: int) -> None:
    lines = drawn(width, height)
    text = "\n".join(lines)
    assert len(lines) <= height
    assert "this machine goes away in 25 s" in text
    assert "store" in text
    assert lines[-1].startswith("a higher window also shows memory")


def test_the_newest_event_stays_longer_than_those_before_it() -> None:
    text = "\n".join(drawn(80, 24))
    assert "step 64 was not committed" in text
    assert "step 63 was not committed" not in text


@pytest.mark.parametrize("phase", ["idle", "starting", "training", "ending", "down"])
def test_that_more_may_be_lost_is_said_only_until_training_goes_on(phase: str) -> None:
    (losses,) = [text for name, text, _ in view_rows.cost_rows({**ACCOUNT, "phase": phase}) if name == "losses"]
    assert ("known once training goes on" in losses) == (phase in ("starting", "down"))


def test_a_high_terminal_shows_everything() -> None:
    lines = drawn(100, 60)
    assert {"run", "agent", "job", "why", "failures", "memory", "events"} <= {line.partition(" ")[0] for line in lines}
    assert "a higher window" not in lines[-1]


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60, 70, 80])
def test_of_the_table_of_levels_a_narrow_terminal_shows_whole_columns(width: int) -> None:
    lines = drawn(width, 100)
    at = next(number for number, line in enumerate(lines) if line.startswith("level"))
    for line in lines[at : at + 5]:
        assert "…" not in line
    assert "60" in next(line for line in lines[at:] if line.startswith("store")).split()


def test_of_several_nodes_each_has_a_line_with_its_memory_and_traffic_up_to_a_few() -> None:
    row = {f"{name}_bytes": 1 << 20 for name in ("slots", "kept", "copies", "buffers", "total", "sends", "receives")}
    nodes = [{"node": f"n{number}", "allowed_bytes": 1 << 30, "bound": "", **row} for number in range(12)]
    job = {**JOB, "memory": {**JOB["memory"], "nodes": nodes, "nodes_left_out": 100}}
    lines = view.text({**STATUS, "job": job}, 200).splitlines()
    shown = [line for line in lines if "sends 1.0 MiB and gets 1.0 MiB each time" in line]
    assert len(shown) == view_rows.NODES
    assert "copies 1.0 MiB" in shown[0]
    assert any("and 104 more nodes" in line for line in lines)
    job["memory"].update(nodes=nodes[: view_rows.NODES], nodes_left_out=1)
    assert "and 1 more node (--json)" in view.text({**STATUS, "job": job}, 200)


def test_memory_only_nodes_that_the_job_names_have_a_line_each_and_one_that_is_not_there_says_why() -> None:
    lenders = [
        {
            "address": "10.0.0.7:7777",
            "name": "a",
            "lends_bytes": 64 << 30,
            "domains": ["zone-a", "rack-7", "host-b980d6ef2c31"],
            "error": None,
        },
        {"address": "10.0.0.8:7777", "error": "the connection has ended"},
        {"address": "10.0.0.9:7777", "error": None},
    ]
    lines = view.text({**STATUS, "lenders": lenders}, 200).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("borrows"))
    assert lines[at].endswith("10.0.0.7:7777 lends 64.0 GiB, in zone-a/rack-7")
    assert "10.0.0.8:7777 is not there: the connection has ended" in lines[at + 1]
    assert "10.0.0.9:7777 is not there: it has not answered yet" in lines[at + 2]


def test_a_node_is_called_by_its_agents_name() -> None:
    nodes = one, two = "gpu-1:17-a1b2c3", "gpu-2:18-a1b2c3"
    row = {f"{name}_bytes": 1 << 20 for name in ("slots", "kept", "copies", "buffers", "total", "sends", "receives")}
    rows = [{"node": name, "allowed_bytes": 1 << 30, "bound": "", **row} for name in nodes]
    job = {**JOB, "memory": {**JOB["memory"], "nodes": rows, "nodes_left_out": 0}}
    source = dict.fromkeys(("outcomes", "false", "missed", "true", "late", "precision", "recall"), 0)
    foreseen = {
        "sources": {"memory": {**source, "proven": True, "lead_s": None}},
        "standing": [{"node": two, "source": "memory", "for_s": 1.0}],
    }
    text = view.text({**STATUS, "name": one, "job": job, "predictions": foreseen}, 200)
    agent = next(line for line in text.splitlines() if line.startswith("agent"))
    assert "on node3, up" in agent
    assert agent.endswith(f"; {one}")
    assert f"{two}: slots" in text
    assert f"{two} may fail" in text
    follows = {"epoch": "e", "ranks": [4, 5], "coordinator": one, "connected": True}
    followed = {**STATUS, "name": two, "job": None, "account": None, "followed_jobs": [follows]}
    text = view.text(followed, 200)
    assert f"watch it at its coordinator, {one}\n" in text
    follows["connected"] = False
    assert f"{one}, from which this node is cut off" in view.text(followed, 200)


def test_who_is_cut_off_from_the_coordinator_is_named_and_what_follows() -> None:
    cut_off = [
        {"node": "gpu-2:18-a1b2c3", "ranks": [4, 5, 6, 7], "for_s": 42.0},
        {"node": None, "ranks": [1], "for_s": 3.0},
    ]
    lines = view.text({**STATUS, "job": {**JOB, "cut_off": cut_off}}, 200).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("cut off"))
    then = "no snapshot is taken until it is connected again"
    assert f"node gpu-2:18-a1b2c3, for 42 s: {then}" in lines[at]
    assert f"1 rank of this node, for 3 s: {then}" in lines[at + 1]


def test_a_notice_to_another_node_is_not_said_to_be_one_to_this_machine() -> None:
    two = "gpu-2:18-a1b2c3"
    one = {"left_s": 25.0, "certain": True, "source": "aws", "key": f"spot on node {two}", "nodes": [two]}
    # Ranks of several nodes got one signal: its key names no node.
    signal = {**one, "source": "signal", "key": "SIGTERM"}
    standing = [one, signal, {**signal, "nodes": ["", two]}]
    notices = {**JOB["notices"], "standing": standing}
    text = view.text({**STATUS, "job": {**JOB, "notices": notices}}, 200)
    assert f"node {two} goes away in 25 s (aws spot); 12 s are needed" in text
    assert f" node {two} goes away in 25 s (signal SIGTERM)" in text
    assert f"this machine, node {two} go away in 25 s (signal SIGTERM)" in text


FOLLOWS = {"epoch": "e", "ranks": [1], "coordinator": "a", "connected": True}


@pytest.mark.parametrize("job", [None, {**JOB, "superseded_by": "e, begun on other nodes"}])
def test_a_former_coordinator_does_not_show_its_old_account_as_that_of_the_job(job: dict[str, Any] | None) -> None:
    text = view.text({**STATUS, "job": job, "followed_jobs": [FOLLOWS]}, 200)
    assert "watch it at its coordinator, a\n" in text
    for row in ("goodput", "losses", "commits", "store", "launch"):
        assert f"\n{row}" not in text


@pytest.mark.parametrize("more", [{"followed_jobs": [FOLLOWS]}, {}])
def test_of_a_node_that_leads_no_job_nothing_is_counted_as_if_it_saved_nothing(more: dict[str, Any]) -> None:
    none = {**ACCOUNT, "goodput": None, "failures": 0, "restored_bytes": {}, "given_up": 0, "commits_failed": 0}
    none |= {name: {"number": 0, "seconds": 0.0, "last_s": 0.0} for name in ("snapshots", "commits", "recoveries")}
    text = view.text({**STATUS, "job": None, "account": none, **more}, 200)
    assert "0 complete" not in text
    assert "0 done" not in text
    once = {**none, "commits": {"number": 1, "seconds": 2.0, "last_s": 2.0}}  # of what others left
    assert ("1 done" in view.text({**STATUS, "job": None, "account": once, **more}, 200)) == (not more)
