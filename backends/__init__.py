"""The backends of stores, one file each, under one contract (`ckpt.storage.contract`). Opened only by
`ckpt.storage.open`.

A backend imports the base modules and the helpers of ckpt.storage: contract, names, failure, files. Start with
`local`.
"""

if __name__ != "ckpt.backends":
    raise ImportError(f"this folder is the package ckpt.backends; import it by that name, not as {__name__!r}")
