"""Who keeps whose state."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.placement.groups import PlacementNode, group_nodes
from ckpt.placement.parity_placement import ParityGroup
from ckpt.placement.placement import GENERATIONS, Parity, Placement, Replicas, place
from ckpt.placement.stripes import plan_stripes

PAGE = 4096
STATE = 60 * PAGE
AMPLE = 1 << 40


def trainer(name: str, *domains: str, nbytes: int = STATE, lend: int = AMPLE, **more) -> PlacementNode:
    return PlacementNode(name, nbytes, lend, domains, **more)


def memory_only(name: str, *domains: str, lend: int = AMPLE, **more) -> PlacementNode:
    return PlacementNode(name, 0, lend, domains, has_state=False, **more)


def many(count: int, *domains: str) -> list[PlacementNode]:
    """`domains`: templates over the node's number, such as "rack{0}"."""
    return [trainer(f"n{i:02d}", *(domain.format(i) for domain in domains)) for i in range(count)]


def holders(placement: Placement) -> dict[str, tuple[str, ...]]:
    return {kept.node: kept.holders for kept in placement.protected_states}


def members(placement: Placement) -> list[tuple[str, ...]]:
    return [group.members for group in placement.groups]


@st.composite
def jobs(draw: st.DrawFn) -> list[PlacementNode]:
    """Any nodes: some without state, room or domains, some memory-only; equal or unequal links."""
    count = draw(st.integers(1, 9))
    depth = draw(st.integers(0, 2))
    unequal, speeds = draw(st.booleans()), st.sampled_from((0, 1e6, 1e9))
    found = []
    for i in range(count):
        trains = draw(st.integers(0, 4)) > 0
        found.append(
            PlacementNode(
                f"n{i}",
                draw(st.sampled_from((0, 1, PAGE, 3 * PAGE + 5, STATE))) if trains else 0,
                draw(st.sampled_from((0, 3 * PAGE, 2 * STATE, 5 * STATE, AMPLE))),
                tuple(draw(st.sampled_from("abc")) for _ in range(draw(st.integers(0, depth)))),
                link_bytes_s=min(draw(speeds), draw(speeds)) if unequal else 0,
                has_state=trains,
            )
        )
    return found


options = st.one_of(st.builds(Replicas, st.integers(1, 3)), st.builds(Parity, st.integers(1, 4), st.integers(1, 2)))


def is_sound(nodes: list[PlacementNode], placement: Placement, option: Replicas | Parity) -> None:
    """What holds for every placement."""
    by_id = {node.id: node for node in nodes}
    asked = option.n if isinstance(option, Replicas) else option.parity
    assert [kept.node for kept in placement.protected_states] == sorted(node.id for node in nodes if node.has_state)
    assert sorted(itertools.chain(*(group.home_members for group in placement.groups))) == sorted(by_id)
    for kept in placement.protected_states:
        assert kept.node not in kept.holders
        assert len(set(kept.holders)) == len(kept.holders)
        assert 0 <= kept.losses_max <= asked
    for load in placement.loads:
        assert 0 <= load.keeps_all_bytes <= load.lend_bytes == by_id[load.node].lend_bytes
        assert load.keeps_all_bytes == load.keeps_bytes * GENERATIONS
    assert sum(load.sends_bytes for load in placement.loads) == sum(load.receives_bytes for load in placement.loads)
    assert {s.node: (s.requested, s.achieved) for s in placement.shortfalls} == {
        kept.node: (asked, kept.losses_max) for kept in placement.protected_states if kept.losses_max < asked
    }
    promised = {kept.node: kept.losses_max for kept in placement.protected_states}
    for count in range(min(asked, len(nodes)) + 1):
        for gone in itertools.combinations(by_id, count):
            assert not {id for id in placement.lost_nodes(gone) if promised[id] >= count}


@given(jobs(), options)
@settings(max_examples=200)
def test_every_state_survives_what_is_promised_within_the_budgets_and_not_by_itself(nodes, option):
    is_sound(nodes, place(nodes, option), option)


