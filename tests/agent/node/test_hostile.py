"""What arrives from a hostile or broken trainer, tool or store ends what it belongs to, and never the agent."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ckpt.agent.node.node_context import owner_of
from ckpt.agent.snapshots.memory_checkpoint import StagedReader
from ckpt.errors import AgentError, CkptError, DamagedData, UsageError
from ckpt.format import values
from ckpt.format.declaration import encode, encode_layout
from ckpt.ipc import client, messages
from ckpt.ipc.arena import Arena
from ckpt.ipc.control_page import SUB_MAX
from ckpt.layout.division import divide
from ckpt.layout.layout import Declaration, Layout
from ckpt.layout.staging import stage
from ckpt.settings import read_settings
from ckpt.storage import open as open_store
from ckpt.types import FRAME_BYTES, PATH_NAME, Epoch, Identity, Version
from tests.agent.fake import OPTIONS, FakeRank
from tests.agent.node import test_agent
from tests.agent.node.test_agent import checkpoint, finish, start, wait_gone
from tests.agent.nodes.cluster import come_back

url = test_agent.url  # the fixture
EMPTY = Layout(())
EPOCH = Epoch(50, "0123456789abcdef")
INF = math.inf
JOIN = {
    "epoch": str(EPOCH),
    "rank": 0,
    "world": 1,
    "coordinate": "rank=0",
    "options": OPTIONS,
    "launch": "x",
    "parent": None,
    "ancestors": [],
    "version": str(Version(0)),
    "values_bytes": 10,
    "resume": False,
    "arenas": [],
}


@pytest.fixture
def rank(url: str) -> Iterator[FakeRank]:
    """The only rank of a job, not yet connected."""
    made = FakeRank(url, 0, 1)
    yield made
    made.close()


class Attacker:
    """A connection that says whatever it is told to."""

    def __init__(self, url: str, role: str = "trainer") -> None:
        self.sock = client.connect(url, read_settings())
        self.sock.settimeout(30)
        self.agent = int(self.ask("hello", version=client.VERSION, role=role)["pid"])

    def ask(self, kind: str, fds: Any = (), blobs: Any = (), **fields: Any) -> dict[str, Any]:
        """The answer. Errors: the agent's refusal; EOFError where it closed the connection."""
        messages.send(self.sock, {"t": kind, "id": 7, **fields}, fds, blobs)
        while True:
            try:
                message = messages.receive(self.sock)
            except ConnectionResetError:
                message = None
            if message is None:
                raise EOFError
            message.close()
            if message.fields.get("id") == 7:
                messages.raise_error(message)
                return msgpack.unpackb(message.blobs[0]) if kind == "status" else message.fields

    def join(self, fds: Any = (), **fields: Any) -> dict[str, Any]:
        return self.ask("join", fds, [encode_layout(EMPTY), b""], **{**JOIN, **fields})

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def attack(url: str) -> Iterator[Callable[..., Attacker]]:
    with contextlib.ExitStack() as stack:
        yield lambda role="trainer": stack.enter_context(contextlib.closing(Attacker(url, role)))


def train_and_leave(rank: FakeRank) -> None:
    """Its next checkpoint becomes complete, and the last one is committed."""
    checkpoint([rank])
    assert finish([rank])[0]["error"] is None


def kill(agent: int) -> None:
    os.kill(agent, signal.SIGKILL)
    wait_gone(agent)


# --- messages --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    *(("begin", "world", {"launch": "x", "world": world, "take_over": True}) for world in (0, -1, 20_000, 10**9)),
    *(("preempt", "deadline_s", {"deadline_s": deadline_s}) for deadline_s in (INF, math.nan)),
    ("prune", "keep", {"yes": False, "keep": "abc"}),
    ("prune", "keep", {"yes": False, "keep": [1]}),
    ("prune", "keep.best", {"yes": False, "keep": {"best": 5}}),
    ("prune", "last", {"yes": False, "keep": {"last": "x"}}),
]
CLOSED: list[tuple[str, dict[str, Any]]] = [
    ("hello", {"version": INF, "role": "trainer"}),
    ("hello", {"version": 1, "role": "trainer", "id": INF}),
    ("begin", {"launch": "x", "world": INF, "take_over": True}),
    ("begin", {"launch": "x", "world": 1, "take_over": True, "id": INF}),
    ("begin", {"launch": "x", "world": 1, "take_over": True, "id": None}),
    ("status", {"id": INF}),
    ("preempt", {"deadline_s": "x"}),
    ("prune", {"yes": False, "also": 5}),
]
STAGED = {"attempt": 5, "version": str(Version(1)), "slot": 0, "division": "", "stall_s": 0}
FROM_A_RANK: list[tuple[str, dict[str, Any]]] = [
    ("arena-warm", {"slot": INF, "division": ""}),
    ("snapshot-staged", {**STAGED, "attempt": INF}),
    ("snapshot-staged", {**STAGED, "sample": ["a", [INF], b""]}),
    ("snapshot-staged", {"attempt": INF, "why": "late"}),
    ("save", {"version": "x", "why": "save"}),
    ("unsavable", {"version": "x", "why": ""}),
    ("rank-holds", {"attempt": INF}),
]


