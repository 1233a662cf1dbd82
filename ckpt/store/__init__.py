"""Checkpoints in a store: commit, listing, reading, deletion, verification, export and copying.

Imports the leaves (format, layout, placement, policy, storage, ...) and the base modules; never ipc, agent or trainer.
Start with `keys` (the objects), `lineage` (which commits belong to a run), `commit` and `reader`.
"""
