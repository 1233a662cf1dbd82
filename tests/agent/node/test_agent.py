"""A real agent process, ranks without torch, a folder as the store."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import xxhash

from ckpt.errors import AgentError, CkptError, NewerFormat, SaveFailed, Superseded
from ckpt.format.columns import HASH_BYTES
from ckpt.ipc import client, messages
from ckpt.settings import read_settings
from ckpt.storage import canonical
from ckpt.storage import open as open_store
from ckpt.store.run import Run
from ckpt.threads import Tasks
from ckpt.types import Epoch, Identity, Version
from tests.agent.fake import OPTIONS, FakeRank

REPOSITORY = Path(__file__).parents[3]
Ranks = Callable[..., list[FakeRank]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return canonical(str(tmp_path / "store"))


@pytest.fixture
def ranks(url: str) -> Iterator[Ranks]:
    """Makes connected ranks, closed at the end."""
    made: list[FakeRank] = []

    def make(world: int, launch: str = "test", options: dict[str, Any] | None = None) -> list[FakeRank]:
        new = [FakeRank(url, rank, world, launch) for rank in range(world)]
        made.extend(new)
        for rank in new:
            rank.options = options or OPTIONS
            rank.connect()
        return new

    yield make
    for rank in made:
        rank.close()


def together(ranks: Sequence[FakeRank], what: Callable[[FakeRank], Any]) -> list[Any]:
    """`what` on every rank at once, as in a job. Raises the first error."""
    with Tasks("job", pool_size=len(ranks)) as tasks:
        return [future.result(90) for future in [tasks.submit(what, rank) for rank in ranks]]


def start(ranks: Sequence[FakeRank], take_over: bool = False) -> messages.Message:
    """The whole entry of a job, without failures."""
    decision = ranks[0].begin(take_over)
    together(ranks, lambda rank: rank.join(decision.fields["epoch"]))
    restored = together(ranks, lambda rank: rank.restore(decision))
    finish_start(ranks[0], restored[0])
    together(ranks, lambda rank: rank.wait_warm())
    return decision


def finish_start(first: FakeRank, identity: Any) -> None:
    first.request("restored", {"epoch": first.epoch, "identity": str(identity) if identity else None})


def checkpoint(ranks: Sequence[FakeRank], level: str = "local") -> int:
    """Trains in lock-step to the next step that is saved, until that is complete at `level`. Returns it."""
    step = ranks[0].await_next()
    ranks[0].levels.pop((str(Version(step)), level), None)  # of an appointment of that step that was given up before
    train(ranks, step)
    assert all(rank.taken[-1] == step for rank in ranks)
    assert ranks[0].wait_level(Version(step), level), ranks[0].levels
    return step


def train(ranks: Sequence[FakeRank], until: int) -> None:
    while ranks[0].step < until:
        together(ranks, one_step)


def wait_for(what: Callable[[], bool], timeout_s: float = 60) -> None:
    """For what wakes nobody when it changes."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def one_step(rank: FakeRank) -> bool:
    """Whether to leave after it."""
    rank.enter(rank.step + 1)
    rank.train(rank.step + 1)
    leave = rank.boundary()
    if rank.is_due and not leave:
        rank.save_due()
    return leave


def finish(ranks: Sequence[FakeRank]) -> list[dict[str, Any]]:
    """Saves the last step and leaves."""
    together(ranks, lambda rank: rank.save(Version(rank.step, 1), "exit"))
    return together(ranks, lambda rank: rank.leave())


def committed_steps(url: str) -> list[int]:
    with contextlib.closing(open_store(url)) as store:
        return [ref.identity.version.step for ref in Run(store).view().history]