def test_a_message_with_impossible_fields_ends_its_own_connection_at_most_and_no_job(
    rank: FakeRank, attack: Callable[..., Attacker]
) -> None:
    rank.connect()
    start([rank])
    agent = rank.connection.agent_pid
    for kind, named, fields in REFUSED:
        with pytest.raises(UsageError, match=named):
            attack().ask(kind, **fields)
    for kind, fields in CLOSED:
        with pytest.raises(EOFError):
            attack().ask(kind, **fields)
    for packet in (b"no msgpack", b"\x81\xa1t\xa4join"):
        attacker = attack()
        attacker.sock.send(packet)
        with pytest.raises((EOFError, OSError)):
            attacker.ask("status")
    assert attack("tool").ask("status")["job"]["superseded_by"] is None
    assert attack("tool").agent == agent
    assert not rank.lost.is_set()
    train_and_leave(rank)


def test_a_rank_whose_message_is_impossible_loses_its_connection_and_may_come_back(rank: FakeRank) -> None:
    rank.connect()
    start([rank])
    agent = rank.connection.agent_pid
    for kind, fields in FROM_A_RANK:
        messages.send(rank.connection._sock, {"t": kind, "id": 1 << 40, **fields})
        assert rank.lost.wait(30)
        come_back(rank)
        rank.wait_warm()
    assert rank.connection.agent_pid == agent
    train_and_leave(rank)


WRONG_OPTIONS: list[tuple[str, Any]] = [
    ("options", []),
    ("options.policy", {**OPTIONS, "policy": 5}),
    ("Every", {**OPTIONS, "policy": {"steps": "x", "seconds": None}}),
    ("options.keep", {**OPTIONS, "keep": []}),
    ("options.keep.best", {**OPTIONS, "keep": {"best": 5}}),
    ("options.keep.best", {**OPTIONS, "keep": {"best": ["loss"]}}),
    ("Keep", {**OPTIONS, "keep": {"last": 2.5}}),
    ("options.limits", {**OPTIONS, "limits": "x"}),
    ("memory", {**OPTIONS, "limits": {"memory": "x"}}),
    ("bandwidth", {**OPTIONS, "limits": {"bandwidth": -1}}),
    ("options.codec", {**OPTIONS, "codec": ["auto"]}),
]


def test_an_option_that_cannot_be_is_refused_by_its_name_when_the_rank_joins(rank: FakeRank) -> None:
    rank.connect()
    decision = rank.begin()
    for named, options in WRONG_OPTIONS:
        rank.options = options
        with pytest.raises(UsageError, match=named):
            rank.join(decision.fields["epoch"])
    rank.options = OPTIONS
    rank.join(decision.fields["epoch"])
    rank.request("restored", {"epoch": rank.epoch, "identity": None})
    rank.wait_warm()
    train_and_leave(rank)


def test_an_arena_that_was_lost_on_its_way_is_sent_again_to_the_rank_that_comes_back(rank: FakeRank) -> None:
    rank.connect()
    start([rank])
    rank.connection.close()
    with contextlib.closing(rank.slots.pop(0)) as kept:
        come_back(rank)
        with rank.changed:
            assert rank.changed.wait_for(lambda: 0 in rank.warm, 30)
        assert os.path.samestat(os.fstat(rank.slots[0].fd), os.fstat(kept.fd))
    train_and_leave(rank)


# --- arenas ----------------------------------------------------------------------------------------------------------


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


