"""Keys: what is built is parsed again, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.storage.names import is_key
from ckpt.store import keys
from ckpt.store.run import Run
from ckpt.types import Epoch, Identity, Version
from tests.store.build import epoch, identity
from tests.store.sim import Sim

epochs = st.builds(Epoch, st.integers(0, 99_999_999), st.text("0123456789abcdef", min_size=16, max_size=16))
identities = st.builds(
    Identity, epochs, st.builds(Version, st.integers(0, 999_999_999_999), st.integers(0, 99_999_999))
)
writers = st.from_regex(keys.WRITER, fullmatch=True)
owners = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", fullmatch=True)


@given(identities, writers, owners, st.integers(0, 999_999_999))
def test_every_key_that_is_built_is_a_key_and_is_parsed_again(one: Identity, writer: str, owner: str, n: int) -> None:
    record, pack = keys.record_key(one, writer), keys.pack_key(one, owner, writer, n)
    assert is_key(record)
    assert is_key(pack)
    assert keys.parse_record(record) == (one, writer)
    assert keys.parse_pack(pack) == keys.PackKey(one, owner, writer, n)
    assert keys.parse_retired(keys.retired_key(one)) == one
    for prefix, build in (
        (keys.EPOCHS, keys.epoch_key),
        (keys.HEARTBEATS, keys.heartbeat_key),
        (keys.CLOSED, keys.closed_key),
    ):
        assert keys.parse_epoch(build(one.epoch), prefix) == one.epoch
        assert keys.is_ours(build(one.epoch))
    assert all(map(keys.is_ours, (record, pack, keys.retired_key(one), keys.lease_key(writer))))


JUNK = [
    "README.md",
    "commits/",
    "commits/x",
    "commits/latest-w",
    f"commits/{identity(1, 5)}",
    f"commits/{identity(1, 5)}-",
    f"commits/{identity(1, 5)}-UPPER",
    f"commits/{identity(1, 5)}x-w",
    f"commits/{str(identity(1, 5)).replace('-', '_')}-w",
    f"commits/sub/{identity(1, 5)}-w",
    f"commits/{str(identity(1, 5)).replace('1', chr(0x661))}-w",
    f"data/{identity(1, 5)}/node/w-01.pack",
    f"data/{identity(1, 5)}/node/w.pack",
    f"data/{identity(1, 5)}/node/more/w-1.pack",
    f"data/{identity(1, 5)}/../w-1.pack",
    f"data/../{identity(1, 5)}/node/w-1.pack",
    "epochs/1",
    f"epochs/{epoch(1)}.bak",
    f"closed/{epoch(1)}x",
    "alive/..",
    "retired/everything",
    f"retired/{identity(1, 5)}0",
    "leases/someone",
]


@pytest.mark.parametrize("key", JUNK)
def test_what_is_no_key_of_ours_is_parsed_as_nothing(key: str) -> None:
    found = [keys.parse_record(key), keys.parse_pack(key), keys.parse_retired(key)]
    found += [keys.parse_epoch(key, prefix) for prefix in (keys.EPOCHS, keys.HEARTBEATS, keys.CLOSED)]
    assert found == [None] * 6
    assert not keys.is_ours(key) or key.startswith(keys.LEASES)  # any reader may have one


def test_a_listing_with_foreign_objects_is_read_as_if_they_were_not_there() -> None:
    store = Sim()
    for key in JUNK:
        if is_key(key):
            store.put(key, [b"\xff\x00junk"])
    view = Run(store).view()
    assert (view.claims, view.commits, view.history, view.closed_epochs, view.heartbeats) == (
        (),
        (),
        [],
        frozenset(),
        {},
    )


@pytest.mark.parametrize("writer", ["", "a-b", "../x", "A", "x" * 17, "a b"])
def test_a_writer_that_would_make_keys_ambiguous_is_refused(writer: str) -> None:
    with pytest.raises(UsageError, match="writer"):
        keys.record_key(identity(1, 5), writer)
    with pytest.raises(UsageError):
        keys.pack_key(identity(1, 5), "node", writer, 0)


@pytest.mark.parametrize("owner", ["", "..", "a/b", ".x", "dp=1", "x" * 65])
def test_an_owner_that_would_escape_its_folder_is_refused(owner: str) -> None:
    with pytest.raises(UsageError, match="cannot be part of a key"):
        keys.pack_key(identity(1, 5), owner, "w", 0)
