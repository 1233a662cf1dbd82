"""Nodes that are on one machine are lost together: their copies lie elsewhere where they can, and else that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.ipc.failure_domains import HOST_PREFIX, find_lost_with_hosts, find_own_domains, relevant_domains
from ckpt.ipc.node_list import DOMAINS_MAX, encode_nodes, parse_nodes
from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Parity, Replicas, place

ONE, TWO = f"{HOST_PREFIX}1", f"{HOST_PREFIX}2"
PLENTY = 1 << 40


def test_a_node_tells_its_host_below_the_domains_that_it_was_given(tmp_path: Path) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("6f0c\n")
    (host,) = find_own_domains("", boot_id)
    assert host.startswith(HOST_PREFIX)
    assert "6f0c" not in host
    assert find_own_domains("zone-a/rack-7/", boot_id) == ["zone-a", "rack-7", host]
    boot_id.write_text("another")
    assert find_own_domains("", boot_id) != [host]
    assert find_own_domains("zone-a", tmp_path / "none") == ["zone-a"]
    assert find_own_domains("") == find_own_domains(""), "that of this machine"


def test_the_host_is_known_however_many_domains_a_node_was_given() -> None:
    named = [str(n) for n in range(DOMAINS_MAX + 3)]
    told = {"name": "a", "addresses": ["10.0.0.1:1"], "domains": [*named, ONE], "ranks": [0]}
    (node,) = parse_nodes(encode_nodes([told]), 1)
    assert node.domains == (*named[: DOMAINS_MAX - 1], ONE)
    (node,) = parse_nodes(encode_nodes([{**told, "domains": [*named[: DOMAINS_MAX - 1], ONE]}]), 1)
    assert node.domains == (*named[: DOMAINS_MAX - 1], ONE)


def test_a_host_counts_where_it_tells_nodes_apart_and_only_there() -> None:
    assert relevant_domains({"a": (ONE,), "b": (ONE,), "c": (TWO,)}) == {"a": (ONE,), "b": (ONE,), "c": ()}
    assert relevant_domains({"a": ("x", ONE), "b": ("y", ONE)}) == {"a": ("x",), "b": ("y",)}
    assert relevant_domains({"a": (), "b": ("x",), "c": (ONE,)}) == {"a": (), "b": ("x",), "c": ()}


@pytest.mark.parametrize("option", [Replicas(1), Parity(1, 1)])
def test_two_containers_of_one_host_do_not_keep_each_others_only_copy(option: Replicas | Parity) -> None:
    domains = {"a": (ONE,), "b": (TWO,), "c": (ONE,), "d": (TWO,)}
    nodes = [PlacementNode(name, 1, PLENTY, each) for name, each in relevant_domains(domains).items()]
    assert find_lost_with_hosts(domains, place(nodes, option)) == {}
    blind = place([PlacementNode(name, 1, PLENTY) for name in domains], option)
    assert find_lost_with_hosts(domains, blind) == {ONE: ["a", "c"], TWO: ["b", "d"]}


def test_where_all_are_on_one_host_they_keep_each_others_copies_and_that_is_known() -> None:
    domains = {"a": (ONE,), "b": (ONE,)}
    made = place(
        [PlacementNode(name, 1, PLENTY, each) for name, each in relevant_domains(domains).items()], Replicas(1)
    )
    assert [kept.holders for kept in made.protected_states] == [("b",), ("a",)]
    assert find_lost_with_hosts(domains, made) == {ONE: ["a", "b"]}
