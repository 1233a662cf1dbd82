"""The backends, one file each, under one contract (`ckpt.storage.contract`). Reached through `ckpt.storage.open`."""

if __name__ != "ckpt.backends":
    raise ImportError(f"this folder is the package ckpt.backends; it is not to be imported as {__name__!r}")
