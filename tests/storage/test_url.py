"""From a URL to a backend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt import storage
from ckpt.backends.any_fsspec import open_fsspec
from ckpt.errors import UsageError
from ckpt.storage.late import late_listing_cause
from ckpt.storage.names import redact_url
from ckpt.storage.retry import Retrying
from ckpt.storage.url import OUR_BACKENDS, canonical, scheme_of


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/a/b/../c/", "/a/c"),
        ("file:///a//b%20c/", "/a/b c"),
        ("FILE:///a", "/a"),
        ("file://localhost/a/b", "/a/b"),
        ("file:///a/%C3%BC%ff", "/a/ü\udcff"),  # as os.fsdecode has a name that is no UTF-8
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/a//b/", "s3://bucket/a/b"),
        ("gs://bucket/a=b", "gs://bucket/a=b"),
        ("az://container/run", "az://container/run"),
        ("memory://x", "memory://x"),
        ("fsspec+s3://bucket/a/", "fsspec+s3://bucket/a"),
        ("sftp://user@host:22/a", "sftp://user@host:22/a"),
    ],
)
def test_equal_stores_have_one_canonical_url(url: str, expected: str) -> None:
    assert canonical(url) == expected
    assert canonical(expected) == expected


def test_a_path_is_relative_to_here_and_links_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", os.fspath(tmp_path / "home"))
    assert canonical("link/run") == canonical("./real/run") == os.path.realpath(tmp_path / "real/run")
    assert canonical("~/run") == os.path.realpath(tmp_path / "home/run")
    assert scheme_of(canonical("link")) == "file"


@pytest.mark.parametrize(
    "url",
    [
        *("", "s3:/bucket", "s3:bucket", "file:/a", "https:/x", "://x", "s3://", "s3:///a", "s3://bucket/../a"),
        *("s3://bucket/a?endpoint=x", "s3://buck et/a", "s3://bucket/a\nb", "file://host/a", "a\x00b", "Ä://x"),
        *("memory:///", "nonsense://x", "fsspec+nonsense://x", "file:///tmp/%00a", "S3:bucket/x", "File:/a"),
        *("s3//bucket/run", "GS//bucket/run"),
    ],
)
def test_a_wrong_url_is_refused_and_what_is_accepted_is_said(url: str) -> None:
    with pytest.raises(UsageError, match=r"s3://|file:///|environment|a URL that fsspec knows"):
        storage.open(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:se/cret@bucket/x",
        "s3://AKIA:se@cret@bucket/x",
        "nonsense://user:secret@host/x",
        "fsspec+nonsense://user:secret@host/x",
        "file://user:secret@host/x",
        "s3://AKIA:secret@bucket\n",
    ],
)
def test_a_refusal_does_not_tell_a_password(url: str) -> None:
    with pytest.raises(UsageError, match=r":\*\*\*@") as caught:
        storage.open(url)
    assert "cret" not in str(caught.value)


def test_a_store_is_told_of_without_its_password_and_with_its_port() -> None:
    assert open_fsspec("fsspec+memory://user:secret@host/a").url == "fsspec+memory://user:***@host/a"
    assert redact_url("ftp://me@corp.com:secret@host:21/a") == "ftp://me@corp.com:***@host:21/a"
    for url in ("sftp://user@host:22/a", "sftp://host:22/a@b", "s3://bucket/a", "/a:b@c"):
        assert redact_url(url) == url


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a folder"):
        storage.open(f"{tmp_path}/file")


def test_every_backend_is_wrapped_in_the_one_retry(tmp_path: Path) -> None:
    for url in (os.fspath(tmp_path), "memory://here", "fsspec+memory://there"):
        store = storage.open(url)
        assert isinstance(store, Retrying)
        assert store.url == url
        store.close()


def test_two_that_open_a_memory_url_see_one_store() -> None:
    one, two = storage.open("memory://shared"), storage.open("memory://shared/")
    one.put("k", [b"x"])
    one.close()
    assert two.get("k", 1) == b"x"
    two.delete(["k"])


def test_the_table_says_what_the_entry_points_say() -> None:
    found = {point.name: point.value for point in importlib.metadata.entry_points(group="ckpt.backends")}
    assert {name: found.get(name) for name in OUR_BACKENDS} == OUR_BACKENDS


def test_a_foreign_package_may_bring_a_backend(tmp_path: Path) -> None:
    info = tmp_path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpt.backends]\nshelf = foreign:open_shelf\n")
    (tmp_path / "foreign.py").write_text(
        "from ckpt.backends.memory import open_memory\ndef open_shelf(url): return open_memory(url)\n"
    )
    code = "from ckpt import storage; print(storage.open('shelf://a/b').inner.url)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.fspath(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("shelf://a/b\n", "")


@pytest.mark.parametrize("url", ["/nowhere/here", "memory://x"])
def test_opening_a_plain_store_imports_nothing_heavy(url: str) -> None:
    heavy = ("torch", "numpy", "obstore", "fsspec", "importlib.metadata", "botocore", "asyncio")
    code = (
        f"import sys; from ckpt import storage; storage.open({url!r}); print(sorted({{*{heavy!r}}} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_backends_are_no_package_by_their_bare_name() -> None:
    spec = importlib.util.spec_from_file_location(
        "backends", Path(storage.__file__).parents[2] / "backends/__init__.py"
    )
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"ckpt\.backends"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    ("url", "is_late"),
    [
        *((url, False) for url in ("s3://b/r", "gs://b/r", "az://b/r", "memory://r", "fsspec+s3://b/r", "sftp://h/r")),
        *((url, True) for url in ("smb://host/r", "fsspec+dropbox://r", "late://r")),
    ],
)
def test_object_stores_and_what_asks_a_server_each_time_list_promptly(url: str, is_late: bool) -> None:
    assert (late_listing_cause(url) is not None) == is_late


def test_a_folder_on_a_local_disk_lists_promptly(tmp_path: Path) -> None:
    assert late_listing_cause(str(tmp_path)) is None
    assert late_listing_cause(str(tmp_path / "not" / "there yet")) is None
