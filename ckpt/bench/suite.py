"""The suite: everything that `ckpt bench URL` measures, in a folder below the URL that is removed at the end.

A section that fails is reported with its reason, and the others are measured all the same.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from ckpt.bench import codec_speed, store_speed, training
from ckpt.bench.bare import open_bare
from ckpt.bench.figures import Figure, SuiteResult, machine_facts
from ckpt.errors import CkptError, UsageError
from ckpt.reader import open_store
from ckpt.simulate.scenario import StorePrices
from ckpt.storage import Backend, canonical
from ckpt.storage.names import redact_url
from ckpt.storage.url import missing_folders, scheme_of

SECTIONS = ("store", "codecs", "save", "restore")
STATES_IN_MEMORY = 6  # state and gradients, a copy as a ceiling, and three arenas
CODEC_BYTES_MAX = 64 << 20
Report = Callable[[str], None]


def run_suite(
    url: str,
    nbytes: int,
    only: Collection[str] = SECTIONS,
    prices: StorePrices | None = None,
    report: Report = lambda text: None,
) -> SuiteResult:
    """Measures the sections named in `only`. `nbytes`: of the job's state. `report` is told each section's name as it
    begins. Errors: UsageError for a bad URL or an unknown section; those of the store if it takes no object."""
    unknown = sorted(set(only) - set(SECTIONS))
    if unknown:
        raise UsageError(f"no section is called {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if "restore" in only and "save" not in only:
        raise UsageError("the section restore reads what the section save wrote; name both")
    if canonical(url).startswith("memory://"):
        raise UsageError(f"{redact_url(url)} is within one process; give a folder, or a URL of a store")
    _check_memory(nbytes)
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    behaviour: dict[str, Any] = {}
    with _scratch(url) as (below, store):
        store.put("begun", [b"ckpt bench"])
        store.delete(["begun"])
        bare = open_bare(f"{below}/blocks") if set(only) - {"codecs"} else None

        def measure_store() -> Iterator[Figure]:
            behaviour.update(store_speed.behaviour(f"{below}/blocks", blocks))
            yield from store_speed.measure(blocks, bare, nbytes)

        works: dict[str, Callable[[], Iterator[Figure]]] = {
            "store": measure_store,
            "codecs": lambda: codec_speed.measure(min(nbytes, CODEC_BYTES_MAX)),
            "save": lambda: training.measure_saves(below, store, bare, nbytes, prices or StorePrices()),
            "restore": lambda: training.measure_restores(below, store, bare, nbytes),
        }
        with closing(open_store(f"{below}/blocks")) as blocks:
            for name in SECTIONS:
                if name not in only:
                    continue
                report(name)
                try:
                    figures += works[name]()
                except (CkptError, OSError) as exc:
                    failed[name] = str(exc)
    facts = {**machine_facts(), "url": redact_url(canonical(url)), "state_bytes": nbytes}
    return SuiteResult(facts, behaviour, figures, failed)


def _check_memory(nbytes: int) -> None:
    """Errors: UsageError if the state, its copy and its arenas have no room."""
    import psutil

    free = psutil.virtual_memory().available
    if nbytes * STATES_IN_MEMORY > free:
        raise UsageError(
            f"a state of {nbytes >> 20:,} MiB takes about {nbytes * STATES_IN_MEMORY >> 20:,} MiB of memory with its "
            f"copies; {free >> 20:,} MiB are free. Give a smaller --size"
        )


@contextmanager
def _scratch(url: str) -> Iterator[tuple[str, Backend]]:
    """A folder below the URL, and its store. Everything in it is deleted after the block, and so are the folders on the
    way that did not exist before."""
    below = f"{canonical(url)}/ckpt-bench-{secrets.token_hex(4)}"
    new = missing_folders(url)
    with closing(open_store(below)) as store:
        try:
            yield below, store
        finally:
            with suppress(CkptError):
                store.delete([info.key for info in store.list("")])
            if scheme_of(below) == "file":
                shutil.rmtree(below, ignore_errors=True)
            for folder in new:
                with suppress(OSError):  # in use by now
                    folder.rmdir()
