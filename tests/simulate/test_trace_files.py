"""Every format is read as it is documented, and what no trace can hold is refused with its line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.simulate import trace_files
from ckpt.simulate.generators import Fleet, bulk
from ckpt.simulate.trace import EventKind, Trace, TraceEvent
from ckpt.simulate.trace_files import load, save
from tests.simulate.lives import check_trace, counts, losses

ADD, REMOVE, CRASH = EventKind.ADD, EventKind.REMOVE, EventKind.CRASH


def read(folder: Path, text: str, seed: int = 0) -> Trace:
    file = folder / "zone.txt"
    file.write_text(text)
    trace = load(file, seed)
    check_trace(trace)
    assert trace.name == "zone"
    return trace


def test_a_list_of_counts_becomes_nodes_and_a_mean_price(tmp_path: Path) -> None:
    body = {"metadata": {"gap_seconds": 300}, "data": [0, 3, 3, 1, 2], "prices": [1, 1, 2, 2, 4.5]}
    trace = read(tmp_path, json.dumps(body, indent=1))
    assert trace.span_s == 1500
    assert trace.price_node_hour == 2.1
    assert counts(trace) == {300: 3, 900: 1, 1200: 2}
    assert losses(trace) == [900, 900]
    assert read(tmp_path, '{"metadata": {"gap_seconds": 30}, "data": [0, 0]}') == Trace("zone", 60, ())


def test_the_seed_chooses_which_nodes_a_drop_takes(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 60}, "data": [16, 12]})
    gone = [{e.node for e in read(tmp_path, text, seed).events if e.kind is REMOVE} for seed in (1, 1, 2)]
    assert gone[0] == gone[1] != gone[2]
    assert [len(each) for each in gone] == [4, 4, 4]


def test_a_drop_takes_each_node_equally_often(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 60}, "data": [4, 3]})
    gone = [e.node for seed in range(400) for e in read(tmp_path, text, seed).events if e.kind is REMOVE]
    assert {gone.count(f"node-{n}") // 34 for n in range(1, 5)} == {2, 3}  # 68 to 135, of 100 expected


def test_node_events_in_milliseconds(tmp_path: Path) -> None:
    trace = read(tmp_path, "0,add,node1\r\n0,add,node2\r\n60000,remove,node1\r\n90500,add,node3\r\n")
    assert trace.events == (
        TraceEvent(0, ADD, "node1"),
        TraceEvent(0, ADD, "node2"),
        TraceEvent(60, REMOVE, "node1"),
        TraceEvent(90.5, ADD, "node3"),
    )
    assert trace.span_s == 90.5


def test_dated_counts_are_sorted_and_begin_at_0(tmp_path: Path) -> None:
    lines = ["2021-12-11, 23:59:00, 5", "2021-12-12, 00:02:00, 4", "2021-12-12, 00:01:00, 7", "2021-12-12, 00:02:30, 4"]
    trace = read(tmp_path, "\n".join(lines))
    assert counts(trace) == {0: 5, 120: 7, 180: 4}
    assert trace.span_s == 210


def test_counts_in_milliseconds_may_have_several_rows_of_one_instant(tmp_path: Path) -> None:
    """A node that comes at an instant is not taken by a drop of the same instant."""
    trace = read(tmp_path, "0,1\n0,2\n0,3\n60000,2\n60000,1\n60000,2\n120000,0\n120000,1\n120000,0")
    assert counts(trace) == {0: 3, 60: 2, 120: 0}
    assert [(e.time_s, e.kind) for e in trace.events[3:]] == [
        *((60, REMOVE), (60, REMOVE), (60, ADD)),
        *((120, REMOVE), (120, REMOVE)),
    ]


def test_operations_of_which_some_change_no_node(tmp_path: Path) -> None:
    lines = [
        '[0, "add", {"nodes": ["node-0", "node-1", "node-2"], "duration": 60000}]',
        '[60000, "no-op", {"nodes": [], "duration": 60000}]',
        '[120000, "remove", {"nodes": ["node-2", "node-0"], "duration": 60000}]',
        '[180000, "migration", {"nodes": [], "duration": 60000, "strategy": [8, 4]}]',
    ]
    trace = read(tmp_path, "\n".join(lines))
    assert counts(trace) == {0: 3, 120: 1}
    assert trace.span_s == 240


def test_the_formats_own_columns(tmp_path: Path) -> None:
    trace = read(tmp_path, "time_s,event,node\n0,add,a\n1.5,crash,a\n2,remove,a\n3,add,a\n10,end\n")
    assert trace.events == (
        TraceEvent(0, ADD, "a"),
        TraceEvent(1.5, CRASH, "a"),
        TraceEvent(2, REMOVE, "a"),
        TraceEvent(3, ADD, "a#2"),
    )
    assert trace.span_s == 10
    pooled = read(tmp_path, "time_s,event,node,pool\n0,add,a,east\n5,remove,a,\n")
    assert pooled.events[1] == TraceEvent(5, REMOVE, "a", "east")
    assert pooled.span_s == 5


def test_a_name_that_looks_like_a_later_life_is_another_node(tmp_path: Path) -> None:
    trace = read(tmp_path, "time_s,event,node\n0,add,a#2\n0,add,a\n1,remove,a\n2,add,a\n3,remove,a\n3,remove,a#2\n")
    assert [event.node for event in trace.events] == ["a#2", "a", "a", "a#3", "a#3", "a#2"]


@hypothesis.given(st.integers(0, 10**6), st.floats(0.1, 50), st.floats(0, 3000))
def test_what_is_written_is_read_back(seed: int, hours: float, provision_s: float) -> None:
    made = bulk(Fleet(6, hours, seed, provision_s, crashes=0.1), mtbf_h=3, pools=2, bulk_mtbf_h=2)
    file = Path(os.environ["CKPT_RUNTIME_DIR"]) / "bulk.csv"
    save(made, file)
    assert load(file) == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (" \n\n", "empty"),
        ("hello", "line 1: 'hello'; expected a trace"),
        ("0,add,a\n\n5,remove,b", "line 3: 'remove b'; expected a node that is there"),
        ("0,add,a\n5,add,a", "line 2: 'add a'; expected a node that is not there yet"),
        ("0,add,a\n5,remove,a\n6,remove,a", "line 3: 'remove a'"),
        ("0,add,a\n5,gone,a", "line 2: '5,gone,a'; expected time_ms,add|remove,node"),
        ("0,add,a\n5,add", "line 2"),
        ("0,add,", "line 1: ''; expected the name of a node"),
        ("0,add,a\x07", "expected the name of a node"),
        ("0,add," + "a" * 201, "expected the name of a node"),
        ("-1,add,a", "line 1: '-1'; expected a number of milliseconds"),
        ("nan,add,a", "'nan'; expected a number of milliseconds"),
        ("1e300,add,a", "'1e300'"),
        ("5,add,a\n4,add,b", "line 2: '4,add,b'; expected a time that is not before"),
        ("0,1\n5,2\n4,3", "line 3: '4,3'; expected a time that is not before"),
        ("0,1\n5,-2", "line 2: '-2'; expected a whole number of nodes"),
        ("0,1.5", "line 1: '1.5'; expected a whole number"),
        ("0,100001", "a whole number of nodes, from 0 to 100000"),
        ("0,1\n5", "line 2: '5'; expected time_ms,node count"),
        ("2021-12-11, 11:11:30, 55\n2021-12-11, 11:61:30, 5", "line 2"),
        ("2021-12-11, 11:11:30, 55\n2021-12-11, 5", "YYYY-MM-DD, HH:MM:SS, node count"),
        ("2021-12-11, 11:11:30, 5.5", "line 1: '5.5'"),
        ("time_s,event,name", "line 1"),
        ("time_s,event,node", "no row follows"),
        ("time_s,event,node\n0,start,a", "line 2: '0,start,a'; expected time_s,add|remove|crash,node"),
        ("time_s,event,node\n0,end\n1,add,a", "line 2"),
        ("time_s,event,node\n0,add,a,zone", "line 2"),
        ("time_s,event,node\n0,crash,a", "line 2: 'crash a'"),
        ("time_s,event,node\n5,add,a\n4,end", "line 3: '4,end'; expected a time that is not before"),
        ("time_s,event,node,pool\n5,add,a,\x01", "a pool"),
        ("{", "no JSON"),
        ("{}", "gap_seconds: None; expected a number of seconds"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "more than 0"),
        ('{"metadata": {"gap_seconds": true}, "data": [1]}', "gap_seconds: True"),
        ('{"metadata": {"gap_seconds": 30}, "data": []}', "data: []; expected a list"),
        ('{"metadata": {"gap_seconds": 30}, "data": [1, 2.0]}', "data[1]: 2.0; expected a whole number"),
        ('{"metadata": {"gap_seconds": 30}, "data": [1, true]}', "data[1]: True"),
        ('{"metadata": {"gap_seconds": 30}, "data": [1, -1]}', "data[1]: -1"),
        ('{"metadata": {"gap_seconds": 30}, "data": [1, 2], "prices": [1]}', "a list of 2 prices"),
        ('{"metadata": {"gap_seconds": 30}, "data": [1, 2], "prices": [1, NaN]}', "prices[1]: nan"),
        ("[" * 100_000, "line 1"),
        ('[0, "add", {"nodes": ["a"]}]\n[5, "grow", {"nodes": []}]', "line 2"),
        ('[0, "add", {"nodes": [5]}]', "line 1: 5; expected the name"),
        ('[0, "add", {"nodes": ["a,b"]}]', "without a comma"),
        ('[NaN, "add", {"nodes": ["a"]}]', "line 1: nan"),
        ('[0, "add", {"nodes": ["a"], "duration": -1}]', "line 1: duration: -1"),
        ('[0, "add", ["a"]]', "line 1"),
        ('[9, "add", {"nodes": ["a"]}]\n[5, "no-op", {"nodes": []}]', "line 2"),
    ],
)
def test_a_bad_row_is_refused_with_its_place_and_what_is_expected(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert str(tmp_path / "zone.txt") in str(caught.value)
    assert len(str(caught.value)) < 500


def test_what_is_no_text_or_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    with pytest.raises(UsageError, match="No such file"):
        load(file)
    with pytest.raises(UsageError, match="Is a directory"):
        load(tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        save(Trace("x", 1, ()), file / "y")
    file.write_bytes(b"0,add,\xff")
    with pytest.raises(UsageError, match="byte 6 is no UTF-8"):
        load(file)
    with open(file, "wb") as sparse:
        sparse.truncate(trace_files.FILE_BYTES_MAX + 1)
    with pytest.raises(UsageError, match="more than 64 MiB"):
        load(file)
    file.write_text(json.dumps({"metadata": {"gap_seconds": 1}, "data": [0, 50] * 20}))
    monkeypatch.setattr(trace_files, "EVENTS_MAX", 1000)
    with pytest.raises(UsageError, match="more than 1000 node events"):
        load(file)
    file.write_text("\n".join(f"{n},add,node{n}" for n in range(1001)))
    with pytest.raises(UsageError, match="more than 1000 node events"):
        load(file)


def test_the_public_traces_are_read() -> None:
    folder = os.environ.get("CKPT_TRACES")
    if not folder:
        pytest.skip("needs the public traces: CKPT_TRACES names their folder")
    files = [file for ending in ("*.json", "*.csv", "*.txt") for file in Path(folder).rglob(ending)]
    assert files
    for file in files:
        trace = load(file)
        check_trace(trace)
        assert trace.span_s > 0
    bamboo = [load(file) for file in files if file.name == "p3-trace.csv"]
    assert [(len(trace.events), len(losses(trace)), len(set(losses(trace)))) for trace in bamboo] in (
        [],
        [(344, 167, 79)],
    )
