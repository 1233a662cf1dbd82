"""The placement of replicas over nodes: who keeps copies or parity of whose state, and what a loss leaves.

Pure functions, without torch or I/O. It may import the base modules, `ckpt.format.manifest` and `ckpt.layout`. Start
with `placement` (the options and `place`), then `groups`; `rebuild` and `rereplication` are for after a loss.
"""