FOREIGN = [
    (8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
    (1 << 47, fcntl.F_SEAL_SHRINK),
    (8192, 0),
    (100, fcntl.F_SEAL_SHRINK),
]


def descriptors(pid: int) -> int:
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process closed it since the folder was read
            found += "hostile" in os.readlink(each)
    return found


@pytest.mark.parametrize(("size", "seals"), FOREIGN)
def test_a_descriptor_that_is_refused_as_an_arena_is_closed(size: int, seals: int) -> None:
    fd = memfd(size, seals)
    with pytest.raises(AgentError):
        Arena.adopt(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_an_agent_refuses_the_arena_that_it_cannot_map_and_keeps_no_descriptor_of_it(
    attack: Callable[..., Attacker],
) -> None:
    with pytest.raises(AgentError, match="20000"):
        attack().join(world=20_000, resume=True)
    for size, seals in FOREIGN:
        fd = memfd(size, seals)
        try:
            with pytest.raises(AgentError, match="arena"):
                attack().join([fd], resume=True, arenas=[0])
        finally:
            os.close(fd)
    agent = attack("tool")
    assert descriptors(agent.agent) == 0
    kill(agent.agent)


SEVENTH = Identity(EPOCH, Version(7))


def sealed(about: bytes, identity: Identity = SEVENTH) -> Arena:
    """A whole snapshot of nothing."""
    staging = stage(EMPTY, divide([EMPTY], set(), FRAME_BYTES)[0], FRAME_BYTES)
    arena = Arena.create(1 << 20)
    told = encode(Declaration(0, 1, "rank=0", "d", EMPTY, staging))
    at = arena.write_declaration(staging.data_bytes, told)
    arena.seal(identity, 0, 1, staging.data_bytes, at, values.encode({}), values.encode({}), about)
    return arena


@pytest.mark.parametrize(
    "metrics", [{"loss": "x"}, {"loss": [1]}, {"loss": 10**400}, 5], ids=["text", "list", "huge", "5"]
)
def test_an_arena_whose_metrics_are_no_numbers_holds_no_snapshot(metrics: Any) -> None:
    with contextlib.closing(sealed(values.encode({"metrics": metrics}))) as arena, pytest.raises(DamagedData):
        StagedReader().read(SEVENTH, 1, {0: arena})


@pytest.mark.parametrize(
    "identity",
    [
        Identity(EPOCH, Version(10**12)),
        Identity(EPOCH, Version(1, SUB_MAX + 1)),
        Identity(Epoch(10**8, EPOCH.nonce), Version(1)),
    ],
)
def test_a_header_that_names_what_no_key_has_room_for_is_damaged(identity: Identity) -> None:
    with contextlib.closing(sealed(values.encode({}), identity)) as arena, pytest.raises(DamagedData):
        arena.header()


def test_the_largest_tick_that_can_be_written_is_sound() -> None:
    identity = Identity(Epoch(10**8 - 1, EPOCH.nonce), Version(10**12 - 1, SUB_MAX))
    with contextlib.closing(sealed(values.encode({}), identity)) as arena:
        assert arena.header().identity == identity == Identity.parse(str(identity))


# --- mistakes of the agent's own -------------------------------------------------------------------------------------


def test_a_job_that_the_agent_cannot_go_on_with_is_told_so_and_goes_on_with_the_next_one(rank: FakeRank) -> None:
    """A rank publishes a step that no appointment has room for: the mistake is met where no message is handled."""
    rank.options = {**OPTIONS, "policy": {"steps": None, "seconds": 0.05}}
    rank.connect()
    start([rank])
    rank.wait_warm()  # nothing else is on its way when the event comes
    rank.enter(1 << 43)
    assert rank.lost.wait(60)
    assert [event["name"] for event in rank.events if event["loud"]][-1] == "job.failed"
    first = rank.connection.agent_pid
    rank.disconnect()
    come_back(rank)
    assert rank.connection.agent_pid != first
    rank.enter(1)  # where it is, in its new page
    rank.wait_warm()
    train_and_leave(rank)


# --- the store -------------------------------------------------------------------------------------------------------

FOREIGN_KEYS = [
    "closed/99999999-0123456789abcdef",
    "alive/99999999-0123456789abcdef",
    "epochs/99999999-0123456789abcdef",
    "commits/99999999-0123456789abcdef-000000000001.0000-abc",
]


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_a_foreign_object_fails_the_start_with_its_name_and_not_the_agent(
    key: str, rank: FakeRank, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "0.05")
    rank.settings = read_settings()
    with contextlib.closing(open_store(url)) as store:
        store.put(key, [b"foreign"])
        rank.connect()
        agent = rank.connection.agent_pid
        with pytest.raises(CkptError, match="99999999"):
            rank.begin()
        store.delete([key])
    start([rank])
    assert rank.connection.agent_pid == agent
    train_and_leave(rank)


@pytest.mark.parametrize("host", ["größe", "日本", ".hidden", "", "a b/c", "x" * 300, "٣٤", "plain-1.example"])
def test_any_host_name_gives_an_owner_that_may_stand_in_a_key(host: str) -> None:
    assert PATH_NAME.fullmatch(owner_of(host))


# --- the environment -------------------------------------------------------------------------------------------------


def test_a_relative_runtime_folder_is_the_same_for_the_agent_which_works_elsewhere(
    url: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runtime_dir)
    monkeypatch.setenv("CKPT_RUNTIME_DIR", "here")
    assert read_settings().runtime_dir == runtime_dir / "here"
    with contextlib.closing(FakeRank(url, 0, 1)) as rank:
        rank.connect()
        assert sorted(each.suffix for each in (runtime_dir / "here").iterdir()) == [".lock", ".log", ".sock", ".start"]
        kill(rank.connection.agent_pid)
