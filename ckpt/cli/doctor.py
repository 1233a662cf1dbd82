"""The command `ckpt doctor`: checks the environment, the credentials, a store's behaviour and this machine's speed."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli import out
from ckpt.cli.exits import Exit
from ckpt.errors import AccessDenied, CkptError, UsageError
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.storage import Backend
    from ckpt.storage.probe import Probe

PACKAGES = ("multilevel-ckpt", "torch", "numpy", "obstore", "fsspec", "zstandard", "xxhash", "msgpack")
# The command shows only whether these are set, never their values.
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BASE_URL",
    "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ENDPOINT",
)  # fmt: skip
CEILING_BYTES = 64 << 20
SKEW_MAX_S = 60.0
PAIR_WAIT_S = 300.0  # for the other machine, and for its answers
# The properties that ckpt needs, by the probe's names. ckpt works without put-if-absent and without ranged gets.
NEEDED = {
    "read_after_write": "what was put is not read back",
    "read_after_overwrite": "what was put anew is read as it was before",
    "list_after_write": "what was put is not listed",
    "delete": "what was deleted is still read",
    "list_after_delete": "what was deleted is still listed",
}
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def doctor(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="A store to try out; something is written there.")
    ] = None,
    pair: Annotated[
        bool, typer.Option("--pair", help="Measure how late another machine's objects show. Run it on both at once.")
    ] = False,
    json: out.JsonOption = False,
) -> None:
    """Look for what is wrong here, and try out a store."""
    if pair and url is None:
        raise UsageError("--pair needs the URL of a store that both machines reach")
    found: dict[str, Any] = {"environment": environment(), "credentials": credentials()}
    found["machine"] = machine_ceilings()
    problems = list(found["environment"].pop("problems"))
    if url is not None:
        found["store"], store_problems = try_store(url, pair)
        problems += store_problems
    found["problems"] = problems
    if json:
        out.print_json(found)
    else:
        for section in ("environment", "credentials", "machine", "store"):
            if section in found:
                out.print_text(section)
                for name, value in found[section].items():
                    out.print_text(f"  {name:<34} {value}")
        for problem in problems:
            out.print_text(f"problem: {problem}")
        if not problems:
            out.print_text("no problem found")
    if problems:
        raise typer.Exit(Exit.STORAGE if url is not None and found["store"].get("error") else Exit.FAILED)


def environment() -> dict[str, Any]:
    """The versions and limits of this environment. The entry `problems` lists what is wrong."""
    import importlib.metadata
    import resource

    from ckpt.settings import read_settings

    problems = []
    facts: dict[str, Any] = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    if sys.platform != "linux":
        problems.append("ckpt needs Linux: arenas are memfds")
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
            problems.append(f"{package} is not installed")
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts["open files, at most"] = files_max
    if files_max < 256:
        problems.append(f"only {files_max} open files are allowed; raise it (ulimit -n 1024)")
    settings = read_settings()
    facts["sockets in"] = str(settings.runtime_dir)
    facts["launch id"] = settings.launch
    problems += _socket_folder_problems(settings.runtime_dir)
    facts["memory available"] = out.format_size(_memory_available())
    facts["processors"] = len(os.sched_getaffinity(0))
    facts["huge pages for shared memory"] = _huge_pages()
    return facts | {"problems": problems}


def _socket_folder_problems(folder: os.PathLike[str]) -> list[str]:
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        return []
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        return [f"{folder} must be yours alone: run chmod 700 on it, or set CKPT_RUNTIME_DIR to another folder"]
    return []


def _memory_available() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _huge_pages() -> str:
    """The kernel's setting of huge pages for arenas, which ask for them. Root changes it by writing `advise` to
    SHMEM_HUGE."""
    try:
        text = SHMEM_HUGE.read_text()
    except OSError:
        return "not in this kernel"
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        return f"{chosen} (restoring from memory is faster with: echo advise > {SHMEM_HUGE})"
    return chosen


def credentials() -> dict[str, str]:
    """The credentials that are set, never their values."""
    facts = {name: "set" for name in CREDENTIALS if os.environ.get(name)}
    for file in ("~/.aws/credentials", "~/.aws/config"):
        if Path(file).expanduser().exists():
            facts[file] = "present"
    return facts or {"none": "neither in the environment nor in ~/.aws"}


def machine_ceilings() -> dict[str, str]:
    """The speed of copying and hashing here, in one thread: no save or restore can be faster."""
    import numpy as np
    import xxhash

    source = np.random.default_rng(0).integers(0, 256, CEILING_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    return {
        "memcpy, one thread": _rate(lambda: np.copyto(target, source)),
        "xxh3-128, one thread": _rate(lambda: xxhash.xxh3_128_digest(source.data)),
    }


def _rate(work: Callable[[], object], count: int = 5) -> str:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return f"{CEILING_BYTES / sorted(took)[count // 2] / 1e9:.1f} GB/s"


def try_store(url: str, pair: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The store's behaviour, and its problems. An error of the store is a problem in the result, not an exception.

    Errors: UsageError for an invalid URL.
    """
    import secrets
    from dataclasses import asdict

    from ckpt.reader import open_store
    from ckpt.storage.late import late_listing_cause
    from ckpt.storage.pair_probe import LATE_S, probe_pair
    from ckpt.storage.probe import probe
    from ckpt.storage.url import canonical, missing_folders

    new: list[Path] = []
    try:
        new = missing_folders(url)
        with closing(open_store(url)) as store:
            key = f"doctor/{secrets.token_hex(8)}"
            body = secrets.token_bytes(CEILING_BYTES)
            try:
                store.put(key, [b"ckpt doctor"])
            except AccessDenied as error:
                return read_only_result(store, error)
            try:
                found = probe(store)
                facts = {name.replace("_", " "): value for name, value in asdict(found).items()}
                facts["put, one object"] = _rate(lambda: store.put(key, [body]), count=3)
                facts["get, one object"] = _rate(lambda: store.get_range(key, 0, len(body)), count=3)
            finally:
                store.delete([key])
            problems = store_problems(found)
            cause = late_listing_cause(canonical(url))
            facts["listing may be late"] = cause or "not known to be"
            if pair:
                slowest_s = max(probe_pair(store, PAIR_WAIT_S))
                facts["round trip to the other machine"] = f"{slowest_s:.1f} s"
                if slowest_s > LATE_S:
                    problems.append(
                        f"new objects show late: an object and the other machine's answer took {slowest_s:.1f} s. A "
                        "start on another machine may miss the newest checkpoint; docs/guides/stores.md says how to "
                        "mount"
                    )
            elif cause:
                problems.append(
                    f"{cause} may show another machine's new objects late: run `ckpt doctor {redact_url(url)} --pair` "
                    "on two machines at once"
                )
    except UsageError:
        raise
    except CkptError as error:
        return {"error": str(error)}, [str(error)]
    finally:
        for folder in new:
            with suppress(OSError):  # never made, or in use by now
                folder.rmdir()
    return facts, problems


def read_only_result(store: Backend, refused: AccessDenied) -> tuple[dict[str, Any], list[str]]:
    """The result of `try_store` for a store that refuses writes. Errors: `refused` if listing fails, too."""
    from dataclasses import fields

    from ckpt.storage.probe import Probe
    from ckpt.store.keys import COMMITS

    try:
        next(iter(store.list(COMMITS)), None)
    except CkptError:
        raise refused from None
    left = ", ".join(each.name.removesuffix("_s").replace("_", " ") for each in fields(Probe))
    text = f"the store can be listed, but every save would fail: {refused}. Not tried for that: {left}"
    return {"error": str(refused), "can be listed": True}, [text]


def store_problems(found: Probe) -> list[str]:
    """What is wrong with the store, by the probe's findings."""
    problems = [
        f"the store is not consistent: {what}. Checkpoints can get lost there; use another store"
        for name, what in NEEDED.items()
        if not getattr(found, name)
    ]
    if abs(found.clock_skew_s) > SKEW_MAX_S:
        problems.append(
            f"the store's clock and this machine's are {abs(found.clock_skew_s):g} s apart: set this machine's (NTP), "
            "or requests may be refused, and the ages that are shown are wrong"
        )
    return problems
