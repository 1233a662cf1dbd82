"""Stores whose listings may show the objects of another machine up to a minute late.

Object stores list every finished put. A network file system may answer from its client's cache.
"""

from __future__ import annotations

import os
import re

# FUSE leaves caching to the program behind it, such as sshfs or rclone. NFS is not listed here: its client asks the
# server again about a folder that is opened (backends/local.py), unless it is mounted with nocto.
LATE_TYPES = re.compile(r"fuse\..*|cifs|smb3")
NFS_TYPES = ("nfs", "nfs4")

# Protocols of fsspec with current listings: object stores, and those that ask a server each time.
PROMPT_PROTOCOLS = {
    *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs", "cos", "r2", "tos"),
    *("memory", "file", "local", "sftp", "ssh", "ftp", "hdfs", "webhdfs"),
}


def late_listing_cause(url: str) -> str | None:
    """What may show another machine's objects late, in words; None if nothing is known to. `url`: canonical, see
    `ckpt.storage.url.canonical`."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return _folder_cause(url)
    protocol = scheme.removeprefix("fsspec+")
    if scheme in ("s3", "gs", "az", "memory") or protocol in PROMPT_PROTOCOLS:
        return None
    return f"the file system {protocol}"


def _folder_cause(path: str) -> str | None:
    kind, options = _mount_of(os.path.realpath(path))
    if LATE_TYPES.fullmatch(kind) or (kind in NFS_TYPES and "nocto" in options):
        return f"a mount of type {kind}"
    return None


def _mount_of(path: str) -> tuple[str, list[str]]:
    """Type and options of the mount that holds the path; ("", []) if the kernel does not say."""
    found, longest = ("", [""]), -1
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                before, _, after = line.partition(" - ")
                point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
                if len(point) >= longest and os.path.commonpath([path, point]) == point:
                    kind, _, options = after.split()[:3]
                    found, longest = (kind, options.split(",")), len(point)
    except (OSError, ValueError, IndexError):
        pass  # another kernel, or none
    return found
