"""Snapshots of one rank: copies its live tensors into an arena, at the boundary or late, on CPU and CUDA, and checks
deferred copies. The package imports torch; of the trainer it may import only link and state. Start with snapshot.py,
then read bindings.py and deferred_copy.py.
"""
