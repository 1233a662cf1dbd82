"""Rows of the view of `ckpt watch`: costs, memory, notices and predictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt.cli import out
from ckpt.ipc.failure_domains import without_host
from ckpt.policy.adaptive import format_duration
from ckpt.types import format_count

Facts = dict[str, Any]
Row = tuple[str, str, str]  # label, text, style; a row without a label continues the one before

NODES = 8
WHERE = {"local": "this host's memory", "peer": "other hosts' memory", "store": "the store", "none": "nothing"}
PARTS = ("stall", "lost", "recovery", "starting", "ending")


def cost_rows(account: Facts) -> Iterator[Row]:
    if account["goodput"] is not None:
        parts = (f"{name} {_share(account[f'{name}_s'], account['elapsed_s'])}" for name in PARTS)
        yield "goodput", f"{account['goodput']:.1%} of {format_duration(account['elapsed_s'])}; {', '.join(parts)}", ""
    snapshots, commits = account["snapshots"], account["commits"]
    text = f"{snapshots['number']} complete"
    if snapshots["number"]:
        text += f", training paused {_mean_text(snapshots)}"
    yield "snapshots", text + (f"; {account['given_up']} given up" if account["given_up"] else ""), ""
    text = f"{commits['number']} done"
    if commits["number"]:
        stored = account["saved_bytes"].get("store", 0)
        text += (
            f", {_mean_text(commits)}, {out.format_size(stored)} written for {out.format_size(account['raw_bytes'])}"
        )
    failed = account["commits_failed"]
    yield "commits", text + (f"; {failed} failed" if failed else ""), "yellow" if failed else ""
    if account["failures"]:
        lost = format_count(account["lost_steps"], "step")
        text = f"{account['failures']}: {lost} lost ({format_duration(account['lost_s'])})"
        if account["phase"] in ("down", "starting"):
            text += "; those of this failure are known once training goes on"
        if account["recoveries"]["number"]:
            text += f"; until training went on {_mean_text(account['recoveries'])}"
        yield "losses", text, "yellow"
    restored = [
        f"{out.format_size(count)} from {WHERE[level]}" for level, count in sorted(account["restored_bytes"].items())
    ]
    if restored:
        yield "restored", ", ".join(restored), ""


def _mean_text(count: Facts) -> str:
    return f"{format_duration(count['seconds'] / count['number'])} each (the last {format_duration(count['last_s'])})"


def _share(part_s: float, whole_s: float) -> str:
    return f"{format_duration(part_s)} ({part_s / whole_s:.2%})" if part_s and whole_s else "0"


def memory_rows(plan: Facts | None) -> Iterator[Row]:
    if plan is None:
        return
    text = f"{format_count(plan['slots'], 'slot')} of {out.format_size(plan['slot_bytes'])}, "
    text += f"{out.format_size(plan['kept_bytes'])} kept from before, "
    text += f"{out.format_size(plan['commit_bytes'])} for commits: {out.format_size(plan['total_bytes'])} of "
    text += f"{out.format_size(plan['allowed_bytes'])} ({plan['bound']})"
    yield "memory", text, "" if plan["slots"] > 2 else "yellow"
    rows = plan.get("nodes", [])
    if len(rows) < 2:
        return
    for row in rows[:NODES]:
        uses = ", ".join(
            f"{name} {out.format_size(row[f'{name}_bytes'])}" for name in ("slots", "kept", "copies", "buffers")
        )
        text = (
            f"{row['node']}: {uses}: {out.format_size(row['total_bytes'])} of {out.format_size(row['allowed_bytes'])}"
        )
        if row["sends_bytes"] or row["receives_bytes"]:
            sends, gets = out.format_size(row["sends_bytes"]), out.format_size(row["receives_bytes"])
            text += f"; sends {sends} and gets {gets} each time"
        yield "", text, "" if row["total_bytes"] <= row["allowed_bytes"] else "yellow"
    left_out = len(rows) - len(rows[:NODES]) + plan["nodes_left_out"]
    if left_out:
        yield "", f"and {format_count(left_out, 'more node')} (--json)", ""


def memory_node_rows(lenders: list[Facts]) -> Iterator[Row]:
    """Rows for the memory-only nodes that the job names."""
    for number, each in enumerate(lenders[:NODES]):
        if "lends_bytes" in each:
            domains = without_host(each["domains"])
            domain = f", in {'/'.join(domains)}" if domains else ""
            text, style = f"{each['address']} lends {out.format_size(each['lends_bytes'])}{domain}", ""
        else:
            text, style = f"{each['address']} is not there: {each['error'] or 'it has not answered yet'}", "yellow"
        yield "borrows" * (not number), text, style
    if len(lenders) > NODES:
        yield "", f"and {len(lenders) - NODES} more memory-only nodes (--json)", ""


def _node_text(name: str) -> str:
    return f"node {name}" if name else "this machine"


def notice_rows(notices: Facts) -> Iterator[Row]:
    for number, each in enumerate(notices["standing"]):
        nodes = list(map(_node_text, each["nodes"]))
        machines = nodes[0] if len(nodes) == 1 else f"{', '.join(nodes[:NODES])}{', ...' * (len(nodes) > NODES)}"
        go = f"go{'es' * (len(nodes) == 1)} away" if each["certain"] else "may go away"
        # The relay adds the node's name to the key: see agent.preemption.notice_relay.
        key = each["key"].partition(" on node ")[0]
        text = f"{machines} {go} in {each['left_s']:.0f} s ({each['source']} {key})"
        if not number:
            text += f"; {notices['needs_s']:.0f} s are needed"
        yield "notices" * (not number), text, "red" if each["certain"] else "yellow"


def prediction_rows(found: Facts | None) -> Iterator[Row]:
    """Rows for the alarms and the quality of each proven source of predictions. The other sources are only counted:
    nothing follows from their alarms."""
    if not found or not found["sources"]:
        return
    number = 0
    proven = {name: source for name, source in found["sources"].items() if source["proven"]}
    for each in found["standing"]:
        if each["source"] not in proven:
            continue
        where = _node_text(each["node"])
        yield "foreseen" * (not number), f"{where} may fail, says {each['source']}", "red"
        number += 1
    for name, source in proven.items():
        alarms = format_count(round(source["false"]), "false alarm")
        missed = format_count(round(source["missed"]), "failure")
        text = f"{name}: proven, {format_count(source['outcomes'], 'outcome')} "
        text += f"({source['true']:.0f} true, {source['late']:.0f} late, {alarms}, {missed} missed); "
        text += f"precision at least {source['precision']:.0%}, recall {source['recall']:.0%}"
        text += f", lead {format_duration(source['lead_s'])}" if source["lead_s"] is not None else ""
        yield "foreseen" * (not number), text, ""
        number += 1
    if rest := len(found["sources"]) - len(proven):
        text = f"{format_count(rest, 'other source')} of predictions, not" if proven else ""
        text = text or f"{format_count(rest, 'source')} of predictions, {'not' if rest == 1 else 'none'}"
        yield "foreseen" * (not number), f"{text} proven yet (--json)", ""
