"""The local backend: durability, and the faults of disks and folders."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.backends.local import LocalBackend, open_local
from ckpt.errors import AccessDenied, AlreadyExists, DamagedData, NotFound, StorageError, TransientError
from ckpt.storage import PutMode
from ckpt.storage.names import TEMPORARY_PREFIX


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / "store"


@pytest.fixture
def store(folder: Path) -> LocalBackend:
    return open_local(os.fspath(folder))


@pytest.mark.parametrize("mode", PutMode)
def test_bytes_then_name_then_folder_reach_the_disk_in_that_order(
    store: LocalBackend, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: PutMode
) -> None:
    done: list[str] = []

    def name_of(path: str) -> str:
        name = os.path.relpath(path, folder.parents[1])
        return os.path.join(os.path.dirname(name), "TEMPORARY") if TEMPORARY_PREFIX in name else name

    def note(name: str, told: Callable[..., str]) -> None:
        real = getattr(os, name)

        def noted(*args: object, **kwargs: object) -> object:
            result = real(*args, **kwargs)
            done.append(f"{name} {told(*args)}")
            return result

        monkeypatch.setattr(os, name, noted)

    note("mkdir", lambda path: name_of(path))
    note("write", lambda fd, _: name_of(os.readlink(f"/proc/self/fd/{fd}")))
    note("fsync", lambda fd: name_of(os.readlink(f"/proc/self/fd/{fd}")))
    note("replace", lambda _, path: name_of(path))
    note("link", lambda _, path: name_of(path))
    store.put("a/b/k", [b"x"], mode)
    name = "new/store/a/b"
    appears = "replace" if mode is PutMode.OVERWRITE else "link"
    write = [f"write {name}/TEMPORARY", f"fsync {name}/TEMPORARY", f"{appears} {name}/k", f"fsync {name}"]
    assert done == [
        *("mkdir new", "fsync .", "mkdir new/store", "fsync new"),
        *("mkdir new/store/a", "fsync new/store", "mkdir new/store/a/b", "fsync new/store/a"),
        *write,
    ]
    done.clear()
    store.put("a/b/k2", [b"x"], mode)  # the folders are known to be on the disk
    assert done == [each.replace("/k", "/k2") for each in write]


def test_a_folder_that_another_made_is_on_the_disk_before_what_it_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.joinpath("a/b").mkdir(parents=True)
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    open_local(os.fspath(folder)).put("a/b/k", [b"x"])
    assert [Path(each) for each in synced[:2]] == [folder, folder / "a"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace", "link"])
def test_a_disk_that_fails_leaves_the_old_object_and_no_rubbish(
    store: LocalBackend, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store.put("k", [b"old"])

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(StorageError, match="kernel's log"):
            store.put(
                "new" if step == "link" else "k", [b"new"], PutMode.IF_ABSENT if step == "link" else PutMode.OVERWRITE
            )
    assert store.get("k", 3) == b"old"
    assert os.listdir(folder) == ["k"]


def test_a_full_disk_is_told_and_leaves_nothing(store: LocalBackend, folder: Path) -> None:
    store.put("k", [b"old"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        for size in (3 << 20, 9 << 20):  # through the page cache, and past it
            with pytest.raises(StorageError, match=r"MiB are free: make room \(`ckpt prune .* --last 2 --yes` "):
                store.put("k", [bytes(size)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.get("k", 3) == b"old"
    assert os.listdir(folder) == ["k"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
        (errno.EROFS, AccessDenied),
        (errno.EACCES, AccessDenied),
        (errno.ESTALE, TransientError),
        (errno.EMFILE, TransientError),
        (errno.EIO, StorageError),
        (errno.ELOOP, StorageError),
    ],
)
def test_each_fault_of_a_disk_has_its_class(
    store: LocalBackend, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[StorageError]
) -> None:
    store.put("k", [b"x"])

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        for attempt in (lambda: store.put("k", [b"y"]), lambda: store.get("k", 1), lambda: store.get_range("k", 0, 1)):
            with pytest.raises(expected) as caught:
                attempt()
            assert type(caught.value) is expected
    assert store.get("k", 1) == b"x"


def test_a_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    store = open_local(str(tmp_path / ("x" * 300)))
    with pytest.raises(StorageError, match="give a shorter path"):
        store.put("k", [b"x"])


def test_no_permission_is_told(store: LocalBackend, folder: Path) -> None:
    store.put("a/k", [b"x"])
    for each in (folder / "a", folder, folder.parent):
        each.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        for attempt in (lambda: store.put("a/k", [b"y"]), lambda: store.put("new/k", [b"y"])):
            with pytest.raises(AccessDenied, match=r"give user \d+ permission to read and write there"):
                attempt()
        if user == 0:
            with pytest.raises(AccessDenied):
                store.get("a/k", 1)
            with pytest.raises(AccessDenied):
                list(store.list(""))
    finally:
        os.seteuid(user)
        for each in (folder.parent, folder, folder / "a"):
            each.chmod(0o700)
    assert store.get("a/k", 1) == b"x"


def test_a_file_where_a_folder_should_be_is_told(store: LocalBackend, folder: Path) -> None:
    store.put("a", [b"x"])
    for attempt in (lambda: store.put("a/k", [b"y"]), lambda: store.put("a/b/k", [b"y"])):
        with pytest.raises(StorageError, match="there is a file instead of a folder"):
            attempt()
    store.put("folder/k", [b"x"])
    with pytest.raises(StorageError, match="a folder instead of a file"):
        store.put("folder", [b"x"])
    with pytest.raises(NotFound):
        store.get("folder", 10)
    folder.parent.joinpath("other").write_text("x")
    with pytest.raises(StorageError, match="there is a file instead"):
        LocalBackend(os.fspath(folder.parent / "other" / "store")).put("k", [b"x"])


def test_a_folder_that_its_file_system_does_not_make_is_told_and_not_tried_again() -> None:
    with pytest.raises(StorageError, match="/proc/ckpt/run cannot be made") as caught:
        open_local("/proc/ckpt/run").put("k", [b"x"])
    assert type(caught.value) is StorageError


def test_links_are_not_followed_out_of_the_store(store: LocalBackend, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("secret")
    store.put("k", [b"x"])
    (folder / "to-file").symlink_to(secret / "file")
    for attempt in (lambda: store.get("to-file", 10), lambda: store.get_range("to-file", 0, 1)):
        with pytest.raises(StorageError, match="symbolic link"):
            attempt()
    with pytest.raises(NotFound):
        store.head("to-file")
    with pytest.raises(StorageError, match="symbolic link"):
        list(store.list(""))
    store.put("to-file", [b"mine"])  # takes the name, not what it points to
    assert (secret / "file").read_text() == "secret"
    assert [info.key for info in store.list("")] == ["k", "to-file"]


def test_what_is_no_regular_file_does_not_block(store: LocalBackend, folder: Path) -> None:
    store.put("k", [b"x"])
    os.mkfifo(folder / "pipe")
    with pytest.raises(NotFound):
        store.get("pipe", 10)
    assert [info.key for info in store.list("")] == ["k"]


def test_foreign_files_are_none_of_ours(store: LocalBackend, folder: Path) -> None:
    store.put("k", [b"x"])
    for name in (".DS_Store", "with space", ".git/config", "x" * 65):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert [info.key for info in store.list("")] == ["k"]
    assert store.abort_uploads(-60) == 0
    assert (folder / ".DS_Store").exists()


def test_links_beside_our_folders_are_none_of_ours(store: LocalBackend, folder: Path) -> None:
    store.put("data/k", [b"x"])
    (folder / "latest").symlink_to("data")
    (folder / "data" / f"{TEMPORARY_PREFIX}0123").write_text("half")
    assert [info.key for info in store.list("data/")] == ["data/k"]
    assert store.abort_uploads(-60, ["data/", "commits/"]) == 1
    assert (folder / "latest").is_symlink()


def test_a_file_cut_off_while_it_is_read_is_damage(
    store: LocalBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", [bytes(100)])
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (os.truncate(folder / "k", 50), real(*args))[1])
    with pytest.raises(DamagedData, match="truncated to 50 bytes"):
        store.get_range("k", 0, 100)


def test_a_store_whose_folder_vanishes_is_empty(store: LocalBackend, folder: Path) -> None:
    store.put("a/k", [b"x"])
    os.rename(folder, folder.parent / "elsewhere")
    assert list(store.list("")) == []
    with pytest.raises(NotFound):
        store.get("a/k", 1)
    store.put("a/k", [b"y"])  # and can be begun again
    assert store.get("a/k", 1) == b"y"


def test_a_put_survives_that_its_folder_is_removed_meanwhile(store: LocalBackend) -> None:
    def work(n: int) -> None:
        for _ in range(100):
            store.put(f"data/x/{n}", [b"x"])
            store.delete([f"data/x/{n}"])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert list(store.list("")) == []


def test_a_taken_name_stays_where_the_file_system_has_no_links(
    store: LocalBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    store.put("k", [b"first"], PutMode.IF_ABSENT)
    with pytest.raises(AlreadyExists):
        store.put("k", [b"second"], PutMode.IF_ABSENT)
    assert store.get("k", 10) == b"first"
    assert os.listdir(folder) == ["k"]


KILLED = """
import sys
from ckpt.backends.local import open_local
store = open_local(sys.argv[1])
for n in range(10**6):
    store.put("k", [bytes([n % 256]) * (4 << 20)] * 2)
    print(n, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_object(store: LocalBackend, folder: Path, seed: int) -> None:
    after_s = random.Random(seed)
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(after_s.uniform(0, 0.03))  # any moment will do
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = store.get("k", 8 << 20)
        assert found == found[:1] * (8 << 20)
    left = [name for name in os.listdir(folder) if name != "k"]
    assert all(name.startswith(TEMPORARY_PREFIX) for name in left)
    assert store.abort_uploads(-60) == len(left)
    assert os.listdir(folder) == ["k"]


def test_large_reads_are_exact(store: LocalBackend) -> None:
    data = os.urandom(1 << 20) * 26  # beyond HUGE_BYTES
    store.put("k", [data])
    assert bytes(store.get_range("k", 1, len(data) - 1)) == data[1:]


def test_the_kernel_may_do_less_than_it_is_asked(store: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, view: write(fd, view[:7]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    chunks = [bytes(range(n)) for n in (0, 3, 20, 7, 1, 0, 14)]
    store.put("k", chunks)
    assert store.get("k", 100) == b"".join(chunks)
    assert bytes(store.get_range("k", 2, 40)) == b"".join(chunks)[2:42]


def _direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _knows_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "k", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 700_000])
def test_large_objects_are_exact_past_the_page_cache(
    store: LocalBackend, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, cut: int
) -> None:
    data = random.Random(seed).randbytes((9 << 20) - cut)
    real = os.write
    seen: list[int] = []

    def write(fd: int, view: memoryview) -> int:
        assert _direct(fd)
        assert len(view) % 4096 == 0
        seen.append(len(view))
        return real(fd, view[: 1 << 20])  # less than it is asked

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        step = 1_000_003
        store.put("k", [memoryview(data)[at : at + step] for at in range(0, len(data), step)])
    assert store.get("k", len(data)) == data
    assert store.head("k").size == len(data)
    assert bool(seen) == _knows_direct(folder)


@pytest.mark.parametrize("after", [0, 2])
def test_a_file_system_that_refuses_to_bypass_its_cache_is_written_through_it(
    store: LocalBackend, monkeypatch: pytest.MonkeyPatch, seed: int, after: int
) -> None:
    data = random.Random(seed).randbytes((8 << 20) + 1)
    real = os.write
    calls = itertools.count()

    def write(fd: int, view: memoryview) -> int:
        if _direct(fd) and next(calls) >= after:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, view)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        store.put("k", [data])
    assert store.get("k", len(data)) == data


