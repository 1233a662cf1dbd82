"""Stores whose listings may show the objects of another machine up to a minute late.

Object stores list every finished put. A network file system may answer from its client's cache.
"""

from __future__ import annotations

import os
import re

import psutil

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
    path = os.path.realpath(path)
    try:
        mounts = [each for each in psutil.disk_partitions(all=True) if _lies_in(path, each.mountpoint)]
    except OSError:  # another kernel
        return None
    # Of two mounts at one place the later one shows.
    mount = max(reversed(mounts), key=lambda each: len(each.mountpoint), default=None)
    if mount is None:
        return None
    is_late_nfs = mount.fstype in NFS_TYPES and "nocto" in mount.opts.split(",")
    return f"a mount of type {mount.fstype}" if is_late_nfs or LATE_TYPES.fullmatch(mount.fstype) else None


def _lies_in(path: str, folder: str) -> bool:
    return os.path.isabs(folder) and os.path.commonpath([path, folder]) == folder
