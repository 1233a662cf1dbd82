"""What fsspec is trusted with: an upload that fails shows nothing, whatever the file system does about it."""

from __future__ import annotations

import ftplib
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.ftp import FTPFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckpt.backends.any_fsspec import open_fsspec
from ckpt.errors import AccessDenied, DamagedData, NotFound, RunInUse, StorageError, TransientError, UsageError
from ckpt.policy.save_options import Keep
from ckpt.storage import open as open_store
from ckpt.storage.names import TEMPORARY_PREFIX
from ckpt.store.lease import Lease
from ckpt.store.lineage import Claim
from ckpt.store.prune import Pruner
from ckpt.store.run import Run
from tests.servers import free_port, program, running
from tests.storage import tiny
from tests.store.build import begun, commit, epoch, floats, identity, snapshot
from tests.store.test_run import Beating


class FailingFileSystem(LocalFileSystem):
    """Local files; a write stops half way with `failure`, as a connection does, and completes what it has."""

    protocol = "failing"
    failure: BaseException | None = None
    step = "write"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if type(self).failure is not None and type(self).step == "write":
            super().pipe_file(path, value[: len(value) // 2], mode, **options)
            raise type(self).failure
        super().pipe_file(path, value, mode, **options)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if type(self).failure is not None and type(self).step in ("write", "move"):
            raise type(self).failure
        super().mv(path1, path2, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if type(self).failure is not None and type(self).step == f"list {os.path.basename(path)}":
            raise type(self).failure
        return super().ls(path, detail, **options)


class TimelessFileSystem(LocalFileSystem):
    """Local files, of whose times nothing is told."""

    protocol = "timeless"

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **options)
        return {name: found[name] for name in ("name", "size", "type")}


class PlainFileSystem(LocalFileSystem):
    """Local files of a file system that takes no option but its own, as SFTP's does, and caches listings."""

    protocol = "plain"

    def __init__(self) -> None:
        super().__init__()

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail, **options)
        return self.dircache.get(path) or super().ls(path, detail, **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Another thread may fill it again before it is looked at."""


class OneConnectionFileSystem(LocalFileSystem):
    """Local files that are asked for over one connection, as SFTP's and FTP's are: a second request meanwhile fails."""

    protocol = "one"
    connection = threading.Lock()

    def cat_file(self, path: str, *args: Any, **options: Any) -> bytes:
        assert self.connection.acquire(blocking=False), "two requests on one connection"
        try:
            time.sleep(0.005)
            return bytes(super().cat_file(path, *args, **options))
        finally:
            self.connection.release()


class BreakingFileSystem(LocalFileSystem):
    """Local files over a connection that, once broken, stays so."""

    protocol = "breaking"
    made: ClassVar[list[BreakingFileSystem]] = []
    failure: BaseException | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).made.append(self)

    def __getattribute__(self, name: str) -> Any:
        if name in ("ls", "info", "cat_file", "pipe_file", "rm_file") and self.failure is not None:
            raise self.failure
        return super().__getattribute__(name)


@contextmanager
def web_server(to_put: int, to_get: int = 404) -> Iterator[str]:
    """Of nothing. What it answers to whoever writes, and reads."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.send_response(to_put)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.send_error(404)

        def do_GET(self) -> None:
            self.send_error(to_get)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("fault", [500, 502, 503, 504, tiny.RESET])
def test_s3fs_asks_once_and_leaves_trying_again_to_us(fault: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries five times what botocore tries five times, each as long as a server that says nothing is waited for."""
    with tiny.tiny() as server:
        for name, value in server.at.environment().items():
            monkeypatch.setenv(name, value)
        backend = open_fsspec("fsspec+s3://bucket/run")
        attempts = {
            "put": lambda: backend.put("k", [b"x"]),
            "head": lambda: backend.head("k"),
            "get": lambda: backend.get_range("k", 0, 1),
            "list": lambda: list(backend.list("commits/")),
            "delete": lambda: backend.delete(["k"]),
        }
        for what, attempt in attempts.items():
            server.requests.clear()
            server.plan = [("*", fault)] * 100
            with pytest.raises(TransientError, match="bucket/run"):
                attempt()
            asked = len(server.requests)
            assert asked == 1 or (asked == 2 and fault == tiny.RESET), what  # aiohttp sends what was reset once more
        server.plan, server.objects = [], {"run/k": b"data"}
        assert backend.get("k", 10) == b"data"


class SilentFtp:
    """What FTPFileSystem speaks through, where the server ends every session that is idle."""

    def mlsd(self, path: str) -> Iterator[tuple[str, dict[str, str]]]:
        raise ftplib.error_temp("421 Timeout: closing control connection.")

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def failing() -> Iterator[type[FailingFileSystem]]:
    kinds = FailingFileSystem, TimelessFileSystem, PlainFileSystem, OneConnectionFileSystem, BreakingFileSystem
    for kind in kinds:
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    yield FailingFileSystem
    BreakingFileSystem.made.clear()
    FailingFileSystem.failure = None
    FailingFileSystem.step = "write"


@pytest.mark.parametrize("step", ["write", "move"])
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ConnectionResetError("reset"), TransientError),
        (TimeoutError("slow"), TransientError),
        (PermissionError("no"), AccessDenied),
        (OSError(28, "No space left on device"), StorageError),
        (RuntimeError("anything"), StorageError),
    ],
)
def test_an_upload_that_fails_shows_nothing_and_keeps_the_old_object(
    failing: type[FailingFileSystem], tmp_path: Path, step: str, failure: BaseException, expected: type[StorageError]
) -> None:
    store = open_fsspec(f"fsspec+failing://{tmp_path}")
    store.put("a/k", [b"old object"])
    failing.failure, failing.step = failure, step
    for key in ("a/k", "a/new"):
        with pytest.raises(expected) as caught:
            store.put(key, [b"new", b"object"])
        assert type(caught.value) is expected
        assert caught.value.__cause__ is failure
    failing.failure = None
    assert [info.key for info in store.list("")] == ["a/k"]
    assert store.get("a/k", 100) == b"old object"
    assert os.listdir(tmp_path / "a") == ["k"]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError("Socket is closed"), TransientError),  # as paramiko's
        (OSError("anything"), StorageError),
        (ConnectionResetError("reset"), TransientError),
        (PermissionError("no"), AccessDenied),
    ],
)
@pytest.mark.parametrize("folder", ["commits", "identity"])
def test_a_folder_that_cannot_be_listed_is_an_error_and_not_empty(
    failing: type[FailingFileSystem], tmp_path: Path, folder: str, failure: OSError, expected: type[StorageError]
) -> None:
    """fsspec's own find() passes over it."""
    store = open_fsspec(f"fsspec+failing://{tmp_path}")
    store.put("commits/identity/k", [b"x"])
    failing.failure, failing.step = failure, f"list {folder}"
    for prefix in ("", "commits/"):
        with pytest.raises(expected) as caught:
            list(store.list(prefix))
        assert type(caught.value) is expected
    with pytest.raises(expected):
        store.abort_uploads(0, ["commits/"])


@pytest.mark.parametrize("failure", [FileNotFoundError("gone"), OSError(2, "gone"), type("Smb", (OSError,), {})(2, "")])
def test_a_folder_that_is_not_there_or_goes_meanwhile_has_nothing(
    failing: type[FailingFileSystem], tmp_path: Path, failure: OSError
) -> None:
    store = open_fsspec(f"fsspec+failing://{tmp_path}")
    assert list(store.list("commits/")) == []
    store.put("commits/k", [b"x"])
    store.put("data/k", [b"x"])
    failing.failure, failing.step = failure, "list commits"
    assert [info.key for info in store.list("")] == ["data/k"]


def test_a_prune_that_cannot_list_the_commits_retires_nothing(failing: type[FailingFileSystem], tmp_path: Path) -> None:
    store = open_fsspec(f"fsspec+failing://{tmp_path}")
    run = Run(store)
    commit(store, 10, snapshot({"w": floats(4)}))
    run.close_epoch(epoch(1), "test")
    failing.failure, failing.step = OSError("Socket is closed"), "list commits"
    with pytest.raises(StorageError):
        Pruner(run, None, grace_s=-1).plan(run.view(), Keep(last=1))


def test_a_file_system_that_may_have_one_connection_is_asked_by_one_thread_at_a_time(tmp_path: Path) -> None:
    store = open_fsspec(f"fsspec+one://{tmp_path}")
    store.put("k", [bytes(range(256))])
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda at: store.get_range("k", at, 8)[0], range(64))) == list(range(64))


@pytest.mark.parametrize(
    "failure",
    [
        BrokenPipeError(32, "Broken pipe"),
        EOFError(),
        OSError("Socket is closed"),
        ftplib.error_temp("421 closing"),
        ftplib.error_reply("226 of what was asked before"),
        type("SSHException", (Exception,), {})("Server connection dropped"),
    ],
)
def test_a_connection_that_broke_is_made_anew_by_the_next_operation(tmp_path: Path, failure: BaseException) -> None:
    store = open_fsspec(f"fsspec+breaking://{tmp_path}")
    store.put("k", [b"x"])
    (first,) = BreakingFileSystem.made
    first.failure = failure
    with pytest.raises(TransientError):
        store.get("k", 10)
    assert store.get("k", 10) == b"x"
    assert [info.key for info in store.list("")] == ["k"]
    assert len(BreakingFileSystem.made) == 2


def test_a_connection_ends_with_the_store(tmp_path: Path) -> None:
    """Whose thread ends where nobody has it any more, as SFTP's."""
    ended = threading.Event()
    store = open_fsspec(f"fsspec+breaking://{tmp_path}")
    store.put("k", [b"x"])
    weakref.finalize(BreakingFileSystem.made.pop(), ended.set)
    store.close()
    gc.collect()
    assert ended.is_set()


@pytest.mark.parametrize("status", [405, 501])
def test_a_url_that_can_only_be_read_is_told(status: int) -> None:
    """By a web server that knows no PUT; and where fsspec has no way to move what was put, as for all of HTTP."""
    for answered, said in ((status, str(status)), (201, "NotImplementedError")):
        with web_server(answered) as url, pytest.raises(StorageError, match="this URL is read-only") as caught:
            open_fsspec(f"{url}/run").put("k", [b"x"])
        assert said in str(caught.value)
        assert type(caught.value) is StorageError
    with web_server(201, status) as url, pytest.raises(StorageError, match=str(status)) as caught:
        list(open_fsspec(f"{url}/run").list(""))
    assert "read-only" not in str(caught.value)


def test_what_is_an_answer_makes_no_new_connection(tmp_path: Path) -> None:
    store = open_fsspec(f"fsspec+breaking://{tmp_path}")
    with pytest.raises(NotFound):
        store.get("k", 10)
    assert len(BreakingFileSystem.made) == 1


def test_every_operation_outlives_a_restart_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RETRY_S", "30")
    port = free_port()
    words = [program("rclone"), "--config", os.devnull, "serve", "ftp", str(tmp_path), "--addr", f"127.0.0.1:{port}"]
    store = open_store(f"ftp://127.0.0.1:{port}/run")  # before it is there
    with running(words, port):
        store.put("a/k", [b"0123"])
    with running(words, port):
        assert [info.key for info in store.list("a/")] == ["a/k"]
    with running(words, port):
        assert store.get("a/k", 10) == b"0123"
    with running(words, port):
        store.put("a/l", [b"4567"])
    with running(words, port):
        assert bytes(store.get_range("a/l", 1, 2)) == b"56"
    with running(words, port):
        store.delete(["a/k"])
        assert [info.key for info in store.list("")] == ["a/l"]
    store.close()


def test_a_server_that_ends_the_session_has_not_said_that_nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec says so of its listings, whatever the server answered."""
    monkeypatch.setattr(FTPFileSystem, "_connect", lambda self: setattr(self, "ftp", SilentFtp()))
    store = open_fsspec("ftp://127.0.0.1/run")
    with pytest.raises(TransientError, match="421 Timeout"):
        list(store.list("commits/"))
    with pytest.raises(TransientError, match="421 Timeout"):
        store.head("commits/k")


def test_what_is_not_there_is_so_also_for_whoever_handles_a_failure(tmp_path: Path) -> None:
    store = open_fsspec(f"fsspec+file://{tmp_path}")
    try:
        raise TransientError("a put") from ConnectionResetError("reset")
    except TransientError:
        assert list(store.list("")) == []
        with pytest.raises(NotFound):
            store.get("k", 10)


@pytest.mark.parametrize("protocol", ["file", "plain"])
def test_a_listing_is_current_whatever_the_file_system_caches(tmp_path: Path, protocol: str) -> None:
    one, two = (open_fsspec(f"fsspec+{protocol}://{tmp_path}") for _ in range(2))
    assert list(one.list("")) == []
    two.put("k", [b"x"])
    assert [info.key for info in one.list("")] == ["k"]
    two.delete(["k"])
    with pytest.raises(NotFound):
        one.head("k")


def test_a_server_that_is_not_there_when_it_is_opened_is_named_by_the_first_operation() -> None:
    """Some file systems connect at once."""
    store = open_fsspec(f"ftp://127.0.0.1:{free_port()}/run")
    with pytest.raises(TransientError, match=r"ftp://127\.0\.0\.1"):
        store.head("k")


def test_a_file_system_that_cannot_be_opened_is_told() -> None:
    with pytest.raises(UsageError, match="Protocol not known: nonsense"):
        open_fsspec("fsspec+nonsense://x")
    with pytest.raises(UsageError, match="install the package for it"):
        open_fsspec("dropbox://host/x")  # dropboxdrivefs is not installed


def test_a_reply_that_is_short_or_the_whole_object_is_never_taken_for_the_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_fsspec("fsspec+memory://replies")
    store.put("k", [b"0123456789"])
    real = MemoryFileSystem.cat_file
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", lambda *args, **more: real(*args, **more)[:2])
        with pytest.raises(TransientError, match="2 of 5 bytes arrived"):
            store.get_range("k", 0, 5)
        with pytest.raises(DamagedData, match="has 10 bytes"):
            store.get_range("k", 8, 5)
        patch.setattr(MemoryFileSystem, "cat_file", lambda self, path, **_: real(self, path))
        assert store.get_range("k", 3, 4) == b"3456"
        assert store.get_range("k", 0, 10) == b"0123456789"
        with pytest.raises(DamagedData, match="has 10 bytes"):
            store.get_range("k", 8, 5)
    store.delete(["k"])


@pytest.mark.parametrize(
    "told",
    [
        *({"created": each} for each in ("2026-01-02T03:04:05Z", 1767323045.0, 1767323045)),
        {"modificationTime": 1767323045000},  # WebHDFS
        {"modify": "20260102030405"},  # FTP
    ],
)
def test_a_modification_time_is_read_however_it_is_told(
    told: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *_, **__: {"type": "file", "size": 1, **told})
    assert open_fsspec("fsspec+memory://times").head("k").modified_s == 1767323045.0


def test_where_no_time_is_told_nothing_is_ever_old(tmp_path: Path) -> None:
    store = open_fsspec(f"fsspec+timeless://{tmp_path}")
    run = begun(store)
    for step in (10, 20):
        commit(store, step, snapshot({"w": floats(8, 8, seed=step)}))
    (tmp_path / "data" / f"{TEMPORARY_PREFIX}writing").write_text("half")
    pruner = Pruner(run, epoch(1), grace_s=0.0)
    with Lease(store, [identity(1, 10)], refresh_s=0.001):
        assert len(pruner.plan(run.view(), Keep(last=1)).retire) == 1
        for _ in range(3):
            plan = pruner.plan(run.view(), Keep(last=1))
            pruner.execute(plan)
            assert (plan.records, plan.packs, plan.leases) == ((), (), ())
    assert "gives no age of its objects" in plan.blocked
    assert (tmp_path / "data" / f"{TEMPORARY_PREFIX}writing").exists()
    assert all(ref.saved_s is None for ref in run.view().commits)


def test_a_job_that_beats_is_seen_to_live_where_no_time_is_told(tmp_path: Path) -> None:
    store = open_fsspec(f"fsspec+timeless://{tmp_path}")
    theirs = Run(store)
    theirs.put_claim(Claim(epoch(1), None, launch="theirs"))
    theirs.put_heartbeat(epoch(1), 10, 10.0)
    mine = Run(store, clock=Beating(lambda: theirs.put_heartbeat(epoch(1), 11, 10.0)))
    with pytest.raises(RunInUse):
        mine.check_not_in_use(mine.view(), "mine", 10.0)