def wait_gone(pid: int, timeout_s: float = 60) -> None:
    """Until the agent's process has ended. It is nobody's child here, and whose it is may be slow to bury it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], timeout_s)[0], "the agent stays"
    finally:
        os.close(pidfd)


def end_agent(job: Sequence[FakeRank]) -> int:
    """The ranks, which have left, are gone: until the agent has ended. Its process id."""
    agent: int = job[0].connection.agent_pid
    for rank in job:
        rank.connection.close()
    wait_gone(agent)
    return agent


def test_ranks_that_come_at_once_start_one_agent_for_each_url_and_it_has_no_torch(url: str) -> None:
    urls = [url, canonical(f"{url}-other")]

    def come(rank: int) -> tuple[str, int]:
        mine = urls[rank % 2]
        begun.wait(60)
        sock = client.connect(mine, read_settings())
        connection = client.Connection(sock, tasks, lambda message: message.close(), lambda why: None, role="tool")
        connections.append(connection)
        return mine, connection.agent_pid

    begun, connections = threading.Barrier(8), list[client.Connection]()
    with Tasks("ranks", pool_size=8) as tasks:
        try:
            found = {future.result(90) for future in [tasks.submit(come, rank) for rank in range(8)]}
            assert len(found) == len({pid for _, pid in found}) == 2
            for _, pid in found:
                assert "ckpt.agent.node.main" in psutil.Process(pid).cmdline()
                assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
                assert os.getsid(pid) != os.getsid(0)
        finally:
            for connection in connections:
                connection.close()
    for _, pid in found:
        os.kill(pid, signal.SIGTERM)  # no job came, for which they would wait a while
        wait_gone(pid)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_job_saves_commits_leaves_and_the_agent_leaves_nothing(
    world: int, url: str, ranks: Ranks, runtime_dir: Path
) -> None:
    job = ranks(world)
    decision = start(job)
    assert decision.fields["candidate"] is None
    assert checkpoint(job) % 5 == 0
    assert checkpoint(job) % 5 == 0
    train(job, job[0].step + 2)
    left = finish(job)
    last = job[0].step
    assert {answer["committed"] for answer in left} == {str(Version(last, 1))}
    end_agent(job)
    assert list(runtime_dir.iterdir()) == []
    assert committed_steps(url)[-1] == last
    closed = [path.name for path in Path(url, "closed").iterdir()]
    assert closed == [decision.fields["epoch"]]


def two_starts(ranks: Ranks, world: int) -> tuple[list[FakeRank], list[FakeRank], tuple[int, int]]:
    """A job that trains on beyond two committed checkpoints, ranks for another start, and the checkpoints' steps."""
    job = ranks(world)
    start(job)
    steps = checkpoint(job, "store"), checkpoint(job, "store")
    train(job, steps[1] + 2)
    return job, ranks(world), steps


def test_a_new_start_supersedes_the_trainers_that_still_live_and_takes_their_memory(url: str, ranks: Ranks) -> None:
    old, new, (_, last) = two_starts(ranks, 2)
    decision = start(new)
    assert decision.fields["candidate"]["level"] == "local"
    for rank in new:
        rank.check(last)
        assert set(rank.fetched) == {"local"}
    for rank in old:
        with rank.changed:
            assert rank.changed.wait_for(lambda rank=rank: rank.superseded is not None, 30)
    with pytest.raises(Superseded):
        old[0].save(Version(12, 1))
    step = checkpoint(new)
    finish(new)
    assert committed_steps(url)[-1] == step > last


def test_each_start_says_how_many_steps_it_loses_and_no_step_is_lost_twice(
    ranks: Ranks,
) -> None:
    def begin() -> tuple[FakeRank, Any]:
        (rank,) = ranks(1, options={**OPTIONS, "policy": {"steps": 1000, "seconds": None}})
        return rank, start([rank]).fields

    rank, fields = begin()
    assert fields["steps_lost"] is None
    rank.enter(8)
    rank, fields = begin()
    assert (fields["candidate"], fields["steps_lost"]) == (None, 7), "nothing was saved"
    train([rank], 4)
    rank.save(Version(4, 1))
    assert rank.wait_level(Version(4, 1), "local")
    rank.enter(9)
    rank, fields = begin()
    assert (fields["candidate"]["step"], fields["steps_lost"]) == (4, 4)
    rank.enter(7)
    rank, fields = begin()
    assert (fields["candidate"]["step"], fields["steps_lost"]) == (4, 2), "those of the start before are lost already"
    recovered = lambda: [each["data"] for each in rank.events if each["name"] == "job.recovered"]  # noqa: E731
    wait_for(lambda: bool(recovered()))
    assert recovered()[0]["lost_steps"] == 2
    finish([rank])


def test_a_frame_that_is_bad_in_memory_comes_from_the_store(ranks: Ranks) -> None:
    _, new, (_, last) = two_starts(ranks, 2)
    seen: set[int] = set()
    lock = threading.Lock()

    def spoil(frame: int, raw: memoryview) -> bool:
        with lock:
            first = frame not in seen
            seen.add(frame)
            return first

    new[1].spoil = spoil
    start(new)
    for rank in new:
        rank.check(last)
    assert new[1].fetched["store"] > 0
    assert set(new[0].fetched) == {"local"}
    finish(new)


