"""`ckpt bench` against every store that can be started here: a folder, rclone, moto, and Ceph RGW.

    python -m benchmarks.suite [--small] [--server folder|rclone|moto|ceph ...] [--out FOLDER]

Writes one JSON, Markdown and HTML report for each. Ceph needs the Debian packages radosgw, ceph-mon and ceph-osd; its
cluster is made in a temporary folder and removed (tests/ceph.py says how).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.report import parser
from ckpt.bench.render import to_document
from ckpt.bench.suite import run_suite
from ckpt.report.html import write_html
from ckpt.report.markdown import write_markdown
from tests import ceph, servers


@contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as path:
        yield path


@contextmanager
def s3(start: Callable[[], AbstractContextManager[servers.Server]]) -> Iterator[str]:
    with start() as server:
        os.environ.update(server.environment())
        yield f"s3://{server.bucket}/suite"


CEPH_BYTES = 16 << 30  # once it is full, writes hang

STORES: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "folder": folder,
    "rclone": lambda: s3(servers.rclone),
    "moto": lambda: s3(servers.moto),
    "ceph": lambda: s3(lambda: ceph.ceph(CEPH_BYTES)),
}
STATE_BYTES = 1 << 30
# Ceph is in memory here, and the suite saves some thirty states.
STATE_BYTES_ON_CEPH = 256 << 20


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--server", action="append", choices=STORES, help="by default all that can be started")
    made.add_argument("--out", type=Path, help="a folder for the reports")
    args = made.parse_args()
    failed = False
    for name in args.server or [name for name in STORES if name != "ceph" or ceph.why_not() is None]:
        nbytes = (4 << 20) if args.small else STATE_BYTES_ON_CEPH if name == "ceph" else STATE_BYTES
        with STORES[name]() as url:
            result = run_suite(url, nbytes, report=lambda section, name=name: print(f"{name}: {section}", flush=True))
        for figure in result.figures:
            ratio = "" if figure.ratio is None else f"  {figure.ratio:.3g} x the ceiling"
            print(f"  {figure.name:60} {figure.value:10.4g} {figure.unit}{ratio}")
        for section, why in result.failed.items():
            print(f"  {section}: not measured: {why}")
        failed = failed or bool(result.failed)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"suite-{name}.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
            write_markdown(to_document(result), args.out / f"suite-{name}.md")
            write_html(to_document(result), args.out / f"suite-{name}.html")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