@pytest.mark.parametrize(("chunks", "chunk_bytes"), [(32, 1 << 20), (1, 32 << 20), (1, 1 << 20)])
def test_a_put_that_is_broken_off_ends_soon_where_the_cache_cannot_be_bypassed(
    store: LocalBackend, folder: Path, monkeypatch: pytest.MonkeyPatch, chunks: int, chunk_bytes: int
) -> None:
    written, cancel = [], threading.Event()
    write_real, fsync, control = os.write, os.fsync, fcntl.fcntl

    def write(fd: int, view: memoryview) -> int:
        assert not cancel.is_set(), "it goes on"
        written.append(write_real(fd, view))
        cancel.set()
        return written[-1]

    def sync(fd: int) -> None:
        assert not stat.S_ISREG(os.fstat(fd).st_mode), "what is given up need not be on the disk"
        fsync(fd)

    def refuse(fd: int, what: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(fd, what, flags)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        patch.setattr(os, "fsync", sync)
        patch.setattr(fcntl, "fcntl", refuse)
        with pytest.raises(StorageError, match="put was cancelled"):
            store.put("data/k", [bytes(chunk_bytes)] * chunks, cancel=cancel)
    assert sum(written) <= 8 << 20
    assert not [path for path in folder.rglob("*") if path.is_file()], "nor is the temporary file left"


def test_a_top_folder_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "data").symlink_to(tmp_path / "disk")
    store = open_local(str(tmp_path / "run"))
    store.put("data/a/1", [b"one"])
    store.put("data/b", [b"two"])
    assert [info.key for info in store.list("data/")] == ["data/a/1", "data/b"]
    assert store.get("data/a/1", 9) == b"one"
    store.delete(["data/a/1", "data/b"])
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "run" / "data").is_symlink()
    store.put("data/c", [b"three"])
    assert (tmp_path / "disk" / "c").read_bytes() == b"three"
    store.close()
