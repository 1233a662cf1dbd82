"""The user's state as ckpt sees it: canonical names, shards, mesh coordinates, and the walk that turns the state into a
layout, live tensors and value trees. The package imports torch, and no other trainer package; it may import ipc, store
and all below them. Start with state_walk.py, then read state_nodes.py.
"""