def test_a_candidate_that_no_source_has_whole_is_struck_for_all_and_the_one_before_is_restored(
    url: str, ranks: Ranks
) -> None:
    _, new, (before, last) = two_starts(ranks, 2)
    decision = new[0].begin()
    assert decision.fields["candidate"]["step"] == last
    together(new, lambda rank: rank.join(decision.fields["epoch"]))
    new[1].spoil = lambda frame, raw: True
    outcomes = []
    for rank in new:
        rank.restore_thread = rank.tasks.start("restore", lambda rank=rank: outcomes.append(attempt(rank, decision)))
    for rank in new:
        rank.restore_thread.join(60)
    assert sum(isinstance(outcome, CkptError) for outcome in outcomes) >= 1
    new[1].spoil = lambda frame, raw: False
    fields = {"epoch": new[0].epoch, "identity": decision.fields["candidate"]["identity"], "why": "bad"}
    followed_job = new[0].request("restored", fields)
    assert followed_job.fields["candidate"]["step"] == before
    restored = together(new, lambda rank: rank.restore(followed_job))
    for rank in new:
        rank.check(before)
    finish_start(new[0], restored[0])
    together(new, lambda rank: rank.wait_warm())
    finish(new)
    assert committed_steps(url) == [before, before]  # the line goes on from there; what was struck is a branch


def attempt(rank: FakeRank, decision: messages.Message) -> Any:
    try:
        return rank.restore(decision)
    except CkptError as exc:
        return exc


def test_a_start_that_is_too_old_for_the_newest_checkpoint_is_an_error_and_goes_on_from_no_older_one(
    url: str, ranks: Ranks
) -> None:
    """It would make a branch of all that the newer ckpt has saved."""
    job = ranks(1)
    start(job)
    together(job, one_step)
    job[0].save(Version(1, 1))
    train(job, 3)
    finish(job)
    end_agent(job)
    assert committed_steps(url) == [1, 3]
    newest = max(Path(url, "commits").iterdir())
    body = bytearray(newest.read_bytes()[:-HASH_BYTES])
    body[8] += 1  # the format's version
    newest.write_bytes(body + xxhash.xxh3_128_digest(bytes(body)))
    again = ranks(1)
    with pytest.raises(NewerFormat, match=f"step 3.*install a newer ckpt.*ckpt branch {url} --at"):
        again[0].begin()
    again[0].connection.close()
    newest.write_bytes(bytes([*body[:40], body[40] ^ 1, *body[41:]]))
    third = ranks(1)
    assert start(third).fields["candidate"]["step"] == 1, "what is damaged is passed over"
    finish(third)


class Process:
    """A rank in a process of its own."""

    def __init__(self, url: str, rank: int, world: int, epoch: str | None = None) -> None:
        given = json.dumps({"url": url, "rank": rank, "world": world, "epoch": epoch})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.fake", given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            bufsize=0,  # it may say two lines at once, and select does not see the one that lies in a buffer
        )

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], 90)
        line = self.process.stdout.readline() if readable else b""
        assert line, "the rank said nothing"
        return json.loads(line)

    def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.hear()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


def train_processes(job: Sequence[Process]) -> int:
    """To the next step that is saved, until that is complete. Returns it."""
    step = job[0].ask(do="await")["step"]
    at = 0
    while at < step:
        at = step_processes(job)
    assert job[0].ask(do="wait", step=step, level="local") == {"ok": True}
    return int(step)


def step_processes(job: Sequence[Process]) -> int:
    """One step, of all at once. Returns it."""
    for process in job:
        process.tell(do="step")
    (step,) = {int(process.hear()["step"]) for process in job}
    return step


def start_processes(url: str, world: int) -> tuple[list[Process], dict[str, Any]]:
    first = Process(url, 0, world)
    epoch = first.hear()["epoch"]
    job = [first, *(Process(url, rank, world, epoch) for rank in range(1, world))]
    return job, first.hear()


def test_a_killed_job_without_a_successor_is_committed_and_the_agent_ends(url: str, runtime_dir: Path) -> None:
    job, _ = start_processes(url, 1)
    last = train_processes(job)
    job[0].ask(do="step")
    job[0].tell(do="die")
    job[0].end()
    wait_for(lambda: not list(runtime_dir.iterdir()))
    assert committed_steps(url)[-1] == last


def test_tools_that_ask_a_lingering_agent_do_not_keep_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "3")
    job, _ = start_processes(url, 1)
    train_processes(job)
    job[0].tell(do="die")
    job[0].end()
    place, asked = client.make_agent_paths(url, read_settings()), 0
    until_s = time.monotonic() + 30
    while (sock := client.connect_nowait(place)) is not None:
        assert time.monotonic() < until_s, f"asked {asked} times in 30 s, and it is still there"
        with Tasks("tool") as tasks, contextlib.suppress(AgentError):
            tool = client.Connection(sock, tasks, messages.Message.close, lambda why: None, role="tool")
            asked += bool(tool.status())
            tool.close()
        time.sleep(0.5)
    assert asked > 2


