"""What a failing S3 server does to us: each fault gives the right class of error, and a put is whole or not there."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt import settings, storage
from ckpt.backends.cloud import SMALL_TIMEOUT_S, CloudBackend, open_cloud
from ckpt.backends.cloud_config import other_config, s3_config
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    DamagedData,
    NotFound,
    StorageError,
    TransientError,
    UsageError,
)
from ckpt.storage import PutMode
from tests.storage import tiny
from tests.storage.tiny import CUT, LOST_REPLY, NAMED, PARTIAL, RESET, SILENT, WHOLE, TinyS3

URL = "s3://bucket/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyS3]:
    with tiny.tiny() as server:
        for name, value in server.at.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def cloud(server: TinyS3, request: pytest.FixtureRequest) -> Iterator[CloudBackend]:
    """The bare backend: no retries around it. As parameter: for how long it is patient."""
    backend = open_cloud(URL, timeout_s=getattr(request, "param", SMALL_TIMEOUT_S))
    yield backend
    backend.close()


def attempts(cloud: CloudBackend) -> dict[str, Callable[[], object]]:
    return {
        "put": lambda: cloud.put("k", [b"x"]),
        "put if absent": lambda: cloud.put("k", [b"x"], PutMode.IF_ABSENT),
        "get": lambda: cloud.get("k", 10),
        "get_range": lambda: cloud.get_range("k", 0, 1),
        "head": lambda: cloud.head("k"),
        "list": lambda: list(cloud.list("")),
        "delete": lambda: cloud.delete(["k"]),
        "abort_uploads": lambda: cloud.abort_uploads(0),
    }


NO_PATHS = ["commits//x", "commits/a/../b", "commits/./x", "commits/a\nb", "certificate//x", "/x"]


@pytest.mark.parametrize("name", NO_PATHS)
def test_a_foreign_object_whose_name_is_no_path_hides_nothing(server: TinyS3, cloud: CloudBackend, name: str) -> None:
    server.objects = {"run/commits/a": b"1", f"run/{name}": b"", "run/epochs/b": b"22", "running/c": b"3"}
    assert [(info.key, info.size) for info in cloud.list("")] == [("commits/a", 1), ("epochs/b", 2)]
    assert [info.key for info in cloud.list("commits/")] == ["commits/a"]
    listed = list(cloud.list(""))
    del server.objects[f"run/{name}"]
    assert listed == list(cloud.list("")), "in all that is told of an object"


def test_where_such_an_object_hides_the_others_the_error_names_it(
    server: TinyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", server.at.endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "any")
    backend = open_cloud("gs://bucket/run", timeout_s=5)
    server.objects = {"run/commits/a": b"1", "run/commits//x": b""}
    with pytest.raises(StorageError, match=r"run/commits//x.*rename or remove the object"):
        backend.list("")
    backend.close()


@pytest.mark.parametrize("fault", [500, 502, 503, 504, 429, 408, 520, 527, RESET])
def test_what_may_pass_is_transient_and_is_asked_once(server: TinyS3, cloud: CloudBackend, fault: int | str) -> None:
    for what, attempt in attempts(cloud).items():
        server.requests.clear()
        server.plan = [("*", fault)] * 3 if what != "abort_uploads" else [("GET", fault)]
        with pytest.raises(TransientError, match=r"bucket/run"):
            attempt()
        assert len([each for each in server.requests if not each.endswith("clock")]) == 1, what


@pytest.mark.parametrize("cloud", [0.5], indirect=True)
def test_a_server_that_never_answers_is_transient(server: TinyS3, cloud: CloudBackend) -> None:
    for what, attempt in attempts(cloud).items():
        if what not in ("put if absent", "abort_uploads"):  # they have a longer time-out
            server.plan = [("*", SILENT)]
            with pytest.raises(TransientError, match=r"Timeout|timed out|TimedOut"):
                attempt()


@pytest.mark.parametrize("port_is", ["closed", "unknown"])
def test_a_server_that_is_not_there_is_transient(port_is: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.tiny() as server:
        environment = server.at.environment()
    host = "http://nowhere.invalid" if port_is == "unknown" else environment["AWS_ENDPOINT_URL"]
    for name, value in {**environment, "AWS_ENDPOINT_URL": host}.items():
        monkeypatch.setenv(name, value)
    backend = open_cloud(URL, timeout_s=5)
    for attempt in attempts(backend).values():
        with pytest.raises(TransientError):
            attempt()
    backend.close()


@pytest.mark.parametrize(
    ("status", "code", "expected", "said"),
    [
        (403, "AccessDenied", AccessDenied, "credentials"),
        (403, "SignatureDoesNotMatch", AccessDenied, "credentials"),
        (400, "ExpiredToken", AccessDenied, "credentials"),
        (403, "RequestTimeTooSkewed", AccessDenied, "clock"),
        (401, "", AccessDenied, "credentials"),
        (403, "QuotaExceeded", StorageError, "make room"),
        (507, "InsufficientStorage", StorageError, "make room"),
        (404, "NoSuchBucket", StorageError, "no bucket bucket"),
        (404, "NoSuchKey", NotFound, "k"),
        (412, "PreconditionFailed", AlreadyExists, "k"),
        (409, "ConditionalRequestConflict", TransientError, "409"),
        (409, "OperationAborted", TransientError, "409"),
        (400, "RequestTimeout", TransientError, "400"),
        (400, "IncompleteBody", TransientError, "400"),
        (301, "PermanentRedirect", StorageError, "AWS_REGION"),
        (400, "InvalidRequest", StorageError, "InvalidRequest"),
        (501, "NotImplemented", StorageError, "501"),
    ],
)
def test_a_refusal_has_its_class_and_says_what_to_do(
    server: TinyS3, cloud: CloudBackend, status: int, code: str, expected: type[StorageError], said: str
) -> None:
    server.body = f"<Error><Code>{code}</Code><Message>because</Message></Error>" if code else ""
    for mode in PutMode:
        server.plan = [("PUT", status)]
        with pytest.raises(expected, match=said) as caught:
            cloud.put("k", [b"x"], mode)
        assert type(caught.value) is expected
        assert "Debug source" not in str(caught.value)


def test_a_server_that_finds_no_uploads_where_none_were_begun_has_none(server: TinyS3, cloud: CloudBackend) -> None:
    server.body = "<Error><Code>NoSuchUpload</Code><Message>NoSuchUpload</Message></Error>"
    server.plan = [("GET", 404)]
    assert cloud.abort_uploads(0) == 0
    assert server.plan == []


def not_deleted(key: str, code: str) -> str:
    """The reply to a bulk delete that has left one key."""
    error = f"<Error><Key>{key}</Key><Code>{code}</Code><Message>no</Message></Error>"
    return f"<DeleteResult>{error}</DeleteResult>"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("AccessDenied", AccessDenied),
        ("InternalError", TransientError),
        ("SlowDown", TransientError),
        ("InvalidRequest", StorageError),
        ("ExpiredToken", AccessDenied),
    ],
)
def test_a_key_that_a_bulk_delete_left_has_the_class_of_its_code(
    server: TinyS3, cloud: CloudBackend, code: str, expected: type[StorageError]
) -> None:
    server.body = not_deleted("run/k", code)
    server.plan = [("POST", 200)]
    with pytest.raises(expected) as caught:
        cloud.delete(["k", "l"])
    assert type(caught.value) is expected


def test_a_key_that_a_bulk_delete_did_not_find_is_gone(server: TinyS3, cloud: CloudBackend) -> None:
    server.body = not_deleted("run/k", "NoSuchKey")
    server.plan = [("POST", 200)]
    cloud.put("l", [b"x"])
    cloud.delete(["k", "l"])
    assert server.objects == {}


def test_a_reply_that_obstore_panics_at_is_an_error_like_any_other(server: TinyS3, cloud: CloudBackend) -> None:
    server.body = not_deleted("elsewhere", "AccessDenied")
    server.plan = [("POST", 200)]
    with pytest.raises(StorageError, match="delete 1 object:"):
        cloud.delete(["k"])


def test_the_stack_tries_again_until_the_server_is_well(server: TinyS3) -> None:
    store = storage.open(URL, settings=replace(settings.read_settings(), retry_s=60.0))
    server.plan = [("PUT", 503), ("PUT", RESET), ("PUT", LOST_REPLY), ("GET", 500), ("GET", CUT)]
    store.put("k", [b"data" * 100])
    assert store.get("k", 1000) == b"data" * 100
    assert server.requests == ["PUT run/k"] * 4 + ["GET run/k"] * 3
    store.close()


def test_a_reply_that_is_cut_off_is_never_data_nor_damage_but_asked_again(server: TinyS3, cloud: CloudBackend) -> None:
    server.objects["run/k"] = data = bytes(range(256)) * 100
    for ranges in (PARTIAL, NAMED, WHOLE):
        server.ranges = ranges
        for start, attempt in (
            (0, lambda: cloud.get("k", 25_600)),
            (0, lambda: cloud.get_range("k", 0, 25_600)),
            (25_000, lambda: cloud.get_range("k", 25_000, 600)),
        ):
            server.plan = [("GET", CUT)] * 2
            with pytest.raises(TransientError):
                attempt()
            server.plan.clear()
            assert bytes(attempt()) == data[start:]


@pytest.mark.parametrize("cloud", [2.0], indirect=True)
@pytest.mark.parametrize("ranges", [NAMED, WHOLE])
def test_a_range_answered_with_200_is_found_out_once_and_read_right(
    server: TinyS3, cloud: CloudBackend, ranges: str
) -> None:
    data = os.urandom(3 << 20)
    server.objects["run/k"], server.ranges = data, ranges
    for start, length in [(0, 10), (5, 1), (2_500_000, 500_000), (0, len(data)), (len(data) - 1, 1)]:
        assert bytes(cloud.get_range("k", start, length)) == data[start : start + length]
    assert len(server.requests) == 6  # one more than gets: obstore was asked once
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: bytes(cloud.get_range("k", n * 1000, 1000)), range(40)))
    assert b"".join(found) == data[:40_000]
    for start, length in [(len(data), 1), (len(data) - 5, 6), (0, len(data) + 1)]:
        at = "" if ranges == NAMED else f"ends at byte {len(data)}, before"
        with pytest.raises(DamagedData, match=f"k.*{at}"):
            cloud.get_range("k", start, length)
    for fault, expected in [
        (503, TransientError),
        (RESET, TransientError),
        (SILENT, TransientError),
        (403, AccessDenied),
    ]:
        server.plan = [("GET", fault)]
        with pytest.raises(expected):
            cloud.get_range("k", 0, 10)
    assert bytes(cloud.get_range("k", 0, 10)) == data[:10]


def test_an_upload_whose_part_fails_is_aborted_and_shows_nothing(server: TinyS3, cloud: CloudBackend) -> None:
    cloud.single_bytes_max, cloud.part_bytes = 1 << 20, 5 << 20
    server.plan = [("PUT", 400)]
    with pytest.raises(StorageError, match="400"):
        cloud.put("k", [bytes(12 << 20)])
    assert server.objects == {}
    assert server.uploads == {}
    assert "DELETE run/k uploadId" in server.requests  # a part that was under way may still arrive after it


@pytest.mark.parametrize("single", [True, False])
def test_a_put_that_is_broken_off_ends_soon_and_its_memory_is_free(
    server: TinyS3, cloud: CloudBackend, single: bool
) -> None:
    if not single:
        cloud.single_bytes_max, cloud.part_bytes = 1 << 20, 5 << 20
    server.plan = [("PUT", SILENT)] * 4
    memory, cancel = mmap.mmap(-1, 12 << 20), threading.Event()
    with memoryview(memory) as view, ThreadPoolExecutor(1) as pool:
        put = pool.submit(cloud.put, "k", [view[: 5 << 20], view[5 << 20 :]], cancel=cancel)
        while not any(each.startswith("PUT") for each in server.requests):
            assert not put.done()
            time.sleep(0.01)
        cancel.set()
        with pytest.raises(StorageError, match="put was cancelled"):
            put.result(60)
    del put
    memory.close()  # nobody has a view of it
    assert server.objects == {}


@pytest.mark.parametrize("fault", [400, 503])
@pytest.mark.parametrize("single", [True, False])
def test_a_large_put_that_fails_leaves_its_memory_free_at_once(
    server: TinyS3, cloud: CloudBackend, single: bool, fault: int
) -> None:
    """Not only when rubbish is collected, which may be hours later: packs are of many megabytes, and so are arenas."""
    if not single:
        cloud.single_bytes_max, cloud.part_bytes = 1 << 20, 5 << 20
    server.plan = [("PUT", fault)] * 9
    memory = mmap.mmap(-1, 12 << 20)
    gc.disable()
    try:
        with memoryview(memory) as view, pytest.raises(StorageError, match=str(fault)) as caught:
            cloud.put("k", [view], cancel=threading.Event())
        del caught
        memory.close()
    finally:
        gc.enable()


def test_one_lost_part_is_sent_again_by_itself(server: TinyS3, cloud: CloudBackend) -> None:
    cloud.single_bytes_max, cloud.part_bytes = 1 << 20, 5 << 20
    server.plan = [("PUT", 503)]
    data = os.urandom(12 << 20)
    cloud.put("k", [data[: 7 << 20], data[7 << 20 :]])
    assert server.objects["run/k"] == data
    assert len([each for each in server.requests if each.startswith("PUT")]) == 4


def test_the_clock_is_the_servers(server: TinyS3, cloud: CloudBackend) -> None:
    assert server.requests == []
    assert abs(cloud.now_s() - cloud.now_s()) < 60
    assert server.requests == ["HEAD run/clock"] * 2
    assert server.objects == {}


def test_no_credentials_are_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tiny.tiny() as nobody:  # answers 404 to whoever asks for a role
        for name in list(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", os.fspath(tmp_path))
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", nobody.at.endpoint)
        backend = open_cloud(URL, timeout_s=5)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", nobody.at.endpoint)  # botocore's name for it
        for attempt in attempts(backend).values():
            with pytest.raises(AccessDenied, match="AWS_ACCESS_KEY_ID"):
                attempt()
        with pytest.raises(
            AccessDenied, match=f"AWS_PROFILE and ~/.aws, .*metadata service of this machine at {nobody.at.endpoint}"
        ):
            backend.get("key", 1)
        backend.close()


def test_a_profile_gives_credentials_region_and_endpoint(
    server: TinyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = id\naws_secret_access_key = secret\n")
    (tmp_path / "config").write_text(f"[profile lab]\nregion = mars-1\nendpoint_url = {server.at.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.fspath(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", os.fspath(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    backend = open_cloud(URL)
    backend.put("k", [b"x"])
    assert server.objects == {"run/k": b"x"}
    assert s3_config(os.environ)["region"] == "mars-1"
    backend.close()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError, match="nobody"):
        open_cloud(URL)


def test_a_profile_that_is_gone_is_not_missed_where_variables_give_the_credentials(
    server: TinyS3, cloud: CloudBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor by botocore, which ends uploads, and lists what obstore cannot."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    server.objects = {"run/a//b": b"", "run/c": b""}
    assert [info.key for info in cloud.list("")] == ["c"]
    (tmp_path / "config").write_text("no section = no config\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.fspath(tmp_path / "config"))
    with pytest.raises(UsageError, match=r"check the AWS variables, ~/\.aws/config"):
        cloud.abort_uploads(0)


@pytest.mark.parametrize(
    ("endpoint", "unsigned", "http"),
    [
        (None, True, None),
        ("https://s3.example.com/", True, False),
        ("http://127.0.0.1:9000", True, True),
        ("http://10.0.0.7:9000", None, True),
    ],
)
def test_the_payload_is_signed_only_on_a_bare_network(
    endpoint: str | None, unsigned: bool | None, http: bool | None
) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "x"} | ({"AWS_ENDPOINT_URL": endpoint} if endpoint else {})
    config = s3_config(environment)
    assert config.get("unsigned_payload") is unsigned
    assert config.get("client_options", {}).get("allow_http") is http
    assert "unsigned_payload" not in s3_config({**environment, "AWS_UNSIGNED_PAYLOAD": "false"})


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://x", "http://", "nonsense"])
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL"):
        s3_config({"AWS_ACCESS_KEY_ID": "x", "AWS_ENDPOINT_URL_S3": endpoint})


@pytest.mark.parametrize(
    ("scheme", "variable", "name"),
    [
        ("gs", "GOOGLE_BASE_URL", "base_url"),
        ("az", "AZURE_STORAGE_ENDPOINT", "endpoint"),
        ("az", "AZURE_ENDPOINT", "endpoint"),
    ],
)
def test_other_clouds_are_asked_without_tls_only_where_the_endpoint_says_so(
    scheme: str, variable: str, name: str
) -> None:
    assert other_config(scheme, {}) == {}
    for endpoint, plain in (("http://127.0.0.1:1/a", True), ("https://example.com/a", False)):
        expected = {name: endpoint, "client_options": {"allow_http": plain}}
        assert other_config(scheme, {variable: endpoint + "/"}) == expected
    with pytest.raises(UsageError, match=variable):
        other_config(scheme, {variable: "localhost:1"})


def test_other_clouds_open_without_asking_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    for url in ("gs://bucket/run", "az://container/run"):
        backend = open_cloud(url)
        assert backend.abort_uploads(0) == 0
        backend.close()
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(AccessDenied, match=r"Account must be specified; set .*AZURE_STORAGE_ACCOUNT_NAME"):
        open_cloud("az://container/run")