@given(jobs(), options, st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_does_not_matter(nodes, option, rng):
    shuffled = list(nodes)
    rng.shuffle(shuffled)
    assert place(shuffled, option) == place(nodes, option)


@given(jobs(), options, jobs(), options)
def test_a_placement_that_replaces_another_is_as_sound(nodes, option, earlier, other):
    before = place(earlier, other)
    placement = place(nodes, option, before)
    is_sound(nodes, placement, option)
    assert place(nodes, option, placement) == place(nodes, option, place(nodes, option, placement))


@given(jobs(), st.integers(1, 3))
def test_no_copy_is_left_out_or_left_in_its_domain_while_a_node_has_room(nodes, n):
    placement = place(nodes, Replicas(n))
    by_id = {node.id: node for node in nodes}
    room = {load.node: by_id[load.node].lend_bytes // GENERATIONS - load.keeps_bytes for load in placement.loads}
    depth = max(len(node.domains) for node in nodes)
    for kept in placement.protected_states:
        owner = by_id[kept.node]
        free = [id for id, left in room.items() if id not in (kept.node, *kept.holders) and left >= owner.state_bytes]
        if len(kept.holders) < min(n, len(nodes) - 1):
            assert not free
        for level in range(depth if kept.holders else 0):
            if all(by_id[id].domain(level) == owner.domain(level) for id in kept.holders):
                assert [id for id in free if by_id[id].domain(level) != owner.domain(level)] == []


@given(jobs(), st.integers(1, 4), st.integers(1, 2))
def test_parity_is_left_out_only_where_all_that_is_left_together_cannot_keep_it(nodes, data, parity):
    placement = place(nodes, Parity(data, parity))
    rooms = [
        node.lend_bytes // GENERATIONS - load.keeps_bytes for node, load in zip(nodes, placement.loads, strict=True)
    ]
    for group in placement.groups:
        sizes = [node.state_bytes if node.id in group.home_members else 0 for node in nodes]
        if not group.parity and any(sizes):
            assert plan_stripes(sizes, rooms, 1) is None


# -- who is put together


@given(
    st.lists(st.sampled_from("abcde"), min_size=2, max_size=12), st.integers(2, 4), st.randoms(use_true_random=False)
)
def test_groups_of_equal_sizes_get_no_more_of_a_domain_than_its_share(labels, count, rng):
    labels = labels[: len(labels) // count * count]
    if not labels:
        return
    nodes = [trainer(f"n{i:02d}", label, f"{label}{rng.randrange(2)}") for i, label in enumerate(labels)]
    found = group_nodes(nodes, [len(nodes) // count] * count)
    by_id = {node.id: node for node in nodes}
    for level in range(2):
        for domain in {node.domain(level) for node in nodes}:
            size = sum(node.domain(level) == domain for node in nodes)
            held = [sum(by_id[id].domain(level) == domain for id in group) for group in found]
            assert max(held) == -(-size // count)


def pairs_alike(groups: Sequence[Sequence[PlacementNode]]) -> tuple[int, ...]:
    """At each level, how many pairs within a group are of one domain."""
    pairs = [pair for group in groups for pair in itertools.combinations(group, 2)]
    return tuple(sum(a.domain(level) == b.domain(level) for a, b in pairs) for level in range(2))


def brute_force(nodes: list[PlacementNode], sizes: list[int]) -> tuple[int, ...]:
    """The least there is, by all permutations."""
    bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    return min(pairs_alike([order[a:b] for a, b in bounds]) for order in itertools.permutations(nodes))


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 3), (3, 4), (2, 5)])
def test_groups_of_unequal_sizes_share_as_few_domains_as_the_best_of_all_arrangements(sizes, seed):
    rng = random.Random(seed)
    for _ in range(3):
        nodes = [trainer(f"n{i}", rng.choice("ab"), rng.choice("xy")) for i in range(sum(sizes))]
        by_id = {node.id: node for node in nodes}
        found = group_nodes(nodes, list(sizes))
        assert pairs_alike([[by_id[id] for id in group] for group in found]) == brute_force(nodes, list(sizes))


def test_a_domain_whose_loss_would_lose_state_is_named():
    nodes = [trainer(f"n{i}", "east", f"rack{i // 3}", lend=2 * STATE) for i in range(4)]
    placement = place(nodes, Replicas(1))
    assert placement.exposed_domains == ("east/rack0",)  # three of four nodes: one of them keeps another's copy
    assert place([trainer(n.id, *n.domains) for n in nodes], Replicas(1)).exposed_domains == ()


def test_memory_only_nodes_are_in_different_groups():
    lend = GENERATIONS * STATE  # not enough for both
    nodes = [trainer("a"), memory_only("b", lend=lend), trainer("c"), memory_only("d", lend=lend)]
    assert all({"a", "c"} & set(group) and {"b", "d"} & set(group) for group in members(place(nodes, Replicas(1))))


def pairings(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All ways to put them together in pairs."""
    for at in range(1, len(names)):
        rest = [*names[1:at], *names[at + 1 :]]
        for others in pairings(rest) if rest else [[]]:
            yield [(names[0], names[at]), *others]


@pytest.mark.parametrize("count", [4, 6, 8])
def test_of_all_pairings_that_is_made_whose_slowest_transfer_is_the_quickest(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        speeds = [rng.choice((1e6, 1e7, 1e8, 1e9)) for _ in range(count)]
        nodes = [
            trainer(f"n{i}", nbytes=rng.choice((1, 2, 5, 10)) * PAGE, link_bytes_s=speed)
            for i, speed in enumerate(speeds)
        ]
        by_id = {node.id: node for node in nodes}

        def slowest(pairs: list[tuple[str, str]], by_id: dict[str, PlacementNode] = by_id) -> float:
            ways = [(by_id[a], by_id[b]) for pair in pairs for a, b in (pair, pair[::-1])]
            return max(a.state_bytes / min(a.link_bytes_s, b.link_bytes_s) for a, b in ways)

        made = [(kept.node, kept.holders[0]) for kept in place(nodes, Replicas(1)).protected_states]
        assert slowest(made) == pytest.approx(min(map(slowest, pairings(list(by_id)))))


# -- any number of nodes, little room


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("stable", [1, 2, 3])
@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("enough", [True, False])
def test_memory_only_nodes_that_lend_enough_keep_everything_and_survive_all_that_train(count, stable, n, enough):
    lend = GENERATIONS * STATE * count - (0 if enough else 1)
    nodes = [*many(count), *(memory_only(f"s{i}", lend=lend) for i in range(stable))]
    placement = place(nodes, Replicas(n))
    is_sound(nodes, placement, Replicas(n))
    found = holders(placement).values()
    whole = [f"s{i}" for i in range(stable) if all(f"s{i}" in each for each in found)]
    assert len(whole) == (min(stable, n) if enough else 0)
    assert all(len(each) == min(n, len(nodes) - 1) for each in found if enough)
    if enough:
        assert not placement.lost_nodes([node.id for node in nodes if node.has_state])
    said = [note for note in placement.notes if "no memory-only node keeps all" in note]
    assert len(said) == (not enough and count > 1)
    assert place(nodes, Replicas(n), placement) == placement


def test_one_of_those_that_lend_enough_keeps_everything_and_one_beside_a_trainer_does_not():
    nodes = [*many(2, "spot"), memory_only("a", "spot"), memory_only("b"), memory_only("c")]
    assert set(holders(place(nodes, Replicas(1))).values()) == {("b",)}
    assert set(holders(place(nodes[:3], Replicas(1))).values()) <= {("a",), ("n00",), ("n01",)}
    beside = [trainer("t", "x"), trainer("u", "y"), memory_only("m", "x")]
    placement = place(beside, Replicas(1))
    assert holders(placement)["t"] == ("u",)
    assert "no memory-only node keeps all" in placement.notes[-1]
    before, joined = place(many(4), Replicas(1)), [*many(4), memory_only("m")]
    assert set(holders(place(joined, Replicas(1), before)).values()) == {("m",)}
    assert place(many(4), Replicas(1), place(joined, Replicas(1), before)) == before


def test_a_memory_only_node_may_be_the_only_peer():
    placement = place([trainer("t", lend=0), memory_only("m")], Replicas(1))
    assert holders(placement) == {"t": ("m",)}
    assert (placement.loads[0].keeps_all_bytes, placement.loads[1].keeps_all_bytes) == (GENERATIONS * STATE, 0)
    placement = place([*(trainer(f"t{i}", lend=0) for i in range(3)), memory_only("m")], Replicas(1))
    assert set(holders(placement).values()) == {("m",)}
    striped = place([*(trainer(f"t{i}", lend=0) for i in range(3)), memory_only("m")], Parity(3, 1))
    assert {load.node: load.keeps_bytes for load in striped.loads} == {"m": STATE, "t0": 0, "t1": 0, "t2": 0}
    assert striped.shortfalls == ()


def test_a_memory_only_node_helps_several_groups_whose_nodes_lend_nothing():
    nodes = [*(trainer(f"t{i}", lend=0) for i in range(7)), memory_only("m")]
    placement = place(nodes, Parity(3, 1))
    assert placement.shortfalls == ()
    assert [group.helpers for group in placement.groups] == [(), ("m",)]
    assert "also lies on m" in placement.notes[0]
    is_sound(nodes, placement, Parity(3, 1))


def test_numbers_that_do_not_divide_give_a_ring_of_copies_and_short_groups_of_parity():
    assert sorted(map(len, members(place(many(7), Replicas(2))))) == [3, 4]
    assert sorted(map(len, members(place(many(7), Replicas(1))))) == [2, 2, 3]
    placement = place(many(7), Parity(2, 2))
    assert sorted(map(len, members(placement))) == [3, 4]
    assert "a group has 1 + 2 nodes instead of 2 + 2" in placement.notes[0]
    assert {kept.losses_max for kept in placement.protected_states} == {2}
    assert sorted(map(len, members(place(many(5), Parity(2, 2))))) == [5]  # two cannot protect each other twice


@pytest.mark.parametrize(
    ("count", "lend", "option", "sizes", "losses"),
    [
        (7, 2 * STATE, Parity(2, 2), [7], 2),  # short groups would take more than is lent
        (3, STATE, Parity(2, 2), [3], 1),  # two parities become one before none
        (8, GENERATIONS * 9 * PAGE, Parity(2, 2), [8], 1),  # 7 + 1 nodes need 9 pages each
        (8, GENERATIONS * 9 * PAGE, Parity(3, 1), [8], 1),
    ],
)
def test_groups_are_as_long_as_the_lent_memory_asks_for_and_keep_one_parity_before_none(
    count, lend, option, sizes, losses
):
    placement = place([trainer(f"n{i}", lend=lend) for i in range(count)], option)
    assert sorted(map(len, members(placement))) == sizes
    assert {kept.losses_max for kept in placement.protected_states} == {losses}
    reasons = {shortfall.reason for shortfall in placement.shortfalls}
    assert all("too little memory" in reason and "ckpt.Limits(memory=)" in reason for reason in reasons)
    assert bool(reasons) == (losses < option.parity)


@pytest.mark.parametrize("count", [4, 7, 8, 12])
def test_what_is_too_little_for_the_parity_asked_for_is_enough_for_less_of_all_states(count):
    """As with copies: what one group has no parity of is lost with any of its nodes, and the checkpoint with that."""
    for pages in (20, 30, 40):  # 3 + 1 nodes need 20 each, 2 + 2 need 60
        lent = [trainer(f"n{i:02d}", lend=GENERATIONS * pages * PAGE) for i in range(count)]
        placement = place(lent, Parity(2, 2))
        assert min(kept.losses_max for kept in placement.protected_states) >= 1
        is_sound(lent, placement, Parity(2, 2))


@pytest.mark.parametrize(
    ("count", "state", "pages", "option", "losses"),
    [(128, 1000, 1, Parity(6, 2), 0), *((512, 100, n, Replicas(2), int(n >= 100)) for n in (0, 99, 100, 150))],
)
def test_that_many_nodes_lend_too_little_is_found_out_at_once(count, state, pages, option, losses):
    """The agent that places it does nothing else meanwhile. One helper or state after the other takes a minute."""
    began_s = time.process_time()
    lent = [trainer(f"n{i:03d}", nbytes=state * PAGE, lend=GENERATIONS * pages * PAGE) for i in range(count)]
    assert {kept.losses_max for kept in place(lent, option).protected_states} == {losses}
    assert time.process_time() - began_s < 5


def test_fewer_nodes_than_were_asked_for_is_said():
    alone = place(many(1), Replicas(1))
    assert [(s.achieved, s.reason) for s in alone.shortfalls] == [(0, "there is no other node")]
    assert alone.lost_nodes(["n00"]) == {"n00"}
    three = place(many(3), Replicas(3))
    assert [(s.requested, s.achieved, s.reason) for s in three.shortfalls] == [(3, 2, "there are only 3 nodes")] * 3
    two = place(many(2), Parity(2, 2))
    assert [(s.achieved, s.reason) for s in two.shortfalls] == [(1, "there are only 2 nodes")] * 2
    assert place(many(1), Parity(2, 1)).shortfalls[0].achieved == 0
    assert place([], Replicas(1)).protected_states == ()


@pytest.mark.parametrize(
    ("pages", "n"),
    [
        ({"a": (1, 0), "b": (1, 1), "c": (1, 2)}, 1),  # who goes round the ring finds no room for c's copy: b's moves
        ({"a": (2, 4), "b": (1, 1), "c": (4, 3)}, 2),  # a second copy gives way to the first one of a larger state
    ],
)
def test_a_copy_moves_out_of_the_way_of_one_that_fits_nowhere_else(pages: dict[str, tuple[int, int]], n: int):
    """`pages`: of state, and of room."""
    lent = [trainer(name, nbytes=size * PAGE, lend=GENERATIONS * room * PAGE) for name, (size, room) in pages.items()]
    assert [kept.losses_max for kept in place(lent, Replicas(n)).protected_states] == [1, 1, 1]


@pytest.mark.parametrize("count", [3, 4, 5, 6, 8, 16])
def test_no_state_has_one_copy_more_than_there_is_room_for_of_each(count):
    """A state of which there is none makes the copies of the others worth nothing: no checkpoint outlives its node."""
    for asked, room in itertools.combinations_with_replacement(range(1, min(count, 6)), 2):
        lent = [trainer(f"n{i:02d}", lend=GENERATIONS * STATE * room) for i in range(count)]
        assert {kept.losses_max for kept in place(lent, Replicas(asked)).protected_states} == {asked}
        lent = [trainer(f"n{i:02d}", lend=GENERATIONS * STATE * asked) for i in range(count)]
        assert {kept.losses_max for kept in place(lent, Replicas(room)).protected_states} == {asked}


# -- stability


def test_a_node_that_is_replaced_by_another_of_its_rack_changes_one_group():
    racks = many(12, "rack{0}")
    racks = [trainer(node.id, f"rack{i // 3}") for i, node in enumerate(racks)]
    for option in (Replicas(1), Replicas(2), Parity(2, 2)):
        before = place(racks, option)
        for gone in racks:
            after = place(
                [*(node for node in racks if node is not gone), trainer("new", *gone.domains)], option, before
            )
            changed = set(members(before)) - set(members(after))
            assert len(changed) == 1
            assert gone.id in changed.pop()


def test_a_node_more_or_less_changes_as_many_groups_as_change_size():
    before = place(many(12), Replicas(1))
    less = place(many(11), Replicas(1), before)
    assert len(set(members(before)) - set(map(tuple, map(sorted, members(less))))) <= 2
    more = place(many(13), Replicas(1), before)
    assert len(set(members(before)) - set(map(tuple, map(sorted, members(more))))) == 1


def test_groups_are_made_anew_where_all_can_be_safer():
    flat = place(many(4), Replicas(1))
    pairs = [set(group) for group in members(flat)]
    nodes = [trainer(id, f"rack{i}") for i, pair in enumerate(pairs) for id in pair]
    after = place(nodes, Replicas(1), flat)
    assert all(set(group) not in pairs for group in members(after))
    assert after.exposed_domains == ()
    nodes = [trainer(f"n{i:03d}", f"rack{i // 100}") for i in range(400)]  # mending these takes too many swaps
    inside = tuple(ParityGroup((f"n{i:03d}", f"n{i + 1:03d}")) for i in range(0, 400, 2))
    before = replace(place(nodes, Replicas(1)), groups=inside)
    domains = {node.id: node.domains for node in nodes}
    assert all(domains[a] != domains[b] for a, b in members(place(nodes, Replicas(1), before)))


# -- what is refused


@pytest.mark.parametrize(
    "make",
    [
        lambda: Replicas(0),
        lambda: Replicas(True),
        lambda: Replicas(1.0),
        lambda: Replicas(65),
        lambda: Parity(0),
        lambda: Parity(2, 3),
        lambda: Parity(2, 0),
        lambda: Parity("2"),
        lambda: PlacementNode(""),
        lambda: PlacementNode("a", domains=("",)),
        lambda: PlacementNode("a\0"),
        lambda: PlacementNode("a", -1),
        lambda: PlacementNode("a", 0, -1),
        lambda: PlacementNode("a", 1, has_state=False),
        lambda: PlacementNode("a", link_bytes_s=-1),
        lambda: PlacementNode("a", link_bytes_s=float("nan")),
        lambda: place([PlacementNode("a"), PlacementNode("a")], Replicas(1)),
        lambda: group_nodes([PlacementNode("a")], [2]),
    ],
)
def test_a_wrong_option_or_node_is_refused(make):
    with pytest.raises(UsageError):
        make()