def test_an_agent_that_is_killed_is_started_again_and_takes_over_the_arenas(url: str, ranks: Ranks) -> None:
    """Killed in the middle of a commit: the ranks bring their arenas, which are empty slots, and a snapshot is taken at
    once."""
    options = {**OPTIONS, "limits": {"memory": None, "bandwidth": 100_000.0}}  # its commit takes seconds
    job = ranks(2, options=options)
    start(job)
    step = checkpoint(job)
    assert (str(Version(step)), "store") not in job[0].levels
    first = job[0].connection.agent_pid
    os.kill(first, signal.SIGKILL)
    for rank in job:
        assert rank.lost.wait(30)
    for rank in job:
        rank.disconnect()
        rank.options = OPTIONS
    together(job, reconnect)
    assert job[0].connection.agent_pid != first
    arenas = dict(job[0].slots)
    together(job, lambda rank: rank.join(rank.epoch, resume=True))
    together(job, lambda rank: rank.wait_warm())
    assert job[0].slots == arenas
    together(job, one_step)
    newer = checkpoint(job)
    assert newer > step
    finish(job)
    assert newer in committed_steps(url)
    end_agent(job)


def reconnect(rank: FakeRank) -> None:
    """As trainers do: a socket of the dead agent may take the connection, and end it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return rank.connect()
        except AgentError:
            assert time.monotonic() < deadline


def test_what_may_go_is_deleted_after_a_commit_that_failed_too(url: str, ranks: Ranks) -> None:
    """Else a store that has filled up stays full."""
    job = ranks(1)
    job[0].options = {**OPTIONS, "policy": {"steps": 1000, "seconds": None}, "keep": {"last": 1}}
    start(job)
    for step in (1, 2):
        train(job, step)
        job[0].save(Version(step, 1))
        assert job[0].wait_level(Version(step, 1), "store")
    first, third = (str(Identity(Epoch.parse(job[0].epoch), Version(step, 1))) for step in (1, 3))
    wait_for(lambda: Path(url, "retired", first).exists())
    packs = [path for path in Path(url, "data", first).rglob("*") if path.is_file()]
    assert packs
    for path in (Path(url, "retired", first), *packs):
        os.utime(path, (1e9, 1e9))
    Path(url, "data", third).write_text("a file where a folder should be")
    train(job, 3)
    job[0].save(Version(3, 1))
    assert not job[0].wait_level(Version(3, 1), "store")
    wait_for(lambda: not any(path.exists() for path in packs))
    assert committed_steps(url) == [2]
    Path(url, "data", third).unlink()
    finish(job)


def test_a_dead_rank_ends_the_others_waits(url: str, ranks: Ranks) -> None:
    first = ranks(2)[0]
    decision = first.begin()
    other = Process(url, 1, 2, decision.fields["epoch"])
    first.join(decision.fields["epoch"])
    finish_start(first, None)
    first.wait_warm()
    with Tasks("waiter", pool_size=1) as tasks:
        saving = tasks.submit(first.save, Version(1, 1))
        other.process.send_signal(signal.SIGKILL)
        with pytest.raises(SaveFailed, match="rank 1"):
            saving.result(60)
    other.end()
    first.leave("exception")


def test_an_idle_agent_is_small_and_uses_no_processor_time(ranks: Ranks) -> None:
    job = ranks(1)
    start(job)
    process = psutil.Process(job[0].connection.agent_pid)
    own_bytes = process.memory_info().rss - process.memory_info().shared
    assert own_bytes < 80 << 20

    def is_idle() -> bool:
        before = process.cpu_times()
        switches = process.num_ctx_switches().voluntary
        threading.Event().wait(1.5)
        after = process.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        return used_s < 0.1 and process.num_ctx_switches().voluntary - switches < 20

    assert any(is_idle() for _ in range(10)), "it may have had to end what it began"
    finish(job)


def test_an_agent_gives_way_to_training_once_it_serves_and_not_while_a_start_waits_for_it(
    url: str, runtime_dir: Path
) -> None:
    """Else it would take minutes beside what keeps the processors busy, and a start that waits so long fails."""
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not share the processor between sessions")
    place = client.make_agent_paths(url, read_settings())
    words = ["--url", url, "--socket", place.socket, "--lock", place.run_lock, "--log", place.log]
    command = [sys.executable, "-m", "ckpt.agent.node.main", *map(str, words), "--ready-fd", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY, start_new_session=True) as agent:
        assert agent.stdout is not None
        while not Path(f"/proc/{agent.pid}/autogroup").read_text().endswith(" nice 10\n"):
            assert agent.poll() is None
            time.sleep(0.001)
        serves, _, _ = select.select([agent.stdout], [], [], 0)
        assert serves
        assert agent.stdout.readline() == b"ok\n"
        agent.terminate()
        assert agent.wait(60) == 0
