"""The line: what a start goes on from, whatever was claimed, lost, committed late or branched off."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedData, UsageError
from ckpt.store.lineage import (
    AGENT_ADDRESSES_MAX,
    AGENT_TEXT_MAX,
    AGENTS_MAX,
    ANCESTORS_MAX,
    CLAIM_BYTES_MAX,
    Ancestor,
    Claim,
    CommitRef,
    Lineage,
    decode_claim,
    encode_claim,
    next_epoch,
)
from ckpt.types import Epoch, Identity, Version
from tests.store.build import epoch, identity


def refs(*identities: Identity, writer: str = "w") -> list[CommitRef]:
    return [CommitRef(each, writer, 1) for each in identities]


def steps(line: list[CommitRef]) -> list[tuple[int, int]]:
    return [(ref.identity.epoch.number, ref.identity.version.step) for ref in line]


def test_an_epochs_own_claim_counts_more_than_what_others_say_of_it() -> None:
    lineage = Lineage([
        Claim(epoch(1), None),
        Claim(epoch(2), identity(1, 20)),
        Claim(epoch(3), identity(2, 30), (Ancestor(epoch(2), identity(1, 5)),)),
    ])  # fmt: skip
    assert steps(lineage.history(refs(identity(1, 10), identity(1, 20)), ())) == [(1, 10), (1, 20)]


def test_of_two_starts_that_took_one_number_the_larger_nonce_is_the_newer() -> None:
    a, b = epoch(2, nonce=1), epoch(2, nonce=2)
    lineage = Lineage([Claim(epoch(1), None), Claim(b, identity(1, 10)), Claim(a, identity(1, 10))])
    commits = refs(identity(1, 10), identity(2, 20, nonce=1), identity(2, 15, nonce=2))
    assert [str(r.identity.epoch) for r in lineage.history(commits, ())] == [str(epoch(1)), str(b)]


def test_a_start_has_overlooked_what_others_committed_and_it_did_not_list() -> None:
    claims = [Claim(epoch(1), None), Claim(epoch(2), identity(1, 10)), Claim(epoch(3), identity(1, 20))]
    lineage = Lineage([*claims, Claim(epoch(4), identity(1, 20))])
    commits = refs(identity(1, 20), identity(1, 30), identity(2, 20), identity(3, 30))
    assert steps(lineage.overlooked_commits(epoch(4), commits, (), [identity(1, 20), identity(2, 20)])) == [
        (1, 30),
        (3, 30),
    ]
    assert lineage.overlooked_commits(epoch(4), commits, [identity(3, 30)], [ref.identity for ref in commits[:3]]) == []


def test_what_an_ancestor_has_left_behind_is_overlooked_by_no_start_after_it() -> None:
    claims = [Claim(epoch(1), None), Claim(epoch(2), identity(1, 10)), Claim(epoch(3), identity(1, 20))]
    unclaimed = (Ancestor(epoch(4), identity(3, 30)),)
    lineage = Lineage([*claims, Claim(epoch(5), identity(4, 40), unclaimed)])
    commits = refs(identity(1, 30), identity(2, 20), identity(3, 30), identity(3, 35))
    assert steps(lineage.overlooked_commits(epoch(5), commits, (), ())) == [(3, 35)]


def test_a_start_from_nothing_has_overlooked_all_that_is_there() -> None:
    lineage = Lineage([Claim(epoch(1, 1), None), Claim(epoch(1, 2), None)])
    commits = refs(identity(1, 10, nonce=1), identity(1, 20, nonce=1))
    assert steps(lineage.overlooked_commits(epoch(1, 2), commits, (), ())) == [(1, 10), (1, 20)]


def test_a_step_that_two_epochs_ran_is_taken_from_the_newer_one_and_not_mixed() -> None:
    lineage = Lineage([Claim(epoch(1), None), Claim(epoch(2), identity(1, 10))])
    line = lineage.history(refs(identity(1, 10), identity(1, 20), identity(2, 20)), ())
    assert steps(line) == [(1, 10), (2, 20)]


def test_of_several_records_of_one_checkpoint_the_lowest_writer_counts() -> None:
    lineage = Lineage([Claim(epoch(1), None)])
    commits = [*refs(identity(1, 10), writer="b"), *refs(identity(1, 10), writer="a")]
    assert [ref.writer for ref in lineage.history(commits, ())] == ["a"]


def test_a_claim_that_cannot_be_read_ends_the_line_there_and_is_named() -> None:
    lineage = Lineage([Claim(epoch(3), identity(2, 30))], epochs=[epoch(1), epoch(2), epoch(3)])
    commits = refs(identity(1, 10), identity(2, 30), identity(3, 40))
    assert steps(lineage.history(commits, ())) == [(2, 30), (3, 40)]
    assert lineage.broken_epoch(epoch(3)) == epoch(2)
    assert lineage.newest_epoch == epoch(3)


def test_a_new_epoch_is_above_everything_that_anyone_remembers() -> None:
    assert next_epoch([]).number == 1
    assert next_epoch([epoch(4), epoch(9, 5), epoch(2)]).number == 10
    assert next_epoch([]) != next_epoch([])
    with pytest.raises(UsageError, match="99999999"):
        next_epoch([epoch(99_999_999)])


# --- against a second definition -----------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Claim], list[CommitRef]]:
    """Each epoch goes on from any version of any earlier one; some are claimed only by their descendants."""
    count = draw(st.integers(1, 6))
    forks: dict[int, Identity | None] = {1: None}
    for n in range(2, count + 1):
        forks[n] = identity(draw(st.integers(1, n - 1)), draw(st.integers(0, 5)))
    claimed = {1, count, *(n for n in forks if draw(st.booleans()))}

    def chain(n: int) -> tuple[Ancestor, ...]:
        found = []
        fork = forks[n]
        while fork is not None and fork.epoch.number not in claimed:
            found.append(Ancestor(fork.epoch, forks[fork.epoch.number]))
            fork = forks[fork.epoch.number]
        return tuple(found)

    claims = [Claim(epoch(n), forks[n], chain(n)) for n in sorted(claimed)]
    versions = st.tuples(st.integers(1, count), st.integers(0, 6))
    return claims, refs(*sorted({identity(*each) for each in draw(st.lists(versions, max_size=20))}))


@given(histories())
def test_the_line_is_what_a_walk_back_from_the_newest_epoch_passes(
    history: tuple[list[Claim], list[CommitRef]],
) -> None:
    claims, commits = history
    parents = {claim.epoch: claim.parent for claim in claims}
    parents |= {each.epoch: each.parent for claim in claims for each in claim.ancestors if each.epoch not in parents}
    expected: list[CommitRef] = []
    at: Epoch | None = max(claim.epoch for claim in claims)
    limit = Version(10**9)
    while at is not None:
        expected += sorted((r for r in commits if r.identity.epoch == at and r.identity.version <= limit), reverse=True)
        parent = parents[at]
        at, limit = (parent.epoch, parent.version) if parent else (None, limit)
    lineage = Lineage(claims)
    assert lineage.history(commits, ()) == expected[::-1]
    assert {*lineage.history(commits, ()), *lineage.branches(commits, ())} == set(commits)


# --- claims as bytes -------------------------------------------------------------------------------------------------


def test_a_claim_comes_back_as_it_was() -> None:
    claim = Claim(epoch(3), identity(2, 30, sub=4), (Ancestor(epoch(2), None),), "job-é", "host", 12.5)
    assert decode_claim(encode_claim(claim), f"epochs/{epoch(3)}") == claim
    told = replace(claim, secret_name="r", agents=(("a", ("10.0.0.1:7", "[::1]:8")), ("b", ())))
    assert decode_claim(encode_claim(told), f"epochs/{epoch(3)}") == told


def test_a_claim_that_says_as_much_as_it_may_is_small_enough_to_be_read() -> None:
    agents = (("f" * 16, ("[2001:db8:1111:2222:3333:4444:5555:6666]:65535",) * AGENT_ADDRESSES_MAX),) * AGENTS_MAX
    claim = Claim(epoch(600), None, secret_name="r" * 16, agents=agents)
    assert len(encode_claim(claim)) <= CLAIM_BYTES_MAX
    assert decode_claim(encode_claim(claim), f"epochs/{epoch(600)}") == claim
    chain = tuple(Ancestor(epoch(n), identity(n - 1, 10**9)) for n in range(599, 599 - ANCESTORS_MAX, -1))
    most = replace(claim, parent=identity(599, 1), ancestors=chain)
    assert len(encode_claim(most)) <= CLAIM_BYTES_MAX
    assert decode_claim(encode_claim(most), f"epochs/{epoch(600)}") == replace(most, secret_name="", agents=())
    with pytest.raises(UsageError, match="names too many agents"):
        Claim(epoch(3), None, agents=(*agents, agents[0]))


def test_a_claim_cannot_go_on_from_itself_or_from_later_so_that_no_chain_is_a_circle() -> None:
    for parent in (identity(3, 1), identity(4, 1)):
        with pytest.raises(UsageError, match="cannot continue from"):
            Claim(epoch(3), parent)
        with pytest.raises(UsageError, match="cannot continue from"):
            Claim(epoch(9), identity(5, 1), (Ancestor(epoch(3), parent),))


def changed(**fields: object) -> bytes:
    body = json.loads(encode_claim(Claim(epoch(3), identity(2, 30), (Ancestor(epoch(2), None),), "l", "h", 1.0)))
    body = {**body, "check": "absent", **fields}
    return json.dumps({key: value for key, value in body.items() if value != "absent"}).encode()


def test_a_claim_of_an_earlier_release_has_no_hash_and_is_read() -> None:
    assert decode_claim(changed(), f"epochs/{epoch(3)}").parent == identity(2, 30)


def test_a_bit_that_flips_in_a_claim_is_found_or_changes_nothing() -> None:
    """Else the run would go on along another line, in silence."""
    claim = Claim(epoch(3), identity(2, 30), (Ancestor(epoch(2), None),), "launch", "host", 1.0)
    data = encode_claim(claim)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert decode_claim(bytes(flipped), f"epochs/{epoch(3)}") == claim, bytes(flipped)
        except DamagedData:
            continue


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        changed(version=2),
        changed(version="absent"),
        changed(epoch="1"),
        changed(epoch=str(epoch(4))),
        changed(parent=str(identity(3, 1))),
        changed(parent="../../etc/passwd"),
        changed(parent=str(identity(2, 1)).replace("-", ",")),
        changed(parent=str(identity(2, 1))[:25] + "," + str(identity(2, 1))[26:]),
        changed(parent=str(identity(2, 1)).replace("1", "\N{ARABIC-INDIC DIGIT ONE}")),
        changed(parent=7),
        changed(ancestors=7),
        changed(ancestors=[[str(epoch(2))]]),
        changed(ancestors=[[str(epoch(2)), str(identity(2, 1))]]),
        changed(ancestors=[[str(epoch(2)), None]] * (ANCESTORS_MAX + 1)),
        changed(launch=["x"]),
        changed(launch="x" * 10_000),
        changed(time="soon"),
        changed(time=10**400),
        changed(run=7),
        changed(agents=7),
        changed(agents=[["a"]]),
        changed(agents=[["a", 7]]),
        changed(agents=[["a", [7]]]),
        changed(agents=[["a", ["h:1"]]] * (AGENTS_MAX + 1)),
        changed(agents=[["a" * (AGENT_TEXT_MAX + 1), []]]),
    ],
)
def test_a_hostile_claim_is_damaged_data_that_names_it(data: bytes) -> None:
    with pytest.raises(DamagedData, match="epochs/"):
        decode_claim(data, f"epochs/{epoch(3)}")
